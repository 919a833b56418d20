//! Runs what was declared once, small and large, and checks the results.

use crate::backend::{DataType, Enqueue, Operation, RawComm, ReduceOp, Status, Workspace};
use crate::failure::Fault;
use crate::owner::Desk;
use crate::sync::{Deadline, Pause};
use crate::uses::Use;

/// How many bytes a small operation moves a rank.
const SMALL_BYTES: usize = 64;

/// A local rank with what it needs for the first use.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) rank: u32,
    pub(crate) comm: RawComm,
    pub(crate) workspace: Box<dyn Workspace>,
}

/// How long each buffer of a workspace has to be.
pub(crate) fn buffer_bytes(large_bytes: usize, size: u32) -> usize {
    large_bytes.max(SMALL_BYTES.saturating_mul(size as usize))
}

/// What one rank does, and what it has to find.
struct Part {
    operation: Operation,
    send: Vec<u8>,
    expected: Vec<u8>,
}

/// Runs the operations one after the other; each is complete before the next is put in, so that nothing runs ahead of
/// what the next one allocates.
pub(crate) fn run(
    desk: &Desk,
    uses: &[Use],
    size: u32,
    large_bytes: usize,
    lanes: &mut [Lane],
    until: Deadline,
) -> Result<(), Fault> {
    for one in uses {
        for bytes in [SMALL_BYTES, buffer_bytes(large_bytes, size)] {
            run_one(desk, *one, size, bytes, lanes, until)?;
        }
    }
    Ok(())
}

fn run_one(
    desk: &Desk,
    one: Use,
    size: u32,
    bytes: usize,
    lanes: &mut [Lane],
    until: Deadline,
) -> Result<(), Fault> {
    let call = format!("first use, {one}");
    let mut parts = Vec::new();
    for lane in lanes.iter_mut() {
        let Some(part) = part(one, size, bytes, lane) else { continue };
        let workspace = &mut lane.workspace;
        let written = desk.call(Some(lane.rank), &call, |_| workspace.write(&part.send))?;
        written.map_err(|error| Fault::of(Some(lane.rank), &error))?;
        parts.push((lane, part));
    }
    let comms: Vec<(u32, RawComm)> = parts.iter().map(|(lane, _)| (lane.rank, lane.comm)).collect();
    let rank = match comms[..] {
        [] => return Ok(()),
        [(rank, _)] => Some(rank),
        _ => None,
    };
    let calls: Vec<Enqueue> = parts
        .iter()
        .map(|(lane, part)| Enqueue {
            comm: lane.comm,
            operation: part.operation,
            stream: lane.workspace.stream(),
        })
        .collect();
    // SAFETY: the communicators are this group's, of this library, and `call` runs this only while nobody has taken them;
    // none is in progress, since each call before was settled. The workspaces outlive the operations: they live until
    // their streams are idle, or, if this ends with an error before, keep their memory themselves, as their contract says.
    let status = desk.call(rank, &call, |backend| unsafe { backend.enqueue(&calls) })?;
    if status.is_error() {
        return Err(desk.blamed(&comms, &call, status));
    }
    if status == Status::IN_PROGRESS {
        desk.settle(&comms, &call, until)?;
    }
    for (lane, part) in parts {
        finish(desk, &call, lane, until)?;
        let mut seen = vec![0; part.expected.len()];
        let workspace = &mut lane.workspace;
        let read = desk.call(Some(lane.rank), &call, |_| workspace.read(&mut seen))?;
        read.map_err(|error| Fault::of(Some(lane.rank), &error))?;
        // Looked through byte by byte only where it is wrong.
        let wrong = || seen.iter().zip(&part.expected).position(|(seen, expected)| seen != expected);
        if let Some(at) = if seen == part.expected { None } else { wrong() } {
            let cause = format!(
                "{call} of {bytes} bytes: byte {at} of the result is {:#04x}, not {:#04x}",
                seen[at], part.expected[at]
            );
            return Err(Fault::new(Some(lane.rank), cause));
        }
    }
    Ok(())
}

/// Waits until the stream has done everything.
fn finish(desk: &Desk, call: &str, lane: &mut Lane, until: Deadline) -> Result<(), Fault> {
    let mut pause = Pause::default();
    loop {
        let workspace = &mut lane.workspace;
        let idle = desk.call(Some(lane.rank), call, |_| workspace.is_idle())?;
        if idle.map_err(|error| Fault::of(Some(lane.rank), &error))? {
            return Ok(());
        }
        match desk.state(lane.rank, lane.comm, call)? {
            Status::SUCCESS | Status::IN_PROGRESS => {}
            status => return Err(desk.explained(lane.rank, call, status, Some(lane.comm))),
        }
        if until.is_over() {
            let cause = format!("{call}: put into its stream, and not done");
            return Err(Fault::new(Some(lane.rank), cause));
        }
        pause.wait();
    }
}

