//! The functions that fill the verbs table, over a [`World`].

use core::ffi::{c_char, c_int, c_void};
use std::cell::RefCell;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use portway_transport_ib::{Table, Verbs, sys};

use super::fabric::{Make, Registered, World};
use super::queues::{
    ack_async_event, create_cq, create_qp, destroy_cq, destroy_qp, get_async_event, modify_qp,
};

const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;

unsafe extern "C" {
    fn __errno_location() -> *mut i32;
}

pub(super) fn set_errno(errno: i32) {
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
pub(super) unsafe fn world<'a>(context: *mut sys::ibv_context) -> (&'a World, usize) {
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
    let refusal = world.lock().makes[*index].open;
    if refusal != 0 {
        set_errno(refusal);
        return core::ptr::null_mut();
    }
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
    // SAFETY: made by `add` and not ended.
    let sys::ibv_mr { context, lkey, .. } = *unsafe { &*registration };
    // SAFETY: its context is open.
    let (world, _) = unsafe { world(context) };
    let mut inner = world.lock();
    if inner.refuse_deregistration {
        return EBUSY;
    }
    inner.registered.remove(&lkey);
    inner.log.calls.push("dereg_mr");
    // SAFETY: made by `add`; the caller ends it once.
    drop(unsafe { Box::from_raw(registration) });
    0
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
