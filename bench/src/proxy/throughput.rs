//! Puts a second through one engine, for each number of producers and channels and each batch of the engine.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Instant;

use portway_proxy::{ChannelProducer, Engine};

use super::null_port::{Check, Verdict};
use super::{NAME, Rig, payload, rig};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::rate::{self, Outcome, Plan, Sink, Source};
use crate::report::{Row, counted_first};
use crate::trial::Trial;

/// Puts of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 100_000;

/// Who puts, and how many triggers the engine takes a step. Rows stand in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    pub channels: u64,
    pub drain: u64,
    pub producers: u64,
}

/// All configurations; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let plan = Plan::of(args, ITERATIONS);
    let mut found: BTreeMap<Shape, Vec<Outcome>> = BTreeMap::new();
    for _ in args.runs() {
        for &producers in &args.producers {
            for &channels in &args.channels {
                for drain in args.drain(&[1, 32]) {
                    let shape = Shape { producers, channels, drain };
                    let name = format!(
                        "proxy throughput, {producers} producers, {channels} channels, batches of {drain}"
                    );
                    let outcome = measure(&name, &shape, &plan, args.check(), None, pinning)?;
                    found.entry(shape).or_default().push(outcome);
                }
            }
        }
    }
    let rows = found.iter().flat_map(|(shape, runs)| of_shape(shape, args.poll, runs));
    Ok(counted_first(rows.collect()))
}

fn of_shape(&Shape { channels, drain, producers }: &Shape, poll: u64, runs: &[Outcome]) -> Vec<Row> {
    let shape = [("channels", channels), ("drain", drain), ("poll", poll), ("producers", producers)];
    let row = Row {
        layer: NAME.into(),
        test: "throughput".into(),
        shape: shape.map(|(key, value)| (key.to_owned(), value)).into(),
        size_bytes: 16,
        ..Row::default()
    };
    rate::rows(&row, false, runs)
}

/// Puts once; `corrupt` is the put of the first producer whose offset is wrong on purpose.
pub fn measure(
    name: &str,
    shape: &Shape,
    plan: &Plan,
    check: bool,
    corrupt: Option<u64>,
    pinning: &Pinning,
) -> Result<Outcome, Failure> {
    let &Shape { channels, drain, producers } = shape;
    let failed = |source| Failure::proxy(name, source);
    let check = check.then(|| Check::new(producers, channels, false));
    let Rig { engine, channels, verdict, .. } = rig(channels, drain, check, plan.deadline).map_err(failed)?;
    let putter = |producer| {
        let ends = channels.iter().map(|channel| channel.producer()).collect::<Result<Vec<_>, _>>()?;
        let lane = producer as usize % ends.len();
        Ok(Putter { producer, ends, lane, corrupt: corrupt.filter(|_| producer == 0) })
    };
    let putters = (0..producers).map(putter).collect::<Result<_, _>>().map_err(failed)?;
    let sink = Stepped { engine, start: Instant::now(), verdict };
    rate::measure(name, putters, sink, plan, pinning)
}

/// A thread that puts, over one channel after the other.
struct Putter {
    producer: u64,
    ends: Vec<ChannelProducer>,
    lane: usize,
    corrupt: Option<u64>,
}

impl Source for Putter {
    #[inline]
    fn push(&mut self, first: u64, trial: &Trial) -> Result<u64, Failure> {
        let mut put = payload::put(self.producer, first);
        if self.corrupt == Some(first) {
            put.source_offset_bytes ^= 1;
        }
        self.ends[self.lane]
            .put(put.source_offset_bytes, put.destination_offset_bytes, put.len_bytes)
            .map_err(|source| Failure::proxy(trial.name(), source))?;
        self.lane += 1;
        if self.lane == self.ends.len() {
            self.lane = 0;
        }
        Ok(1)
    }
}

/// An engine that is stepped.
struct Stepped {
    engine: Engine,
    start: Instant,
    verdict: Verdict,
}

impl Sink for Stepped {
    #[inline]
    fn take(&mut self) -> u64 {
        loop {
            let step = self.engine.step(self.start.elapsed());
            // A step that only completed made room, and there may be triggers for it.
            if step.triggers != 0 || step.is_idle() {
                return step.triggers;
            }
        }
    }

    fn wrong(mut self, sent: &[u64]) -> Option<u64> {
        self.engine.shut_down();
        let check = self.verdict.lock().unwrap_or_else(PoisonError::into_inner).take();
        check.map(|check| check.finish(sent))
    }
}
