//! Models of the protocol, for [loom](https://docs.rs/loom): every interleaving of a few threads, and every value that
//! the orderings let a load return.
//!
//! Each model is headed by the sentence that it checks. `ci/loom.sh` runs them, and then weakens the orderings in
//! `sync.rs` one after the other: some model must notice each. The ring has two slots. A wait whose timeout is not
//! zero has no clock here, so a model in which it does not end exceeds loom's number of steps and fails.

use core::time::Duration;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread::{self, JoinHandle};

use crate::layout::{device, host, watch};
use crate::memory::Words;
use crate::sync::Ordering;
use crate::trigger::PARITY;
use crate::{Cause, Consumer, Error, Fifo, Position, Producer, Trigger};

/// A wait that ends only by what other threads do.
const PATIENT: Duration = Duration::from_secs(1);

/// Runs a model. Two forced switches an execution unless `LOOM_MAX_PREEMPTIONS` says otherwise.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut explorer = loom::model::Builder::new();
    explorer.preemption_bound = explorer.preemption_bound.or(Some(2));
    explorer.check(model);
}

/// What the threads of a model share.
struct Model {
    fifo: Fifo,
    producer: Producer,
    device: Words,
    outside: Arc<Outside>,
}

impl Model {
    fn new(start: Position) -> (Model, Consumer) {
        let (fifo, consumer, device) = Fifo::model(PATIENT, start);
        let producer = Producer::new(fifo.shared.clone(), device.clone()).unwrap();
        let outside = Arc::new(Outside(core::array::from_fn(|_| UnsafeCell::new(0))));
        (Model { fifo, producer, device, outside }, consumer)
    }

    /// A model whose ring is full of the triggers 0 and 1, from position 0 on.
    fn full() -> (Model, Consumer) {
        let (model, consumer) = Model::new(Position(0));
        model.producer.push_batch(&[trigger(0), trigger(1)]).unwrap();
        (model, consumer)
    }

    /// A thread with a producer, and with the memory outside the ring.
    fn spawn<T: 'static>(&self, body: impl FnOnce(Producer, &Outside) -> T + 'static) -> JoinHandle<T> {
        let (producer, outside) = (self.producer.clone(), self.outside.clone());
        thread::spawn(move || body(producer, &outside))
    }

    /// The gate and the host's record of a break.
    fn records(&self) -> (u64, u64) {
        let gate = self.device[device::WATCH + watch::GATE].load(Ordering::Relaxed);
        (gate, self.fifo.shared.host[host::BROKEN].load(Ordering::Relaxed))
    }
}

/// Memory that is not part of the ring: what a put would move. loom fails a model in which an access is not ordered
/// after the write that it races with.
struct Outside([UnsafeCell<u64>; 4]);

// SAFETY: loom runs one thread at a time, and reports the accesses that would race.
unsafe impl Sync for Outside {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Outside {}

impl Outside {
    fn write(&self, index: u64, value: u64) {
        // SAFETY: loom hands out a pointer to a live cell and runs one thread at a time.
        self.0[index as usize].with_mut(|cell| unsafe { *cell = value });
    }

