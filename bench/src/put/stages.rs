//! What share each stage of a put has: push, pop, post, seen by the peer; and the completion, which comes beside the last.

use portway_fifo::{Heap, Platform};
use portway_proxy::{Config, Engine, Loopback, loopback};

use super::NAME;
use super::latency::{self, Message};
use super::side::{Channels, Place};
use super::stamped::{Clock, Stamp, Stamped, StepBegan};
use super::wired::{End, Wiring, triggers, wire};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::proxy::serve;
use crate::rate::over;
use crate::report::{Control, Reference, Row};
use crate::round::Round;
use crate::stats::median;
use crate::trial::Trial;

const TEST: &str = "stages";

pub const PUSH_POP: &str = "push to pop";
pub const POP_POST: &str = "pop to post";
pub const POST_SEEN: &str = "post to seen";
pub const POST_COMPLETED: &str = "post to completion";
/// Where the ends have another clock than the engine.
pub const REST: &str = "push to pop, post to seen";
pub const WHOLE: &str = "whole";

/// Two ends over loopback whose ports stamp what they are asked, and the engine to be stepped with [`stamp`](Self::stamp).
pub struct Rig {
    pub engine: Engine,
    pub ends: [End; 2],
    pub clock: Clock,
    began: StepBegan,
    stamped: [Stamped<Loopback>; 2],
}

impl Rig {
    pub fn new(platform: &dyn Platform, args: &Args, size_bytes: u64) -> Result<Self, portway_proxy::Error> {
        let transport = Loopback::new(loopback::Config::default())?;
        let (clock, began) = (Clock::new(), StepBegan::default());
        let stamped = [(); 2].map(|()| Stamped::new(transport.clone(), clock, began.clone()));
        let wiring = Wiring {
            transports: [&stamped[0], &stamped[1]],
            signal_word: &|transport| Ok(transport.register(&platform.host_memory(8)?)?),
            channels: 1,
            engine: Config { deadline: args.deadline(), max_channels: 2, ..Config::default() },
            core: None,
        };
        let (engine, ends) = wire(platform, size_bytes, wiring)?;
        Ok(Rig { engine, ends, clock, began, stamped })
    }

    /// What is to be done before each step of the engine.
    pub fn stamp(&self) -> impl FnMut() + Send + use<> {
        let (clock, began) = (self.clock, self.began.clone());
        move || began.store(clock.now_ns(), std::sync::atomic::Ordering::Relaxed)
    }

    /// The stamps of both ends' puts, once the engine is shut down. Of a put that was split, the first trigger was popped and
    /// posted first, and the last one is complete last.
    pub fn take(&self, size_bytes: u64) -> [Vec<Stamp>; 2] {
        let of_put =
            |parts: &[Stamp]| Stamp { completed_ns: parts[parts.len() - 1].completed_ns, ..parts[0] };
        let chunk = triggers(size_bytes) as usize;
        self.stamped.each_ref().map(|stamped| stamped.take().chunks(chunk).map(of_put).collect())
    }
}

/// A message, by the thread that plays both ends.
#[derive(Clone, Copy, Debug)]
struct Way {
    pushed_ns: u64,
    /// What the thread's own clock readings come to, from the push to the signal seen.
    took_ns: f64,
}

/// The stages of the counted messages of some runs, in microseconds.
#[derive(Clone, Debug, Default)]
struct Found {
    stages: [Vec<f64>; 3],
    completion: Vec<f64>,
    whole: Vec<f64>,
    wrong: u64,
    /// Each run's median of the whole, and that of a run without stamps beside it.
    runs: Vec<(f64, f64)>,
}

