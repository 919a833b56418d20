//! [`Chain`]: requests that are written down one by one and handed to the device together, with one doorbell.

use core::ptr::{NonNull, null_mut};

use crate::pieces::Piece;
use crate::sys;

/// The post function of a queue pair, from the table of its context.
pub(crate) type PostSend =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_send_wr, *mut *mut sys::ibv_send_wr) -> i32;

/// The length of a signal.
const WORD_BYTES: u32 = 8;

/// A request with all that it refers to.
#[repr(C)]
struct Slot {
    /// First, so that a slot's address is its request's.
    request: sys::ibv_send_wr,
    piece: sys::ibv_sge,
    /// The value of an inline signal. The device copies it while it posts.
    value: u64,
}

/// The slots are linked once, in order; a post cuts the link behind its last request for as long as it takes.
pub(crate) struct Chain {
    /// The slots refer to each other, so they are reached through these pointers alone: the first, the next to be
    /// written, and one past the last.
    slots: NonNull<Slot>,
    next: NonNull<Slot>,
    end: NonNull<Slot>,
}

// SAFETY: the slots belong to the chain, and the device reads them within `post` only.
unsafe impl Send for Chain {}

impl core::fmt::Debug for Chain {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Chain({} of {} requests)", self.len(), self.capacity())
    }
}

impl Chain {
    /// For so many requests, at least one.
    pub(crate) fn new(capacity: usize) -> Self {
        let slot = || Slot {
            request: sys::ibv_send_wr { num_sge: 1, opcode: sys::IBV_WR_RDMA_WRITE, ..Default::default() },
            piece: sys::ibv_sge::default(),
            value: 0,
        };
        let slots: Box<[Slot]> = (0..capacity.max(1)).map(|_| slot()).collect();
        let capacity = slots.len();
        // A pointer to a slice is one to its first slot.
        let slots: NonNull<Slot> = NonNull::from(Box::leak(slots)).cast();
        // SAFETY: one past the last of so many slots.
        let end = unsafe { slots.add(capacity) };
        let mut at = slots;
        while at != end {
            // SAFETY: `at` is before the end, so what follows it is a slot or the end.
            let next = unsafe { at.add(1) };
            let slot = at.as_ptr();
            // SAFETY: a slot of the chain; only its address is taken.
            let piece = unsafe { &raw mut (*slot).piece };
            // SAFETY: a slot of the chain, to which nothing else refers.
            let request = unsafe { &mut (*slot).request };
            request.sg_list = piece;
            request.next = if next == end { null_mut() } else { next.as_ptr().cast() };
            at = next;
        }
        Chain { slots, next: slots, end }
    }

    fn len(&self) -> usize {
        (self.next.as_ptr() as usize - self.slots.as_ptr() as usize) / size_of::<Slot>()
    }

    fn capacity(&self) -> usize {
        (self.end.as_ptr() as usize - self.slots.as_ptr() as usize) / size_of::<Slot>()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.slots
    }

    /// Adds the write of a part of a put.
    #[inline]
    pub(crate) fn write(&mut self, id: u64, piece: &Piece) {
        let slot = self.add(id, piece.destination_address, piece.remote_key);
        slot.request.send_flags = 0;
        slot.piece =
            sys::ibv_sge { addr: piece.source_address, length: piece.len_bytes, lkey: piece.local_key };
    }

    /// Adds the write of a signal word's new value.
    #[inline]
    pub(crate) fn signal(&mut self, id: u64, value: u64, address: u64, remote_key: u32) {
        let slot = self.add(id, address, remote_key);
        slot.request.send_flags = sys::IBV_SEND_INLINE.0;
        slot.value = value;
        slot.piece = sys::ibv_sge { addr: &raw const slot.value as u64, length: WORD_BYTES, lkey: 0 };
    }

    /// The next slot. There is one: the ledger lets no more requests be built than the queue holds, and the chain is as
    /// long as the queue.
    #[inline]
    fn add(&mut self, id: u64, address: u64, remote_key: u32) -> &mut Slot {
        assert!(self.next != self.end, "the chain is as long as its queue");
        let mut next = self.next;
        // SAFETY: not the end, so what follows is a slot or the end.
        self.next = unsafe { next.add(1) };
        // SAFETY: a slot of the chain, which is borrowed as a whole.
        let slot = unsafe { next.as_mut() };
        slot.request.wr_id = id;
        slot.request.wr.rdma =
            sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: address, rkey: remote_key };
        slot
    }

    /// Makes the last request ask for a completion.
    #[inline]
    pub(crate) fn ask_for_last(&mut self) {
        if let Some(mut last) = self.last() {
            // SAFETY: a slot of the chain, which is borrowed as a whole.
            unsafe { last.as_mut() }.request.send_flags |= sys::IBV_SEND_SIGNALED.0;
        }
    }

    /// The last slot that was written.
    #[inline]
    fn last(&self) -> Option<NonNull<Slot>> {
        // SAFETY: not the first, so there is a slot before.
        (!self.is_empty()).then(|| unsafe { self.next.sub(1) })
    }

    /// Hands the chain to the device and empties it.
    ///
    /// # Errors
    /// The status of the post. The device may have taken the first requests of the chain.
    ///
    /// # Safety
    /// - `post` is the function of the context of `pair`, which is not destroyed.
    /// - The source of every request may be read until the request is complete or the queue pair is destroyed.
    #[inline]
    pub(crate) unsafe fn post(&mut self, post: PostSend, pair: *mut sys::ibv_qp) -> Result<(), i32> {
        let Some(last) = self.last() else { return Ok(()) };
        self.next = self.slots;
        let last = last.as_ptr();
        // SAFETY: a slot of the chain, to which nothing else refers.
        let next = unsafe { core::mem::replace(&mut (*last).request.next, null_mut()) };
        let mut bad = null_mut();
        // SAFETY: the caller vouches for function, queue pair and sources; the chain is linked and ends.
        let status = unsafe { post(pair, self.slots.as_ptr().cast(), &mut bad) };
        // SAFETY: as above; the device is done with the requests themselves.
        unsafe { (*last).request.next = next };
        if status == 0 { Ok(()) } else { Err(status) }
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        let slots = core::ptr::slice_from_raw_parts_mut(self.slots.as_ptr(), self.capacity());
        // SAFETY: leaked in `new`, with this length.
        drop(unsafe { Box::from_raw(slots) });
    }
}
