//! Peers that close their port, or drop their transport, while their process lives: puts end in an error that names them.
//! And what a connection costs that nobody uses.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::time::{Duration, Instant};

use portway_fifo::cuda::Kind;
use portway_proxy::TransportError;
use portway_proxy::transport::Transport;
use portway_transport_ipc::{Config, Error, Ipc};
use wire::{Machine, PATIENCE, Wire, close, wait_until};

/// Long after an executor has looked whether its peer is there.
const LATER: Duration = Duration::from_millis(100);

/// Two transports: of one hub, or of two that reach each other over sockets as two processes do.
fn transports(machine: &Machine, apart: bool) -> [Ipc; 2] {
    if !apart {
        return machine.transports(Config::default());
    }
    [0, 1].map(|at| Ipc::open(&machine.contexts[at], Config::default()).unwrap())
}

/// How a peer leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    Closes,
    Drops,
    DropsAll,
}

fn left(wire: &mut Wire, far: Ipc, leaving: Leaving) {
    match leaving {
        Leaving::Closes => drop(wire.b.close().unwrap()),
        Leaving::Drops => drop(std::mem::replace(&mut wire.b, Box::new(Nobody))),
        Leaving::DropsAll => {
            drop(std::mem::replace(&mut wire.b, Box::new(Nobody)));
            drop(far);
        }
    }
}

/// Takes the place of a port that was dropped.
#[derive(Debug)]
struct Nobody;

impl portway_proxy::transport::Port for Nobody {
    fn bind(
        &mut self,
        _: &portway_proxy::transport::Binding,
    ) -> Result<portway_proxy::transport::Lane, TransportError> {
        Err(TransportError::Closed)
    }

    fn submit(
        &mut self,
        _: &portway_proxy::transport::Op,
    ) -> Result<portway_proxy::transport::Submit, TransportError> {
        Err(TransportError::Closed)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        Err(TransportError::Closed)
    }

    fn poll(&mut self, _: &mut [portway_proxy::transport::Completion]) -> Result<usize, TransportError> {
        Err(TransportError::Closed)
    }

    fn close(&mut self) -> Result<portway_proxy::transport::Close, TransportError> {
        Ok(portway_proxy::transport::Close::Quiesced)
    }
}

#[test]
fn puts_to_a_peer_that_has_left_end_in_its_name() {
    for apart in [false, true] {
        for leaving in [Leaving::Closes, Leaving::Drops, Leaving::DropsAll] {
            let machine = Machine::new();
            let pair = transports(&machine, apart);
            let mut wire = Wire::over(&pair, &machine.contexts, Kind::Vmm);
            let [near, far] = pair;
            wire.submit(64, Some(1), true);
            wire.complete(1);
            // Control: as long as the peer is there, nothing happens.
            std::thread::sleep(LATER);
            wire::poll(&mut *wire.a).unwrap();
            let start = Instant::now();
            left(&mut wire, far, leaving);
            let error = wait_until(
                "the port's error",
                || {
                    let op = wire.op(64, None, false);
                    let submitted = wire.a.submit(&op).and_then(|_| wire.a.kick());
                    submitted.and_then(|()| wire::poll(&mut *wire.a)).err()
                },
                Option::is_some,
            );
            assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
            match error.unwrap() {
                TransportError::Remote { peer, .. } => {
                    let name = format!("this process ({})", std::process::id());
                    assert!(
                        peer.contains(&name) && peer.contains("closed its port"),
                        "{peer}, {apart}, {leaving:?}"
                    );
                }
                other => panic!("{other:?}, {apart}, {leaving:?}"),
            }
            close(&mut *wire.a);
            assert_eq!(near.quarantined(), Default::default());
        }
    }
}

/// A peer may close its port as soon as it has what it wanted: what was done by then is complete, and not lost.
#[test]
fn what_was_done_before_the_peer_left_is_complete() {
    let machine = Machine::new();
    let pair = transports(&machine, false);
    let mut wire = machine.wire(&pair);
    wire.submit(64, Some(1), true);
    wait_until("the signal", || wire.word_value(), |value| *value == 1);
    close(&mut *wire.b);
    // The executor has seen both by now, and nobody has polled.
    std::thread::sleep(LATER);
    wire.complete(1);
    assert!(matches!(wire.failure(), TransportError::Remote { .. }));
    assert!(matches!(wire::poll(&mut *wire.a), Err(TransportError::Remote { .. })));
    close(&mut *wire.a);
}

