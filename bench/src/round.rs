//! [`Round`]: one run of a latency test.

use std::time::{Duration, Instant};

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::trial::{Phase, Trial, warm_limit};

/// Round trips of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 10_000;

/// Half of each round trip in microseconds, and the payloads that were wrong.
pub type Samples = (Vec<f64>, u64);

/// One run of one test, by a thread that measures and perhaps another one that answers.
pub struct Round<'a> {
    pub pinning: &'a Pinning,
    pub trial: &'a Trial,
    warmup: u64,
    timed: u64,
    limit: Duration,
}

impl<'a> Round<'a> {
    /// A run as the command line asks for.
    pub fn new(args: &Args, pinning: &'a Pinning, trial: &'a Trial) -> Self {
        let timed = args.iterations.unwrap_or(ITERATIONS);
        Round { pinning, trial, warmup: args.warmup, timed, limit: args.limit() }
    }

    /// Runs the measuring side on a producer's core and the other side on the consumer's.
    pub fn both<A: Send, B: Send>(
        &self,
        time: impl FnOnce() -> Result<A, Failure> + Send,
        other: impl FnOnce() -> Result<B, Failure> + Send,
    ) -> Result<(A, B), Failure> {
        let Round { pinning, trial, .. } = self;
        std::thread::scope(|scope| {
            let timing = scope.spawn(|| {
                pin(pinning.producer(0));
                trial.part(|| trial.start().and_then(|()| time()))
            });
            let other = scope.spawn(|| {
                pin(pinning.consumer());
                trial.part(|| trial.start().and_then(|()| other()))
            });
            match (timing.join().ok().flatten(), other.join().ok().flatten()) {
                (Some(timed), Some(other)) => Ok((timed, other)),
                _ => Err(trial.why()),
            }
        })
    }

    /// Runs the measuring side with no other, on a producer's core.
    pub fn alone<A: Send>(&self, time: impl FnOnce() -> Result<A, Failure> + Send) -> Result<A, Failure> {
        std::thread::scope(|scope| {
            let timing = scope.spawn(|| {
                pin(self.pinning.producer(0));
                self.trial.part(time)
            });
            timing.join().ok().flatten().ok_or_else(|| self.trial.why())
        })
    }

    /// Half the time of each counted round trip, in microseconds, and how many round trips there were with those before
    /// them. `round_trip` takes the number of the round trip and returns how long it took. Ends the trial.
    pub fn time(
        &self,
        mut round_trip: impl FnMut(u64) -> Result<Duration, Failure>,
    ) -> Result<(Vec<f64>, u64), Failure> {
        let mut samples = Vec::with_capacity(self.timed.min(1 << 20) as usize);
        let mut wait = self.trial.wait("round trips", self.warmup + self.timed);
        let mut sent = 0;
        let phases = [(self.warmup, warm_limit(self.limit), false), (self.timed, self.limit, true)];
        for (count, limit, counted) in phases {
            let begin = Instant::now();
            for _ in 0..count {
                let time = round_trip(sent)?;
                sent += 1;
                wait.step(sent)?;
                if counted {
                    samples.push(time.as_nanos() as f64 / 1e3 / 2.0);
                }
                if begin.elapsed() >= limit {
                    break;
                }
            }
        }
        self.trial.enter(Phase::Over);
        Ok((samples, sent))
    }
}

/// How long `body` takes.
pub fn timed<E>(body: impl FnOnce() -> Result<(), E>) -> Result<Duration, E> {
    let start = Instant::now();
    body()?;
    Ok(start.elapsed())
}
