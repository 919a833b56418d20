//! Verbs that note down what a transport makes with them, so that somebody else can post to the same queues.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use portway_transport_ib::{Error, Table, Verbs, sys};

/// What this thread has made since the last [`take`].
#[derive(Default)]
pub struct Made {
    pub pairs: Vec<*mut sys::ibv_qp>,
    pub queues: Vec<*mut sys::ibv_cq>,
    pub regions: Vec<*mut sys::ibv_mr>,
    /// The index of the GID that a queue pair sends from, where it has one.
    pub gid_index: Option<u8>,
}

thread_local! {
    static MADE: RefCell<Made> = RefCell::default();
    /// Bytes that queue pairs take inline at least.
    static INLINE_BYTES: RefCell<u32> = const { RefCell::new(0) };
}

/// Kept for good, since the functions below call it.
static REAL: OnceLock<Verbs> = OnceLock::new();

/// What this thread has made since the last call.
pub fn take() -> Made {
    MADE.take()
}

/// The library, with queue pairs that take at least so many bytes inline when this thread makes them.
pub fn verbs(inline_bytes: u32) -> Result<Verbs, Error> {
    let real = match REAL.get() {
        Some(real) => real,
        None => {
            let loaded = Verbs::load()?;
            REAL.get_or_init(|| loaded)
        }
    };
    INLINE_BYTES.set(inline_bytes);
    let table = *real.table();
    let table = Table {
        create_cq,
        create_qp,
        modify_qp,
        reg_mr,
        reg_mr_iova2: table.reg_mr_iova2.map(|_| reg_mr_iova2 as _),
        ..table
    };
    // SAFETY: the functions are those of the library, or call them with what they were given.
    Ok(unsafe { Verbs::from_table(table) })
}

fn real() -> &'static Table {
    // The functions below are in a table that `verbs` made, and it sets this first.
    REAL.get().expect("set by whoever made the table").table()
}

unsafe extern "C" fn create_cq(
    context: *mut sys::ibv_context,
    capacity: c_int,
    user: *mut c_void,
    channel: *mut sys::ibv_comp_channel,
    vector: c_int,
) -> *mut sys::ibv_cq {
    // SAFETY: the caller vouches for the arguments.
    let queue = unsafe { (real().create_cq)(context, capacity, user, channel, vector) };
    MADE.with_borrow_mut(|made| made.queues.push(queue));
    queue
}

unsafe extern "C" fn create_qp(
    domain: *mut sys::ibv_pd,
    attributes: *mut sys::ibv_qp_init_attr,
) -> *mut sys::ibv_qp {
    // SAFETY: the caller passes attributes.
    let most = unsafe { &mut (*attributes).cap.max_inline_data };
    *most = INLINE_BYTES.with_borrow(|bytes| *bytes).max(*most);
    // SAFETY: the caller vouches for the arguments.
    let pair = unsafe { (real().create_qp)(domain, attributes) };
    MADE.with_borrow_mut(|made| made.pairs.push(pair));
    pair
}

unsafe extern "C" fn modify_qp(
    pair: *mut sys::ibv_qp,
    attributes: *mut sys::ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller passes attributes.
    let address = unsafe { (*attributes).ah_attr };
    if mask as u32 & sys::IBV_QP_AV.0 != 0 && address.is_global == 1 {
        MADE.with_borrow_mut(|made| made.gid_index = Some(address.grh.sgid_index));
    }
    // SAFETY: the caller vouches for the arguments.
    unsafe { (real().modify_qp)(pair, attributes, mask) }
}

unsafe extern "C" fn reg_mr(
    domain: *mut sys::ibv_pd,
    address: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut sys::ibv_mr {
    // SAFETY: the caller vouches for the arguments.
    let region = unsafe { (real().reg_mr)(domain, address, len, access) };
    MADE.with_borrow_mut(|made| made.regions.push(region));
    region
}

unsafe extern "C" fn reg_mr_iova2(
    domain: *mut sys::ibv_pd,
    address: *mut c_void,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut sys::ibv_mr {
    // In the table only if the library has it.
    let Some(register) = real().reg_mr_iova2 else { return core::ptr::null_mut() };
    // SAFETY: the caller vouches for the arguments.
    let region = unsafe { register(domain, address, len, iova, access) };
    MADE.with_borrow_mut(|made| made.regions.push(region));
    region
}
