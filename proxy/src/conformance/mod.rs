//! The suite that holds a transport to the [port contract](crate::transport#the-port-contract), for the tests of
//! transports. Feature `conformance`.
//!
//! Say how a connection's two ends are made, and run it:
//!
//! ```
//! use portway_fifo::Heap;
//! use portway_proxy::conformance::{self, End, Failing, Fixture, Pair};
//! use portway_proxy::loopback::{Config, Faults, Loopback};
//! use portway_proxy::TransportError;
//!
//! struct OverLoopback(Loopback);
//!
//! impl Fixture for OverLoopback {
//!     fn pair(&self) -> Result<Pair, TransportError> {
//!         let end = || End::new(self.0.clone(), |len_bytes| Heap.allocate(len_bytes));
//!         Ok(Pair { a: end(), b: end() })
//!     }
//!
//!     fn failing_pair(&self) -> Result<Failing, TransportError> {
//!         let fails = self.0.with_faults(Faults { fail_at: Some(20), ..Faults::default() });
//!         let a = End::new(fails, |len_bytes| Heap.allocate(len_bytes));
//!         Ok(Failing::Pair(Pair { a, ..self.pair()? }))
//!     }
//! }
//!
//! let report = conformance::run(&OverLoopback(Loopback::new(Config::default())?));
//! report.assert();
//! # Ok::<(), TransportError>(())
//! ```
//!
//! [`run`] makes a pair for each of the [`CHECKS`], in order. Each is also a function of its own in [`checks`], for a
//! `#[test]` a check. What a fixture cannot do is waived by name and never counts as passed.
//!
//! # How it works
//!
//! ```text
//!  a check ──▶ side A ──▶ thread ──▶ transport, port
//!         └──▶ side B ──▶ thread ──▶ transport, port
//!                    └──▶ thread ──▶ stream ──▶ serve ──▶ transport, port      (another process)
//! ```
//!
//! A check gives commands to two sides, each at work on a thread of its own. So a port that never returns from a call
//! is found: the check waits for its side until the [`Limits`] and no longer, says in which call the port is, and
//! leaves the thread to itself. A call that returns late fails the check too; time in which the thread waited for a
//! processor does not count (where the system tells it).
//!
//! Ports are used as the engine uses them, on another thread than the one that connected them. Memory is read and
//! written through [`Region::read`](portway_fifo::Region::read) and [`write`](portway_fifo::Region::write) alone, so it
//! may lie on a device. Each lies unaligned in a larger allocation, whose other bytes are watched.
//!
//! # Two processes
//!
//! One process runs the suite, with [`End::remote`] in the place of an end; the other calls [`serve`] with an [`End::new`]
//! of its own. Between them they need a byte stream each way: the pipes of a child process, or a socket.
//!
//! ```no_run
//! use std::process::{Command, Stdio};
//! use std::time::Duration;
//! # use portway_fifo::Heap;
//! # use portway_proxy::conformance::{End, serve};
//! # use portway_proxy::loopback::{Config, Loopback};
//! # let mine = Loopback::new(Config::default())?;
//!
//! // In the process that runs the suite. A remote end can be cloned and given to pair after pair.
//! let pipe = || Stdio::piped();
//! let mut child = Command::new("the-other-end").stdin(pipe()).stdout(pipe()).spawn()?;
//! let b = End::remote(child.stdout.take().unwrap(), child.stdin.take().unwrap());
//!
//! // In the other one.
//! let end = End::new(mine, |len_bytes| Heap.allocate(len_bytes));
//! serve(&end, std::io::stdin(), std::io::stdout(), Duration::from_secs(60))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What goes over the stream is small: bytes to move are made on the side where they lie. An end forgets what the
//! earlier check made.
//!
//! # What it cannot show
//!
//! - A race that did not happen. The checks look after every call of the port, which finds what is wrong in a port that
//!   works inside its calls each time; and while another thread drives it, which finds what hardware does wrong only
//!   when it does.
//! - That a port which fails leaves the other ports of its transport alone: each check has one connection.
//! - That a put of gigabytes arrives, or one at an offset beyond the first few megabytes.
//!
//! [`broken`] has a port for each mistake that the checks are made to find.

mod agent;
pub mod broken;
pub mod checks;
mod command;
mod pattern;
mod report;
mod rig;
mod side;
mod wire;

use core::time::Duration;
use std::time::Instant;

pub use checks::CHECKS;
pub use report::{Entry, Failure, Outcome, Report};
pub use side::{End, serve};

use crate::TransportError;

/// The two ends of a connection that is to be made. They may be of the same transport.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The end that most checks put from.
    pub a: End,
    /// The end that they put to.
    pub b: End,
}

/// A pair with a failure to come, or why there is none.
#[derive(Clone, Debug)]
pub enum Failing {
    /// The port that end A makes fails of itself, within its first 1,000 ops of 64 bytes.
    Pair(Pair),
    /// The fixture has no way to make a port fail: the reason, for the report.
    Waived(String),
}

/// How long a check waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For anything that has to happen: a connection, a completion, a signal, an answer of a side. 10 seconds unless
    /// told otherwise.
    pub wait: Duration,
    /// The longest that one call into a port may take. 1 second unless told otherwise: far more than a call that does
    /// not block can need, and less than one that does.
    pub call: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { wait: Duration::from_secs(10), call: Duration::from_secs(1) }
    }
}

/// How the suite gets what it tests.
pub trait Fixture {
    /// Two ends that nobody else uses until the next call. Called once a check.
    fn pair(&self) -> Result<Pair, TransportError>;

    /// The same, with a port that will fail.
    fn failing_pair(&self) -> Result<Failing, TransportError>;

    /// How long the checks wait.
    fn limits(&self) -> Limits {
        Limits::default()
    }
}

/// A sentence of the port contract, and the check of it.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The name of the function in [`checks`].
    pub name: &'static str,
    /// The number of the sentence.
    pub sentence: u32,
    /// What is to be true, in short.
    pub claim: &'static str,
    /// Runs it.
    pub run: fn(&dyn Fixture) -> Outcome,
}

/// Runs every check.
pub fn run(fixture: &dyn Fixture) -> Report {
    let entry = |check: &Check| {
        let start = Instant::now();
        let outcome = (check.run)(fixture);
        Entry { check: *check, outcome, took: start.elapsed() }
    };
    Report { entries: CHECKS.iter().map(entry).collect() }
}
