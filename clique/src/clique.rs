//! [`Clique`]: a clique that is ready.

use core::time::Duration;
use std::sync::Arc;

use crate::CliqueError;
use crate::backend::BackendError;
use crate::bring_up::CliqueBuilder;
use crate::closing::Meeting;
use crate::custody::Quarantine;
use crate::failure::Fault;
use crate::member::Member;
use crate::owner::Desk;
use crate::report::{Closed, Durations};
use crate::sync::{Deadline, lock};
use crate::team::Team;
use crate::watcher::Watcher;

/// A clique that is ready: the local ranks as [`Member`]s, and what concerns all of them.
///
/// It ends with [`close`](Self::close), together with the other participants, or with [`abort`](Self::abort). Once it and
/// its members are dropped, what is left is aborted, within 3 s; the other participants are told.
///
/// There is no other way to one than [`CliqueBuilder::bring_up`], and none back from its end:
///
/// ```compile_fail,E0451
/// # use portway_clique::Clique;
/// let clique = Clique { members: Vec::new() }; // its fields are private
/// ```
///
/// ```compile_fail,E0382
/// # fn f(mut clique: portway_clique::Clique) {
/// clique.close(std::time::Duration::from_secs(1));
/// clique.members(); // it is gone
/// # }
/// ```
#[derive(Debug)]
pub struct Clique {
    team: Arc<Team>,
    members: Vec<Member>,
    durations: Durations,
}

impl Clique {
    /// What a clique of `size` ranks is to be. The name is the same for all participants; cliques that live at the same
    /// time have different ones. It has 1 to [`MAX_NAME_BYTES`](crate::MAX_NAME_BYTES) bytes and no `/`.
    pub fn builder(name: &str, size: u32) -> CliqueBuilder {
        CliqueBuilder::new(name, size)
    }

    pub(crate) fn start(team: Team, durations: Durations) -> Result<Self, CliqueError> {
        let team = Arc::new(team);
        Watcher::attach(&team)?;
        let members = (0..team.locals.len() as u32).map(|seat| Member::new(team.clone(), seat)).collect();
        Ok(Clique { team, members, durations })
    }

    /// The local ranks, in the order in which they were added. Each can be sent to a thread of its own. Empty the second
    /// time.
    pub fn members(&mut self) -> Vec<Member> {
        core::mem::take(&mut self.members)
    }

    /// How many ranks it has.
    pub fn size(&self) -> u32 {
        self.team.size
    }

    /// How long each part of the bring-up took.
    pub fn durations(&self) -> Durations {
        self.durations
    }

    /// Why it cannot be used any more; `None` while it can.
    pub fn end(&self) -> Option<CliqueError> {
        self.team.life.end()
    }

    /// What did not come back when it, or a child of it, was aborted.
    pub fn quarantine(&self) -> Quarantine {
        self.team.life.quarantine.clone()
    }

    /// How often the watcher has asked for errors.
    pub fn heartbeats(&self) -> u64 {
        lock(&self.team.watcher).as_ref().map_or(0, Watcher::beats)
    }

    /// Aborts all local communicators together, and tells the other participants. Whoever waits in a call gets
    /// [`CliqueError::Ended`]. Returns within 3 s; what has not come back then is in quarantine.
    pub fn abort(&self) -> Quarantine {
        let life = &self.team.life;
        life.end_by_itself("aborted", "this participant aborted its clique");
        life.quarantine.clone()
    }

    /// Stops what is under way in all local communicators, without an end: [`Member::shrink`] goes on from here.
    ///
    /// # Errors
    /// [`BackendError::NotInLibrary`] from a library that cannot; its own errors.
    pub fn revoke(&self) -> Result<(), CliqueError> {
        let life = &self.team.life;
        if !life.backend.capabilities().revoke {
            return Err(BackendError::NotInLibrary { call: "revoke", library: life.backend.name() }.into());
        }
        life.check()?;
        let named = self.team.named();
        let until = Deadline::after(self.team.call_within);
        let answer = life.owner.post(move |desk: &mut Desk| {
            for (rank, comm) in &named {
                // SAFETY: as in `Desk::state`.
                let status = desk.call(Some(*rank), "revoke", |backend| unsafe { backend.revoke(*comm) })?;
                let status = status.map_err(|error| Fault::of(Some(*rank), &error))?;
                if status.is_error() {
                    return Err(desk.explained(*rank, "revoke", status, Some(*comm)));
                }
            }
            desk.settle(&named, "revoke", until)
        });
        life.answer(&answer, "revoke", None, self.team.call_within)
    }

    /// Closes it together with the other participants: finalizes and destroys the local communicators, and waits until
    /// the others have closed, too. Members that are left get [`CliqueError::Ended`] from then on.
    ///
    /// # Errors
    /// Why it had ended before; what went wrong, or did not end `within`: then what is left is aborted.
    pub fn close(self, within: Duration) -> Result<Closed, CliqueError> {
        self.team.close(within, Meeting::Nowhere)
    }
}
