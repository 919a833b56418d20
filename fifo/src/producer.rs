//! [`Producer`]: the kernel's end, in software.

use core::time::Duration;
use std::sync::Arc;

use crate::error::{Cause, Error};
use crate::fifo::{Shared, check_timeout, gate, tail_watch};
use crate::layout::{device, host};
use crate::memory::Words;
use crate::sync::{AtomicU64, GATE_LOAD, GATE_STORE, LAST_RECORD_STAYS, Ordering, RECORD_STORE, SLOT_STORE};
use crate::trigger::{Position, Trigger};
use crate::watch::{Unreached, Watch, timed_out};

/// Pushes triggers from the processor: plays the GPU wherever there is none, and is the reference that the device
/// header is read against. Clones push into the same FIFO.
///
/// Every call ends: with success, when the FIFO is aborted or broken, or after the timeout.
#[derive(Clone, Debug)]
pub struct Producer {
    shared: Arc<Shared>,
    device: Words,
    tail: Watch,
    timeout: Duration,
}

impl Producer {
    pub(crate) fn new(shared: Arc<Shared>, device: Words) -> Result<Self, Error> {
        let tail = tail_watch(&shared, &device)?;
        let timeout = shared.timeout;
        Ok(Producer { shared, device, tail, timeout })
    }

    /// The same producer with another timeout than the FIFO's.
    ///
    /// # Errors
    /// [`Error::TimeoutRange`].
    pub fn with_timeout(&self, timeout: Duration) -> Result<Self, Error> {
        check_timeout(timeout)?;
        Ok(Producer { timeout, ..self.clone() })
    }

    /// Pushes one trigger and returns its position. Waits while the ring is full.
    ///
    /// What the caller did before is visible to whoever handles the trigger.
    ///
    /// # Errors
    /// - [`Error::Aborted`] or [`Error::Broken`], if the FIFO was so before; nothing was taken.
    /// - [`Error::Timeout`], or [`Error::Broken`] after an abort, if the push gave up waiting. It had taken its
    ///   position, so the FIFO is broken from there on.
    #[inline]
    pub fn push(&self, trigger: Trigger) -> Result<Position, Error> {
        let position = self.take(1)?;
        self.store(position, trigger);
        Ok(position)
    }

    /// Pushes triggers to consecutive positions and returns the first. Waits for room for all of them.
    ///
    /// # Errors
    /// [`Error::BatchLength`], and those of [`push`](Self::push).
    pub fn push_batch(&self, triggers: &[Trigger]) -> Result<Position, Error> {
        let slots = self.shared.ring.slots();
        let len = triggers.len() as u64;
        if len == 0 || len > slots {
            return Err(Error::BatchLength { len: triggers.len(), slots });
        }
        let first = self.take(len)?;
        for (n, trigger) in triggers.iter().enumerate() {
            self.store(first.plus(n as u64), *trigger);
        }
        Ok(first)
    }

    /// Takes `len` positions and waits until there is room for all of them. Returns the first.
    #[inline]
    fn take(&self, len: u64) -> Result<Position, Error> {
        let closed = self.tail.gate().load(GATE_LOAD);
        if closed != 0 {
            return Err(gate::error(closed, self.shared.tail()));
        }
        let first = Position(self.device[device::HEAD].fetch_add(len, Ordering::Relaxed));
        let room = self.shared.ring.room(first.plus(len - 1));
        if self.tail.seen(room) {
            return Ok(first);
        }
        match self.tail.wait_raw(room, self.timeout) {
            Ok(()) => Ok(first),
            Err(unreached) => Err(self.give_up(unreached, first, room)),
        }
    }

    /// Publishes a trigger in its slot, for which there is room.
    #[inline]
    fn store(&self, position: Position, trigger: Trigger) {
        let word = host::SLOTS + 2 * self.shared.ring.slot(position);
        let words = trigger.stamped(self.shared.ring.parity(position));
        let slot = &self.shared.host[word..word + 2];
        slot[0].store(words[0], Ordering::Relaxed);
        slot[1].store(words[1], SLOT_STORE);
    }

    /// Waits until the consumer has handed on the trigger at `position`. What the consumer did with it, and with all
    /// before it, is then visible to the caller.
    ///
    /// # Errors
    /// [`Error::Aborted`], [`Error::Broken`] or [`Error::Timeout`]. None of them breaks the FIFO.
    pub fn sync(&self, position: Position) -> Result<(), Error> {
        let target = position.plus(1);
        self.tail.wait_raw(target, self.timeout).map_err(|unreached| match unreached {
            Unreached::Stopped(code) => gate::error(code, position),
            Unreached::TimedOut { seen } => timed_out("the tail", target, seen, self.timeout),
        })
    }

    /// Ends every wait in this FIFO; see [`Fifo::abort`](crate::Fifo::abort).
    pub fn abort(&self) {
        self.shared.abort();
    }

    /// Records that the position `first` will never be published. The first record stays, for all to read.
    #[cold]
    fn give_up(&self, unreached: Unreached, first: Position, room: Position) -> Error {
        let (mut expected, cause) = match unreached {
            Unreached::TimedOut { .. } => (0, Cause::Timeout),
            Unreached::Stopped(code) => (code, Cause::Abort),
        };
        let record = gate::broken(cause, first);
        // An abort that nobody broke the FIFO in yet gives way to the break; a break stays.
        while expected == 0 || expected == gate::ABORTED || LAST_RECORD_STAYS {
            match self.tail.gate().compare_exchange(expected, record, GATE_STORE, Ordering::Relaxed) {
                Ok(_) => {
                    self.host_record().store(record, RECORD_STORE);
                    break;
                }
                Err(now) => expected = now,
            }
        }
        match unreached {
            Unreached::TimedOut { seen } => timed_out("room in the ring", room, seen, self.timeout),
            Unreached::Stopped(_) => gate::error(self.tail.gate().load(GATE_LOAD), first),
        }
    }

    fn host_record(&self) -> &AtomicU64 {
        &self.shared.host[host::BROKEN]
    }
}
