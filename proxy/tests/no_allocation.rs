//! The engine's step allocates nothing, whatever the ports do, and stores each tail once a batch. A process of its own,
//! since it has its own allocator.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Submit};
use portway_proxy::{ChannelProducer, Config, Engine, OpSet, Request, TransportError};
use support::script::{add_fifo, scripted_channel};

/// Counts the allocations of a thread while it is told to.
struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
        // SAFETY: the caller vouches for what the system's allocator asks of it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        COUNTED.with(|counted| counted.set(counted.get().map(|count| count + 1)));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often `body` allocates or frees.
fn allocations(body: impl FnOnce()) -> u64 {
    COUNTED.set(Some(0));
    body();
    COUNTED.replace(None).unwrap()
}

const DEPTH: usize = 16;

/// Holds up to sixteen ops, refuses now and then, and completes the newest first. Allocates nothing, or, for the
/// control, something.
#[derive(Debug)]
struct Moody {
    lanes: u32,
    held: [Completion; DEPTH],
    len: usize,
    submits: u64,
    polls: u64,
    allocates: bool,
}

impl Moody {
    fn new(allocates: bool) -> Box<Self> {
        let none = Completion { lane: Lane(0), sequence: 0 };
        Box::new(Moody { lanes: 0, held: [none; DEPTH], len: 0, submits: 0, polls: 0, allocates })
    }
}

impl Port for Moody {
    fn bind(&mut self, _: &Binding) -> Result<Lane, TransportError> {
        self.lanes += 1;
        Ok(Lane(self.lanes - 1))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.submits += 1;
        if self.len == DEPTH || self.submits % 7 == 0 {
            return Ok(Submit::Full);
        }
        if self.allocates {
            drop(std::hint::black_box(Box::new(op.sequence)));
        }
        self.held[self.len] = Completion { lane: op.lane, sequence: op.sequence };
        self.len += 1;
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.polls += 1;
        if self.polls % 3 == 0 {
            return Ok(0);
        }
        let count = self.len.min(completions.len()).min(9);
        for slot in &mut completions[..count] {
            self.len -= 1;
            *slot = self.held[self.len];
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        Ok(Close::Quiesced)
    }
}

/// An engine with two FIFOs and two ports, and channels across; one of them has ended. Returns how often steps
/// allocated, over so many rounds.
fn allocations_of_steps(rounds: u64, allocates: bool) -> u64 {
    let mut engine = Engine::new(&Heap, Config { window: 8, ..Config::default() }).unwrap();
    let fifos: Vec<_> = (0..2).map(|_| add_fifo(&mut engine, 256)).collect();
    let ports = [Moody::new(allocates), Moody::new(false)].map(|port| engine.add_port(port).unwrap());
    let mut channels: Vec<ChannelProducer> = Vec::new();
    for (fifo, _) in &fifos {
        for port in [ports[0], ports[1], ports[0]] {
            let channel = engine.add_channel(scripted_channel(*fifo, port, 1 << 20)).unwrap();
            channels.push(channel.producer().unwrap());
        }
    }
    // The last channel of each FIFO ends by a trigger that makes no sense; its later ones are thrown away.
    for (_, fifo) in &fifos {
        let request = Request {
            op: OpSet::PUT,
            channel: 2,
            size: 8,
            source_offset_bytes: 1 << 39,
            destination_offset_bytes: 0,
        };
        fifo.producer().unwrap().push(request.encode().unwrap()).unwrap();
    }
    engine.step(Duration::ZERO);
    assert_eq!(engine.stats().channels_ended, 2);

    let mut now = Duration::ZERO;
    let mut allocated = 0;
    for round in 0..rounds {
        for (index, (_, fifo)) in fifos.iter().enumerate() {
            let room = 256 - (pushed(fifo) - fifo.tail().0);
            for n in 0..room.min(40) {
                let of_fifo = &channels[3 * index..3 * index + 2];
                let channel = &of_fifo[(round + n) as usize % 2];
                match n % 4 {
                    0 => channel.put_signal(n, n, 8),
                    1 => channel.put(0, 0, 1 << 20),
                    2 => channel.signal(3),
                    _ => discarded(fifo),
                }
                .unwrap();
            }
        }
        now += Duration::from_micros(300);
        let before = engine.stats();
        allocated += allocations(|| {
            engine.step(now);
        });
        let after = engine.stats();
        assert!(after.publishes - before.publishes <= 2, "one store a FIFO and step");
    }
    let stats = engine.stats();
    assert!(stats.completions > rounds && stats.refusals > 0 && stats.stalls > 0, "{stats:?}");
    assert!(stats.discarded > 0 && stats.last_stall.is_some(), "{stats:?}");
    allocated
}

/// Pushes a trigger of the channel that has ended.
fn discarded(fifo: &Fifo) -> Result<portway_fifo::Position, portway_proxy::Error> {
    let request = Request {
        op: OpSet::FLUSH,
        channel: 2,
        size: 0,
        source_offset_bytes: 0,
        destination_offset_bytes: 0,
    };
    Ok(fifo.producer()?.push(request.encode()?)?)
}

/// How many triggers were pushed, from the FIFO's head in device memory.
fn pushed(fifo: &Fifo) -> u64 {
    // SAFETY: the head is an aligned word of heap memory that `fifo` keeps alive, and accessed atomically only.
    let head = unsafe { std::sync::atomic::AtomicU64::from_ptr(fifo.handle().head as *mut u64) };
    head.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_step_allocates_nothing() {
    assert_eq!(allocations_of_steps(10_000, false), 0);
    // The control: a port that allocates is seen.
    assert!(allocations_of_steps(100, true) > 100);
}

#[test]
fn a_batch_is_published_once() {
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (id, fifo) = add_fifo(&mut engine, 256);
    let port = engine.add_port(Moody::new(false)).unwrap();
    let channel = engine.add_channel(scripted_channel(id, port, 4096)).unwrap();
    let producer = channel.producer().unwrap();
    for _ in 0..200 {
        producer.put(0, 0, 8).unwrap();
    }
    for batch in 1..=6 {
        let step = engine.step(Duration::from_millis(batch));
        let stats = engine.stats();
        assert_eq!((step.triggers, stats.triggers, stats.publishes), (32, 32 * batch, batch));
        assert_eq!(fifo.tail().0, 32 * batch);
    }
    assert_eq!(engine.step(Duration::from_millis(7)).triggers, 8);
    assert_eq!(engine.stats().publishes, 7);
    // Nothing taken, nothing stored.
    assert_eq!(engine.step(Duration::from_millis(8)).triggers, 0);
    assert_eq!(engine.stats().publishes, 7);
}
