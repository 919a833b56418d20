//! Ports that break the contract, one [`Defect`] each: they show that the checks can fail.

use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use portway_fifo::Region;

use crate::TransportError;
use crate::loopback::Loopback;
use crate::transport::{
    Binding, Close, Completion, Endpoint, Lane, LocalMemory, MemoryId, Op, Port, Put, RemoteMemory, Submit,
    Transport,
};

/// What is wrong with a [`Broken`] transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Defect {
    /// The third poll takes a minute.
    Blocking,
    /// Every kick sleeps for a fifth of a second.
    Slow,
    /// Dropping the port sleeps for a fifth of a second.
    SlowDrop,
    /// Every submit sleeps for a fifth of a second once the peer's port is closed.
    WaitsForPeer,
    /// Every fifth submit is refused, and its put is carried out.
    HalfAccepted,
    /// Once full, always full.
    StaysFull,
    /// A signal is written before the put of the same op.
    SignalOvertakes,
    /// A long put's last byte arrives after the signal behind it.
    TailArrivesLate,
    /// Every fourth signal is followed by an old value.
    StaleSignal,
    /// Signals have 32 bits.
    TruncatedSignal,
    /// The ninth op never completes.
    ForgottenOp,
    /// The ninth op completes twice.
    RepeatedCompletion,
    /// A poll counts more completions than there was room for.
    OverfullPoll,
    /// A put completes before its source is read.
    EarlyCompletion,
    /// A flush completes before the puts ahead of it are delivered.
    EarlyFlush,
    /// Every seventh put completes and moves nothing.
    LostPut,
    /// A put writes a byte too many.
    OutOfBounds,
    /// A byte behind each registered memory is written, but none that the region reaches.
    WritesBehind,
    /// Puts of all lanes go between the first lane's memories.
    MixesLanes,
    /// What is under way goes on after the port says that it is quiesced.
    WritesOnceQuiesced,
    /// An error is returned once.
    ForgetsError,
    /// After an error, another one.
    ChangesError,
    /// A closed port accepts ops.
    OpenOnceClosed,
    /// Only a kick makes progress.
    NeedsKicks,
    /// Lanes count from 1.
    LanesFromOne,
    /// A port that has refused a binding fails.
    BindingSpoils,
    /// A port is never quiesced.
    NeverQuiesced,
    /// Memory stays bound after the port is quiesced.
    KeepsMemory,
    /// Memory can be released at any time.
    ReleasesBound,
    /// An import can be forgotten at any time.
    ForgetsBound,
    /// An import of cut bytes succeeds.
    TrustsBytes,
    /// The twelfth poll panics.
    Panics,
}

impl Defect {
    /// All of them, each with the check that is meant to find it.
    pub const ALL: &'static [(Defect, &'static str)] = &[
        (Defect::Blocking, "no_call_blocks"),
        (Defect::Slow, "no_call_blocks"),
        (Defect::SlowDrop, "a_port_can_be_dropped"),
        (Defect::WaitsForPeer, "no_call_waits_for_the_peer"),
        (Defect::HalfAccepted, "full_leaves_no_trace"),
        (Defect::StaysFull, "full_leaves_no_trace"),
        (Defect::SignalOvertakes, "signals_stay_behind_data"),
        (Defect::TailArrivesLate, "signals_stay_behind_long_puts"),
        (Defect::StaleSignal, "signals_arrive_as_written"),
        (Defect::TruncatedSignal, "signals_arrive_as_written"),
        (Defect::ForgottenOp, "every_op_completes_once"),
        (Defect::RepeatedCompletion, "every_op_completes_once"),
        (Defect::OverfullPoll, "every_op_completes_once"),
        (Defect::EarlyCompletion, "a_completed_put_has_left_its_source"),
        (Defect::EarlyFlush, "a_completed_flush_means_delivered"),
        (Defect::LostPut, "signals_stay_behind_data"),
        (Defect::OutOfBounds, "nothing_else_is_written"),
        (Defect::WritesBehind, "nothing_else_is_written"),
        (Defect::MixesLanes, "random_ops"),
        (Defect::WritesOnceQuiesced, "nothing_is_written_once_quiesced"),
        (Defect::ForgetsError, "an_error_stays"),
        (Defect::ChangesError, "an_error_stays"),
        (Defect::OpenOnceClosed, "a_closed_port_stays_closed"),
        (Defect::NeedsKicks, "polls_alone_finish"),
        (Defect::LanesFromOne, "bindings_are_counted_and_checked"),
        (Defect::BindingSpoils, "bindings_are_counted_and_checked"),
        (Defect::NeverQuiesced, "memory_is_held_until_quiesced"),
        (Defect::KeepsMemory, "memory_is_held_until_quiesced"),
        (Defect::ReleasesBound, "memory_is_held_until_quiesced"),
        (Defect::ForgetsBound, "imports_are_held_until_quiesced"),
        (Defect::TrustsBytes, "bytes_from_a_peer_are_checked"),
        (Defect::Panics, "random_ops"),
    ];
}

