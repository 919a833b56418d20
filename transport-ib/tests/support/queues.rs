//! The functions of the verbs table that are about queues: made, moved from state to state, posted to, polled; and events.

use core::ffi::{c_int, c_void};
use std::cell::RefCell;
use std::collections::VecDeque;

use portway_transport_ib::sys;

use super::fabric::{Event, Pair, Queue, Request, World};
use super::table::{set_errno, world};

const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

pub(super) unsafe extern "C" fn create_cq(
    context: *mut sys::ibv_context,
    capacity: c_int,
    _: *mut c_void,
    _: *mut sys::ibv_comp_channel,
    _: c_int,
) -> *mut sys::ibv_cq {
    // SAFETY: an open context.
    let (world, _) = unsafe { world(context) };
    let mut inner = world.lock();
    let handle = inner.number();
    inner.queues.insert(handle, Queue { capacity: capacity as usize, entries: VecDeque::new() });
    // SAFETY: a completion queue is plain data and pointers, for all of which zero is a value.
    let mut queue: sys::ibv_cq = unsafe { core::mem::zeroed() };
    queue.context = context;
    queue.handle = handle;
    Box::into_raw(Box::new(queue))
}

pub(super) unsafe extern "C" fn destroy_cq(queue: *mut sys::ibv_cq) -> c_int {
    // SAFETY: a queue that is not destroyed.
    let sys::ibv_cq { context, handle, .. } = *unsafe { &*queue };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
    let mut inner = world.lock();
    if inner.pairs.values().any(|pair| pair.completions == handle) {
        return EBUSY;
    }
    inner.queues.remove(&handle);
    inner.log.calls.push("destroy_cq");
    // SAFETY: made by `create_cq`, and the caller destroys it once.
    drop(unsafe { Box::from_raw(queue) });
    0
}

pub(super) unsafe extern "C" fn create_qp(
    domain: *mut sys::ibv_pd,
    attributes: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: the caller passes attributes.
    let attributes = unsafe { *attributes };
    // SAFETY: a domain in use.
    let context = unsafe { (*domain).context };
    // SAFETY: its context is open.
    let (world, device) = unsafe { world(context) };
    let mut inner = world.lock();
    let number = inner.number();
    // SAFETY: a queue pair is plain data and pointers, for all of which zero is a value.
    let mut pair: sys::ibv_qp = unsafe { core::mem::zeroed() };
    pair.context = context;
    pair.qp_num = number;
    // SAFETY: the caller passes a completion queue that is not destroyed.
    let completions = unsafe { (*attributes.send_cq).handle };
    let address = Box::into_raw(Box::new(pair));
    inner.pairs.insert(
        number,
        Pair {
            address: address as usize,
            device,
            state: sys::IBV_QPS_RESET,
            completions,
            depth: attributes.cap.max_send_wr,
            used: 0,
            silent: 0,
            queue: VecDeque::new(),
            peer: 0,
            unacknowledged: 0,
        },
    );
    address
}

/// What has to be told at each step, by the specification of RC queue pairs.
const TO_INIT: u32 =
    sys::IBV_QP_STATE.0 | sys::IBV_QP_PKEY_INDEX.0 | sys::IBV_QP_PORT.0 | sys::IBV_QP_ACCESS_FLAGS.0;
const TO_RTR: u32 = sys::IBV_QP_STATE.0
    | sys::IBV_QP_AV.0
    | sys::IBV_QP_PATH_MTU.0
    | sys::IBV_QP_DEST_QPN.0
    | sys::IBV_QP_RQ_PSN.0
    | sys::IBV_QP_MAX_DEST_RD_ATOMIC.0
    | sys::IBV_QP_MIN_RNR_TIMER.0;
const TO_RTS: u32 = sys::IBV_QP_STATE.0
    | sys::IBV_QP_TIMEOUT.0
    | sys::IBV_QP_RETRY_CNT.0
    | sys::IBV_QP_RNR_RETRY.0
    | sys::IBV_QP_SQ_PSN.0
    | sys::IBV_QP_MAX_QP_RD_ATOMIC.0;

pub(super) unsafe extern "C" fn modify_qp(
    pair: *mut sys::ibv_qp,
    attributes: *mut sys::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: a queue pair that is not destroyed.
    let sys::ibv_qp { context, qp_num: number, .. } = *unsafe { &*pair };
    // SAFETY: the caller passes attributes.
    let attributes = unsafe { *attributes };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
    if attributes.qp_state == sys::IBV_QPS_ERR {
        world.firmware();
    }
    let mut inner = world.lock();
    if attributes.qp_state == sys::IBV_QPS_ERR {
        inner.log.calls.push("to ERR");
        inner.flush(number);
        return 0;
    }
    let state = inner.pairs[&number].state;
    let expected = match attributes.qp_state {
        sys::IBV_QPS_INIT => (sys::IBV_QPS_RESET, TO_INIT),
        sys::IBV_QPS_RTR => (sys::IBV_QPS_INIT, TO_RTR),
        sys::IBV_QPS_RTS => (sys::IBV_QPS_RTR, TO_RTS),
        _ => return EINVAL,
    };
    if (state, mask as u32) != expected {
        return EINVAL;
    }
    if attributes.qp_state != sys::IBV_QPS_INIT {
        inner.log.ready.push(attributes);
    }
    let entry = inner.pairs.get_mut(&number).unwrap();
    entry.state = attributes.qp_state;
    if attributes.qp_state == sys::IBV_QPS_RTR {
        entry.peer = attributes.dest_qp_num;
    }
    0
}

