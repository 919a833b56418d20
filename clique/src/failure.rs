//! [`Failure`]: what a clique failed of first.

use core::fmt;

use crate::backend::{BackendError, Status};
use crate::custody::Quarantine;
use crate::message::Note;
use crate::state::Phase;

/// What failed first, where and why.
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
    /// The ranks that had said nothing when the time was over; at most 64 are named.
    pub missing: Vec<u32>,
    /// What did not come back of this participant's attempts to end its communicators.
    pub quarantine: Quarantine,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { clique, attempt, phase, process, cause, missing, .. } = self;
        write!(f, "clique {clique:?}, attempt {attempt}: failed in {phase}, first ")?;
        match self.rank {
            Some(rank) => write!(f, "rank {rank} ({process})")?,
            None => write!(f, "{process}")?,
        }
        write!(f, ": {cause}")?;
        if !missing.is_empty() {
            write!(f, "; missing ranks: {missing:?}")?;
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
        Note { phase, rank, process: process.to_owned(), status, cause, missing, at_ns: now_ns() }
    }
}

/// The time by this host's clock.
pub(crate) fn now_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
