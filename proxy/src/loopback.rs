//! [`Loopback`]: a transport between memories of one process. The test double, the example for new transports, and
//! what the bench runs on.

use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portway_fifo::memory::copy_bytes;
use portway_fifo::{Heap, Platform, Region, Words};

use crate::error::TransportError;
use crate::transport::{
    Binding, Close, Completion, Endpoint, Lane, LocalMemory, MemoryId, Op, Port, RemoteMemory, Submit,
    Transport,
};

/// What a loopback port does wrong, on purpose. Nothing, unless told otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Every op rests for this many polls before it is carried out.
    pub delay_polls: u32,
    /// Carries out ops of different lanes in an order drawn from this seed.
    pub reorder_seed: Option<u64>,
    /// Refuses every n-th submit; 0 for none.
    pub refuse_every: u64,
    /// Fails at the n-th accepted op, counting from 0.
    pub fail_at: Option<u64>,
    /// Forgets the n-th accepted op: it is never carried out and never completes.
    pub lose_at: Option<u64>,
}

/// How to make loopback ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The most ops that a port holds. 256 unless told otherwise.
    pub depth: usize,
    /// What goes wrong.
    pub faults: Faults,
}

impl Default for Config {
    fn default() -> Self {
        Config { depth: 256, faults: Faults::default() }
    }
}

/// The most bytes that one call moves, so that no call takes long and no lane starves the others.
const BYTES_A_CALL: u64 = 1 << 20;

/// A transport between memories that the processor reaches, pinned memory included. A clone is the same transport.
///
/// Its ports move the bytes themselves, inside [`kick`](Port::kick) and [`poll`](Port::poll).
#[derive(Clone, Debug)]
pub struct Loopback {
    hub: Arc<Hub>,
    config: Config,
}

#[derive(Debug)]
struct Hub {
    id: u64,
    memories: Mutex<Memories>,
    endpoints: AtomicUsize,
}

/// By their index, which is used once.
#[derive(Debug, Default)]
struct Memories {
    known: BTreeMap<u32, Registered>,
    next: u32,
}

#[derive(Clone, Debug)]
struct Registered {
    region: Region,
    /// Bindings of ports that are not closed.
    bound: Arc<AtomicUsize>,
    /// How often it was imported and not forgotten: an import is the memory itself here.
    imports: usize,
    /// Those of the bindings that are of an import.
    imports_bound: Arc<AtomicUsize>,
}

/// As what a memory is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum As {
    Local,
    Import,
}

/// A registered memory that cannot be released until this is dropped.
#[derive(Debug)]
struct Held(Registered, As);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.bound.fetch_sub(1, Ordering::AcqRel);
        if self.1 == As::Import {
            self.0.imports_bound.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Hub {
    /// The memory, held: counted under the lock, so that it is not released in between.
    fn hold(&self, what: &'static str, id: MemoryId, held_as: As) -> Result<Held, TransportError> {
        self.with(what, id, |registered| {
            if held_as == As::Import && registered.imports == 0 {
                return Err(TransportError::Unknown { what, index: id.index });
            }
            registered.bound.fetch_add(1, Ordering::AcqRel);
            if held_as == As::Import {
                registered.imports_bound.fetch_add(1, Ordering::AcqRel);
            }
            Ok(Held(registered.clone(), held_as))
        })?
    }

    fn memories(&self) -> MutexGuard<'_, Memories> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(
        &self,
        what: &'static str,
        id: MemoryId,
        body: impl FnOnce(&mut Registered) -> R,
    ) -> Result<R, TransportError> {
        match self.memories().known.get_mut(&id.index) {
            Some(registered) if id.transport == self.id => Ok(body(registered)),
            _ => Err(TransportError::Unknown { what, index: id.index }),
        }
    }
}

/// The first word of all that a loopback exports: "portway\0", then a version.
const MAGIC: u64 = u64::from_le_bytes(*b"portway\0");
const VERSION: u64 = 1;

