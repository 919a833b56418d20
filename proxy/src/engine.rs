//! [`Engine`]: takes triggers, drives ports, moves frontiers. It owns no thread and reads no clock.

use core::hash::{BuildHasher, Hasher};
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use portway_fifo::{Consumer, Fifo, Platform};

use crate::channel::{self, PortChannel, Slab};
use crate::error::{ChannelError, Error, TransportError};
use crate::request::{MAX_CHANNELS, MAX_REGION_BYTES, OpSet, Request, RequestFault};
use crate::stats::{Board, Counts, Stats, stall_word};
use crate::transport::{Binding, Close, Completion, Lane, LocalMemory, Op, Port, Put, RemoteMemory, Submit};
use crate::window::{Stray, Window};

/// How to make an engine. `Config { deadline: Duration::from_secs(1), ..Config::default() }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The most triggers taken from one FIFO in one step, 1 to 1,024. 32 unless told otherwise.
    pub batch: usize,
    /// The most ops of one channel under way, backlog included: a power of two from 2 to 65,536. 256 unless told
    /// otherwise. A channel whose window is full stalls its FIFO.
    pub window: usize,
    /// The most channels over the engine's life, 1 to 32,768. 256 unless told otherwise. A channel that has ended
    /// keeps its number, so that a kernel that still uses it cannot reach another.
    pub max_channels: usize,
    /// How long an op may be under way before its channel ends, up to an hour. 10 seconds unless told otherwise.
    pub deadline: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config { batch: 32, window: 256, max_channels: 256, deadline: Duration::from_secs(10) }
    }
}

impl Config {
    fn check(&self) -> Result<(), Error> {
        let refuse = |what, value, must_be| Err(Error::Config { what, value, must_be });
        if !(1..=1024).contains(&self.batch) {
            return refuse("batch", self.batch as u64, "1 to 1,024");
        }
        if !self.window.is_power_of_two() || !(2..=65_536).contains(&self.window) {
            return refuse("window", self.window as u64, "a power of two from 2 to 65,536");
        }
        if !(1..=MAX_CHANNELS).contains(&self.max_channels) {
            return refuse("max_channels", self.max_channels as u64, "1 to 32,768");
        }
        if self.deadline.is_zero() || self.deadline > portway_fifo::MAX_TIMEOUT {
            let millis = u64::try_from(self.deadline.as_millis()).unwrap_or(u64::MAX);
            return refuse("deadline in milliseconds", millis, "over 0 and at most an hour");
        }
        Ok(())
    }
}

/// A FIFO of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FifoId {
    engine: u64,
    index: usize,
}

/// A port of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortId {
    engine: u64,
    index: usize,
}

/// What a channel is made of.
#[derive(Clone, Debug)]
pub struct ChannelConfig {
    /// Where its triggers come from.
    pub fifo: FifoId,
    /// The connection to its peer.
    pub port: PortId,
    /// Where its puts read.
    pub source: LocalMemory,
    /// Where its puts write.
    pub destination: RemoteMemory,
    /// The peer's signal word, which this channel alone advances.
    pub outbound: RemoteMemory,
    /// The signal word here, which the peer's channel advances.
    pub inbound: LocalMemory,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Triggers taken.
    pub triggers: u64,
    /// Ops that completed.
    pub completions: u64,
}

impl Step {
    /// Whether there was nothing to do.
    pub fn is_idle(self) -> bool {
        self == Step::default()
    }
}

/// The parts of an engine that other threads may touch.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) board: Board,
    fifos: Mutex<Vec<Fifo>>,
    channels: Mutex<Vec<Arc<channel::Shared>>>,
}

impl Shared {
    pub(crate) fn fifos(&self) -> Vec<Fifo> {
        self.fifos.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends every wait on every FIFO and channel, from whichever thread.
    pub(crate) fn end_all(&self) {
        for channel in self.channels.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            channel.end(ChannelError::Stopped { channel: channel.number });
        }
        for fifo in self.fifos.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            fifo.abort();
        }
    }
}

