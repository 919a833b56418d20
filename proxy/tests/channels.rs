//! Channels, FIFOs, ports and engines in their combinations, and what a running proxy can be asked for.

mod support;

use std::sync::Arc;
use std::time::Duration;

use portway_fifo::memory::{DmaBuf, IpcHandle, IpcKind, Memory, Segment};
use portway_fifo::{Fifo, Heap, Place, Position, Region};
use portway_proxy::loopback::Faults;
use portway_proxy::transport::{LocalMemory, MemoryId, Op, Put, Transport};
use portway_proxy::{
    ChannelConfig, ChannelError, Config, Engine, Error, FifoId, Idle, Loopback, MAX_PUT_BYTES, MAX_SIZE,
    Proxy, RunConfig, Stop, TransportError, loopback,
};
use support::deadline::{until, within};
use support::script::{Act, Scripted, add_fifo, remote, scripted_channel};
use support::{End, LIMIT, Pair, channel_config, connect};

fn run(engine: Engine) -> Proxy {
    Proxy::start(engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).unwrap()
}

#[test]
fn every_call_asks_for_what_it_says() {
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (fifo, _) = add_fifo(&mut engine, 64);
    let port = Scripted::new();
    let port_id = engine.add_port(port.port()).unwrap();
    let producer = engine.add_channel(scripted_channel(fifo, port_id, 1 << 20)).unwrap().producer().unwrap();
    let at_once = producer.with_timeout(Duration::ZERO).unwrap();

    producer.put(1, 2, 3).unwrap();
    producer.put_signal(4, 5, 6).unwrap();
    producer.signal(7).unwrap();
    producer.signal(MAX_SIZE).unwrap();
    // Nobody steps yet, so what waits runs out of time; what it asked for was pushed.
    for result in [at_once.flush(), at_once.put_signal_flush(8, 9, 10)] {
        let Err(Error::Fifo(portway_fifo::Error::Timeout { what: "the frontier", seen: 0, .. })) = result
        else {
            panic!("{result:?}");
        };
    }
    assert!(!producer.poll().unwrap());
    engine.step(Duration::ZERO);
    let put = |source_offset_bytes, destination_offset_bytes, len_bytes| {
        Some(Put { source_offset_bytes, destination_offset_bytes, len_bytes })
    };
    let last = 9 + u64::from(MAX_SIZE);
    let expected = [
        (put(1, 2, 3), None, false),
        (put(4, 5, 6), Some(1), false),
        (None, Some(8), false),
        (None, Some(8 + u64::from(MAX_SIZE)), false),
        (None, None, true),
        (put(8, 9, 10), Some(last), true),
    ];
    let lane = portway_proxy::transport::Lane(0);
    let expected: Vec<Op> = (0u64..)
        .zip(expected)
        .map(|(sequence, (put, signal, flush))| Op { lane, sequence, put, signal, flush })
        .collect();
    assert_eq!(port.script().ops, expected);
}

/// Memory that nobody touches: only its numbers matter.
#[derive(Debug)]
struct Imaginary;

impl Memory for Imaginary {
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, portway_fifo::Error> {
        Ok(vec![range])
    }

    fn dma_buf(&self, _: Segment) -> Result<DmaBuf, portway_fifo::Error> {
        Err(portway_fifo::Error::Unsupported { what: "imaginary memory as dma-buf" })
    }

    fn ipc_handle(&self, _: Segment, _: IpcKind) -> Result<IpcHandle, portway_fifo::Error> {
        Err(portway_fifo::Error::Unsupported { what: "imaginary memory as IPC handle" })
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), portway_fifo::Error> {
        Err(portway_fifo::Error::Unsupported { what: "reading imaginary memory" })
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), portway_fifo::Error> {
        Err(portway_fifo::Error::Unsupported { what: "writing imaginary memory" })
    }
}

