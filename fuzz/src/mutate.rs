//! [`Random`]: numbers from a seed, and inputs changed by them.

/// xorshift64*, so that a seed means the same on every machine.
pub struct Random(u64);

/// The longest input.
const MAX_BYTES: usize = 4096;

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 16) as usize % limit
    }

    /// One of the inputs with a few changes; at times nothing but random bytes.
    pub fn changed(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        if self.below(50) == 0 {
            return (0..self.below(256)).map(|_| self.next() as u8).collect();
        }
        let mut bytes = corpus[self.below(corpus.len())].clone();
        for _ in 0..1 + self.below(4) {
            self.change(&mut bytes, corpus);
        }
        bytes.truncate(MAX_BYTES);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, corpus: &[Vec<u8>]) {
        let len = bytes.len();
        if len == 0 {
            bytes.push(self.next() as u8);
            return;
        }
        let at = self.below(len);
        match self.below(8) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes[at] = self.next() as u8,
            2 => {
                // A number at one of its limits, 1 to 8 bytes long.
                let limits = [0, 1, u64::MAX, u64::MAX - 1, u64::MAX >> 1, 1 << 63, len as u64, 1 << 16];
                let number = limits[self.below(limits.len())].wrapping_add(self.next() & 1).to_le_bytes();
                let width = 1 << self.below(4);
                bytes.iter_mut().skip(at).take(width).zip(number).for_each(|(byte, new)| *byte = new);
            }
            3 => bytes.truncate(at),
            4 => {
                let more = self.below(16);
                bytes.extend((0..more).map(|_| self.next() as u8));
            }
            5 => {
                let piece: Vec<u8> = bytes[at..].iter().take(1 + self.below(32)).copied().collect();
                let to = self.below(len);
                bytes.splice(to..to, piece);
            }
            6 => {
                let end = (at + 1 + self.below(16)).min(len);
                bytes.drain(at..end);
            }
            _ => {
                let other = &corpus[self.below(corpus.len())];
                let from = self.below(other.len().max(1)).min(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
}
