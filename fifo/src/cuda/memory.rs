//! Memory of a context: how it is allocated, and what it gives to transports.

use core::ffi::{c_int, c_void};
use core::{fmt, ptr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::cuda::context::Inner;
use crate::cuda::quarantine::Resource;
use crate::cuda::table::{
    HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD, MEM_HOST_ALLOC_DEVICE_MAP, MEM_HOST_ALLOC_PORTABLE,
    OUT_OF_MEMORY, RANGE_HANDLE_DMA_BUF_FD,
};
use crate::cuda::vmm::{self, Mapping, Retained};
use crate::memory::{DmaBuf, IpcHandle, IpcKind, Segment, load_bytes, store_bytes};
use crate::{Error, Memory, Place, Region};

/// How memory was allocated, which decides in which ways it can be exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Page-locked host memory at the same address for the processor and all devices (`cuMemHostAlloc`). Not exported.
    Pinned,
    /// Device memory mapped piece by piece (`cuMemCreate`): exported as a descriptor or a fabric handle. An allocation
    /// takes whole pieces, of 2 MiB on the devices of today.
    Vmm,
    /// Device memory in one piece (`cuMemAlloc`): exported as a legacy handle.
    Legacy,
    /// Device memory of a stream-ordered pool (`cuMemAllocAsync`): only imported here, and not exported.
    Pool,
    /// Memory of another process that was [opened](crate::cuda::Context::open_legacy) here. Not exported on.
    Opened,
}

/// See [`Context::allocate`](crate::cuda::Context::allocate).
pub(super) fn allocate(context: &Arc<Inner>, kind: Kind, len_bytes: u64) -> Result<Region, Error> {
    let limit_bytes = isize::MAX as u64;
    if len_bytes == 0 || len_bytes > limit_bytes {
        return Err(Error::Range {
            what: "CUDA memory",
            offset_bytes: 0,
            len_bytes,
            address: 0,
            limit_bytes,
        });
    }
    let allocation = {
        let _current = context.enter()?;
        match kind {
            Kind::Pinned => pinned(context, len_bytes)?,
            Kind::Vmm if !context.attributes.vmm => {
                return Err(Error::Unsupported { what: "virtual memory management on this device" });
            }
            Kind::Vmm => {
                let mapping = Mapping::new(context, len_bytes)?;
                Allocation::new(context, kind, mapping.address, mapping.len_bytes, Resource::Vmm(mapping))
            }
            Kind::Legacy => legacy(context, len_bytes)?,
            Kind::Pool => {
                return Err(Error::Unsupported { what: "allocating from a stream-ordered pool" });
            }
            Kind::Opened => {
                return Err(Error::Unsupported { what: "allocating in another process" });
            }
        }
    };
    let address = allocation.base;
    let place = allocation.place();
    if kind == Kind::Pinned {
        for word in (0..len_bytes).step_by(ZEROS.len()) {
            let part = &ZEROS[..ZEROS.len().min((len_bytes - word) as usize)];
            // SAFETY: the memory was allocated just above, and nobody else knows of it.
            unsafe { store_bytes((address + word) as *mut u8, part) };
        }
    } else {
        // SAFETY: the memory was allocated just above. If the time is over before the device has finished, the
        // allocation goes to the quarantine and stays mapped.
        unsafe { context.copier.zero(context, address, len_bytes) }?;
    }
    // SAFETY: the allocation covers the range, at addresses that the processor reaches if the place says so, and it
    // stays mapped until the owner is dropped, and longer.
    unsafe { Region::new(address, len_bytes, place, Arc::new(allocation)) }
}

const ZEROS: [u8; 4096] = [0; 4096];

fn pinned(context: &Arc<Inner>, len_bytes: u64) -> Result<Allocation, Error> {
    let driver = &context.driver;
    let mut host: *mut c_void = ptr::null_mut();
    let flags = MEM_HOST_ALLOC_PORTABLE | MEM_HOST_ALLOC_DEVICE_MAP;
    // SAFETY: `host` outlives the call.
    or_out_of_memory(unsafe { driver.cuMemHostAlloc(&mut host, len_bytes as usize, flags) }, len_bytes)?;
    let base = host as u64;
    let resource = Resource::Pinned { address: base, len_bytes };
    let allocation = Allocation::new(context, Kind::Pinned, base, len_bytes, resource);
    let mut device = 0;
    // SAFETY: `device` outlives the call.
    unsafe { driver.cuMemHostGetDevicePointer_v2(&mut device, host, 0) }?;
    if device != base {
        return Err(Error::Unsupported { what: "page-locked memory with another address on the device" });
    }
    Ok(allocation)
}

