//! What participants send each other, in sockets and files, as bytes: small, versioned, checked.
//!
//! Each frame begins alike:
//!
//! ```text
//! 0   4  "pwrv"
//! 4   2  version, 1
//! 6   2  kind
//! 8   4  length of what follows
//! ```

use core::time::Duration;

pub(crate) use crate::bytes::Wrong;
use crate::bytes::{Reader, Writer};
use crate::rendezvous::board::Key;
use crate::rendezvous::{MAX_MESSAGE_BYTES, MAX_NAME_BYTES, MAX_PARTICIPANTS, Post};

const MAGIC: u32 = u32::from_le_bytes(*b"pwrv");
const VERSION: u16 = 1;
pub(crate) const HEADER_BYTES: usize = 12;
pub(crate) const MAX_TOKEN_BYTES: usize = 256;
/// The longest text of a refusal, and the longest name of a peer.
const MAX_TEXT_BYTES: usize = 512;
/// The longest body of a frame whose sender is not known yet.
pub(crate) const MAX_HELLO_BYTES: usize = 2048;
/// The longest body of a participant's frame: a message, its round, and their lengths.
pub(crate) const MAX_REQUEST_BYTES: usize = MAX_MESSAGE_BYTES + 2 * MAX_NAME_BYTES + 64;
/// The longest body of an answer: everybody's longest message.
pub(crate) const MAX_ANSWER_BYTES: usize = MAX_PARTICIPANTS as usize * (MAX_MESSAGE_BYTES + 8) + 64;

const _: () = assert!(MAX_ANSWER_BYTES <= u32::MAX as usize);

/// Tells this process from every other, also from an earlier one with its number.
pub(crate) type Instance = [u8; 16];

/// Who wants to be a participant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) token: Vec<u8>,
    pub(crate) participant: u32,
    pub(crate) participants: u32,
    pub(crate) instance: Instance,
    /// For messages: process and host.
    pub(crate) name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Hello(Hello),
    Welcome,
    /// The request is not done: the parts of a [`CliqueError::Config`](crate::CliqueError::Config).
    Refused {
        what: String,
        expected: String,
        seen: String,
    },
    Post {
        key: Key,
        post: Post,
    },
    Posted,
    Gather {
        key: Key,
        within: Duration,
    },
    /// Asks whether a round has ended.
    Look {
        key: Key,
    },
    /// It has not. Short, since thousands ask again and again.
    NotYet,
    /// What was said, or where those are who have said nothing.
    Gathered(Vec<Result<Post, String>>),
    Goodbye,
    /// Participant 0's answer to a hello that came as a file.
    Run {
        /// Whose hello it answers.
        to: Instance,
        /// The run that it is part of, or the parts of a [`CliqueError::Config`](crate::CliqueError::Config).
        run: Result<Instance, [String; 3]>,
    },
}

/// The length of a body, from its header.
pub(crate) fn body_len(header: &[u8], most: usize) -> Result<usize, Wrong> {
    let mut reader = Reader(header);
    let magic = reader.u32("length")?;
    if magic != MAGIC {
        return Err(Wrong::new("magic", format!("{MAGIC:#010x}"), format!("{magic:#010x}")));
    }
    let version = reader.u16("length")?;
    if version != VERSION {
        return Err(Wrong::new("protocol version", VERSION, version));
    }
    let _kind = reader.u16("length")?;
    let len = reader.u32("length")? as usize;
    if len > most {
        return Err(Wrong::new("length", format!("at most {most} bytes"), format!("{len} bytes")));
    }
    Ok(len)
}

