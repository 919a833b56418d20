//! The atomics of this crate, behind a door that [loom](https://docs.rs/loom) can stand in.
//!
//! The orderings that the protocol rests on are named here, once. Built with `--cfg portway_plant="NAME"` one of
//! them is weakened on purpose: `ci/loom.sh` shows that the models then fail, so the models can fail.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::AtomicU64;
pub use core::sync::atomic::Ordering;
#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64;

/// A producer's store of the second word of a slot: whoever sees it sees the first word and all that the
/// producer did before the push.
pub(crate) const SLOT_STORE: Ordering =
    if cfg!(portway_plant = "slot_store") { Ordering::Relaxed } else { Ordering::Release };

/// The consumer's load of the second word of a slot; pairs with [`SLOT_STORE`].
pub(crate) const SLOT_LOAD: Ordering =
    if cfg!(portway_plant = "slot_load") { Ordering::Relaxed } else { Ordering::Acquire };

/// The consumer's store of the tail: whoever sees it sees what the consumer did with the triggers below it.
pub(crate) const TAIL_STORE: Ordering =
    if cfg!(portway_plant = "tail_store") { Ordering::Relaxed } else { Ordering::Release };

/// The elected reader's store of its copy of a watched word: hands on what it acquired to the other waiters.
pub(crate) const SEEN_STORE: Ordering =
    if cfg!(portway_plant = "seen_store") { Ordering::Relaxed } else { Ordering::Release };

/// A waiter's load of the elected reader's copy; pairs with [`SEEN_STORE`].
pub(crate) const SEEN_LOAD: Ordering =
    if cfg!(portway_plant = "seen_load") { Ordering::Relaxed } else { Ordering::Acquire };

/// Paces a waiting thread: spins, then yields, then sleeps 50 µs at a time, so that a thousand waiters leave the
/// processor to the one thread they wait for.
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
            _ => std::thread::sleep(core::time::Duration::from_micros(50)),
        }
        self.rounds = self.rounds.saturating_add(1);
    }

    #[cfg(loom)]
    pub(crate) fn wait(&mut self) {
        self.rounds += 1;
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
