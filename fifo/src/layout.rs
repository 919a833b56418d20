//! Where each shared word lies, and the handle that tells a kernel.
//!
//! Host memory holds what the consumer polls and what waiters read over the bus; device memory holds what producers
//! contend for. Words with different writers lie on different 128-byte lines.
//!
//! ```text
//! host    0 tail, 8 abort │ 128 broken │ 256 slots, 16 bytes each
//! device  0 head │ 128 seen, 136 gate │ 256 reader │ 384 flushed
//! ```

use bytemuck::{Pod, Zeroable};

/// The version of [`FifoHandle`] and of everything a kernel does with it. `fifo.cuh` holds the same number and its
/// calls refuse a handle that has another.
pub const HANDLE_VERSION: u32 = 1;

/// Bytes between words with different writers: a cache line of a GPU, two of a processor.
pub const LINE_BYTES: u64 = 128;

/// Indices of the 64-bit words in a FIFO's host memory.
pub(crate) mod host {
    pub(crate) const TAIL: usize = 0;
    pub(crate) const ABORT: usize = 1;
    pub(crate) const BROKEN: usize = 16;
    pub(crate) const SLOTS: usize = 32;

    pub(crate) const fn len_bytes(slots: u64) -> u64 {
        // Saturated, a number of slots that no ring has makes a memory that no machine has.
        slots.saturating_mul(16).saturating_add(SLOTS as u64 * 8)
    }
}

/// Indices of the 64-bit words in a FIFO's device memory.
pub(crate) mod device {
    pub(crate) const HEAD: usize = 0;
    pub(crate) const WATCH: usize = 16;
    pub(crate) const FLUSHED: usize = WATCH + super::watch::WORDS;
    pub(crate) const LEN_BYTES: u64 = (FLUSHED as u64 + 16) * 8;
}

/// Indices of the words of a [`Watch`](crate::Watch) in its device memory, from its first word on.
pub mod watch {
    /// The elected reader's copy of the watched word.
    pub const SEEN: usize = 0;
    /// The elected reader's copy of the stop word, or the record of a broken FIFO.
    pub const GATE: usize = 1;
    /// 1 while a thread is the elected reader.
    pub const READER: usize = 16;
    /// How many words the device part of a watch takes.
    pub const WORDS: usize = 32;
}

/// The addresses of a [`Watch`](crate::Watch)'s words, as a kernel gets them. All in bytes, in the device's view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WatchHandle {
    /// The word waited for.
    pub value: u64,
    /// The word that ends the wait when it is not 0.
    pub stop: u64,
    /// Device memory: the elected reader's copies of both, side by side.
    pub seen: u64,
    /// Device memory: the election.
    pub reader: u64,
}

impl WatchHandle {
    /// The handle of a watch over the word at `value`, stopped by the one at `stop`, with its
    /// [`watch::WORDS`] words of device memory from `copy` on. All are addresses.
    pub const fn new(value: u64, stop: u64, copy: u64) -> Self {
        let seen = copy.wrapping_add(watch::SEEN as u64 * 8);
        WatchHandle { value, stop, seen, reader: copy.wrapping_add(watch::READER as u64 * 8) }
    }
}

/// A FIFO as a kernel sees it: plain data, passed by value.
///
/// The layout is that of `portway::FifoHandle` in `fifo.cuh`. Addresses are valid while the [`Fifo`](crate::Fifo)
/// that made the handle lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FifoHandle {
    /// [`HANDLE_VERSION`].
    pub version: u32,
    /// Binary logarithm of the number of slots.
    pub shift: u32,
    /// The address of the first slot.
    pub slots: u64,
    /// The address of the head.
    pub head: u64,
    /// The tail, with the abort word as stop.
    pub tail: WatchHandle,
    /// The address of the tail's replica in device memory, written by the flusher alone; 0 if there is none.
    pub flushed: u64,
    /// The address of the host's record of a break.
    pub broken: u64,
    /// How long a call waits unless it is told otherwise, in nanoseconds.
    pub timeout_ns: u64,
}

const _: () = assert!(size_of::<FifoHandle>() == 80 && size_of::<WatchHandle>() == 32);
