//! [`measure`]: how many triggers a second go from some threads to one, whatever they go through.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::report::Rate;
use crate::stats::{Spread, median};
use crate::trial::{Phase, Trial, warm_limit};

/// A thread's end that triggers go into.
pub trait Source: Send {
    /// Pushes some triggers, of which the first is this end's `first`-th, and returns how many.
    fn push(&mut self, first: u64, trial: &Trial) -> Result<u64, Failure>;
}

/// The end where they come out.
pub trait Sink: Send {
    /// Takes what is there, up to a limit of its own, and returns how many that were.
    fn take(&mut self) -> u64;
    /// How many were not what they had to be, once all were taken. `sent` tells how many each source pushed. None if
    /// nothing was verified.
    fn wrong(self, sent: &[u64]) -> Option<u64>;
}

/// How often and how long.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub warmup: u64,
    pub iterations: u64,
    /// How long the counted iterations take at most.
    pub limit: Duration,
    pub deadline: Duration,
    /// Spins of an idle sink between two looks.
    pub poll: u64,
}

impl Plan {
    /// What the command line asks for; `iterations` if it does not say.
    pub fn of(args: &Args, iterations: u64) -> Self {
        Plan {
            warmup: args.warmup,
            iterations: args.iterations.unwrap_or(iterations),
            limit: args.limit(),
            deadline: args.deadline(),
            poll: args.poll,
        }
    }
}

/// What one measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub iterations: u64,
    pub push_mops: f64,
    pub proc_mops: f64,
    pub wrong: Option<u64>,
}

/// The medians over runs, or over what `pick` finds in them. A run in which there was nothing to divide by, on a machine
/// that was away all the time, has no say.
pub fn over<T>(runs: &[T], pick: impl Fn(&T) -> f64) -> Option<Spread> {
    median(&runs.iter().map(pick).filter(|value| value.is_finite()).collect::<Vec<_>>())
}

/// The rates over runs.
pub fn rates<T>(runs: &[T], outcome: impl Fn(&T) -> Outcome) -> Option<Rate> {
    Some(Rate {
        push: over(runs, |run| outcome(run).push_mops)?,
        proc: over(runs, |run| outcome(run).proc_mops)?,
    })
}

/// Millions a second.
pub fn mops(count: u64, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64() / 1e6
}

/// Pushes by one thread a source, takes by one more, and tells how fast that went.
pub fn measure<S: Source, K: Sink>(
    name: &str,
    sources: Vec<S>,
    mut sink: K,
    plan: &Plan,
    pinning: &Pinning,
) -> Result<Outcome, Failure> {
    let count = sources.len() as u64;
    let trial = &Trial::new(name, count + 1, plan.deadline);
    let finished = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        let producers: Vec<_> = sources
            .into_iter()
            .enumerate()
            .map(|(n, mut source)| {
                scope.spawn(move || {
                    pin(pinning.producer(n));
                    let produced = trial.part(|| produce(&mut source, trial));
                    finished.fetch_add(1, Ordering::Release);
                    produced
                })
            })
            .collect();
        let consumer = scope.spawn(move || {
            pin(pinning.consumer());
            let consumed = trial.part(|| consume(&mut sink, count, plan, finished, trial));
            consumed.map(|consumed| (consumed, sink))
        });
        let produced: Option<Vec<_>> =
            producers.into_iter().map(|thread| thread.join().ok().flatten()).collect();
        let (Some(produced), Some((consumed, sink))) = (produced, consumer.join().ok().flatten()) else {
            return Err(trial.why());
        };
        let first = produced.iter().map(|part| part.start).min();
        let last = produced.iter().map(|part| part.end).max();
        let pushing = first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first);
        let sent: Vec<_> = produced.iter().map(|part| part.sent).collect();
        Ok(Outcome {
            iterations: consumed.timed,
            push_mops: mops(produced.iter().map(|part| part.timed).sum(), pushing),
            proc_mops: mops(consumed.timed, consumed.time),
            wrong: sink.wrong(&sent),
        })
    })
}

/// A source's part.
struct Produced {
    /// When its first counted push began.
    start: Instant,
    /// When its last push ended.
    end: Instant,
    timed: u64,
    sent: u64,
}

/// Pushes until the trial is over.
fn produce(source: &mut impl Source, trial: &Trial) -> Result<Produced, Failure> {
    trial.start()?;
    let mut sent = 0;
    let mut push_during = |phase: Phase| -> Result<u64, Failure> {
        while trial.phase() == phase {
            sent += source.push(sent, trial)?;
        }
        Ok(sent)
    };
    let warm = push_during(Phase::Warm)?;
    let start = Instant::now();
    let sent = push_during(Phase::Timed)?;
    Ok(Produced { start, end: Instant::now(), timed: sent - warm, sent })
}

/// The sink's part.
struct Consumed {
    timed: u64,
    time: Duration,
}

/// Takes what comes, paces the trial by it, and then takes what is left.
fn consume(
    sink: &mut impl Sink,
    producers: u64,
    plan: &Plan,
    finished: &AtomicU64,
    trial: &Trial,
) -> Result<Consumed, Failure> {
    let mut take = |least: u64, limit: Duration| -> Result<Consumed, Failure> {
        let start = Instant::now();
        let mut wait = trial.wait("triggers to arrive", least);
        let mut taken = 0;
        while taken < least {
            let clock = match sink.take() {
                0 => {
                    (0..plan.poll).for_each(|_| std::hint::spin_loop());
                    wait.look(taken)?
                }
                some => {
                    taken += some;
                    wait.step(taken)?
                }
            };
            if clock && start.elapsed() >= limit {
                break;
            }
        }
        Ok(Consumed { timed: taken, time: start.elapsed() })
    };
    trial.start()?;
    take(plan.warmup, warm_limit(plan.limit))?;
    trial.enter(Phase::Timed);
    let consumed = take(plan.iterations, plan.limit)?;
    trial.enter(Phase::Over);
    let mut wait = trial.wait("producers to end", producers);
    loop {
        // In this order: what was pushed before the last producer ended is there.
        let finished = finished.load(Ordering::Acquire);
        match sink.take() {
            0 if finished == producers => return Ok(consumed),
            0 => wait.look(finished)?,
            _ => wait.step(finished)?,
        };
    }
}
