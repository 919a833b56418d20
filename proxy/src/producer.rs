//! [`ChannelProducer`]: a channel's device end, in software.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::time::Instant;

use portway_fifo::{Position, Producer, Watch, Words};

use crate::channel::PortChannel;
use crate::error::Error;
use crate::request::{MAX_SIZE, OpSet, Request, RequestFault};

/// The most bytes that one trigger of a put moves; longer ones are split. A multiple of 4,096, so that every part begins
/// as aligned as the whole.
pub const MAX_PUT_BYTES: u64 = (MAX_SIZE as u64 + 1) - 4096;

/// Plays the kernel: the calls of `port_channel.cuh` from the processor, for tests, for the bench, and for programs
/// that have no GPU. Any number of threads may call it.
///
/// Every call ends: with success, with the channel's error, or after the timeout.
#[derive(Clone, Debug)]
pub struct ChannelProducer {
    channel: PortChannel,
    fifo: Producer,
    frontier: Watch,
    signal: Watch,
    expected: Words,
    timeout: Duration,
}

impl ChannelProducer {
    pub(crate) fn new(channel: &PortChannel) -> Result<Self, Error> {
        let fifo = channel.shared.fifo.producer()?;
        let (frontier, signal, expected) = channel.watches()?;
        let timeout = channel.timeout();
        Ok(ChannelProducer { channel: channel.clone(), fifo, frontier, signal, expected, timeout })
    }

    /// The same end with another timeout than the FIFO's.
    ///
    /// # Errors
    /// [`portway_fifo::Error::TimeoutRange`].
    pub fn with_timeout(&self, timeout: Duration) -> Result<Self, Error> {
        Ok(ChannelProducer { fifo: self.fifo.with_timeout(timeout)?, timeout, ..self.clone() })
    }

    /// The channel that this is an end of.
    pub fn channel(&self) -> &PortChannel {
        &self.channel
    }

    /// Moves `len_bytes` bytes from the source region to the destination region. Returns the position of its (last)
    /// trigger.
    ///
    /// # Errors
    /// [`Error::Request`] if the range leaves a region; [`Error::Channel`] if the channel has ended;
    /// [`Error::Fifo`] if the push does not succeed.
    pub fn put(&self, source: u64, destination: u64, len_bytes: u64) -> Result<Position, Error> {
        self.push_put(OpSet::PUT, source, destination, len_bytes)
    }

