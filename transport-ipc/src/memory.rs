//! Memories of this side: the hub's tables of what is registered, and how an allocation is exported.

use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portway_fifo::cuda::{Context, Kind};
use portway_fifo::memory::{IpcHandle, IpcKind, Memory, Segment};
use portway_fifo::{Place, Region};
use portway_proxy::TransportError;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::config::Way;
use crate::error::Error;
use crate::identity::Process;
use crate::message;
use crate::server::{Answers, Server};
use crate::socket::Request;

/// A number that nobody else has: from the system, since the standard library's random state is the same in processes that
/// were forked from one.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        // Kept from this process, by a filter of system calls.
        _ => {
            let mut hasher = RandomState::new().build_hasher();
            hasher.write_u32(std::process::id());
            hasher.finish()
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the transports of a process that know each other share: the tables, and the thread that answers other processes.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) id: u64,
    pub(crate) process: Process,
    pub(crate) tables: Arc<Tables>,
    _server: Server,
}

impl Hub {
    pub(crate) fn new() -> Result<Self, Error> {
        let (id, process, tables) = (random(), Process::this()?, Arc::new(Tables::default()));
        let server = Server::start(id, tables.clone())?;
        Ok(Hub { id, process, tables, _server: server })
    }
}

/// Everything that is registered or waits for a peer, under the number of its transport.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    memories: Mutex<HashMap<(u64, u32), Arc<Local>>>,
    /// Whether each is still open.
    endpoints: Mutex<HashMap<(u64, u64), Arc<AtomicBool>>>,
    allocations: Mutex<Vec<Weak<Allocation>>>,
    next_allocation: AtomicU64,
}

/// A memory of this side.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) region: Region,
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) nonce: u64,
    /// Bindings of ports of this process that are not quiesced.
    bound: AtomicUsize,
}

/// A share in a memory that a port has bound.
#[derive(Debug)]
pub(crate) struct Held(Arc<Local>);