impl Frame {
    /// What it is, for messages: what is in it, such as a token, belongs into none.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Frame::Hello(_) => "a hello",
            Frame::Welcome => "a welcome",
            Frame::Refused { .. } => "a refusal",
            Frame::Post { .. } => "a post",
            Frame::Posted => "the receipt of a post",
            Frame::Gather { .. } => "a gather",
            Frame::Look { .. } => "a look",
            Frame::NotYet => "that a round has not ended",
            Frame::Gathered(_) => "the answer to a gather",
            Frame::Goodbye => "a goodbye",
            Frame::Run { .. } => "the answer to a hello",
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Frame::Hello(hello) => {
                let mut w = begin(1);
                w.bytes(&hello.token);
                w.u32(hello.participant);
                w.u32(hello.participants);
                w.raw(&hello.instance);
                w.text(&hello.name, MAX_TEXT_BYTES);
                finish(w)
            }
            Frame::Welcome => finish(begin(2)),
            Frame::Refused { what, expected, seen } => {
                let mut w = begin(3);
                w.text(what, MAX_TEXT_BYTES);
                w.text(expected, MAX_TEXT_BYTES);
                w.text(seen, MAX_TEXT_BYTES);
                finish(w)
            }
            Frame::Post { key, post } => {
                let mut w = begin(4);
                write_key(&mut w, key);
                write_post(&mut w, post);
                finish(w)
            }
            Frame::Posted => finish(begin(5)),
            Frame::Gather { key, within } => {
                let mut w = begin(6);
                write_key(&mut w, key);
                w.u64(u64::try_from(within.as_micros()).unwrap_or(u64::MAX));
                finish(w)
            }
            Frame::Gathered(said) => encode_gathered(said.len(), said.iter().map(|said| said.as_ref())),
            Frame::Goodbye => finish(begin(8)),
            Frame::Run { to, run } => {
                let mut w = begin(9);
                w.raw(to);
                w.u8(run.is_ok().into());
                match run {
                    Ok(run) => w.raw(run),
                    Err(parts) => parts.iter().for_each(|text| w.text(text, MAX_TEXT_BYTES)),
                }
                finish(w)
            }
            Frame::Look { key } => {
                let mut w = begin(10);
                write_key(&mut w, key);
                finish(w)
            }
            Frame::NotYet => finish(begin(11)),
        }
    }

    /// Reads a whole frame, header and all.
    pub(crate) fn decode(bytes: &[u8], most: usize) -> Result<Frame, Wrong> {
        let len = body_len(bytes, most)?;
        if bytes.len() != HEADER_BYTES + len {
            return Err(Wrong::new("length", HEADER_BYTES + len, bytes.len()));
        }
        let (kind, mut r) = (u16::from_le_bytes([bytes[6], bytes[7]]), Reader(&bytes[HEADER_BYTES..]));
        let frame = match kind {
            1 => Frame::Hello(Hello {
                token: r.bytes("length of the token", MAX_TOKEN_BYTES)?.to_vec(),
                participant: r.u32("participant")?,
                participants: r.u32("number of participants")?,
                instance: r.array("instance")?,
                name: r.shown("name", MAX_TEXT_BYTES)?,
            }),
            2 => Frame::Welcome,
            3 => {
                let [what, expected, seen] = read_refusal(&mut r)?;
                Frame::Refused { what, expected, seen }
            }
            4 => Frame::Post { key: read_key(&mut r)?, post: read_post(&mut r)? },
            5 => Frame::Posted,
            6 => Frame::Gather { key: read_key(&mut r)?, within: Duration::from_micros(r.u64("limit")?) },
            7 => {
                let count = r.u32("number of participants")?;
                if count > MAX_PARTICIPANTS {
                    return Err(Wrong::new(
                        "number of participants",
                        format!("at most {MAX_PARTICIPANTS}"),
                        count,
                    ));
                }
                let mut said = Vec::new();
                for _ in 0..count {
                    said.push(if r.0.first() == Some(&0) {
                        r.u8("kind of message")?;
                        Err(r.shown("whereabouts", MAX_TEXT_BYTES)?)
                    } else {
                        Ok(read_post(&mut r)?)
                    });
                }
                Frame::Gathered(said)
            }
            8 => Frame::Goodbye,
            9 => Frame::Run {
                to: r.array("instance")?,
                run: match r.u8("answer")? {
                    0 => Err(read_refusal(&mut r)?),
                    1 => Ok(r.array("run")?),
                    other => return Err(Wrong::new("answer", "0 or 1", other)),
                },
            },
            10 => Frame::Look { key: read_key(&mut r)? },
            11 => Frame::NotYet,
            other => return Err(Wrong::new("kind of frame", "1 to 11", other)),
        };
        r.end("end of a frame")?;
        Ok(frame)
    }
}

/// A [`Frame::Gathered`], without copying the messages first.
pub(crate) fn encode_gathered<'a>(
    count: usize,
    said: impl Iterator<Item = Result<&'a Post, &'a String>>,
) -> Vec<u8> {
    let mut w = begin(7);
    w.u32(count as u32);
    for said in said {
        match said {
            Ok(post) => write_post(&mut w, post),
            Err(whereabouts) => {
                w.u8(0);
                w.text(whereabouts, MAX_TEXT_BYTES);
            }
        }
    }
    finish(w)
}

/// A frame of a kind whose length is not known yet.
fn begin(kind: u16) -> Writer {
    let mut writer = Writer::default();
    writer.u32(MAGIC);
    writer.u16(VERSION);
    writer.u16(kind);
    writer.u32(0);
    writer
}

