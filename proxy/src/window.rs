//! [`Window`]: the ops of one channel, from the trigger to the completion.

use portway_fifo::Position;

use crate::transport::Op;

/// One op under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) op: Op,
    /// Where its trigger stands in the FIFO.
    pub(crate) position: Position,
    /// When the engine took it, in nanoseconds of the engine's time.
    pub(crate) taken_at_ns: u64,
    done: bool,
}

/// A ring of ops with three marks, each an op's sequence number in its lane:
///
/// ```text
///   complete ≤ sent ≤ taken ≤ complete + capacity
///   └ accepted by the port ┘└ backlog ┘
/// ```
///
/// Ops complete in any order; `complete` is the first that has not, and with it the channel's frontier.
#[derive(Debug)]
pub(crate) struct Window {
    entries: Box<[Option<Entry>]>,
    complete: u64,
    sent: u64,
    taken: u64,
    /// The frontier while nothing is under way.
    idle_frontier: Position,
}

/// A completion that matches no op under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stray {
    NeverSent,
    Repeated,
}

impl Window {
    /// A window for `capacity` ops (a power of two) of a channel whose triggers come at `start` or later.
    pub(crate) fn new(capacity: usize, start: Position) -> Self {
        let entries = vec![None; capacity].into_boxed_slice();
        Window { entries, complete: 0, sent: 0, taken: 0, idle_frontier: start }
    }

    #[inline]
    fn index(&self, sequence: u64) -> usize {
        sequence as usize & (self.entries.len() - 1)
    }

    #[inline]
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
    fn in_port(&self) -> u64 {
        self.sent.wrapping_sub(self.complete)
    }

    /// Takes an op; the window is not full.
    #[inline]
    pub(crate) fn take(&mut self, op: Op, position: Position, now_ns: u64) {
        let index = self.index(self.taken);
        self.entries[index] = Some(Entry { op, position, taken_at_ns: now_ns, done: false });
        self.taken = self.taken.wrapping_add(1);
        self.idle_frontier = position.plus(1);
    }

    /// The next op of the backlog.
    #[inline]
    pub(crate) fn next_to_send(&self) -> Option<&Op> {
        if self.sent == self.taken {
            return None;
        }
        self.entries[self.index(self.sent)].as_ref().map(|entry| &entry.op)
    }

    /// The port accepted the op that [`next_to_send`](Self::next_to_send) showed.
    #[inline]
    pub(crate) fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Notes a completion and moves the frontier over all that are complete in a row.
    #[inline]
    pub(crate) fn complete(&mut self, sequence: u64) -> Result<(), Stray> {
        if sequence.wrapping_sub(self.complete) >= self.in_port() {
            let old = sequence.wrapping_sub(self.complete) as i64;
            return Err(if old < 0 { Stray::Repeated } else { Stray::NeverSent });
        }
        let index = self.index(sequence);
        match &mut self.entries[index] {
            Some(entry) if !entry.done => entry.done = true,
            _ => return Err(Stray::Repeated),
        }
        while self.complete != self.sent {
            let index = self.index(self.complete);
            match &self.entries[index] {
                Some(entry) if entry.done => self.complete = self.complete.wrapping_add(1),
                _ => break,
            }
        }
        Ok(())
    }

    /// The oldest op that is not complete.
    pub(crate) fn oldest(&self) -> Option<(&Entry, bool)> {
        if self.is_idle() {
            return None;
        }
        let entry = self.entries[self.index(self.complete)].as_ref()?;
        Some((entry, self.complete != self.sent))
    }

    /// The position below which all triggers of the channel are complete.
    #[inline]
    pub(crate) fn frontier(&self) -> Position {
        match self.oldest() {
            Some((entry, _)) => entry.position,
            None => self.idle_frontier,
        }
    }

    /// Forgets the backlog and returns how many ops that were.
    pub(crate) fn drop_backlog(&mut self) -> u64 {
        let dropped = self.backlog();
        self.taken = self.sent;
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Lane;

    fn take(window: &mut Window, position: u64) {
        let op =
            Op { lane: Lane(0), sequence: window.next_sequence(), put: None, signal: Some(1), flush: false };
        window.take(op, Position(position), 0);
    }

    #[test]
    fn the_frontier_stays_at_a_hole_and_jumps_over_what_is_complete() {
        let mut window = Window::new(8, Position(100));
        assert_eq!(window.frontier(), Position(100));
        for position in [103, 107, 108] {
            take(&mut window, position);
            window.sent();
        }
        assert_eq!(window.frontier(), Position(103));
        window.complete(2).unwrap();
        assert_eq!(window.frontier(), Position(103));
        window.complete(0).unwrap();
        assert_eq!(window.frontier(), Position(107));
        window.complete(1).unwrap();
        assert_eq!(window.frontier(), Position(109));
        assert!(window.is_idle());
    }

    #[test]
    fn a_completion_of_nothing_under_way_is_refused() {
        let mut window = Window::new(4, Position(0));
        assert_eq!(window.complete(0), Err(Stray::NeverSent));
        take(&mut window, 0);
        assert_eq!(window.complete(0), Err(Stray::NeverSent), "still in the backlog");
        window.sent();
        take(&mut window, 1);
        window.sent();
        window.complete(1).unwrap();
        assert_eq!(window.complete(1), Err(Stray::Repeated));
        window.complete(0).unwrap();
        assert_eq!(window.complete(0), Err(Stray::Repeated));
        assert_eq!(window.complete(u64::MAX), Err(Stray::Repeated));
    }

    #[test]
    fn it_fills_and_empties() {
        let mut window = Window::new(4, Position(u64::MAX - 1));
        for round in 0..10u64 {
            for n in 0..4 {
                assert!(!window.is_full());
                take(&mut window, (u64::MAX - 1).wrapping_add(round * 4 + n));
            }
            assert!(window.is_full());
            assert_eq!(window.backlog(), 4);
            while window.next_to_send().is_some() {
                window.sent();
            }
            for n in (0..4).rev() {
                window.complete(round * 4 + n).unwrap();
            }
        }
        assert_eq!(window.frontier(), Position(u64::MAX - 1).plus(40));
    }
}
