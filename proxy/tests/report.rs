//! What a proxy says of itself, while it works, while it is stuck, and after a channel has ended.

mod support;

use std::time::{Duration, Instant};

use portway_fifo::{Heap, Position};
use portway_proxy::{Config, Engine, Idle, Proxy, REPORT_WAIT, RunConfig, Stop, TransportError};
use support::LIMIT;
use support::deadline::{Gate, until, within};
use support::script::{Act, Scripted, add_fifo, scripted_channel};

fn start(engine: Engine) -> Proxy {
    Proxy::start(engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).unwrap()
}

/// The lines of a report that begin like this.
fn lines(text: &str, start: &str) -> Vec<String> {
    text.lines().filter(|line| line.starts_with(start)).map(str::to_owned).collect()
}

#[test]
fn a_report_names_depths_frontiers_stalls_and_errors() {
    within(2 * LIMIT, "reports", || {
        let mut engine = Engine::new(&Heap, Config { window: 4, ..Config::default() }).unwrap();
        let (ports, mut channels) = ([Scripted::new(), Scripted::new()], Vec::new());
        ports[0].script().holds = true;
        for port in &ports {
            let (fifo, _) = add_fifo(&mut engine, 64);
            let port = engine.add_port(port.port()).unwrap();
            channels.push(engine.add_channel(scripted_channel(fifo, port, 4096)).unwrap());
        }
        let proxy = start(engine);
        // The first port accepts three of five, completes one, and has no room for the others.
        ports[0].script().room = Some(3);
        let producer = channels[0].producer().unwrap();
        for _ in 0..5 {
            producer.put(0, 0, 8).unwrap();
        }
        ports[0].complete(0, 0);
        let arrived = || channels[0].frontier() == Position(1) && proxy.stats().triggers == 5;
        until(LIMIT, "a completion and four ops under way", arrived, || proxy.stats());
        ports[1].script().poll = Act::Fail(TransportError::Closed);
        until(LIMIT, "the end of the second channel", || channels[1].error().is_some(), || proxy.stats());

        let report = proxy.report();
        assert!(report.answered);
        let under_way = report.channels[0].under_way.unwrap();
        assert_eq!((under_way.port, under_way.in_port, under_way.backlog), (0, 2, 2));
        assert_eq!((report.fifos[0].slots, report.fifos[0].tail), (64, Position(5)));
        let text = report.to_string();
        let is = |start, expected: &str| assert_eq!(lines(&text, start), [expected], "{text}");
        is("FIFO 0:", "FIFO 0: 64 slots, taken up to 5");
        is(
            "FIFO 0, channel 0",
            "FIFO 0, channel 0, port 0: complete up to 1; 2 ops in the port, 2 waiting for it",
        );
        is(
            "FIFO 1, channel 0",
            "FIFO 1, channel 0, port 1: complete up to 0; ended: channel 0 of FIFO 1: the port is closed: connect another",
        );
        let engine = &lines(&text, "engine:")[0];
        assert!(
            engine.contains("5 triggers, 1 complete") && engine.ends_with("1 of 2 channels ended"),
            "{text}"
        );

        // A window that is full stalls its FIFO.
        producer.put(0, 0, 8).unwrap();
        until(LIMIT, "a stall", || proxy.stats().stalls > 0, || proxy.stats());
        let text = proxy.report().to_string();
        assert!(text.contains("stalls (the last for channel 0 of FIFO 0)"), "{text}");
        proxy.stop(Stop::Cancel);
    });
}

#[test]
fn a_report_of_a_stuck_engine_comes_without_it_and_leaves_nothing() {
    within(2 * LIMIT, "reports", || {
        let mut engine = Engine::new(&Heap, Config::default()).unwrap();
        let (fifo, _) = add_fifo(&mut engine, 64);
        let (port, gate) = (Scripted::new(), Gate::default());
        let id = engine.add_port(port.port()).unwrap();
        let channel = engine.add_channel(scripted_channel(fifo, id, 4096)).unwrap();
        port.script().poll = Act::Stay(gate.clone());
        let proxy = start(engine);
        until(LIMIT, "the engine's thread in the port", || gate.inside() == 1, || gate.inside());
        for _ in 0..3 {
            let begun = Instant::now();
            let report = proxy.report();
            let took = begun.elapsed();
            assert!(took < REPORT_WAIT + Duration::from_secs(2), "expected {REPORT_WAIT:?}, took {took:?}");
            assert!(!report.answered && report.channels[0].under_way.is_none());
            let text = report.to_string();
            assert!(text.contains("engine: no answer within 100ms"), "{text}");
            assert!(
                text.contains("channel 0: complete up to 0; what it has under way is not known"),
                "{text}"
            );
        }
        port.script().poll = Act::Obey;
        gate.open();
        until(LIMIT, "an answer", || proxy.report().answered, || proxy.report());
        assert!(channel.error().is_none());
        proxy.stop(Stop::Cancel);
    });
}
