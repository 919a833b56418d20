//! Verbs whose writes come with immediate data, which takes a receive at the peer. The transport posts none, so the peer
//! answers that it is not ready: nothing that the transport does by itself makes a peer say so.

use std::sync::OnceLock;

use portway_transport_ib::{Error, Table, Verbs, sys};

type PostSend =
    unsafe extern "C" fn(*mut sys::ibv_qp, *mut sys::ibv_send_wr, *mut *mut sys::ibv_send_wr) -> i32;

/// Kept for good, since the functions below call it.
static REAL: OnceLock<Verbs> = OnceLock::new();
/// The provider's own function.
static POST_SEND: OnceLock<PostSend> = OnceLock::new();

/// The library, with a function of ours in the tables of the devices that it opens.
pub fn verbs() -> Result<Verbs, Error> {
    let loaded = Verbs::load()?;
    let table = *REAL.get_or_init(|| loaded).table();
    // SAFETY: the library's functions, and one that posts other writes than it was given: the peer refuses them.
    Ok(unsafe { Verbs::from_table(Table { open_device, ..table }) })
}

unsafe extern "C" fn open_device(device: *mut sys::ibv_device) -> *mut sys::ibv_context {
    let open = REAL.get().unwrap().table().open_device;
    // SAFETY: the caller vouches for the device.
    let context = unsafe { open(device) };
    if !context.is_null() {
        // SAFETY: opened above, and nobody else has it yet.
        let ops = unsafe { &mut (*context).ops };
        POST_SEND.get_or_init(|| ops.post_send.unwrap());
        ops.post_send = Some(post_send);
    }
    context
}

unsafe extern "C" fn post_send(
    pair: *mut sys::ibv_qp,
    chain: *mut sys::ibv_send_wr,
    bad: *mut *mut sys::ibv_send_wr,
) -> i32 {
    let mut at = chain;
    // SAFETY: the caller's chain ends.
    while let Some(request) = unsafe { at.as_mut() } {
        request.opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;
        at = request.next;
    }
    // SAFETY: the caller vouches for the arguments.
    unsafe { POST_SEND.get().unwrap()(pair, chain, bad) }
}