    fn read(&self, index: u64) -> u64 {
        // SAFETY: loom hands out a pointer to a live cell and runs one thread at a time.
        self.0[index as usize].with(|cell| unsafe { *cell })
    }
}

/// A trigger whose two words belong together.
fn trigger(n: u64) -> Trigger {
    Trigger::new([n, !n & !PARITY]).unwrap()
}

/// The n of [`trigger`]; a trigger that is not whole ends the model.
fn number(whole: Trigger) -> u64 {
    let n = whole.words()[0];
    assert_eq!(whole, trigger(n), "a torn trigger");
    n
}

/// Takes `n` triggers, publishing after each.
fn take(consumer: &mut Consumer, n: usize, mut each: impl FnMut(Position, Trigger)) {
    for _ in 0..n {
        while consumer.drain(1, &mut each) == 0 {
            thread::yield_now();
        }
    }
}

/// "What the caller did before a push is visible to whoever handles the trigger."
#[test]
fn a_trigger_carries_what_its_producer_did() {
    explore(|| {
        let (model, mut consumer) = Model::new(Position(0));
        let producers = [0, 1].map(|n| {
            model.spawn(move |producer, outside| {
                outside.write(n, n + 10);
                producer.push(trigger(n)).unwrap()
            })
        });
        let mut pushed_at = [None; 2];
        take(&mut consumer, 2, |position, trigger| {
            let n = number(trigger);
            assert_eq!(model.outside.read(n), n + 10);
            pushed_at[n as usize] = Some(position);
        });
        assert_eq!(producers.map(|thread| Some(thread.join().unwrap())), pushed_at);
        assert!(consumer.peek().is_none());
    });
}

/// "Positions wrap around at 2^64", and "the parity is that of the lap, so a slot is never cleared".
#[test]
fn triggers_arrive_once_and_in_order_across_the_wrap() {
    explore(|| {
        let start = Position(u64::MAX);
        let (model, mut consumer) = Model::new(start);
        let thread = model.spawn(|producer, outside| {
            for n in 0..4 {
                outside.write(n, n + 10);
                producer.push(trigger(n)).unwrap();
            }
        });
        let mut next = 0;
        take(&mut consumer, 4, |position, trigger| {
            assert_eq!((position, number(trigger)), (start.plus(next), next));
            assert_eq!(model.outside.read(next), next + 10);
            next += 1;
        });
        thread.join().unwrap();
        assert!(consumer.peek().is_none());
        assert_eq!(model.records(), (0, 0));
    });
}

/// "One thread, n ≤ N triggers, one fetch-add": batches of two producers do not mix.
#[test]
fn a_batch_stands_at_consecutive_positions() {
    explore(|| {
        let (model, mut consumer) = Model::new(Position(u64::MAX - 1));
        let producers = [0, 2]
            .map(|n| model.spawn(move |producer, _| producer.push_batch(&[trigger(n), trigger(n + 1)])));
        let mut taken = Vec::new();
        take(&mut consumer, 4, |_, trigger| taken.push(number(trigger)));
        assert!(taken == [0, 1, 2, 3] || taken == [2, 3, 0, 1], "{taken:?}");
        for thread in producers {
            thread.join().unwrap().unwrap();
        }
    });
}

/// "The two words of a slot may become visible in either order; a torn slot is seen as incomplete."
#[test]
fn a_torn_slot_is_not_taken() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        take(&mut consumer, 2, |_, _| ());
        let shared = model.fifo.shared.clone();
        let thread = model.spawn(move |_, outside| {
            outside.write(2, 12);
            let words = trigger(2).stamped(shared.ring.parity(Position(2)));
            // As a device may store it: each word with release, the second first.
            shared.host[host::SLOTS + 1].store(words[1], Ordering::Release);
            shared.host[host::SLOTS].store(words[0], Ordering::Release);
        });
        take(&mut consumer, 1, |_, trigger| {
            assert_eq!(number(trigger), 2);
            assert_eq!(model.outside.read(2), 12);
        });
        thread.join().unwrap();
    });
}

/// "The consumer's tail is never ahead of what it did": room for position p comes with what the consumer did with the
/// trigger in its slot, for the elected reader and, by release and acquire of its copy, for the other waiter.
#[test]
fn room_comes_with_what_the_consumer_did() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        let producers = [2, 3].map(|n| {
            model.spawn(move |producer, outside| {
                let position = producer.push(trigger(n)).unwrap();
                for before in 0..=position.0 - 2 {
                    assert_eq!(outside.read(before), before + 10);
                }
            })
        });
        take(&mut consumer, 2, |position, _| model.outside.write(position.0, position.0 + 10));
        for thread in producers {
            thread.join().unwrap();
        }
        let mut rest = Vec::new();
        take(&mut consumer, 2, |_, trigger| rest.push(number(trigger)));
        rest.sort_unstable();
        assert_eq!(rest, [2, 3]);
        assert_eq!(model.records(), (0, 0));
    });
}

