//! [`Memory`]: which rounds this process has posted and gathered, so that using one twice is an error and not a wait.

use std::collections::VecDeque;

use crate::CliqueError;
use crate::rendezvous::board::Key;

const MAX_REMEMBERED: usize = 1024;

#[derive(Debug)]
struct Used {
    key: Key,
    posted: bool,
    gathered: bool,
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
            self.0.push_back(Used { key: key.clone(), posted: false, gathered: false });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    pub(super) fn post(&mut self, participant: u32, key: &Key) -> Result<(), CliqueError> {
        if core::mem::replace(&mut self.of(key).posted, true) {
            return Err(twice(participant, key, "one post", "a second one"));
        }
        Ok(())
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
