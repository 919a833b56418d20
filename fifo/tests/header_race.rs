//! Payload outside the ring, in plain memory, of C++ producers and of Rust ones: whoever handles a trigger sees what
//! its producer wrote before, and a producer whose trigger was handed on may write again.
//!
//! `ci/tsan.sh` runs this under ThreadSanitizer, which sees whether it is so by order or by luck.

#![cfg(not(any(loom, miri)))]

mod device;

use std::time::Duration;

use device::Deadline;
use portway_fifo::{Config, Consumer, Fifo, FifoHandle, Heap, Position, Trigger};

const WORDS: usize = 8;
const BLOCKS: u64 = 4;
const PRODUCERS: u64 = 6;
const TRIGGERS: u64 = 2_000;
const LIMIT: Duration = Duration::from_secs(100);

type Block = [u64; WORDS];

/// `payload::mix` of `payload.h`, by which producers fill their blocks.
fn word(producer: u64, n: u64, index: u64) -> u64 {
    device::ledger::mix(producer << 48 ^ n << 8 ^ index)
}

fn open() -> (Fifo, Consumer) {
    let config = Config {
        slots: 64,
        timeout: Duration::from_secs(90),
        first_position: Position(0),
        ..Config::default()
    };
    Fifo::new(&Heap, config).unwrap()
}

/// Reads the block behind every trigger, with plain loads, until all have come. The producers live that long: they
/// are joined later.
fn drain(consumer: &mut Consumer, total: u64) {
    let deadline = Deadline::new(LIMIT, "triggers whose payload lies outside the ring");
    let mut seen = 0;
    while seen < total {
        let taken = consumer.drain(16, |position, trigger| {
            let [address, name] = trigger.words();
            let (producer, n) = (name >> 48, name & ((1 << 48) - 1));
            for index in 0..WORDS {
                let place = (address as *const u64).wrapping_add(index);
                // SAFETY: the trigger carries the address of its producer's block, which lives until the producers
                // are joined. That nobody writes it meanwhile is what this test is about.
                let value = unsafe { *place };
                assert_eq!(
                    value,
                    word(producer, n, index as u64),
                    "{n} of producer {producer} at {position}"
                );
            }
        });
        seen += taken as u64;
        if taken == 0 {
            let closed = consumer.closed();
            deadline.passed(|| format!("expected {total}, saw {seen}, {closed:?}")).unwrap();
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

#[test]
fn the_header_orders_payload_outside_the_ring() {
    type Start = unsafe extern "C" fn(*const FifoHandle, u64, u64, u64) -> *mut u8;
    type Join = unsafe extern "C" fn(*mut u8) -> u64;
    let Some(library) = device::build("race") else { return };
    // SAFETY: `race.cpp` defines it with this signature.
    let start = unsafe { library.get::<Start>(b"portway_race_start\0") }.unwrap();
    // SAFETY: as above.
    let join = unsafe { library.get::<Join>(b"portway_race_join\0") }.unwrap();
    for form in 0..2 {
        let (fifo, mut consumer) = open();
        // SAFETY: the FIFO lives until the producers have been joined, below, whatever `drain` does.
        let crew = unsafe { start(&fifo.handle(), form, PRODUCERS, TRIGGERS) };
        let drained = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            drain(&mut consumer, PRODUCERS * TRIGGERS);
        }));
        if drained.is_err() {
            fifo.abort();
        }
        // SAFETY: started above and joined once.
        let fault = unsafe { join(crew) };
        if let Err(panic) = drained {
            std::panic::resume_unwind(panic);
        }
        assert_eq!(fault, 0, "a call of form {form} ended with this status");
    }
}

/// A producer's blocks, written with plain stores and shared by address.
struct Blocks(*mut Block);

// SAFETY: the pointer is to leaked memory; who writes when is what the test is about.
unsafe impl Send for Blocks {}

#[test]
fn the_rust_producer_orders_payload_outside_the_ring() {
    let (fifo, mut consumer) = open();
    let threads: Vec<_> = (0..PRODUCERS)
        .map(|id| {
            let producer = fifo.producer().unwrap();
            let blocks = Blocks(Box::leak(Box::new([[0; WORDS]; BLOCKS as usize])).as_mut_ptr());
            std::thread::spawn(move || {
                let blocks = blocks;
                let mut positions = [Position(0); BLOCKS as usize];
                for n in 0..TRIGGERS {
                    let index = (n % BLOCKS) as usize;
                    if n >= BLOCKS {
                        producer.sync(positions[index]).unwrap();
                    }
                    let block = blocks.0.wrapping_add(index);
                    for at in 0..WORDS {
                        let place = block.cast::<u64>().wrapping_add(at);
                        // SAFETY: inside the leaked blocks of this thread.
                        unsafe { *place = word(id, n, at as u64) };
                    }
                    positions[index] =
                        producer.push(Trigger::new([block as u64, id << 48 | n]).unwrap()).unwrap();
                }
            })
        })
        .collect();
    drain(&mut consumer, PRODUCERS * TRIGGERS);
    for thread in threads {
        thread.join().unwrap();
    }
}
