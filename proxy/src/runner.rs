//! [`Proxy`]: an engine on a thread of its own.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::channel::PortChannel;
use crate::engine::{self, ChannelConfig, Engine, FifoId, PortId};
use crate::error::Error;
use crate::flusher::{FlushStream, Flusher};
use crate::stats::Stats;
use crate::transport::Port;

/// What a thread does between two looks that found nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Idle {
    /// Looks again at once: the lowest latency, for a processor of its own.
    #[default]
    Spin,
    /// Lets other threads run first.
    Yield,
    /// Sleeps. Adds up to this long to every latency.
    Sleep(Duration),
}

impl Idle {
    pub(crate) fn wait(&mut self) {
        match self {
            Idle::Spin => core::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Sleep(time) => std::thread::sleep(*time),
        }
    }
}

/// How to run an engine. `RunConfig { idle: Idle::Yield, ..RunConfig::default() }`.
#[derive(Debug)]
pub struct RunConfig {
    /// The processors that the engine's thread may run on; empty for those of the thread that starts it.
    pub cpus: Vec<usize>,
    /// What the threads do when there is nothing to do.
    pub idle: Idle,
    /// Where the tail flusher writes, if there is to be one.
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
    /// Everything that was pushed was handled, and everything handled is complete.
    pub drained: bool,
    /// Ops that had been taken and were not complete. Those of their puts that the port had accepted have unknown
    /// outcome.
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
    stop: Mutex<Option<Stop>>,
}

#[derive(Default)]
struct Calls(Vec<Call>);

impl core::fmt::Debug for Calls {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} calls", self.0.len())
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
    exit: Receiver<Exit>,
    thread: Option<std::thread::JoinHandle<()>>,
    flusher: Option<Flusher>,
}

impl Proxy {
    /// Starts a thread that steps the engine.
    ///
    /// # Errors
    /// [`Error::Thread`] if a thread cannot be made, or not be bound to the processors.
    pub fn start(engine: Engine, config: RunConfig) -> Result<Self, Error> {
        let RunConfig { cpus, idle, flush_stream } = config;
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
        let thread = {
            let shared = shared.clone();
            spawn("portway-proxy", move || {
                let placed = bind_to(&cpus);
                let failed = placed.is_err();
                // The receiver waits for exactly this.
                let _ = bound.send(placed);
                if !failed {
                    run(engine, &shared, idle, &exited);
                }
            })?
        };
        let mut proxy = Proxy { shared, exit, thread: Some(thread), flusher };
        match is_bound.recv_timeout(CALL_TIMEOUT) {
            Ok(Ok(())) => Ok(proxy),
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
    /// As there, and [`Error::Unresponsive`].
    pub fn add_port(&self, port: Box<dyn Port>) -> Result<PortId, Error> {
        self.call(move |engine| engine.add_port(port))?
    }

    /// Adds a channel. See [`Engine::add_channel`].
    ///
    /// # Errors
    /// As there, and [`Error::Unresponsive`].
    pub fn add_channel(&self, config: ChannelConfig) -> Result<PortChannel, Error> {
        self.call(move |engine| engine.add_channel(config))?
    }

    /// Ends a port's channels and closes it; true once what it had bound can be released. See
    /// [`Engine::close_port`].
    ///
    /// # Errors
    /// As there, and [`Error::Unresponsive`].
    pub fn close_port(&self, port: PortId) -> Result<bool, Error> {
        self.call(move |engine| engine.close_port(port))?
    }

    /// Opens an aborted or broken FIFO again. See [`Engine::reset_fifo`].
    ///
    /// # Errors
    /// As there, and [`Error::Unresponsive`].
    pub fn reset_fifo(&self, fifo: FifoId) -> Result<(), Error> {
        self.call(move |engine| engine.reset_fifo(fifo))?
    }

    /// What the engine and the flusher have done so far.
    pub fn stats(&self) -> Stats {
        let flusher = self.flusher.as_ref().map(Flusher::stats);
        Stats { flusher, ..self.shared.engine.board.stats() }
    }

    /// Stops: every waiter of every channel and FIFO gets its status, whatever the engine's thread does.
    pub fn stop(mut self, how: Stop) -> Report {
        self.finish(how)
    }

    /// Runs `body` on the engine's thread, between two steps.
    fn call<R: Send + 'static>(
        &self,
        body: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (answered, answer) = sync_channel(1);
        let call: Call = Box::new(move |engine| {
            // Whoever asked may have given up.
            let _ = answered.send(body(engine));
        });
        self.shared.calls.lock().unwrap_or_else(PoisonError::into_inner).0.push(call);
        self.shared.attention.store(true, Ordering::Release);
        answer.recv_timeout(CALL_TIMEOUT).map_err(|_| Error::Unresponsive { after: CALL_TIMEOUT })
    }

    fn finish(&mut self, how: Stop) -> Report {
        let within = match how {
            Stop::Drain { within } => within.min(portway_fifo::MAX_TIMEOUT),
            Stop::Cancel => Duration::ZERO,
        };
        *self.shared.stop.lock().unwrap_or_else(PoisonError::into_inner) = Some(how);
        self.shared.attention.store(true, Ordering::Release);
        if let Some(flusher) = &self.flusher {
            flusher.stop();
        }
        let deadline = Instant::now() + within + STOP_GRACE;
        let mut quarantined = Vec::new();
        let exit = match self.wait_for_exit(within, deadline) {
            Some(exit) => exit,
            None => {
                quarantined.push("portway-proxy");
                Exit { drained: false, cancelled: 0, quiesced: false }
            }
        };
        // Whoever still waits, waits no longer, even if the thread is gone or stuck.
        self.shared.engine.end_all();
        if let Some(thread) = self.thread.take() {
            if quarantined.is_empty() {
                // It has sent its exit, or died of a panic: nothing is left to wait for.
                let _ = thread.join();
            }
        }
        let stats = self.stats();
        if let Some(flusher) = self.flusher.take() {
            if !flusher.join(deadline) {
                quarantined.push("portway-flusher");
            }
        }
        Report {
            drained: exit.drained,
            cancelled: exit.cancelled,
            quiesced: exit.quiesced,
            quarantined,
            stats,
        }
    }

    /// The thread's last word. After `within` its waiters are released even if it has not come.
    fn wait_for_exit(&self, within: Duration, deadline: Instant) -> Option<Exit> {
        let gone = Exit { drained: false, cancelled: 0, quiesced: false };
        // A little longer than the drain may take, so that a drain in time is not cut off.
        match self.exit.recv_timeout(within + STOP_GRACE / 10) {
            Ok(exit) => return Some(exit),
            Err(RecvTimeoutError::Disconnected) => return Some(gone),
            Err(RecvTimeoutError::Timeout) => self.shared.engine.end_all(),
        }
        match self.exit.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(exit) => Some(exit),
            Err(RecvTimeoutError::Disconnected) => Some(gone),
            Err(RecvTimeoutError::Timeout) => None,
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.finish(Stop::Cancel);
        }
    }
}

