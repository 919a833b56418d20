//! Memory beyond one device and one process: opened by its handle, reached over the bus, page-locked in place.

use core::any::Any;
use core::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::cuda::memory::Allocation;
use crate::cuda::quarantine::Resource;
use crate::cuda::table::{
    IPC_LAZY_PEER_ACCESS, LegacyHandle, MEM_HOST_REGISTER_DEVICE_MAP, MEM_HOST_REGISTER_PORTABLE,
    PEER_ACCESS_ALREADY_ENABLED,
};
use crate::cuda::vmm::{self, OpenedPieces};
use crate::cuda::{Context, Driver, Kind};
use crate::memory::IpcHandle;
use crate::{Error, Place, Region};

impl Driver {
    /// The ordinal of the device with this UUID, or `None` if this process sees no such device: there is none, or
    /// `CUDA_VISIBLE_DEVICES` hides it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn ordinal_of(&self, uuid: &[u8; 16]) -> Result<Option<u32>, Error> {
        for ordinal in 0..self.device_count()? {
            let mut device = 0;
            // SAFETY: `device` outlives the call.
            unsafe { self.cuDeviceGet(&mut device, ordinal as c_int) }?;
            let mut seen = [0; 16];
            // SAFETY: `seen` outlives the call and has the length of a UUID.
            unsafe { self.cuDeviceGetUuid_v2(&mut seen, device) }?;
            if seen == *uuid {
                return Ok(Some(ordinal));
            }
        }
        Ok(None)
    }
}

impl Context {
    /// Whether this device reaches the memory of another one directly. It always reaches its own.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Unsupported`] if the driver cannot tell.
    pub fn can_reach(&self, ordinal: u32) -> Result<bool, Error> {
        let inner = self.inner();
        if ordinal == inner.ordinal {
            return Ok(true);
        }
        let (mut device, mut can) = (0, 0);
        // SAFETY: `device` outlives the call.
        unsafe { inner.driver.cuDeviceGet(&mut device, ordinal as c_int) }?;
        // SAFETY: `can` outlives the call.
        unsafe { inner.driver.cuDeviceCanAccessPeer(&mut can, inner.device, device) }?;
        Ok(can != 0)
    }

