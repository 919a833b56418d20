//! Memory that several agents share: [`Region`], the [`Memory`] that owns it, and [`Words`], the only view that this
//! crate takes of it.
//!
//! # Rules for memory shared with a device
//!
//! 1. No `&T` or `&mut T` into it, except to atomics. The other side writes whenever it likes, and a plain reference
//!    would let the compiler assume that it does not.
//! 2. Every access is atomic ([`Words`], [`copy_bytes`], [`Region::read`], [`Region::write`]): a program whose
//!    signals are wrong reads stale or mixed bytes, as the processor
//!    executes it. (Rust's memory model defines races of accesses of one size; that a byte may race with a word of 8 is
//!    what the processors that we run on promise, not the language.)
//! 3. Nothing read from it is trusted: it is checked before it becomes an index, a length or an address.

use core::fmt;
use core::sync::atomic::AtomicU8;
use std::alloc::Layout;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::Error;
use crate::sync::{AtomicU64, Ordering};

/// Where a region's bytes lie, which decides who can reach them and at what price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// Host memory that only the processor reaches.
    Host,
    /// Page-locked host memory that devices reach as well, at the same address.
    Pinned,
    /// The memory of the CUDA device with this ordinal. The processor cannot follow its addresses.
    Device(u32),
}

impl Place {
    /// Whether the processor may load from and store to these addresses.
    pub const fn is_host(self) -> bool {
        matches!(self, Place::Host | Place::Pinned)
    }
}

/// A piece of a memory that is physically one allocation, and so can be registered or exported as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The address of its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// A segment as a Linux dma-buf.
#[derive(Debug)]
pub struct DmaBuf {
    /// The descriptor; closing it does not end registrations made from it.
    pub fd: OwnedFd,
    /// Where in the buffer the segment begins.
    pub offset_bytes: u64,
}

/// A segment in a form that another process can import.
#[derive(Debug)]
#[non_exhaustive]
pub enum IpcHandle {
    /// A CUDA legacy handle (`CUipcMemHandle`).
    Legacy([u8; 64]),
    /// A descriptor, passed over a Unix socket.
    Fd(OwnedFd),
    /// A CUDA fabric handle (`CUmemFabricHandle`).
    Fabric([u8; 64]),
}

/// The kinds of [`IpcHandle`], to ask for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IpcKind {
    /// See [`IpcHandle::Legacy`].
    Legacy,
    /// See [`IpcHandle::Fd`].
    Fd,
    /// See [`IpcHandle::Fabric`].
    Fabric,
}

/// An allocation: what a transport may need of it, and how the host reads and writes it.
///
/// # Contract
/// - The bytes stay mapped at their address until the last [`Region`] of the memory is dropped.
/// - A method that the memory cannot serve answers [`Error::Unsupported`] and names itself.
/// - `read` and `write` are called with ranges inside the memory, off the trigger path, and may block.
///
/// There are no default methods on purpose: an implementation decides about each.
pub trait Memory: fmt::Debug + Send + Sync {
    /// The physical segments that cover `range`, in order of address.
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, Error>;
    /// A descriptor through which a NIC's driver reaches `segment`.
    fn dma_buf(&self, segment: Segment) -> Result<DmaBuf, Error>;
    /// A handle by which another process imports `segment`.
    fn ipc_handle(&self, segment: Segment, kind: IpcKind) -> Result<IpcHandle, Error>;
    /// Copies the bytes at `address` to `into`.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error>;
    /// Copies `from` to the bytes at `address`.
    fn write(&self, address: u64, from: &[u8]) -> Result<(), Error>;
}

/// Where a FIFO or a proxy takes its words from: pinned and device memory on a GPU machine, [`Heap`] elsewhere.
pub trait Platform: fmt::Debug {
    /// Zeroed memory that the processor and the device both reach; the processor polls it. 128-byte aligned.
    fn host_memory(&self, len_bytes: u64) -> Result<Region, Error>;
    /// Zeroed memory close to the device, which only the device touches while it runs. 128-byte aligned.
    fn device_memory(&self, len_bytes: u64) -> Result<Region, Error>;
}

/// A range of a memory: plain numbers plus a share in the owner, so that the bytes outlive every holder.
#[derive(Clone)]
pub struct Region {
    address: u64,
    len_bytes: u64,
    place: Place,
    owner: Arc<dyn Memory>,
}

