//! A port that does what a test tells it to, and remembers what it was asked for.

use std::collections::VecDeque;
use std::panic::panic_any;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{
    Binding, Close, Completion, Lane, LocalMemory, MemoryId, Op, Port, RemoteMemory, Submit,
};
use portway_proxy::{ChannelConfig, Engine, FifoId, PortId, TransportError};

use super::deadline::Gate;

/// What a call does before it does its work, or instead of it.
#[derive(Clone, Debug, Default)]
pub enum Act {
    /// Its work.
    #[default]
    Obey,
    /// Sleeps first.
    Slow(Duration),
    /// Stays in the call until the gate opens.
    Stay(Gate),
    /// Panics with this text as a `&str`.
    Panic(&'static str),
    /// Panics with this text as a `String`.
    PanicString(&'static str),
    /// Panics with something that is no text and panics again when it is dropped.
    PanicBomb,
    /// Returns this error.
    Fail(TransportError),
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload panics too");
    }
}

impl Act {
    fn run(self) -> Result<(), TransportError> {
        match self {
            Act::Obey => {}
            Act::Slow(time) => std::thread::sleep(time),
            Act::Stay(gate) => gate.pass(),
            Act::Panic(text) => panic_any(text),
            Act::PanicString(text) => panic_any(text.to_owned()),
            Act::PanicBomb => panic_any(Bomb),
            Act::Fail(error) => return Err(error),
        }
        Ok(())
    }
}

/// The test's end of a scripted port.
#[derive(Debug, Default)]
pub struct Script {
    pub bind: Act,
    pub submit: Act,
    pub kick: Act,
    pub poll: Act,
    pub close: Act,
    pub drop: Act,
    /// Refuses every op.
    pub is_full: bool,
    /// Refuses every op after so many.
    pub room: Option<usize>,
    /// Refuses every n-th op; 0 for none.
    pub refuse_every: u64,
    pub submits: u64,
    /// Does not complete what it accepts by itself.
    pub holds: bool,
    /// Reports this count whatever it writes.
    pub count: Option<usize>,
    /// How often a close is pending before it is quiesced.
    pub pending_closes: u32,
    /// What it accepted.
    pub ops: Vec<Op>,
    /// What it will report.
    pub done: VecDeque<Completion>,
    pub bindings: Vec<Binding>,
    pub kicks: u64,
    pub closes: u64,
    pub is_dropped: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Scripted(Arc<Mutex<Script>>);

#[derive(Debug)]
struct ScriptedPort(Scripted);

impl Scripted {
    pub fn new() -> Self {
        Scripted::default()
    }

    pub fn port(&self) -> Box<dyn Port> {
        Box::new(ScriptedPort(self.clone()))
    }

    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Completes an op of lane 0 at the next poll.
    pub fn complete(&self, lane: u32, sequence: u64) {
        self.script().done.push_back(Completion { lane: Lane(lane), sequence });
    }

    /// Runs an act without holding the script.
    fn act(&self, which: impl Fn(&Script) -> &Act) -> Result<(), TransportError> {
        let act = which(&self.script()).clone();
        act.run()
    }
}

impl Port for ScriptedPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.0.act(|s| &s.bind)?;
        let mut script = self.0.script();
        script.bindings.push(*binding);
        Ok(Lane(script.bindings.len() as u32 - 1))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.0.act(|s| &s.submit)?;
        let mut script = self.0.script();
        script.submits += 1;
        let refused = script.refuse_every != 0 && script.submits % script.refuse_every == 0;
        if refused || script.is_full || script.room == Some(0) {
            return Ok(Submit::Full);
        }
        script.room = script.room.map(|room| room - 1);
        script.ops.push(*op);
        if !script.holds {
            script.done.push_back(Completion { lane: op.lane, sequence: op.sequence });
        }
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.0.act(|s| &s.kick)?;
        self.0.script().kicks += 1;
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.0.act(|s| &s.poll)?;
        let mut script = self.0.script();
        let count = completions.len().min(script.done.len());
        for (slot, completion) in completions.iter_mut().zip(script.done.drain(..count)) {
            *slot = completion;
        }
        Ok(script.count.unwrap_or(count))
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        self.0.script().closes += 1;
        self.0.act(|s| &s.close)?;
        let mut script = self.0.script();
        if script.pending_closes > 0 {
            script.pending_closes -= 1;
            return Ok(Close::Pending);
        }
        Ok(Close::Quiesced)
    }
}

impl Drop for ScriptedPort {
    fn drop(&mut self) {
        self.0.script().is_dropped = true;
        // A drop has nobody to tell of an error.
        let _ = self.0.act(|s| &s.drop);
    }
}

/// A memory's name that nobody else has.
fn new_id() -> MemoryId {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    MemoryId { transport: 0, index: NEXT.fetch_add(1, Ordering::Relaxed) }
}

pub fn local(len_bytes: u64) -> LocalMemory {
    LocalMemory { id: new_id(), region: Heap.allocate(len_bytes).unwrap() }
}

pub fn remote(len_bytes: u64) -> RemoteMemory {
    RemoteMemory { id: new_id(), len_bytes }
}

/// A channel over a scripted port, with regions of `len_bytes` bytes.
pub fn scripted_channel(fifo: FifoId, port: PortId, len_bytes: u64) -> ChannelConfig {
    ChannelConfig {
        fifo,
        port,
        source: local(len_bytes),
        destination: remote(len_bytes),
        outbound: remote(8),
        inbound: local(8),
    }
}

/// A FIFO of the engine with so many slots.
pub fn add_fifo(engine: &mut Engine, slots: u64) -> (FifoId, Fifo) {
    let config = portway_fifo::Config { slots, timeout: super::LIMIT, ..Default::default() };
    let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
    (engine.add_fifo(fifo.clone(), consumer).unwrap(), fifo)
}
