//! Triggers a second, for each number of producers, ring size and batch.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::payload::{Check, trigger};
use super::queue::{self, Receiver, Sender};
use super::trial::{Phase, Trial};
use super::{NAME, REFERENCE};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::report::{Rate, Reference, Row};
use crate::stats::{Spread, median};

/// Triggers of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 100_000;

/// Who pushes what into which ring, and who takes it out. Rows stand in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    pub batch: u64,
    pub drain: u64,
    pub poll: u64,
    pub producers: u64,
    pub slots: u64,
}

/// How often, how long, how careful.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub warmup: u64,
    pub iterations: u64,
    /// How long each of both takes at most.
    pub limit: Duration,
    pub deadline: Duration,
    pub check: bool,
}

/// What one measurement found.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub iterations: u64,
    pub push_mops: f64,
    pub proc_mops: f64,
    pub wrong: Option<u64>,
}

/// All configurations, each beside its reference; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let plan = Plan {
        warmup: args.warmup,
        iterations: args.iterations.unwrap_or(ITERATIONS),
        limit: args.limit(),
        deadline: args.deadline(),
        check: args.check(),
    };
    let mut found: BTreeMap<Shape, Vec<Pair>> = BTreeMap::new();
    for _ in 0..args.runs {
        for &producers in &args.producers {
            for &slots in &args.depth {
                let one = Shape { producers, slots, batch: 1, drain: args.drain, poll: args.poll };
                let name = format!("fifo throughput, {REFERENCE}, {producers} producers, {slots} slots");
                let (senders, receiver) = queue::reference(slots, producers);
                let theirs = measure(&name, senders, receiver, &one, &plan, pinning)?;
                for &batch in &args.batch {
                    let shape = Shape { batch, ..one };
                    let name =
                        format!("fifo throughput, {producers} producers, {slots} slots, batch {batch}");
                    let (senders, receiver) = queue::fifo(slots, producers, plan.deadline)
                        .map_err(|source| Failure::Fifo { measurement: name.clone(), source })?;
                    let ours = measure(&name, senders, receiver, &shape, &plan, pinning)?;
                    found.entry(shape).or_default().push((ours, theirs));
                }
            }
        }
    }
    Ok(found.iter().filter_map(|(shape, runs)| row(shape, runs)).collect())
}

/// A run of ours and of the reference.
type Pair = (Outcome, Outcome);

fn row(&Shape { batch, drain, poll, producers, slots }: &Shape, runs: &[Pair]) -> Option<Row> {
    let over =
        |pick: fn(&Pair) -> f64| -> Option<Spread> { median(&runs.iter().map(pick).collect::<Vec<_>>()) };
    let proc = over(|(ours, _)| ours.proc_mops)?;
    let size_bytes = 16;
    let wrong = |(ours, theirs): &Pair| Some(ours.wrong? + theirs.wrong?);
    let shape =
        [("batch", batch), ("drain", drain), ("poll", poll), ("producers", producers), ("slots", slots)];
    Some(Row {
        layer: NAME.into(),
        test: "throughput".into(),
        shape: shape.map(|(key, value)| (key.to_owned(), value)).into(),
        size_bytes,
        iterations: runs.iter().map(|(ours, _)| ours.iterations).sum(),
        rate_mops: Some(Rate { push: over(|(ours, _)| ours.push_mops)?, proc }),
        bandwidth_gb_per_s: Some(proc.median * size_bytes as f64 / 1e3),
        reference: Some(Reference {
            name: REFERENCE.into(),
            proc_mops: over(|(_, theirs)| theirs.proc_mops)?,
            ratio: over(|(ours, theirs)| ours.proc_mops / theirs.proc_mops)?,
        }),
        wrong: runs.iter().map(wrong).sum(),
        ..Row::default()
    })
}

