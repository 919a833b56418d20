//! What reaches the device, and when: chains, doorbells, completions, budgets.

mod support;

use portway_proxy::TransportError;
use portway_proxy::transport::{Completion, Lane, LocalMemory, Op, Put, Submit, Transport};
use portway_transport_ib::{Config, Ib, sys};
use support::fabric::{Make, World};
use support::link::{LIMIT, Link};

const ASKS: u32 = sys::IBV_SEND_SIGNALED.0;
const INLINE: u32 = sys::IBV_SEND_INLINE.0;

fn open(makes: &[Make], config: Config) -> (World, Ib) {
    let world = World::new(makes);
    let ib = Ib::open_with(&world.verbs(), config).unwrap();
    (world, ib)
}

fn plain() -> (World, Ib) {
    open(&[Make::default()], Config::default())
}

#[test]
fn write_and_signal_are_one_chain_and_one_doorbell() {
    let (world, ib) = plain();
    let mut link = Link::new(&ib, &ib, 4096);
    assert_eq!(link.offer(Some((0, 0, 1000)), Some(1), false).unwrap(), Submit::Accepted);
    assert!(world.log().posts.is_empty(), "the doorbell waits for the kick");
    link.a.kick().unwrap();
    assert_eq!(world.log().posts, [[(0, 1000), (INLINE | ASKS, 8)]]);
    link.a.kick().unwrap();
    assert_eq!(world.log().posts.len(), 1, "nothing to post, no doorbell");
    link.until_complete(1).unwrap();
    assert_eq!(link.word(), 1);
}

#[test]
fn a_burst_of_32_is_one_doorbell_with_two_completions() {
    let (world, ib) = plain();
    let mut link = Link::new(&ib, &ib, 4096);
    for signal in 1..=32 {
        link.offer(Some((0, 0, 64)), Some(signal), false).unwrap();
    }
    link.a.kick().unwrap();
    let posts = world.log().posts;
    assert_eq!(posts.iter().map(Vec::len).collect::<Vec<_>>(), [64]);
    assert_eq!(posts[0].iter().filter(|(flags, _)| flags & ASKS != 0).count(), 2);
    link.until_complete(32).unwrap();
    assert_eq!((link.word(), link.complete.len()), (32, 32));
}

#[test]
fn one_request_in_k_asks_and_each_flush() {
    let (world, ib) = open(&[Make::default()], Config { signal_every: 10, ..Config::default() });
    let mut link = Link::new(&ib, &ib, 4096);
    for op in 0..25 {
        link.offer(Some((0, 0, 64)), None, op == 3).unwrap();
    }
    link.a.kick().unwrap();
    let asking: Vec<usize> = (0..25).filter(|&at| world.log().posts[0][at].0 & ASKS != 0).collect();
    // The flush, ten later, ten later, the end of the burst.
    assert_eq!(asking, [3, 13, 23, 24]);
    link.until_complete(25).unwrap();
}

#[test]
fn a_flush_alone_posts_nothing_and_waits_for_what_is_before_it() {
    let (world, ib) = plain();
    let mut link = Link::new(&ib, &ib, 4096);
    link.offer(None, None, true).unwrap();
    link.until_complete(1).unwrap();
    assert!(world.log().posts.is_empty());
    world.set_portion(0);
    link.offer(Some((0, 0, 64)), None, false).unwrap();
    link.a.kick().unwrap();
    link.offer(None, None, true).unwrap();
    link.a.kick().unwrap();
    let still = |link: &mut Link, complete: &[u64]| {
        for _ in 0..100 {
            link.poll().unwrap();
        }
        assert_eq!(link.complete, complete, "the wire is stopped");
    };
    still(&mut link, &[0]);
    world.set_portion(64);
    link.until_complete(3).unwrap();
    assert_eq!(world.log().posts.len(), 1);
    // With a put and a signal of its own it waits for these, too.
    world.set_portion(0);
    link.offer(Some((0, 0, 64)), Some(1), true).unwrap();
    link.a.kick().unwrap();
    still(&mut link, &[0, 1, 2]);
    world.set_portion(64);
    link.until_complete(4).unwrap();
}

