//! [`Words`]: where signal words come from, and host memory that processes map in common.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use portway_fifo::cuda::Context;
use portway_fifo::{Platform, Region};
use portway_proxy::TransportError;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::config::WordPlace;
use crate::error::Error;
use crate::memory::{Allocation, Tables, lock};

/// Bytes that words are cut from.
const SLAB_BYTES: u64 = 64 << 10;

/// The distance of two words, so that no two share a cache line, nor a pair of them.
const STRIDE_BYTES: u64 = 128;

/// Seals of shared memory: nobody can make it shorter under those who have mapped it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Host memory behind a descriptor, mapped here.
#[derive(Debug)]
struct Map {
    address: usize,
    len: usize,
}

impl Map {
    fn new(descriptor: impl AsFd, len: usize) -> Result<Self, Error> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let address = unsafe {
            rustix::mm::mmap(core::ptr::null_mut(), len, protection, MapFlags::SHARED, descriptor, 0)
        };
        let address = address.map_err(Error::system("mapping shared memory"))?;
        Ok(Map { address: address as usize, len })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped so in `new`; whoever used the range kept this value.
        let _ = unsafe { rustix::mm::munmap(self.address as *mut _, self.len) };
    }
}

/// Makes host memory that other processes can map too: zeroed, page-locked, at the same address for all devices of this
/// process.
fn make_shared(context: &Context, len_bytes: u64) -> Result<(Region, OwnedFd), TransportError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor =
        rustix::fs::memfd_create("portway-ipc", flags).map_err(Error::system("making shared memory"))?;
    rustix::fs::ftruncate(&descriptor, len_bytes).map_err(Error::system("making shared memory"))?;
    rustix::fs::fcntl_add_seals(&descriptor, SEALS).map_err(Error::system("sealing shared memory"))?;
    let region = map_shared(context, &descriptor, len_bytes)?;
    Ok((region, descriptor))
}

/// Maps host memory of another process.
pub(crate) fn open_shared(
    context: &Context,
    descriptor: &OwnedFd,
    len_bytes: u64,
) -> Result<Region, TransportError> {
    let seals = rustix::fs::fcntl_get_seals(descriptor).unwrap_or(SealFlags::empty());
    let len = rustix::fs::fstat(descriptor).map_err(Error::system("looking at shared memory"))?.st_size;
    if !seals.contains(SEALS) || len as u64 != len_bytes {
        return Err(TransportError::Malformed {
            what: "shared memory of the peer",
            expected: format!("{len_bytes} bytes, sealed"),
            seen: format!("{len} bytes with seals {seals:?}"),
        });
    }
    map_shared(context, descriptor, len_bytes)
}

fn map_shared(context: &Context, descriptor: &OwnedFd, len_bytes: u64) -> Result<Region, TransportError> {
    let map = Map::new(descriptor, len_bytes as usize)?;
    let address = map.address as u64;
    // SAFETY: the map keeps the range mapped, and its length is sealed; only its address leaves here.
    Ok(unsafe { context.register_host(address, len_bytes, Arc::new(map)) }?)
}

/// Cuts words from slabs. A word is never given out twice, since a late write of its former peer would look like a
/// signal; a slab goes when all of its words have gone.
#[derive(Debug)]
pub(crate) struct Words {
    place: WordPlace,
    slab: Mutex<Option<Slab>>,
}

#[derive(Debug)]
struct Slab {
    region: Region,
    allocation: Arc<Allocation>,
    used_bytes: u64,
}

impl Words {
    pub(crate) fn new(place: WordPlace) -> Self {
        Words { place, slab: Mutex::new(None) }
    }

    /// A zeroed word, and the allocation that it lies in.
    pub(crate) fn next(
        &self,
        context: &Context,
        tables: &Tables,
    ) -> Result<(Region, Arc<Allocation>), TransportError> {
        let mut slab = lock(&self.slab);
        let slab = match &mut *slab {
            Some(slab) if slab.used_bytes + STRIDE_BYTES <= SLAB_BYTES => slab,
            none_or_full => none_or_full.insert(self.make(context, tables)?),
        };
        let word = slab.region.slice(slab.used_bytes, 8)?;
        slab.used_bytes += STRIDE_BYTES;
        Ok((word, slab.allocation.clone()))
    }

    fn make(&self, context: &Context, tables: &Tables) -> Result<Slab, TransportError> {
        let (region, allocation) = match self.place {
            WordPlace::Pinned => {
                let (region, descriptor) = make_shared(context, SLAB_BYTES)?;
                let allocation = tables.shared_allocation(context, &region, descriptor);
                (region, allocation)
            }
            WordPlace::Device => {
                let region = context.device_memory(SLAB_BYTES)?;
                let allocation = tables.allocation(context, &region)?;
                (region, allocation)
            }
        };
        Ok(Slab { region, allocation, used_bytes: 0 })
    }
}
