//! [`Ib`]: the transport.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use portway_fifo::{Heap, Platform, Region};
use portway_proxy::TransportError;
use portway_proxy::transport::{Endpoint, LocalMemory, RemoteMemory, Transport};

use crate::config::Config;
use crate::device::Device;
use crate::endpoint::IbEndpoint;
use crate::error::Error;
use crate::keeper::{Keeper, Share};
use crate::memory::{Local, Memories, Order, place_number};
use crate::message;
use crate::topology::Sysfs;
use crate::verbs::Verbs;

/// What a transport, its endpoints and its ports share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: Config,
    pub(crate) memories: Memories,
    pub(crate) keeper: Share,
}

/// A transport over one port of one RDMA device. A clone is the same transport.
///
/// The [crate page](crate) tells what is ordered by what.
#[derive(Clone, Debug)]
pub struct Ib {
    inner: Arc<Inner>,
}

/// A number that no other transport has, not even one of a process that was forked from the same: forks share the keys.
pub(crate) fn random() -> u64 {
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

impl Ib {
    /// Loads the verbs library and opens a device.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::NoKernelSupport`], [`Error::NoDevice`], [`Error::NoActivePort`], in this order of
    /// what is missing; [`Error::Config`]; [`Error::Unfit`]; [`Error::Device`].
    pub fn open(config: Config) -> Result<Self, Error> {
        config.check()?;
        Ib::open_with(&Verbs::load()?, config)
    }

    /// [`open`](Self::open) with functions that are there already.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(verbs: &Verbs, config: Config) -> Result<Self, Error> {
        config.check()?;
        let device = Device::open(verbs, &config, Sysfs::default())?;
        let keeper = Keeper::start(device)?;
        Ok(Ib { inner: Arc::new(Inner { config, memories: Memories::new(random()), keeper }) })
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.inner.keeper.device().name
    }

    /// The device's port, counting from 1.
    pub fn port(&self) -> u8 {
        self.inner.keeper.device().port.number
    }

    /// Whether the link is up, as far as the device's asynchronous events said. Ports live through a link that comes
    /// back within [`Config::gives_up_after`].
    pub fn link_is_up(&self) -> bool {
        self.inner.keeper.link_is_up()
    }

    /// How many asynchronous events the device has reported.
    pub fn events(&self) -> u64 {
        self.inner.keeper.events()
    }

    fn add(&self, region: &Region, order: Order) -> Result<LocalMemory, TransportError> {
        let inner = &self.inner;
        let memory = Local::register(&inner.keeper, inner.config.gpu.as_ref(), region, order)?;
        Ok(LocalMemory { id: inner.memories.add_local(memory), region: region.clone() })
    }
}

impl Transport for Ib {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        self.add(region, Order::Relaxed)
    }

    /// In the memory of [`Config::gpu`], or on the host without one: where the data is.
    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        let region = match &self.inner.config.gpu {
            Some(gpu) => gpu.platform.device_memory(8)?,
            None => Heap.host_memory(8)?,
        };
        self.add(&region, Order::Strict)
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        self.inner.memories.release(memory.id)
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        let local = self.inner.memories.local("memory", memory.id)?;
        let transport = self.inner.memories.transport;
        let (index, place) = (memory.id.index, place_number(local.region.place()));
        let is_word = local.order == Order::Strict;
        Ok(message::Memory { transport, index, place, is_word, spans: local.remote_spans() }.encode())
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        let memory = message::Memory::decode(bytes)?;
        let len_bytes = memory.len_bytes();
        Ok(RemoteMemory { id: self.inner.memories.add_remote(memory), len_bytes })
    }

    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        self.inner.memories.forget(memory.id)
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let (endpoint, bytes) = IbEndpoint::new(&self.inner)?;
        Ok((Box::new(endpoint), bytes))
    }
}
