//! Memories that the transport knows: registered here, or imported from a peer.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use portway_fifo::{Place, Region, memory::Segment};
use portway_proxy::TransportError;
use portway_proxy::transport::MemoryId;
use rustix::io::Errno;

use crate::config::Gpu;
use crate::device::Registration;
use crate::error::Error;
use crate::keeper::Keeper;
use crate::message::{self, MAX_SPANS, Span};
use crate::sys;

/// Ranges of a dma-buf are registered from a multiple of this to another.
const PAGE_BYTES: u64 = 4096;

/// Whether writes to a memory may be placed in another order than they were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Data. A later write without relaxed ordering, the signal's, still cannot pass it.
    Relaxed,
    /// Signal words.
    Strict,
}

/// A memory of this side.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) region: Region,
    pub(crate) order: Order,
    /// Under local keys, for requests.
    pub(crate) spans: Vec<Span>,
    /// One for each span.
    registrations: Vec<Registration>,
    /// Bindings of ports that are not quiesced.
    bound: AtomicUsize,
}

/// A memory of a peer, imported.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) memory: message::Memory,
    /// Bindings of ports that are not quiesced.
    bound: AtomicUsize,
}

/// A share in a memory that a port has bound.
#[derive(Debug)]
pub(crate) enum Bound {
    Local(Arc<Local>),
    Remote(Arc<Remote>),
}

impl Drop for Bound {
    fn drop(&mut self) {
        let bound = match self {
            Bound::Local(memory) => &memory.bound,
            Bound::Remote(memory) => &memory.bound,
        };
        bound.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Clone, Debug)]
enum Known {
    Local(Arc<Local>),
    Remote(Arc<Remote>),
}

/// All memories of one transport, by their index.
#[derive(Debug)]
pub(crate) struct Memories {
    pub(crate) transport: u64,
    table: Mutex<Table>,
}

/// By their index, which is used once.
#[derive(Debug, Default)]
struct Table {
    known: BTreeMap<u32, Known>,
    next: u32,
}

impl Memories {
    pub(crate) fn new(transport: u64) -> Self {
        Memories { transport, table: Mutex::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, known: Known) -> MemoryId {
        let mut table = self.table();
        let index = table.next;
        table.next += 1;
        table.known.insert(index, known);
        MemoryId { transport: self.transport, index }
    }

    pub(crate) fn add_local(&self, memory: Local) -> MemoryId {
        self.add(Known::Local(Arc::new(memory)))
    }

    pub(crate) fn add_remote(&self, memory: message::Memory) -> MemoryId {
        self.add(Known::Remote(Arc::new(Remote { memory, bound: AtomicUsize::new(0) })))
    }

    /// Under the table's lock, so that a binding is seen by a release, or comes after it.
    fn find<'a>(
        &self,
        table: &'a Table,
        what: &'static str,
        id: MemoryId,
    ) -> Result<&'a Known, TransportError> {
        let known = table.known.get(&id.index).filter(|_| id.transport == self.transport);
        known.ok_or(TransportError::Unknown { what, index: id.index })
    }

    pub(crate) fn local(&self, what: &'static str, id: MemoryId) -> Result<Arc<Local>, TransportError> {
        match self.find(&self.table(), what, id)? {
            Known::Local(memory) => Ok(memory.clone()),
            Known::Remote(_) => Err(TransportError::Unknown { what, index: id.index }),
        }
    }

    /// A memory of this side, which from now on cannot be released before the port is quiesced.
    pub(crate) fn bind_local(
        &self,
        what: &'static str,
        id: MemoryId,
    ) -> Result<(Bound, Arc<Local>), TransportError> {
        match self.find(&self.table(), what, id)? {
            Known::Local(memory) => {
                memory.bound.fetch_add(1, Ordering::AcqRel);
                Ok((Bound::Local(memory.clone()), memory.clone()))
            }
            Known::Remote(_) => Err(TransportError::Unknown { what, index: id.index }),
        }
    }

    /// A memory of the peer's, which from now on cannot be forgotten before the port is quiesced.
    pub(crate) fn bind_remote(
        &self,
        what: &'static str,
        id: MemoryId,
    ) -> Result<(Bound, Arc<Remote>), TransportError> {
        match self.find(&self.table(), what, id)? {
            Known::Remote(memory) => {
                memory.bound.fetch_add(1, Ordering::AcqRel);
                Ok((Bound::Remote(memory.clone()), memory.clone()))
            }
            Known::Local(_) => Err(TransportError::Unknown { what, index: id.index }),
        }
    }

    /// Ends an import that no port has bound.
    pub(crate) fn forget(&self, id: MemoryId) -> Result<(), TransportError> {
        let (mut table, what) = (self.table(), "imported memory");
        let Known::Remote(remote) = self.find(&table, what, id)? else {
            return Err(TransportError::Unknown { what, index: id.index });
        };
        let ports = remote.bound.load(Ordering::Acquire);
        if ports != 0 {
            return Err(TransportError::Busy { address: remote.memory.spans[0].address, ports });
        }
        table.known.remove(&id.index);
        Ok(())
    }

    /// Ends a registration that no port has bound.
    pub(crate) fn release(&self, id: MemoryId) -> Result<(), TransportError> {
        let memory = self.local("memory", id)?;
        {
            let mut table = self.table();
            let ports = memory.bound.load(Ordering::Acquire);
            if ports != 0 {
                return Err(TransportError::Busy { address: memory.region.address(), ports });
            }
            table.known.remove(&id.index);
        }
        // An export that looked the memory up before lets go of it in a moment, and then ends the registration.
        match Arc::into_inner(memory) {
            Some(memory) => {
                memory.registrations.into_iter().try_for_each(Registration::end).map_err(Into::into)
            }
            None => Ok(()),
        }
    }
}

