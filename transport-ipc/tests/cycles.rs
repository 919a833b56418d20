//! A thousand connections one after the other, and a thousand that end badly: threads, descriptors, mappings, streams and
//! memory stay as many as they were. The only test of this program, since it counts what the process has.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/peer.rs"]
mod peer;
mod support;
#[path = "support/wire.rs"]
mod wire;

use std::time::Duration;

use portway_fifo::cuda::{Context, Driver, Kind};
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, LocalMemory, Op, Port, Put, RemoteMemory, Transport};
use portway_transport_ipc::{Config, Ipc};
use wire::{Machine, PATIENCE, Wire, close, wait_until};

const CYCLES: u64 = 1_000;

/// Cycles after which everything that is made once is there.
const WARM: u64 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    threads: usize,
    descriptors: usize,
    mappings: usize,
    driver_objects: i64,
}

fn counts(machine: &Machine) -> Counts {
    let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
    Counts {
        threads: entries("/proc/self/task"),
        descriptors: entries("/proc/self/fd"),
        mappings: std::fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
        driver_objects: machine.standin.live(),
    }
}

fn reclaim(contexts: &[Context; 2]) {
    for context in contexts {
        context.reclaim().unwrap();
    }
}

/// What one cycle does, from a connection to the last thing that is released.
fn cycle(machine: &Machine, transports: &[Ipc; 2], round: u64) {
    let Wire { mut a, mut b, source, destination, word, remotes, lane, .. } =
        Wire::between(transports, &machine.contexts);
    let put = Some(Put { source_offset_bytes: 0, destination_offset_bytes: 0, len_bytes: 64 });
    let op = |sequence| Op { lane, sequence, put, signal: Some(sequence + 1), flush: true };
    a.submit(&op(0)).unwrap();
    a.kick().unwrap();
    wait_until("a put", || wire::poll(&mut *a).unwrap(), |done| *done == 1);
    match round % 5 {
        // Closed in the middle of a put.
        0 => {
            a.submit(&op(1)).unwrap();
            a.kick().unwrap();
        }
        // While the driver does not come back.
        1 => {
            machine.standin.hold_next("cuMemcpyAsync");
            a.submit(&op(1)).unwrap();
            a.kick().unwrap();
            machine.standin.wait_until_held("cuMemcpyAsync", 1);
            a.close().unwrap();
            machine.standin.release("cuMemcpyAsync");
        }
        // After a failure of the driver.
        2 => {
            machine.standin.fail("cuMemcpyAsync", 1, 719);
            a.submit(&op(1)).unwrap();
            a.kick().unwrap();
            wait_until("the error", || wire::poll(&mut *a).err(), Option::is_some);
        }
        // While the stream does not run.
        3 => {
            machine.standin.set("paused", 1);
            a.submit(&op(1)).unwrap();
            a.kick().unwrap();
            a.close().unwrap();
            machine.standin.set("paused", 0);
        }
        _ => {}
    }
    close(&mut *a);
    close(&mut *b);
    drop((a, b));
    give_back(transports, [&source, &destination, &word], &remotes);
}

/// The same between transports that do not know each other: descriptors, sockets and mappings come and go.
fn cycle_apart(machine: &Machine) {
    let [near, far] = [0, 1].map(|at| Ipc::open(&machine.contexts[at], Config::default()).unwrap());
    let memory = far.register(&machine.contexts[1].allocate(Kind::Vmm, 4096).unwrap()).unwrap();
    let word = far.signal_word().unwrap();
    let [destination, signal] = [&memory, &word].map(|m| near.import(&far.export(m).unwrap()).unwrap());
    let ((a_end, a_bytes), (b_end, b_bytes)) = (near.endpoint().unwrap(), far.endpoint().unwrap());
    let mut a: Box<dyn Port> = a_end.connect(&b_bytes, PATIENCE).unwrap();
    let mut b: Box<dyn Port> = b_end.connect(&a_bytes, PATIENCE).unwrap();
    let source = near.register(&machine.contexts[0].allocate(Kind::Vmm, 4096).unwrap()).unwrap();
    let binding = Binding { source: source.id, destination: destination.id, signal: signal.id };
    a.bind(&binding).unwrap();
    close(&mut *a);
    close(&mut *b);
}

