//! Cliques over the library in software.

use std::sync::Arc;
use std::time::{Duration, Instant};

use portway_clique::backend::{Backend, Status};
use portway_clique::software::{Fabric, Fault, Kind, Software, Step};

use super::bring_up::Setting;
use super::rows::Found;
use crate::args::Args;
use crate::failure::Failure;
use crate::progress;
use crate::report::{Phase, Report};

pub const TEST: &str = "bring-up in software";

/// Ranks and processes.
const SHAPES: [(u32, u32); 3] = [(2, 1), (8, 1), (8, 8)];

/// Warm cliques of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 20;

/// The shortest that counts as large: filling and checking it is the library's work here, not ours.
const LARGE_BYTES: usize = 256 << 10;

/// How long a control may take.
const PATIENCE: Duration = Duration::from_secs(10);

fn setting(ranks: u32, processes: u32, within: Duration) -> Result<(Setting, Vec<Software>), Failure> {
    let fabric = Fabric::new(ranks);
    let libraries: Vec<_> = (0..processes).map(|_| Software::new(&fabric)).collect();
    let backends = libraries.iter().map(|library| Arc::new(library.clone()) as Arc<dyn Backend>).collect();
    Ok((Setting::new(backends, ranks, LARGE_BYTES, within)?, libraries))
}

/// Rows for each shape. Each run has a new library.
pub fn rows(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let mut found: [Found; SHAPES.len()] = Default::default();
    for _ in args.runs() {
        for ((ranks, processes), found) in SHAPES.into_iter().zip(&mut found) {
            progress::begin(&format!("clique in software, {ranks} ranks, {processes} processes"));
            let (mut setting, _) = setting(ranks, processes, args.deadline())?;
            found.add(&mut setting, Phase::Cold)?;
            found.run_done(Phase::Cold);
            let began = Instant::now();
            for _ in 0..args.iterations.unwrap_or(ITERATIONS) {
                found.add(&mut setting, Phase::Warm)?;
                if began.elapsed() >= args.limit() {
                    break;
                }
            }
            found.run_done(Phase::Warm);
        }
    }
    for ((ranks, processes), found) in SHAPES.into_iter().zip(&found) {
        let (setting, _) = setting(ranks, processes, args.deadline())?;
        report.results.extend(found.rows(args, TEST, &setting));
    }
    Ok(())
}

/// How many of three corruptions are found: what a rank puts in, a result of the library, a size.
pub fn found() -> Result<u64, Failure> {
    let (mut setting, libraries) = setting(2, 2, PATIENCE)?;
    let input = setting.once(true)?.1;
    let size = setting.finds_a_wrong_size()?;
    libraries[1].inject(Fault::new(Step::Result, Some(1), Kind::Fail(Status::INTERNAL_ERROR)));
    let result = setting.finds_a_wrong_result()?;
    Ok([input, size, result].into_iter().map(u64::from).sum())
}
