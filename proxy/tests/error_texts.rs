//! Every error text of this crate, to be read as a whole: who, what, expected, seen, and what to do.

use core::time::Duration;
use std::collections::BTreeSet;

use portway_fifo::Position;
use portway_proxy::transport::{Lane, Op, Put};
use portway_proxy::{ChannelError, Error, OpSet, Request, RequestFault, TransportError};

const AFTER: Duration = Duration::from_secs(5);

fn request() -> Request {
    Request { op: OpSet::PUT, channel: 3, size: 64, source_offset_bytes: 8, destination_offset_bytes: 16 }
}

fn transport() -> Vec<(TransportError, &'static str)> {
    use TransportError::*;
    let device = |status, vendor, source| Device { operation: "registering memory", status, vendor, source };
    let why = std::sync::Arc::new(std::io::Error::other("no such device"));
    vec![
        (
            Busy { address: 0x1000, ports: 2 },
            "the memory at 0x1000 is bound by 2 ports that are not quiesced: close them, and try again",
        ),
        (Closed, "the port is closed: connect another"),
        (
            Contract { what: "a second completion", lane: 1, sequence: 7 },
            "the port broke its contract: a second completion (lane 1, op 7): hold its transport to the conformance suite",
        ),
        (device(12, 0x81, None), "registering memory failed with status 12 (vendor code 129)"),
        (device(12, 0, None), "registering memory failed with status 12"),
        (device(0, 0x81, None), "registering memory failed with vendor code 129"),
        (device(0, 0, Some(why)), "registering memory failed: no such device"),
        (
            Lane { lane: 2, sequence: 7, lanes: 1 },
            "op 7 is of lane 2, and the port has bound 1: a lane's number comes from `Port::bind`",
        ),
        (
            Malformed { what: "memory export", expected: "40 bytes".into(), seen: "39 bytes".into() },
            "memory export: expected 40 bytes, seen 39 bytes",
        ),
        (
            Memory(portway_fifo::Error::Unsupported { what: "a dma-buf" }),
            "not supported: a dma-buf; do without it, or use another memory, device or driver",
        ),
        (
            Outside {
                lane: 1,
                sequence: 7,
                what: "destination",
                offset_bytes: 60,
                len_bytes: 8,
                limit_bytes: 64,
            },
            "op 7 of lane 1: 8 bytes at offset 60 of the destination: must be 1 byte or more and end within its 64 bytes",
        ),
        (
            Overlap { source_address: 0x1000, destination_address: 0x1008 },
            "the source at 0x1000 and the destination at 0x1008 share bytes: bind memories that do not",
        ),
        (
            Overreported { count: 3, room: 2 },
            "the port reported 3 completions into room for 2: hold its transport to the conformance suite",
        ),
        (
            Panicked { what: "the port", message: "index out of range".into() },
            "the port panicked: index out of range",
        ),
        (
            Remote { peer: "host1".into(), operation: "write", status: 12, vendor: 0x81 },
            "write to host1 failed with status 12 (vendor code 129): see what the peer says, and the way to it; go on over a new port",
        ),
        (
            Remote {
                peer: "process 7 (it has ended)".into(),
                operation: "a connection",
                status: 0,
                vendor: 0,
            },
            "a connection to process 7 (it has ended) failed: see what the peer says, and the way to it; go on over a new port",
        ),
        (
            Timeout { what: "the handshake", peer: "host1".into(), after: AFTER },
            "waited 5s for the handshake of host1: see whether it still runs and can be reached; wait longer if it is slow",
        ),
        (
            Unknown { what: "source", index: 4 },
            "source 4 is not known to this transport: it is another's, was released, or was forgotten",
        ),
    ]
}

fn channel() -> Vec<(ChannelError, &'static str)> {
    use ChannelError::*;
    let (fifo, channel, position) = (1, 3, Position(40));
    vec![
        (
            Deadline { fifo, channel, position, after: AFTER, sent: true },
            "channel 3 of FIFO 1: the op at position 40 is not complete after 5s (sent to the port: true); close the \
             port: until it is quiesced, later puts may still land and memory stays bound",
        ),
        (
            Fifo { fifo, channel, source: portway_fifo::Error::Aborted },
            "channel 3 of FIFO 1: the FIFO was aborted: reset it when nobody uses it",
        ),
        (
            Port { fifo, channel, source: TransportError::Closed },
            "channel 3 of FIFO 1: the port is closed: connect another",
        ),
        (
            Request {
                fifo,
                channel,
                position,
                fault: RequestFault::Source { limit_bytes: 64 },
                request: request(),
            },
            "channel 3 of FIFO 1: the trigger at position 40 is refused, it reads past the source region's 64 bytes: \
             Request { op: OpSet(1), channel: 3, size: 64, source_offset_bytes: 8, \
             destination_offset_bytes: 16 }; compare it with the memories that the channel is bound to",
        ),
        (Stopped { fifo, channel }, "channel 3 of FIFO 1: the proxy has stopped"),
    ]
}

