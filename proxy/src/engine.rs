//! [`Engine`]: takes triggers, drives ports, moves frontiers. It owns no thread and reads no clock.
//!
//! Here is how one is made and changed; `step` is what it does all the time.

mod backend;
mod port;
mod step;

use core::hash::{BuildHasher, Hasher};
use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};

use portway_fifo::{Consumer, Fifo, Platform};

use backend::{Backend, ChannelState};
use port::PortState;

use crate::channel::{self, Line, PortChannel, Slab};
use crate::error::{ChannelError, Error, TransportError};
use crate::report::UnderWay;
use crate::request::{MAX_CHANNELS, MAX_REGION_BYTES};
use crate::stats::{Board, Counts, Stats};
use crate::transport::{Binding, LocalMemory, MemoryId, Port, RemoteMemory};
use crate::window::Window;
pub use step::Step;

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

/// The parts of an engine that other threads may touch.
#[derive(Debug)]
pub(crate) struct Shared {
    id: u64,
    slab: Arc<Slab>,
    pub(crate) board: Board,
    fifos: Mutex<Vec<Fifo>>,
    channels: Mutex<Vec<Arc<channel::Shared>>>,
}

impl Shared {
    pub(crate) fn fifos(&self) -> Vec<Fifo> {
        self.fifos.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All channels, in the order in which they were added.
    pub(crate) fn channels(&self) -> Vec<Arc<channel::Shared>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends every wait on every FIFO and channel, from whichever thread.
    pub(crate) fn end_all(&self) {
        for channel in self.channels.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            channel.end(ChannelError::Stopped { fifo: channel.fifo_index, channel: channel.number });
        }
        for fifo in self.fifos.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            fifo.abort();
        }
    }

    /// The first half of making a channel: checks it and sets up its memory. That may block in a driver, so it is done
    /// on the caller's thread, never on the engine's.
    pub(crate) fn prepare(&self, config: ChannelConfig) -> Result<Prepared, Error> {
        if config.fifo.engine != self.id {
            return Err(Error::Foreign { what: "FIFO", index: config.fifo.index });
        }
        if config.port.engine != self.id {
            return Err(Error::Foreign { what: "port", index: config.port.index });
        }
        let regions = [
            ("source region", config.source.region.len_bytes()),
            ("destination region", config.destination.len_bytes),
        ];
        for (what, len_bytes) in regions {
            if len_bytes == 0 || len_bytes > MAX_REGION_BYTES {
                return Err(Error::Region { what, len_bytes, must_be: "1 byte to 1 TiB" });
            }
        }
        let words = [
            ("outbound signal word", config.outbound.len_bytes),
            ("inbound signal word", config.inbound.region.len_bytes()),
        ];
        for (what, len_bytes) in words {
            if len_bytes != 8 {
                return Err(Error::Region { what, len_bytes, must_be: "8 bytes" });
            }
        }
        let address = config.inbound.region.address();
        if address % 8 != 0 {
            let what = "inbound signal word";
            return Err(portway_fifo::Error::Alignment { what, address, align_bytes: 8 }.into());
        }
        let fifo = self.fifos.lock().unwrap_or_else(PoisonError::into_inner)[config.fifo.index].clone();
        // No trigger of the channel can stand before the tail of now.
        let line = self.slab.line(fifo.tail())?;
        Ok(Prepared { config, fifo, line })
    }
}

/// A channel that has its memory and is not part of the engine yet.
#[derive(Debug)]
pub(crate) struct Prepared {
    config: ChannelConfig,
    fifo: Fifo,
    line: Line,
}

#[derive(Debug)]
struct FifoState {
    fifo: Fifo,
    /// Not here while the FIFO is being reset.
    consumer: Option<Consumer>,
    /// Channel number to index in `Engine::channels`.
    channels: Vec<u32>,
    closed: bool,
}

impl FifoState {
    fn is_empty(&self) -> bool {
        self.consumer.as_ref().is_none_or(|consumer| consumer.peek().is_none())
    }
}

/// Takes what is ready from its FIFOs, submits it to its ports, polls them, and publishes.
///
/// [`step`](Self::step) never blocks, allocates, locks, logs or calls the system; whoever calls it decides how often,
/// on which thread, and what time it is. [`Proxy`](crate::Proxy) does so on a thread of its own.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    fifos: Vec<FifoState>,
    backend: Backend,
    /// What the board shows.
    shown: Counts,
    shared: Arc<Shared>,
    next_housekeeping_ns: u64,
}

