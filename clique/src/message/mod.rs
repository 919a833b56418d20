//! What participants tell each other: [`Hello`], [`IdMessage`], [`Note`], [`SplitMessage`].

mod codec;
#[cfg(all(test, not(loom)))]
mod tests;

use core::fmt;

use codec::{Reader, Writer};

use crate::CliqueError;
use crate::backend::{CommConfig, DataType, ID_BYTES, ReduceOp, Status};
use crate::rendezvous::MAX_MESSAGE_BYTES;
use crate::state::Phase;
use crate::uses::Use;

const HELLO: u8 = 1;
const IDS: u8 = 2;
const NOTE: u8 = 3;
const SPLIT: u8 = 4;
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
        let mut writer = Writer::new(HELLO);
        writer.u32(self.size);
        writer.string(&self.process);
        writer.string(&self.library);
        writer.u32(self.library_version);
        writer.u8(u8::from(self.several_ids));
        let CommConfig { min_ctas, max_ctas, cga_cluster_size, net_name, split_share } = &self.config;
        for number in [min_ctas, max_ctas, cga_cluster_size] {
            writer.option(number, |writer, number| writer.u32(*number));
        }
        writer.option(net_name, |writer, name| writer.string(name));
        writer.option(split_share, |writer, share| writer.u8(u8::from(*share)));
        writer.u64(self.large_bytes);
        writer.list(&self.locals, |writer, local| {
            writer.u32(local.rank);
            writer.string(&local.uuid);
        });
        writer.list(&self.uses, |writer, one| write_use(writer, *one));
        for variables in [&self.environment, &self.hardware] {
            writer.list(variables, |writer, (name, value)| {
                writer.string(name);
                writer.string(value);
            });
        }
        bounded(writer)
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<Hello, CliqueError> {
        let mut reader = Reader::new(bytes, peer, HELLO)?;
        let number =
            |reader: &mut Reader<'_>| reader.option("configuration", |reader| reader.u32("configuration"));
        let hello = Hello {
            size: reader.u32("size")?,
            process: reader.text("process")?,
            library: reader.text("library")?,
            library_version: reader.u32("library version")?,
            several_ids: reader.flag("several ids")?,
            config: CommConfig {
                min_ctas: number(&mut reader)?,
                max_ctas: number(&mut reader)?,
                cga_cluster_size: number(&mut reader)?,
                net_name: reader.option("network name", |reader| reader.string("network name"))?,
                split_share: reader.option("split share", |reader| reader.flag("split share"))?,
            },
            large_bytes: reader.u64("large size")?,
            locals: reader.list("ranks", |reader| {
                Ok(Local { rank: reader.u32("rank")?, uuid: reader.text("device UUID")? })
            })?,
            uses: reader.list("declared operations", read_use)?,
            environment: reader.list("environment", read_variable)?,
            hardware: reader.list("environment", read_variable)?,
        };
        reader.finish()?;
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
        let mut writer = Writer::new(IDS);
        writer.u64(self.key);
        writer.list(&self.ids, |writer, (index, id)| {
            writer.u32(*index);
            writer.bytes(id);
        });
        bounded(writer)
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<IdMessage, CliqueError> {
        let mut reader = Reader::new(bytes, peer, IDS)?;
        let key = reader.u64("key of ids")?;
        let ids = reader
            .list("unique ids", |reader| Ok((reader.u32("index of an id")?, reader.array("unique id")?)))?;
        reader.finish()?;
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
        let mut writer = Writer::new(NOTE);
        writer.u8(self.phase.index());
        writer.option(&self.rank, |writer, rank| writer.u32(*rank));
        writer.string(&self.process);
        writer.option(&self.status, |writer, status| writer.u32(status.0 as u32));
        writer.string(&self.cause);
        writer.list(&self.missing[..self.missing.len().min(MAX_MISSING)], |writer, rank| writer.u32(*rank));
        writer.finish()
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<Note, CliqueError> {
        let mut reader = Reader::new(bytes, peer, NOTE)?;
        let index = reader.u8("phase")?;
        let phase = Phase::ALL.get(usize::from(index)).copied();
        let phase = phase.ok_or_else(|| reader.wrong("phase", "below 7", index))?;
        let note = Note {
            phase,
            rank: reader.option("rank", |reader| reader.u32("rank"))?,
            process: reader.text("process")?,
            status: reader.option("status", |reader| Ok(Status(reader.u32("status")? as i32)))?,
            cause: reader.text("cause")?,
            missing: reader.list("missing ranks", |reader| reader.u32("missing rank"))?,
        };
        reader.finish()?;
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
        let mut writer = Writer::new(SPLIT);
        writer.list(&self.0, |writer, (rank, color, key)| {
            writer.u32(*rank);
            writer.option(color, |writer, color| writer.u32(*color));
            writer.u32(*key as u32);
        });
        bounded(writer)
    }

    pub(crate) fn decode(bytes: &[u8], peer: &str) -> Result<SplitMessage, CliqueError> {
        let mut reader = Reader::new(bytes, peer, SPLIT)?;
        let ranks = reader.list("split", |reader| {
            let rank = reader.u32("rank of a split")?;
            let color = reader.option("colour", |reader| reader.u32("colour"))?;
            Ok((rank, color, reader.u32("key")? as i32))
        })?;
        reader.finish()?;
        Ok(SplitMessage(ranks))
    }
}

fn read_variable(reader: &mut Reader<'_>) -> Result<(String, String), CliqueError> {
    Ok((reader.text("variable")?, reader.string("value")?))
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

fn read_use(reader: &mut Reader<'_>) -> Result<Use, CliqueError> {
    match reader.u8("operation")? {
        0 => {
            let data_type = reader.u8("data type")?;
            let known = DataType::ALL.get(usize::from(data_type)).copied();
            let data_type = known.ok_or_else(|| reader.wrong("data type", "below 10", data_type))?;
            let op = reader.u8("reduction")?;
            let known = ReduceOp::ALL.get(usize::from(op)).copied();
            let op = known.ok_or_else(|| reader.wrong("reduction", "below 4", op))?;
            Ok(Use::AllReduce { data_type, op })
        }
        1 => Ok(Use::AllGather),
        2 => Ok(Use::Peers { from: reader.u32("sender")?, to: reader.u32("receiver")? }),
        seen => Err(reader.wrong("operation", "0, 1 or 2", seen)),
    }
}

fn bounded(writer: Writer) -> Result<Vec<u8>, CliqueError> {
    let bytes = writer.finish();
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