/// What the peers exchange: magic, version and kind, transport, index, length.
fn encode(kind: u64, transport: u64, index: u64, len_bytes: u64) -> Vec<u8> {
    [MAGIC, VERSION << 8 | kind, transport, index, len_bytes].iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn decode(what: &'static str, kind: u64, transport: u64, bytes: &[u8]) -> Result<[u64; 2], TransportError> {
    let refuse = |expected: String, seen: String| Err(TransportError::Malformed { what, expected, seen });
    if bytes.len() != 40 {
        return refuse("40 bytes".into(), format!("{} bytes", bytes.len()));
    }
    let word = |i: usize| u64::from_le_bytes(core::array::from_fn(|b| bytes[8 * i + b]));
    for (i, expected) in [MAGIC, VERSION << 8 | kind, transport].into_iter().enumerate() {
        if word(i) != expected {
            let name = ["magic", "version and kind", "transport"][i];
            return refuse(format!("{name} {expected:#x}"), format!("{:#x}", word(i)));
        }
    }
    Ok([word(3), word(4)])
}

const KIND_MEMORY: u64 = 1;
const KIND_ENDPOINT: u64 = 2;

impl Loopback {
    /// A transport of its own.
    ///
    /// # Errors
    /// [`TransportError::Malformed`] if the depth is 0.
    pub fn new(config: Config) -> Result<Self, TransportError> {
        if config.depth == 0 {
            let (expected, seen) = ("at least 1".into(), "0".into());
            return Err(TransportError::Malformed { what: "depth of a loopback port", expected, seen });
        }
        let id = std::hash::RandomState::new().build_hasher().finish();
        Ok(Loopback {
            hub: Arc::new(Hub { id, memories: Mutex::default(), endpoints: AtomicUsize::new(0) }),
            config,
        })
    }

    /// The same transport, whose new endpoints have these faults.
    pub fn with_faults(&self, faults: Faults) -> Self {
        Loopback { hub: self.hub.clone(), config: Config { faults, ..self.config } }
    }
}

impl Transport for Loopback {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        if !region.place().is_host() {
            let (address, place) = (region.address(), region.place());
            return Err(portway_fifo::Error::NotHostMemory { address, place }.into());
        }
        let mut memories = self.hub.memories();
        let index = memories.next;
        memories.next += 1;
        let (bound, imports_bound) = Default::default();
        let registered = Registered { region: region.clone(), bound, imports: 0, imports_bound };
        memories.known.insert(index, registered);
        Ok(LocalMemory { id: MemoryId { transport: self.hub.id, index }, region: region.clone() })
    }

    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        self.register(&Heap.host_memory(8)?)
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        let (mut memories, index) = (self.hub.memories(), memory.id.index);
        let known = memories.known.get(&index).filter(|_| memory.id.transport == self.hub.id);
        let registered = known.ok_or(TransportError::Unknown { what: "memory", index })?;
        let ports = registered.bound.load(Ordering::Acquire);
        if ports != 0 {
            return Err(TransportError::Busy { address: registered.region.address(), ports });
        }
        memories.known.remove(&index);
        Ok(())
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        let len_bytes = self.hub.with("memory", memory.id, |registered| registered.region.len_bytes())?;
        Ok(encode(KIND_MEMORY, self.hub.id, u64::from(memory.id.index), len_bytes))
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        let [index, len_bytes] = decode("memory export", KIND_MEMORY, self.hub.id, bytes)?;
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let id = MemoryId { transport: self.hub.id, index };
        self.hub.with("imported memory", id, |registered| {
            let there_are = registered.region.len_bytes();
            if there_are != len_bytes {
                let (expected, seen) = (format!("{there_are} bytes"), format!("{len_bytes} bytes"));
                return Err(TransportError::Malformed { what: "memory export", expected, seen });
            }
            registered.imports += 1;
            Ok(RemoteMemory { id, len_bytes })
        })?
    }

    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        let (what, index) = ("imported memory", memory.id.index);
        let last = |registered: &mut Registered| match registered.imports_bound.load(Ordering::Acquire) {
            _ if registered.imports == 0 => Err(TransportError::Unknown { what, index }),
            ports if ports != 0 && registered.imports == 1 => {
                Err(TransportError::Busy { address: registered.region.address(), ports })
            }
            _ => {
                registered.imports -= 1;
                Ok(())
            }
        };
        self.hub.with(what, memory.id, last)?
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let index = self.hub.endpoints.fetch_add(1, Ordering::Relaxed) as u64;
        let bytes = encode(KIND_ENDPOINT, self.hub.id, index, 0);
        Ok((Box::new(LoopbackEndpoint { transport: self.clone(), index }), bytes))
    }
}

