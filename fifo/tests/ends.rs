//! Every wait ends, and says how. Real threads and a real clock; `model.rs` has the interleavings.

use std::thread;
use std::time::{Duration, Instant};

use portway_fifo::{Cause, Config, Consumer, Error, Fifo, Heap, Position, Region, Trigger};

const SLOTS: u64 = 64;
const SOON: Duration = Duration::from_millis(30);
const LATE: Duration = Duration::from_secs(20);

/// A full ring, and the memory that the producers' words lie in.
fn full(timeout: Duration) -> (Fifo, Consumer, Region) {
    let host = Heap.allocate(Fifo::host_len_bytes(SLOTS)).unwrap();
    let device = Heap.allocate(Fifo::DEVICE_LEN_BYTES).unwrap();
    let config = Config { slots: SLOTS, timeout, ..Config::default() };
    let (fifo, consumer) = Fifo::in_memory(host, device.clone(), config).unwrap();
    fifo.producer().unwrap().push_batch(&vec![trigger(); SLOTS as usize]).unwrap();
    (fifo, consumer, device)
}

fn trigger() -> Trigger {
    Trigger::new([1, 2]).unwrap()
}

fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (call(), start.elapsed())
}

#[test]
fn a_push_and_a_sync_time_out() {
    let (fifo, consumer, _) = full(SOON);
    let producer = fifo.producer().unwrap();
    let timeout = |what, expected| Error::Timeout { what, expected, seen: 0, after: SOON };

    let (synced, took) = timed(|| producer.sync(Position(0)));
    assert_eq!(synced, Err(timeout("the tail", 1)));
    assert!((SOON..LATE).contains(&took), "{took:?}");
    assert_eq!(consumer.closed(), None, "a sync breaks nothing");

    let (pushed, took) = timed(|| producer.push(trigger()));
    assert_eq!(pushed, Err(timeout("room in the ring", 1)));
    assert!((SOON..LATE).contains(&took), "{took:?}");
    let broken = Error::Broken { cause: Cause::Timeout, position: Position(SLOTS) };
    assert_eq!(consumer.closed(), Some(broken.clone()));

    let (pushed, took) = timed(|| producer.with_timeout(LATE).unwrap().push(trigger()));
    assert_eq!(pushed, Err(broken));
    assert!(took < LATE, "a broken FIFO is not waited for: {took:?}");
}

#[test]
fn an_abort_ends_all_that_wait() {
    let (fifo, consumer, device) = full(LATE);
    let producer = fifo.producer().unwrap();
    let waiting = || {
        let mut head = [0; 8];
        device.read(fifo.handle().head - device.address(), &mut head).unwrap();
        u64::from_ne_bytes(head) - SLOTS
    };
    thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| timed(|| producer.push(trigger()))));
        let start = Instant::now();
        while waiting() < 4 {
            assert!(start.elapsed() < LATE, "{} of 4 pushes have taken a position in {LATE:?}", waiting());
            thread::yield_now();
        }
        fifo.abort();
        // All of them first: the one whose record stays may be the last to return.
        for (pushed, took) in threads.map(|thread| thread.join().unwrap()) {
            assert_eq!(pushed.err(), consumer.closed());
            assert!(took < LATE, "{took:?}");
        }
    });
    assert!(matches!(consumer.closed(), Some(Error::Broken { cause: Cause::Abort, .. })));
}

/// A kernel that is killed while it is the elected reader leaves the election taken. Nobody refreshes the copy then;
/// a wait takes its whole time, and still reports what the word says.
#[test]
fn a_dead_reader_costs_time_and_nothing_else() {
    let (fifo, mut consumer, device) = full(SOON);
    let producer = fifo.producer().unwrap();
    device.write(fifo.handle().tail.reader - device.address(), &1u64.to_ne_bytes()).unwrap();
    consumer.drain(1, |_, _| ());
    assert_eq!(producer.sync(Position(0)), Ok(()));
    assert_eq!(producer.push(trigger()), Ok(Position(SLOTS)));
    assert!(matches!(producer.sync(Position(1)), Err(Error::Timeout { expected: 2, seen: 1, .. })));

    consumer.reset().unwrap();
    producer.with_timeout(LATE).unwrap().push_batch(&vec![trigger(); SLOTS as usize]).unwrap();
    consumer.drain(1, |_, _| ());
    let (synced, took) = timed(|| producer.with_timeout(LATE).unwrap().sync(Position(SLOTS + 1)));
    assert_eq!(synced, Ok(()));
    assert!(took < LATE, "a reset opens the election: {took:?}");
}
