//! Cliques over NCCL, of all GPUs that this process sees, beside ncclCommInitRankConfig.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use portway_clique::CliqueError;
use portway_clique::backend::{Backend, BackendError, CommConfig, LocalRank, RawComm, Status};
use portway_clique::nccl::Nccl;
use portway_fifo::cuda::Driver;

use super::NAME;
use super::bring_up::{BRING_UP, FIRST_USE, Setting, us};
use super::rows::{Found, shape};
use crate::args::Args;
use crate::failure::Failure;
use crate::gpu;
use crate::progress;
use crate::rate::over;
use crate::report::{Control, Phase, Reference, Report, Row};

const TEST: &str = "bring-up over NCCL";

/// Pairs of a run, one of ours and one of NCCL's, unless `-n` says otherwise.
const ITERATIONS: u64 = 4;

/// What the first use calls large unless told otherwise.
const LARGE_BYTES: usize = 4 << 20;

/// NCCL and how many GPUs there are; what the machine lacks for it; or what has failed.
fn open() -> Result<Result<(Arc<Nccl>, u32), String>, Failure> {
    let count = match Driver::load().and_then(|driver| driver.device_count()) {
        Ok(0) => return Ok(Err("no CUDA device".into())),
        Ok(count) => count,
        Err(error) => match gpu::lacking(&error) {
            Some(what) => return Ok(Err(format!("{what}: {error}"))),
            None => return Err(Failure::gpu("the GPU", error)),
        },
    };
    match Nccl::load() {
        Ok(nccl) => Ok(Ok((nccl, count))),
        Err(error @ BackendError::Unavailable { .. }) => Ok(Err(error.to_string())),
        Err(error) => Err(Failure::clique("opening NCCL", error.into())),
    }
}

/// What the machine lacks for NCCL, or why it cannot be used.
pub fn lacks() -> Option<String> {
    match open() {
        Ok(Ok(_)) => None,
        Ok(Err(lacking)) => Some(lacking),
        Err(failure) => Some(failure.to_string()),
    }
}

/// The rows, or a note that says what the machine lacks.
pub fn rows(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let (nccl, ranks) = match open()? {
        Ok(found) => found,
        Err(lacking) => {
            report.note(NAME, format!("over NCCL: waived: {lacking}"));
            return Ok(());
        }
    };
    report.note(
        NAME,
        format!("over {}: one clique of {ranks} GPUs in this process, a thread for each", nccl.name()),
    );
    report.note(
        NAME,
        "beside ncclCommInitRankConfig = bring-up without first use; ref = a unique id and one group",
    );
    report.note(NAME, "of ncclCommInitRankConfig by the same table, non-blocking, until all are up. Its cliques are the warm ones of");
    report.note(NAME, "the bring-up, where wrong counts them");
    // The first one loads the library's kernels.
    let within = args.deadline() * 3;
    let mut setting = Setting::new(vec![nccl.clone()], ranks, LARGE_BYTES, within)?;
    let mut found = Found::default();
    progress::begin("clique over NCCL, cold");
    found.add(&mut setting, Phase::Cold)?;
    found.run_done(Phase::Cold);
    let mut pairs = Vec::new();
    for _ in 0..args.most_runs {
        progress::begin("clique over NCCL");
        for pair in 0..args.iterations.unwrap_or(ITERATIONS) {
            // Neither is always the first.
            let before = (pair % 2 == 0).then(|| bare(&nccl, ranks, within)).transpose()?;
            let took = found.add(&mut setting, Phase::Warm)?;
            let theirs = before.map_or_else(|| bare(&nccl, ranks, within), Ok)?;
            pairs.push((took[BRING_UP] - took[FIRST_USE], us(theirs)));
        }
        found.run_done(Phase::Warm);
    }
    report.results.extend(found.rows(args, TEST, &setting));
    let row = Row {
        layer: NAME.into(),
        test: "beside ncclCommInitRankConfig".into(),
        shape: shape(&setting),
        runs: args.most_runs,
        reference: over(&pairs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
            time_us: over(&pairs, |(_, theirs)| *theirs),
            ..Reference::new("ncclCommInitRankConfig", ratio)
        }),
        ..Row::default()
    };
    report.results.push(row.with_times(args, pairs.iter().map(|(ours, _)| *ours).collect()));
    if args.check() {
        let found = [setting.once(true)?.1, setting.finds_a_wrong_size()?];
        let found = found.into_iter().map(u64::from).sum();
        report.control(Control::new(NAME, TEST, 2, found));
    }
    Ok(())
}

/// How long NCCL's own initialisation takes, by a thread of its own: whatever hangs in there is left behind.
fn bare(nccl: &Arc<Nccl>, ranks: u32, within: Duration) -> Result<Duration, Failure> {
    let name = format!("NCCL's own initialisation of {ranks} ranks");
    let (done, is_done) = sync_channel(1);
    let nccl = nccl.clone();
    std::thread::spawn(move || done.send(initialise(&nccl, ranks, within)));
    match is_done.recv_timeout(within * 2) {
        Ok(result) => result.map_err(|source| Failure::clique(&name, source)),
        Err(RecvTimeoutError::Disconnected) => Err(Failure::Panicked { measurement: name }),
        Err(RecvTimeoutError::Timeout) => Err(Failure::Deadline {
            measurement: name,
            what: "the library's calls to return",
            expected: 1,
            seen: 0,
            after: within * 2,
        }),
    }
}

fn initialise(nccl: &Nccl, ranks: u32, within: Duration) -> Result<Duration, CliqueError> {
    let locals: Vec<_> = (0..ranks).map(|rank| LocalRank { rank, device: rank }).collect();
    let mut comms = vec![RawComm::NULL; locals.len()];
    let start = Instant::now();
    let id = nccl.unique_id()?;
    // SAFETY: there is a place for each rank, and the id, of this library, is used by this group alone.
    let status = unsafe { nccl.init(ranks, &[id], &CommConfig::default(), &locals, &mut comms) };
    // After an error the communicators are left behind, since to abort them may block; the bench ends with it.
    check("ncclCommInitRankConfig", status)?;
    settle(nccl, &comms, "ncclCommInitRankConfig", within)?;
    let took = start.elapsed();
    // SAFETY: they are up, and not ended.
    let status = unsafe { nccl.finalize(&comms) };
    check("ncclCommFinalize", status)?;
    settle(nccl, &comms, "ncclCommFinalize", within)?;
    for comm in comms {
        // SAFETY: it is finalized, and not used again.
        let status = unsafe { nccl.destroy(comm) };
        check("ncclCommDestroy", status)?;
    }
    Ok(took)
}

/// Waits until none of the communicators, which are not ended, is in progress.
fn settle(nccl: &Nccl, comms: &[RawComm], call: &'static str, within: Duration) -> Result<(), CliqueError> {
    let start = Instant::now();
    for comm in comms {
        loop {
            // SAFETY: `initialise` made it, and destroys it after the last of these waits.
            let status = unsafe { nccl.state(*comm) };
            if status != Status::IN_PROGRESS {
                check(call, status)?;
                break;
            }
            if start.elapsed() >= within {
                return Err(CliqueError::Timeout {
                    what: call.into(),
                    expected: "communicators that are not in progress".into(),
                    seen: "one that is".into(),
                    waited: within,
                });
            }
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn check(call: &'static str, status: Status) -> Result<(), CliqueError> {
    match status.is_error() {
        true => Err(BackendError::Status { call, status, message: "in the reference".into() }.into()),
        false => Ok(()),
    }
}