#[test]
fn a_long_put_is_split_and_its_last_part_alone_signals() {
    const TIB: u64 = 1 << 40;
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (fifo, _) = add_fifo(&mut engine, 64);
    let port = Scripted::new();
    let port_id = engine.add_port(port.port()).unwrap();
    // SAFETY: device memory is not reached by the processor, and the scripted port moves nothing: no access is made.
    let region = unsafe { Region::new(1 << 40, TIB, Place::Device(0), Arc::new(Imaginary)) }.unwrap();
    let source = LocalMemory { id: MemoryId { transport: 0, index: u32::MAX }, region };
    let config = ChannelConfig { source, destination: remote(TIB), ..scripted_channel(fifo, port_id, 8) };
    let producer = engine.add_channel(config).unwrap().producer().unwrap();

    let (source, destination, len_bytes) = (4096, 1 << 39, 600 << 20);
    producer.put(source, destination, len_bytes).unwrap();
    assert_eq!(producer.put_signal(source, destination, len_bytes).unwrap(), Position(5));
    // To the last byte of a region of a tebibyte, and in one part.
    producer.put_signal(TIB - MAX_PUT_BYTES, TIB - MAX_PUT_BYTES, MAX_PUT_BYTES).unwrap();
    producer.put(0, TIB - MAX_PUT_BYTES - 1, MAX_PUT_BYTES + 1).unwrap();
    engine.step(Duration::ZERO);

    let script = port.script();
    let parts: Vec<_> = script.ops.iter().map(|op| (op.put.unwrap(), op.signal)).collect();
    let rest = len_bytes - 2 * MAX_PUT_BYTES;
    let mut expected = Vec::new();
    for last_signal in [None, Some(1)] {
        for (n, len_bytes) in [(0, MAX_PUT_BYTES), (1, MAX_PUT_BYTES), (2, rest)] {
            let at = n * MAX_PUT_BYTES;
            let put = Put {
                source_offset_bytes: source + at,
                destination_offset_bytes: destination + at,
                len_bytes,
            };
            expected.push((put, if n == 2 { last_signal } else { None }));
        }
    }
    assert_eq!(parts[..6], expected);
    let put = |source_offset_bytes, destination_offset_bytes, len_bytes| Put {
        source_offset_bytes,
        destination_offset_bytes,
        len_bytes,
    };
    let end = TIB - MAX_PUT_BYTES;
    assert_eq!(parts[6], (put(end, end, MAX_PUT_BYTES), Some(2)));
    assert_eq!(parts[7], (put(0, end - 1, MAX_PUT_BYTES), None));
    assert_eq!(parts[8], (put(MAX_PUT_BYTES, TIB - 1, 1), None));
    assert_eq!(parts.len(), 9);
    // Every part begins as aligned as the whole.
    assert_eq!(MAX_PUT_BYTES % 4096, 0);
}

/// Two engines; in each two FIFOs, two ports to the other engine, and a channel for every pair of them. Each channel
/// sends numbered messages and checks those of its peer.
#[test]
fn fifos_ports_channels_and_engines_mix() {
    const MESSAGES: u64 = 200;
    const LEN_BYTES: u64 = 24;
    within(3 * LIMIT, "all messages", || {
        let transport = Loopback::new(loopback::Config::default()).unwrap();
        let mut engines = [(); 2].map(|()| Engine::new(&Heap, Config::default()).unwrap());
        let fifos: Vec<FifoId> = (0..4).map(|n| add_fifo(&mut engines[n / 2], 64).0).collect();
        let mut ends = Vec::new();
        for _ in 0..2 {
            let (a, b) = connect(&transport, &transport);
            let ports = [engines[0].add_port(a).unwrap(), engines[1].add_port(b).unwrap()];
            for fifo in 0..2 {
                let memories = [End::new(&transport, 4096), End::new(&transport, 4096)];
                for side in 0..2 {
                    let (here, there) = (&memories[side], &memories[1 - side]);
                    let config = channel_config(&transport, fifos[2 * side + fifo], ports[side], here, there);
                    let channel = engines[side].add_channel(config).unwrap();
                    ends.push((channel.producer().unwrap(), here.clone()));
                }
            }
        }
        let proxies = engines.map(run);
        let message = |round: u64, sender: usize| -> Vec<u8> {
            (0..LEN_BYTES).map(|i| (round * 31 + i * 7 + sender as u64) as u8).collect()
        };
        std::thread::scope(|scope| {
            for (index, (channel, end)) in ends.iter().enumerate() {
                scope.spawn(move || {
                    for round in 0..MESSAGES {
                        let at = round % 64 * LEN_BYTES;
                        end.source.region.write(at, &message(round, index)).unwrap();
                        channel.put_signal(at, at, LEN_BYTES).unwrap();
                        channel.wait().unwrap();
                        let mut seen = vec![0; LEN_BYTES as usize];
                        end.destination.region.read(at, &mut seen).unwrap();
                        assert_eq!(seen, message(round, index ^ 1), "round {round} of channel {index}");
                    }
                    channel.flush().unwrap();
                });
            }
        });
        for proxy in proxies {
            let report = proxy.stop(Stop::Drain { within: LIMIT });
            assert!(report.drained && report.quiesced, "{report:?}");
            assert_eq!(report.stats.completions, 4 * (MESSAGES + 1));
        }
        for (_, end) in &ends {
            transport.release(&end.source).unwrap();
        }
    });
}

