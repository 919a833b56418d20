//! [`Report`]: what the checks found.

use core::fmt;
use core::time::Duration;

use super::Check;

/// How a port broke the contract.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whose doing it is: side A, side B, or the fixture.
    pub who: String,
    /// What the contract asks for.
    pub expected: String,
    /// What came instead.
    pub seen: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}; seen {}", self.who, self.expected, self.seen)
    }
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The sentence holds, as far as the check can tell.
    Passed,
    /// It does not.
    Failed(Failure),
    /// It was not tested, for this reason.
    Waived(String),
}

impl Outcome {
    /// Panics if the check failed; says so if it was waived. For a test of one check.
    ///
    /// # Panics
    /// With the failure.
    #[track_caller]
    pub fn assert(&self) {
        match self {
            Outcome::Passed => {}
            Outcome::Waived(reason) => println!("waived: {reason}"),
            Outcome::Failed(failure) => panic!("{failure}"),
        }
    }
}

/// A check and what it found.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The check.
    pub check: Check,
    /// What it found.
    pub outcome: Outcome,
    /// How long it took.
    pub took: Duration,
}

/// What all checks found. Its `Display` is a table, one line a check.
#[derive(Clone, Debug)]
pub struct Report {
    /// One a check, in the order of the contract's sentences.
    pub entries: Vec<Entry>,
}

impl Report {
    /// The checks that failed.
    pub fn failed(&self) -> impl Iterator<Item = (&Check, &Failure)> {
        self.entries.iter().filter_map(|entry| match &entry.outcome {
            Outcome::Failed(failure) => Some((&entry.check, failure)),
            _ => None,
        })
    }

    /// The checks that were waived, with the reason.
    pub fn waived(&self) -> impl Iterator<Item = (&Check, &str)> {
        self.entries.iter().filter_map(|entry| match &entry.outcome {
            Outcome::Waived(reason) => Some((&entry.check, reason.as_str())),
            _ => None,
        })
    }

    /// Panics with the whole report if a check failed; prints what was waived.
    ///
    /// # Panics
    /// If a check failed.
    #[track_caller]
    pub fn assert(&self) {
        for (check, reason) in self.waived() {
            println!("waived: {}: {reason}", check.name);
        }
        assert!(self.failed().next().is_none(), "the port contract is broken:\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Entry { check, outcome, took } in &self.entries {
            let Check { name, sentence, claim, .. } = check;
            let millis = took.as_millis();
            match outcome {
                Outcome::Passed => writeln!(f, "passed {sentence:3} {name} ({millis} ms)")?,
                Outcome::Waived(reason) => writeln!(f, "waived {sentence:3} {name}: {reason}")?,
                Outcome::Failed(failure) => {
                    writeln!(f, "FAILED {sentence:3} {name} ({millis} ms): {failure}")?;
                    writeln!(f, "           the contract says: {claim}")?;
                }
            }
        }
        Ok(())
    }
}
