//! The stand-in for the CUDA driver (`calls.c` and the others), built by the C compiler of the machine, and how a test steers it.
//!
//! Each [`Standin`] is a library of its own, with its own devices and counts, so tests of one process do not disturb
//! each other. Tests of other crates include this file by its path.
#![allow(dead_code)] // each test program uses a part

use std::ffi::{CString, c_char, c_int, c_long};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libloading::{Library, Symbol};

/// How long a test waits for what has to happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A loaded stand-in.
pub struct Standin {
    path: PathBuf,
    library: Library,
}

const SOURCES: [(&str, &str); 6] = [
    ("calls.c", include_str!("calls.c")),
    ("objects.c", include_str!("objects.c")),
    ("devices.c", include_str!("devices.c")),
    ("memory.c", include_str!("memory.c")),
    ("streams.c", include_str!("streams.c")),
    ("control.c", include_str!("control.c")),
];

/// The bytes of the built library.
fn image() -> &'static [u8] {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let folder = fresh_folder();
        let library = folder.join("standin.so");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let arguments = "-x c -shared -fPIC -O1 -Wall -Wextra -Werror -fvisibility=hidden -pthread - -o";
        let mut child = Command::new(&compiler)
            .args(arguments.split(' '))
            .arg(&library)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{compiler}: {e}"));
        let mut source = child.stdin.take().unwrap();
        for (name, text) in SOURCES {
            writeln!(source, "#line 1 \"{name}\"\n{text}").unwrap();
        }
        drop(source);
        assert!(child.wait().unwrap().success(), "the stand-in does not compile");
        let bytes = std::fs::read(&library).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        bytes
    })
}

