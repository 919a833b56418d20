//! Errors of requests, asynchronous events: who is told what, and who is not touched.

mod support;

use std::time::{Duration, Instant};

use portway_proxy::TransportError;
use portway_proxy::transport::{Close, Submit, Transport};
use portway_transport_ib::{Config, Ib, sys};
use support::fabric::{Make, World};
use support::link::{LIMIT, Link, close};

fn two() -> (World, Ib, Ib) {
    let world = World::new(&[Make::default(), Make { name: "soft1", ..Make::default() }]);
    let end = |name: &str| {
        Ib::open_with(&world.verbs(), Config { device: Some(name.into()), ..Config::default() }).unwrap()
    };
    let (a, b) = (end("soft0"), end("soft1"));
    (world, a, b)
}

fn works(link: &mut Link) {
    let done = link.complete.len() + 1;
    let value = link.word() + 1;
    assert_eq!(link.offer(Some((0, 0, 64)), Some(value), true).unwrap(), Submit::Accepted);
    link.until_complete(done).unwrap();
    assert_eq!(link.word(), value);
}

#[test]
fn a_failed_request_ends_its_port_and_no_other() {
    let (world, a, b) = two();
    let (mut link, mut other) = (Link::new(&a, &b, 4096), Link::new(&a, &b, 4096));
    works(&mut link);
    works(&mut other);
    world.fail_after(4, sys::IBV_WC_RETRY_EXC_ERR);
    for value in 2..10 {
        link.offer(Some((0, 0, 64)), Some(value), false).unwrap();
    }
    link.a.kick().unwrap();
    let error = Link::error_of(&mut *link.a);
    let TransportError::Remote { peer, operation, status: 12, vendor: 0x5a } = &error else {
        panic!("{error:?}")
    };
    assert!(operation.contains("RETRY_EXC_ERR"), "{operation}");
    assert!(peer.contains("10.0.0.1") && peer.contains("lane 0, op 3"), "{peer}");
    // Every call says the same.
    for again in
        [link.offer(None, Some(3), false).unwrap_err(), link.a.kick().unwrap_err(), link.poll().unwrap_err()]
    {
        assert_eq!(again.to_string(), error.to_string());
    }
    assert!(world.log().calls.contains(&"to ERR"), "before it is reported");
    works(&mut other);
    close(&mut *link.a);
    a.release(&link.source).unwrap();
    // A fresh connection over the same devices.
    works(&mut Link::new(&a, &b, 4096));
}

#[test]
fn nothing_is_reported_before_the_queue_pairs_are_in_the_error_state() {
    let (world, a, b) = two();
    for _ in 0..50 {
        let mut link = Link::new(&a, &b, 4096);
        world.clear_log();
        world.fail_after(0, sys::IBV_WC_REM_OP_ERR);
        link.offer(Some((0, 0, 64)), None, true).unwrap();
        link.a.kick().unwrap();
        let error = Link::error_of(&mut *link.a);
        assert!(world.log().calls.contains(&"to ERR"), "reported first: {error}");
    }
}

#[test]
fn a_wrong_key_ends_both_ends() {
    let (world, a, b) = two();
    let mut link = Link::new(&a, &b, 4096);
    works(&mut link);
    let mut other = Link::new(&a, &b, 4096);
    // Nobody bound it on its own side, so the peer may take it back under the sender's feet.
    b.release(&link.destination).unwrap();
    link.offer(Some((0, 0, 64)), Some(9), false).unwrap();
    link.a.kick().unwrap();
    let error = Link::error_of(&mut *link.a);
    assert!(matches!(error, TransportError::Remote { status: 10, .. }), "{error:?}");
    let there = Link::error_of(&mut *link.b);
    assert!(there.to_string().contains("QP_ACCESS_ERR"), "{there}");
    assert_eq!(link.word(), 1, "the signal did not arrive");
    works(&mut other);
    assert_eq!(world.log().refused_posts, 0);
}

#[test]
fn a_source_taken_back_is_this_sides_fault() {
    let (world, a, b) = two();
    let mut link = Link::new(&a, &b, 4096);
    world.fail_after(0, sys::IBV_WC_LOC_PROT_ERR);
    link.offer(Some((0, 0, 64)), None, false).unwrap();
    link.a.kick().unwrap();
    let error = Link::error_of(&mut *link.a);
    let TransportError::Device { status: 4, vendor: 0x5a, source: Some(source), .. } = &error else {
        panic!("{error:?}")
    };
    let source = source.to_string();
    assert!(source.contains("10.0.0.1") && source.contains("lane 0, op 0"), "{source}");
}