#[derive(Debug)]
struct LoopbackEndpoint {
    transport: Loopback,
    index: u64,
}

impl Endpoint for LoopbackEndpoint {
    fn connect(self: Box<Self>, peer: &[u8], _: Duration) -> Result<Box<dyn Port>, TransportError> {
        let hub = &self.transport.hub;
        let [index, _] = decode("endpoint", KIND_ENDPOINT, hub.id, peer)?;
        let made = hub.endpoints.load(Ordering::Relaxed) as u64;
        if index >= made || index == self.index {
            let (expected, seen) = (format!("another one of {made} endpoints"), format!("endpoint {index}"));
            return Err(TransportError::Malformed { what: "endpoint", expected, seen });
        }
        Ok(Box::new(LoopbackPort::new(&self.transport)))
    }
}

/// A binding, with everything looked up.
#[derive(Debug)]
struct Bound {
    source: Held,
    destination: Held,
    _signal: Held,
    word: Words,
}

/// An accepted op.
#[derive(Debug)]
struct Resting {
    op: Op,
    /// Polls until it may be carried out.
    polls: u32,
    /// Bytes of its put that have been moved.
    moved_bytes: u64,
}

#[derive(Debug)]
struct LoopbackPort {
    hub: Arc<Hub>,
    config: Config,
    lanes: Vec<Bound>,
    resting: VecDeque<Resting>,
    complete: VecDeque<Completion>,
    submits: u64,
    accepted: u64,
    lost: usize,
    random: u64,
    failed: Option<TransportError>,
}

impl LoopbackPort {
    fn new(transport: &Loopback) -> Self {
        let config = transport.config;
        LoopbackPort {
            hub: transport.hub.clone(),
            config,
            lanes: Vec::new(),
            resting: VecDeque::with_capacity(config.depth),
            complete: VecDeque::with_capacity(config.depth),
            submits: 0,
            accepted: 0,
            lost: 0,
            random: config.faults.reorder_seed.unwrap_or(0) | 1,
            failed: None,
        }
    }

    fn check(&self) -> Result<(), TransportError> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Carries out what may be, up to a limit of bytes.
    fn work(&mut self) {
        let mut budget = BYTES_A_CALL;
        while budget > 0 {
            let Some(index) = self.pick() else { return };
            let Some(resting) = self.resting.get_mut(index) else { return };
            let lane = &self.lanes[resting.op.lane.0 as usize];
            budget = budget.saturating_sub(lane.advance(resting, budget).max(1));
            if resting.op.put.is_some_and(|put| resting.moved_bytes < put.len_bytes) {
                return;
            }
            if let Some(value) = resting.op.signal {
                lane.word[0].store(value, Ordering::Release);
            }
            self.complete.push_back(Completion { lane: resting.op.lane, sequence: resting.op.sequence });
            self.resting.remove(index);
        }
    }

    /// The next op to carry out: the oldest, or, when reordering, the oldest of a lane drawn at random.
    fn pick(&mut self) -> Option<usize> {
        let ready = |resting: &Resting| resting.polls == 0;
        if self.config.faults.reorder_seed.is_none() {
            return self.resting.front().filter(|r| ready(r)).map(|_| 0);
        }
        // An op that has begun is finished first.
        if let Some(index) = self.resting.iter().position(|r| r.moved_bytes > 0) {
            return Some(index);
        }
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let drawn = (self.random >> 33) as usize % self.resting.len().max(1);
        let lane = self.resting.get(drawn)?.op.lane;
        let oldest = self.resting.iter().position(|r| r.op.lane == lane)?;
        ready(&self.resting[oldest]).then_some(oldest)
    }
}

