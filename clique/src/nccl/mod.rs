//! [`Nccl`]: NCCL as the [`Backend`](crate::backend::Backend) of cliques.
//!
//! The library is looked for at run time: the path in the variable `PORTWAY_NCCL_LIBRARY`, or `libnccl.so.2`, or
//! `libnccl.so`. Versions from 2.18 on will do; what a version lacks is
//! [`NotInLibrary`](crate::backend::BackendError::NotInLibrary).

mod calls;
mod comms;
mod config;
mod table;
mod workspace;

use core::ffi::{c_char, c_int};
use core::fmt;
use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libloading::Library;
use portway_fifo::cuda::{Context, Driver};

use crate::backend::{BackendError, Status, Variable};

use comms::Comms;
use table::Table;
use workspace::Pool;

/// The variable that says where the library is.
pub const LIBRARY_VARIABLE: &str = "PORTWAY_NCCL_LIBRARY";
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The first version with everything that is needed: splits.
const OLDEST: u32 = 2_18_01;
/// The longest text that is taken from the library.
const MAX_TEXT_BYTES: usize = 1024;

/// NCCL, opened when asked for.
///
/// There may be several; they share what the library itself shares. It stays loaded, because it has threads of its own.
/// The CUDA driver is opened when a device is first needed.
pub struct Nccl {
    table: Table,
    version: u32,
    driver: Mutex<Option<Arc<Driver>>>,
    /// By ordinal. Each has a lock of its own, since making a context may take long.
    contexts: Mutex<HashMap<u32, Arc<Mutex<Option<Context>>>>>,
    comms: Comms,
    pool: Arc<Pool>,
    /// Why this crate itself has refused something, for `explain`.
    note: Mutex<Option<(Status, String)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unavailable(library: impl Into<String>, message: impl Into<String>) -> BackendError {
    BackendError::Unavailable { library: library.into(), message: message.into() }
}

impl Nccl {
    /// Opens the library.
    ///
    /// # Errors
    /// - [`BackendError::Unavailable`]: there is none, it is older than 2.18, or one of NCCL's configuration files sets
    ///   what [`variable`](crate::backend::Backend::variable) refuses;
    /// - [`BackendError::NotInLibrary`]: it lacks a function that every version has.
    pub fn load() -> Result<Arc<Self>, BackendError> {
        check_files(|name| env::var_os(name), |path| std::fs::read_to_string(path).ok())?;
        let (library, name) = find(env::var_os(LIBRARY_VARIABLE), |name| {
            // SAFETY: loading runs the library's initialisers, which are made for that.
            unsafe { Library::new(name) }
        })?;
        Self::from_library(library, &name, None)
    }

    /// Opens a library by its path, and takes a driver that is open already: a test's stand-ins.
    #[doc(hidden)]
    pub fn open(path: &Path, driver: Option<Arc<Driver>>) -> Result<Arc<Self>, BackendError> {
        let name = path.display().to_string();
        // SAFETY: as in `load`.
        let library = unsafe { Library::new(path) };
        Self::from_library(library.map_err(|error| unavailable(&name, error.to_string()))?, &name, driver)
    }

    fn from_library(
        library: Library,
        name: &str,
        driver: Option<Arc<Driver>>,
    ) -> Result<Arc<Self>, BackendError> {
        // SAFETY: the name is NCCL's own, or what the caller says is NCCL.
        let table = unsafe { Table::resolve(&library, name) }?;
        core::mem::forget(library); // the functions in the table stay good, and so do the library's threads
        let mut version: c_int = 0;
        // SAFETY: `version` outlives the call.
        let status = Status(unsafe { (table.ncclGetVersion)(&mut version) });
        if status != Status::SUCCESS {
            return Err(unavailable(name, format!("ncclGetVersion: {status}")));
        }
        let version = u32::try_from(version).unwrap_or(0);
        if version < OLDEST {
            let message = format!("version {}, must be at least {}", dotted(version), dotted(OLDEST));
            return Err(unavailable(name, message));
        }
        Ok(Arc::new(Nccl {
            table,
            version,
            driver: Mutex::new(driver),
            contexts: Mutex::default(),
            comms: Comms::default(),
            pool: Arc::default(),
            note: Mutex::default(),
        }))
    }

    /// How many communicators there are that have not been destroyed or aborted.
    pub fn live_communicators(&self) -> usize {
        self.comms.len()
    }

    fn library(&self) -> String {
        format!("NCCL {}", dotted(self.version))
    }

    fn driver(&self) -> Result<Arc<Driver>, portway_fifo::Error> {
        let mut driver = lock(&self.driver);
        match &*driver {
            Some(driver) => Ok(driver.clone()),
            None => Ok(driver.insert(Driver::load()?).clone()),
        }
    }

    /// The device's context, made when first asked for.
    fn context(&self, device: u32) -> Result<Context, BackendError> {
        let place = lock(&self.contexts).entry(device).or_default().clone();
        let mut context = lock(&place);
        if let Some(context) = &*context {
            return Ok(context.clone());
        }
        let made = self.driver().and_then(|driver| Context::new(&driver, device));
        let made = made.map_err(|error| device_error("making its context", device, &error))?;
        Ok(context.insert(made).clone())
    }

    /// Calls something while the device's context is current, which is how NCCL knows the device.
    fn on_device<R>(&self, device: u32, call: impl FnOnce() -> R) -> Result<R, BackendError> {
        let context = self.context(device)?;
        let current = context.current();
        let _current = current.map_err(|error| device_error("entering its context", device, &error))?;
        Ok(call())
    }

