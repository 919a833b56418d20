//! [`measure`]: how many triggers a second go from some threads to one, whatever they go through.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::report::{self, Rate, Row};
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

/// How fast some iterations went.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub iterations: u64,
    pub push_mops: f64,
    pub proc_mops: f64,
}

/// What one measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// The first window, where there are windows.
    pub cold: Option<Pace>,
    /// What came before the counted iterations, the first window apart.
    pub ramp: Option<Pace>,
    /// The counted iterations.
    pub warm: Pace,
    /// Of all of them.
    pub wrong: Option<u64>,
}

/// The medians over runs, or over what `pick` finds in them. A run in which there was nothing to divide by, on a machine
/// that was away all the time, has no say.
pub fn over<T>(runs: &[T], pick: impl Fn(&T) -> f64) -> Option<Spread> {
    median(&runs.iter().map(pick).filter(|value| value.is_finite()).collect::<Vec<_>>())
}

/// A row for each phase that runs have. The counted iterations have the reference of `row` and what was wrong. Whether the
/// rows have a bandwidth is told by `moves`: whether what is counted moves their size.
pub fn rows(row: &Row, moves: bool, runs: &[Outcome]) -> Vec<Row> {
    let of = |phase, paces: Vec<Pace>| {
        let push = over(&paces, |pace| pace.push_mops)?;
        let proc = over(&paces, |pace| pace.proc_mops)?;
        let counted = phase == report::Phase::Warm;
        Some(Row {
            phase,
            runs: paces.len() as u64,
            iterations: paces.iter().map(|pace| pace.iterations).sum(),
            rate_mops: Some(Rate { push, proc }),
            bandwidth_gb_per_s: moves.then_some(proc.median * row.size_bytes as f64 / 1e3),
            reference: row.reference.clone().filter(|_| counted),
            wrong: if counted { runs.iter().map(|run| run.wrong).sum() } else { None },
            ..row.clone()
        })
    };
    let paces = |pick: fn(&Outcome) -> Option<Pace>| runs.iter().filter_map(pick).collect();
    let warm = of(report::Phase::Warm, paces(|run| Some(run.warm)));
    let cold = of(report::Phase::Cold, paces(|run| run.cold));
    let ramp = of(report::Phase::Ramp, paces(|run| run.ramp));
    [warm, cold, ramp].into_iter().flatten().collect()
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
        let pace = |phase: usize, consumed: &Consumed| {
            let parts = || produced.iter().map(|part| &part[phase]);
            let first = parts().map(|part| part.start).min();
            let last = parts().map(|part| part.end).max();
            let pushing = first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first);
            Pace {
                iterations: consumed.count,
                push_mops: mops(parts().map(|part| part.count).sum(), pushing),
                proc_mops: mops(consumed.count, consumed.time),
            }
        };
        let sent: Vec<_> = produced.iter().map(|parts| parts.iter().map(|part| part.count).sum()).collect();
        let [ramp, warm] = &consumed;
        Ok(Outcome {
            cold: None,
            ramp: (ramp.count > 0).then(|| pace(0, ramp)),
            warm: pace(1, warm),
            wrong: sink.wrong(&sent),
        })
    })
}

/// A source's part of a phase.
struct Produced {
    /// When its first push began.
    start: Instant,
    /// When its last push ended.
    end: Instant,
    count: u64,
}

/// Pushes until the trial is over: what does not count, and what does.
fn produce(source: &mut impl Source, trial: &Trial) -> Result<[Produced; 2], Failure> {
    trial.start()?;
    let mut sent = 0;
    let mut push_during = |phase: Phase| -> Result<Produced, Failure> {
        let (start, before) = (Instant::now(), sent);
        while trial.phase() == phase {
            sent += source.push(sent, trial)?;
        }
        Ok(Produced { start, end: Instant::now(), count: sent - before })
    };
    Ok([push_during(Phase::Warm)?, push_during(Phase::Timed)?])
}

/// The sink's part of a phase.
struct Consumed {
    count: u64,
    time: Duration,
}

/// Takes what comes, paces the trial by it, and then takes what is left.
fn consume(
    sink: &mut impl Sink,
    producers: u64,
    plan: &Plan,
    finished: &AtomicU64,
    trial: &Trial,
) -> Result<[Consumed; 2], Failure> {
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
        Ok(Consumed { count: taken, time: start.elapsed() })
    };
    trial.start()?;
    let ramp = take(plan.warmup, warm_limit(plan.limit))?;
    trial.enter(Phase::Timed);
    let consumed = [ramp, take(plan.iterations, plan.limit)?];
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
