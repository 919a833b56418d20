//! [`Stream`]: a queue of work on a device.

use core::any::Any;
use core::ffi::c_void;
use core::time::Duration;
use core::{fmt, ptr};
use std::sync::Arc;

use crate::Error;
use crate::cuda::context::Inner;
use crate::cuda::quarantine::Resource;
use crate::cuda::table::{Handle, NOT_READY, STREAM_NON_BLOCKING, SUCCESS};
use crate::cuda::{Context, Current};
use crate::fifo::check_timeout;

/// A stream of a context. Clones share it.
///
/// Any thread may use it; what several threads put into it at the same time is put in some order. Dropping the last
/// clone never waits: see [`cuda`](crate::cuda#what-may-block).
#[derive(Clone)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

struct StreamInner {
    context: Arc<Inner>,
    raw: usize,
    /// What keeps a stream that is not ours.
    keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Stream {
    /// A new stream that is ordered after no other one, not even the default stream (`CU_STREAM_NON_BLOCKING`).
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(context: &Context) -> Result<Self, Error> {
        let inner = context.inner();
        let _current = inner.enter()?;
        let mut raw: Handle = ptr::null_mut();
        // SAFETY: `raw` outlives the call.
        unsafe { inner.driver.cuStreamCreate(&mut raw, STREAM_NON_BLOCKING) }?;
        Ok(Self::build(context, raw, None))
    }

    /// A stream that somebody else has made: a `CUstream`, kept alive by `keep`, which [`Context::reclaim`] drops after
    /// the last clone.
    ///
    /// # Safety
    /// - `stream` is a stream of `context`, or null for the context's default stream.
    /// - It lives until `keep` is dropped.
    pub unsafe fn from_raw(context: &Context, stream: *mut c_void, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self::build(context, stream, Some(keep))
    }

    fn build(context: &Context, raw: Handle, keep: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        let context = context.inner().clone();
        Stream { inner: Arc::new(StreamInner { context, raw: raw as usize, keep }) }
    }

    /// The `CUstream`.
    pub fn raw(&self) -> *mut c_void {
        self.inner.raw as *mut c_void
    }

    /// Puts the writing of a 64-bit value into the stream. It becomes visible after everything that the stream did
    /// before.
    ///
    /// Usually takes 2–4 µs. On a [primed](Self::prime) stream that carries nothing else it returns even where a full
    /// launch queue would block it; that it never blocks is not promised, so nothing may wait for the thread that
    /// calls it.
    ///
    /// # Errors
    /// [`Error::Alignment`]; [`Error::Unsupported`] if the device or the driver cannot; [`Error::Driver`].
    ///
    /// # Safety
    /// - The device can write the eight bytes at `address`, until the stream has done so.
    /// - Nothing accesses them through a Rust reference to anything but atomics.
    pub unsafe fn write_value(&self, address: u64, value: u64) -> Result<(), Error> {
        // SAFETY: the caller vouches for the address.
        unsafe { self.enter()?.write_value(address, value) }
    }

    fn check_word(&self, address: u64) -> Result<(), Error> {
        if address % 8 != 0 {
            return Err(Error::Alignment { what: "the word that a stream writes", address, align_bytes: 8 });
        }
        if !self.inner.context.attributes.stream_write_value {
            return Err(Error::Unsupported { what: "writing a 64-bit value from a stream" });
        }
        Ok(())
    }

    /// Makes the stream's context current once, for several works in a row.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn enter(&self) -> Result<Entered<'_>, Error> {
        Ok(Entered { stream: self, _current: self.inner.context.enter()? })
    }

    /// Puts a copy of eight bytes from the device to the host into the stream. It touches nothing of the caller's.
    ///
    /// With `CUDA_DEVICE_MAX_CONNECTIONS=1` and a full launch queue, a written value blocks, unless the stream's last
    /// work was such a copy or a value written after one. So prime a stream that writes values, once, before anything
    /// waits for them, and put nothing else into it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn prime(&self) -> Result<(), Error> {
        let context = &self.inner.context;
        let _current = context.enter()?;
        // SAFETY: the stream lives while `self` does, and is one of this context, which is current.
        unsafe { context.copier.prime(&context.driver, self.raw()) }
    }

    /// Whether everything in the stream is done. Does not wait.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what work in the stream failed with.
    pub fn is_idle(&self) -> Result<bool, Error> {
        let context = &self.inner.context;
        let _current = context.enter()?;
        // SAFETY: the stream lives while `self` does.
        match unsafe { (context.driver.table().cuStreamQuery)(self.raw()) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            status => context.driver.check("cuStreamQuery", status).map(|()| true),
        }
    }

    /// Waits until everything in the stream is done, at most for `timeout`.
    ///
    /// # Errors
    /// - [`Error::Timeout`] if it is not done in time: expected status 0, seen 600 (not ready);
    /// - [`Error::TimeoutRange`];
    /// - [`Error::Driver`], also for what work in the stream failed with.
    pub fn wait(&self, timeout: Duration) -> Result<(), Error> {
        check_timeout(timeout)?;
        // SAFETY: the stream lives while `self` does.
        unsafe { self.inner.context.wait_stream(self.raw(), timeout) }
    }

    pub(super) fn context(&self) -> &Arc<Inner> {
        &self.inner.context
    }
}

/// A stream whose context is current in this thread: see [`Stream::enter`].
#[derive(Debug)]
#[must_use = "the context is current only while the guard lives"]
pub struct Entered<'a> {
    stream: &'a Stream,
    _current: Current<'a>,
}

impl Entered<'_> {
    /// Puts a copy into the stream: between memories of devices, page-locked memory and what was opened of other
    /// processes, by the addresses alone. It usually takes 4–5 µs; like every call of the driver it may block.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the driver cannot; [`Error::Driver`].
    ///
    /// # Safety
    /// - The device can read `len_bytes` from `from` and write them to `to`, until the stream has done so.
    /// - Nothing accesses either range through a Rust reference to anything but atomics.
    pub unsafe fn copy(&self, to: u64, from: u64, len_bytes: u64) -> Result<(), Error> {
        let driver = &self.stream.inner.context.driver;
        // SAFETY: the stream lives while `self` does; the caller vouches for both ranges.
        unsafe { driver.cuMemcpyAsync(to, from, len_bytes as usize, self.stream.raw()) }
    }

    /// [`Stream::write_value`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// - As there.
    pub unsafe fn write_value(&self, address: u64, value: u64) -> Result<(), Error> {
        self.stream.check_word(address)?;
        let driver = &self.stream.inner.context.driver;
        // SAFETY: the stream lives while `self` does; the caller vouches for the address.
        unsafe { driver.cuStreamWriteValue64_v2(self.stream.raw(), address, value, 0) }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        self.context.quarantine.put(match self.keep.take() {
            None => Resource::Stream(self.raw),
            Some(keep) => Resource::ForeignStream(Some(keep)),
        });
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({:#x}, device {})", self.inner.raw, self.inner.context.ordinal)
    }
}
