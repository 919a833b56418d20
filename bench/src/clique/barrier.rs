//! One pass of the barrier among local threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portway_clique::{Barrier, CliqueError};

use super::bring_up::us;
use super::{NAME, each};
use crate::args::Args;
use crate::failure::Failure;
use crate::progress;
use crate::report::{Report, Row};
use crate::stats::{Times, median};

pub const TEST: &str = "barrier";

const THREADS: u32 = 8;

/// Passes of a run unless `-n` says otherwise, and those before them.
const ITERATIONS: u64 = 2_000;
const WARMUP: u64 = 100;

pub fn row(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let (mut samples, mut runs, mut wrong) = (Vec::new(), 0, 0);
    for _ in args.runs() {
        let count = args.iterations.unwrap_or(ITERATIONS);
        let (took, found) = passes(count, args.limit(), args.deadline(), false)?;
        samples.extend(took);
        wrong += found;
        runs += 1;
    }
    report.results.push(Row {
        layer: NAME.into(),
        test: TEST.into(),
        shape: [("threads".to_owned(), THREADS.into())].into(),
        runs,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        wrong: args.check().then_some(wrong),
        ..Row::default()
    });
    Ok(())
}

/// A run in whose last pass one thread does not say that it comes: whether the others find that.
pub fn found(args: &Args) -> Result<u64, Failure> {
    Ok(passes(10, args.deadline(), args.deadline(), true)?.1)
}

/// Passes in microseconds, of the thread that waits longest in the median, and the passes in which somebody left before all
/// had come.
fn passes(count: u64, limit: Duration, within: Duration, corrupt: bool) -> Result<(Vec<f64>, u64), Failure> {
    let name = format!("{NAME} barrier of {THREADS} threads");
    progress::begin(&name);
    let barrier = Barrier::<bool>::new(THREADS);
    // The pass to which each thread has come.
    let come: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let run = |seat: u32| -> Result<(Vec<f64>, u64), CliqueError> {
        let (mut took, mut wrong, mut pass) = (Vec::new(), 0, 0);
        for (count, limit, counted) in [(WARMUP, within, false), (count, limit, true)] {
            let began = Instant::now();
            for done in 1.. {
                pass += 1;
                if !(corrupt && counted && seat == 0 && done == count) {
                    come[seat as usize].store(pass, Ordering::Release);
                }
                let start = Instant::now();
                // Who comes last says for all whether this was the last pass.
                let lead =
                    |word: Result<(), CliqueError>| word.map(|()| done == count || began.elapsed() >= limit);
                let over = barrier.arrive(seat, "a measurement", Ok(()), within, lead)?;
                let time = start.elapsed();
                if counted {
                    took.push(us(time));
                }
                wrong += u64::from(come.iter().any(|come| come.load(Ordering::Acquire) < pass));
                if over {
                    break;
                }
            }
        }
        Ok((took, wrong))
    };
    let threads = each(&name, 0..THREADS, run)?;
    let wrong = threads.iter().map(|(_, wrong)| *wrong).max().unwrap_or(0);
    let middle = |took: &[f64]| median(took).map_or(0.0, |spread| spread.median);
    let longest = threads.into_iter().max_by(|(a, _), (b, _)| middle(a).total_cmp(&middle(b)));
    Ok((longest.map_or(Vec::new(), |(took, _)| took), wrong))
}
