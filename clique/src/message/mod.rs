//! What participants tell each other: [`Hello`], [`IdMessage`], [`Note`], [`SplitMessage`].

#[cfg(all(test, not(loom)))]
mod tests;

use core::fmt;

use crate::CliqueError;
use crate::backend::{CommConfig, DataType, ID_BYTES, ReduceOp, Status};
use crate::bytes::{Reader, Writer, Wrong};
use crate::rendezvous::MAX_MESSAGE_BYTES;
use crate::state::Phase;
use crate::uses::Use;

const MAGIC: [u8; 4] = *b"PWCQ";
const VERSION: u16 = 1;
const HELLO: u8 = 1;
const IDS: u8 = 2;
const NOTE: u8 = 3;
const SPLIT: u8 = 4;
/// How long a text may be.
const MAX_TEXT_BYTES: usize = 1024;
/// How many missing ranks a note names.
const MAX_MISSING: usize = 64;

/// Who a participant is and what it has, for the others to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) size: u32,
    /// `host:pid`.
    pub(crate) process: String,
    pub(crate) library: String,
    pub(crate) library_version: u32,
    pub(crate) several_ids: bool,
    pub(crate) config: CommConfig,
    pub(crate) large_bytes: u64,
    pub(crate) locals: Vec<Local>,
    pub(crate) uses: Vec<Use>,
    /// The variables that all have to share, sorted by name.
    pub(crate) environment: Vec<(String, String)>,
    /// Those that name what this host has, for messages, sorted by name.
    pub(crate) hardware: Vec<(String, String)>,
}

/// A rank and the UUID of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    pub(crate) rank: u32,
    pub(crate) uuid: String,
}

impl Hello {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, CliqueError> {
        let mut writer = begin(HELLO);
        writer.u32(self.size);
        writer.text(&self.process, MAX_TEXT_BYTES);
        writer.text(&self.library, MAX_TEXT_BYTES);
        writer.u32(self.library_version);
        writer.u8(u8::from(self.several_ids));
        let CommConfig { min_ctas, max_ctas, cga_cluster_size, net_name, split_share } = &self.config;
        for number in [min_ctas, max_ctas, cga_cluster_size] {
            writer.option(number, |writer, number| writer.u32(*number));
        }
        writer.option(net_name, |writer, name| writer.text(name, MAX_TEXT_BYTES));
        writer.option(split_share, |writer, share| writer.u8(u8::from(*share)));
        writer.u64(self.large_bytes);
        writer.list(&self.locals, |writer, local| {
            writer.u32(local.rank);
            writer.text(&local.uuid, MAX_TEXT_BYTES);
        });
        writer.list(&self.uses, |writer, one| write_use(writer, *one));
        for variables in [&self.environment, &self.hardware] {
            writer.list(variables, |writer, (name, value)| {
                writer.text(name, MAX_TEXT_BYTES);
                writer.text(value, MAX_TEXT_BYTES);
            });
        }
        bounded(writer)
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<Hello, CliqueError> {
        decode(bytes, peer, HELLO, Hello::read)
    }

    fn read(reader: &mut Reader<'_>) -> Result<Hello, Wrong> {
        let number =
            |reader: &mut Reader<'_>| reader.option("configuration", |reader| reader.u32("configuration"));
        let hello = Hello {
            size: reader.u32("size")?,
            process: reader.shown("process", MAX_TEXT_BYTES)?,
            library: reader.shown("library", MAX_TEXT_BYTES)?,
            library_version: reader.u32("library version")?,
            several_ids: reader.flag("several ids")?,
            config: CommConfig {
                min_ctas: number(reader)?,
                max_ctas: number(reader)?,
                cga_cluster_size: number(reader)?,
                net_name: reader
                    .option("network name", |reader| reader.text("network name", MAX_TEXT_BYTES))?,
                split_share: reader.option("split share", |reader| reader.flag("split share"))?,
            },
            large_bytes: reader.u64("large size")?,
            locals: reader.list("ranks", |reader| {
                Ok(Local { rank: reader.u32("rank")?, uuid: reader.shown("device UUID", MAX_TEXT_BYTES)? })
            })?,
            uses: reader.list("declared operations", read_use)?,
            environment: reader.list("environment", read_variable)?,
            hardware: reader.list("environment", read_variable)?,
        };
        Ok(hello)
    }
}

/// Unique ids, for the members that `key` stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IdMessage {
    pub(crate) key: u64,
    /// Which id it is, and its bytes.
    pub(crate) ids: Vec<(u32, [u8; ID_BYTES])>,
}

impl IdMessage {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, CliqueError> {
        let mut writer = begin(IDS);
        writer.u64(self.key);
        writer.list(&self.ids, |writer, (index, id)| {
            writer.u32(*index);
            writer.raw(id);
        });
        bounded(writer)
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<IdMessage, CliqueError> {
        decode(bytes, peer, IDS, IdMessage::read)
    }

    fn read(reader: &mut Reader<'_>) -> Result<IdMessage, Wrong> {
        let key = reader.u64("key of ids")?;
        let ids = reader
            .list("unique ids", |reader| Ok((reader.u32("index of an id")?, reader.array("unique id")?)))?;
        Ok(IdMessage { key, ids })
    }
}

/// A failure, as it travels: what failed first, where and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) phase: Phase,
    pub(crate) rank: Option<u32>,
    pub(crate) process: String,
    pub(crate) status: Option<Status>,
    pub(crate) cause: String,
    /// Ranks that had said nothing.
    pub(crate) missing: Vec<u32>,
}

