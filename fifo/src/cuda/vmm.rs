//! [`Mapping`]: device memory that is made, mapped and exported piece by piece (virtual memory management).

use core::ffi::c_int;

use std::os::fd::AsRawFd;

use crate::Error;
use crate::cuda::Driver;
use crate::cuda::context::Inner;
use crate::cuda::table::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDescription, AllocationProperties, GRANULARITY_MINIMUM,
    HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD, LOCATION_DEVICE, Location, OUT_OF_MEMORY,
};
use crate::memory::{IpcHandle, Segment};

/// One physical allocation, mapped at an address range of its own. The fields say how much of it is there, so that it
/// can be taken apart from any state.
pub(super) struct Mapping {
    /// The address range, a multiple of the device's granularity.
    pub(super) address: u64,
    pub(super) len_bytes: u64,
    /// The driver's handle of the physical memory.
    pub(super) handle: Option<u64>,
    /// In which ways it can be exported.
    pub(super) handle_types: c_int,
    mapped: bool,
}

impl Mapping {
    /// Makes at least `len_bytes` bytes that the context's device can read and write, in the current context. The
    /// bytes are not zeroed.
    ///
    /// It can be exported in every way that the device and the process offer, and NICs can reach it if they can reach
    /// the device at all.
    pub(super) fn new(context: &Inner, len_bytes: u64) -> Result<Self, Error> {
        let driver = &context.driver;
        let attributes = &context.attributes;
        let fd = if attributes.posix_fd { HANDLE_TYPE_POSIX_FD } else { 0 };
        let mut wanted = vec![fd];
        if attributes.fabric {
            // Only a process that has been given a channel may have fabric handles; others are refused here.
            wanted.insert(0, fd | HANDLE_TYPE_FABRIC);
        }
        let location = Location { kind: LOCATION_DEVICE, id: context.device };
        let mut created = Err(Error::OutOfMemory { len_bytes });
        let mut handle_types = 0;
        for types in wanted {
            handle_types = types;
            let properties = AllocationProperties {
                kind: ALLOCATION_PINNED,
                handle_types,
                location,
                windows_only: core::ptr::null_mut(),
                compression: 0,
                gpu_direct_rdma: attributes.gpu_direct_rdma_with_vmm.into(),
                usage: 0,
                reserved: [0; 4],
            };
            created = create(driver, &properties, len_bytes);
            match &created {
                Ok(_) | Err(Error::OutOfMemory { .. } | Error::Range { .. }) => break,
                Err(_) => {}
            }
        }
        let (handle, len) = created?;
        let mut mapping =
            Mapping { address: 0, len_bytes: len, handle: Some(handle), handle_types, mapped: false };
        match mapping.map(driver, location) {
            Ok(()) => Ok(mapping),
            Err(error) => {
                let _ = mapping.free(driver);
                Err(error)
            }
        }
    }

    fn map(&mut self, driver: &Driver, location: Location) -> Result<(), Error> {
        let len = self.len_bytes as usize;
        // SAFETY: `self.address` outlives the call; the length is a multiple of the granularity.
        unsafe { driver.cuMemAddressReserve(&mut self.address, len, 0, 0, 0) }?;
        let handle = self.handle.ok_or(Error::Unsupported { what: "mapping memory that was released" })?;
        // SAFETY: the range was reserved just above, and the handle has as many bytes.
        unsafe { driver.cuMemMap(self.address, len, 0, handle, 0) }?;
        self.mapped = true;
        let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
        // SAFETY: the range was mapped just above; one description is passed, which outlives the call.
        unsafe { driver.cuMemSetAccess(self.address, len, &access, 1) }
    }

