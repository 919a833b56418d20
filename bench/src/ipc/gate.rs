//! [`Gate`]: kernels that need each other begin together, at a word of the host.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portway_fifo::cuda::Context;
use portway_fifo::{Error, Platform, Words};

use crate::failure::Failure;

/// The distance of two words that blocks store to.
const STRIDE_BYTES: u64 = 128;

/// A kernel's gate, in pinned memory: a word for each block, in which it says how often it has come to the gate; then the
/// word that says how often the gate was opened.
pub struct Gate {
    words: Words,
    blocks: u64,
}

impl Gate {
    pub fn new(context: &Context, blocks: u64) -> Result<Self, Error> {
        Ok(Gate { words: Words::new(context.host_memory((blocks + 1) * STRIDE_BYTES)?)?, blocks })
    }

    /// `Gate` of the kernels.
    pub fn parameter(&self) -> [u64; 2] {
        let ready = self.words.region().address();
        [ready, ready + self.blocks * STRIDE_BYTES]
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        &self.words[(at * STRIDE_BYTES / 8) as usize]
    }
}

/// Opens the gates for the `nth` time, once all blocks of all of them have come.
pub fn open<'a>(
    measurement: &str,
    gates: impl IntoIterator<Item = &'a Gate> + Clone,
    nth: u64,
    within: Duration,
) -> Result<(), Failure> {
    let begin = Instant::now();
    loop {
        let words = gates.clone().into_iter().flat_map(|gate| (0..gate.blocks).map(|at| gate.word(at)));
        let seen = words.map(|word| word.load(Ordering::Acquire)).min().unwrap_or(0);
        if seen >= nth {
            break;
        }
        if begin.elapsed() > within {
            return Err(Failure::Deadline {
                measurement: measurement.into(),
                what: "all blocks to come to their gate",
                expected: nth,
                seen,
                after: begin.elapsed(),
            });
        }
        std::thread::yield_now();
    }
    for gate in gates {
        gate.word(gate.blocks).store(nth, Ordering::Release);
    }
    Ok(())
}
