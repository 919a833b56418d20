//! What holds for every input: the decoder against a reference, and the FIFO against a queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portway_fifo::{Cause, Config, Consumer, Error, Fifo, Heap, Position, Producer, Region, Trigger};
use proptest::prelude::*;

const PARITY: u64 = 1 << 63;

/// A FIFO, and the memory that its slots lie in.
fn fifo(slots: u64, first_position: Position, timeout: Duration) -> (Fifo, Consumer, Region) {
    let host = Heap.allocate(Fifo::host_len_bytes(slots)).unwrap();
    let device = Heap.allocate(Fifo::DEVICE_LEN_BYTES).unwrap();
    let config = Config { slots, timeout, first_position, ..Config::default() };
    let (fifo, consumer) = Fifo::in_memory(host.clone(), device, config).unwrap();
    (fifo, consumer, host)
}

/// Positions, the ones before a wrap more often than others.
fn positions() -> impl Strategy<Value = Position> {
    let before_a_wrap = (prop::sample::select(vec![7, 32, 61, 62, 63, 64]), 1..=200u64)
        .prop_map(|(bits, before)| ((1u128 << bits) as u64).wrapping_sub(before));
    prop_oneof![Just(0), before_a_wrap, any::<u64>()].prop_map(Position)
}

/// Both words without the ring's bits, or nothing if these are not those of the position's lap: odd laps clear them.
fn reference(slots: u64, position: Position, words: [u64; 2]) -> Option<[u64; 2]> {
    let set = (position.0 / slots) % 2 == 0;
    words.iter().all(|word| (*word >= PARITY) == set).then(|| words.map(|word| word % PARITY))
}

/// So many cases. A failure is printed whole, so nothing is kept of it.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_time: 60_000, ..ProptestConfig::default() }
}

/// Writes a slot by hand, as a device would, and checks what the consumer makes of it.
fn check_slot(slots: u64, position: Position, words: [u64; 2]) {
    let (fifo, consumer, host) = fifo(slots, position, Duration::ZERO);
    let slot = fifo.handle().slots - host.address() + position.0 % slots * 16;
    assert_eq!(consumer.peek(), None, "a ring is empty at first");
    host.write(slot, &words[0].to_ne_bytes()).unwrap();
    host.write(slot + 8, &words[1].to_ne_bytes()).unwrap();
    let expected = reference(slots, position, words);
    assert_eq!(consumer.peek().map(Trigger::words), expected, "{words:#x?} at {position}");
}

#[test]
fn every_single_bit_of_a_slot_is_decoded() {
    for bit in 0..128 {
        for position in [0, 63, 64, u64::MAX].map(Position) {
            for background in [0, u64::MAX, PARITY, !PARITY] {
                let mut words = [background; 2];
                words[bit / 64] ^= 1 << (bit % 64);
                check_slot(64, position, words);
            }
        }
    }
}

proptest! {
    #![proptest_config(cases(1024))]

    #[test]
    fn every_slot_is_decoded_like_the_reference(
        words: [u64; 2],
        position in positions(),
        shift in 6..12u32,
    ) {
        check_slot(1 << shift, position, words);
    }

    #[test]
    fn a_trigger_is_63_bits_a_word_or_an_error(words: [u64; 2]) {
        match Trigger::new(words) {
            Ok(trigger) => {
                prop_assert!(words[0] < PARITY && words[1] < PARITY);
                prop_assert_eq!(trigger.words(), words);
            }
            Err(error) => {
                prop_assert!(words[0] >= PARITY || words[1] >= PARITY);
                prop_assert_eq!(error, Error::Payload { words });
            }
        }
    }
}

/// One call on a FIFO.
#[derive(Clone, Debug)]
enum Call {
    Push([u64; 2]),
    PushBatch(usize),
    Drain(usize),
    Take,
    Publish,
    /// Of the position this far behind (or ahead of) the published one.
    Sync(i64),
    Abort,
    Reset,
}