    /// Takes apart what is there, in the current context. The device must have finished with it.
    pub(super) fn free(&mut self, driver: &Driver) -> Result<(), Error> {
        let len = self.len_bytes as usize;
        if self.mapped {
            // SAFETY: mapped so by `map`; no region of it is left.
            unsafe { driver.cuMemUnmap(self.address, len) }?;
            self.mapped = false;
        }
        if let Some(handle) = self.handle {
            // SAFETY: the handle is ours, and nothing of it is mapped here.
            unsafe { driver.cuMemRelease(handle) }?;
            self.handle = None;
        }
        if self.address != 0 {
            // SAFETY: reserved so by `map`, and nothing is mapped there any more.
            unsafe { driver.cuMemAddressFree(self.address, len) }?;
            self.address = 0;
        }
        Ok(())
    }
}

/// Makes physical memory and returns its handle and its length, rounded up as the device needs.
fn create(driver: &Driver, properties: &AllocationProperties, len_bytes: u64) -> Result<(u64, u64), Error> {
    let mut granularity = 0;
    // SAFETY: both arguments outlive the call.
    unsafe { driver.cuMemGetAllocationGranularity(&mut granularity, properties, GRANULARITY_MINIMUM) }?;
    let limit_bytes = isize::MAX as u64;
    let len = len_bytes
        .checked_next_multiple_of((granularity as u64).max(1))
        .filter(|&len| len <= limit_bytes)
        .ok_or(Error::Range { what: "device memory", offset_bytes: 0, len_bytes, address: 0, limit_bytes })?;
    let mut handle = 0;
    // SAFETY: both arguments outlive the call.
    match unsafe { driver.cuMemCreate(&mut handle, len as usize, properties, 0) } {
        Ok(()) => Ok((handle, len)),
        Err(Error::Driver { status: OUT_OF_MEMORY, .. }) => Err(Error::OutOfMemory { len_bytes }),
        Err(error) => Err(error),
    }
}

/// Physical memory of another process, piece behind piece in one address range.
pub(super) struct OpenedPieces {
    pub(super) address: u64,
    pub(super) len_bytes: u64,
    /// The lengths of the pieces that are mapped, in order.
    mapped: Vec<u64>,
}

impl OpenedPieces {
    /// Maps the pieces in the current context, for its device to read and write.
    pub(super) fn new(context: &Inner, pieces: &[(IpcHandle, u64)]) -> Result<Self, Error> {
        let driver = &context.driver;
        let sum = pieces.iter().try_fold(0u64, |sum, &(_, len_bytes)| sum.checked_add(len_bytes));
        let limit_bytes = isize::MAX as u64;
        let len_bytes = sum.filter(|sum| (1..=limit_bytes).contains(sum)).ok_or(Error::Range {
            what: "pieces of another process's memory",
            offset_bytes: 0,
            len_bytes: sum.unwrap_or(u64::MAX),
            address: 0,
            limit_bytes,
        })?;
        let mut opened = OpenedPieces { address: 0, len_bytes, mapped: Vec::new() };
        // SAFETY: the address outlives the call.
        unsafe { driver.cuMemAddressReserve(&mut opened.address, len_bytes as usize, 0, 0, 0) }?;
        match opened.map(context, pieces) {
            Ok(()) => Ok(opened),
            Err(error) => {
                let _ = opened.free(driver);
                Err(error)
            }
        }
    }

    fn map(&mut self, context: &Inner, pieces: &[(IpcHandle, u64)]) -> Result<(), Error> {
        let driver = &context.driver;
        let mut at = self.address;
        for (handle, len_bytes) in pieces {
            let handle = Retained { driver, handle: import(driver, handle)? };
            // SAFETY: the range was reserved in `new`, and nothing is mapped there yet. The driver refuses a length that
            // is not that of the handle's memory.
            unsafe { driver.cuMemMap(at, *len_bytes as usize, 0, handle.handle, 0) }?;
            self.mapped.push(*len_bytes);
            at += len_bytes;
        }
        let location = Location { kind: LOCATION_DEVICE, id: context.device };
        let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
        // SAFETY: the whole range is mapped; one description is passed, which outlives the call.
        unsafe { driver.cuMemSetAccess(self.address, self.len_bytes as usize, &access, 1) }
    }

