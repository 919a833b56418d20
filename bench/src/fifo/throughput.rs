//! Triggers a second, for each number of producers, ring size and batch.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::payload::{Check, trigger};
use super::queue::{self, Receiver, Sender};
use super::trial::Trial;
use super::{NAME, REFERENCE};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::report::{Rate, Reference, Row};
use crate::stats::{Spread, median};

/// Triggers of a measurement unless `-n` says otherwise.
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
        iterations: runs.first()?.0.iterations,
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
    // Whole batches for each producer.
    let share = |count: u64| count.div_ceil(shape.producers).next_multiple_of(shape.batch);
    let (warmup, timed) = (share(plan.warmup), share(plan.iterations));
    let trial = &Trial::new(name, shape.producers + 1, plan.deadline);
    std::thread::scope(|scope| {
        let producers: Vec<_> = senders
            .into_iter()
            .zip(0..)
            .map(|(mut sender, producer)| {
                scope.spawn(move || {
                    pin(pinning.producer(producer as usize));
                    trial.part(|| produce(&mut sender, producer, shape.batch, warmup, timed, trial))
                })
            })
            .collect();
        let consumer = scope.spawn(move || {
            pin(pinning.consumer());
            trial.part(|| consume(&mut receiver, shape, plan.check, warmup, timed, trial))
        });
        let ends: Vec<_> = producers.into_iter().map(|thread| thread.join().ok().flatten()).collect();
        let consumed = consumer.join().ok().flatten();
        let (Some(ends), Some((seconds, wrong))) = (ends.into_iter().collect::<Option<Vec<_>>>(), consumed)
        else {
            return Err(trial.why());
        };
        let first = ends.iter().map(|(start, _)| *start).min();
        let last = ends.iter().map(|(_, end)| *end).max();
        let pushing = first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first);
        let iterations = timed * shape.producers;
        let mops = |seconds: f64| iterations as f64 / seconds / 1e6;
        Ok(Outcome { iterations, push_mops: mops(pushing.as_secs_f64()), proc_mops: mops(seconds), wrong })
    })
}

/// A producer's part: when its counted pushes began and ended.
fn produce(
    sender: &mut impl Sender,
    producer: u64,
    batch: u64,
    warmup: u64,
    timed: u64,
    trial: &Trial,
) -> Result<(Instant, Instant), Failure> {
    let mut triggers = vec![trigger(0, 0); batch as usize];
    let mut push = |from: u64, to: u64| -> Result<(), Failure> {
        for n in (from..to).step_by(batch as usize) {
            for (slot, n) in triggers.iter_mut().zip(n..) {
                *slot = trigger(producer, n);
            }
            sender.send(&triggers, trial)?;
        }
        Ok(())
    };
    trial.start()?;
    push(0, warmup)?;
    let start = Instant::now();
    push(warmup, warmup + timed)?;
    Ok((start, Instant::now()))
}

/// The consumer's part: the seconds that the counted triggers took, and how many triggers were wrong.
fn consume(
    receiver: &mut impl Receiver,
    shape: &Shape,
    check: bool,
    warmup: u64,
    timed: u64,
    trial: &Trial,
) -> Result<(f64, Option<u64>), Failure> {
    let mut check = check.then(|| Check::new(shape.producers));
    let mut receive = |max: u64| {
        receiver.receive(max, |words| {
            if let Some(check) = &mut check {
                check.see(words);
            } else {
                std::hint::black_box(words);
            }
        })
    };
    let mut take = |count: u64| -> Result<(), Failure> {
        let mut wait = trial.wait("triggers to arrive", count);
        let mut taken = 0;
        while taken < count {
            match receive(shape.drain.min(count - taken)) {
                0 => {
                    (0..shape.poll).for_each(|_| std::hint::spin_loop());
                    wait.look(taken)?;
                }
                some => {
                    taken += some;
                    wait.step(taken)?;
                }
            }
        }
        Ok(())
    };
    trial.start()?;
    take(warmup * shape.producers)?;
    let start = Instant::now();
    take(timed * shape.producers)?;
    let seconds = start.elapsed().as_secs_f64();
    let surplus = receive(shape.slots);
    Ok((seconds, check.map(|check| check.finish(warmup + timed) + surplus)))
}