#[test]
fn a_running_proxy_takes_ports_and_channels_from_any_thread() {
    within(2 * LIMIT, "channels of a running proxy", || {
        let mut engine = Engine::new(&Heap, Config::default()).unwrap();
        let fifos: Vec<FifoId> = (0..4).map(|_| add_fifo(&mut engine, 64).0).collect();
        let proxy = run(engine);
        std::thread::scope(|scope| {
            for &fifo in &fifos {
                let proxy = &proxy;
                scope.spawn(move || {
                    let port = proxy.add_port(Scripted::new().port()).unwrap();
                    for number in 0..8 {
                        let channel = proxy.add_channel(scripted_channel(fifo, port, 4096)).unwrap();
                        assert_eq!(channel.number(), number);
                        channel.producer().unwrap().put_signal_flush(0, 0, 8).unwrap();
                    }
                    assert!(proxy.close_port(port).unwrap());
                    let error = proxy.add_channel(scripted_channel(fifo, port, 4096)).unwrap_err();
                    let text = error.to_string();
                    assert!(
                        text.starts_with("channel 8 of FIFO ") && text.contains(": the port is closed"),
                        "{text}"
                    );
                });
            }
        });
        let stats = proxy.stats();
        assert_eq!((stats.completions, stats.channels_ended), (32, 32));
        assert!(proxy.stop(Stop::Drain { within: LIMIT }).drained);
    });
}

/// A call that comes just when the thread has looked must not be forgotten until the next.
#[test]
fn calls_in_quick_succession_are_all_answered() {
    within(2 * LIMIT, "twenty thousand calls", || {
        for idle in [Idle::Yield, Idle::Sleep(Duration::from_millis(100))] {
            let mut engine = Engine::new(&Heap, Config::default()).unwrap();
            let port = engine.add_port(Scripted::new().port()).unwrap();
            let proxy = Proxy::start(engine, RunConfig { idle, ..RunConfig::default() }).unwrap();
            for call in 0..10_000 {
                assert!(proxy.close_port(port).unwrap(), "call {call}");
            }
            assert!(proxy.stop(Stop::Cancel).quiesced);
        }
    });
}

#[test]
fn a_running_proxy_resets_a_fifo_for_new_channels() {
    within(LIMIT, "a reset", || {
        let mut engine = Engine::new(&Heap, Config::default()).unwrap();
        let (id, fifo) = add_fifo(&mut engine, 64);
        let port = Scripted::new();
        let port_id = engine.add_port(port.port()).unwrap();
        let old = engine.add_channel(scripted_channel(id, port_id, 4096)).unwrap();
        let proxy = run(engine);
        let producer = old.producer().unwrap();
        producer.put_signal_flush(0, 0, 8).unwrap();
        // Of an open FIFO it does nothing.
        proxy.reset_fifo(id).unwrap();
        producer.put_signal_flush(0, 0, 8).unwrap();
        fifo.abort();
        until(LIMIT, "the channel's end", || old.error().is_some(), || old.error());
        let error = proxy.add_channel(scripted_channel(id, port_id, 4096)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "channel 1 of FIFO 0: the FIFO was aborted: reset it when nobody uses it"
        );
        proxy.reset_fifo(id).unwrap();

        let new = proxy.add_channel(scripted_channel(id, port_id, 4096)).unwrap();
        assert_eq!((new.number(), new.frontier()), (1, Position(2)), "positions go on");
        new.producer().unwrap().put_signal_flush(0, 0, 8).unwrap();
        // Nothing of before can satisfy it, and the old channel stays ended, whoever still pushes to it.
        assert_eq!(new.frontier(), Position(3));
        assert!(matches!(old.error(), Some(ChannelError::Fifo { .. })));
        assert!(matches!(producer.flush(), Err(Error::Channel(ChannelError::Fifo { .. }))));
        assert_eq!(port.script().ops.len(), 3);
        assert!(proxy.stop(Stop::Drain { within: LIMIT }).drained);
    });
}

