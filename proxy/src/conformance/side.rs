//! [`Side`]: an end at work on a thread of its own, and whoever waits for it with a deadline.

use core::cell::Cell;
use core::fmt;
use core::time::Duration;
use std::io::{Read, Write};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use super::agent::{Agent, Allocate, DRIVE_LIMITS, Inside};
use super::command::{Answer, Command, Driven, Fault, FaultKind, Longest, Name, Plan, Reply, Track};
use super::pattern::{Complaint, Piece};
use super::report::Failure;
use super::{Limits, wire};
use crate::TransportError;
use crate::transport::{Completion, Lane, Op, Transport};

/// One end of a connection to be: a transport of this process, or one behind a stream.
///
/// A clone is the same end.
#[derive(Clone, Debug)]
pub struct End(Kind);

#[derive(Clone)]
enum Kind {
    Local { transport: Arc<dyn Transport>, allocate: Arc<Allocate> },
    Remote(Arc<Mutex<Stream>>),
}

/// The stream to an end in another process.
struct Stream {
    reader: Box<dyn Read + Send>,
    writer: Box<dyn Write + Send>,
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Local { transport, .. } => f.debug_tuple("Local").field(transport).finish(),
            Kind::Remote(_) => f.write_str("Remote"),
        }
    }
}

impl End {
    /// An end in this process. `allocate` makes zeroed memory of so many bytes, of the kind that the transport is for; it
    /// is read and written through [`Region::read`](portway_fifo::Region::read) and
    /// [`write`](portway_fifo::Region::write) alone.
    pub fn new(
        transport: impl Transport + 'static,
        allocate: impl Fn(u64) -> Result<portway_fifo::Region, portway_fifo::Error> + Send + Sync + 'static,
    ) -> Self {
        End(Kind::Local { transport: Arc::new(transport), allocate: Arc::new(allocate) })
    }

    /// An end that [`serve`] works for behind this pair of streams.
    pub fn remote(reader: impl Read + Send + 'static, writer: impl Write + Send + 'static) -> Self {
        let stream = Stream { reader: Box::new(reader), writer: Box::new(writer) };
        End(Kind::Remote(Arc::new(Mutex::new(stream))))
    }
}

