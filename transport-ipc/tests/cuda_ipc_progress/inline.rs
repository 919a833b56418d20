//! The control: a port whose copies are submitted by the engine's own thread, as it is usually done.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use portway_fifo::Words;
use portway_fifo::cuda::Stream;
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Submit};

/// See the module. It has one lane, whose addresses it was told.
#[derive(Debug)]
pub struct Inline {
    pub stream: Stream,
    pub source: u64,
    pub destination: u64,
    pub word: u64,
    /// The stream writes here how many ops it has done.
    pub done: Words,
    pub under_way: VecDeque<Completion>,
    pub submitted: u64,
    pub completed: u64,
}

impl Port for Inline {
    fn bind(&mut self, _: &Binding) -> Result<Lane, TransportError> {
        Ok(Lane(0))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        let stream = self.stream.enter()?;
        if let Some(put) = &op.put {
            let to = self.destination + put.destination_offset_bytes;
            let from = self.source + put.source_offset_bytes;
            // SAFETY: the memories outlive the stream's work, and are accessed by the device alone.
            unsafe { stream.copy(to, from, put.len_bytes) }?;
        }
        if let Some(value) = op.signal {
            // SAFETY: the word outlives the stream's work, and is accessed atomically only.
            unsafe { stream.write_value(self.word, value) }?;
        }
        self.submitted += 1;
        // SAFETY: as above.
        unsafe { stream.write_value(self.done.region().address(), self.submitted) }?;
        self.under_way.push_back(Completion { lane: op.lane, sequence: op.sequence });
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        let done = self.done[0].load(Ordering::Acquire);
        let mut count = 0;
        while self.completed < done && count < completions.len() {
            let Some(completion) = self.under_way.pop_front() else { break };
            completions[count] = completion;
            count += 1;
            self.completed += 1;
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        match self.done[0].load(Ordering::Acquire) == self.submitted {
            true => Ok(Close::Quiesced),
            false => Ok(Close::Pending),
        }
    }
}