fn legacy(context: &Arc<Inner>, len_bytes: u64) -> Result<Allocation, Error> {
    let mut base = 0;
    // SAFETY: `base` outlives the call.
    or_out_of_memory(unsafe { context.driver.cuMemAlloc_v2(&mut base, len_bytes as usize) }, len_bytes)?;
    let resource = Resource::Legacy { address: base, len_bytes };
    Ok(Allocation::new(context, Kind::Legacy, base, len_bytes, resource))
}

fn or_out_of_memory(result: Result<(), Error>, len_bytes: u64) -> Result<(), Error> {
    match result {
        Err(Error::Driver { status: OUT_OF_MEMORY, .. }) => Err(Error::OutOfMemory { len_bytes }),
        other => other,
    }
}

/// The memory behind the regions of one allocation, our own or the caller's.
pub(super) struct Allocation {
    context: Arc<Inner>,
    kind: Kind,
    base: u64,
    len_bytes: u64,
    /// Taken by the drop.
    resource: Option<Resource>,
}

impl Allocation {
    pub(super) fn new(
        context: &Arc<Inner>,
        kind: Kind,
        base: u64,
        len_bytes: u64,
        resource: Resource,
    ) -> Self {
        Allocation { context: context.clone(), kind, base, len_bytes, resource: Some(resource) }
    }

    pub(super) fn place(&self) -> Place {
        match self.kind {
            Kind::Pinned => Place::Pinned,
            Kind::Vmm | Kind::Legacy | Kind::Pool | Kind::Opened => Place::Device(self.context.ordinal),
        }
    }

    fn check(&self, what: &'static str, address: u64, len_bytes: u64) -> Result<(), Error> {
        let inside = address
            .checked_sub(self.base)
            .and_then(|offset| offset.checked_add(len_bytes))
            .is_some_and(|end| end <= self.len_bytes);
        if inside { Ok(()) } else { Err(self.out_of_range(what, address, len_bytes)) }
    }

    fn out_of_range(&self, what: &'static str, address: u64, len_bytes: u64) -> Error {
        Error::Range {
            what,
            offset_bytes: address.wrapping_sub(self.base),
            len_bytes,
            address: self.base,
            limit_bytes: self.len_bytes,
        }
    }

    /// The one physical segment that a range lies in.
    fn chunk(&self, what: &'static str, range: Segment) -> Result<Segment, Error> {
        match self.segments(range)?.as_slice() {
            [chunk] => Ok(*chunk),
            _ => Err(self.out_of_range(what, range.address, range.len_bytes)),
        }
    }

    /// In which ways the physical memory of a chunk can be exported.
    fn handle_types(&self, chunk: Segment) -> Result<u64, Error> {
        match &self.resource {
            Some(Resource::Vmm(mapping)) => Ok(mapping.handle_types as u64),
            _ => crate::cuda::import::handle_types(&self.context, chunk.address),
        }
    }

    /// Exports the physical memory of a chunk in the form of `handle_type`.
    ///
    /// # Safety
    /// - `into` points to what the handle type needs.
    unsafe fn export(&self, chunk: Segment, handle_type: c_int, into: *mut c_void) -> Result<(), Error> {
        let driver = &self.context.driver;
        let retained;
        let handle = match &self.resource {
            Some(Resource::Vmm(Mapping { handle: Some(handle), .. })) => *handle,
            _ => {
                retained = Retained::at(driver, chunk.address)?;
                retained.handle
            }
        };
        // SAFETY: the handle lives while `self` or `retained` does; the caller vouches for `into`.
        unsafe { vmm::export(driver, handle, handle_type, into) }
    }
}

impl Memory for Allocation {
    /// Whole physical allocations: the first may begin before `range`, and the last end after it.
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, Error> {
        self.check("range of CUDA memory", range.address, range.len_bytes)?;
        match self.resource {
            Some(Resource::Imported { .. }) if self.kind != Kind::Pinned => {
                let _current = self.context.enter()?;
                crate::cuda::import::segments(&self.context, range)
            }
            _ => Ok(vec![Segment { address: self.base, len_bytes: self.len_bytes }]),
        }
    }

