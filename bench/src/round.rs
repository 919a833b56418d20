//! [`Round`]: one run of a latency test.

use std::time::{Duration, Instant};

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::report::{Phase, Row};
use crate::trial::{self, Trial, warm_limit};

/// Round trips of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 10_000;

/// One-way times in microseconds: of the first iteration of each run, of those between, and of those that count; and the
/// payloads that were wrong in all of them.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    pub cold: Vec<f64>,
    pub ramp: Vec<f64>,
    pub warm: Vec<f64>,
    pub wrong: u64,
}

impl Samples {
    /// Of one run: the last `counted` of them count.
    pub fn of_run(all: impl IntoIterator<Item = f64>, counted: u64, wrong: u64) -> Self {
        let mut all: Vec<f64> = all.into_iter().collect();
        let warm = all.split_off(all.len().saturating_sub(counted as usize));
        let ramp = if all.is_empty() { Vec::new() } else { all.split_off(1) };
        Samples { cold: all, ramp, warm, wrong }
    }

    /// The same of a further run.
    pub fn add(&mut self, run: Samples) {
        self.cold.extend(run.cold);
        self.ramp.extend(run.ramp);
        self.warm.extend(run.warm);
        self.wrong += run.wrong;
    }

    /// A row for each phase that there was. The reference stands beside those that count, and so does what was wrong.
    pub fn rows(self, args: &Args, row: Row) -> Vec<Row> {
        let Samples { cold, ramp, warm, wrong } = self;
        let before = |phase, samples| Row { phase, reference: None, ..row.clone() }.with_times(args, samples);
        let before = [(Phase::Cold, cold), (Phase::Ramp, ramp)]
            .into_iter()
            .filter(|(_, samples)| !samples.is_empty())
            .map(|(phase, samples)| before(phase, samples))
            .collect::<Vec<_>>();
        let warm = Row { wrong: args.check().then_some(wrong), ..row.clone().with_times(args, warm) };
        std::iter::once(warm).chain(before).collect()
    }
}

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

    /// Half the time of each round trip, and how many there were, with those that do not count. `round_trip` takes the number of the round trip and returns how long it took. Ends the trial.
    pub fn time(
        &self,
        mut round_trip: impl FnMut(u64) -> Result<Duration, Failure>,
    ) -> Result<(Samples, u64), Failure> {
        let mut samples = Vec::with_capacity((self.warmup + self.timed).min(1 << 20) as usize);
        let mut wait = self.trial.wait("round trips", self.warmup + self.timed);
        let (mut sent, mut before) = (0, 0);
        for (count, limit) in [(self.warmup, warm_limit(self.limit)), (self.timed, self.limit)] {
            let begin = Instant::now();
            before = sent;
            for _ in 0..count {
                let time = round_trip(sent)?;
                sent += 1;
                wait.step(sent)?;
                samples.push(time.as_nanos() as f64 / 1e3 / 2.0);
                if begin.elapsed() >= limit {
                    break;
                }
            }
        }
        self.trial.enter(trial::Phase::Over);
        Ok((Samples::of_run(samples, sent - before, 0), sent))
    }
}

/// How long `body` takes.
pub fn timed<E>(body: impl FnOnce() -> Result<(), E>) -> Result<Duration, E> {
    let start = Instant::now();
    body()?;
    Ok(start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    #[test]
    fn the_first_those_between_and_those_that_count_are_rows_of_their_own() {
        let mut samples = Samples::of_run([9.0, 5.0, 4.0, 1.0, 2.0], 2, 1);
        samples.add(Samples::of_run([8.0, 3.0], 1, 0));
        assert_eq!((&samples.cold[..], &samples.ramp[..]), (&[9.0, 8.0][..], &[5.0, 4.0][..]));
        let args = args::parse("put -c 1").unwrap();
        let rows = samples.rows(&args, Row { test: "x".into(), ..Row::default() });
        let seen: Vec<_> = rows.iter().map(|row| (row.phase, row.iterations, row.wrong)).collect();
        assert_eq!(seen, [(Phase::Warm, 3, Some(1)), (Phase::Cold, 2, None), (Phase::Ramp, 2, None)]);
        // Without any before them, all count.
        let alone = Samples::of_run([1.0], 1, 0).rows(&args, Row::default());
        assert_eq!((alone.len(), alone[0].phase), (1, Phase::Warm));
    }
}
