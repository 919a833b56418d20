//! [`Life`]: what the threads of a clique share, and how it ends for all of them at once.

use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, OnceLock};

use crate::CliqueError;
use crate::backend::{Backend, RawComm};
use crate::barrier::Barrier;
use crate::custody::Quarantine;
use crate::failure::{Failure, Fault};
use crate::message::Note;
use crate::owner::{Owner, spawn};
use crate::rendezvous::Post;
use crate::rounds::{LIFE, Rounds};
use crate::state::Phase;
use crate::sync::{Deadline, LAST_FAILURE_STAYS, Mutex, lock};
use crate::team::Word;
use crate::watcher::StopSignal;

/// Until how long after a deadline a rendezvous may still bring what it knows.
///
/// This and the next two are moments, all counted from the deadline, and not pauses that add up: whatever hangs, a call
/// returns [`ABORTED_BY`] after its deadline, which leaves a busy machine 20 ms of the promised 100.
pub(crate) const HEARD_BY: Duration = Duration::from_millis(35);
/// Until when the others are told of a failure, and an earlier one of theirs is heard.
pub(crate) const TOLD_BY: Duration = Duration::from_millis(50);
/// Until when aborts are waited for; what has not returned then is in quarantine.
pub(crate) const ABORTED_BY: Duration = Duration::from_millis(80);
/// How long the others are told of a failure where no deadline is near.
pub(crate) const TELL_WITHIN: Duration = Duration::from_millis(200);
/// How long an abort is waited for where no deadline is near. NCCL's own took 0.86 to 0.98 s for one used communicator on
/// an H200; a healthy one is not to be taken for one that hangs, also with more of them.
pub(crate) const ABORT_WITHIN: Duration = Duration::from_secs(3);
/// How long an owner that is inside a call is waited for there: half of it to come out before the aborts begin, the rest
/// to end after them.
const OWNER_WITHIN: Duration = Duration::from_secs(1);

/// Until when the others are told of something, where there is a deadline.
pub(crate) fn told_by(deadline: Deadline) -> Deadline {
    Deadline::after(TELL_WITHIN).earlier(deadline.plus(TOLD_BY))
}

/// The first of several ends.
#[derive(Debug, Default)]
pub(crate) struct First<T>(Mutex<Option<T>>);

impl<T: Clone> First<T> {
    pub(crate) fn new() -> Self {
        First(Mutex::new(None))
    }

    /// The first that was set, and whether it is this one.
    pub(crate) fn set(&self, value: T) -> (T, bool) {
        let mut first = lock(&self.0);
        if let Some(first) = first.as_ref().filter(|_| !LAST_FAILURE_STAYS) {
            return (first.clone(), false);
        }
        *first = Some(value.clone());
        (value, true)
    }

    pub(crate) fn get(&self) -> Option<T> {
        lock(&self.0).clone()
    }
}

/// A local group of communicators, and its end.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) owner: Owner,
    pub(crate) rounds: Rounds,
    /// This participant, `host:pid`.
    pub(crate) process: String,
    pub(crate) quarantine: Quarantine,
    /// What the participants have in the variables that name what a host has, once it is known.
    pub(crate) hardware: OnceLock<Vec<String>>,
    /// Where the members meet; broken with the clique.
    pub(crate) barrier: Barrier<Word>,
    end: First<CliqueError>,
    /// Set once its communicators are gone, or in quarantine.
    gone: StopSignal,
}

