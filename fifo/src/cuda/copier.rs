//! [`Copier`]: bytes to and from device memory, on a stream of their own and with a deadline.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::Error;
use crate::cuda::Driver;
use crate::cuda::context::Inner;
use crate::cuda::table::{Handle, MEM_HOST_ALLOC_DEVICE_MAP, MEM_HOST_ALLOC_PORTABLE, STREAM_NON_BLOCKING};
use crate::memory::{load_bytes, store_bytes};
use crate::sync::{Deadline, Pause};

/// Bytes that one step of a copy moves.
const STEP_BYTES: usize = 256 << 10;

/// Bytes of either word that [`Copier::prime`] copies; behind the staging bytes, and all of the device's.
const PRIME_BYTES: usize = 8;

/// Copies through page-locked memory, on a private stream that is ordered after no other one, so that a kernel that
/// spins holds up no copy. Everything is allocated beforehand.
pub(super) struct Copier {
    stream: usize,
    staging: u64,
    device_word: u64,
    /// Held while the staging bytes are in use; `true` if a copy timed out and may still be using them.
    busy: Mutex<bool>,
    timeout_ns: AtomicU64,
}

impl Copier {
    /// Makes one in the current context.
    pub(super) fn new(driver: &Driver) -> Result<Self, Error> {
        let mut copier = Copier {
            stream: 0,
            staging: 0,
            device_word: 0,
            busy: Mutex::new(false),
            timeout_ns: AtomicU64::new(Duration::from_secs(10).as_nanos() as u64),
        };
        match copier.allocate(driver) {
            Ok(()) => Ok(copier),
            Err(error) => {
                let _ = copier.destroy(driver);
                Err(error)
            }
        }
    }

