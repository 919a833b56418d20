//! How many calls of the driver puts cost: each is microseconds in which the next op waits.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::time::Duration;

use portway_proxy::transport::Submit;
use portway_transport_ipc::Config;
use wire::{Machine, Wire, wait_until};

const COPY: &str = "cuMemcpyAsync";
const VALUE: &str = "cuStreamWriteValue64_v2";

/// Copies, values, and everything else that the executor has asked the driver for.
fn calls(machine: &Machine) -> [i64; 3] {
    let (copies, values) = (machine.standin.calls(COPY), machine.standin.calls(VALUE));
    [copies, values, machine.standin.all_calls() - copies - values]
}

/// What `body` and all that it has submitted cost.
fn cost(machine: &Machine, wire: &mut Wire, body: impl FnOnce(&mut Wire) -> usize) -> [i64; 3] {
    // A completion that nobody waits for comes a moment later.
    let settled = |machine: &Machine| {
        let mut last = [0; 3];
        let same = || {
            std::thread::sleep(Duration::from_millis(20));
            let before = std::mem::replace(&mut last, calls(machine));
            before == last
        };
        wait_until("calls that stand still", same, |same| *same);
        last
    };
    let before = settled(machine);
    let ops = body(wire);
    wire.complete(ops);
    let after = settled(machine);
    std::array::from_fn(|at| after[at] - before[at])
}

/// Submits ops and releases them together.
fn together(wire: &mut Wire, ops: &[(u64, bool, bool)]) -> usize {
    for &(len_bytes, signals, flush) in ops {
        let op = wire.op(len_bytes, None, flush);
        let signal = signals.then_some(op.sequence + 1);
        let op = portway_proxy::transport::Op { signal, ..op };
        assert_eq!(wire.a.submit(&op).unwrap(), Submit::Accepted);
    }
    wire.a.kick().unwrap();
    ops.len()
}

#[test]
fn puts_cost_no_more_calls_than_they_have_to() {
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    let mut wire = machine.wire(&transports);
    let put = (64, false, false);
    let cases: [(&str, Vec<_>, [i64; 3]); 5] = [
        ("a put with a signal", vec![(64, true, false)], [1, 2, 0]),
        ("the same with a flush", vec![(64, true, true)], [1, 2, 0]),
        (
            "a window of puts, a signal with the last, and a flush",
            [vec![put; 15], vec![(64, true, true)]].concat(),
            [16, 2, 0],
        ),
        ("32 puts with signals", vec![(64, true, false); 32], [32, 33, 0]),
        ("a bare signal", vec![(0, true, false)], [0, 0, 0]),
    ];
    for (what, ops, expected) in cases {
        let seen = cost(&machine, &mut wire, |wire| together(wire, &ops));
        assert_eq!(seen, expected, "{what}: copies, values, other calls");
    }
    // A flush by itself asks for the completion of what is in the stream, and for nothing more.
    let seen =
        cost(&machine, &mut wire, |wire| together(wire, &[put; 4]) + together(wire, &[(0, false, true)]));
    assert_eq!((seen[0], seen[2]), (4, 0), "{seen:?}");
    assert!((1..=4).contains(&seen[1]), "{seen:?}");
}

/// Nobody waits for it, and still everything is complete in the end; also through a port of the fewest places.
#[test]
fn completions_that_nobody_waits_for_come_all_the_same() {
    let machine = Machine::new();
    for depth in [2, 3, 256] {
        let transports = machine.transports(Config { depth, ..Config::default() });
        let mut wire = machine.wire(&transports);
        let mut complete = 0;
        for _ in 0..200 {
            let op = wire.op(64, None, false);
            wait_until(
                "room",
                || {
                    complete += wire::poll(&mut *wire.a).unwrap();
                    wire.a.submit(&op).unwrap()
                },
                |submit| *submit == Submit::Accepted,
            );
            wire.a.kick().unwrap();
        }
        wire.complete(200 - complete);
    }
}
