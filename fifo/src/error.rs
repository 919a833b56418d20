//! [`Error`]: what can go wrong, by whose fault.

use core::time::Duration;

use crate::{Place, Position};

/// Why a FIFO broke: the reason that the push at the break gave up for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// There was no room within the timeout.
    Timeout,
    /// The FIFO was aborted while the push waited for room.
    Abort,
}

impl core::fmt::Display for Cause {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Cause::Timeout => "timeout",
            Cause::Abort => "abort",
        })
    }
}

/// The errors of this crate.
///
/// By who is at fault:
/// - **the caller**: `Alignment`, `BatchLength`, `NotHostMemory`, `Overlap`, `Payload`, `Range`, `RingSize`,
///   `TimeoutRange`;
/// - **the other side of the ring** or the program around it: `Aborted`, `Broken`, `Stopped`, `Timeout`;
/// - **the system**: `OutOfMemory`, `System`, `Unsupported`.
///
/// The feature `cuda` adds, of the caller's: `Busy`, `Compile`; of the system's: `Driver`, `MissingFunction`,
/// `NoLibrary`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The FIFO was aborted before the call took a position: nothing is lost, and a reset opens it again.
    #[error("the FIFO was aborted: reset it when nobody uses it")]
    Aborted,
    /// An address is not aligned as its use needs.
    #[error("{what} at {address:#x}: the address must be a multiple of {align_bytes}")]
    Alignment {
        /// What lies there.
        what: &'static str,
        /// The address.
        address: u64,
        /// The alignment that is needed.
        align_bytes: u64,
    },
    /// A batch is empty or has more triggers than the ring has slots.
    #[error("a batch of {len} triggers for a ring of {slots} slots: must be 1 to {slots}")]
    BatchLength {
        /// Triggers in the batch.
        len: usize,
        /// Slots of the ring.
        slots: u64,
    },
    /// Something is still in use, so it cannot be given back.
    #[cfg(feature = "cuda")]
    #[error("{what} is still in use by {shares} others: drop those first")]
    Busy {
        /// What is in use.
        what: &'static str,
        /// How many others use it.
        shares: u64,
    },
    /// Device code does not compile.
    #[cfg(feature = "cuda")]
    #[error("device code does not compile:\n{log}")]
    Compile {
        /// The compiler's messages.
        log: String,
    },
    /// A call into a library of the system's, the CUDA driver or its compiler, failed.
    #[cfg(feature = "cuda")]
    #[error(
        "{call} failed with status {status} ({name}): look the status up under this function in its library's documentation"
    )]
    Driver {
        /// The function.
        call: &'static str,
        /// The status that it returned.
        status: i32,
        /// The library's name for the status; "unknown" if it has none.
        name: String,
    },
    /// A library of the system's lacks a function that is needed: it is too old.
    #[cfg(feature = "cuda")]
    #[error("{library} has no function {function}: a newer one is needed")]
    MissingFunction {
        /// The library.
        library: String,
        /// The function.
        function: &'static str,
    },
    /// A library that is loaded when first used is not there.
    #[cfg(feature = "cuda")]
    #[error("{library} cannot be loaded: {reason}")]
    NoLibrary {
        /// The library.
        library: String,
        /// What the system says.
        reason: String,
    },
    /// A push gave up after it had taken its position, so the triggers from there on cannot be delivered.
    #[error(
        "the FIFO is broken: the push at position {position} gave up ({cause}) and left a gap: reset it when nobody uses it"
    )]
    Broken {
        /// Why the push gave up.
        cause: Cause,
        /// The position that it had taken.
        position: Position,
    },
    /// The processor was to reach memory that it cannot.
    #[error(
        "memory at {address:#x} ({place:?}) is not reached by the processor: take host memory, or let a kernel do it"
    )]
    NotHostMemory {
        /// The first address.
        address: u64,
        /// Where it lies.
        place: Place,
    },
    /// The system has no more memory.
    #[error("no memory for {len_bytes} bytes")]
    OutOfMemory {
        /// The length asked for.
        len_bytes: u64,
    },
    /// Two memories that must be apart share bytes.
    #[error("{a} at {a_address:#x} overlaps {b} at {b_address:#x}")]
    Overlap {
        /// The first memory's role.
        a: &'static str,
        /// Its address.
        a_address: u64,
        /// The second memory's role.
        b: &'static str,
        /// Its address.
        b_address: u64,
    },
    /// A payload uses bit 63 of a word, which belongs to the ring.
    #[error("trigger words {:#018x} and {:#018x}: bit 63 of each belongs to the ring", words[0], words[1])]
    Payload {
        /// Both words.
        words: [u64; 2],
    },
    /// A range is empty, begins at address 0, or ends past what it is part of or past the address space.
    #[error(
        "{what}: {len_bytes} bytes at offset {offset_bytes} of {address:#x} must be 1 byte or more and end within {limit_bytes} bytes"
    )]
    Range {
        /// What the range was to be.
        what: &'static str,
        /// Its offset.
        offset_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// The address that the offset counts from.
        address: u64,
        /// The length of what it is part of.
        limit_bytes: u64,
    },
    /// A ring size that is not a power of two, or out of range.
    #[error(
        "a ring of {slots} slots: must be a power of two from {} to {}",
        crate::MIN_SLOTS,
        crate::MAX_SLOTS
    )]
    RingSize {
        /// The size asked for.
        slots: u64,
    },
    /// The stop word ended a wait on a [`Watch`](crate::Watch).
    #[error("the wait for {what} was stopped with code {code}")]
    Stopped {
        /// What was waited for.
        what: &'static str,
        /// The stop word.
        code: u64,
    },
    /// The system refused what a [`Memory`](crate::Memory) or a [`Platform`](crate::Platform) asked of it. For
    /// implementations elsewhere: this crate makes none.
    #[error("{what} failed: {}", std::io::Error::from_raw_os_error(*.errno))]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's number of the error.
        errno: i32,
    },
    /// A wait's time was over.
    #[error("waited {after:?} for {what} to reach {expected}; it stands at {seen}")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// The value that would have ended the wait.
        expected: u64,
        /// The value at the end.
        seen: u64,
        /// The timeout.
        after: Duration,
    },
    /// A timeout longer than [`MAX_TIMEOUT`](crate::MAX_TIMEOUT).
    #[error("a timeout of {timeout:?}: nothing here waits longer than {:?}", crate::MAX_TIMEOUT)]
    TimeoutRange {
        /// The timeout asked for.
        timeout: Duration,
    },
    /// A memory cannot do this.
    #[error("not supported: {what}; do without it, or use another memory, device or driver")]
    Unsupported {
        /// What was asked of it.
        what: &'static str,
    },
}