/// A folder that nobody else uses.
fn fresh_folder() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("libcuda-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

impl Standin {
    /// A stand-in with two devices.
    pub fn new() -> Self {
        Self::without(&[])
    }

    /// A stand-in that lacks these functions, as an older driver does.
    pub fn without(missing: &[&str]) -> Self {
        let mut bytes = image().to_vec();
        for name in missing {
            hide(&mut bytes, name);
        }
        let path = fresh_folder().join("libcuda.so.1");
        std::fs::write(&path, bytes).unwrap();
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(&path) }.unwrap();
        Standin { path, library }
    }

    /// Where the library lies; its name is that of the driver's.
    pub fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// The folder that it lies in, for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap()
    }

    /// How often a function was called by any thread.
    pub fn calls(&self, function: &str) -> i64 {
        self.count(Some(function), 0)
    }

    /// How often any function was called by the thread with this id in the system.
    pub fn calls_by(&self, thread: i64) -> i64 {
        self.count(None, thread)
    }

    /// How often any function was called.
    pub fn all_calls(&self) -> i64 {
        self.count(None, 0)
    }

    fn count(&self, function: Option<&str>, thread: i64) -> i64 {
        let name = function.map(|name| CString::new(name).unwrap());
        let name = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        // SAFETY: the symbol has this type in `control.c`.
        let count: Symbol<unsafe extern "C" fn(*const c_char, c_long) -> c_long> =
            unsafe { self.library.get(b"standin_calls\0") }.unwrap();
        // SAFETY: the name is null or ended by a zero.
        unsafe { count(name, thread) }
    }

    /// Makes the `nth` call of a function from now on, counted from 1, fail with `status`.
    pub fn fail(&self, function: &str, nth: i64, status: i32) {
        self.fail_many(function, nth, 1, status);
    }

    /// Makes every call of a function fail with `status` from now on.
    pub fn fail_always(&self, function: &str, status: i32) {
        self.fail_many(function, 1, 1 << 40, status);
    }

    /// Lets a function succeed again.
    pub fn fail_no_more(&self, function: &str) {
        self.fail_many(function, 1, 0, 0);
    }

    fn fail_many(&self, function: &str, nth: i64, count: i64, status: i32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the symbol has this type in `control.c`.
        let fail: Symbol<unsafe extern "C" fn(*const c_char, c_long, c_long, c_int)> =
            unsafe { self.library.get(b"standin_fail\0") }.unwrap();
        // SAFETY: the name is ended by a zero.
        unsafe { fail(name.as_ptr(), nth, count, status) }
    }

    /// Holds every call of a function until [`release`](Self::release).
    pub fn hold(&self, function: &str) {
        self.set_held(function, 1);
    }

    /// Holds the next call of a function until [`release`](Self::release), and no other.
    pub fn hold_next(&self, function: &str) {
        self.set_held(function, 2);
    }

    /// Lets the calls of a function go on.
    pub fn release(&self, function: &str) {
        self.set_held(function, 0);
    }

    fn set_held(&self, function: &str, held: c_int) {
        let name = CString::new(function).unwrap();
        // SAFETY: the symbol has this type in `control.c`.
        let hold: Symbol<unsafe extern "C" fn(*const c_char, c_int)> =
            unsafe { self.library.get(b"standin_hold\0") }.unwrap();
        // SAFETY: the name is ended by a zero.
        unsafe { hold(name.as_ptr(), held) }
    }

    /// Waits until `count` calls of a function are held; panics if they are not in time.
    pub fn wait_until_held(&self, function: &str, count: i64) {
        let name = CString::new(function).unwrap();
        // SAFETY: the symbol has this type in `control.c`.
        let waiting: Symbol<unsafe extern "C" fn(*const c_char) -> c_long> =
            unsafe { self.library.get(b"standin_waiting\0") }.unwrap();
        let start = Instant::now();
        loop {
            // SAFETY: the name is ended by a zero.
            let seen = unsafe { waiting(name.as_ptr()) };
            if seen == count {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{seen} calls of {function} are held, expected {count}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sets a property: "devices", "loading mode" (1 eager, 2 lazy), "pinned shift" (how far the device's address of
    /// page-locked memory is off), "fabric allowed", "peer access" (between devices), "opens its own" (legacy handles),
    /// "uuid base" (first byte of the first UUID), "paused" (streams keep what they are given), or "strict" (capture
    /// restricts calls).
    pub fn set(&self, what: &str, value: i64) {
        set(&self.library, what, value);
    }

    /// Sets a device attribute by its number; -1 makes the driver not know it.
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        // SAFETY: the symbol has this type in `control.c`.
        let set: Symbol<unsafe extern "C" fn(c_int, c_int)> =
            unsafe { self.library.get(b"standin_set_attribute\0") }.unwrap();
        // SAFETY: any numbers will do.
        unsafe { set(attribute, value) }
    }

    /// How many of the driver's objects are alive.
    pub fn live(&self) -> i64 {
        // SAFETY: the symbol has this type in `control.c`.
        let live: Symbol<unsafe extern "C" fn() -> c_long> =
            unsafe { self.library.get(b"standin_live\0") }.unwrap();
        // SAFETY: it takes nothing.
        unsafe { live() }
    }

    /// How many contexts this thread has pushed, and its stream capture mode.
    pub fn thread_state(&self) -> (i32, i32) {
        // SAFETY: both symbols have this type in `control.c`.
        let [depth, mode] = ["standin_depth\0", "standin_mode\0"].map(|name| {
            // SAFETY: as above.
            let get: Symbol<unsafe extern "C" fn() -> c_int> =
                unsafe { self.library.get(name.as_bytes()) }.unwrap();
            // SAFETY: it takes nothing.
            unsafe { get() }
        });
        (depth, mode)
    }

    /// Sets this thread's stream capture mode.
    pub fn set_mode(&self, mode: i32) {
        // SAFETY: the symbol has this type in `control.c`.
        let set: Symbol<unsafe extern "C" fn(c_int)> =
            unsafe { self.library.get(b"standin_set_mode\0") }.unwrap();
        // SAFETY: any number will do.
        unsafe { set(mode) }
    }

    /// The library, to call the driver's functions themselves.
    pub fn library(&self) -> &Library {
        &self.library
    }
}

/// Sets a property, in a process that has only opened the library of another one's stand-in.
pub fn set_in(path: &str, what: &str, value: i64) {
    // SAFETY: the library has no initialisers, and is loaded already.
    let library = unsafe { Library::new(path) }.unwrap();
    set(&library, what, value);
}

fn set(library: &Library, what: &str, value: i64) {
    let what = CString::new(what).unwrap();
    // SAFETY: the symbol has this type in `control.c`.
    let set: Symbol<unsafe extern "C" fn(*const c_char, c_long)> =
        unsafe { library.get(b"standin_set\0") }.unwrap();
    // SAFETY: the name is ended by a zero.
    unsafe { set(what.as_ptr(), value) }
}

impl Drop for Standin {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.folder());
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

/// This thread's id in the system.
pub fn thread_id() -> i64 {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}
