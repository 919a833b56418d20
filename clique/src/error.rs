//! What can go wrong, split by who is at fault.

use core::time::Duration;

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
}
