//! [`Request`]: what a port channel's trigger says.
//!
//! ```text
//! word 0   0..40 source offset        40..63 size, low 23 bits
//! word 1   0..40 destination offset   40..45 size, high 5 bits   45..60 channel   60..63 op
//! ```
//!
//! The 126 bits of a trigger are all used, and no two whole sets of fields fill 63, so one field has to be split.

use portway_fifo::Trigger;

use crate::Error;

/// The largest size that a trigger holds, in bytes of a put or in steps of a bare signal.
pub const MAX_SIZE: u32 = (1 << SIZE_BITS) - 1;
/// One past the largest offset, and the largest length of a bound region, in bytes.
pub const MAX_REGION_BYTES: u64 = 1 << OFFSET_BITS;
/// One past the largest channel number.
pub const MAX_CHANNELS: usize = 1 << CHANNEL_BITS;

const OFFSET_BITS: u32 = 40;
const SIZE_BITS: u32 = 28;
const SIZE_LOW_BITS: u32 = 23;
const CHANNEL_BITS: u32 = 15;
const CHANNEL_SHIFT: u32 = 45;
const OP_SHIFT: u32 = 60;

/// What a trigger may ask for, in any combination but none. A set of [`PUT`](Self::PUT), [`SIGNAL`](Self::SIGNAL) and
/// [`FLUSH`](Self::FLUSH).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpSet(u8);

impl OpSet {
    /// Move bytes from the source region to the destination region.
    pub const PUT: OpSet = OpSet(1);
    /// Advance the peer's signal word, after every earlier put of the channel.
    pub const SIGNAL: OpSet = OpSet(2);
    /// Complete only when every earlier put of the channel has been delivered.
    pub const FLUSH: OpSet = OpSet(4);

    /// Both sets together.
    pub const fn and(self, other: OpSet) -> OpSet {
        OpSet(self.0 | other.0)
    }

    /// Whether all of `other` is in this set.
    #[inline]
    pub const fn has(self, other: OpSet) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A port channel's trigger, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub op: OpSet,
    /// The channel's number in its FIFO.
    pub channel: u16,
    /// The bytes of a put; without a put, how far a signal advances.
    pub size: u32,
    /// Where in the source region a put begins, in bytes.
    pub source_offset_bytes: u64,
    /// Where in the destination region it begins.
    pub destination_offset_bytes: u64,
}

impl Request {
    /// The trigger that says this.
    ///
    /// # Errors
    /// [`Error::Request`] if a field does not fit its bits or the op is empty.
    pub fn encode(self) -> Result<Trigger, Error> {
        if self.op.0 == 0 {
            return Err(Error::Request { request: self, fault: RequestFault::UndefinedOp });
        }
        let fields = [
            ("channel", u64::from(self.channel), MAX_CHANNELS as u64 - 1),
            ("size", u64::from(self.size), u64::from(MAX_SIZE)),
            ("source offset", self.source_offset_bytes, MAX_REGION_BYTES - 1),
            ("destination offset", self.destination_offset_bytes, MAX_REGION_BYTES - 1),
        ];
        for (what, value, limit) in fields {
            if value > limit {
                return Err(Error::Request {
                    request: self,
                    fault: RequestFault::Field { what, value, limit },
                });
            }
        }
        let size = u64::from(self.size);
        let first = self.source_offset_bytes | (size & ((1 << SIZE_LOW_BITS) - 1)) << OFFSET_BITS;
        let second = self.destination_offset_bytes
            | (size >> SIZE_LOW_BITS) << OFFSET_BITS
            | u64::from(self.channel) << CHANNEL_SHIFT
            | u64::from(self.op.0) << OP_SHIFT;
        Ok(Trigger::new([first, second])?)
    }

    /// What a trigger says. Every bit pattern says something; whether it makes sense is for the engine to check.
    #[inline]
    pub const fn decode(trigger: Trigger) -> Request {
        let [first, second] = trigger.words();
        let offset = (1 << OFFSET_BITS) - 1;
        let size_high = (second >> OFFSET_BITS) & ((1 << (SIZE_BITS - SIZE_LOW_BITS)) - 1);
        Request {
            op: OpSet((second >> OP_SHIFT) as u8 & 7),
            channel: (second >> CHANNEL_SHIFT) as u16 & (MAX_CHANNELS - 1) as u16,
            size: (first >> OFFSET_BITS) as u32 | (size_high as u32) << SIZE_LOW_BITS,
            source_offset_bytes: first & offset,
            destination_offset_bytes: second & offset,
        }
    }

    /// The channel of a trigger, as an index.
    #[inline]
    pub(crate) const fn channel_of(trigger: Trigger) -> usize {
        Request::decode(trigger).channel as usize
    }

    /// What is wrong with this request for a source and a destination region of these lengths, if anything. The rules
    /// that the device code follows too.
    pub(crate) fn fault(self, lens: (u64, u64)) -> Option<RequestFault> {
        let put = self.op.has(OpSet::PUT);
        if self.op.0 == 0 {
            Some(RequestFault::UndefinedOp)
        } else if self.size == 0 && self.op != OpSet::FLUSH {
            Some(RequestFault::Empty)
        } else if put && !self.is_inside((lens.0, u64::MAX)) {
            Some(RequestFault::Source { limit_bytes: lens.0 })
        } else if put && !self.is_inside((u64::MAX, lens.1)) {
            Some(RequestFault::Destination { limit_bytes: lens.1 })
        } else {
            None
        }
    }

    /// Whether this, taken from a trigger, is a put, with or without more, that has no [`fault`](Self::fault).
    #[inline]
    pub(crate) fn is_sound_put(self, lens: (u64, u64)) -> bool {
        let size = u64::from(self.size);
        // In what a trigger says both ends stay below 2^41.
        self.op.has(OpSet::PUT)
            && size != 0
            && self.source_offset_bytes.wrapping_add(size) <= lens.0
            && self.destination_offset_bytes.wrapping_add(size) <= lens.1
    }

    /// Whether both ranges end within these lengths.
    #[inline]
    fn is_inside(self, lens: (u64, u64)) -> bool {
        let size = u64::from(self.size);
        // In what a trigger says both ends stay below 2^41.
        self.source_offset_bytes.saturating_add(size) <= lens.0
            && self.destination_offset_bytes.saturating_add(size) <= lens.1
    }
}

/// Why the engine refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestFault {
    /// A field does not fit its bits in the trigger.
    #[error("its {what} of {value} does not fit the trigger, which holds up to {limit}")]
    Field {
        /// Which field.
        what: &'static str,
        /// What it is.
        value: u64,
        /// The largest that fits.
        limit: u64,
    },
    /// None of put, signal and flush.
    #[error("its op is empty")]
    UndefinedOp,
    /// A put of no bytes, or a signal that advances by nothing.
    #[error("its size is 0")]
    Empty,
    /// The put reads past the end of the source region.
    #[error("it reads past the source region's {limit_bytes} bytes")]
    Source {
        /// The region's length.
        limit_bytes: u64,
    },
    /// The put writes past the end of the destination region.
    #[error("it writes past the destination region's {limit_bytes} bytes")]
    Destination {
        /// The region's length.
        limit_bytes: u64,
    },
    /// No channel of the FIFO has this number.
    #[error("the FIFO has {channels} channels")]
    UnknownChannel {
        /// How many there are.
        channels: usize,
    },
}
