//! [`Failure`]: why a measurement has no result.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a measurement, or the whole run, has no result.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The deadline of `-T` was over.
    #[error("{measurement}: waited {after:?} for {what}: expected {expected}, saw {seen}")]
    Deadline { measurement: String, what: &'static str, expected: u64, seen: u64, after: Duration },
    /// The FIFO refused.
    #[error("{measurement}: {source}")]
    Fifo { measurement: String, source: portway_fifo::Error },
    /// Another thread of the measurement failed and says why.
    #[error("{measurement}: ended because another thread of it failed")]
    Ended { measurement: String },
    /// A thread of the measurement panicked.
    #[error("{measurement}: a thread panicked")]
    Panicked { measurement: String },
    /// The file of `-J` cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Json { path: PathBuf, source: io::Error },
    /// Standard output cannot be written.
    #[error("cannot write the result: {0}")]
    Output(io::Error),
}

impl Failure {
    pub fn json(path: &Path, source: io::Error) -> Self {
        Failure::Json { path: path.to_owned(), source }
    }
}