fn finish(writer: Writer) -> Vec<u8> {
    let Writer(mut bytes) = writer;
    let len = (bytes.len() - HEADER_BYTES) as u32;
    bytes[8..HEADER_BYTES].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn write_key(w: &mut Writer, key: &Key) {
    w.bytes(key.clique.as_bytes());
    w.u64(key.attempt);
    w.bytes(key.phase.as_bytes());
}

fn read_key(r: &mut Reader<'_>) -> Result<Key, Wrong> {
    Ok(Key {
        clique: r.text("clique's name", MAX_NAME_BYTES)?,
        attempt: r.u64("attempt")?,
        phase: r.text("phase's name", MAX_NAME_BYTES)?,
    })
}

fn write_post(w: &mut Writer, post: &Post) {
    let (kind, bytes) = match post {
        Post::Ok(bytes) => (1, bytes),
        Post::Failed(bytes) => (2, bytes),
    };
    w.u8(kind);
    w.bytes(bytes);
}

fn read_post(r: &mut Reader<'_>) -> Result<Post, Wrong> {
    let kind = r.u8("kind of message")?;
    let bytes = r.bytes("length of a message", MAX_MESSAGE_BYTES)?.to_vec();
    match kind {
        1 => Ok(Post::Ok(bytes)),
        2 => Ok(Post::Failed(bytes)),
        other => Err(Wrong::new("kind of message", "1 or 2", other)),
    }
}

fn read_refusal(r: &mut Reader<'_>) -> Result<[String; 3], Wrong> {
    let mut text = || r.shown("refusal", MAX_TEXT_BYTES);
    Ok([text()?, text()?, text()?])
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> Vec<Frame> {
        let key = Key { clique: "c".to_owned(), attempt: 7, phase: "p".to_owned() };
        let hello = Hello {
            token: b"token".to_vec(),
            participant: 3,
            participants: 4,
            instance: [9; 16],
            name: "process 5 on host".to_owned(),
        };
        let refused = ["what", "expected", "seen"].map(str::to_owned);
        let [what, expected, seen] = refused;
        vec![
            Frame::Hello(hello),
            Frame::Welcome,
            Frame::Refused { what, expected, seen },
            Frame::Post { key: key.clone(), post: Post::Ok(vec![1, 2, 3]) },
            Frame::Posted,
            Frame::Gather { key: key.clone(), within: Duration::from_millis(1500) },
            Frame::Look { key },
            Frame::NotYet,
            Frame::Gathered(vec![Ok(Post::Failed(vec![4])), Err("has not come".to_owned())]),
            Frame::Goodbye,
            Frame::Run { to: [1; 16], run: Ok([2; 16]) },
            Frame::Run { to: [1; 16], run: Err(["what", "expected", "seen"].map(str::to_owned)) },
        ]
    }

    #[test]
    fn frames_come_back_as_they_were_and_no_part_of_one_is_taken_for_it() {
        for frame in frames() {
            let bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes, 1000).as_ref(), Ok(&frame));
            for len in 0..bytes.len() {
                assert!(Frame::decode(&bytes[..len], 1000).is_err(), "{frame:?} cut at {len}");
                // A frame whose header says that it is that long: what it holds is checked too.
                let mut cut = bytes[..len].to_vec();
                if len >= HEADER_BYTES {
                    cut[8..12].copy_from_slice(&((len - HEADER_BYTES) as u32).to_le_bytes());
                    assert!(Frame::decode(&cut, 1000).is_err(), "{frame:?} shortened to {len}");
                }
            }
            let mut longer = bytes;
            longer.push(0);
            longer[8] += 1;
            assert!(Frame::decode(&longer, 1000).is_err());
        }
    }

    #[test]
    fn the_error_names_what_is_wrong() {
        let change = |at: usize, byte: u8| {
            let mut bytes = frames()[0].encode();
            bytes[at] = byte;
            let wrong = Frame::decode(&bytes, 1000).unwrap_err();
            wrong.from("somebody").to_string()
        };
        assert!(change(0, b'q').starts_with("somebody sent a wrong magic"), "{}", change(0, b'q'));
        assert_eq!(change(4, 2), "somebody sent a wrong protocol version: expected 1, seen 2");
        assert!(change(6, 99).contains("kind of frame"));
        assert!(change(10, 9).contains("at most 1000 bytes"));
        assert!(change(14, 9).contains("length of the token"));
        assert!(change(60, 0xff).contains("UTF-8"), "{}", change(60, 0xff));
    }

    #[test]
    fn a_name_cannot_write_over_what_is_around_it() {
        let name = "process 5 on host\n\x1b[2Jall is well";
        let Frame::Hello(hello) = frames().remove(0) else { unreachable!() };
        let sent = Frame::Hello(Hello { name: name.to_owned(), ..hello }).encode();
        let Ok(Frame::Hello(hello)) = Frame::decode(&sent, 1000) else { panic!("it is a hello") };
        assert_eq!(hello.name, "process 5 on host\\n\\u{1b}[2Jall is well");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_pass_unchecked(
            which in 0usize..12,
            changes in proptest::collection::vec((4usize..200, any::<u8>()), 1..6),
        ) {
            let mut bytes = frames()[which].encode();
            for (at, byte) in changes {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            if let Ok(frame) = Frame::decode(&bytes, 1000) {
                let again = frame.encode();
                if again != bytes {
                    // A text with what does not print has come longer than it was sent.
                    prop_assert!(again.len() > bytes.len());
                    prop_assert_eq!(Frame::decode(&again, 1000), Ok(frame));
                }
            }
        }
    }
}