pub(super) unsafe extern "C" fn destroy_qp(pair: *mut sys::ibv_qp) -> c_int {
    // SAFETY: a queue pair that is not destroyed.
    let sys::ibv_qp { context, qp_num: number, .. } = *unsafe { &*pair };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
    world.firmware();
    let mut inner = world.lock();
    // The library would wait here, and its caller with it.
    if inner.refuse_destroy || inner.pairs[&number].unacknowledged > 0 {
        return EBUSY;
    }
    inner.pairs.remove(&number);
    inner.log.calls.push("destroy_qp");
    // SAFETY: made by `create_qp`, and the caller destroys it once.
    drop(unsafe { Box::from_raw(pair) });
    0
}

pub(super) unsafe extern "C" fn get_async_event(
    context: *mut sys::ibv_context,
    out: *mut sys::ibv_async_event,
) -> c_int {
    // SAFETY: an open context.
    let (world, device) = unsafe { world(context) };
    let mut inner = world.lock();
    let Some(Event(kind, address)) = inner.events[device].pop_front() else {
        set_errno(EAGAIN);
        return -1;
    };
    // SAFETY: an open context.
    let descriptor = unsafe { (*context).async_fd };
    // SAFETY: the descriptor belongs to the context.
    let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
    let _ = rustix::io::read(descriptor, &mut [0]);
    for pair in inner.pairs.values_mut().filter(|pair| pair.address == address) {
        pair.unacknowledged += 1;
    }
    let element = sys::ibv_async_event__bindgen_ty_1 { qp: address as *mut sys::ibv_qp };
    // SAFETY: the caller passes a place for the event.
    unsafe { out.write(sys::ibv_async_event { element, event_type: kind }) };
    // The acknowledgement has no context to find the world by.
    EVENTS.set(Some(world.clone()));
    0
}

thread_local! {
    /// Whose event this thread fetched last.
    static EVENTS: RefCell<Option<World>> = const { RefCell::new(None) };
}

pub(super) unsafe extern "C" fn ack_async_event(event: *mut sys::ibv_async_event) {
    // SAFETY: an event of `get_async_event`.
    let event = unsafe { &*event };
    // SAFETY: the element is an address in all its forms.
    let address = unsafe { event.element.qp } as usize;
    let Some(world) = EVENTS.with_borrow(Clone::clone) else { return };
    let mut inner = world.lock();
    for pair in inner.pairs.values_mut().filter(|pair| pair.address == address) {
        pair.unacknowledged -= 1;
    }
}

pub(super) unsafe extern "C" fn post_send(
    pair: *mut sys::ibv_qp,
    chain: *mut sys::ibv_send_wr,
    bad: *mut *mut sys::ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair that is not destroyed.
    let sys::ibv_qp { context, qp_num: number, .. } = *unsafe { &*pair };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
    let mut inner = world.lock();
    let mut post = Vec::new();
    let mut at = chain;
    while !at.is_null() {
        // SAFETY: the caller passes a chain that ends.
        let wr = unsafe { *at };
        // SAFETY: each of its requests has one piece.
        let piece = unsafe { *wr.sg_list };
        // SAFETY: the request is a write.
        let remote = unsafe { wr.wr.rdma };
        let entry = inner.pairs.get_mut(&number).unwrap();
        let is_inline = wr.send_flags & sys::IBV_SEND_INLINE.0 != 0;
        let right =
            wr.opcode == sys::IBV_WR_RDMA_WRITE && wr.num_sge == 1 && (!is_inline || piece.length == 8);
        let sends = [sys::IBV_QPS_RTS, sys::IBV_QPS_ERR].contains(&entry.state);
        if entry.used == entry.depth || !right || !sends {
            let status = if right && sends { ENOMEM } else { EINVAL };
            inner.log.refused_posts += 1;
            // SAFETY: the caller passes a place for the request that is refused.
            unsafe { bad.write(at) };
            return status;
        }
        entry.used += 1;
        // SAFETY: the piece of an inline request of 8 bytes is a word.
        let inline = is_inline.then(|| unsafe { (piece.addr as *const [u8; 8]).read() });
        let asks = wr.send_flags & sys::IBV_SEND_SIGNALED.0 != 0;
        let request = Request {
            id: wr.wr_id,
            local: (piece.addr, piece.lkey),
            len: piece.length,
            inline,
            remote: (remote.remote_addr, remote.rkey),
            asks,
        };
        if entry.state == sys::IBV_QPS_ERR {
            inner.complete(number, request.id, sys::IBV_WC_WR_FLUSH_ERR, true);
        } else {
            entry.queue.push_back(request);
        }
        post.push((wr.send_flags, piece.length));
        at = wr.next;
    }
    inner.log.posts.push(post);
    0
}

pub(super) unsafe extern "C" fn poll_cq(
    queue: *mut sys::ibv_cq,
    room: c_int,
    out: *mut sys::ibv_wc,
) -> c_int {
    // SAFETY: a completion queue that is not destroyed.
    let sys::ibv_cq { context, handle, .. } = *unsafe { &*queue };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
    let mut inner = world.lock();
    inner.pump();
    let mut count = 0;
    while count < room {
        let Some((wc, number, frees)) = inner.queues.get_mut(&handle).unwrap().entries.pop_front() else {
            break;
        };
        if let Some(pair) = inner.pairs.get_mut(&number) {
            pair.used -= frees;
        }
        let place = out.wrapping_add(count as usize);
        // SAFETY: there is room for so many.
        unsafe { place.write(wc) };
        count += 1;
    }
    count
}