#[test]
fn memory_is_busy_until_its_port_is_closed_after_a_deadline_too() {
    within(LIMIT, "a release", || {
        let config = Config { deadline: Duration::from_millis(50), ..Config::default() };
        let faults = Faults { lose_at: Some(0), ..Faults::default() };
        let pair = Pair::with_faults(config, 4096, faults);
        let (transport, ends, channel) = (pair.transport, pair.ends, pair.a);
        let proxy = run(pair.engine);
        let busy = |what: &str| {
            for memory in [&ends[0].source, &ends[1].destination, &ends[1].signal] {
                let error = transport.release(memory).expect_err(what);
                assert!(matches!(error, TransportError::Busy { .. }), "{what}: {error}");
            }
        };
        busy("bound");
        let producer = channel.producer().unwrap();
        let result = producer.put_signal_flush(0, 0, 64);
        assert!(
            matches!(result, Err(Error::Channel(ChannelError::Deadline { sent: true, .. }))),
            "{result:?}"
        );
        busy("ended by the deadline");
        assert!(proxy.close_port(pair.ports[0]).unwrap());
        transport.release(&ends[0].source).unwrap();
        // The other end's port still has these, as its source and the word that it signals.
        assert!(proxy.close_port(pair.ports[1]).unwrap());
        for memory in [&ends[1].destination, &ends[1].signal] {
            transport.release(memory).unwrap();
        }
        assert!(proxy.stop(Stop::Cancel).quiesced);
    });
}

#[test]
fn a_channel_from_a_port_that_never_quiesces_is_told_of_by_the_stop() {
    within(LIMIT, "a stop", || {
        let mut engine = Engine::new(&Heap, Config::default()).unwrap();
        let port = Scripted::new();
        port.script().close = Act::Fail(TransportError::Device {
            operation: "draining the queue",
            status: -110,
            vendor: 7,
            source: None,
        });
        let port_id = engine.add_port(port.port()).unwrap();
        let proxy = run(engine);
        let error = proxy.close_port(port_id).unwrap_err();
        assert_eq!(error.to_string(), "draining the queue failed with status -110 (vendor code 7)");
        let report = proxy.stop(Stop::Cancel);
        assert!(!report.quiesced && report.quarantined.is_empty(), "{report:?}");
    });
}

#[test]
fn many_threads_share_a_channel() {
    const THREADS: usize = 8;
    const EACH: u64 = 250;
    within(3 * LIMIT, "all signals", || {
        let pair = Pair::new(Config::default(), 4096);
        let proxy = run(pair.engine);
        let (a, b) = (pair.a.producer().unwrap(), pair.b.producer().unwrap());
        std::thread::scope(|scope| {
            for thread in 0..THREADS as u64 {
                let (a, b) = (&a, &b);
                scope.spawn(move || {
                    for round in 0..EACH {
                        a.put_signal(thread * 8, thread * 8, 8).unwrap();
                        if round % 16 == 0 {
                            a.flush().unwrap();
                        }
                    }
                });
                scope.spawn(move || (0..EACH).for_each(|_| b.wait().unwrap()));
            }
        });
        // As many waits as signals, and none left.
        assert!(!b.poll().unwrap());
        let report = proxy.stop(Stop::Drain { within: LIMIT });
        assert!(report.drained, "{report:?}");
    });
}

/// What other crates and threads do with these types.
#[test]
fn a_proxy_can_be_shared_between_threads() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Proxy>();
    is_shared::<portway_proxy::PortChannel>();
    is_shared::<portway_proxy::ChannelProducer>();
    is_shared::<Loopback>();
    is_shared::<Fifo>();
    fn is_sent<T: Send>() {}
    is_sent::<Engine>();
}
