//! [`Watch`]: how any number of threads wait for one word that another agent advances.

use core::time::Duration;

use crate::layout::watch;
use crate::memory::Words;
use crate::sync::{
    AtomicU64, Deadline, GATE_LOAD, GATE_STORE, NO_LAST_LOOK, Ordering, Pause, READER_RETURN, READER_TAKE,
    SEEN_LOAD, SEEN_STORE, STOP_LOAD, TAIL_LOAD,
};
use crate::{Error, Position};

/// A word in memory that is dear to read, waited for by many threads through a copy that is cheap to read.
///
/// A tail in pinned memory costs a GPU thread a round trip over PCIe. When every waiting thread makes it, they share
/// the bus and a ring of 512 slots passes 0.15 M triggers a second. So at most one waiter at a time, *the elected
/// reader*, reads the word; it copies what it saw to device memory, with release, and the others watch that copy,
/// with acquire. Beside the word stands the *stop* word, which ends every wait once it is not 0; the reader carries it
/// over into the *gate*.
///
/// The same protocol, on the same words, is `portway::wait` in `fifo.cuh`.
#[derive(Clone, Debug)]
pub struct Watch {
    value: (Words, usize),
    stop: (Words, usize),
    copy: (Words, usize),
    flushed: Option<(Words, usize)>,
}

/// Why a wait ended without reaching its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreached {
    /// The gate was not 0; this is what it held.
    Stopped(u64),
    /// The time was over, and the word stood here.
    TimedOut { seen: Position },
}

impl Watch {
    /// A watch over word `value.1` of `value.0`, stopped by word `stop.1` of `stop.0`, with its copy in the
    /// [`watch::WORDS`] words of `copy.0` from word `copy.1` on.
    ///
    /// # Errors
    /// [`Error::Range`] if an index lies outside its words.
    pub fn new(value: (Words, usize), stop: (Words, usize), copy: (Words, usize)) -> Result<Self, Error> {
        for ((words, index), len) in [(&value, 1), (&stop, 1), (&copy, watch::WORDS)] {
            if index.checked_add(len).is_none_or(|end| end > words.len()) {
                return Err(Error::Range {
                    what: "word of a watch",
                    offset_bytes: (*index as u64).saturating_mul(8),
                    len_bytes: len as u64 * 8,
                    address: words.address(),
                    limit_bytes: words.len() as u64 * 8,
                });
            }
        }
        Ok(Watch { value, stop, copy, flushed: None })
    }

    /// The same watch, whose waiters also look at a replica of the value that a flusher writes.
    pub(crate) fn with_flushed(mut self, words: Words, index: usize) -> Self {
        self.flushed = Some((words, index));
        self
    }

    /// Waits until the watched word has reached `target`, in wrapping arithmetic.
    ///
    /// The word wins over the stop word and over the clock: before a wait gives up it looks at the word itself, so
    /// a target that was reached is reported as reached. A timeout of zero is one look.
    ///
    /// # Errors
    /// [`Error::Stopped`] with the gate's value if the stop word ends the wait; [`Error::Timeout`] with what was
    /// waited for, expected and seen; [`Error::TimeoutRange`] for a timeout longer than
    /// [`MAX_TIMEOUT`](crate::MAX_TIMEOUT).
    pub fn wait(&self, what: &'static str, target: Position, timeout: Duration) -> Result<(), Error> {
        crate::fifo::check_timeout(timeout)?;
        self.wait_raw(target, timeout).map_err(|unreached| match unreached {
            Unreached::Stopped(code) => Error::Stopped { what, code },
            Unreached::TimedOut { seen } => timed_out(what, target, seen, timeout),
        })
    }

    /// The newest value of the watched word that this call can see, read from the word itself.
    pub fn value(&self) -> Position {
        Position(self.value.0[self.value.1].load(TAIL_LOAD))
    }

    /// Whether the watched word has reached `target`, by the cheap copies alone.
    #[inline]
    pub(crate) fn seen(&self, target: Position) -> bool {
        if Position(self.copy.0[self.copy.1 + watch::SEEN].load(SEEN_LOAD)).reached(target) {
            return true;
        }
        match &self.flushed {
            Some((words, index)) => Position(words[*index].load(SEEN_LOAD)).reached(target),
            None => false,
        }
    }

    /// What ended this watch: 0 while it is open.
    #[inline]
    pub(crate) fn gate(&self) -> &AtomicU64 {
        &self.copy.0[self.copy.1 + watch::GATE]
    }

    pub(crate) fn wait_raw(&self, target: Position, timeout: Duration) -> Result<(), Unreached> {
        if self.seen(target) {
            return Ok(());
        }
        let reader = &self.copy.0[self.copy.1 + watch::READER];
        let deadline = Deadline::after(timeout);
        let mut pause = Pause::new();
        loop {
            if reader.compare_exchange(0, 1, READER_TAKE, Ordering::Relaxed).is_ok() {
                self.refresh();
                reader.store(0, READER_RETURN);
            }
            if self.seen(target) {
                return Ok(());
            }
            let gate = self.gate().load(GATE_LOAD);
            if gate != 0 || deadline.passed() {
                // The copy is as old as the last election. The stop word first, then the word itself: it has every
                // value from before the stop.
                let stop = if gate == 0 { self.stop.0[self.stop.1].load(STOP_LOAD) } else { 0 };
                let seen = self.value();
                if seen.reached(target) && !NO_LAST_LOOK {
                    return Ok(());
                }
                return Err(match if stop == 0 { gate } else { self.close(stop) } {
                    0 => Unreached::TimedOut { seen },
                    gate => Unreached::Stopped(gate),
                });
            }
            pause.wait();
        }
    }

    /// What the elected reader does: copies both words. It reads the stop word first, so that whoever sees the gate
    /// closed has seen every value from before the stop.
    ///
    /// The copy never goes back: each reader got the election from the one before it, so it reads the word after it.
    fn refresh(&self) {
        let stop = self.stop.0[self.stop.1].load(STOP_LOAD);
        self.copy.0[self.copy.1 + watch::SEEN].store(self.value().0, SEEN_STORE);
        if stop != 0 {
            self.close(stop);
        }
    }

    /// Carries a stop word over into the gate, and returns what the gate then holds: the first reason stays.
    fn close(&self, stop: u64) -> u64 {
        match self.gate().compare_exchange(0, stop, GATE_STORE, Ordering::Relaxed) {
            Ok(_) => stop,
            Err(first) => first,
        }
    }
}

pub(crate) fn timed_out(what: &'static str, target: Position, seen: Position, timeout: Duration) -> Error {
    Error::Timeout { what, expected: target.0, seen: seen.0, after: timeout }
}
