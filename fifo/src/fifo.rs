//! [`Fifo`]: makes a ring and hands out its two ends.

use core::time::Duration;
use std::sync::Arc;

#[cfg(not(loom))]
use crate::Producer;
use crate::error::{Cause, Error};
use crate::layout::{device, host};
use crate::memory::Words;
#[cfg(not(loom))]
use crate::memory::{Platform, Region};
use crate::sync::{Ordering, STOP_STORE, TAIL_LOAD};
use crate::trigger::{PARITY, Position, Ring};
use crate::{Consumer, Watch};

/// The smallest ring.
pub const MIN_SLOTS: u64 = 64;

/// The largest ring.
pub const MAX_SLOTS: u64 = 1 << 20;

/// The longest timeout. Nothing waits without end; what has to wait longer calls again.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(3600);

/// How to make a FIFO. `Config { slots: 512, ..Config::default() }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Slots of the ring: a power of two from [`MIN_SLOTS`] to [`MAX_SLOTS`]. 2,048 unless told otherwise.
    pub slots: u64,
    /// How long a push or a sync waits, at most [`MAX_TIMEOUT`]. 10 seconds unless told otherwise.
    pub timeout: Duration,
    /// Whether waiters also look at the tail's replica in device memory. Set it if a flusher writes the replica; each
    /// look of a waiter costs a little more. Not set unless told otherwise.
    pub replica: bool,
    /// The first position. 0 unless a test wants to see the counters wrap.
    pub first_position: Position,
}

impl Default for Config {
    fn default() -> Self {
        Config { slots: 2048, timeout: Duration::from_secs(10), replica: false, first_position: Position(0) }
    }
}

#[cfg(not(loom))]
impl Config {
    fn ring(&self) -> Result<Ring, Error> {
        if !self.slots.is_power_of_two() || !(MIN_SLOTS..=MAX_SLOTS).contains(&self.slots) {
            return Err(Error::RingSize { slots: self.slots });
        }
        check_timeout(self.timeout)?;
        Ok(Ring { shift: self.slots.trailing_zeros() })
    }
}

pub(crate) fn check_timeout(timeout: Duration) -> Result<(), Error> {
    if timeout > MAX_TIMEOUT {
        return Err(Error::TimeoutRange { timeout });
    }
    Ok(())
}

/// What the host's abort word and the gate hold: 0 while the FIFO is open.
pub(crate) mod gate {
    use super::{Cause, Error, Position};

    /// Aborted, and no position was lost.
    pub(crate) const ABORTED: u64 = 1;
    const BROKEN_BY_TIMEOUT: u64 = 2;
    const BROKEN_BY_ABORT: u64 = 3;

    /// A break: the cause in the low two bits, above it the low 62 bits of the position. One word, so that it is
    /// recorded in one step.
    pub(crate) const fn broken(cause: Cause, position: Position) -> u64 {
        let cause = match cause {
            Cause::Timeout => BROKEN_BY_TIMEOUT,
            Cause::Abort => BROKEN_BY_ABORT,
        };
        position.0 << 2 | cause
    }

    /// The error that a gate stands for. The position's upper two bits come from `near`, any position of the same
    /// stream: the two lie far less than 2^61 apart.
    pub(crate) const fn error(gate: u64, near: Position) -> Error {
        let cause = match gate & 3 {
            BROKEN_BY_TIMEOUT => Cause::Timeout,
            BROKEN_BY_ABORT => Cause::Abort,
            _ => return Error::Aborted,
        };
        let ahead = (gate >> 2).wrapping_sub(near.0) << 2;
        Error::Broken { cause, position: Position(near.0.wrapping_add((ahead as i64 >> 2) as u64)) }
    }
}

/// What every end of a FIFO shares.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) ring: Ring,
    pub(crate) timeout: Duration,
    replica: bool,
    pub(crate) host: Words,
    #[cfg(not(loom))]
    device: Region,
}

impl Shared {
    pub(crate) fn abort(&self) {
        self.host[host::ABORT].store(gate::ABORTED, STOP_STORE);
    }

    pub(crate) fn tail(&self) -> Position {
        Position(self.host[host::TAIL].load(TAIL_LOAD))
    }

