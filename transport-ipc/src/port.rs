//! [`IpcPort`]: a connection. What the engine calls: it reads and writes memory, and nothing else.

use core::fmt;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use portway_fifo::Words;
use portway_fifo::cuda::Warning;
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Close, Completion, Lane, MemoryId, Op, Port, Submit};

use crate::error::{Cause, Error, StalledIn};
use crate::link::{Bound, Link, Stage, Work, after};
use crate::memory::Presence;
use crate::transport::Inner;

/// Polls between two looks at the clock while something is under way.
const POLLS_A_LOOK: u32 = 16;

/// A lane, with everything looked up.
#[derive(Debug)]
struct Bindings {
    from: u64,
    from_len_bytes: u64,
    to: u64,
    to_len_bytes: u64,
    /// Which of the port's words.
    word: usize,
}

/// A signal word of the peer.
#[derive(Debug)]
struct Word {
    address: u64,
    /// It lies in host memory, where the engine can store to it.
    host: Option<Words>,
    /// Copies and signals for it that the stream has not done: as long as there are any, a store would overtake them, and
    /// would be overwritten by them.
    outstanding: u64,
}

/// An op that the stream has to do first.
#[derive(Debug)]
struct Pending {
    completion: Completion,
    ticket: u64,
    /// The word that it counts for, if it is in the stream itself.
    word: Option<usize>,
}

/// See the [module](self).
pub(crate) struct IpcPort {
    failed: Option<TransportError>,
    link: Arc<Link>,
    lanes: Vec<Bindings>,
    words: Vec<Word>,
    /// In the order of their tickets.
    pending: VecDeque<Pending>,
    finished: VecDeque<Completion>,
    last_ticket: u64,
    /// Up to which the executor may go, as it was told last.
    released: u64,
    watch: StallWatch,
    /// Given to the executor when the port closes.
    bound: Option<Vec<Bound>>,
    peer: String,
    peer_transport: u64,
    inner: Arc<Inner>,
    presence: Presence,
}

/// Notices that nothing gets done.
#[derive(Debug, Default)]
struct StallWatch {
    /// What the track's word was when it was seen to move last, and since when it stands.
    seen: Option<(u64, Instant)>,
    polls: u32,
}

impl StallWatch {
    /// How long nothing has got done, if something is under way for which it should.
    fn stands_for(&mut self, under_way: bool, done: u64) -> Option<Duration> {
        if !under_way {
            *self = StallWatch::default();
            return None;
        }
        self.polls = self.polls.wrapping_add(1);
        match self.seen {
            Some((seen, _)) if seen != done => self.seen = Some((done, Instant::now())),
            None => self.seen = Some((done, Instant::now())),
            Some((_, since)) if self.polls % POLLS_A_LOOK == 0 => return Some(since.elapsed()),
            Some(_) => {}
        }
        None
    }
}

impl fmt::Debug for IpcPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lanes = self.bound.iter().flatten().map(|bound| &bound.destination.remote.description);
        f.debug_struct("IpcPort")
            .field("peer", &self.peer)
            .field("failed", &self.failed)
            .field("lanes", &lanes.collect::<Vec<_>>())
            .field("under_way", &self.pending.len())
            .finish_non_exhaustive()
    }
}

impl IpcPort {
    pub(crate) fn new(
        inner: Arc<Inner>,
        link: Arc<Link>,
        peer: String,
        peer_transport: u64,
        presence: Presence,
    ) -> Self {
        let depth = inner.config.depth;
        let last_ticket = link.done[0].load(Ordering::Acquire);
        IpcPort {
            failed: None,
            lanes: Vec::new(),
            words: Vec::new(),
            pending: VecDeque::with_capacity(depth),
            finished: VecDeque::with_capacity(depth),
            last_ticket,
            released: last_ticket,
            watch: StallWatch::default(),
            bound: Some(Vec::new()),
            link,
            peer,
            peer_transport,
            inner,
            presence,
        }
    }

