//! What a clique asks for, as calls of NCCL.

use core::ffi::{c_int, c_void};
use core::ptr;

use crate::backend::{
    Backend, BackendError, Capabilities, CommConfig, Enqueue, ID_BYTES, LocalRank, Operation, RawComm, Shape,
    SplitCall, Status, Variable, Workspace,
};
use crate::nccl::comms::{Found, Slot};
use crate::nccl::config::{self, Filled};
use crate::nccl::table::{Comm, NO_COLOR, REVOKE_DEFAULT, RawConfig, RawStatus, SHRINK_ABORT, UniqueId};
use crate::nccl::{Nccl, lock, text};

/// The first error, else the last status.
fn worse(first: Status, then: Status) -> Status {
    if first.is_error() { first } else { then }
}

impl Nccl {
    /// Makes calls one group. Its end is called in any case: without it the thread would collect calls for ever.
    fn group(&self, calls: impl FnOnce() -> Status) -> Status {
        // SAFETY: has no arguments.
        let begun = Status(unsafe { (self.table.ncclGroupStart)() });
        if begun.is_error() {
            return begun;
        }
        let called = calls();
        // SAFETY: closes the group begun above, in the same thread.
        worse(called, Status(unsafe { (self.table.ncclGroupEnd)() }))
    }

    /// Calls something for each of several communicators, with its device current, until one fails.
    fn for_each<T: Copy>(
        &self,
        items: &[T],
        comm: impl Fn(&T) -> RawComm,
        mut call: impl FnMut(usize, &T, Found) -> RawStatus,
    ) -> Status {
        for (at, item) in items.iter().enumerate() {
            let status = match self.made(comm(item)) {
                Ok(found) => match self.on_device(found.device, || call(at, item, found)) {
                    Ok(status) => Status(status),
                    Err(error) => self.refuse(Status::UNHANDLED_CUDA_ERROR, error.to_string()),
                },
                Err(status) => status,
            };
            if status.is_error() {
                return status;
            }
        }
        Status::SUCCESS
    }

    /// A communicator that has a handle.
    fn made(&self, comm: RawComm) -> Result<Found, Status> {
        match self.comms.find(comm) {
            Some(found) if !found.handle.is_null() => Ok(found),
            Some(_) => {
                Err(self.refuse(Status::INVALID_USAGE, "the communicator is a child that is not made yet"))
            }
            None => Err(self.refuse(Status::INVALID_ARGUMENT, "there is no such communicator, or no longer")),
        }
    }

    fn check(&self, call: &'static str, status: RawStatus) -> Result<(), BackendError> {
        let status = Status(status);
        if status == Status::SUCCESS {
            return Ok(());
        }
        // SAFETY: names no communicator.
        let message = unsafe { self.explain(status, None) };
        Err(BackendError::Status { call, status, message })
    }

    /// Aborts a communicator by the library's own handle.
    ///
    /// # Safety
    /// - The handle is of a communicator that is neither destroyed nor aborted, and nobody names it after this.
    unsafe fn abort_handle(&self, device: u32, handle: Comm) -> Status {
        // SAFETY: the caller's.
        let call = || unsafe { (self.table.ncclCommAbort)(handle) };
        // The library finds the device by itself; this keeps the thread's own.
        Status(self.on_device(device, call).unwrap_or_else(|_| call()))
    }

    /// The children of a group of splits, taken in when the group has been called.
    fn children(
        &self,
        slots: &[Option<Slot>],
        parents: impl Iterator<Item = RawComm>,
        children: &mut [RawComm],
    ) {
        for ((slot, parent), child) in slots.iter().zip(parents).zip(children) {
            let made = slot.zip(self.comms.find(parent));
            *child =
                made.map_or(RawComm::NULL, |(slot, found)| self.comms.add_child(slot, found.device, parent));
        }
    }
}

impl Backend for Nccl {
    fn name(&self) -> String {
        self.library()
    }

