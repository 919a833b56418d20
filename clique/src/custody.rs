//! [`Custody`]: who may touch the communicators, the owner or whoever aborts them.

use core::fmt;
use core::sync::atomic::AtomicUsize;
use std::sync::Arc;

use crate::backend::RawComm;
use crate::sync::{
    AtomicU32, Deadline, LOOK_THEN_ENTER, Mutex, Ordering, Pause, REGISTER_LATE, TAKE_AT_ONCE, lock,
};

/// The owner is inside a call.
const INSIDE: u32 = 1;
/// The communicators are somebody else's, for good.
const TAKEN: u32 = 2;

/// The communicators of a local group, and the right to call the library on them.
///
/// The owner enters for each call. Whoever aborts takes them, once: from then on the owner cannot enter, so no call
/// begins on a communicator that is being aborted.
#[derive(Debug)]
pub(crate) struct Custody {
    word: AtomicU32,
    comms: Mutex<Vec<RawComm>>,
}

/// What was taken.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) comms: Vec<RawComm>,
    /// The owner was inside a call and did not come out in time.
    pub(crate) owner_is_stuck: bool,
}

/// The owner is inside until this is dropped.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Custody);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.word.fetch_and(!INSIDE, Ordering::AcqRel);
    }
}

impl Custody {
    pub(crate) fn new() -> Self {
        Custody { word: AtomicU32::new(0), comms: Mutex::new(Vec::new()) }
    }

    /// The owner, and nobody else, before a call. `None` if the communicators were taken.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        if LOOK_THEN_ENTER {
            let word = self.word.load(Ordering::Acquire);
            self.word.fetch_or(INSIDE, Ordering::AcqRel);
            return if word == 0 { Some(Inside(self)) } else { None };
        }
        let entered = self.word.compare_exchange(0, INSIDE, Ordering::AcqRel, Ordering::Acquire);
        entered.ok().map(|_| Inside(self))
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.word.load(Ordering::Acquire) & TAKEN != 0
    }

    /// The owner adds what a call has made. Returns what nobody else will end if all was taken in the meantime.
    pub(crate) fn register(&self, made: &[RawComm]) -> Vec<RawComm> {
        let made = made.iter().copied().filter(|comm| *comm != RawComm::NULL);
        let mut comms = lock(&self.comms);
        if self.is_taken() && !REGISTER_LATE {
            return made.collect();
        }
        comms.extend(made);
        Vec::new()
    }

    /// The owner strikes out what it is about to destroy or to hand on. False if it was taken, and is not its any more.
    pub(crate) fn strike(&self, comm: RawComm) -> bool {
        let mut comms = lock(&self.comms);
        let at = comms.iter().position(|one| *one == comm);
        at.map(|at| comms.swap_remove(at)).is_some()
    }

    /// Takes the communicators away from the owner; `None` if somebody already has. Waits until the owner is outside,
    /// but no longer than `until`.
    pub(crate) fn take(&self, until: Deadline) -> Option<Taken> {
        if self.word.fetch_or(TAKEN, Ordering::AcqRel) & TAKEN != 0 {
            return None;
        }
        let mut pause = Pause::default();
        let inside = || self.word.load(Ordering::Acquire) & INSIDE != 0;
        while !TAKE_AT_ONCE && inside() && !until.is_over() {
            pause.wait();
        }
        let owner_is_stuck = !TAKE_AT_ONCE && inside();
        Some(Taken { comms: core::mem::take(&mut lock(&self.comms)), owner_is_stuck })
    }
}

/// Counts what did not come back: threads inside the library, and the communicators that they keep. Clones count
/// together.
#[derive(Clone, Default)]
pub struct Quarantine(Arc<AtomicUsize>);

/// Counts one until it is dropped.
#[derive(Debug)]
pub(crate) struct Ticket(Quarantine);

impl Quarantine {
    /// How many there are now. What comes back late is not counted any more.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    pub(crate) fn enter(&self) -> Ticket {
        self.0.fetch_add(1, Ordering::AcqRel);
        Ticket(self.clone())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in quarantine", self.count())
    }
}
