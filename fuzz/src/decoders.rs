//! Targets that decode. What is accepted has to come back the same when it is encoded and decoded again.

use std::error::Error;
use std::time::Duration;

use portway_clique::backend::Status;
use portway_clique::state::Phase;
use portway_fifo::Trigger;
use portway_proxy::{OpSet, Request};

use crate::gid::Gid;
use crate::identity::Process;
use crate::rendezvous::Post;
use crate::rendezvous::board::Key;
use crate::rendezvous::wire::{Frame, MAX_ANSWER_BYTES, MAX_HELLO_BYTES};
use crate::{ib_message, ipc_message, message};

/// The 16 bytes that a device wrote: every pattern says something, and what can be encoded comes back.
pub fn trigger(bytes: &[u8]) {
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
}

pub fn ib_connection(bytes: &[u8]) {
    if let Ok(endpoint) = ib_message::Endpoint::decode(bytes) {
        assert_eq!(endpoint.encode(), bytes);
    }
    if let Ok(memory) = ib_message::Memory::decode(bytes) {
        assert_eq!(memory.encode(), bytes);
        assert!(memory.len_bytes() > 0);
    }
}

pub fn ipc_connection(bytes: &[u8]) {
    if let Ok(endpoint) = ipc_message::Endpoint::decode(bytes) {
        assert_eq!(endpoint.encode(), bytes);
    }
    if let Ok(memory) = ipc_message::Memory::decode(bytes) {
        assert_eq!(ipc_message::Memory::decode(&memory.encode()).as_ref().ok(), Some(&memory));
        let whole: u64 = memory.pieces.iter().map(|piece| piece.len_bytes).sum();
        assert!(memory.offset_bytes + memory.len_bytes <= whole, "outside of its allocation");
    }
}

/// What is gathered, and the frames of the rendezvous around it.
pub fn clique_messages(bytes: &[u8]) {
    use message::{Hello, IdMessage, Note, SplitMessage};
    if let Ok(hello) = Hello::decode(bytes, "x") {
        assert_eq!(Hello::decode(&hello.encode().expect("as long as before"), "x").ok(), Some(hello));
    }
    if let Ok(ids) = IdMessage::decode(bytes, "x") {
        assert_eq!(IdMessage::decode(&ids.encode().expect("as long as before"), "x").ok(), Some(ids));
    }
    if let Ok(note) = Note::decode(bytes, "x") {
        let again = Note::decode(&note.encode(), "x").expect("as good as before");
        // It names the first ranks that are missing, not all.
        assert!(
            (again.rank, &again.cause) == (note.rank, &note.cause)
                && note.missing.starts_with(&again.missing)
        );
    }
    if let Ok(split) = SplitMessage::decode(bytes, "x") {
        assert_eq!(SplitMessage::decode(&split.encode().expect("as long as before"), "x").ok(), Some(split));
    }
    for most in [MAX_HELLO_BYTES, MAX_ANSWER_BYTES] {
        if let Ok(frame) = Frame::decode(bytes, most) {
            assert_eq!(Frame::decode(&frame.encode(), most).ok(), Some(frame));
        }
    }
}

/// A mistake of the kind that these targets are for: believes how many queue pairs follow.
pub fn plant_trusts_a_count(bytes: &[u8]) {
    if bytes.len() > 60 && bytes.starts_with(b"portway\0") {
        let count = usize::from(bytes[44]);
        assert!(bytes.len() >= 46 + 4 * count, "the index of the last number is out of range");
    }
}

/// Believes the length of what follows.
pub fn plant_trusts_a_length(bytes: &[u8]) {
    if bytes.len() >= 12 && bytes.starts_with(b"pwrv") {
        let len = u32::from_le_bytes(core::array::from_fn(|byte| bytes[8 + byte]));
        assert!(bytes.len() - 12 >= len as usize, "reads past the end");
    }
}

/// A target, a name and an input.
pub type Seed = (&'static str, &'static str, Vec<u8>);