#[test]
fn long_puts_are_split_at_the_longest_message_of_both_ends() {
    let makes = [
        Make { max_message_bytes: 16_384, ..Make::default() },
        Make { name: "soft1", max_message_bytes: 10_000, ..Make::default() },
    ];
    let world = World::new(&makes);
    let end = |name: &str| {
        Ib::open_with(&world.verbs(), Config { device: Some(name.into()), ..Config::default() }).unwrap()
    };
    let (a, b) = (end("soft0"), end("soft1"));
    let mut link = Link::new(&a, &b, 1 << 20);
    let bytes: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
    link.source.region.write(7, &bytes).unwrap();
    link.offer(Some((7, 9, 20_000)), Some(5), true).unwrap();
    link.until_complete(1).unwrap();
    // 10,000 rounded down to whole pages.
    assert_eq!(world.log().posts, [[(0, 8192), (0, 8192), (0, 3616), (INLINE | ASKS, 8)]]);
    let mut seen = vec![0; 20_000];
    link.destination.region.read(9, &mut seen).unwrap();
    assert!(seen == bytes);
    assert_eq!(link.word(), 5);
}

#[test]
fn an_op_longer_than_the_whole_queue_is_accepted_and_goes_out_in_parts() {
    let makes = [Make { max_message_bytes: 4096, ..Make::default() }];
    let (world, ib) = open(&makes, Config { depth: 64, ..Config::default() });
    let mut link = Link::new(&ib, &ib, 1 << 20);
    let bytes: Vec<u8> = (0..1u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    link.source.region.write(0, &bytes).unwrap();
    world.set_portion(7);
    // 256 requests and the signal, in a queue of 64.
    assert_eq!(link.offer(Some((0, 0, 1 << 20)), Some(1), true).unwrap(), Submit::Accepted);
    assert_eq!(
        link.offer(Some((0, 0, 1)), Some(2), false).unwrap(),
        Submit::Full,
        "not before the first is out"
    );
    let start = std::time::Instant::now();
    link.a.kick().unwrap();
    while link.offer(None, Some(2), false).unwrap() == Submit::Full {
        assert_eq!(link.word(), 0, "the signal comes after all of the data");
        link.poll().unwrap();
        assert!(start.elapsed() < LIMIT);
    }
    link.until_complete(2).unwrap();
    let mut seen = vec![0; 1 << 20];
    link.destination.region.read(0, &mut seen).unwrap();
    assert!(seen == bytes);
    assert_eq!((link.word(), link.complete.clone()), (2, vec![0, 1]));
    let log = world.log();
    assert_eq!((log.refused_posts, log.overruns), (0, 0));
}

#[test]
fn lanes_are_dealt_to_the_queue_pairs_in_turn() {
    let (world, ib) = open(&[Make::default()], Config { queue_pairs: 2, ..Config::default() });
    let mut link = Link::new(&ib, &ib, 4096);
    let import = |memory| ib.import(&ib.export(memory).unwrap()).unwrap().id;
    let words = [ib.signal_word().unwrap(), ib.signal_word().unwrap()];
    for word in &words {
        let binding = portway_proxy::transport::Binding {
            source: link.source.id,
            destination: import(&link.destination),
            signal: import(word),
        };
        link.a.bind(&binding).unwrap();
    }
    for (lane, len_bytes) in [(0, 10), (1, 11), (2, 12)] {
        let put = Put { source_offset_bytes: 0, destination_offset_bytes: 0, len_bytes };
        let op = Op { lane: Lane(lane), sequence: 0, put: Some(put), signal: None, flush: false };
        link.a.submit(&op).unwrap();
    }
    link.a.kick().unwrap();
    let posts = world.log().posts;
    assert_eq!(posts, [vec![(0, 10), (ASKS, 12)], vec![(ASKS, 11)]]);
    let mut room = [Completion { lane: Lane(0), sequence: 0 }; 8];
    let (start, mut count) = (std::time::Instant::now(), 0);
    while count < 3 {
        count += link.a.poll(&mut room).unwrap();
        assert!(start.elapsed() < LIMIT, "{count} of 3");
    }
}

#[test]
fn misuse_is_named_and_ends_the_port() {
    let (_world, ib) = plain();
    let mut link = Link::new(&ib, &ib, 4096);
    let error = link.offer(Some((4000, 0, 97)), None, false).unwrap_err();
    assert!(
        matches!(
            error,
            TransportError::Outside {
                what: "source",
                sequence: 0,
                offset_bytes: 4000,
                len_bytes: 97,
                limit_bytes: 4096,
                ..
            }
        ),
        "{error}"
    );
    assert!(link.a.kick().is_err() && link.poll().is_err() && link.offer(None, Some(1), false).is_err());
    let mut link = Link::new(&ib, &ib, 4096);
    link.lane = Lane(1);
    let error = link.offer(None, Some(1), false).unwrap_err();
    assert!(matches!(error, TransportError::Lane { lane: 1, lanes: 1, .. }), "{error}");
    let mut link = Link::new(&ib, &ib, 4096);
    assert!(link.offer(Some((u64::MAX, 0, 2)), None, false).is_err(), "the sum does not wrap");
    for put in [(0, 0, 0), (4096, 0, 1), (0, 4096, 1), (0, 1, 4096), (0, 0, 4097), (0, 0, u64::MAX)] {
        let mut link = Link::new(&ib, &ib, 4096);
        assert!(link.offer(Some(put), None, false).is_err(), "{put:?}");
    }
    let mut link = Link::new(&ib, &ib, 4096);
    for put in [(0, 0, 4096), (4095, 4095, 1), (0, 0, 1)] {
        assert_eq!(link.offer(Some(put), None, false).unwrap(), Submit::Accepted, "{put:?}");
    }
}

/// A small generator, so that a run can be repeated from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

#[test]
fn no_queue_overflows_whatever_the_load() {
    let mut refused = 0;
    for seed in 1..=20u64 {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let config = Config {
            depth: 64 + random.below(64) as u32,
            signal_every: 1 + random.below(32) as u32,
            queue_pairs: 1 + random.below(3) as usize,
            ..Config::default()
        };
        let makes = [Make { max_message_bytes: 4096, ..Make::default() }];
        let (world, ib) = open(&makes, config);
        let mut link = Link::new(&ib, &ib, 1 << 16);
        let import = |memory: &LocalMemory| ib.import(&ib.export(memory).unwrap()).unwrap().id;
        let lanes = 5;
        let mut words = vec![link.signal.clone()];
        for _ in 1..lanes {
            let word = ib.signal_word().unwrap();
            let (source, destination) = (link.source.id, import(&link.destination));
            let binding = portway_proxy::transport::Binding { source, destination, signal: import(&word) };
            link.a.bind(&binding).unwrap();
            words.push(word);
        }
        let mut next = vec![0u64; lanes];
        let mut signals = vec![0u64; lanes];
        let mut complete = vec![0u64; lanes];
        let mut room = [Completion { lane: Lane(0), sequence: 0 }; 16];
        let mut poll = |link: &mut Link, complete: &mut Vec<u64>| {
            let count = link.a.poll(&mut room).unwrap();
            for completion in &room[..count] {
                let lane = completion.lane.0 as usize;
                assert_eq!(completion.sequence, complete[lane], "seed {seed}: each once, and here in order");
                complete[lane] += 1;
            }
        };
        for step in 0..2000 {
            let lane = random.below(lanes as u64) as usize;
            let long = random.below(50) == 0;
            let len_bytes = 1 + random.below(if long { 1 << 15 } else { 200 });
            let put = Put { source_offset_bytes: 3, destination_offset_bytes: 5, len_bytes };
            let signal = (random.below(2) == 0).then_some(signals[lane] + 1);
            let op = Op {
                lane: Lane(lane as u32),
                sequence: next[lane],
                put: (random.below(4) > 0).then_some(put),
                signal,
                flush: random.below(10) == 0,
            };
            match link.a.submit(&op).unwrap() {
                Submit::Accepted => {
                    next[lane] += 1;
                    signals[lane] += u64::from(signal.is_some());
                }
                Submit::Full => refused += 1,
            }
            if random.below(5) == 0 {
                link.a.kick().unwrap();
            }
            if step % 100 == 0 {
                world.set_portion(random.below(40) as usize);
            }
            if random.below(12) == 0 {
                poll(&mut link, &mut complete);
            }
        }
        world.set_portion(64);
        let start = std::time::Instant::now();
        link.a.kick().unwrap();
        while complete != next {
            poll(&mut link, &mut complete);
            assert!(start.elapsed() < LIMIT, "seed {seed}: {complete:?} of {next:?} are complete");
        }
        for (word, signals) in words.iter().zip(&signals) {
            let mut bytes = [0; 8];
            word.region.read(0, &mut bytes).unwrap();
            assert_eq!(u64::from_ne_bytes(bytes), *signals, "seed {seed}");
        }
        let log = world.log();
        assert_eq!((log.refused_posts, log.overruns), (0, 0), "seed {seed}");
    }
    assert!(refused > 1000, "refused only {refused} times: the load was too light to show anything");
}

/// The control of the test above: the devices there do refuse what overflows them.
#[test]
fn the_software_device_does_overflow() {
    let (world, ib) = open(&[Make::default()], Config { depth: 64, ..Config::default() });
    let mut link = Link::new(&ib, &ib, 4096);
    world.set_portion(0);
    // One request is left in the books of the port and taken from the device's, so that the books are wrong.
    world.steal_slots(1);
    while link.offer(Some((0, 0, 64)), None, false).unwrap() == Submit::Accepted {}
    link.a.kick().unwrap();
    let error = Link::error_of(&mut *link.a);
    assert!(
        matches!(error, TransportError::Device { operation: "ibv_post_send", status: 12, .. }),
        "{error}"
    );
    assert_eq!(world.log().refused_posts, 1);
}

/// After an error every request completes, whether it asked or not. With a control: with one place less, one is lost.
#[test]
fn completions_of_an_error_find_room_when_all_send_queues_are_full() {
    for places in [0, 1] {
        let config = Config { depth: 64, queue_pairs: 3, ..Config::default() };
        let (world, ib) = open(&[Make::default()], config);
        let mut link = Link::new(&ib, &ib, 4096);
        let import = |memory: &LocalMemory| ib.import(&ib.export(memory).unwrap()).unwrap().id;
        for _ in 1..3 {
            let word = ib.signal_word().unwrap();
            let (source, destination) = (link.source.id, import(&link.destination));
            let binding = portway_proxy::transport::Binding { source, destination, signal: import(&word) };
            link.a.bind(&binding).unwrap();
        }
        world.set_portion(0);
        world.steal_completions(places);
        for lane in 0..3 {
            link.lane = Lane(lane);
            while link.offer(Some((0, 0, 64)), None, false).unwrap() == Submit::Accepted {}
        }
        link.a.kick().unwrap();
        let posted: usize = world.log().posts.iter().map(Vec::len).sum();
        assert_eq!(posted, 3 * 64);
        let number = world.states()[0].0;
        world.event(0, sys::IBV_EVENT_QP_FATAL, Some(number));
        let error = Link::error_of(&mut *link.a);
        assert!(error.to_string().contains("QP_FATAL"), "{error}");
        assert_eq!(world.log().overruns, places as u64);
    }
}
