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
use crate::round::Samples;
use crate::stats::median;

pub const TEST: &str = "barrier";

const THREADS: u32 = 8;

/// Passes of a run unless `-n` says otherwise, and those before them.
const ITERATIONS: u64 = 2_000;
const WARMUP: u64 = 100;

pub fn rows(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let (mut samples, mut runs) = (Samples::default(), 0);
    for _ in args.runs() {
        let counts = [args.warmup.min(WARMUP), args.iterations.unwrap_or(ITERATIONS)];
        samples.add(passes(counts, args.limit(), args.deadline(), false)?);
        runs += 1;
    }
    let row = Row {
        layer: NAME.into(),
        test: TEST.into(),
        shape: [("threads".to_owned(), THREADS.into())].into(),
        runs,
        ..Row::default()
    };
    report.results.extend(samples.rows(args, row));
    Ok(())
}

/// A run in whose last pass one thread does not say that it comes: whether the others find that.
pub fn found(args: &Args) -> Result<u64, Failure> {
    Ok(passes([0, 10], args.deadline(), args.deadline(), true)?.wrong)
}

/// Passes in microseconds, of the thread that waits longest in the median, as many as do not count and as do; and the passes in
/// which somebody left before all had come.
fn passes(counts: [u64; 2], limit: Duration, within: Duration, corrupt: bool) -> Result<Samples, Failure> {
    let name = format!("{NAME} barrier of {THREADS} threads");
    progress::begin(&name);
    let barrier = Barrier::<bool>::new(THREADS);
    // The pass to which each thread has come.
    let come: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(0)).collect();
    let run = |seat: u32| -> Result<Samples, CliqueError> {
        let (mut took, mut before, mut wrong, mut pass) = (Vec::new(), 0, 0, 0);
        let [warmup, count] = counts;
        for (count, limit, counted) in [(warmup, within, false), (count, limit, true)] {
            before = took.len();
            if count == 0 {
                continue;
            }
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
                took.push(us(time));
                wrong += u64::from(come.iter().any(|come| come.load(Ordering::Acquire) < pass));
                if over {
                    break;
                }
            }
        }
        let counted = (took.len() - before) as u64;
        Ok(Samples::of_run(took, counted, wrong))
    };
    let threads = each(&name, 0..THREADS, run)?;
    let wrong = threads.iter().map(|samples| samples.wrong).max().unwrap_or(0);
    let middle = |samples: &Samples| median(&samples.warm).map_or(0.0, |spread| spread.median);
    let longest = threads.into_iter().max_by(|a, b| middle(a).total_cmp(&middle(b)));
    Ok(Samples { wrong, ..longest.unwrap_or_default() })
}