    #[inline]
    fn check(&mut self) -> Result<(), TransportError> {
        if self.failed.is_none() {
            if let Some(error) = self.link.error.get() {
                self.failed = Some(error.clone());
            }
        }
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Lets the executor see what was submitted. A word that it looks at all the time is written only when that is news.
    #[inline]
    fn release(&mut self) {
        if self.released != self.last_ticket {
            self.released = self.last_ticket;
            self.link.release(self.released);
        }
    }

    #[cold]
    fn fail(&mut self, error: TransportError) -> TransportError {
        self.link.stop();
        self.failed.get_or_insert(error).clone()
    }

    /// Takes note of what the stream has done.
    #[inline]
    fn retire(&mut self) -> u64 {
        let done = self.link.done[0].load(Ordering::Acquire);
        while let Some(first) = self.pending.front() {
            if after(first.ticket, done) {
                break;
            }
            if let Some(word) = first.word {
                self.words[word].outstanding -= 1;
            }
            self.finished.push_back(first.completion);
            self.pending.pop_front();
        }
        done
    }

    /// Reports what is complete, as far as there is room.
    #[inline]
    fn report(&mut self, completions: &mut [Completion]) -> usize {
        let count = completions.len().min(self.finished.len());
        for (slot, completion) in completions.iter_mut().zip(self.finished.drain(..count)) {
            *slot = completion;
        }
        count
    }

    #[cold]
    fn stalled(&mut self, after: Duration) -> TransportError {
        let place = self.link.inside().unwrap_or(StalledIn::Stream);
        let lazy = self.inner.context.warnings().contains(&Warning::LazyLoading);
        let causes: &[Cause] = match (place, lazy, self.inner.one_connection) {
            (StalledIn::Stream, true, true) => &[Cause::LazyLoading, Cause::OneConnection],
            (StalledIn::Stream, true, false) => &[Cause::LazyLoading],
            (StalledIn::Stream, false, true) => &[Cause::OneConnection],
            (StalledIn::Stream, false, false) => &[Cause::Device],
            (_, _, true) => &[Cause::Free, Cause::OneConnection],
            (_, _, false) => &[Cause::Free],
        };
        let peer = self.peer.clone();
        self.fail(Error::Stalled { peer, place, causes, after }.into())
    }

    /// The number of a word among those of the port.
    fn word(&mut self, address: u64, host: Option<Words>) -> usize {
        if let Some(known) = self.words.iter().position(|word| word.address == address) {
            return known;
        }
        self.words.push(Word { address, host, outstanding: 0 });
        self.words.len() - 1
    }

    /// Gives what is bound to the executor, which lets go of it once nothing is under way.
    fn give_away(&mut self) {
        if let Some(bound) = self.bound.take() {
            self.inner.closing.began(3 * bound.len() as u64);
            self.link.close(bound);
        }
    }
}

impl Port for IpcPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.check()?;
        let (inner, peer_transport) = (self.inner.clone(), self.peer_transport);
        let ours = |what, id: MemoryId| match id.transport == inner.transport {
            true => Ok(id.index),
            false => Err(TransportError::Unknown { what, index: id.index }),
        };
        let source = ours("source", binding.source)?;
        let unknown = TransportError::Unknown { what: "source", index: source };
        let source = inner.hub.tables.hold(inner.transport, source).ok_or(unknown)?;
        let of_peer = |what, id| {
            let held = inner.imports.hold(what, ours(what, id)?, &inner.hub)?;
            if held.remote.transport != peer_transport {
                return Err(TransportError::Malformed {
                    what,
                    expected: format!("memory of the peer's transport {peer_transport:#x}"),
                    seen: format!("memory of transport {:#x}", held.remote.transport),
                });
            }
            Ok(held)
        };
        let destination = of_peer("destination", binding.destination)?;
        let signal = of_peer("signal word", binding.signal)?;
        let (word, to) = (&signal.remote, &destination.remote);
        if word.len_bytes != 8 || word.address % 8 != 0 {
            let expected = "8 bytes at a multiple of 8".into();
            let seen = format!("{} bytes at {:#x}", word.len_bytes, word.address);
            return Err(TransportError::Malformed { what: "signal word", expected, seen });
        }
        let from = source.region().range();
        if from.address < to.address + to.len_bytes && to.address < from.address + from.len_bytes {
            let (source_address, destination_address) = (from.address, to.address);
            return Err(TransportError::Overlap { source_address, destination_address });
        }
        let host = if word.host { Some(signal.words()?) } else { None };
        let bindings = Bindings {
            from: from.address,
            from_len_bytes: from.len_bytes,
            to: to.address,
            to_len_bytes: to.len_bytes,
            word: self.word(word.address, host),
        };
        let lane = Lane(self.lanes.len() as u32);
        self.lanes.push(bindings);
        if let Some(bound) = &mut self.bound {
            bound.push(Bound { _source: source, destination, _signal: signal });
        }
        Ok(lane)
    }

    #[inline]
    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.check()?;
        if self.pending.len() + self.finished.len() >= self.inner.config.depth {
            return Ok(Submit::Full);
        }
        let lens_bytes = |lane: Lane| {
            let bindings = &self.lanes[lane.0 as usize];
            [bindings.from_len_bytes, bindings.to_len_bytes]
        };
        if let Some(error) = TransportError::of_op(op, self.lanes.len(), lens_bytes) {
            return Err(self.fail(error));
        }
        let lane = &self.lanes[op.lane.0 as usize];
        let flush = op.flush;
        let mut work = Work { from: 0, to: 0, len_bytes: 0, word: 0, value: 0, flush, ticket: 0 };
        if let Some(put) = &op.put {
            work.from = lane.from + put.source_offset_bytes;
            work.to = lane.to + put.destination_offset_bytes;
            work.len_bytes = put.len_bytes;
        }
        let number = lane.word;
        let completion = Completion { lane: op.lane, sequence: op.sequence };
        if op.put.is_none() {
            if self.words[number].outstanding > 0 {
                self.retire();
            }
            let word = &self.words[number];
            match (&word.host, op.signal) {
                // The stream has nothing for this word, so nothing is overtaken, and nothing comes behind.
                (Some(host), Some(value)) if word.outstanding == 0 => {
                    host[0].store(value, Ordering::Release);
                    self.finished.push_back(completion);
                    return Ok(Submit::Accepted);
                }
                (_, None) if word.outstanding == 0 => {
                    self.finished.push_back(completion);
                    return Ok(Submit::Accepted);
                }
                // A flush alone is complete when all that was submitted before it is.
                (_, None) => {
                    self.link.want(self.last_ticket);
                    self.pending.push_back(Pending { completion, ticket: self.last_ticket, word: None });
                    return Ok(Submit::Accepted);
                }
                _ => {}
            }
        }
        if let Some(value) = op.signal {
            (work.word, work.value) = (self.words[number].address, value);
        }
        work.ticket = self.last_ticket.wrapping_add(1);
        if !self.link.push(work) {
            return Ok(Submit::Full);
        }
        self.last_ticket = work.ticket;
        self.words[number].outstanding += 1;
        self.pending.push_back(Pending { completion, ticket: work.ticket, word: Some(number) });
        Ok(Submit::Accepted)
    }

    #[inline]
    fn kick(&mut self) -> Result<(), TransportError> {
        self.check()?;
        self.release();
        Ok(())
    }

    #[inline]
    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        if self.failed.is_none() && self.link.error.get().is_some() {
            // What was done before the failure is told before it.
            self.retire();
            match self.report(completions) {
                0 => {}
                count => return Ok(count),
            }
        }
        self.check()?;
        self.release();
        let done = self.retire();
        if let Some(stood) = self.watch.stands_for(!self.pending.is_empty(), done) {
            if stood >= self.inner.config.stall_limit {
                return Err(self.stalled(stood));
            }
        }
        Ok(self.report(completions))
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        self.failed.get_or_insert(TransportError::Closed);
        self.presence.leave();
        self.give_away();
        match self.link.stage() {
            Stage::Open => Ok(Close::Pending),
            Stage::Quiesced => Ok(Close::Quiesced),
            Stage::GivenUp => {
                let (peer, after) = (self.peer.clone(), self.inner.config.quiesce_limit);
                Err(Error::Unquiesced { peer, after }.into())
            }
        }
    }
}

impl Drop for IpcPort {
    fn drop(&mut self) {
        self.give_away();
    }
}
