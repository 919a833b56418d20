//! Time one way: put and signal by size, and the signal alone.

use portway_transport_ipc::WordPlace;

use super::kernels::{Gpus, Plan};
use super::plain::floor;
use super::{NAME, PLACES};
use crate::failure::Failure;
use crate::rate::over;
use crate::report::{Reference, Report, Row};
use crate::stats::{Times, median};

/// Round trips of a run unless `-n` says otherwise, how many `-n` can say, and how many bytes they fill and check at most.
const ROUND_TRIPS: u64 = 2_000;
const MOST_ROUND_TRIPS: u64 = 100_000;
const CHECKED_BYTES: u64 = 256 << 20;

/// Round trips before those, which do not count.
const WARMUP: u64 = 100;

/// Rows for each place of the word: put and signal by size, then the signal alone.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    for (place, subject) in PLACES {
        let sizes: Vec<u64> = gpus.args.sizes();
        rows_of(gpus, report, place, subject, "latency", &sizes)?;
    }
    for (place, subject) in PLACES {
        rows_of(gpus, report, place, subject, "signal", &[0])?;
    }
    Ok(())
}

/// One size: the samples of all runs, and each run's median with the floor's beside it.
#[derive(Default)]
struct Found {
    samples: Vec<f64>,
    wrong: u64,
    runs: Vec<(f64, f64)>,
}

fn rows_of(
    gpus: &Gpus,
    report: &mut Report,
    place: WordPlace,
    subject: &str,
    test: &str,
    sizes: &[u64],
) -> Result<(), Failure> {
    let mut found: Vec<Found> = sizes.iter().map(|_| Found::default()).collect();
    for _ in 0..gpus.args.most_runs {
        for (&size, found) in sizes.iter().zip(&mut found) {
            let (samples, wrong) = round_trips(gpus, place, size, None)?;
            let theirs = median(&floor(gpus, place, size, WARMUP + 1_000)?);
            let pair = median(&samples).zip(theirs);
            found.runs.extend(pair.map(|(ours, theirs)| (ours.median, theirs.median)));
            found.samples.extend(samples);
            found.wrong += wrong;
        }
    }
    // A signal has no payload, and what its word holds is not read here.
    let row = |(&size_bytes, Found { mut samples, wrong, runs }): (&u64, Found)| Row {
        layer: NAME.into(),
        test: test.into(),
        subject: subject.into(),
        size_bytes,
        runs: runs.len() as u64,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        reference: over(&runs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
            time_us: over(&runs, |(_, theirs)| *theirs),
            ..Reference::new("copy and value by a thread", ratio)
        }),
        wrong: (gpus.args.check() && size_bytes > 0).then_some(wrong),
        ..Row::default()
    };
    report.results.extend(sizes.iter().zip(found).map(row));
    Ok(())
}

/// Half of each round trip in microseconds, and the messages that were not whole.
fn round_trips(
    gpus: &Gpus,
    place: WordPlace,
    size_bytes: u64,
    corrupt: Option<u64>,
) -> Result<(Vec<f64>, u64), Failure> {
    let name = format!("{NAME} latency, {size_bytes} bytes");
    let fitting = (CHECKED_BYTES / size_bytes.max(1)).clamp(100, ROUND_TRIPS);
    let count = WARMUP + gpus.args.iterations.map_or(fitting, |count| count.min(MOST_ROUND_TRIPS));
    let check = u64::from(gpus.args.check() && size_bytes > 0);
    let corrupt = corrupt.unwrap_or(u64::MAX);
    let plan = |follows| Plan { len_bytes: size_bytes, puts: 1, count, follows, check, corrupt };
    let [lead, follow] = gpus.run(&name, "trips", place, size_bytes.max(8), [plan(0), plan(1)])?;
    let ways = lead.us.iter().zip(&follow.us).map(|(trip, between)| (trip - between) / 2.0);
    Ok((ways.skip(WARMUP as usize).collect(), lead.wrong + follow.wrong))
}

/// A run in which one message has a flipped bit.
pub fn wrong_of_a_corrupted_run(gpus: &Gpus) -> Result<u64, Failure> {
    Ok(round_trips(gpus, WordPlace::default(), 64, Some(7))?.1)
}
