//! Ports that are slow, full, broken, or liars: what they cost is their own channels, and nothing else.

mod support;

use std::time::Duration;

use portway_fifo::{Fifo, Heap, Position};
use portway_proxy::transport::{Completion, Lane};
use portway_proxy::{
    ChannelError, ChannelProducer, Config, Engine, Error, FifoId, Idle, PortChannel, PortId, Proxy,
    RunConfig, Stop, TransportError,
};
use support::LIMIT;
use support::deadline::{Gate, within};
use support::script::{Act, Scripted, add_fifo, scripted_channel};

/// Longer than the engine's deadline in these tests.
const LATE: Duration = Duration::from_secs(11);

/// An engine with one FIFO, a port to be bad and one to be good, and a channel on each.
struct Rig {
    engine: Engine,
    fifo: FifoId,
    ring: Fifo,
    bad: Scripted,
    bad_id: PortId,
    good: Scripted,
    /// On the bad port.
    victim: PortChannel,
    /// On the good port.
    witness: PortChannel,
    now: Duration,
}

impl Rig {
    fn new(window: usize) -> Self {
        let mut engine = Engine::new(&Heap, Config { window, ..Config::default() }).unwrap();
        let (fifo, ring) = add_fifo(&mut engine, 64);
        let (bad, good) = (Scripted::new(), Scripted::new());
        let bad_id = engine.add_port(bad.port()).unwrap();
        let good_id = engine.add_port(good.port()).unwrap();
        let victim = engine.add_channel(scripted_channel(fifo, bad_id, 4096)).unwrap();
        let witness = engine.add_channel(scripted_channel(fifo, good_id, 4096)).unwrap();
        Rig { engine, fifo, ring, bad, bad_id, good, victim, witness, now: Duration::ZERO }
    }

    fn ends(&self) -> (ChannelProducer, ChannelProducer) {
        (self.victim.producer().unwrap(), self.witness.producer().unwrap())
    }

    /// A step a little later.
    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        self.engine.step(self.now);
    }

    /// Every trigger is accounted for.
    fn check_counts(&self, under_way: u64) {
        let stats = self.engine.stats();
        assert_eq!(stats.triggers, stats.completions + stats.discarded + under_way, "{stats:?}");
    }

    /// The victim has ended with the port's error; returns that.
    fn port_error(&self) -> TransportError {
        match self.victim.error() {
            Some(ChannelError::Port { channel, source, .. }) => {
                assert_eq!(channel, self.victim.number());
                source
            }
            other => panic!("expected the port's error, seen {other:?}"),
        }
    }
}

/// Whether a good channel completes two hundred flushes on the engine that also serves a port whose calls do `act`.
fn others_go_on(act: Act) -> bool {
    let rig = Rig::new(256);
    let (victim, witness) = rig.ends();
    let witness = witness.with_timeout(Duration::from_millis(500)).unwrap();
    {
        let mut script = rig.bad.script();
        (script.submit, script.kick, script.poll) = (act.clone(), act.clone(), act);
    }
    let proxy = Proxy::start(rig.engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).unwrap();
    for _ in 0..5 {
        victim.put(0, 0, 8).unwrap();
    }
    let went_on = (0..200).all(|_| witness.flush().is_ok());
    proxy.stop(Stop::Cancel);
    went_on
}

#[test]
fn a_slow_port_slows_others_down_and_does_not_stop_them() {
    assert!(within(LIMIT, "two hundred flushes beside a slow port", || {
        others_go_on(Act::Slow(Duration::from_millis(1)))
    }));
    // The control: a port that never comes back does stop them.
    let gate = Gate::default();
    let kept = gate.clone();
    assert!(!within(LIMIT, "flushes beside a stuck port", move || others_go_on(Act::Stay(kept))));
    gate.open();
}