/// Messages that are right.
pub fn seeds() -> Result<Vec<Seed>, Box<dyn Error>> {
    let mut seeds: Vec<Seed> = Vec::new();
    let put = 1u64 << 60 | 3 << 45 | 4096; // not only what `encode` makes
    seeds.push(("trigger", "a-put", [64u64, put].iter().flat_map(|word| word.to_le_bytes()).collect()));
    seeds.push(("trigger", "all-bits", vec![0x7f; 32]));

    let gids = vec![Gid([1; 16]), Gid([2; 16])];
    let endpoint = ib_message::Endpoint {
        transport: 7,
        nonce: 99,
        roce: true,
        mtu: 5,
        lid: 3,
        first_psn: 0xabcdef,
        max_message_bytes: 8 << 20,
        queue_pairs: vec![17, 18],
        gids,
    };
    seeds.push(("ib-connection", "endpoint", endpoint.encode()));
    let spans = vec![
        ib_message::Span { offset_bytes: 0, len_bytes: 4096, address: 0x7000_0000, key: 5 },
        ib_message::Span { offset_bytes: 4096, len_bytes: 100, address: 0x9000_0000, key: 6 },
    ];
    seeds.push((
        "ib-connection",
        "memory",
        ib_message::Memory { transport: 8, index: 4, place: 2, spans }.encode(),
    ));

    let process = Process { boot: [1; 16], namespace: 2, pid: 3, started: 4 };
    let author = ipc_message::Author { transport: 7, hub: 8, process, device: [9; 16] };
    seeds.push(("ipc-connection", "endpoint", ipc_message::Endpoint { author, nonce: 99 }.encode()));
    for (name, fabric, legacy) in [
        ("memory", None, None),
        ("memory-fabric", Some([5; 64]), None),
        ("memory-legacy", None, Some([6; 64])),
    ] {
        let piece = |len_bytes| ipc_message::Piece { len_bytes, fabric };
        let memory = ipc_message::Memory {
            author,
            index: 4,
            nonce: 1,
            allocation: 2,
            base: 0x7000_0000,
            place: ipc_message::Place::Device,
            offset_bytes: 100,
            len_bytes: 5_000,
            descriptors: true,
            pieces: vec![piece(4096), piece(4096)],
            legacy,
        };
        seeds.push(("ipc-connection", name, memory.encode()));
    }

    let note = message::Note {
        phase: Phase::ALL[1],
        rank: Some(1),
        process: "host:7".into(),
        status: Some(Status(3)),
        cause: "why".into(),
        missing: vec![2, 3],
    };
    seeds.push(("clique-messages", "note", note.encode()));
    let split = message::SplitMessage(vec![(0, Some(1), 2), (1, None, -1)]);
    seeds.push(("clique-messages", "split", split.encode()?));
    let ids = message::IdMessage { key: 5, ids: vec![(3, [7; portway_clique::backend::ID_BYTES])] };
    seeds.push(("clique-messages", "ids", ids.encode()?));
    let hello = message::Hello {
        size: 2,
        process: "host:7".into(),
        library: "libnccl.so.2".into(),
        library_version: 22_700,
        several_ids: true,
        config: Default::default(),
        large_bytes: 1 << 20,
        locals: vec![message::Local { rank: 0, uuid: "GPU-0".into() }],
        uses: vec![portway_clique::Use::AllGather],
        environment: vec![("NCCL_DEBUG".into(), "INFO".into())],
    };
    seeds.push(("clique-messages", "hello", hello.encode()?));
    let key = || Key { clique: "one".into(), attempt: 1, phase: "gathering".into() };
    let post = Frame::Post { key: key(), post: Post::Ok(vec![1, 2, 3]) };
    seeds.push(("clique-messages", "frame-post", post.encode()));
    let gather = Frame::Gather { key: key(), within: Duration::from_secs(1) };
    seeds.push(("clique-messages", "frame-gather", gather.encode()));
    seeds.push(("clique-messages", "frame-welcome", Frame::Welcome.encode()));
    Ok(seeds)
}