impl Note {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = begin(NOTE);
        writer.u8(self.phase.index());
        writer.option(&self.rank, |writer, rank| writer.u32(*rank));
        writer.text(&self.process, MAX_TEXT_BYTES);
        writer.option(&self.status, |writer, status| writer.u32(status.0 as u32));
        writer.text(&self.cause, MAX_TEXT_BYTES);
        writer.list(&self.missing[..self.missing.len().min(MAX_MISSING)], |writer, rank| writer.u32(*rank));
        writer.0
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<Note, CliqueError> {
        decode(bytes, peer, NOTE, Note::read)
    }

    fn read(reader: &mut Reader<'_>) -> Result<Note, Wrong> {
        let index = reader.u8("phase")?;
        let phase = Phase::ALL.get(usize::from(index)).copied();
        let phase = phase.ok_or_else(|| Wrong::new("phase", "below 7", index))?;
        let note = Note {
            phase,
            rank: reader.option("rank", |reader| reader.u32("rank"))?,
            process: reader.shown("process", MAX_TEXT_BYTES)?,
            status: reader.option("status", |reader| Ok(Status(reader.u32("status")? as i32)))?,
            cause: reader.shown("cause", MAX_TEXT_BYTES)?,
            missing: reader.list("missing ranks", |reader| reader.u32("missing rank"))?,
        };
        Ok(note)
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank} ({})", self.process)?,
            None => write!(f, "{}", self.process)?,
        }
        write!(f, " in {}: {}", self.phase, self.cause)
    }
}

/// What the ranks of a participant say in a split: rank, colour, key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SplitMessage(pub(crate) Vec<(u32, Option<u32>, i32)>);

impl SplitMessage {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, CliqueError> {
        let mut writer = begin(SPLIT);
        writer.list(&self.0, |writer, (rank, color, key)| {
            writer.u32(*rank);
            writer.option(color, |writer, color| writer.u32(*color));
            writer.u32(*key as u32);
        });
        bounded(writer)
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<SplitMessage, CliqueError> {
        decode(bytes, peer, SPLIT, SplitMessage::read)
    }

    fn read(reader: &mut Reader<'_>) -> Result<SplitMessage, Wrong> {
        let ranks = reader.list("split", |reader| {
            let rank = reader.u32("rank of a split")?;
            let color = reader.option("colour", |reader| reader.u32("colour"))?;
            Ok((rank, color, reader.u32("key")? as i32))
        })?;
        Ok(SplitMessage(ranks))
    }
}

/// A message of a kind.
fn begin(kind: u8) -> Writer {
    let mut writer = Writer::default();
    writer.raw(&MAGIC);
    writer.u16(VERSION);
    writer.u8(kind);
    writer
}

/// What a peer sent, which has to be a whole message of this kind.
fn decode<T>(
    bytes: &[u8],
    peer: &str,
    kind: u8,
    read: impl FnOnce(&mut Reader<'_>) -> Result<T, Wrong>,
) -> Result<T, CliqueError> {
    let whole = |bytes| {
        let mut reader = Reader(bytes);
        if reader.0.len() > MAX_MESSAGE_BYTES {
            let expected = format!("at most {MAX_MESSAGE_BYTES}");
            return Err(Wrong::new("length of a message", expected, reader.0.len()));
        }
        let magic: [u8; 4] = reader.array("message")?;
        if magic != MAGIC {
            return Err(Wrong::new("head of a message", format!("{MAGIC:02x?}"), format!("{magic:02x?}")));
        }
        let version = reader.u16("version of a message")?;
        if version != VERSION {
            return Err(Wrong::new("version of a message", VERSION, version));
        }
        let seen = reader.u8("kind of a message")?;
        if seen != kind {
            return Err(Wrong::new("kind of a message", kind, seen));
        }
        let message = read(&mut reader)?;
        reader.end("end of a message")?;
        Ok(message)
    };
    whole(bytes).map_err(|wrong: Wrong| wrong.from(peer))
}

fn read_variable(reader: &mut Reader<'_>) -> Result<(String, String), Wrong> {
    Ok((reader.shown("variable", MAX_TEXT_BYTES)?, reader.text("value", MAX_TEXT_BYTES)?))
}

fn write_use(writer: &mut Writer, one: Use) {
    match one {
        Use::AllReduce { data_type, op } => {
            writer.u8(0);
            writer.u8(data_type as u8);
            writer.u8(op as u8);
        }
        Use::AllGather => writer.u8(1),
        Use::Peers { from, to } => {
            writer.u8(2);
            writer.u32(from);
            writer.u32(to);
        }
    }
}

fn read_use(reader: &mut Reader<'_>) -> Result<Use, Wrong> {
    match reader.u8("operation")? {
        0 => {
            let data_type = reader.u8("data type")?;
            let known = DataType::ALL.get(usize::from(data_type)).copied();
            let data_type = known.ok_or_else(|| Wrong::new("data type", "below 10", data_type))?;
            let op = reader.u8("reduction")?;
            let known = ReduceOp::ALL.get(usize::from(op)).copied();
            let op = known.ok_or_else(|| Wrong::new("reduction", "below 4", op))?;
            Ok(Use::AllReduce { data_type, op })
        }
        1 => Ok(Use::AllGather),
        2 => Ok(Use::Peers { from: reader.u32("sender")?, to: reader.u32("receiver")? }),
        seen => Err(Wrong::new("operation", "0, 1 or 2", seen)),
    }
}

fn bounded(writer: Writer) -> Result<Vec<u8>, CliqueError> {
    let bytes = writer.0;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(CliqueError::Config {
            what: "this participant's message, of its ranks, declared operations and environment, in bytes"
                .to_owned(),
            expected: format!("at most {MAX_MESSAGE_BYTES}"),
            seen: bytes.len().to_string(),
        });
    }
    Ok(bytes)
}
