//! What the tests of this crate share: two ends over loopback, in one engine.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod deadline;
pub mod script;

use std::time::Duration;

use portway_fifo::{Fifo, Heap, Region};
use portway_proxy::loopback::Faults;
use portway_proxy::transport::{LocalMemory, Port, RemoteMemory, Transport};
use portway_proxy::{ChannelConfig, Config, Engine, FifoId, Loopback, PortChannel, PortId, loopback};

/// Longer than anything here takes, so that a hang becomes a failure.
pub const LIMIT: Duration = Duration::from_secs(20);

/// One end's memories.
#[derive(Clone, Debug)]
pub struct End {
    pub source: LocalMemory,
    pub destination: LocalMemory,
    pub signal: LocalMemory,
}

impl End {
    pub fn new(transport: &dyn Transport, len_bytes: u64) -> Self {
        let memory = || transport.register(&Heap.allocate(len_bytes).unwrap()).unwrap();
        End { source: memory(), destination: memory(), signal: transport.signal_word().unwrap() }
    }
}

pub fn import(transport: &dyn Transport, memory: &LocalMemory) -> RemoteMemory {
    transport.import(&transport.export(memory).unwrap()).unwrap()
}

/// The two ports of a connection.
pub fn connect(a: &Loopback, b: &Loopback) -> (Box<dyn Port>, Box<dyn Port>) {
    let (a_end, a_bytes) = a.endpoint().unwrap();
    let (b_end, b_bytes) = b.endpoint().unwrap();
    (a_end.connect(&b_bytes, LIMIT).unwrap(), b_end.connect(&a_bytes, LIMIT).unwrap())
}

/// A channel of `here` that puts to `there`.
pub fn channel_config(
    transport: &Loopback,
    fifo: FifoId,
    port: PortId,
    here: &End,
    there: &End,
) -> ChannelConfig {
    ChannelConfig {
        fifo,
        port,
        source: here.source.clone(),
        destination: import(transport, &there.destination),
        outbound: import(transport, &there.signal),
        inbound: here.signal.clone(),
    }
}

/// An engine with nothing to do, to put in the place of one that moves to a thread.
pub fn empty_engine() -> Engine {
    Engine::new(&Heap, Config { max_channels: 1, ..Config::default() }).unwrap()
}

/// Two ends, each with a FIFO and a channel to the other.
#[derive(Debug)]
pub struct Pair {
    pub transport: Loopback,
    pub engine: Engine,
    pub fifos: [FifoId; 2],
    pub rings: [Fifo; 2],
    pub ports: [PortId; 2],
    pub ends: [End; 2],
    pub a: PortChannel,
    pub b: PortChannel,
    pub a_source: Region,
    pub b_destination: Region,
}

impl Pair {
    pub fn new(config: Config, len_bytes: u64) -> Self {
        Pair::with_faults(config, len_bytes, Faults::default())
    }

    /// Only `a`'s port has the faults.
    pub fn with_faults(config: Config, len_bytes: u64, faults: Faults) -> Self {
        let transport = Loopback::new(loopback::Config::default()).unwrap();
        let ports = connect(&transport.with_faults(faults), &transport);
        Pair::with_ports(config, len_bytes, transport, ports)
    }

    pub fn with_ports(
        config: Config,
        len_bytes: u64,
        transport: Loopback,
        ports: (Box<dyn Port>, Box<dyn Port>),
    ) -> Self {
        let mut engine = Engine::new(&Heap, config).unwrap();
        let ends = [End::new(&transport, len_bytes), End::new(&transport, len_bytes)];
        let ports = [engine.add_port(ports.0).unwrap(), engine.add_port(ports.1).unwrap()];
        let mut rings = Vec::new();
        let fifos = [0, 1].map(|_| {
            let config = portway_fifo::Config { timeout: LIMIT, ..Default::default() };
            let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
            rings.push(fifo.clone());
            engine.add_fifo(fifo, consumer).unwrap()
        });
        let a = channel_config(&transport, fifos[0], ports[0], &ends[0], &ends[1]);
        let b = channel_config(&transport, fifos[1], ports[1], &ends[1], &ends[0]);
        let (a, b) = (engine.add_channel(a).unwrap(), engine.add_channel(b).unwrap());
        let a_source = ends[0].source.region.clone();
        let b_destination = ends[1].destination.region.clone();
        let rings = [rings[0].clone(), rings[1].clone()];
        Pair { transport, engine, fifos, rings, ports, ends, a, b, a_source, b_destination }
    }
}