    /// [`put`](Self::put), then a signal that advances the peer's word by 1. The peer cannot see it before the data.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_signal(&self, source: u64, destination: u64, len_bytes: u64) -> Result<Position, Error> {
        self.push_put(OpSet::PUT.and(OpSet::SIGNAL), source, destination, len_bytes)
    }

    /// [`put_signal`](Self::put_signal), then [`flush`](Self::flush).
    ///
    /// # Errors
    /// As both.
    pub fn put_signal_flush(&self, source: u64, destination: u64, len_bytes: u64) -> Result<(), Error> {
        let start = Instant::now();
        let op = OpSet::PUT.and(OpSet::SIGNAL).and(OpSet::FLUSH);
        let position = self.push_put(op, source, destination, len_bytes)?;
        self.wait_frontier(position, start)
    }

    /// Advances the peer's signal word by `n`, after every earlier put of this channel.
    ///
    /// # Errors
    /// [`Error::Request`] if `n` is 0 or over [`MAX_SIZE`]; otherwise as [`put`](Self::put).
    pub fn signal(&self, n: u32) -> Result<Position, Error> {
        self.push(Request { op: OpSet::SIGNAL, size: n, ..self.request() })
    }

    /// Waits until every earlier put of this channel has been delivered and its source may be reused.
    ///
    /// # Errors
    /// As [`put`](Self::put), and [`portway_fifo::Error::Timeout`].
    pub fn flush(&self) -> Result<(), Error> {
        let start = Instant::now();
        let position = self.push(Request { op: OpSet::FLUSH, ..self.request() })?;
        self.wait_frontier(position, start)
    }

    /// Waits for the peer's next signal, and consumes it: as many waits return as the peer's signals count.
    ///
    /// # Errors
    /// [`Error::Channel`] if the channel ends first, [`portway_fifo::Error::Timeout`].
    pub fn wait(&self) -> Result<(), Error> {
        self.wait_within(self.timeout)
    }

    fn wait_within(&self, timeout: Duration) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            let expected = self.expected[0].load(Ordering::Acquire);
            let left = timeout.saturating_sub(start.elapsed());
            self.waited(self.signal.wait("the peer's signal", Position(expected).plus(1), left))?;
            if self.consume(expected) {
                return Ok(());
            }
            // Another thread consumed that signal: it has made progress, and this one goes for the next.
        }
    }

    /// Consumes the peer's next signal if it is there.
    ///
    /// # Errors
    /// [`Error::Channel`] if the channel has ended and no signal is left.
    pub fn poll(&self) -> Result<bool, Error> {
        match self.wait_within(Duration::ZERO) {
            Ok(()) => Ok(true),
            Err(Error::Fifo(portway_fifo::Error::Timeout { .. })) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn consume(&self, expected: u64) -> bool {
        let next = expected.wrapping_add(1);
        self.expected[0].compare_exchange(expected, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn request(&self) -> Request {
        Request {
            op: OpSet::FLUSH,
            channel: self.channel.number(),
            size: 0,
            source_offset_bytes: 0,
            destination_offset_bytes: 0,
        }
    }

    /// Pushes a put in parts of at most [`MAX_PUT_BYTES`]; only the last carries the signal and the flush.
    fn push_put(&self, op: OpSet, source: u64, destination: u64, len_bytes: u64) -> Result<Position, Error> {
        let shared = &self.channel.shared;
        let request = |op, size: u64, done: u64| Request {
            op,
            size: u32::try_from(size).unwrap_or(u32::MAX),
            source_offset_bytes: source.saturating_add(done),
            destination_offset_bytes: destination.saturating_add(done),
            ..self.request()
        };
        let leaves = |offset: u64, limit: u64| offset.checked_add(len_bytes).is_none_or(|end| end > limit);
        let fault = if len_bytes == 0 {
            Some(RequestFault::Empty)
        } else if leaves(source, shared.source_len_bytes) {
            Some(RequestFault::Source { limit_bytes: shared.source_len_bytes })
        } else if leaves(destination, shared.destination_len_bytes) {
            Some(RequestFault::Destination { limit_bytes: shared.destination_len_bytes })
        } else {
            None
        };
        if let Some(fault) = fault {
            return Err(Error::Request { request: request(op, len_bytes, 0), fault });
        }
        if len_bytes <= MAX_PUT_BYTES {
            return self.push(request(op, len_bytes, 0));
        }
        let (start, mut done) = (Instant::now(), 0);
        loop {
            let left = self.timeout.saturating_sub(start.elapsed());
            let part = ChannelProducer { fifo: self.fifo.with_timeout(left)?, ..self.clone() };
            if len_bytes - done <= MAX_PUT_BYTES {
                return part.push(request(op, len_bytes - done, done));
            }
            part.push(request(OpSet::PUT, MAX_PUT_BYTES, done))?;
            done += MAX_PUT_BYTES;
        }
    }

    fn push(&self, request: Request) -> Result<Position, Error> {
        let shared = &self.channel.shared;
        if let Some(fault) = request.fault((shared.source_len_bytes, shared.destination_len_bytes)) {
            return Err(Error::Request { request, fault });
        }
        if let Some(error) = self.channel.shared.error() {
            return Err(error.clone().into());
        }
        self.waited(self.fifo.push(request.encode()?))
    }

    /// Waits with what is left of the time of a call that began at `start`.
    fn wait_frontier(&self, position: Position, start: Instant) -> Result<(), Error> {
        let left = self.timeout.saturating_sub(start.elapsed());
        self.waited(self.frontier.wait("the frontier", position.plus(1), left))
    }

    /// A wait's error as the channel's, if the channel has ended.
    fn waited<T>(&self, result: Result<T, portway_fifo::Error>) -> Result<T, Error> {
        result.map_err(|error| match (&error, self.channel.shared.error()) {
            (portway_fifo::Error::Timeout { .. }, _) | (_, None) => Error::Fifo(error),
            (_, Some(ended)) => Error::Channel(ended.clone()),
        })
    }
}
