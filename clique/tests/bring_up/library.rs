//! A communicator library whose ranks are processes: they meet in a folder, where each leaves a file for the others.
//!
//! It knows all-gathers, which is enough for a first use, and waits for ever for a rank that does not come, as the real
//! ones do.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use portway_clique::backend::{
    Backend, BackendError, Capabilities, CommConfig, Enqueue, ID_BYTES, LocalRank, Operation, RawComm,
    RawStream, Shape, SplitCall, Status, Variable, Workspace,
};

/// Called before a step, with its name.
pub type Before = Arc<dyn Fn(&str) + Send + Sync>;

pub struct Library {
    folder: PathBuf,
    before: Before,
    comms: Mutex<HashMap<usize, Comm>>,
    next: AtomicU64,
    memory: Arc<Mutex<HashMap<u64, Vec<u8>>>>,
}

#[derive(Clone)]
struct Comm {
    shape: Shape,
    /// What the files are called that its ranks leave, and how many times they have met.
    name: String,
    meetings: u32,
    /// Where the result of the meeting goes that has not ended; nowhere for the initialisation's.
    pending: Option<u64>,
    in_progress: bool,
}

impl Library {
    pub fn new(folder: PathBuf, before: Before) -> Self {
        let (comms, next) = (Mutex::default(), AtomicU64::new(1));
        Library { folder, before, comms, next, memory: Arc::default() }
    }

    fn file(&self, comm: &Comm, rank: u32) -> PathBuf {
        self.folder.join(format!("{}-{}-{rank}", comm.name, comm.meetings))
    }

    /// Leaves this rank's file of a meeting, whole or not at all.
    fn leave(&self, comm: &Comm, bytes: &[u8]) -> Status {
        let path = self.file(comm, comm.shape.rank);
        let part = path.with_extension("part");
        match std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, &path)) {
            Ok(()) => Status::IN_PROGRESS,
            Err(_) => Status::SYSTEM_ERROR,
        }
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

impl core::fmt::Debug for Library {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Library")
    }
}

impl Backend for Library {
    fn name(&self) -> String {
        "library of a test".to_owned()
    }

