//! Puts with signals, one behind the other.

use std::time::{Duration, Instant};

use portway_fifo::Heap;

use super::side::{Channels, Place, Side, too_many, wait};
use super::wired::{Wired, triggers};
use super::{NAME, reference};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::rate::{self, Outcome, Pace, mops, over};
use crate::report::{Reference, Row, counted_first};
use crate::stats::middle;
use crate::trial::{Trial, warm_limit};

/// Puts of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 100_000;

/// Puts of a window at most: as many as a channel has under way.
const WINDOW: u64 = 256;

/// Bytes of a window at most, unless one put has more: the window of large puts stays in no cache.
const WINDOW_BYTES: u64 = 4 << 20;

/// A row a size; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let sizes = args.sizes();
    let mut found: Vec<Vec<(Outcome, f64)>> = vec![Vec::new(); sizes.len()];
    for _ in args.runs() {
        for (&size, found) in sizes.iter().zip(&mut found) {
            found.push(measure(args, size, None, pinning)?);
        }
    }
    let rows = sizes.into_iter().zip(found).filter_map(|(size, runs)| of_size(size, &runs));
    Ok(counted_first(rows.flatten().collect()))
}

/// Puts of a window.
pub fn window(size_bytes: u64) -> u64 {
    (WINDOW_BYTES / size_bytes).clamp(1, WINDOW)
}

fn of_size(size_bytes: u64, runs: &[(Outcome, f64)]) -> Option<Vec<Row>> {
    let gb_per_s = |run: &Outcome| run.warm.proc_mops * size_bytes as f64 / 1e3;
    let row = Row {
        layer: NAME.into(),
        test: "throughput".into(),
        shape: [("window".to_owned(), window(size_bytes))].into(),
        size_bytes,
        reference: Some(Reference {
            bandwidth_gb_per_s: over(runs, |(_, memcpy)| *memcpy),
            ..Reference::new("memcpy", over(runs, |(run, memcpy)| gb_per_s(run) / memcpy)?)
        }),
        ..Row::default()
    };
    Some(rate::rows(&row, true, &runs.iter().map(|(run, _)| *run).collect::<Vec<_>>()))
}

/// One run, and the bandwidth of memcpy beside it. A bit of the message `spoiled` is flipped on purpose.
pub fn measure(
    args: &Args,
    size_bytes: u64,
    spoiled: Option<u64>,
    pinning: &Pinning,
) -> Result<(Outcome, f64), Failure> {
    let name = format!("put throughput, {size_bytes} bytes");
    let wired = Wired::new(&Heap, size_bytes * window(size_bytes), args.deadline(), pinning.engine());
    let wired = wired.map_err(|source| Failure::proxy(&name, source))?;
    let ours = through(args, &name, wired, size_bytes, spoiled, pinning)?;
    let memcpy = std::thread::scope(|scope| {
        let memcpy = || reference::memcpy(size_bytes, window(size_bytes), warm_limit(args.limit()), pinning);
        scope.spawn(memcpy).join().map_err(|_| Failure::Panicked { measurement: name.clone() })
    })?;
    Ok((ours, memcpy))
}

/// One run over ends that are wired already. A bit of the message `spoiled` is flipped on purpose.
pub fn through(
    args: &Args,
    name: &str,
    wired: Wired,
    size_bytes: u64,
    spoiled: Option<u64>,
    pinning: &Pinning,
) -> Result<Outcome, Failure> {
    let failed = |source| Failure::proxy(name, source);
    let [from, to] = &wired.ends;
    let mut sides = [Channels::new(from).map_err(failed)?, Channels::new(to).map_err(failed)?];
    let (outcome, sent) = between(args, name, &mut sides, size_bytes, spoiled, pinning)?;
    wired.stop(name, sent * triggers(size_bytes), args.deadline())?;
    Ok(outcome)
}