/// Pushes by one thread a sender, drains by one more, and tells how fast that went.
pub fn measure<S: Sender, R: Receiver>(
    name: &str,
    senders: Vec<S>,
    mut receiver: R,
    shape: &Shape,
    plan: &Plan,
    pinning: &Pinning,
) -> Result<Outcome, Failure> {
    let trial = &Trial::new(name, shape.producers + 1, plan.deadline);
    let finished = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        let producers: Vec<_> = senders
            .into_iter()
            .zip(0..)
            .map(|(mut sender, producer)| {
                scope.spawn(move || {
                    pin(pinning.producer(producer as usize));
                    let produced = trial.part(|| produce(&mut sender, producer, shape.batch, trial));
                    finished.fetch_add(1, Ordering::Release);
                    produced
                })
            })
            .collect();
        let consumer = scope.spawn(move || {
            pin(pinning.consumer());
            trial.part(|| consume(&mut receiver, shape, plan, finished, trial))
        });
        let produced: Option<Vec<_>> =
            producers.into_iter().map(|thread| thread.join().ok().flatten()).collect();
        let (Some(produced), Some(consumed)) = (produced, consumer.join().ok().flatten()) else {
            return Err(trial.why());
        };
        let first = produced.iter().map(|part| part.start).min();
        let last = produced.iter().map(|part| part.end).max();
        let pushing = first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first);
        let mops = |count: u64, time: Duration| count as f64 / time.as_secs_f64() / 1e6;
        let sent: Vec<_> = produced.iter().map(|part| part.sent).collect();
        Ok(Outcome {
            iterations: consumed.timed,
            push_mops: mops(produced.iter().map(|part| part.timed).sum(), pushing),
            proc_mops: mops(consumed.timed, consumed.time),
            wrong: consumed.check.map(|check| check.finish(&sent)),
        })
    })
}

/// A producer's part.
struct Produced {
    /// When its first counted push began.
    start: Instant,
    /// When its last push ended.
    end: Instant,
    timed: u64,
    sent: u64,
}

/// Pushes until the trial is over.
fn produce(sender: &mut impl Sender, producer: u64, batch: u64, trial: &Trial) -> Result<Produced, Failure> {
    let mut triggers = vec![trigger(0, 0); batch as usize];
    trial.start()?;
    let mut sent = 0;
    let mut push_during = |phase: Phase| -> Result<u64, Failure> {
        while trial.phase() == phase {
            for (slot, n) in triggers.iter_mut().zip(sent..) {
                *slot = trigger(producer, n);
            }
            sender.send(&triggers, trial)?;
            sent += batch;
        }
        Ok(sent)
    };
    let warm = push_during(Phase::Warm)?;
    let start = Instant::now();
    let sent = push_during(Phase::Timed)?;
    Ok(Produced { start, end: Instant::now(), timed: sent - warm, sent })
}

/// The consumer's part.
struct Consumed {
    timed: u64,
    time: Duration,
    check: Option<Check>,
}

/// Takes what comes, paces the trial by it, and then takes what is left.
fn consume(
    receiver: &mut impl Receiver,
    shape: &Shape,
    plan: &Plan,
    finished: &AtomicU64,
    trial: &Trial,
) -> Result<Consumed, Failure> {
    let mut check = plan.check.then(|| Check::new(shape.producers));
    let mut receive = || {
        receiver.receive(shape.drain, |words| match &mut check {
            Some(check) => check.see(words),
            None => drop(std::hint::black_box(words)),
        })
    };
    let mut take = |least: u64| -> Result<(u64, Duration), Failure> {
        let start = Instant::now();
        let mut wait = trial.wait("triggers to arrive", least);
        let mut taken = 0;
        while taken < least {
            let clock = match receive() {
                0 => {
                    (0..shape.poll).for_each(|_| std::hint::spin_loop());
                    wait.look(taken)?
                }
                some => {
                    taken += some;
                    wait.step(taken)?
                }
            };
            if clock && start.elapsed() >= plan.limit {
                break;
            }
        }
        Ok((taken, start.elapsed()))
    };
    trial.start()?;
    take(plan.warmup)?;
    trial.enter(Phase::Timed);
    let (timed, time) = take(plan.iterations)?;
    trial.enter(Phase::Over);
    let mut wait = trial.wait("producers to end", shape.producers);
    loop {
        // In this order: what was pushed before the last producer ended is there.
        let finished = finished.load(Ordering::Acquire);
        match receive() {
            0 if finished == shape.producers => return Ok(Consumed { timed, time, check }),
            0 => wait.look(finished)?,
            _ => wait.step(finished)?,
        };
    }
}
