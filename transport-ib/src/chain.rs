//! [`Chain`]: requests that are written down one by one and handed to the device together, with one doorbell.

use crate::pieces::Piece;
use crate::sys;

/// The post function of a queue pair, from the table of its context.
pub(crate) type PostSend =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_send_wr, *mut *mut sys::ibv_send_wr) -> i32;

/// The length of a signal.
const WORD_BYTES: u32 = 8;

/// All memory is allocated once; the requests are linked when they are posted.
pub(crate) struct Chain {
    requests: Box<[sys::ibv_send_wr]>,
    pieces: Box<[sys::ibv_sge]>,
    /// The values of inline signals. The device copies them while it posts.
    values: Box<[u64]>,
    len: usize,
}

// SAFETY: the pointers in the requests are written and used within `post`, and point into the chain itself.
unsafe impl Send for Chain {}

impl core::fmt::Debug for Chain {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Chain({} of {} requests)", self.len, self.requests.len())
    }
}

impl Chain {
    pub(crate) fn new(capacity: usize) -> Self {
        let request = sys::ibv_send_wr { num_sge: 1, opcode: sys::IBV_WR_RDMA_WRITE, ..Default::default() };
        Chain {
            requests: vec![request; capacity].into_boxed_slice(),
            pieces: vec![sys::ibv_sge::default(); capacity].into_boxed_slice(),
            values: vec![0; capacity].into_boxed_slice(),
            len: 0,
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds the write of a part of a put.
    #[inline]
    pub(crate) fn write(&mut self, id: u64, piece: &Piece, asks: bool) {
        let flags = if asks { sys::IBV_SEND_SIGNALED.0 } else { 0 };
        let index = self.add(id, piece.destination_address, piece.remote_key, flags);
        self.pieces[index] =
            sys::ibv_sge { addr: piece.source_address, length: piece.len_bytes, lkey: piece.local_key };
    }

    /// Adds the write of a signal word's new value.
    #[inline]
    pub(crate) fn signal(&mut self, id: u64, value: u64, address: u64, remote_key: u32, asks: bool) {
        let flags = sys::IBV_SEND_INLINE.0 | if asks { sys::IBV_SEND_SIGNALED.0 } else { 0 };
        let index = self.add(id, address, remote_key, flags);
        self.values[index] = value;
    }

    #[inline]
    fn add(&mut self, id: u64, address: u64, remote_key: u32, flags: u32) -> usize {
        let index = self.len;
        let request = &mut self.requests[index];
        request.wr_id = id;
        request.send_flags = flags;
        request.wr.rdma =
            sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: address, rkey: remote_key };
        self.len += 1;
        index
    }

    /// Makes the last request ask for a completion. There is one.
    #[inline]
    pub(crate) fn ask_for_last(&mut self) {
        self.requests[self.len - 1].send_flags |= sys::IBV_SEND_SIGNALED.0;
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
        let len = core::mem::take(&mut self.len);
        let Some(last) = len.checked_sub(1) else { return Ok(()) };
        let values = self.values.as_ptr();
        let pieces = self.pieces.as_mut_ptr();
        let requests = self.requests.as_mut_ptr();
        for index in 0..len {
            let piece = pieces.wrapping_add(index);
            // SAFETY: `index` is below the number of requests, and nothing else refers to them now.
            let request = unsafe { &mut *requests.wrapping_add(index) };
            if request.send_flags & sys::IBV_SEND_INLINE.0 != 0 {
                let addr = values.wrapping_add(index) as u64;
                // SAFETY: there are as many pieces as requests.
                unsafe { piece.write(sys::ibv_sge { addr, length: WORD_BYTES, lkey: 0 }) };
            }
            request.sg_list = piece;
            request.next =
                if index == last { core::ptr::null_mut() } else { requests.wrapping_add(index + 1) };
        }
        let mut bad = core::ptr::null_mut();
        // SAFETY: the caller vouches for function, queue pair and sources; the chain is linked and ends.
        let status = unsafe { post(pair, requests, &mut bad) };
        if status == 0 { Ok(()) } else { Err(status) }
    }
}