#[test]
fn a_full_port_stalls_its_fifo_by_name_until_the_deadline() {
    let mut rig = Rig::new(4);
    rig.bad.script().is_full = true;
    let (victim, witness) = rig.ends();
    for _ in 0..4 {
        victim.put(0, 0, 8).unwrap();
    }
    let passed = witness.put(0, 0, 8).unwrap();
    rig.step();
    // The refused ops wait in their channel's window, out of the way.
    assert_eq!(rig.witness.frontier(), passed.plus(1));
    assert_eq!(rig.engine.stats().stalls, 0);

    let fifth = victim.put(0, 0, 8).unwrap();
    let behind = witness.put(0, 0, 8).unwrap();
    for step in 1..=3 {
        rig.step();
        let stats = rig.engine.stats();
        assert_eq!((stats.stalls, stats.last_stall), (step, Some((0, rig.victim.number()))));
        assert_eq!(rig.ring.tail(), fifth, "the fifth waits in the ring, and what is behind it");
    }
    assert!(rig.engine.stats().refusals >= 4);
    rig.check_counts(4);

    // Ten seconds after the first op was taken there is nothing to see yet; a moment later the channel ends.
    rig.engine.step(Duration::from_secs(10));
    assert!(rig.victim.error().is_none());
    rig.engine.step(LATE);
    let error = rig.victim.error().expect("the deadline");
    let ChannelError::Deadline { channel, position, after, sent, .. } = error.clone() else {
        panic!("{error:?}")
    };
    assert_eq!((channel, position, sent), (rig.victim.number(), Position(0), false));
    assert_eq!(after, LATE - Duration::from_millis(1));
    assert!(error.to_string().contains("position 0 is not complete after 10.999s (sent to the port: false)"));

    // The FIFO goes on for its other channels, and the victim's triggers go nowhere.
    rig.now = LATE;
    rig.step();
    assert_eq!(rig.witness.frontier(), behind.plus(1));
    assert_eq!(rig.good.script().ops.len(), 2);
    assert!(rig.bad.script().ops.is_empty());
    assert!(matches!(victim.put(0, 0, 8), Err(Error::Channel(ChannelError::Deadline { .. }))));
    rig.check_counts(0);
}

#[test]
fn a_lost_op_ends_its_channel_at_the_deadline_and_no_other() {
    let mut rig = Rig::new(16);
    let sibling = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap();
    rig.bad.script().holds = true;
    let (victim, _) = rig.ends();
    let lost = victim.put(0, 0, 8).unwrap();
    let waiting = victim.with_timeout(Duration::ZERO).unwrap();
    for _ in 0..5 {
        rig.step();
    }
    assert!(rig.victim.error().is_none());
    rig.engine.step(LATE);
    let error = rig.victim.error();
    assert!(matches!(error, Some(ChannelError::Deadline { sent: true, position, .. }) if position == lost));
    assert!(matches!(waiting.wait(), Err(Error::Channel(ChannelError::Deadline { .. }))));
    rig.check_counts(1);

    // Its port is not at fault for the others.
    rig.now = LATE;
    let next = sibling.producer().unwrap().put(0, 0, 8).unwrap();
    rig.step();
    rig.bad.complete(1, 0);
    rig.step();
    assert_eq!(sibling.frontier(), next.plus(1));
    // The lost op turns up after all: taken note of, and of no consequence.
    let frontier = rig.victim.frontier();
    rig.bad.complete(0, 0);
    rig.step();
    assert_eq!(rig.victim.frontier(), frontier);
    assert!(sibling.error().is_none());
    rig.check_counts(0);
}

#[test]
fn an_engine_that_was_away_takes_what_is_complete_before_it_ends_anything() {
    let mut rig = Rig::new(256);
    let (victim, _) = rig.ends();
    rig.bad.script().holds = true;
    let mut last = Position(0);
    for _ in 0..4 {
        for _ in 0..50 {
            last = victim.put(0, 0, 8).unwrap();
        }
        rig.step();
        rig.step();
    }
    for sequence in 0..200 {
        rig.bad.complete(0, sequence);
    }
    rig.engine.step(LATE * 2);
    assert!(rig.victim.error().is_none(), "{:?}", rig.victim.error());
    assert_eq!(rig.victim.frontier(), last.plus(1));
    rig.check_counts(0);
}

/// What a call does, and what the channel's error says then.
fn misdeeds() -> Vec<(Act, &'static str)> {
    let failure =
        TransportError::Remote { peer: "gpu7.rack3".into(), operation: "write", status: 12, vendor: 129 };
    vec![
        (Act::Panic("as a str"), "the port panicked: as a str"),
        (Act::PanicString("as a String"), "the port panicked: as a String"),
        (Act::PanicBomb, "the port panicked: no message"),
        (
            Act::Fail(failure),
            "write to gpu7.rack3 failed with status 12 (vendor code 129): see what the peer says, and the way to it; go on over a new port",
        ),
    ]
}