impl Region {
    /// Describes memory that `owner` keeps alive.
    ///
    /// # Errors
    /// [`Error::Range`] if the range is empty, begins at address 0 or ends past the address space.
    ///
    /// # Safety
    /// - The range lies in one allocation, mapped until `owner` is dropped.
    /// - If `place` says that the processor reaches it, every byte of it may be loaded and stored.
    /// - Until then nothing accesses the range through a Rust reference to anything but atomics.
    pub unsafe fn new(
        address: u64,
        len_bytes: u64,
        place: Place,
        owner: Arc<dyn Memory>,
    ) -> Result<Self, Error> {
        if len_bytes == 0 || address == 0 || address.checked_add(len_bytes).is_none() {
            let what = if address == 0 { "region at address 0" } else { "region" };
            return Err(Error::Range {
                what,
                offset_bytes: 0,
                len_bytes,
                address,
                limit_bytes: u64::MAX - address,
            });
        }
        Ok(Region { address, len_bytes, place, owner })
    }

    /// The address of the first byte, the same for the processor (where it reaches the place) and the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes, never 0.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Where the bytes lie.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The memory that the region is part of.
    pub fn owner(&self) -> &Arc<dyn Memory> {
        &self.owner
    }

    /// The region as a [`Segment`].
    pub fn range(&self) -> Segment {
        Segment { address: self.address, len_bytes: self.len_bytes }
    }

    /// A part of the region.
    ///
    /// # Errors
    /// [`Error::Range`] if the part is empty or does not lie inside.
    pub fn slice(&self, offset_bytes: u64, len_bytes: u64) -> Result<Region, Error> {
        self.part("part of a region", offset_bytes, len_bytes)
    }

    /// [`slice`](Self::slice), with the name that its error gives the part.
    pub(crate) fn part(
        &self,
        what: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Region, Error> {
        self.check(what, offset_bytes, len_bytes)?;
        if len_bytes == 0 {
            return Err(self.out_of_range(what, offset_bytes, len_bytes));
        }
        Ok(Region { address: self.address + offset_bytes, len_bytes, ..self.clone() })
    }

    /// Whether the two regions share a byte.
    pub fn overlaps(&self, other: &Region) -> bool {
        let apart = |a: &Region, b: &Region| a.address + a.len_bytes <= b.address;
        !apart(self, other) && !apart(other, self)
    }

    /// Copies bytes out of the region.
    ///
    /// # Errors
    /// [`Error::Range`], or the memory's own.
    pub fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check("read from a region", offset_bytes, into.len() as u64)?;
        self.owner.read(self.address + offset_bytes, into)
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// [`Error::Range`], or the memory's own.
    pub fn write(&self, offset_bytes: u64, from: &[u8]) -> Result<(), Error> {
        self.check("write to a region", offset_bytes, from.len() as u64)?;
        self.owner.write(self.address + offset_bytes, from)
    }

    fn check(&self, what: &'static str, offset_bytes: u64, len_bytes: u64) -> Result<(), Error> {
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Ok(()),
            _ => Err(self.out_of_range(what, offset_bytes, len_bytes)),
        }
    }

    fn out_of_range(&self, what: &'static str, offset_bytes: u64, len_bytes: u64) -> Error {
        Error::Range { what, offset_bytes, len_bytes, address: self.address, limit_bytes: self.len_bytes }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x} + {} bytes, {:?})", self.address, self.len_bytes, self.place)
    }
}

/// A region as 64-bit words, each read and written atomically.
#[cfg(not(loom))]
#[derive(Clone, Debug)]
pub struct Words {
    region: Region,
}

#[cfg(not(loom))]
impl Words {
    /// Views a region as words.
    ///
    /// # Errors
    /// [`Error::NotHostMemory`] if the processor cannot reach it, [`Error::Alignment`] if its address is not a
    /// multiple of 8. A trailing part of a word is left out.
    pub fn new(region: Region) -> Result<Self, Error> {
        if !region.place.is_host() {
            return Err(Error::NotHostMemory { address: region.address, place: region.place });
        }
        if region.address % 8 != 0 {
            return Err(Error::Alignment {
                what: "memory as words",
                address: region.address,
                align_bytes: 8,
            });
        }
        Ok(Words { region })
    }

    pub(crate) fn address(&self) -> u64 {
        self.region.address
    }

    /// The region that the words lie in.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

#[cfg(not(loom))]
impl core::ops::Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        let len = (self.region.len_bytes / 8) as usize;
        let base = self.region.address as *const AtomicU64;
        // SAFETY: the range is mapped, loadable and storable while `self.region` holds its owner, and accessed only
        // atomically (contract of `Region::new`); that the processor reaches it and that it is aligned was checked
        // in `Words::new`. An atomic may change under a shared reference, whoever changes it.
        unsafe { core::slice::from_raw_parts(base, len) }
    }
}

