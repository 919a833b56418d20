//! [`Object`]: a shared memory object of the system's, mapped.

use std::hash::{BuildHasher, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use portway_fifo::memory::{DmaBuf, IpcHandle, IpcKind, Segment, copy_bytes};
use portway_fifo::{Error, Memory, Place, Region};
use portway_proxy::TransportError;
use rustix::fs::{FallocateFlags, Mode, fallocate, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::shm;

/// Whoever made it removes its name when the last region of it is dropped.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) id: u64,
    base: u64,
    len_bytes: u64,
    made_here: bool,
}

fn name(id: u64) -> String {
    format!("/portway-shm-{id:016x}")
}

fn failed(operation: &'static str) -> impl Fn(Errno) -> TransportError {
    move |errno| TransportError::Device { operation, status: errno.raw_os_error(), vendor: 0, source: None }
}

impl Object {
    /// A new one, zeroed. Its number begins with the process's and ends at random.
    pub(crate) fn create(len_bytes: u64) -> Result<Arc<Object>, TransportError> {
        let random = std::hash::RandomState::new().build_hasher().finish() & 0xffff_ffff;
        let id = u64::from(std::process::id()) << 32 | random;
        let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
        let fd = shm::open(name(id), flags, Mode::RUSR | Mode::WUSR).map_err(failed("shm_open"))?;
        // Not just its length: a store into a page that the system has no room for would end the process.
        let mapped = fallocate(&fd, FallocateFlags::empty(), 0, len_bytes)
            .map_err(failed("fallocate of shared memory"))
            .and_then(|()| Object::map(id, &fd, len_bytes, true));
        if mapped.is_err() {
            let _ = shm::unlink(name(id)); // why there is none is in the result
        }
        mapped
    }

    /// A peer's, of at least this length.
    pub(crate) fn open(id: u64, len_bytes: u64) -> Result<Arc<Object>, TransportError> {
        let fd = shm::open(name(id), shm::OFlags::RDWR, Mode::empty())
            .map_err(failed("shm_open of the peer's memory"))?;
        let found = fstat(&fd).map_err(failed("fstat of the peer's memory"))?;
        let (user, len) = (rustix::process::getuid().as_raw(), found.st_size as u64);
        let expected = format!("at least {len_bytes} bytes of user {user}");
        if found.st_uid != user || len < len_bytes {
            let seen = format!("{len} bytes of user {}", found.st_uid);
            return Err(TransportError::Malformed { what: "the peer's shared memory", expected, seen });
        }
        Object::map(id, &fd, len_bytes, false)
    }

    fn map(id: u64, fd: &OwnedFd, len_bytes: u64, made_here: bool) -> Result<Arc<Object>, TransportError> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses an address where nothing is mapped.
        let base =
            unsafe { mmap(core::ptr::null_mut(), len_bytes as usize, access, MapFlags::SHARED, fd, 0) }
                .map_err(failed("mmap of shared memory"))?;
        Ok(Arc::new(Object { id, base: base as u64, len_bytes, made_here }))
    }

    /// All of it.
    pub(crate) fn region(self: &Arc<Self>) -> Result<Region, Error> {
        // SAFETY: mapped until `self` is dropped, for loads and stores; its address leaves this file only in regions.
        unsafe { Region::new(self.base, self.len_bytes, Place::Host, self.clone()) }
    }

    /// The pointer to a range, if all of it lies in this object.
    pub(crate) fn checked(&self, address: u64, len_bytes: u64) -> Result<*mut u8, Error> {
        let (offset_bytes, limit_bytes) = (address.wrapping_sub(self.base), self.len_bytes);
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= limit_bytes => Ok(address as *mut u8),
            _ => {
                let (what, address) = ("part of shared memory", self.base);
                Err(Error::Range { what, offset_bytes, len_bytes, address, limit_bytes })
            }
        }
    }
}

impl Memory for Object {
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, Error> {
        self.checked(range.address, range.len_bytes)?;
        Ok(vec![range])
    }

    fn dma_buf(&self, _: Segment) -> Result<DmaBuf, Error> {
        Err(Error::Unsupported { what: "shared memory as dma-buf" })
    }

    fn ipc_handle(&self, _: Segment, _: IpcKind) -> Result<IpcHandle, Error> {
        Err(Error::Unsupported { what: "shared memory as CUDA IPC handle" })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        let from = self.checked(address, into.len() as u64)?;
        // SAFETY: `checked` found the range inside the mapping, which only atomics access (contract of `Region::new`);
        // `into` is ours alone and is not used meanwhile.
        unsafe { copy_bytes(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Error> {
        let to = self.checked(address, from.len() as u64)?;
        let mut bytes = from.to_vec();
        // SAFETY: as in `read`.
        unsafe { copy_bytes(bytes.as_mut_ptr(), to, bytes.len()) };
        Ok(())
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and no region of it is left.
        let unmapped = unsafe { munmap(self.base as *mut _, self.len_bytes as usize) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
        if self.made_here {
            let _ = shm::unlink(name(self.id)); // somebody of the same user may have removed the name
        }
    }
}