#[test]
fn a_peer_that_is_gone_is_an_error() {
    let (_world, a, b) = two();
    let mut link = Link::new(&a, &b, 4096);
    works(&mut link);
    close(&mut *link.b);
    link.offer(Some((0, 0, 64)), Some(2), true).unwrap();
    link.a.kick().unwrap();
    let error = Link::error_of(&mut *link.a);
    assert!(matches!(error, TransportError::Remote { status: 12, .. }), "{error:?}");
}

#[test]
fn events_of_a_queue_pair_end_its_port() {
    let (world, a, b) = two();
    let (mut link, mut other) = (Link::new(&a, &b, 4096), Link::new(&a, &b, 4096));
    let number = world.states()[0].0;
    world.event(0, sys::IBV_EVENT_QP_FATAL, Some(number));
    let error = Link::error_of(&mut *link.a);
    assert!(error.to_string().contains("QP_FATAL"), "{error}");
    works(&mut other);
    close(&mut *link.a);
    assert_eq!(a.events(), 1);
}

#[test]
fn a_device_that_dies_ends_all_its_ports() {
    let (world, a, b) = two();
    let (mut link, mut other) = (Link::new(&a, &b, 4096), Link::new(&a, &b, 4096));
    world.event(0, sys::IBV_EVENT_DEVICE_FATAL, None);
    for link in [&mut link, &mut other] {
        let error = Link::error_of(&mut *link.a);
        assert!(error.to_string().contains("DEVICE_FATAL"), "{error}");
    }
}

#[test]
fn a_link_that_goes_and_comes_ends_nothing_by_itself() {
    let (world, a, b) = two();
    let mut link = Link::new(&a, &b, 4096);
    let wait = |up: bool| {
        let start = Instant::now();
        while a.link_is_up() != up {
            assert!(start.elapsed() < LIMIT, "the event has not been seen");
            std::thread::yield_now();
        }
    };
    assert!(a.link_is_up());
    world.port_event(0, sys::IBV_EVENT_PORT_ERR, 1);
    wait(false);
    works(&mut link);
    // Not of the port in use.
    world.port_event(0, sys::IBV_EVENT_PORT_ACTIVE, 2);
    // Events are taken in turn: when this one is counted, the one before has had its effect.
    world.port_event(0, sys::IBV_EVENT_LID_CHANGE, 1);
    let start = Instant::now();
    while a.events() < 3 {
        assert!(start.elapsed() < LIMIT, "{} events of 3 have been seen", a.events());
        std::thread::yield_now();
    }
    assert!(!a.link_is_up());
    world.port_event(0, sys::IBV_EVENT_PORT_ACTIVE, 1);
    wait(true);
    works(&mut link);
}

/// The library makes whoever destroys a queue pair wait for the acknowledgement of its events. The software device
/// refuses instead, so an event that was not acknowledged would show.
#[test]
fn queue_pairs_are_destroyed_while_events_pour_in() {
    let (world, a, b) = two();
    for _ in 0..50 {
        let mut link = Link::new(&a, &b, 4096);
        let number = world.states()[0].0;
        for _ in 0..20 {
            world.event(0, sys::IBV_EVENT_COMM_EST, Some(number));
        }
        close(&mut *link.a);
        close(&mut *link.b);
    }
    assert_eq!(world.left().1, 0);
}

/// Moving a queue pair to the error state and destroying it reach the device's firmware, which may not answer for long.
#[test]
fn the_engine_never_waits_for_the_firmware() {
    let (world, a, b) = two();
    let mut link = Link::new(&a, &b, 4096);
    let mut other = Link::new(&a, &b, 4096);
    works(&mut link);
    let limit = Duration::from_secs(2);
    let start = Instant::now();
    world.block_firmware(true);
    world.fail_after(0, sys::IBV_WC_RETRY_EXC_ERR);
    link.offer(Some((0, 0, 64)), Some(2), false).unwrap();
    link.a.kick().unwrap();
    // The failure has happened; nothing is reported while the queue pair is not in the error state, and nothing waits.
    for _ in 0..1000 {
        assert_eq!(link.poll().unwrap(), 0);
    }
    assert_eq!(link.offer(None, Some(3), false).unwrap(), Submit::Full);
    link.a.kick().unwrap();
    works(&mut other);
    assert_eq!(other.a.close().unwrap(), Close::Pending);
    assert_eq!(other.a.close().unwrap(), Close::Pending);
    assert!(start.elapsed() < limit, "calls waited: {:?}", start.elapsed());
    world.block_firmware(false);
    let error = Link::error_of(&mut *link.a);
    assert!(matches!(error, TransportError::Remote { status: 12, .. }), "{error:?}");
    close(&mut *other.a);
}
