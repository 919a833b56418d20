//! [`Ledger`]: the books of one queue pair. How much room there is, which requests ask for a completion, which ops are
//! complete. It knows no device.
//!
//! Requests are numbered, and complete in order. An op ends with the request before `end`: a flush alone needs
//! none of its own, since it waits for those before it.

use portway_proxy::transport::{Completion, Lane};

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    lane: u32,
    sequence: u64,
    /// One past its last request.
    end: u64,
}

/// ```text
///   complete ≤ built ≤ full = complete + depth       requests
///   first ≤ next ≤ ops_full = first + ops.len()      ops
/// ```
#[derive(Debug)]
pub(crate) struct Ledger {
    built: u64,
    complete: u64,
    /// What `built` may come to.
    full: u64,
    /// After so many requests one asks for a completion.
    every: u64,
    /// One past the last request that asks for a completion.
    asked: u64,
    ops: Box<[Entry]>,
    first: u64,
    next: u64,
    /// What `next` may come to.
    ops_full: u64,
}

impl Ledger {
    /// For a queue that holds `depth` requests, of which the first gets the number `start`.
    pub(crate) fn new(depth: u32, every: u32, start: u64) -> Self {
        let ops = vec![Entry::default(); (depth as usize).next_power_of_two()].into_boxed_slice();
        let (full, ops_full) = (start + u64::from(depth), ops.len() as u64);
        Ledger {
            built: start,
            complete: start,
            full,
            every: every.into(),
            asked: start,
            ops,
            first: 0,
            next: 0,
            ops_full,
        }
    }

    #[inline]
    fn index(&self, op: u64) -> usize {
        op as usize & (self.ops.len() - 1)
    }

    /// Whether an op can be begun. One without requests too, since it must not pass one that is not all there.
    #[inline]
    pub(crate) fn takes_op(&self) -> bool {
        self.has_room() && self.has_entry()
    }

    /// Whether an op of so many requests, one or more, can be built whole.
    #[inline]
    pub(crate) fn takes_whole_op(&self, requests: u64) -> bool {
        // Of none: not here.
        requests != 0 && self.built + requests <= self.full && self.has_entry()
    }

    #[inline]
    fn has_entry(&self) -> bool {
        self.next != self.ops_full
    }

