//! A stream and two buffers of a device.

use std::sync::Arc;

use super::Shared;
use crate::backend::{BackendError, RawStream, Workspace};

/// A workspace.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) fabric: Arc<Shared>,
    pub(super) device: u32,
    pub(super) send: u64,
    pub(super) recv: u64,
    pub(super) stream: usize,
    pub(super) len_bytes: usize,
}

impl Memory {
    fn too_long(&self, call: &'static str, len: usize) -> BackendError {
        let message = format!("{len} bytes: the buffer has {}", self.len_bytes);
        BackendError::Device { call, device: self.device, message }
    }
}

impl Workspace for Memory {
    fn stream(&self) -> RawStream {
        RawStream(self.stream)
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
        let mut state = self.fabric.lock();
        let buffer =
            state.machine.bytes(self.send, bytes.len()).ok_or_else(|| self.too_long("write", bytes.len()))?;
        buffer.copy_from_slice(bytes);
        if let Some(buffer) = state.machine.bytes(self.recv, self.len_bytes) {
            buffer.fill(0xff);
        }
        Ok(())
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), BackendError> {
        let mut state = self.fabric.lock();
        let buffer =
            state.machine.bytes(self.recv, bytes.len()).ok_or_else(|| self.too_long("read", bytes.len()))?;
        bytes.copy_from_slice(buffer);
        Ok(())
    }

    fn is_idle(&mut self) -> Result<bool, BackendError> {
        Ok(self.fabric.lock().machine.streams.get(&self.stream).copied().unwrap_or(0) == 0)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut state = self.fabric.lock();
        state.workspaces -= 1;
        // Kernels that still run find no memory, and write nowhere.
        state.machine.memory.remove(&self.send);
        state.machine.memory.remove(&self.recv);
        state.machine.streams.remove(&self.stream);
    }
}
