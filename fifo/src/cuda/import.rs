//! Memory that the caller has allocated: what it is, and how it becomes a region.

use core::any::Any;
use core::ffi::c_int;
use std::sync::Arc;

use crate::cuda::Kind;
use crate::cuda::context::Inner;
use crate::cuda::memory::Allocation;
use crate::cuda::quarantine::Resource;
use crate::cuda::table::{INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, pointer};
use crate::cuda::vmm::Retained;
use crate::memory::Segment;
use crate::{Error, Region};

/// See [`Context::import_raw`](crate::cuda::Context::import_raw).
///
/// # Safety
/// - The range stays allocated and mapped as it is until `keep` is dropped.
/// - Until then nothing accesses it through a Rust reference to anything but atomics.
pub(super) unsafe fn import(
    context: &Arc<Inner>,
    address: u64,
    len_bytes: u64,
    keep: Arc<dyn Any + Send + Sync>,
) -> Result<Region, Error> {
    if len_bytes == 0 || address.checked_add(len_bytes).is_none() {
        return Err(Error::Range {
            what: "CUDA memory to import",
            offset_bytes: 0,
            len_bytes,
            address,
            limit_bytes: u64::MAX,
        });
    }
    let kind = kind(context, address)?;
    if kind == Kind::Pinned {
        self::kind(context, address + len_bytes - 1)?;
    } else {
        let _current = context.enter()?;
        segments(context, Segment { address, len_bytes })?;
    }
    let resource = Resource::Imported { keep: Some(keep), len_bytes };
    let allocation = Allocation::new(context, kind, address, len_bytes, resource);
    let place = allocation.place();
    // SAFETY: the caller keeps the range mapped while `keep` lives, which the allocation holds. That the processor
    // reaches page-locked memory was asked of the driver.
    unsafe { Region::new(address, len_bytes, place, Arc::new(allocation)) }
}

/// See [`Context::kind`](crate::cuda::Context::kind).
pub(super) fn kind(context: &Inner, address: u64) -> Result<Kind, Error> {
    let _current = context.enter()?;
    let ask = |attribute| ask(context, attribute, address);
    let ask_or_none = |attribute| Ok::<_, Error>(if_known(ask(attribute))?.unwrap_or(0));
    let memory_type = ask(pointer::MEMORY_TYPE)?;
    if ask_or_none(pointer::IS_MANAGED)? != 0 {
        return Err(Error::Unsupported { what: "managed memory" });
    }
    match memory_type {
        pointer::TYPE_HOST => {
            if ask(pointer::DEVICE_POINTER)? != address {
                return Err(Error::Unsupported {
                    what: "page-locked memory with another address on the device",
                });
            }
            return Ok(Kind::Pinned);
        }
        pointer::TYPE_DEVICE => {}
        _ => return Err(Error::Unsupported { what: "memory that is neither the device's nor the host's" }),
    }
    if ask(pointer::DEVICE_ORDINAL)? != u64::from(context.ordinal) {
        return Err(Error::Unsupported { what: "memory of another device than the context's" });
    }
    if ask_or_none(pointer::IS_LEGACY_IPC_CAPABLE)? != 0 {
        return Ok(Kind::Legacy);
    }
    if ask_or_none(pointer::POOL_HANDLE)? != 0 {
        return Ok(Kind::Pool);
    }
    let retained = if_known(Retained::at(&context.driver, address))?;
    Ok(if retained.is_some() { Kind::Vmm } else { Kind::Legacy })
}

/// `None` where the driver answers that it does not know: an older one to a newer question, or any to a question that
/// makes no sense for this memory.
fn if_known<T>(answer: Result<T, Error>) -> Result<Option<T>, Error> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(Error::Driver { status: INVALID_VALUE | NOT_FOUND | NOT_SUPPORTED, .. }) => Ok(None),
        Err(Error::Unsupported { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// In which ways memory of [`Kind::Vmm`] can be exported, as a set of bits. The context is current.
pub(super) fn handle_types(context: &Inner, address: u64) -> Result<u64, Error> {
    Ok(if_known(ask(context, pointer::ALLOWED_HANDLE_TYPES, address))?.unwrap_or(0))
}

/// The physical segments that cover a range of device memory, whole, in order. The context is current.
pub(super) fn segments(context: &Inner, range: Segment) -> Result<Vec<Segment>, Error> {
    let end = range.address + range.len_bytes;
    let mut segments = Vec::new();
    let mut at = range.address;
    while at < end {
        let (mut address, mut len) = (0, 0);
        // SAFETY: both results outlive the call, which only looks the address up.
        unsafe { context.driver.cuMemGetAddressRange_v2(&mut address, &mut len, at) }?;
        let segment_end = address.saturating_add(len as u64);
        if address > at || segment_end <= at {
            return Err(Error::Range {
                what: "segment of CUDA memory",
                offset_bytes: at - range.address,
                len_bytes: len as u64,
                address: range.address,
                limit_bytes: range.len_bytes,
            });
        }
        segments.push(Segment { address, len_bytes: len as u64 });
        at = segment_end;
    }
    Ok(segments)
}

/// An attribute of an address. Some are written as one byte, some as four, some as eight.
fn ask(context: &Inner, attribute: c_int, address: u64) -> Result<u64, Error> {
    let mut value = [0u8; 8];
    // SAFETY: no attribute that is asked for here is longer than eight bytes.
    unsafe { context.driver.cuPointerGetAttribute((&raw mut value).cast(), attribute, address) }?;
    Ok(u64::from_le_bytes(value))
}
