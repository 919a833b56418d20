//! Work to count instructions of: `instructions PATH COUNT` takes COUNT triggers, in batches of 32. What it does
//! besides is the same for every COUNT, so the difference of two runs belongs to the triggers alone.
//! `ci/instructions.sh` runs it.

use std::process::ExitCode;

use portway_fifo::{Config, Fifo, Heap, MAX_SLOTS, Trigger};

/// Triggers that a path takes before it publishes the tail.
const BATCH: usize = 32;

/// Triggers that wait in the ring. No push runs beside the path, and no wait.
const PUSHED: u64 = 1 << 16;
const _: () = assert!(PUSHED <= MAX_SLOTS);

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let path = words.next();
    let count = words.next().and_then(|count| count.parse().ok()).filter(|count| *count <= PUSHED);
    let (Some(path), Some(count)) = (path, count) else { return usage() };
    let run = match path.as_str() {
        "push" => push,
        "fifo" => fifo,
        "dearer" => dearer,
        _ => return usage(),
    };
    match run(count) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("instructions: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: instructions push|fifo|dearer COUNT, with COUNT at most {PUSHED}");
    ExitCode::from(2)
}

/// Push by a software producer, which always finds room.
fn push(count: u64) -> Result<(), Box<dyn std::error::Error>> {
    let (fifo, _consumer) = Fifo::new(&Heap, Config { slots: PUSHED, ..Config::default() })?;
    let producer = fifo.producer()?;
    for n in 0..count {
        producer.push(Trigger::new([n, !n >> 1])?)?;
    }
    Ok(())
}

/// Pop and publish of the FIFO's consumer.
fn fifo(count: u64) -> Result<(), Box<dyn std::error::Error>> {
    take(count, |word| word)
}

/// The same with a little more work a trigger: the control, which has to be found.
fn dearer(count: u64) -> Result<(), Box<dyn std::error::Error>> {
    take(count, std::hint::black_box)
}

/// Takes `count` of as many triggers as the ring holds, and reads a word of each.
#[inline(always)]
fn take(count: u64, read: impl Fn(u64) -> u64) -> Result<(), Box<dyn std::error::Error>> {
    let (fifo, mut consumer) = Fifo::new(&Heap, Config { slots: PUSHED, ..Config::default() })?;
    let producer = fifo.producer()?;
    for n in 0..PUSHED {
        producer.push(Trigger::new([n, !n >> 1])?)?;
    }
    let (mut taken, mut sum) = (0, 0);
    while taken < count {
        let max = BATCH.min((count - taken) as usize);
        match consumer.drain(max, |_, trigger| sum += read(trigger.words()[0])) {
            0 => return Err(format!("{taken} of {PUSHED} triggers were there").into()),
            some => taken += some as u64,
        }
    }
    // What the triggers were for: without it their words need not be read.
    if sum != count * count.saturating_sub(1) / 2 {
        return Err(format!("{count} triggers came to {sum}").into());
    }
    Ok(())
}
