//! `portway-fifo` alone, with triggers and a consumer of our own: a kernel whose blocks report when they begin and end a
//! span, and a host thread that adds the spans up. Threads play the blocks; `../nvcc` and `../nvrtc` push from a GPU.

mod event;

use std::thread;
use std::time::{Duration, Instant};

use event::{Event, Kind};
use portway_fifo::{Config, Consumer, Fifo, Heap, Producer};

const BLOCKS: u32 = 4;
const SPANS: u64 = 5_000;
/// No wait here is longer.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Fifo(#[from] portway_fifo::Error),
    #[error("at position {position}: {source}")]
    NoEvent { position: u64, source: event::NoEvent },
    #[error("at position {position}: block {block} of {blocks} {what}")]
    Order { position: u64, block: u32, blocks: usize, what: &'static str },
    #[error("saw {seen} of {expected} spans within {after:?}")]
    Late { seen: u64, expected: u64, after: Duration },
}

/// What the host knows of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Block {
    began_ns: Option<u64>,
    spans: u64,
    total_ns: u64,
}

/// Our consumer: takes triggers itself, so that an event that makes no sense stays in the ring and nothing behind it is
/// taken, and publishes once for all that it took.
fn account(consumer: &mut Consumer, blocks: &mut [Block]) -> Result<u64, Error> {
    let mut ended = 0;
    while let Some(trigger) = consumer.peek() {
        let position = consumer.position().0;
        let event = Event::decode(trigger).map_err(|source| Error::NoEvent { position, source })?;
        let (block, len) = (event.block, blocks.len());
        let wrong = |what| Error::Order { position, block, blocks: len, what };
        let state = blocks.get_mut(block as usize).ok_or_else(|| wrong("does not exist"))?;
        match (event.kind, state.began_ns) {
            (Kind::Begin, None) => state.began_ns = Some(event.time_ns),
            (Kind::End, Some(began)) => {
                state.began_ns = None;
                state.spans += 1;
                state.total_ns +=
                    event.time_ns.checked_sub(began).ok_or_else(|| wrong("ended before it began"))?;
                ended += 1;
            }
            (Kind::Begin, Some(_)) => return Err(wrong("begins twice")),
            (Kind::End, None) => return Err(wrong("ends what it did not begin")),
        }
        consumer.advance();
    }
    consumer.publish();
    Ok(ended)
}

/// What a block of the kernel does.
fn block(producer: &Producer, block: u32) -> Result<(), portway_fifo::Error> {
    for span in 0..SPANS {
        let begin = Event { kind: Kind::Begin, block, time_ns: 1_000 * span };
        let end = Event { kind: Kind::End, block, time_ns: 1_000 * span + 1 + u64::from(block) };
        producer.push_batch(&[begin.encode()?, end.encode()?])?;
    }
    Ok(())
}

fn run() -> Result<[Block; BLOCKS as usize], Error> {
    let config = Config { slots: 256, timeout: LIMIT, ..Config::default() };
    let (fifo, mut consumer) = Fifo::new(&Heap, config)?;
    let producer = &fifo.producer()?;
    let mut blocks = [Block::default(); BLOCKS as usize];
    let (expected, started) = (u64::from(BLOCKS) * SPANS, Instant::now());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..BLOCKS).map(|n| scope.spawn(move || block(producer, n))).collect();
        let mut seen = 0;
        let mut accounted = Ok(());
        while accounted.is_ok() && seen < expected {
            accounted = account(&mut consumer, &mut blocks).map(|ended| seen += ended);
            if started.elapsed() > LIMIT {
                accounted = Err(Error::Late { seen, expected, after: LIMIT });
            }
        }
        if accounted.is_err() {
            fifo.abort(); // ends every wait of the blocks
        }
        let pushed = threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"));
        accounted.and(pushed.map_err(Error::from))
    })?;
    Ok(blocks)
}

fn main() -> Result<(), Error> {
    for (n, block) in run()?.iter().enumerate() {
        println!("block {n}: {} spans, {} ns", block.spans, block.total_ns);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use portway_fifo::Trigger;

    #[test]
    fn every_span_is_counted() {
        for (n, block) in run().unwrap().into_iter().enumerate() {
            assert_eq!(block, Block { began_ns: None, spans: SPANS, total_ns: SPANS * (n as u64 + 1) });
        }
    }

    /// What the consumer says to these words, and how many triggers it took before.
    fn refused(words: &[[u64; 2]]) -> (String, u64) {
        let (fifo, mut consumer) = Fifo::new(&Heap, Config { slots: 64, ..Config::default() }).unwrap();
        let producer = fifo.producer().unwrap();
        let first = consumer.position();
        for words in words {
            producer.push(Trigger::new(*words).unwrap()).unwrap();
        }
        let error = account(&mut consumer, &mut [Block::default(); 2]).unwrap_err();
        (error.to_string(), consumer.position().since(first))
    }

    #[test]
    fn what_is_no_event_is_named_and_not_taken() {
        let (begin, end) = (1 << 32, 2 << 32);
        for (words, taken, says) in [
            (vec![[begin, 5], [7 << 32, 9]], 1, "kind 7"),
            (vec![[1 << 40 | begin, 0]], 0, "must be 1 or 2"),
            (vec![[begin | 2, 0]], 0, "block 2 of 2 does not exist"),
            (vec![[begin, 0], [begin, 1]], 1, "begins twice"),
            (vec![[begin, 0], [end, 1], [end, 1]], 2, "did not begin"),
            (vec![[begin, 9], [end, 1]], 1, "before it began"),
        ] {
            let (text, took) = refused(&words);
            assert!(text.contains(says) && took == taken, "{words:x?}: “{text}” after {took}");
        }
    }
}
