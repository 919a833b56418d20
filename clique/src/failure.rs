//! [`Failure`]: what a clique failed of first.

use core::fmt;

use crate::backend::{BackendError, Status};
use crate::custody::Quarantine;
use crate::message::Note;
use crate::state::Phase;
use crate::text::printable;

/// What failed first, where and why.
///
/// First is not a matter of clocks, which differ between hosts. Of several failures of one exchange it is the one that the
/// [rendezvous](crate::rendezvous::Rendezvous::gather) got first, for all participants alike. While a clique is used each
/// participant names what it learned of first, its own or another's.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The clique's name.
    pub clique: String,
    /// Which attempt to bring it up.
    pub attempt: u64,
    /// The phase in which it failed.
    pub phase: Phase,
    /// The rank that failed first, if it was one rank.
    pub rank: Option<u32>,
    /// The participant that failed first, `host:pid`.
    pub process: String,
    /// The library's status, if it was the library.
    pub status: Option<Status>,
    /// What happened.
    pub cause: String,
    /// The ranks that had said nothing when the time was over, or whose process had gone before; at most 64 are named.
    pub missing: Vec<u32>,
    /// What the participants have in the variables that name what a host has, such as its interfaces, once they have said
    /// so: each value with who has it. They are not compared.
    pub hardware: Vec<String>,
    /// What did not come back of this participant's attempts to end its communicators. A clique and its children count
    /// together.
    pub quarantine: Quarantine,
}

/// How many values of variables an error shows.
const MAX_SHOWN: usize = 8;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { clique, attempt, phase, process, cause, missing, hardware, .. } = self;
        write!(f, "clique {clique:?}, attempt {attempt}: failed in {phase}, first ")?;
        match self.rank {
            Some(rank) => write!(f, "rank {rank} ({process})")?,
            None => write!(f, "{process}")?,
        }
        write!(f, ": {cause}")?;
        if !missing.is_empty() {
            write!(f, "; missing ranks: {missing:?}")?;
        }
        // Whoever has no way to the others often has it by one of these.
        if phase.has_communicators() && *phase != Phase::Ready && !hardware.is_empty() {
            let more = if hardware.len() > MAX_SHOWN { ", and more" } else { "" };
            write!(f, "; with {}{more}", hardware[..hardware.len().min(MAX_SHOWN)].join(", "))?;
        }
        match self.quarantine.count() {
            0 => Ok(()),
            count => write!(f, "; {count} in quarantine"),
        }
    }
}

impl core::error::Error for Failure {}

/// What went wrong in a call, before it is known in which phase.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) rank: Option<u32>,
    pub(crate) status: Option<Status>,
    pub(crate) cause: String,
    pub(crate) missing: Vec<u32>,
    /// The communicators were taken away: somebody else knows why.
    pub(crate) is_taken: bool,
}

impl Fault {
    pub(crate) fn new(rank: Option<u32>, cause: impl Into<String>) -> Self {
        Fault { rank, status: None, cause: cause.into(), missing: Vec::new(), is_taken: false }
    }

    pub(crate) fn status(rank: u32, call: &str, status: Status, message: &str) -> Self {
        let cause = format!("{call}: {status}: {message}");
        Fault { status: Some(status), ..Fault::new(Some(rank), cause) }
    }

    pub(crate) fn taken() -> Self {
        Fault { is_taken: true, ..Fault::new(None, "the communicators were aborted") }
    }

    pub(crate) fn of(rank: Option<u32>, error: &BackendError) -> Self {
        let status = match error {
            BackendError::Status { status, .. } => Some(*status),
            _ => None,
        };
        Fault { status, ..Fault::new(rank, error.to_string()) }
    }

    pub(crate) fn note(self, phase: Phase, process: &str) -> Note {
        let Fault { rank, status, cause, missing, .. } = self;
        Note { phase, rank, process: process.to_owned(), status, cause: printable(&cause), missing }
    }
}