    /// Takes apart what is there, in the current context. The device must have finished with it.
    pub(super) fn free(&mut self, driver: &Driver) -> Result<(), Error> {
        while let Some(&len_bytes) = self.mapped.last() {
            let at = self.address + self.mapped[..self.mapped.len() - 1].iter().sum::<u64>();
            // SAFETY: mapped so by `map`; no region of it is left.
            unsafe { driver.cuMemUnmap(at, len_bytes as usize) }?;
            self.mapped.pop();
        }
        if self.address != 0 {
            // SAFETY: reserved so by `new`, and nothing is mapped there any more.
            unsafe { driver.cuMemAddressFree(self.address, self.len_bytes as usize) }?;
            self.address = 0;
        }
        Ok(())
    }
}

/// A handle of another process's physical memory; the caller releases it.
fn import(driver: &Driver, handle: &IpcHandle) -> Result<u64, Error> {
    let mut physical = 0;
    match handle {
        IpcHandle::Fd(fd) => {
            let fd = fd.as_raw_fd() as usize as *mut core::ffi::c_void;
            // SAFETY: `physical` outlives the call. A descriptor goes as the value of the pointer itself, and is open.
            unsafe { driver.cuMemImportFromShareableHandle(&mut physical, fd, HANDLE_TYPE_POSIX_FD) }?;
        }
        IpcHandle::Fabric(bytes) => {
            let mut bytes = *bytes;
            let from = (&raw mut bytes).cast();
            // SAFETY: both outlive the call, and `bytes` has the length of a fabric handle.
            unsafe { driver.cuMemImportFromShareableHandle(&mut physical, from, HANDLE_TYPE_FABRIC) }?;
        }
        IpcHandle::Legacy(_) => {
            return Err(Error::Unsupported { what: "a legacy handle of a piece of memory" });
        }
    }
    Ok(physical)
}

/// Lets the context's device read and write mapped memory of another device, in the current context.
///
/// # Safety
/// - The segment is mapped, as a whole.
pub(super) unsafe fn allow(context: &Inner, segment: Segment) -> Result<(), Error> {
    let location = Location { kind: LOCATION_DEVICE, id: context.device };
    let access = AccessDescription { location, flags: ACCESS_READ_WRITE };
    // SAFETY: the caller vouches for the range; one description is passed, which outlives the call.
    unsafe { context.driver.cuMemSetAccess(segment.address, segment.len_bytes as usize, &access, 1) }
}

/// A handle of the physical memory behind an address, as long as this value lives.
pub(super) struct Retained<'a> {
    driver: &'a Driver,
    pub(super) handle: u64,
}

impl<'a> Retained<'a> {
    /// Fails for memory that was not made this way.
    pub(super) fn at(driver: &'a Driver, address: u64) -> Result<Self, Error> {
        let mut handle = 0;
        // SAFETY: `handle` outlives the call, which only looks the address up.
        unsafe { driver.cuMemRetainAllocationHandle(&mut handle, address as *mut _) }?;
        Ok(Retained { driver, handle })
    }
}

impl Drop for Retained<'_> {
    fn drop(&mut self) {
        // Gives back a share in a handle; the memory stays mapped, so nothing is freed and nothing blocks.
        // SAFETY: balances the retain in `at`.
        let _ = unsafe { self.driver.cuMemRelease(self.handle) };
    }
}

/// Exports physical memory in the form of `handle_type`, which the driver writes to `into`.
///
/// # Safety
/// - `handle` is a live handle.
/// - `into` points to what the handle type needs: an `int` for a descriptor, 64 bytes for a fabric handle.
pub(super) unsafe fn export(
    driver: &Driver,
    handle: u64,
    handle_type: c_int,
    into: *mut core::ffi::c_void,
) -> Result<(), Error> {
    // SAFETY: the caller vouches for both.
    unsafe { driver.cuMemExportToShareableHandle(into, handle, handle_type, 0) }
}
