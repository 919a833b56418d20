//! Locks, atomics and time of this crate, behind a door that [loom](https://docs.rs/loom) can stand in.
//!
//! Built with `--cfg portway_plant="NAME"`, one rule that the threads rest on is broken on purpose: `ci/loom.sh` shows
//! that some model then fails, so the models can fail.

use core::time::Duration;

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Planted: whoever completes the barrier wakes one waiter instead of all.
pub(crate) const WAKE_ONE: bool = cfg!(portway_plant = "clique_wake_one");
/// Planted: who has an error leaves the barrier at once.
pub(crate) const LEAVE_EARLY: bool = cfg!(portway_plant = "clique_leave_early");
/// Planted: somebody who leaves for good tells nobody.
pub(crate) const LEAVE_SILENTLY: bool = cfg!(portway_plant = "clique_leave_silently");
/// Planted: the leader does the exchange under the barrier's lock.
pub(crate) const LEAD_LOCKED: bool = cfg!(portway_plant = "clique_lead_locked");
/// Planted: the owner looks whether its communicators were taken, and then goes in, in two steps.
pub(crate) const LOOK_THEN_ENTER: bool = cfg!(portway_plant = "clique_look_then_enter");
/// Planted: whoever takes the communicators does not wait for the owner to come out.
pub(crate) const TAKE_AT_ONCE: bool = cfg!(portway_plant = "clique_take_at_once");
/// Planted: communicators that are made after the rest was taken are kept.
pub(crate) const REGISTER_LATE: bool = cfg!(portway_plant = "clique_register_late");
/// Planted: a command can be left behind by an owner that has ended.
pub(crate) const POST_TO_NOBODY: bool = cfg!(portway_plant = "clique_post_to_nobody");
/// Planted: the watcher looks for a stop before it takes the lock that it sleeps with.
pub(crate) const SLEEP_BLIND: bool = cfg!(portway_plant = "clique_sleep_blind");
/// Planted: a later failure replaces the first one.
pub(crate) const LAST_FAILURE_STAYS: bool = cfg!(portway_plant = "clique_last_failure_stays");

/// Takes a lock. No code of a caller runs under any lock of this crate, and what they guard is whole between
/// statements, so a thread that panicked elsewhere has left it usable.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Sleeps until woken or the time is over. Wakes for nothing at times, too.
pub(crate) fn sleep_on<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    until: Deadline,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, until.left()).unwrap_or_else(|poisoned| poisoned.into_inner()).0
}

/// The moment at which a wait gives up.
///
/// A model has no clock: there a wait of zero gives up at once, and every other one never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    #[cfg(not(loom))]
    at: std::time::Instant,
    #[cfg(loom)]
    is_over: bool,
}

/// The longest time that anything waits: a year.
#[cfg(not(loom))]
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

#[cfg(not(loom))]
impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        Deadline { at: std::time::Instant::now() + time.min(LONGEST) }
    }

    pub(crate) fn plus(self, time: Duration) -> Self {
        Deadline { at: self.at + time.min(LONGEST) }
    }

    pub(crate) fn left(self) -> Duration {
        self.at.saturating_duration_since(std::time::Instant::now())
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    pub(crate) fn earlier(self, other: Self) -> Self {
        Deadline { at: self.at.min(other.at) }
    }
}

#[cfg(loom)]
impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        Deadline { is_over: time.is_zero() }
    }

    pub(crate) fn plus(self, _time: Duration) -> Self {
        self
    }

    pub(crate) fn left(self) -> Duration {
        Duration::from_secs(u64::from(!self.is_over))
    }

    pub(crate) fn is_over(self) -> bool {
        self.is_over
    }

    pub(crate) fn earlier(self, other: Self) -> Self {
        Deadline { is_over: self.is_over || other.is_over }
    }
}

/// Paces a thread that polls: spins, then yields, then sleeps, up to 200 µs at a time.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    rounds: u32,
}

impl Pause {
    #[cfg(not(loom))]
    pub(crate) fn wait(&mut self) {
        match self.rounds {
            0..16 => core::hint::spin_loop(),
            16..48 => std::thread::yield_now(),
            rounds => std::thread::sleep(Duration::from_micros(25 << ((rounds - 48) / 16).min(3))),
        }
        self.rounds = self.rounds.saturating_add(1);
    }

    #[cfg(loom)]
    pub(crate) fn wait(&mut self) {
        self.rounds += 1;
        if self.rounds > 2 {
            loom::skip_branch();
        }
        loom::thread::yield_now();
    }

    /// Whether it is still worth a processor's time to look again at once.
    pub(crate) fn is_short(&self) -> bool {
        self.rounds < 48
    }
}
