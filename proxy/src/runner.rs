//! [`Proxy`]: an engine on a thread of its own.

use core::convert::identity;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::channel::PortChannel;
use crate::engine::{self, ChannelConfig, Engine, FifoId, PortId};
use crate::error::Error;
use crate::flusher::{FlushStream, Flusher};
use crate::report::{REPORT_WAIT, Snapshot};
use crate::stats::Stats;
use crate::thread::{Idle, Worker, bind_to};
use crate::trace::told;
use crate::transport::Port;

/// How to run an engine. `RunConfig { idle: Idle::Yield, ..RunConfig::default() }`.
#[derive(Debug)]
pub struct RunConfig {
    /// The processors that the engine's thread may run on; empty for those of the thread that starts it.
    pub cpus: Vec<usize>,
    /// What the threads do when there is nothing to do.
    pub idle: Idle,
    /// Where the tail flusher writes, if there is to be one. It serves the FIFOs that the engine has by then and that
    /// have a replica of their tail.
    pub flush_stream: Option<Box<dyn FlushStream>>,
}

impl Default for RunConfig {
    fn default() -> Self {
        RunConfig { cpus: Vec::new(), idle: Idle::Spin, flush_stream: None }
    }
}

/// How to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Handle what was pushed and complete what is under way, for at most this long; then cancel.
    Drain {
        /// How long.
        within: Duration,
    },
    /// End every channel at once. Puts under way have unknown outcome.
    Cancel,
}

/// What stopping did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Every trigger that was pushed was taken, and no op is under way, not even one of a channel that ended before.
    pub drained: bool,
    /// Ops that had been taken and were not complete. Those of their puts that the port had accepted have unknown
    /// outcome. 0, and not known, if the engine's thread is among the quarantined.
    pub cancelled: u64,
    /// All ports are quiesced: what they had bound can be released.
    pub quiesced: bool,
    /// Threads that did not come back, by name. They keep, until they do, their stream or ports and all memory that
    /// these can touch.
    pub quarantined: Vec<&'static str>,
    /// The counters at the end.
    pub stats: Stats,
}

/// How long a stop waits, beyond the time it was given, for ports to quiesce and threads to come back.
pub const STOP_GRACE: Duration = Duration::from_secs(1);

/// How long calls into a running engine wait for its thread.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

type Call = Box<dyn FnOnce(&mut Engine) + Send>;

#[derive(Debug)]
struct Shared {
    engine: Arc<engine::Shared>,
    /// Set with a call or a stop request, so that the thread takes the locks below only then.
    attention: AtomicBool,
    calls: Mutex<Calls>,
    /// Until when to drain, once there is a stop request.
    stop: Mutex<Option<Instant>>,
}

/// Calls that wait for the engine's thread.
#[derive(Default)]
struct Calls {
    queue: VecDeque<(u64, Call)>,
    next: u64,
    /// The thread has ended.
    closed: bool,
}

impl core::fmt::Debug for Calls {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} calls", self.queue.len())
    }
}

impl Shared {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stop(&self) -> MutexGuard<'_, Option<Instant>> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped by the engine's thread when it ends, by a panic too: no call waits for it any more.
struct Gone(Arc<Shared>);

impl Drop for Gone {
    fn drop(&mut self) {
        let queue = {
            let mut calls = self.0.calls();
            calls.closed = true;
            core::mem::take(&mut calls.queue)
        };
        // Whoever waits for one of these learns that it will not come.
        drop(queue);
    }
}

#[derive(Debug)]
struct Exit {
    drained: bool,
    cancelled: u64,
    quiesced: bool,
}

/// An engine that runs.
///
/// Stop it with [`stop`](Self::stop); dropping it cancels it, waits at most [`STOP_GRACE`], and leaves a thread that
/// does not come back to itself, with all memory that the thread can touch.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    exit: Mutex<Receiver<Exit>>,
    worker: Option<Worker>,
    flusher: Option<Flusher>,
}

