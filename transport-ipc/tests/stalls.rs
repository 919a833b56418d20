//! What happens when the driver, the device or the context lets an executor down: the port fails by name and in time, the
//! others go on, and everything comes back once the driver does.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::time::{Duration, Instant};

use portway_proxy::TransportError;
use portway_proxy::transport::{Close, Submit, Transport};
use portway_transport_ipc::{Cause, Config, Error, Ipc, Quarantined, StalledIn};
use wire::{Machine, PATIENCE, Wire, close, wait_until};

const STALL: Duration = Duration::from_millis(200);

fn config() -> Config {
    Config { stall_limit: STALL, ..Config::default() }
}

/// The error of a port whose executor is held up, and how long it took.
fn stalled(wire: &mut Wire) -> (TransportError, StalledIn, &'static [Cause]) {
    let start = Instant::now();
    let error = wire.failure();
    let took = start.elapsed();
    // Late only because this machine is.
    assert!(took >= STALL / 2 && took < PATIENCE, "{took:?}");
    match Error::of(&error) {
        Some(&Error::Stalled { place, causes, after, .. }) => {
            assert!(after >= STALL, "{after:?}");
            (error, place, causes)
        }
        _ => panic!("{error:?}"),
    }
}

/// The executor of one port does not come back from a call of the driver.
fn held_in(function: &str, place: StalledIn) {
    let machine = Machine::new();
    let transports = machine.transports(config());
    let [mut stuck, mut other] = [machine.wire(&transports), machine.wire(&transports)];
    machine.standin.hold(function);
    stuck.submit(64, Some(1), true);
    machine.standin.wait_until_held(function, 1);
    let (error, seen, causes) = stalled(&mut stuck);
    assert_eq!((seen, causes), (place, &[Cause::Free][..]));
    assert!(error.to_string().contains("cudaFree in progress"), "{error}");
    // Every call returns the error, at once; the executor is still held.
    let op = stuck.op(0, Some(2), false);
    for result in [stuck.a.submit(&op).err(), stuck.a.kick().err()] {
        assert_eq!(result.unwrap().to_string(), error.to_string());
    }
    assert_eq!(stuck.a.close().unwrap(), Close::Pending);
    let held = transports[0].quarantined();
    assert_eq!((held.executors, held.memories), (1, 3));
    match transports[0].release(&stuck.source) {
        Err(TransportError::Busy { ports: 1, .. }) => {}
        result => panic!("{result:?}"),
    }
    // What another port does without the driver goes on.
    other.submit(0, Some(1), false);
    other.complete(1);
    assert_eq!(other.word_value(), 1);
    // The driver comes back: the port is quiesced, what it had bound is free, and the other port moves data again.
    machine.standin.release(function);
    close(&mut *stuck.a);
    assert_eq!(transports[0].quarantined(), Quarantined::default());
    transports[0].release(&stuck.source).unwrap();
    other.submit(64, Some(2), true);
    other.complete(1);
    assert_eq!(other.word_value(), 2);
    let mut fresh = machine.wire(&transports);
    fresh.submit(64, Some(1), true);
    fresh.complete(1);
    assert_eq!(fresh.word_value(), 1);
}

#[test]
fn an_executor_that_is_held_in_a_copy_is_named() {
    held_in("cuMemcpyAsync", StalledIn::Copy);
}

#[test]
fn an_executor_that_is_held_in_a_written_value_is_named() {
    held_in("cuStreamWriteValue64_v2", StalledIn::WriteValue);
}

/// Executors do not wait for each other: while one is held in a copy, another submits its own.
#[test]
fn a_port_moves_data_while_the_executor_of_another_is_held() {
    let machine = Machine::new();
    let transports = machine.transports(config());
    let [mut stuck, mut other] = [machine.wire(&transports), machine.wire(&transports)];
    machine.standin.hold_next("cuMemcpyAsync");
    stuck.submit(64, Some(1), false);
    machine.standin.wait_until_held("cuMemcpyAsync", 1);
    for value in 1..=10 {
        other.submit(64, Some(value), true);
        other.complete(1);
        assert_eq!(other.word_value(), value);
    }
    let mut fresh = machine.wire(&transports);
    fresh.submit(64, Some(1), true);
    fresh.complete(1);
    assert_eq!(stalled(&mut stuck).1, StalledIn::Copy);
    machine.standin.release("cuMemcpyAsync");
    stuck.close();
    other.close();
}

