//! The device header as a stream: its producers are threads, the consumer is ours. Every trigger arrives exactly once,
//! in its producer's order, with all of its bits, wherever the counters stand.

#![cfg(not(any(loom, miri)))]

mod device;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use device::ledger::{self, Ledger};
use device::{Deadline, Form, Handle, Plan, Report};
use portway_fifo::{Config, Consumer, Fifo, Heap, Position, Trigger};

/// How long one stream may take. It takes about a second at most.
const STREAM_LIMIT: Duration = Duration::from_secs(60);

/// Counters start this far below a boundary, so that each stream crosses it.
const BELOW: u64 = 1_500;

fn starts() -> [(&'static str, Position); 3] {
    let below = |boundary: u64| Position(boundary.wrapping_sub(BELOW));
    [("2^32", below(1 << 32)), ("2^63", below(1 << 63)), ("2^64", below(0))]
}

/// One stream at a time, so that each has the processor for itself.
fn alone() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(slots: u64, first_position: Position) -> (Fifo, Consumer) {
    Fifo::new(&Heap, Config { slots, timeout: Duration::from_secs(50), first_position, ..Config::default() })
        .unwrap()
}

/// Drains until `done` says so, or until something is wrong.
fn drain(
    consumer: &mut Consumer,
    ledger: &mut Ledger,
    deadline: &Deadline,
    mut done: impl FnMut(&Ledger) -> bool,
) -> Result<(), String> {
    let mut wrong = None;
    let mut idle = 0;
    loop {
        let taken = consumer.drain(64, |position, trigger| {
            if wrong.is_none() {
                wrong = ledger.enter(position, trigger).err();
            }
        });
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        idle = if taken == 0 { idle + 1 } else { 0 };
        if idle > 1_000 {
            if done(ledger) {
                return Ok(());
            }
            let closed = consumer.closed();
            deadline.passed(|| format!("saw {} triggers, the FIFO is closed: {closed:?}", ledger.total))?;
            if let Some(closed) = closed {
                return Err(format!("after {} triggers: {closed}", ledger.total));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// Runs a plan to its end and returns how many triggers arrived.
fn stream(slots: u64, first: Position, plan: Plan) -> Result<u64, String> {
    let device = device::device().ok_or("no device header")?;
    let (fifo, mut consumer) = open(slots, first);
    let mut ledger = Ledger::new(plan.salt, plan.producers);
    let deadline = Deadline::new(STREAM_LIMIT, format!("the triggers of {plan:?} in {slots} slots"));
    let producers = device.start(&Handle::of(&fifo), plan);
    drain(&mut consumer, &mut ledger, &deadline, |_| producers.done())?;
    let reports = producers.join();
    // What was pushed before the last producer said it was done is there now.
    drain(&mut consumer, &mut ledger, &deadline, |_| true)?;
    for (id, report) in reports.iter().enumerate() {
        let Report { fault, status, position, .. } = *report;
        if fault != 0 {
            return Err(format!("producer {id}, host.cpp:{fault}: status {status} at {position}"));
        }
        ledger.agrees(id, report.pushed, report.digest)?;
    }
    let calls = plan.producers * plan.calls;
    match plan.form {
        Form::Scalar if ledger.total != calls => Err(format!("{calls} calls, {} triggers", ledger.total)),
        _ if ledger.total > 500 && ledger.constant_bits() != [0; 2] => {
            Err(format!("bits {:x?} never changed", ledger.constant_bits()))
        }
        _ => Ok(ledger.total),
    }
}

/// Every number of producers, ring and start, by one form of push. `triggers` are about those of each stream: most where
/// they are cheap, since a thousand threads in 64 slots must each be woken for every trigger.
fn matrix(form: Form, triggers: [[u64; 2]; 4]) {
    if device::device().is_none() {
        return;
    }
    let _alone = alone();
    let began = Instant::now();
    let mut total = 0;
    for (producers, triggers) in [1, 7, 64, 1_000].into_iter().zip(triggers) {
        for (slots, triggers) in [64, 1_024].into_iter().zip(triggers) {
            for (index, (boundary, first)) in starts().into_iter().enumerate() {
                let began = Instant::now();
                let batch_max = if form == Form::Batch { 48 } else { 1 };
                let mean = if form == Form::Batch { batch_max / 2 } else { 1 };
                let calls = triggers.div_ceil(producers * mean);
                let salt = producers << 32 | slots << 8 | index as u64;
                let plan = Plan { form, producers, calls, batch_max, salt };
                let arrived = stream(slots, first, plan)
                    .unwrap_or_else(|wrong| panic!("{plan:?} in {slots} slots, across {boundary}: {wrong}"));
                total += arrived;
                let rate = arrived as f64 / began.elapsed().as_secs_f64() / 1e6;
                println!(
                    "{form:?} {producers} producers, {slots} slots, {boundary}: {arrived} at {rate:.2} M/s"
                );
            }
        }
    }
    println!("{form:?}: {total} triggers in {:?}", began.elapsed());
}

#[test]
fn push_delivers_every_trigger_once_and_in_order() {
    matrix(Form::Scalar, [[50_000, 400_000], [50_000, 400_000], [20_000, 100_000], [6_000, 20_000]]);
}

#[test]
fn push_batch_delivers_every_trigger_once_and_in_order() {
    matrix(Form::Batch, [[100_000, 800_000], [50_000, 800_000], [20_000, 300_000], [24_000, 24_000]]);
}

/// Control: producers that do not wait for room are noticed.
#[test]
fn an_overrun_is_noticed() {
    let Some(device) = device::device() else { return };
    let _alone = alone();
    // Where the last lap has the parity of the first, a wrong trigger arrives; where it has not, none does.
    for (calls, complaint) in [(15 * 64, "number 896 of producer 0, expected 0"), (14 * 64, "0 arrived")] {
        let (fifo, mut consumer) = open(64, Position(0));
        let handle = Handle::of(&fifo).with_tail(device::stray_word(1 << 40));
        let plan = Plan { form: Form::Scalar, producers: 1, calls, batch_max: 1, salt: 1 };
        let producers = device.start(&handle, plan);
        let limit = Duration::from_secs(10);
        Deadline::new(limit, "producers that never wait").until(1, || producers.done().into());
        let mut ledger = Ledger::new(plan.salt, 1);
        let deadline = Deadline::new(limit, "the triggers of an overrun ring");
        let drained = drain(&mut consumer, &mut ledger, &deadline, |_| true);
        let report = producers.join()[0];
        let wrong = drained.and_then(|()| ledger.agrees(0, report.pushed, report.digest)).unwrap_err();
        assert!(wrong.contains(complaint), "{wrong}");
    }
}

/// Control: a trigger that never comes is noticed, and said to be missing.
#[test]
fn a_missing_trigger_ends_the_drain() {
    let (_fifo, mut consumer) = open(64, Position(0));
    let deadline = Deadline::new(Duration::from_millis(50), "a trigger that nobody pushes");
    let wrong = drain(&mut consumer, &mut Ledger::new(0, 1), &deadline, |it| it.total == 1).unwrap_err();
    assert!(wrong.contains("a trigger that nobody pushes: saw 0 triggers"), "{wrong}");
}

/// Control: the ledger refuses what is lost, doubled, out of order, or wrong in one bit.
#[test]
fn the_ledger_notices_every_kind_of_fault() {
    let salt = 0x5eed;
    let good: Vec<[u64; 2]> = (0..4).map(|n| ledger::encode(salt, n % 2, n / 2)).collect();
    let verdict = |sent: &[[u64; 2]]| {
        let mut book = Ledger::new(salt, 2);
        for (at, words) in sent.iter().enumerate() {
            book.enter(Position(at as u64), Trigger::new(*words).unwrap())?;
        }
        (0..2).try_for_each(|producer| {
            let positions = [producer, producer + 2];
            let digest = positions
                .into_iter()
                .enumerate()
                .fold(0u64, |sum, (n, position)| sum.wrapping_add(ledger::digest(position as u64, n as u64)));
            book.agrees(producer, 2, digest)
        })
    };
    assert_eq!(verdict(&good), Ok(()));
    let [a, b, c, d] = [good[0], good[1], good[2], good[3]];
    for bad in [vec![a, b, c], vec![a, b, b, d], vec![c, b, a, d], vec![b, a, c, d], vec![a, a, b, c, d]] {
        assert!(verdict(&bad).is_err(), "{bad:?} passed");
    }
    for bit in 0..126 {
        let mut flipped = good.clone();
        flipped[1][bit / 63] ^= 1 << (bit % 63);
        assert!(verdict(&flipped).is_err(), "a flip of bit {bit} passed");
    }
}
