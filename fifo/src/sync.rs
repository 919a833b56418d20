//! The atomics of this crate, behind a door that [loom](https://docs.rs/loom) can stand in.
//!
//! The orderings that the protocol rests on are named here, once. Built with `--cfg portway_plant="NAME"`, one of
//! them is weakened on purpose, or one of two rules is broken: `ci/loom.sh` shows that some model then fails, so the
//! models can fail.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicU64;
pub use core::sync::atomic::Ordering;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64;

/// Planted: a wait gives up on what the copy says, without a look at the word itself.
pub(crate) const NO_LAST_LOOK: bool = cfg!(portway_plant = "no_last_look");
/// Planted: a later record of a break replaces the first one.
pub(crate) const LAST_RECORD_STAYS: bool = cfg!(portway_plant = "last_record_stays");

/// An ordering of the protocol, unless the plant of that name weakens it.
macro_rules! ordering {
    ($ordering:ident, $plant:literal) => {
        if cfg!(portway_plant = $plant) { Ordering::Relaxed } else { Ordering::$ordering }
    };
}

/// A producer's store of the second word of a slot: whoever sees it sees the first word and all that the
/// producer did before the push.
pub(crate) const SLOT_STORE: Ordering = ordering!(Release, "slot_store");
/// The consumer's load of the second word of a slot; pairs with [`SLOT_STORE`].
pub(crate) const SLOT_LOAD: Ordering = ordering!(Acquire, "slot_load");

/// The consumer's store of the tail: whoever sees it sees what the consumer did with the triggers below it.
pub(crate) const TAIL_STORE: Ordering = ordering!(Release, "tail_store");
/// A load of a watched word, by the elected reader or as a waiter's last look; pairs with [`TAIL_STORE`].
pub(crate) const TAIL_LOAD: Ordering = ordering!(Acquire, "tail_load");

/// The elected reader's store of its copy of a watched word: hands on what it acquired to the other waiters.
pub(crate) const SEEN_STORE: Ordering = ordering!(Release, "seen_store");
/// A waiter's load of the elected reader's copy, or of the flusher's; pairs with [`SEEN_STORE`].
pub(crate) const SEEN_LOAD: Ordering = ordering!(Acquire, "seen_load");

/// The election: whoever becomes the reader reads the watched word no older than the readers before.
pub(crate) const READER_TAKE: Ordering = ordering!(Acquire, "reader_take");
/// The end of an election; pairs with [`READER_TAKE`].
pub(crate) const READER_RETURN: Ordering = ordering!(Release, "reader_return");

/// The store of a stop word: whoever sees it sees every value that was published before.
pub(crate) const STOP_STORE: Ordering = ordering!(Release, "stop_store");
/// A load of a stop word; pairs with [`STOP_STORE`].
pub(crate) const STOP_LOAD: Ordering = ordering!(Acquire, "stop_load");

/// The step that closes a gate: hands on what its author acquired with the stop word.
pub(crate) const GATE_STORE: Ordering = ordering!(Release, "gate_store");
/// A load of a gate; pairs with [`GATE_STORE`].
pub(crate) const GATE_LOAD: Ordering = ordering!(Acquire, "gate_load");

/// A producer's store of the host's record of a break: whoever sees it sees what that producer pushed before.
pub(crate) const RECORD_STORE: Ordering = ordering!(Release, "record_store");
/// The consumer's load of that record; pairs with [`RECORD_STORE`].
pub(crate) const RECORD_LOAD: Ordering = ordering!(Acquire, "record_load");

/// Paces a waiting thread: spins, then yields, then sleeps, the longer the longer it has waited, up to 1.6 ms. So a
/// thousand waiters leave the processor to the one thread that they wait for.
pub(crate) struct Pause {
    rounds: u32,
}

impl Pause {
    pub(crate) fn new() -> Self {
        Pause { rounds: 0 }
    }

    #[cfg(not(loom))]
    pub(crate) fn wait(&mut self) {
        match self.rounds {
            0..16 => core::hint::spin_loop(),
            16..80 => std::thread::yield_now(),
            rounds => {
                let doublings = ((rounds - 80) / 16).min(5);
                std::thread::sleep(core::time::Duration::from_micros(50 << doublings));
            }
        }
        self.rounds = self.rounds.saturating_add(1);
    }

    /// In a model two waiters can take turns for ever, and loom would follow them. After a few rounds of one the rest
    /// of an execution runs in one fair order, so that it ends; what a later round could find, an earlier one does.
    #[cfg(loom)]
    pub(crate) fn wait(&mut self) {
        self.rounds += 1;
        if self.rounds > 2 {
            loom::skip_branch();
        }
        loom::thread::yield_now();
    }
}

/// The moment at which a wait gives up.
///
/// A model has no clock: there a wait of zero gives up at once and every other one only when the model ends it.
pub(crate) struct Deadline {
    #[cfg(not(loom))]
    start: std::time::Instant,
    timeout: core::time::Duration,
}

impl Deadline {
    #[cfg(not(loom))]
    pub(crate) fn after(timeout: core::time::Duration) -> Self {
        Deadline { start: std::time::Instant::now(), timeout }
    }

    #[cfg(not(loom))]
    pub(crate) fn passed(&self) -> bool {
        self.start.elapsed() >= self.timeout
    }

    #[cfg(loom)]
    pub(crate) fn after(timeout: core::time::Duration) -> Self {
        Deadline { timeout }
    }

    #[cfg(loom)]
    pub(crate) fn passed(&self) -> bool {
        self.timeout.is_zero()
    }
}
