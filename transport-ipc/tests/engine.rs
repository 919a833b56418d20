//! The transport behind an engine: what a channel says of a stalled executor, and that a stop is bounded meanwhile.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::time::{Duration, Instant};

use portway_fifo::cuda::Kind;
use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{LocalMemory, Port, Transport};
use portway_proxy::{ChannelConfig, ChannelError, ChannelProducer, Engine, Idle, Proxy, RunConfig, Stop};
use portway_transport_ipc::{Config, Error, Ipc};
use wire::{Machine, PATIENCE, wait_until};

const STALL: Duration = Duration::from_millis(200);

/// Two transports, and a proxy that puts from the first to the second.
struct Rig {
    machine: Machine,
    transports: [Ipc; 2],
    proxy: Proxy,
    fifos: Vec<portway_proxy::FifoId>,
    /// The other ends, which have nothing to send.
    others: Vec<Box<dyn Port>>,
}

impl Rig {
    fn new() -> Self {
        let machine = Machine::new();
        let transports = machine.transports(Config { stall_limit: STALL, ..Config::default() });
        let mut engine = Engine::new(&Heap, portway_proxy::Config::default()).unwrap();
        // A FIFO for each channel that a test makes.
        let fifos = (0..3)
            .map(|_| {
                let config = portway_fifo::Config { timeout: PATIENCE, ..Default::default() };
                let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
                engine.add_fifo(fifo, consumer).unwrap()
            })
            .collect();
        let proxy = Proxy::start(engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).unwrap();
        Rig { machine, transports, proxy, fifos, others: Vec::new() }
    }

    /// A channel over a port of its own, and where its data arrives.
    fn channel(&mut self) -> (ChannelProducer, LocalMemory) {
        let [near, far] = &self.transports;
        let ((a, a_bytes), (b, b_bytes)) = (near.endpoint().unwrap(), far.endpoint().unwrap());
        let port = a.connect(&b_bytes, PATIENCE).unwrap();
        self.others.push(b.connect(&a_bytes, PATIENCE).unwrap());
        let [here, there] = &self.machine.contexts;
        let source = near.register(&here.allocate(Kind::Vmm, 4096).unwrap()).unwrap();
        let destination = far.register(&there.allocate(Kind::Vmm, 4096).unwrap()).unwrap();
        let outbound = far.signal_word().unwrap();
        let import = |memory| near.import(&far.export(memory).unwrap()).unwrap();
        let config = ChannelConfig {
            fifo: self.fifos.pop().unwrap(),
            port: self.proxy.add_port(port).unwrap(),
            source,
            destination: import(&destination),
            outbound: import(&outbound),
            inbound: near.signal_word().unwrap(),
        };
        (self.proxy.add_channel(config).unwrap().producer().unwrap(), destination)
    }
}

#[test]
fn a_stalled_executor_ends_its_channel_by_name_and_another_goes_on() {
    let mut rig = Rig::new();
    let [(stuck, _), (other, destination)] = [rig.channel(), rig.channel()];
    stuck.put_signal_flush(0, 0, 64).unwrap();
    rig.machine.standin.hold_next("cuMemcpyAsync");
    let start = Instant::now();
    stuck.put_signal(0, 0, 64).unwrap();
    rig.machine.standin.wait_until_held("cuMemcpyAsync", 1);
    let waiter = std::thread::spawn({
        let stuck = stuck.clone();
        move || stuck.flush()
    });
    for round in 0..50 {
        other.put_signal_flush(0, round * 64, 64).unwrap();
    }
    let mut bytes = [1; 64];
    destination.region.read(49 * 64, &mut bytes).unwrap();
    // The wait of a kernel would end like this one.
    waiter.join().unwrap().unwrap_err();
    assert!(start.elapsed() >= STALL && start.elapsed() < PATIENCE);
    let error = stuck.channel().error().unwrap();
    let ChannelError::Port { source, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(Error::of(source), Some(Error::Stalled { .. })), "{error:?}");
    assert!(error.to_string().contains("likely: cudaFree in progress"), "{error}");
    // A new channel works while the driver still holds the first executor, and afterwards the stop finds all in order.
    let (fresh, _) = rig.channel();
    fresh.put_signal_flush(0, 0, 64).unwrap();
    rig.machine.standin.release("cuMemcpyAsync");
    let report = rig.proxy.stop(Stop::Drain { within: PATIENCE });
    assert!(report.quiesced && report.quarantined.is_empty(), "{report:?}");
    assert_eq!(rig.transports[0].quarantined(), Default::default());
}

#[test]
fn a_stop_in_the_middle_of_a_stalled_copy_is_bounded() {
    for cancel in [false, true] {
        let mut rig = Rig::new();
        let (channel, _) = rig.channel();
        channel.put_signal_flush(0, 0, 64).unwrap();
        rig.machine.standin.hold("cuMemcpyAsync");
        channel.put_signal(0, 0, 64).unwrap();
        rig.machine.standin.wait_until_held("cuMemcpyAsync", 1);
        let start = Instant::now();
        let within = Duration::from_millis(100);
        let report = rig.proxy.stop(if cancel { Stop::Cancel } else { Stop::Drain { within } });
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert!(!report.quiesced && report.quarantined.is_empty(), "{report:?}");
        // The engine is gone; the executor and what it holds are counted until the driver comes back.
        assert_eq!(rig.transports[0].quarantined().executors, 1);
        rig.machine.standin.release("cuMemcpyAsync");
        let transport = &rig.transports[0];
        wait_until("an empty quarantine", || transport.quarantined().executors, |held| *held == 0);
    }
}

/// What the driver refuses reaches the channel with peer, operation, size and status.
#[test]
fn a_failure_of_the_driver_ends_its_channel_by_name() {
    const LAUNCH_FAILED: i32 = 719;
    for (function, operation) in
        [("cuMemcpyAsync", "copy"), ("cuStreamWriteValue64_v2", "signal behind a copy")]
    {
        let mut rig = Rig::new();
        let (channel, _) = rig.channel();
        channel.put_signal_flush(0, 0, 64).unwrap();
        rig.machine.standin.fail(function, 1, LAUNCH_FAILED);
        channel.put_signal(0, 0, 192).unwrap();
        let error = wait_until("the channel's error", || channel.channel().error(), Option::is_some).unwrap();
        let ChannelError::Port { source, .. } = &error else { panic!("{error:?}") };
        let text = Error::of(source).unwrap().to_string();
        let peer = format!("this process ({})", std::process::id());
        for part in [operation, "192 bytes", &peer, "GPU-", function, "719"] {
            assert!(text.contains(part), "no {part} in: {text}");
        }
        drop(rig.proxy.stop(Stop::Drain { within: PATIENCE }));
    }
}

/// A peer that closes its port is gone for the channel, although its process lives; what was done before counts as done.
#[test]
fn a_peer_that_closes_its_port_ends_the_channel_by_name() {
    let mut rig = Rig::new();
    let (channel, _) = rig.channel();
    channel.put_signal_flush(0, 0, 64).unwrap();
    rig.others.clear();
    let error = wait_until("the channel's error", || channel.channel().error(), Option::is_some).unwrap();
    let text = error.to_string();
    assert!(text.contains("this process") && text.contains("closed its port"), "{text}");
    channel.put_signal_flush(0, 0, 64).unwrap_err();
    let report = rig.proxy.stop(Stop::Drain { within: PATIENCE });
    assert!(report.quiesced, "{report:?}");
}
