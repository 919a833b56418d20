//! [`Window`]: the ops of one channel, from the trigger to the completion.

use portway_fifo::Position;

use crate::transport::{Lane, Op};

/// One op under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Where its trigger stands in the FIFO.
    pub(crate) position: Position,
    /// When the engine took it, in nanoseconds of the engine's time, which stays below [`DONE`]; that once it is complete.
    pub(crate) taken_at_ns: u64,
}

/// A time that no engine sees.
const DONE: u64 = u64::MAX;

/// A ring of ops with three marks, each an op's sequence number in its lane:
///
/// ```text
///   complete ≤ sent ≤ taken ≤ complete + capacity
///   └ accepted by the port ┘└ backlog ┘
/// ```
///
/// Ops complete in any order; `complete` is the first that has not.
#[derive(Debug)]
pub(crate) struct Window {
    entries: Box<[Entry]>,
    /// The ops of the backlog; what a port has accepted is not kept.
    ops: Box<[Op]>,
    complete: u64,
    sent: u64,
    taken: u64,
    /// How far `taken` may go with ops that the port accepts at once: up to the capacity; nowhere behind a backlog or
    /// once the window is closed.
    clear_until: u64,
    closed: bool,
    /// The position behind the last op before `complete`.
    frontier: Position,
}

/// A completion that matches no op under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stray {
    NeverSent,
    Repeated,
}

impl Stray {
    pub(crate) const fn what(self) -> &'static str {
        match self {
            Stray::NeverSent => "a completion of an op that was never accepted",
            Stray::Repeated => "a second completion of an op",
        }
    }
}

impl Window {
    /// A window for `capacity` ops (a power of two) of a channel whose triggers come at `start` or later.
    pub(crate) fn new(capacity: usize, start: Position) -> Self {
        let none = Entry { position: start, taken_at_ns: DONE };
        let no_op = Op { lane: Lane(0), sequence: 0, put: None, signal: None, flush: false };
        Window {
            entries: vec![none; capacity].into_boxed_slice(),
            ops: vec![no_op; capacity].into_boxed_slice(),
            complete: 0,
            sent: 0,
            taken: 0,
            clear_until: capacity as u64,
            closed: false,
            frontier: start,
        }
    }

    #[inline]
    fn index(&self, sequence: u64) -> usize {
        sequence as usize & (self.entries.len() - 1)
    }

    /// Whether it has room for an op, and nothing waits before it.
    #[inline]
    pub(crate) fn is_clear(&self) -> bool {
        self.taken != self.clear_until
    }

    fn update_clear(&mut self) {
        let clear = !self.closed && self.backlog() == 0;
        self.clear_until =
            if clear { self.complete.wrapping_add(self.entries.len() as u64) } else { self.taken };
    }

    pub(crate) fn is_full(&self) -> bool {
        self.taken.wrapping_sub(self.complete) as usize == self.entries.len()
    }