impl Proxy {
    /// Starts a thread that steps the engine. An engine runs once:
    ///
    /// ```compile_fail,E0382
    /// # use portway_proxy::{Engine, Proxy, RunConfig};
    /// let engine = Engine::new(&portway_fifo::Heap, Default::default())?;
    /// let first = Proxy::start(engine, RunConfig::default())?;
    /// let second = Proxy::start(engine, RunConfig::default())?; // it has moved
    /// # Ok::<(), portway_proxy::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] for an [`Idle`] that sleeps too long, or a flusher with nothing to flush; [`Error::Thread`] if a thread cannot be made, or not be
    /// bound to the processors. The engine is dropped then.
    pub fn start(engine: Engine, config: RunConfig) -> Result<Self, Error> {
        let RunConfig { cpus, idle, flush_stream } = config;
        idle.check()?;
        let shared = Arc::new(Shared {
            engine: engine.shared().clone(),
            attention: AtomicBool::new(false),
            calls: Mutex::default(),
            stop: Mutex::new(None),
        });
        let flusher = match flush_stream {
            Some(stream) => Some(Flusher::start(engine.shared().fifos(), stream, idle)?),
            None => None,
        };
        let (exited, exit) = sync_channel(1);
        let (bound, is_bound) = sync_channel(1);
        let worker = {
            let gone = Gone(shared.clone());
            Worker::spawn("portway-proxy", move || {
                let placed = bind_to(&cpus);
                let failed = placed.is_err();
                // The receiver waits for exactly this.
                let _ = bound.send(placed);
                if !failed {
                    run(engine, &gone.0, idle, &exited);
                }
            })?
        };
        let mut proxy = Proxy { shared, exit: Mutex::new(exit), worker: Some(worker), flusher };
        match is_bound.recv_timeout(CALL_TIMEOUT) {
            Ok(Ok(())) => told("start", Ok(proxy)),
            Ok(Err(error)) => {
                proxy.finish(Stop::Cancel);
                Err(error)
            }
            Err(_) => Err(Error::Unresponsive { after: CALL_TIMEOUT }),
        }
    }

    /// Adds a port. See [`Engine::add_port`].
    ///
    /// # Errors
    /// As there, [`Error::Unresponsive`], and [`Error::Thread`] if the engine's thread has ended.
    pub fn add_port(&self, port: Box<dyn Port>) -> Result<PortId, Error> {
        told("add_port", self.call(move |engine| engine.add_port(port)).and_then(identity))
    }

    /// Adds a channel. See [`Engine::add_channel`].
    ///
    /// # Errors
    /// As [`add_port`](Self::add_port).
    pub fn add_channel(&self, config: ChannelConfig) -> Result<PortChannel, Error> {
        // The part that may block in a driver, on this thread.
        let prepared = self.shared.engine.prepare(config);
        let install = |prepared| self.call(move |engine| engine.install(prepared)).and_then(identity);
        told("add_channel", prepared.and_then(install))
    }

    /// Ends a port's channels and closes it; true once what it had bound can be released. See
    /// [`Engine::close_port`].
    ///
    /// # Errors
    /// As [`add_port`](Self::add_port).
    pub fn close_port(&self, port: PortId) -> Result<bool, Error> {
        told("close_port", self.call(move |engine| engine.close_port(port)).and_then(identity))
    }

    /// Opens an aborted or broken FIFO again. See [`Engine::reset_fifo`]. On the caller's thread it reads and writes the
    /// FIFO's device memory, which takes as long as the memory's platform lets it.
    ///
    /// # Errors
    /// As [`add_port`](Self::add_port); [`Error::InUse`] while another thread resets it.
    pub fn reset_fifo(&self, fifo: FifoId) -> Result<(), Error> {
        told("reset_fifo", self.reset(fifo))
    }

    fn reset(&self, fifo: FifoId) -> Result<(), Error> {
        let Some(mut consumer) = self.call(move |engine| engine.begin_reset(fifo))?? else { return Ok(()) };
        // The part that may block in a driver, on this thread.
        let result = consumer.reset();
        let succeeded = result.is_ok();
        // Never withdrawn: the consumer goes back whenever the thread comes to it.
        let (_, answer) = self.post(move |engine| engine.end_reset(fifo, consumer, succeeded))?;
        match answer.recv_timeout(CALL_TIMEOUT) {
            Ok(()) => Ok(result?),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => Err(Error::Unresponsive { after: CALL_TIMEOUT }),
        }
    }