/// The same between two sides, from the first to the second; and how many puts there were.
pub fn between<S: Side>(
    args: &Args,
    name: &str,
    sides: &mut [S; 2],
    size_bytes: u64,
    spoiled: Option<u64>,
    pinning: &Pinning,
) -> Result<(Outcome, u64), Failure> {
    let count = window(size_bytes);
    let trial = &Trial::new(name, 1, args.deadline());
    let [from, to] = sides;
    let Windows { sent, counted, mut wrong, took } = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            pin(pinning.producer(0));
            trial.part(|| windows(args, size_bytes, spoiled, from, to, trial))
        });
        thread.join().ok().flatten().ok_or_else(|| trial.why())
    })?;
    wrong += too_many(to, trial)?;
    let outcome = of_windows(count, &took, counted, args.check().then_some(wrong));
    Ok((outcome, sent))
}

/// What a run comes to whose windows of `count` puts took so long to the last push, and to the last that was seen; the last
/// `counted` of them count.
pub fn of_windows(count: u64, took: &[[Duration; 2]], counted: usize, wrong: Option<u64>) -> Outcome {
    let pace = |took: &[[Duration; 2]]| {
        let mops_of =
            |at: usize| mops(count, middle(&mut took.iter().map(|pair| pair[at]).collect::<Vec<_>>()));
        Pace { iterations: count * took.len() as u64, push_mops: mops_of(0), proc_mops: mops_of(1) }
    };
    let (before, warm) = took.split_at(took.len().saturating_sub(counted));
    let (cold, ramp) = before.split_at(before.len().min(1));
    let some = |took: &[_]| (!took.is_empty()).then(|| pace(took));
    Outcome { cold: some(cold), ramp: some(ramp), warm: pace(warm), wrong }
}

/// What the windows of a run came to.
#[derive(Default)]
struct Windows {
    /// Puts, with those of the windows that do not count.
    sent: u64,
    /// Messages that were not whole.
    wrong: u64,
    /// Of each window, from the first push to the last, and to the last signal seen.
    took: Vec<[Duration; 2]>,
    /// How many of them, at the end, count.
    counted: usize,
}

/// Windows until there are enough of them.
fn windows<S: Side>(
    args: &Args,
    size_bytes: u64,
    spoiled: Option<u64>,
    from: &mut S,
    to: &mut S,
    trial: &Trial,
) -> Result<Windows, Failure> {
    let count = window(size_bytes);
    let mut windows = Windows::default();
    let places = || (0..count).map(|place| Place { offset_bytes: place * size_bytes, len_bytes: size_bytes });
    let iterations = args.iterations.unwrap_or(ITERATIONS);
    let phases = [(args.warmup, warm_limit(args.limit())), (iterations, args.limit())];
    let mut wait_for_end = trial.wait("windows of puts", args.warmup + iterations);
    for (least, limit) in phases {
        let (begin, before) = (Instant::now(), windows.sent);
        windows.counted = 0;
        while windows.sent - before < least && (windows.counted == 0 || begin.elapsed() < limit) {
            if args.check() {
                for (place, number) in places().zip(windows.sent..) {
                    from.memory().fill(place, number);
                    if spoiled == Some(number) {
                        from.memory().spoil(place);
                    }
                }
            }
            let start = Instant::now();
            for (place, number) in places().zip(windows.sent..) {
                from.put_signal(number, place, trial)?;
            }
            from.kick(trial)?;
            let pushed = start.elapsed();
            for number in windows.sent..windows.sent + count {
                wait(to, number, trial)?;
            }
            let all = start.elapsed();
            if args.check() {
                let whole = |(place, number)| to.memory().is_whole(place, number);
                windows.wrong +=
                    places().zip(windows.sent..).filter(|&message| !whole(message)).count() as u64;
            }
            windows.sent += count;
            windows.took.push([pushed, all]);
            windows.counted += 1;
            wait_for_end.step(windows.sent)?;
        }
    }
    Ok(windows)
}