    /// Marks every slot empty for its next position at or after `start`, and sets the host's words.
    fn clear(&self, start: Position) {
        for n in 0..self.ring.slots() {
            let position = start.plus(n);
            let empty = self.ring.parity(position) ^ PARITY;
            let word = host::SLOTS + 2 * self.ring.slot(position);
            self.host[word].store(empty, Ordering::Relaxed);
            self.host[word + 1].store(empty, Ordering::Relaxed);
        }
        self.host[host::BROKEN].store(0, Ordering::Relaxed);
        self.host[host::ABORT].store(0, Ordering::Relaxed);
        self.host[host::TAIL].store(start.0, Ordering::Release);
    }
}

/// A FIFO: the share of it that any thread may hold, to abort it, to look at it, and to hand out producers.
///
/// ```
/// use portway_fifo::{Config, Fifo, Heap, Trigger};
///
/// let (fifo, mut consumer) = Fifo::new(&Heap, Config::default())?;
/// let producer = fifo.producer()?;
/// let position = producer.push(Trigger::new([1, 2])?)?;
/// let taken = consumer.drain(32, |at, trigger| println!("{at}: {trigger:?}"));
/// assert_eq!(taken, 1);
/// producer.sync(position)?; // the consumer has handed it on
/// # Ok::<(), portway_fifo::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Fifo {
    pub(crate) shared: Arc<Shared>,
}

#[cfg(not(loom))]
impl Fifo {
    /// Makes a FIFO in memory of `platform`, with its one consumer.
    ///
    /// # Errors
    /// [`Error::RingSize`], [`Error::TimeoutRange`], or the platform's.
    pub fn new(platform: &dyn Platform, config: Config) -> Result<(Fifo, Consumer), Error> {
        let ring = config.ring()?;
        let host = platform.host_memory(host::len_bytes(ring.slots()))?;
        let device = platform.device_memory(device::LEN_BYTES)?;
        Fifo::in_memory(host, device, config)
    }

    /// Makes a FIFO in the caller's memory: [`host_len_bytes`](Self::host_len_bytes) bytes that the processor and
    /// the device reach, and [`DEVICE_LEN_BYTES`](Self::DEVICE_LEN_BYTES) that only the device has to. Both are
    /// aligned to 128 bytes and overwritten.
    ///
    /// # Errors
    /// [`Error::RingSize`], [`Error::TimeoutRange`]; [`Error::Range`], [`Error::Alignment`],
    /// [`Error::NotHostMemory`] or [`Error::Overlap`] for a memory that does not serve.
    pub fn in_memory(host: Region, device: Region, config: Config) -> Result<(Fifo, Consumer), Error> {
        let ring = config.ring()?;
        let (a, b) = ("the FIFO's host memory", "the FIFO's device memory");
        let host = host.part(a, 0, host::len_bytes(ring.slots()))?;
        let device = device.part(b, 0, device::LEN_BYTES)?;
        for (what, region) in [(a, &host), (b, &device)] {
            let (address, align_bytes) = (region.address(), crate::layout::LINE_BYTES);
            if address % align_bytes != 0 {
                return Err(Error::Alignment { what, address, align_bytes });
            }
        }
        if host.overlaps(&device) {
            return Err(Error::Overlap { a, a_address: host.address(), b, b_address: device.address() });
        }
        let shared = Arc::new(Shared {
            ring,
            timeout: config.timeout,
            replica: config.replica,
            host: Words::new(host)?,
            device,
        });
        shared.open(config.first_position)?;
        let consumer = Consumer::new(shared.clone(), config.first_position);
        Ok((Fifo { shared }, consumer))
    }

    /// Bytes of device memory that a FIFO takes.
    pub const DEVICE_LEN_BYTES: u64 = device::LEN_BYTES;

    /// Bytes of host memory that a FIFO of `slots` slots takes.
    pub const fn host_len_bytes(slots: u64) -> u64 {
        host::len_bytes(slots)
    }

    /// A producer in software, which plays the kernel. Any number of threads may push through it and its clones.
    ///
    /// # Errors
    /// [`Error::NotHostMemory`] if the producers' words lie in device memory, where only kernels reach them.
    pub fn producer(&self) -> Result<Producer, Error> {
        let device = Words::new(self.shared.device.clone())?;
        Producer::new(self.shared.clone(), device)
    }

