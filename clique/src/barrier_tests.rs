use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Instant;

use super::*;

const PATIENT: Duration = Duration::from_secs(10);

fn spawn<R: Send + 'static>(
    barrier: &Arc<Barrier<u32>>,
    body: impl FnOnce(&Barrier<u32>) -> R + Send + 'static,
) -> JoinHandle<R> {
    let barrier = barrier.clone();
    std::thread::spawn(move || body(&barrier))
}

fn arrive(barrier: &Barrier<u32>, seat: u32, within: Duration) -> Result<u32, CliqueError> {
    barrier.arrive(seat, "a test", Ok(()), within, |word| word.map(|()| 7))
}

fn config(what: &str) -> CliqueError {
    CliqueError::Config { what: what.to_owned(), expected: "a".to_owned(), seen: "b".to_owned() }
}

/// Nobody is ahead of anybody by more than one pass, and one leads each.
#[test]
fn all_pass_together_again_and_again() {
    const SEATS: u32 = 8;
    const PASSES: u32 = 2_000;
    let barrier = Arc::new(Barrier::new(SEATS));
    let counts: Arc<Vec<AtomicU32>> = Arc::new((0..SEATS).map(|_| AtomicU32::new(0)).collect());
    let led = Arc::new(AtomicU32::new(0));
    let threads: Vec<_> = (0..SEATS)
        .map(|seat| {
            let (counts, led) = (counts.clone(), led.clone());
            spawn(&barrier, move |barrier| {
                for pass in 0..PASSES {
                    counts[seat as usize].store(pass + 1, Ordering::Relaxed);
                    let lead =
                        |word: Result<(), CliqueError>| word.map(|()| led.fetch_add(1, Ordering::Relaxed));
                    let number = barrier.arrive(seat, "a test", Ok(()), PATIENT, lead).unwrap();
                    assert_eq!(number, pass, "what the leader of this pass said");
                    for other in counts.iter() {
                        let other = other.load(Ordering::Relaxed);
                        assert!(other == pass + 1 || other == pass + 2, "{other} in pass {pass}");
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(led.load(Ordering::Relaxed), PASSES);
}

/// An error waits for everybody, reaches everybody, and the barrier goes on.
#[test]
fn an_error_does_not_leave_early() {
    let barrier = Arc::new(Barrier::new(2));
    let (left, has_left) = sync_channel(1);
    let thread = spawn(&barrier, move |barrier| {
        let result = barrier.arrive(0, "a test", Err(config("mine")), PATIENT, |word| word.map(|()| 7));
        left.send(()).unwrap();
        result
    });
    while lock(&barrier.state).come().is_empty() {
        std::thread::yield_now();
    }
    has_left.recv_timeout(Duration::from_millis(50)).expect_err("it stays until all have come");
    let other = arrive(&barrier, 1, PATIENT).unwrap_err();
    let own = thread.join().unwrap().unwrap_err();
    assert_eq!(own.to_string(), other.to_string());
    assert!(own.to_string().starts_with("mine"), "{own}");
    let thread = spawn(&barrier, |barrier| arrive(barrier, 0, PATIENT));
    assert_eq!(arrive(&barrier, 1, PATIENT).unwrap(), 7);
    assert_eq!(thread.join().unwrap().unwrap(), 7);
}

/// Those who trickle in late do not stretch the deadline of the first, and the missing ones can be told from the rest.
#[test]
fn trickling_arrivals_do_not_stretch_the_deadline() {
    let barrier = Arc::new(Barrier::new(8));
    let start = Instant::now();
    let first = Duration::from_millis(300);
    let threads: Vec<_> = (0..7)
        .map(|seat| {
            spawn(&barrier, move |barrier| {
                std::thread::sleep(Duration::from_millis(u64::from(seat) * 30));
                let result = arrive(barrier, seat, if seat == 0 { first } else { PATIENT });
                (result, start.elapsed())
            })
        })
        .collect();
    for thread in threads {
        let (result, took) = thread.join().unwrap();
        let error = result.unwrap_err();
        assert!(took < first + Duration::from_millis(250), "{took:?}");
        assert!(
            matches!(&error, CliqueError::Timeout { seen, .. } if seen == "[0, 1, 2, 3, 4, 5, 6]"),
            "{error}"
        );
    }
    // It is broken for good, at once.
    let start = Instant::now();
    assert!(matches!(arrive(&barrier, 7, PATIENT), Err(CliqueError::Timeout { .. })));
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn more_than_declared_is_an_error() {
    let barrier = Arc::new(Barrier::new(2));
    let thread = spawn(&barrier, |barrier| arrive(barrier, 0, PATIENT));
    while lock(&barrier.state).come().is_empty() {
        std::thread::yield_now();
    }
    for seat in [0, 2] {
        let error = arrive(&barrier, seat, PATIENT).unwrap_err();
        assert!(
            matches!(&error, CliqueError::Crowded { seat: who, seats: 2, come, .. } if *who == seat && *come == [0]),
            "{error}"
        );
    }
    // Who was there before is not disturbed.
    assert_eq!(arrive(&barrier, 1, PATIENT).unwrap(), 7);
    assert_eq!(thread.join().unwrap().unwrap(), 7);
}

/// A third arrival while the leader is out talking to others.
#[test]
fn more_than_declared_while_the_leader_leads() {
    let barrier = Arc::new(Barrier::new(1));
    let (leads, is_leading) = sync_channel(1);
    let (go, gone) = sync_channel(1);
    let thread = spawn(&barrier, move |barrier| {
        barrier.arrive(0, "a test", Ok(()), PATIENT, |word| {
            leads.send(()).unwrap();
            let _ = gone.recv_timeout(PATIENT);
            word.map(|()| 1)
        })
    });
    is_leading.recv_timeout(PATIENT).unwrap();
    assert!(matches!(arrive(&barrier, 0, PATIENT), Err(CliqueError::Crowded { .. })));
    go.send(()).unwrap();
    assert_eq!(thread.join().unwrap().unwrap(), 1);
}

#[test]
fn who_comes_for_something_else_is_named() {
    let barrier = Arc::new(Barrier::new(2));
    let thread = spawn(&barrier, |barrier| arrive(barrier, 0, PATIENT));
    while lock(&barrier.state).come().is_empty() {
        std::thread::yield_now();
    }
    let own = barrier.arrive(1, "another", Ok(()), PATIENT, |word| word.map(|()| 7)).unwrap_err();
    let other = thread.join().unwrap().unwrap_err();
    let expected = "what local seat 1 came to the barrier for: expected a test, seen another";
    assert_eq!((own.to_string(), other.to_string()), (expected.to_owned(), expected.to_owned()));
}

#[test]
fn a_seat_that_is_left_counts_as_failed() {
    let barrier = Arc::new(Barrier::new(3));
    let threads: Vec<_> =
        (0..2).map(|seat| spawn(&barrier, move |barrier| arrive(barrier, seat, PATIENT))).collect();
    while lock(&barrier.state).come().len() < 2 {
        std::thread::yield_now();
    }
    let start = Instant::now();
    barrier.leave(2);
    for thread in threads {
        assert!(matches!(thread.join().unwrap(), Err(CliqueError::Left { seat: 2 })));
    }
    assert!(matches!(arrive(&barrier, 0, PATIENT), Err(CliqueError::Left { seat: 2 })));
    assert!(start.elapsed() < PATIENT / 2, "{:?}", start.elapsed());
}

#[test]
fn a_panic_of_the_leader_reaches_all() {
    let barrier = Arc::new(Barrier::new(2));
    let arrive = |barrier: &Barrier<u32>, seat| {
        barrier.arrive(seat, "a test", Ok(()), PATIENT, |_| panic!("the leader's mistake"))
    };
    let thread = spawn(&barrier, move |barrier| arrive(barrier, 0));
    let own = arrive(&barrier, 1);
    for result in [own, thread.join().unwrap()] {
        assert_eq!(result.unwrap_err().to_string(), "the leader of a barrier panicked: the leader's mistake");
    }
    // It is not in the way of the next pass.
    let thread = spawn(&barrier, |barrier| super::tests::arrive(barrier, 0, PATIENT));
    assert_eq!(super::tests::arrive(&barrier, 1, PATIENT).unwrap(), 7);
    assert_eq!(thread.join().unwrap().unwrap(), 7);
}

/// A leader that does not come back by the deadline is not waited for.
#[test]
fn a_leader_that_hangs_is_not_waited_for() {
    let barrier = Arc::new(Barrier::new(2));
    let within = Duration::from_millis(100);
    let (go, gone) = sync_channel::<()>(1);
    let waiter = spawn(&barrier, move |barrier| {
        let start = Instant::now();
        (arrive(barrier, 0, within), start.elapsed())
    });
    while lock(&barrier.state).come().is_empty() {
        std::thread::yield_now();
    }
    let leader = spawn(&barrier, move |barrier| {
        barrier.arrive(1, "a test", Ok(()), within, |word| {
            let _ = gone.recv_timeout(PATIENT);
            word.map(|()| 7)
        })
    });
    let (result, took) = waiter.join().unwrap();
    assert!(matches!(result, Err(CliqueError::Timeout { .. })), "{result:?}");
    assert!(took >= within && took < PATIENT / 4, "{took:?}");
    go.send(()).unwrap();
    assert!(matches!(leader.join().unwrap(), Err(CliqueError::Timeout { .. })), "all get the same");
}

/// Whoever is refused leaves nothing behind: the next to come is the first.
#[test]
fn a_seat_that_does_not_exist_sets_no_purpose() {
    let barrier = Barrier::new(1);
    let error = barrier.arrive(1, "something else", Ok(()), PATIENT, |word| word.map(|()| 7)).unwrap_err();
    assert!(matches!(error, CliqueError::Crowded { seat: 1, .. }), "{error}");
    assert_eq!(arrive(&barrier, 0, PATIENT).unwrap(), 7);
}

fn meet(barrier: &Barrier<u32>, seat: u32, purpose: &str, within: Duration) -> Result<u32, CliqueError> {
    let arrival = Arrival { seat, purpose, word: Ok(()), within, late: Late::CallsOff };
    barrier.meet(arrival, |word, _| word.map(|()| 7))
}

/// Those who came get the time-out, whoever comes late for the same pass gets it at once, and the next pass is whole.
#[test]
fn a_pass_that_is_called_off_breaks_nothing() {
    const SHORT: Duration = Duration::from_millis(40);
    let barrier = Arc::new(Barrier::new(3));
    for pass in ["one", "two"] {
        let both = [0, 1].map(|seat| spawn(&barrier, move |barrier| meet(barrier, seat, pass, SHORT)));
        for error in both.map(|one| one.join().unwrap().unwrap_err()) {
            assert!(matches!(error, CliqueError::Timeout { .. }), "{error}");
            assert!(error.to_string().contains(&format!("the barrier for {pass}")), "{error}");
        }
        assert!(!barrier.is_broken());
    }
    for pass in ["one", "two"] {
        let start = Instant::now();
        let late = meet(&barrier, 2, pass, PATIENT).unwrap_err();
        assert!(late.to_string().contains(&format!("the barrier for {pass}")), "{late}");
        assert!(start.elapsed() < PATIENT / 4, "{:?}", start.elapsed());
    }
    let all = [0, 1, 2].map(|seat| spawn(&barrier, move |barrier| meet(barrier, seat, "three", PATIENT)));
    assert_eq!(all.map(|one| one.join().unwrap().unwrap()), [7; 3]);
}

/// One who cannot come again decides, whoever's time is over first: the barrier breaks, and no purpose is called off.
#[test]
fn a_pass_of_both_kinds_breaks() {
    for (first, second) in [(Late::Breaks, Late::CallsOff), (Late::CallsOff, Late::Breaks)] {
        let barrier = Arc::new(Barrier::new(3));
        let threads = [(0, first), (1, second)].map(|(seat, late)| {
            let thread = spawn(&barrier, move |barrier| {
                let (purpose, within) = ("a test", Duration::from_millis(500));
                barrier.meet(Arrival { seat, purpose, word: Ok(()), within, late }, |_, _| Ok(7))
            });
            // One after the other, so that each order is there once.
            let start = Instant::now();
            while !lock(&barrier.state).come().contains(&seat) {
                assert!(start.elapsed() < PATIENT, "seat {seat} has not come");
                std::thread::yield_now();
            }
            thread
        });
        for thread in threads {
            let error = thread.join().unwrap().unwrap_err();
            assert!(matches!(error, CliqueError::Timeout { .. }), "{error}");
        }
        assert!(barrier.is_broken() && lock(&barrier.state).called_off.is_empty(), "{first:?} {second:?}");
    }
}

/// The last to come after the time does not lead a pass that is over.
#[test]
fn nobody_leads_when_the_time_is_over() {
    let barrier = Barrier::<u32>::new(2);
    let mut state = lock(&barrier.state);
    state.arrived[0] = true;
    state.purpose = Some("a test".to_owned());
    state.deadline = Some(Deadline::after(Duration::ZERO));
    drop(state);
    let error = meet(&barrier, 1, "a test", PATIENT).unwrap_err();
    assert!(matches!(error, CliqueError::Timeout { .. }) && !barrier.is_broken(), "{error}");
    assert_eq!(
        meet(&barrier, 0, "a test", PATIENT).unwrap_err().to_string(),
        error.to_string(),
        "called off"
    );
}

/// The control, and the other half: a time-out of a pass that cannot be called off breaks the barrier for good; and the
/// leader is told the deadline of the first to come.
#[test]
fn the_leader_is_told_the_first_deadline() {
    let barrier = Arc::new(Barrier::new(2));
    const LIMIT: Duration = Duration::from_secs(2);
    let first = spawn(&barrier, |barrier| meet(barrier, 0, "a test", LIMIT));
    let start = Instant::now();
    while lock(&barrier.state).come() != [0] {
        assert!(start.elapsed() < LIMIT, "the first has not come");
        std::thread::yield_now();
    }
    let arrival = Arrival { seat: 1, purpose: "a test", word: Ok(()), within: PATIENT, late: Late::CallsOff };
    let left = std::cell::Cell::new(PATIENT);
    let lead = |word: Result<(), CliqueError>, deadline: Deadline| {
        left.set(deadline.left());
        word.map(|()| 7)
    };
    assert_eq!(barrier.meet(arrival, lead).unwrap(), 7);
    assert!(left.get() < LIMIT, "{:?}", left.get());
    first.join().unwrap().unwrap();
    assert!(matches!(arrive(&barrier, 0, Duration::from_millis(20)), Err(CliqueError::Timeout { .. })));
    assert!(barrier.is_broken());
}
