//! One way through the whole stack: put and signal there, wait, put and signal back, wait.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portway_fifo::Heap;

use super::side::Side;
use super::wired::Wired;
use super::{NAME, reference};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::rate::over;
use crate::report::{Reference, Row};
use crate::round::{Round, Samples};
use crate::stats::{Times, median};
use crate::trial::Trial;

/// What one size came to: the samples of all runs, and each run's median with the reference's beside it.
#[derive(Default)]
struct Found {
    samples: Vec<f64>,
    wrong: u64,
    runs: Vec<(f64, f64)>,
}

/// A row a size; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let sizes = args.sizes();
    let mut found: Vec<Found> = sizes.iter().map(|_| Found::default()).collect();
    for _ in args.runs() {
        let theirs = reference::ping_pong(args, pinning)?;
        for (&size, found) in sizes.iter().zip(&mut found) {
            let (samples, wrong) = round_trips(args, size, None, pinning)?;
            found.runs.extend(median(&samples).map(|ours| (ours.median, theirs)));
            found.samples.extend(samples);
            found.wrong += wrong;
        }
    }
    let row = |(size_bytes, Found { mut samples, wrong, runs }): (u64, Found)| Row {
        layer: NAME.into(),
        test: "latency".into(),
        size_bytes,
        runs: runs.len() as u64,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        reference: over(&runs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
            time_us: over(&runs, |(_, theirs)| *theirs),
            ..Reference::new("two-atomics", ratio)
        }),
        wrong: args.check().then_some(wrong),
        ..Row::default()
    };
    Ok(sizes.into_iter().zip(found).map(row).collect())
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

/// One run: half of each round trip in microseconds, and the messages that were not whole.
pub fn round_trips(
    args: &Args,
    size_bytes: u64,
    spoiled: Option<Spoiled>,
    pinning: &Pinning,
) -> Result<Samples, Failure> {
    let name = format!("put latency, {size_bytes} bytes");
    let failed = |source| Failure::proxy(&name, source);
    let wired = Wired::new(&Heap, size_bytes, args.deadline(), pinning.engine()).map_err(failed)?;
    let [a, b] = &wired.ends;
    let (a, b) = (Side::new(a).map_err(failed)?, Side::new(b).map_err(failed)?);
    let trial = &Trial::new(&name, 1, args.deadline());
    let round = Round::new(args, pinning, trial);
    let ways = [(&a, &b), (&b, &a)];
    let mut wrong = 0;
    let (samples, sent) = round.alone(|| {
        round.time(|n| {
            let mut time = Duration::ZERO;
            for ((from, to), number) in ways.into_iter().zip(2 * n..) {
                let spoil = spoiled.and_then(|(how, at)| (2 * at == number).then_some(how));
                let (took, whole) = way(from, to, number, size_bytes, spoil, args.check(), trial)?;
                time += took;
                wrong += u64::from(!whole);
            }
            Ok(time)
        })
    })?;
    for side in [&a, &b] {
        // A signal too many.
        wrong += u64::from(side.end.poll().map_err(failed)?);
    }
    wired.stop(&name, 2 * sent, args.deadline())?;
    Ok((samples, wrong))
}

/// One message: how long it took, and whether all of it was there with its signal.
fn way(
    from: &Side,
    to: &Side,
    number: u64,
    size_bytes: u64,
    spoil: Option<Spoil>,
    check: bool,
    trial: &Trial,
) -> Result<(Duration, bool), Failure> {
    if check {
        from.fill(0, size_bytes, number);
    }
    if spoil == Some(Spoil::FlippedBit) {
        from.source[0].fetch_xor(1, Ordering::Relaxed);
    }
    let start = Instant::now();
    match spoil {
        Some(Spoil::NoData) => from.end.signal(1),
        _ => from.end.put_signal(0, 0, size_bytes),
    }
    .map_err(|source| Failure::proxy(trial.name(), source))?;
    to.wait(trial)?;
    let took = start.elapsed();
    Ok((took, !check || to.is_whole(0, size_bytes, number)))
}
