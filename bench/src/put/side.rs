//! [`Side`]: an end as a thread plays it.

use std::sync::atomic::Ordering;

use portway_fifo::Words;
use portway_proxy::{ChannelProducer, Error};

use super::pattern;
use super::wired::End;
use crate::failure::Failure;
use crate::trial::Trial;

/// What an end does, whatever carries it out. Messages are numbered by `n` and go over the connections in turn.
pub trait Side: Send {
    /// Where its puts read and where its peer's arrive.
    fn memory(&self) -> &Memory;
    /// The connections.
    fn lanes(&self) -> u64;
    /// Puts and signals.
    fn put_signal(&mut self, n: u64, place: Place, trial: &Trial) -> Result<(), Failure>;
    /// Signals, and puts nothing.
    fn signal(&mut self, n: u64, trial: &Trial) -> Result<(), Failure>;
    /// No more is put for now.
    fn kick(&mut self, trial: &Trial) -> Result<(), Failure>;
    /// Whether the peer's message has come; true once a message.
    fn poll(&mut self, n: u64, trial: &Trial) -> Result<bool, Failure>;
}

/// Where a message lies, the same in source and destination.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub offset_bytes: u64,
    pub len_bytes: u64,
}

impl Place {
    fn words(self) -> std::ops::Range<usize> {
        (self.offset_bytes / 8) as usize..((self.offset_bytes + self.len_bytes) / 8) as usize
    }
}

/// Waits for the peer's message as a kernel does: looks all the time.
#[inline]
pub fn wait(side: &mut impl Side, n: u64, trial: &Trial) -> Result<(), Failure> {
    let mut wait = trial.wait("the peer's signal", 1);
    while !side.poll(n, trial)? {
        std::hint::spin_loop();
        wait.look(0)?;
    }
    Ok(())
}

/// Signals that nobody waited for.
pub fn too_many(side: &mut impl Side, trial: &Trial) -> Result<u64, Failure> {
    (0..side.lanes()).try_fold(0, |count, lane| Ok(count + u64::from(side.poll(lane, trial)?)))
}

/// The memory of an end.
pub struct Memory {
    pub source: Words,
    pub destination: Words,
}

impl Memory {
    /// Writes a message into the source.
    pub fn fill(&self, place: Place, number: u64) {
        pattern::fill(&self.source[place.words()], number);
    }

    /// Flips a bit of a message in the source.
    pub fn spoil(&self, place: Place) {
        for first in &self.source[place.words()][..1] {
            first.fetch_xor(1, Ordering::Relaxed);
        }
    }

    /// Whether the destination holds a message.
    pub fn is_whole(&self, place: Place, number: u64) -> bool {
        pattern::is_whole(&self.destination[place.words()], number)
    }
}

/// A side that leaves all to an engine.
pub struct Channels {
    ends: Vec<ChannelProducer>,
    memory: Memory,
}

impl Channels {
    pub fn new(end: &End) -> Result<Self, Error> {
        Ok(Channels {
            ends: end.channels.iter().map(|channel| channel.producer()).collect::<Result<_, _>>()?,
            memory: Memory {
                source: Words::new(end.source.clone())?,
                destination: Words::new(end.destination.clone())?,
            },
        })
    }

    fn end(&self, n: u64) -> &ChannelProducer {
        match &self.ends[..] {
            [one] => one,
            ends => &ends[(n % ends.len() as u64) as usize],
        }
    }
}

impl Side for Channels {
    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn lanes(&self) -> u64 {
        self.ends.len() as u64
    }

    #[inline]
    fn put_signal(&mut self, n: u64, place: Place, trial: &Trial) -> Result<(), Failure> {
        let put = self.end(n).put_signal(place.offset_bytes, place.offset_bytes, place.len_bytes);
        put.map(drop).map_err(|source| Failure::proxy(trial.name(), source))
    }

    fn signal(&mut self, n: u64, trial: &Trial) -> Result<(), Failure> {
        self.end(n).signal(1).map(drop).map_err(|source| Failure::proxy(trial.name(), source))
    }

    #[inline]
    fn kick(&mut self, _: &Trial) -> Result<(), Failure> {
        Ok(())
    }

    #[inline]
    fn poll(&mut self, n: u64, trial: &Trial) -> Result<bool, Failure> {
        self.end(n).poll().map_err(|source| Failure::proxy(trial.name(), source))
    }
}
