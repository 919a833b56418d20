//! What one participant alone runs into, after it has said that it goes on: the others hear of it.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;
#[path = "support/meddled.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod meddled;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use meddled::{Call, Meddled};
use portway_clique::backend::Status;
use portway_clique::rendezvous::Hub;
use portway_clique::software::{Fabric, Fault, Kind, Software, Step};
use portway_clique::{Clique, CliqueError, Member};

/// The deadline of the participant that is late.
const SHORT: Duration = Duration::from_millis(1500);

/// Brings two participants up. The second has little time, and a rendezvous whose first call like this takes all of it.
fn with_one_that_is_late(call: Call, phase: &'static str) -> Vec<Result<Clique, CliqueError>> {
    let job = Job::new(&[1, 1]);
    let let_go = Arc::new(AtomicBool::new(false));
    let (first, is_let_go) = (AtomicBool::new(true), let_go.clone());
    let meddle = move |now, of: &str| {
        if (now, of) == (call, phase) && first.swap(false, Ordering::AcqRel) {
            until(PATIENT, "being let go", || is_let_go.load(Ordering::Acquire));
        }
        Ok(())
    };
    let meddled = Meddled(job.places[1].clone(), Box::new(meddle));
    let calm = Meddled(job.places[0].clone(), Box::new(|_, _| Ok(())));
    let parts = vec![(0, calm, PATIENT), (1, meddled, SHORT)];
    let parts = parts.into_iter().map(|(one, place, within)| {
        (job.builder(one, 0), job.processes[one].clone(), Arc::new(place), within)
    });
    let results = each(PATIENT, parts.collect(), |_, (builder, process, place, within)| {
        builder.bring_up(process, place, within)
    });
    let_go.store(true, Ordering::Release);
    results
}

/// It has said that all is done, and then its time is over before it has heard the others, or that its word has arrived.
/// The others are ready; they hear of it while they live.
#[test]
fn whoever_fails_last_of_all_is_heard_of_by_those_who_are_ready() {
    for (call, cause) in [
        (Call::Gather, "the rendezvous did not return by the deadline"),
        (Call::Posted, "posting \"used\": waited"),
    ] {
        let mut results = with_one_that_is_late(call, "used");
        let late = results.pop().unwrap().map(drop).unwrap_err().to_string();
        assert!(late.contains(cause), "{call:?}: {late}");
        let ready = results.pop().unwrap().unwrap();
        until(PATIENT / 4, &format!("{call:?}: the one that is ready to hear of it"), || {
            ready.end().is_some()
        });
        let end = ready.end().unwrap().to_string();
        assert!(end.contains(cause), "{call:?}: {end}");
    }
}

/// The same before there is a first use: the others are still in it.
#[test]
fn whoever_fails_after_it_was_up_is_heard_of_in_the_first_use() {
    for call in [Call::Gather, Call::Posted] {
        let start = Instant::now();
        for result in with_one_that_is_late(call, "up") {
            let error = result.map(drop).unwrap_err();
            assert!(matches!(error, CliqueError::Failed(_)), "{call:?}: {error}");
        }
        assert!(start.elapsed() < PATIENT / 4, "{call:?}: {:?}", start.elapsed());
    }
}

/// Two members at a barrier; how each left it, and why each clique has ended, if it has.
fn at_a_barrier(is_lost: bool) -> Vec<(Result<(), CliqueError>, Clique, Member)> {
    let job = Job::new(&[1, 1]);
    let parts = [0, 1].map(|one| {
        let meddle = move |call, phase: &str| {
            if is_lost && one == 0 && (call, phase) == (Call::Gather, "meet") {
                let (what, message) = ("the connection to the store".to_owned(), "reset".to_owned());
                return Err(CliqueError::System { what, errno: None, message });
            }
            Ok(())
        };
        let place = Meddled(job.places[one].clone(), Box::new(meddle));
        (job.builder(one, 0), job.processes[one].clone(), Arc::new(place))
    });
    each(PATIENT, parts.into(), |_, (builder, process, place)| {
        let mut clique = builder.bring_up(process, place, PATIENT).unwrap();
        let mut member = clique.members().remove(0);
        (member.barrier(), clique, member)
    })
}

/// One does not get to hear at a barrier that all have come, and another one may have passed: it ends for both.
#[test]
fn a_rendezvous_that_fails_at_a_barrier_ends_the_clique_for_all() {
    let sides = at_a_barrier(true);
    for (one, (_, clique, _)) in sides.iter().enumerate() {
        until(PATIENT / 4, &format!("participant {one} to end"), || clique.end().is_some());
        let end = clique.end().unwrap().to_string();
        assert!(end.contains("the connection to the store: reset"), "participant {one}: {end}");
    }
    assert!(matches!(sides[0].0, Err(CliqueError::Failed(_))), "{:?}", sides[0].0);
    // The control.
    for (passed, clique, _) in &at_a_barrier(false) {
        assert!(passed.is_ok() && clique.end().is_none(), "{passed:?}, {:?}", clique.end());
    }
}

/// After a failure the next attempt takes the same seat, at once.
#[test]
fn a_bring_up_that_failed_has_left_its_seat() {
    let process = Arc::new(Software::new(&Fabric::new(1)));
    let hub = Hub::new(1).unwrap();
    process.inject(Fault::new(Step::Uuid, None, Kind::Fail(Status::SYSTEM_ERROR)));
    for attempt in 0..300 {
        let place = hub.join(0).unwrap_or_else(|error| panic!("attempt {attempt}: {error}"));
        let builder = Clique::builder("test", 1).attempt(attempt).local(0, 0);
        let error = builder.bring_up(process.clone(), Arc::new(place), PATIENT).map(drop).unwrap_err();
        assert!(matches!(error, CliqueError::Failed(_)), "{error}");
    }
}