    /// Whether there is room for one more request.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.built != self.full
    }

    /// The number of the next of so many requests. There is room for them.
    #[inline]
    pub(crate) fn requests(&mut self, count: u64) -> u64 {
        let number = self.built;
        self.built = number + count;
        debug_assert!(self.built <= self.full);
        number
    }

    /// An op ends with the last request that was built; true if that one has to ask for a completion: for a flush, or
    /// because it is time.
    #[inline]
    pub(crate) fn end_op(&mut self, lane: Lane, sequence: u64, flush: bool) -> bool {
        let index = self.index(self.next);
        self.ops[index] = Entry { lane: lane.0, sequence, end: self.built };
        self.next += 1;
        let unasked = self.built - self.asked;
        let asks = unasked >= self.every || (flush && unasked != 0);
        if asks {
            self.asked = self.built;
        }
        asks
    }

    /// The last request that was built has to ask for a completion; true if it did not do so yet.
    #[inline]
    pub(crate) fn ask_for_last(&mut self) -> bool {
        let unasked = self.asked != self.built;
        self.asked = self.built;
        unasked
    }

    /// Request `number` is complete, and with it all before. False if it is not under way.
    #[inline]
    pub(crate) fn completed(&mut self, number: u64) -> bool {
        let under_way = (self.complete..self.built).contains(&number);
        if under_way {
            self.full += number + 1 - self.complete;
            self.complete = number + 1;
        }
        under_way
    }

    /// The next op that is complete and was not returned yet.
    #[inline]
    pub(crate) fn next_complete(&mut self) -> Option<Completion> {
        if self.first == self.next {
            return None;
        }
        let entry = self.ops[self.index(self.first)];
        if entry.end > self.complete {
            return None;
        }
        self.first += 1;
        self.ops_full += 1;
        Some(Completion { lane: Lane(entry.lane), sequence: entry.sequence })
    }

    /// The op that a request under way belongs to, if that op has ended.
    pub(crate) fn op_of(&self, number: u64) -> Option<Completion> {
        let entries = (self.first..self.next).map(|op| self.ops[self.index(op)]);
        entries
            .filter(|entry| entry.end > number)
            .map(|entry| Completion { lane: Lane(entry.lane), sequence: entry.sequence })
            .next()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sequences(ledger: &mut Ledger) -> Vec<u64> {
        core::iter::from_fn(|| ledger.next_complete()).map(|completion| completion.sequence).collect()
    }

    #[test]
    fn one_in_k_asks_and_its_completion_completes_all_before() {
        let mut ledger = Ledger::new(64, 4, 0);
        let mut asking = Vec::new();
        for sequence in 0..10 {
            let number = ledger.requests(1);
            if ledger.end_op(Lane(0), sequence, false) {
                asking.push(number);
            }
        }
        assert_eq!(asking, [3, 7]);
        assert!(ledger.ask_for_last(), "requests 8 and 9 do not ask");
        assert!(!ledger.ask_for_last(), "now 9 does");
        assert!(ledger.completed(3));
        assert_eq!(sequences(&mut ledger), [0, 1, 2, 3]);
        assert!(ledger.completed(9));
        assert_eq!(sequences(&mut ledger), [4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_flush_of_its_own_needs_no_request() {
        let mut ledger = Ledger::new(64, 32, 0);
        assert!(!ledger.end_op(Lane(0), 0, true));
        assert_eq!(sequences(&mut ledger), [0], "nothing before it");
        ledger.requests(1);
        assert!(!ledger.end_op(Lane(0), 1, false));
        assert!(ledger.end_op(Lane(1), 0, true), "the request before it has to ask");
        assert!(!ledger.end_op(Lane(1), 1, true), "it does so already");
        assert_eq!(sequences(&mut ledger), []);
        ledger.completed(0);
        assert_eq!(sequences(&mut ledger), [1, 0, 1]);
    }

    #[test]
    fn a_completion_of_nothing_under_way_is_told() {
        let mut ledger = Ledger::new(64, 32, 0);
        assert!(!ledger.completed(0));
        ledger.requests(1);
        ledger.requests(1);
        assert!(!ledger.completed(2));
        assert!(ledger.completed(1));
        assert!(!ledger.completed(0) && !ledger.completed(1));
        assert!(!ledger.completed(u64::MAX));
    }

    #[test]
    fn a_request_names_its_op() {
        let mut ledger = Ledger::new(64, 32, 0);
        ledger.requests(1);
        ledger.end_op(Lane(3), 11, false);
        ledger.requests(1);
        ledger.requests(1);
        ledger.end_op(Lane(4), 12, false);
        let op_of = |number| ledger.op_of(number).map(|op| (op.lane.0, op.sequence));
        assert_eq!(
            [op_of(0), op_of(1), op_of(2), op_of(3)],
            [Some((3, 11)), Some((4, 12)), Some((4, 12)), None]
        );
    }

    proptest! {
        /// Whatever is asked of it: the send queue never holds more than its depth, at most `depth` completions are due
        /// at a time, every op completes once and in order, and after a burst nothing waits for a later one.
        #[test]
        fn budgets_hold_under_any_load(
            depth in 64u32..200,
            every in 1u32..32,
            steps in proptest::collection::vec((0usize..6, 0u32..3, any::<bool>()), 1..400),
        ) {
            let mut ledger = Ledger::new(depth, every, 0);
            // The device: numbers of requests that ask, in order.
            let mut asking = std::collections::VecDeque::new();
            let (mut posted, mut done, mut sequence, mut seen) = (0u64, 0u64, 0u64, 0u64);
            for (ops, requests, complete) in steps {
                for _ in 0..ops {
                    if !ledger.takes_op() { break }
                    for _ in 0..requests {
                        if !ledger.has_room() { break }
                        prop_assert_eq!(ledger.requests(1), posted);
                        posted += 1;
                    }
                    if ledger.end_op(Lane(0), sequence, complete) { asking.push_back(posted - 1) }
                    sequence += 1;
                }
                if posted > 0 && ledger.ask_for_last() { asking.push_back(posted - 1) }
                prop_assert!(posted - done <= u64::from(depth) && asking.len() <= depth as usize);
                if let Some(number) = complete.then(|| asking.pop_front()).flatten() {
                    prop_assert!(ledger.completed(number));
                    done = number + 1;
                }
                while let Some(op) = ledger.next_complete() {
                    prop_assert_eq!(op.sequence, seen);
                    seen += 1;
                }
            }
            for number in asking { prop_assert!(ledger.completed(number)) }
            while let Some(op) = ledger.next_complete() {
                prop_assert_eq!(op.sequence, seen);
                seen += 1;
            }
            prop_assert_eq!(seen, sequence);
        }
    }
}
