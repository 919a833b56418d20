//! The stand-in for NCCL (`nccl.c`), built by the C compiler of the machine, and how a test steers it.
//!
//! Each [`Nccl`] is a library of its own, with its own communicators and counts.

use std::ffi::{CString, c_char, c_int, c_long};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};

/// A loaded stand-in.
pub struct Nccl {
    path: PathBuf,
    library: Library,
}

fn image() -> &'static [u8] {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let folder = fresh_folder();
        let library = folder.join("standin.so");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let arguments = "-x c -shared -fPIC -O1 -Wall -Wextra -Werror -fvisibility=hidden -pthread - -ldl -o";
        let mut child = Command::new(&compiler)
            .args(arguments.split(' '))
            .arg(&library)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{compiler}: {e}"));
        let mut source = child.stdin.take().unwrap();
        source.write_all(include_bytes!("nccl.c")).unwrap();
        drop(source);
        assert!(child.wait().unwrap().success(), "the stand-in does not compile");
        let bytes = std::fs::read(&library).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        bytes
    })
}

fn fresh_folder() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("libnccl-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

impl Nccl {
    /// A stand-in without some functions, as an older library is, that asks this driver for devices.
    pub fn new(missing: &[&str], driver: &str) -> Self {
        let mut bytes = image().to_vec();
        for name in missing {
            hide(&mut bytes, name);
        }
        let path = fresh_folder().join("libnccl.so.2");
        std::fs::write(&path, bytes).unwrap();
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        let nccl = Nccl { path, library };
        let driver = CString::new(driver).unwrap();
        // SAFETY: the symbol has this type in `nccl.c`.
        let set: Symbol<unsafe extern "C" fn(*const c_char) -> c_int> =
            unsafe { nccl.library.get(b"standin_driver\0") }.unwrap();
        // SAFETY: the path is ended by a zero.
        assert_eq!(unsafe { set(driver.as_ptr()) }, 1);
        nccl
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn ask(&self, symbol: &str, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the symbols that are asked here have this type in `nccl.c`.
        let ask: Symbol<unsafe extern "C" fn(*const c_char) -> c_long> =
            unsafe { self.library.get(symbol.as_bytes()) }.unwrap();
        // SAFETY: the name is ended by a zero.
        unsafe { ask(name.as_ptr()) }
    }

    /// How often a function was called.
    pub fn calls(&self, function: &str) -> i64 {
        self.ask("standin_calls", function)
    }

    /// What was passed last: see `standin_seen`.
    pub fn seen(&self, what: &str) -> i64 {
        self.ask("standin_seen", what)
    }

    /// How many communicators are alive.
    pub fn live(&self) -> i64 {
        self.ask("standin_live", "")
    }

    /// Makes the `nth` call of a function from now on, counted from 1, fail.
    pub fn fail(&self, function: &str, nth: i64, status: i32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the symbol has this type in `nccl.c`.
        let fail: Symbol<unsafe extern "C" fn(*const c_char, c_long, c_int)> =
            unsafe { self.library.get(b"standin_fail\0") }.unwrap();
        // SAFETY: the name is ended by a zero.
        unsafe { fail(name.as_ptr(), nth, status) }
    }

    /// Sets "version", "makes blocking" or "ballast".
    pub fn set(&self, what: &str, value: i64) {
        self.put("standin_set", what, value);
    }

    /// Holds every call of a function, or lets them go on.
    pub fn hold(&self, function: &str, held: bool) {
        self.put("standin_hold", function, held.into());
    }

    fn put(&self, symbol: &str, name: &str, value: i64) {
        let name = CString::new(name).unwrap();
        // SAFETY: the symbols that are set here have this type in `nccl.c`.
        let set: Symbol<unsafe extern "C" fn(*const c_char, c_long)> =
            unsafe { self.library.get(symbol.as_bytes()) }.unwrap();
        // SAFETY: the name is ended by a zero.
        unsafe { set(name.as_ptr(), value) }
    }

    /// Waits until a call of a function is held; panics if none is in time.
    pub fn wait_until_held(&self, function: &str, patience: Duration) {
        let began = Instant::now();
        while self.ask("standin_waiting", function) == 0 {
            assert!(began.elapsed() < patience, "no call of {function} is held, expected 1");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.path.parent().unwrap());
    }
}

/// Renames a function in the library's table of names, where the loader then does not find it.
fn hide(bytes: &mut [u8], name: &str) {
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    let mut found = 0;
    for at in 0..bytes.len() - wanted.len() {
        if bytes[at..].starts_with(&wanted) {
            bytes[at + 1] = b'X';
            found += 1;
        }
    }
    assert!(found > 0, "the stand-in has no {name}");
}
