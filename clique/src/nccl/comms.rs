//! [`Comms`]: the communicators that are alive, by the names that a clique knows them by.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::RawComm;
use crate::nccl::table::Comm;

/// Where the library writes a handle. For a child it does so in the background, at the end of a split that may take as
/// long as it likes, so the place lives on the heap, and for ever if the library has not written by the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot(&'static AtomicPtr<c_void>);

impl Slot {
    pub(super) fn new() -> Self {
        Slot(Box::leak(Box::new(AtomicPtr::new(ptr::null_mut()))))
    }

    /// For the library to write to.
    pub(super) fn pointer(self) -> *mut Comm {
        self.0.as_ptr()
    }

    /// What it has written, or null.
    pub(super) fn handle(self) -> Comm {
        self.0.load(Ordering::Acquire)
    }

    /// A name for the communicator to come: no other live one has it.
    pub(super) fn name(self) -> RawComm {
        RawComm(ptr::from_ref(self.0) as usize)
    }

    /// Gives the place back, if nothing will be written to it.
    fn free(self) {
        if !self.handle().is_null() {
            // SAFETY: made by `Box::leak` in `new`. The library writes once, which it has done; `Comms::remove` has taken
            // the only copy that anybody looks at.
            drop(unsafe { Box::from_raw(ptr::from_ref(self.0).cast_mut()) });
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    slot: Slot,
    device: u32,
    /// Of a child: whose state says whether it is made. `None` once that is known.
    parent: Option<RawComm>,
    /// A child that was aborted before the library had told its handle. It goes with its parent.
    abandoned: bool,
}

/// A communicator that was found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// Null for a child that is not made yet.
    pub(super) handle: Comm,
    pub(super) device: u32,
    pub(super) parent: Option<RawComm>,
}

#[derive(Debug, Default)]
pub(super) struct Comms(Mutex<HashMap<RawComm, Entry>>);

impl Comms {
    /// No call of the library is made under the lock.
    fn lock(&self) -> MutexGuard<'_, HashMap<RawComm, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what an initialisation has written. [`RawComm::NULL`] if that is nothing.
    pub(super) fn add(&self, slot: Slot, device: u32) -> RawComm {
        let name = RawComm(slot.handle() as usize);
        if name != RawComm::NULL {
            self.lock().insert(name, Entry { slot, device, parent: None, abandoned: false });
        }
        name
    }

    /// Takes in a child that the library may have begun to make.
    pub(super) fn add_child(&self, slot: Slot, device: u32, parent: RawComm) -> RawComm {
        self.lock().insert(slot.name(), Entry { slot, device, parent: Some(parent), abandoned: false });
        slot.name()
    }

    pub(super) fn find(&self, comm: RawComm) -> Option<Found> {
        let comms = self.lock();
        let entry = comms.get(&comm)?;
        Some(Found { handle: entry.slot.handle(), device: entry.device, parent: entry.parent })
    }

    /// A parent is not in progress any more: of its children that are made the own state counts from now on, and nobody
    /// asks the parent for their sake, which may be aborted at any time.
    pub(super) fn settle_children(&self, parent: RawComm) {
        for entry in self.lock().values_mut() {
            if entry.parent == Some(parent) && !entry.abandoned && !entry.slot.handle().is_null() {
                entry.parent = None;
            }
        }
    }

    /// Marks a child without a handle as gone. Returns whether it is one.
    pub(super) fn abandon(&self, comm: RawComm) -> bool {
        match self.lock().get_mut(&comm) {
            Some(entry) if entry.slot.handle().is_null() => {
                entry.abandoned = true;
                true
            }
            _ => false,
        }
    }

    /// Takes out the abandoned children of a parent that is gone: the handles that the library has told since.
    pub(super) fn abandoned_by(&self, parent: RawComm) -> Vec<Comm> {
        let mut handles = Vec::new();
        self.lock().retain(|_, entry| {
            let gone = entry.abandoned && entry.parent == Some(parent);
            if gone {
                handles.push(entry.slot.handle());
                entry.slot.free();
            }
            !gone
        });
        handles.retain(|handle| !handle.is_null());
        handles
    }

    /// Forgets a communicator that is destroyed or aborted.
    pub(super) fn remove(&self, comm: RawComm) {
        if let Some(entry) = self.lock().remove(&comm) {
            entry.slot.free();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }
}
