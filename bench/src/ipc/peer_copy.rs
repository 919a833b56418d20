//! [`PeerCopy`]: the driver's own copy between two devices, which a program without portway would call.

use std::ffi::{c_int, c_void};

use libloading::Library;
use portway_fifo::Error;
use portway_fifo::cuda::{Context, Stream};

const LIBRARY: &str = "libcuda.so.1";
const FUNCTION: &str = "cuMemcpyPeerAsync";

/// Addresses are the device's own; contexts and stream are handles of the driver.
type Function = unsafe extern "C" fn(u64, *mut c_void, u64, *mut c_void, usize, *mut c_void) -> c_int;

/// See the [module](self).
pub struct PeerCopy {
    function: Function,
    _library: Library,
}

impl PeerCopy {
    /// Finds it in the driver.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::MissingFunction`].
    pub fn load() -> Result<Self, Error> {
        let missing = |error: libloading::Error| Error::NoLibrary {
            library: LIBRARY.into(),
            reason: error.to_string(),
        };
        // SAFETY: the driver is loaded already, through the same name: nothing is initialised anew.
        let library = unsafe { Library::new(LIBRARY) }.map_err(missing)?;
        // SAFETY: the type is that of the driver's function of this name.
        let function = unsafe { library.get::<Function>(FUNCTION.as_bytes()) }
            .map(|symbol| *symbol)
            .map_err(|_| Error::MissingFunction { library: LIBRARY.into(), function: FUNCTION })?;
        Ok(PeerCopy { function, _library: library })
    }

    /// Puts a copy into a stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// - `from` has `len_bytes` in memory of its context's device, and `to` in that of its own, until the stream has
    ///   copied them.
    /// - Nothing accesses either range through a Rust reference to anything but atomics.
    pub unsafe fn put(
        &self,
        to: (u64, &Context),
        from: (u64, &Context),
        len_bytes: u64,
        stream: &Stream,
    ) -> Result<(), Error> {
        let ((to, theirs), (from, ours)) = (to, from);
        // SAFETY: contexts and stream live through the call; the caller vouches for the ranges.
        match unsafe { (self.function)(to, theirs.raw(), from, ours.raw(), len_bytes as usize, stream.raw()) }
        {
            0 => Ok(()),
            status => Err(Error::Driver { call: FUNCTION, status, name: "unknown".into() }),
        }
    }
}
