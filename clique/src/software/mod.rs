//! A communicator library in software: [`Software`], over the devices of a [`Fabric`].
//!
//! It plays what is dangerous about the real ones: initialisation and the first operation of each kind allocate in the
//! background; an allocation takes the process's driver lock and, with it, waits until the device runs no kernel; a kernel
//! stays on its device until all its ranks have launched it; wrong sizes, ranks taken twice and ids used twice wait for
//! ever. And it can be told to delay, fail, hang or panic at any [`Step`].
//!
//! All-reduce works for all types but the 16-bit floats. Nothing here waits while it holds a lock.

mod fault;
mod group;
mod machine;
mod math;
mod memory;

use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub use fault::{Fault, Kind, Step};
use group::{Comm, GroupKey, State, Work};
use machine::Machine;
use memory::Memory;

use crate::backend::{
    Backend, BackendError, Capabilities, CommConfig, DataType, Enqueue, ID_BYTES, LocalRank, Operation,
    RawComm, Shape, SplitCall, Status, Variable, Workspace,
};

/// How long anything is kept at most, so that a test that fails leaves nothing behind for ever.
const LIMIT: Duration = Duration::from_secs(120);
/// How often the initialisation of a communicator allocates.
const INIT_ALLOCATIONS: u32 = 2;

/// Some devices, and the processes that use them. Clones are the same.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// What is there of a fabric's resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Communicators that were neither destroyed nor aborted.
    pub communicators: usize,
    /// Workspaces.
    pub workspaces: usize,
    /// Kernels that have not ended.
    pub kernels: usize,
}

impl Fabric {
    /// So many devices.
    pub fn new(devices: u32) -> Self {
        Fabric::build(devices, false)
    }

    /// So many devices, for a library that sets everything up in its initialisation, and nothing when an operation comes
    /// first.
    pub fn eager(devices: u32) -> Self {
        Fabric::build(devices, true)
    }