impl Found {
    /// Adds a message and what its port has noted.
    fn add(&mut self, way: &Way, stamp: &Stamp) {
        let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
        // A step that was under way when the push began took it all the same.
        let popped_ns = stamp.popped_ns.max(way.pushed_ns);
        let seen_us = (way.pushed_ns as f64 + way.took_ns - stamp.posted_ns as f64) / 1e3;
        let stages = [us(way.pushed_ns, popped_ns), us(popped_ns, stamp.posted_ns), seen_us];
        for (all, stage) in self.stages.iter_mut().zip(stages) {
            all.push(stage);
        }
        self.completion.push(us(stamp.posted_ns, stamp.completed_ns));
        self.whole.push(way.took_ns / 1e3);
    }
}

/// Rows for each size; the whole is run `-N` times, each beside a run of the product as it is.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let sizes = args.sizes();
    let mut found = vec![Found::default(); sizes.len()];
    for _ in args.runs() {
        for (&size, found) in sizes.iter().zip(&mut found) {
            let plain = latency::round_trips(args, size, None, pinning)?;
            let before = found.whole.len();
            measure(args, size, None, pinning, found)?;
            let pair = median(&found.whole[before..]).zip(median(&plain.warm));
            found.runs.extend(pair.map(|(ours, plain)| (ours.median, plain.median)));
        }
    }
    Ok(sizes.iter().zip(found).flat_map(|(&size, found)| of_size(args, size, found)).collect())
}

fn of_size(args: &Args, size_bytes: u64, found: Found) -> Vec<Row> {
    let Found { stages: [pop, post, seen], completion, whole, wrong, runs } = found;
    let row =
        Row { layer: NAME.into(), test: TEST.into(), size_bytes, runs: runs.len() as u64, ..Row::default() };
    let stages = [(PUSH_POP, pop), (POP_POST, post), (POST_SEEN, seen), (POST_COMPLETED, completion)];
    let ratio = over(&runs, |(ours, plain)| ours / plain);
    let whole_row = Row {
        reference: ratio.map(|ratio| Reference {
            time_us: over(&runs, |(_, plain)| *plain),
            ..Reference::new("without-stamps", ratio)
        }),
        wrong: args.check().then_some(wrong),
        ..row.clone()
    };
    shares(args, &row, whole_row, whole, stages)
}

/// The rows of stages beside that of the whole, with the share of each.
pub fn shares<const N: usize>(
    args: &Args,
    row: &Row,
    whole_row: Row,
    whole: Vec<f64>,
    stages: [(&str, Vec<f64>); N],
) -> Vec<Row> {
    let mean = |samples: &[f64]| samples.iter().sum::<f64>() / samples.len().max(1) as f64;
    let mean_of_whole = mean(&whole);
    let stage = |(name, samples): (&str, Vec<f64>)| {
        let share = 100.0 * mean(&samples) / mean_of_whole;
        let share_percent = Some(share).filter(|share| share.is_finite());
        Row { subject: name.into(), share_percent, ..row.clone() }.with_times(args, samples)
    };
    let whole_row = Row { subject: WHOLE.into(), share_percent: Some(100.0), ..whole_row };
    std::iter::once(whole_row.with_times(args, whole)).chain(stages.map(stage)).collect()
}

/// A run in which one payload has a flipped bit.
pub fn control(args: &Args, pinning: &Pinning) -> Result<Control, Failure> {
    let mut found = Found::default();
    measure(args, 64, Some((latency::Spoil::FlippedBit, 0)), pinning, &mut found)?;
    Ok(Control::new(NAME, TEST, 1, found.wrong))
}

