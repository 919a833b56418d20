//! Communicators: how far each of them is, and what an operation does once all its ranks are there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use super::fault::{Faults, Kind, Step};
use super::machine::Machine;
use super::math;
use crate::backend::{Enqueue, Operation, Status};
use crate::uses::SizeClass;

/// The call that asks is to hang; no status of a library.
pub(super) const HANGS: Status = Status(i32::MIN);

/// Everything of a fabric.
#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Machine,
    /// Nothing is set up when an operation comes first.
    pub(super) eager: bool,
    /// By process.
    pub(super) faults: Vec<Faults>,
    pub(super) comms: HashMap<usize, Comm>,
    pub(super) groups: HashMap<GroupKey, Group>,
    pub(super) released: bool,
    pub(super) workspaces: usize,
}

/// What makes ranks a group: the unique id, or the split that they come from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum GroupKey {
    Id(u64),
    /// Parent, which split of it, colour.
    Split(Box<GroupKey>, u32, u32),
}

/// The ranks that have met.
#[derive(Debug, Default)]
pub(super) struct Group {
    members: BTreeMap<u32, usize>,
    operations: HashMap<OpKey, Op>,
    /// By number of the split: who said what, and its child.
    splits: HashMap<u32, BTreeMap<u32, (Option<u32>, i32)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum OpKey {
    Collective(u64),
    /// From, to, and which of those.
    Pair(u32, u32, u64),
}

/// One operation, and who is how far with it.
#[derive(Debug, Default)]
struct Op {
    issued: BTreeMap<u32, Enqueue>,
    launched: HashSet<u32>,
}

/// One communicator.
#[derive(Debug)]
pub(super) struct Comm {
    pub(super) group: GroupKey,
    pub(super) size: u32,
    pub(super) rank: u32,
    /// As the fabric counts.
    pub(super) device: u32,
    /// As its process counts.
    pub(super) ordinal: u32,
    pub(super) process: usize,
    pub(super) error: Option<Status>,
    pub(super) work: Work,
    pub(super) since: Instant,
    pub(super) splits: u32,
    pub(super) revoked: bool,
    collectives: u64,
    pairs: HashMap<(u32, u32), u64>,
    /// What it has met: kind, peer, size.
    met: HashSet<(u8, u32, SizeClass)>,
}

/// What a communicator does in the background.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Idle,
    /// It was made with a size, a rank or an id that do not fit the others': the library waits for ever.
    Lost,
    /// Finds the others, then allocates so often.
    Init {
        allocations: u32,
    },
    /// Waits for so many ranks to call the same split.
    Split {
        parent: GroupKey,
        number: u32,
        color: u32,
        callers: u32,
    },
    /// Sets operations up, then launches them.
    Enqueue {
        operations: Vec<(u64, Setup)>,
    },
    Finalize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setup {
    key: OpKey,
    is_new: bool,
}

impl Comm {
    pub(super) fn new(group: GroupKey, size: u32, rank: u32, place: (usize, u32, u32), work: Work) -> Self {
        let (process, device, ordinal) = place;
        Comm {
            group,
            size,
            rank,
            device,
            ordinal,
            process,
            error: None,
            work,
            since: Instant::now(),
            splits: 0,
            revoked: false,
            collectives: 0,
            pairs: HashMap::new(),
            met: HashSet::new(),
        }
    }
}

impl State {
    /// Adds a communicator; its number. One whose place is taken never comes up.
    pub(super) fn add(&mut self, mut comm: Comm) -> usize {
        let number = self.machine.number() as usize;
        if matches!(comm.work, Work::Init { .. }) {
            let fits = comm.rank < comm.size && self.fits(&comm);
            let group = self.groups.entry(comm.group.clone()).or_default();
            if fits && !group.members.contains_key(&comm.rank) {
                group.members.insert(comm.rank, number);
            } else {
                comm.work = Work::Lost;
            }
        }
        self.comms.insert(number, comm);
        number
    }

    /// The others of the group believe in the same size.
    fn fits(&self, comm: &Comm) -> bool {
        let members = self.groups.get(&comm.group).map(|group| &group.members);
        members
            .into_iter()
            .flatten()
            .all(|(_, other)| self.comms.get(other).is_none_or(|o| o.size == comm.size))
    }

