//! Puts, signals, flushes and waits over loopback, checked byte by byte.

mod support;

use std::time::Duration;

use portway_fifo::Position;
use portway_proxy::{Idle, Proxy, RunConfig, Stop};
use support::Pair;

#[test]
fn a_put_with_its_signal_arrives_whole() {
    let pair = Pair::new(portway_proxy::Config::default(), 1 << 16);
    let (a, b) = (pair.a.producer().unwrap(), pair.b.producer().unwrap());
    let proxy = Proxy::start(pair.engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).unwrap();
    for round in 0..100u64 {
        let len = 1 + round * 650;
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + round) as u8).collect();
        pair.a_source.write(3, &bytes).unwrap();
        a.put_signal(3, 5, len).unwrap();
        b.wait().unwrap();
        let mut seen = vec![0; len as usize];
        pair.b_destination.read(5, &mut seen).unwrap();
        assert_eq!(seen, bytes);
        a.flush().unwrap();
    }
    assert!(!b.poll().unwrap());
    b.signal(3).unwrap();
    for _ in 0..3 {
        a.wait().unwrap();
    }
    assert!(!a.poll().unwrap());
    let report = proxy.stop(Stop::Drain { within: Duration::from_secs(5) });
    assert!(report.drained && report.quiesced, "{report:?}");
    assert!(report.quarantined.is_empty());
    assert_eq!(report.stats.triggers, 201);
    assert_eq!(pair.a.frontier(), Position(200));
}
