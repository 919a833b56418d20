//! [`Consumer`]: the host's end.

use core::ops::ControlFlow;
use std::sync::Arc;

use crate::Error;
use crate::fifo::{Shared, gate};
use crate::layout::host;
use crate::sync::{AtomicU64, Ordering, RECORD_LOAD, SLOT_LOAD, STOP_LOAD, TAIL_STORE};
use crate::trigger::{Position, Ring, Trigger};

/// Takes triggers out of a FIFO, one thread at a time, and tells producers how far it has come.
///
/// Nothing here waits, allocates, locks or calls the system. A trigger is *taken* by [`advance`](Self::advance) (or
/// [`drain`](Self::drain)) and its slot is free for producers after the next [`publish`](Self::publish): once a
/// batch, so that the tail's line travels once a batch.
#[derive(Debug)]
pub struct Consumer {
    shared: Arc<Shared>,
    next: Position,
    published: Position,
}

impl Consumer {
    pub(crate) fn new(shared: Arc<Shared>, start: Position) -> Self {
        Consumer { shared, next: start, published: start }
    }

    /// The next trigger, if it has been pushed. It stays until [`advance`](Self::advance).
    #[inline]
    pub fn peek(&self) -> Option<Trigger> {
        look(&self.shared.host, self.shared.ring, self.next)
    }

    /// Takes the trigger that [`peek`](Self::peek) showed. If it showed none, the one pushed here later is lost.
    #[inline]
    pub fn advance(&mut self) {
        self.next = self.next.plus(1);
    }

    /// Where the next trigger will stand.
    #[inline]
    pub fn position(&self) -> Position {
        self.next
    }

    /// Tells producers about every trigger taken so far: frees the slots and lets `sync` return. Stores only if there
    /// is something new, and returns whether there was.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.published == self.next {
            return false;
        }
        self.published = self.next;
        self.shared.host[host::TAIL].store(self.next.0, TAIL_STORE);
        true
    }

    /// Takes what is there, at most `max` triggers, hands each one on with its position, and publishes once.
    #[inline]
    pub fn drain(&mut self, max: usize, mut each: impl FnMut(Position, Trigger)) -> usize {
        let taken = self.take(max, |position, trigger| {
            each(position, trigger);
            ControlFlow::Continue(())
        });
        self.publish();
        taken
    }

    /// Hands what is there to `each`, at most `max` triggers, until it breaks off: with true if it has taken that trigger
    /// too, with false if the trigger is to stay. Returns how many were taken; publishes nothing.
    #[inline]
    pub fn take(
        &mut self,
        max: usize,
        mut each: impl FnMut(Position, Trigger) -> ControlFlow<bool>,
    ) -> usize {
        // Held here: after an acquiring load the compiler would fetch them anew.
        let (host, ring): (&[AtomicU64], _) = (&self.shared.host, self.shared.ring);
        let mut taken = 0;
        while taken < max {
            let Some(trigger) = look(host, ring, self.next) else { break };
            let flow = each(self.next, trigger);
            if flow == ControlFlow::Break(false) {
                break;
            }
            self.next = self.next.plus(1);
            taken += 1;
            if flow.is_break() {
                break;
            }
        }
        taken
    }

    /// Why no more triggers will come, if so: [`Error::Aborted`] or [`Error::Broken`].
    ///
    /// Triggers from before that may still be there: whoever asks first and then drains misses none that the thread
    /// which aborted or broke the FIFO had pushed before. Do not wait for any: the position on record is the first
    /// that was given up, and another push at a lower position may have given up after it.
    #[inline]
    pub fn closed(&self) -> Option<Error> {
        let broken = self.shared.host[host::BROKEN].load(RECORD_LOAD);
        if broken != 0 {
            return Some(gate::error(broken, self.next));
        }
        if self.shared.host[host::ABORT].load(STOP_LOAD) != 0 {
            return Some(Error::Aborted);
        }
        None
    }
}

/// The trigger at a position, if it is there.
#[inline]
fn look(host: &[AtomicU64], ring: Ring, position: Position) -> Option<Trigger> {
    let word = host::SLOTS + 2 * ring.slot(position);
    let slot = host.get(word..word + 2)?;
    // The second word's release store covers the first word and the producer's payload. The first word is still
    // checked, since a device may make the two visible in either order.
    let second = slot[1].load(SLOT_LOAD);
    let first = slot[0].load(Ordering::Relaxed);
    Trigger::unstamp([first, second], ring.parity(position))
}

#[cfg(not(loom))]
impl Consumer {
    /// Opens an aborted or broken FIFO again. Triggers that were not taken are dropped; positions go on where the
    /// producers stopped and never rewind, so nothing that was kept from before can be mistaken for something new. A
    /// [`sync`](crate::Producer::sync) of a position from before returns at once, whatever became of its trigger.
    ///
    /// Call it when no kernel and no thread is inside a call on the FIFO: abort, and let them return. What one that
    /// still is pushes may be lost or delivered out of its order; memory stays safe.
    ///
    /// # Errors
    /// The device memory's.
    pub fn reset(&mut self) -> Result<(), Error> {
        let start = self.shared.reset()?;
        self.next = start;
        self.published = start;
        Ok(())
    }
}
