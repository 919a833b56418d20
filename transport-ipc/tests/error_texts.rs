//! Every error text of this crate, to be read as a whole: who, what, expected, seen, and what to do.

use core::time::Duration;
use std::collections::BTreeSet;

use portway_fifo::Place;
use portway_proxy::TransportError;
use portway_transport_ipc::{Cause, Error, StalledIn, Way};

fn texts() -> Vec<(Error, &'static str)> {
    use Error::*;
    let after = Duration::from_secs(5);
    let peer = || "process 7".to_owned();
    let driver =
        |call| portway_fifo::Error::Driver { call, status: 2, name: "CUDA_ERROR_OUT_OF_MEMORY".into() };
    let device = core::array::from_fn(|at| at as u8);
    vec![
        (
            Config { what: "depth", value: 0, must_be: "a power of two" },
            "configuration of the transport: depth is 0, must be a power of two",
        ),
        (
            Memory { address: 0x1000, place: Place::Host },
            "memory at 0x1000 (Host) is not reached by the GPU: allocate it through its context",
        ),
        (
            OtherDevice { expected: 0, seen: 1 },
            "memory of device 1, registered with the transport of device 0: register it with one of device 1",
        ),
        (
            Pool { address: 0x1000 },
            "memory at 0x1000 comes from a stream-ordered pool (cuMemAllocAsync), which is not exported: use \
             cuMemAlloc or cuMemCreate",
        ),
        (
            Export {
                address: 0x1000,
                len_bytes: 64,
                tried: vec![
                    (Some(Way::Fabric), driver("cuMemExportToShareableHandle")),
                    (None, driver("cuPointerGetAttribute")),
                ],
            },
            "memory at 0x1000 (64 bytes) is exported in no form, expected one or more: Fabric: \
             cuMemExportToShareableHandle failed with status 2 (CUDA_ERROR_OUT_OF_MEMORY): look the status up under \
             this function in its library's documentation; cuPointerGetAttribute failed with status 2 \
             (CUDA_ERROR_OUT_OF_MEMORY): look the status up under this function in its library's documentation; \
             export it again once the cause is gone, or register memory of another allocation",
        ),
        (
            Driver { peer: peer(), operation: "copy", len_bytes: 64, source: driver("cuMemcpyDtoDAsync") },
            "copy of 64 bytes to process 7: cuMemcpyDtoDAsync failed with status 2 (CUDA_ERROR_OUT_OF_MEMORY): look \
             the status up under this function in its library's documentation; the port has ended, connect another \
             once the device works",
        ),
        (SameProcess, "a legacy handle of this very process: open the second transport with Ipc::beside"),
        (
            Gone { peer: peer(), why: "it has ended" },
            "process 7 is gone: it has ended; connect to a new endpoint of it, and import anew",
        ),
        (
            Silent { peer: peer(), after },
            "process 7 did not answer within 5s: it is stopped, or overloaded; `Config::ask_timeout` says how long to \
             wait",
        ),
        (
            Refused { peer: peer(), expected: 1000, seen: 0 },
            "process 7 runs as user 0, expected 1000: both ends have to be of one user",
        ),
        (
            Released { peer: peer(), index: 3 },
            "process 7 has released memory 3, whose export this is: ask it for an export of what it uses now",
        ),
        (
            Stale { peer: peer() },
            "the imported memory has been freed by process 7, which uses its addresses again: forget the import, and \
             ask for a new export",
        ),
        (
            Hidden { device, visible: Some("1".into()), why: "no device has this UUID".into() },
            "device GPU-00010203-0405-0607-0809-0a0b0c0d0e0f is not visible to this process \
             (CUDA_VISIBLE_DEVICES=1), make it so: no device has this UUID",
        ),
        (
            Hidden { device, visible: None, why: "no device has this UUID".into() },
            "device GPU-00010203-0405-0607-0809-0a0b0c0d0e0f is not visible to this process \
             (CUDA_VISIBLE_DEVICES=unset), make it so: no device has this UUID",
        ),
        (
            NoPeerAccess { ours: device, theirs: [0xff; 16] },
            "device GPU-00010203-0405-0607-0809-0a0b0c0d0e0f does not reach the memory of device \
             GPU-ffffffff-ffff-ffff-ffff-ffffffffffff: no peer access; `nvidia-smi topo -p2p r` shows which do",
        ),
        (
            NoWay {
                peer: peer(),
                tried: vec![(Way::Fabric, "not exported".into()), (Way::Legacy, "not exported".into())],
            },
            "no way of `Config::ways` to the memory of process 7 is open: Fabric: not exported; Legacy: not exported",
        ),
        (
            NoWay { peer: peer(), tried: vec![] },
            "no way of `Config::ways` to the memory of process 7 is open: nothing to try",
        ),
        (
            OtherMachine { peer: peer() },
            "process 7 runs on another machine: this transport connects GPUs of one, and the verbs transport the others",
        ),
        (
            System { operation: "pidfd_open", errno: 3 },
            "pidfd_open failed with errno 3 (No such process (os error 3)): see the limits of this process, and what it \
             may do",
        ),
        (
            Unfit { device: "A device".into(), why: "it has no unified addressing" },
            "device A device is not fit: it has no unified addressing; use another device or transport",
        ),
        (
            Stalled {
                peer: peer(),
                place: StalledIn::Copy,
                causes: &[Cause::Free, Cause::OneConnection],
                after,
            },
            "the executor for process 7 is stalled in the driver's call for a copy for 5s; likely: a call that waits \
             for the device, such as cudaFree, is in progress; or work of another stream is in front, since \
             CUDA_DEVICE_MAX_CONNECTIONS is 1. Free device memory only while no kernel waits for a put. Raise \
             CUDA_DEVICE_MAX_CONNECTIONS, or unset it.",
        ),
        (
            Stalled { peer: peer(), place: StalledIn::Stream, causes: &[Cause::LazyLoading], after },
            "the executor for process 7 is stalled in its stream, which does not run for 5s; likely: the first launch \
             of a kernel, which is loaded lazily. Set CUDA_MODULE_LOADING=EAGER, or load every kernel beforehand.",
        ),
        (
            Stalled { peer: peer(), place: StalledIn::WriteValue, causes: &[Cause::Device], after },
            "the executor for process 7 is stalled in the driver's call for a value for 5s; likely: the device is busy \
             with other work. See what else the device has to do.",
        ),
        (
            Unquiesced { peer: peer(), after },
            "what was submitted to process 7 is not done 5s after the port was closed: stream and memory stay in \
             quarantine until the process ends",
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

/// Behind the traits of the proxy each is the source, which has the whole text; of a peer that is gone, or silent, the proxy
/// has variants of its own.
#[test]
fn the_proxys_error_leads_to_the_whole_text() {
    for (error, text) in texts() {
        let of_its_own = match &error {
            Error::Gone { .. } => Some("a connection to process 7 (it has ended) failed"),
            Error::Silent { .. } => Some("waited 5s for an answer of process 7"),
            _ => None,
        };
        let told = TransportError::from(error);
        match of_its_own {
            Some(start) => assert!(told.to_string().starts_with(start), "{told}"),
            None => assert_eq!(Error::of(&told).map(Error::to_string).as_deref(), Some(text)),
        }
    }
}
