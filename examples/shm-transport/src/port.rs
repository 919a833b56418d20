//! [`ShmPort`]: takes ops, and moves their bytes inside `kick` and `poll`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use portway_fifo::Words;
use portway_fifo::memory::copy_bytes;
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Submit};

use crate::transport::{Entry, Table};

/// The most ops that a port holds.
const DEPTH: usize = 256;
/// The most bytes that one call moves, so that none takes long.
const BYTES_A_CALL: u64 = 1 << 20;

#[derive(Debug)]
struct Bound {
    source: Arc<Entry>,
    destination: Arc<Entry>,
    _signal: Arc<Entry>,
    word: Words,
}

#[derive(Debug)]
pub(crate) struct ShmPort {
    table: Arc<Table>,
    /// A word of each end's, 0 until that end goes.
    gone: Words,
    peer_gone: Words,
    fail_after: Option<u64>,
    lanes: Vec<Bound>,
    taken: VecDeque<Op>,
    /// Bytes of the first taken op that have been moved.
    moved_bytes: u64,
    complete: VecDeque<Completion>,
    failed: Option<TransportError>,
}

impl ShmPort {
    pub(crate) fn new(table: Arc<Table>, gone: Words, peer_gone: Words, fail_after: Option<u64>) -> Self {
        let (taken, complete) = (VecDeque::with_capacity(DEPTH), VecDeque::with_capacity(DEPTH));
        let (lanes, moved_bytes, failed) = (Vec::new(), 0, None);
        ShmPort { table, gone, peer_gone, fail_after, lanes, taken, moved_bytes, complete, failed }
    }

    /// The first error again, if there was one; a new one if the peer has gone.
    fn check(&mut self) -> Result<(), TransportError> {
        if self.failed.is_none() && self.peer_gone[0].load(Ordering::Acquire) != 0 {
            let (peer, operation) = ("the other end, which has gone".into(), "put");
            self.failed = Some(TransportError::Remote { peer, operation, status: -1, vendor: 0 });
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn work(&mut self) {
        let mut budget_bytes = BYTES_A_CALL;
        while let Some(op) = self.taken.front() {
            let lane = &self.lanes[op.lane.0 as usize];
            if let Some(put) = op.put {
                let len_bytes = (put.len_bytes - self.moved_bytes).min(budget_bytes);
                let from = lane.source.region.address() + put.source_offset_bytes + self.moved_bytes;
                let to = lane.destination.region.address() + put.destination_offset_bytes + self.moved_bytes;
                // SAFETY: `submit` found the put inside both memories, which `lane` keeps mapped and which are accessed
                // through atomics only (contract of `Region::new`).
                unsafe { copy_bytes(from as *mut u8, to as *mut u8, len_bytes as usize) };
                budget_bytes -= len_bytes;
                self.moved_bytes += len_bytes;
                if self.moved_bytes < put.len_bytes {
                    return;
                }
            }
            // Whoever sees the value sees the bytes of all earlier puts.
            if let Some(value) = op.signal {
                lane.word[0].store(value, Ordering::Release);
            }
            self.complete.push_back(Completion { lane: op.lane, sequence: op.sequence });
            self.taken.pop_front();
            self.moved_bytes = 0;
        }
    }
}

impl Bound {
    fn lens_bytes(&self) -> [u64; 2] {
        [self.source.region.len_bytes(), self.destination.region.len_bytes()]
    }
}

impl Port for ShmPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.check()?;
        let source = self.table.hold("source", true, binding.source)?;
        let destination = self.table.hold("destination", false, binding.destination)?;
        let signal = self.table.hold("signal word", false, binding.signal)?;
        let word = Words::new(signal.region.clone())?;
        if word.len() != 1 {
            let (expected, seen) = ("8 bytes".into(), format!("{} bytes", signal.region.len_bytes()));
            return Err(TransportError::Malformed { what: "signal word", expected, seen });
        }
        self.lanes.push(Bound { source, destination, _signal: signal, word });
        Ok(Lane(self.lanes.len() as u32 - 1))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.check()?;
        if self.taken.len() + self.complete.len() >= DEPTH {
            return Ok(Submit::Full);
        }
        let lens_bytes = |lane: Lane| self.lanes[lane.0 as usize].lens_bytes();
        if let Some(error) = TransportError::of_op(op, self.lanes.len(), lens_bytes) {
            return Err(self.failed.insert(error).clone());
        }
        if let Some(left) = &mut self.fail_after {
            *left = left.saturating_sub(1);
            self.peer_gone[0].store(u64::from(*left == 0), Ordering::Release);
        }
        self.taken.push_back(*op);
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.check()?;
        self.work();
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.kick()?;
        let count = completions.len().min(self.complete.len());
        for (slot, completion) in completions.iter_mut().zip(self.complete.drain(..count)) {
            *slot = completion;
        }
        Ok(count)
    }

    /// Bytes move inside calls alone, so a port that is told to stop has stopped.
    fn close(&mut self) -> Result<Close, TransportError> {
        self.gone[0].store(1, Ordering::Release);
        self.failed = Some(TransportError::Closed);
        self.taken.clear();
        self.lanes.clear();
        Ok(Close::Quiesced)
    }
}

impl Drop for ShmPort {
    fn drop(&mut self) {
        self.gone[0].store(1, Ordering::Release);
    }
}
