//! [`Watcher`]: asks, while a clique is in use, whether something has gone wrong with it.

use core::time::Duration;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use crate::CliqueError;
use crate::backend::{RawComm, Status};
use crate::failure::Fault;
use crate::life::{ABORT_WITHIN, Life};
use crate::owner::{LOST_COMMAND, spawn};
use crate::rounds::{Heard, LIFE};
use crate::sync::{Condvar, Deadline, Mutex, SLEEP_BLIND, lock, sleep_on};
use crate::team::Team;

/// A stop that a sleeper hears of at once.
#[derive(Debug)]
pub(crate) struct StopSignal {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl StopSignal {
    pub(crate) fn new() -> Self {
        StopSignal { stopped: Mutex::new(false), wake: Condvar::new() }
    }

    pub(crate) fn stop(&self) {
        *lock(&self.stopped) = true;
        self.wake.notify_all();
    }

    /// Sleeps until the time is over, or until it is stopped; then this is true.
    pub(crate) fn sleep(&self, until: Deadline) -> bool {
        if SLEEP_BLIND {
            let stopped = *lock(&self.stopped);
            return stopped || *sleep_on(&self.wake, lock(&self.stopped), until);
        }
        let mut stopped = lock(&self.stopped);
        while !*stopped && !until.is_over() {
            stopped = sleep_on(&self.wake, stopped, until);
        }
        *stopped
    }
}

/// The watcher's thread, from outside. Dropping it stops the thread and does not wait for it.
#[derive(Debug)]
pub(crate) struct Watcher {
    stop: Arc<StopSignal>,
    beats: Arc<AtomicU64>,
    ended: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
}

impl Watcher {
    /// Starts one for a team, which stops it in the end.
    pub(crate) fn attach(team: &Team) -> Result<(), CliqueError> {
        let mut beat = Beat::new(team);
        let watcher = Watcher::start(team.heartbeat, move || beat.again());
        *lock(&team.watcher) = Some(watcher.inspect_err(|error| team.abandon(error))?);
        Ok(())
    }