#[derive(Debug)]
struct FifoState {
    consumer: Consumer,
    fifo: Fifo,
    /// Channel number to index in `Engine::channels`.
    channels: Vec<u32>,
    closed: bool,
}

#[derive(Debug)]
struct PortState {
    port: Box<dyn Port>,
    /// Lane to index in `Engine::channels`.
    lanes: Vec<u32>,
    /// Submitted to since the last kick.
    touched: bool,
    /// Ops that it accepted and has not reported.
    under_way: u64,
    failed: Option<TransportError>,
    quiesced: bool,
}

#[derive(Debug)]
struct ChannelState {
    shared: Arc<channel::Shared>,
    fifo: u32,
    port: u32,
    lane: Lane,
    window: Window,
    /// What the peer's signal word holds once every signal so far has arrived.
    signal_value: u64,
    /// Completed something since the frontier was stored.
    moved: bool,
    ended: bool,
}

/// How often deadlines are looked at and idle ports polled.
const HOUSEKEEPING_NS: u64 = 1_000_000;

/// Completions taken from a port at a time.
const POLL_BATCH: usize = 64;

/// Takes what is ready from its FIFOs, submits it to its ports, polls them, and publishes.
///
/// [`step`](Self::step) never blocks, allocates, locks, logs or calls the system; whoever calls it decides how often,
/// on which thread, and what time it is. [`Proxy`](crate::Proxy) does so on a thread of its own.
#[derive(Debug)]
pub struct Engine {
    id: u64,
    config: Config,
    slab: Slab,
    fifos: Vec<FifoState>,
    ports: Vec<PortState>,
    channels: Vec<ChannelState>,
    /// Channels with a backlog.
    waiting: Vec<u32>,
    /// Channels whose frontier has to be stored.
    moved: Vec<u32>,
    completions: Box<[Completion]>,
    counts: Counts,
    shared: Arc<Shared>,
    next_housekeeping_ns: u64,
    /// The port that is being called, so that a panic can be put down to it.
    calling: Option<u32>,
}

impl Engine {
    /// An engine without FIFOs, ports and channels, whose channels' words lie in memory of `platform`.
    ///
    /// # Errors
    /// [`Error::Config`], or the platform's.
    pub fn new(platform: &dyn Platform, config: Config) -> Result<Self, Error> {
        config.check()?;
        let max_channels = config.max_channels;
        let none = Completion { lane: Lane(0), sequence: 0 };
        Ok(Engine {
            id: std::hash::RandomState::new().build_hasher().finish(),
            slab: Slab::new(platform, max_channels)?,
            fifos: Vec::new(),
            ports: Vec::new(),
            channels: Vec::with_capacity(max_channels),
            waiting: Vec::with_capacity(max_channels),
            moved: Vec::with_capacity(max_channels),
            completions: vec![none; POLL_BATCH].into_boxed_slice(),
            counts: Counts::default(),
            shared: Arc::default(),
            next_housekeeping_ns: 0,
            calling: None,
            config,
        })
    }