/// How long the defects that sleep do so.
const NAP: Duration = Duration::from_millis(200);

/// A transport over loopback with a defect in every port. Its ends A and B have to be clones of one.
#[derive(Clone, Debug)]
pub struct Broken {
    inner: Loopback,
    defect: Defect,
    closed_ports: Arc<AtomicUsize>,
    regions: Arc<Mutex<Vec<Region>>>,
}

impl Broken {
    /// Puts the defect on top of `inner`.
    pub fn new(inner: Loopback, defect: Defect) -> Self {
        Broken { inner, defect, closed_ports: Arc::default(), regions: Arc::default() }
    }
}

impl Transport for Broken {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).push(region.clone());
        self.inner.register(region)
    }

    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        self.inner.signal_word()
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        match self.inner.release(memory) {
            Err(TransportError::Busy { .. }) if self.defect == Defect::ReleasesBound => Ok(()),
            result => result,
        }
    }

    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        match self.inner.forget(memory) {
            Err(TransportError::Busy { .. }) if self.defect == Defect::ForgetsBound => Ok(()),
            result => result,
        }
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        self.inner.export(memory)
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        match self.inner.import(bytes) {
            Err(_) if self.defect == Defect::TrustsBytes => {
                Ok(RemoteMemory { id: MemoryId { transport: 0, index: 0 }, len_bytes: 0 })
            }
            result => result,
        }
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let (inner, bytes) = self.inner.endpoint()?;
        Ok((Box::new(BrokenEndpoint { inner, transport: self.clone() }), bytes))
    }
}

#[derive(Debug)]
struct BrokenEndpoint {
    inner: Box<dyn Endpoint>,
    transport: Broken,
}

impl Endpoint for BrokenEndpoint {
    fn connect(self: Box<Self>, peer: &[u8], timeout: Duration) -> Result<Box<dyn Port>, TransportError> {
        let inner = self.inner.connect(peer, timeout)?;
        Ok(Box::new(BrokenPort {
            inner,
            transport: self.transport,
            held: VecDeque::new(),
            complete: VecDeque::new(),
            calls: Calls::default(),
            older_signals: Vec::new(),
            tripped: false,
        }))
    }
}

/// An op that the port below has not got yet.
#[derive(Debug)]
struct Held {
    op: Op,
    /// Polls until it gets it.
    polls: u32,
}

#[derive(Debug, Default)]
struct Calls {
    submits: u64,
    accepted: u64,
    puts: u64,
    polls: u64,
    signals: u64,
    completions: u64,
}

#[derive(Debug)]
struct BrokenPort {
    inner: Box<dyn Port>,
    transport: Broken,
    held: VecDeque<Held>,
    complete: VecDeque<Completion>,
    calls: Calls,
    /// A lane's last two signals.
    older_signals: Vec<[u64; 2]>,
    /// The defect has shown, for those that show once or from a moment on.
    tripped: bool,
}

/// Marks the number of an op whose completion is not passed on.
const HIDDEN: u64 = 1 << 63;

fn hidden(op: Op) -> Op {
    Op { sequence: op.sequence | HIDDEN, ..op }
}

fn completion(op: &Op) -> Completion {
    Completion { lane: op.lane, sequence: op.sequence }
}

impl BrokenPort {
    /// Gives an op to the port below, after so many polls and behind what is held of its lane.
    fn hand_on(&mut self, op: Op, polls: u32) -> Result<Submit, TransportError> {
        if polls == 0 && !self.held.iter().any(|held| held.op.lane == op.lane) {
            return self.inner.submit(&op);
        }
        if self.held.len() >= 64 {
            return Ok(Submit::Full);
        }
        self.held.push_back(Held { op, polls });
        Ok(Submit::Accepted)
    }

    /// One poll has gone by for what is held.
    fn hand_on_held(&mut self) -> Result<(), TransportError> {
        let mut waiting: Vec<Lane> = Vec::new();
        let mut at = 0;
        while let Some(held) = self.held.get_mut(at) {
            held.polls = held.polls.saturating_sub(1);
            let op = held.op;
            let due = held.polls == 0 && !waiting.contains(&op.lane);
            if due && self.inner.submit(&op)? == Submit::Accepted {
                self.held.remove(at);
            } else {
                waiting.push(op.lane);
                at += 1;
            }
        }
        self.inner.kick()
    }