    /// Of device memory. The descriptor covers the host pages that `segment` touches.
    fn dma_buf(&self, segment: Segment) -> Result<DmaBuf, Error> {
        self.check("dma-buf", segment.address, segment.len_bytes)?;
        if self.kind == Kind::Pinned {
            return Err(Error::Unsupported { what: "page-locked memory as dma-buf" });
        }
        if !self.context.attributes.dma_buf {
            return Err(Error::Unsupported { what: "dma-buf on this device" });
        }
        let page_bytes = rustix::param::page_size() as u64;
        let offset_bytes = segment.address % page_bytes;
        let len = (offset_bytes + segment.len_bytes).next_multiple_of(page_bytes);
        let mut fd: c_int = -1;
        let into = (&raw mut fd).cast();
        let _current = self.context.enter()?;
        // SAFETY: `fd` outlives the call, and is what this type of handle is written to.
        unsafe {
            self.context.driver.cuMemGetHandleForAddressRange(
                into,
                segment.address - offset_bytes,
                len as usize,
                RANGE_HANDLE_DMA_BUF_FD,
                0,
            )
        }?;
        Ok(DmaBuf { fd: own_fd("cuMemGetHandleForAddressRange", fd)?, offset_bytes })
    }

    /// Of the whole physical allocation that `segment` lies in, see [`segments`](Self::segments). One handle cannot
    /// span two.
    fn ipc_handle(&self, segment: Segment, kind: IpcKind) -> Result<IpcHandle, Error> {
        let unsupported = match kind {
            IpcKind::Legacy => "a legacy IPC handle of this memory",
            IpcKind::Fd => "a descriptor of this memory",
            IpcKind::Fabric => "a fabric handle of this memory",
        };
        let chunk = self.chunk("memory of an IPC handle", segment)?;
        let _current = self.context.enter()?;
        let supported = match (kind, self.kind) {
            (IpcKind::Legacy, Kind::Legacy) => true,
            (IpcKind::Fd, Kind::Vmm) => self.handle_types(chunk)? & HANDLE_TYPE_POSIX_FD as u64 != 0,
            (IpcKind::Fabric, Kind::Vmm) => self.handle_types(chunk)? & HANDLE_TYPE_FABRIC as u64 != 0,
            _ => false,
        };
        if !supported {
            return Err(Error::Unsupported { what: unsupported });
        }
        let mut bytes = [0; 64];
        match kind {
            IpcKind::Legacy => {
                // SAFETY: `bytes` outlives the call and has the length of a handle.
                unsafe { self.context.driver.cuIpcGetMemHandle(&mut bytes, chunk.address) }?;
                Ok(IpcHandle::Legacy(bytes))
            }
            IpcKind::Fd => {
                let mut fd: c_int = -1;
                // SAFETY: `fd` outlives the call, and is what this type of handle is written to.
                unsafe { self.export(chunk, HANDLE_TYPE_POSIX_FD, (&raw mut fd).cast()) }?;
                Ok(IpcHandle::Fd(own_fd("cuMemExportToShareableHandle", fd)?))
            }
            IpcKind::Fabric => {
                // SAFETY: `bytes` outlives the call and has the length of a fabric handle.
                unsafe { self.export(chunk, HANDLE_TYPE_FABRIC, (&raw mut bytes).cast()) }?;
                Ok(IpcHandle::Fabric(bytes))
            }
        }
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check("read of CUDA memory", address, into.len() as u64)?;
        if self.kind == Kind::Pinned {
            // SAFETY: the range lies in this memory, checked above, which the processor reaches and which is accessed
            // atomically only (contract of `Region::new`).
            unsafe { load_bytes(address as *mut u8, into) };
            return Ok(());
        }
        // SAFETY: the range lies in this memory, checked above, which is mapped on the device while `self` lives.
        unsafe { self.context.copier.read(&self.context, address, into) }
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Error> {
        self.check("write of CUDA memory", address, from.len() as u64)?;
        if self.kind == Kind::Pinned {
            // SAFETY: as in `read`.
            unsafe { store_bytes(address as *mut u8, from) };
            return Ok(());
        }
        // SAFETY: as in `read`.
        unsafe { self.context.copier.write(&self.context, address, from) }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(resource) = self.resource.take() {
            self.context.quarantine.put(resource);
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Allocation { kind, base, len_bytes, context, .. } = self;
        write!(f, "Allocation({kind:?}, {base:#x} + {len_bytes} bytes, device {})", context.ordinal)
    }
}

/// Takes over a descriptor that the driver made, and keeps it from programs that this one starts.
fn own_fd(call: &'static str, fd: c_int) -> Result<OwnedFd, Error> {
    if fd < 0 {
        return Err(Error::Driver { call, status: 0, name: format!("success, with descriptor {fd}") });
    }
    // SAFETY: the driver has just made it, for us alone.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).map_err(|errno| Error::Driver {
        call,
        status: errno.raw_os_error(),
        name: format!("descriptor {}: {errno}", fd.as_raw_fd()),
    })?;
    Ok(fd)
}