impl Bound {
    /// Moves up to `limit` bytes of a put; returns how many.
    fn advance(&self, resting: &mut Resting, limit: u64) -> u64 {
        let Some(put) = resting.op.put else { return 0 };
        let len_bytes = (put.len_bytes - resting.moved_bytes).min(limit);
        let source = self.source.0.region.address() + put.source_offset_bytes + resting.moved_bytes;
        let destination =
            self.destination.0.region.address() + put.destination_offset_bytes + resting.moved_bytes;
        // SAFETY: both regions are host memory (checked in `register`), kept alive by `self`, and accessed atomically
        // only (contract of `Region::new`). `submit` found the put inside both.
        unsafe { copy_bytes(source as *mut u8, destination as *mut u8, len_bytes as usize) };
        resting.moved_bytes += len_bytes;
        len_bytes
    }

    fn lens_bytes(&self) -> [u64; 2] {
        [self.source.0.region.len_bytes(), self.destination.0.region.len_bytes()]
    }
}

impl Port for LoopbackPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.check()?;
        let source = self.hub.hold("source", binding.source, As::Local)?;
        let destination = self.hub.hold("destination", binding.destination, As::Import)?;
        let signal = self.hub.hold("signal word", binding.signal, As::Import)?;
        let (from, to) = (&source.0.region, &destination.0.region);
        if from.overlaps(to) {
            let (source_address, destination_address) = (from.address(), to.address());
            return Err(TransportError::Overlap { source_address, destination_address });
        }
        let word = Words::new(signal.0.region.clone())?;
        if word.is_empty() {
            let seen = format!("{} bytes", signal.0.region.len_bytes());
            return Err(TransportError::Malformed { what: "signal word", expected: "8 bytes".into(), seen });
        }
        self.lanes.push(Bound { source, destination, _signal: signal, word });
        Ok(Lane(self.lanes.len() as u32 - 1))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.check()?;
        self.submits += 1;
        let faults = self.config.faults;
        let refuse = faults.refuse_every != 0 && self.submits % faults.refuse_every == 0;
        if refuse || self.resting.len() + self.complete.len() + self.lost >= self.config.depth {
            return Ok(Submit::Full);
        }
        let lens_bytes = |lane: Lane| self.lanes[lane.0 as usize].lens_bytes();
        if let Some(error) = TransportError::of_op(op, self.lanes.len(), lens_bytes) {
            return Err(self.fail(error));
        }
        let number = self.accepted;
        self.accepted += 1;
        if faults.fail_at == Some(number) {
            return Err(self.fail(TransportError::Remote {
                peer: "the other end".into(),
                operation: "put over loopback",
                status: -1,
                vendor: number as u32,
            }));
        }
        if faults.lose_at == Some(number) {
            self.lost += 1;
            return Ok(Submit::Accepted);
        }
        self.resting.push_back(Resting { op: *op, polls: faults.delay_polls, moved_bytes: 0 });
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.check()?;
        self.work();
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.check()?;
        if self.config.faults.delay_polls > 0 {
            for resting in &mut self.resting {
                resting.polls = resting.polls.saturating_sub(1);
            }
        }
        self.work();
        let count = completions.len().min(self.complete.len());
        for (slot, completion) in completions.iter_mut().zip(self.complete.drain(..count)) {
            *slot = completion;
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        // Nothing moves outside a call, so a port without ops is quiet.
        self.failed.get_or_insert(TransportError::Closed);
        self.resting.clear();
        self.lanes.clear();
        Ok(Close::Quiesced)
    }
}

impl LoopbackPort {
    fn fail(&mut self, error: TransportError) -> TransportError {
        self.failed = Some(error.clone());
        error
    }
}
