//! [`Plan`]: what an episode does, drawn from the seed and the episode's number alone.

use portway_proxy::loopback::Faults;

/// xorshift64*, so that a seed means the same on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64, episode: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ episode.wrapping_add(1) << 17 | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 16) % limit
    }
}

/// How an episode ends, for both of its proxies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Everything is done and drained: nothing may have failed.
    Drained,
    /// A FIFO is aborted on the way, reset, and used by a new channel.
    Aborted,
    /// The proxies are stopped at once on the way.
    Cancelled,
    /// A port is closed on the way.
    Closed,
    /// A port fails (loopback).
    Failed,
    /// An op is lost, and the engine's deadline finds it (loopback).
    Lost,
}

/// What the sender of a connection does, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// So many bytes from and to the call's own place.
    Put {
        len_bytes: u64,
        signal: bool,
    },
    Signal,
    Flush,
}

/// A connection: what its sender does.
#[derive(Clone, Debug)]
pub struct Dialogue {
    pub calls: Vec<Call>,
}

impl Dialogue {
    /// How many signals the receiver waits for.
    pub fn signals(&self) -> u64 {
        let is_signal = |call: &&Call| matches!(call, Call::Signal | Call::Put { signal: true, .. });
        self.calls.iter().filter(is_signal).count() as u64
    }
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub ending: Ending,
    pub slots: u64,
    pub dialogues: Vec<Dialogue>,
    pub faults: Faults,
    /// Whether ports are quiesced as soon as they are closed.
    pub quiesces_at_once: bool,
    /// How long the ending lets the dialogues go on.
    pub after_us: u64,
    /// Signal words lie in the memory of the GPU (IPC).
    pub words_on_device: bool,
}

/// The place of a call in the memories, in bytes.
pub const PLACE_BYTES: u64 = 512;
pub const MAX_CALLS: u64 = 200;

impl Plan {
    /// `loopback`: the transport can be told to fail and to lose.
    pub fn draw(seed: u64, episode: u64, loopback: bool) -> Plan {
        let random = &mut Random::new(seed, episode);
        let ending = match random.below(if loopback { 10 } else { 7 }) {
            0..=3 => Ending::Drained,
            4 => Ending::Aborted,
            5 => Ending::Cancelled,
            6 => Ending::Closed,
            7 | 8 => Ending::Failed,
            _ => Ending::Lost,
        };
        let dialogues = (0..1 + random.below(3))
            .map(|_| Dialogue {
                calls: (0..1 + random.below(MAX_CALLS))
                    .map(|_| match random.below(8) {
                        0 => Call::Signal,
                        1 => Call::Flush,
                        kind => Call::Put { len_bytes: 1 + random.below(PLACE_BYTES), signal: kind & 1 == 0 },
                    })
                    .collect(),
            })
            .collect();
        let faults = Faults {
            delay_polls: random.below(4) as u32,
            reorder_seed: (random.below(2) == 0).then(|| random.next()),
            refuse_every: [0, 2, 3, 7][random.below(4) as usize],
            fail_at: (ending == Ending::Failed).then(|| random.below(60)),
            lose_at: (ending == Ending::Lost).then(|| random.below(60)),
        };
        Plan {
            ending,
            slots: 64 << random.below(3),
            dialogues,
            faults,
            quiesces_at_once: loopback,
            after_us: random.below(3_000),
            words_on_device: random.below(2) == 0,
        }
    }
}
