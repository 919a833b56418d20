//! [`Team`]: what the members of a ready clique in this process share.

use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::CliqueError;
use crate::backend::{LocalRank, RawComm};
use crate::barrier::{Arrival, Late};
use crate::failure::Fault;
use crate::group::Plan;
use crate::life::Life;
use crate::rendezvous::Post;
use crate::report::Closed;
use crate::rounds::{Rounds, Short, note_of};
use crate::split::{Child, Wish};
use crate::state::Phase;
use crate::sync::{Deadline, Mutex, lock};
use crate::uses::{SizeClass, Use};
use crate::verify::Seat;
use crate::watcher::Watcher;

/// What members leave a barrier with.
#[derive(Clone, Debug)]
pub(crate) enum Word {
    /// They go on.
    Go,
    /// Each, by its seat, has a place in a child, or none.
    Children(Vec<Option<Child>>),
    /// The clique is closed.
    Closed(Closed),
}

/// The local ranks of a clique that is ready.
#[derive(Debug)]
pub(crate) struct Team {
    pub(crate) life: Arc<Life>,
    pub(crate) size: u32,
    pub(crate) locals: Vec<LocalRank>,
    pub(crate) comms: Vec<RawComm>,
    pub(crate) seats: Vec<Seat>,
    pub(crate) plan: Plan,
    pub(crate) call_within: Duration,
    pub(crate) heartbeat: Duration,
    /// How many barriers were passed.
    pub(crate) passes: Mutex<u64>,
    /// What was declared and run.
    declared: BTreeSet<Use>,
    met: Mutex<BTreeSet<(Use, SizeClass)>>,
    pub(crate) wishes: Mutex<Vec<Option<Wish>>>,
    pub(crate) watcher: Mutex<Option<Watcher>>,
}

impl Team {
    pub(crate) fn new(
        life: Arc<Life>,
        plan: &Plan,
        comms: Vec<RawComm>,
        seats: Vec<Seat>,
        call_within: Duration,
        heartbeat: Duration,
    ) -> Self {
        let count = plan.locals.len();
        Team {
            life,
            size: plan.size,
            locals: plan.locals.clone(),
            comms,
            seats,
            plan: plan.clone(),
            call_within,
            heartbeat,
            passes: Mutex::new(0),
            declared: plan.uses.iter().copied().collect(),
            met: Mutex::new(BTreeSet::new()),
            wishes: Mutex::new(vec![None; count]),
            watcher: Mutex::new(None),
        }
    }

    /// Whether an operation can go on without a barrier: everybody has met it.
    pub(crate) fn has_met(&self, one: Use, class: SizeClass) -> bool {
        self.declared.contains(&one) || lock(&self.met).contains(&(one, class))
    }

    pub(crate) fn meet(&self, one: Use, class: SizeClass) {
        lock(&self.met).insert((one, class));
    }

    /// Brings a local seat to the barrier; the last of them does, and its exchange with the other participants is done
    /// under a name that all of them make up alike.
    pub(crate) fn arrive(
        &self,
        seat: u32,
        purpose: &str,
        word: Result<(), CliqueError>,
        late: Late,
        lead: impl FnOnce(Result<(), CliqueError>, Deadline) -> Result<Word, CliqueError>,
    ) -> Result<Word, CliqueError> {
        let life = &self.life;
        life.check()?;
        let left = life.barrier.meet(Arrival { seat, purpose, word, within: self.call_within, late }, lead);
        left.map_err(|error| match life.end() {
            // The failure of the clique says more than the barrier that broke with it.
            Some(end) => end,
            // A barrier that is broken is so for good, and the clique with it: the other participants hear of it, too.
            None if life.barrier.is_broken() || matches!(error, CliqueError::Panicked { .. }) => {
                life.fail_ready(Fault::new(None, error.to_string()))
            }
            None => error,
        })
    }

    /// Meets the other participants, in rounds that all of them name alike, with the joined word of the local members. All
    /// go on from here or nobody does; where that is not sure the clique fails.
    ///
    /// # Errors
    /// The local word; what another participant said; who did not come.
    pub(crate) fn meet_others(
        &self,
        rounds: &Rounds,
        word: Result<(), CliqueError>,
        until: Deadline,
    ) -> Result<(), CliqueError> {
        let life = &self.life;
        if rounds.rendezvous.participants() == 1 {
            return word;
        }
        let post = match &word {
            Ok(()) => Post::Ok(Vec::new()),
            Err(error) => Post::Failed(note_of(error, Phase::Ready, &life.process).encode()),
        };
        let heard = rounds.exchange("meet", post, until, || life.check());
        word?;
        let fault = match heard {
            Ok(_) => return Ok(()),
            Err(Short::Failed(note)) => return Err(CliqueError::Failed(Arc::new(life.failure(note)))),
            // Some may be past this barrier, and some are not: also where this one's rendezvous failed.
            Err(Short::Error(error)) => error.to_string(),
            Err(Short::Silent(who)) => who,
        };
        Err(life.fail_ready(Fault::new(None, fault)))
    }

    /// Ends a clique that could not be handed out.
    pub(crate) fn abandon(&self, error: &CliqueError) {
        self.life.fail_ready(Fault::new(None, error.to_string()));
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // The watcher ends by itself; nobody waits for it here.
        let watcher = lock(&self.watcher).take();
        drop(watcher);
        self.life.end_by_itself("dropped", "this participant dropped its clique without closing it");
    }
}