/// The thread of an engine: steps it until it is told to stop.
fn run(mut engine: Engine, shared: &Shared, mut idle: Idle, exited: &SyncSender<Exit>) {
    let start = Instant::now();
    let how = loop {
        let step = engine.step(start.elapsed());
        if shared.attention.load(Ordering::Acquire) {
            if let Some(how) = attend(&mut engine, shared) {
                break how;
            }
        }
        if step.is_idle() {
            idle.wait();
        }
    };
    let mut drained = engine.is_idle();
    if let Stop::Drain { within } = how {
        let asked = Instant::now();
        while !drained && asked.elapsed() < within {
            if engine.step(start.elapsed()).is_idle() {
                idle.wait();
            }
            drained = engine.is_idle();
        }
    }
    let cancelled = engine.under_way();
    let asked = Instant::now();
    let mut quiesced = engine.shut_down();
    while !quiesced && asked.elapsed() < STOP_GRACE / 2 {
        idle.wait();
        quiesced = engine.shut_down();
    }
    // The receiver is gone only if nobody wants to know.
    let _ = exited.send(Exit { drained, cancelled, quiesced });
}

/// Runs the calls that wait; the stop request, if there is one.
fn attend(engine: &mut Engine, shared: &Shared) -> Option<Stop> {
    shared.attention.store(false, Ordering::Release);
    let calls = core::mem::take(&mut shared.calls.lock().unwrap_or_else(PoisonError::into_inner).0);
    for call in calls {
        call(engine);
    }
    *shared.stop.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn spawn(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
) -> Result<std::thread::JoinHandle<()>, Error> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|error| Error::Thread { what: "starting a thread", message: error.to_string() })
}

/// Binds the calling thread to these processors; to none in particular if there are none.
fn bind_to(cpus: &[usize]) -> Result<(), Error> {
    if cpus.is_empty() {
        return Ok(());
    }
    let refuse = |message: String| Error::Thread { what: "binding a thread to processors", message };
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        if cpu >= rustix::thread::CpuSet::MAX_CPU {
            return Err(refuse(format!("there is no processor {cpu}")));
        }
        set.set(cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|error| refuse(format!("{cpus:?}: {error}")))
}