impl Held {
    pub(crate) fn region(&self) -> &Region {
        &self.0.region
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.0.nonce
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.bound.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Tables {
    pub(crate) fn add(&self, transport: u64, index: u32, region: Region, allocation: Arc<Allocation>) {
        let local = Local { region, allocation, nonce: random(), bound: AtomicUsize::new(0) };
        lock(&self.memories).insert((transport, index), Arc::new(local));
    }

    pub(crate) fn get(&self, transport: u64, index: u32) -> Option<Arc<Local>> {
        lock(&self.memories).get(&(transport, index)).cloned()
    }

    /// The memory, which cannot be released while the share lives.
    pub(crate) fn hold(&self, transport: u64, index: u32) -> Option<Held> {
        let memories = lock(&self.memories);
        let local = memories.get(&(transport, index))?;
        // Under the lock, so that a release sees it or comes first.
        local.bound.fetch_add(1, Ordering::AcqRel);
        Some(Held(local.clone()))
    }

    pub(crate) fn release(&self, transport: u64, index: u32) -> Result<(), TransportError> {
        let mut memories = lock(&self.memories);
        let Some(local) = memories.get(&(transport, index)) else {
            return Err(TransportError::Unknown { what: "memory", index });
        };
        let ports = local.bound.load(Ordering::Acquire);
        if ports != 0 {
            return Err(TransportError::Busy { address: local.region.address(), ports });
        }
        memories.remove(&(transport, index));
        Ok(())
    }

    /// Forgets all of a transport.
    pub(crate) fn forget(&self, transport: u64) {
        lock(&self.memories).retain(|&(of, _), _| of != transport);
        lock(&self.endpoints).retain(|&(of, _), _| of != transport);
    }

    /// The allocation that a region lies in: the same for every region of it, as long as one is registered.
    pub(crate) fn allocation(&self, context: &Context, region: &Region) -> Result<Arc<Allocation>, Error> {
        let segments = match region.place() {
            Place::Device(_) => region.owner().segments(region.range()),
            _ => Ok(vec![region.range()]),
        };
        let unclear = Error::Memory { address: region.address(), place: region.place() };
        let segments = segments.ok().filter(|s| covers(s, region)).ok_or(unclear)?;
        let place = match region.place() {
            Place::Device(_) => message::Place::Device,
            _ => message::Place::Private,
        };
        let owner = owner_address(region.owner());
        let mut all = lock(&self.allocations);
        all.retain(|known| known.strong_count() > 0);
        let known = all
            .iter()
            .filter_map(Weak::upgrade)
            .find(|known| owner_address(known.region.owner()) == owner && known.segments == segments);
        Ok(known.unwrap_or_else(|| {
            let allocation = self.number(context, region.clone(), segments, place, Forms::default());
            all.push(Arc::downgrade(&allocation));
            allocation
        }))
    }

    /// An allocation of host memory that is behind a descriptor.
    pub(crate) fn shared_allocation(
        &self,
        context: &Context,
        region: &Region,
        descriptor: OwnedFd,
    ) -> Arc<Allocation> {
        let forms = Forms { descriptors: Some(vec![Arc::new(descriptor)]), ..Forms::default() };
        let segments = vec![region.range()];
        self.number(context, region.clone(), segments, message::Place::Shared, forms)
    }

    fn number(
        &self,
        context: &Context,
        region: Region,
        segments: Vec<Segment>,
        place: message::Place,
        forms: Forms,
    ) -> Arc<Allocation> {
        let id = self.next_allocation.fetch_add(1, Ordering::Relaxed);
        let forms = Mutex::new(forms);
        Arc::new(Allocation { id, context: context.clone(), region, segments, place, forms })
    }

    /// An endpoint or a port is there, until the share is dropped.
    pub(crate) fn present(self: &Arc<Self>, transport: u64, nonce: u64) -> Presence {
        let open = Arc::new(AtomicBool::new(true));
        lock(&self.endpoints).insert((transport, nonce), open.clone());
        Presence { tables: self.clone(), transport, nonce, open }
    }

    pub(crate) fn is_present(&self, transport: u64, nonce: u64) -> bool {
        lock(&self.endpoints).get(&(transport, nonce)).is_some_and(|open| open.load(Ordering::Acquire))
    }
}

/// See [`Tables::present`].
#[derive(Debug)]
pub(crate) struct Presence {
    tables: Arc<Tables>,
    transport: u64,
    nonce: u64,
    open: Arc<AtomicBool>,
}

impl Presence {
    /// The port is closed: its peers are told. A store, and nothing that could block.
    pub(crate) fn leave(&self) {
        self.open.store(false, Ordering::Release);
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        lock(&self.tables.endpoints).remove(&(self.transport, self.nonce));
    }
}

impl Answers for Tables {
    fn memory(&self, request: &Request) -> bool {
        self.get(request.transport, request.index).is_some_and(|local| local.nonce == request.nonce)
    }

    fn descriptors(&self, request: &Request, first: usize, most: usize) -> Option<Vec<Arc<OwnedFd>>> {
        let local = self.get(request.transport, request.index).filter(|l| l.nonce == request.nonce)?;
        let forms = lock(&local.allocation.forms);
        let rest = forms.descriptors.as_ref()?.get(first..)?;
        Some(rest[..rest.len().min(most)].to_vec())
    }

    fn allocation(&self, id: u64) -> bool {
        lock(&self.allocations).iter().filter_map(Weak::upgrade).any(|known| known.id == id)
    }

    fn endpoint(&self, request: &Request) -> bool {
        self.is_present(request.transport, request.nonce)
    }
}

fn owner_address(owner: &Arc<dyn Memory>) -> usize {
    Arc::as_ptr(owner).cast::<u8>() as usize
}

/// Whether a memory's segments cover the region, in order and without gaps: what is missing would be lost silently.
fn covers(segments: &[Segment], region: &Region) -> bool {
    let Some(first) = segments.first() else { return false };
    let mut end = first.address;
    for segment in segments {
        match end.checked_add(segment.len_bytes) {
            Some(next) if segment.address == end && segment.len_bytes > 0 => end = next,
            _ => return false,
        }
    }
    first.address <= region.address() && region.address() + region.len_bytes() <= end
}

/// What two ranges have in common.
fn overlap(one: Segment, other: Segment) -> Segment {
    let address = one.address.max(other.address);
    let end = (one.address + one.len_bytes).min(other.address + other.len_bytes);
    Segment { address, len_bytes: end.saturating_sub(address) }
}

/// The physical memory that registered regions lie in.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// Never given twice: another allocation at the same address has another one.
    id: u64,
    pub(crate) context: Context,
    /// Keeps the owner.
    region: Region,
    segments: Vec<Segment>,
    place: message::Place,
    /// How it can be exported, as far as somebody has asked.
    forms: Mutex<Forms>,
}

/// The forms in which an allocation can be exported.
#[derive(Clone, Debug, Default)]
struct Forms {
    /// A descriptor for each segment.
    descriptors: Option<Vec<Arc<OwnedFd>>>,
    /// A fabric handle for each segment.
    fabric: Option<Vec<[u8; 64]>>,
    legacy: Option<[u8; 64]>,
}

impl Forms {
    fn has(&self, kind: IpcKind) -> bool {
        match kind {
            IpcKind::Fd => self.descriptors.is_some(),
            IpcKind::Fabric => self.fabric.is_some(),
            IpcKind::Legacy => self.legacy.is_some(),
            _ => false,
        }
    }

    fn is_empty(&self) -> bool {
        self.descriptors.is_none() && self.fabric.is_none() && self.legacy.is_none()
    }

