//! [`Flat`]: whether memory, threads and descriptors of this process stay what they are.

use std::fs;
use std::time::{Duration, Instant};

/// What this process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    pub memory_bytes: u64,
    pub threads: usize,
    pub descriptors: usize,
}

impl Use {
    pub fn now() -> Result<Use, std::io::Error> {
        let status = fs::read_to_string("/proc/self/statm")?;
        let pages: u64 = status.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        Ok(Use {
            memory_bytes: pages * 4096,
            threads: fs::read_dir("/proc/self/task")?.count(),
            // Without the one that lists them.
            descriptors: fs::read_dir("/proc/self/fd")?.count() - 1,
        })
    }
}

/// What is compared: the first episodes settle caches and the allocator, the next quarter of the time is the measure.
#[derive(Debug, Default)]
pub struct Flat {
    measure: Option<Use>,
    last: Option<Use>,
}

/// More than the allocator's moods, less than a leak of a page an episode.
const ALLOWED_BYTES: u64 = 2 << 20;
/// A thread that was joined may be in the list for a moment.
const SETTLES_WITHIN: Duration = Duration::from_millis(500);

impl Flat {
    /// Notes what there is after an episode, at this part of the run (0 to 1).
    pub fn note(&mut self, part: f64) -> Result<(), Box<dyn std::error::Error>> {
        let started = Instant::now();
        let mut seen = Use::now()?;
        let wanted = self.last.or(self.measure);
        while wanted.is_some_and(|wanted| seen.threads > wanted.threads) && started.elapsed() < SETTLES_WITHIN
        {
            std::thread::sleep(Duration::from_millis(1));
            seen = Use::now()?;
        }
        let into = match part {
            0.25..0.5 => &mut self.measure,
            0.75.. => &mut self.last,
            _ => return Ok(()),
        };
        let old = into.unwrap_or(seen);
        *into = Some(Use {
            memory_bytes: old.memory_bytes.max(seen.memory_bytes),
            threads: old.threads.max(seen.threads),
            descriptors: old.descriptors.max(seen.descriptors),
        });
        Ok(())
    }

    /// What was there in the second quarter of the run and in the last, if that is no more.
    pub fn check(&self) -> Result<(Use, Use), String> {
        let (Some(measure), Some(last)) = (self.measure, self.last) else {
            return Err("too few episodes to compare: give it more time".into());
        };
        let flat = last.memory_bytes <= measure.memory_bytes + ALLOWED_BYTES
            && last.threads <= measure.threads
            && last.descriptors <= measure.descriptors;
        if flat {
            Ok((measure, last))
        } else {
            Err(format!("not flat: expected no more than {measure:?}, seen {last:?}"))
        }
    }
}