/// Under loom: words of the model instead of memory.
#[cfg(loom)]
#[derive(Clone, Debug)]
pub struct Words {
    words: Arc<[AtomicU64]>,
}

#[cfg(loom)]
impl Words {
    /// Zeroed words of the model.
    pub fn zeroed(len_bytes: u64) -> Self {
        Words { words: (0..len_bytes / 8).map(|_| AtomicU64::new(0)).collect() }
    }

    /// A model's words have no address.
    pub(crate) fn address(&self) -> u64 {
        0
    }
}

#[cfg(loom)]
impl core::ops::Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        &self.words
    }
}

/// Copies `len_bytes` bytes from `source` to `destination` with relaxed atomic accesses, eight bytes at a time where
/// both are aligned alike.
///
/// A copy that races with another access moves stale or mixed bytes; that is the program's mistake. Overlapping ranges are copied from low to high addresses.
///
/// # Safety
/// - The processor may load `len_bytes` bytes from `source` and store as many to `destination`.
/// - Nobody accesses either range through a Rust reference to anything but atomics.
pub unsafe fn copy_bytes(source: *mut u8, destination: *mut u8, len_bytes: usize) {
    let aligned_alike = (source as usize ^ destination as usize) % 8 == 0;
    for piece in pieces(source as usize, len_bytes, aligned_alike) {
        match piece {
            Piece::Byte(at) => {
                // SAFETY: `at` lies below `len_bytes`, so the caller vouches for the byte.
                let value = unsafe { load_byte(source.wrapping_add(at)) };
                // SAFETY: as above.
                unsafe { store_byte(destination.wrapping_add(at), value) };
            }
            Piece::Word(at) => {
                // SAFETY: `at + 8` is at most `len_bytes`, so the caller vouches for the word; `pieces` aligned it.
                let value = unsafe { load_word(source.wrapping_add(at)) };
                // SAFETY: as above; the destination is aligned like the source.
                unsafe { store_word(destination.wrapping_add(at), value) };
            }
        }
    }
}

/// A step of a copy: one byte, or eight of them at an aligned address.
enum Piece {
    Byte(usize),
    Word(usize),
}

/// The steps that cover `len_bytes` bytes from `address` on; words only if `words` allows them.
fn pieces(address: usize, len_bytes: usize, words: bool) -> impl Iterator<Item = Piece> {
    let head = if words { (address.wrapping_neg() % 8).min(len_bytes) } else { len_bytes };
    let tail = head + (len_bytes - head) / 8 * 8;
    (0..head)
        .map(Piece::Byte)
        .chain((head..tail).step_by(8).map(Piece::Word))
        .chain((tail..len_bytes).map(Piece::Byte))
}

/// Copies shared memory from `base` on to `into`, with relaxed atomic loads.
///
/// # Safety
/// - The processor may load as many bytes, and nobody accesses them through a Rust reference to anything but atomics.
pub(crate) unsafe fn load_bytes(base: *mut u8, into: &mut [u8]) {
    for piece in pieces(base as usize, into.len(), true) {
        match piece {
            // SAFETY: `at` lies below the length, so the caller vouches for the byte.
            Piece::Byte(at) => into[at] = unsafe { load_byte(base.wrapping_add(at)) },
            Piece::Word(at) => {
                // SAFETY: as above for all eight bytes; `pieces` aligned the word.
                let word = unsafe { load_word(base.wrapping_add(at)) };
                into[at..at + 8].copy_from_slice(&word.to_ne_bytes());
            }
        }
    }
}

/// Copies `from` to shared memory from `base` on, with relaxed atomic stores.
///
/// # Safety
/// - The processor may store as many bytes, and nobody accesses them through a Rust reference to anything but atomics.
pub(crate) unsafe fn store_bytes(base: *mut u8, from: &[u8]) {
    for piece in pieces(base as usize, from.len(), true) {
        match piece {
            // SAFETY: `at` lies below the length, so the caller vouches for the byte.
            Piece::Byte(at) => unsafe { store_byte(base.wrapping_add(at), from[at]) },
            Piece::Word(at) => {
                let word = core::array::from_fn(|i| from[at + i]);
                // SAFETY: as above for all eight bytes; `pieces` aligned the word.
                unsafe { store_word(base.wrapping_add(at), u64::from_ne_bytes(word)) };
            }
        }
    }
}

