//! Loads that a thread of the processor offers: it begins what is due, and looks what is done.

use std::time::{Duration, Instant};

use super::{Pace, Run};
use crate::failure::Failure;
use crate::rate::mops;
use crate::trial::{Phase, Trial, warm_limit};

/// Where operations go to. They are done in the order in which they began.
pub trait Offered {
    /// How many may be under way.
    fn most_under_way(&self) -> u64;
    /// Begins the next one, the `n`-th.
    fn begin(&mut self, n: u64, trial: &Trial) -> Result<(), Failure>;
    /// How many are done, of `begun`.
    fn done(&mut self, begun: u64, trial: &Trial) -> Result<u64, Failure>;
}

/// One run, and how many operations there were with those that do not count, which are a fifth as many as those that do, or
/// what was begun in a fifth of the time. Gives up what is not begun at twice the time. Ends the trial.
pub fn offer(ops: &mut impl Offered, pace: &Pace, trial: &Trial) -> Result<(Run, u64), Failure> {
    let before = warm_limit(pace.limit);
    let most = ops.most_under_way();
    // The first that counts, and how many there are with those before it.
    let mut warm = pace.all / 5;
    let mut all = warm + pace.all;
    let over = 2 * (pace.limit + before);
    let mut us = Vec::with_capacity(pace.all.min(1 << 22) as usize);
    let (mut begun, mut done) = (0, 0);
    let (mut first, mut last) = (Duration::ZERO, Duration::ZERO);
    let mut wait = trial.wait("operations under load", all);
    let start = Instant::now();
    while done < all {
        let now = start.elapsed();
        if begun < warm && now >= before {
            (warm, all) = (begun, begun + pace.all);
        }
        if now >= over {
            all = begun;
        }
        if begun < all && begun - done < most && now >= pace.due(begun) {
            ops.begin(begun, trial)?;
            begun += 1;
        }
        let seen = ops.done(begun, trial)?;
        if seen == done {
            wait.look(done)?;
            continue;
        }
        last = start.elapsed();
        for n in done..seen {
            if n < warm {
                first = last;
            } else {
                us.push(last.saturating_sub(pace.due(n)).as_nanos() as f64 / 1e3);
            }
        }
        done = seen;
        wait.step(done)?;
    }
    trial.enter(Phase::Over);
    // From the last that does not count, or the first that was due; where there was time for none, none was carried.
    let mops = if us.is_empty() { 0.0 } else { mops(us.len() as u64, last.saturating_sub(first)) };
    Ok((Run { mops, us, wrong: 0 }, done))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation is done this long after the one before it, or after it began.
    struct Server {
        takes: Duration,
        free_at: Instant,
        ends: std::collections::VecDeque<Instant>,
        done: u64,
    }

    impl Offered for Server {
        fn most_under_way(&self) -> u64 {
            64
        }

        fn begin(&mut self, _: u64, _: &Trial) -> Result<(), Failure> {
            self.free_at = self.free_at.max(Instant::now()) + self.takes;
            self.ends.push_back(self.free_at);
            Ok(())
        }

        fn done(&mut self, _: u64, _: &Trial) -> Result<u64, Failure> {
            while self.ends.front().is_some_and(|end| *end <= Instant::now()) {
                self.ends.pop_front();
                self.done += 1;
            }
            Ok(self.done)
        }
    }

    fn run(takes: Duration, kops: u64) -> (Run, u64) {
        // Long, for a machine with other work on it.
        let limit = Duration::from_millis(400);
        let pace = Pace { period_ps: 1_000_000_000 / kops, all: 400 * kops, limit };
        let trial = Trial::new("a load", 1, Duration::from_secs(60));
        let ends = std::collections::VecDeque::new();
        offer(&mut Server { takes, free_at: Instant::now(), ends, done: 0 }, &pace, &trial).unwrap()
    }

    #[test]
    fn what_is_offered_is_timed_from_when_it_is_due() {
        // A server of 20 thousand a second at most.
        let takes = Duration::from_micros(50);
        let (light, count) = run(takes, 1);
        assert_eq!(light.us.len(), 400);
        assert!((401..=480).contains(&count), "those that count, and a fifth before them at most: {count}");
        assert!(
            light.us.iter().all(|us| *us >= 50.0),
            "none is done sooner than the server takes: {:?}",
            light.us
        );
        // Four times as much as it carries: the queue grows, and so does the time from due to done.
        let (heavy, _) = run(takes, 80);
        assert!(heavy.mops < 0.95 * 0.080, "{}", heavy.mops);
        assert!(heavy.us.last() > Some(&1_000.0), "lateness counts: {:?}", heavy.us.last());
    }

    #[test]
    fn a_load_far_above_what_is_carried_has_a_rate_and_times() {
        let (run, count) = run(Duration::from_micros(50), 1_000_000);
        assert!(!run.us.is_empty() && (run.us.len() as u64) < count, "{} of {count}", run.us.len());
        assert!(run.mops > 0.0 && run.mops < 0.021, "{}", run.mops);
        // The first that counts was due at once, and begun when the warm-up was over.
        assert!(run.us.iter().all(|us| *us >= 79_000.0), "{:?}", run.us.first());
    }
}
