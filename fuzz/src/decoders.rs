//! Targets that decode. What is accepted has to come back the same when it is encoded and decoded again. Each says whether
//! anything was accepted.

use portway_fifo::Trigger;
use portway_proxy::{OpSet, Request};

use crate::rendezvous::wire::{Frame, MAX_ANSWER_BYTES, MAX_HELLO_BYTES};
use crate::{ib_message, ipc_message, message};

/// The 16 bytes that a device wrote: every pattern says something, and what can be encoded comes back.
pub fn trigger(bytes: &[u8]) -> bool {
    for bytes in bytes.chunks_exact(16) {
        let word = |at| u64::from_le_bytes(core::array::from_fn(|byte| bytes[at + byte]));
        let Ok(trigger) = Trigger::new([word(0), word(8)]) else {
            assert!((word(0) | word(8)) >> 63 == 1, "refused without bit 63: {bytes:x?}");
            continue;
        };
        let request = Request::decode(trigger);
        match request.encode() {
            Ok(again) => assert_eq!(again, trigger, "{request:?}"),
            Err(error) => {
                let parts = [OpSet::PUT, OpSet::SIGNAL, OpSet::FLUSH];
                assert!(parts.iter().all(|part| !request.op.has(*part)), "{error}");
            }
        }
    }
    true
}

pub fn ib_connection(bytes: &[u8]) -> bool {
    let mut accepted = false;
    if let Ok(endpoint) = ib_message::Endpoint::decode(bytes) {
        accepted = true;
        assert_eq!(endpoint.encode(), bytes);
    }
    if let Ok(memory) = ib_message::Memory::decode(bytes) {
        accepted = true;
        assert_eq!(memory.encode(), bytes);
        assert!(memory.len_bytes() > 0);
    }
    accepted
}

pub fn ipc_connection(bytes: &[u8]) -> bool {
    let mut accepted = false;
    if let Ok(endpoint) = ipc_message::Endpoint::decode(bytes) {
        accepted = true;
        assert_eq!(endpoint.encode(), bytes);
    }
    if let Ok(memory) = ipc_message::Memory::decode(bytes) {
        accepted = true;
        assert_eq!(ipc_message::Memory::decode(&memory.encode()).as_ref().ok(), Some(&memory));
        let whole: u64 = memory.pieces.iter().map(|piece| piece.len_bytes).sum();
        assert!(memory.offset_bytes + memory.len_bytes <= whole, "outside of its allocation");
    }
    accepted
}

/// What is gathered, and the frames of the rendezvous around it.
pub fn clique_messages(bytes: &[u8]) -> bool {
    let mut accepted = false;
    use message::{Hello, IdMessage, Note, SplitMessage};
    if let Ok(hello) = Hello::decode(bytes, "x") {
        accepted = true;
        assert_eq!(Hello::decode(&hello.encode().expect("as long as before"), "x").ok(), Some(hello));
    }
    if let Ok(ids) = IdMessage::decode(bytes, "x") {
        accepted = true;
        assert_eq!(IdMessage::decode(&ids.encode().expect("as long as before"), "x").ok(), Some(ids));
    }
    if let Ok(note) = Note::decode(bytes, "x") {
        accepted = true;
        let again = Note::decode(&note.encode(), "x").expect("as good as before");
        // It names the first ranks that are missing, not all.
        assert!(
            (again.rank, &again.cause) == (note.rank, &note.cause)
                && note.missing.starts_with(&again.missing)
        );
    }
    if let Ok(split) = SplitMessage::decode(bytes, "x") {
        accepted = true;
        assert_eq!(SplitMessage::decode(&split.encode().expect("as long as before"), "x").ok(), Some(split));
    }
    for most in [MAX_HELLO_BYTES, MAX_ANSWER_BYTES] {
        if let Ok(frame) = Frame::decode(bytes, most) {
            accepted = true;
            assert_eq!(Frame::decode(&frame.encode(), most).ok(), Some(frame));
        }
    }
    accepted
}

/// A mistake of the kind that these targets are for: believes how many queue pairs follow.
pub fn plant_trusts_a_count(bytes: &[u8]) -> bool {
    if bytes.len() > 60 && bytes.starts_with(b"portway\0") {
        let count = usize::from(bytes[44]);
        assert!(bytes.len() >= 46 + 4 * count, "the index of the last number is out of range");
    }
    true
}

/// Believes the length of what follows.
pub fn plant_trusts_a_length(bytes: &[u8]) -> bool {
    if bytes.len() >= 12 && bytes.starts_with(b"pwrv") {
        let len = u32::from_le_bytes(core::array::from_fn(|byte| bytes[8 + byte]));
        assert!(bytes.len() - 12 >= len as usize, "reads past the end");
    }
    true
}