/// Works for a suite in another process until the stream ends.
///
/// `idle` is to be longer than the suite may leave this end alone: if not every pair has it, as long as the suite takes.
///
/// # Errors
/// [`TransportError::Timeout`] if nothing came, or a command did not end, within `idle`: the thread that was at work is
/// left to itself. [`TransportError::Malformed`] for bytes that no suite of this version sends, or if `end` is itself
/// remote.
pub fn serve(
    end: &End,
    reader: impl Read + Send + 'static,
    writer: impl Write + Send + 'static,
    idle: Duration,
) -> Result<(), TransportError> {
    let Kind::Local { transport, allocate } = end.0.clone() else {
        let (expected, seen) = ("an end of this process".into(), "a remote one".into());
        return Err(TransportError::Malformed { what: "the end to serve", expected, seen });
    };
    let inside = Arc::new(Inside::default());
    let (progress, progressed) = mpsc::channel();
    let at_work = inside.clone();
    spawn("portway-conformance-serve", move || {
        let (mut reader, mut writer) = (reader, writer);
        let mut agent = Agent::new(transport, allocate, inside);
        let end = loop {
            match wire::receive(&mut reader) {
                Ok(Some(command)) => {
                    let answer = agent.execute(command);
                    if let Err(error) = wire::send(&answer, &mut writer) {
                        break Err(error);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
            // Whoever waits may have given up.
            let _ = progress.send(None);
        };
        drop(agent);
        let _ = progress.send(Some(end));
    })?;
    loop {
        match progressed.recv_timeout(idle) {
            Ok(None) => {}
            Ok(Some(Ok(()))) => return Ok(()),
            Ok(Some(Err(error))) => {
                let (expected, seen) = ("a command".into(), error.to_string());
                return Err(TransportError::Malformed { what: "the suite's stream", expected, seen });
            }
            Err(_) => {
                let call = at_work.call();
                let peer = if call.is_empty() { "the suite".into() } else { format!("a port in {call}") };
                return Err(TransportError::Timeout { what: "the next command", peer, after: idle });
            }
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), TransportError> {
    // Not joined: each of these threads says when it ends, and is waited for with a deadline.
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    thread.map(drop).map_err(|error| TransportError::Device {
        operation: "starting a thread of the conformance suite",
        status: error.raw_os_error().unwrap_or(0),
        vendor: 0,
        source: Some(Arc::new(error)),
    })
}

/// What an end does with a command.
enum Worker {
    Agent(Agent),
    Relay(Arc<Mutex<Stream>>),
}

impl Worker {
    fn execute(&mut self, command: Command) -> Answer {
        match self {
            Worker::Agent(agent) => agent.execute(command),
            Worker::Relay(stream) => {
                let broken = |text: String| Answer {
                    reply: Reply::Failed { fault: Fault::new(FaultKind::Suite {}, "the stream", text) },
                    longest: Longest::default(),
                };
                // Held for longer only by a thread that an earlier check left behind.
                let Ok(mut stream) = stream.try_lock() else {
                    return broken("an earlier check still waits for the other process".into());
                };
                if let Err(error) = wire::send(&command, &mut *stream.writer) {
                    return broken(error.to_string());
                }
                match wire::receive(&mut *stream.reader) {
                    Ok(Some(answer)) => answer,
                    Ok(None) => broken("the other process has closed it".into()),
                    Err(error) => broken(error.to_string()),
                }
            }
        }
    }
}

/// An end at work.
#[derive(Debug)]
pub(super) struct Side {
    name: &'static str,
    limits: Limits,
    commands: Option<mpsc::Sender<Command>>,
    answers: mpsc::Receiver<Answer>,
    inside: Arc<Inside>,
    /// Lanes of its port.
    lanes: Cell<u32>,
    watching: Cell<bool>,
}

pub(super) type Checked<T> = Result<T, Failure>;

/// The value of the reply that a command has.
macro_rules! reply {
    ($side:expr, $command:expr, $pattern:pat => $value:expr) => {
        match $side.call($command)? {
            $pattern => Ok($value),
            other => Err($side.failure("an answer to the command", format!("{other:?}"))),
        }
    };
}

/// A memory of a side.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) number: u32,
    pub(super) len_bytes: u64,
    pub(super) export: Vec<u8>,
}

impl Side {
    pub(super) fn start(name: &'static str, end: End, limits: Limits) -> Checked<Side> {
        let inside = Arc::new(Inside::default());
        let (commands, to_do) = mpsc::channel();
        let (answered, answers) = mpsc::channel();
        let at_work = inside.clone();
        let thread = spawn(&format!("portway-conformance-{name}"), move || {
            let mut worker = match end.0 {
                Kind::Local { transport, allocate } => {
                    Worker::Agent(Agent::new(transport, allocate, at_work))
                }
                Kind::Remote(stream) => Worker::Relay(stream),
            };
            // Ends when the side is dropped.
            for command in to_do {
                let answer = worker.execute(command);
                if answered.send(answer).is_err() {
                    break;
                }
            }
            // `answered` goes after the worker, so that its end tells that of the worker.
            drop(worker);
            drop(answered);
        });
        let side = Side {
            name,
            limits,
            commands: Some(commands),
            answers,
            inside,
            lanes: Cell::new(0),
            watching: Cell::new(false),
        };
        thread.map_err(|error| side.failure("a thread", error.to_string()))?;
        side.done(Command::Reset {})?;
        Ok(side)
    }

    pub(super) fn failure(&self, expected: impl Into<String>, seen: impl Into<String>) -> Failure {
        Failure { who: format!("side {}", self.name), expected: expected.into(), seen: seen.into() }
    }

    /// Gives the side something to do; [`finish`](Self::finish) waits for it.
    pub(super) fn begin(&self, command: Command) -> Checked<()> {
        let gone = || self.failure("a thread that works", "it is gone");
        self.commands.as_ref().ok_or_else(gone)?.send(command).map_err(|_| gone())
    }

    /// The answer to what was begun, be it a fault. `within` is what the command itself may take.
    fn outcome(&self, within: Duration) -> Checked<Result<Reply, Fault>> {
        let answer = self.answer(within)?;
        let Longest { call, took } = answer.longest;
        if took > self.limits.call {
            let expected = format!("{call} returns at once, in no case after {:?}", self.limits.call);
            return Err(self.failure(expected, format!("it took {took:?}")));
        }
        Ok(match answer.reply {
            Reply::Failed { fault } if fault.kind == (FaultKind::Suite {}) => {
                return Err(self.failure("a side that works", format!("{}: {}", fault.call, fault.text)));
            }
            Reply::Failed { fault } => Err(fault),
            reply => Ok(reply),
        })
    }

    /// Waits for an answer until the command's time is over, or one call into the transport has not come back.
    fn answer(&self, within: Duration) -> Checked<Answer> {
        let start = Instant::now();
        let (wait, limit) = (self.limits.wait, within + self.limits.wait);
        let mut ended = None;
        loop {
            let left = limit.saturating_sub(start.elapsed()).min(wait);
            match self.answers.recv_timeout(left) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.failure("a side that works", "it is gone"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let call = self.inside.call();
            let stuck = !call.is_empty() && ended == Some(self.inside.ended());
            if stuck || start.elapsed() >= limit {
                let call = if call.is_empty() { "a command" } else { call };
                let seen = format!("it has not within {:?}", if stuck { wait } else { limit });
                return Err(self.failure(format!("{call} returns"), seen));
            }
            ended = Some(self.inside.ended());
        }
    }

    /// The reply to what was begun.
    pub(super) fn finish(&self, within: Duration) -> Checked<Reply> {
        self.outcome(within)?.map_err(|fault| self.fault(&fault))
    }

    pub(super) fn fault(&self, fault: &Fault) -> Failure {
        self.failure(format!("{} succeeds", fault.call), fault.text.clone())
    }

    fn call(&self, command: Command) -> Checked<Reply> {
        self.attempt(command)?.map_err(|fault| self.fault(&fault))
    }

    /// Does something that has no result.
    pub(super) fn done(&self, command: Command) -> Checked<()> {
        reply!(self, command, Reply::Done {} => ())
    }

    /// The fault of something that may fail.
    pub(super) fn attempt(&self, command: Command) -> Checked<Result<Reply, Fault>> {
        let within = match &command {
            Command::Connect { within, .. } => 2 * *within,
            Command::Look { within } => *within,
            Command::Drive { plan, .. } => DRIVE_LIMITS * plan.within,
            _ => Duration::ZERO,
        };
        self.begin(command)?;
        self.outcome(within)
    }

    fn memory(&self, command: Command) -> Checked<Memory> {
        reply!(self, command, Reply::Memory { number, len_bytes, export } => Memory { number, len_bytes, export })
    }

    pub(super) fn allocate(&self, len_bytes: u64) -> Checked<Memory> {
        self.memory(Command::Allocate { len_bytes })
    }

    pub(super) fn signal_word(&self) -> Checked<Memory> {
        self.memory(Command::SignalWord {})
    }

    /// Imports a memory of the other side. Its length has to be that of the original.
    pub(super) fn import(&self, memory: &Memory) -> Checked<Name> {
        let command = Command::Import { bytes: memory.export.clone() };
        let (number, len_bytes) =
            reply!(self, command, Reply::Remote { number, len_bytes } => (number, len_bytes))?;
        if len_bytes != memory.len_bytes {
            let expected = format!("an import as long as its original, {} bytes", memory.len_bytes);
            return Err(self.failure(expected, format!("{len_bytes} bytes")));
        }
        Ok(Name::Remote { number })
    }

    pub(super) fn endpoint(&self) -> Checked<Vec<u8>> {
        reply!(self, Command::Endpoint {}, Reply::Endpoint { bytes } => bytes)
    }

    /// Binds a lane. Its number has to be the next.
    pub(super) fn bind(&self, source: Name, destination: Name, signal: Name) -> Checked<Lane> {
        let command = Command::Bind { source, destination, signal };
        let lane = reply!(self, command, Reply::Bound { lane } => lane)?;
        let next = self.lanes.get();
        if lane != Lane(next) {
            let expected = format!("lane {next} from bind, as lanes count from 0");
            return Err(self.failure(expected, format!("lane {}", lane.0)));
        }
        self.lanes.set(next + 1);
        Ok(lane)
    }

    /// Offers an op; whether it was accepted.
    pub(super) fn submit(&self, op: &Op) -> Checked<bool> {
        reply!(self, Command::Submit { op: *op }, Reply::Submitted { accepted } => accepted)
    }

    pub(super) fn kick(&self) -> Checked<()> {
        self.done(Command::Kick {})
    }

    pub(super) fn poll(&self) -> Checked<Vec<Completion>> {
        reply!(self, Command::Poll { room: 64 }, Reply::Polled { completions } => completions)
    }

    /// Whether the port is quiesced.
    pub(super) fn close(&self) -> Checked<bool> {
        reply!(self, Command::Close {}, Reply::Closed { quiesced } => quiesced)
    }

    pub(super) fn drive(&self, ops: &[Op], plan: Plan) -> Checked<Driven> {
        let command = Command::Drive { ops: ops.to_vec(), plan };
        reply!(self, command, Reply::Driven { driven } => driven)
    }

    pub(super) fn fill(&self, memory: &Memory, seed: u64) -> Checked<()> {
        self.done(Command::Fill { memory: memory.number, seed })
    }

    /// Compares a whole memory; `what` says of which.
    pub(super) fn verify(&self, what: &str, memory: &Memory, base: u64, pieces: &[Piece]) -> Checked<()> {
        let command = Command::Verify { memory: memory.number, base, pieces: pieces.to_vec() };
        match reply!(self, command, Reply::Compared { complaint } => complaint)? {
            None => Ok(()),
            Some(complaint) => Err(self.complaint(&format!("in {what}: "), &complaint)),
        }
    }

    pub(super) fn word(&self, memory: &Memory) -> Checked<u64> {
        reply!(self, Command::Word { memory: memory.number }, Reply::Word { value } => value)
    }

    pub(super) fn watch(&self, tracks: Vec<Track>) -> Checked<()> {
        self.watching.set(true);
        self.done(Command::Watch { tracks })
    }

    /// Whether it was given words to watch.
    pub(super) fn is_watching(&self) -> bool {
        self.watching.get()
    }

    /// Looks at the watched words; whether all have their last value.
    pub(super) fn look(&self, within: Duration) -> Checked<bool> {
        let reply = self.call(Command::Look { within })?;
        self.looked(reply)
    }

    pub(super) fn looked(&self, reply: Reply) -> Checked<bool> {
        match reply {
            Reply::Looked { complaint: Some(complaint), .. } => Err(self.complaint("", &complaint)),
            Reply::Looked { finished, .. } => Ok(finished),
            other => Err(self.failure("an answer to the command", format!("{other:?}"))),
        }
    }

    fn complaint(&self, where_: &str, complaint: &Complaint) -> Failure {
        self.failure(format!("{where_}{}", complaint.expected), complaint.seen.clone())
    }
}

impl Drop for Side {
    /// Waits, with a deadline, until the worker has let go of what it holds, so that two checks do not overlap.
    fn drop(&mut self) {
        self.commands = None;
        let start = Instant::now();
        while start.elapsed() < self.limits.wait {
            let left = self.limits.wait.saturating_sub(start.elapsed());
            match self.answers.recv_timeout(left) {
                // An answer that nobody waited for.
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}