    /// Gives an op to the port below, made worse.
    fn submit_worse(&mut self, op: Op) -> Result<Submit, TransportError> {
        match (self.transport.defect, op.put) {
            (Defect::SignalOvertakes, Some(_)) if op.signal.is_some() => {
                let signal = Op { put: None, flush: false, ..hidden(op) };
                match self.inner.submit(&signal)? {
                    Submit::Full => Ok(Submit::Full),
                    Submit::Accepted => self.hand_on(Op { signal: None, ..op }, 3),
                }
            }
            (Defect::TailArrivesLate, Some(put)) if put.len_bytes > 4_096 => {
                let len_bytes = put.len_bytes - 1;
                let answer = self.inner.submit(&Op { put: Some(Put { len_bytes, ..put }), ..op })?;
                if answer == Submit::Accepted {
                    let last = Put {
                        source_offset_bytes: put.source_offset_bytes + len_bytes,
                        destination_offset_bytes: put.destination_offset_bytes + len_bytes,
                        len_bytes: 1,
                    };
                    let op = Op { put: Some(last), signal: None, flush: false, ..hidden(op) };
                    self.held.push_back(Held { op, polls: 100_000 });
                }
                Ok(answer)
            }
            (Defect::TailArrivesLate, _) => self.inner.submit(&op),
            (Defect::StaleSignal, _) => {
                let answer = self.inner.submit(&op)?;
                if let (Submit::Accepted, Some(value)) = (answer, op.signal) {
                    self.calls.signals += 1;
                    let lane = op.lane.0 as usize;
                    if self.older_signals.len() <= lane {
                        self.older_signals.resize(lane + 1, [0; 2]);
                    }
                    let [older, old] = self.older_signals[lane];
                    self.older_signals[lane] = [old, value];
                    if self.calls.signals % 4 == 0 {
                        let again = Op { put: None, signal: Some(older), flush: false, ..hidden(op) };
                        // If there is no room, the next one shows it.
                        self.inner.submit(&again)?;
                    }
                }
                Ok(answer)
            }
            (Defect::TruncatedSignal, _) => {
                self.inner.submit(&Op { signal: op.signal.map(|value| value & 0xffff_ffff), ..op })
            }
            (Defect::ForgottenOp, _) if self.calls.accepted == 8 => self.inner.submit(&hidden(op)),
            (Defect::EarlyCompletion, Some(_)) if !op.flush => {
                let answer = self.hand_on(hidden(op), 4)?;
                self.complete.extend((answer == Submit::Accepted).then(|| completion(&op)));
                Ok(answer)
            }
            (Defect::EarlyFlush, put) => {
                let polls = if put.is_some() { 6 } else { 0 };
                if !op.flush {
                    return self.hand_on(op, polls);
                }
                let answer = self.hand_on(hidden(op), polls)?;
                self.complete.extend((answer == Submit::Accepted).then(|| completion(&op)));
                Ok(answer)
            }
            (Defect::LostPut, Some(_)) => {
                let lost = self.calls.puts % 7 == 6;
                let answer = self.inner.submit(&Op { put: op.put.filter(|_| !lost), ..op })?;
                self.calls.puts += u64::from(answer == Submit::Accepted);
                Ok(answer)
            }
            (Defect::MixesLanes, Some(_)) if op.lane != Lane(0) => {
                let put = Op { lane: Lane(0), signal: None, flush: false, ..hidden(op) };
                match self.inner.submit(&put)? {
                    Submit::Full => Ok(Submit::Full),
                    Submit::Accepted => self.hand_on(Op { put: None, ..op }, 0),
                }
            }
            (Defect::OutOfBounds, Some(put)) => {
                let len_bytes = put.len_bytes + 1;
                self.inner.submit(&Op { put: Some(Put { len_bytes, ..put }), ..op })
            }
            (Defect::NeedsKicks, _) => self.hand_on(op, u32::MAX),
            _ => self.hand_on(op, 0),
        }
    }

    /// What the defects that change a port's state make of a call.
    fn check(&self) -> Result<(), TransportError> {
        let ends = matches!(
            self.transport.defect,
            Defect::WritesOnceQuiesced | Defect::KeepsMemory | Defect::NeverQuiesced | Defect::BindingSpoils
        );
        if ends && self.tripped { Err(TransportError::Closed) } else { Ok(()) }
    }