    /// Goes on with what a communicator does; where it stands.
    pub(super) fn advance(&mut self, number: usize) -> Status {
        let Some(comm) = self.comms.get_mut(&number) else { return Status::INVALID_ARGUMENT };
        if let Some(error) = comm.error {
            return error;
        }
        let step = match comm.work {
            Work::Idle => Step::State,
            Work::Init { .. } | Work::Lost => Step::InitProgress,
            Work::Split { .. } => Step::SplitProgress,
            Work::Enqueue { .. } | Work::Finalize => Step::EnqueueProgress,
        };
        match self.faults[comm.process].at(step, Some(comm.rank)) {
            Some(Kind::Delay(time)) if comm.since.elapsed() < time => return Status::IN_PROGRESS,
            Some(Kind::Fail(status)) => {
                comm.error = Some(status);
                return status;
            }
            Some(Kind::Hang) if step == Step::State => return HANGS,
            Some(Kind::Hang) => return Status::IN_PROGRESS,
            Some(Kind::Panic) => panic!("planted in {step:?} of rank {}", comm.rank),
            _ => {}
        }
        let done = match comm.work.clone() {
            Work::Idle => true,
            Work::Lost => false,
            Work::Init { allocations } => self.go_on_init(number, allocations),
            Work::Split { parent, number: split, color, callers } => {
                self.go_on_split(number, &parent, split, color, callers)
            }
            Work::Enqueue { operations } => self.go_on_enqueue(number, operations),
            Work::Finalize => self.is_quiet(number),
        };
        if !done {
            return Status::IN_PROGRESS;
        }
        if let Some(comm) = self.comms.get_mut(&number) {
            comm.work = Work::Idle;
        }
        Status::SUCCESS
    }

    fn go_on_init(&mut self, number: usize, mut allocations: u32) -> bool {
        let Some(comm) = self.comms.get_mut(&number) else { return false };
        let here = self.groups.get(&comm.group).map_or(0, |group| group.members.len());
        if here < comm.size as usize {
            return false;
        }
        while allocations > 0 && self.machine.allocate(comm.process, comm.device, number as u64) {
            allocations -= 1;
        }
        comm.work = Work::Init { allocations };
        allocations == 0
    }

    fn go_on_split(
        &mut self,
        number: usize,
        parent: &GroupKey,
        split: u32,
        color: u32,
        callers: u32,
    ) -> bool {
        let said = self.groups.get(parent).and_then(|group| group.splits.get(&split));
        let Some(said) = said.filter(|said| said.len() == callers as usize) else { return false };
        let same = said.iter().filter(|(_, (other, _))| *other == Some(color));
        let mut order: Vec<(i32, u32)> = same.map(|(rank, (_, key))| (*key, *rank)).collect();
        order.sort_unstable();
        let Some(comm) = self.comms.get_mut(&number) else { return false };
        let rank = order.iter().position(|(_, rank)| *rank == comm.rank).unwrap_or(0);
        comm.group = GroupKey::Split(Box::new(parent.clone()), split, color);
        (comm.rank, comm.size) = (rank as u32, order.len() as u32);
        comm.work = Work::Init { allocations: 1 };
        let (group, rank) = (comm.group.clone(), comm.rank);
        self.groups.entry(group).or_default().members.insert(rank, number);
        self.go_on_init(number, 1)
    }

    /// What a rank says in a split.
    pub(super) fn say(&mut self, parent: &GroupKey, split: u32, rank: u32, color: Option<u32>, key: i32) {
        let group = self.groups.entry(parent.clone()).or_default();
        group.splits.entry(split).or_default().insert(rank, (color, key));
    }

    /// Issues operations of one communicator.
    pub(super) fn issue(&mut self, number: usize, calls: &[Enqueue]) -> Status {
        let eager = self.eager;
        let Some(comm) = self.comms.get_mut(&number) else { return Status::INVALID_ARGUMENT };
        if comm.revoked || !matches!(comm.work, Work::Idle) {
            return Status::INVALID_USAGE;
        }
        let mut operations = Vec::new();
        for call in calls {
            let (kind, peer, bytes, key) = match call.operation {
                Operation::AllReduce { count, data_type, op, .. } => {
                    comm.collectives += 1;
                    let kind = 16 + data_type as u8 * 4 + op as u8;
                    (kind, 0, count * data_type.size_bytes(), OpKey::Collective(comm.collectives))
                }
                Operation::AllGather { count, data_type, .. } => {
                    comm.collectives += 1;
                    (0, 0, count * data_type.size_bytes(), OpKey::Collective(comm.collectives))
                }
                Operation::Send { count, data_type, peer, .. }
                | Operation::Recv { count, data_type, peer, .. } => {
                    if peer >= comm.size {
                        return Status::INVALID_ARGUMENT;
                    }
                    let sends = matches!(call.operation, Operation::Send { .. });
                    let pair = if sends { (comm.rank, peer) } else { (peer, comm.rank) };
                    let nth = comm.pairs.entry(pair).or_default();
                    *nth += 1;
                    (
                        1 + u8::from(sends),
                        peer,
                        count * data_type.size_bytes(),
                        OpKey::Pair(pair.0, pair.1, *nth),
                    )
                }
            };
            let is_new = comm.met.insert((kind, peer, SizeClass::of(bytes))) && !eager;
            let group = self.groups.entry(comm.group.clone()).or_default();
            group.operations.entry(key).or_default().issued.insert(comm.rank, *call);
            operations.push((call.stream.0 as u64, Setup { key, is_new }));
        }
        comm.work = Work::Enqueue { operations };
        comm.since = Instant::now();
        self.advance(number)
    }

