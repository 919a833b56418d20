//! What participants send each other, in sockets and files, as bytes: small, versioned, checked.
//!
//! Each frame begins alike, all numbers are little-endian, texts and messages follow their length:
//!
//! ```text
//! 0   4  "pwrv"
//! 4   2  version, 1
//! 6   2  kind
//! 8   4  length of what follows
//! ```

use core::time::Duration;

use crate::CliqueError;
use crate::rendezvous::board::Key;
use crate::rendezvous::{MAX_MESSAGE_BYTES, MAX_NAME_BYTES, MAX_PARTICIPANTS, Post};
use crate::text::printable;

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
    /// The request is not done: the parts of a [`CliqueError::Config`].
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
        /// The run that it is part of, or the parts of a [`CliqueError::Config`].
        run: Result<Instance, [String; 3]>,
    },
}

/// What is wrong with some bytes; who sent them is added where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) what: &'static str,
    pub(crate) expected: String,
    pub(crate) seen: String,
}

impl Wrong {
    pub(crate) fn new(what: &'static str, expected: impl ToString, seen: impl ToString) -> Self {
        Wrong { what, expected: expected.to_string(), seen: seen.to_string() }
    }

    pub(crate) fn from(self, peer: &str) -> CliqueError {
        let Wrong { what, expected, seen } = self;
        CliqueError::Foreign { peer: peer.to_owned(), what, expected, seen }
    }
}

/// The length of a body, from its header.
pub(crate) fn body_len(header: &[u8], most: usize) -> Result<usize, Wrong> {
    let mut reader = Reader { bytes: header, at: 0 };
    let magic = reader.u32()?;
    if magic != MAGIC {
        return Err(Wrong::new("magic", format!("{MAGIC:#010x}"), format!("{magic:#010x}")));
    }
    let version = reader.u16()?;
    if version != VERSION {
        return Err(Wrong::new("protocol version", VERSION, version));
    }
    let _kind = reader.u16()?;
    let len = reader.u32()? as usize;
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
                let mut w = Writer::new(1);
                w.bytes(&hello.token);
                w.u32(hello.participant);
                w.u32(hello.participants);
                w.0.extend_from_slice(&hello.instance);
                w.text(&hello.name);
                w.finish()
            }
            Frame::Welcome => Writer::new(2).finish(),
            Frame::Refused { what, expected, seen } => {
                let mut w = Writer::new(3);
                w.text(what);
                w.text(expected);
                w.text(seen);
                w.finish()
            }
            Frame::Post { key, post } => {
                let mut w = Writer::new(4);
                w.key(key);
                w.post(post);
                w.finish()
            }
            Frame::Posted => Writer::new(5).finish(),
            Frame::Gather { key, within } => {
                let mut w = Writer::new(6);
                w.key(key);
                w.0.extend_from_slice(&u64::try_from(within.as_micros()).unwrap_or(u64::MAX).to_le_bytes());
                w.finish()
            }
            Frame::Gathered(said) => encode_gathered(said.len(), said.iter().map(|said| said.as_ref())),
            Frame::Goodbye => Writer::new(8).finish(),
            Frame::Run { to, run } => {
                let mut w = Writer::new(9);
                w.0.extend_from_slice(to);
                w.0.push(run.is_ok().into());
                match run {
                    Ok(run) => w.0.extend_from_slice(run),
                    Err(parts) => parts.iter().for_each(|text| w.text(text)),
                }
                w.finish()
            }
            Frame::Look { key } => {
                let mut w = Writer::new(10);
                w.key(key);
                w.finish()
            }
            Frame::NotYet => Writer::new(11).finish(),
        }
    }

    /// Reads a whole frame, header and all.
    pub(crate) fn decode(bytes: &[u8], most: usize) -> Result<Frame, Wrong> {
        let len = body_len(bytes, most)?;
        let mut r = Reader { bytes, at: 6 };
        let kind = r.u16()?;
        r.at = HEADER_BYTES;
        if bytes.len() != HEADER_BYTES + len {
            return Err(Wrong::new("length", HEADER_BYTES + len, bytes.len()));
        }
        let frame = match kind {
            1 => Frame::Hello(Hello {
                token: r.bytes("length of the token", MAX_TOKEN_BYTES)?.to_vec(),
                participant: r.u32()?,
                participants: r.u32()?,
                instance: r.take()?,
                name: r.shown("name")?,
            }),
            2 => Frame::Welcome,
            3 => Frame::Refused {
                what: r.shown("refusal")?,
                expected: r.shown("refusal")?,
                seen: r.shown("refusal")?,
            },
            4 => Frame::Post { key: r.key()?, post: r.post()? },
            5 => Frame::Posted,
            6 => Frame::Gather { key: r.key()?, within: Duration::from_micros(r.u64()?) },
            7 => {
                let count = r.u32()?;
                if count > MAX_PARTICIPANTS {
                    return Err(Wrong::new(
                        "number of participants",
                        format!("at most {MAX_PARTICIPANTS}"),
                        count,
                    ));
                }
                let mut said = Vec::new();
                for _ in 0..count {
                    said.push(if r.peek() == Some(0) {
                        r.u8()?;
                        Err(r.shown("whereabouts")?)
                    } else {
                        Ok(r.post()?)
                    });
                }
                Frame::Gathered(said)
            }
            8 => Frame::Goodbye,
            9 => Frame::Run {
                to: r.take()?,
                run: match r.u8()? {
                    0 => Err([r.shown("refusal")?, r.shown("refusal")?, r.shown("refusal")?]),
                    1 => Ok(r.take()?),
                    other => return Err(Wrong::new("answer", "0 or 1", other)),
                },
            },
            10 => Frame::Look { key: r.key()? },
            11 => Frame::NotYet,
            other => return Err(Wrong::new("kind of frame", "1 to 11", other)),
        };
        if r.at != bytes.len() {
            return Err(Wrong::new("length", format!("{} bytes", r.at), format!("{} bytes", bytes.len())));
        }
        Ok(frame)
    }
}

