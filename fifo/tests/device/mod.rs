//! The device header, compiled by the host's C++ compiler and loaded: its threads play a GPU.
//!
//! Without a C++ compiler the tests print `waived:` and pass; `PORTWAY_REQUIRE_CXX=1` makes that a failure. `CXX` names
//! the compiler and `PORTWAY_CXXFLAGS` adds to its flags.

#![allow(dead_code)] // each test program uses its part

pub mod ledger;

use std::ffi::{CStr, c_char};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libloading::Library;
use portway_fifo::{Fifo, FifoHandle};

/// How long the compiler may take.
const TOOL_LIMIT: Duration = Duration::from_secs(180);

/// `portway::Status`.
pub mod status {
    pub const OK: u64 = 0;
    pub const TIMEOUT: u64 = 1;
    pub const ABORTED: u64 = 2;
    pub const BROKEN_BY_TIMEOUT: u64 = 3;
    pub const BROKEN_BY_ABORT: u64 = 4;
    pub const INVALID: u64 = 5;
}

/// What a call returned: a status and a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Outcome {
    pub status: u64,
    pub position: u64,
}

/// By which function producers push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Form {
    Scalar,
    Batch,
}

/// What a crew of producers is to do.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Plan {
    pub form: Form,
    pub producers: u64,
    pub calls: u64,
    pub batch_max: u64,
    pub salt: u64,
}

/// What a producer has to say in the end. `fault` is a line of `host.cpp`, or 0.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Report {
    pub pushed: u64,
    pub digest: u64,
    pub fault: u64,
    pub status: u64,
    pub position: u64,
}

/// What a waiter's call returned, and when.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Waited {
    pub status: u64,
    pub position: u64,
    pub returned_ns: u64,
}

#[repr(C)]
struct Fact {
    name: *const c_char,
    value: u64,
}

/// A `Crew` or `Waiters` of `host.cpp`.
#[repr(C)]
struct Threads {
    _opaque: [u8; 0],
}

macro_rules! calls {
    ($($name:ident: $symbol:literal, fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        struct Calls { $($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)* }

        impl Calls {
            fn of(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Calls { $(
                    // SAFETY: `host.cpp` defines the symbol with this signature.
                    $name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,
                )* })
            }
        }
    };
}

calls! {
    facts: "portway_test_facts", fn() -> *const Fact;
    now_ns: "portway_test_now_ns", fn() -> u64;
    push: "portway_test_push", fn(*const FifoHandle, *const u64, u64) -> Outcome;
    push_batch: "portway_test_push_batch", fn(*const FifoHandle, *const u64, u64, u64) -> Outcome;
    sync: "portway_test_sync", fn(*const FifoHandle, u64, u64) -> u64;
    wait: "portway_test_wait", fn(*const FifoHandle, u64, u64) -> u64;
    start: "portway_test_start", fn(*const FifoHandle, *const Plan) -> *mut Threads;
    done: "portway_test_done", fn(*const Threads) -> u64;
    join: "portway_test_join", fn(*mut Threads, *mut Report);
    wait_start: "portway_test_wait_start", fn(*const FifoHandle, u64, u64, u64, u64) -> *mut Threads;
    wait_entered: "portway_test_wait_entered", fn(*const Threads) -> u64;
    wait_join: "portway_test_wait_join", fn(*mut Threads, *mut Waited);
}

/// The loaded header. It is never unloaded.
pub struct Device {
    calls: Calls,
    _library: Library,
}

/// The header, or `None` after a `waived:` line where there is no C++ compiler.
pub fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    DEVICE
        .get_or_init(|| {
            let library = build("host")?;
            let calls = Calls::of(&library).expect("host.cpp defines the calls of device/mod.rs");
            Some(Device { calls, _library: library })
        })
        .as_ref()
}

/// Compiles and loads `NAME.cpp` of this folder.
pub fn build(name: &str) -> Option<Library> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let object = folder.join(format!("{name}-{}.o", std::process::id()));
    let log = object.with_extension("log");
    let (fresh, shared) = (object.with_extension("so"), folder.join(format!("{name}.so")));
    let flags = std::env::var("PORTWAY_CXXFLAGS").unwrap_or_default();
    let mut compile = compiler();
    compile
        .args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC", "-c"])
        .args(flags.split_whitespace())
        .arg("-I")
        .arg(root.join("device"))
        .arg(root.join(format!("tests/device/{name}.cpp")))
        .arg("-o")
        .arg(&object);
    if !run(&mut compile, &log) {
        let missing = format!("no C++ compiler ({:?})", compile.get_program());
        assert!(std::env::var_os("PORTWAY_REQUIRE_CXX").is_none_or(|it| it != "1"), "{missing}");
        // Not `println!`, which the test harness would swallow.
        let _ = writeln!(std::io::stderr(), "waived: {missing}, so the device header is not tested");
        return None;
    }
    // Linked apart, without the extra flags: a sanitizer's runtime is the program's, not the library's.
    let mut link = compiler();
    link.args(["-shared", "-pthread"]).arg(&object).arg("-o").arg(&fresh);
    assert!(run(&mut link, &log), "the compiler was there a moment ago");
    let _ = std::fs::remove_file(object);
    // A test that runs at the same time finds the old library or the new one, and both are whole.
    std::fs::rename(fresh, &shared).expect("the library that was just linked can be renamed");
    // SAFETY: the library was just built from our source; it has no constructors but those of the C++ library.
    let library = unsafe { Library::new(&shared) }.expect("the library that was just linked loads");
    Some(library)
}