    /// Whether every op that was taken is complete.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.taken == self.complete
    }

    /// The sequence number that the next op gets.
    #[inline]
    pub(crate) fn next_sequence(&self) -> u64 {
        self.taken
    }

    /// Ops that the port has not accepted yet.
    #[inline]
    pub(crate) fn backlog(&self) -> u64 {
        self.taken.wrapping_sub(self.sent)
    }

    /// Ops that the port has accepted, from the first that is not complete on. Some of them may be.
    #[inline]
    pub(crate) fn in_port(&self) -> u64 {
        self.sent.wrapping_sub(self.complete)
    }

    /// Takes an op that the port has accepted already; the window is clear.
    #[inline]
    pub(crate) fn take_sent(&mut self, position: Position, now_ns: u64) {
        self.take(position, now_ns);
        self.sent = self.taken;
    }

    /// Takes an op into the backlog; the window is neither full nor closed.
    pub(crate) fn take_waiting(&mut self, op: Op, position: Position, now_ns: u64) {
        let index = self.index(self.taken);
        self.ops[index] = op;
        self.take(position, now_ns);
        self.update_clear();
    }

    #[inline]
    fn take(&mut self, position: Position, now_ns: u64) {
        let index = self.index(self.taken);
        self.entries[index] = Entry { position, taken_at_ns: now_ns };
        self.taken = self.taken.wrapping_add(1);
    }

    /// The next op of the backlog.
    pub(crate) fn next_to_send(&self) -> Option<&Op> {
        if self.sent == self.taken { None } else { Some(&self.ops[self.index(self.sent)]) }
    }

    /// The port accepted the op that [`next_to_send`](Self::next_to_send) showed.
    pub(crate) fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
        self.update_clear();
    }

    /// Notes a completion and moves the frontier over all that are complete in a row.
    #[inline]
    pub(crate) fn complete(&mut self, sequence: u64) -> Result<(), Stray> {
        if sequence.wrapping_sub(self.complete) >= self.in_port() {
            let old = sequence.wrapping_sub(self.complete) as i64;
            return Err(if old < 0 { Stray::Repeated } else { Stray::NeverSent });
        }
        let index = self.index(sequence);
        if core::mem::replace(&mut self.entries[index].taken_at_ns, DONE) == DONE {
            return Err(Stray::Repeated);
        }
        while self.complete != self.sent {
            let oldest = &self.entries[self.index(self.complete)];
            if oldest.taken_at_ns != DONE {
                break;
            }
            self.frontier = oldest.position.plus(1);
            self.complete = self.complete.wrapping_add(1);
        }
        self.update_clear();
        Ok(())
    }

    /// The oldest op that is not complete, and whether the port has accepted it.
    #[inline]
    pub(crate) fn oldest(&self) -> Option<(&Entry, bool)> {
        if self.is_idle() {
            return None;
        }
        Some((&self.entries[self.index(self.complete)], self.complete != self.sent))
    }

    /// The position below which all triggers of the channel are complete.
    #[inline]
    pub(crate) fn frontier(&self) -> Position {
        self.frontier
    }

    /// Closes the window for good. Forgets the backlog and returns how many ops that were.
    pub(crate) fn close(&mut self) -> u64 {
        let dropped = self.backlog();
        self.taken = self.sent;
        self.closed = true;
        self.update_clear();
        dropped
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(window: &mut Window, position: u64) {
        let sequence = window.next_sequence();
        let op = Op { lane: Lane(0), sequence, put: None, signal: Some(1), flush: false };
        window.take_waiting(op, Position(position), 0);
    }

    #[test]
    fn the_frontier_stays_before_a_hole_and_jumps_over_what_is_complete() {
        let mut window = Window::new(8, Position(100));
        assert_eq!(window.frontier(), Position(100));
        for position in [103, 107, 108] {
            window.take_sent(Position(position), 0);
        }
        assert_eq!(window.frontier(), Position(100));
        window.complete(2).unwrap();
        assert_eq!(window.frontier(), Position(100));
        window.complete(0).unwrap();
        assert_eq!(window.frontier(), Position(104));
        window.complete(1).unwrap();
        assert_eq!(window.frontier(), Position(109));
        assert!(window.is_idle());
    }

    #[test]
    fn a_completion_of_nothing_under_way_is_refused() {
        let mut window = Window::new(4, Position(0));
        assert_eq!(window.complete(0), Err(Stray::NeverSent));
        wait(&mut window, 0);
        assert_eq!(window.complete(0), Err(Stray::NeverSent), "still in the backlog");
        window.sent();
        window.take_sent(Position(1), 0);
        window.complete(1).unwrap();
        assert_eq!(window.complete(1), Err(Stray::Repeated));
        window.complete(0).unwrap();
        assert_eq!(window.complete(0), Err(Stray::Repeated));
        assert_eq!(window.complete(u64::MAX), Err(Stray::Repeated));
    }

    #[test]
    fn it_fills_and_empties() {
        let start = Position(u64::MAX - 1);
        let mut window = Window::new(4, start);
        for round in 0..10u64 {
            assert!(window.is_clear());
            for n in 0..4 {
                assert!(!window.is_full());
                wait(&mut window, start.plus(round * 4 + n).0);
            }
            assert!(window.is_full() && !window.is_clear());
            assert_eq!(window.backlog(), 4);
            for n in 0..4 {
                assert_eq!(window.next_to_send().map(|op| op.sequence), Some(round * 4 + n));
                window.sent();
            }
            assert!(window.next_to_send().is_none());
            for n in (0..4).rev() {
                window.complete(round * 4 + n).unwrap();
            }
        }
        assert_eq!(window.frontier(), start.plus(40));
    }

    #[test]
    fn closed_it_takes_nothing_more_and_still_notes_completions() {
        let mut window = Window::new(4, Position(0));
        window.take_sent(Position(0), 0);
        window.take_sent(Position(1), 0);
        wait(&mut window, 2);
        assert_eq!(window.close(), 1);
        assert!(!window.is_clear() && window.is_closed());
        window.complete(1).unwrap();
        window.complete(0).unwrap();
        assert_eq!(window.complete(2), Err(Stray::NeverSent), "it was in the backlog");
        assert!(window.is_idle() && !window.is_clear());
    }
}