/// The number by which peers tell places apart.
pub(crate) fn place_number(place: Place) -> u32 {
    match place {
        Place::Device(ordinal) => ordinal.saturating_add(1),
        _ => 0,
    }
}

impl Local {
    /// Registers a region with the device.
    pub(crate) fn register(
        keeper: &Arc<Keeper>,
        gpu: Option<&Gpu>,
        region: &Region,
        order: Order,
    ) -> Result<Self, TransportError> {
        match (region.place(), gpu) {
            (Place::Device(ordinal), Some(gpu)) if gpu.ordinal == ordinal => {}
            (Place::Device(_), _) => {
                let what = "memory of a GPU that Config::gpu does not name";
                return Err(portway_fifo::Error::Unsupported { what }.into());
            }
            _ => return Local::host(keeper, region, order),
        }
        let parts = parts(&region.owner().segments(region.range())?, region)?;
        let mut memory = Local {
            region: region.clone(),
            order,
            spans: Vec::new(),
            registrations: Vec::new(),
            bound: AtomicUsize::new(0),
        };
        for part in parts {
            let registration = register_segment(keeper, region, part, order)?;
            memory.add(part, registration);
        }
        Ok(memory)
    }

    fn host(keeper: &Arc<Keeper>, region: &Region, order: Order) -> Result<Self, TransportError> {
        let registration = register_pages(keeper, region, region.range(), order)?;
        let mut memory = Local {
            region: region.clone(),
            order,
            spans: Vec::new(),
            registrations: Vec::new(),
            bound: AtomicUsize::new(0),
        };
        memory.add(region.range(), registration);
        Ok(memory)
    }

    fn add(&mut self, segment: Segment, registration: Registration) {
        let offset_bytes = segment.address - self.region.address();
        let (key, _) = registration.keys();
        self.spans.push(Span { offset_bytes, len_bytes: segment.len_bytes, address: segment.address, key });
        self.registrations.push(registration);
    }

    /// The spans under their remote keys, for peers.
    pub(crate) fn remote_spans(&self) -> Vec<Span> {
        let keyed = self.spans.iter().zip(&self.registrations);
        keyed.map(|(span, registration)| Span { key: registration.keys().1, ..*span }).collect()
    }
}

/// The parts of a memory's segments that lie in the region: a memory gives whole segments, of which the first may begin
/// before it and the last end after it. Refused if they leave a gap: what is missing would be lost silently.
fn parts(segments: &[Segment], region: &Region) -> Result<Vec<Segment>, TransportError> {
    let end = region.address() + region.len_bytes();
    let mut at = region.address();
    let mut parts = Vec::new();
    for segment in segments {
        let part_end = segment.address.saturating_add(segment.len_bytes).min(end);
        if segment.address > at || part_end <= at {
            break;
        }
        parts.push(Segment { address: at, len_bytes: part_end - at });
        at = part_end;
    }
    if at != end || parts.len() > MAX_SPANS {
        return Err(TransportError::Malformed {
            what: "segments of a GPU memory",
            expected: format!("{} bytes in a row from {:#x}", region.len_bytes(), region.address()),
            seen: format!("{} segments that cover it up to {at:#x}", segments.len()),
        });
    }
    Ok(parts)
}

fn access(order: Order) -> u32 {
    let relaxed = if order == Order::Relaxed { sys::IBV_ACCESS_RELAXED_ORDERING.0 } else { 0 };
    sys::IBV_ACCESS_LOCAL_WRITE.0 | sys::IBV_ACCESS_REMOTE_WRITE.0 | relaxed
}

