//! The suite over loopback: it passes, whatever loopback does short of breaking the contract; and each broken port is
//! found by the check that is meant for it.

use std::time::Duration;

use portway_fifo::{Heap, Region};
use portway_proxy::TransportError;
use portway_proxy::conformance::broken::{Broken, Defect};
use portway_proxy::conformance::{self, CHECKS, End, Failing, Fixture, Limits, Outcome, Pair};
use portway_proxy::loopback::{Config, Faults, Loopback};
use portway_proxy::transport::{
    Binding, Close, Completion, Endpoint, Lane, LocalMemory, Op, Port, RemoteMemory, Submit, Transport,
};

fn end(transport: impl Transport + 'static) -> End {
    End::new(transport, |len_bytes| Heap.allocate(len_bytes))
}

/// Loopback, with faults that the contract allows.
struct OverLoopback(Loopback);

impl OverLoopback {
    fn new(config: Config) -> Self {
        OverLoopback(Loopback::new(config).unwrap())
    }
}

impl Fixture for OverLoopback {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(self.0.clone()), b: end(self.0.clone()) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        let fails = self.0.with_faults(Faults { fail_at: Some(30), ..Faults::default() });
        Ok(Failing::Pair(Pair { a: end(fails), ..self.pair()? }))
    }
}

fn passes(config: Config) {
    let report = conformance::run(&OverLoopback::new(config));
    println!("{report}");
    report.assert();
    assert_eq!(report.waived().count(), 0, "loopback can be made to do everything");
    assert_eq!(report.entries.len(), CHECKS.len());
}

#[test]
fn loopback_passes() {
    passes(Config::default());
}

#[test]
fn loopback_passes_with_delays() {
    passes(Config { faults: Faults { delay_polls: 3, ..Faults::default() }, ..Config::default() });
}

#[test]
fn loopback_passes_out_of_order() {
    passes(Config { faults: Faults { reorder_seed: Some(7), ..Faults::default() }, ..Config::default() });
}

#[test]
fn loopback_passes_when_it_often_refuses() {
    passes(Config { faults: Faults { refuse_every: 3, ..Faults::default() }, ..Config::default() });
}

#[test]
fn loopback_passes_with_everything_and_little_room() {
    let faults = Faults { delay_polls: 2, reorder_seed: Some(11), refuse_every: 5, ..Faults::default() };
    passes(Config { depth: 3, faults });
}

/// A broken port at both ends; and one that fails besides.
struct OverBroken {
    broken: Broken,
    failing: Broken,
    defect: Defect,
}

impl OverBroken {
    fn new(defect: Defect) -> Self {
        let loopback = Loopback::new(Config::default()).unwrap();
        let fails = loopback.with_faults(Faults { fail_at: Some(30), ..Faults::default() });
        let (broken, failing) = (Broken::new(loopback, defect), Broken::new(fails, defect));
        OverBroken { broken, failing, defect }
    }
}

impl Fixture for OverBroken {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(self.broken.clone()), b: end(self.broken.clone()) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Pair(Pair { a: end(self.failing.clone()), b: end(self.broken.clone()) }))
    }

    fn limits(&self) -> Limits {
        let limits = Limits::default();
        match self.defect {
            // What these never do is waited for.
            Defect::Blocking
            | Defect::StaysFull
            | Defect::ForgottenOp
            | Defect::NeedsKicks
            | Defect::NeverQuiesced => Limits { wait: Duration::from_secs(2), ..limits },
            Defect::Slow | Defect::SlowDrop | Defect::WaitsForPeer => {
                Limits { call: Duration::from_millis(150), ..limits }
            }
            _ => limits,
        }
    }
}

/// A part of what the check that finds the defect has to say.
fn words(defect: Defect) -> &'static str {
    match defect {
        Defect::Blocking => "expected poll returns; seen it has not within 2s",
        Defect::Slow => "kick returns at once",
        Defect::SlowDrop => "drop returns at once",
        Defect::WaitsForPeer => "submit returns at once",
        Defect::HalfAccepted => "was refused",
        Defect::StaysFull => "is accepted in the end",
        Defect::SignalOvertakes | Defect::LostPut | Defect::TailArrivesLate => "expected with signal word",
        Defect::StaleSignal | Defect::TruncatedSignal => "takes the values of the ops in order",
        Defect::ForgottenOp => "completes within 2s; seen of 112 ops 112 accepted and 111 complete",
        Defect::RepeatedCompletion => "a second completion: op 2 of lane 0",
        Defect::OverfullPoll => "2 completions reported, with room for 1",
        Defect::EarlyCompletion | Defect::EarlyFlush => "expected with signal word",
        Defect::OutOfBounds => "which nobody was to write",
        Defect::WritesBehind => "at offset 100003, of the range",
        Defect::MixesLanes => "expected with signal word",
        Defect::WritesOnceQuiesced => "in what the quiesced port had bound: byte",
        Defect::ForgetsError => "returns “put over loopback to the other end failed",
        Defect::ChangesError => "again; seen the port is closed",
        Defect::OpenOnceClosed => "submit on lane 0 returns “an error”",
        Defect::NeedsKicks => "of 32 ops 32 accepted and 1 complete",
        Defect::LanesFromOne => "lane 0 from bind, as lanes count from 0; seen lane 1",
        Defect::BindingSpoils => "expected destination is refused as Unknown; seen the port is closed",
        Defect::NeverQuiesced => "quiesced in the end; seen Pending after",
        Defect::KeepsMemory => "expected release succeeds",
        Defect::ReleasesBound => "memory that is bound is refused as Busy; seen success",
        Defect::ForgetsBound => "a destination that is bound is refused as Busy; seen success",
        Defect::TrustsBytes => "cut to 0 bytes is refused as Malformed",
        Defect::Panics => "a panic: the twelfth poll of a broken port",
        _ => panic!("{defect:?} has no words here"),
    }
}