    /// Takes handles in, all of one kind, one for each segment. A legacy handle is that of a whole allocation.
    fn take(&mut self, handles: Vec<IpcHandle>) {
        let mut of = (Vec::new(), Vec::new(), Vec::new());
        let segments = handles.len();
        for handle in handles {
            match handle {
                IpcHandle::Fd(fd) => of.0.push(Arc::new(fd)),
                IpcHandle::Fabric(bytes) => of.1.push(bytes),
                IpcHandle::Legacy(bytes) => of.2.push(bytes),
                _ => {}
            }
        }
        // Those that another thread has asked for meanwhile stay: peers may have been told of them.
        if of.0.len() == segments {
            self.descriptors.get_or_insert(of.0);
        } else if of.1.len() == segments {
            self.fabric.get_or_insert(of.1);
        } else if let [bytes] = of.2[..] {
            self.legacy.get_or_insert(bytes);
        }
    }
}

/// Statuses that say that a form is not to be had here, rather than that something failed.
const NOT_PERMITTED: i32 = 800;
const NOT_SUPPORTED: i32 = 801;

impl Allocation {
    fn base(&self) -> u64 {
        self.segments[0].address
    }

    /// Every form that there is. What the memory, the device or the process do not allow is left out; the peer's error
    /// says which forms there were. What the driver fails with is an error if no form is left; either way the next call
    /// asks again.
    fn forms(&self) -> Result<Forms, Error> {
        let known = lock(&self.forms).clone();
        if self.place != message::Place::Device {
            return Ok(known);
        }
        let failure = |way, source| Error::Export {
            address: self.region.address(),
            len_bytes: self.region.len_bytes(),
            tried: vec![(way, source)],
        };
        match self.context.kind(self.base()) {
            Ok(Kind::Pool) => return Err(Error::Pool { address: self.base() }),
            Ok(_) => {}
            Err(source) => return Err(failure(None, source)),
        }
        let (mut found, mut tried) = (Vec::new(), Vec::new());
        for (way, kind) in
            [(Way::Descriptor, IpcKind::Fd), (Way::Fabric, IpcKind::Fabric), (Way::Legacy, IpcKind::Legacy)]
        {
            if known.has(kind) {
                continue;
            }
            match self.handles(kind) {
                Ok(handles) => found.push(handles),
                Err(
                    portway_fifo::Error::Unsupported { .. }
                    | portway_fifo::Error::Driver { status: NOT_PERMITTED | NOT_SUPPORTED, .. },
                ) => {}
                Err(source) => tried.push((Some(way), source)),
            }
        }
        let mut forms = lock(&self.forms);
        found.into_iter().for_each(|handles| forms.take(handles));
        if forms.is_empty() && !tried.is_empty() {
            let (address, len_bytes) = (self.region.address(), self.region.len_bytes());
            return Err(Error::Export { address, len_bytes, tried });
        }
        Ok(forms.clone())
    }

    /// A handle for each segment. Calls the driver.
    fn handles(&self, kind: IpcKind) -> Result<Vec<IpcHandle>, portway_fifo::Error> {
        // An owner is asked about what is its own; the handle is that of the whole piece around it.
        let within = self.segments.iter().map(|&segment| overlap(segment, self.region.range()));
        within.map(|segment| self.region.owner().ipc_handle(segment, kind)).collect()
    }
}

impl Local {
    /// What a peer needs to import it.
    pub(crate) fn message(&self, author: message::Author, index: u32) -> Result<message::Memory, Error> {
        let allocation = &*self.allocation;
        let forms = allocation.forms()?;
        let pieces = allocation.segments.iter().enumerate().map(|(at, segment)| message::Piece {
            len_bytes: segment.len_bytes,
            fabric: forms.fabric.as_ref().and_then(|handles| handles.get(at).copied()),
        });
        Ok(message::Memory {
            author,
            index,
            nonce: self.nonce,
            allocation: allocation.id,
            base: allocation.base(),
            place: allocation.place,
            offset_bytes: self.region.address() - allocation.base(),
            len_bytes: self.region.len_bytes(),
            descriptors: forms.descriptors.is_some(),
            pieces: pieces.collect(),
            legacy: forms.legacy,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::os::unix::process::CommandExt;

    use super::*;

    /// Processes that are forked from one have the same state of the standard library.
    #[test]
    fn a_forked_process_draws_other_numbers() {
        let drawn_in_both = |draw: fn() -> u64| {
            draw();
            let (mut near, mut far) = UnixStream::pair().unwrap();
            near.set_read_timeout(Some(core::time::Duration::from_secs(20))).unwrap();
            let mut program = std::process::Command::new("true");
            // SAFETY: between fork and exec it draws a number and writes it to an open descriptor.
            unsafe { program.pre_exec(move || far.write_all(&draw().to_ne_bytes())) };
            let mut child = program.spawn().unwrap();
            let mut bytes = [0; 8];
            near.read_exact(&mut bytes).unwrap();
            child.wait().unwrap();
            (draw(), u64::from_ne_bytes(bytes))
        };
        let (ours, childs) = drawn_in_both(random);
        assert_ne!(ours, childs);
        // Control: the standard library's are the same.
        let (ours, childs) = drawn_in_both(|| RandomState::new().build_hasher().finish());
        assert_eq!(ours, childs);
    }
}
