//! The bytes that travel. Every word of every message differs from the word that was there before it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Word `index` of message `number`. Whatever the index, two numbers give two words.
#[inline]
fn word(number: u64, index: u64) -> u64 {
    (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

/// Writes a message.
pub fn fill(words: &[AtomicU64], number: u64) {
    for (index, at) in (0..).zip(words) {
        at.store(word(number, index), Ordering::Relaxed);
    }
}

/// Whether every byte of a message is there.
pub fn is_whole(words: &[AtomicU64], number: u64) -> bool {
    (0..).zip(words).fold(0, |wrong, (index, at)| wrong | (at.load(Ordering::Relaxed) ^ word(number, index)))
        == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        let words: Vec<_> = (0..100).map(|_| AtomicU64::new(0)).collect();
        assert!(!is_whole(&words, 0));
        fill(&words, 5);
        assert!(is_whole(&words, 5) && !is_whole(&words, 4) && !is_whole(&words, 6));
        for byte in 0..800 {
            let flip = || words[byte / 8].fetch_xor(1 << (byte % 8 * 8), Ordering::Relaxed);
            flip();
            assert!(!is_whole(&words, 5), "byte {byte}");
            flip();
        }
        assert!(is_whole(&words, 5));
    }
}
