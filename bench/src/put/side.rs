//! [`Side`]: an end as a thread plays it.

use portway_fifo::Words;
use portway_proxy::{ChannelProducer, Error};

use super::pattern;
use super::wired::End;
use crate::failure::Failure;
use crate::trial::Trial;

/// See the module.
pub struct Side {
    pub end: ChannelProducer,
    pub source: Words,
    destination: Words,
}

impl Side {
    pub fn new(end: &End) -> Result<Self, Error> {
        Ok(Side {
            end: end.channel.producer()?,
            source: Words::new(end.source.clone())?,
            destination: Words::new(end.destination.clone())?,
        })
    }

    /// Waits for the peer's next signal as a kernel does: looks all the time.
    pub fn wait(&self, trial: &Trial) -> Result<(), Failure> {
        let mut wait = trial.wait("the peer's signal", 1);
        while !self.end.poll().map_err(|source| Failure::proxy(trial.name(), source))? {
            std::hint::spin_loop();
            wait.look(0)?;
        }
        Ok(())
    }

    /// Writes a message into the source.
    pub fn fill(&self, offset_bytes: u64, len_bytes: u64, number: u64) {
        pattern::fill(&self.source[words(offset_bytes, len_bytes)], number);
    }

    /// Whether the destination holds a message.
    pub fn is_whole(&self, offset_bytes: u64, len_bytes: u64, number: u64) -> bool {
        pattern::is_whole(&self.destination[words(offset_bytes, len_bytes)], number)
    }
}

fn words(offset_bytes: u64, len_bytes: u64) -> std::ops::Range<usize> {
    (offset_bytes / 8) as usize..((offset_bytes + len_bytes) / 8) as usize
}
