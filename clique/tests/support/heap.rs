//! What the C library's allocator has given out, and what it keeps.
//!
//! Resident memory does not tell a leak where threads come and go: glibc gives threads arenas of their own, up to eight for
//! each processor, and keeps at the top of each what was freed there, which `malloc_trim` gives back of the first alone.
//! What is in use it counts exactly, over all arenas.

use std::collections::BTreeMap;

use libloading::os::unix::Library;

/// glibc's `struct mallinfo2`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct MallInfo2 {
    arena: usize,
    ordblks: usize,
    smblks: usize,
    hblks: usize,
    hblkhd: usize,
    usmblks: usize,
    fsmblks: usize,
    uordblks: usize,
    fordblks: usize,
    keepcost: usize,
}

/// The counts of the allocator, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap {
    pub in_use_bytes: usize,
    /// Free, and not given back to the system. Not all of it need be resident.
    #[allow(dead_code, reason = "one test program looks at it")]
    pub kept_bytes: usize,
}

impl Heap {
    /// Those of now, after what is free was given back as far as possible. `None`, after a line that says so, where the
    /// C library does not count.
    pub fn now() -> Option<Heap> {
        let program = Library::this();
        // SAFETY: the C library's `int malloc_trim(size_t)`.
        let trim = unsafe { program.get::<unsafe extern "C" fn(usize) -> i32>(b"malloc_trim\0") };
        // SAFETY: the C library's `struct mallinfo2 mallinfo2(void)`.
        let info = unsafe { program.get::<unsafe extern "C" fn() -> MallInfo2>(b"mallinfo2\0") };
        let (Ok(trim), Ok(info)) = (trim, info) else {
            println!("waived: needs the mallinfo2 of glibc 2.33");
            return None;
        };
        // SAFETY: has no conditions.
        unsafe { trim(0) };
        // SAFETY: has no conditions.
        let info = unsafe { info() };
        Some(Heap { in_use_bytes: info.uordblks + info.hblkhd, kept_bytes: info.fordblks })
    }
}

/// The resident memory of this process in KiB, by what it belongs to.
#[allow(dead_code, reason = "each test program uses some of it")]
pub fn resident_kib() -> BTreeMap<&'static str, i64> {
    /// glibc's arenas of threads begin at multiples of it.
    const ARENA_BYTES: u64 = 64 << 20;
    let mut kib = BTreeMap::new();
    let mut kind = "";
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
            kind = match (words.nth(4), end - start) {
                (Some("[heap]"), _) => "allocator",
                (Some(_), _) => "files",
                (None, _) if start % ARENA_BYTES == 0 => "allocator",
                // What Rust and the C library give a thread, and keep some of for the next.
                (None, len) if [2 << 20, 8 << 20].contains(&len) => "stacks",
                (None, _) => "anonymous",
            };
        } else if first == "Rss:" {
            *kib.entry(kind).or_default() += words.next().unwrap().parse::<i64>().unwrap();
        }
    }
    kib
}