impl Engine {
    /// An engine without FIFOs, ports and channels, whose channels' words lie in memory of `platform`.
    ///
    /// # Errors
    /// [`Error::Config`], or the platform's.
    pub fn new(platform: &dyn Platform, config: Config) -> Result<Self, Error> {
        config.check()?;
        let max_channels = config.max_channels;
        let shared = Arc::new(Shared {
            id: std::hash::RandomState::new().build_hasher().finish(),
            slab: Slab::new(platform, max_channels)?,
            board: Board::default(),
            fifos: Mutex::default(),
            channels: Mutex::default(),
        });
        Ok(Engine {
            fifos: Vec::new(),
            backend: Backend::new(max_channels, config.deadline),
            shown: Counts::default(),
            shared,
            next_housekeeping_ns: 0,
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
            return Err(Error::Limit { what: "FIFOs", limit: MAX_CHANNELS, remedy: "take another engine" });
        }
        self.shared.fifos.lock().unwrap_or_else(PoisonError::into_inner).push(fifo.clone());
        self.fifos.push(FifoState { fifo, consumer: Some(consumer), channels: Vec::new(), closed: false });
        Ok(FifoId { engine: self.shared.id, index })
    }

    /// Takes over a port.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn add_port(&mut self, port: Box<dyn Port>) -> Result<PortId, Error> {
        let index = self.backend.ports.len();
        if index == MAX_CHANNELS {
            return Err(Error::Limit { what: "ports", limit: MAX_CHANNELS, remedy: "take another engine" });
        }
        self.backend.ports.push(PortState::new(port));
        Ok(PortId { engine: self.shared.id, index })
    }

    /// Makes a channel. Its number is the next free one of its FIFO.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a FIFO or port of another engine, [`Error::Limit`], [`Error::Region`],
    /// [`Error::InUse`] for a signal word that another channel has or had, [`Error::Channel`] if the FIFO is closed or
    /// the port has failed, or the port's.
    pub fn add_channel(&mut self, config: ChannelConfig) -> Result<PortChannel, Error> {
        let prepared = self.shared.prepare(config)?;
        self.install(prepared)
    }

    /// The second half of making a channel, on the engine's thread.
    pub(crate) fn install(&mut self, prepared: Prepared) -> Result<PortChannel, Error> {
        let Prepared { config, fifo, line } = prepared;
        let ChannelConfig { fifo: fifo_id, port: port_id, source, destination, outbound, inbound } = config;
        let (fifo_index, port_index) = (fifo_id.index, port_id.index);
        self.check_signal_words([outbound.id, inbound.id])?;
        let (fifo_state, port_state) = (&mut self.fifos[fifo_index], &mut self.backend.ports[port_index]);
        let number = fifo_state.channels.len() as u16;
        let Some(consumer) = &fifo_state.consumer else {
            return Err(being_reset(fifo_index));
        };
        if let Some(source) = consumer.closed() {
            return Err(ChannelError::Fifo { fifo: fifo_index, channel: number, source }.into());
        }
        if let Some(error) = &port_state.failed {
            return Err(
                ChannelError::Port { fifo: fifo_index, channel: number, source: error.clone() }.into()
            );
        }
        let binding = Binding { source: source.id, destination: destination.id, signal: outbound.id };
        let lane = match port_state.call(|port| port.bind(&binding)) {
            Ok(lane) if lane.0 as usize == port_state.lanes.len() => lane,
            Ok(lane) => {
                let error =
                    TransportError::Contract { what: "lanes count from 0", lane: lane.0, sequence: 0 };
                self.backend.fail_port(port_index, error.clone());
                return Err(error.into());
            }
            Err(error) => {
                if matches!(*error, TransportError::Panicked { .. }) {
                    self.backend.fail_port(port_index, (*error).clone());
                }
                return Err((*error).into());
            }
        };
        let start = consumer.position();
        let lens = (source.region.len_bytes(), destination.len_bytes);
        let channel = PortChannel::new(line, number, (fifo_index, fifo), lens, inbound.region);
        channel.shared.set_frontier(start);
        let index = self.backend.channels.len() as u32;
        port_state.lanes.push(index);
        fifo_state.channels.push(index);
        self.shared.channels.lock().unwrap_or_else(PoisonError::into_inner).push(channel.shared.clone());
        self.backend.channels.push(ChannelState {
            shared: channel.shared.clone(),
            words: [outbound.id, inbound.id],
            fifo: fifo_index as u32,
            number,
            port: port_index as u32,
            lane,
            source_len_bytes: lens.0,
            destination_len_bytes: lens.1,
            window: Window::new(self.config.window, start),
            signal_value: 0,
            moved: false,
        });
        Ok(channel)
    }

