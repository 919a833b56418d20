//! [`NullPort`]: accepts everything, moves nothing, completes at the next poll, and knows what it must be asked.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Submit};

use super::payload;

/// The most ops that the port holds: as many as a connection of a NIC.
const DEPTH: usize = 4096;

/// Where a port leaves its check when it is closed.
pub type Verdict = Arc<Mutex<Option<Check>>>;

/// See the module.
#[derive(Debug)]
pub struct NullPort {
    lanes: u32,
    done: VecDeque<Completion>,
    check: Option<Check>,
    verdict: Verdict,
    completed: Arc<AtomicU64>,
}

impl NullPort {
    pub fn new(check: Option<Check>, verdict: Verdict) -> Self {
        let completed = Arc::default();
        NullPort { lanes: 0, done: VecDeque::with_capacity(DEPTH), check, verdict, completed }
    }

    /// Where it tells how many ops it has completed.
    pub fn completed(&self) -> Arc<AtomicU64> {
        self.completed.clone()
    }
}

impl Port for NullPort {
    fn bind(&mut self, _: &Binding) -> Result<Lane, TransportError> {
        self.lanes += 1;
        Ok(Lane(self.lanes - 1))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        if self.done.len() == DEPTH {
            return Ok(Submit::Full);
        }
        match &mut self.check {
            Some(check) => check.see(op),
            None => drop(std::hint::black_box(*op)),
        }
        self.done.push_back(Completion { lane: op.lane, sequence: op.sequence });
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        let count = completions.len().min(self.done.len());
        for (slot, completion) in completions.iter_mut().zip(self.done.drain(..count)) {
            *slot = completion;
        }
        if count > 0 {
            self.completed.fetch_add(count as u64, Ordering::Release);
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        *self.verdict.lock().unwrap_or_else(PoisonError::into_inner) = self.check.take();
        Ok(Close::Quiesced)
    }
}

/// Follows the ops of one FIFO: each producer's puts come in order, on one channel after the other.
#[derive(Debug)]
pub struct Check {
    producers: Vec<Next>,
    /// The next sequence number of each lane.
    sequences: Vec<u64>,
    /// Whether each put comes with a signal and a flush.
    signal_flush: bool,
    wrong: u64,
}

/// What comes next from a producer.
#[derive(Clone, Copy, Debug)]
struct Next {
    n: u64,
    lane: usize,
}

impl Check {
    /// A check of puts by some producers over some channels; the first producer begins with the first channel, the
    /// second with the second.
    pub fn new(producers: u64, channels: u64, signal_flush: bool) -> Self {
        let next = |producer| Next { n: 0, lane: (producer % channels) as usize };
        let sequences = vec![0; channels as usize];
        Check { producers: (0..producers).map(next).collect(), sequences, signal_flush, wrong: 0 }
    }

    #[inline]
    fn see(&mut self, op: &Op) {
        let sound = op.put.is_some_and(|put| {
            let producer = payload::producer(&put);
            let Some(next) = self.producers.get_mut(producer as usize) else { return false };
            let expected = *next;
            *next = Next { n: expected.n + 1, lane: (expected.lane + 1) % self.sequences.len() };
            let sequence = self.sequences.get_mut(expected.lane).map(|sequence| {
                *sequence += 1;
                *sequence - 1
            });
            let signal = self.signal_flush.then(|| op.sequence + 1);
            put == payload::put(producer, expected.n)
                && op.lane.0 as usize == expected.lane
                && sequence == Some(op.sequence)
                && (op.signal, op.flush) == (signal, self.signal_flush)
        });
        if !sound {
            self.wrong += 1;
        }
    }

    /// The mistakes, once all is done; `sent` tells how many puts each producer asked for.
    pub fn finish(&self, sent: &[u64]) -> u64 {
        self.wrong + self.producers.iter().zip(sent).map(|(next, sent)| next.n.abs_diff(*sent)).sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mistakes among what two producers ask for over three channels, after a change to it.
    fn wrong(change: impl Fn(&mut Vec<Op>)) -> u64 {
        let mut sequences = [0; 3];
        let mut ops: Vec<Op> = (0..6)
            .flat_map(|n| [(0, n), (1, n)])
            .map(|(producer, n)| {
                let lane = (producer + n) as usize % 3;
                sequences[lane] += 1;
                let put = Some(payload::put(producer, n));
                let (lane, sequence) = (Lane(lane as u32), sequences[lane] - 1);
                Op { lane, sequence, put, signal: None, flush: false }
            })
            .collect();
        change(&mut ops);
        let mut check = Check::new(2, 3, false);
        ops.iter().for_each(|op| check.see(op));
        check.finish(&[6, 6])
    }

    #[test]
    fn every_kind_of_mistake_is_found() {
        assert_eq!(wrong(|_| {}), 0);
        assert_eq!(wrong(|ops| ops[5].put.as_mut().unwrap().source_offset_bytes ^= 1), 1);
        assert_eq!(wrong(|ops| ops[5].put.as_mut().unwrap().len_bytes += 1), 1);
        assert_eq!(wrong(|ops| ops[5].signal = Some(1)), 1);
        assert_eq!(wrong(|ops| ops[5].flush = true), 1);
        assert_ne!(wrong(|ops| ops[5].put = None), 0);
        assert_ne!(wrong(|ops| ops[5].lane.0 += 1), 0);
        assert_ne!(wrong(|ops| ops[5].sequence += 1), 0);
        assert_ne!(wrong(|ops| ops.swap(0, 2)), 0, "a producer's puts in the wrong order");
        assert_ne!(wrong(|ops| ops.retain(|op| op.sequence != 1 || op.lane.0 != 1)), 0, "a lost one");
        assert_eq!(wrong(|ops| ops.truncate(11)), 1, "the last one lost");
        assert_ne!(wrong(|ops| ops.insert(4, ops[4])), 0, "one asked for twice");
    }
}
