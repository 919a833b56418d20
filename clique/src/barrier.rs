//! [`Barrier`]: threads of one process meet, one of them speaks for all, and all leave with the same word.

use core::fmt;
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::CliqueError;
use crate::error::panic_message;
use crate::sync::{
    AtomicU64, Condvar, Deadline, LEAD_LOCKED, LEAVE_EARLY, LEAVE_SILENTLY, Mutex, MutexGuard, Ordering,
    Pause, WAKE_ONE, lock, sleep_on,
};

/// How long after the deadline waiters give the leader to come back with an error that says more than theirs. It has its
/// own limit, [`ABORTED_BY`](crate::life::ABORTED_BY), and is back by then, unless code of others keeps none.
const LEADER_GRACE: Duration = Duration::from_millis(90);
/// The same where they can give it more, since a barrier that breaks costs more than its delay.
const PATIENT_GRACE: Duration = Duration::from_secs(2);

/// How many passes that were called off are remembered, for those who come late.
const MAX_CALLED_OFF: usize = 64;

/// What the end of the time does to those who have come, while others have not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Late {
    /// It breaks the barrier for all, for good.
    Breaks,
    /// This pass is called off for those who came for it, and for whoever comes for it later: the purpose has to name it.
    /// The next pass is one like any other.
    CallsOff,
}

/// How somebody comes.
pub(crate) struct Arrival<'a> {
    pub(crate) seat: u32,
    pub(crate) purpose: &'a str,
    pub(crate) word: Result<(), CliqueError>,
    pub(crate) within: Duration,
    pub(crate) late: Late,
}

/// A barrier of a fixed number of seats, to be passed any number of times.
///
/// - Nobody leaves before all seats have come, not even with an error; errors are joined, the first one reaches all.
/// - The last to come leads: it alone runs what the clique has to do with others, without a lock.
/// - The first to come sets the deadline; those who come later can only shorten it. Once it is over the barrier is
///   broken for all, for good.
/// - A seat that is [left](Self::leave) breaks it too: it will not come any more. So does [`fail`](Self::fail).
pub struct Barrier<T> {
    state: Mutex<State<T>>,
    wake: Condvar,
    /// Changes whenever a waiter may go, so that it can look without the lock.
    changes: AtomicU64,
    seats: u32,
}

struct State<T> {
    epoch: u64,
    arrived: Vec<bool>,
    deadline: Option<Deadline>,
    /// How long the first to come was ready to wait.
    limit: Duration,
    /// What they came for.
    purpose: Option<String>,
    /// The first error that somebody brought.
    brought: Option<CliqueError>,
    leading: bool,
    /// Whether the end of the time breaks it: one of those who have come cannot come again.
    breaks: bool,
    /// The word of the epoch before, for those who have not read it yet, and how many they are.
    word: Option<Result<T, CliqueError>>,
    unread: u32,
    broken: Option<CliqueError>,
    /// The last passes that were called off, and why, and how many there have been.
    called_off: Vec<(String, CliqueError)>,
    times_called_off: u64,
    asleep: u32,
}

impl<T> fmt::Debug for Barrier<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a barrier of {} seats", self.seats)
    }
}

impl<T: Clone> Barrier<T> {
    /// A barrier that nobody has come to yet.
    pub fn new(seats: u32) -> Self {
        let state = State {
            epoch: 0,
            arrived: vec![false; seats as usize],
            deadline: None,
            limit: Duration::ZERO,
            purpose: None,
            brought: None,
            leading: false,
            breaks: false,
            word: None,
            unread: 0,
            broken: None,
            called_off: Vec::new(),
            times_called_off: 0,
            asleep: 0,
        };
        Barrier { state: Mutex::new(state), wake: Condvar::new(), changes: AtomicU64::new(0), seats }
    }

