//! Cutting a put into requests: none crosses a span of either memory, none is longer than the longest message.

use crate::message::Span;

/// One request's worth of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) source_address: u64,
    pub(crate) local_key: u32,
    pub(crate) destination_address: u64,
    pub(crate) remote_key: u32,
    pub(crate) len_bytes: u32,
}

/// The span that holds an offset. The offset lies in the memory.
fn find(spans: &[Span], offset_bytes: u64) -> &Span {
    &spans[spans.partition_point(|span| span.offset_bytes <= offset_bytes) - 1]
}

/// The first piece of a put of `len_bytes` bytes from `source_offset_bytes` to `destination_offset_bytes`. Both ranges
/// lie in their memories.
pub(crate) fn first_piece(
    source: &[Span],
    destination: &[Span],
    source_offset_bytes: u64,
    destination_offset_bytes: u64,
    len_bytes: u64,
    longest_bytes: u32,
) -> Piece {
    let (from, to) = (find(source, source_offset_bytes), find(destination, destination_offset_bytes));
    let from_bytes = source_offset_bytes - from.offset_bytes;
    let to_bytes = destination_offset_bytes - to.offset_bytes;
    let len =
        len_bytes.min(from.len_bytes - from_bytes).min(to.len_bytes - to_bytes).min(longest_bytes.into());
    Piece {
        source_address: from.address + from_bytes,
        local_key: from.key,
        destination_address: to.address + to_bytes,
        remote_key: to.key,
        len_bytes: len as u32,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Spans of these lengths, each at an address and under a key of its own.
    fn spans(lens: &[u64], key: u32) -> Vec<Span> {
        let mut offset_bytes = 0;
        let at = |(index, &len_bytes): (usize, &u64)| {
            let span =
                Span { offset_bytes, len_bytes, address: (index as u64 + 1) << 32, key: key + index as u32 };
            offset_bytes += len_bytes;
            span
        };
        lens.iter().enumerate().map(at).collect()
    }

    fn cut(source: &[Span], destination: &[Span], from: u64, to: u64, len: u64, longest: u32) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let piece = first_piece(source, destination, from + done, to + done, len - done, longest);
            assert!(piece.len_bytes > 0, "no progress at {done} of {len}");
            done += u64::from(piece.len_bytes);
            pieces.push(piece);
        }
        pieces
    }

    #[test]
    fn cuts_at_spans_of_either_side_and_at_the_longest_message() {
        type Row = (&'static [u64], &'static [u64], u64, u64, u64, u32, &'static [u32]);
        const ROWS: &[Row] = &[
            (&[1 << 30], &[1 << 30], 5, 9, 4096, 1 << 30, &[4096]),
            (&[1 << 30], &[1 << 30], 0, 0, (8 << 20) + 1, 8 << 20, &[8 << 20, 1]),
            (&[1 << 30], &[1 << 30], 0, 0, 16 << 20, 8 << 20, &[8 << 20, 8 << 20]),
            (&[100, 100], &[200], 50, 0, 100, 4096, &[50, 50]),
            (&[200], &[100, 100], 0, 50, 100, 4096, &[50, 50]),
            (&[60, 60, 60], &[90, 90], 10, 0, 160, 40, &[40, 10, 40, 20, 40, 10]),
            (&[100, 100], &[100, 100], 100, 100, 100, 4096, &[100]),
            (&[100, 100], &[100, 100], 99, 0, 2, 4096, &[1, 1]),
        ];
        for (row, (source, destination, from, to, len, longest, expected)) in ROWS.iter().enumerate() {
            let pieces = cut(&spans(source, 10), &spans(destination, 20), *from, *to, *len, *longest);
            let lens: Vec<u32> = pieces.iter().map(|piece| piece.len_bytes).collect();
            assert_eq!(lens, *expected, "row {row}");
        }
    }

    proptest! {
        #[test]
        fn pieces_cover_the_put_once_and_in_order(
            source in proptest::collection::vec(1u64..50, 1..8),
            destination in proptest::collection::vec(1u64..50, 1..8),
            place in (any::<u64>(), any::<u64>(), any::<u64>()),
            longest in 1u32..64,
        ) {
            let (source, destination) = (spans(&source, 10), spans(&destination, 20));
            let total = |spans: &[Span]| spans.iter().map(|span| span.len_bytes).sum::<u64>();
            let (from, to) = (place.0 % total(&source), place.1 % total(&destination));
            let len = 1 + place.2 % (total(&source) - from).min(total(&destination) - to);
            let byte = |spans: &[Span], offset: u64| {
                let span = spans.iter().rfind(|span| span.offset_bytes <= offset).unwrap();
                (span.address + offset - span.offset_bytes, span.key)
            };
            let mut done = 0;
            for piece in cut(&source, &destination, from, to, len, longest) {
                prop_assert!(piece.len_bytes <= longest);
                for i in 0..u64::from(piece.len_bytes) {
                    prop_assert_eq!((piece.source_address + i, piece.local_key), byte(&source, from + done + i));
                    prop_assert_eq!((piece.destination_address + i, piece.remote_key), byte(&destination, to + done + i));
                }
                done += u64::from(piece.len_bytes);
            }
            prop_assert_eq!(done, len);
        }
    }
}