    /// What the engine and the flusher have done so far.
    pub fn stats(&self) -> Stats {
        let flusher = self.flusher.as_ref().map(Flusher::stats);
        Stats { flusher, ..self.shared.engine.board.stats() }
    }

    /// Stops: every waiter of every channel and FIFO gets its status, whatever the engine's thread does. At once, or,
    /// when it drains, once everything is handled or the time for it is over. Returns at most [`STOP_GRACE`] later.
    pub fn stop(mut self, how: Stop) -> Report {
        self.finish(how)
    }

    /// What FIFOs and channels are doing, to be printed. It waits for the engine's thread for
    /// [`REPORT_WAIT`] at most, and tells what it can without it.
    pub fn report(&self) -> Snapshot {
        let under_way = self.call_within(REPORT_WAIT, |engine| engine.by_channel()).ok();
        Snapshot::new(&self.shared.engine, under_way, self.stats())
    }

    /// Runs `body` on the engine's thread, between two steps, and waits for what it returns.
    fn call<R: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.call_within(CALL_TIMEOUT, body)
    }

    fn call_within<R: Send + 'static>(
        &self,
        after: Duration,
        body: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (number, answer) = self.post(body)?;
        match answer.recv_timeout(after) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Disconnected) => Err(gone()),
            Err(RecvTimeoutError::Timeout) => {
                let withdrawn = {
                    let queue = &mut self.shared.calls().queue;
                    let at = queue.iter().position(|(n, _)| *n == number);
                    at.and_then(|at| queue.remove(at))
                };
                drop(withdrawn);
                // It may have been carried out in the meantime.
                answer.try_recv().map_err(|_| Error::Unresponsive { after })
            }
        }
    }

    /// Hands `body` to the engine's thread: the number of the call, and where its result will come.
    fn post<R: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<(u64, Receiver<R>), Error> {
        let (answered, answer) = sync_channel(1);
        let call: Call = Box::new(move |engine| {
            // Whoever asked may have given up.
            let _ = answered.send(body(engine));
        });
        let number = {
            let mut calls = self.shared.calls();
            if calls.closed {
                return Err(gone());
            }
            let number = calls.next;
            calls.next += 1;
            calls.queue.push_back((number, call));
            number
        };
        self.alert();
        Ok((number, answer))
    }

    fn alert(&self) {
        self.shared.attention.store(true, Ordering::Release);
        if let Some(worker) = &self.worker {
            worker.wake();
        }
    }

    fn finish(&mut self, how: Stop) -> Report {
        let now = Instant::now();
        let drained_by = match how {
            Stop::Drain { within } => now + within.min(portway_fifo::MAX_TIMEOUT),
            Stop::Cancel => now,
        };
        let over = drained_by + STOP_GRACE;
        *self.shared.stop() = Some(drained_by);
        self.alert();
        if let Some(flusher) = &self.flusher {
            flusher.stop();
        }
        let mut quarantined = Vec::new();
        let exit = self.wait_for_exit(drained_by, over);
        // Whoever still waits, waits no longer, even if the thread is gone.
        self.shared.engine.end_all();
        if self.worker.take().is_some_and(|worker| !worker.join_by(over)) {
            quarantined.push("portway-proxy");
        }
        let stats = self.stats();
        if self.flusher.take().is_some_and(|flusher| !flusher.join_by(over)) {
            quarantined.push("portway-flusher");
        }
        let Exit { drained, cancelled, quiesced } = exit;
        let report = Report { drained, cancelled, quiesced, quarantined, stats };
        #[cfg(feature = "tracing")]
        crate::trace::stopped(&report, &self.shared.engine);
        report
    }

    /// The thread's last word, if it comes before `over`. Once the time to drain is over, nobody waits for the thread.
    fn wait_for_exit(&mut self, drained_by: Instant, over: Instant) -> Exit {
        let exit = self.exit.get_mut().unwrap_or_else(PoisonError::into_inner);
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let mut answer = exit.recv_timeout(left(drained_by));
        if let Err(RecvTimeoutError::Timeout) = answer {
            self.shared.engine.end_all();
            answer = exit.recv_timeout(left(over));
        }
        answer.unwrap_or(Exit { drained: false, cancelled: 0, quiesced: false })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if self.worker.is_some() {
            self.finish(Stop::Cancel);
        }
    }
}

