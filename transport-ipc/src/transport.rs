//! [`Ipc`]: the transport.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use portway_fifo::cuda::{Context, Warning};
use portway_fifo::{Place, Region};
use portway_proxy::TransportError;
use portway_proxy::transport::{Endpoint, LocalMemory, MemoryId, RemoteMemory, Transport};

use crate::config::Config;
use crate::endpoint::IpcEndpoint;
use crate::error::Error;
use crate::import::{Description, Importer, Imports};
use crate::memory::{Allocation, Hub, random};
use crate::message::Author;
use crate::track::Rack;
use crate::word::Words;

/// What a transport, its endpoints and its ports share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: Config,
    pub(crate) context: Context,
    pub(crate) hub: Arc<Hub>,
    pub(crate) transport: u64,
    pub(crate) imports: Imports,
    pub(crate) rack: Rack,
    pub(crate) closing: Closing,
    /// All streams of the process share one connection.
    pub(crate) one_connection: bool,
    words: Words,
    next_index: AtomicU32,
}

impl Inner {
    pub(crate) fn author(&self) -> Author {
        Author {
            transport: self.transport,
            hub: self.hub.id,
            process: self.hub.process,
            device: self.context.attributes().uuid,
        }
    }

    fn next_id(&self) -> MemoryId {
        let index = self.next_index.fetch_add(1, Ordering::Relaxed);
        MemoryId { transport: self.transport, index }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.hub.tables.forget(self.transport);
    }
}

/// What closed ports still hold, because their work is not done: an executor that is stuck in the driver, or a stream that
/// does not run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quarantined {
    /// Executors, each with its thread and its stream.
    pub executors: u64,
    /// Bindings of memory.
    pub memories: u64,
}

/// The count of [`Quarantined`].
#[derive(Debug, Default)]
pub(crate) struct Closing {
    executors: AtomicU64,
    memories: AtomicU64,
}

impl Closing {
    pub(crate) fn began(&self, memories: u64) {
        self.executors.fetch_add(1, Ordering::Relaxed);
        self.memories.fetch_add(memories, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self, memories: u64) {
        self.executors.fetch_sub(1, Ordering::Relaxed);
        self.memories.fetch_sub(memories, Ordering::Relaxed);
    }
}

/// A transport for one GPU. A clone is the same transport.
///
/// The [crate page](crate) tells who calls the driver, and what is ordered by what.
#[derive(Clone, Debug)]
pub struct Ipc {
    inner: Arc<Inner>,
}

impl Ipc {
    /// Opens a transport for the device of a context.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::Unfit`] for a device whose streams cannot write 64-bit values; [`Error::System`].
    pub fn open(context: &Context, config: Config) -> Result<Self, Error> {
        config.check()?;
        Ipc::build(context, config, Arc::new(Hub::new()?))
    }

    /// A transport for another GPU of this process, or for the same once more, with the same configuration. The two know
    /// each other, so that memory goes from one to the other as it is.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn beside(&self, context: &Context) -> Result<Self, Error> {
        Ipc::build(context, self.inner.config.clone(), self.inner.hub.clone())
    }

    fn build(context: &Context, config: Config, hub: Arc<Hub>) -> Result<Self, Error> {
        let attributes = context.attributes();
        if !attributes.stream_write_value {
            let why = "its streams cannot write 64-bit values";
            return Err(Error::Unfit { device: attributes.name.clone(), why });
        }
        Ok(Ipc {
            inner: Arc::new(Inner {
                words: Words::new(config.word_place),
                config,
                context: context.clone(),
                hub,
                transport: random(),
                imports: Imports::default(),
                rack: Rack::default(),
                closing: Closing::default(),
                one_connection: context.warnings().contains(&Warning::OneConnection),
                next_index: AtomicU32::new(0),
            }),
        })
    }

    /// How an imported memory is reached.
    ///
    /// # Errors
    /// [`TransportError::Unknown`].
    pub fn describe(&self, memory: &RemoteMemory) -> Result<Description, TransportError> {
        let MemoryId { transport, index } = memory.id;
        let remote = self.inner.imports.get(index).filter(|_| transport == self.inner.transport);
        let unknown = TransportError::Unknown { what: "imported memory", index };
        remote.map(|remote| remote.description.clone()).ok_or(unknown)
    }

    /// What closed ports still hold.
    pub fn quarantined(&self) -> Quarantined {
        let Closing { executors, memories } = &self.inner.closing;
        Quarantined {
            executors: executors.load(Ordering::Relaxed),
            memories: memories.load(Ordering::Relaxed),
        }
    }

    fn add(&self, region: &Region, allocation: Arc<Allocation>) -> LocalMemory {
        let id = self.inner.next_id();
        self.inner.hub.tables.add(id.transport, id.index, region.clone(), allocation);
        LocalMemory { id, region: region.clone() }
    }
}

impl Transport for Ipc {
    /// Device memory of the context's device, or page-locked memory; the latter can be put from, and only within the
    /// process be put to.
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        let Inner { context, hub, .. } = &*self.inner;
        match region.place() {
            Place::Pinned => {}
            Place::Device(seen) if seen == context.ordinal() => {}
            Place::Device(seen) => {
                return Err(Error::OtherDevice { expected: context.ordinal(), seen }.into());
            }
            place => return Err(Error::Memory { address: region.address(), place }.into()),
        }
        let allocation = hub.tables.allocation(context, region)?;
        Ok(self.add(region, allocation))
    }

    /// In the place that [`Config::word_place`] says.
    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        let Inner { context, hub, words, .. } = &*self.inner;
        let (region, allocation) = words.next(context, &hub.tables)?;
        Ok(self.add(&region, allocation))
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        let MemoryId { transport, index } = memory.id;
        if transport != self.inner.transport {
            return Err(TransportError::Unknown { what: "memory", index });
        }
        self.inner.hub.tables.release(transport, index)
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        let MemoryId { transport, index } = memory.id;
        let local = self.inner.hub.tables.get(transport, index).filter(|_| transport == self.inner.transport);
        let local = local.ok_or(TransportError::Unknown { what: "memory", index })?;
        Ok(local.message(self.inner.author(), index)?.encode())
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        let inner = &*self.inner;
        let importer = Importer {
            context: &inner.context,
            hub: &inner.hub,
            imports: &inner.imports,
            ways: &inner.config.ways,
            ask_timeout: inner.config.ask_timeout,
        };
        let remote = importer.import(bytes)?;
        let (id, len_bytes) = (inner.next_id(), remote.len_bytes);
        inner.imports.add(id.index, remote);
        Ok(RemoteMemory { id, len_bytes })
    }

    /// What was opened for it goes to the context's quarantine with the last import of the same allocation, and
    /// [`Context::reclaim`] closes it.
    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        let MemoryId { transport, index } = memory.id;
        if transport != self.inner.transport {
            return Err(TransportError::Unknown { what: "imported memory", index });
        }
        self.inner.imports.forget(index)
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let (endpoint, bytes) = IpcEndpoint::new(&self.inner)?;
        Ok((Box::new(endpoint), bytes))
    }
}