/// Everything was submitted, and the stream does not run: a first launch of a kernel that is loaded lazily does that.
#[test]
fn a_stream_that_does_not_run_is_named_with_its_likely_cause() {
    for (loading_mode, cause, word) in
        [(1, Cause::Device, "busy"), (2, Cause::LazyLoading, "lazy first launch")]
    {
        let mut machine = Machine::new();
        machine.standin.set("loading mode", loading_mode);
        machine.contexts =
            [0, 1].map(|ordinal| portway_fifo::cuda::Context::new(&machine.driver, ordinal).unwrap());
        let transports = machine.transports(config());
        let mut wire = machine.wire(&transports);
        machine.standin.set("paused", 1);
        wire.submit(64, Some(1), true);
        let (error, place, seen) = stalled(&mut wire);
        assert_eq!((place, seen), (StalledIn::Stream, &[cause][..]));
        assert!(error.to_string().contains(word), "{error}");
        // What was submitted may still land, and the port is not quiesced before it has.
        assert_eq!(wire.a.close().unwrap(), Close::Pending);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(wire.a.close().unwrap(), Close::Pending);
        machine.standin.set("paused", 0);
        assert_eq!(wire.word_value(), 1);
        wire.close();
        let mut fresh = machine.wire(&transports);
        fresh.submit(64, Some(1), true);
        fresh.complete(1);
    }
}

/// Where all streams share one connection a copy from the device to the host goes before each value, and a stall is put
/// down to that. The driver reads the variable once, so this runs in a process of its own.
#[test]
fn with_one_connection_values_are_primed_and_a_stall_is_put_down_to_it() {
    const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    const NAME: &str = "with_one_connection_values_are_primed_and_a_stall_is_put_down_to_it";
    if std::env::var(VARIABLE).is_err() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(VARIABLE, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
        return;
    }
    let machine = Machine::new();
    let transports = machine.transports(config());
    let mut wire = machine.wire(&transports);
    let primes = || machine.standin.calls("cuMemcpyDtoHAsync_v2");
    let before = primes();
    wire.submit(64, Some(1), true);
    wire.complete(1);
    assert_eq!(primes() - before, 1, "one before the signal and the completion");
    wire.submit(64, None, true);
    wire.complete(1);
    assert_eq!(primes() - before, 2, "one before the completion");
    machine.standin.hold("cuStreamWriteValue64_v2");
    wire.submit(64, Some(2), false);
    let (error, place, causes) = stalled(&mut wire);
    assert_eq!((place, causes), (StalledIn::WriteValue, &[Cause::Free, Cause::OneConnection][..]));
    assert!(error.to_string().contains("one connection"), "{error}");
    machine.standin.release("cuStreamWriteValue64_v2");
    wire.close();
}

/// Control for the tests above: a port that has nothing under way, or whose ops complete in time, does not stall.
#[test]
fn a_port_that_is_idle_or_slow_does_not_stall() {
    let machine = Machine::new();
    let transports = machine.transports(config());
    let mut wire = machine.wire(&transports);
    let start = Instant::now();
    let mut value = 0;
    while start.elapsed() < 3 * STALL {
        machine.standin.set("paused", 1);
        value += 1;
        wire.submit(64, Some(value), false);
        let pause = Instant::now();
        while pause.elapsed() < STALL / 4 {
            wire::poll(&mut *wire.a).unwrap();
        }
        machine.standin.set("paused", 0);
        wait_until("the signal", || wire.word_value(), |seen| *seen == value);
    }
    let idle = Instant::now();
    while idle.elapsed() < 2 * STALL {
        wire::poll(&mut *wire.a).unwrap();
    }
}

/// A closed port whose stream never runs again: it is given up after the limit, and its memory stays bound for good.
#[test]
fn what_is_not_done_by_the_quiesce_limit_stays_in_quarantine() {
    let machine = Machine::new();
    let quiesce_limit = Duration::from_millis(200);
    let transports = machine.transports(Config { quiesce_limit, ..config() });
    let mut wire = machine.wire(&transports);
    machine.standin.set("paused", 1);
    wire.submit(64, Some(1), false);
    wait_until("the submission", || machine.standin.calls("cuStreamWriteValue64_v2"), |calls| *calls > 1);
    let error = wait_until("an end", || wire.a.close().err(), Option::is_some).unwrap();
    assert!(matches!(Error::of(&error), Some(Error::Unquiesced { .. })), "{error:?}");
    let held = transports[0].quarantined();
    assert_eq!((held.executors, held.memories), (1, 3));
    assert!(matches!(transports[0].release(&wire.source), Err(TransportError::Busy { .. })));
    machine.standin.set("paused", 0);
}

