//! The tail flusher: a side thread that keeps a replica of each tail in device memory.

use core::fmt::Debug;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use portway_fifo::{Fifo, Position};

use crate::error::{Error, TransportError};
use crate::stats::FlusherStats;
use crate::thread::{Idle, Worker};

/// A stream that writes a 64-bit value to device memory, in order.
///
/// A call may block for as long as it likes, for ever too: that is why the flusher has a thread of its own.
pub trait FlushStream: Debug + Send {
    /// Writes `value` to the device word at `address`, after all earlier writes.
    ///
    /// # Safety
    /// - The word is aligned, and stays writable until the stream has written it.
    unsafe fn write(&mut self, address: u64, value: u64) -> Result<(), TransportError>;
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    writes: AtomicU64,
    failures: AtomicU64,
    panicked: AtomicBool,
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
    worker: Option<Worker>,
}

impl Flusher {
    pub(crate) fn start(fifos: Vec<Fifo>, stream: Box<dyn FlushStream>, idle: Idle) -> Result<Self, Error> {
        let fifos: Vec<Fifo> = fifos.into_iter().filter(|fifo| fifo.handle().flushed != 0).collect();
        if fifos.is_empty() {
            return Err(Error::Config {
                what: "number of FIFOs with a replica",
                value: 0,
                must_be: "1 or more, to flush",
            });
        }
        let shared = Arc::new(Shared::default());
        let start = Instant::now();
        let worker = {
            let shared = shared.clone();
            Worker::spawn("portway-flusher", move || flush(&fifos, stream, &shared, start, idle))?
        };
        Ok(Flusher { shared, start, worker: Some(worker) })
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
            panicked: self.shared.panicked.load(Ordering::Relaxed),
            blocked_for,
        }
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(worker) = &self.worker {
            worker.wake();
        }
    }

    /// Joins the thread if it ends by `deadline`. Otherwise it is left to itself, with its stream and its share of the
    /// memory that it writes to; then this is false.
    pub(crate) fn join_by(mut self, deadline: Instant) -> bool {
        self.worker.take().is_none_or(|worker| worker.join_by(deadline))
    }
}

impl Drop for Flusher {
    /// Tells the thread to end, and does not wait for it.
    fn drop(&mut self) {
        self.stop();
    }
}

fn flush(fifos: &[Fifo], mut stream: Box<dyn FlushStream>, shared: &Shared, start: Instant, idle: Idle) {
    let mut flushed: Vec<Option<Position>> = vec![None; fifos.len()];
    while !shared.stop.load(Ordering::Acquire) {
        let mut wrote = false;
        for (fifo, flushed) in fifos.iter().zip(&mut flushed) {
            let tail = fifo.tail();
            if *flushed == Some(tail) {
                continue;
            }
            shared.entered_ns.store(start.elapsed().as_nanos() as u64 + 1, Ordering::Release);
            let write = AssertUnwindSafe(|| {
                // SAFETY: the word is the replica in the FIFO's device memory, which `fifo` keeps, and it is left to this
                // thread, with the stream, if a write does not return.
                unsafe { stream.write(fifo.handle().flushed, tail.0) }
            });
            let result = catch_unwind(write);
            shared.entered_ns.store(0, Ordering::Release);
            let Ok(result) = result else {
                shared.panicked.store(true, Ordering::Relaxed);
                return;
            };
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
