//! [`Context`]: one device, ready for use.

use core::any::Any;
use core::ffi::{c_int, c_void};
use core::fmt;
use core::marker::PhantomData;
use core::ptr;
use core::time::Duration;
use std::sync::Arc;

use crate::cuda::attributes::{Attributes, Warning};
use crate::cuda::copier::Copier;
use crate::cuda::quarantine::{Quarantine, Quarantined};
use crate::cuda::table::{CAPTURE_MODE_RELAXED, Handle, NOT_READY, SUCCESS};
use crate::cuda::{Driver, Kind};
use crate::fifo::check_timeout;
use crate::sync::{Deadline, Pause};
use crate::{Error, Platform, Region};

/// A device's context: its memory, its streams and its kernels. Clones share it.
///
/// Dropping it frees nothing, as everything in [`cuda`](crate::cuda): [`close`](Self::close) does.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

/// What every object of a context shares.
pub(super) struct Inner {
    pub(super) driver: Arc<Driver>,
    /// The driver's handle, as a number so that threads may share it: a context belongs to no thread.
    raw: usize,
    pub(super) device: c_int,
    pub(super) ordinal: u32,
    pub(super) attributes: Attributes,
    warnings: Vec<Warning>,
    /// Taken by [`Context::close`].
    owner: Option<Owner>,
    pub(super) copier: Copier,
    pub(super) quarantine: Quarantine,
}

/// Who keeps the driver's context alive.
enum Owner {
    /// We do: a share of the device's primary context.
    Primary,
    /// This value does.
    Other(Arc<dyn Any + Send + Sync>),
}

impl Context {
    /// The primary context of the device with this ordinal: the one that CUDA's runtime API uses too.
    ///
    /// # Errors
    /// [`Error::Driver`], with status 101 if there is no such device; [`Error::OutOfMemory`]; [`Error::Unsupported`]
    /// if the device has not the same addresses as the processor.
    pub fn new(driver: &Arc<Driver>, ordinal: u32) -> Result<Self, Error> {
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: `device` outlives the call.
        unsafe { driver.cuDeviceGet(&mut device, number) }?;
        let mut raw: Handle = ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        unsafe { driver.cuDevicePrimaryCtxRetain(&mut raw, device) }?;
        Self::build(driver, raw, device, ordinal, Owner::Primary).inspect_err(|_| {
            // SAFETY: balances the retain above; nothing uses the context.
            let _ = unsafe { driver.cuDevicePrimaryCtxRelease_v2(device) };
        })
    }

    /// A context that somebody else has made: a `CUcontext`, kept alive by `keep`. [`close`](Self::close) drops it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Safety
    /// - `context` is a live `CUcontext` of the same driver, and stays so until `keep` is dropped.
    pub unsafe fn from_raw(
        driver: &Arc<Driver>,
        context: *mut c_void,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, Error> {
        let mut device = 0;
        {
            let _current = Current::enter(driver, context)?;
            // SAFETY: `device` outlives the call.
            unsafe { driver.cuCtxGetDevice(&mut device) }?;
        }
        for ordinal in 0..driver.device_count()? {
            let mut candidate = -1;
            // SAFETY: `candidate` outlives the call.
            unsafe { driver.cuDeviceGet(&mut candidate, ordinal as c_int) }?;
            if candidate == device {
                return Self::build(driver, context, device, ordinal, Owner::Other(keep));
            }
        }
        Err(Error::Unsupported { what: "a context whose device has no ordinal" })
    }

    fn build(
        driver: &Arc<Driver>,
        raw: Handle,
        device: c_int,
        ordinal: u32,
        owner: Owner,
    ) -> Result<Self, Error> {
        let attributes = Attributes::read(driver, device)?;
        if !attributes.unified_addressing {
            return Err(Error::Unsupported { what: "a device with addresses of its own" });
        }
        let warnings = Warning::collect(driver)?;
        let copier = {
            let _current = Current::enter(driver, raw)?;
            Copier::new(driver)?
        };
        Ok(Context {
            inner: Arc::new(Inner {
                driver: driver.clone(),
                raw: raw as usize,
                device,
                ordinal,
                attributes,
                warnings,
                owner: Some(owner),
                copier,
                quarantine: Quarantine::default(),
            }),
        })
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.inner.driver
    }

    /// The `CUcontext`.
    pub fn raw(&self) -> *mut c_void {
        self.inner.raw as *mut c_void
    }

    /// The device's ordinal, as in [`Place::Device`](crate::Place::Device).
    pub fn ordinal(&self) -> u32 {
        self.inner.ordinal
    }

    /// What the device can do.
    pub fn attributes(&self) -> &Attributes {
        &self.inner.attributes
    }

    /// What can keep a proxy from making progress in this process, as it was when the context was made.
    pub fn warnings(&self) -> &[Warning] {
        &self.inner.warnings
    }

    /// Makes the context current in this thread, for the caller's own calls of the driver, until the guard is dropped.
    /// Until then the thread's stream capture mode is *relaxed*. Guards are dropped in the reverse order.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn current(&self) -> Result<Current<'_>, Error> {
        self.inner.enter()
    }