    /// Comes to the barrier with a word, and leaves it with everybody's.
    ///
    /// `lead` runs for the last to come, with the joined word, and its result is what all leave with. It has to end by
    /// the deadline itself.
    ///
    /// # Errors
    /// - The first error that somebody brought, or `lead`'s.
    /// - [`CliqueError::Timeout`] when the time is over; it names the seats that did not come.
    /// - [`CliqueError::Config`], for all, if they came for different purposes: the first one's counts.
    /// - [`CliqueError::Crowded`] for a seat that does not exist or has already come; nobody else notices.
    /// - [`CliqueError::Left`] once a seat was left; [`CliqueError::Panicked`] if `lead` panicked.
    pub fn arrive(
        &self,
        seat: u32,
        purpose: &str,
        word: Result<(), CliqueError>,
        within: Duration,
        lead: impl FnOnce(Result<(), CliqueError>) -> Result<T, CliqueError>,
    ) -> Result<T, CliqueError> {
        self.meet(Arrival { seat, purpose, word, within, late: Late::Breaks }, |word, _| lead(word))
    }

    /// The same; `lead` is told the deadline that the first to come has set, and what the end of the time does is said.
    pub(crate) fn meet(
        &self,
        arrival: Arrival<'_>,
        lead: impl FnOnce(Result<(), CliqueError>, Deadline) -> Result<T, CliqueError>,
    ) -> Result<T, CliqueError> {
        let Arrival { seat, purpose, word, within, late } = arrival;
        if LEAVE_EARLY {
            word.clone()?;
        }
        let mut state = lock(&self.state);
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        if let Some((_, why)) = state.called_off.iter().find(|(called_off, _)| called_off == purpose) {
            return Err(why.clone());
        }
        let expected = state.purpose.clone().unwrap_or_else(|| purpose.to_owned());
        match state.arrived.get_mut(seat as usize) {
            Some(arrived) if !*arrived => *arrived = true,
            _ => {
                let come = state.come();
                return Err(CliqueError::Crowded { seat, seats: self.seats, purpose: expected, come });
            }
        }
        state.purpose.get_or_insert_with(|| purpose.to_owned());
        let word = word.and_then(|()| {
            if expected == purpose {
                return Ok(());
            }
            Err(CliqueError::Config {
                what: format!("what local seat {seat} came to the barrier for"),
                expected: expected.clone(),
                seen: purpose.to_owned(),
            })
        });
        if let Err(error) = word {
            state.brought.get_or_insert(error);
        }
        let deadline = Deadline::after(within);
        state.limit = state.deadline.map_or(within, |_| state.limit);
        let deadline = state.deadline.map_or(deadline, |first| first.earlier(deadline));
        state.deadline = Some(deadline);
        state.breaks |= late == Late::Breaks;
        if deadline.is_over() && !state.breaks {
            // Also for the last to come: those who sleep may not have seen yet that the time is over.
            let error = state.timeout(self.seats);
            state.call_off(&error);
            self.wake_all(&state);
            return Err(error);
        }
        if state.arrived.iter().all(|arrived| *arrived) {
            self.lead(state, |word| lead(word, deadline))
        } else {
            self.wait(state)
        }
    }

    /// Whether it is broken for good.
    pub(crate) fn is_broken(&self) -> bool {
        lock(&self.state).broken.is_some()
    }

    /// Says that a seat will never come again. Who waits for it, or comes later, gets [`CliqueError::Left`].
    pub fn leave(&self, seat: u32) {
        self.fail(&CliqueError::Left { seat });
    }

    /// Breaks the barrier, for good. Who waits, or comes later, gets the error of the first break.
    pub fn fail(&self, error: &CliqueError) {
        let mut state = lock(&self.state);
        if state.broken.is_none() {
            state.broken = Some(error.clone());
            if !LEAVE_SILENTLY {
                self.wake_all(&state);
            }
        }
    }

