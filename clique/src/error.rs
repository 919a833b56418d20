//! What can go wrong, split by who is at fault.

use core::any::Any;
use core::time::Duration;
use std::sync::Arc;

use crate::backend::BackendError;
use crate::failure::Failure;
use crate::uses::Use;
use crate::verify::Disagreement;

/// Why there is no communicator, or none any more.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CliqueError {
    /// The caller asked for something that cannot be.
    #[error("{what}: expected {expected}, seen {seen}")]
    Config {
        /// What is wrong.
        what: String,
        /// What it had to be.
        expected: String,
        /// What it is.
        seen: String,
    },
    /// A peer sent something that does not belong there: a wrong token, version, size.
    #[error("{peer} sent a wrong {what}: expected {expected}, seen {seen}")]
    Foreign {
        /// Who, as far as it is known.
        peer: String,
        /// What of it.
        what: &'static str,
        /// What it had to be.
        expected: String,
        /// What it is.
        seen: String,
    },
    /// A limit was over.
    #[error("{what}: waited {waited:?} for {expected}, seen {seen}")]
    Timeout {
        /// What was under way.
        what: String,
        /// What it waited for.
        expected: String,
        /// What had come until then.
        seen: String,
        /// How long.
        waited: Duration,
    },
    /// The operating system refused.
    #[error("{what}: {message}")]
    System {
        /// What was tried.
        what: String,
        /// Its number, when there is one.
        errno: Option<i32>,
        /// Its words.
        message: String,
    },
    /// The communicator library, or the device.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The participants differ in something that the library would turn into a hang. All of them get this verdict.
    #[error("the participants do not agree: {0}")]
    Disagreement(Disagreement),
    /// The clique has failed, here or elsewhere. All its members get the first failure.
    #[error(transparent)]
    Failed(Arc<Failure>),
    /// The clique was closed, or aborted by this process.
    #[error("the clique {clique:?} is {how}")]
    Ended {
        /// Its name.
        clique: String,
        /// Closed or aborted.
        how: &'static str,
    },
    /// An operation that was not declared and cannot be met for the first time now.
    #[error("{operation}: not declared for the first use of the clique")]
    Undeclared {
        /// Which one.
        operation: Use,
    },
    /// More came to a barrier than it has seats for.
    #[error("seat {seat} came to the barrier for {purpose} of {seats} seats, to which {come:?} have come")]
    Crowded {
        /// Who.
        seat: u32,
        /// How many seats there are.
        seats: u32,
        /// What the others came for.
        purpose: String,
        /// Who had come.
        come: Vec<u32>,
    },
    /// Somebody that others count on was dropped.
    #[error("local seat {seat} was dropped, and will not come to the barrier")]
    Left {
        /// Who.
        seat: u32,
    },
    /// Code that was called panicked.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// Whose.
        what: String,
        /// What it said.
        message: String,
    },
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("something that is no text").to_owned()
}
