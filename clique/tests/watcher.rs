//! What a clique in use makes of answers that are late, or do not come.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
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

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
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
        self.0.gather(round, within)
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