    fn lead<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<T>>,
        lead: impl FnOnce(Result<(), CliqueError>) -> Result<T, CliqueError>,
    ) -> Result<T, CliqueError> {
        let joined = state.brought.take().map_or(Ok(()), Err);
        state.leading = true;
        let kept = if LEAD_LOCKED {
            Some(state)
        } else {
            drop(state);
            None
        };
        let led = catch_unwind(AssertUnwindSafe(|| lead(joined)));
        let mut state = kept.unwrap_or_else(|| lock(&self.state));
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        let word = led.unwrap_or_else(|panic| {
            let error = CliqueError::Panicked {
                what: "the leader of a barrier".to_owned(),
                message: panic_message(&*panic),
            };
            Err(error)
        });
        state.leading = false;
        state.begin_next();
        state.unread = self.seats - 1;
        state.word = (state.unread > 0).then(|| word.clone());
        self.wake_all(&state);
        word
    }

    fn wait<'a>(&'a self, mut state: MutexGuard<'a, State<T>>) -> Result<T, CliqueError> {
        let (epoch, called_off) = (state.epoch, state.times_called_off);
        let mut pause = Pause::default();
        loop {
            if state.epoch != epoch {
                // Nobody can complete another epoch before this seat has come again.
                state.unread -= 1;
                let word = if state.unread == 0 { state.word.take() } else { state.word.clone() };
                return word.unwrap_or_else(|| Err(state.timeout(self.seats)));
            }
            if state.times_called_off != called_off {
                let why = state.called_off.last().map(|(_, why)| why.clone());
                return Err(why.unwrap_or_else(|| state.timeout(self.seats)));
            }
            if let Some(broken) = &state.broken {
                return Err(broken.clone());
            }
            let deadline = state.deadline.unwrap_or_else(|| Deadline::after(Duration::ZERO));
            let grace = if state.breaks { LEADER_GRACE } else { PATIENT_GRACE };
            let deadline = if state.leading { deadline.plus(grace) } else { deadline };
            if deadline.is_over() {
                let error = state.timeout(self.seats);
                if !state.breaks && !state.leading {
                    state.call_off(&error);
                } else {
                    state.broken = Some(error.clone());
                }
                self.wake_all(&state);
                return Err(error);
            }
            if pause.is_short() && !cfg!(loom) {
                let changes = self.changes.load(Ordering::Acquire);
                drop(state);
                while pause.is_short() && self.changes.load(Ordering::Acquire) == changes {
                    pause.wait();
                }
                state = lock(&self.state);
            } else {
                state.asleep += 1;
                state = sleep_on(&self.wake, state, deadline);
                state.asleep -= 1;
            }
        }
    }

    /// Called with the lock, which the reference stands for.
    fn wake_all(&self, state: &State<T>) {
        self.changes.fetch_add(1, Ordering::Release);
        if WAKE_ONE {
            self.wake.notify_one();
        } else if state.asleep > 0 {
            self.wake.notify_all();
        }
    }
}

impl<T> State<T> {
    fn begin_next(&mut self) {
        self.epoch += 1;
        self.forget_arrivals();
    }

    fn call_off(&mut self, why: &CliqueError) {
        self.times_called_off += 1;
        if self.called_off.len() == MAX_CALLED_OFF {
            self.called_off.remove(0);
        }
        self.called_off.extend(self.purpose.take().map(|purpose| (purpose, why.clone())));
        self.brought = None;
        self.forget_arrivals();
    }

    fn forget_arrivals(&mut self) {
        self.arrived.fill(false);
        self.breaks = false;
        self.deadline = None;
        self.purpose = None;
    }

    /// The seats that have come.
    fn come(&self) -> Vec<u32> {
        (0..).zip(&self.arrived).filter(|(_, arrived)| **arrived).map(|(seat, _)| seat).collect()
    }

    fn timeout(&self, seats: u32) -> CliqueError {
        let purpose = self.purpose.as_deref().unwrap_or("a barrier");
        let seen = if self.leading {
            "all of them, and no answer from the others of the clique".to_owned()
        } else {
            format!("{:?}", self.come())
        };
        CliqueError::Timeout {
            what: format!("the barrier for {purpose}"),
            expected: format!("the local seats below {seats}"),
            seen,
            waited: self.limit,
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "barrier_tests.rs"]
mod tests;