impl Life {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        rounds: Rounds,
        process: String,
        seats: usize,
    ) -> Result<Self, CliqueError> {
        let owner = Owner::start(backend.clone())?;
        let quarantine = Quarantine::default();
        let barrier = Barrier::new(seats as u32);
        Ok(Life {
            backend,
            owner,
            rounds,
            process,
            quarantine,
            hardware: OnceLock::new(),
            barrier,
            end: First::new(),
            gone: StopSignal::new(),
        })
    }

    /// Why it can not be used any more.
    pub(crate) fn end(&self) -> Option<CliqueError> {
        self.end.get()
    }

    /// Fails if it cannot be used any more.
    pub(crate) fn check(&self) -> Result<(), CliqueError> {
        self.end().map_or(Ok(()), Err)
    }

    /// A note as the caller gets it.
    pub(crate) fn failure(&self, note: Note) -> Failure {
        Failure {
            clique: self.rounds.clique.clone(),
            attempt: self.rounds.attempt,
            phase: note.phase,
            rank: note.rank,
            process: note.process,
            status: note.status,
            cause: note.cause,
            missing: note.missing,
            hardware: self.hardware.get().cloned().unwrap_or_default(),
            quarantine: self.quarantine.clone(),
        }
    }

    /// Ends it with this failure, unless it has ended before. Returns why it ended; all communicators are aborted then,
    /// or in quarantine, unless another thread is at it.
    pub(crate) fn fail(&self, note: Note, deadline: Deadline) -> CliqueError {
        self.finish(CliqueError::Failed(Arc::new(self.failure(note))), deadline)
    }

    /// Ends it with this word, and aborts what there is.
    pub(crate) fn finish(&self, how: CliqueError, deadline: Deadline) -> CliqueError {
        self.finish_and_tell(how, None, deadline)
    }

    /// The same, telling the other participants. The word is set first, so that the own watcher does not take what the
    /// others are told for news.
    pub(crate) fn finish_and_tell(
        &self,
        how: CliqueError,
        told: Option<&Note>,
        deadline: Deadline,
    ) -> CliqueError {
        let (first, is_this) = self.end.set(how);
        if is_this {
            self.barrier.fail(&first);
            told.into_iter().for_each(|note| self.tell(note, deadline));
            self.abort(deadline);
        }
        first
    }

    /// Lets the end be known without an abort.
    ///
    /// # Errors
    /// It had ended already; the reason.
    pub(crate) fn begin_end(&self, how: CliqueError) -> Result<(), CliqueError> {
        match self.end.set(how) {
            (_, true) => Ok(()),
            (first, false) => Err(first),
        }
    }

    /// Ends it while it is used, telling the other participants.
    pub(crate) fn fail_ready(&self, fault: Fault) -> CliqueError {
        let note = fault.note(Phase::Ready, &self.process);
        let failed = CliqueError::Failed(Arc::new(self.failure(note.clone())));
        self.finish_and_tell(failed, Some(&note), Deadline::after(ABORT_WITHIN))
    }

    /// Ends it by the will of this participant, telling the others what it did.
    pub(crate) fn end_by_itself(&self, how: &'static str, what: &str) {
        let note = Fault::new(None, what).note(Phase::Ready, &self.process);
        let ended = CliqueError::Ended { clique: self.rounds.clique.clone(), how };
        self.finish_and_tell(ended, Some(&note), Deadline::after(ABORT_WITHIN));
        self.wait_until_gone();
    }

    /// Tells the other participants that this one has ended.
    pub(crate) fn tell(&self, note: &Note, deadline: Deadline) {
        // They are told once, of the first failure; where they cannot be told, their own deadlines end their waits.
        let _ = self.rounds.post(LIFE, Post::Failed(note.encode()), told_by(deadline));
    }

    /// Waits until its communicators are gone, or in quarantine, if it has ended: another thread may be at it.
    pub(crate) fn wait_until_gone(&self) {
        if self.end().is_some() {
            self.gone.sleep(Deadline::after(ABORT_WITHIN + ABORTED_BY));
        }
    }

    /// Says that its communicators are gone.
    pub(crate) fn set_gone(&self) {
        self.gone.stop();
    }

    /// Aborts all communicators together. Returns within [`ABORT_WITHIN`], and [`ABORTED_BY`] after `deadline`.
    pub(crate) fn abort(&self, deadline: Deadline) {
        let until = Deadline::after(ABORT_WITHIN).earlier(deadline.plus(ABORTED_BY));
        let owner_until = Deadline::after(OWNER_WITHIN).earlier(until);
        // An owner that is stuck leaves half of the time, or more, to the aborts.
        let half = Deadline::after(owner_until.left() / 2);
        self.owner.close();
        let Some(taken) = self.owner.custody.take(half) else { return };
        abort_together(&self.backend, taken.comms, &self.quarantine, until);
        if taken.owner_is_stuck && !self.owner.has_ended(owner_until) {
            self.owner.quarantine(self.quarantine.enter());
        }
        self.set_gone();
    }

    /// Waits for the answer of a call.
    pub(crate) fn answer(
        &self,
        answer: &Receiver<Result<(), Fault>>,
        call: &str,
        rank: Option<u32>,
        within: Duration,
    ) -> Result<(), CliqueError> {
        let fault = match answer.recv_timeout(within) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(fault)) if fault.is_taken => return Err(self.ended()),
            Ok(Err(fault)) => fault,
            Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
            Err(RecvTimeoutError::Timeout) => {
                Fault::new(rank, format!("{call} did not return, or was still in progress, after {within:?}"))
            }
        };
        Err(self.fail_ready(fault))
    }

    /// The word for a call that was dropped: the clique has ended, or what was called panicked.
    pub(crate) fn ended(&self) -> CliqueError {
        self.end().unwrap_or_else(|| CliqueError::Panicked {
            what: "a call on the owner's thread".to_owned(),
            message: "it did not answer".to_owned(),
        })
    }
}

/// Aborts each communicator on a thread of its own, all at once. What has not come back by `until` stays in quarantine
/// until it does.
pub(crate) fn abort_together(
    backend: &Arc<dyn Backend>,
    comms: Vec<RawComm>,
    quarantine: &Quarantine,
    until: Deadline,
) {
    let (alive, all_back) = sync_channel::<()>(0);
    for comm in comms {
        let (backend, ticket, alive) = (backend.clone(), quarantine.enter(), alive.clone());
        let spawned = spawn("clique-abort", move || {
            // SAFETY: the communicator was made by this library for a group whose custody was taken, once: it is neither
            // destroyed nor aborted, and the owner begins no call on it any more.
            let abort = || unsafe { backend.abort(comm) };
            // Whatever it answers, the communicator is gone.
            let _ = catch_unwind(AssertUnwindSafe(abort));
            drop(ticket);
            drop(alive);
        });
        if spawned.is_err() {
            // Nobody aborts it: it stays counted.
            core::mem::forget(quarantine.enter());
        }
    }
    drop(alive);
    // Nothing is ever sent: the channel ends when the last thread has.
    let _ = all_back.recv_timeout(until.left());
}
