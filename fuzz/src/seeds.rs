//! The corpora, made anew. Knows what is in each message, which the targets need not; so it is a feature of its own.

use std::error::Error;
use std::time::Duration;

use portway_clique::backend::Status;
use portway_clique::state::Phase;

use crate::gid::Gid;
use crate::identity::Process;
use crate::rendezvous::Post;
use crate::rendezvous::board::Key;
use crate::rendezvous::wire::Frame;
use crate::{ib_message, ipc_message, message};

/// A target, a name and an input.
pub type Seed = (&'static str, &'static str, Vec<u8>);

/// Messages that are right, and calls.
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
        ib_message::Memory { transport: 8, index: 4, place: 2, is_word: false, spans }.encode(),
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
        hardware: vec![("NCCL_IB_HCA".into(), "mlx5_0".into())],
    };
    seeds.push(("clique-messages", "hello", hello.encode()?));
    let key = || Key { clique: "one".into(), attempt: 1, phase: "gathering".into() };
    let post = Frame::Post { key: key(), post: Post::Ok(vec![1, 2, 3]) };
    seeds.push(("clique-messages", "frame-post", post.encode()));
    let gather = Frame::Gather { key: key(), within: Duration::from_secs(1) };
    seeds.push(("clique-messages", "frame-gather", gather.encode()));
    seeds.push(("clique-messages", "frame-welcome", Frame::Welcome.encode()));
    seeds.extend(engine_calls());
    Ok(seeds)
}

/// Some sequences of calls that make sense.
fn engine_calls() -> Vec<Seed> {
    let set_up = [0u8, 0, 0, 0, 1, 1];
    let put = |fifo: u8, op: u8, channel: u8, size: u16, from: u16, to: u16| {
        let mut bytes = vec![fifo << 7, op, channel];
        [size, from, to].iter().for_each(|number| bytes.extend(number.to_be_bytes()));
        bytes
    };
    let step = [15u8, 0, 10];
    let (mut plain, mut mixed) = (set_up.to_vec(), vec![0x45, 0, 0, 0x9a, 1, 1]);
    for at in 0..20u16 {
        plain.extend(put(0, 7, 0, 64, 64 * at, 64 * at));
        plain.extend(step);
        mixed.extend(put((at & 1) as u8, 1 + (at % 7) as u8, (at & 1) as u8, 100, at, 4096 - 100 - at));
        if at % 4 == 0 {
            mixed.extend(step);
        }
    }
    let mut ends = set_up.to_vec();
    ends.extend(put(0, 3, 0, 8, 4090, 0)); // leaves the source
    ends.extend(step);
    ends.extend([7, 15, 0xff, 0xff, 8, 11, 0, 0, 9, 0, 10, 0, 11, 1, 1]);
    ends.extend(put(1, 7, 2, 8, 0, 4088));
    ends.extend(step);
    vec![
        ("engine-calls", "plain", plain),
        ("engine-calls", "mixed", mixed),
        ("engine-calls", "ends", ends),
        ("engine-calls", "nothing", Vec::new()),
    ]
}
