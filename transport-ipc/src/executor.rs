//! [`Executor`]: the thread of a port that calls the driver, so that the engine does not; and the [`Link`] between them.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crossbeam_queue::ArrayQueue;
use portway_fifo::Words;
use portway_fifo::cuda::Entered;
use portway_proxy::TransportError;

use crate::error::{Error, StalledIn};
use crate::import::HeldRemote;
use crate::memory::{Held, lock};
use crate::socket::Line;
use crate::track::Track;
use crate::transport::Inner;

/// A completion is written after so many ops, or so many bytes, even if more are waiting. A value between two copies
/// costs a few microseconds, in which nothing is copied.
const OPS_A_BATCH: usize = 32;
const BYTES_A_BATCH: u64 = 512 << 20;

/// Looks for work between two looks at the clock.
const LOOKS: usize = 32;

/// How often the executor looks whether the peer still lives.
const LIVENESS: Duration = Duration::from_millis(10);

/// The executor's sleep between two looks once it has been idle for a while.
const NAP: Duration = Duration::from_micros(50);

/// Between two looks at what a closed port has under way; and how often the driver is asked, where the word may not come.
const QUIESCE_NAP: Duration = Duration::from_micros(200);
const QUERY_EVERY: Duration = Duration::from_millis(100);
/// When the driver is asked although nothing has failed.
const QUERY_ANYWAY: Duration = Duration::from_secs(1);

/// What a stream is to do for an op: a copy if there are bytes, then a value if there is a word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) len_bytes: u64,
    /// Address of the signal word, or 0.
    pub(crate) word: u64,
    pub(crate) value: u64,
    /// Somebody waits for its completion, which is written at once.
    pub(crate) flush: bool,
    /// The op's number on this track, counting on from the last op of the port before.
    pub(crate) ticket: u64,
}

/// Where a port's executor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Open,
    Quiesced,
    /// Its stream and memory have been given up.
    GivenUp,
}

/// What port and executor share. The port only reads and writes memory here.
#[derive(Debug)]
pub(crate) struct Link {
    queue: ArrayQueue<Work>,
    /// The ticket up to which the executor may go: that of the last op before a kick or a poll.
    released: AtomicU64,
    /// The track's word: the ticket of the last op that is done.
    pub(crate) done: Words,
    pub(crate) error: OnceLock<TransportError>,
    /// Nothing more is submitted.
    stop: AtomicBool,
    /// The port has gone; what it had bound lies in `bound`.
    closed: AtomicBool,
    bound: Mutex<Vec<Bound>>,
    /// The call of the driver that the executor is in.
    inside: AtomicU8,
    submitted: AtomicU64,
    /// Apart, so that the executor can let go of the rest before it says so.
    stage: Arc<AtomicU8>,
}

/// What a lane has bound.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) _source: Held,
    pub(crate) destination: HeldRemote,
    pub(crate) _signal: HeldRemote,
}

impl Link {
    pub(crate) fn new(track: &Track, depth: usize) -> Self {
        let last = track.done[0].load(Ordering::Acquire);
        Link {
            queue: ArrayQueue::new(depth),
            released: AtomicU64::new(last),
            done: track.done.clone(),
            error: OnceLock::new(),
            stop: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            bound: Mutex::default(),
            inside: AtomicU8::new(0),
            submitted: AtomicU64::new(last),
            stage: Arc::default(),
        }
    }

    /// Lets work rest here until it is released; false if there is no room.
    #[inline]
    pub(crate) fn push(&self, work: Work) -> bool {
        self.queue.push(work).is_ok()
    }

    /// Releases all work up to this ticket.
    #[inline]
    pub(crate) fn release(&self, ticket: u64) {
        self.released.store(ticket, Ordering::Release);
    }

    /// Released work, if there is any after the op with this ticket.
    fn next(&self, after: u64) -> Option<Work> {
        if self.released.load(Ordering::Acquire) == after {
            return None;
        }
        self.queue.pop()
    }