/// A [`Frame::Gathered`], without copying the messages first.
pub(crate) fn encode_gathered<'a>(
    count: usize,
    said: impl Iterator<Item = Result<&'a Post, &'a String>>,
) -> Vec<u8> {
    let mut w = Writer::new(7);
    w.u32(count as u32);
    for said in said {
        match said {
            Ok(post) => w.post(post),
            Err(whereabouts) => {
                w.0.push(0);
                w.text(whereabouts);
            }
        }
    }
    w.finish()
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u16) -> Self {
        let mut writer = Writer(Vec::new());
        writer.u32(MAGIC);
        writer.u16(VERSION);
        writer.u16(kind);
        writer.u32(0);
        writer
    }

    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Lengths are checked by whoever made the bytes; the reader checks again.
    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.0.extend_from_slice(bytes);
    }

    /// A text, cut at the limit: it is for people.
    fn text(&mut self, text: &str) {
        let mut len = text.len().min(MAX_TEXT_BYTES);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        self.bytes(&text.as_bytes()[..len]);
    }

    fn key(&mut self, key: &Key) {
        self.bytes(key.clique.as_bytes());
        self.0.extend_from_slice(&key.attempt.to_le_bytes());
        self.bytes(key.phase.as_bytes());
    }

    fn post(&mut self, post: &Post) {
        let (kind, bytes) = match post {
            Post::Ok(bytes) => (1, bytes),
            Post::Failed(bytes) => (2, bytes),
        };
        self.0.push(kind);
        self.bytes(bytes);
    }

    fn finish(mut self) -> Vec<u8> {
        let len = (self.0.len() - HEADER_BYTES) as u32;
        self.0[8..HEADER_BYTES].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn slice(&mut self, len: usize) -> Result<&'a [u8], Wrong> {
        let end = self.at.saturating_add(len);
        let Some(slice) = self.bytes.get(self.at..end) else {
            return Err(Wrong::new("length", format!("{end} bytes"), format!("{} bytes", self.bytes.len())));
        };
        self.at = end;
        Ok(slice)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        let mut array = [0; N];
        array.copy_from_slice(self.slice(N)?);
        Ok(array)
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn u8(&mut self) -> Result<u8, Wrong> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Wrong> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Wrong> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Wrong> {
        self.take().map(u64::from_le_bytes)
    }

    fn bytes(&mut self, what: &'static str, most: usize) -> Result<&'a [u8], Wrong> {
        let len = self.u32()? as usize;
        if len > most {
            return Err(Wrong::new(what, format!("at most {most} bytes"), format!("{len} bytes")));
        }
        self.slice(len)
    }

    fn text(&mut self, what: &'static str, most: usize) -> Result<String, Wrong> {
        let bytes = self.bytes(what, most)?;
        match core::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => Err(Wrong::new(what, "UTF-8", error)),
        }
    }

    /// A text that is only shown to people, and so that it can be.
    fn shown(&mut self, what: &'static str) -> Result<String, Wrong> {
        self.text(what, MAX_TEXT_BYTES).map(|text| printable(&text))
    }

    fn key(&mut self) -> Result<Key, Wrong> {
        Ok(Key {
            clique: self.text("clique's name", MAX_NAME_BYTES)?,
            attempt: self.u64()?,
            phase: self.text("phase's name", MAX_NAME_BYTES)?,
        })
    }

    fn post(&mut self) -> Result<Post, Wrong> {
        let kind = self.u8()?;
        let bytes = self.bytes("length of a message", MAX_MESSAGE_BYTES)?.to_vec();
        match kind {
            1 => Ok(Post::Ok(bytes)),
            2 => Ok(Post::Failed(bytes)),
            other => Err(Wrong::new("kind of message", "1 or 2", other)),
        }
    }
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
