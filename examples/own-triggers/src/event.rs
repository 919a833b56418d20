//! What a trigger of this program says, and how it lies in 16 bytes.
//!
//! ```text
//!  word 0:  63 ring │ 62 .. 40 zero │ 39 .. 32 kind │ 31 .. 0 block
//!  word 1:  63 ring │ 62 .. 0 time in nanoseconds
//! ```

use portway_fifo::Trigger;

/// A block of the kernel began or ended a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: Kind,
    pub block: u32,
    pub time_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Begin = 1,
    End = 2,
}

/// A trigger that is no event. A device may write anything, so this is no panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no event: kind {kind} (must be 1 or 2) in the words {words:#x?}")]
pub struct NoEvent {
    pub kind: u64,
    pub words: [u64; 2],
}

impl Event {
    /// # Errors
    /// A time of 2^63 ns or more, since bit 63 belongs to the ring.
    pub fn encode(self) -> Result<Trigger, portway_fifo::Error> {
        Trigger::new([(self.kind as u64) << 32 | u64::from(self.block), self.time_ns])
    }

    /// # Errors
    /// [`NoEvent`] for what [`encode`](Self::encode) does not make.
    pub fn decode(trigger: Trigger) -> Result<Event, NoEvent> {
        let words = trigger.words();
        let kind = match words[0] >> 32 {
            1 => Kind::Begin,
            2 => Kind::End,
            kind => return Err(NoEvent { kind, words }),
        };
        Ok(Event { kind, block: words[0] as u32, time_ns: words[1] })
    }
}