    fn version(&self) -> Result<u32, BackendError> {
        Ok(self.version)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            several_ids: self.table.ncclCommInitRankScalable.is_some(),
            shrink: self.table.ncclCommShrink.is_some(),
            revoke: self.table.ncclCommRevoke.is_some(),
        }
    }

    fn variable(&self, name: &str, value: &str) -> Variable {
        config::variable(name, value)
    }

    fn device_uuid(&self, device: u32) -> Result<String, BackendError> {
        let context = self.context(device)?;
        let hex: String = context.attributes().uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
    }

    fn unique_id(&self) -> Result<[u8; ID_BYTES], BackendError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: `id` outlives the call.
        let status = unsafe { (self.table.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", status).map(|()| id.0)
    }

    unsafe fn init(
        &self,
        size: u32,
        ids: &[[u8; ID_BYTES]],
        config: &CommConfig,
        locals: &[LocalRank],
        comms: &mut [RawComm],
    ) -> Status {
        comms.fill(RawComm::NULL);
        let (Some(filled), Ok(size)) = (Filled::new(config, self.version), c_int::try_from(size)) else {
            return self
                .refuse(Status::INVALID_ARGUMENT, "a number or text of the configuration does not fit");
        };
        let mut ids: Vec<UniqueId> = ids.iter().copied().map(UniqueId).collect();
        let first = match (ids.first(), self.table.ncclCommInitRankScalable) {
            (None, _) => return self.refuse(Status::INVALID_ARGUMENT, "no unique id"),
            (Some(_), None) if ids.len() > 1 => {
                let why = self.missing("ncclCommInitRankScalable").to_string();
                return self.refuse(Status::INVALID_ARGUMENT, why);
            }
            (Some(first), _) => *first,
        };
        let slots: Vec<Slot> = locals.iter().map(|_| Slot::new()).collect();
        let mut configs: Vec<_> = locals.iter().map(|_| filled.raw).collect();
        let status = self.group(|| {
            for ((local, slot), raw) in locals.iter().zip(&slots).zip(&mut configs) {
                let rank = c_int::try_from(local.rank).unwrap_or(-1);
                let count = ids.len() as c_int;
                let called = self.on_device(local.device, || match self.table.ncclCommInitRankScalable {
                    // SAFETY: the slot lives until the library has written to it; the ids and the configuration outlive
                    // the call, which copies them, and the ids are what the caller says.
                    Some(scalable) if count > 1 => unsafe {
                        scalable(slot.pointer(), size, rank, count, ids.as_mut_ptr(), raw)
                    },
                    // SAFETY: as above.
                    _ => unsafe {
                        (self.table.ncclCommInitRankConfig)(slot.pointer(), size, first, rank, raw)
                    },
                });
                let status = match called {
                    Ok(status) => Status(status),
                    Err(error) => self.refuse(Status::UNHANDLED_CUDA_ERROR, error.to_string()),
                };
                if status.is_error() {
                    return status;
                }
            }
            Status::SUCCESS
        });
        for ((local, slot), comm) in locals.iter().zip(slots).zip(comms) {
            *comm = self.comms.add(slot, local.device);
        }
        if !status.is_error() && !configs.iter().all(RawConfig::is_non_blocking) {
            return self
                .refuse(Status::INVALID_USAGE, "the library has changed the communicators to blocking ones");
        }
        status
    }

    unsafe fn state(&self, comm: RawComm) -> Status {
        let Some(found) = self.comms.find(comm) else { return Status::INVALID_ARGUMENT };
        if let Some(parent) = found.parent {
            // SAFETY: the caller keeps the parent while a child of it is being made.
            let making = unsafe { self.state(parent) };
            if making != Status::SUCCESS {
                return making;
            }
        }
        // The library tells the handle before the parent's state, so this is the last word.
        let Some(found) = self.comms.find(comm).filter(|found| !found.handle.is_null()) else {
            return self.refuse(Status::INTERNAL_ERROR, "the parent is done and has made no child");
        };
        let mut state = Status::SUCCESS.0;
        // SAFETY: the caller says that the communicator is alive; `state` outlives the call.
        let status = Status(unsafe { (self.table.ncclCommGetAsyncError)(found.handle, &mut state) });
        let state = worse(status, Status(state));
        if state == Status::SUCCESS {
            self.comms.settle_children(comm);
        }
        state
    }

    fn handle(&self, comm: RawComm) -> RawComm {
        self.comms.find(comm).map_or(RawComm::NULL, |found| RawComm(found.handle as usize))
    }

    unsafe fn shape(&self, comm: RawComm) -> Result<Shape, BackendError> {
        let found = self.made(comm).map_err(|status| BackendError::Status {
            call: "ncclCommCount",
            status,
            // SAFETY: names no communicator.
            message: unsafe { self.explain(status, None) },
        })?;
        let calls = [
            ("ncclCommCount", self.table.ncclCommCount),
            ("ncclCommUserRank", self.table.ncclCommUserRank),
            ("ncclCommCuDevice", self.table.ncclCommCuDevice),
        ];
        let mut values = [0; 3];
        for ((call, function), value) in calls.into_iter().zip(&mut values) {
            // SAFETY: the caller says that the communicator is alive and done; `value` outlives the call.
            self.check(call, unsafe { function(found.handle, value) })?;
        }
        let [size, rank, device] = values.map(|value| u32::try_from(value).unwrap_or(u32::MAX));
        Ok(Shape { size, rank, device })
    }

    unsafe fn enqueue(&self, calls: &[Enqueue]) -> Status {
        let table = &self.table;
        self.group(|| {
            self.for_each(
                calls,
                |call| call.comm,
                |_, call, found| {
                    let (comm, stream) = (found.handle, call.stream.0 as *mut c_void);
                    match call.operation {
                        Operation::AllReduce { send, recv, count, data_type, op } => {
                            let (send, recv) = (send as *const c_void, recv as *mut c_void);
                            let (data_type, op) = (data_type as c_int, op as c_int);
                            // SAFETY: the caller vouches for communicator, memory and stream.
                            unsafe { (table.ncclAllReduce)(send, recv, count, data_type, op, comm, stream) }
                        }
                        Operation::AllGather { send, recv, count, data_type } => {
                            let (send, recv) = (send as *const c_void, recv as *mut c_void);
                            // SAFETY: as above.
                            unsafe {
                                (table.ncclAllGather)(send, recv, count, data_type as c_int, comm, stream)
                            }
                        }
                        Operation::Send { send, count, data_type, peer } => {
                            let peer = c_int::try_from(peer).unwrap_or(-1);
                            let send = send as *const c_void;
                            // SAFETY: as above.
                            unsafe { (table.ncclSend)(send, count, data_type as c_int, peer, comm, stream) }
                        }
                        Operation::Recv { recv, count, data_type, peer } => {
                            let peer = c_int::try_from(peer).unwrap_or(-1);
                            let recv = recv as *mut c_void;
                            // SAFETY: as above.
                            unsafe { (table.ncclRecv)(recv, count, data_type as c_int, peer, comm, stream) }
                        }
                    }
                },
            )
        })
    }

    unsafe fn split(&self, calls: &[SplitCall], children: &mut [RawComm]) -> Status {
        children.fill(RawComm::NULL);
        // One for every call: without a colour the library writes too.
        let slots: Vec<Slot> = calls.iter().map(|_| Slot::new()).collect();
        let mut made = vec![None; calls.len()];
        let status = self.group(|| {
            self.for_each(
                calls,
                |call| call.parent,
                |at, call, found| {
                    let color = match call.color {
                        Some(color) => c_int::try_from(color).unwrap_or(-2), // a number that the library refuses
                        None => NO_COLOR,
                    };
                    // SAFETY: the slot lives until the library has written to it; the caller vouches for the parent;
                    // without a configuration the child has its parent's.
                    let status = unsafe {
                        (self.table.ncclCommSplit)(
                            found.handle,
                            color,
                            call.key,
                            slots[at].pointer(),
                            ptr::null_mut(),
                        )
                    };
                    if !Status(status).is_error() && call.color.is_some() {
                        made[at] = Some(slots[at]);
                    }
                    status
                },
            )
        });
        self.children(&made, calls.iter().map(|call| call.parent), children);
        status
    }

    unsafe fn shrink(
        &self,
        parents: &[RawComm],
        excluded: &[u32],
        children: &mut [RawComm],
    ) -> Result<Status, BackendError> {
        children.fill(RawComm::NULL);
        let shrink = self.table.ncclCommShrink.ok_or_else(|| self.missing("ncclCommShrink"))?;
        let excluded: Vec<c_int> = excluded.iter().map(|rank| c_int::try_from(*rank).unwrap_or(-1)).collect();
        let mut made = vec![None; parents.len()];
        let status = self.group(|| {
            self.for_each(
                parents,
                |parent| *parent,
                |at, _, found| {
                    let slot = Slot::new();
                    let mut excluded = excluded.clone(); // the library sorts it
                    let count = excluded.len() as c_int;
                    // SAFETY: as in `split`; the list outlives the call, which copies it.
                    let status = unsafe {
                        shrink(
                            found.handle,
                            excluded.as_mut_ptr(),
                            count,
                            slot.pointer(),
                            ptr::null_mut(),
                            SHRINK_ABORT,
                        )
                    };
                    if !Status(status).is_error() {
                        made[at] = Some(slot);
                    }
                    status
                },
            )
        });
        self.children(&made, parents.iter().copied(), children);
        Ok(status)
    }

    unsafe fn revoke(&self, comm: RawComm) -> Result<Status, BackendError> {
        let revoke = self.table.ncclCommRevoke.ok_or_else(|| self.missing("ncclCommRevoke"))?;
        // SAFETY: the caller vouches for the communicator.
        Ok(self.for_each(
            &[comm],
            |comm| *comm,
            |_, _, found| unsafe { revoke(found.handle, REVOKE_DEFAULT) },
        ))
    }

    unsafe fn finalize(&self, comms: &[RawComm]) -> Status {
        let finalize = self.table.ncclCommFinalize;
        // SAFETY: the caller vouches for the communicators.
        self.group(|| self.for_each(comms, |comm| *comm, |_, _, found| unsafe { finalize(found.handle) }))
    }

    unsafe fn destroy(&self, comm: RawComm) -> Status {
        let destroy = self.table.ncclCommDestroy;
        let device = self.comms.find(comm).map_or(0, |found| found.device);
        for child in self.comms.abandoned_by(comm) {
            // SAFETY: nobody has the child's name any more, and the split that told its handle is over: the caller says
            // that the parent is not in progress.
            unsafe { self.abort_handle(device, child) };
        }
        // SAFETY: the caller vouches for the communicator, and nobody names it after this.
        let status = self.for_each(&[comm], |comm| *comm, |_, _, found| unsafe { destroy(found.handle) });
        self.comms.remove(comm);
        status
    }

    unsafe fn abort(&self, comm: RawComm) -> Status {
        if self.comms.abandon(comm) {
            return Status::SUCCESS; // it ends with its parent, which is aborted too
        }
        let Some(found) = self.comms.find(comm) else {
            return self.refuse(Status::INVALID_ARGUMENT, "there is no such communicator, or no longer");
        };
        // SAFETY: the caller vouches for the communicator, and nobody names it after this.
        let status = unsafe { self.abort_handle(found.device, found.handle) };
        for child in self.comms.abandoned_by(comm) {
            // SAFETY: nobody has the child's name any more, and its split has ended with its parent.
            unsafe { self.abort_handle(found.device, child) };
        }
        self.comms.remove(comm);
        status
    }

    unsafe fn explain(&self, status: Status, comm: Option<RawComm>) -> String {
        // SAFETY: the library returns a text for any number.
        let name = unsafe { (self.table.ncclGetErrorString)(status.0) };
        // SAFETY: it is a constant of the library.
        let name = unsafe { text(name) };
        let handle =
            comm.and_then(|comm| self.comms.find(comm)).map_or(ptr::null_mut(), |found| found.handle);
        // SAFETY: the caller vouches for the communicator, if there is one; null is allowed.
        let last = unsafe { (self.table.ncclGetLastError)(handle) };
        // SAFETY: it is a buffer of the library, which always ends in a zero and is 1,024 bytes long.
        let last = unsafe { text(last) };
        let note = lock(&self.note).take_if(|(of, _)| *of == status).map(|(_, why)| why);
        let parts = [Some(name), note, Some(last.trim().to_owned())].into_iter().flatten();
        parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
    }

    fn workspace(&self, device: u32, len_bytes: usize) -> Result<Box<dyn Workspace>, BackendError> {
        self.pool.take(device, &self.context(device)?, len_bytes)
    }
}