    /// Takes over a FIFO's consumer.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn add_fifo(&mut self, fifo: Fifo, consumer: Consumer) -> Result<FifoId, Error> {
        let index = self.fifos.len();
        if index == MAX_CHANNELS {
            return Err(Error::Limit { what: "FIFOs", limit: MAX_CHANNELS });
        }
        self.shared.fifos.lock().unwrap_or_else(PoisonError::into_inner).push(fifo.clone());
        self.fifos.push(FifoState { consumer, fifo, channels: Vec::new(), closed: false });
        Ok(FifoId { engine: self.id, index })
    }

    /// Takes over a port.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn add_port(&mut self, port: Box<dyn Port>) -> Result<PortId, Error> {
        let index = self.ports.len();
        if index == MAX_CHANNELS {
            return Err(Error::Limit { what: "ports", limit: MAX_CHANNELS });
        }
        self.ports.push(PortState {
            port,
            lanes: Vec::new(),
            touched: false,
            under_way: 0,
            failed: None,
            quiesced: false,
        });
        Ok(PortId { engine: self.id, index })
    }

    /// Makes a channel. Its number is the next free one of its FIFO.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a FIFO or port of another engine, [`Error::Limit`], [`Error::Region`],
    /// [`Error::Channel`] if the FIFO is closed or the port has failed, or the port's.
    pub fn add_channel(&mut self, config: ChannelConfig) -> Result<PortChannel, Error> {
        let ChannelConfig { fifo, port, source, destination, outbound, inbound } = config;
        if fifo.engine != self.id {
            return Err(Error::Foreign { what: "FIFO", index: fifo.index });
        }
        if port.engine != self.id {
            return Err(Error::Foreign { what: "port", index: port.index });
        }
        let index = self.channels.len();
        if index == self.config.max_channels {
            return Err(Error::Limit { what: "channels", limit: index });
        }
        let lens = (source.region.len_bytes(), destination.len_bytes);
        for (what, len_bytes) in [("source region", lens.0), ("destination region", lens.1)] {
            if len_bytes == 0 || len_bytes > MAX_REGION_BYTES {
                return Err(Error::Region { what, len_bytes, must_be: "1 byte to 1 TiB" });
            }
        }
        let words = [
            ("outbound signal word", outbound.len_bytes),
            ("inbound signal word", inbound.region.len_bytes()),
        ];
        for (what, len_bytes) in words {
            if len_bytes != 8 {
                return Err(Error::Region { what, len_bytes, must_be: "8 bytes" });
            }
        }
        let (fifo_state, port_state) = (&mut self.fifos[fifo.index], &mut self.ports[port.index]);
        let number = fifo_state.channels.len() as u16;
        if let Some(source) = fifo_state.consumer.closed() {
            return Err(ChannelError::Fifo { channel: number, source }.into());
        }
        if let Some(error) = &port_state.failed {
            return Err(ChannelError::Port { channel: number, source: error.clone() }.into());
        }
        let binding = Binding { source: source.id, destination: destination.id, signal: outbound.id };
        let start = fifo_state.consumer.position();
        let fifo_share = fifo_state.fifo.clone();
        let channel = PortChannel::new(&self.slab, index, number, fifo_share, lens, inbound.region, start)?;
        let lane = port_state.port.bind(&binding)?;
        if lane.0 as usize != port_state.lanes.len() {
            let error = TransportError::Contract { what: "lanes count from 0", lane: lane.0, sequence: 0 };
            self.fail_port(port.index, error.clone());
            return Err(error.into());
        }
        port_state.lanes.push(index as u32);
        fifo_state.channels.push(index as u32);
        self.shared.channels.lock().unwrap_or_else(PoisonError::into_inner).push(channel.shared.clone());
        self.channels.push(ChannelState {
            shared: channel.shared.clone(),
            fifo: fifo.index as u32,
            port: port.index as u32,
            lane,
            window: Window::new(self.config.window, start),
            signal_value: 0,
            moved: false,
            ended: false,
        });
        Ok(channel)
    }

    /// Opens an aborted or broken FIFO again, for new channels; its old ones have ended. See
    /// [`Consumer::reset`] for what the caller has to see to.
    ///
    /// # Errors
    /// [`Error::Foreign`], or the FIFO's.
    pub fn reset_fifo(&mut self, fifo: FifoId) -> Result<(), Error> {
        if fifo.engine != self.id {
            return Err(Error::Foreign { what: "FIFO", index: fifo.index });
        }
        if self.fifos[fifo.index].consumer.closed().is_some() {
            self.close_fifo(fifo.index);
            self.fifos[fifo.index].consumer.reset()?;
            self.fifos[fifo.index].closed = false;
        }
        Ok(())
    }

    /// Does what is ready, once. `now` is the time since any fixed moment and never goes back.
    ///
    /// From every FIFO it takes up to a batch; it offers the ops to their ports, kicks and polls these, moves the
    /// frontiers of the channels, and publishes each FIFO's tail at most once. A panic in a port ends that port's
    /// channels and nothing else.
    pub fn step(&mut self, now: Duration) -> Step {
        let now_ns = now.as_nanos() as u64;
        let before = self.counts;
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| self.step_unguarded(now_ns))) {
            self.caught(&*payload);
        }
        self.store_frontiers();
        if self.counts != before {
            self.shared.board.show(self.counts);
        }
        Step {
            triggers: self.counts.triggers - before.triggers,
            completions: self.counts.completions - before.completions,
        }
    }

    /// Whether every trigger that was pushed has been taken and every op is complete.
    pub fn is_idle(&self) -> bool {
        let empty = |fifo: &FifoState| fifo.closed || fifo.consumer.peek().is_none();
        self.fifos.iter().all(empty) && self.channels.iter().all(|c| c.ended || c.window.is_idle())
    }

    /// What the engine has done so far.
    pub fn stats(&self) -> Stats {
        self.shared.board.stats()
    }

    /// Ends every channel and aborts every FIFO, then closes the ports. True once all of them are quiesced; call
    /// again until then.
    pub fn shut_down(&mut self) -> bool {
        for index in 0..self.channels.len() {
            let channel = self.channels[index].shared.number;
            self.end_channel(index, ChannelError::Stopped { channel });
        }
        self.shared.end_all();
        for index in 0..self.ports.len() {
            self.close_port_once(index);
        }
        self.shared.board.show(self.counts);
        self.ports.iter().all(|port| port.quiesced)
    }

    /// Ends a port's channels and begins to close it; true once it is quiesced and what it had bound can be released.
    /// Call again until then.
    ///
    /// # Errors
    /// [`Error::Foreign`].
    pub fn close_port(&mut self, port: PortId) -> Result<bool, Error> {
        if port.engine != self.id {
            return Err(Error::Foreign { what: "port", index: port.index });
        }
        self.fail_port(port.index, TransportError::Closed);
        self.close_port_once(port.index);
        Ok(self.ports[port.index].quiesced)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Ops that were taken and are not known to be complete.
    pub(crate) fn under_way(&self) -> u64 {
        self.channels.iter().map(|c| c.window.in_port() + c.window.backlog()).sum()
    }

    fn step_unguarded(&mut self, now_ns: u64) {
        self.send_backlogs();
        for index in 0..self.fifos.len() {
            if !self.fifos[index].closed {
                self.drain(index, now_ns);
            }
        }
        let keep_house = now_ns >= self.next_housekeeping_ns;
        for index in 0..self.ports.len() {
            self.kick_and_poll(index, keep_house);
        }
        if keep_house {
            self.next_housekeeping_ns = now_ns + HOUSEKEEPING_NS;
            self.end_overdue(now_ns);
        }
    }

    /// Offers the backlogs to their ports again, oldest op first.
    fn send_backlogs(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            let index = self.waiting[at] as usize;
            self.send(index);
            if self.channels[index].window.backlog() == 0 {
                self.waiting.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Takes up to a batch from a FIFO.
    fn drain(&mut self, index: usize, now_ns: u64) {
        let mut taken = 0;
        while taken < self.config.batch {
            let state = &mut self.fifos[index];
            let Some(trigger) = state.consumer.peek() else { break };
            let position = state.consumer.position();
            let request = Request::decode(trigger);
            let Some(&channel_index) = state.channels.get(usize::from(request.channel)) else {
                let fault = RequestFault::UnknownChannel { channels: state.channels.len() };
                self.refuse_fifo(index, fault, request);
                return;
            };
            let channel = &mut self.channels[channel_index as usize];
            if !channel.ended {
                if channel.window.is_full() {
                    self.counts.stalls += 1;
                    self.counts.last_stall = stall_word(index, request.channel);
                    break;
                }
                let lens = (channel.shared.source_len_bytes, channel.shared.destination_len_bytes);
                if let Some(fault) = request.fault(lens.0, lens.1) {
                    let number = request.channel;
                    let error = ChannelError::Request { channel: number, position, fault, request };
                    self.end_channel(channel_index as usize, error);
                } else {
                    let op = channel.op(&request);
                    channel.window.take(op, position, now_ns);
                    if channel.window.backlog() == 1 {
                        self.send(channel_index as usize);
                        if self.channels[channel_index as usize].window.backlog() == 1 {
                            self.waiting.push(channel_index);
                        }
                    }
                }
            } else {
                self.counts.discarded += 1;
            }
            self.fifos[index].consumer.advance();
            taken += 1;
        }
        self.counts.triggers += taken as u64;
        let state = &mut self.fifos[index];
        if state.consumer.publish() {
            self.counts.publishes += 1;
        }
        // Only a FIFO that had less than a batch to give can have been closed long ago without its end being seen.
        if taken < self.config.batch && state.consumer.closed().is_some() {
            self.close_fifo(index);
        }
    }

    /// Offers a channel's backlog to its port until that is full.
    fn send(&mut self, index: usize) {
        let channel = &mut self.channels[index];
        let port = &mut self.ports[channel.port as usize];
        self.calling = Some(channel.port);
        while let Some(op) = channel.window.next_to_send() {
            match port.port.submit(op) {
                Ok(Submit::Accepted) => {
                    channel.window.sent();
                    port.touched = true;
                    port.under_way += 1;
                }
                Ok(Submit::Full) => {
                    self.counts.refusals += 1;
                    break;
                }
                Err(error) => {
                    let port = channel.port as usize;
                    self.calling = None;
                    self.fail_port(port, error);
                    return;
                }
            }
        }
        self.calling = None;
    }

    fn kick_and_poll(&mut self, index: usize, keep_house: bool) {
        let port = &mut self.ports[index];
        if port.failed.is_some() {
            // What it still has under way is waited for by nobody, but has to end before its memory is free.
            if keep_house {
                self.close_port_once(index);
            }
            return;
        }
        self.calling = Some(index as u32);
        if port.touched {
            port.touched = false;
            if let Err(error) = port.port.kick() {
                self.calling = None;
                return self.fail_port(index, error);
            }
        }
        if port.under_way == 0 && !keep_house {
            self.calling = None;
            return;
        }
        let polled = port.port.poll(&mut self.completions);
        self.calling = None;
        match polled {
            Ok(count) => self.complete(index, count.min(POLL_BATCH)),
            Err(error) => self.fail_port(index, error),
        }
    }

    /// Takes note of the first `count` of `self.completions`, all of one port.
    fn complete(&mut self, port_index: usize, count: usize) {
        for at in 0..count {
            let Completion { lane, sequence } = self.completions[at];
            let port = &mut self.ports[port_index];
            let stray = match port.lanes.get(lane.0 as usize) {
                Some(&index) => {
                    let channel = &mut self.channels[index as usize];
                    let result = channel.window.complete(sequence);
                    if result.is_ok() && !channel.moved {
                        channel.moved = true;
                        self.moved.push(index);
                    }
                    result.err().map(|stray| match stray {
                        Stray::NeverSent => "a completion of an op that was never accepted",
                        Stray::Repeated => "a second completion of an op",
                    })
                }
                None => Some("a completion of a lane that was never bound"),
            };
            if let Some(what) = stray {
                return self.fail_port(port_index, TransportError::Contract { what, lane: lane.0, sequence });
            }
            port.under_way -= 1;
            self.counts.completions += 1;
        }
    }

    /// Stores the frontiers that moved, each once.
    fn store_frontiers(&mut self) {
        for index in self.moved.drain(..) {
            let channel = &mut self.channels[index as usize];
            channel.moved = false;
            if !channel.ended {
                channel.shared.set_frontier(channel.window.frontier());
            }
        }
    }

    fn end_overdue(&mut self, now_ns: u64) {
        let limit_ns = self.config.deadline.as_nanos() as u64;
        for index in 0..self.channels.len() {
            let channel = &self.channels[index];
            if channel.ended {
                continue;
            }
            let Some((oldest, sent)) = channel.window.oldest() else { continue };
            let age_ns = now_ns.saturating_sub(oldest.taken_at_ns);
            if age_ns > limit_ns {
                let after = Duration::from_nanos(age_ns);
                let (channel, position) = (channel.shared.number, oldest.position);
                self.end_channel(index, ChannelError::Deadline { channel, position, after, sent });
            }
        }
    }

    /// Ends a channel: its error word before anything else. Ops that its port has accepted go on in there.
    #[cold]
    fn end_channel(&mut self, index: usize, error: ChannelError) {
        let channel = &mut self.channels[index];
        if channel.ended {
            return;
        }
        channel.shared.end(error);
        channel.ended = true;
        channel.window.drop_backlog();
        self.counts.channels_ended += 1;
    }

    #[cold]
    fn fail_port(&mut self, index: usize, error: TransportError) {
        if self.ports[index].failed.is_some() {
            return;
        }
        self.ports[index].failed = Some(error.clone());
        for channel in 0..self.channels.len() {
            if self.channels[channel].port as usize == index {
                let number = self.channels[channel].shared.number;
                self.end_channel(channel, ChannelError::Port { channel: number, source: error.clone() });
            }
        }
    }

    /// Ends the channels of a FIFO that was aborted or broke, and does not look at it again until a reset.
    #[cold]
    fn close_fifo(&mut self, index: usize) {
        let error = self.fifos[index].consumer.closed().unwrap_or(portway_fifo::Error::Aborted);
        self.fifos[index].closed = true;
        self.end_fifo_channels(index, |channel| ChannelError::Fifo { channel, source: error.clone() });
    }

    /// A trigger that names no channel was not written by our device code: nothing in that FIFO can be trusted.
    #[cold]
    fn refuse_fifo(&mut self, index: usize, fault: RequestFault, request: Request) {
        let position = self.fifos[index].consumer.position();
        self.fifos[index].fifo.abort();
        self.fifos[index].closed = true;
        self.end_fifo_channels(index, |_| ChannelError::Request {
            channel: request.channel,
            position,
            fault,
            request,
        });
    }

    fn end_fifo_channels(&mut self, index: usize, error: impl Fn(u16) -> ChannelError) {
        for channel in 0..self.channels.len() {
            if self.channels[channel].fifo as usize == index {
                let number = self.channels[channel].shared.number;
                self.end_channel(channel, error(number));
            }
        }
    }

    fn close_port_once(&mut self, index: usize) {
        let port = &mut self.ports[index];
        if port.quiesced {
            return;
        }
        // A port that panics or fails while it closes is as quiet as it will get; its memory stays bound.
        match catch_unwind(AssertUnwindSafe(|| port.port.close())) {
            Ok(Ok(Close::Quiesced)) => port.quiesced = true,
            Ok(Ok(Close::Pending)) => {}
            Ok(Err(error)) => self.fail_port(index, error),
            Err(payload) => self.fail_port(index, panicked(&*payload)),
        }
    }

    /// A panic came out of a step.
    #[cold]
    fn caught(&mut self, payload: &(dyn core::any::Any + Send)) {
        let error = panicked(payload);
        match self.calling.take() {
            Some(port) => self.fail_port(port as usize, error),
            // Not in a port: our own mistake. No channel can rely on this engine any more.
            None => (0..self.ports.len()).for_each(|port| self.fail_port(port, error.clone())),
        }
    }
}

impl ChannelState {
    /// The op that a request asks for, and the channel's next numbers.
    #[inline]
    fn op(&mut self, request: &Request) -> Op {
        let put = request.op.has(OpSet::PUT);
        let signal = request.op.has(OpSet::SIGNAL).then(|| {
            let n = if put { 1 } else { u64::from(request.size) };
            self.signal_value = self.signal_value.wrapping_add(n);
            self.signal_value
        });
        Op {
            lane: self.lane,
            sequence: self.window.next_sequence(),
            put: put.then_some(Put {
                source_offset_bytes: request.source_offset_bytes,
                destination_offset_bytes: request.destination_offset_bytes,
                len_bytes: u64::from(request.size),
            }),
            signal,
            flush: request.op.has(OpSet::FLUSH),
        }
    }
}

impl Drop for Engine {
    /// Ends every wait. What ports still have under way is theirs to keep alive.
    fn drop(&mut self) {
        self.shared.end_all();
    }
}

fn panicked(payload: &(dyn core::any::Any + Send)) -> TransportError {
    let message = payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    TransportError::Panicked { message }
}
