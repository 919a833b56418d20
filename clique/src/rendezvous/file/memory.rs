//! [`Memory`]: which rounds this process has posted and gathered, so that using one twice is an error and not a wait.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::CliqueError;
use crate::rendezvous::board::Key;

const MAX_REMEMBERED: usize = 1024;
/// How long a round that somebody waits in may look unused.
const TOUCH_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Used {
    key: Key,
    /// A post has begun.
    posting: bool,
    /// It is where the others see it.
    posted: bool,
    gathered: bool,
    touched: Option<Instant>,
}

/// The last 1,024 rounds.
#[derive(Debug, Default)]
pub(super) struct Memory(VecDeque<Used>);

impl Memory {
    fn of(&mut self, key: &Key) -> &mut Used {
        let at = self.0.iter().rposition(|used| used.key == *key).unwrap_or_else(|| {
            if self.0.len() == MAX_REMEMBERED {
                self.0.pop_front();
            }
            let key = key.clone();
            self.0.push_back(Used { key, posting: false, posted: false, gathered: false, touched: None });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    pub(super) fn post(&mut self, participant: u32, key: &Key) -> Result<(), CliqueError> {
        if core::mem::replace(&mut self.of(key).posting, true) {
            return Err(twice(participant, key, "one post", "a second one"));
        }
        Ok(())
    }

    pub(super) fn posted(&mut self, key: &Key) {
        self.of(key).posted = true;
    }

    pub(super) fn has_posted(&self, key: &Key) -> bool {
        self.0.iter().any(|used| used.posted && used.key == *key)
    }

    /// Whether the round's folder has to be touched now, so that it counts as used.
    pub(super) fn is_to_touch(&mut self, key: &Key) -> bool {
        let used = self.of(key);
        let is_due = used.touched.is_none_or(|at| at.elapsed() >= TOUCH_EVERY);
        if is_due {
            used.touched = Some(Instant::now());
        }
        is_due
    }

    pub(super) fn may_gather(&self, participant: u32, key: &Key) -> Result<(), CliqueError> {
        if self.0.iter().any(|used| used.gathered && used.key == *key) {
            return Err(twice(
                participant,
                key,
                "one gather that ends complete or with a failure",
                "another one",
            ));
        }
        Ok(())
    }

    pub(super) fn gathered(&mut self, participant: u32, key: &Key) -> Result<(), CliqueError> {
        self.may_gather(participant, key)?;
        self.of(key).gathered = true;
        Ok(())
    }
}

fn twice(participant: u32, key: &Key, expected: &str, seen: &str) -> CliqueError {
    CliqueError::Config {
        what: format!("{key}, participant {participant}"),
        expected: expected.to_owned(),
        seen: seen.to_owned(),
    }
}
