//! [`Link`]: what a port and its executor share. The port only reads and writes memory here.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use portway_fifo::Words;
use portway_proxy::TransportError;

use crate::error::StalledIn;
use crate::import::HeldRemote;
use crate::memory::{Held, lock};
use crate::track::Track;

/// What a stream is to do for an op: a copy if there are bytes, then a value if there is a word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) len_bytes: u64,
    /// Address of the signal word, or 0.
    pub(crate) word: u64,
    pub(crate) value: u64,
    /// Somebody waits for its completion, which is written at once.
    pub(crate) flush: bool,
    /// The op's number on this track, counting on from the last op of the port before.
    pub(crate) ticket: u64,
}

/// Whether ticket `a` comes after ticket `b`.
pub(crate) fn after(a: u64, b: u64) -> bool {
    a.wrapping_sub(b) as i64 > 0
}

/// Where a port's executor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Open,
    Quiesced,
    /// Its stream and memory have been given up.
    GivenUp,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Link {
    queue: ArrayQueue<Work>,
    /// The track's word: the ticket of the last op that is done.
    pub(crate) done: Words,
    pub(crate) error: OnceLock<TransportError>,
    /// Nothing more is submitted.
    stop: AtomicBool,
    /// The port has gone; what it had bound lies in `bound`.
    closed: AtomicBool,
    bound: Mutex<Vec<Bound>>,
    /// Written by the port, apart from what it reads at every op.
    orders: CachePadded<Orders>,
    /// Written at every call of the driver: apart from what the port reads at every op.
    progress: CachePadded<Progress>,
    /// Apart, so that the executor can let go of the rest before it says so.
    stage: Arc<AtomicU8>,
}

#[derive(Debug)]
struct Orders {
    /// The ticket up to which the executor may go: that of the last op before a kick or a poll.
    released: AtomicU64,
    /// The ticket whose completion somebody waits for.
    wanted: AtomicU64,
}

#[derive(Debug)]
struct Progress {
    /// The call of the driver that the executor is in.
    inside: AtomicU8,
    /// The ticket of the last op that was put into the stream.
    submitted: AtomicU64,
}

/// What a lane has bound.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) _source: Held,
    pub(crate) destination: HeldRemote,
    pub(crate) _signal: HeldRemote,
}

impl Link {
    pub(crate) fn new(track: &Track, depth: usize) -> Self {
        let last = track.done[0].load(Ordering::Acquire);
        let orders = Orders { released: AtomicU64::new(last), wanted: AtomicU64::new(last) };
        let progress = Progress { inside: AtomicU8::new(0), submitted: AtomicU64::new(last) };
        Link {
            queue: ArrayQueue::new(depth),
            done: track.done.clone(),
            error: OnceLock::new(),
            stop: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            bound: Mutex::default(),
            orders: CachePadded::new(orders),
            progress: CachePadded::new(progress),
            stage: Arc::default(),
        }
    }

    /// Lets work rest here until it is released; false if there is no room.
    #[inline]
    pub(crate) fn push(&self, work: Work) -> bool {
        self.queue.push(work).is_ok()
    }

    /// Releases all work up to this ticket.
    #[inline]
    pub(crate) fn release(&self, ticket: u64) {
        self.orders.released.store(ticket, Ordering::Release);
    }

    /// Released work, if there is any after the op with this ticket.
    pub(crate) fn next(&self, after: u64) -> Option<Work> {
        if self.orders.released.load(Ordering::Acquire) == after {
            return None;
        }
        self.queue.pop()
    }

    /// Drops what was not put into the stream.
    pub(crate) fn drop_waiting(&self) {
        while self.queue.pop().is_some() {}
    }

    /// Somebody waits for the completion of the op with this ticket.
    #[inline]
    pub(crate) fn want(&self, ticket: u64) {
        self.orders.wanted.store(ticket, Ordering::Release);
    }

    /// The ticket whose completion somebody waits for.
    pub(crate) fn wanted(&self) -> u64 {
        self.orders.wanted.load(Ordering::Acquire)
    }

    /// Nothing more is to be submitted.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// The port goes, and leaves what it had bound.
    pub(crate) fn close(&self, bound: Vec<Bound>) {
        *lock(&self.bound) = bound;
        self.stop();
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// What the port has left.
    pub(crate) fn take_bound(&self) -> Vec<Bound> {
        core::mem::take(&mut *lock(&self.bound))
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Open,
            1 => Stage::Quiesced,
            _ => Stage::GivenUp,
        }
    }

    /// Sets the stage, also once the link is gone.
    pub(crate) fn stage_setter(&self) -> impl FnOnce(Stage) + use<> {
        let word = self.stage.clone();
        move |stage| word.store(stage as u8, Ordering::Release)
    }

    /// Where the executor is, if it is in the driver.
    pub(crate) fn inside(&self) -> Option<StalledIn> {
        match self.progress.inside.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(StalledIn::Copy),
            2 => Some(StalledIn::WriteValue),
            _ => Some(StalledIn::Driver),
        }
    }

    /// Does something in the driver, and lets it be seen.
    pub(crate) fn in_driver<R>(&self, place: StalledIn, body: impl FnOnce() -> R) -> R {
        let number = match place {
            StalledIn::Copy => 1,
            StalledIn::WriteValue => 2,
            StalledIn::Driver | StalledIn::Stream => 3,
        };
        self.progress.inside.store(number, Ordering::Relaxed);
        let result = body();
        self.progress.inside.store(0, Ordering::Relaxed);
        result
    }

    /// The ticket of the last op that was put into the stream.
    pub(crate) fn submitted(&self) -> u64 {
        self.progress.submitted.load(Ordering::Relaxed)
    }

    /// Takes note of an op that was put into the stream.
    pub(crate) fn set_submitted(&self, ticket: u64) {
        self.progress.submitted.store(ticket, Ordering::Relaxed);
    }

    /// Whether everything that was put into the stream is done.
    pub(crate) fn is_done(&self) -> bool {
        !after(self.submitted(), self.done[0].load(Ordering::Acquire))
    }
}
