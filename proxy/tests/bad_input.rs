//! Bad input: each a typed error that names who, what, what was expected and what was seen, in every build profile.

mod support;

use std::sync::Arc;
use std::time::Duration;

use portway_fifo::{Fifo, Heap, Position, Region};
use portway_proxy::transport::{Endpoint, LocalMemory, MemoryId, Transport};
use portway_proxy::{
    ChannelConfig, ChannelError, Config, Engine, Error, Idle, Loopback, MAX_REGION_BYTES, MAX_SIZE, OpSet,
    Proxy, Request, RequestFault, RunConfig, Stop, TransportError, loopback,
};
use support::script::{Scripted, add_fifo, local, remote, scripted_channel};
use support::{End, LIMIT, Pair, channel_config, connect, import};

/// The text of an error, of which the variant is asserted by the caller.
fn says<T: std::fmt::Debug, E: std::fmt::Display>(result: Result<T, E>) -> String {
    match result {
        Ok(value) => panic!("expected an error, got {value:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_bound_of_the_engine_config() {
    let good = Config::default();
    let refused = [
        (Config { batch: 0, ..good.clone() }, "batch is 0: must be 1 to 1,024"),
        (Config { batch: 1025, ..good.clone() }, "batch is 1025: must be 1 to 1,024"),
        (Config { window: 0, ..good.clone() }, "window is 0: must be a power of two from 2 to 65,536"),
        (Config { window: 1, ..good.clone() }, "window is 1: must be a power of two from 2 to 65,536"),
        (Config { window: 48, ..good.clone() }, "window is 48: must be a power of two from 2 to 65,536"),
        (
            Config { window: 1 << 17, ..good.clone() },
            "window is 131072: must be a power of two from 2 to 65,536",
        ),
        (Config { max_channels: 0, ..good.clone() }, "max_channels is 0: must be 1 to 32,768"),
        (Config { max_channels: 32_769, ..good.clone() }, "max_channels is 32769: must be 1 to 32,768"),
        (
            Config { max_channels: usize::MAX, ..good.clone() },
            "max_channels is 18446744073709551615: must be 1 to 32,768",
        ),
        (
            Config { deadline: Duration::ZERO, ..good.clone() },
            "deadline in milliseconds is 0: must be over 0 and at most an hour",
        ),
        (
            Config { deadline: Duration::from_millis(3_600_001), ..good.clone() },
            "deadline in milliseconds is 3600001: must be over 0 and at most an hour",
        ),
        (
            Config { deadline: Duration::MAX, ..good.clone() },
            "deadline in milliseconds is 18446744073709551615: must be over 0 and at most an hour",
        ),
    ];
    for (config, expected) in refused {
        let result = Engine::new(&Heap, config);
        assert!(matches!(result, Err(Error::Config { .. })));
        assert_eq!(says(result), expected);
    }
    // The control: both ends of every bound are taken.
    for config in [
        Config { batch: 1, window: 2, max_channels: 1, deadline: Duration::from_nanos(1) },
        Config { batch: 1024, window: 65_536, max_channels: 32_768, deadline: Duration::from_secs(3600) },
    ] {
        Engine::new(&Heap, config).unwrap();
    }
}

#[test]
fn every_bound_of_the_run_config() {
    let engine = || Engine::new(&Heap, Config::default()).unwrap();
    let idle = Idle::Sleep(Duration::from_millis(101));
    let result = Proxy::start(engine(), RunConfig { idle, ..RunConfig::default() });
    assert!(matches!(result, Err(Error::Config { .. })));
    assert_eq!(says(result), "idle sleep in milliseconds is 101: must be at most 100");
    for (cpu, expected) in [(1 << 20, "there is no processor 1048576"), (1000, "[1000]: Invalid argument")] {
        let result = Proxy::start(engine(), RunConfig { cpus: vec![cpu], ..RunConfig::default() });
        assert!(matches!(result, Err(Error::Thread { .. })));
        let text = says(result);
        assert!(text.starts_with(&format!("binding a thread to processors: {expected}")), "{text}");
    }
    let idle = Idle::Sleep(Duration::from_millis(100));
    let proxy = Proxy::start(engine(), RunConfig { idle, ..RunConfig::default() }).unwrap();
    assert!(proxy.stop(Stop::Drain { within: Duration::MAX }).drained);
}

#[test]
fn what_belongs_to_another_engine() {
    let mut other = Engine::new(&Heap, Config::default()).unwrap();
    // Further along than anything of ours, so that a bare index would miss.
    let (foreign_fifo, _) = (0..3).map(|_| add_fifo(&mut other, 64)).last().unwrap();
    let foreign_port = (0..5).map(|_| other.add_port(Scripted::new().port()).unwrap()).last().unwrap();
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (fifo, _) = add_fifo(&mut engine, 64);
    let port = engine.add_port(Scripted::new().port()).unwrap();

    let of_fifo = "FIFO 2 belongs to another engine: name one that this engine's own calls have returned";
    let of_port = "port 4 belongs to another engine: name one that this engine's own calls have returned";
    assert_eq!(says(engine.add_channel(scripted_channel(foreign_fifo, port, 8))), of_fifo);
    assert_eq!(says(engine.add_channel(scripted_channel(fifo, foreign_port, 8))), of_port);
    assert_eq!(says(engine.reset_fifo(foreign_fifo)), of_fifo);
    assert_eq!(says(engine.close_port(foreign_port)), of_port);
    let proxy = Proxy::start(engine, RunConfig::default()).unwrap();
    assert_eq!(says(proxy.add_channel(scripted_channel(foreign_fifo, port, 8))), of_fifo);
    assert_eq!(says(proxy.add_channel(scripted_channel(fifo, foreign_port, 8))), of_port);
    assert_eq!(says(proxy.reset_fifo(foreign_fifo)), of_fifo);
    let result = proxy.close_port(foreign_port);
    assert!(matches!(result, Err(Error::Foreign { what: "port", index: 4 })));
    assert_eq!(says(result), of_port);
    proxy.add_channel(scripted_channel(fifo, port, 8)).unwrap();
}

#[test]
fn regions_and_words_that_no_channel_can_have() {
    let mut engine = Engine::new(&Heap, Config { max_channels: 2, ..Config::default() }).unwrap();
    let (fifo, _) = add_fifo(&mut engine, 64);
    let port = engine.add_port(Scripted::new().port()).unwrap();
    let good = || scripted_channel(fifo, port, 4096);
    let heap = local(64);
    // SAFETY: the processor is never told that it reaches the range, and the engine refuses it: no access is made.
    let huge = unsafe {
        Region::new(
            4096,
            MAX_REGION_BYTES + 1,
            portway_fifo::Place::Device(0),
            Arc::clone(heap.region.owner()),
        )
    };
    let huge = LocalMemory { id: heap.id, region: huge.unwrap() };
    let part = |offset, len_bytes| LocalMemory {
        id: heap.id,
        region: heap.region.slice(offset, len_bytes).unwrap(),
    };
    let refused = [
        (
            ChannelConfig { source: huge, ..good() },
            "source region of 1099511627777 bytes: must be 1 byte to 1 TiB",
        ),
        (
            ChannelConfig { destination: remote(0), ..good() },
            "destination region of 0 bytes: must be 1 byte to 1 TiB",
        ),
        (
            ChannelConfig { destination: remote(u64::MAX), ..good() },
            "destination region of 18446744073709551615 bytes: must be 1 byte to 1 TiB",
        ),
        (
            ChannelConfig { outbound: remote(16), ..good() },
            "outbound signal word of 16 bytes: must be 8 bytes",
        ),
        (ChannelConfig { inbound: part(0, 4), ..good() }, "inbound signal word of 4 bytes: must be 8 bytes"),
    ];
    for (config, expected) in refused {
        let result = engine.add_channel(config);
        assert!(matches!(result, Err(Error::Region { .. })));
        assert_eq!(says(result), expected);
    }
    let text = says(engine.add_channel(ChannelConfig { inbound: part(4, 8), ..good() }));
    assert!(text.starts_with("inbound signal word at 0x"), "{text}");
    assert!(text.ends_with("4: the address must be a multiple of 8"), "{text}");

    // Two channels cannot count on one word, not even after the first has ended.
    let first = good();
    let channel = engine.add_channel(first.clone()).unwrap();
    engine.step(Duration::ZERO);
    for (config, what, index) in [
        (ChannelConfig { outbound: first.outbound, ..good() }, "outbound", first.outbound.id.index),
        (ChannelConfig { inbound: first.inbound.clone(), ..good() }, "inbound", first.inbound.id.index),
    ] {
        let result = engine.add_channel(config);
        assert!(matches!(result, Err(Error::InUse { .. })));
        let remedy = "a signal word has one writer for good, so take a new one for each channel";
        let expected = format!("{what} signal word {index} is in use by channel 0 of FIFO 0: {remedy}");
        assert_eq!(says(result), expected);
    }
    assert!(channel.error().is_none());
    engine.add_channel(good()).unwrap();
    let result = engine.add_channel(good());
    assert!(matches!(result, Err(Error::Limit { what: "channels", limit: 2, .. })));
    assert_eq!(
        says(result),
        "the engine has 2 channels, as many as it can: drop ended channels, or raise `Config::max_channels`"
    );
}

#[test]
fn calls_of_the_device_end() {
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (fifo, ring) = add_fifo(&mut engine, 64);
    let port = engine.add_port(Scripted::new().port()).unwrap();
    let config = ChannelConfig { destination: remote(1000), ..scripted_channel(fifo, port, 4096) };
    let producer = engine.add_channel(config).unwrap().producer().unwrap();
    let (size, source) = (RequestFault::Empty, RequestFault::Source { limit_bytes: 4096 });
    let destination = RequestFault::Destination { limit_bytes: 1000 };
    let cases = [
        ((0, 0, 0), size),
        ((4096, 0, 1), source),
        ((4090, 0, 7), source),
        ((0, 0, 4097), source),
        ((u64::MAX, 0, 1), source),
        ((1, 0, u64::MAX), source),
        ((u64::MAX, u64::MAX, u64::MAX), source),
        ((0, 1000, 1), destination),
        ((0, 994, 7), destination),
        ((0, u64::MAX, 8), destination),
    ];
    for ((from, to, len), expected) in cases {
        for result in [
            producer.put(from, to, len).map(drop),
            producer.put_signal(from, to, len).map(drop),
            producer.put_signal_flush(from, to, len),
        ] {
            let Err(Error::Request { fault, request }) = result else { panic!("{result:?}") };
            assert_eq!(fault, expected, "put({from}, {to}, {len})");
            assert_eq!((request.source_offset_bytes, request.destination_offset_bytes), (from, to));
        }
    }
    let text = says(producer.put(4090, 0, 7));
    assert!(text.starts_with("it reads past the source region's 4096 bytes: "), "{text}");
    assert!(text.contains("size: 7, source_offset_bytes: 4090, destination_offset_bytes: 0"), "{text}");
    assert!(says(producer.put(0, 0, 0)).starts_with("its size is 0: "));
    assert!(
        says(producer.put(0, 999, 2)).starts_with("it writes past the destination region's 1000 bytes: ")
    );
    assert!(says(producer.signal(0)).starts_with("its size is 0: "));
    let text = says(producer.signal(MAX_SIZE + 1));
    assert!(
        text.starts_with("its size of 268435456 does not fit the trigger, which holds up to 268435455: "),
        "{text}"
    );
    let text = says(producer.with_timeout(Duration::from_secs(3601)));
    assert_eq!(text, "a timeout of 3601s: nothing here waits longer than 3600s");
    // Nothing of all this was pushed.
    engine.step(Duration::ZERO);
    assert_eq!(ring.tail(), Position(0));
    // The control: to the last byte it fits.
    producer.put(4095, 999, 1).unwrap();
    producer.put(0, 0, 1000).unwrap();
    producer.signal(MAX_SIZE).unwrap();
    assert_eq!(engine.step(Duration::ZERO).completions, 3);
}

#[test]
fn requests_that_fit_no_trigger() {
    let good = Request {
        op: OpSet::PUT,
        channel: 0x7fff,
        size: MAX_SIZE,
        source_offset_bytes: (1 << 40) - 1,
        destination_offset_bytes: (1 << 40) - 1,
    };
    assert_eq!(Request::decode(good.encode().unwrap()), good);
    let refused = [
        (
            Request { channel: 0x8000, ..good },
            "its channel of 32768 does not fit the trigger, which holds up to 32767",
        ),
        (
            Request { size: u32::MAX, ..good },
            "its size of 4294967295 does not fit the trigger, which holds up to 268435455",
        ),
        (
            Request { source_offset_bytes: 1 << 40, ..good },
            "its source offset of 1099511627776 does not fit the trigger, which holds up to 1099511627775",
        ),
        (
            Request { destination_offset_bytes: u64::MAX, ..good },
            "its destination offset of 18446744073709551615 does not fit the trigger, which holds up to 1099511627775",
        ),
    ];
    for (request, expected) in refused {
        let result = request.encode();
        assert!(matches!(result, Err(Error::Request { fault: RequestFault::Field { .. }, .. })));
        let text = says(result);
        assert!(text.starts_with(&format!("{expected}: Request {{")), "{text}");
    }
}

/// Triggers that our device code would not write, as the engine sees them.
#[test]
fn triggers_that_make_no_sense() {
    let request = Request {
        op: OpSet::PUT.and(OpSet::SIGNAL),
        channel: 0,
        size: 8,
        source_offset_bytes: 4090,
        destination_offset_bytes: 0,
    };
    let undefined = Request::decode(portway_fifo::Trigger::new([0, 0]).unwrap());
    assert!(says(undefined.encode()).starts_with("its op is empty: "));
    let cases = [
        (request, "it reads past the source region's 4096 bytes"),
        (
            Request { source_offset_bytes: 0, destination_offset_bytes: 1 << 39, ..request },
            "it writes past the destination region's 4096 bytes",
        ),
        (Request { size: 0, ..request }, "its size is 0"),
        (Request { op: OpSet::SIGNAL, size: 0, ..request }, "its size is 0"),
        (undefined, "its op is empty"),
        (Request { channel: 1, ..request }, "the FIFO has 1 channels"),
        (Request { channel: 0x7fff, ..request }, "the FIFO has 1 channels"),
    ];
    for (request, expected) in cases {
        let mut engine = Engine::new(&Heap, Config::default()).unwrap();
        let (fifo, ring) = add_fifo(&mut engine, 64);
        let port = Scripted::new();
        let port_id = engine.add_port(port.port()).unwrap();
        let channel = engine.add_channel(scripted_channel(fifo, port_id, 4096)).unwrap();
        let producer = channel.producer().unwrap();
        for _ in 0..3 {
            producer.put(0, 0, 8).unwrap();
        }
        // An empty op has no encoding, so its words are written as they are.
        let trigger = request.encode().unwrap_or(portway_fifo::Trigger::new([0, 0]).unwrap());
        let at = ring.producer().unwrap().push(trigger).unwrap();
        engine.step(Duration::ZERO);
        let error = channel.error().unwrap();
        assert!(
            matches!(&error, ChannelError::Request { position: Position(3), request: seen, .. } if *seen == request)
        );
        let number = request.channel;
        assert_eq!(
            error.to_string(),
            format!(
                "channel {number} of FIFO 0: the trigger at position {at} is refused, {expected}: {request:?}; compare it \
                 with the memories that the channel is bound to"
            )
        );
        // What came before it was handed on, counted and published.
        assert_eq!(port.script().ops.len(), 3);
        let stats = engine.stats();
        assert!((3..=4).contains(&stats.triggers) && stats.completions == 3, "{stats:?}");
        assert_eq!(ring.tail(), Position(stats.triggers));
    }
}

#[test]
fn use_after_the_end() {
    let pair = Pair::new(Config::default(), 4096);
    let (transport, ends, ports) = (pair.transport.clone(), pair.ends.clone(), pair.ports);
    let fifo = pair.fifos[0];
    let producer = pair.a.producer().unwrap();
    let mut engine = pair.engine;
    assert!(engine.shut_down());
    for result in [
        producer.put(0, 0, 8).map(drop),
        producer.signal(1).map(drop),
        producer.flush(),
        producer.wait(),
        producer.poll().map(drop),
    ] {
        assert!(
            matches!(result, Err(Error::Channel(ChannelError::Stopped { channel: 0, .. }))),
            "{result:?}"
        );
    }
    assert_eq!(says(producer.flush()), "channel 0 of FIFO 0: the proxy has stopped");
    let config = channel_config(&transport, fifo, ports[0], &ends[0], &ends[1]);
    let mut fresh = config.clone();
    fresh.inbound = transport.signal_word().unwrap();
    fresh.outbound = import(&transport, &transport.signal_word().unwrap());
    assert_eq!(
        says(engine.add_channel(fresh)),
        "channel 1 of FIFO 0: the FIFO was aborted: reset it when nobody uses it"
    );
    // Stepping it further does no harm.
    assert!(engine.step(Duration::ZERO).is_idle());
    // The channel outlives its engine.
    drop(engine);
    assert!(matches!(producer.flush(), Err(Error::Channel(ChannelError::Stopped { .. }))));
}

#[test]
fn memories_that_the_transport_does_not_know_or_that_overlap() {
    let transport = Loopback::new(loopback::Config::default()).unwrap();
    let other = Loopback::new(loopback::Config::default()).unwrap();
    let (port, _peer) = connect(&transport, &transport);
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (fifo, _) = add_fifo(&mut engine, 64);
    let port = engine.add_port(port).unwrap();
    let (here, there) = (End::new(&transport, 4096), End::new(&transport, 4096));
    let foreign = End::new(&other, 4096);
    let good = || channel_config(&transport, fifo, port, &here, &there);

    for config in [
        ChannelConfig { source: foreign.source.clone(), ..good() },
        ChannelConfig { destination: import(&other, &foreign.destination), ..good() },
        ChannelConfig { outbound: import(&other, &foreign.signal), ..good() },
    ] {
        let result = engine.add_channel(config);
        assert!(matches!(result, Err(Error::Transport(TransportError::Unknown { .. }))), "{result:?}");
    }
    let text = says(engine.add_channel(ChannelConfig { source: foreign.source.clone(), ..good() }));
    assert_eq!(
        text,
        "source 0 is not known to this transport: it is another's, was released, or was forgotten"
    );
    for memory in [
        &foreign.source,
        &LocalMemory { id: MemoryId { index: 99, ..here.source.id }, ..here.source.clone() },
    ] {
        for text in [says(transport.release(memory)), says(transport.export(memory))] {
            let part = format!(" {} is not known to this transport: ", memory.id.index);
            assert!(text.contains(&part), "{text}");
        }
    }

    let part = transport.register(&here.source.region.slice(4000, 96).unwrap()).unwrap();
    let result = engine.add_channel(ChannelConfig { destination: import(&transport, &part), ..good() });
    assert!(matches!(result, Err(Error::Transport(TransportError::Overlap { .. }))));
    let (a, b) = (here.source.region.address(), part.region.address());
    assert_eq!(
        says(result),
        format!("the source at {a:#x} and the destination at {b:#x} share bytes: bind memories that do not")
    );
    engine.add_channel(good()).unwrap();

    let text = says(transport.release(&here.source));
    assert_eq!(
        text,
        format!("the memory at {a:#x} is bound by 1 ports that are not quiesced: close them, and try again")
    );
    transport.release(&part).unwrap();
    assert!(says(transport.release(&part)).contains(" is not known to this transport: "));
}

#[test]
fn bytes_of_a_peer_that_are_truncated_foreign_or_of_another_version() {
    let transport = Loopback::new(loopback::Config::default()).unwrap();
    let other = Loopback::new(loopback::Config::default()).unwrap();
    let memory = transport.register(&Heap.allocate(64).unwrap()).unwrap();
    let export = transport.export(&memory).unwrap();
    let connect = |bytes: &[u8]| transport.endpoint().unwrap().0.connect(bytes, LIMIT);
    let (_peer, endpoint): (Box<dyn Endpoint>, _) = transport.endpoint().unwrap();
    // Both kinds of bytes, and a memory's where an endpoint's are due.
    let malformed = |result: Result<(), TransportError>| {
        let Err(TransportError::Malformed { what, expected, seen }) = &result else { panic!("{result:?}") };
        assert_ne!(expected, seen);
        assert_eq!(says(result.clone()), format!("{what}: expected {expected}, seen {seen}"));
    };
    for (bytes, is_memory) in [(export, true), (endpoint, false)] {
        let take = |bytes: &[u8]| {
            if is_memory { transport.import(bytes).map(drop) } else { connect(bytes).map(drop) }
        };
        take(&bytes).unwrap();
        for len in 0..bytes.len() {
            malformed(take(&bytes[..len]));
        }
        malformed(take(&[bytes.as_slice(), &[0]].concat()));
        // Every byte of what says what it is, from where and in which version.
        for at in 0..24 {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x40;
            malformed(take(&wrong));
        }
        malformed(if is_memory { connect(&bytes).map(drop) } else { transport.import(&bytes).map(drop) });
        malformed(if is_memory {
            other.import(&bytes).map(drop)
        } else {
            other.endpoint().unwrap().0.connect(&bytes, LIMIT).map(drop)
        });
    }
    let refused = Loopback::new(loopback::Config { depth: 0, ..Default::default() });
    assert_eq!(says(refused), "depth of a loopback port: expected at least 1, seen 0");
}

#[test]
fn a_fifo_that_is_closed_takes_no_channel() {
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let config = portway_fifo::Config { slots: 64, timeout: Duration::ZERO, ..Default::default() };
    let (ring, consumer) = Fifo::new(&Heap, config).unwrap();
    let fifo = engine.add_fifo(ring.clone(), consumer).unwrap();
    let port = engine.add_port(Scripted::new().port()).unwrap();
    let channel = engine.add_channel(scripted_channel(fifo, port, 8)).unwrap();
    let producer = channel.producer().unwrap();
    for _ in 0..64 {
        producer.signal(1).unwrap();
    }
    let text = says(producer.signal(1));
    assert_eq!(text, "waited 0ns for room in the ring to reach 1; it stands at 0");
    let broken = "the FIFO is broken: the push at position 64 gave up (timeout) and left a gap: reset it when nobody uses it";
    assert_eq!(says(producer.signal(1)), broken);
    assert_eq!(
        says(engine.add_channel(scripted_channel(fifo, port, 8))),
        format!("channel 1 of FIFO 0: {broken}")
    );
    engine.step(Duration::ZERO);
    assert_eq!(channel.error().unwrap().to_string(), format!("channel 0 of FIFO 0: {broken}"));
}