    fn build(devices: u32, eager: bool) -> Self {
        let state = State {
            eager,
            machine: Machine::new(devices),
            faults: Vec::new(),
            comms: HashMap::new(),
            groups: HashMap::new(),
            released: false,
            workspaces: 0,
        };
        Fabric(Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Lets every call return that hangs, now and later.
    pub fn release(&self) {
        self.0.lock().released = true;
        self.0.changed.notify_all();
    }

    /// What is there now.
    pub fn live(&self) -> Live {
        let state = self.0.lock();
        let kernels = state.machine.resident.iter().map(|count| *count as usize).sum();
        Live { communicators: state.comms.len(), workspaces: state.workspaces, kernels }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The library as one process sees it. Clones are the same process.
#[derive(Clone, Debug)]
pub struct Software {
    fabric: Arc<Shared>,
    process: usize,
    visible: Vec<u32>,
    version: u32,
    capabilities: Capabilities,
}

impl Software {
    /// A new process that sees all devices.
    pub fn new(fabric: &Fabric) -> Self {
        let devices = fabric.0.lock().machine.resident.len() as u32;
        Software::with_devices(fabric, (0..devices).collect())
    }

    /// A new process that sees these devices of the fabric, and calls them 0, 1 and so on.
    pub fn with_devices(fabric: &Fabric, visible: Vec<u32>) -> Self {
        let process = {
            let mut state = fabric.0.lock();
            state.machine.drivers.push(None);
            state.faults.push(fault::Faults::default());
            state.faults.len() - 1
        };
        let capabilities = Capabilities { several_ids: true, shrink: true, revoke: true };
        Software { fabric: fabric.0.clone(), process, visible, version: 10000, capabilities }
    }

    /// Says that it is of this version, and can this much.
    #[must_use]
    pub fn with_version(mut self, version: u32, capabilities: Capabilities) -> Self {
        (self.version, self.capabilities) = (version, capabilities);
        self
    }

    /// Something goes wrong in this process.
    pub fn inject(&self, fault: Fault) {
        self.fabric.lock().faults[self.process].add(fault);
    }

    /// Nothing goes wrong any more.
    pub fn heal(&self) {
        self.fabric.lock().faults[self.process].clear();
    }

    /// Allocates on a device as the program around would: with the driver's lock, and once the device runs no kernel.
    /// The real driver has no limit; this one gives up after `within`.
    ///
    /// # Errors
    /// It did not come to it in time.
    pub fn allocate(&self, device: u32, within: Duration) -> Result<(), BackendError> {
        let device_index = self.device("allocate", device)?;
        let start = Instant::now();
        let mut state = self.fabric.lock();
        let holder = state.machine.number();
        while !state.machine.allocate(self.process, device_index, holder) {
            if start.elapsed() >= within {
                state.machine.release(self.process, holder);
                let message = format!("the driver's lock, or the device, was not free within {within:?}");
                return Err(BackendError::Device { call: "allocate", device, message });
            }
            // Others go on when they are asked how far they are, which wakes nobody.
            let waited = self.fabric.changed.wait_timeout(state, Duration::from_micros(20));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn device(&self, call: &'static str, device: u32) -> Result<u32, BackendError> {
        let known = self.visible.get(device as usize).copied();
        let known = known.filter(|index| (*index as usize) < self.fabric.lock().machine.resident.len());
        known.ok_or_else(|| BackendError::Device {
            call,
            device,
            message: "there is no such device".to_owned(),
        })
    }

    /// What goes wrong with a call; `None` if it goes on.
    fn trip(&self, step: Step, rank: Option<u32>) -> Option<Status> {
        let kind = self.fabric.lock().faults[self.process].at(step, rank)?;
        match kind {
            Kind::Delay(time) => {
                std::thread::sleep(time);
                None
            }
            Kind::Fail(status) => Some(status),
            Kind::Panic => panic!("planted in {step:?}"),
            Kind::Hang => Some(self.hang()),
        }
    }

    /// Until it is released.
    fn hang(&self) -> Status {
        let state = self.fabric.lock();
        let kept = self.fabric.changed.wait_timeout_while(state, LIMIT, |state| !state.released);
        drop(kept.unwrap_or_else(PoisonError::into_inner));
        Status::INTERNAL_ERROR
    }

    fn failed(&self, call: &'static str, status: Status) -> BackendError {
        BackendError::Status { call, status, message: "planted".to_owned() }
    }

    fn rank_of(&self, comm: RawComm) -> Option<u32> {
        self.fabric.lock().comms.get(&comm.0).map(|comm| comm.rank)
    }

    /// A call for a communicator fails, and it keeps the error.
    fn refuse(&self, comm: RawComm, status: Status) -> Status {
        if let Some(comm) = self.fabric.lock().comms.get_mut(&comm.0) {
            comm.error = Some(status);
        }
        status
    }

    fn not_there(&self, call: &'static str) -> BackendError {
        BackendError::NotInLibrary { call, library: self.name() }
    }

    /// Makes children: for each parent its colour and key. `callers` is how many ranks take part.
    fn children(
        &self,
        calls: &[SplitCall],
        children: &mut [RawComm],
        callers: impl Fn(&Comm) -> u32,
    ) -> Status {
        for call in calls {
            if let Some(status) = self.trip(Step::Split, self.rank_of(call.parent)) {
                return self.refuse(call.parent, status);
            }
        }
        let mut state = self.fabric.lock();
        for (call, child) in calls.iter().zip(children) {
            let Some(parent) = state.comms.get_mut(&call.parent.0) else { return Status::INVALID_ARGUMENT };
            parent.splits += 1;
            let (number, group, rank, size) = (parent.splits, parent.group.clone(), parent.rank, parent.size);
            let place = (parent.process, parent.device, parent.ordinal);
            let callers = callers(parent);
            state.say(&group, number, rank, call.color, call.key);
            if let Some(color) = call.color {
                let work = Work::Split { parent: group.clone(), number, color, callers };
                *child = RawComm(state.add(Comm::new(group, size, rank, place, work)));
            }
        }
        Status::IN_PROGRESS
    }
}

/// A unique id: a number that no other has.
fn id_of(number: u64) -> [u8; ID_BYTES] {
    let mut id = [0; ID_BYTES];
    id[..8].copy_from_slice(&number.to_le_bytes());
    id
}

impl Backend for Software {
    fn name(&self) -> String {
        format!("software {}", self.version)
    }

    fn version(&self) -> Result<u32, BackendError> {
        Ok(self.version)
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn variable(&self, name: &str, value: &str) -> Variable {
        match (name, value) {
            ("PORTWAY_SOFTWARE_BLOCKING", "1") => Variable::Refused("not 1: calls would block"),
            ("PORTWAY_SOFTWARE_INTERFACE", _) => Variable::Hardware,
            _ if name.starts_with("PORTWAY_SOFTWARE_") => Variable::Compared,
            _ => Variable::Ignored,
        }
    }

    fn device_uuid(&self, device: u32) -> Result<String, BackendError> {
        if let Some(status) = self.trip(Step::Uuid, None) {
            return Err(self.failed("device_uuid", status));
        }
        let device = self.device("device_uuid", device)?;
        Ok(self.fabric.lock().machine.uuids[device as usize].clone())
    }

    fn unique_id(&self) -> Result<[u8; ID_BYTES], BackendError> {
        if let Some(status) = self.trip(Step::UniqueId, None) {
            return Err(self.failed("unique_id", status));
        }
        Ok(id_of(self.fabric.lock().machine.number()))
    }

    unsafe fn init(
        &self,
        size: u32,
        ids: &[[u8; ID_BYTES]],
        _config: &CommConfig,
        locals: &[LocalRank],
        comms: &mut [RawComm],
    ) -> Status {
        let Some(number) = ids.first().and_then(|id| id.first_chunk().copied().map(u64::from_le_bytes))
        else {
            return Status::INVALID_ARGUMENT;
        };
        for (local, comm) in locals.iter().zip(comms) {
            if let Some(status) = self.trip(Step::Init, Some(local.rank)) {
                return status;
            }
            let Ok(device) = self.device("init", local.device) else { return Status::INVALID_ARGUMENT };
            let place = (self.process, device, local.device);
            let work = Work::Init { allocations: INIT_ALLOCATIONS };
            let new = Comm::new(GroupKey::Id(number), size, local.rank, place, work);
            *comm = RawComm(self.fabric.lock().add(new));
        }
        Status::IN_PROGRESS
    }

    unsafe fn state(&self, comm: RawComm) -> Status {
        let status = self.fabric.lock().advance(comm.0);
        if status == group::HANGS { self.hang() } else { status }
    }

    unsafe fn shape(&self, comm: RawComm) -> Result<Shape, BackendError> {
        if let Some(status) = self.trip(Step::Shape, self.rank_of(comm)) {
            return Err(self.failed("shape", status));
        }
        let state = self.fabric.lock();
        let comm = state.comms.get(&comm.0).ok_or_else(|| self.failed("shape", Status::INVALID_ARGUMENT))?;
        Ok(Shape { size: comm.size, rank: comm.rank, device: comm.ordinal })
    }

    unsafe fn enqueue(&self, calls: &[Enqueue]) -> Status {
        for call in calls {
            if let Some(status) = self.trip(Step::Enqueue, self.rank_of(call.comm)) {
                return self.refuse(call.comm, status);
            }
            let half = [DataType::F16, DataType::BF16];
            if matches!(call.operation, Operation::AllReduce { data_type, .. } if half.contains(&data_type)) {
                return Status::INVALID_ARGUMENT;
            }
        }
        let mut by_comm: Vec<(usize, Vec<Enqueue>)> = Vec::new();
        for call in calls {
            match by_comm.iter_mut().find(|(comm, _)| *comm == call.comm.0) {
                Some((_, calls)) => calls.push(*call),
                None => by_comm.push((call.comm.0, vec![*call])),
            }
        }
        let mut state = self.fabric.lock();
        let mut all = Status::SUCCESS;
        for (comm, calls) in by_comm {
            let status = state.issue(comm, &calls);
            all = if all.is_error() || status == Status::SUCCESS { all } else { status };
        }
        self.fabric.changed.notify_all();
        all
    }

    unsafe fn split(&self, calls: &[SplitCall], children: &mut [RawComm]) -> Status {
        self.children(calls, children, |parent| parent.size)
    }

    unsafe fn shrink(
        &self,
        parents: &[RawComm],
        excluded: &[u32],
        children: &mut [RawComm],
    ) -> Result<Status, BackendError> {
        if !self.capabilities.shrink {
            return Err(self.not_there("shrink"));
        }
        let key = |parent: &RawComm| self.rank_of(*parent).unwrap_or(0) as i32;
        let calls: Vec<SplitCall> = parents
            .iter()
            .map(|parent| SplitCall { parent: *parent, color: Some(0), key: key(parent) })
            .collect();
        Ok(self.children(&calls, children, |parent| parent.size - excluded.len() as u32))
    }

    unsafe fn revoke(&self, comm: RawComm) -> Result<Status, BackendError> {
        if !self.capabilities.revoke {
            return Err(self.not_there("revoke"));
        }
        let mut state = self.fabric.lock();
        state.cancel(comm.0);
        if let Some(comm) = state.comms.get_mut(&comm.0) {
            comm.revoked = true;
        }
        self.fabric.changed.notify_all();
        Ok(Status::SUCCESS)
    }

    unsafe fn finalize(&self, comms: &[RawComm]) -> Status {
        for comm in comms {
            if let Some(status) = self.trip(Step::Finalize, self.rank_of(*comm)) {
                return self.refuse(*comm, status);
            }
            if let Some(comm) = self.fabric.lock().comms.get_mut(&comm.0) {
                comm.work = Work::Finalize;
            }
        }
        Status::IN_PROGRESS
    }

    unsafe fn destroy(&self, comm: RawComm) -> Status {
        let tripped = self.trip(Step::Destroy, self.rank_of(comm));
        self.fabric.lock().remove(comm.0);
        self.fabric.changed.notify_all();
        tripped.unwrap_or(Status::SUCCESS)
    }

    unsafe fn abort(&self, comm: RawComm) -> Status {
        let tripped = self.trip(Step::Abort, self.rank_of(comm));
        self.fabric.lock().remove(comm.0);
        self.fabric.changed.notify_all();
        tripped.unwrap_or(Status::SUCCESS)
    }

    unsafe fn explain(&self, _status: Status, comm: Option<RawComm>) -> String {
        let rank = comm.and_then(|comm| self.rank_of(comm));
        rank.map_or_else(|| "no rank's".to_owned(), |rank| format!("rank {rank}'s"))
    }

    fn workspace(&self, device: u32, len_bytes: usize) -> Result<Box<dyn Workspace>, BackendError> {
        if let Some(status) = self.trip(Step::Workspace, None) {
            return Err(self.failed("workspace", status));
        }
        self.allocate(device, LIMIT)?;
        let mut state = self.fabric.lock();
        let (send, recv) = (state.machine.map(len_bytes), state.machine.map(len_bytes));
        let stream = state.machine.number() as usize;
        state.workspaces += 1;
        Ok(Box::new(Memory { fabric: self.fabric.clone(), device, send, recv, stream, len_bytes }))
    }
}
