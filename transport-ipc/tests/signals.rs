//! A bare signal is a store of the engine, unless the stream has something for its word: then it can neither overtake nor be
//! overwritten. Each test has a control: a port that always stores, and what the test says of it.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::sync::atomic::Ordering;

use portway_fifo::Words;
use portway_transport_ipc::{Config, WordPlace};
use wire::{Machine, Wire, wait_until};

/// Sends a bare signal.
type Signal = fn(&mut Wire, u64);

/// As the port does it.
fn by_the_port(wire: &mut Wire, value: u64) {
    wire.submit(0, Some(value), false);
}

/// The control: a store at once, whatever is under way.
fn by_a_store(wire: &mut Wire, value: u64) {
    Words::new(wire.word.region.clone()).unwrap()[0].store(value, Ordering::Release);
}

fn paused() -> (Machine, Wire) {
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    let wire = machine.wire(&transports);
    wire.source.region.write(0, &[7; 64]).unwrap();
    machine.standin.set("paused", 1);
    (machine, wire)
}

fn data(wire: &Wire) -> u8 {
    let mut byte = [0];
    wire.destination.region.read(63, &mut byte).unwrap();
    byte[0]
}

/// A put that the stream has not done, then a bare signal. Whoever sees the signal has to see the data.
fn overtaking(signal: Signal) -> Result<(), String> {
    let (machine, mut wire) = paused();
    wire.submit(64, None, false);
    // The copy is in the stream: the driver has it, and has not done it.
    wait_until(
        "the copy's submission",
        || machine.standin.calls("cuStreamWriteValue64_v2"),
        |calls| *calls > 0,
    );
    signal(&mut wire, 1);
    // Time for a signal that goes by itself.
    for _ in 0..50 {
        let _ = wire::poll(&mut *wire.a).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
        if wire.word_value() == 1 && data(&wire) != 7 {
            return Err("the signal is there and the data is not".into());
        }
    }
    machine.standin.set("paused", 0);
    wait_until("the signal", || wire.word_value(), |value| *value == 1);
    if data(&wire) == 7 { Ok(()) } else { Err("the signal came without the data".into()) }
}

/// A signal that the stream has not written yet, then a bare one. The word must not go back.
fn overwriting(signal: Signal) -> Result<(), String> {
    let (machine, mut wire) = paused();
    wire.submit(64, Some(1), false);
    wait_until("the submission", || machine.standin.calls("cuStreamWriteValue64_v2"), |calls| *calls > 1);
    signal(&mut wire, 2);
    let before = wire.word_value();
    machine.standin.set("paused", 0);
    wait_until("all writes", || wire.word_value(), |value| *value > 0);
    // Everything that was submitted is done now; the port's own signal may still be on its way.
    let after = wire.word_value();
    if after < before {
        return Err(format!("the word went back from {before} to {after}"));
    }
    wait_until("the last signal", || wire.word_value(), |value| *value == 2);
    Ok(())
}

#[test]
fn a_bare_signal_does_not_overtake_a_put() {
    overtaking(by_the_port).unwrap();
    let control = overtaking(by_a_store).unwrap_err();
    assert!(control.contains("the data is not"), "{control}");
}

#[test]
fn a_bare_signal_is_not_overwritten() {
    overwriting(by_the_port).unwrap();
    let control = overwriting(by_a_store).unwrap_err();
    assert!(control.contains("went back from 2 to 1"), "{control}");
}

#[test]
fn a_bare_signal_with_nothing_under_way_is_a_store_and_no_call_of_the_driver() {
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    let mut wire = machine.wire(&transports);
    let before = machine.standin.all_calls();
    for value in 1..=100 {
        wire.submit(0, Some(value), false);
        assert_eq!(wire.word_value(), value);
        wire.complete(1);
    }
    assert_eq!(machine.standin.all_calls(), before);
    // After a put that is complete as well.
    wire.submit(64, Some(101), false);
    wire.complete(1);
    let before = machine.standin.calls("cuStreamWriteValue64_v2");
    wire.submit(0, Some(102), false);
    assert_eq!(wire.word_value(), 102);
    assert_eq!(machine.standin.calls("cuStreamWriteValue64_v2"), before);
}

/// The stream and the engine take turns at one word, as fast as they can; it only grows.
#[test]
fn stores_and_stream_signals_in_any_mixture_come_in_order() {
    let machine = Machine::new();
    let transports = machine.transports(Config::default());
    let mut wire = machine.wire(&transports);
    let (mut sent, mut seen) = (0, 0);
    for round in 0..3_000u64 {
        if round % 50 == 0 {
            machine.standin.set("paused", i64::from(round % 100 == 0));
        }
        let put = if round * 7 % 10 < 4 { 64 } else { 0 };
        let op = wire.op(put, Some(sent + 1), false);
        while wire.a.submit(&op).unwrap() == portway_proxy::transport::Submit::Full {
            machine.standin.set("paused", 0);
            wire::poll(&mut *wire.a).unwrap();
        }
        sent += 1;
        wire.a.kick().unwrap();
        let _ = wire::poll(&mut *wire.a).unwrap();
        let value = wire.word_value();
        assert!(seen <= value && value <= sent, "{value} after {seen}, of {sent}");
        seen = value;
    }
    machine.standin.set("paused", 0);
    wait_until("the last signal", || wire.word_value(), |value| *value == sent);
}

#[test]
fn signals_to_a_word_on_the_device_all_take_the_stream() {
    let machine = Machine::new();
    let transports = machine.transports(Config { word_place: WordPlace::Device, ..Config::default() });
    let mut wire = machine.wire(&transports);
    wire.submit(0, Some(1), false);
    wire.complete(1);
    // The signal and the completion.
    assert_eq!(machine.standin.calls("cuStreamWriteValue64_v2"), 2);
    assert_eq!(wire.word_value(), 1);
}
