//! [`Team`]: what the members of a ready clique in this process share.

use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::CliqueError;
use crate::backend::{LocalRank, RawComm};
use crate::failure::Fault;
use crate::group::Plan;
use crate::life::{ABORT_GRACE, Life};
use crate::rendezvous::Post;
use crate::report::Closed;
use crate::rounds::{Heard, note_of};
use crate::split::{Child, Wish};
use crate::state::Phase;
use crate::sync::{Deadline, Mutex, lock};
use crate::uses::{SizeClass, Use};
use crate::verify::Seat;
use crate::watcher::Watcher;

/// How often whoever waits for other participants looks whether the clique has ended.
const LOOK: Duration = Duration::from_millis(5);

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
    pub(crate) splits: Mutex<u32>,
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
            splits: Mutex::new(0),
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
        lead: impl FnOnce(Result<(), CliqueError>) -> Result<Word, CliqueError>,
    ) -> Result<Word, CliqueError> {
        self.life.check()?;
        let left = self.life.barrier.arrive(seat, purpose, word, self.call_within, lead);
        left.map_err(|error| match (self.life.end(), &error) {
            // The failure of the clique says more than the barrier that broke with it.
            (Some(end), _) => end,
            // The barrier is broken for good, and the clique with it: the other participants hear of it, too.
            (None, CliqueError::Timeout { .. } | CliqueError::Left { .. } | CliqueError::Panicked { .. }) => {
                self.life.fail_ready(Fault::new(None, error.to_string()))
            }
            (None, _) => error,
        })
    }

    /// Meets the other participants, with the joined word of the local members.
    ///
    /// # Errors
    /// The local word; what another participant said; who did not come.
    pub(crate) fn meet_others(&self, key: &str, word: Result<(), CliqueError>) -> Result<(), CliqueError> {
        let life = &self.life;
        if life.rounds.rendezvous.participants() == 1 {
            return word;
        }
        let rounds = life.rounds.keyed(key);
        let post = match &word {
            Ok(()) => Post::Ok(Vec::new()),
            Err(error) => Post::Failed(note_of(error, Phase::Ready, &life.process).encode()),
        };
        let until = Deadline::after(self.call_within);
        let heard = rounds.exchange("meet", post, until);
        word?;
        match self.hear(&heard?, until)? {
            Heard::All(_) => Ok(()),
            Heard::Failed(note) => Err(CliqueError::Failed(Arc::new(life.failure(note)))),
            Heard::Missing(missing) => {
                let names: Vec<String> = missing.iter().map(|one| rounds.name(*one)).take(16).collect();
                let fault = Fault::new(None, format!("nothing by the deadline from {}", names.join("; ")));
                Err(life.fail_ready(fault))
            }
        }
    }
}

impl Team {
    /// What is heard in an exchange, unless the clique ends meanwhile.
    pub(crate) fn hear(
        &self,
        heard: &Receiver<Result<Heard, CliqueError>>,
        until: Deadline,
    ) -> Result<Heard, CliqueError> {
        loop {
            match heard.recv_timeout(LOOK) {
                Ok(heard) => return heard,
                Err(_) => self.life.check()?,
            }
            // The rendezvous ends by itself, and knows more then.
            if until.plus(ABORT_GRACE).is_over() {
                let fault = Fault::new(None, "the rendezvous did not return by the deadline");
                return Err(self.life.fail_ready(fault));
            }
        }
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
