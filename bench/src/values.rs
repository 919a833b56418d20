//! What values on the command line look like. The tests stand with [`Args`](crate::args::Args).

use std::time::Duration;

/// Percent, with fractions.
pub fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if (0.0..1000.0).contains(&percent) => Ok(percent),
        _ => Err("must be a number of percent from 0 to below 1000".into()),
    }
}

/// Seconds, with fractions.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "must be a number of seconds")?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(limit) if (Duration::from_micros(100)..=Duration::from_secs(3600)).contains(&limit) => Ok(limit),
        _ => Err("must be 0.0001 to 3600 seconds".into()),
    }
}

/// Puts are filled and checked by words.
const WORD_BYTES: u64 = 8;

/// The size of a put, with a binary suffix or without.
pub fn put_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    match digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift)) {
        Some(bytes) if bytes % WORD_BYTES == 0 && (WORD_BYTES..=1 << 28).contains(&bytes) => Ok(bytes),
        _ => Err("must be a multiple of 8 from 8 to 256M".into()),
    }
}

/// Loads of a sweep at most.
const MOST_LOADS: u64 = 1_000;

/// One rate, or from, to and step: millions with fractions, as thousands.
pub fn rates(text: &str) -> Result<(u64, u64, u64), String> {
    let refuse = || String::from("must be MOPS or LO:HI:STEP, from 0.001 to 1000");
    let kops = |text: &str| match text.parse::<f64>() {
        Ok(mops) if (0.001..=1000.0).contains(&mops) => Ok((mops * 1000.0).round() as u64),
        _ => Err(refuse()),
    };
    match text.split(':').map(kops).collect::<Result<Vec<_>, _>>()?[..] {
        [one] => Ok((one, one, 1)),
        [low, high, step] if low <= high && (high - low) / step >= MOST_LOADS => {
            Err(format!("has more than {MOST_LOADS} loads"))
        }
        [low, high, step] if low <= high => Ok((low, high, step)),
        _ => Err(refuse()),
    }
}

/// The slots of a ring.
pub fn ring_size(text: &str) -> Result<u64, String> {
    let range = portway_fifo::MIN_SLOTS..=portway_fifo::MAX_SLOTS;
    match text.parse::<u64>() {
        Ok(slots) if slots.is_power_of_two() && range.contains(&slots) => Ok(slots),
        _ => Err(format!("must be a power of two from {} to {}", range.start(), range.end())),
    }
}
