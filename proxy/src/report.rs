//! [`Snapshot`]: what a proxy is doing, for a person to read.

use core::fmt;
use core::time::Duration;

use portway_fifo::Position;

use crate::channel::PortChannel;
use crate::engine;
use crate::error::ChannelError;
use crate::stats::Stats;

/// How long [`Proxy::report`](crate::Proxy::report) waits for the engine's thread.
pub const REPORT_WAIT: Duration = Duration::from_millis(100);

/// What a proxy is doing, from [`Proxy::report`](crate::Proxy::report). Printed, it has a line for the engine, each FIFO and
/// each channel.
///
/// Its parts are read one after the other while the engine goes on, so they may be a few steps apart.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// Every FIFO, by its index in the engine.
    pub fifos: Vec<FifoSnapshot>,
    /// Every channel, those that have ended too, in the order in which they were added.
    pub channels: Vec<ChannelSnapshot>,
    /// The counters.
    pub stats: Stats,
    /// Whether the engine's thread answered within [`REPORT_WAIT`]. If not, it is inside a call of a port, or has ended.
    pub answered: bool,
}

/// A FIFO of a [`Snapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FifoSnapshot {
    /// How many triggers it holds.
    pub slots: u64,
    /// All triggers below are taken.
    pub tail: Position,
}

/// A channel of a [`Snapshot`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChannelSnapshot {
    /// Its FIFO's index.
    pub fifo: usize,
    /// Its number in that FIFO.
    pub number: u16,
    /// All of its triggers below are complete.
    pub frontier: Position,
    /// What it has under way; `None` where only the engine's thread could have said so.
    pub under_way: Option<UnderWay>,
    /// Why it has ended, if it has.
    pub error: Option<ChannelError>,
}

/// Ops of a channel that are not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnderWay {
    /// The index of its port in the engine.
    pub port: usize,
    /// Ops that the port has accepted, from the first that is not complete on.
    pub in_port: u64,
    /// Ops that the port had no room for yet.
    pub backlog: u64,
}

impl Snapshot {
    pub(crate) fn new(engine: &engine::Shared, under_way: Option<Vec<UnderWay>>, stats: Stats) -> Self {
        let answered = under_way.is_some();
        let under_way = under_way.unwrap_or_default();
        let fifos = engine.fifos();
        let channel = |(at, shared): (usize, _)| {
            let channel = PortChannel { shared };
            ChannelSnapshot {
                fifo: channel.shared.fifo_index,
                number: channel.number(),
                frontier: channel.frontier(),
                under_way: under_way.get(at).copied(),
                error: channel.error(),
            }
        };
        Snapshot {
            channels: engine.channels().into_iter().enumerate().map(channel).collect(),
            fifos: fifos.iter().map(|fifo| FifoSnapshot { slots: fifo.slots(), tail: fifo.tail() }).collect(),
            stats,
            answered,
        }
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stats { triggers, completions, refusals, stalls, discarded, channels_ended, .. } = self.stats;
        write!(f, "engine: {triggers} triggers, {completions} complete, {discarded} discarded; ")?;
        write!(f, "{refusals} refusals of full ports, {stalls} stalls")?;
        if let Some((fifo, channel)) = self.stats.last_stall {
            write!(f, " (the last for channel {channel} of FIFO {fifo})")?;
        }
        write!(f, "; {channels_ended} of {} channels ended", self.channels.len())?;
        if !self.answered {
            write!(
                f,
                "\nengine: no answer within {REPORT_WAIT:?}: it is inside a call of a port, or has ended"
            )?;
        }
        if let Some(flusher) = self.stats.flusher {
            write!(f, "\nflusher: {} writes, {} failed", flusher.writes, flusher.failures)?;
            if !flusher.blocked_for.is_zero() {
                write!(f, ", in a call since {:?}", flusher.blocked_for)?;
            }
        }
        for (index, fifo) in self.fifos.iter().enumerate() {
            write!(f, "\nFIFO {index}: {} slots, taken up to {}", fifo.slots, fifo.tail.0)?;
        }
        for channel in &self.channels {
            write!(f, "\n{channel}")?;
        }
        Ok(())
    }
}

impl fmt::Display for ChannelSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FIFO {}, channel {}", self.fifo, self.number)?;
        if let Some(under_way) = self.under_way {
            write!(f, ", port {}", under_way.port)?;
        }
        write!(f, ": complete up to {}", self.frontier.0)?;
        match (&self.error, self.under_way) {
            (Some(error), _) => write!(f, "; ended: {error}"),
            (None, Some(UnderWay { in_port, backlog, .. })) => {
                write!(f, "; {in_port} ops in the port, {backlog} waiting for it")
            }
            (None, None) => write!(f, "; what it has under way is not known"),
        }
    }
}