#[test]
fn a_port_that_fails_or_panics_in_a_call_ends_with_its_channels_and_no_other() {
    for call in ["submit", "kick", "poll"] {
        for (act, says) in misdeeds() {
            let mut rig = Rig::new(16);
            let sibling = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap();
            let (victim, witness) = rig.ends();
            {
                let mut script = rig.bad.script();
                match call {
                    "submit" => script.submit = act,
                    "kick" => script.kick = act,
                    _ => script.poll = act,
                }
            }
            victim.put(0, 0, 8).unwrap();
            let after = witness.put(0, 0, 8).unwrap();
            victim.put(0, 0, 8).unwrap();
            rig.step();
            // One step, and whoever comes after the bad port has had its full turn.
            assert_eq!(rig.witness.frontier(), after.plus(1), "{call}: {says}");
            assert_eq!(rig.good.script().kicks, 1, "{call}: {says}");
            assert_eq!(rig.ring.tail(), Position(3), "{call}: {says}");
            assert_eq!(rig.port_error().to_string(), says, "{call}");
            assert!(matches!(sibling.error(), Some(ChannelError::Port { .. })));
            assert!(matches!(victim.flush(), Err(Error::Channel(ChannelError::Port { .. }))));
            assert_eq!(rig.engine.stats().channels_ended, 2);
            // What the port had accepted by then has unknown outcome.
            let under_way = rig.bad.script().ops.len() as u64;
            rig.check_counts(under_way);

            let error = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap_err();
            assert!(matches!(&error, Error::Channel(ChannelError::Port { .. })), "{error}");
            assert!(error.to_string().ends_with(says), "{error}");
            rig.step();
            assert!(rig.witness.error().is_none());
        }
    }
}

#[test]
fn a_port_that_panics_while_it_binds_fails() {
    let mut rig = Rig::new(16);
    rig.bad.script().bind = Act::Panic("no binding");
    let error = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap_err();
    assert_eq!(error.to_string(), "the port panicked: no binding");
    assert_eq!(rig.port_error().to_string(), "the port panicked: no binding");
    rig.step();
    assert!(rig.witness.error().is_none());

    // A refusal is no failure, takes no number, and gives the channel's memory back.
    let mut rig = Rig::new(16);
    rig.bad.script().bind = Act::Fail(TransportError::Unknown { what: "source", index: 7 });
    for _ in 0..2 * Config::default().max_channels {
        let error = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "source 7 is not known to this transport: it is another's, was released, or was forgotten"
        );
    }
    rig.bad.script().bind = Act::Obey;
    let channel = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap();
    assert_eq!(channel.number(), 2);
    assert!(rig.victim.error().is_none());
}

#[test]
fn a_port_that_fails_to_close_is_asked_once_and_says_so() {
    for (act, says) in misdeeds() {
        let mut rig = Rig::new(16);
        rig.bad.script().close = act;
        for _ in 0..5 {
            let error = rig.engine.close_port(rig.bad_id).unwrap_err();
            assert_eq!(error.to_string(), says);
            rig.step();
        }
        assert_eq!(rig.bad.script().closes, 1);
        assert!(matches!(rig.port_error(), TransportError::Closed));
        assert!(!rig.engine.shut_down(), "{says}: not quiesced");
        assert_eq!((rig.bad.script().closes, rig.good.script().closes), (1, 1));
    }
}

#[test]
fn a_port_is_closed_until_it_is_quiesced() {
    let mut rig = Rig::new(16);
    rig.bad.script().pending_closes = 3;
    assert!(!rig.engine.close_port(rig.bad_id).unwrap());
    // Steps go on with it once a millisecond, whether anybody asks or not.
    rig.engine.step(rig.now);
    rig.engine.step(rig.now);
    assert_eq!(rig.bad.script().closes, 2);
    rig.now += Duration::from_millis(1);
    rig.engine.step(rig.now);
    assert_eq!(rig.bad.script().closes, 3);
    assert!(rig.engine.close_port(rig.bad_id).unwrap());
    assert!(rig.engine.close_port(rig.bad_id).unwrap());
    rig.step();
    assert_eq!(rig.bad.script().closes, 4, "not after it was quiesced");
}