    /// Nothing more is to be submitted.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// The port goes, and leaves what it had bound.
    pub(crate) fn close(&self, bound: Vec<Bound>) {
        *lock(&self.bound) = bound;
        self.stop();
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Open,
            1 => Stage::Quiesced,
            _ => Stage::GivenUp,
        }
    }

    /// Where the executor is, if it is in the driver.
    pub(crate) fn inside(&self) -> Option<StalledIn> {
        match self.inside.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(StalledIn::Copy),
            2 => Some(StalledIn::WriteValue),
            _ => Some(StalledIn::Driver),
        }
    }

    /// Does something in the driver, and lets it be seen.
    fn in_driver<R>(&self, place: StalledIn, body: impl FnOnce() -> R) -> R {
        let number = match place {
            StalledIn::Copy => 1,
            StalledIn::WriteValue => 2,
            StalledIn::Driver | StalledIn::Stream => 3,
        };
        self.inside.store(number, Ordering::Relaxed);
        let result = body();
        self.inside.store(0, Ordering::Relaxed);
        result
    }

    fn is_done(&self) -> bool {
        let submitted = self.submitted.load(Ordering::Relaxed);
        self.done[0].load(Ordering::Acquire).wrapping_sub(submitted) as i64 >= 0
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Executor {
    link: Arc<Link>,
    track: Track,
    /// The ticket of the last work that was taken.
    taken: u64,
    inner: Arc<Inner>,
    peer: String,
    /// To the peer's process, if that is another one.
    line: Option<Line>,
}

impl Executor {
    /// Starts the thread for a port.
    pub(crate) fn start(
        inner: &Arc<Inner>,
        track: Track,
        peer: String,
        line: Option<Line>,
    ) -> Result<Arc<Link>, Error> {
        let link = Arc::new(Link::new(&track, inner.config.depth));
        let taken = link.submitted.load(Ordering::Relaxed);
        let executor = Executor { link: link.clone(), track, taken, inner: inner.clone(), peer, line };
        let thread = std::thread::Builder::new().name("portway-ipc".into()).spawn(move || executor.run());
        thread.map_err(|error| Error::System {
            operation: "starting a thread",
            errno: error.raw_os_error().unwrap_or(0),
        })?;
        Ok(link)
    }

    fn run(mut self) {
        {
            let stream = self.track.stream.clone();
            match self.link.in_driver(StalledIn::Driver, || stream.enter()) {
                Ok(entered) => self.serve(&entered),
                Err(error) => self.fail(error.into()),
            }
        }
        // An executor serves its port for as long as that is there, and then ends within the limit.
        while !self.link.closed.load(Ordering::Acquire) {
            std::thread::sleep(QUIESCE_NAP);
        }
        self.line = None;
        self.quiesce();
    }

    fn serve(&mut self, stream: &Entered<'_>) {
        let mut worked = Instant::now();
        let mut looked = worked;
        while !self.link.stop.load(Ordering::Acquire) {
            if let Some(work) = self.look() {
                if let Err(error) = self.submit(stream, work) {
                    self.fail(error.into());
                }
                worked = Instant::now();
                if worked - looked < LIVENESS {
                    continue;
                }
            }
            let now = Instant::now();
            if now - looked >= LIVENESS {
                looked = now;
                if self.line.as_ref().is_some_and(Line::has_ended) {
                    let (peer, why) =
                        (self.peer.clone(), "its process has ended, or its transport was closed");
                    self.fail(Error::Gone { peer, why }.into());
                }
            }
            if now - worked < self.inner.config.spin {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Looks for work for a moment.
    fn look(&self) -> Option<Work> {
        for _ in 0..LOOKS {
            if let Some(work) = self.link.next(self.taken) {
                return Some(work);
            }
            core::hint::spin_loop();
        }
        None
    }

    /// The port will see it, and everything that waits is dropped.
    fn fail(&self, error: TransportError) {
        // The first one stays.
        let _ = self.link.error.set(error);
        self.link.stop();
    }

    /// Puts an op, and whatever else is waiting, into the stream, and a completion behind them.
    fn submit(&mut self, stream: &Entered<'_>, first: Work) -> Result<(), portway_fifo::Error> {
        let link = &*self.link;
        let (mut next, mut ops, mut bytes, mut unprimed) = (Some(first), 0, 0, false);
        let mut ticket = first.ticket;
        // Where all streams share one connection, a value blocks behind a copy of some kinds, but not behind one from
        // the device to the host.
        let prime = |unprimed: &mut bool| {
            if self.inner.one_connection && core::mem::take(unprimed) {
                link.in_driver(StalledIn::Copy, || self.track.stream.prime())?;
            }
            Ok::<(), portway_fifo::Error>(())
        };
        while let Some(work) = next {
            if work.len_bytes > 0 {
                // SAFETY: the port checked the op against its lane, whose memories it has bound: they are mapped for this
                // device until the port is quiesced, and accessed atomically only (contract of `Region::new`).
                link.in_driver(StalledIn::Copy, || unsafe {
                    stream.copy(work.to, work.from, work.len_bytes)
                })?;
                unprimed = true;
            }
            if work.word != 0 {
                prime(&mut unprimed)?;
                // SAFETY: the word is the lane's, bound like its memories, 8 bytes at a multiple of 8.
                link.in_driver(StalledIn::WriteValue, || unsafe {
                    stream.write_value(work.word, work.value)
                })?;
            }
            ticket = work.ticket;
            ops += 1;
            bytes += work.len_bytes;
            let full = ops == OPS_A_BATCH || bytes >= BYTES_A_BATCH;
            let ends = full || work.flush || link.stop.load(Ordering::Relaxed);
            next = if ends { None } else { link.next(ticket) };
        }
        prime(&mut unprimed)?;
        let done = link.done.region().address();
        // SAFETY: the track's own word, in page-locked memory that lives as long as the track.
        link.in_driver(StalledIn::WriteValue, || unsafe { stream.write_value(done, ticket) })?;
        link.submitted.store(ticket, Ordering::Relaxed);
        self.taken = ticket;
        Ok(())
    }

    /// Waits until nothing that was submitted touches memory any more, and lets go of the memory.
    fn quiesce(self) {
        let Executor { link, track, inner, peer, .. } = self;
        while link.queue.pop().is_some() {}
        // After a failed call there may be work in the stream that no completion follows.
        let failed = link.error.get().is_some();
        let start = Instant::now();
        let mut asked = start;
        let clean = loop {
            if !failed && link.is_done() {
                break Some(true);
            }
            if start.elapsed() >= inner.config.quiesce_limit {
                break None;
            }
            if asked.elapsed() >= QUERY_EVERY && (failed || start.elapsed() >= QUERY_ANYWAY)
                || asked == start && failed
            {
                asked = Instant::now();
                match link.in_driver(StalledIn::Driver, || track.stream.is_idle()) {
                    Ok(false) => {}
                    // Idle; or the context has failed or is gone, and nothing of it runs any more.
                    Ok(true) => break Some(link.is_done()),
                    Err(_) => break Some(false),
                }
            }
            std::thread::sleep(QUIESCE_NAP);
        };
        let bound = core::mem::take(&mut *lock(&link.bound));
        let memories = 3 * bound.len() as u64;
        let stage = link.stage.clone();
        match clean {
            Some(clean) => {
                drop(bound);
                if clean {
                    inner.rack.give_back(track);
                } else {
                    // The stream goes to the context's quarantine.
                    drop(track);
                }
                inner.closing.ended(memories);
                drop((inner, link));
                stage.store(1, Ordering::Release);
            }
            None => {
                // The device may still reach all of it: it stays as it is, for good.
                core::mem::forget((bound, track));
                let after = inner.config.quiesce_limit;
                let _ = link.error.set(Error::Unquiesced { peer, after }.into());
                stage.store(2, Ordering::Release);
            }
        }
    }
}