    /// Zeroed memory of the given kind. At least 128-byte aligned.
    ///
    /// # Errors
    /// - [`Error::OutOfMemory`]; [`Error::Range`] for a length of 0 or one that the driver cannot round up;
    /// - [`Error::Unsupported`] if the device lacks that kind, or gives pinned memory another address than the
    ///   processor, and for [`Kind::Pool`], which can only be imported;
    /// - [`Error::Timeout`] if the memory could not be zeroed in the [copy timeout](Self::set_copy_timeout);
    /// - [`Error::Driver`].
    pub fn allocate(&self, kind: Kind, len_bytes: u64) -> Result<Region, Error> {
        crate::cuda::memory::allocate(&self.inner, kind, len_bytes)
    }

    /// Makes a region of memory that the caller has allocated, with whatever allocator: device memory, or page-locked
    /// host memory that the device reaches at the same address. `keep` is what keeps it allocated; it is dropped by
    /// [`reclaim`](Self::reclaim) after the last region.
    ///
    /// # Errors
    /// [`Error::Range`] if the range is empty or not mapped as a whole; [`Error::Unsupported`] for managed memory and
    /// memory of another device; [`Error::Driver`], with status 1 for an address that the driver does not know.
    ///
    /// # Safety
    /// - The range stays allocated and mapped as it is until `keep` is dropped.
    /// - Until then nothing accesses it through a Rust reference to anything but atomics.
    pub unsafe fn import_raw(
        &self,
        address: u64,
        len_bytes: u64,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Region, Error> {
        // SAFETY: the caller's promise, handed on.
        unsafe { crate::cuda::import::import(&self.inner, address, len_bytes, keep) }
    }

    /// How the memory at an address was allocated, and so how it can be exported.
    ///
    /// # Errors
    /// As [`import_raw`](Self::import_raw).
    pub fn kind(&self, address: u64) -> Result<Kind, Error> {
        crate::cuda::import::kind(&self.inner, address)
    }

    /// How long a read or write of device memory may take for each 256 KiB, and zeroing for each allocation, before it
    /// ends in [`Error::Timeout`]. 10 seconds unless told otherwise.
    ///
    /// # Errors
    /// [`Error::TimeoutRange`].
    pub fn set_copy_timeout(&self, timeout: Duration) -> Result<(), Error> {
        check_timeout(timeout)?;
        self.inner.copier.set_timeout(timeout);
        Ok(())
    }

    /// What was dropped and not freed yet.
    pub fn quarantined(&self) -> Quarantined {
        self.inner.quarantine.total()
    }

    /// Frees what is in quarantine and returns what that was. **Blocks** until the device has finished everything, and
    /// while other threads make no progress in the driver. Call it where no kernel waits for this thread.
    ///
    /// What it frees has no owner left on the host. A NIC or a peer that still has it must have been told before.
    ///
    /// # Errors
    /// [`Error::Driver`], the first of them; what could not be freed stays in quarantine.
    pub fn reclaim(&self) -> Result<Quarantined, Error> {
        self.inner.quarantine.reclaim(&self.inner)
    }

    /// [Reclaims](Self::reclaim), then releases what the context itself holds. **Blocks** likewise.
    ///
    /// # Errors
    /// - [`Error::Busy`] if a clone, or memory, a stream or a module of the context, is still there. What was in
    ///   quarantine is freed, the rest stays. Keep a clone if you mean to try again.
    /// - [`Error::Driver`], the first of them; the rest is released all the same.
    pub fn close(self) -> Result<(), Error> {
        let reclaimed = self.reclaim().map(drop);
        let shares = Arc::strong_count(&self.inner) as u64 - 1;
        let Some(mut inner) = Arc::into_inner(self.inner) else {
            return reclaimed.and(Err(Error::Busy { what: "the CUDA context", shares: shares.max(1) }));
        };
        let destroyed = inner.enter().and_then(|_current| {
            // A copy that timed out, or one that primed somebody's stream, may still be under way.
            // SAFETY: the context is current and lives.
            let finished = unsafe { inner.driver.cuCtxSynchronize() };
            finished.and(inner.copier.destroy(&inner.driver))
        });
        let released = match inner.owner.take() {
            // SAFETY: balances the retain in `new`; nothing uses the context any more.
            Some(Owner::Primary) => unsafe { inner.driver.cuDevicePrimaryCtxRelease_v2(inner.device) },
            Some(Owner::Other(keep)) => {
                drop(keep);
                Ok(())
            }
            None => Ok(()),
        };
        reclaimed.and(destroyed).and(released)
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

impl Platform for Context {
    fn host_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        self.allocate(Kind::Pinned, len_bytes)
    }

    /// Memory of [`Kind::Vmm`] where the device has it, so that every kind of peer can reach it; else of
    /// [`Kind::Legacy`].
    fn device_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        let kind = if self.inner.attributes.vmm { Kind::Vmm } else { Kind::Legacy };
        self.allocate(kind, len_bytes)
    }
}

impl Inner {
    /// Makes the context current in this thread until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Current<'_>, Error> {
        Current::enter(&self.driver, self.raw as Handle)
    }

