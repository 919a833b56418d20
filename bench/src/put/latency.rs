//! One way through the whole stack: put and signal there, wait, put and signal back, wait.

use std::time::{Duration, Instant};

use portway_fifo::Heap;

use super::side::{Channels, Place, Side, too_many, wait};
use super::wired::{Wired, triggers};
use super::{NAME, reference};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::rate::over;
use crate::report::{Reference, Row, counted_first};
use crate::round::{Round, Samples};
use crate::stats::median;
use crate::trial::Trial;

/// What one size came to: the samples of all runs, and each run's median with the reference's beside it.
#[derive(Default)]
struct Found {
    samples: Samples,
    runs: Vec<(f64, f64)>,
}

/// A row a size; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let sizes = args.sizes();
    let mut found: Vec<Found> = sizes.iter().map(|_| Found::default()).collect();
    for _ in args.runs() {
        let theirs = reference::ping_pong(args, pinning)?;
        for (&size, found) in sizes.iter().zip(&mut found) {
            let samples = round_trips(args, size, None, pinning)?;
            found.runs.extend(median(&samples.warm).map(|ours| (ours.median, theirs)));
            found.samples.add(samples);
        }
    }
    let rows = |(size_bytes, Found { samples, runs }): (u64, Found)| {
        let row = Row {
            layer: NAME.into(),
            test: "latency".into(),
            size_bytes,
            runs: runs.len() as u64,
            reference: over(&runs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
                time_us: over(&runs, |(_, theirs)| *theirs),
                ..Reference::new("two-atomics", ratio)
            }),
            ..Row::default()
        };
        samples.rows(args, row)
    };
    Ok(counted_first(sizes.into_iter().zip(found).flat_map(rows).collect()))
}

/// What is done on purpose to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spoil {
    /// A bit of it is another one.
    FlippedBit,
    /// Its signal comes without it.
    NoData,
}

/// Which message is spoiled, and how: the first of a round trip.
pub type Spoiled = (Spoil, u64);

/// One run: half of each round trip, and the messages that were not whole.
pub fn round_trips(
    args: &Args,
    size_bytes: u64,
    spoiled: Option<Spoiled>,
    pinning: &Pinning,
) -> Result<Samples, Failure> {
    let name = format!("put latency, {size_bytes} bytes");
    let wired = Wired::new(&Heap, size_bytes, args.deadline(), pinning.engine());
    through(args, &name, wired.map_err(|source| Failure::proxy(&name, source))?, size_bytes, spoiled, pinning)
}

/// The same over ends that are wired already.
pub fn through(
    args: &Args,
    name: &str,
    wired: Wired,
    size_bytes: u64,
    spoiled: Option<Spoiled>,
    pinning: &Pinning,
) -> Result<Samples, Failure> {
    let failed = |source| Failure::proxy(name, source);
    let [a, b] = &wired.ends;
    let mut sides = [Channels::new(a).map_err(failed)?, Channels::new(b).map_err(failed)?];
    let (samples, sent) = between(args, name, &mut sides, size_bytes, spoiled, pinning)?;
    wired.stop(name, 2 * sent * triggers(size_bytes), args.deadline())?;
    Ok(samples)
}

/// The same between two sides, whatever carries out what they ask for; and how many round trips there were.
pub fn between<S: Side>(
    args: &Args,
    name: &str,
    sides: &mut [S; 2],
    size_bytes: u64,
    spoiled: Option<Spoiled>,
    pinning: &Pinning,
) -> Result<(Samples, u64), Failure> {
    let trial = &Trial::new(name, 1, args.deadline());
    let round = Round::new(args, pinning, trial);
    let place = Place { offset_bytes: 0, len_bytes: size_bytes };
    let mut wrong = 0;
    let (samples, sent) = round.alone(|| {
        round.time(|n| {
            let mut time = Duration::ZERO;
            for (way, number) in (0..2).zip(2 * n..) {
                let [a, b] = &mut *sides;
                let (from, to) = if way == 0 { (a, b) } else { (b, a) };
                let message = Message { n, number, place, spoil: spoil_of(spoiled, number) };
                let (took, whole) = one_way(from, to, &message, args.check(), trial, |_| ())?;
                time += took;
                wrong += u64::from(!whole);
            }
            Ok(time)
        })
    })?;
    for side in sides {
        wrong += too_many(side, trial)?;
    }
    Ok((Samples { wrong, ..samples }, sent))
}

/// One message.
pub struct Message {
    /// Its round trip.
    pub n: u64,
    /// What its bytes follow from.
    pub number: u64,
    pub place: Place,
    pub spoil: Option<Spoil>,
}

/// What is done on purpose to a message: the first of a round trip.
pub fn spoil_of(spoiled: Option<Spoiled>, number: u64) -> Option<Spoil> {
    spoiled.and_then(|(how, at)| (2 * at == number).then_some(how))
}

/// How long a message took, and whether all of it was there with its signal. `pushing` is told when the push begins.
pub fn one_way<S: Side>(
    from: &mut S,
    to: &mut S,
    message: &Message,
    check: bool,
    trial: &Trial,
    pushing: impl FnOnce(Instant),
) -> Result<(Duration, bool), Failure> {
    let &Message { n, number, place, spoil } = message;
    if check {
        from.memory().fill(place, number);
    }
    if spoil == Some(Spoil::FlippedBit) {
        from.memory().spoil(place);
    }
    let start = Instant::now();
    pushing(start);
    match spoil {
        Some(Spoil::NoData) => from.signal(n, trial)?,
        _ => from.put_signal(n, place, trial)?,
    }
    from.kick(trial)?;
    wait(to, n, trial)?;
    let took = start.elapsed();
    Ok((took, !check || to.memory().is_whole(place, number)))
}