fn gone() -> Error {
    let message = "it has ended, by a panic".to_owned();
    Error::Thread { what: "calling the engine's thread", message }
}

/// The thread of an engine: steps it until it is told to stop.
fn run(mut engine: Engine, shared: &Shared, idle: Idle, exited: &SyncSender<Exit>) {
    let start = Instant::now();
    let drained_by = loop {
        let step = engine.step(start.elapsed());
        if shared.attention.load(Ordering::Acquire) {
            if let Some(drained_by) = attend(&mut engine, shared) {
                break drained_by;
            }
        }
        if step.is_idle() {
            idle.wait();
        }
    };
    while !engine.is_idle() && Instant::now() < drained_by {
        if engine.step(start.elapsed()).is_idle() {
            idle.wait();
        }
    }
    let (drained, cancelled) = (engine.is_drained(), engine.under_way());
    let close_by = Instant::now() + STOP_GRACE / 2;
    let mut quiesced = engine.shut_down();
    while engine.is_closing() && Instant::now() < close_by {
        idle.wait();
        quiesced = engine.shut_down();
    }
    // The receiver is gone only if nobody wants to know.
    let _ = exited.send(Exit { drained, cancelled, quiesced });
}

/// Runs the calls that wait; until when to drain, if there is a stop request.
fn attend(engine: &mut Engine, shared: &Shared) -> Option<Instant> {
    shared.attention.store(false, Ordering::Release);
    // One at a time, so that those behind one that gets stuck can be withdrawn.
    while let Some((_, call)) = next_call(shared) {
        call(engine);
    }
    *shared.stop()
}

fn next_call(shared: &Shared) -> Option<(u64, Call)> {
    shared.calls().queue.pop_front()
}

#[cfg(test)]
mod tests {
    use portway_fifo::{Config, Fifo, Heap};

    use super::*;

    /// No port can bring the thread down, so this takes a call of our own.
    #[test]
    fn a_thread_that_is_gone_is_told_of_at_once() {
        let mut engine = Engine::new(&Heap, engine::Config::default()).unwrap();
        let (fifo, consumer) = Fifo::new(&Heap, Config::default()).unwrap();
        engine.add_fifo(fifo.clone(), consumer).unwrap();
        let proxy = Proxy::start(engine, RunConfig::default()).unwrap();
        let start = Instant::now();
        // A call that gives the next two time to come, the one that brings the thread down, one that waits behind it,
        // and one that comes later.
        let (_, first) = proxy.post(|_| std::thread::sleep(Duration::from_millis(50))).unwrap();
        let (_, second) = proxy.post(|_| -> () { panic!("our own mistake") }).unwrap();
        let (_, behind) = proxy.post(|engine| engine.is_idle()).unwrap();
        assert!(first.recv_timeout(CALL_TIMEOUT).is_ok());
        assert!(matches!(second.recv_timeout(CALL_TIMEOUT), Err(RecvTimeoutError::Disconnected)));
        assert!(matches!(behind.recv_timeout(CALL_TIMEOUT), Err(RecvTimeoutError::Disconnected)));
        let says = "calling the engine's thread: it has ended, by a panic";
        assert_eq!(proxy.call(|engine| engine.is_idle()).unwrap_err().to_string(), says);
        assert!(start.elapsed() < CALL_TIMEOUT, "{:?}", start.elapsed());
        let report = proxy.stop(Stop::Drain { within: Duration::from_secs(60) });
        assert!(start.elapsed() < CALL_TIMEOUT, "{:?}", start.elapsed());
        assert!(!report.drained && !report.quiesced && report.quarantined.is_empty(), "{report:?}");
        let producer = fifo.producer().unwrap();
        let position = producer.push(portway_fifo::Trigger::new([0, 0]).unwrap()).unwrap();
        assert!(matches!(producer.sync(position), Err(portway_fifo::Error::Aborted)));
    }
}