    fn version(&self) -> Result<u32, BackendError> {
        Ok(1)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn variable(&self, _name: &str, _value: &str) -> Variable {
        Variable::Ignored
    }

    fn device_uuid(&self, device: u32) -> Result<String, BackendError> {
        Ok(format!("GPU-{}-{device}", std::process::id()))
    }

    fn unique_id(&self) -> Result<[u8; ID_BYTES], BackendError> {
        let mut id = [0; ID_BYTES];
        id[..4].copy_from_slice(&std::process::id().to_le_bytes());
        id[4..12].copy_from_slice(&self.number().to_le_bytes());
        Ok(id)
    }

    unsafe fn init(
        &self,
        size: u32,
        ids: &[[u8; ID_BYTES]],
        _config: &CommConfig,
        locals: &[LocalRank],
        comms: &mut [RawComm],
    ) -> Status {
        (self.before)("init");
        let name: String = ids[0][..12].iter().map(|byte| format!("{byte:02x}")).collect();
        for (local, comm) in locals.iter().zip(comms) {
            let shape = Shape { size, rank: local.rank, device: local.device };
            let new = Comm { shape, name: name.clone(), meetings: 0, pending: None, in_progress: true };
            if self.leave(&new, &[]).is_error() {
                return Status::SYSTEM_ERROR;
            }
            *comm = RawComm(self.number() as usize);
            self.comms.lock().unwrap().insert(comm.0, new);
        }
        Status::IN_PROGRESS
    }

    unsafe fn state(&self, comm: RawComm) -> Status {
        let mut comms = self.comms.lock().unwrap();
        let Some(comm) = comms.get_mut(&comm.0) else { return Status::INVALID_ARGUMENT };
        if !comm.in_progress {
            return Status::SUCCESS;
        }
        let mut all = Vec::new();
        for rank in 0..comm.shape.size {
            match std::fs::read(self.file(comm, rank)) {
                Ok(bytes) => all.extend(bytes),
                Err(_) => return Status::IN_PROGRESS,
            }
        }
        if let Some(recv) = comm.pending.take() {
            if let Some(buffer) = self.memory.lock().unwrap().get_mut(&recv) {
                buffer[..all.len()].copy_from_slice(&all);
            }
        }
        comm.in_progress = false;
        Status::SUCCESS
    }

    unsafe fn shape(&self, comm: RawComm) -> Result<Shape, BackendError> {
        Ok(self.comms.lock().unwrap()[&comm.0].shape)
    }

    unsafe fn enqueue(&self, calls: &[Enqueue]) -> Status {
        (self.before)("enqueue");
        for call in calls {
            let Operation::AllGather { send, recv, count, .. } = call.operation else {
                return Status::INVALID_ARGUMENT;
            };
            let bytes = self.memory.lock().unwrap()[&send][..count].to_vec();
            let mut comms = self.comms.lock().unwrap();
            let Some(comm) = comms.get_mut(&call.comm.0) else { return Status::INVALID_ARGUMENT };
            comm.meetings += 1;
            (comm.pending, comm.in_progress) = (Some(recv), true);
            if self.leave(comm, &bytes).is_error() {
                return Status::SYSTEM_ERROR;
            }
        }
        Status::IN_PROGRESS
    }

    unsafe fn split(&self, _calls: &[SplitCall], _children: &mut [RawComm]) -> Status {
        Status::INVALID_USAGE
    }

    unsafe fn shrink(
        &self,
        _parents: &[RawComm],
        _excluded: &[u32],
        _children: &mut [RawComm],
    ) -> Result<Status, BackendError> {
        Err(BackendError::NotInLibrary { call: "shrink", library: self.name() })
    }

    unsafe fn revoke(&self, _comm: RawComm) -> Result<Status, BackendError> {
        Err(BackendError::NotInLibrary { call: "revoke", library: self.name() })
    }

    unsafe fn finalize(&self, _comms: &[RawComm]) -> Status {
        Status::SUCCESS
    }

    unsafe fn destroy(&self, comm: RawComm) -> Status {
        self.comms.lock().unwrap().remove(&comm.0);
        Status::SUCCESS
    }

    unsafe fn abort(&self, comm: RawComm) -> Status {
        self.comms.lock().unwrap().remove(&comm.0);
        Status::SUCCESS
    }

    unsafe fn explain(&self, _status: Status, _comm: Option<RawComm>) -> String {
        "no words".to_owned()
    }

    fn workspace(&self, _device: u32, len_bytes: usize) -> Result<Box<dyn Workspace>, BackendError> {
        let (send, recv) = (self.number(), self.number());
        let mut memory = self.memory.lock().unwrap();
        memory.extend([send, recv].map(|address| (address, vec![0; len_bytes])));
        Ok(Box::new(Buffers { memory: self.memory.clone(), send, recv, len_bytes }))
    }
}

#[derive(Debug)]
struct Buffers {
    memory: Arc<Mutex<HashMap<u64, Vec<u8>>>>,
    send: u64,
    recv: u64,
    len_bytes: usize,
}

impl Workspace for Buffers {
    fn stream(&self) -> RawStream {
        RawStream(self.send as usize)
    }

    fn send_address(&self) -> u64 {
        self.send
    }

    fn recv_address(&self) -> u64 {
        self.recv
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        let mut memory = self.memory.lock().unwrap();
        memory.get_mut(&self.send).unwrap()[..bytes.len()].copy_from_slice(bytes);
        memory.get_mut(&self.recv).unwrap().fill(0xff);
        Ok(())
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), BackendError> {
        bytes.copy_from_slice(&self.memory.lock().unwrap()[&self.recv][..bytes.len()]);
        Ok(())
    }

    fn is_idle(&mut self) -> Result<bool, BackendError> {
        // What was put in is done once its communicator is not in progress any more.
        Ok(true)
    }
}
