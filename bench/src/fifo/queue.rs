//! The queues under test behind two small traits, so that both run through the same loops.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::Backoff;
use portway_fifo::{Config, Consumer, Fifo, Heap, Producer, Trigger};

use crate::failure::Failure;
use crate::trial::Trial;

/// A producer's end.
pub trait Sender: Send {
    /// Sends all of the batch, in order; waits while there is no room.
    fn send(&mut self, batch: &[Trigger], trial: &Trial) -> Result<(), Failure>;
}

/// The consumer's end.
pub trait Receiver: Send {
    /// Hands on what is there, at most `max` triggers, and returns how many that were.
    fn receive(&mut self, max: u64, each: impl FnMut([u64; 2])) -> u64;
}

/// A FIFO on the heap, and `producers` senders into it.
pub fn fifo(
    slots: u64,
    producers: u64,
    deadline: std::time::Duration,
) -> Result<(Vec<Producer>, Consumer), portway_fifo::Error> {
    let (fifo, consumer) = Fifo::new(&Heap, Config { slots, timeout: deadline, ..Config::default() })?;
    let senders = (0..producers).map(|_| fifo.producer()).collect::<Result<_, _>>()?;
    Ok((senders, consumer))
}

impl Sender for Producer {
    #[inline]
    fn send(&mut self, batch: &[Trigger], trial: &Trial) -> Result<(), Failure> {
        let pushed = match batch {
            [one] => self.push(*one),
            _ => self.push_batch(batch),
        };
        match pushed {
            Ok(_) => Ok(()),
            Err(source) => Err(Failure::Fifo { measurement: trial.name().into(), source }),
        }
    }
}

impl Receiver for Consumer {
    #[inline]
    fn receive(&mut self, max: u64, mut each: impl FnMut([u64; 2])) -> u64 {
        self.drain(max as usize, |_, trigger| each(trigger.words())) as u64
    }
}

/// A share of the reference queue.
pub type Reference = Arc<ArrayQueue<Trigger>>;

/// The reference, and `producers` senders into it.
pub fn reference(slots: u64, producers: u64) -> (Vec<Reference>, Reference) {
    let queue = Arc::new(ArrayQueue::new(slots as usize));
    (vec![queue.clone(); producers as usize], queue)
}

impl Sender for Reference {
    #[inline]
    fn send(&mut self, batch: &[Trigger], trial: &Trial) -> Result<(), Failure> {
        for &trigger in batch {
            let mut refused = self.push(trigger);
            if refused.is_err() {
                // Its own crate's way to wait: spin a little, then yield.
                let backoff = Backoff::new();
                let mut wait = trial.wait("room in the queue", 1);
                while let Err(trigger) = refused {
                    backoff.snooze();
                    wait.look(0)?;
                    refused = self.push(trigger);
                }
            }
        }
        Ok(())
    }
}

impl Receiver for Reference {
    #[inline]
    fn receive(&mut self, max: u64, mut each: impl FnMut([u64; 2])) -> u64 {
        for taken in 0..max {
            match self.pop() {
                Some(trigger) => each(trigger.words()),
                None => return taken,
            }
        }
        max
    }
}