/// "`sync` waits until the consumer has handed on the trigger; what it did with it is then visible", and "the copy of
/// the tail never goes back".
#[test]
fn sync_sees_what_the_consumer_did() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        let waiters = [0, 1].map(|n| {
            model.spawn(move |producer, outside| {
                producer.sync(Position(n)).unwrap();
                assert_eq!(outside.read(n), n + 10);
            })
        });
        take(&mut consumer, 2, |position, _| model.outside.write(position.0, position.0 + 10));
        for thread in waiters {
            thread.join().unwrap();
        }
        // One waiter was told of 2, by this copy.
        assert_eq!(model.device[device::WATCH + watch::SEEN].load(Ordering::Relaxed), 2);
    });
}

/// "Waiters take the later of the reader's copy and the flusher's", and the flusher hands on what it acquired.
#[test]
fn sync_sees_it_through_the_flushed_replica_too() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        let (fifo, words) = (model.fifo.clone(), model.device.clone());
        let flusher = thread::spawn(move || words[device::FLUSHED].store(fifo.tail().0, Ordering::Release));
        let waiter = model.spawn(|producer, outside| {
            producer.sync(Position(0)).unwrap();
            assert_eq!(outside.read(0), 10);
        });
        take(&mut consumer, 1, |position, _| model.outside.write(position.0, position.0 + 10));
        flusher.join().unwrap();
        waiter.join().unwrap();
    });
}

/// "The word wins over the stop word: a target that was reached is reported as reached."
#[test]
fn what_was_reached_before_an_abort_is_reported_as_reached() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        let waiters = [0, 1].map(|n| model.spawn(move |producer, _| producer.sync(Position(n))));
        take(&mut consumer, 1, |_, _| ());
        model.fifo.abort();
        let [reached, other] = waiters.map(|thread| thread.join().unwrap());
        assert_eq!((reached, other), (Ok(()), Err(Error::Aborted)));
    });
}

/// "A push that returns without publishing breaks its FIFO: cause and position are recorded, every later call returns
/// them." The first record stays, and the gate and the host's word are the same.
#[test]
fn an_abort_ends_every_push_that_waits() {
    explore(|| {
        let (model, consumer) = Model::full();
        let producers = [2, 3].map(|n| model.spawn(move |producer, _| producer.push(trigger(n))));
        model.fifo.abort();
        let [one, other] = producers.map(|thread| thread.join().unwrap().unwrap_err());
        let broken = consumer.closed().unwrap();
        let at = |n| Error::Broken { cause: Cause::Abort, position: Position(n) };
        // A push that found the gate closed took no position.
        let head = model.device[device::HEAD].load(Ordering::Relaxed);
        assert!(broken == at(2) || (broken == at(3) && head == 4), "{broken:?}, head {head}");
        for error in [&one, &other] {
            assert!(
                *error == broken || (*error == Error::Aborted && head == 3),
                "{error:?}, {broken:?}, head {head}"
            );
        }
        let (gate, record) = model.records();
        assert_eq!(gate, record);
        assert_eq!(model.producer.push(trigger(4)), Err(broken.clone()));
        assert_eq!(model.producer.sync(Position(1)), Err(broken));
    });
}

/// "Every wait ends by success, by an abort or by a break", also while the consumer makes room: a push that succeeded
/// stands in its slot, and one that did not is the one on record.
#[test]
fn an_abort_races_with_room() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        let producers = [2, 3].map(|n| model.spawn(move |producer, _| producer.push(trigger(n))));
        model.fifo.abort();
        take(&mut consumer, 2, |_, _| ());
        let results = producers.map(|thread| thread.join().unwrap());
        check_ends(&model, consumer, results, Cause::Abort);
    });
}

