//! Host and device agree on what they share: the C++ compiler's sizes, offsets and constants are ours.

#![cfg(not(any(loom, miri)))]

mod device;

use std::mem::{align_of, offset_of};

use device::status;
use portway_fifo::{FifoHandle, HANDLE_VERSION, MAX_TIMEOUT, Trigger, WatchHandle};

#[test]
fn the_cpp_compiler_sees_the_same_layout() {
    let Some(device) = device::device() else { return };
    let size = |bytes: usize| bytes as u64;
    macro_rules! offset {
        ($type:ident, $field:ident) => {
            (concat!(stringify!($type), ".", stringify!($field)), size(offset_of!($type, $field)))
        };
    }
    let ours = [
        ("sizeof FifoHandle", size(size_of::<FifoHandle>())),
        ("alignof FifoHandle", size(align_of::<FifoHandle>())),
        ("sizeof WatchHandle", size(size_of::<WatchHandle>())),
        ("alignof WatchHandle", size(align_of::<WatchHandle>())),
        ("sizeof Trigger", size(size_of::<Trigger>())),
        offset!(FifoHandle, version),
        offset!(FifoHandle, shift),
        offset!(FifoHandle, slots),
        offset!(FifoHandle, head),
        offset!(FifoHandle, tail),
        offset!(FifoHandle, flushed),
        offset!(FifoHandle, broken),
        offset!(FifoHandle, timeout_ns),
        offset!(WatchHandle, value),
        offset!(WatchHandle, stop),
        offset!(WatchHandle, seen),
        offset!(WatchHandle, reader),
        ("kOk", status::OK),
        ("kTimeout", status::TIMEOUT),
        ("kAborted", status::ABORTED),
        ("kBrokenByTimeout", status::BROKEN_BY_TIMEOUT),
        ("kBrokenByAbort", status::BROKEN_BY_ABORT),
        ("kInvalid", status::INVALID),
        ("kHandleVersion", HANDLE_VERSION.into()),
        ("kMaxTimeoutNs", MAX_TIMEOUT.as_nanos() as u64),
        ("kParity", 1 << 63),
    ];
    let theirs = device.facts();
    let theirs: Vec<(&str, u64)> = theirs.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(theirs, ours, "the device header, then layout.rs");
    // Every byte of a handle is a field that was compared: the fields are words, but for the first two halves.
    assert_eq!(size_of::<WatchHandle>(), 4 * 8);
    assert_eq!(size_of::<FifoHandle>(), 2 * 4 + 2 * 8 + size_of::<WatchHandle>() + 3 * 8);
}