    /// Waits until everything in a stream is done.
    ///
    /// # Safety
    /// - `stream` is a live stream of this context.
    pub(super) unsafe fn wait_stream(&self, stream: Handle, timeout: Duration) -> Result<(), Error> {
        let _current = self.enter()?;
        let deadline = Deadline::after(timeout);
        let mut pause = Pause::new();
        loop {
            // SAFETY: the stream lives, says the caller.
            match unsafe { (self.driver.table().cuStreamQuery)(stream) } {
                SUCCESS => return Ok(()),
                NOT_READY if deadline.passed() => {
                    return Err(Error::Timeout {
                        what: "the status of a stream",
                        expected: SUCCESS as u64,
                        seen: NOT_READY as u64,
                        after: timeout,
                    });
                }
                NOT_READY => pause.wait(),
                status => return self.driver.check("cuStreamQuery", status),
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What is in quarantine stays, and so does the context that it belongs to: giving it back could block.
        core::mem::forget(self.owner.take());
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context(device {}, {})", self.ordinal, self.attributes.name)
    }
}

/// While it lives, a context is current in this thread, and the thread's stream capture mode is relaxed. What was
/// before comes back when it is dropped.
#[must_use = "the context is current only while the guard lives"]
pub struct Current<'a> {
    driver: &'a Driver,
    mode: c_int,
    /// A guard belongs to its thread.
    not_send: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    fn enter(driver: &'a Driver, context: Handle) -> Result<Self, Error> {
        // SAFETY: whoever made the handle vouches that the context lives.
        unsafe { driver.cuCtxPushCurrent_v2(context) }?;
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` outlives the call.
        let exchanged = unsafe { driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
        if let Err(error) = exchanged {
            pop(driver);
            return Err(error);
        }
        Ok(Current { driver, mode, not_send: PhantomData })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        // Neither call can block, and neither leaves anything that a caller could do about a failure.
        let mut mode = self.mode;
        // SAFETY: `mode` outlives the call.
        let _ = unsafe { self.driver.cuThreadExchangeStreamCaptureMode(&mut mode) };
        pop(self.driver);
    }
}

/// Takes back the push of [`Current::enter`].
fn pop(driver: &Driver) {
    let mut popped: Handle = ptr::null_mut();
    // SAFETY: `popped` outlives the call.
    let _ = unsafe { driver.cuCtxPopCurrent_v2(&mut popped) };
}

impl fmt::Debug for Current<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Current")
    }
}
