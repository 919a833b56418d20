//! The 16 bytes that travel: [`Trigger`], and where a trigger stands: [`Position`].

use crate::Error;

/// The bit of each slot word that belongs to the ring: the parity of the lap that wrote it.
pub(crate) const PARITY: u64 = 1 << 63;

/// A trigger: two words of 63 bits each, all of them the user's.
///
/// Bit 63 of each word belongs to the ring, which keeps the lap's parity there. A word that has it set is refused
/// by name, never masked.
///
/// ```
/// use portway_fifo::Trigger;
///
/// let trigger = Trigger::new([7, u64::MAX >> 1])?;
/// assert_eq!(trigger.words(), [7, u64::MAX >> 1]);
/// assert!(Trigger::new([1 << 63, 0]).is_err());
/// # Ok::<(), portway_fifo::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Trigger([u64; 2]);

impl Trigger {
    /// A trigger with these two words.
    ///
    /// # Errors
    /// [`Error::Payload`] if bit 63 of a word is set.
    #[inline]
    pub const fn new(words: [u64; 2]) -> Result<Self, Error> {
        if (words[0] | words[1]) & PARITY != 0 {
            return Err(Error::Payload { words });
        }
        Ok(Trigger(words))
    }

    /// The two words, bit 63 clear in both.
    #[inline]
    pub const fn words(self) -> [u64; 2] {
        self.0
    }

    /// What a slot holds once its lap's parity is in.
    #[inline]
    pub(crate) const fn stamped(self, parity: u64) -> [u64; 2] {
        [self.0[0] | parity, self.0[1] | parity]
    }

    /// The trigger in a slot, if both words carry this lap's parity.
    #[inline]
    pub(crate) const fn unstamp(words: [u64; 2], parity: u64) -> Option<Self> {
        let words = [words[0] ^ parity, words[1] ^ parity];
        if (words[0] | words[1]) & PARITY != 0 {
            return None;
        }
        Some(Trigger(words))
    }
}

/// A place in a FIFO's stream of triggers: the n-th trigger ever pushed stands at `first_position + n`.
///
/// Positions never rewind, not even by a reset, and wrap around at 2^64. So they have no order of their own; two of
/// them are compared by their wrapping difference, which is right while they lie less than 2^63 apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Position(pub u64);

impl Position {
    /// The position `n` triggers later.
    #[inline]
    pub const fn plus(self, n: u64) -> Self {
        Position(self.0.wrapping_add(n))
    }

    /// How many triggers this position lies behind `earlier`.
    #[inline]
    pub const fn since(self, earlier: Position) -> u64 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Whether a counter that stands at this position has come as far as `target`.
    #[inline]
    pub const fn reached(self, target: Position) -> bool {
        self.0.wrapping_sub(target.0) as i64 >= 0
    }
}

impl core::fmt::Display for Position {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

/// Maps positions to slots and laps of a ring of `1 << shift` slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) shift: u32,
}

impl Ring {
    #[inline]
    pub(crate) const fn slots(self) -> u64 {
        1 << self.shift
    }

    /// The slot of a position.
    #[inline]
    pub(crate) const fn slot(self, position: Position) -> usize {
        (position.0 & (self.slots() - 1)) as usize
    }

    /// The parity, in bit 63, of the lap that a position belongs to: set on the first lap (so that a zeroed ring
    /// reads as empty), clear on the second, and so on.
    #[inline]
    pub(crate) const fn parity(self, position: Position) -> u64 {
        !(position.0 >> self.shift) << 63
    }

    /// How far the tail must have come before the slot of `position` may be written.
    #[inline]
    pub(crate) const fn room(self, position: Position) -> Position {
        Position(position.0.wrapping_add(1).wrapping_sub(self.slots()))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn parity_alternates_by_lap_and_across_the_wrap() {
        for shift in [1, 6, 11, 20] {
            let ring = Ring { shift };
            assert_eq!(ring.parity(Position(0)), PARITY);
            for start in [0, 1 << 32, 1 << 63, u64::MAX - ring.slots() + 1] {
                let last_of_lap = Position(start | (ring.slots() - 1));
                assert_eq!(ring.parity(last_of_lap) ^ ring.parity(last_of_lap.plus(1)), PARITY);
                assert_eq!(ring.slot(last_of_lap.plus(1)), 0);
            }
        }
    }

    #[test]
    fn reached_holds_across_the_wrap() {
        for base in [0, (1 << 32) - 2, (1 << 63) - 2, u64::MAX - 1] {
            let base = Position(base);
            assert!(base.reached(base));
            assert!(base.plus(5).reached(base));
            assert!(!base.reached(base.plus(5)));
            assert_eq!(base.plus(5).since(base), 5);
        }
    }

    #[test]
    fn a_torn_slot_reads_as_empty() {
        let trigger = Trigger::new([3, 4]).unwrap();
        let whole = trigger.stamped(PARITY);
        assert_eq!(Trigger::unstamp(whole, PARITY), Some(trigger));
        assert_eq!(Trigger::unstamp([whole[0], 4], PARITY), None);
        assert_eq!(Trigger::unstamp([3, whole[1]], PARITY), None);
        assert_eq!(Trigger::unstamp(whole, 0), None);
    }
}
