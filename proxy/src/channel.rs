//! [`PortChannel`]: a channel's memory, its handle for kernels, and its end.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytemuck::{Pod, Zeroable};
use portway_fifo::layout::{LINE_BYTES, watch};
use portway_fifo::memory::Platform;
use portway_fifo::{Fifo, FifoHandle, Position, Region, WatchHandle, Words};

use crate::error::{ChannelError, Error};
use crate::producer::ChannelProducer;

/// The version of [`PortChannelHandle`]; `port_channel.cuh` holds the same number.
pub const CHANNEL_VERSION: u32 = 1;

/// A port channel as a kernel sees it: plain data, passed by value. Addresses are valid while the [`PortChannel`] that
/// made the handle lives.
///
/// The layout is that of `portway::PortChannel` in `port_channel.cuh`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PortChannelHandle {
    /// [`CHANNEL_VERSION`].
    pub version: u32,
    /// The channel's number in its FIFO.
    pub channel: u32,
    /// The FIFO that its triggers go to.
    pub fifo: FifoHandle,
    /// The length of the source region, in bytes.
    pub source_len_bytes: u64,
    /// The length of the destination region.
    pub destination_len_bytes: u64,
    /// The frontier, stopped by the error word beside it.
    pub frontier: WatchHandle,
    /// The signal word that the peer writes, stopped by the same error word.
    pub signal: WatchHandle,
    /// The address of the count of signals that were waited for.
    pub expected: u64,
}

const _: () = assert!(size_of::<PortChannelHandle>() == 176);

/// Word indices in a channel's line of host memory, written by the engine.
mod host {
    pub(super) const FRONTIER: usize = 0;
    pub(super) const ERROR: usize = 1;
}

/// Word indices in a channel's device memory.
mod device {
    use super::watch;

    pub(super) const FRONTIER_WATCH: usize = 0;
    pub(super) const SIGNAL_WATCH: usize = watch::WORDS;
    pub(super) const EXPECTED: usize = 2 * watch::WORDS;
    pub(super) const LEN_BYTES: u64 = (EXPECTED as u64 + 16) * 8;
}

/// Memory for the words of all channels of an engine, so that no channel allocates while kernels run.
#[derive(Debug)]
pub(crate) struct Slab {
    host: Region,
    device: Region,
    /// Lines that no channel has.
    free: Mutex<Vec<u32>>,
    channels: usize,
}

/// The memory of one channel. It goes back to its slab when the last share in it is dropped.
#[derive(Debug)]
pub(crate) struct Line {
    words: Words,
    device: Region,
    slab: Arc<Slab>,
    index: u32,
}

impl Slab {
    pub(crate) fn new(platform: &dyn Platform, channels: usize) -> Result<Arc<Self>, Error> {
        let len = channels as u64;
        Ok(Arc::new(Slab {
            host: platform.host_memory(len * LINE_BYTES)?,
            device: platform.device_memory(len * device::LEN_BYTES)?,
            free: Mutex::new((0..channels as u32).rev().collect()),
            channels,
        }))
    }

    /// Takes a line and sets its words for a channel whose triggers come at `start` or later. Writes device memory, so
    /// it may block in a driver and is not for the engine's thread.
    pub(crate) fn line(self: &Arc<Self>, start: Position) -> Result<Line, Error> {
        let index = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(index) = index else {
            return Err(Error::Limit {
                what: "channels",
                limit: self.channels,
                remedy: "drop ended channels, or raise `Config::max_channels`",
            });
        };
        let at = u64::from(index);
        let host = self.host.slice(at * LINE_BYTES, LINE_BYTES)?;
        let device = self.device.slice(at * device::LEN_BYTES, device::LEN_BYTES)?;
        let line = Line { words: Words::new(host)?, device, slab: self.clone(), index };
        let mut copy = [0u64; device::LEN_BYTES as usize / 8];
        copy[device::FRONTIER_WATCH + watch::SEEN] = start.0;
        line.device.write(0, bytemuck::cast_slice(&copy))?;
        line.words[host::FRONTIER].store(start.0, Ordering::Relaxed);
        line.words[host::ERROR].store(0, Ordering::Relaxed);
        Ok(line)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.slab.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

/// What the engine, the host and any thread that stops them share of a channel.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) number: u16,
    /// The FIFO's index in the engine.
    pub(crate) fifo_index: usize,
    pub(crate) fifo: Fifo,
    pub(crate) source_len_bytes: u64,
    pub(crate) destination_len_bytes: u64,
    pub(crate) inbound: Region,
    pub(crate) line: Line,
    error: OnceLock<ChannelError>,
}

impl Shared {
    #[inline]
    pub(crate) fn set_frontier(&self, frontier: Position) {
        self.line.words[host::FRONTIER].store(frontier.0, Ordering::Release);
    }

