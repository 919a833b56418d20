//! [`Config`]: where signal words lie, how memory is handed to peers, and how long things may take.

use core::time::Duration;

use crate::error::Error;

/// Where a signal word lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WordPlace {
    /// In page-locked host memory that both processes map: a bare signal is a plain store, without a call of the driver.
    #[default]
    Pinned,
    /// In the memory of the GPU whose kernels wait for it.
    Device,
}

/// A way in which memory gets from one process to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// Both ends belong to one process and to transports that [know each other](crate::Ipc::beside).
    SameProcess,
    /// Descriptors, one for each physical piece, passed over a Unix socket.
    Descriptor,
    /// Fabric handles, one for each physical piece.
    Fabric,
    /// The legacy handle of a whole allocation.
    Legacy,
}

/// How to open a transport. `Config { stall_limit: Duration::from_secs(1), ..Config::default() }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where [`signal_word`](portway_proxy::Transport::signal_word) allocates. Page-locked memory unless told otherwise.
    pub word_place: WordPlace,
    /// The ways that are tried to reach a peer's memory, in this order. All of them unless told otherwise.
    pub ways: Vec<Way>,
    /// Ops that a port holds, 2 to 65,536. 256 unless told otherwise.
    pub depth: usize,
    /// When a port fails because nothing of what it submitted completes. 5 seconds unless told otherwise: below the
    /// engine's own deadline, so that the error can say why.
    pub stall_limit: Duration,
    /// How long a closed port waits for what it had submitted, before its stream and its memory are given up for good.
    /// 60 seconds unless told otherwise.
    pub quiesce_limit: Duration,
    /// How long an executor looks for work without sleeping, after the last that it had. 10 milliseconds unless told
    /// otherwise. After that an op may wait for another 50 to 100 microseconds.
    pub spin: Duration,
    /// How long a question to another process may take. 5 seconds unless told otherwise.
    pub ask_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            word_place: WordPlace::default(),
            ways: vec![Way::SameProcess, Way::Descriptor, Way::Fabric, Way::Legacy],
            depth: 256,
            stall_limit: Duration::from_secs(5),
            quiesce_limit: Duration::from_secs(60),
            spin: Duration::from_millis(10),
            ask_timeout: Duration::from_secs(5),
        }
    }
}

impl Config {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let within = |what, value: u64, low: u64, high: u64, must_be| {
            if (low..=high).contains(&value) { Ok(()) } else { Err(Error::Config { what, value, must_be }) }
        };
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        const HOUR_MS: u64 = 3_600_000;
        let must_be = "1 to 3,600,000";
        within("depth", self.depth as u64, 2, 65_536, "2 to 65,536")?;
        within("ways", self.ways.len() as u64, 1, 16, "1 or more")?;
        within("stall_limit in milliseconds", millis(self.stall_limit), 1, HOUR_MS, must_be)?;
        within("quiesce_limit in milliseconds", millis(self.quiesce_limit), 1, HOUR_MS, must_be)?;
        within("ask_timeout in milliseconds", millis(self.ask_timeout), 1, HOUR_MS, must_be)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_named() {
        let refused = |change: fn(&mut Config)| {
            let mut config = Config::default();
            change(&mut config);
            match config.check() {
                Ok(()) => None,
                Err(Error::Config { what, .. }) => Some(what),
                Err(other) => panic!("{other}"),
            }
        };
        assert_eq!(refused(|_| ()), None);
        assert_eq!(refused(|c| c.depth = 1), Some("depth"));
        assert_eq!(refused(|c| c.ways.clear()), Some("ways"));
        assert_eq!(refused(|c| c.stall_limit = Duration::ZERO), Some("stall_limit in milliseconds"));
        assert_eq!(refused(|c| c.ask_timeout = Duration::MAX), Some("ask_timeout in milliseconds"));
        assert_eq!(refused(|c| c.spin = Duration::MAX), None);
    }
}
