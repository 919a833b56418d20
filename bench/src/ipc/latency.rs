//! Time one way: put and signal by size, and the signal alone.

use portway_transport_ipc::WordPlace;

use super::kernels::{Gpus, Plan};
use super::plain::floor;
use super::{NAME, PLACES};
use crate::failure::Failure;
use crate::rate::over;
use crate::report::{Control, Reference, Report, Row, counted_first};
use crate::round::Samples;
use crate::stats::median;

/// Round trips of a run unless `-n` says otherwise, how many `-n` can say, and how many bytes they fill and check at most.
const ROUND_TRIPS: u64 = 2_000;
const MOST_ROUND_TRIPS: u64 = 100_000;
const CHECKED_BYTES: u64 = 256 << 20;

/// Round trips before those at most.
const WARMUP: u64 = 100;

/// Round trips of the floor that count, at most.
const FLOOR_TRIPS: u64 = 1_000;

const LATENCY: &str = "latency";
const SIGNAL: &str = "signal";

/// Rows for each place of the word: put and signal by size, then the signal alone, whose size is 0.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    for (test, sizes) in [(LATENCY, &gpus.args.sizes()[..]), (SIGNAL, &[0])] {
        let mut rows = Vec::new();
        for (place, subject) in PLACES {
            rows.extend(rows_of(gpus, place, subject, test, sizes)?);
        }
        report.results.extend(counted_first(rows));
    }
    Ok(())
}

/// One size: the samples of all runs, and each run's median with the floor's beside it.
#[derive(Default)]
struct Found {
    samples: Samples,
    runs: Vec<(f64, f64)>,
}

fn rows_of(
    gpus: &Gpus,
    place: WordPlace,
    subject: &str,
    test: &str,
    sizes: &[u64],
) -> Result<Vec<Row>, Failure> {
    let mut found: Vec<Found> = sizes.iter().map(|_| Found::default()).collect();
    for _ in 0..gpus.args.most_runs {
        for (&size, found) in sizes.iter().zip(&mut found) {
            let samples = round_trips(gpus, place, size, None)?;
            let count = FLOOR_TRIPS.min(samples.warm.len() as u64);
            let theirs = floor(gpus, place, size, WARMUP + count)?;
            let pair = median(&samples.warm).zip(median(&theirs[WARMUP as usize..]));
            found.runs.extend(pair.map(|(ours, theirs)| (ours.median, theirs.median)));
            found.samples.add(samples);
        }
    }
    let rows = |(&size_bytes, Found { samples, runs }): (&u64, Found)| {
        let row = Row {
            layer: NAME.into(),
            test: test.into(),
            subject: subject.into(),
            size_bytes,
            runs: runs.len() as u64,
            reference: over(&runs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
                time_us: over(&runs, |(_, theirs)| *theirs),
                ..Reference::new("copy and value by a thread", ratio)
            }),
            ..Row::default()
        };
        samples.rows(gpus.args, row)
    };
    Ok(sizes.iter().zip(found).flat_map(rows).collect())
}

/// Half of each round trip in microseconds; and the messages that were not whole, or whose signal was not the only one.
fn round_trips(
    gpus: &Gpus,
    place: WordPlace,
    size_bytes: u64,
    corrupt: Option<u64>,
) -> Result<Samples, Failure> {
    let name = format!("{NAME} latency, {size_bytes} bytes");
    let fitting = (CHECKED_BYTES / size_bytes.max(1)).clamp(100, ROUND_TRIPS);
    let counted = gpus.args.iterations.map_or(fitting, |count| count.min(MOST_ROUND_TRIPS));
    let count = gpus.args.warmup.min(WARMUP) + counted;
    let (check, corrupt) = (gpus.args.check().into(), corrupt.unwrap_or(u64::MAX));
    let plan = |follows| Plan { len_bytes: size_bytes, puts: 1, count, follows, check, corrupt };
    let [lead, follow] = gpus.run(&name, ("trips", count), place, size_bytes.max(8), [plan(0), plan(1)])?;
    let ways = lead.us.iter().zip(&follow.us).map(|(trip, between)| (trip - between) / 2.0);
    Ok(Samples::of_run(ways, counted, lead.wrong + follow.wrong))
}

/// Runs in which one message has a flipped bit, and in which one signal comes with another one.
pub fn controls(gpus: &Gpus) -> Result<[Control; 2], Failure> {
    let wrong = |size_bytes| Ok(round_trips(gpus, WordPlace::default(), size_bytes, Some(0))?.wrong);
    Ok([Control::new(NAME, LATENCY, 1, wrong(64)?), Control::new(NAME, SIGNAL, 1, wrong(0)?)])
}
