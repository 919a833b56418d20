//! Every call of the device header ends, and says how: success, timeout, abort, break, refusal. A reset mends it.

#![cfg(not(any(loom, miri)))]

mod device;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use device::{Deadline, Device, Handle, Outcome, Waited, Waiters, status, stray_word};
use portway_fifo::{Cause, Config, Consumer, Error, Fifo, Heap, MAX_TIMEOUT, Position, Trigger};

const SLOTS: u64 = 64;
/// Long enough for what is to succeed.
const LONG: Duration = Duration::from_secs(30);
const LONG_NS: u64 = LONG.as_nanos() as u64;
/// Short enough for what is to time out.
const SHORT: Duration = Duration::from_millis(20);
const SHORT_NS: u64 = SHORT.as_nanos() as u64;

/// Positions around which the counters or the record of a break wrap.
const STARTS: [u64; 5] = [0, (1 << 32) - 70, (1 << 62) - 70, (1 << 63) - 70, u64::MAX - 69];

/// One test at a time: they measure how fast threads come back.
fn device() -> Option<(&'static Device, MutexGuard<'static, ()>)> {
    static RUNNING: Mutex<()> = Mutex::new(());
    let device = device::device()?;
    Some((device, RUNNING.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn open(first_position: u64) -> (Fifo, Consumer, Handle) {
    let config =
        Config { slots: SLOTS, timeout: LONG, first_position: Position(first_position), ..Config::default() };
    let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
    let handle = Handle::of(&fifo);
    (fifo, consumer, handle)
}

/// Pushes a trigger into every slot.
fn fill(device: &Device, handle: &Handle) {
    for n in 0..SLOTS {
        assert_eq!(device.push(handle, [n, n], LONG_NS).status, status::OK);
    }
}

fn ok(position: u64) -> Outcome {
    Outcome { status: status::OK, position }
}

fn broken(cause: Cause, position: u64) -> Option<Error> {
    Some(Error::Broken { cause, position: Position(position) })
}

#[test]
fn a_timeout_breaks_the_fifo_and_everybody_says_so() {
    let Some((device, _alone)) = device() else { return };
    for start in STARTS {
        let (fifo, mut consumer, handle) = open(start);
        fill(device, &handle);
        let gap = start.wrapping_add(SLOTS);
        let began = Instant::now();
        let first = device.push(&handle, [1, 2], SHORT_NS);
        assert!(began.elapsed() >= SHORT, "the push gave up after {:?}", began.elapsed());
        assert_eq!(first, Outcome { status: status::TIMEOUT, position: gap });

        let later = Outcome { status: status::BROKEN_BY_TIMEOUT, position: gap };
        assert_eq!(device.push(&handle, [1, 2], LONG_NS), later);
        assert_eq!(device.push_batch(&handle, &[[1, 2], [3, 4]], LONG_NS), later);
        assert_eq!(device.sync(&handle, gap, LONG_NS), status::BROKEN_BY_TIMEOUT);
        assert_eq!(consumer.closed(), broken(Cause::Timeout, gap));
        let rust = fifo.producer().unwrap().push(Trigger::new([1, 2]).unwrap());
        assert_eq!(rust.err(), broken(Cause::Timeout, gap));

        let mut next = start;
        let taken = consumer.drain(usize::MAX, |position, _| {
            assert_eq!(position.0, next);
            next = next.wrapping_add(1);
        });
        assert_eq!(taken as u64, SLOTS, "all from below the gap, nothing from above");
        // What was handed on after the break is reported as handed on.
        assert_eq!(device.sync(&handle, gap.wrapping_sub(1), 0), status::OK);
        assert_eq!(device.sync(&handle, gap, LONG_NS), status::BROKEN_BY_TIMEOUT);
    }
}

#[test]
fn pushes_that_time_out_together_name_their_own_position() {
    let Some((device, _alone)) = device() else { return };
    let (_fifo, consumer, handle) = open(0);
    fill(device, &handle);
    let mut waited = device.start_pushers(&handle, 8, SHORT).join();
    let Some(Error::Broken { cause: Cause::Timeout, position: Position(recorded) }) = consumer.closed()
    else {
        panic!("the host says {:?}", consumer.closed());
    };
    // The first to give up leaves the record. The others ran out of time too, or saw the record before that.
    assert!(waited.iter().any(|it| (it.status, it.position) == (status::TIMEOUT, recorded)), "{waited:?}");
    waited.retain(|it| (it.status, it.position) != (status::BROKEN_BY_TIMEOUT, recorded));
    assert!(waited.iter().all(|it| it.status == status::TIMEOUT), "{waited:?}");
    waited.sort_by_key(|it| it.position);
    waited.dedup_by_key(|it| it.position);
    assert!(waited.iter().all(|it| (SLOTS..SLOTS + 8).contains(&it.position)), "{waited:?}");
}

#[test]
fn a_timeout_of_zero_still_looks() {
    let Some((device, _alone)) = device() else { return };
    let (_fifo, mut consumer, handle) = open(0);
    fill(device, &handle);
    // The tail has come along, and no producer has seen it yet.
    assert_eq!(consumer.drain(usize::MAX, |_, _| ()), SLOTS as usize);
    assert_eq!(device.sync(&handle, SLOTS - 1, 0), status::OK);
    assert_eq!(device.sync(&handle, SLOTS, 0), status::TIMEOUT);
    fill(device, &handle);
    assert_eq!(consumer.drain(usize::MAX, |_, _| ()), SLOTS as usize);
    assert_eq!(device.push(&handle, [1, 2], 0), ok(2 * SLOTS));
    for n in 1..SLOTS {
        assert_eq!(device.push(&handle, [n, n], 0), ok(2 * SLOTS + n));
    }
    assert_eq!(device.push(&handle, [1, 2], 0), Outcome { status: status::TIMEOUT, position: 3 * SLOTS });
}

#[test]
fn a_sync_that_times_out_breaks_nothing() {
    let Some((device, _alone)) = device() else { return };
    let (_fifo, mut consumer, handle) = open(u64::MAX);
    assert_eq!(device.push(&handle, [1, 2], LONG_NS), ok(u64::MAX));
    let began = Instant::now();
    assert_eq!(device.sync(&handle, u64::MAX, SHORT_NS), status::TIMEOUT);
    assert!(began.elapsed() >= SHORT);
    assert_eq!(consumer.closed(), None);
    assert_eq!(consumer.drain(9, |_, _| ()), 1);
    assert_eq!(device.sync(&handle, u64::MAX, SHORT_NS), status::OK);
    assert_eq!(device.push(&handle, [1, 2], LONG_NS), ok(0));
}

#[test]
fn an_abort_loses_nothing_that_was_pushed_before() {
    let Some((device, _alone)) = device() else { return };
    let (fifo, mut consumer, handle) = open(7);
    assert_eq!(device.push(&handle, [1, 2], LONG_NS), ok(7));
    fifo.abort();
    assert_eq!(device.sync(&handle, 7, LONG_NS), status::ABORTED);
    assert_eq!(consumer.closed(), Some(Error::Aborted));
    let broken = Outcome { status: status::BROKEN_BY_ABORT, position: 8 };
    assert_eq!(device.push(&handle, [1, 2], LONG_NS), broken);
    assert_eq!(device.push_batch(&handle, &[[1, 2]; 3], LONG_NS), broken);
    let (cause, position) = (Cause::Abort, Position(8));
    assert_eq!(consumer.closed(), Some(Error::Broken { cause, position }));
    assert_eq!(consumer.drain(9, |_, _| ()), 1, "what was pushed before the abort is still there");
}

/// Aborts threads that wait, and returns what they say and the time until the last was back.
fn abort(device: &Device, fifo: &Fifo, waiters: Waiters) -> (Vec<Waited>, Duration) {
    let aborted_ns = device.now_ns();
    fifo.abort();
    let waited = waiters.join();
    let last_ns = waited.iter().map(|it| it.returned_ns).max().unwrap();
    (waited, Duration::from_nanos(last_ns.saturating_sub(aborted_ns)))
}

/// `count` threads, each past the step of the head in a push for which there is no room.
fn waiting_pushers(device: &'static Device, handle: &Handle, count: u64, timeout: Duration) -> Waiters {
    fill(device, handle);
    let all = handle.head().wrapping_add(count);
    let waiters = device.start_pushers(handle, count as usize, timeout);
    Deadline::new(LONG, format!("{count} pushes to take their positions")).until(all, || handle.head());
    waiters
}

/// `count` threads in a sync for a trigger that is never pushed.
fn waiting_syncers(device: &'static Device, handle: &Handle, count: u64, timeout: Duration) -> Waiters {
    let waiters = device.start_syncers(handle, count as usize, handle.head(), timeout);
    Deadline::new(LONG, format!("{count} threads to call sync")).until(count, || waiters.entered());
    // Entered is just before the call: a thread that comes later than the abort is aborted all the same.
    waiters
}

/// What aborted pushes say: all of them the same, and the host says it too.
fn check_aborted_pushers(consumer: &Consumer, waited: &[Waited], first: u64) {
    let gap = waited[0].position;
    assert!(gap.wrapping_sub(first) < waited.len() as u64, "broke at {gap}, which nobody took");
    for it in waited {
        assert_eq!((it.status, it.position), (status::BROKEN_BY_ABORT, gap));
    }
    assert_eq!(consumer.closed(), broken(Cause::Abort, gap));
}

/// By then the pauses of waiting threads are about as long as they get, and every one has looked at the stop word.
fn wait_long() {
    std::thread::sleep(Duration::from_millis(50));
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
fn an_abort_wakes_four_waiters_within_10_ms() {
    let Some((device, _alone)) = device() else { return };
    let (mut pushes, mut syncs) = (Vec::new(), Vec::new());
    for round in 0..15 {
        let (fifo, consumer, handle) = open(STARTS[round % STARTS.len()]);
        let waiters = waiting_pushers(device, &handle, 4, LONG);
        let first = handle.head().wrapping_sub(4);
        wait_long();
        let (waited, took) = abort(device, &fifo, waiters);
        check_aborted_pushers(&consumer, &waited, first);
        pushes.push(took);

        let (fifo, consumer, handle) = open(STARTS[round % STARTS.len()]);
        let waiters = waiting_syncers(device, &handle, 4, LONG);
        wait_long();
        let (waited, took) = abort(device, &fifo, waiters);
        assert!(waited.iter().all(|it| it.status == status::ABORTED), "{waited:?}");
        assert_eq!(consumer.closed(), Some(Error::Aborted));
        syncs.push(took);
    }
    println!("4 waiters back: push {:?}, sync {:?}", median(pushes.clone()), median(syncs.clone()));
    for times in [pushes, syncs] {
        // The median, since a busy machine may hold up any single thread.
        assert!(median(times.clone()) < Duration::from_millis(10), "4 aborted waiters took {times:?}");
        assert!(times.iter().all(|it| *it < LONG / 2), "4 aborted waiters took {times:?}");
    }
}

#[test]
fn an_abort_wakes_a_thousand_waiters_within_a_second() {
    let Some((device, _alone)) = device() else { return };
    let (fifo, consumer, handle) = open(0);
    let waiters = waiting_pushers(device, &handle, 1_000, LONG);
    wait_long();
    let (waited, pushes) = abort(device, &fifo, waiters);
    check_aborted_pushers(&consumer, &waited, SLOTS);

    let (fifo, _consumer, handle) = open(0);
    let waiters = waiting_syncers(device, &handle, 1_000, LONG);
    wait_long();
    let (waited, syncs) = abort(device, &fifo, waiters);
    assert!(waited.iter().all(|it| it.status == status::ABORTED));
    println!("1,000 waiters back: push {pushes:?}, sync {syncs:?}");
    assert!(pushes.max(syncs) < Duration::from_secs(1), "1,000 waiters: push {pushes:?}, sync {syncs:?}");
}

/// Control: an abort that does not reach the waiters is noticed, by their status and by the time they take.
#[test]
fn an_abort_that_nobody_sees_is_noticed() {
    let Some((device, _alone)) = device() else { return };
    let deaf = |handle: Handle| handle.with_stop(stray_word(0));
    let timeout = Duration::from_millis(300);
    let (fifo, _consumer, handle) = open(0);
    let handle = deaf(handle);
    let waiters = waiting_syncers(device, &handle, 4, timeout);
    let (waited, took) = abort(device, &fifo, waiters);
    assert!(waited.iter().all(|it| it.status == status::TIMEOUT), "{waited:?}");
    assert!(took > Duration::from_millis(100), "back after {took:?}, by what?");
}

#[test]
fn bad_arguments_are_refused_and_nothing_happens() {
    let Some((device, _alone)) = device() else { return };
    let (_fifo, mut consumer, handle) = open(5);
    let invalid = status::INVALID;
    let max_ns = MAX_TIMEOUT.as_nanos() as u64;
    let top = 1 << 63;

    for words in [[top, 0], [0, top], [u64::MAX, u64::MAX]] {
        assert_eq!(device.push(&handle, words, LONG_NS).status, invalid, "{words:x?}");
        for at in [0, 9, SLOTS as usize - 1] {
            let mut batch = vec![[1, 2]; SLOTS as usize];
            batch[at] = words;
            assert_eq!(device.push_batch(&handle, &batch, LONG_NS).status, invalid, "{words:x?} at {at}");
        }
    }
    assert_eq!(device.push_batch(&handle, &[], LONG_NS).status, invalid);
    assert_eq!(device.push_batch(&handle, &vec![[1, 2]; SLOTS as usize + 1], LONG_NS).status, invalid);
    for version in [0, 2, u32::MAX] {
        let other = handle.clone().with_version(version);
        assert_eq!(device.push(&other, [1, 2], LONG_NS).status, invalid);
        assert_eq!(device.push_batch(&other, &[[1, 2]], LONG_NS).status, invalid);
        assert_eq!(device.sync(&other, 0, LONG_NS), invalid);
    }
    for timeout_ns in [max_ns + 1, u64::MAX] {
        assert_eq!(device.push(&handle, [1, 2], timeout_ns).status, invalid);
        assert_eq!(device.push_batch(&handle, &[[1, 2]], timeout_ns).status, invalid);
        assert_eq!(device.sync(&handle, 0, timeout_ns), invalid);
        assert_eq!(device.wait(&handle, 5, timeout_ns), invalid, "although the tail is there");
    }
    assert_eq!(device.wait(&handle, 5, max_ns), status::OK);
    assert_eq!(device.wait(&handle, 6, 0), status::TIMEOUT);

    assert_eq!(handle.head(), 5, "refused calls took positions");
    assert_eq!(consumer.drain(9, |_, _| ()), 0);
    assert_eq!(consumer.closed(), None);
    // What is just allowed.
    let all = u64::MAX >> 1;
    assert_eq!(device.push_batch(&handle, &vec![[all, all]; SLOTS as usize], max_ns), ok(5));
    assert_eq!(consumer.drain(99, |_, it| assert_eq!(it.words(), [all, all])), SLOTS as usize);
}

/// Pushes and drains some laps, by the header and by the Rust producer in turn.
fn runs_again(device: &Device, fifo: &Fifo, consumer: &mut Consumer, handle: &Handle) {
    let producer = fifo.producer().unwrap();
    let start = consumer.position();
    for n in 0..3 * SLOTS {
        let position = start.plus(n);
        assert!(consumer.peek().is_none(), "a trigger from before the reset shows up at {position}");
        if n % 2 == 0 {
            assert_eq!(device.push(handle, [n, !n >> 1], LONG_NS), ok(position.0));
        } else {
            assert_eq!(producer.push(Trigger::new([n, !n >> 1]).unwrap()), Ok(position));
        }
        let mut seen = None;
        consumer.drain(9, |at, trigger| seen = Some((at, trigger.words())));
        assert_eq!(seen, Some((position, [n, !n >> 1])));
        assert_eq!(device.sync(handle, position.0, LONG_NS), status::OK);
    }
    assert_eq!(consumer.closed(), None);
}

/// `lost` pushes are aborted while they wait behind a full ring, of which `drained` triggers were taken.
fn break_and_reset(device: &'static Device, start: u64, lost: u64, drained: u64) -> (Fifo, Consumer, Handle) {
    let (fifo, mut consumer, handle) = open(start);
    if lost == 0 {
        fill(device, &handle);
        fifo.abort();
        assert_eq!(device.sync(&handle, handle.head(), LONG_NS), status::ABORTED);
    } else {
        let waiters = waiting_pushers(device, &handle, lost, LONG);
        abort(device, &fifo, waiters);
    }
    assert_eq!(consumer.drain(drained as usize, |_, _| ()), drained as usize);
    assert!(consumer.closed().is_some());
    let head = handle.head();
    consumer.reset().unwrap();
    assert_eq!(consumer.position(), Position(head), "positions went on where the producers stopped");
    (fifo, consumer, handle)
}

#[test]
fn a_reset_mends_what_one_and_two_laps_left() {
    let Some((device, _alone)) = device() else { return };
    // Slots hold the first lap. With n positions lost, the next lap to come to a slot is the one after (n = 0), for
    // the first n slots the one after that, whose parity is that of the first.
    for lost in [0, 1, 32, 64, 65, 128] {
        for (start, drained) in [(0, 0), (STARTS[4], 10), (STARTS[3], SLOTS)] {
            let (fifo, mut consumer, handle) = break_and_reset(device, start, lost, drained);
            runs_again(device, &fifo, &mut consumer, &handle);
        }
    }
    // A timeout's break is mended as well.
    let (fifo, mut consumer, handle) = open(0);
    fill(device, &handle);
    assert_eq!(device.push(&handle, [1, 2], SHORT_NS).status, status::TIMEOUT);
    consumer.reset().unwrap();
    runs_again(device, &fifo, &mut consumer, &handle);
}

/// Control: without the clearing of slots, one from two laps before would pass for new.
#[test]
fn a_slot_that_a_reset_left_would_be_noticed() {
    let Some((device, _alone)) = device() else { return };
    for (lost, stale) in [(0, false), (64, true)] {
        let (_fifo, consumer, handle) = break_and_reset(device, 0, lost, 0);
        for slot in 0..SLOTS {
            for word in handle.slot(slot) {
                // What `fill` had put there.
                word.store(slot | 1 << 63, std::sync::atomic::Ordering::Release);
            }
        }
        assert_eq!(consumer.peek().is_some(), stale, "{lost} positions lost");
    }
}
