//! Random calls of an engine over loopback, and what has to stay true whatever they are.
//!
//! Each call is a byte that says which, and the bytes that it needs. Time is virtual, so nothing here waits.

use std::time::Duration;

use portway_fifo::{Config, Fifo, Heap, Position, Producer, Region, Trigger};
use portway_proxy::loopback::{self, Faults};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{
    ChannelConfig, Config as EngineConfig, Engine, FifoId, Loopback, OpSet, PortChannel, PortId, Request,
};

const LEN_BYTES: u64 = 4096;
/// What lies before and behind a memory that may be written to.
const GUARD_BYTES: u64 = 64;
const FIFOS: usize = 2;
const SLOTS: u64 = 64;
const MAX_CALLS: usize = 400;

/// Bytes of the input, 0 once it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn number(&mut self, bytes: u32) -> u64 {
        (0..bytes).fold(0, |number, _| number << 8 | u64::from(self.byte()))
    }
}

/// Memory that peers write to, and what nobody may.
struct Guarded {
    around: Region,
    memory: LocalMemory,
}

impl Guarded {
    fn new(transport: &Loopback) -> Self {
        let around = Heap.allocate(LEN_BYTES + 2 * GUARD_BYTES).expect("memory");
        let memory =
            transport.register(&around.slice(GUARD_BYTES, LEN_BYTES).expect("inside")).expect("heap");
        Guarded { around, memory }
    }

    fn is_whole(&self) -> bool {
        let mut guard = [0; GUARD_BYTES as usize];
        [0, GUARD_BYTES + LEN_BYTES].into_iter().all(|at| {
            self.around.read(at, &mut guard).expect("inside");
            guard.iter().all(|byte| *byte == 0)
        })
    }
}

struct World {
    transport: Loopback,
    engine: Engine,
    fifos: Vec<(FifoId, Producer)>,
    ports: Vec<PortId>,
    channels: Vec<(PortChannel, Position)>,
    source: LocalMemory,
    destination: Guarded,
    now: Duration,
}

fn faults(input: &mut Input<'_>) -> Faults {
    let byte = input.byte();
    Faults {
        delay_polls: u32::from(byte & 3),
        reorder_seed: (byte & 4 != 0).then_some(u64::from(byte)),
        refuse_every: u64::from(byte >> 3 & 3),
        fail_at: (byte & 0x60 == 0x60).then_some(u64::from(byte & 31)),
        lose_at: (byte & 0x80 != 0).then_some(u64::from(byte & 15)),
    }
}

impl World {
    fn new(input: &mut Input<'_>) -> World {
        let transport = Loopback::new(loopback::Config { depth: 8, ..Default::default() }).expect("a depth");
        let config = EngineConfig { window: 16, max_channels: 16, batch: 8, ..EngineConfig::default() };
        let mut engine = Engine::new(&Heap, config).expect("a configuration");
        let mut fifos = Vec::new();
        for _ in 0..FIFOS {
            let config = Config { slots: SLOTS, timeout: Duration::ZERO, ..Config::default() };
            let (fifo, consumer) = Fifo::new(&Heap, config).expect("a ring");
            let producer = fifo.producer().expect("on the heap");
            fifos.push((engine.add_fifo(fifo, consumer).expect("room for it"), producer));
        }
        let (source, destination) = (Guarded::new(&transport).memory, Guarded::new(&transport));
        let mut world = World {
            transport,
            engine,
            fifos,
            ports: Vec::new(),
            channels: Vec::new(),
            source,
            destination,
            now: Duration::ZERO,
        };
        for _ in 0..2 {
            world.add_port(input);
            world.add_channel(input);
        }
        world
    }

    fn add_port(&mut self, input: &mut Input<'_>) {
        let transport = self.transport.with_faults(faults(input));
        let (end, _) = transport.endpoint().expect("loopback has ends");
        let (_other, bytes) = transport.endpoint().expect("loopback has ends");
        let port = end.connect(&bytes, Duration::ZERO).expect("loopback connects");
        self.ports.push(self.engine.add_port(port).expect("a port"));
    }

