//! [`Failure`]: why a measurement has no result.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::baseline::Unreadable;

/// Why a measurement, or the whole run, has no result.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The deadline of `-T` was over.
    #[error("{measurement}: waited {after:?} for {what}: expected {expected}, saw {seen}")]
    Deadline { measurement: String, what: &'static str, expected: u64, seen: u64, after: Duration },
    /// The FIFO refused.
    #[error("{measurement}: {source}")]
    Fifo { measurement: String, source: portway_fifo::Error },
    /// The GPU or its driver refused.
    #[error("{measurement}: {source}")]
    Gpu { measurement: String, source: Box<portway_fifo::Error> },
    /// `--devices` has a number that no GPU has.
    #[error("--devices names GPU {number}: this machine has {count}, numbered from 0")]
    NoSuchGpu { number: u32, count: u32 },
    /// A call on the device ended a kernel.
    #[error("{measurement}: a call on the device returned status {status} ({})", status_name(*status))]
    OnDevice { measurement: String, status: u64 },
    /// The proxy refused.
    #[error("{measurement}: {source}")]
    Proxy { measurement: String, source: Box<portway_proxy::Error> },
    /// The clique, or what carries its messages, failed.
    #[error("{measurement}: {source}")]
    Clique { measurement: String, source: Box<portway_clique::CliqueError> },
    /// The engine has not done what it was asked for.
    #[error("{measurement}: {triggers} triggers were to be taken and completed: {report}")]
    Undone { measurement: String, triggers: u64, report: String },
    /// Another thread of the measurement failed and says why.
    #[error("{measurement}: ended because another thread of it failed")]
    Ended { measurement: String },
    /// A thread of the measurement panicked.
    #[error("{measurement}: a thread panicked")]
    Panicked { measurement: String },
    /// A file of the result cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// A file is not a result.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: Unreadable },
    /// Standard output cannot be written.
    #[error("cannot write the result: {0}")]
    Output(io::Error),
}

impl Failure {
    pub fn proxy(measurement: &str, source: portway_proxy::Error) -> Self {
        Failure::Proxy { measurement: measurement.into(), source: Box::new(source) }
    }

    pub fn clique(measurement: &str, source: portway_clique::CliqueError) -> Self {
        Failure::Clique { measurement: measurement.into(), source: Box::new(source) }
    }

    pub fn gpu(measurement: &str, source: portway_fifo::Error) -> Self {
        Failure::Gpu { measurement: measurement.into(), source: Box::new(source) }
    }

    /// Fails for the first status of a call on the device that is not 0.
    pub fn on_device(measurement: &str, statuses: impl IntoIterator<Item = u64>) -> Result<(), Self> {
        match statuses.into_iter().find(|&status| status != 0) {
            Some(status) => Err(Failure::OnDevice { measurement: measurement.into(), status }),
            None => Ok(()),
        }
    }

    /// What happened, with the causes behind it that its text does not have already.
    pub fn in_full(&self) -> String {
        let causes = std::iter::successors(std::error::Error::source(self), |cause| cause.source());
        causes.map(ToString::to_string).fold(self.to_string(), |text, cause| match text.contains(&cause) {
            true => text,
            false => format!("{text}: {cause}"),
        })
    }

    pub fn write(path: &Path, source: io::Error) -> Self {
        Failure::Write { path: path.to_owned(), source }
    }

    pub fn read(path: &Path, source: Unreadable) -> Self {
        Failure::Read { path: path.to_owned(), source }
    }
}

/// `Status` of the device header.
fn status_name(status: u64) -> &'static str {
    match status {
        1 => "timeout",
        2 => "aborted",
        3 => "broken by a timeout",
        4 => "broken by an abort",
        5 => "invalid",
        6 => "failed",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use portway_proxy::TransportError;

    use super::*;

    #[test]
    fn causes_are_told_once() {
        let source = Some(Arc::new(io::Error::other("no such device")) as _);
        let error = TransportError::Device { operation: "opening", status: 7, vendor: 0, source };
        let text = Failure::proxy("a test", error.into()).in_full();
        assert_eq!(text, "a test: opening failed with status 7: no such device");
    }
}
