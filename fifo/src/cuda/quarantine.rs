//! [`Quarantine`]: what was dropped, kept mapped until somebody who may block frees it.

use core::any::Any;
use core::ops::{AddAssign, SubAssign};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Error;
use crate::cuda::context::Inner;
use crate::cuda::table::Handle;
use crate::cuda::vmm::{Mapping, OpenedPieces};

/// Something of the driver's that has to be given back.
pub(super) enum Resource {
    /// Memory of [`Kind::Pinned`](crate::cuda::Kind::Pinned).
    Pinned { address: u64, len_bytes: u64 },
    /// Memory of [`Kind::Legacy`](crate::cuda::Kind::Legacy).
    Legacy { address: u64, len_bytes: u64 },
    /// Memory of [`Kind::Vmm`](crate::cuda::Kind::Vmm).
    Vmm(Mapping),
    /// Memory of another process, opened by its legacy handle.
    OpenedLegacy { address: u64, len_bytes: u64 },
    /// Memory of another process, mapped piece by piece.
    OpenedPieces(OpenedPieces),
    /// The caller's host memory, page-locked by us: what keeps it.
    Registered { address: u64, len_bytes: u64, keep: Option<Arc<dyn Any + Send + Sync>> },
    /// The caller's memory: what keeps it, whose drop may call the driver.
    Imported { keep: Option<Arc<dyn Any + Send + Sync>>, len_bytes: u64 },
    /// A stream, by its handle.
    Stream(usize),
    /// Somebody else's stream: what keeps it.
    ForeignStream(Option<Arc<dyn Any + Send + Sync>>),
    /// A module, by its handle.
    Module(usize),
}

/// How much was dropped and not freed: it stays usable by kernels, and counts against the device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quarantined {
    /// Allocations, imported ones among them.
    pub allocations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Streams.
    pub streams: u64,
    /// Modules.
    pub modules: u64,
}

impl AddAssign for Quarantined {
    fn add_assign(&mut self, other: Self) {
        self.allocations += other.allocations;
        self.bytes += other.bytes;
        self.streams += other.streams;
        self.modules += other.modules;
    }
}

impl SubAssign for Quarantined {
    fn sub_assign(&mut self, other: Self) {
        self.allocations -= other.allocations;
        self.bytes -= other.bytes;
        self.streams -= other.streams;
        self.modules -= other.modules;
    }
}

impl Resource {
    fn size(&self) -> Quarantined {
        let memory = |bytes| Quarantined { allocations: 1, bytes, ..Quarantined::default() };
        match self {
            Resource::Pinned { len_bytes, .. }
            | Resource::Legacy { len_bytes, .. }
            | Resource::OpenedLegacy { len_bytes, .. }
            | Resource::Registered { len_bytes, .. }
            | Resource::Imported { len_bytes, .. } => memory(*len_bytes),
            Resource::Vmm(mapping) => memory(mapping.len_bytes),
            Resource::OpenedPieces(pieces) => memory(pieces.len_bytes),
            Resource::Stream(_) | Resource::ForeignStream(_) => {
                Quarantined { streams: 1, ..Quarantined::default() }
            }
            Resource::Module(_) => Quarantined { modules: 1, ..Quarantined::default() },
        }
    }

    /// Whether it holds a value of the caller's.
    fn keeps(&self) -> bool {
        matches!(self, Resource::Imported { .. } | Resource::Registered { .. } | Resource::ForeignStream(_))
    }

    /// Gives it back. May block. After an error it can be tried again.
    fn free(&mut self, context: &Inner) -> Result<(), Error> {
        let driver = &context.driver;
        match self {
            // SAFETY: allocated so in `memory::pinned`; its last owner is gone.
            Resource::Pinned { address, .. } => unsafe { driver.cuMemFreeHost(*address as *mut _) },
            // SAFETY: allocated so in `memory::legacy`; its last owner is gone.
            Resource::Legacy { address, .. } => unsafe { driver.cuMemFree_v2(*address) },
            Resource::Vmm(mapping) => mapping.free(driver),
            // SAFETY: opened so in `peer::open_legacy`; its last owner is gone.
            Resource::OpenedLegacy { address, .. } => unsafe { driver.cuIpcCloseMemHandle(*address) },
            Resource::OpenedPieces(pieces) => pieces.free(driver),
            Resource::Registered { address, keep, .. } => {
                // SAFETY: registered so in `peer::register_host`; its last owner is gone.
                unsafe { driver.cuMemHostUnregister(*address as *mut _) }?;
                drop(keep.take());
                Ok(())
            }
            Resource::Imported { keep, .. } | Resource::ForeignStream(keep) => {
                drop(keep.take());
                Ok(())
            }
            // SAFETY: created by `Stream::new`, whose last share is gone.
            Resource::Stream(stream) => unsafe { driver.cuStreamDestroy_v2(*stream as Handle) },
            // SAFETY: loaded by `Module::load`, whose last share, and that of its functions, is gone.
            Resource::Module(module) => unsafe { driver.cuModuleUnload(*module as Handle) },
        }
    }
}

#[derive(Default)]
struct State {
    waiting: Vec<Resource>,
    /// Of all that is waiting, and all that is being freed just now.
    total: Quarantined,
}

/// What was dropped in a context. No lock is held while the driver is called, so putting something in never waits for
/// somebody who frees.
#[derive(Default)]
pub(super) struct Quarantine {
    state: Mutex<State>,
}

impl Drop for Quarantine {
    /// What was not freed stays, with the values that keep the caller's memory: the driver still knows it.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.waiting.drain(..).for_each(core::mem::forget);
    }
}

impl Quarantine {
    pub(super) fn put(&self, resource: Resource) {
        let mut state = self.lock();
        state.total += resource.size();
        state.waiting.push(resource);
    }

    pub(super) fn total(&self) -> Quarantined {
        self.lock().total
    }

    /// See [`Context::reclaim`](crate::cuda::Context::reclaim).
    pub(super) fn reclaim(&self, context: &Inner) -> Result<Quarantined, Error> {
        let mut freed = Quarantined::default();
        loop {
            let mut taken = core::mem::take(&mut self.lock().waiting);
            if taken.is_empty() {
                return Ok(freed);
            }
            let kept = taken.iter().any(Resource::keeps);
            let result = self.free(context, &mut taken, &mut freed);
            self.lock().waiting.append(&mut taken);
            result?;
            if !kept {
                return Ok(freed);
            }
            // What the imports kept may itself have been put in just now.
        }
    }

    /// Frees what it can of `taken`; the rest stays there.
    fn free(&self, context: &Inner, taken: &mut Vec<Resource>, freed: &mut Quarantined) -> Result<(), Error> {
        let _current = context.enter()?;
        // Kernels may still use what is here, and unmapping does not wait for them.
        // SAFETY: the context is current and lives.
        unsafe { context.driver.cuCtxSynchronize() }?;
        let mut result = Ok(());
        taken.retain_mut(|resource| {
            let size = resource.size();
            let outcome = resource.free(context);
            let failed = outcome.is_err();
            if !failed {
                self.lock().total -= size;
                *freed += size;
            }
            result = core::mem::replace(&mut result, Ok(())).and(outcome);
            failed
        });
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