    /// Remembers why, and returns the status.
    fn refuse(&self, status: Status, why: impl Into<String>) -> Status {
        *lock(&self.note) = Some((status, why.into()));
        status
    }

    fn missing(&self, call: &'static str) -> BackendError {
        BackendError::NotInLibrary { call, library: self.library() }
    }
}

fn device_error(call: &'static str, device: u32, error: &portway_fifo::Error) -> BackendError {
    BackendError::Device { call, device, message: error.to_string() }
}

fn dotted(version: u32) -> String {
    format!("{}.{}.{}", version / 1_00_00, version / 1_00 % 1_00, version % 1_00)
}

/// A text of the library's, which another thread may be changing.
///
/// # Safety
/// - `text` is null, or points to bytes that stay mapped, and of which one of the first 1,024 is zero.
unsafe fn text(text: *const c_char) -> String {
    let mut bytes = Vec::new();
    while !text.is_null() && bytes.len() < MAX_TEXT_BYTES {
        // SAFETY: no byte before this one was zero, so it is mapped, says the caller.
        let place = unsafe { text.add(bytes.len()) };
        // SAFETY: as above. Volatile, since the library has one text for all threads.
        let byte = unsafe { place.read_volatile() } as u8;
        if byte == 0 {
            break;
        }
        bytes.push(byte);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Opens the first library of those that it may be. A path that somebody gave is the only one.
fn find<L>(
    given: Option<OsString>,
    open: impl Fn(&OsString) -> Result<L, libloading::Error>,
) -> Result<(L, String), BackendError> {
    let names = match given {
        Some(path) => vec![path],
        None => NAMES.map(OsString::from).to_vec(),
    };
    let mut failures = Vec::new();
    for name in &names {
        match open(name) {
            Ok(library) => return Ok((library, name.to_string_lossy().into_owned())),
            Err(error) => failures.push(error.to_string()),
        }
    }
    let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
    Err(unavailable(names.join(" or "), failures.join("; ")))
}

/// Looks for what would make communicators block into the files that NCCL reads variables from.
fn check_files(
    variable: impl Fn(&str) -> Option<OsString>,
    read: impl Fn(&Path) -> Option<String>,
) -> Result<(), BackendError> {
    let own = match (variable("NCCL_CONF_FILE"), variable("HOME")) {
        (Some(path), _) => Some(PathBuf::from(path)),
        (None, home) => home.map(|home| Path::new(&home).join(".nccl.conf")),
    };
    for path in own.into_iter().chain([PathBuf::from("/etc/nccl.conf")]) {
        for (name, value) in read(&path).map(|text| config::from_file(&text)).unwrap_or_default() {
            // The environment goes before the files.
            if let (Variable::Refused(expected), None) = (config::variable(&name, &value), variable(&name)) {
                let message = format!("{} sets {name}={value}; must be {expected}", path.display());
                return Err(unavailable("NCCL", message));
            }
        }
    }
    Ok(())
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({}, {} communicators)", dotted(self.version), self.comms.len())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn the_library_is_looked_for_by_two_names_or_by_a_given_path_alone() {
        let asked = RefCell::new(Vec::new());
        let open = |name: &OsString| -> Result<(), _> {
            asked.borrow_mut().push(name.clone());
            Err(libloading::Error::DlOpenUnknown)
        };
        let error = find(None, open).unwrap_err().to_string();
        assert_eq!(asked.take(), ["libnccl.so.2", "libnccl.so"]);
        assert!(error.contains("libnccl.so.2 or libnccl.so cannot be used"), "{error}");
        let error = find(Some("/there/nccl".into()), open).unwrap_err().to_string();
        assert_eq!(asked.take(), ["/there/nccl"]);
        assert!(error.contains("/there/nccl cannot be used"), "{error}");
    }

    #[test]
    fn a_configuration_file_that_makes_communicators_block_is_refused() {
        let check = |environment: &[(&str, &str)], file: &str| {
            let variable = |name: &str| {
                environment.iter().find(|(other, _)| *other == name).map(|(_, value)| OsString::from(value))
            };
            let read = |path: &Path| {
                path.to_str().filter(|path| *path == file).map(|_| "NCCL_COMM_BLOCKING=1\n".to_owned())
            };
            check_files(variable, read)
        };
        for (environment, file) in [
            (&[][..], "/etc/nccl.conf"),
            (&[("HOME", "/home/me")], "/home/me/.nccl.conf"),
            (&[("HOME", "/home/me"), ("NCCL_CONF_FILE", "/site/conf")], "/site/conf"),
        ] {
            let error = check(environment, file).unwrap_err().to_string();
            assert!(error.contains(&format!("{file} sets NCCL_COMM_BLOCKING=1")), "{error}");
        }
        // What it does not read, and what the environment replaces, does no harm.
        check(&[("HOME", "/home/me"), ("NCCL_CONF_FILE", "/site/conf")], "/home/me/.nccl.conf").unwrap();
        check(&[("NCCL_COMM_BLOCKING", "0")], "/etc/nccl.conf").unwrap();
    }

    #[test]
    fn a_text_is_bounded() {
        let long = vec![b'a'; 2 * MAX_TEXT_BYTES];
        // SAFETY: the bytes are there, as many as are read at most.
        assert_eq!(unsafe { text(long.as_ptr().cast()) }.len(), MAX_TEXT_BYTES);
        // SAFETY: null is allowed.
        assert_eq!(unsafe { text(core::ptr::null()) }, "");
        assert_eq!(dotted(2_27_07), "2.27.7");
    }
}