    /// Starts to ask every so often, until the answer is false. Holds nothing of the clique that its members need.
    fn start(every: Duration, mut again: impl FnMut() -> bool + Send + 'static) -> Result<Self, CliqueError> {
        let (stop, beats) = (Arc::new(StopSignal::new()), Arc::new(AtomicU64::new(0)));
        let (alive, ended) = std::sync::mpsc::sync_channel(0);
        let (stopped, counts) = (stop.clone(), beats.clone());
        spawn("clique-watcher", move || {
            let _alive = alive;
            while !stopped.sleep(Deadline::after(every)) {
                if !again() {
                    return;
                }
                counts.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        Ok(Watcher { stop, beats, ended: std::sync::Mutex::new(ended) })
    }

    /// How often it has asked.
    pub(crate) fn beats(&self) -> u64 {
        self.beats.load(Ordering::Relaxed)
    }

    /// Stops it, and waits for it a while.
    pub(crate) fn stop(&self, until: Deadline) {
        self.stop.stop();
        let ended = self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // One that does not come back ends with what it is stuck in.
        let _ = ended.recv_timeout(until.left());
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

/// How much longer than a call an answer may take: who was asked may be in a call that takes all its time.
const SLACK: Duration = Duration::from_millis(100);
/// How long an answer is waited for at once. It mostly comes at once; one that is later is heard at the next heartbeat, and
/// meanwhile a watcher that is stopped can end.
const AT_ONCE: Duration = Duration::from_millis(250);

/// What is asked at each heartbeat, and what has not been answered since an earlier one. Both are asked on other threads,
/// so that one that does not answer hides nothing of the other.
struct Beat {
    life: Arc<Life>,
    comms: Vec<(u32, RawComm)>,
    /// How long each answer is waited for before the next heartbeat.
    at_once: Duration,
    /// How long there may be no answer.
    patience: Duration,
    /// The library, by its owner.
    library: Option<Asked<Result<(), Fault>>>,
    /// The other participants, over the rendezvous.
    others: Option<Asked<Result<Option<Heard>, CliqueError>>>,
    /// Since when the rendezvous is late with its answers.
    silent_since: Option<Instant>,
}

/// A question, which is not asked again before it is answered.
struct Asked<R> {
    answer: Receiver<R>,
    since: Instant,
}

impl<R> Asked<R> {
    fn now(answer: Receiver<R>) -> Self {
        Asked { answer, since: Instant::now() }
    }
}

impl Beat {
    fn new(team: &Team) -> Self {
        let named = team.locals.iter().zip(&team.comms).map(|(local, comm)| (local.rank, *comm));
        Beat {
            life: team.life.clone(),
            comms: named.collect(),
            at_once: (team.heartbeat / 2).min(AT_ONCE),
            patience: team.call_within.saturating_add(SLACK),
            library: None,
            others: None,
            silent_since: None,
        }
    }

    /// Asks once; false if there is nothing more to ask.
    fn again(&mut self) -> bool {
        if self.life.end().is_some() {
            return false;
        }
        if self.library.is_none() {
            self.library = Some(Asked::now(self.ask_library()));
        }
        if self.others.is_none() {
            match self.life.rounds.watch(LIFE) {
                Ok(answer) => self.others = Some(Asked::now(answer)),
                // There may be a thread for it at the next heartbeat.
                Err(error) if !self.is_patient(Instant::now()) => {
                    return self.fail(Fault::new(None, error.to_string()));
                }
                Err(_) => {}
            }
        }
        self.hear_library() && self.hear_others()
    }

    /// Whether the rendezvous, which has not answered since then at least, may still be late.
    fn is_patient(&mut self, since: Instant) -> bool {
        self.silent_since.get_or_insert(since).elapsed() <= self.patience
    }

    fn fail(&self, fault: Fault) -> bool {
        self.life.fail_ready(fault);
        false
    }

    fn hear_library(&mut self) -> bool {
        let Some(Asked { answer, since }) = self.library.take() else { return true };
        match answer.recv_timeout(self.at_once) {
            Ok(Ok(())) => true,
            Ok(Err(fault)) if fault.is_taken => false,
            Ok(Err(fault)) => self.fail(fault),
            // It may be busy with a call of a member. Those that it was given before have failed by then.
            Err(RecvTimeoutError::Timeout) if since.elapsed() <= self.patience => {
                self.library = Some(Asked { answer, since });
                true
            }
            Err(RecvTimeoutError::Timeout) => {
                self.fail(Fault::new(None, format!("watching did not return after {:?}", since.elapsed())))
            }
            // If the clique has ended its word stays.
            Err(RecvTimeoutError::Disconnected) => self.fail(Fault::new(None, LOST_COMMAND)),
        }
    }

    fn ask_library(&self) -> Receiver<Result<(), Fault>> {
        let comms = self.comms.clone();
        self.life.owner.post(move |desk| {
            for (rank, comm) in comms {
                let status = desk.state(rank, comm, "watching")?;
                if status.is_error() {
                    return Err(desk.explained(rank, "watching", status, Some(comm)));
                }
                debug_assert!(status == Status::SUCCESS || status == Status::IN_PROGRESS);
            }
            Ok(())
        })
    }

    fn hear_others(&mut self) -> bool {
        let Some(Asked { answer, since }) = self.others.take() else { return true };
        match answer.recv_timeout(self.at_once) {
            Ok(Ok(Some(Heard::Failed(note)))) => {
                self.life.fail(note, Deadline::after(ABORT_WITHIN));
                false
            }
            // Who has closed waits for the others in its own way.
            Ok(Ok(Some(Heard::All(_)))) => false,
            Ok(Ok(Some(Heard::Missing(_)) | None)) => {
                self.silent_since = None;
                true
            }
            // A late answer is no loss: a packet was sent again, or the store's machine is busy.
            Ok(Err(CliqueError::Timeout { .. })) if self.is_patient(since) => true,
            Ok(Err(error)) => self.fail(lost(&error.to_string())),
            Err(RecvTimeoutError::Timeout) if since.elapsed() <= self.patience => {
                self.others = Some(Asked { answer, since });
                true
            }
            Err(RecvTimeoutError::Timeout) => self.fail(lost(&format!("no answer in {:?}", since.elapsed()))),
            Err(RecvTimeoutError::Disconnected) => self.fail(lost("it panicked")),
        }
    }
}

fn lost(seen: &str) -> Fault {
    Fault::new(None, format!("the rendezvous was lost: {seen}"))
}

#[cfg(all(test, not(loom)))]
#[path = "watcher_tests.rs"]
mod tests;
