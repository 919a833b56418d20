//! [`Shm`]: what is registered and imported, and who has it bound.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use portway_fifo::{Error, Region, Words};
use portway_proxy::TransportError;
use portway_proxy::transport::{Endpoint, LocalMemory, MemoryId, Port, RemoteMemory, Transport};

use crate::memory::Object;
use crate::message::{ENDPOINT, MEMORY, Part, decode, encode};
use crate::port::ShmPort;

/// A transport over shared memory. A clone is the same transport.
#[derive(Clone, Debug)]
pub struct Shm {
    table: Arc<Table>,
    fail_after: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Table {
    id: u64,
    objects: Mutex<Vec<Weak<Object>>>,
    memories: Mutex<Vec<Option<Arc<Entry>>>>,
}

/// A memory that a port may bind. Every share of it but the table's is a binding.
#[derive(Debug)]
pub(crate) struct Entry {
    local: bool,
    part: Part,
    pub(crate) region: Region,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn add(&self, local: bool, part: Part, region: Region) -> MemoryId {
        let mut memories = locked(&self.memories);
        memories.push(Some(Arc::new(Entry { local, part, region })));
        MemoryId { transport: self.id, index: memories.len() as u32 - 1 }
    }

    /// Takes out what no port has bound.
    fn remove(&self, what: &'static str, local: bool, id: MemoryId) -> Result<(), TransportError> {
        let entry = self.hold(what, local, id)?;
        let mut memories = locked(&self.memories);
        match Arc::strong_count(&entry) - 2 {
            0 => memories[id.index as usize] = None,
            ports => return Err(TransportError::Busy { address: entry.region.address(), ports }),
        }
        Ok(())
    }

    pub(crate) fn hold(
        &self,
        what: &'static str,
        local: bool,
        id: MemoryId,
    ) -> Result<Arc<Entry>, TransportError> {
        match locked(&self.memories).get(id.index as usize) {
            Some(Some(entry)) if id.transport == self.id && entry.local == local => Ok(entry.clone()),
            _ => Err(TransportError::Unknown { what, index: id.index }),
        }
    }
}

impl Shm {
    /// A transport with nothing in it.
    pub fn new() -> Result<Shm, TransportError> {
        // The number of a new object is as good a random one as any.
        let id = Object::create(8)?.id;
        let table = Table { id, objects: Mutex::default(), memories: Mutex::default() };
        Ok(Shm { table: Arc::new(table), fail_after: None })
    }

    /// For tests: the same transport, whose new ports fail at their `ops`-th op as if the peer had gone.
    pub fn failing_after(&self, ops: u64) -> Shm {
        Shm { fail_after: Some(ops), ..self.clone() }
    }

    /// Zeroed memory that peers can map: the only kind that can be registered.
    pub fn allocate(&self, len_bytes: u64) -> Result<Region, Error> {
        let object = Object::create(len_bytes).map_err(|error| match error {
            TransportError::Device { operation, status, .. } => {
                Error::System { what: operation, errno: status }
            }
            _ => Error::OutOfMemory { len_bytes },
        })?;
        let mut objects = locked(&self.table.objects);
        objects.retain(|object| object.strong_count() > 0);
        objects.push(Arc::downgrade(&object));
        object.region()
    }
}

impl Transport for Shm {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        let (address, len_bytes) = (region.address(), region.len_bytes());
        let objects = locked(&self.table.objects);
        let mut objects = objects.iter().filter_map(Weak::upgrade);
        let Some(object) = objects.find(|object| object.checked(address, len_bytes).is_ok()) else {
            return Err(Error::Unsupported { what: "memory of another allocator as shared memory" }.into());
        };
        let part = Part { object: object.id, offset_bytes: address - object.region()?.address(), len_bytes };
        Ok(LocalMemory { id: self.table.add(true, part, region.clone()), region: region.clone() })
    }

    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        self.register(&self.allocate(8)?)
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        self.table.remove("memory", true, memory.id)
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        Ok(encode(MEMORY, self.table.hold("memory", true, memory.id)?.part))
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        let part = decode("memory export", MEMORY, bytes)?;
        let object = Object::open(part.object, part.offset_bytes + part.len_bytes)?;
        let region = object.region()?.slice(part.offset_bytes, part.len_bytes)?;
        Ok(RemoteMemory { id: self.table.add(false, part, region), len_bytes: part.len_bytes })
    }

    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        self.table.remove("imported memory", false, memory.id)
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let object = Object::create(8)?;
        let bytes = encode(ENDPOINT, Part { object: object.id, offset_bytes: 0, len_bytes: 8 });
        let gone = Words::new(object.region()?)?;
        Ok((Box::new(ShmEndpoint { shm: self.clone(), id: object.id, gone }), bytes))
    }
}

/// One end, before it knows the other.
#[derive(Debug)]
struct ShmEndpoint {
    shm: Shm,
    id: u64,
    gone: Words,
}

impl Endpoint for ShmEndpoint {
    /// Needs nothing of the peer but that it is there, so it does not wait.
    fn connect(self: Box<Self>, peer: &[u8], _: Duration) -> Result<Box<dyn Port>, TransportError> {
        let part = decode("endpoint", ENDPOINT, peer)?;
        if part.object == self.id {
            let (expected, seen) = ("the peer's end".into(), "this end's own".into());
            return Err(TransportError::Malformed { what: "endpoint", expected, seen });
        }
        let peer_gone = Words::new(Object::open(part.object, 8)?.region()?)?;
        Ok(Box::new(ShmPort::new(self.shm.table, self.gone, peer_gone, self.shm.fail_after)))
    }
}