    /// Ends the channel for everyone who waits or will wait, if it has not ended. The typed error is there before the
    /// word, so whoever sees the word finds it.
    pub(crate) fn end(&self, error: ChannelError) {
        let code = error.code();
        if self.error.set(error).is_ok() {
            self.line.words[host::ERROR].store(code, Ordering::Release);
        }
    }

    pub(crate) fn error(&self) -> Option<&ChannelError> {
        self.error.get()
    }

    fn address(&self, word: usize) -> u64 {
        self.line.words.region().address() + word as u64 * 8
    }

    fn device_address(&self, word: usize) -> u64 {
        self.line.device.address() + word as u64 * 8
    }
}

/// A port channel: puts from a source region to a peer's destination region, signals to the peer, and signals from it.
///
/// Kernels use it through [`handle`](Self::handle), threads through [`producer`](Self::producer). A clone is the same
/// channel.
#[derive(Clone, Debug)]
pub struct PortChannel {
    pub(crate) shared: Arc<Shared>,
}

impl PortChannel {
    pub(crate) fn new(
        line: Line,
        number: u16,
        (fifo_index, fifo): (usize, Fifo),
        lens: (u64, u64),
        inbound: Region,
    ) -> Self {
        let (source_len_bytes, destination_len_bytes) = lens;
        let error = OnceLock::new();
        let shared = Shared {
            number,
            fifo_index,
            fifo,
            source_len_bytes,
            destination_len_bytes,
            inbound,
            line,
            error,
        };
        PortChannel { shared: Arc::new(shared) }
    }

    /// The channel's number in its FIFO.
    pub fn number(&self) -> u16 {
        self.shared.number
    }

    /// Why the channel has ended, if it has.
    pub fn error(&self) -> Option<ChannelError> {
        self.shared.error().cloned()
    }

    /// The position below which all its triggers are complete. A snapshot.
    pub fn frontier(&self) -> Position {
        Position(self.shared.line.words[host::FRONTIER].load(Ordering::Acquire))
    }

    /// How long a device call waits unless it is told otherwise: the FIFO's timeout.
    pub fn timeout(&self) -> Duration {
        self.shared.fifo.timeout()
    }

    /// What a kernel needs, by value. Keep the channel alive while a kernel has it.
    pub fn handle(&self) -> PortChannelHandle {
        let shared = &self.shared;
        let stop = shared.address(host::ERROR);
        PortChannelHandle {
            version: CHANNEL_VERSION,
            channel: u32::from(shared.number),
            fifo: shared.fifo.handle(),
            source_len_bytes: shared.source_len_bytes,
            destination_len_bytes: shared.destination_len_bytes,
            frontier: WatchHandle::new(
                shared.address(host::FRONTIER),
                stop,
                shared.device_address(device::FRONTIER_WATCH),
            ),
            signal: WatchHandle::new(
                shared.inbound.address(),
                stop,
                shared.device_address(device::SIGNAL_WATCH),
            ),
            expected: shared.device_address(device::EXPECTED),
        }
    }

    /// The channel's device end in software, which plays the kernel.
    ///
    /// # Errors
    /// [`portway_fifo::Error::NotHostMemory`] if the words of the FIFO, of the channel or the signal word lie where
    /// only kernels reach them.
    pub fn producer(&self) -> Result<ChannelProducer, Error> {
        ChannelProducer::new(self)
    }

    /// The two watches of the software end: frontier and signal; and the word that counts the signals waited for.
    pub(crate) fn watches(&self) -> Result<(portway_fifo::Watch, portway_fifo::Watch, Words), Error> {
        let shared = &self.shared;
        let line = &shared.line;
        let stop = || (line.words.clone(), host::ERROR);
        let copy = Words::new(line.device.clone())?;
        let frontier = portway_fifo::Watch::new(
            (line.words.clone(), host::FRONTIER),
            stop(),
            (copy.clone(), device::FRONTIER_WATCH),
        )?;
        let inbound = Words::new(shared.inbound.clone())?;
        let signal = portway_fifo::Watch::new((inbound, 0), stop(), (copy, device::SIGNAL_WATCH))?;
        let expected = line.device.slice(device::EXPECTED as u64 * 8, 8)?;
        Ok((frontier, signal, Words::new(expected)?))
    }
}