/// "On timeout the call returns a status", and the clock does not win over the word either: an error never says that
/// the tail stands where the push waited for it to be. The push that is patient ends as well.
#[test]
fn a_timeout_races_with_publish() {
    explore(|| {
        let (model, mut consumer) = Model::full();
        let hasty = model.spawn(|producer, _| {
            let result = producer.with_timeout(Duration::ZERO).unwrap().push(trigger(2));
            if let Err(Error::Timeout { expected, seen, .. }) = result {
                assert!(!Position(seen).reached(Position(expected)), "{result:?}");
            }
            result
        });
        let patient = model.spawn(|producer, _| producer.push(trigger(3)));
        take(&mut consumer, 2, |_, _| ());
        let results = [hasty, patient].map(|thread| thread.join().unwrap());
        check_ends(&model, consumer, results, Cause::Timeout);
    });
}

/// How two pushes, of the triggers 2 and 3 at the positions 2 and 3, may have ended after the ring was drained.
fn check_ends(
    model: &Model,
    mut consumer: Consumer,
    results: [Result<Position, Error>; 2],
    expected_cause: Cause,
) {
    let (gate, record) = model.records();
    let closed = consumer.closed();
    let mut standing = Vec::new();
    consumer.drain(2, |position, trigger| standing.push((position, number(trigger))));
    if let Some(Error::Broken { cause, position }) = closed {
        assert_eq!(gate, record);
        assert_eq!(cause, expected_cause);
        assert!(!standing.iter().any(|(at, _)| *at == position), "delivered at the break");
        assert!(results.iter().any(|result| result.is_err()));
    } else {
        assert_eq!(record, 0);
    }
    // Before a gap nothing is lost; what stands behind one is not delivered.
    let gap = matches!(closed, Some(Error::Broken { position: Position(2), .. }));
    for (n, result) in [2, 3].into_iter().zip(results) {
        match result {
            Ok(position) => assert!(gap || standing.contains(&(position, n)), "{standing:?}, {closed:?}"),
            Err(Error::Timeout { .. }) => assert_eq!(expected_cause, Cause::Timeout),
            Err(Error::Aborted) => assert_eq!(expected_cause, Cause::Abort),
            Err(error) => assert_eq!(Some(error), closed),
        }
    }
}

/// "Triggers from before an abort may still be there: whoever asks first and then drains misses none that the thread
/// which aborted had pushed before."
#[test]
fn an_abort_comes_after_the_triggers_before_it() {
    explore(|| {
        let (model, mut consumer) = Model::new(Position(0));
        let thread = model.spawn(|producer, _| {
            producer.push(trigger(0)).unwrap();
            producer.abort();
        });
        while consumer.closed().is_none() {
            thread::yield_now();
        }
        assert_eq!(consumer.drain(2, |_, trigger| assert_eq!(number(trigger), 0)), 1);
        assert_eq!(consumer.closed(), Some(Error::Aborted));
        thread.join().unwrap();
    });
}

/// The same of a break.
#[test]
fn a_break_comes_after_the_triggers_before_it() {
    explore(|| {
        let (model, mut consumer) = Model::new(Position(0));
        let thread = model.spawn(|producer, _| {
            producer.push_batch(&[trigger(0), trigger(1)]).unwrap();
            producer.with_timeout(Duration::ZERO).unwrap().push(trigger(2)).unwrap_err()
        });
        let broken = loop {
            match consumer.closed() {
                Some(error) => break error,
                None => thread::yield_now(),
            }
        };
        assert_eq!(broken, Error::Broken { cause: Cause::Timeout, position: Position(2) });
        assert_eq!(consumer.drain(3, |position, trigger| assert_eq!(number(trigger), position.0)), 2);
        assert!(matches!(thread.join().unwrap(), Error::Timeout { expected: 1, seen: 0, .. }));
    });
}
