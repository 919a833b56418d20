//! The functions that fill the verbs table, over a [`World`].

use core::ffi::{c_char, c_int, c_void};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use portway_transport_ib::{Table, Verbs, sys};

use super::fabric::{Event, Make, Pair, Queue, Registered, Request, World};

const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;

unsafe extern "C" {
    fn __errno_location() -> *mut i32;
}

fn set_errno(errno: i32) {
    // SAFETY: the C library returns the address of the thread's number.
    let place = unsafe { __errno_location() };
    // SAFETY: as above.
    unsafe { place.write(errno) };
}

#[repr(C)]
struct Context {
    base: sys::ibv_context,
    world: World,
    device: usize,
    _read_end: OwnedFd,
}

#[repr(C)]
struct Device {
    base: sys::ibv_device,
    world: World,
    index: usize,
    name: CString,
}

thread_local! {
    /// Whose devices this thread's listing shows. None: no kernel support.
    static HERE: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// # Safety
/// - `context` was opened by this world and not closed.
unsafe fn world<'a>(context: *mut sys::ibv_context) -> (&'a World, usize) {
    // SAFETY: every context of these verbs is the first field of one of ours.
    let context = unsafe { &*context.cast::<Context>() };
    (&context.world, context.device)
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut sys::ibv_device {
    let Some(world) = HERE.with_borrow(Clone::clone) else {
        set_errno(ENOSYS);
        return core::ptr::null_mut();
    };
    let makes = world.lock().makes.clone();
    let device = |(index, make): (usize, &Make)| {
        let base = sys::ibv_device { transport_type: make.transport, ..Default::default() };
        let name = CString::new(make.name).unwrap();
        Box::into_raw(Box::new(Device { base, world: world.clone(), index, name })).cast()
    };
    let list: Vec<*mut sys::ibv_device> =
        makes.iter().enumerate().map(device).chain([core::ptr::null_mut()]).collect();
    // SAFETY: the caller passes a place for the count.
    unsafe { count.write(makes.len() as c_int) };
    Box::into_raw(list.into_boxed_slice()).cast()
}

/// The tests make few lists, and devices are looked at after the list is freed.
unsafe extern "C" fn free_device_list(_: *mut *mut sys::ibv_device) {}

unsafe extern "C" fn get_device_name(device: *mut sys::ibv_device) -> *const c_char {
    // SAFETY: a device of `get_device_list`, which is never freed.
    let device = unsafe { &*device.cast::<Device>() };
    device.name.as_ptr()
}

unsafe extern "C" fn open_device(device: *mut sys::ibv_device) -> *mut sys::ibv_context {
    // SAFETY: a device of `get_device_list`, which is never freed.
    let Device { world, index, .. } = unsafe { &*device.cast::<Device>() };
    let (read_end, wake) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    // SAFETY: a context is plain data and pointers, for all of which zero is a value.
    let mut base: sys::ibv_context = unsafe { core::mem::zeroed() };
    base.device = device;
    base.async_fd = read_end.as_raw_fd();
    let mut inner = world.lock();
    base.ops.post_send = Some(inner.data_path.0);
    base.ops.poll_cq = Some(inner.data_path.1);
    inner.wakes[*index] = Some(wake);
    inner.open += 1;
    let context = Context { base, world: world.clone(), device: *index, _read_end: read_end };
    Box::into_raw(Box::new(context)).cast()
}

unsafe extern "C" fn close_device(context: *mut sys::ibv_context) -> c_int {
    // SAFETY: opened above; the caller closes it once.
    let context = unsafe { Box::from_raw(context.cast::<Context>()) };
    let mut inner = context.world.lock();
    inner.open -= 1;
    inner.log.calls.push("close_device");
    0
}

unsafe extern "C" fn query_device(context: *mut sys::ibv_context, out: *mut sys::ibv_device_attr) -> c_int {
    // SAFETY: an open context.
    let (world, device) = unsafe { world(context) };
    let make = world.lock().makes[device].clone();
    let attributes = sys::ibv_device_attr {
        phys_port_cnt: 1,
        max_qp_wr: make.max_requests,
        max_cqe: make.max_requests * 4,
        ..Default::default()
    };
    // SAFETY: the caller passes a place for the attributes.
    unsafe { out.write(attributes) };
    0
}

unsafe extern "C" fn query_port(
    context: *mut sys::ibv_context,
    number: u8,
    out: *mut sys::_compat_ibv_port_attr,
) -> c_int {
    if number != 1 {
        return EINVAL;
    }
    // SAFETY: an open context.
    let (world, device) = unsafe { world(context) };
    let make = world.lock().makes[device].clone();
    let attributes = sys::ibv_port_attr {
        state: make.state,
        active_mtu: sys::ibv_mtu(make.mtu),
        max_msg_sz: make.max_message_bytes,
        lid: 3,
        link_layer: if make.roce { 2 } else { 1 },
        ..Default::default()
    };
    // SAFETY: the caller passes the whole attributes under their first part's type.
    unsafe { out.cast::<sys::ibv_port_attr>().write(attributes) };
    0
}

unsafe extern "C" fn query_gid(
    context: *mut sys::ibv_context,
    _: u8,
    index: c_int,
    out: *mut sys::ibv_gid,
) -> c_int {
    // SAFETY: an open context.
    let (world, device) = unsafe { world(context) };
    let gids = world.lock().makes[device].gids.clone();
    if index > 31 {
        return EINVAL;
    }
    let raw = gids.iter().find(|gid| i32::from(gid.0) == index).map_or([0; 16], |gid| gid.1);
    // SAFETY: the caller passes a place for the GID.
    unsafe { out.write(sys::ibv_gid { raw }) };
    0
}

unsafe extern "C" fn query_gid_table(
    context: *mut sys::ibv_context,
    out: *mut sys::ibv_gid_entry,
    room: usize,
    _: u32,
    size: usize,
) -> isize {
    assert_eq!(size, size_of::<sys::ibv_gid_entry>());
    // SAFETY: an open context.
    let (world, device) = unsafe { world(context) };
    let gids = world.lock().makes[device].gids.clone();
    for (at, (index, raw, kind)) in gids.iter().take(room).enumerate() {
        let entry = sys::ibv_gid_entry {
            gid: sys::ibv_gid { raw: *raw },
            gid_index: u32::from(*index),
            port_num: 1,
            gid_type: kind.0,
            ndev_ifindex: 2,
        };
        let place = out.wrapping_add(at);
        // SAFETY: there is room for so many.
        unsafe { place.write(entry) };
    }
    gids.len().min(room) as isize
}

unsafe extern "C" fn alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    Box::into_raw(Box::new(sys::ibv_pd { context, handle: 0 }))
}

