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
        if let Some(at) = seen.iter().zip(&part.expected).position(|(seen, expected)| seen != expected) {
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
            let own_at =
                |index: usize| if index % size as usize == lane.rank as usize { own } else { others };
            // A single rank is always the one whose turn it is, so its own value is the result.
            let result = if size == 1 { own } else { result };
            Some(Part {
                operation: Operation::AllReduce { send, recv, count, data_type, op },
                send: encode(count, data_type, own_at),
                expected: encode(count, data_type, |_| result),
            })
        }
        Use::AllGather => {
            let count = (bytes / size as usize).max(1);
            let pattern = |rank: u32| (0..count).map(move |index| pattern(rank, rank, index));
            Some(Part {
                operation: Operation::AllGather { send, recv, count, data_type: DataType::U8 },
                send: pattern(lane.rank).collect(),
                expected: (0..size).flat_map(pattern).collect(),
            })
        }
        Use::Peers { from, to } => {
            let data = || (0..bytes).map(|index| pattern(from, to, index)).collect();
            let (count, data_type) = (bytes, DataType::U8);
            if lane.rank == from {
                let operation = Operation::Send { send, count, data_type, peer: to };
                Some(Part { operation, send: data(), expected: Vec::new() })
            } else if lane.rank == to {
                let operation = Operation::Recv { recv, count, data_type, peer: from };
                Some(Part { operation, send: Vec::new(), expected: data() })
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

/// `count` elements, each 0, 1 or 2.
fn encode(count: usize, data_type: DataType, value: impl Fn(usize) -> u8) -> Vec<u8> {
    let encoded = [0, 1, 2].map(|number: u8| match data_type {
        DataType::F16 => [0u16, 0x3c00, 0x4000][usize::from(number)].to_le_bytes().to_vec(),
        DataType::BF16 => [0u16, 0x3f80, 0x4000][usize::from(number)].to_le_bytes().to_vec(),
        DataType::F32 => f32::from(number).to_le_bytes().to_vec(),
        DataType::F64 => f64::from(number).to_le_bytes().to_vec(),
        _ => u64::from(number).to_le_bytes()[..data_type.size_bytes()].to_vec(),
    });
    (0..count).flat_map(|index| encoded[usize::from(value(index))].iter().copied()).collect()
}

/// A byte that tells from where to where it goes, and its place.
fn pattern(from: u32, to: u32, index: usize) -> u8 {
    let mixed = (from.wrapping_mul(0x9e37_79b1))
        ^ (to.wrapping_mul(0x85eb_ca6b))
        ^ (index as u32).wrapping_mul(0xc2b2_ae35);
    (mixed >> 24) as u8
}
