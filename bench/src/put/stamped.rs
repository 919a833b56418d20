//! [`Stamped`]: a transport that notes when an op is offered to a port of another transport, and when it completes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use portway_fifo::Region;
use portway_proxy::TransportError;
use portway_proxy::transport::{
    Binding, Close, Completion, Endpoint, Lane, LocalMemory, Op, Port, RemoteMemory, Submit, Transport,
};

/// The clock of all stamps: the processor's, in nanoseconds since it was made.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    pub fn new() -> Self {
        Clock(Instant::now())
    }

    pub fn at_ns(self, moment: Instant) -> u64 {
        moment.saturating_duration_since(self.0).as_nanos() as u64
    }

    pub fn now_ns(self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }
}

/// When the engine's step that is under way began. Its thread alone writes and reads it.
pub type StepBegan = Arc<AtomicU64>;

/// What happened to an op on the engine's thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// The step began that took its trigger out of the FIFO.
    pub popped_ns: u64,
    /// The port was offered it.
    pub posted_ns: u64,
    /// A poll of the port returned its completion; 0 if none has.
    pub completed_ns: u64,
}

/// Where a port leaves its stamps, by the number of the op, when it is closed.
pub type Log = Arc<Mutex<Vec<Stamp>>>;

/// See the module. For one lane.
#[derive(Debug)]
pub struct Stamped<T> {
    inner: T,
    clock: Clock,
    step: StepBegan,
    log: Log,
}

impl<T: Transport> Stamped<T> {
    pub fn new(inner: T, clock: Clock, step: StepBegan) -> Self {
        Stamped { inner, clock, step, log: Log::default() }
    }

    /// The stamps, once the port is closed.
    pub fn take(&self) -> Vec<Stamp> {
        std::mem::take(&mut *self.log.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Transport> Transport for Stamped<T> {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        self.inner.register(region)
    }

    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        self.inner.signal_word()
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        self.inner.release(memory)
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        self.inner.export(memory)
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        self.inner.import(bytes)
    }

    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        self.inner.forget(memory)
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let (inner, bytes) = self.inner.endpoint()?;
        let (clock, step, log) = (self.clock, self.step.clone(), self.log.clone());
        Ok((Box::new(StampedEnd { inner, clock, step, log }), bytes))
    }
}

#[derive(Debug)]
struct StampedEnd {
    inner: Box<dyn Endpoint>,
    clock: Clock,
    step: StepBegan,
    log: Log,
}

impl Endpoint for StampedEnd {
    fn connect(self: Box<Self>, peer: &[u8], timeout: Duration) -> Result<Box<dyn Port>, TransportError> {
        let StampedEnd { inner, clock, step, log } = *self;
        let port = inner.connect(peer, timeout)?;
        Ok(Box::new(StampedPort { port, clock, step, stamps: Vec::new(), log }))
    }
}

#[derive(Debug)]
struct StampedPort {
    port: Box<dyn Port>,
    clock: Clock,
    step: StepBegan,
    stamps: Vec<Stamp>,
    log: Log,
}

impl Port for StampedPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.port.bind(binding)
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        // The first offer is the one that counts, should there be no room.
        if self.stamps.len() as u64 == op.sequence {
            let popped_ns = self.step.load(Ordering::Relaxed);
            self.stamps.push(Stamp { popped_ns, posted_ns: self.clock.now_ns(), completed_ns: 0 });
        }
        self.port.submit(op)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.port.kick()
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        let count = self.port.poll(completions)?;
        if count > 0 {
            let completed_ns = self.clock.now_ns();
            for completion in completions.iter().take(count) {
                if let Some(stamp) = self.stamps.get_mut(completion.sequence as usize) {
                    stamp.completed_ns = completed_ns;
                }
            }
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        let closed = self.port.close()?;
        if closed == Close::Quiesced && !self.stamps.is_empty() {
            *self.log.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(&mut self.stamps);
        }
        Ok(closed)
    }
}
