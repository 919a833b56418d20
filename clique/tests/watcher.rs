//! What a clique in use makes of answers that are late, or do not come.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use portway_clique::backend::Status;
use portway_clique::rendezvous::{Gathered, InProcess, Post, Rendezvous, Round};
use portway_clique::software::{Fault, Kind, Step};
use portway_clique::{Clique, CliqueError};

const CALL_WITHIN: Duration = Duration::from_millis(300);

/// A rendezvous that is late with so many answers of one phase.
#[derive(Debug)]
struct Late(Arc<InProcess>, &'static str, Arc<AtomicU32>);

impl Rendezvous for Late {
    fn participant(&self) -> u32 {
        self.0.participant()
    }

    fn participants(&self) -> u32 {
        self.0.participants()
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        self.0.post(round, post)
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        self.answer(round, Duration::ZERO)?;
        self.0.look(round)
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        self.answer(round, within)?;
        self.0.gather(round, within)
    }
}

impl Late {
    fn answer(&self, round: &Round, within: Duration) -> Result<(), CliqueError> {
        let one_less = |left: u32| left.checked_sub(1);
        let is_late = || self.2.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_ok();
        if round.phase == self.1 && is_late() {
            return Err(CliqueError::Timeout {
                what: "a test".to_owned(),
                expected: "an answer".to_owned(),
                seen: "none".to_owned(),
                waited: within,
            });
        }
        Ok(())
    }
}

fn up(job: &Job, late: &Arc<AtomicU32>) -> Clique {
    let place = Arc::new(Late(job.places[0].clone(), "life", late.clone()));
    let builder = job.builder(0, 0).call_within(CALL_WITHIN);
    builder.bring_up(job.processes[0].clone(), place, PATIENT).unwrap()
}

#[test]
fn some_late_answers_of_the_rendezvous_end_nothing_and_a_silence_does() {
    let job = Job::new(&[1]);
    let late = Arc::new(AtomicU32::new(0));
    let clique = up(&job, &late);
    late.store(3, Ordering::Release);
    let before = clique.heartbeats();
    until(PATIENT, "more heartbeats", || clique.heartbeats() > before + 5 || clique.end().is_some());
    assert!(clique.end().is_none(), "{:?}", clique.end());
    late.store(u32::MAX, Ordering::Release);
    let start = Instant::now();
    until(PATIENT, "the end", || clique.end().is_some());
    assert!(start.elapsed() >= CALL_WITHIN, "{:?}", start.elapsed());
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("the rendezvous was lost"), "{end}");
}

#[test]
fn a_library_that_does_not_say_how_it_is_ends_the_clique() {
    let job = Job::new(&[1]);
    let clique = up(&job, &Arc::default());
    job.processes[0].inject(Fault::new(Step::State, None, Kind::Hang));
    until(PATIENT, "the end", || clique.end().is_some());
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("watching did not return after"), "{end}");
    until(PATIENT, "the owner to be in quarantine", || clique.quarantine().count() == 1);
    job.fabric.release();
    until(PATIENT, "the owner to come back", || clique.quarantine().count() == 0);
}

/// In a child of some of the participants each waits by looking again and again.
#[test]
fn some_late_answers_are_no_loss_at_the_barrier_of_a_child() {
    let job = Job::new(&[1, 1, 1]);
    let late = Arc::new(AtomicU32::new(0));
    let parts: Vec<_> = (0..3)
        .map(|one| (job.builder(one, 0), job.processes[one].clone(), job.places[one].clone(), late.clone()))
        .collect();
    let cliques = each(PATIENT, parts, |_, (builder, process, place, late)| {
        builder.bring_up(process, Arc::new(Late(place, "meet", late)), PATIENT).unwrap()
    });
    late.store(4, Ordering::Release);
    let passed = each(PATIENT, cliques, |rank, mut clique| {
        let mut member = clique.members().remove(0);
        let child = member.split((rank < 2).then_some(0), 0).unwrap();
        let passed = child.map(|mut child| child.barrier().map(|()| child));
        (passed, member, clique)
    });
    for (passed, ..) in &passed {
        assert!(!matches!(passed, Some(Err(_))), "{passed:?}");
    }
    assert_eq!(late.load(Ordering::Acquire), 0, "the answers were late");
}

/// A rendezvous whose looks do not return while it is told so.
#[derive(Debug)]
struct Stuck(Arc<InProcess>, Arc<AtomicBool>);

impl Rendezvous for Stuck {
    fn participant(&self) -> u32 {
        self.0.participant()
    }

    fn participants(&self) -> u32 {
        self.0.participants()
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        self.0.post(round, post)
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        self.0.gather(round, within)
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        until(PATIENT, "being let go", || !self.1.load(Ordering::Acquire));
        self.0.look(round)
    }
}

/// A clique whose rendezvous has not answered for some heartbeats.
fn with_stuck_rendezvous(job: &Job, call_within: Duration) -> (Clique, Arc<AtomicBool>) {
    let stuck = Arc::new(AtomicBool::new(false));
    let place = Arc::new(Stuck(job.places[0].clone(), stuck.clone()));
    let builder = job.builder(0, 0).call_within(call_within);
    let clique = builder.bring_up(job.processes[0].clone(), place, PATIENT).unwrap();
    stuck.store(true, Ordering::Release);
    let before = clique.heartbeats();
    until(PATIENT, "heartbeats that wait for nobody", || clique.heartbeats() > before + 3);
    (clique, stuck)
}

#[test]
fn a_rendezvous_that_hangs_hides_no_error_of_the_library() {
    let job = Job::new(&[1]);
    let (clique, stuck) = with_stuck_rendezvous(&job, PATIENT);
    assert!(clique.end().is_none(), "{:?}", clique.end());
    job.processes[0].inject(Fault::new(Step::State, Some(0), Kind::Fail(Status::REMOTE_ERROR)));
    until(PATIENT / 4, "the library's error", || clique.end().is_some());
    assert!(stuck.swap(false, Ordering::AcqRel), "the rendezvous hung all the time");
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("remote error"), "{end}");
}

#[test]
fn a_rendezvous_that_hangs_ends_the_clique_when_its_time_is_over() {
    let job = Job::new(&[1]);
    let (clique, stuck) = with_stuck_rendezvous(&job, CALL_WITHIN);
    let start = Instant::now();
    until(PATIENT / 4, "the end", || clique.end().is_some());
    println!("recorded: ended after {:?}, of {CALL_WITHIN:?}", start.elapsed());
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("the rendezvous was lost: no answer in"), "{end}");
    stuck.store(false, Ordering::Release);
}