/// # Safety
/// - The byte may be loaded, and is accessed atomically only.
unsafe fn load_byte(from: *mut u8) -> u8 {
    // SAFETY: as above; a byte is always aligned. A race with a word is what rule 2 of the module says.
    unsafe { AtomicU8::from_ptr(from) }.load(Ordering::Relaxed)
}

/// # Safety
/// - The byte may be stored, and is accessed atomically only.
unsafe fn store_byte(to: *mut u8, value: u8) {
    // SAFETY: as above; a byte is always aligned. A race with a word is what rule 2 of the module says.
    unsafe { AtomicU8::from_ptr(to) }.store(value, Ordering::Relaxed);
}

/// # Safety
/// - The word is aligned, may be loaded, and is accessed atomically only.
unsafe fn load_word(from: *mut u8) -> u64 {
    // SAFETY: as above. A race with a byte is what rule 2 of the module says.
    unsafe { core::sync::atomic::AtomicU64::from_ptr(from.cast()) }.load(Ordering::Relaxed)
}

/// # Safety
/// - The word is aligned, may be stored, and is accessed atomically only.
unsafe fn store_word(to: *mut u8, value: u64) {
    // SAFETY: as above. A race with a byte is what rule 2 of the module says.
    unsafe { core::sync::atomic::AtomicU64::from_ptr(to.cast()) }.store(value, Ordering::Relaxed);
}

/// Ordinary memory of this process: the platform of machines without a GPU, of tests and of the software producer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

impl Heap {
    /// Zeroed memory, 4,096-byte aligned.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], or [`Error::Range`] for a length of 0 or beyond the address space.
    pub fn allocate(&self, len_bytes: u64) -> Result<Region, Error> {
        let range = || Error::Range {
            what: "heap allocation",
            offset_bytes: 0,
            len_bytes,
            address: 0,
            limit_bytes: isize::MAX as u64,
        };
        let size = usize::try_from(len_bytes).map_err(|_| range())?;
        let layout = Layout::from_size_align(size, 4096).map_err(|_| range())?;
        if size == 0 {
            return Err(range());
        }
        // SAFETY: the size is not zero, checked above.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        if base.is_null() {
            return Err(Error::OutOfMemory { len_bytes });
        }
        let owner = Arc::new(HeapMemory { base: base as u64, layout });
        // SAFETY: the allocation was made just above, lives until `owner` frees it, and only its address leaves here.
        unsafe { Region::new(base as u64, len_bytes, Place::Host, owner) }
    }
}

impl Platform for Heap {
    fn host_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        self.allocate(len_bytes)
    }

    fn device_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        self.allocate(len_bytes)
    }
}

#[derive(Debug)]
struct HeapMemory {
    base: u64,
    layout: Layout,
}

impl Memory for HeapMemory {
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, Error> {
        self.checked(range.address, range.len_bytes as usize)?;
        Ok(vec![range])
    }

    fn dma_buf(&self, _: Segment) -> Result<DmaBuf, Error> {
        Err(Error::Unsupported { what: "heap memory as dma-buf" })
    }

    fn ipc_handle(&self, _: Segment, _: IpcKind) -> Result<IpcHandle, Error> {
        Err(Error::Unsupported { what: "heap memory as IPC handle" })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        let base = self.checked(address, into.len())?;
        // SAFETY: `checked` found the whole range inside the allocation, whose regions are accessed atomically only
        // (contract of `Region::new`).
        unsafe { load_bytes(base, into) };
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Error> {
        let base = self.checked(address, from.len())?;
        // SAFETY: as in `read`.
        unsafe { store_bytes(base, from) };
        Ok(())
    }
}

impl HeapMemory {
    /// The first byte of a range, if all of it lies in this allocation.
    fn checked(&self, address: u64, len_bytes: usize) -> Result<*mut u8, Error> {
        let size = self.layout.size() as u64;
        let inside = address
            .checked_sub(self.base)
            .and_then(|offset| offset.checked_add(len_bytes as u64))
            .is_some_and(|end| end <= size);
        if !inside {
            return Err(Error::Range {
                what: "part of a heap allocation",
                offset_bytes: address.wrapping_sub(self.base),
                len_bytes: len_bytes as u64,
                address: self.base,
                limit_bytes: size,
            });
        }
        Ok(address as *mut u8)
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `Heap::allocate`, and this is the last owner.
        unsafe { std::alloc::dealloc(self.base as *mut u8, self.layout) };
    }
}