#[test]
fn two_ports_that_panic_when_dropped_take_nobody_along() {
    let rig = Rig::new(16);
    rig.bad.script().drop = Act::Panic("first drop");
    rig.good.script().drop = Act::PanicBomb;
    let (bad, good) = (rig.bad.clone(), rig.good.clone());
    drop(rig.engine);
    assert!(bad.script().is_dropped && good.script().is_dropped);
    assert!(matches!(rig.witness.error(), Some(ChannelError::Stopped { .. })));
}

#[test]
fn completions_that_are_not_true_end_the_port() {
    let completion = |lane, sequence| Completion { lane: Lane(lane), sequence };
    let cases = [
        (vec![completion(1, 0)], "a completion of a lane that was never bound (lane 1, op 0)"),
        (
            vec![completion(u32::MAX, 0)],
            "a completion of a lane that was never bound (lane 4294967295, op 0)",
        ),
        (vec![completion(0, 1)], "a completion of an op that was never accepted (lane 0, op 1)"),
        (
            vec![completion(0, 1 << 40)],
            "a completion of an op that was never accepted (lane 0, op 1099511627776)",
        ),
        (vec![completion(0, 0), completion(0, 0)], "a second completion of an op (lane 0, op 0)"),
        (vec![completion(0, u64::MAX)], "a second completion of an op (lane 0, op 18446744073709551615)"),
    ];
    for (completions, says) in cases {
        let mut rig = Rig::new(16);
        rig.bad.script().holds = true;
        let (victim, witness) = rig.ends();
        victim.put(0, 0, 8).unwrap();
        rig.bad.script().done.extend(completions.iter().copied());
        let after = witness.put(0, 0, 8).unwrap();
        rig.step();
        assert_eq!(
            rig.port_error().to_string(),
            format!("the port broke its contract: {says}: hold its transport to the conformance suite")
        );
        assert_eq!(rig.witness.frontier(), after.plus(1));
        // What was true before the lie counts.
        let true_ones = completions.len() as u64 - 1;
        assert_eq!(rig.victim.frontier(), Position(true_ones), "{says}");
        rig.check_counts(1 - true_ones);
    }
}

#[test]
fn a_count_beyond_the_buffer_or_beyond_what_was_written_ends_the_port() {
    for (count, says) in [
        (
            65,
            "the port reported 65 completions into room for 64: hold its transport to the conformance suite",
        ),
        (
            usize::MAX,
            "the port reported 18446744073709551615 completions into room for 64: hold its transport to the conformance suite",
        ),
    ] {
        let mut rig = Rig::new(16);
        rig.bad.script().count = Some(count);
        rig.ends().0.put(0, 0, 8).unwrap();
        rig.step();
        assert_eq!(rig.port_error().to_string(), says);
    }

    // The good port leaves completions of its lane 0 behind; the bad one counts some and writes none. Were the
    // buffer as it was left, the bad port's op 0 would pass for complete.
    let mut rig = Rig::new(16);
    rig.bad.script().holds = true;
    let (victim, witness) = rig.ends();
    let before = victim.put(0, 0, 8).unwrap();
    witness.put(0, 0, 8).unwrap();
    rig.step();
    rig.bad.script().count = Some(1);
    rig.step();
    assert!(rig.port_error().to_string().contains("a lane that was never bound"), "{}", rig.port_error());
    assert_eq!(rig.victim.frontier(), before);
    rig.check_counts(1);
}

#[test]
fn channels_of_a_scarce_port_take_turns() {
    let mut rig = Rig::new(16);
    let sibling = rig.engine.add_channel(scripted_channel(rig.fifo, rig.bad_id, 4096)).unwrap();
    let (victim, sibling) = (rig.victim.producer().unwrap(), sibling.producer().unwrap());
    rig.bad.script().is_full = true;
    for _ in 0..16 {
        victim.put(0, 0, 8).unwrap();
        sibling.put(0, 0, 8).unwrap();
    }
    rig.step();
    rig.bad.script().is_full = false;
    // Room for four ops a step: whoever is first takes all of it.
    for step in 1..=8 {
        rig.bad.script().room = Some(4);
        rig.step();
        let script = rig.bad.script();
        let of_lane = |lane| script.ops.iter().filter(|op| op.lane == Lane(lane)).count();
        assert_eq!(script.ops.len(), 4 * step);
        assert!(of_lane(0).abs_diff(of_lane(1)) <= 4, "after {step} steps {} and {}", of_lane(0), of_lane(1));
    }
    rig.step();
    rig.check_counts(0);
}