    fn allocate(&mut self, driver: &Driver) -> Result<(), Error> {
        let mut staging: *mut c_void = ptr::null_mut();
        let flags = MEM_HOST_ALLOC_PORTABLE | MEM_HOST_ALLOC_DEVICE_MAP;
        // SAFETY: `staging` outlives the call.
        unsafe { driver.cuMemHostAlloc(&mut staging, STEP_BYTES + PRIME_BYTES, flags) }?;
        self.staging = staging as u64;
        // SAFETY: `device_word` outlives the call.
        unsafe { driver.cuMemAlloc_v2(&mut self.device_word, PRIME_BYTES) }?;
        let mut stream: Handle = ptr::null_mut();
        // SAFETY: `stream` outlives the call.
        unsafe { driver.cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) }?;
        self.stream = stream as usize;
        Ok(())
    }

    /// Gives everything back, in the current context. May block.
    pub(super) fn destroy(&self, driver: &Driver) -> Result<(), Error> {
        let mut result = Ok(());
        if self.stream != 0 {
            // SAFETY: created in `allocate`; the caller owns the copier alone.
            result = result.and(unsafe { driver.cuStreamDestroy_v2(self.stream as Handle) });
        }
        if self.device_word != 0 {
            // SAFETY: as above.
            result = result.and(unsafe { driver.cuMemFree_v2(self.device_word) });
        }
        if self.staging != 0 {
            // SAFETY: as above.
            result = result.and(unsafe { driver.cuMemFreeHost(self.staging as *mut c_void) });
        }
        result
    }

    pub(super) fn set_timeout(&self, timeout: Duration) {
        self.timeout_ns.store(timeout.as_nanos() as u64, Ordering::Relaxed);
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout_ns.load(Ordering::Relaxed))
    }

    /// Copies device memory to `into`.
    ///
    /// # Safety
    /// - The bytes from `address` on are mapped, and the device may read them.
    pub(super) unsafe fn read(&self, context: &Inner, address: u64, into: &mut [u8]) -> Result<(), Error> {
        let mut busy = self.lock(context)?;
        for (step, part) in into.chunks_mut(STEP_BYTES).enumerate() {
            let from = address + (step * STEP_BYTES) as u64;
            let to = self.staging as *mut c_void;
            self.finish(context, &mut busy, |driver, stream| {
                // SAFETY: the caller vouches for the source. The staging bytes are page-locked and long enough, and
                // while `busy` is held or `true`, nobody else uses them.
                unsafe { driver.cuMemcpyDtoHAsync_v2(to, from, part.len(), stream) }
            })?;
            // SAFETY: the staging bytes are long enough, and the copy to them has finished.
            unsafe { load_bytes(self.staging as *mut u8, part) };
        }
        Ok(())
    }

    /// Copies `from` to device memory.
    ///
    /// # Safety
    /// - The bytes from `address` on are mapped, and the device may write them.
    pub(super) unsafe fn write(&self, context: &Inner, address: u64, from: &[u8]) -> Result<(), Error> {
        let mut busy = self.lock(context)?;
        for (step, part) in from.chunks(STEP_BYTES).enumerate() {
            let to = address + (step * STEP_BYTES) as u64;
            // SAFETY: the staging bytes are long enough, and no copy uses them: `busy` is held, and not `true`.
            unsafe { store_bytes(self.staging as *mut u8, part) };
            self.finish(context, &mut busy, |driver, stream| {
                // SAFETY: the caller vouches for the destination; for the staging bytes see `read`.
                unsafe { driver.cuMemcpyHtoDAsync_v2(to, self.staging as *const c_void, part.len(), stream) }
            })?;
        }
        Ok(())
    }

    /// Zeroes device memory.
    ///
    /// # Safety
    /// - The bytes from `address` on are mapped, and the device may write them.
    pub(super) unsafe fn zero(&self, context: &Inner, address: u64, len_bytes: u64) -> Result<(), Error> {
        let mut busy = self.lock(context)?;
        self.finish(context, &mut busy, |driver, stream| {
            // SAFETY: the caller vouches for the destination.
            unsafe { driver.cuMemsetD8Async(address, 0, len_bytes as usize, stream) }
        })
    }

    /// Puts a copy of one word from the device to the host into `stream`.
    ///
    /// # Safety
    /// - `stream` is a live stream of the context, which is current.
    pub(super) unsafe fn prime(&self, driver: &Driver, stream: Handle) -> Result<(), Error> {
        let to = (self.staging + STEP_BYTES as u64) as *mut c_void;
        // SAFETY: both words belong to the copier, are used for nothing else, and live as long as the context.
        unsafe { driver.cuMemcpyDtoHAsync_v2(to, self.device_word, PRIME_BYTES, stream) }
    }

    /// Starts one step in the current context and waits until it is done.
    fn finish(
        &self,
        context: &Inner,
        busy: &mut bool,
        start: impl FnOnce(&Driver, Handle) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let stream = self.stream as Handle;
        {
            let _current = context.enter()?;
            start(&context.driver, stream)?;
        }
        *busy = true;
        self.settle(context, busy)
    }

    fn settle(&self, context: &Inner, busy: &mut bool) -> Result<(), Error> {
        // SAFETY: the stream lives as long as the copier.
        unsafe { context.wait_stream(self.stream as Handle, self.timeout()) }?;
        *busy = false;
        Ok(())
    }

    /// Waits for the staging bytes: for their holder, and for a copy that timed out before.
    fn lock(&self, context: &Inner) -> Result<MutexGuard<'_, bool>, Error> {
        let timeout = self.timeout();
        let deadline = Deadline::after(timeout);
        let mut pause = Pause::new();
        let mut busy = loop {
            match self.busy.try_lock() {
                Ok(guard) => break guard,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if deadline.passed() => {
                    return Err(Error::Timeout {
                        what: "the count of other threads that copy in the context",
                        expected: 0,
                        seen: 1,
                        after: timeout,
                    });
                }
                Err(TryLockError::WouldBlock) => pause.wait(),
            }
        };
        if *busy {
            self.settle(context, &mut busy)?;
        }
        Ok(busy)
    }
}