    fn go_on_enqueue(&mut self, number: usize, mut operations: Vec<(u64, Setup)>) -> bool {
        let Some(comm) = self.comms.get(&number) else { return false };
        let (group_key, rank, size) = (comm.group.clone(), comm.rank, comm.size);
        let (process, device) = (comm.process, comm.device);
        // All have to be set up before one is launched: a group is one kernel.
        for (_, setup) in &mut operations {
            let Some(op) = self.groups.get(&group_key).and_then(|group| group.operations.get(&setup.key))
            else {
                continue;
            };
            if setup.is_new {
                let met = op.issued.len() == setup.key.ranks(size);
                if !met || !self.machine.allocate(process, device, number as u64) {
                    if let Some(comm) = self.comms.get_mut(&number) {
                        comm.work = Work::Enqueue { operations };
                    }
                    return false;
                }
                setup.is_new = false;
            }
        }
        for (stream, setup) in &operations {
            self.machine.launch(device, *stream as usize);
            let Some(group) = self.groups.get_mut(&group_key) else { continue };
            let Some(op) = group.operations.get_mut(&setup.key) else { continue };
            op.launched.insert(rank);
            if op.launched.len() == setup.key.ranks(size) {
                let op = group.operations.remove(&setup.key).unwrap_or_default();
                self.run(&group_key, &op);
            }
        }
        true
    }

    /// Does an operation that all its ranks have launched.
    fn run(&mut self, group: &GroupKey, op: &Op) {
        let members = self.groups.get(group).map(|group| group.members.clone()).unwrap_or_default();
        let sends: Vec<Vec<u8>> = op.issued.values().map(|call| self.source(call)).collect();
        for (rank, call) in &op.issued {
            let Some((device, process)) = members
                .get(rank)
                .and_then(|number| self.comms.get(number))
                .map(|comm| (comm.device, comm.process))
            else {
                continue;
            };
            let (recv, mut result) = match call.operation {
                Operation::AllReduce { recv, data_type, op, .. } => {
                    let mut result = sends[0].clone();
                    for other in &sends[1..] {
                        math::combine(&mut result, other, data_type, op);
                    }
                    (recv, result)
                }
                Operation::AllGather { recv, .. } => (recv, sends.concat()),
                Operation::Send { .. } => (0, Vec::new()),
                // The receiver's own source is empty.
                Operation::Recv { recv, .. } => (recv, sends.concat()),
            };
            if let Some(Kind::Fail(_)) = self.faults[process].at(Step::Result, Some(*rank)) {
                result.iter_mut().for_each(|byte| *byte ^= 1);
            }
            if let Some(bytes) = self.machine.bytes(recv, result.len()) {
                bytes.copy_from_slice(&result);
            }
            self.machine.complete(device, call.stream.0);
        }
    }

    fn source(&mut self, call: &Enqueue) -> Vec<u8> {
        let (send, len) = match call.operation {
            Operation::AllReduce { send, count, data_type, .. }
            | Operation::AllGather { send, count, data_type, .. }
            | Operation::Send { send, count, data_type, .. } => (send, count * data_type.size_bytes()),
            Operation::Recv { .. } => return Vec::new(),
        };
        self.machine.bytes(send, len).map(|bytes| bytes.to_vec()).unwrap_or_default()
    }

    fn is_quiet(&self, number: usize) -> bool {
        let Some(comm) = self.comms.get(&number) else { return true };
        let operations = self.groups.get(&comm.group).map(|group| &group.operations);
        operations.into_iter().flatten().all(|(_, op)| !op.issued.contains_key(&comm.rank))
    }

    /// Takes back what a communicator has under way: its kernels end, and nobody gets a result.
    pub(super) fn cancel(&mut self, number: usize) {
        let Some(comm) = self.comms.get_mut(&number) else { return };
        comm.work = Work::Idle;
        let (rank, device) = (comm.rank, comm.device);
        self.machine.release(comm.process, number as u64);
        let Some(group) = self.groups.get_mut(&comm.group) else { return };
        for op in group.operations.values_mut() {
            if let Some(call) = op.issued.remove(&rank) {
                if op.launched.remove(&rank) {
                    self.machine.complete(device, call.stream.0);
                }
            }
        }
        group.operations.retain(|_, op| !op.issued.is_empty());
    }

    /// Frees a communicator.
    pub(super) fn remove(&mut self, number: usize) {
        self.cancel(number);
        let Some(comm) = self.comms.remove(&number) else { return };
        let Some(group) = self.groups.get_mut(&comm.group) else { return };
        if group.members.get(&comm.rank) == Some(&number) {
            group.members.remove(&comm.rank);
        }
        if group.members.is_empty() {
            self.groups.remove(&comm.group);
        }
    }
}

impl OpKey {
    /// How many ranks take part.
    fn ranks(self, size: u32) -> usize {
        match self {
            OpKey::Collective(_) => size as usize,
            OpKey::Pair(..) => 2,
        }
    }
}