    fn add_channel(&mut self, input: &mut Input<'_>) {
        let import = |memory| {
            let bytes = self.transport.export(memory).expect("registered");
            self.transport.import(&bytes).expect("just exported")
        };
        let words = [0, 1].map(|_| self.transport.signal_word().expect("memory"));
        let config = ChannelConfig {
            fifo: self.fifos[usize::from(input.byte()) % FIFOS].0,
            port: self.ports[usize::from(input.byte()) % self.ports.len()],
            source: self.source.clone(),
            destination: import(&self.destination.memory),
            outbound: import(&words[0]),
            inbound: words[1].clone(),
        };
        // A failed port or no room for more is an error, and changes nothing.
        if let Ok(channel) = self.engine.add_channel(config) {
            let frontier = channel.frontier();
            self.channels.push((channel, frontier));
        }
    }

    fn call(&mut self, input: &mut Input<'_>) {
        let call = input.byte();
        let fifo = usize::from(call >> 7);
        match call & 15 {
            0..=5 => {
                let bits = input.byte();
                let parts = [(1, OpSet::PUT), (2, OpSet::SIGNAL), (4, OpSet::FLUSH)];
                let mut parts = parts.into_iter().filter(|(bit, _)| bits & bit != 0).map(|(_, part)| part);
                let Some(first) = parts.next() else { return };
                let op = parts.fold(first, OpSet::and);
                let request = Request {
                    op,
                    channel: u16::from(input.byte() % 18),
                    size: input.number(2) as u32,
                    source_offset_bytes: input.number(2),
                    destination_offset_bytes: input.number(2),
                };
                if let Ok(trigger) = request.encode() {
                    let _ = self.fifos[fifo].1.push(trigger); // full, aborted or broken: named, and no harm
                }
            }
            6 => {
                let words = [input.number(8), input.number(8)];
                if let Ok(trigger) = Trigger::new(words) {
                    let _ = self.fifos[fifo].1.push(trigger);
                }
            }
            7 => self.fifos[fifo].1.abort(),
            8 => {
                let _ = self.engine.reset_fifo(self.fifos[fifo].0); // refused while channels live
            }
            9 => {
                let port = self.ports[usize::from(input.byte()) % self.ports.len()];
                let _ = self.engine.close_port(port);
            }
            10 if self.ports.len() < 8 => self.add_port(input),
            11 => self.add_channel(input),
            _ => {
                self.now += Duration::from_millis(input.number(2) >> (call >> 4 & 7));
                self.engine.step(self.now);
            }
        }
    }

    /// What is true after every call.
    fn check(&mut self) {
        for (channel, last) in &mut self.channels {
            let frontier = channel.frontier();
            assert!(frontier.since(*last) < 1 << 63, "channel {}: the frontier went back", channel.number());
            *last = frontier;
        }
        assert!(self.destination.is_whole(), "bytes outside of the destination were written");
    }
}

/// Calls in the order of the bytes; then everything ends.
pub fn calls(bytes: &[u8]) -> bool {
    let input = &mut Input(bytes);
    let mut world = World::new(input);
    for _ in 0..MAX_CALLS {
        if input.0.is_empty() {
            break;
        }
        world.call(input);
        world.check();
    }
    // Whatever happened, the engine comes to rest: by its deadline nothing is under way any more.
    for _ in 0..1_000 {
        world.now += Duration::from_secs(1);
        world.engine.step(world.now);
        world.check();
        if world.engine.is_idle() {
            break;
        }
    }
    assert!(world.engine.is_idle(), "not idle 1,000 s after the last call");
    let mut quiesced = false;
    for _ in 0..100 {
        quiesced = quiesced || world.engine.shut_down();
    }
    assert!(quiesced, "ports not quiesced after 100 calls");
    for (channel, _) in &world.channels {
        let error = channel.error().unwrap_or_else(|| panic!("channel {} has not ended", channel.number()));
        let text = error.to_string();
        assert!(!text.contains("panicked"), "nothing here panics but by a mistake of ours: {text}");
    }
    world.check();
    true
}

/// A mistake that the invariants are there for: somebody writes where an offset says, without a look at the length.
pub fn plant_believes_an_offset(bytes: &[u8]) -> bool {
    let input = &mut Input(bytes);
    let world = World::new(input);
    for _ in 0..MAX_CALLS {
        if input.0.is_empty() {
            break;
        }
        if input.byte() & 15 <= 5 {
            let at = input.number(2);
            if (LEN_BYTES..LEN_BYTES + GUARD_BYTES).contains(&at) {
                world.destination.around.write(GUARD_BYTES + at, &[1]).expect("inside the guard");
            }
        }
    }
    assert!(world.destination.is_whole(), "bytes outside of the destination were written");
    true
}
