//! Triggers a second, for each number of producers, ring size and batch.

use std::collections::BTreeMap;

use portway_fifo::Trigger;

use super::payload::{Check, trigger};
use super::queue::{self, Receiver, Sender};
use super::{NAME, REFERENCE};
use crate::args::{Args, DEPTH};
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::rate::{self, Outcome, Plan, Sink, Source, over};
use crate::report::{Reference, Row, counted_first};
use crate::trial::Trial;

/// Triggers of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 100_000;

/// Who pushes what into which ring, and who takes it out. Rows stand in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    pub batch: u64,
    pub drain: u64,
    pub producers: u64,
    pub slots: u64,
}

/// All configurations, each beside its reference; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let plan = Plan::of(args, ITERATIONS);
    let mut found: BTreeMap<Shape, Vec<Pair>> = BTreeMap::new();
    for _ in args.runs() {
        let depth = &args.depth(DEPTH);
        for (&producers, &slots) in
            args.producers.iter().flat_map(|producers| depth.iter().map(move |slots| (producers, slots)))
        {
            for drain in args.drain(&[32]) {
                let one = Shape { producers, slots, batch: 1, drain };
                let name = format!("fifo throughput, {REFERENCE}, {producers} producers, {slots} slots");
                let ends = queue::reference(slots, producers);
                let theirs = measure(&name, ends, &one, &plan, args.check(), pinning)?;
                for &batch in &args.batch {
                    let shape = Shape { batch, ..one };
                    let name =
                        format!("fifo throughput, {producers} producers, {slots} slots, batch {batch}");
                    let ends = queue::fifo(slots, producers, plan.deadline)
                        .map_err(|source| Failure::Fifo { measurement: name.clone(), source })?;
                    let ours = measure(&name, ends, &shape, &plan, args.check(), pinning)?;
                    found.entry(shape).or_default().push((ours, theirs));
                }
            }
        }
    }
    let rows = found.iter().filter_map(|(shape, runs)| of_shape(shape, args.poll, runs));
    Ok(counted_first(rows.flatten().collect()))
}

/// A run of ours and of the reference.
type Pair = (Outcome, Outcome);

fn of_shape(&Shape { batch, drain, producers, slots }: &Shape, poll: u64, runs: &[Pair]) -> Option<Vec<Row>> {
    let shape =
        [("batch", batch), ("drain", drain), ("poll", poll), ("producers", producers), ("slots", slots)];
    let ratio = over(runs, |(ours, theirs)| ours.warm.proc_mops / theirs.warm.proc_mops)?;
    let row = Row {
        layer: NAME.into(),
        test: "throughput".into(),
        shape: shape.map(|(key, value)| (key.to_owned(), value)).into(),
        size_bytes: 16,
        reference: Some(Reference {
            proc_mops: over(runs, |(_, theirs)| theirs.warm.proc_mops),
            ..Reference::new(REFERENCE, ratio)
        }),
        ..Row::default()
    };
    let with_theirs = |&(ours, theirs): &Pair| {
        let wrong = ours.wrong.zip(theirs.wrong).map(|(ours, theirs)| ours + theirs);
        Outcome { wrong, ..ours }
    };
    Some(rate::rows(&row, true, &runs.iter().map(with_theirs).collect::<Vec<_>>()))
}

/// Pushes and drains once.
pub fn measure<S: Sender, R: Receiver>(
    name: &str,
    (senders, receiver): (Vec<S>, R),
    shape: &Shape,
    plan: &Plan,
    check: bool,
    pinning: &Pinning,
) -> Result<Outcome, Failure> {
    let pusher = |(sender, producer)| Pusher {
        sender,
        producer,
        triggers: vec![trigger(producer, 0); shape.batch as usize],
    };
    let pushers = senders.into_iter().zip(0..).map(pusher).collect();
    let check = check.then(|| Check::new(shape.producers));
    rate::measure(name, pushers, Drain { receiver, max: shape.drain, check }, plan, pinning)
}

struct Pusher<S> {
    sender: S,
    producer: u64,
    triggers: Vec<Trigger>,
}

impl<S: Sender> Source for Pusher<S> {
    #[inline]
    fn push(&mut self, first: u64, trial: &Trial) -> Result<u64, Failure> {
        for (slot, n) in self.triggers.iter_mut().zip(first..) {
            *slot = trigger(self.producer, n);
        }
        self.sender.send(&self.triggers, trial)?;
        Ok(self.triggers.len() as u64)
    }
}

struct Drain<R> {
    receiver: R,
    max: u64,
    check: Option<Check>,
}

impl<R: Receiver> Sink for Drain<R> {
    #[inline]
    fn take(&mut self) -> u64 {
        let check = &mut self.check;
        self.receiver.receive(self.max, |words| match check {
            Some(check) => check.see(words),
            None => drop(std::hint::black_box(words)),
        })
    }

    fn wrong(self, sent: &[u64]) -> Option<u64> {
        self.check.map(|check| check.finish(sent))
    }
}