    /// Lets this device read and write memory of `other`, a context of the same process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if it does not [reach](Self::can_reach) it, and for memory of [`Kind::Pool`] of another
    /// device; [`Error::Driver`].
    pub fn reach(&self, other: &Context, region: &Region) -> Result<(), Error> {
        let inner = self.inner();
        if region.place() == Place::Pinned || other.ordinal() == self.ordinal() {
            return Ok(());
        }
        if !self.can_reach(other.ordinal())? {
            return Err(Error::Unsupported { what: "peer access between these two devices" });
        }
        match other.kind(region.address())? {
            Kind::Vmm => {
                let segments = region.owner().segments(region.range())?;
                let _current = inner.enter()?;
                for segment in segments {
                    // SAFETY: the region's owner keeps its segments mapped.
                    unsafe { vmm::allow(inner, segment) }?;
                }
                Ok(())
            }
            Kind::Pool => {
                Err(Error::Unsupported { what: "memory of a stream-ordered pool of another device" })
            }
            _ => {
                let _current = inner.enter()?;
                // SAFETY: the other context lives, and the flags must be 0.
                match unsafe { inner.driver.cuCtxEnablePeerAccess(other.raw(), 0) } {
                    Err(Error::Driver { status: PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(()),
                    enabled => enabled,
                }
            }
        }
    }

    /// Opens memory of another process by its [legacy handle](IpcHandle::Legacy): the whole allocation, which must have
    /// at least `len_bytes`. The region's place is this device, which reaches it; where it lies is another matter.
    ///
    /// [Reclaiming](Self::reclaim) closes it, after the last region. The other process must not free it before.
    ///
    /// # Errors
    /// [`Error::Range`] if the allocation is shorter; [`Error::Unsupported`]; [`Error::Driver`].
    pub fn open_legacy(&self, handle: &[u8; 64], len_bytes: u64) -> Result<Region, Error> {
        let inner = self.inner();
        let mut base = 0;
        let _current = inner.enter()?;
        // SAFETY: `base` outlives the call. A handle is 64 bytes of any value, which the driver checks.
        unsafe {
            inner.driver.cuIpcOpenMemHandle_v2(&mut base, LegacyHandle(*handle), IPC_LAZY_PEER_ACCESS)
        }?;
        let resource = Resource::OpenedLegacy { address: base, len_bytes };
        let allocation = Allocation::new(inner, Kind::Opened, base, len_bytes, resource);
        let (mut start, mut len) = (0, 0);
        // SAFETY: both results outlive the call, which only looks the address up.
        unsafe { inner.driver.cuMemGetAddressRange_v2(&mut start, &mut len, base) }?;
        let limit_bytes = (start + len as u64).saturating_sub(base);
        if len_bytes > limit_bytes {
            return Err(Error::Range {
                what: "another process's allocation",
                offset_bytes: 0,
                len_bytes,
                address: base,
                limit_bytes,
            });
        }
        let place = allocation.place();
        // SAFETY: the driver has mapped the range, checked just above, and it stays so until the owner is dropped, and
        // longer.
        unsafe { Region::new(base, len_bytes, place, Arc::new(allocation)) }
    }

    /// Opens memory of another process by descriptors or fabric handles, and maps it piece behind piece: each handle with
    /// the length of its whole physical allocation.
    ///
    /// The place and the end are as with [`open_legacy`](Self::open_legacy); the other process may free it at any time,
    /// and it stays here.
    ///
    /// # Errors
    /// [`Error::Range`] for lengths that make no sense; [`Error::Unsupported`]; [`Error::Driver`].
    pub fn open_pieces(&self, pieces: &[(IpcHandle, u64)]) -> Result<Region, Error> {
        let inner = self.inner();
        if !inner.attributes.vmm {
            return Err(Error::Unsupported { what: "virtual memory management on this device" });
        }
        let opened = {
            let _current = inner.enter()?;
            OpenedPieces::new(inner, pieces)?
        };
        let (address, len_bytes) = (opened.address, opened.len_bytes);
        let resource = Resource::OpenedPieces(opened);
        let allocation = Allocation::new(inner, Kind::Opened, address, len_bytes, resource);
        let place = allocation.place();
        // SAFETY: the whole range is mapped, and stays so until the owner is dropped, and longer.
        unsafe { Region::new(address, len_bytes, place, Arc::new(allocation)) }
    }

    /// Page-locks host memory of the caller's, whole pages, so that devices reach it at the same address. `keep` is what
    /// keeps it mapped; it is dropped by [`reclaim`](Self::reclaim) after the last region.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if devices would see it at another address; [`Error::Driver`].
    ///
    /// # Safety
    /// - The range is mapped, readable and writable, until `keep` is dropped.
    /// - Until then nothing accesses it through a Rust reference to anything but atomics.
    pub unsafe fn register_host(
        &self,
        address: u64,
        len_bytes: u64,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Region, Error> {
        let inner = self.inner();
        let host = address as *mut c_void;
        let flags = MEM_HOST_REGISTER_PORTABLE | MEM_HOST_REGISTER_DEVICE_MAP;
        let _current = inner.enter()?;
        // SAFETY: the caller keeps the range mapped while `keep` lives, which the allocation holds.
        unsafe { inner.driver.cuMemHostRegister_v2(host, len_bytes as usize, flags) }?;
        let resource = Resource::Registered { address, len_bytes, keep: Some(keep) };
        let allocation = Allocation::new(inner, Kind::Pinned, address, len_bytes, resource);
        let mut device = 0;
        // SAFETY: `device` outlives the call.
        unsafe { inner.driver.cuMemHostGetDevicePointer_v2(&mut device, host, 0) }?;
        if device != address {
            return Err(Error::Unsupported { what: "page-locked memory with another address on the device" });
        }
        // SAFETY: the caller vouches for the range; that devices reach it was asked of the driver.
        unsafe { Region::new(address, len_bytes, Place::Pinned, Arc::new(allocation)) }
    }
}
