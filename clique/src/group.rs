//! What the owner does to bring a local group up: makes its communicators, and uses them first.

use crate::backend::{CommConfig, LocalRank, RawComm, Shape};
use crate::failure::Fault;
use crate::first_use::{self, Lane, buffer_bytes};
use crate::id::UniqueIds;
use crate::owner::Desk;
use crate::sync::Deadline;
use crate::uses::Use;

/// The local ranks of a clique, and what they run first.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) size: u32,
    pub(crate) locals: Vec<LocalRank>,
    pub(crate) uses: Vec<Use>,
    pub(crate) large_bytes: usize,
}

impl Plan {
    /// Communicators, with their ranks.
    pub(crate) fn named(&self, comms: &[RawComm]) -> Vec<(u32, RawComm)> {
        self.locals.iter().zip(comms).map(|(local, comm)| (local.rank, *comm)).collect()
    }
}

/// A local group whose ranks are up here. Nobody but its owner uses it before it is ready.
#[derive(Debug)]
pub(crate) struct Up {
    pub(crate) comms: Vec<RawComm>,
    lanes: Vec<Lane>,
}

/// Allocates what the first use needs, then makes the communicators, which takes the ids.
pub(crate) fn init(
    desk: &mut Desk,
    plan: &Plan,
    ids: UniqueIds,
    config: &CommConfig,
    until: Deadline,
) -> Result<Up, Fault> {
    let workspaces = workspaces(desk, plan)?;
    let ids = ids.into_raw();
    let mut comms = vec![RawComm::NULL; plan.locals.len()];
    let made = &mut comms;
    let status = desk.call(None, "init", |backend| {
        // SAFETY: there are as many places as ranks. The ids were made by this library for this attempt: they were
        // collected by its key, and taken by value, so no other call has them.
        unsafe { backend.init(plan.size, &ids, config, &plan.locals, made) }
    });
    keep(desk, &comms)?;
    let status = status?;
    if status.is_error() {
        return Err(desk.blamed(&plan.named(&comms), "init", status));
    }
    up(desk, plan, comms, workspaces, until)
}

/// Waits until the communicators are up, and looks whether they are what they should be.
pub(crate) fn up(
    desk: &Desk,
    plan: &Plan,
    comms: Vec<RawComm>,
    workspaces: Vec<Box<dyn crate::backend::Workspace>>,
    until: Deadline,
) -> Result<Up, Fault> {
    let named = plan.named(&comms);
    if let Some((rank, _)) = named.iter().find(|(_, comm)| *comm == RawComm::NULL) {
        return Err(Fault::new(Some(*rank), "init made no communicator, and no error"));
    }
    desk.settle(&named, "init", until)?;
    for (local, comm) in plan.locals.iter().zip(&comms) {
        let LocalRank { rank, device } = *local;
        // SAFETY: as in `Desk::state`.
        let seen = desk.call(Some(rank), "shape", |backend| unsafe { backend.shape(*comm) })?;
        let seen = seen.map_err(|error| Fault::of(Some(rank), &error))?;
        let expected = Shape { size: plan.size, rank, device };
        if seen != expected {
            return Err(Fault::new(Some(rank), format!("the communicator is {seen:?}, not {expected:?}")));
        }
    }
    let lanes = named.into_iter().zip(workspaces);
    let lanes = lanes.map(|((rank, comm), workspace)| Lane { rank, comm, workspace }).collect();
    Ok(Up { comms, lanes })
}

/// Runs the first use, and frees what only it needed.
pub(crate) fn use_first(desk: &Desk, plan: &Plan, up: Up, until: Deadline) -> Result<Vec<RawComm>, Fault> {
    let Up { comms, mut lanes } = up;
    let result = first_use::run(desk, &plan.uses, plan.size, plan.large_bytes, &mut lanes, until);
    // Freeing may wait for the device, which is why it belongs before the barrier.
    desk.call(None, "free", |_| drop(lanes))?;
    result.map(|()| comms)
}

/// The workspaces of the local ranks, if there is something to run.
pub(crate) fn workspaces(desk: &Desk, plan: &Plan) -> Result<Vec<Box<dyn crate::backend::Workspace>>, Fault> {
    if plan.uses.is_empty() {
        return Ok(Vec::new());
    }
    let len_bytes = buffer_bytes(plan.large_bytes, plan.size);
    let make = |local: &LocalRank| {
        let made =
            desk.call(Some(local.rank), "workspace", |backend| backend.workspace(local.device, len_bytes))?;
        made.map_err(|error| Fault::of(Some(local.rank), &error))
    };
    plan.locals.iter().map(make).collect()
}

/// Puts communicators into custody. If all was taken away meanwhile they are this thread's to end.
pub(crate) fn keep(desk: &Desk, comms: &[RawComm]) -> Result<(), Fault> {
    let left = desk.custody.register(comms);
    if left.is_empty() {
        return Ok(());
    }
    abort_here(desk, &left);
    Err(Fault::taken())
}

/// Aborts communicators that nobody else knows of.
pub(crate) fn abort_here(desk: &Desk, comms: &[RawComm]) {
    for comm in comms {
        let abort = || {
            // SAFETY: made by this library; in nobody's custody, so this thread alone knows it.
            unsafe { desk.backend.abort(*comm) }
        };
        // Whatever it answers, the communicator is gone.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(abort));
    }
}