/// What ends a connection before its time.
fn cycle_that_ends_badly(machine: &Machine, transports: &[Ipc; 2], round: u64) {
    const CONTEXT_IS_DESTROYED: i32 = 709;
    match round % 4 {
        // The peer's process is killed while puts to it are held.
        0 => {
            let hold = |hold: bool| machine.standin.set("paused", hold.into());
            let legacy = round % 8 == 0;
            let context = &machine.contexts[0];
            peer::killed_in_the_middle_of_a_put(NAME, machine.standin.path(), context, legacy, hold);
        }
        // The application destroys its context under traffic: nothing works any more.
        1 => {
            let failing = ["cuMemcpyAsync", "cuStreamWriteValue64_v2", "cuStreamQuery"];
            let mut wire = machine.wire(transports);
            wire.submit(64, Some(1), false);
            failing.iter().for_each(|function| machine.standin.fail_always(function, CONTEXT_IS_DESTROYED));
            let op = wire.op(64, Some(2), true);
            // By the completion of the first the port may have failed already.
            let _ = wire.a.submit(&op).and_then(|_| wire.a.kick());
            let error = wire.failure();
            assert!(
                matches!(error, TransportError::Device { status: CONTEXT_IS_DESTROYED, .. }),
                "{error:?}"
            );
            close(&mut *wire.a);
            failing.iter().for_each(|function| machine.standin.fail_no_more(function));
            close(&mut *wire.b);
            give_back(transports, [&wire.source, &wire.destination, &wire.word], &wire.remotes);
        }
        // Everything is dropped while the driver holds a copy.
        2 => {
            let mut wire = machine.wire(transports);
            machine.standin.hold_next("cuMemcpyAsync");
            wire.submit(64, Some(1), false);
            machine.standin.wait_until_held("cuMemcpyAsync", 1);
            let Wire { a, b, source, destination, word, remotes, .. } = wire;
            drop((a, b));
            machine.standin.release("cuMemcpyAsync");
            wait_until("an empty quarantine", || transports[0].quarantined().executors, |held| *held == 0);
            wait_until("an empty quarantine", || transports[1].quarantined().executors, |held| *held == 0);
            give_back(transports, [&source, &destination, &word], &remotes);
        }
        // The peer closes its port under traffic.
        _ => {
            let mut wire = machine.wire(transports);
            wire.submit(64, Some(1), true);
            wire.complete(1);
            close(&mut *wire.b);
            wire.failure();
            close(&mut *wire.a);
            give_back(transports, [&wire.source, &wire.destination, &wire.word], &wire.remotes);
        }
    }
}

/// Of one side the source, of the other destination and word, and what was imported of these.
fn give_back([near, far]: &[Ipc; 2], memories: [&LocalMemory; 3], remotes: &[RemoteMemory; 2]) {
    let [source, destination, word] = memories;
    near.release(source).unwrap();
    far.release(destination).unwrap();
    far.release(word).unwrap();
    for remote in remotes {
        near.forget(remote).unwrap();
    }
}

/// Runs cycles, and compares what there is after the first few with what there is at the end.
fn nothing_is_left(what: &str, cycles: u64, machine: &Machine, mut cycle: impl FnMut(u64)) {
    let mut first = None;
    for round in 0..cycles {
        cycle(round);
        reclaim(&machine.contexts);
        if round == WARM {
            first = Some(settled(machine));
        }
    }
    let (first, last) = (first.unwrap(), settled(machine));
    println!("{what}: {first:?} after {WARM} cycles, {last:?} after {cycles}");
    assert_eq!((last.threads, last.descriptors), (first.threads, first.descriptors), "{what}");
    assert_eq!(last.driver_objects, first.driver_objects, "{what}");
    // The system merges and splits mappings, and the allocator keeps some.
    assert!(last.mappings <= first.mappings + 20, "{what}: {first:?}, then {last:?}");
}

/// What there is once threads that are ending have ended.
fn settled(machine: &Machine) -> Counts {
    let mut last = counts(machine);
    wait_until(
        "counts that stand still",
        || {
            std::thread::sleep(Duration::from_millis(20));
            reclaim(&machine.contexts);
            let (before, now) = (last, counts(machine));
            last = now;
            before == now
        },
        |still| *still,
    );
    last
}

const NAME: &str = "a_thousand_cycles_leave_nothing";

#[test]
fn a_thousand_cycles_leave_nothing() {
    if let Some(path) = support::child() {
        peer::child(&Driver::open(&path).unwrap(), 1);
    }
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    nothing_is_left("one pair of transports", CYCLES, &machine, |round| cycle(&machine, &transports, round));
    nothing_is_left("ends before their time", CYCLES, &machine, |round| {
        cycle_that_ends_badly(&machine, &transports, round);
    });
    assert_eq!(transports[0].quarantined(), Default::default());
    drop(transports);
    nothing_is_left("transports each time", 200, &machine, |_| cycle_apart(&machine));

    // Control: what is kept is seen.
    let mut kept = Vec::new();
    let leak = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        nothing_is_left("control", WARM + 30, &machine, |_| {
            kept.push(Ipc::open(&machine.contexts[0], Config::default()).unwrap());
        });
    }));
    assert!(leak.is_err(), "thirty transports that stay were not noticed");
}
