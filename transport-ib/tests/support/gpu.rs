//! [`Gpu`]: memory that counts as a GPU's, in physical segments, on a machine without one.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use portway_fifo::memory::{DmaBuf, IpcHandle, IpcKind, Memory, Segment};
use portway_fifo::{Error, Heap, Place, Platform, Region};

/// An allocation of `segment_bytes` long segments. The bytes lie in the heap, so that the software fabric reaches them.
#[derive(Debug)]
pub struct Gpu {
    pub base: Region,
    pub segment_bytes: u64,
    /// Where in its dma-buf a segment begins.
    pub offset_bytes: u64,
    pub dma_buf: bool,
    /// Ranges for which a dma-buf was asked.
    pub asked: Mutex<Vec<Segment>>,
    /// Leaves out the last segment.
    pub truncated: bool,
}

impl Gpu {
    pub fn new(len_bytes: u64, segment_bytes: u64) -> Gpu {
        Gpu {
            base: Heap.allocate(len_bytes).unwrap(),
            segment_bytes,
            offset_bytes: 0,
            dma_buf: true,
            asked: Mutex::default(),
            truncated: false,
        }
    }

    /// A part of it, as memory of device 0.
    pub fn region(self: &Arc<Self>, offset_bytes: u64, len_bytes: u64) -> Region {
        let address = self.base.address() + offset_bytes;
        // SAFETY: a part of the heap allocation that `self` holds; nobody makes references to it.
        unsafe { Region::new(address, len_bytes, Place::Device(0), self.clone()) }.unwrap()
    }
}

impl Memory for Gpu {
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, Error> {
        // Whole, as CUDA memory gives them.
        let (base, limit) = (self.base.address(), self.base.address() + self.base.len_bytes());
        let mut segments = Vec::new();
        let mut at = base + (range.address - base) / self.segment_bytes * self.segment_bytes;
        while at < range.address + range.len_bytes {
            let next = (at + self.segment_bytes).min(limit);
            segments.push(Segment { address: at, len_bytes: next - at });
            at = next;
        }
        if self.truncated {
            segments.pop();
        }
        Ok(segments)
    }

    fn dma_buf(&self, segment: Segment) -> Result<DmaBuf, Error> {
        if !self.dma_buf {
            return Err(Error::Unsupported { what: "this memory as dma-buf" });
        }
        let offset_bytes = segment.address.wrapping_sub(self.base.address());
        let limit_bytes = self.base.len_bytes();
        if offset_bytes.checked_add(segment.len_bytes).is_none_or(|end| end > limit_bytes) {
            let (len_bytes, address) = (segment.len_bytes, self.base.address());
            return Err(Error::Range { what: "dma-buf", offset_bytes, len_bytes, address, limit_bytes });
        }
        self.asked.lock().unwrap().push(segment);
        let fd = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        Ok(DmaBuf { fd, offset_bytes: self.offset_bytes + offset_bytes % self.segment_bytes })
    }

    fn ipc_handle(&self, _: Segment, _: IpcKind) -> Result<IpcHandle, Error> {
        Err(Error::Unsupported { what: "IPC" })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        self.base.read(address - self.base.address(), into)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Error> {
        self.base.write(address - self.base.address(), from)
    }
}

/// Allocates such memory.
#[derive(Debug)]
pub struct GpuPlatform;

impl Platform for GpuPlatform {
    fn host_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        Heap.allocate(len_bytes)
    }

    fn device_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        let gpu = Arc::new(Gpu::new(len_bytes.next_multiple_of(2 << 20), 2 << 20));
        Ok(gpu.region(0, len_bytes))
    }
}
