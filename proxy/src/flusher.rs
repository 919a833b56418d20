//! The tail flusher: a side thread that keeps a replica of each tail in device memory.

use core::fmt::Debug;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use portway_fifo::{Fifo, Position};

use crate::error::{Error, TransportError};
use crate::runner::{Idle, spawn};
use crate::stats::FlusherStats;

/// A stream that writes a 64-bit value to device memory, in order.
///
/// A call may block for as long as it likes, for ever too: that is why the flusher has a thread of its own.
pub trait FlushStream: Debug + Send {
    /// Writes `value` to the device word at `address`, after all earlier writes.
    fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError>;
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    writes: AtomicU64,
    failures: AtomicU64,
    /// When the call under way began, in nanoseconds since the start, plus one; 0 between calls.
    entered_ns: AtomicU64,
}

/// Writes the newest tails to their replicas, skipping those that it missed while a call took its time.
///
/// Nothing waits for it: a waiter that finds the replica behind reads the tail itself.
#[derive(Debug)]
pub(crate) struct Flusher {
    shared: Arc<Shared>,
    start: Instant,
    thread: std::thread::JoinHandle<()>,
}

impl Flusher {
    pub(crate) fn start(fifos: Vec<Fifo>, stream: Box<dyn FlushStream>, idle: Idle) -> Result<Self, Error> {
        let shared = Arc::new(Shared::default());
        let start = Instant::now();
        let thread = {
            let shared = shared.clone();
            spawn("portway-flusher", move || flush(&fifos, stream, &shared, start, idle))?
        };
        Ok(Flusher { shared, start, thread })
    }

    pub(crate) fn stats(&self) -> FlusherStats {
        let entered = self.shared.entered_ns.load(Ordering::Acquire);
        let blocked_for = match entered.checked_sub(1) {
            Some(entered) => self.start.elapsed().saturating_sub(Duration::from_nanos(entered)),
            None => Duration::ZERO,
        };
        FlusherStats {
            writes: self.shared.writes.load(Ordering::Relaxed),
            failures: self.shared.failures.load(Ordering::Relaxed),
            blocked_for,
        }
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
    }

    /// Joins the thread if it ends by `deadline`. Otherwise it is left to itself, with its stream and its share of the
    /// memory that it writes to; then this is false.
    pub(crate) fn join(self, deadline: Instant) -> bool {
        while !self.thread.is_finished() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        // A panic of the stream has ended the thread; there is nothing to add to that.
        let _ = self.thread.join();
        true
    }
}

fn flush(fifos: &[Fifo], mut stream: Box<dyn FlushStream>, shared: &Shared, start: Instant, mut idle: Idle) {
    let mut flushed: Vec<Option<Position>> = vec![None; fifos.len()];
    while !shared.stop.load(Ordering::Acquire) {
        let mut wrote = false;
        for (fifo, flushed) in fifos.iter().zip(&mut flushed) {
            let tail = fifo.tail();
            if *flushed == Some(tail) {
                continue;
            }
            shared.entered_ns.store(start.elapsed().as_nanos() as u64 + 1, Ordering::Release);
            let result = stream.write(fifo.handle().flushed, tail.0);
            shared.entered_ns.store(0, Ordering::Release);
            // A write that failed is not tried again; the next tail is.
            *flushed = Some(tail);
            let count = if result.is_ok() { &shared.writes } else { &shared.failures };
            count.fetch_add(1, Ordering::Relaxed);
            wrote = true;
        }
        if !wrote {
            idle.wait();
        }
    }
}
