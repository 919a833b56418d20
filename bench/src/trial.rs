//! [`Trial`]: what the threads of one measurement share, so that they start together and always end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::progress;

/// How many times a thread looks in vain before it reads the clock and yields its core.
const LOOKS: u32 = 256;

/// How many steps a busy thread takes before it reads the clock.
const STEPS: u32 = 256;

/// How far a measurement is. Each phase ends at a count of iterations or at a time, whichever comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u64)]
pub enum Phase {
    /// Not counted yet.
    Warm,
    /// Counted.
    Timed,
    /// Nothing new begins.
    Over,
}

/// How long the iterations that are not counted take at most, where the counted ones take at most `limit`.
pub fn warm_limit(limit: Duration) -> Duration {
    limit / 5
}

/// One measurement: its start, its phase, its deadline, and the first failure of any of its threads, which ends the
/// others.
pub struct Trial {
    name: String,
    began: Instant,
    deadline: Duration,
    ready: AtomicU64,
    threads: u64,
    phase: AtomicU64,
    ended: AtomicBool,
    /// Iterations so far, for whoever looks on.
    done: Arc<AtomicU64>,
    failure: Mutex<Option<Failure>>,
}

impl Trial {
    /// A measurement by `threads` threads, each of which calls [`start`](Self::start).
    pub fn new(name: impl Into<String>, threads: u64, deadline: Duration) -> Self {
        let name = name.into();
        Trial {
            done: progress::begin(&name),
            name,
            began: Instant::now(),
            deadline,
            ready: AtomicU64::new(0),
            threads,
            phase: AtomicU64::new(Phase::Warm as u64),
            ended: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// What is measured, to name it in a failure.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until every thread is here.
    pub fn start(&self) -> Result<(), Failure> {
        self.ready.fetch_add(1, Ordering::AcqRel);
        let mut wait = self.wait("its threads to start", self.threads);
        loop {
            let ready = self.ready.load(Ordering::Acquire);
            if ready >= self.threads {
                return Ok(());
            }
            // Threads may share a core, and the missing one needs it.
            std::thread::yield_now();
            wait.look(ready)?;
        }
    }

    /// The phase, as set by the one thread that paces the trial.
    #[inline]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Warm,
            1 => Phase::Timed,
            _ => Phase::Over,
        }
    }

    /// Begins the next phase.
    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u64, Ordering::Relaxed);
    }

    /// A wait for `what` to reach `expected`, that ends with the trial.
    pub fn wait(&self, what: &'static str, expected: u64) -> Wait<'_> {
        Wait { trial: self, what, expected, looks: 0, steps: 0 }
    }

    /// Runs a thread's part of the trial. The first failure is kept and ends the other threads.
    pub fn part<T>(&self, body: impl FnOnce() -> Result<T, Failure>) -> Option<T> {
        match body() {
            Ok(value) => Some(value),
            Err(failure) => {
                let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(failure);
                self.ended.store(true, Ordering::Release);
                None
            }
        }
    }

    /// The failure that ended the trial, for a thread that brought no result.
    pub fn why(&self) -> Failure {
        let mut first = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        first.take().unwrap_or_else(|| Failure::Panicked { measurement: self.name.clone() })
    }
}

/// A wait that knows what it waits for.
pub struct Wait<'a> {
    trial: &'a Trial,
    what: &'static str,
    expected: u64,
    looks: u32,
    steps: u32,
}

impl Wait<'_> {
    /// Called on each look in vain, with what was seen: fails if the trial is over. True now and then, when it is
    /// worth to look at the clock.
    #[inline]
    pub fn look(&mut self, seen: u64) -> Result<bool, Failure> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks % LOOKS != 0 {
            return Ok(false);
        }
        self.over(seen)?;
        // Whoever is waited for may need this core.
        std::thread::yield_now();
        Ok(true)
    }

    /// The same on each step that brought something: the trial may be over before there is all.
    #[inline]
    pub fn step(&mut self, seen: u64) -> Result<bool, Failure> {
        self.steps = self.steps.wrapping_add(1);
        if self.steps % STEPS != 0 {
            return Ok(false);
        }
        self.trial.done.store(seen, Ordering::Relaxed);
        self.over(seen)?;
        Ok(true)
    }

    #[cold]
    fn over(&self, seen: u64) -> Result<(), Failure> {
        let Trial { name, began, deadline, ended, .. } = self.trial;
        if ended.load(Ordering::Acquire) {
            return Err(Failure::Ended { measurement: name.clone() });
        }
        if began.elapsed() >= *deadline {
            return Err(Failure::Deadline {
                measurement: name.clone(),
                what: self.what,
                expected: self.expected,
                seen,
                after: *deadline,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_at_the_deadline_and_says_for_what() {
        let trial = Trial::new("a test", 2, Duration::from_millis(20));
        // One of two threads: the other never comes.
        let failure = trial.start().unwrap_err().to_string();
        assert_eq!(failure, "a test: waited 20ms for its threads to start: expected 2, saw 1");
    }

    #[test]
    fn a_busy_thread_ends_at_the_deadline_too() {
        let trial = Trial::new("a test", 1, Duration::from_millis(20));
        let mut wait = trial.wait("more than there is time for", u64::MAX);
        let failure = (0..u64::MAX).find_map(|n| wait.step(n).err()).unwrap().to_string();
        assert!(failure.contains("waited 20ms for more than there is time for"), "{failure}");
    }

    #[test]
    fn the_first_failure_ends_the_others_and_is_the_one_reported() {
        let trial = Trial::new("a test", 1, Duration::from_secs(60));
        let first = Failure::Deadline {
            measurement: "a test".into(),
            what: "x",
            expected: 1,
            seen: 0,
            after: Duration::ZERO,
        };
        assert!(trial.part(|| Err::<(), _>(first)).is_none());
        let other = trial.part(|| {
            let mut wait = trial.wait("y", 1);
            loop {
                wait.look(0)?;
            }
            #[allow(unreachable_code)]
            Ok(())
        });
        assert!(other.is_none());
        assert!(trial.why().to_string().contains("for x"));
    }
}