/// Registers memory by its address: host memory, or a GPU's through a peer memory module.
fn register_pages(
    keeper: &Arc<Keeper>,
    region: &Region,
    range: Segment,
    order: Order,
) -> Result<Registration, Error> {
    let device = keeper.device();
    let table = device.verbs().table();
    let (address, len) = (range.address as *mut core::ffi::c_void, range.len_bytes as usize);
    let registration = match table.reg_mr_iova2 {
        // Knows the optional access flags, and leaves out those that the kernel does not know.
        // SAFETY: the range is mapped while its region's owner lives, of which the registration holds a share.
        Some(register) => unsafe { register(device.domain(), address, len, range.address, access(order)) },
        // SAFETY: as above.
        None => unsafe { (table.reg_mr)(device.domain(), address, len, access(Order::Strict) as i32) },
    };
    // SAFETY: what the call above returned.
    unsafe { Registration::take("ibv_reg_mr", keeper, region, registration) }
}

/// Registers a segment of a GPU's memory: as dma-buf, or through a peer memory module.
fn register_segment(
    keeper: &Arc<Keeper>,
    region: &Region,
    segment: Segment,
    order: Order,
) -> Result<Registration, TransportError> {
    let why_not = match register_dma_buf(keeper, region, segment, order)? {
        Ok(registration) => return Ok(registration),
        Err(why_not) => why_not,
    };
    register_pages(keeper, region, segment, order).map_err(|error| {
        let Error::Device { errno, .. } = error else { return error.into() };
        let why = format!("{why_not}; as peer memory: errno {errno} (is nvidia-peermem loaded?)");
        let source = Error::Unfit { device: keeper.device().name.clone(), why };
        TransportError::Device {
            operation: "registering GPU memory",
            status: errno,
            vendor: 0,
            source: Some(Arc::new(source)),
        }
    })
}

/// The registration, or why this way is not open. An error only if it is open and failed.
fn register_dma_buf(
    keeper: &Arc<Keeper>,
    region: &Region,
    segment: Segment,
    order: Order,
) -> Result<Result<Registration, String>, TransportError> {
    let device = keeper.device();
    let Some(register) = device.verbs().table().reg_dmabuf_mr else {
        return Ok(Err("as dma-buf: the verbs library is too old".into()));
    };
    let buffer = match region.owner().dma_buf(segment) {
        Ok(buffer) => buffer,
        Err(error @ portway_fifo::Error::Unsupported { .. }) => {
            return Ok(Err(format!("as dma-buf: {error}")));
        }
        Err(error) => return Err(error.into()),
    };
    // The pages that the segment touches: an allocation may end within its last, and memory is asked for no more than it
    // has.
    let begin = segment.address & !(PAGE_BYTES - 1);
    let end = (segment.address + segment.len_bytes).next_multiple_of(PAGE_BYTES);
    let pages = Segment { address: begin, len_bytes: end - begin };
    let Some(offset_bytes) = buffer.offset_bytes.checked_sub(segment.address - begin) else {
        return Err(TransportError::Malformed {
            what: "dma-buf of a GPU memory",
            expected: format!("the page at {begin:#x} whole"),
            seen: format!("the segment at {:#x} at offset {}", segment.address, buffer.offset_bytes),
        });
    };
    // The library, the driver, and a kernel that does not know the call (before 5.12), in this order.
    let unsupported = [Errno::NOSYS, Errno::OPNOTSUPP, Errno::PROTONOSUPPORT].map(Errno::raw_os_error);
    let mut orders = vec![order];
    if order == Order::Relaxed {
        // Where relaxed ordering is refused for a dma-buf: without it.
        orders.push(Order::Strict);
    }
    let mut last = 0;
    for order in orders {
        let len = pages.len_bytes as usize;
        // SAFETY: the descriptor is open, and at this offset of its buffer the pages begin that the segment touches; the
        // kernel refuses a range past the buffer's end.
        let registration = unsafe {
            register(
                device.domain(),
                offset_bytes,
                len,
                pages.address,
                buffer.fd.as_raw_fd(),
                access(order) as i32,
            )
        };
        // SAFETY: what the call above returned.
        match unsafe { Registration::take("ibv_reg_dmabuf_mr", keeper, region, registration) } {
            Ok(registration) => return Ok(Ok(registration)),
            Err(Error::Device { errno, .. }) => last = errno,
            Err(error) => return Err(error.into()),
        }
    }
    if unsupported.contains(&last) {
        return Ok(Err(format!("as dma-buf: the device or its driver cannot, errno {last}")));
    }
    Err(Error::Device { operation: "ibv_reg_dmabuf_mr", errno: last }.into())
}