    /// What the defects that concern errors make of a result.
    fn forget<T>(&mut self, result: Result<T, TransportError>, instead: T) -> Result<T, TransportError> {
        let again = match self.transport.defect {
            Defect::ForgetsError | Defect::ChangesError if result.is_err() => {
                core::mem::replace(&mut self.tripped, true)
            }
            Defect::OpenOnceClosed => self.tripped,
            _ => false,
        };
        match self.transport.defect {
            Defect::ChangesError if again => Err(TransportError::Closed),
            _ if again => Ok(instead),
            _ => result,
        }
    }
}

impl Port for BrokenPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.check()?;
        let result = self.inner.bind(binding);
        if self.transport.defect == Defect::BindingSpoils && result.is_err() {
            self.tripped = true;
        }
        let Lane(number) = self.forget(result, Lane(0))?;
        Ok(Lane(if self.transport.defect == Defect::LanesFromOne { number + 1 } else { number }))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.check()?;
        self.calls.submits += 1;
        match self.transport.defect {
            Defect::WaitsForPeer if self.transport.closed_ports.load(Ordering::Relaxed) > 0 => {
                std::thread::sleep(NAP)
            }
            Defect::HalfAccepted if self.calls.submits % 5 == 0 => {
                if op.put.is_some() {
                    self.inner.submit(&Op { signal: None, flush: false, ..hidden(*op) })?;
                }
                return Ok(Submit::Full);
            }
            Defect::StaysFull if self.tripped => return Ok(Submit::Full),
            _ => {}
        }
        let result = self.submit_worse(*op);
        let answer = self.forget(result, Submit::Accepted)?;
        match answer {
            Submit::Accepted => self.calls.accepted += 1,
            Submit::Full => self.tripped |= self.transport.defect == Defect::StaysFull,
        }
        Ok(answer)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.check()?;
        match self.transport.defect {
            Defect::Slow => std::thread::sleep(NAP),
            Defect::WritesBehind => {
                let regions = self.transport.regions.lock().unwrap_or_else(PoisonError::into_inner);
                for region in regions.iter() {
                    // There may be nothing behind it.
                    let _ = region.owner().write(region.address() + region.len_bytes(), &[0xee]);
                }
            }
            Defect::NeedsKicks => {
                if let Some(held) = self.held.front() {
                    if self.inner.submit(&held.op)? == Submit::Accepted {
                        self.held.pop_front();
                    }
                }
            }
            _ => {}
        }
        let result = self.inner.kick();
        self.forget(result, ())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.check()?;
        self.calls.polls += 1;
        match (self.transport.defect, self.calls.polls) {
            (Defect::Blocking, 3) => std::thread::sleep(300 * NAP),
            (Defect::Panics, 12) => panic!("the twelfth poll of a broken port"),
            (Defect::NeedsKicks, _) => {}
            _ => {
                let result = self.hand_on_held();
                self.forget(result, ())?;
            }
        }
        let mut below = [Completion { lane: Lane(0), sequence: 0 }; 64];
        let result = self.inner.poll(&mut below);
        let count = self.forget(result, 0)?;
        for &completion in below[..count].iter().filter(|completion| completion.sequence & HIDDEN == 0) {
            self.calls.completions += 1;
            self.complete.push_back(completion);
            if self.transport.defect == Defect::RepeatedCompletion && self.calls.completions == 9 {
                self.complete.push_back(completion);
            }
        }
        let overfull = self.complete.len() > completions.len();
        let count = completions.len().min(self.complete.len());
        for (slot, completion) in completions.iter_mut().zip(self.complete.drain(..count)) {
            *slot = completion;
        }
        Ok(count + usize::from(overfull && self.transport.defect == Defect::OverfullPoll))
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        match self.transport.defect {
            Defect::NeverQuiesced => {
                self.tripped = true;
                return Ok(Close::Pending);
            }
            Defect::WritesOnceQuiesced | Defect::KeepsMemory => {
                self.tripped = true;
                return Ok(Close::Quiesced);
            }
            Defect::OpenOnceClosed => self.tripped = true,
            _ => {}
        }
        self.transport.closed_ports.fetch_add(1, Ordering::Relaxed);
        self.inner.close()
    }
}

impl Drop for BrokenPort {
    fn drop(&mut self) {
        match self.transport.defect {
            Defect::SlowDrop => std::thread::sleep(NAP),
            Defect::WritesOnceQuiesced => {
                let mut completions = [Completion { lane: Lane(0), sequence: 0 }; 64];
                for _ in 0..300 {
                    // It has no op left in the end, or an error: both will do.
                    let _ = self.inner.poll(&mut completions);
                }
            }
            _ => {}
        }
    }
}