/// The same where the executor notices that the peer has left before the completion has been written, or asked for.
#[test]
fn what_is_in_the_stream_when_the_peer_leaves_is_complete() {
    let machine = Machine::new();
    let leaves = |wire: &mut Wire, go_on: &dyn Fn()| {
        close(&mut *wire.b);
        // Time enough to notice it, and a small part of what the puts may take then.
        std::thread::sleep(LATER);
        go_on();
        wire.complete(2);
        assert_eq!(wire.word_value(), 1);
        assert!(matches!(wire.failure(), TransportError::Remote { .. }));
        close(&mut *wire.a);
    };
    // No completion has been asked for.
    let pair = machine.transports(Config { stall_limit: Duration::from_secs(500), ..Config::default() });
    let mut wire = machine.wire(&pair);
    machine.standin.hold_next("cuMemcpyAsync");
    wire.submit(64, Some(1), false);
    wire.submit(64, None, false);
    machine.standin.wait_until_held("cuMemcpyAsync", 1);
    leaves(&mut wire, &|| machine.standin.release("cuMemcpyAsync"));
    // It has been asked for, and the stream does not get there.
    let mut wire = machine.wire(&pair);
    machine.standin.set("paused", 1);
    wire.submit(64, Some(1), false);
    wire.submit(64, None, true);
    leaves(&mut wire, &|| machine.standin.set("paused", 0));
}

/// An end that connects to nobody gives its stream back.
#[test]
fn an_endpoint_that_nobody_uses_costs_no_stream() {
    let machine = Machine::new();
    let [near, far] = machine.transports(Config::default());
    drop(near.endpoint().unwrap());
    let streams = machine.standin.calls("cuStreamCreate");
    for round in 0..20 {
        let (endpoint, _) = near.endpoint().unwrap();
        if round % 2 == 0 {
            let (gone, bytes) = far.endpoint().unwrap();
            drop(gone);
            let error = endpoint.connect(&bytes, PATIENCE).err().unwrap();
            assert!(matches!(error, TransportError::Remote { .. }), "{error:?}");
        }
    }
    // One more for the other transport's ends.
    assert_eq!(machine.standin.calls("cuStreamCreate") - streams, 1);
    assert_eq!(machine.contexts[0].reclaim().unwrap(), Default::default());
    assert_eq!(machine.standin.calls("cuStreamDestroy_v2"), 0);
}

/// What the driver fails with comes back with its status, and the next try may succeed.
#[test]
fn an_export_that_fails_says_why_and_may_be_tried_again() {
    const OPERATING_SYSTEM: i32 = 304;
    for (kind, function) in [
        (Kind::Vmm, "cuMemExportToShareableHandle"),
        (Kind::Legacy, "cuIpcGetMemHandle"),
        (Kind::Legacy, "cuPointerGetAttribute"),
    ] {
        let machine = Machine::new();
        let [near, far] = transports(&machine, true);
        let memory = near.register(&machine.contexts[0].allocate(kind, 4096).unwrap()).unwrap();
        machine.standin.fail_always(function, OPERATING_SYSTEM);
        for _ in 0..2 {
            let error = near.export(&memory).unwrap_err();
            assert!(matches!(error, TransportError::Device { status: OPERATING_SYSTEM, .. }), "{error:?}");
            let text = Error::of(&error).unwrap().to_string();
            let address = format!("{:#x}", memory.region.address());
            for part in [address.as_str(), "4096 bytes", function, "304"] {
                assert!(text.contains(part), "no {part} in: {text}");
            }
        }
        machine.standin.fail_no_more(function);
        let bytes = near.export(&memory).unwrap();
        if kind == Kind::Vmm {
            far.import(&bytes).unwrap();
        }
    }
}