/// One run of round trips.
fn measure(
    args: &Args,
    size_bytes: u64,
    spoiled: Option<latency::Spoiled>,
    pinning: &Pinning,
    found: &mut Found,
) -> Result<(), Failure> {
    let name = format!("put stages, {size_bytes} bytes");
    let failed = |source| Failure::proxy(&name, source);
    let mut rig = Rig::new(&Heap, args, size_bytes).map_err(failed)?;
    let (clock, stamp) = (rig.clock, rig.stamp());
    let [a, b] = &rig.ends;
    let mut sides = [Channels::new(a).map_err(failed)?, Channels::new(b).map_err(failed)?];
    let trial = &Trial::new(&name, 2, args.deadline());
    let round = Round::new(args, pinning, trial);
    let place = Place { offset_bytes: 0, len_bytes: size_bytes };
    let (mut ways, mut wrong) = (Vec::new(), 0);
    let time = || {
        round.time(|n| {
            let message = |number, from: &mut Channels, to: &mut Channels| {
                let message = Message { n, number, place, spoil: latency::spoil_of(spoiled, number) };
                let mut pushed_ns = 0;
                let pushing = |start| pushed_ns = clock.at_ns(start);
                let (took, whole) = latency::one_way(from, to, &message, args.check(), trial, pushing)?;
                Ok::<_, Failure>((Way { pushed_ns, took_ns: took.as_nanos() as f64 }, whole))
            };
            let [a, b] = &mut sides;
            let (there, there_whole) = message(2 * n, a, b)?;
            let (back, back_whole) = message(2 * n + 1, b, a)?;
            wrong += u64::from(!there_whole) + u64::from(!back_whole);
            ways.push([there, back]);
            Ok(std::time::Duration::from_nanos((there.took_ns + back.took_ns) as u64))
        })
    };
    let ((samples, _), ()) = round.both(time, || serve(&mut rig.engine, trial, stamp))?;
    let logs = rig.take(size_bytes);
    let counted = ways.len() - samples.warm.len();
    for (n, pair) in ways.iter().enumerate().skip(counted) {
        for (way, log) in pair.iter().zip(&logs) {
            match log.get(n).filter(|stamp| stamp.completed_ns > 0) {
                Some(stamp) => found.add(way, stamp),
                None => {
                    let report = format!("message {n} has no stamp of its completion");
                    return Err(Failure::Undone {
                        measurement: name,
                        triggers: 2 * ways.len() as u64,
                        report,
                    });
                }
            }
        }
    }
    found.wrong += wrong;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::machine::Machine;

    fn mean(samples: &[f64]) -> f64 {
        samples.iter().sum::<f64>() / samples.len() as f64
    }

    #[test]
    fn the_stages_come_to_the_whole() {
        let args = args::parse("put --stages -n 500 -w 20 -D 1 -T 60").unwrap();
        let pinning = Pinning::new(&Machine::look());
        let mut found = Found::default();
        measure(&args, 64, None, &pinning, &mut found).unwrap();
        assert!(!found.whole.is_empty() && found.wrong == 0, "{found:?}");
        let sum: f64 = found.stages.iter().map(|stage| mean(stage)).sum();
        let whole = mean(&found.whole);
        assert!((sum - whole).abs() <= 0.01 * whole, "stages {sum} µs, whole {whole} µs");
        for stage in &found.stages {
            assert!(stage.iter().all(|us| *us >= 0.0), "{stage:?}");
            assert!(mean(stage) > 0.0, "a stage that takes no time was not measured");
        }
        assert!(found.completion.iter().all(|us| *us > 0.0));
    }

    /// The control: a stamp of another message, and the sum is another one.
    #[test]
    fn stages_of_another_message_do_not_come_to_the_whole() {
        let way = Way { pushed_ns: 1_000, took_ns: 500.0 };
        let sum = |stamp: Stamp| {
            let mut found = Found::default();
            found.add(&way, &stamp);
            found.stages.iter().flatten().sum::<f64>()
        };
        let stamp = Stamp { popped_ns: 1_200, posted_ns: 1_300, completed_ns: 1_400 };
        assert!((sum(stamp) - 0.5).abs() < 1e-9, "{}", sum(stamp));
        let under_way = Stamp { popped_ns: 900, ..stamp };
        assert!((sum(under_way) - 0.5).abs() < 1e-9, "a step that began before the push");
        let before = Stamp { popped_ns: 200, posted_ns: 300, completed_ns: 400 };
        assert!((sum(before) - 0.5).abs() > 0.1, "{}", sum(before));
    }
}
