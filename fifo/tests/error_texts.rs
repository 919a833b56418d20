//! Every error text of this crate, to be read as a whole: who, what, expected, seen, and what to do.
#![cfg(feature = "cuda")] // which has all of them

use core::time::Duration;
use std::collections::BTreeSet;

use portway_fifo::{Cause, Error, Place, Position};

fn texts() -> Vec<(Error, &'static str)> {
    use Error::*;
    vec![
        (Aborted, "the FIFO was aborted: reset it when nobody uses it"),
        (
            Alignment { what: "tail", address: 0x1001, align_bytes: 8 },
            "tail at 0x1001: the address must be a multiple of 8",
        ),
        (BatchLength { len: 0, slots: 64 }, "a batch of 0 triggers for a ring of 64 slots: must be 1 to 64"),
        (
            Busy { what: "the CUDA context", shares: 2 },
            "the CUDA context is still in use by 2 others: drop those first",
        ),
        (
            Compile { log: "kernel.cu(3): error: expected a `;`".into() },
            "device code does not compile:\nkernel.cu(3): error: expected a `;`",
        ),
        (
            Driver { call: "cuInit", status: 100, name: "CUDA_ERROR_NO_DEVICE".into() },
            "cuInit failed with status 100 (CUDA_ERROR_NO_DEVICE): look the status up under this function in its library's documentation",
        ),
        (
            MissingFunction { library: "libcuda.so.1".into(), function: "cuMemCreate" },
            "libcuda.so.1 has no function cuMemCreate: a newer one is needed",
        ),
        (
            NoLibrary { library: "libcuda.so.1".into(), reason: "no such file".into() },
            "libcuda.so.1 cannot be loaded: no such file",
        ),
        (
            Broken { cause: Cause::Timeout, position: Position(7) },
            "the FIFO is broken: the push at position 7 gave up (timeout) and left a gap: reset it when nobody uses it",
        ),
        (
            NotHostMemory { address: 0x1000, place: Place::Device(0) },
            "memory at 0x1000 (Device(0)) is not reached by the processor: take host memory, or let a kernel do it",
        ),
        (OutOfMemory { len_bytes: 4096 }, "no memory for 4096 bytes"),
        (
            Overlap { a: "slots", a_address: 0x1000, b: "tail", b_address: 0x1008 },
            "slots at 0x1000 overlaps tail at 0x1008",
        ),
        (
            Payload { words: [1 << 63, 2] },
            "trigger words 0x8000000000000000 and 0x0000000000000002: bit 63 of each belongs to the ring",
        ),
        (
            Range { what: "slots", offset_bytes: 8, len_bytes: 64, address: 0x1000, limit_bytes: 64 },
            "slots: 64 bytes at offset 8 of 0x1000 must be 1 byte or more and end within 64 bytes",
        ),
        (RingSize { slots: 63 }, "a ring of 63 slots: must be a power of two from 64 to 1048576"),
        (Stopped { what: "frontier", code: 3 }, "the wait for frontier was stopped with code 3"),
        (System { what: "shm_open", errno: 13 }, "shm_open failed: Permission denied (os error 13)"),
        (
            Timeout { what: "room", expected: 64, seen: 63, after: Duration::from_secs(5) },
            "waited 5s for room to reach 64; it stands at 63",
        ),
        (
            TimeoutRange { timeout: Duration::from_secs(7200) },
            "a timeout of 7200s: nothing here waits longer than 3600s",
        ),
        (
            Unsupported { what: "a dma-buf" },
            "not supported: a dma-buf; do without it, or use another memory, device or driver",
        ),
    ]
}

#[test]
fn every_text_is_what_is_written_here() {
    let mut seen = BTreeSet::new();
    for (error, text) in texts() {
        assert_eq!(error.to_string(), text);
        let debug = format!("{error:?}");
        seen.insert(debug.split([' ', '(', '{']).next().unwrap_or_default().to_owned());
    }
    let source = include_str!("../src/error.rs");
    let body = source.split("pub enum Error {").nth(1).expect("the enum");
    let variants = body.split("\n}").next().expect("its end").lines().filter_map(|line| {
        let rest = line.strip_prefix("    ")?;
        rest.starts_with(|first: char| first.is_ascii_uppercase())
            .then(|| rest.split([' ', '(', ',']).next())?
    });
    assert_eq!(seen, variants.map(str::to_owned).collect(), "every variant is read");
}