/// What the check that is meant for a defect says instead of finding it.
fn miss(defect: Defect, name: &str) -> Option<String> {
    let check = CHECKS.iter().find(|check| check.name == name).expect("a check of that name");
    let outcome = (check.run)(&OverBroken::new(defect));
    println!("{defect:?}: {name}: {outcome:?}");
    match &outcome {
        Outcome::Failed(failure) if failure.to_string().contains(words(defect)) => None,
        _ => Some(format!("{defect:?}, not found by {name} with “{}”: {outcome:?}", words(defect))),
    }
}

#[test]
fn every_defect_is_found_by_its_check() {
    // All at the same time, as some take theirs. Each ends by itself: a check waits for nothing without a limit.
    let misses: Vec<String> = std::thread::scope(|scope| {
        let found = |&(defect, name): &(Defect, &'static str)| scope.spawn(move || miss(defect, name));
        let threads: Vec<_> = Defect::ALL.iter().map(found).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(misses.is_empty(), "{}", misses.join("\n"));
}

#[test]
fn every_sentence_has_a_defect_that_its_check_finds() {
    for check in CHECKS {
        let found = Defect::ALL.iter().any(|(_, name)| *name == check.name);
        assert!(found, "nothing shows that {} can fail", check.name);
    }
}

/// Loopback whose ports do all that they can as soon as they are offered an op.
#[derive(Clone, Debug)]
struct Eager(Loopback);

impl Transport for Eager {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        self.0.register(region)
    }

    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        self.0.signal_word()
    }

    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        self.0.release(memory)
    }

    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        self.0.export(memory)
    }

    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        self.0.import(bytes)
    }

    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        self.0.forget(memory)
    }

    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        let (endpoint, bytes) = self.0.endpoint()?;
        Ok((Box::new(EagerEnd(endpoint)), bytes))
    }
}

#[derive(Debug)]
struct EagerEnd(Box<dyn Endpoint>);

impl Endpoint for EagerEnd {
    fn connect(self: Box<Self>, peer: &[u8], timeout: Duration) -> Result<Box<dyn Port>, TransportError> {
        Ok(Box::new(EagerPort(self.0.connect(peer, timeout)?)))
    }
}

#[derive(Debug)]
struct EagerPort(Box<dyn Port>);

impl Port for EagerPort {
    fn bind(&mut self, binding: &Binding) -> Result<Lane, TransportError> {
        self.0.bind(binding)
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        let answer = self.0.submit(op)?;
        self.0.kick()?;
        Ok(answer)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        self.0.kick()
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        self.0.poll(completions)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        self.0.close()
    }
}

/// What an op does may be seen before the port is kicked.
#[test]
fn a_port_that_works_before_it_is_kicked_passes() {
    struct OverEager(OverLoopback);
    impl Fixture for OverEager {
        fn pair(&self) -> Result<Pair, TransportError> {
            let eager = || end(Eager(self.0.0.clone()));
            Ok(Pair { a: eager(), b: eager() })
        }

        fn failing_pair(&self) -> Result<Failing, TransportError> {
            self.0.failing_pair()
        }
    }
    let report = conformance::run(&OverEager(OverLoopback::new(Config::default())));
    report.assert();
    assert_eq!(report.waived().count(), 0);
}

/// Loopback that cannot be made to fail.
struct Reliable(Loopback);

impl Fixture for Reliable {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(self.0.clone()), b: end(self.0.clone()) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Waived("this loopback does not fail".into()))
    }
}

#[test]
fn what_a_fixture_cannot_do_is_waived_by_name() {
    let reliable = Reliable(Loopback::new(Config::default()).unwrap());
    let outcome = conformance::checks::an_error_stays(&reliable);
    assert_eq!(outcome, Outcome::Waived("this loopback does not fail".into()));
    // A port that takes more than the check offers.
    let roomy = OverLoopback::new(Config { depth: 1 << 20, ..Config::default() });
    let outcome = conformance::checks::full_leaves_no_trace(&roomy);
    assert!(matches!(&outcome, Outcome::Waived(reason) if reason.contains("was not full")), "{outcome:?}");
}
