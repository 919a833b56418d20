//! [`Pool`]: streams and buffers of devices, used again instead of freed.
//!
//! Freeing device memory waits for the device, and a clique that ends may do so while somebody's kernel runs for ever.
//! So what is given back waits here for the next clique on its device.

use std::fmt;
use std::sync::{Arc, Mutex};

use portway_fifo::Region;
use portway_fifo::cuda::{Context, Kind, Stream};

use crate::backend::{BackendError, RawStream, Workspace};
use crate::nccl::{device_error, lock};

#[derive(Clone, Debug)]
struct Parts {
    device: u32,
    stream: Stream,
    send: Region,
    recv: Region,
}

#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Vec<Parts>>);

impl Pool {
    /// Takes parts that are idle and long enough, or makes some.
    pub(super) fn take(
        self: &Arc<Self>,
        device: u32,
        context: &Context,
        len_bytes: usize,
    ) -> Result<Box<dyn Workspace>, BackendError> {
        let failed = |error| device_error("allocating its buffers", device, &error);
        let mut busy = Vec::new();
        let mut found = None;
        while let Some(parts) = self.pop(device, len_bytes) {
            if parts.stream.is_idle().is_ok_and(|idle| idle) {
                found = Some(parts);
                break;
            }
            busy.push(parts);
        }
        lock(&self.0).append(&mut busy);
        let parts = match found {
            Some(parts) => parts,
            None => Parts {
                device,
                stream: Stream::new(context).map_err(failed)?,
                send: context.allocate(Kind::Legacy, len_bytes as u64).map_err(failed)?,
                recv: context.allocate(Kind::Legacy, len_bytes as u64).map_err(failed)?,
            },
        };
        Ok(Box::new(Pooled { pool: self.clone(), parts, len_bytes }))
    }

    fn pop(&self, device: u32, len_bytes: usize) -> Option<Parts> {
        let mut all = lock(&self.0);
        let at = all
            .iter()
            .position(|parts| parts.device == device && parts.send.len_bytes() >= len_bytes as u64)?;
        Some(all.swap_remove(at))
    }
}

/// Parts of a pool, which go back to it.
struct Pooled {
    pool: Arc<Pool>,
    parts: Parts,
    len_bytes: usize,
}

impl Pooled {
    fn check(&self, call: &'static str, len_bytes: usize) -> Result<(), BackendError> {
        if len_bytes <= self.len_bytes {
            return Ok(());
        }
        let message = format!("{len_bytes} bytes, of which there are {}", self.len_bytes);
        Err(BackendError::Device { call, device: self.parts.device, message })
    }
}

impl Workspace for Pooled {
    fn stream(&self) -> RawStream {
        RawStream(self.parts.stream.raw() as usize)
    }

    fn send_address(&self) -> u64 {
        self.parts.send.address()
    }

    fn recv_address(&self) -> u64 {
        self.parts.recv.address()
    }

    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        const CALL: &str = "writing its buffers";
        self.check(CALL, bytes.len())?;
        let unwritten = vec![0xff; self.len_bytes];
        let written = self.parts.send.write(0, bytes).and_then(|()| self.parts.recv.write(0, &unwritten));
        written.map_err(|error| device_error(CALL, self.parts.device, &error))
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), BackendError> {
        const CALL: &str = "reading its buffer";
        self.check(CALL, bytes.len())?;
        let read = self.parts.recv.read(0, bytes);
        read.map_err(|error| device_error(CALL, self.parts.device, &error))
    }

    fn is_idle(&mut self) -> Result<bool, BackendError> {
        let idle = self.parts.stream.is_idle();
        idle.map_err(|error| device_error("the work in its stream", self.parts.device, &error))
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        lock(&self.pool.0).push(self.parts.clone());
    }
}

impl fmt::Debug for Pooled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace(device {}, {} bytes)", self.parts.device, self.len_bytes)
    }
}
