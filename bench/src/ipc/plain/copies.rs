//! [`Plain`]: `cuMemcpyPeerAsync` in a loop, over one way or over many at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portway_fifo::cuda::{Context, Stream};
use portway_fifo::{Error, Platform, Region, Words};

use crate::failure::Failure;
use crate::ipc::peer_copy::PeerCopy;
use crate::machine::pin;

/// Windows of a measurement; the first does not count.
const WINDOWS: u64 = 3;

/// What ends the threads.
const END: u64 = u64::MAX;

/// From the memory of one device to that of another, in a stream of its own and by a thread of its own.
pub struct Way<'a> {
    pub contexts: [&'a Context; 2],
    pub source: &'a Region,
    pub destination: &'a Region,
    pub core: Option<usize>,
}

/// The ways that are measured together.
pub struct Plain<'a> {
    name: String,
    limit: Duration,
    copy: PeerCopy,
    ways: Vec<Prepared<'a>>,
}

struct Prepared<'a> {
    way: Way<'a>,
    stream: Stream,
    /// The stream writes here which window is done.
    done: Words,
    /// Behind each copy, where signals are wanted, a value goes here.
    signal: Region,
}

impl<'a> Plain<'a> {
    /// Prepares a stream for each way. Waits in a measurement end after `limit`.
    pub fn new(name: &str, limit: Duration, ways: Vec<Way<'a>>) -> Result<Self, Failure> {
        let failed = |source| Failure::gpu(name, source);
        let prepare = |way: Way<'a>| {
            let [from, to] = way.contexts;
            from.reach(to, way.destination)?;
            let stream = Stream::new(from)?;
            stream.prime()?;
            stream.wait(Duration::from_secs(10))?;
            let done = Words::new(from.host_memory(8)?)?;
            Ok(Prepared { way, stream, done, signal: from.host_memory(8)? })
        };
        let ways = ways.into_iter().map(prepare).collect::<Result<_, Error>>().map_err(failed)?;
        Ok(Plain { name: name.into(), limit, copy: PeerCopy::load().map_err(failed)?, ways })
    }

    /// Seconds of a window of `count` copies of `len_bytes` a way, side by side, each with a value behind it if they
    /// signal: from the first submission to the end of the last way, the median of the windows.
    pub fn window_s(&self, len_bytes: u64, count: u64, signals: bool) -> Result<f64, Failure> {
        let go = &AtomicU64::new(0);
        let mut seconds = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .ways
                .iter()
                .map(|way| scope.spawn(move || self.serve(way, go, len_bytes, count, signals)))
                .collect();
            let measured = self.measure(go, || threads.iter().any(|thread| thread.is_finished()));
            go.store(END, Ordering::Release);
            // A thread's own error says more than that its window was not done.
            for thread in threads {
                let served =
                    thread.join().map_err(|_| Failure::Panicked { measurement: self.name.clone() })?;
                served.map_err(|source| Failure::gpu(&self.name, source))?;
            }
            measured
        })?;
        let counted = &mut seconds[1..];
        Ok(crate::stats::median(counted).map_or(f64::NAN, |spread| spread.median))
    }

    fn measure(&self, go: &AtomicU64, one_has_ended: impl Fn() -> bool) -> Result<Vec<f64>, Failure> {
        let base = self.ways.iter().map(|way| way.done[0].load(Ordering::Acquire)).max().unwrap_or(0);
        let mut seconds = Vec::new();
        for window in base + 1..=base + WINDOWS {
            let start = Instant::now();
            go.store(window, Ordering::Release);
            let is_done = |way: &Prepared<'_>| way.done[0].load(Ordering::Acquire) == window;
            while !self.ways.iter().all(is_done) {
                let after = start.elapsed();
                if after > self.limit || one_has_ended() {
                    let seen = self.ways.iter().filter(|way| is_done(way)).count() as u64;
                    return Err(Failure::Deadline {
                        measurement: self.name.clone(),
                        what: "the end of a window of plain copies, in ways",
                        expected: self.ways.len() as u64,
                        seen,
                        after,
                    });
                }
                std::thread::yield_now();
            }
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds)
    }

    /// Submits a window whenever `go` says so.
    fn serve(
        &self,
        prepared: &Prepared<'_>,
        go: &AtomicU64,
        len_bytes: u64,
        count: u64,
        signals: bool,
    ) -> Result<(), Error> {
        let Prepared { way, stream, done, signal } = prepared;
        pin(way.core);
        let entered = stream.enter()?;
        let mut last = done[0].load(Ordering::Acquire);
        loop {
            let window = go.load(Ordering::Acquire);
            if window == END {
                return Ok(());
            }
            if window <= last {
                std::thread::yield_now();
                continue;
            }
            for at in 0..count {
                let offset = at * len_bytes;
                let to = (way.destination.address() + offset, way.contexts[1]);
                let from = (way.source.address() + offset, way.contexts[0]);
                // SAFETY: whoever measures keeps both memories, which hold a window, and only devices access them.
                unsafe { self.copy.put(to, from, len_bytes, stream) }?;
                if signals {
                    // SAFETY: the word lives as long as this, and nobody else accesses it.
                    unsafe { entered.write_value(signal.address(), at + 1) }?;
                }
            }
            // SAFETY: the word lives as long as this, and is accessed atomically only.
            unsafe { entered.write_value(done.region().address(), window) }?;
            last = window;
        }
    }
}