fn calls() -> impl Strategy<Value = Call> {
    prop_oneof![
        6 => any::<[u64; 2]>().prop_map(|words| Call::Push(words.map(|word| word & !PARITY))),
        6 => (0..=70usize).prop_map(Call::PushBatch),
        6 => (0..=70usize).prop_map(Call::Drain),
        4 => Just(Call::Take),
        2 => Just(Call::Publish),
        4 => (-70..=70i64).prop_map(Call::Sync),
        1 => Just(Call::Abort),
        1 => Just(Call::Reset),
    ]
}

/// What the documentation says of a FIFO that one thread uses, with timeouts of zero.
struct Reference {
    slots: u64,
    head: Position,
    next: Position,
    published: Position,
    waiting: VecDeque<(Position, [u64; 2])>,
    aborted: bool,
    /// What producers have reported as the end.
    closed: Option<Error>,
}

impl Reference {
    fn new(slots: u64, start: Position) -> Self {
        let waiting = VecDeque::new();
        Reference { slots, head: start, next: start, published: start, waiting, aborted: false, closed: None }
    }

    /// Checks the result of a push, and takes it over where the documentation leaves a choice.
    fn pushed(&mut self, batch: &[[u64; 2]], result: Result<Position, Error>) {
        let len = batch.len() as u64;
        if len == 0 || len > self.slots {
            assert_eq!(result, Err(Error::BatchLength { len: batch.len(), slots: self.slots }));
            return;
        }
        if let Some(error) = &self.closed {
            assert_eq!(result.as_ref(), Err(error));
            return;
        }
        if self.aborted && result == Err(Error::Aborted) {
            self.closed = Some(Error::Aborted);
            return; // and took no position
        }
        let first = self.head;
        self.head = first.plus(len);
        if self.head.since(self.published) <= self.slots {
            assert_eq!(result, Ok(first));
            self.waiting.extend((0..).map(|n| first.plus(n)).zip(batch.iter().copied()));
            return;
        }
        let cause = if self.aborted { Cause::Abort } else { Cause::Timeout };
        let broken = Error::Broken { cause, position: first };
        let expected = match cause {
            Cause::Abort => broken.clone(),
            Cause::Timeout => Error::Timeout {
                what: "room in the ring",
                expected: self.head.0.wrapping_sub(self.slots),
                seen: self.published.0,
                after: Duration::ZERO,
            },
        };
        assert_eq!(result, Err(expected));
        self.closed = Some(broken);
    }

    fn synced(&mut self, position: Position, result: Result<(), Error>) {
        if self.published.reached(position.plus(1)) {
            assert_eq!(result, Ok(()));
            return;
        }
        if self.aborted && self.closed.is_none() {
            self.closed = Some(Error::Aborted);
        }
        let timeout = Error::Timeout {
            what: "the tail",
            expected: position.plus(1).0,
            seen: self.published.0,
            after: Duration::ZERO,
        };
        assert_eq!(result, Err(self.closed.clone().unwrap_or(timeout)));
    }

    fn taken(&mut self) -> Option<(Position, [u64; 2])> {
        let taken = self.waiting.pop_front()?;
        self.next = taken.0.plus(1);
        Some(taken)
    }

    fn reset(&mut self) {
        *self = Reference::new(self.slots, self.head);
    }

    fn check(&self, fifo: &Fifo, consumer: &Consumer) {
        assert_eq!(fifo.tail(), self.published);
        assert_eq!(consumer.position(), self.next);
        assert_eq!(consumer.peek().map(Trigger::words), self.waiting.front().map(|(_, words)| *words));
        let broken = self.closed.clone().filter(|error| *error != Error::Aborted);
        assert_eq!(consumer.closed(), broken.or(self.aborted.then_some(Error::Aborted)));
    }
}

