//! [`Driver`]: the CUDA driver, opened when first used.

use core::ffi::{CStr, c_char, c_int};
use core::fmt;
use core::ptr;
use std::sync::Arc;

use libloading::Library;

use crate::Error;
use crate::cuda::table::{SUCCESS, Status, Table};

/// The name that every CUDA driver installs its library under.
const LIBRARY: &str = "libcuda.so.1";

/// The CUDA driver of this machine.
///
/// Nothing is linked: the library is looked for at run time, and a program that holds no `Driver` never touches it.
/// There may be several; they share what the driver itself shares. Once opened, the library stays loaded, because it
/// has threads of its own.
pub struct Driver {
    table: Table,
    version: c_int,
}

impl Driver {
    /// Opens `libcuda.so.1` from the system's library path and initialises it.
    ///
    /// # Errors
    /// - [`Error::NoLibrary`] if there is none;
    /// - [`Error::MissingFunction`] if it is older than CUDA 11.4;
    /// - [`Error::Driver`] if it cannot be used, for example with status 100 on a machine without a device.
    pub fn load() -> Result<Arc<Self>, Error> {
        Self::open(LIBRARY)
    }

    /// Opens a library that behaves like `libcuda.so.1`: a test's stand-in.
    #[doc(hidden)]
    pub fn open(path: &str) -> Result<Arc<Self>, Error> {
        // SAFETY: loading runs the library's initialisers; the driver's are made for that.
        let library = unsafe { Library::new(path) }
            .map_err(|e| Error::NoLibrary { library: path.to_owned(), reason: e.to_string() })?;
        // SAFETY: the path names a CUDA driver, by its own name or as the caller says.
        let table = unsafe { Table::resolve(&library, path) }?;
        core::mem::forget(library); // the functions in the table stay good, and so do the driver's threads
        let mut driver = Driver { table, version: 0 };
        // SAFETY: the flags must be 0.
        unsafe { driver.cuInit(0) }?;
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        unsafe { driver.cuDriverGetVersion(&mut version) }?;
        driver.version = version;
        Ok(Arc::new(driver))
    }

    /// The newest CUDA version that the driver serves: 13000 is 13.0.
    pub fn version(&self) -> u32 {
        self.version.unsigned_abs()
    }

    /// How many devices there are; `CUDA_VISIBLE_DEVICES` can hide some.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn device_count(&self) -> Result<u32, Error> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        unsafe { self.cuDeviceGetCount(&mut count) }?;
        Ok(count.unsigned_abs())
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    /// Makes a status a result.
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), Error> {
        match status {
            SUCCESS => Ok(()),
            _ => Err(Error::Driver { call, status, name: self.status_name(status) }),
        }
    }

    /// The driver's name for a status, or "unknown" for one that it does not know itself.
    fn status_name(&self, status: Status) -> String {
        let mut name: *const c_char = ptr::null();
        if let Some(function) = self.table.cuGetErrorName {
            // SAFETY: `name` outlives the call.
            unsafe { function(status, &mut name) };
        }
        if name.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: the driver returned a text of its own, ended by a zero, that lives as long as the library.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver(CUDA {}.{})", self.version / 1000, self.version % 1000 / 10)
    }
}