/// The application destroys its context under traffic: each call fails from then on.
#[test]
fn a_context_that_is_destroyed_under_traffic_fails_the_port() {
    const CONTEXT_IS_DESTROYED: i32 = 709;
    for function in ["cuMemcpyAsync", "cuStreamWriteValue64_v2"] {
        let machine = Machine::new();
        let transports = machine.transports(config());
        let mut wire = machine.wire(&transports);
        for value in 1..=20 {
            wire.submit(64, Some(value), false);
        }
        machine.standin.fail_always(function, CONTEXT_IS_DESTROYED);
        machine.standin.fail_always("cuStreamQuery", CONTEXT_IS_DESTROYED);
        let error = wait_until(
            "the port's error",
            || {
                let op = wire.op(64, None, false);
                wire.a.submit(&op).and_then(|_| wire.a.kick()).and_then(|()| wire::poll(&mut *wire.a)).err()
            },
            Option::is_some,
        );
        let error = error.unwrap();
        // Who, what, how much, and what the driver says.
        match Error::of(&error) {
            Some(Error::Driver { peer, len_bytes: 64, source, .. }) => {
                assert!(peer.starts_with("this process") && peer.contains("GPU-"), "{peer}");
                match source {
                    portway_fifo::Error::Driver { call, status, .. } => {
                        assert_eq!((*call, *status), (function, CONTEXT_IS_DESTROYED));
                    }
                    other => panic!("{other:?}"),
                }
            }
            _ => panic!("{error:?}"),
        }
        assert!(matches!(error, TransportError::Device { status: CONTEXT_IS_DESTROYED, .. }), "{error:?}");
        close(&mut *wire.a);
        assert_eq!(transports[0].quarantined(), Quarantined::default());
        machine.standin.fail_no_more(function);
        machine.standin.fail_no_more("cuStreamQuery");
        // The process goes on with a new channel.
        let mut fresh = machine.wire(&transports);
        fresh.submit(64, Some(1), true);
        fresh.complete(1);
    }
}

/// A port is dropped, not closed, in the middle of a stall: nothing waits for it, and nothing is lost.
#[test]
fn a_port_can_be_dropped_in_the_middle_of_a_stalled_copy() {
    let machine = Machine::new();
    let transports = machine.transports(config());
    let mut wire = machine.wire(&transports);
    machine.standin.hold("cuMemcpyAsync");
    wire.submit(64, Some(1), false);
    machine.standin.wait_until_held("cuMemcpyAsync", 1);
    let source = wire.source.clone();
    let start = Instant::now();
    drop(wire);
    assert!(start.elapsed() < Duration::from_secs(1));
    assert_eq!(transports[0].quarantined().executors, 1);
    assert!(matches!(transports[0].release(&source), Err(TransportError::Busy { .. })));
    machine.standin.release("cuMemcpyAsync");
    wait_until("an empty quarantine", || transports[0].quarantined().executors, |held| *held == 0);
    transports[0].release(&source).unwrap();
}

#[test]
fn a_full_port_says_so_and_goes_on() {
    let machine = Machine::new();
    let transports = machine.transports(Config { depth: 4, ..config() });
    let mut wire = machine.wire(&transports);
    machine.standin.set("paused", 1);
    for _ in 0..4 {
        wire.submit(64, None, false);
    }
    let op = wire.op(64, None, false);
    assert_eq!(wire.a.submit(&op).unwrap(), Submit::Full);
    machine.standin.set("paused", 0);
    wire.complete(4);
    assert_eq!(wire.a.submit(&op).unwrap(), Submit::Accepted);
}

#[test]
fn a_device_whose_streams_write_no_values_is_refused() {
    let machine = Machine::new();
    machine.standin.set_attribute(122, 0);
    let context = portway_fifo::cuda::Context::new(&machine.driver, 0).unwrap();
    assert!(matches!(Ipc::open(&context, Config::default()), Err(Error::Unfit { .. })));
}