fn run(call: Call, fifo: &Fifo, producer: &Producer, consumer: &mut Consumer, reference: &mut Reference) {
    match call {
        Call::Push(words) => reference.pushed(&[words], producer.push(Trigger::new(words).unwrap())),
        Call::PushBatch(len) => {
            let batch: Vec<_> = (0..len as u64).map(|n| [n, reference.head.plus(n).0 & !PARITY]).collect();
            let triggers: Vec<_> = batch.iter().map(|words| Trigger::new(*words).unwrap()).collect();
            reference.pushed(&batch, producer.push_batch(&triggers));
        }
        Call::Drain(max) => {
            let expected: Vec<_> = (0..max).map_while(|_| reference.taken()).collect();
            let mut taken = Vec::new();
            let count = consumer.drain(max, |position, trigger| taken.push((position, trigger.words())));
            assert_eq!((count, &taken), (expected.len(), &expected));
            reference.published = reference.next;
        }
        Call::Take => {
            if reference.taken().is_some() {
                consumer.advance();
            }
        }
        Call::Publish => {
            assert_eq!(consumer.publish(), reference.published != reference.next);
            reference.published = reference.next;
        }
        Call::Sync(ahead) => {
            let position = reference.published.plus(ahead as u64);
            reference.synced(position, producer.sync(position));
        }
        Call::Abort => {
            fifo.abort();
            reference.aborted = true;
        }
        Call::Reset => {
            consumer.reset().unwrap();
            reference.reset();
        }
    }
    reference.check(fifo, consumer);
}

proptest! {
    #![proptest_config(cases(1024))]

    #[test]
    fn calls_in_any_order_do_what_a_queue_does(
        start in positions(),
        shift in 6..8u32,
        calls in prop::collection::vec(calls(), 0..80),
    ) {
        let (fifo, mut consumer, _) = fifo(1 << shift, start, Duration::ZERO);
        let producer = fifo.producer().unwrap();
        let mut reference = Reference::new(1 << shift, start);
        for call in calls {
            run(call, &fifo, &producer, &mut consumer, &mut reference);
        }
    }
}

/// Pushes `count` triggers in batches of `batch` and at last waits for the consumer. A trigger is the producer's index
/// and a running number; what it stands for is written outside the ring first. Returns where the triggers stand.
fn produce(producer: &Producer, index: u64, count: u64, batch: u64, outside: &[AtomicU64]) -> Vec<Position> {
    let mut stands_at = Vec::new();
    for from in (0..count).step_by(batch as usize) {
        let numbers = from..count.min(from + batch);
        numbers.clone().for_each(|n| outside[n as usize].store(!n, Ordering::Relaxed));
        let triggers: Vec<_> = numbers.map(|n| Trigger::new([index, n]).unwrap()).collect();
        let first = producer.push_batch(&triggers).unwrap();
        stands_at.extend((0..triggers.len() as u64).map(|n| first.plus(n)));
    }
    if let Some(last) = stands_at.last() {
        producer.sync(*last).unwrap();
    }
    stands_at
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn threads_lose_nothing_and_keep_their_order(
        start in positions(),
        shift in 6..9u32,
        counts in prop::collection::vec((0..1500u64, 1..=64u64), 1..=5),
        max in 1..=100usize,
    ) {
        let (fifo, mut consumer, _) = fifo(1 << shift, start, Duration::from_secs(20));
        let producer = fifo.producer().unwrap();
        let outside: Vec<Vec<AtomicU64>> =
            counts.iter().map(|(count, _)| (0..*count).map(|_| AtomicU64::new(0)).collect()).collect();
        let total = counts.iter().map(|(count, _)| *count as usize).sum::<usize>();
        let mut taken: Vec<Vec<Position>> = vec![Vec::new(); counts.len()];
        let pushed: Vec<Vec<Position>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..).zip(&counts).map(|(index, (count, batch))| {
                let (producer, outside) = (&producer, &outside[index as usize]);
                scope.spawn(move || produce(producer, index, *count, *batch, outside))
            }).collect();
            let started = Instant::now();
            let mut sum = 0;
            while sum < total {
                sum += consumer.drain(max, |position, trigger| {
                    let [index, n] = trigger.words();
                    let of_producer = &mut taken[index as usize];
                    assert_eq!(n, of_producer.len() as u64, "out of order at {position}");
                    assert_eq!(outside[index as usize][n as usize].load(Ordering::Relaxed), !n);
                    of_producer.push(position);
                });
                if started.elapsed() > Duration::from_secs(20) {
                    fifo.abort();
                    panic!("{sum} of {total} triggers after 20 s");
                }
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        prop_assert_eq!(taken, pushed);
        prop_assert_eq!(consumer.peek(), None);
        prop_assert_eq!(fifo.tail(), start.plus(total as u64));
        prop_assert_eq!(consumer.closed(), None);
    }
}
