//! The consumer's book: every trigger exactly once, in the order of its producer, to the last bit.

use portway_fifo::{Position, Trigger};

const BITS: u64 = u64::MAX >> 1;

pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 29)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let x = (x ^ (x >> 32)).wrapping_mul(0xa3b1_9535_4a39_b70d);
    x ^ (x >> 30)
}

/// The payload of a producer's trigger number `n`; the same as `payload::encode` in `payload.h`.
pub fn encode(salt: u64, producer: u64, n: u64) -> [u64; 2] {
    let first = (producer ^ mix(n ^ salt)) & BITS;
    let second = (n ^ mix(first.wrapping_add(salt))) & BITS;
    [(first ^ mix(second)) & BITS, second]
}

/// A producer's digest is the sum of these, so that the positions it was told can be compared with ours.
pub fn digest(position: u64, n: u64) -> u64 {
    mix(position.wrapping_add(mix(n)))
}

/// Who pushed this, and as its how manieth. One to one over all 126 bits.
fn decode(salt: u64, [first, second]: [u64; 2]) -> (u64, u64) {
    let first = (first ^ mix(second)) & BITS;
    let n = (second ^ mix(first.wrapping_add(salt))) & BITS;
    ((first ^ mix(n ^ salt)) & BITS, n)
}

/// What has arrived.
pub struct Ledger {
    salt: u64,
    next: Vec<u64>,
    digests: Vec<u64>,
    /// Of each word, the bits that were seen set and those that were seen clear.
    seen: [[u64; 2]; 2],
    pub total: u64,
}

impl Ledger {
    pub fn new(salt: u64, producers: u64) -> Self {
        let zeros = vec![0; producers as usize];
        Ledger { salt, next: zeros.clone(), digests: zeros, seen: [[0; 2]; 2], total: 0 }
    }

    /// Enters a trigger that stood at `position`.
    pub fn enter(&mut self, position: Position, trigger: Trigger) -> Result<(), String> {
        let words = trigger.words();
        let (producer, n) = decode(self.salt, words);
        let Some(next) = self.next.get_mut(producer as usize) else {
            return Err(format!("position {position}: {words:x?} is nobody's payload"));
        };
        if n != *next {
            return Err(format!("position {position}: number {n} of producer {producer}, expected {next}"));
        }
        *next += 1;
        self.total += 1;
        let digest = &mut self.digests[producer as usize];
        *digest = digest.wrapping_add(self::digest(position.0, n));
        for (word, [ones, zeros]) in words.into_iter().zip(&mut self.seen) {
            *ones |= word;
            *zeros |= !word & BITS;
        }
        Ok(())
    }

    /// Compares with what a producer says it pushed.
    pub fn agrees(&self, producer: usize, pushed: u64, digest: u64) -> Result<(), String> {
        let (taken, ours) = (self.next[producer], self.digests[producer]);
        if taken != pushed {
            return Err(format!("producer {producer} pushed {pushed} triggers, {taken} arrived"));
        }
        if ours != digest {
            return Err(format!("producer {producer} was told other positions than its triggers arrived at"));
        }
        Ok(())
    }

    /// The bits of the two words that did not take both values.
    pub fn constant_bits(&self) -> [u64; 2] {
        self.seen.map(|[ones, zeros]| BITS & !(ones & zeros))
    }
}
