//! The suite with an end behind a stream: it finds the same, and neither side waits without end for the other.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use portway_fifo::Heap;
use portway_proxy::TransportError;
use portway_proxy::conformance::broken::{Broken, Defect};
use portway_proxy::conformance::{self, End, Failing, Fixture, Limits, Outcome, Pair, checks, serve};
use portway_proxy::loopback::{Config, Faults, Loopback};
use portway_proxy::transport::Transport;

/// Longer than anything here takes, so that a hang becomes a failure.
const LIMIT: Duration = Duration::from_secs(120);

fn end(transport: impl Transport + 'static) -> End {
    End::new(transport, |len_bytes| Heap.allocate(len_bytes))
}

type Served = mpsc::Receiver<Result<(), TransportError>>;

/// Plays the other process on a thread: the end that the suite gets, and what `serve` returns.
fn served(end: End, idle: Duration) -> (End, Served) {
    let (here, there) = UnixStream::pair().unwrap();
    let (done, served) = mpsc::channel();
    std::thread::spawn(move || {
        let reader = there.try_clone().unwrap();
        // Nobody listens if the test has failed.
        let _ = done.send(serve(&end, reader, there, idle));
    });
    (End::remote(here.try_clone().unwrap(), here), served)
}

/// The same two ends for every check.
struct Ends {
    pair: Pair,
    failing: End,
    limits: Limits,
}

impl Fixture for Ends {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(self.pair.clone())
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Pair(Pair { a: self.failing.clone(), b: self.pair.b.clone() }))
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

fn loopback() -> (Loopback, Loopback) {
    let loopback = Loopback::new(Config::default()).unwrap();
    let fails = loopback.with_faults(Faults { fail_at: Some(30), ..Faults::default() });
    (loopback, fails)
}

#[test]
fn the_suite_passes_with_both_ends_behind_streams() {
    let (good, fails) = loopback();
    let (a, a_served) = served(end(good.clone()), LIMIT);
    let (b, b_served) = served(end(good), LIMIT);
    let (failing, failing_served) = served(end(fails), LIMIT);
    let ends = Ends { pair: Pair { a, b }, failing, limits: Limits::default() };
    let report = conformance::run(&ends);
    println!("{report}");
    report.assert();
    assert_eq!(report.waived().count(), 0);
    drop(ends);
    for served in [a_served, b_served, failing_served] {
        served.recv_timeout(LIMIT).expect("serve returns when the suite is done").unwrap();
    }
}

#[test]
fn a_defect_behind_a_stream_is_found() {
    let (good, fails) = loopback();
    for (defect, check, words) in [
        (
            Defect::SignalOvertakes,
            checks::signals_stay_behind_data as fn(&dyn Fixture) -> Outcome,
            "side B: expected with",
        ),
        (Defect::Slow, checks::no_call_blocks, "side A: expected kick returns at once"),
        (Defect::ForgottenOp, checks::every_op_completes_once, "side A: expected op 2 of lane 0 completes"),
        (Defect::Blocking, checks::no_call_blocks, "side A: expected a command returns; seen it has not"),
    ] {
        let limits = match defect {
            Defect::Slow => Limits { call: Duration::from_millis(150), ..Limits::default() },
            _ => Limits { wait: Duration::from_secs(2), ..Limits::default() },
        };
        let broken = Broken::new(good.clone(), defect);
        let (a, a_served) = served(end(broken.clone()), Duration::from_secs(10));
        let ends = Ends { pair: Pair { a, b: end(broken) }, failing: end(fails.clone()), limits };
        match check(&ends) {
            Outcome::Failed(failure) if failure.to_string().contains(words) => {}
            outcome => panic!("{defect:?}: {outcome:?}"),
        }
        if defect == Defect::Blocking {
            // What comes after it fails too, at once and by name.
            match checks::polls_alone_finish(&ends) {
                Outcome::Failed(failure) => {
                    assert!(failure.seen.contains("an earlier check still waits"), "{failure}");
                }
                outcome => panic!("{outcome:?}"),
            }
            match a_served.recv_timeout(LIMIT).expect("serve gives up") {
                Err(TransportError::Timeout { peer, .. }) => assert_eq!(peer, "a port in poll"),
                result => panic!("{result:?}"),
            }
        }
    }
}

#[test]
fn a_stream_that_ends_is_named() {
    let (good, fails) = loopback();
    let (here, there) = UnixStream::pair().unwrap();
    drop(there);
    let b = End::remote(here.try_clone().unwrap(), here);
    let ends = Ends { pair: Pair { a: end(good), b }, failing: end(fails), limits: Limits::default() };
    let report = conformance::run(&ends);
    assert_eq!(report.failed().count(), report.entries.len(), "{report}");
    for (check, failure) in report.failed() {
        assert!(
            failure.who == "side B" && failure.seen.starts_with("the stream: "),
            "{}: {failure}",
            check.name
        );
    }
}

#[test]
fn a_process_that_says_nothing_is_not_waited_for_without_end() {
    let (good, fails) = loopback();
    let (here, _silent) = UnixStream::pair().unwrap();
    let b = End::remote(here.try_clone().unwrap(), here);
    let limits = Limits { wait: Duration::from_millis(200), ..Limits::default() };
    let ends = Ends { pair: Pair { a: end(good), b }, failing: end(fails), limits };
    let start = Instant::now();
    match checks::no_call_blocks(&ends) {
        Outcome::Failed(failure) => assert!(failure.seen.contains("not within 200ms"), "{failure}"),
        outcome => panic!("{outcome:?}"),
    }
    assert!(start.elapsed() < LIMIT);
}

#[test]
fn serve_ends_when_nothing_comes_or_what_comes_makes_no_sense() {
    let (good, _) = loopback();
    let (suite, served_nothing) = served(end(good.clone()), Duration::from_millis(100));
    match served_nothing.recv_timeout(LIMIT).expect("serve gives up") {
        Err(TransportError::Timeout { peer, .. }) => assert_eq!(peer, "the suite"),
        result => panic!("{result:?}"),
    }
    drop(suite);

    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(&[1, 0, 0, 0, 0xee]).unwrap();
    match serve(&end(good), there.try_clone().unwrap(), there, LIMIT) {
        Err(TransportError::Malformed { what: "the suite's stream", .. }) => {}
        result => panic!("{result:?}"),
    }
    let mut rest = Vec::new();
    here.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "no answer to what was not understood");

    let (here, there) = UnixStream::pair().unwrap();
    let remote = End::remote(here.try_clone().unwrap(), here);
    match serve(&remote, there.try_clone().unwrap(), there, LIMIT) {
        Err(TransportError::Malformed { what: "the end to serve", .. }) => {}
        result => panic!("{result:?}"),
    }
}