unsafe extern "C" fn dealloc_pd(domain: *mut sys::ibv_pd) -> c_int {
    // SAFETY: allocated above; the caller frees it once.
    let domain = unsafe { Box::from_raw(domain) };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(domain.context) };
    let mut inner = world.lock();
    inner.log.calls.push("dealloc_pd");
    0
}

/// # Safety
/// - `domain` is not freed.
unsafe fn add(domain: *mut sys::ibv_pd, memory: Registered) -> *mut sys::ibv_mr {
    // SAFETY: as above.
    let context = unsafe { (*domain).context };
    // SAFETY: the domain's context is open.
    let (world, _) = unsafe { world(context) };
    let mut inner = world.lock();
    let key = inner.number();
    inner.registered.insert(key, memory);
    Box::into_raw(Box::new(sys::ibv_mr { context, pd: domain, lkey: key, rkey: key, ..Default::default() }))
}

unsafe extern "C" fn reg_mr_iova2(
    domain: *mut sys::ibv_pd,
    address: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut sys::ibv_mr {
    // SAFETY: a domain in use.
    let context = unsafe { (*domain).context };
    // SAFETY: its context is open.
    let (world, device) = unsafe { world(context) };
    let (address, len) = (address as u64, len as u64);
    let refusal = {
        let mut inner = world.lock();
        inner.log.pages.push((address, len, access));
        let make = &inner.makes[device];
        let in_gpu = (make.device_memory.0..make.device_memory.1).contains(&address);
        if in_gpu { make.peer_memory } else { 0 }
    };
    if refusal != 0 {
        set_errno(refusal);
        return core::ptr::null_mut();
    }
    // SAFETY: as above.
    unsafe { add(domain, Registered { address: iova, len, access }) }
}

unsafe extern "C" fn reg_mr(
    domain: *mut sys::ibv_pd,
    address: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut sys::ibv_mr {
    // SAFETY: as the caller says.
    unsafe { reg_mr_iova2(domain, address, len, address as u64, access as u32) }
}

unsafe extern "C" fn reg_dmabuf_mr(
    domain: *mut sys::ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    _: c_int,
    access: c_int,
) -> *mut sys::ibv_mr {
    // SAFETY: a domain in use.
    let context = unsafe { (*domain).context };
    // SAFETY: its context is open.
    let (world, device) = unsafe { world(context) };
    let refusal = {
        let mut inner = world.lock();
        inner.log.dma_bufs.push((offset, len as u64, iova, access as u32));
        inner.makes[device].dma_buf
    };
    if refusal != 0 {
        set_errno(refusal);
        return core::ptr::null_mut();
    }
    // SAFETY: as above.
    unsafe { add(domain, Registered { address: iova, len: len as u64, access: access as u32 }) }
}

unsafe extern "C" fn dereg_mr(registration: *mut sys::ibv_mr) -> c_int {
    // SAFETY: made by `add`; the caller ends it once.
    let registration = unsafe { Box::from_raw(registration) };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(registration.context) };
    let mut inner = world.lock();
    inner.registered.remove(&registration.lkey);
    inner.log.calls.push("dereg_mr");
    0
}

unsafe extern "C" fn create_cq(
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

unsafe extern "C" fn destroy_cq(queue: *mut sys::ibv_cq) -> c_int {
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

unsafe extern "C" fn create_qp(
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

unsafe extern "C" fn modify_qp(
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

unsafe extern "C" fn destroy_qp(pair: *mut sys::ibv_qp) -> c_int {
    // SAFETY: a queue pair that is not destroyed.
    let sys::ibv_qp { context, qp_num: number, .. } = *unsafe { &*pair };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
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

unsafe extern "C" fn get_async_event(
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

unsafe extern "C" fn ack_async_event(event: *mut sys::ibv_async_event) {
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

/// The verbs of a world, or of a kernel without RDMA; those of an old library unless `new`.
pub(super) fn verbs(world: Option<&World>, new: bool) -> Verbs {
    HERE.set(world.cloned());
    let table = Table {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        query_device,
        query_port,
        query_gid,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_cq,
        destroy_cq,
        create_qp,
        modify_qp,
        destroy_qp,
        get_async_event,
        ack_async_event,
        query_gid_table: if new { Some(query_gid_table) } else { None },
        reg_mr_iova2: if new { Some(reg_mr_iova2) } else { None },
        reg_dmabuf_mr: if new { Some(reg_dmabuf_mr) } else { None },
    };
    // SAFETY: the functions behave as the verbs interface says, as far as this crate uses it, from any thread.
    unsafe { Verbs::from_table(table) }
}
