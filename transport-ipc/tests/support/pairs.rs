//! Every two of several ranks connected, and all of them put at the same time: whether each has what was meant for it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portway_fifo::Words;
use portway_fifo::cuda::{Context, Kind};
use portway_proxy::transport::{
    Binding, Close, Completion, Lane, LocalMemory, Op, Port, Put, Submit, Transport,
};
use portway_transport_ipc::{Config, Ipc};

/// How long a round may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of a put, puts of a round, and rounds.
const PUT_BYTES: u64 = 64 << 10;
const PUTS: u64 = 16;
const ROUNDS: u64 = 4;

/// From one rank to another.
struct Way {
    from: usize,
    to: usize,
    port: Box<dyn Port>,
    lane: Lane,
    source: LocalMemory,
    destination: LocalMemory,
    word: LocalMemory,
    sequence: u64,
    complete: u64,
}

/// Bytes that no other way, and no other round, has.
fn pattern(from: usize, to: usize, round: u64) -> Vec<u8> {
    let mut state = (from as u64) << 40 | (to as u64) << 20 | round;
    let words = (0..PUT_BYTES * PUTS / 8).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state
    });
    words.flat_map(u64::to_ne_bytes).collect()
}

/// Rank by rank, on these contexts, some of which may be of one device. Returns what was wrong. `spoil` may change what
/// a rank has to send, to see that it is found.
pub fn all_at_once(contexts: &[Context], spoil: impl Fn(&LocalMemory, usize, usize)) -> Vec<String> {
    let first = Ipc::open(&contexts[0], Config::default()).unwrap();
    let others = contexts[1..].iter().map(|context| first.beside(context).unwrap());
    let transports: Vec<Ipc> = std::iter::once(first.clone()).chain(others).collect();
    let mut ways = Vec::new();
    for from in 0..contexts.len() {
        for to in from + 1..contexts.len() {
            let (near, far) = (&transports[from], &transports[to]);
            let ((near_end, near_bytes), (far_end, far_bytes)) =
                (near.endpoint().unwrap(), far.endpoint().unwrap());
            ways.push(way(&transports, contexts, from, to, near_end.connect(&far_bytes, PATIENCE).unwrap()));
            ways.push(way(&transports, contexts, to, from, far_end.connect(&near_bytes, PATIENCE).unwrap()));
        }
    }
    let mut wrong = Vec::new();
    for round in 1..=ROUNDS {
        for way in &ways {
            way.source.region.write(0, &pattern(way.from, way.to, round)).unwrap();
            spoil(&way.source, way.from, way.to);
        }
        for way in &mut ways {
            send(way, round);
        }
        let start = Instant::now();
        while ways.iter().any(|way| way.complete < round * PUTS) {
            let none = Completion { lane: Lane(u32::MAX), sequence: u64::MAX };
            for way in &mut ways {
                way.complete += way.port.poll(&mut [none; 16]).unwrap() as u64;
            }
            let seen: u64 = ways.iter().map(|way| way.complete).sum();
            let expected = round * PUTS * ways.len() as u64;
            assert!(start.elapsed() < PATIENCE, "{seen} of {expected} puts are complete after {PATIENCE:?}");
        }
        for way in &ways {
            let Way { from, to, .. } = way;
            let value = Words::new(way.word.region.clone()).unwrap()[0].load(Ordering::Acquire);
            let mut bytes = vec![0; (PUT_BYTES * PUTS) as usize];
            way.destination.region.read(0, &mut bytes).unwrap();
            if value != round || bytes != pattern(*from, *to, round) {
                wrong.push(format!("{from} to {to}, round {round}: signal {value}, or other bytes"));
            }
        }
    }
    for way in &mut ways {
        let start = Instant::now();
        while way.port.close().unwrap() != Close::Quiesced {
            assert!(start.elapsed() < PATIENCE, "a port is not quiesced after {PATIENCE:?}");
        }
    }
    wrong
}

fn way(transports: &[Ipc], contexts: &[Context], from: usize, to: usize, mut port: Box<dyn Port>) -> Way {
    let (near, far) = (&transports[from], &transports[to]);
    let allocate = |at: usize| contexts[at].allocate(Kind::Vmm, PUT_BYTES * PUTS).unwrap();
    let source = near.register(&allocate(from)).unwrap();
    let destination = far.register(&allocate(to)).unwrap();
    let word = far.signal_word().unwrap();
    let import = |memory| near.import(&far.export(memory).unwrap()).unwrap().id;
    let binding = Binding { source: source.id, destination: import(&destination), signal: import(&word) };
    let lane = port.bind(&binding).unwrap();
    Way { from, to, port, lane, source, destination, word, sequence: 0, complete: 0 }
}

/// Puts side by side, a signal and a flush with the last.
fn send(way: &mut Way, round: u64) {
    for at in 0..PUTS {
        let offset_bytes = at * PUT_BYTES;
        let put = Put {
            source_offset_bytes: offset_bytes,
            destination_offset_bytes: offset_bytes,
            len_bytes: PUT_BYTES,
        };
        let last = at + 1 == PUTS;
        let op = Op {
            lane: way.lane,
            sequence: way.sequence,
            put: Some(put),
            signal: last.then_some(round),
            flush: last,
        };
        assert_eq!(way.port.submit(&op).unwrap(), Submit::Accepted);
        way.sequence += 1;
    }
    way.port.kick().unwrap();
}