    /// What a kernel needs to push, by value. Keep the FIFO alive while a kernel has it.
    pub fn handle(&self) -> crate::layout::FifoHandle {
        use crate::layout::{FifoHandle, HANDLE_VERSION, WatchHandle};
        let host = self.shared.host.region().address();
        let device = self.shared.device.address();
        let at = |base: u64, word: usize| base + word as u64 * 8;
        FifoHandle {
            version: HANDLE_VERSION,
            shift: self.shared.ring.shift,
            slots: at(host, host::SLOTS),
            head: at(device, device::HEAD),
            tail: WatchHandle::new(at(host, host::TAIL), at(host, host::ABORT), at(device, device::WATCH)),
            flushed: if self.shared.replica { at(device, device::FLUSHED) } else { 0 },
            broken: at(host, host::BROKEN),
            timeout_ns: self.shared.timeout.as_nanos() as u64,
        }
    }
}

impl Fifo {
    /// Ends every wait in this FIFO; the consumer may still drain.
    ///
    /// A push that waits for room has already taken its position, so it breaks the FIFO. Producers look at the abort
    /// word when they wait, and only then: pushes that find room succeed until one has to wait (one ring of them, if
    /// the consumer stops as well), and from then on every push returns [`Error::Aborted`] or [`Error::Broken`].
    /// A kernel's push takes its position before it looks, so on a device each of them breaks the FIFO.
    /// [`Consumer::reset`] opens the FIFO again.
    pub fn abort(&self) {
        self.shared.abort();
    }

    /// How far the consumer has come: every trigger below has been handed on. A snapshot.
    pub fn tail(&self) -> Position {
        self.shared.tail()
    }

    /// Slots of the ring.
    pub fn slots(&self) -> u64 {
        self.shared.ring.slots()
    }

    /// How long a call waits unless it is told otherwise.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout
    }
}

#[cfg(not(loom))]
impl Shared {
    /// Sets every word so that the next position is `start`. Nobody else uses the FIFO.
    fn open(&self, start: Position) -> Result<(), Error> {
        let mut words = [0u64; device::LEN_BYTES as usize / 8];
        words[device::HEAD] = start.0;
        words[device::WATCH + crate::layout::watch::SEEN] = start.0;
        words[device::FLUSHED] = start.0;
        self.device.write(0, bytemuck::cast_slice(&words))?;
        self.clear(start);
        Ok(())
    }

    /// Opens the FIFO again at its head. See [`Consumer::reset`].
    pub(crate) fn reset(&self) -> Result<Position, Error> {
        let mut head = [0u8; 8];
        self.device.read(device::HEAD as u64 * 8, &mut head)?;
        let start = Position(u64::from_ne_bytes(head));
        self.open(start)?;
        Ok(start)
    }
}

#[cfg(loom)]
impl Fifo {
    /// A FIFO of two slots in the model's memory, with its consumer and the producers' words.
    pub(crate) fn model(timeout: Duration, start: Position) -> (Fifo, Consumer, Words) {
        let ring = Ring { shift: 1 };
        let host = Words::zeroed(host::len_bytes(ring.slots()));
        let device = Words::zeroed(device::LEN_BYTES);
        let shared = Arc::new(Shared { ring, timeout, replica: true, host });
        for word in [device::HEAD, device::WATCH + crate::layout::watch::SEEN, device::FLUSHED] {
            device[word].store(start.0, Ordering::Relaxed);
        }
        shared.clear(start);
        let consumer = Consumer::new(shared.clone(), start);
        (Fifo { shared }, consumer, device)
    }
}

/// The watch over a FIFO's tail.
pub(crate) fn tail_watch(shared: &Shared, device: &Words) -> Result<Watch, Error> {
    let host = |index| (shared.host.clone(), index);
    let watch = Watch::new(host(host::TAIL), host(host::ABORT), (device.clone(), device::WATCH))?;
    Ok(if shared.replica { watch.with_flushed(device.clone(), device::FLUSHED) } else { watch })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_break_keeps_its_position_across_every_wrap() {
        for base in [0, 1 << 32, 1 << 61, 1 << 62, 1 << 63, u64::MAX] {
            for off in [0u64, 1, 3_000, 0u64.wrapping_sub(7)] {
                let position = Position(base).plus(off);
                for near in [position, position.plus(40_000), Position(position.0.wrapping_sub(1 << 40))] {
                    for cause in [Cause::Timeout, Cause::Abort] {
                        let error = gate::error(gate::broken(cause, position), near);
                        assert_eq!(error, Error::Broken { cause, position });
                    }
                }
            }
        }
        assert_eq!(gate::error(gate::ABORTED, Position(0)), Error::Aborted);
    }
}
