//! What the machine can do without the stack: a ping-pong of two threads, and memcpy.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::round::{Round, timed};
use crate::stats::{median, middle};
use crate::trial::{Phase, Trial};

/// The median one-way time between two threads, in microseconds: a number goes there in one atomic and comes back in
/// another.
pub fn ping_pong(args: &Args, pinning: &Pinning) -> Result<f64, Failure> {
    let trial = &Trial::new("put latency, two atomics", 2, args.deadline());
    let round = Round::new(args, pinning, trial);
    let [there, back] = [(); 2].map(|()| CachePadded::new(AtomicU64::new(0)));
    let await_next = |word: &AtomicU64, last: u64| -> Result<Option<u64>, Failure> {
        let mut wait = trial.wait("the other thread's number", last + 1);
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen != last {
                return Ok(Some(seen));
            }
            if trial.phase() == Phase::Over {
                return Ok(None);
            }
            std::hint::spin_loop();
            wait.look(seen)?;
        }
    };
    let time = || {
        round.time(|n| {
            timed(|| {
                there.store(n + 1, Ordering::Release);
                await_next(&back, n).map(|_| ())
            })
        })
    };
    let echo = || {
        let mut last = 0;
        while let Some(seen) = await_next(&there, last)? {
            back.store(seen, Ordering::Release);
            last = seen;
        }
        Ok(())
    };
    let ((samples, _), ()) = round.both(time, echo)?;
    Ok(median(&samples.warm).map_or(f64::NAN, |spread| spread.median))
}

/// GB/s of memcpy, `size_bytes` at a time, over a window of `count` places; of the window in the middle.
pub fn memcpy(size_bytes: u64, count: u64, limit: Duration, pinning: &Pinning) -> f64 {
    let size = size_bytes as usize;
    let source = vec![1u8; size * count as usize];
    let mut destination = vec![0u8; source.len()];
    pin(pinning.producer(0));
    let (begin, mut windows) = (Instant::now(), Vec::new());
    while windows.is_empty() || begin.elapsed() < limit {
        let start = Instant::now();
        for (to, from) in destination.chunks_exact_mut(size).zip(source.chunks_exact(size)) {
            to.copy_from_slice(std::hint::black_box(from));
            std::hint::black_box(to);
        }
        windows.push(start.elapsed());
    }
    (size_bytes * count) as f64 / middle(&mut windows).as_secs_f64() / 1e9
}
