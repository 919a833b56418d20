//! Bytes that are known from a number, so that both ends can make and check them without sending them.

use portway_fifo::Region;

/// Mixes 64 bits well; also the step of [`Random`].
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Numbers that a seed determines.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `limit`; 0 if that is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

/// Writes the pattern of `seed` from its byte `offset` on.
pub(super) fn fill(seed: u64, offset: u64, into: &mut [u8]) {
    let mut at = offset;
    let mut rest = into;
    while !rest.is_empty() {
        let word = mix(seed ^ (at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes();
        let begin = (at % 8) as usize;
        let count = (8 - begin).min(rest.len());
        let (now, later) = rest.split_at_mut(count);
        now.copy_from_slice(&word[begin..begin + count]);
        rest = later;
        at += count as u64;
    }
}

/// A range of a memory that holds a part of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where it begins in the memory.
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    pub(super) seed: u64,
    /// Which byte of the pattern comes first.
    pub(super) pattern_offset_bytes: u64,
}

/// What a memory should have held, and did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Complaint {
    pub(super) expected: String,
    pub(super) seen: String,
}

/// How much is read at a time.
const CHUNK_BYTES: u64 = 1 << 20;

/// Looks for the first byte of `region` that is not as one piece says. Complaints count offsets from `origin`.
pub(super) fn check_piece(
    region: &Region,
    piece: &Piece,
    origin: u64,
) -> Result<Option<Complaint>, portway_fifo::Error> {
    let mut done = 0;
    while done < piece.len_bytes {
        let len_bytes = (piece.len_bytes - done).min(CHUNK_BYTES) as usize;
        let (mut expected, mut seen) = (vec![0; len_bytes], vec![0; len_bytes]);
        fill(piece.seed, piece.pattern_offset_bytes + done, &mut expected);
        region.read(piece.offset_bytes + done, &mut seen)?;
        if let Some(at) = (0..len_bytes).find(|&at| expected[at] != seen[at]) {
            let wrong = (at..len_bytes).filter(|&at| expected[at] != seen[at]).count();
            let from_origin = |offset: u64| offset as i64 - origin as i64;
            let offset = from_origin(piece.offset_bytes + done + at as u64);
            let from = from_origin(piece.offset_bytes);
            let to = from + piece.len_bytes as i64;
            return Ok(Some(Complaint {
                expected: format!("byte {:#04x} at offset {offset}, of the range {from}..{to}", expected[at]),
                seen: format!("{:#04x} ({wrong} wrong bytes in {len_bytes})", seen[at]),
            }));
        }
        done += len_bytes as u64;
    }
    Ok(None)
}

/// Looks for the first byte of `region` that is neither as the pieces say nor, outside them, as the pattern `base`.
pub(super) fn check_all(
    region: &Region,
    base: u64,
    pieces: &[Piece],
    origin: u64,
) -> Result<Option<Complaint>, portway_fifo::Error> {
    let mut pieces = pieces.to_vec();
    pieces.sort_by_key(|piece| piece.offset_bytes);
    let mut at = 0;
    // Before, between and behind the pieces: what was there before.
    let untouched = |from: u64, to: u64| Piece {
        offset_bytes: from,
        len_bytes: to.saturating_sub(from),
        seed: base,
        pattern_offset_bytes: from,
    };
    for piece in &pieces {
        let before = check_piece(region, &untouched(at, piece.offset_bytes), origin)?;
        if let Some(mut complaint) = before {
            complaint.expected += ", which nobody was to write";
            return Ok(Some(complaint));
        }
        if let Some(complaint) = check_piece(region, piece, origin)? {
            return Ok(Some(complaint));
        }
        at = piece.offset_bytes + piece.len_bytes;
    }
    let behind = check_piece(region, &untouched(at, region.len_bytes()), origin)?;
    Ok(behind.map(|mut complaint| {
        complaint.expected += ", which nobody was to write";
        complaint
    }))
}

#[cfg(test)]
mod tests {
    use portway_fifo::Heap;

    use super::*;

    #[test]
    fn a_pattern_is_the_same_from_any_offset() {
        let mut whole = [0; 64];
        fill(7, 0, &mut whole);
        for from in 0..40 {
            let mut part = [0; 17];
            fill(7, from, &mut part);
            assert_eq!(part, whole[from as usize..from as usize + 17]);
        }
        let mut other = [0; 64];
        fill(8, 0, &mut other);
        assert_ne!(whole, other);
    }

    #[test]
    fn one_wrong_byte_is_found() {
        let region = Heap.allocate(300).unwrap();
        let mut bytes = [0; 300];
        fill(1, 0, &mut bytes);
        fill(2, 5, &mut bytes[100..150]);
        region.write(0, &bytes).unwrap();
        let piece = Piece { offset_bytes: 100, len_bytes: 50, seed: 2, pattern_offset_bytes: 5 };
        assert_eq!(check_all(&region, 1, &[piece], 7).unwrap(), None);
        for at in [0u64, 99, 100, 149, 150, 299] {
            region.write(at, &[!bytes[at as usize]]).unwrap();
            let complaint = check_all(&region, 1, &[piece], 7).unwrap().unwrap();
            assert!(complaint.expected.contains(&format!("at offset {},", at as i64 - 7)), "{complaint:?}");
            region.write(at, &[bytes[at as usize]]).unwrap();
        }
    }
}
