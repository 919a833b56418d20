//! What travels, and the check of it: every trigger exactly once, whole, and in its producer's order.

use portway_fifo::Trigger;

use super::queue::Sender;
use crate::failure::Failure;
use crate::trial::Trial;

/// Room for more producers than a GPU has threads at a time.
const PRODUCER_SHIFT: u32 = 46;

/// The `n`-th trigger of a producer. The second word depends on all of the first, so a mix of two triggers is seen.
#[inline]
pub fn trigger(producer: u64, n: u64) -> Trigger {
    let first = producer << PRODUCER_SHIFT | n;
    // Both words are below bit 63: there are fewer than 2^17 producers, and `scramble` shifts.
    Trigger::new([first, scramble(first)]).expect("bit 63 is clear")
}

#[inline]
fn scramble(first: u64) -> u64 {
    first.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1
}

/// Follows what arrives from each producer.
#[derive(Debug)]
pub struct Check {
    next: Vec<u64>,
    wrong: u64,
}

impl Check {
    pub fn new(producers: u64) -> Self {
        Check { next: vec![0; producers as usize], wrong: 0 }
    }

    /// Takes the next trigger that arrived, from whichever producer.
    #[inline]
    pub fn see(&mut self, words: [u64; 2]) {
        let n = words[0] & ((1 << PRODUCER_SHIFT) - 1);
        match self.next.get_mut((words[0] >> PRODUCER_SHIFT) as usize) {
            Some(next) if *next == n && words[1] == scramble(words[0]) => *next += 1,
            _ => self.mistake(words),
        }
    }

    /// Counts a trigger that is not the next one of its producer, and goes on after it: a gap counts once, not once
    /// for each trigger that follows.
    #[cold]
    fn mistake(&mut self, words: [u64; 2]) {
        self.wrong += 1;
        let n = words[0] & ((1 << PRODUCER_SHIFT) - 1);
        if let Some(next) = self.next.get_mut((words[0] >> PRODUCER_SHIFT) as usize) {
            // A number out of a corrupted trigger says nothing about its place.
            *next = if words[1] == scramble(words[0]) { n + 1 } else { *next + 1 };
        }
    }

    /// The mistakes, once all has arrived; `sent` tells how many triggers each producer sent.
    pub fn finish(&self, sent: &[u64]) -> u64 {
        self.wrong + self.next.iter().zip(sent).map(|(next, sent)| next.abs_diff(*sent)).sum::<u64>()
    }
}

/// A sender that flips one bit of its `at`-th trigger.
pub struct Corrupting<S> {
    inner: S,
    sent: u64,
    at: u64,
}

impl<S> Corrupting<S> {
    pub fn new(inner: S, at: u64) -> Self {
        Corrupting { inner, sent: 0, at }
    }
}

impl<S: Sender> Sender for Corrupting<S> {
    fn send(&mut self, batch: &[Trigger], trial: &Trial) -> Result<(), Failure> {
        let mut batch = batch.to_vec();
        if let Some(victim) = self.at.checked_sub(self.sent).and_then(|n| batch.get_mut(n as usize)) {
            let [first, second] = victim.words();
            *victim = Trigger::new([first, second ^ 1]).expect("bit 63 is clear");
        }
        self.sent += batch.len() as u64;
        self.inner.send(&batch, trial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(arrivals: impl IntoIterator<Item = [u64; 2]>) -> u64 {
        let mut check = Check::new(2);
        arrivals.into_iter().for_each(|words| check.see(words));
        check.finish(&[4, 4])
    }

    fn all() -> Vec<[u64; 2]> {
        (0..4).flat_map(|n| [trigger(0, n).words(), trigger(1, n).words()]).collect()
    }

    #[test]
    fn what_is_right_passes_in_any_interleaving() {
        assert_eq!(wrong(all()), 0);
        assert_eq!(wrong([1, 0].into_iter().flat_map(|p| (0..4).map(move |n| trigger(p, n).words()))), 0);
    }

    #[test]
    fn every_kind_of_mistake_is_found() {
        let with = |change: fn(&mut Vec<[u64; 2]>)| {
            let mut arrivals = all();
            change(&mut arrivals);
            wrong(arrivals)
        };
        assert_eq!(with(|all| all[3][1] ^= 1), 1, "a flipped bit counts once");
        assert_ne!(with(|all| all[3][0] ^= 1), 0, "a flipped bit of the first word");
        assert_ne!(with(|all| all[3][0] |= 7 << PRODUCER_SHIFT), 0, "a producer that there is not");
        assert_eq!(
            with(|all| all.retain(|words| *words != trigger(0, 1).words())),
            1,
            "a lost one counts once"
        );
        assert_eq!(with(|all| all.truncate(7)), 1, "the last one lost");
        assert_ne!(with(|all| all.insert(2, all[0])), 0, "one delivered twice");
        assert_ne!(with(|all| all.swap(0, 2)), 0, "two of a producer in the wrong order");
        assert_ne!(with(|all| all[2][1] = all[4][1]), 0, "a mix of two");
    }
}
