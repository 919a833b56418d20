//! The orderly end of a clique.

use core::time::Duration;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use crate::CliqueError;
use crate::backend::{RawComm, Status};
use crate::failure::Fault;
use crate::owner::{Desk, LOST_COMMAND};
use crate::rendezvous::Post;
use crate::report::Closed;
use crate::rounds::{LIFE, Short};
use crate::state::Phase;
use crate::sync::{Deadline, lock};
use crate::team::Team;

/// Where the local members are when their clique is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// They may be anywhere; those who wait for each other are told.
    Nowhere,
    /// They all stand at the barrier.
    AtTheBarrier,
}

impl Team {
    /// Finalizes and destroys the local communicators, then waits for the other participants to have done so.
    pub(crate) fn close(&self, within: Duration, meeting: Meeting) -> Result<Closed, CliqueError> {
        let (start, deadline) = (Instant::now(), Deadline::after(within));
        let life = &self.life;
        let watcher = lock(&self.watcher).take();
        if let Some(watcher) = watcher {
            watcher.stop(deadline);
        }
        let clique = life.rounds.clique.clone();
        life.begin_end(CliqueError::Ended { clique, how: "closed" })?;
        if meeting == Meeting::Nowhere {
            life.barrier.fail(&life.ended());
        }
        let named = self.named();
        let answer = life.owner.post(move |desk: &mut Desk| destroy(desk, &named, deadline));
        let result = match answer.recv_timeout(deadline.left()) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                Err(Fault::new(None, format!("closing was not done within {within:?}")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Fault::new(None, LOST_COMMAND)),
        };
        let destroy = start.elapsed();
        if let Err(fault) = result {
            let note = fault.note(Phase::Ready, &life.process);
            life.tell(&note, deadline);
            life.abort(deadline);
            return Err(CliqueError::Failed(Arc::new(life.failure(note))));
        }
        life.set_gone();
        life.owner.close();
        // Its thread has nothing to do any more; if it is late, nothing depends on it.
        let _ = life.owner.has_ended(deadline);
        let everybody = self.close_with_others(deadline)?;
        Ok(Closed { destroy, everybody })
    }

    /// Says that this participant has closed, and waits for the others.
    fn close_with_others(&self, deadline: Deadline) -> Result<bool, CliqueError> {
        match self.life.rounds.exchange(LIFE, Post::Ok(Vec::new()), deadline, || Ok(())) {
            Ok(_) => Ok(true),
            // It is not known of those that have said nothing.
            Err(Short::Silent(_) | Short::Error(CliqueError::Timeout { .. })) => Ok(false),
            Err(Short::Failed(note)) => Err(CliqueError::Failed(Arc::new(self.life.failure(note)))),
            Err(Short::Error(error)) => Err(error),
        }
    }

    /// The local communicators, with their ranks.
    pub(crate) fn named(&self) -> Vec<(u32, RawComm)> {
        self.plan.named(&self.comms)
    }
}

/// Finalizes the communicators as one group, then destroys each.
fn destroy(desk: &mut Desk, named: &[(u32, RawComm)], until: Deadline) -> Result<(), Fault> {
    let comms: Vec<RawComm> = named.iter().map(|(_, comm)| *comm).collect();
    desk.settle(named, "finalize", until)?;
    // Whoever began something before the end gets its answer: later its communicator cannot be asked.
    desk.poll();
    // SAFETY: as in `Desk::state`, for each.
    let status = desk.call(None, "finalize", |backend| unsafe { backend.finalize(&comms) })?;
    if status.is_error() {
        return Err(desk.blamed(named, "finalize", status));
    }
    desk.settle(named, "finalize", until)?;
    let destroyed = destroy_each(desk, named);
    // A member may have looked whether the clique has ended just before it had; its command comes after this one.
    desk.is_over = true;
    destroyed
}

fn destroy_each(desk: &Desk, named: &[(u32, RawComm)]) -> Result<(), Fault> {
    for (rank, comm) in named {
        let status = desk.call(Some(*rank), "destroy", |backend| {
            if !desk.custody.strike(*comm) {
                return None;
            }
            // SAFETY: as in `Desk::state`; it was struck out just now, so nobody else ends it, and it is not used again.
            Some(unsafe { backend.destroy(*comm) })
        })?;
        match status {
            None => return Err(Fault::taken()),
            Some(Status::SUCCESS | Status::IN_PROGRESS) => {}
            Some(status) => return Err(desk.explained(*rank, "destroy", status, None)),
        }
    }
    Ok(())
}