    fn check_signal_words(&self, words: [MemoryId; 2]) -> Result<(), Error> {
        for channel in &self.backend.channels {
            for (at, what) in ["outbound signal word", "inbound signal word"].into_iter().enumerate() {
                if channel.words[at] == words[at] {
                    let (number, fifo) = (channel.shared.number, channel.fifo);
                    let index = words[at].index as usize;
                    let by = format!("channel {number} of FIFO {fifo}");
                    let remedy = "a signal word has one writer for good, so take a new one for each channel";
                    return Err(Error::InUse { what, index, by, remedy });
                }
            }
        }
        Ok(())
    }

    /// Opens an aborted or broken FIFO again, for new channels; its old ones have ended. Does nothing to an open one.
    /// See [`Consumer::reset`] for what the caller has to see to.
    ///
    /// # Errors
    /// [`Error::Foreign`], or the FIFO's.
    pub fn reset_fifo(&mut self, fifo: FifoId) -> Result<(), Error> {
        let Some(mut consumer) = self.begin_reset(fifo)? else { return Ok(()) };
        let result = consumer.reset();
        self.end_reset(fifo, consumer, result.is_ok());
        Ok(result?)
    }

    /// Hands out the consumer of a FIFO that is closed. Its reset touches device memory, which may block in a driver, so
    /// it is not for the engine's thread.
    pub(crate) fn begin_reset(&mut self, fifo: FifoId) -> Result<Option<Consumer>, Error> {
        if fifo.engine != self.shared.id {
            return Err(Error::Foreign { what: "FIFO", index: fifo.index });
        }
        let state = &mut self.fifos[fifo.index];
        let consumer = state.consumer.take().ok_or_else(|| being_reset(fifo.index))?;
        let Some(error) = consumer.closed() else {
            state.consumer = Some(consumer);
            return Ok(None);
        };
        self.close_fifo(fifo.index, &error);
        Ok(Some(consumer))
    }

    /// Takes the consumer back, and opens the FIFO if its reset succeeded.
    pub(crate) fn end_reset(&mut self, fifo: FifoId, consumer: Consumer, succeeded: bool) {
        let state = &mut self.fifos[fifo.index];
        state.consumer = Some(consumer);
        state.closed = !succeeded;
    }

    /// Whether there is nothing to do: every trigger of a FIFO that is open has been taken, and every op of a channel that
    /// has not ended is complete.
    pub fn is_idle(&self) -> bool {
        self.fifos.iter().all(|fifo| fifo.closed || fifo.is_empty())
            && self.backend.channels.iter().all(|channel| channel.has_ended() || channel.window.is_idle())
    }

    /// Whether every trigger has been taken and no op is under way, in what has ended too.
    pub(crate) fn is_drained(&self) -> bool {
        self.fifos.iter().all(FifoState::is_empty) && self.backend.under_way() == 0
    }

    /// What the engine has done so far.
    pub fn stats(&self) -> Stats {
        self.shared.board.stats()
    }

    /// What every channel has under way, in the order in which they were added.
    pub(crate) fn by_channel(&self) -> Vec<UnderWay> {
        let of = |channel: &ChannelState| UnderWay {
            port: channel.port as usize,
            in_port: channel.window.in_port(),
            backlog: channel.window.backlog(),
        };
        self.backend.channels.iter().map(of).collect()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Ops that were taken and are neither complete nor thrown away.
    pub(crate) fn under_way(&self) -> u64 {
        self.backend.under_way()
    }
}

fn being_reset(fifo: usize) -> Error {
    Error::InUse {
        what: "FIFO",
        index: fifo,
        by: "a reset".into(),
        remedy: "try again when that has returned",
    }
}
