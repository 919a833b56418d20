//! [`Agent`]: carries out commands on a transport of this process.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use core::time::Duration;
use std::io::{Read, Seek};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Instant;

use portway_fifo::Region;

use super::command::{Answer, Command, Driven, Fault, FaultKind, Longest, Name, Plan, Reply, Track};
use super::pattern::{self, Complaint, Piece};
use crate::TransportError;
use crate::transport::{
    Binding, Close, Completion, Endpoint, Lane, LocalMemory, MemoryId, Op, Port, RemoteMemory, Submit,
    Transport,
};

/// How an end gets memory.
pub(super) type Allocate = dyn Fn(u64) -> Result<Region, portway_fifo::Error> + Send + Sync;

/// The call that an agent is in, for whoever waits for the agent.
#[derive(Debug, Default)]
pub(super) struct Inside {
    call: Mutex<&'static str>,
    ended: AtomicU64,
}

impl Inside {
    fn begin(&self, call: &'static str) {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = call;
    }

    fn end(&self) {
        self.begin("");
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Its name; empty between calls.
    pub(super) fn call(&self) -> &'static str {
        *self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many calls have ended.
    pub(super) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

/// A transport, a port of it, and all that a check made with them.
pub(super) struct Agent {
    transport: Arc<dyn Transport>,
    allocate: Arc<Allocate>,
    inside: Arc<Inside>,
    delay: RunDelay,
    longest: (&'static str, Duration),
    memories: Vec<Kept>,
    remotes: Vec<RemoteMemory>,
    endpoint: Option<Box<dyn Endpoint>>,
    port: Option<Box<dyn Port>>,
    watched: Vec<Watched>,
}

/// A memory that a check registered, in the midst of what was allocated for it.
#[derive(Clone, Debug)]
struct Kept {
    memory: LocalMemory,
    around: Region,
    /// Where in `around` the memory begins.
    margin_bytes: u64,
}

impl Kept {
    /// A piece of the memory as one of `around`. The pattern counts from there as well.
    fn shifted(&self, piece: &Piece) -> Piece {
        Piece {
            offset_bytes: piece.offset_bytes + self.margin_bytes,
            pattern_offset_bytes: piece.pattern_offset_bytes + self.margin_bytes,
            ..*piece
        }
    }
}

/// What is allocated before and behind a memory, for its transport to leave alone: more than a page, and odd, so that no
/// memory is aligned.
const MARGIN_BYTES: u64 = 4_109;

/// How many times its limit a drive may last, as long as something happens.
pub(super) const DRIVE_LIMITS: u32 = 6;

/// A track and how far its word has come.
struct Watched {
    track: Track,
    value: u64,
    next: usize,
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("transport", &self.transport).finish_non_exhaustive()
    }
}

type Done<T> = Result<T, Fault>;

impl Agent {
    pub(super) fn new(transport: Arc<dyn Transport>, allocate: Arc<Allocate>, inside: Arc<Inside>) -> Self {
        Agent {
            transport,
            allocate,
            inside,
            delay: RunDelay::default(),
            longest: ("", Duration::ZERO),
            memories: Vec::new(),
            remotes: Vec::new(),
            endpoint: None,
            port: None,
            watched: Vec::new(),
        }
    }

    /// Carries out one command. Panics of the transport become faults.
    pub(super) fn execute(&mut self, command: Command) -> Answer {
        self.longest = ("", Duration::ZERO);
        let delayed = self.delay.total();
        let result = catch_unwind(AssertUnwindSafe(|| self.carry_out(command)));
        let reply = match result {
            Ok(Ok(reply)) => reply,
            Ok(Err(fault)) => Reply::Failed { fault },
            Err(payload) => Reply::Failed { fault: self.panicked(&*payload) },
        };
        self.inside.end();
        let waited = self.delay.total().saturating_sub(delayed);
        let (call, took) = self.longest;
        Answer { reply, longest: Longest { call: call.into(), took: took.saturating_sub(waited) } }
    }

    fn carry_out(&mut self, command: Command) -> Done<Reply> {
        Ok(match command {
            Command::Reset {} => {
                self.drop_port();
                *self = Agent::new(self.transport.clone(), self.allocate.clone(), self.inside.clone());
                Reply::Done {}
            }
            Command::Allocate { len_bytes } => {
                let allocate = self.allocate.clone();
                let around =
                    self.transport_call("allocate", |_| Ok(allocate(len_bytes + 2 * MARGIN_BYTES)?))?;
                let region = around.slice(MARGIN_BYTES, len_bytes).map_err(memory_fault)?;
                let memory = self.transport_call("register", |transport| transport.register(&region))?;
                self.keep(Kept { memory, around, margin_bytes: MARGIN_BYTES })?
            }
            Command::SignalWord {} => {
                let memory = self.transport_call("signal_word", |transport| transport.signal_word())?;
                let around = memory.region.clone();
                self.keep(Kept { memory, around, margin_bytes: 0 })?
            }
            Command::Release { memory } => {
                let memory = self.memory(memory)?.memory.clone();
                self.transport_call("release", |transport| transport.release(&memory))?;
                Reply::Done {}
            }
            Command::Import { bytes } => {
                let remote = self.transport_call("import", |transport| transport.import(&bytes))?;
                self.remotes.push(remote);
                Reply::Remote { number: self.remotes.len() as u32 - 1, len_bytes: remote.len_bytes }
            }
            Command::Forget { name } => {
                let found = match name {
                    Name::Remote { number } => self.remotes.get(number as usize).copied(),
                    _ => None,
                };
                let missing = || Fault::new(FaultKind::Suite {}, "", format!("there is no import {name:?}"));
                let memory = found.ok_or_else(missing)?;
                self.transport_call("forget", |transport| transport.forget(&memory))?;
                Reply::Done {}
            }
            Command::Endpoint {} => {
                let (endpoint, bytes) = self.transport_call("endpoint", |transport| transport.endpoint())?;
                self.endpoint = Some(endpoint);
                Reply::Endpoint { bytes }
            }
            Command::Connect { bytes, within } => self.connect(bytes, within)?,
            Command::Bind { source, destination, signal } => {
                let binding = Binding {
                    source: self.name(source)?,
                    destination: self.name(destination)?,
                    signal: self.name(signal)?,
                };
                Reply::Bound { lane: self.port_call("bind", |port| port.bind(&binding))? }
            }
            Command::Submit { op } => Reply::Submitted { accepted: self.submit(&op)? },
            Command::Kick {} => {
                self.port_call("kick", |port| port.kick())?;
                Reply::Done {}
            }
            Command::Poll { room } => Reply::Polled { completions: self.poll(room)? },
            Command::Close {} => {
                let close = self.port_call("close", |port| port.close())?;
                Reply::Closed { quiesced: close == Close::Quiesced }
            }
            Command::DropPort {} => {
                self.drop_port();
                Reply::Done {}
            }
            Command::Drive { ops, plan } => {
                let mut driven = Driven::default();
                driven.fault = self.drive(&ops, &plan, &mut driven).err();
                Reply::Driven { driven }
            }
            Command::Fill { memory, seed } => {
                let around = self.memory(memory)?.around.clone();
                let len_bytes = around.len_bytes();
                let all = Piece { offset_bytes: 0, len_bytes, seed, pattern_offset_bytes: 0 };
                write(&around, &all).map_err(memory_fault)?;
                Reply::Done {}
            }
            Command::Write { memory, piece } => {
                let kept = self.memory(memory)?;
                write(&kept.around, &kept.shifted(&piece)).map_err(memory_fault)?;
                Reply::Done {}
            }
            Command::Verify { memory, base, pieces } => {
                let kept = self.memory(memory)?;
                let pieces: Vec<Piece> = pieces.iter().map(|piece| kept.shifted(piece)).collect();
                let checked = pattern::check_all(&kept.around, base, &pieces, kept.margin_bytes);
                Reply::Compared { complaint: checked.map_err(memory_fault)? }
            }
            Command::Word { memory } => Reply::Word { value: self.word(memory)? },
            Command::Watch { tracks } => {
                self.watched = tracks.into_iter().map(|track| Watched { track, value: 0, next: 0 }).collect();
                Reply::Done {}
            }
            Command::Look { within } => self.look_for(within)?,
        })
    }

    /// A call into the transport: it may take its time.
    fn transport_call<R>(
        &mut self,
        call: &'static str,
        body: impl FnOnce(&dyn Transport) -> Result<R, TransportError>,
    ) -> Done<R> {
        self.inside.begin(call);
        let result = body(&*self.transport);
        self.inside.end();
        result.map_err(|error| Fault::of(call, &error))
    }

    /// A call into the port, measured.
    fn port_call<R>(
        &mut self,
        call: &'static str,
        body: impl FnOnce(&mut dyn Port) -> Result<R, TransportError>,
    ) -> Done<R> {
        let Some(port) = self.port.as_deref_mut() else {
            return Err(Fault::new(FaultKind::Suite {}, call, "there is no port"));
        };
        self.inside.begin(call);
        let start = Instant::now();
        let result = body(port);
        self.note(call, start.elapsed());
        result.map_err(|error| Fault::of(call, &error))
    }

    fn note(&mut self, call: &'static str, took: Duration) {
        self.inside.end();
        if took > self.longest.1 {
            self.longest = (call, took);
        }
    }

    fn panicked(&self, payload: &(dyn core::any::Any + Send)) -> Fault {
        let message = payload
            .downcast_ref::<&str>()
            .map(|message| (*message).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Fault::new(FaultKind::Panicked {}, self.inside.call(), format!("a panic: {message}"))
    }

    fn keep(&mut self, kept: Kept) -> Done<Reply> {
        let export = self.transport_call("export", |transport| transport.export(&kept.memory))?;
        let len_bytes = kept.memory.region.len_bytes();
        self.memories.push(kept);
        Ok(Reply::Memory { number: self.memories.len() as u32 - 1, len_bytes, export })
    }

    fn memory(&self, number: u32) -> Done<&Kept> {
        let missing = || Fault::new(FaultKind::Suite {}, "", format!("there is no memory {number}"));
        self.memories.get(number as usize).ok_or_else(missing)
    }

    fn name(&self, name: Name) -> Done<MemoryId> {
        match name {
            Name::Local { number } => Ok(self.memory(number)?.memory.id),
            Name::Remote { number } => match self.remotes.get(number as usize) {
                Some(remote) => Ok(remote.id),
                None => Err(Fault::new(FaultKind::Suite {}, "", format!("there is no import {number}"))),
            },
            Name::Nobodys {} => {
                let known = self.memories.first().map(|kept| kept.memory.id.transport).unwrap_or(0);
                Ok(MemoryId { transport: !known, index: 0 })
            }
        }
    }

    /// Connects on a thread of its own, as an application would: the port has to work on another than that.
    fn connect(&mut self, bytes: Vec<u8>, within: Duration) -> Done<Reply> {
        let Some(endpoint) = self.endpoint.take() else {
            return Err(Fault::new(FaultKind::Suite {}, "connect", "there is no endpoint"));
        };
        self.inside.begin("connect");
        let (connected, connection) = mpsc::sync_channel(1);
        let thread =
            std::thread::Builder::new().name("portway-conformance-connect".into()).spawn(move || {
                let result = catch_unwind(AssertUnwindSafe(|| endpoint.connect(&bytes, within)));
                // Whoever waits may have given up.
                let _ = connected.send(result);
            });
        if let Err(error) = thread {
            return Err(Fault::new(FaultKind::Suite {}, "connect", format!("starting a thread: {error}")));
        }
        // Twice the time that it was given: one that keeps to it is never cut off.
        match connection.recv_timeout(2 * within) {
            Ok(Ok(Ok(port))) => {
                self.drop_port();
                self.port = Some(port);
                Ok(Reply::Done {})
            }
            Ok(Ok(Err(error))) => Err(Fault::of("connect", &error)),
            Ok(Err(payload)) => Err(self.panicked(&*payload)),
            Err(_) => {
                let text = format!("still connecting after twice the {within:?} that it was given");
                Err(Fault::new(FaultKind::Violation {}, "connect", text))
            }
        }
    }

    fn drop_port(&mut self) {
        if let Some(port) = self.port.take() {
            self.inside.begin("drop");
            let start = Instant::now();
            drop(port);
            self.note("drop", start.elapsed());
        }
    }

    fn submit(&mut self, op: &Op) -> Done<bool> {
        Ok(self.port_call("submit", |port| port.submit(op))? == Submit::Accepted)
    }

    fn poll(&mut self, room: u64) -> Done<Vec<Completion>> {
        // The lane and the number of nothing, so that an entry that was counted and not written is noticed.
        let nothing = Completion { lane: Lane(u32::MAX), sequence: u64::MAX };
        let mut completions = vec![nothing; room as usize];
        let count = self.port_call("poll", |port| port.poll(&mut completions))?;
        if count > completions.len() {
            let text = format!("{count} completions reported, with room for {room}");
            return Err(Fault::new(FaultKind::Violation {}, "poll", text));
        }
        completions.truncate(count);
        Ok(completions)
    }

    fn drive(&mut self, ops: &[Op], plan: &Plan, driven: &mut Driven) -> Done<()> {
        let start = Instant::now();
        let mut progress = start;
        let (mut next, mut after, mut idle) = (0, 0, 0u32);
        loop {
            let mut submitted = 0;
            while next < ops.len() && submitted < plan.submits_a_kick && self.submit(&ops[next])? {
                next += 1;
                submitted += 1;
                driven.accepted += 1;
            }
            if submitted > 0 {
                self.port_call("kick", |port| port.kick())?;
            }
            let completions = self.poll(plan.room)?;
            let moved = submitted > 0 || !completions.is_empty();
            driven.completions.extend(completions);
            if next == ops.len() && driven.completions.len() >= ops.len() {
                after += 1;
            }
            // The caller sees from what is missing that the time was over.
            let late = progress.elapsed() > plan.within || start.elapsed() > DRIVE_LIMITS * plan.within;
            if after > plan.polls_after || late {
                return Ok(());
            }
            if moved {
                progress = Instant::now();
                idle = 0;
            } else {
                idle += 1;
                if idle % 16 == 0 {
                    std::thread::yield_now();
                }
            }
        }
    }

    fn word(&self, memory: u32) -> Done<u64> {
        let mut bytes = [0; 8];
        self.memory(memory)?.memory.region.read(0, &mut bytes).map_err(memory_fault)?;
        // What is read after a signal has to be as new as the signal.
        fence(Ordering::Acquire);
        Ok(u64::from_ne_bytes(bytes))
    }

    fn look_for(&mut self, within: Duration) -> Done<Reply> {
        let start = Instant::now();
        loop {
            let complaint = self.look()?;
            let finished = self.watched.iter().all(|watched| watched.next == watched.track.steps.len());
            if complaint.is_some() || finished || start.elapsed() >= within {
                return Ok(Reply::Looked { finished, complaint });
            }
            std::thread::yield_now();
        }
    }

    /// Looks at every watched word once.
    fn look(&mut self) -> Done<Option<Complaint>> {
        if self.port.is_some() {
            let completions = self.poll(1)?;
            if let Some(completion) = completions.first() {
                let text = format!("{completion:?}, of a port that was given no op");
                return Err(Fault::new(FaultKind::Violation {}, "poll", text));
            }
        }
        for at in 0..self.watched.len() {
            let watched = &self.watched[at];
            let value = self.word(watched.track.word)?;
            if value == watched.value {
                continue;
            }
            let steps = &watched.track.steps;
            let Some(ahead) = steps[watched.next..].iter().position(|step| step.value == value) else {
                let expected = match steps.get(watched.next) {
                    Some(step) => format!("{} next, or a later value of the sequence", step.value),
                    None => format!("no more than {}", watched.value),
                };
                return Ok(Some(Complaint {
                    expected: format!("signal word {at} takes the values of the ops in order: {expected}"),
                    seen: format!("{value} after {}", watched.value),
                }));
            };
            let next = watched.next + ahead + 1;
            let kept = self.memory(watched.track.destination)?;
            for piece in steps[watched.next..next].iter().flat_map(|step| &step.pieces) {
                let checked = pattern::check_piece(&kept.around, &kept.shifted(piece), kept.margin_bytes);
                if let Some(complaint) = checked.map_err(memory_fault)? {
                    return Ok(Some(Complaint {
                        expected: format!("with signal word {at} at {value}, {}", complaint.expected),
                        seen: complaint.seen,
                    }));
                }
            }
            self.watched[at].next = next;
            self.watched[at].value = value;
        }
        Ok(None)
    }
}

/// Writes a piece, some of it at a time.
fn write(region: &Region, piece: &Piece) -> Result<(), portway_fifo::Error> {
    const CHUNK_BYTES: u64 = 1 << 20;
    let mut done = 0;
    while done < piece.len_bytes {
        let mut bytes = vec![0; (piece.len_bytes - done).min(CHUNK_BYTES) as usize];
        pattern::fill(piece.seed, piece.pattern_offset_bytes + done, &mut bytes);
        region.write(piece.offset_bytes + done, &bytes)?;
        done += bytes.len() as u64;
    }
    Ok(())
}

fn memory_fault(error: portway_fifo::Error) -> Fault {
    Fault::new(FaultKind::Suite {}, "reading or writing memory", error.to_string())
}

/// How long the calling thread has been ready to run without a processor, as the system counts it.
///
/// On a busy machine a call can take long because its thread was not let run. That is not the port's doing.
#[derive(Default)]
struct RunDelay(Option<std::fs::File>);

impl RunDelay {
    /// 0 where the system does not say.
    fn total(&mut self) -> Duration {
        let nanos = self.read().unwrap_or(0);
        Duration::from_nanos(nanos)
    }

    fn read(&mut self) -> Option<u64> {
        if self.0.is_none() {
            self.0 = std::fs::File::open("/proc/thread-self/schedstat").ok();
        }
        let file = self.0.as_mut()?;
        let mut text = String::new();
        file.rewind().ok()?;
        file.read_to_string(&mut text).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    }
}
