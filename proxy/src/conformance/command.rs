//! What a check can ask of an end, and what the end answers.

use core::time::Duration;

use super::pattern::{Complaint, Piece};
use super::wire::{wire_enum, wire_struct};
use crate::TransportError;
use crate::transport::{Completion, Lane, Op};

/// A memory to bind.
#[derive(Clone, Copy, Debug)]
pub(super) enum Name {
    /// The n-th that this end registered.
    Local { number: u32 },
    /// The n-th that this end imported.
    Remote { number: u32 },
    /// One that no transport made.
    Nobodys {},
}

/// How [`Command::Drive`] calls the port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Submits between two kicks, at most.
    pub(super) submits_a_kick: u64,
    /// Room for completions in each poll.
    pub(super) room: u64,
    /// Polls that go on after everything is complete.
    pub(super) polls_after: u64,
    /// How long nothing may happen.
    pub(super) within: Duration,
}

/// A signal word that [`Command::Look`] watches.
#[derive(Clone, Debug)]
pub(super) struct Track {
    /// The word.
    pub(super) word: u32,
    /// Where the puts behind it land.
    pub(super) destination: u32,
    /// The values that it takes, in order.
    pub(super) steps: Vec<Milestone>,
}

/// A value of a signal word.
#[derive(Clone, Debug)]
pub(super) struct Milestone {
    pub(super) value: u64,
    /// What has to be there for whoever sees it, beyond what the earlier ones brought.
    pub(super) pieces: Vec<Piece>,
}

/// One thing to do.
#[derive(Clone, Debug)]
pub(super) enum Command {
    /// Forget everything that earlier commands made.
    Reset {},
    Allocate {
        len_bytes: u64,
    },
    SignalWord {},
    Release {
        memory: u32,
    },
    Import {
        bytes: Vec<u8>,
    },
    Forget {
        name: Name,
    },
    Endpoint {},
    /// Connects the latest endpoint.
    Connect {
        bytes: Vec<u8>,
        within: Duration,
    },
    Bind {
        source: Name,
        destination: Name,
        signal: Name,
    },
    Submit {
        op: Op,
    },
    Kick {},
    Poll {
        room: u64,
    },
    Close {},
    DropPort {},
    /// Submits the ops and polls until all are complete, as the engine would.
    Drive {
        ops: Vec<Op>,
        plan: Plan,
    },
    /// Writes a pattern into the whole memory.
    Fill {
        memory: u32,
        seed: u64,
    },
    /// Writes a piece.
    Write {
        memory: u32,
        piece: Piece,
    },
    /// Compares the whole memory.
    Verify {
        memory: u32,
        base: u64,
        pieces: Vec<Piece>,
    },
    /// Reads the first 8 bytes.
    Word {
        memory: u32,
    },
    /// What the coming looks watch.
    Watch {
        tracks: Vec<Track>,
    },
    /// Looks at every watched word once, or until all have their last value; drives the port meanwhile.
    Look {
        within: Duration,
    },
}

/// Which error it was, as far as a check has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultKind {
    Busy {},
    Malformed {},
    Panicked {},
    Unknown {},
    /// Any other of the transport's.
    Other {},
    /// The port broke the contract inside a call.
    Violation {},
    /// Of the suite itself or of the stream between its ends.
    Suite {},
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) kind: FaultKind,
    pub(super) call: String,
    pub(super) text: String,
}

impl Fault {
    pub(super) fn new(kind: FaultKind, call: &str, text: impl Into<String>) -> Self {
        Fault { kind, call: call.into(), text: text.into() }
    }

    pub(super) fn of(call: &str, error: &TransportError) -> Self {
        let kind = match error {
            TransportError::Busy { .. } => FaultKind::Busy {},
            TransportError::Malformed { .. } => FaultKind::Malformed {},
            TransportError::Unknown { .. } => FaultKind::Unknown {},
            _ => FaultKind::Other {},
        };
        Fault::new(kind, call, error.to_string())
    }
}

/// How a [`Command::Drive`] went.
#[derive(Clone, Debug, Default)]
pub(super) struct Driven {
    /// How many of the ops were accepted.
    pub(super) accepted: u64,
    pub(super) completions: Vec<Completion>,
    /// What ended it early.
    pub(super) fault: Option<Fault>,
}

/// An answer to a [`Command`].
#[derive(Clone, Debug)]
pub(super) enum Reply {
    Done {},
    Failed { fault: Fault },
    Memory { number: u32, len_bytes: u64, export: Vec<u8> },
    Remote { number: u32, len_bytes: u64 },
    Endpoint { bytes: Vec<u8> },
    Bound { lane: Lane },
    Submitted { accepted: bool },
    Polled { completions: Vec<Completion> },
    Closed { quiesced: bool },
    Driven { driven: Driven },
    Compared { complaint: Option<Complaint> },
    Word { value: u64 },
    Looked { finished: bool, complaint: Option<Complaint> },
}

/// The longest of the calls into the port since the last command.
#[derive(Clone, Debug, Default)]
pub(super) struct Longest {
    pub(super) call: String,
    /// Without the time in which the thread was ready to run and had no processor.
    pub(super) took: Duration,
}

/// A [`Reply`] and how long the port took for it.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) reply: Reply,
    pub(super) longest: Longest,
}

wire_struct!(Complaint { expected, seen });
wire_struct!(Piece { offset_bytes, len_bytes, seed, pattern_offset_bytes });
wire_struct!(Plan { submits_a_kick, room, polls_after, within });
wire_struct!(Track { word, destination, steps });
wire_struct!(Milestone { value, pieces });
wire_struct!(Fault { kind, call, text });
wire_struct!(Driven { accepted, completions, fault });
wire_struct!(Longest { call, took });
wire_struct!(Answer { reply, longest });
wire_enum!(Name {
    0 => Local { number },
    1 => Remote { number },
    2 => Nobodys {},
});
wire_enum!(FaultKind {
    0 => Busy {},
    1 => Malformed {},
    2 => Panicked {},
    3 => Unknown {},
    4 => Other {},
    5 => Violation {},
    6 => Suite {},
});
wire_enum!(Command {
    0 => Reset {},
    1 => Allocate { len_bytes },
    2 => SignalWord {},
    3 => Release { memory },
    4 => Import { bytes },
    5 => Endpoint {},
    6 => Connect { bytes, within },
    7 => Bind { source, destination, signal },
    8 => Submit { op },
    9 => Kick {},
    10 => Poll { room },
    11 => Close {},
    12 => DropPort {},
    13 => Drive { ops, plan },
    14 => Fill { memory, seed },
    15 => Write { memory, piece },
    16 => Verify { memory, base, pieces },
    17 => Word { memory },
    18 => Watch { tracks },
    19 => Look { within },
    20 => Forget { name },
});
wire_enum!(Reply {
    0 => Done {},
    1 => Failed { fault },
    2 => Memory { number, len_bytes, export },
    3 => Remote { number, len_bytes },
    4 => Endpoint { bytes },
    5 => Bound { lane },
    6 => Submitted { accepted },
    7 => Polled { completions },
    8 => Closed { quiesced },
    9 => Driven { driven },
    10 => Compared { complaint },
    11 => Word { value },
    12 => Looked { finished, complaint },
});
