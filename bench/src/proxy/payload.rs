//! What the producers ask for: no two puts of a measurement are alike, so a lost, doubled or mixed one is seen.

use portway_proxy::transport::Put;

/// Bytes of each channel's source region: memory, though nobody reads it.
pub const SOURCE_LEN_BYTES: u64 = SOURCE_OFFSETS + MAX_LEN_BYTES;
/// Bytes of each channel's destination region, which is but a number.
pub const DESTINATION_LEN_BYTES: u64 = 1 << 40;

const SOURCE_OFFSETS: u64 = 1 << 16;
const MAX_LEN_BYTES: u64 = 8;
const PRODUCER_SHIFT: u32 = 31;

/// The `n`-th put of a producer. Its destination names both, and the rest follows from that.
#[inline]
pub fn put(producer: u64, n: u64) -> Put {
    let destination = producer << PRODUCER_SHIFT | n & ((1 << PRODUCER_SHIFT) - 1);
    let mixed = destination.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Put {
        source_offset_bytes: mixed >> 32 & (SOURCE_OFFSETS - 1),
        destination_offset_bytes: destination,
        len_bytes: (mixed >> 61) + 1,
    }
}

/// The producer of a put, if its destination can be trusted.
#[inline]
pub fn producer(put: &Put) -> u64 {
    put.destination_offset_bytes >> PRODUCER_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_lie_inside_and_name_their_producer() {
        for producer in [0, 1, 255] {
            for n in [0, 1, 77, (1 << 31) - 1, 1 << 31, 1 << 39] {
                let it = put(producer, n);
                assert!((1..=MAX_LEN_BYTES).contains(&it.len_bytes));
                assert!(it.source_offset_bytes + it.len_bytes <= SOURCE_LEN_BYTES);
                assert!(it.destination_offset_bytes + it.len_bytes <= DESTINATION_LEN_BYTES);
                assert_eq!(super::producer(&it), producer);
            }
        }
    }
}
