//! [`Twisted`]: NCCL as a participant sees it that does not do its part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portway_clique::backend::{
    Backend, BackendError, Capabilities, CommConfig, Enqueue, ID_BYTES, LocalRank, RawComm, Shape, SplitCall,
    Status, Variable, Workspace,
};
use portway_clique::rendezvous::Hub;

use super::{Machine, Participant, builder};

/// What it does instead of its part of the initialisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instead {
    /// Does not come back for so long, and fails then.
    Stay(Duration),
    /// Fails after so long.
    Fail(Duration),
}

/// Says that its devices are others than they are, so that one GPU passes for several, and does something else in
/// place of the initialisation. It never has a communicator, so nothing else is asked of it.
#[derive(Debug)]
pub struct Twisted {
    library: Arc<dyn Backend>,
    instead: Instead,
    begun: AtomicU64,
}

impl Twisted {
    pub fn new(library: Arc<dyn Backend>, instead: Instead) -> Arc<Self> {
        Arc::new(Twisted { library, instead, begun: AtomicU64::new(0) })
    }

    /// How many initialisations were begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }
}

impl Backend for Twisted {
    fn name(&self) -> String {
        self.library.name()
    }

    fn version(&self) -> Result<u32, BackendError> {
        self.library.version()
    }

    fn capabilities(&self) -> Capabilities {
        self.library.capabilities()
    }

    fn variable(&self, name: &str, value: &str) -> Variable {
        self.library.variable(name, value)
    }

    fn device_uuid(&self, device: u32) -> Result<String, BackendError> {
        Ok(format!("GPU-that-is-not-there-{device}"))
    }

    fn unique_id(&self) -> Result<[u8; ID_BYTES], BackendError> {
        self.library.unique_id()
    }

    unsafe fn init(
        &self,
        _size: u32,
        _ids: &[[u8; ID_BYTES]],
        _config: &CommConfig,
        _locals: &[LocalRank],
        comms: &mut [RawComm],
    ) -> Status {
        comms.fill(RawComm::NULL);
        self.begun.fetch_add(1, Ordering::AcqRel);
        let (Instead::Stay(time) | Instead::Fail(time)) = self.instead;
        let end = Instant::now() + time;
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        Status::SYSTEM_ERROR
    }

    unsafe fn state(&self, _comm: RawComm) -> Status {
        Status::INVALID_ARGUMENT
    }

    unsafe fn shape(&self, _comm: RawComm) -> Result<Shape, BackendError> {
        Err(self.lacks("shape"))
    }

    unsafe fn enqueue(&self, _calls: &[Enqueue]) -> Status {
        Status::INVALID_ARGUMENT
    }

    unsafe fn split(&self, _calls: &[SplitCall], _children: &mut [RawComm]) -> Status {
        Status::INVALID_ARGUMENT
    }

    unsafe fn shrink(
        &self,
        _parents: &[RawComm],
        _excluded: &[u32],
        _children: &mut [RawComm],
    ) -> Result<Status, BackendError> {
        Err(self.lacks("shrink"))
    }

    unsafe fn revoke(&self, _comm: RawComm) -> Result<Status, BackendError> {
        Err(self.lacks("revoke"))
    }

    unsafe fn finalize(&self, _comms: &[RawComm]) -> Status {
        Status::INVALID_ARGUMENT
    }

    unsafe fn destroy(&self, _comm: RawComm) -> Status {
        Status::INVALID_ARGUMENT
    }

    unsafe fn abort(&self, _comm: RawComm) -> Status {
        Status::INVALID_ARGUMENT
    }

    unsafe fn explain(&self, _status: Status, _comm: Option<RawComm>) -> String {
        "a participant that does not do its part".to_owned()
    }

    fn workspace(&self, device: u32, len_bytes: usize) -> Result<Box<dyn Workspace>, BackendError> {
        self.library.workspace(device, len_bytes)
    }
}

impl Twisted {
    fn lacks(&self, call: &'static str) -> BackendError {
        BackendError::NotInLibrary { call, library: self.library.name() }
    }
}

/// The ranks of the GPUs, and one more that does something else in place of its initialisation, so that the library
/// waits for it.
pub fn with_a_twisted_one(machine: &Machine, size: u32, attempt: u64, instead: Instead) -> Vec<Participant> {
    let hub = Hub::new(size).unwrap();
    let twisted = Twisted::new(machine.backend(), instead);
    let participant = |rank| {
        let is_last = rank == size - 1;
        let backend: Arc<dyn Backend> = if is_last { twisted.clone() } else { machine.backend() };
        let device = if is_last { 0 } else { rank };
        let builder = builder("device", size, attempt).local(rank, device);
        Participant { builder, backend, place: Arc::new(hub.join(rank).unwrap()) }
    };
    (0..size).map(participant).collect()
}