fn calls() -> Vec<(Error, &'static str)> {
    use Error::*;
    vec![
        (
            Config { what: "window", value: 0, must_be: "a power of two" },
            "window is 0: must be a power of two",
        ),
        (
            Foreign { what: "FIFO", index: 2 },
            "FIFO 2 belongs to another engine: name one that this engine's own calls have returned",
        ),
        (
            InUse {
                what: "FIFO",
                index: 2,
                by: "a reset".into(),
                remedy: "try again when that has returned",
            },
            "FIFO 2 is in use by a reset: try again when that has returned",
        ),
        (
            Limit { what: "ports", limit: 4, remedy: "take another engine" },
            "the engine has 4 ports, as many as it can: take another engine",
        ),
        (
            Region { what: "inbound signal word", len_bytes: 4, must_be: "8 bytes" },
            "inbound signal word of 4 bytes: must be 8 bytes",
        ),
        (
            Request { request: request(), fault: RequestFault::Empty },
            "its size is 0: Request { op: OpSet(1), channel: 3, size: 64, source_offset_bytes: 8, \
             destination_offset_bytes: 16 }",
        ),
        (
            Thread { what: "starting the engine's thread", message: "no more threads".into() },
            "starting the engine's thread: no more threads",
        ),
        (
            Unresponsive { after: AFTER },
            "the engine's thread did not answer within 5s: it is inside a call of a port, as `Proxy::report` shows; \
             `Proxy::stop` ends every wait and names it",
        ),
    ]
}

/// The name of a variant, from what Debug makes of it.
fn variant(error: &impl core::fmt::Debug) -> String {
    let text = format!("{error:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

/// The variants of an enum of `error.rs`, by their attributes.
fn declared(name: &str) -> BTreeSet<String> {
    let source = include_str!("../src/error.rs");
    let body = source.split(&format!("pub enum {name} {{")).nth(1).expect("the enum");
    let body = body.split("\n}").next().expect("its end");
    let variants = body.lines().filter(|line| {
        line.strip_prefix("    ")
            .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
    });
    variants.map(|line| line.trim().split([' ', '(', ',']).next().expect("a name").to_owned()).collect()
}

fn read<E: std::error::Error>(name: &str, texts: &[(E, &str)], transparent: &[&str]) {
    let mut seen: BTreeSet<String> = transparent.iter().map(|name| (*name).to_owned()).collect();
    for (error, text) in texts {
        assert_eq!(error.to_string(), *text);
        seen.insert(variant(error));
    }
    assert_eq!(seen, declared(name), "every variant of {name} is read");
}

#[test]
fn every_text_is_what_is_written_here() {
    read("TransportError", &transport(), &[]);
    read("ChannelError", &channel(), &[]);
    read("Error", &calls(), &["Channel", "Fifo", "Transport"]); // whose texts are those of what they carry
}

#[test]
fn an_op_that_a_port_must_not_carry_out_is_named() {
    let put = |source_offset_bytes, destination_offset_bytes, len_bytes| Op {
        lane: Lane(0),
        sequence: 1,
        put: Some(Put { source_offset_bytes, destination_offset_bytes, len_bytes }),
        signal: None,
        flush: false,
    };
    let of = |op: Op, lanes| TransportError::of_op(&op, lanes, |_| [64, 32]);
    let outside = |op| match of(op, 1) {
        None => "nothing",
        Some(TransportError::Outside { what, .. }) => what,
        Some(other) => panic!("{other}"),
    };
    assert_eq!(outside(Op { put: None, ..put(0, 0, 0) }), "nothing");
    for (op, what) in [
        (put(0, 0, 32), "nothing"),
        (put(63, 31, 1), "nothing"),
        (put(0, 0, 0), "source"),
        (put(64, 0, 1), "source"),
        (put(0, 1, 32), "destination"),
        (put(0, 0, 33), "destination"),
        (put(u64::MAX, 0, 2), "source"),
        (put(0, u64::MAX, 2), "destination"),
        (put(0, 0, u64::MAX), "source"),
    ] {
        assert_eq!(outside(op), what, "{op:?}");
    }
    // Of no lane, with or without a put that could be looked at.
    for op in [put(0, 0, 32), Op { put: None, ..put(0, 0, 0) }] {
        assert!(matches!(of(op, 0), Some(TransportError::Lane { lane: 0, sequence: 1, lanes: 0 })));
    }
}
