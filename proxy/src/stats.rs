//! [`Stats`]: what an engine has done, readable from any thread while it runs.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

/// A snapshot of an engine's counters. They are written once a step, so they lag by at most one.
///
/// Every trigger taken is complete, discarded, or under way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Triggers taken out of FIFOs.
    pub triggers: u64,
    /// Ops that ports reported complete.
    pub completions: u64,
    /// Stores of a FIFO's tail: at most one a FIFO and step.
    pub publishes: u64,
    /// Ops that a full port refused, each time it did.
    pub refusals: u64,
    /// Steps in which a FIFO could not go on because a channel's window was full.
    pub stalls: u64,
    /// The FIFO and the channel of the last stall.
    pub last_stall: Option<(usize, u16)>,
    /// Triggers thrown away, because their channel had ended or ended with them.
    pub discarded: u64,
    /// Channels that have ended with an error.
    pub channels_ended: u64,
    /// The tail flusher's, if there is one.
    pub flusher: Option<FlusherStats>,
}

/// What the tail flusher has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlusherStats {
    /// Writes that its stream took.
    pub writes: u64,
    /// Writes that its stream refused.
    pub failures: u64,
    /// Its stream panicked, and is not called again.
    pub panicked: bool,
    /// How long the call that it is in has been going on. More than a few milliseconds mean that the driver blocks it;
    /// nothing waits for it.
    pub blocked_for: Duration,
}

/// The engine's own counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) triggers: u64,
    pub(crate) completions: u64,
    pub(crate) publishes: u64,
    pub(crate) refusals: u64,
    pub(crate) stalls: u64,
    /// FIFO and channel of the last stall, in one word plus one; 0 if there was none.
    pub(crate) last_stall: u64,
    pub(crate) discarded: u64,
    pub(crate) channels_ended: u64,
}

impl Counts {
    const LEN: usize = 8;

    fn words(self) -> [u64; Counts::LEN] {
        // Taken apart by name, so that a new counter cannot be forgotten.
        let Counts {
            triggers,
            completions,
            publishes,
            refusals,
            stalls,
            last_stall,
            discarded,
            channels_ended,
        } = self;
        [triggers, completions, publishes, refusals, stalls, last_stall, discarded, channels_ended]
    }
}

/// Where the engine shows its counters.
#[derive(Debug, Default)]
pub(crate) struct Board([AtomicU64; Counts::LEN]);

impl Board {
    pub(crate) fn show(&self, counts: Counts) {
        for (shown, count) in self.0.iter().zip(counts.words()) {
            shown.store(count, Ordering::Relaxed);
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let [triggers, completions, publishes, refusals, stalls, last_stall, discarded, channels_ended] =
            core::array::from_fn(|i| self.0[i].load(Ordering::Relaxed));
        let last_stall = last_stall.checked_sub(1).map(|word| ((word >> 16) as usize, word as u16));
        Stats {
            triggers,
            completions,
            publishes,
            refusals,
            stalls,
            last_stall,
            discarded,
            channels_ended,
            flusher: None,
        }
    }
}

pub(crate) fn stall_word(fifo: u32, channel: u16) -> u64 {
    (u64::from(fifo) << 16 | u64::from(channel)) + 1
}