/// The part of a rank; `None` if it has none.
fn part(one: Use, size: u32, bytes: usize, lane: &Lane) -> Option<Part> {
    let (send, recv) = (lane.workspace.send_address(), lane.workspace.recv_address());
    match one {
        Use::AllReduce { data_type, op } => {
            let count = (bytes / data_type.size_bytes()).max(1);
            let (own, others, result) = operands(op);
            // A single rank is always the one whose turn it is, so its own value is the result.
            let result = if size == 1 { own } else { result };
            let turns = (0..size).map(|turn| if turn == lane.rank { own } else { others });
            Some(Part {
                operation: Operation::AllReduce { send, recv, count, data_type, op },
                send: elements(count, data_type, turns),
                expected: elements(count, data_type, [result].into_iter()),
            })
        }
        Use::AllGather => {
            let count = (bytes / size as usize).max(1);
            Some(Part {
                operation: Operation::AllGather { send, recv, count, data_type: DataType::U8 },
                send: pattern(lane.rank, lane.rank, count),
                expected: (0..size).flat_map(|rank| pattern(rank, rank, count)).collect(),
            })
        }
        Use::Peers { from, to } => {
            let (count, data_type) = (bytes, DataType::U8);
            if lane.rank == from {
                let operation = Operation::Send { send, count, data_type, peer: to };
                Some(Part { operation, send: pattern(from, to, bytes), expected: Vec::new() })
            } else if lane.rank == to {
                let operation = Operation::Recv { recv, count, data_type, peer: from };
                Some(Part { operation, send: Vec::new(), expected: pattern(from, to, bytes) })
            } else {
                None
            }
        }
    }
}

/// What the rank whose turn it is puts in, what the others do, and the result: exact in every type, for any size.
fn operands(op: ReduceOp) -> (u8, u8, u8) {
    match op {
        ReduceOp::Sum => (1, 0, 1),
        ReduceOp::Prod | ReduceOp::Max => (2, 1, 2),
        ReduceOp::Min => (1, 2, 1),
    }
}

/// `count` elements, each 0, 1 or 2: these values again and again.
fn elements(count: usize, data_type: DataType, values: impl Iterator<Item = u8>) -> Vec<u8> {
    let encoded = [0, 1, 2].map(|number: u8| match data_type {
        DataType::F16 => [0u16, 0x3c00, 0x4000][usize::from(number)].to_le_bytes().to_vec(),
        DataType::BF16 => [0u16, 0x3f80, 0x4000][usize::from(number)].to_le_bytes().to_vec(),
        DataType::F32 => f32::from(number).to_le_bytes().to_vec(),
        DataType::F64 => f64::from(number).to_le_bytes().to_vec(),
        _ => u64::from(number).to_le_bytes()[..data_type.size_bytes()].to_vec(),
    });
    let block: Vec<u8> = values.flat_map(|value| encoded[usize::from(value)].iter().copied()).collect();
    repeated(&block, count * data_type.size_bytes())
}

/// After how many bytes a pattern comes again: a prime, so that what lands where it does not belong, which is off by some
/// power of two or a share of the whole, is seen.
const PERIOD_BYTES: usize = 65_521;

/// Bytes that tell from where to where they go, and their place.
fn pattern(from: u32, to: u32, len: usize) -> Vec<u8> {
    let seed = (u64::from(from) << 32 | u64::from(to)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut block = Vec::with_capacity(PERIOD_BYTES + 8);
    let mut word = seed;
    while block.len() < len.min(PERIOD_BYTES) {
        word = (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(1);
        block.extend_from_slice(&word.to_be_bytes());
    }
    block.truncate(PERIOD_BYTES);
    repeated(&block, len)
}

/// A block again and again, copied as a whole, since byte by byte megabytes take longer than the operation that moves them.
fn repeated(block: &[u8], len: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(len);
    all.extend_from_slice(&block[..block.len().min(len)]);
    while !all.is_empty() && all.len() < len {
        // What is there is whole blocks.
        all.extend_from_within(..all.len().min(len - all.len()));
    }
    all
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::hint::black_box;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn elements_take_turns() {
        let turns = |count| elements(count, DataType::I32, [1, 0, 0].into_iter());
        let numbers: Vec<u8> = turns(7).chunks(4).map(|bytes| bytes[0]).collect();
        assert_eq!((numbers, turns(7).len()), (vec![1, 0, 0, 1, 0, 0, 1], 28));
        assert_eq!(turns(1), [1, 0, 0, 0]);
        assert_eq!(elements(3, DataType::F16, [2].into_iter()), [0, 0x40, 0, 0x40, 0, 0x40]);
    }

    #[test]
    fn a_pattern_tells_where_it_belongs() {
        let one = pattern(3, 5, 4 << 20);
        assert_eq!(one.len(), 4 << 20);
        assert_eq!(one[..100], pattern(3, 5, 100));
        for other in [pattern(5, 3, 1000), pattern(3, 3, 1000), pattern(0, 0, 1000)] {
            let same = one.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 50, "{same} of 1000 bytes");
        }
        // Shifted by a share of the whole or a power of two it is another one.
        for shift in (0..22).map(|power| 1 << power).chain([4096 * 3, (4 << 20) / 3]) {
            let same = one[shift..].iter().zip(&one).take(1000).filter(|(a, b)| a == b).count();
            assert!(same < 50, "shifted by {shift}: {same} of 1000 bytes");
        }
    }

    /// Beside the same number of bytes made one by one, in the same run: the machine is as busy for both.
    #[test]
    fn a_pattern_is_not_made_byte_by_byte() {
        const LEN: usize = 4 << 20;
        let shortest = |make: &dyn Fn() -> Vec<u8>| -> Duration {
            let time = |_| {
                let start = Instant::now();
                black_box(make());
                start.elapsed()
            };
            (0..5).map(time).min().unwrap_or_default()
        };
        let whole = shortest(&|| pattern(black_box(3), 5, LEN));
        let one_by_one =
            shortest(&|| (0..LEN).map(|at| black_box(at as u32).wrapping_mul(3) as u8).collect());
        println!("recorded: 4 MiB of a pattern take {whole:?}, byte by byte {one_by_one:?}");
        assert!(whole * 2 < one_by_one, "{whole:?}, byte by byte {one_by_one:?}");
    }
}