fn compiler() -> Command {
    let cxx = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut words = cxx.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    command.args(words);
    command
}

/// Whether the program was found. It must then succeed, within [`TOOL_LIMIT`].
fn run(command: &mut Command, log: &Path) -> bool {
    let output = std::fs::File::create(log).expect("the folder for temporary files of tests can be written");
    let mut child = match command.stdin(Stdio::null()).stderr(output).spawn() {
        Ok(child) => child,
        Err(error) => {
            let _ = std::fs::remove_file(log);
            assert!(error.kind() == ErrorKind::NotFound, "{command:?}: {error}");
            return false;
        }
    };
    let deadline = Deadline::new(TOOL_LIMIT, format!("{command:?}"));
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child that was started can be asked for its status")
        {
            break status;
        }
        if let Err(late) = deadline.passed(|| "expected its end, saw it running".into()) {
            let _ = child.kill();
            panic!("{late}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let said = std::fs::read_to_string(log).unwrap_or_default();
    let _ = std::fs::remove_file(log);
    assert!(status.success(), "{command:?}: {status}\n{said}");
    true
}

impl Device {
    /// Sizes, offsets and constants, by name, as the C++ compiler sees them.
    pub fn facts(&self) -> Vec<(String, u64)> {
        // SAFETY: takes nothing and returns a static array.
        let mut fact = unsafe { (self.calls.facts)() };
        let mut facts = Vec::new();
        loop {
            // SAFETY: the array ends with a null name, and the loop ends there.
            let Fact { name, value } = unsafe { fact.read() };
            if name.is_null() {
                return facts;
            }
            // SAFETY: the other names are string literals.
            let name = unsafe { CStr::from_ptr(name) };
            facts.push((name.to_string_lossy().into_owned(), value));
            fact = fact.wrapping_add(1);
        }
    }

    /// The clock of [`Waited::returned_ns`].
    pub fn now_ns(&self) -> u64 {
        // SAFETY: reads a clock.
        unsafe { (self.calls.now_ns)() }
    }

    /// `portway::push`.
    pub fn push(&self, handle: &Handle, words: [u64; 2], timeout_ns: u64) -> Outcome {
        // SAFETY: `Handle` keeps what its addresses point to alive; the words are copied.
        unsafe { (self.calls.push)(&handle.raw, words.as_ptr(), timeout_ns) }
    }

    /// `portway::push_batch`.
    pub fn push_batch(&self, handle: &Handle, triggers: &[[u64; 2]], timeout_ns: u64) -> Outcome {
        let words = triggers.as_ptr().cast();
        // SAFETY: as in `push`; there are that many triggers of two words.
        unsafe { (self.calls.push_batch)(&handle.raw, words, triggers.len() as u64, timeout_ns) }
    }

    /// `portway::sync`; its status.
    pub fn sync(&self, handle: &Handle, position: u64, timeout_ns: u64) -> u64 {
        // SAFETY: as in `push`.
        unsafe { (self.calls.sync)(&handle.raw, position, timeout_ns) }
    }

    /// `portway::wait` for the tail to have reached `position`; its status.
    pub fn wait(&self, handle: &Handle, position: u64, timeout_ns: u64) -> u64 {
        // SAFETY: as in `push`.
        unsafe { (self.calls.wait)(&handle.raw, position, timeout_ns) }
    }

    /// Starts producers.
    pub fn start(&'static self, handle: &Handle, plan: Plan) -> Producers {
        // SAFETY: as in `push`, and `Producers` keeps the handle until the threads have ended.
        let threads = unsafe { (self.calls.start)(&handle.raw, &plan) };
        Producers { device: self, handle: handle.clone(), threads, count: plan.producers as usize }
    }

    /// Starts threads that each push once.
    pub fn start_pushers(&'static self, handle: &Handle, count: usize, timeout: Duration) -> Waiters {
        self.start_waiters(handle, count, None, timeout)
    }

    /// Starts threads that each wait in `sync` for `position`.
    pub fn start_syncers(
        &'static self,
        handle: &Handle,
        count: usize,
        position: u64,
        timeout: Duration,
    ) -> Waiters {
        self.start_waiters(handle, count, Some(position), timeout)
    }

    fn start_waiters(
        &'static self,
        handle: &Handle,
        count: usize,
        sync: Option<u64>,
        timeout: Duration,
    ) -> Waiters {
        let (syncs, position) = (sync.is_some() as u64, sync.unwrap_or(0));
        let timeout_ns = timeout.as_nanos() as u64;
        // SAFETY: as in `push`, and `Waiters` keeps the handle until the threads have ended.
        let threads =
            unsafe { (self.calls.wait_start)(&handle.raw, count as u64, syncs, position, timeout_ns) };
        Waiters { device: self, handle: handle.clone(), threads, count }
    }
}

/// A FIFO's handle, which a test may change, and what keeps its addresses valid.
#[derive(Clone)]
pub struct Handle {
    raw: FifoHandle,
    fifo: Fifo,
}

/// A word that stands in for one of a FIFO's. Never freed.
pub fn stray_word(value: u64) -> &'static AtomicU64 {
    Box::leak(Box::new(AtomicU64::new(value)))
}

impl Handle {
    pub fn of(fifo: &Fifo) -> Self {
        Handle { raw: fifo.handle(), fifo: fifo.clone() }
    }

    /// The same handle with another version.
    pub fn with_version(mut self, version: u32) -> Self {
        self.raw.version = version;
        self
    }

    /// The same handle, whose producers take `word` for the tail.
    pub fn with_tail(mut self, word: &'static AtomicU64) -> Self {
        self.raw.tail.value = word.as_ptr() as u64;
        self
    }

    /// The same handle, whose producers take `word` for the abort word.
    pub fn with_stop(mut self, word: &'static AtomicU64) -> Self {
        self.raw.tail.stop = word.as_ptr() as u64;
        self
    }

    /// How many positions have been taken, ever.
    pub fn head(&self) -> u64 {
        // SAFETY: the FIFO is in heap memory and lives; this word is accessed atomically only.
        let head = unsafe { AtomicU64::from_ptr(self.raw.head as *mut u64) };
        head.load(Ordering::Relaxed)
    }

    /// The words of a slot.
    pub fn slot(&self, index: u64) -> [&AtomicU64; 2] {
        assert!(index < self.fifo.slots());
        [0, 8].map(|offset| {
            let address = (self.raw.slots + 16 * index + offset) as *mut u64;
            // SAFETY: as in `head`; the index was checked.
            unsafe { AtomicU64::from_ptr(address) }
        })
    }
}

/// Threads that push. Dropped early, they are aborted and joined.
pub struct Producers {
    device: &'static Device,
    handle: Handle,
    threads: *mut Threads,
    count: usize,
}

impl Producers {
    /// Whether every one has made its last call.
    pub fn done(&self) -> bool {
        // SAFETY: made by `start` and not joined yet, since `join` takes `self`.
        unsafe { (self.device.calls.done)(self.threads) == self.count as u64 }
    }

    /// Waits for the threads, whose every call has a timeout.
    pub fn join(mut self) -> Vec<Report> {
        self.end()
    }

    fn end(&mut self) -> Vec<Report> {
        let mut reports = vec![Report::default(); if self.threads.is_null() { 0 } else { self.count }];
        if !self.threads.is_null() {
            // SAFETY: made by `start` and joined once; there is room for a report a producer.
            unsafe { (self.device.calls.join)(self.threads, reports.as_mut_ptr()) };
            self.threads = std::ptr::null_mut();
        }
        reports
    }
}

impl Drop for Producers {
    fn drop(&mut self) {
        if !self.threads.is_null() {
            self.handle.fifo.abort();
            self.end();
        }
    }
}

/// Threads in one call each. Dropped early, they are aborted and joined.
pub struct Waiters {
    device: &'static Device,
    handle: Handle,
    threads: *mut Threads,
    count: usize,
}

impl Waiters {
    /// How many are just before their call or further.
    pub fn entered(&self) -> u64 {
        // SAFETY: made by `wait_start` and not joined yet, since `join` takes `self`.
        unsafe { (self.device.calls.wait_entered)(self.threads) }
    }

    /// Waits for the threads, whose call has a timeout.
    pub fn join(mut self) -> Vec<Waited> {
        self.end()
    }

    fn end(&mut self) -> Vec<Waited> {
        let mut reports = vec![Waited::default(); if self.threads.is_null() { 0 } else { self.count }];
        if !self.threads.is_null() {
            // SAFETY: made by `wait_start` and joined once; there is room for a report a thread.
            unsafe { (self.device.calls.wait_join)(self.threads, reports.as_mut_ptr()) };
            self.threads = std::ptr::null_mut();
        }
        reports
    }
}

impl Drop for Waiters {
    fn drop(&mut self) {
        if !self.threads.is_null() {
            self.handle.fifo.abort();
            self.end();
        }
    }
}

/// The end of a test's wait, with what it waits for.
pub struct Deadline {
    what: String,
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub fn new(limit: Duration, what: impl Into<String>) -> Self {
        Deadline { what: what.into(), start: Instant::now(), limit }
    }

    /// What to say once the time is over; `progress` says what was expected and what was seen.
    pub fn passed(&self, progress: impl FnOnce() -> String) -> Result<(), String> {
        if self.start.elapsed() < self.limit {
            return Ok(());
        }
        Err(format!("waited {:?} for {}: {}", self.limit, self.what, progress()))
    }

    /// Waits for `seen` to become `expected`.
    pub fn until(&self, expected: u64, mut seen: impl FnMut() -> u64) {
        loop {
            let now = seen();
            if now == expected {
                return;
            }
            if let Err(late) = self.passed(|| format!("expected {expected}, saw {now}")) {
                panic!("{late}");
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}
