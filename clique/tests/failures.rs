//! Each participant fails, hangs or panics at each step of a bring-up: everybody gets an error in time that says who and
//! why, nothing is left behind, and a second attempt works.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;
#[path = "support/meddled.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod meddled;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use meddled::{Call, Meddled};
use portway_clique::backend::Status;
use portway_clique::software::{Fault, Kind, Live, Software, Step};
use portway_clique::state::Phase;
use portway_clique::{CliqueError, Failure};

/// The deadline of a bring-up in which something hangs.
const SHORT: Duration = Duration::from_millis(400);
/// How much later than its deadline a bring-up may return, on a machine that others use as well.
const LATE: Duration = Duration::from_millis(600);

fn failure(error: &CliqueError) -> &Arc<Failure> {
    match error {
        CliqueError::Failed(failure) => failure,
        other => panic!("not a failure: {other}"),
    }
}

/// Where something goes wrong, and the phase that the error has to name.
const STEPS: [(Step, Phase); 9] = [
    (Step::Uuid, Phase::Gathering),
    (Step::UniqueId, Phase::Verified),
    (Step::Workspace, Phase::Initialising),
    (Step::Init, Phase::Initialising),
    (Step::InitProgress, Phase::Initialising),
    (Step::Shape, Phase::Initialising),
    (Step::Enqueue, Phase::FirstUse),
    (Step::EnqueueProgress, Phase::FirstUse),
    (Step::Result, Phase::FirstUse),
];

/// What one case of the matrix is.
#[derive(Clone, Copy, Debug)]
struct Case {
    participant: usize,
    step: Step,
    phase: Phase,
    kind: Kind,
}

fn cases(kind: Kind) -> Vec<Case> {
    let makes_sense = |participant: usize, step: Step| match step {
        // Participant 0 has rank 0, and makes the id.
        Step::UniqueId => participant == 0,
        // Results can only be wrong.
        Step::Result => matches!(kind, Kind::Fail(_)),
        _ => true,
    };
    let mut cases = Vec::new();
    for (step, phase) in STEPS {
        for participant in 0..3 {
            if makes_sense(participant, step) {
                cases.push(Case { participant, step, phase, kind });
            }
        }
    }
    cases
}

/// Runs a case: ranks 0 and 1 in participant 0, 2 in participant 1, 3 and 4 in participant 2.
fn run(case: Case) {
    let mut job = Job::new(&[2, 1, 2]);
    let hangs = matches!(case.kind, Kind::Hang);
    job.within = if hangs { SHORT } else { PATIENT };
    // The last rank of the participant.
    let rank = *job.ranks[case.participant].last().unwrap();
    let has_rank = !matches!(case.step, Step::Uuid | Step::UniqueId | Step::Workspace);
    job.processes[case.participant].inject(Fault::new(case.step, has_rank.then_some(rank), case.kind));
    let outcomes = job.bring_up(0);
    let mut causes = Vec::new();
    for (participant, (result, took)) in outcomes.into_iter().enumerate() {
        let error = result.map(drop).expect_err(&format!("{case:?}, participant {participant}"));
        let limit = if hangs { SHORT + LATE } else { PATIENT / 2 };
        assert!(took < limit, "{case:?}: participant {participant} returned after {took:?}");
        let failure = failure(&error);
        assert!(
            failure.phase == case.phase || (hangs && failure.phase < case.phase),
            "{case:?}: {error}, not in {}",
            case.phase
        );
        if !hangs {
            // A panic in a group's call names no rank of the group.
            let group = matches!(case.kind, Kind::Panic)
                && matches!(case.step, Step::Init | Step::Enqueue | Step::EnqueueProgress);
            if has_rank && !group {
                assert_eq!(failure.rank, Some(rank), "{case:?}: {error}");
            }
            if let Kind::Fail(status) = case.kind {
                assert!(case.step == Step::Result || failure.status == Some(status), "{case:?}: {error}");
            }
        }
        causes.push((failure.cause.clone(), failure.process.clone(), failure.quarantine.clone()));
    }
    if !hangs {
        assert!(causes.iter().all(|one| one.0 == causes[0].0), "{case:?}: all get the same: {causes:?}");
    }
    // Nothing is left behind but what hangs.
    job.processes.iter().for_each(|process| process.heal());
    job.fabric.release();
    until(PATIENT, &format!("{case:?}: everything to come back"), || {
        causes.iter().all(|one| one.2.count() == 0) && job.fabric.live() == Live::default()
    });
    job.within = PATIENT;
    let cliques = job.up(1);
    for closed in each(PATIENT, cliques, |_, clique| clique.close(PATIENT)) {
        closed.unwrap();
    }
    assert_eq!(job.fabric.live(), Live::default(), "{case:?}");
}

#[test]
fn each_participant_fails_at_each_step() {
    for case in cases(Kind::Fail(Status::SYSTEM_ERROR)) {
        run(case);
    }
}

#[test]
fn each_participant_panics_at_each_step() {
    for case in cases(Kind::Panic) {
        run(case);
    }
}

/// All at the same time, since they do nothing but wait.
#[test]
fn each_participant_hangs_at_each_step() {
    each(PATIENT * 3, cases(Kind::Hang), |_, case| run(case));
}

/// Control of the three above: what only delays is no failure.
#[test]
fn each_participant_delays_at_each_step() {
    let cases = cases(Kind::Delay(Duration::from_millis(2)));
    for case in cases {
        let job = Job::new(&[2, 1, 2]);
        job.processes[case.participant].inject(Fault::new(case.step, None, case.kind));
        for closed in each(PATIENT, job.up(0), |_, clique| clique.close(PATIENT)) {
            closed.unwrap();
        }
    }
}

#[test]
fn a_participant_that_never_comes_is_named() {
    let mut job = Job::new(&[1, 1, 1]);
    job.within = Duration::from_millis(150);
    let outcomes = job.bring_up_with(0, |participant, builder| (participant != 1).then_some(builder));
    for (result, _) in outcomes {
        let error = result.unwrap_err();
        assert_eq!(failure(&error).phase, Phase::Gathering);
        assert!(error.to_string().contains("participant 1"), "{error}");
    }
}

/// One that stops before it calls the library keeps the others in it: they say who did not begin. On a machine that is so
/// busy that they cannot ask by their deadline they say less; so there are three tries.
#[test]
fn a_rank_that_never_began_is_told_from_those_that_wait_for_it() {
    let one_try = || {
        let job = Job::new(&[1, 2, 1]);
        // The one that was stopped is let go once the other two are back.
        let away = Arc::new(AtomicU32::new(2));
        let parts: Vec<_> = (0..3)
            .map(|one| {
                (job.builder(one, 0), job.processes[one].clone(), job.places[one].clone(), away.clone())
            })
            .collect();
        let errors = each(PATIENT, parts, |participant, (builder, process, place, away)| {
            let is_stopped = participant == 1;
            let is_away = away.clone();
            let meddle = move |call, phase: &str| {
                if is_stopped && (call, phase) == (Call::Post, "begun") {
                    until(PATIENT, "being let go", || is_away.load(Ordering::Acquire) == 0);
                }
                Ok(())
            };
            let place = Arc::new(Meddled(place, Box::new(meddle)));
            let within = if is_stopped { SHORT * 3 } else { SHORT };
            let error = builder.bring_up(process, place, within).map(drop).unwrap_err();
            if !is_stopped {
                away.fetch_sub(1, Ordering::AcqRel);
            }
            error
        });
        [&errors[0], &errors[2]].map(|error| {
            let failure = failure(error);
            assert_eq!(failure.phase, Phase::Initialising, "{error}");
            (failure.missing == [1, 2], error.to_string())
        })
    };
    let mut said = Vec::new();
    for _ in 0..3 {
        let errors = one_try();
        if errors.iter().all(|(exact, text)| {
            *exact && text.contains("the ranks [1, 2] of other participants did not begin")
        }) {
            return;
        }
        said.push(errors);
    }
    panic!("{said:?}");
}

/// A rendezvous that keeps no limit, in a post or in a gather, at any of the exchanges: the bring-up returns all the same.
#[test]
fn a_rendezvous_that_hangs_is_not_waited_for() {
    let cases: Vec<_> = ["hello", "ids", "begun", "up", "used"]
        .into_iter()
        .flat_map(|phase| [(phase, true), (phase, false)])
        .collect();
    each(PATIENT, cases, |_, (phase, posts)| {
        let job = Job::new(&[1, 1]);
        let let_go = Arc::new(AtomicBool::new(false));
        let parts: Vec<_> = [0, 1]
            .map(|one| {
                (job.builder(one, 0), job.processes[one].clone(), job.places[one].clone(), let_go.clone())
            })
            .into_iter()
            .collect();
        let results = each(PATIENT, parts, move |one, (builder, process, place, let_go)| {
            let start = Instant::now();
            let hangs = (if posts { Call::Post } else { Call::Gather }, phase);
            let meddle = move |call, of: &str| {
                if one == 1 && (call, of) == hangs {
                    until(PATIENT, "being let go", || let_go.load(Ordering::Acquire));
                }
                Ok(())
            };
            let place = Arc::new(Meddled(place, Box::new(meddle)));
            (builder.bring_up(process, place, SHORT).map(drop), start.elapsed())
        });
        let_go.store(true, Ordering::Release);
        // Who has begun is only asked for when something else went wrong; and who has heard that all are done is ready,
        // whatever the last one to hear it does.
        let fine = [!posts && ["begun", "used"].contains(&phase), (phase, posts) == ("begun", false)];
        for ((result, took), fine) in results.iter().zip(fine) {
            assert!(*took < SHORT + LATE, "{phase}, post {posts}: {took:?}");
            assert!(result.is_err() || fine, "{phase}, post {posts}");
        }
    });
}

/// Control: when all have begun, those that did not end are named.
#[test]
fn a_rank_that_does_not_end_is_named() {
    let job = Job::new(&[1, 1]);
    job.processes[1].inject(Fault::new(Step::InitProgress, Some(1), Kind::Hang));
    // Who hangs gives up last, so that it cannot say itself that it does.
    let items = vec![(0, SHORT), (1, SHORT * 3)];
    let parts: Vec<_> = items
        .into_iter()
        .map(|(one, within)| {
            (job.builder(one, 0), job.processes[one].clone(), job.places[one].clone(), within)
        })
        .collect();
    let errors = each(PATIENT, parts, |_, (builder, process, place, within)| {
        builder.bring_up(process, place, within).map(drop).unwrap_err()
    });
    let first = failure(&errors[0]);
    assert_eq!((first.phase, &first.missing[..]), (Phase::Initialising, &[1][..]), "{}", errors[0]);
    assert!(
        errors[0].to_string().contains("the ranks [1] of other participants did not end"),
        "{}",
        errors[0]
    );
    assert!(errors[1].to_string().contains("the ranks of this process are not done"), "{}", errors[1]);
}

/// One that gives up before the others, after it has said that it is done, is heard of in the next round.
#[test]
fn giving_up_after_the_own_word_is_heard_of() {
    let job = Job::new(&[1, 1]);
    // It has met the first one by then.
    job.processes[1].inject(Fault::new(Step::Shape, Some(1), Kind::Delay(SHORT * 2)));
    let parts: Vec<_> = [(0, SHORT), (1, PATIENT)]
        .into_iter()
        .map(|(one, within)| {
            (job.builder(one, 0), job.processes[one].clone(), job.places[one].clone(), within)
        })
        .collect();
    let start = Instant::now();
    let errors = each(PATIENT, parts, |_, (builder, process, place, within)| {
        builder.bring_up(process, place, within).map(drop).unwrap_err()
    });
    assert!(start.elapsed() < PATIENT / 2, "{:?}", start.elapsed());
    for error in errors {
        assert_eq!(failure(&error).missing, [1], "{error}");
    }
}

/// A bring-up with something that never ends returns at most 100 ms after its deadline. The median of ten counts: the
/// machine may have other work.
#[test]
fn deadlines_are_met_within_100_ms() {
    for step in [Step::InitProgress, Step::Init, Step::EnqueueProgress, Step::Workspace] {
        let mut late: Vec<Duration> = (0..5)
            .flat_map(|_| {
                let mut job = Job::new(&[1, 1]);
                job.within = Duration::from_millis(100);
                job.processes[1].inject(Fault::new(step, None, Kind::Hang));
                let late = job.bring_up(0).into_iter().map(|(result, took)| {
                    assert!(result.is_err());
                    took.saturating_sub(Duration::from_millis(100))
                });
                let late: Vec<Duration> = late.collect();
                job.fabric.release();
                late
            })
            .collect();
        late.sort_unstable();
        let median = late[late.len() / 2];
        println!("recorded: {step:?}: {median:?} after the deadline, at most {:?}", late[late.len() - 1]);
        assert!(median <= Duration::from_millis(100), "{step:?}: {late:?}");
    }
}

/// The same when everything hangs that can: what is under way in the library, the aborts, and the rendezvous, which neither
/// brings nor takes anything any more. What is waited for after the deadline is waited for in full then, so the shortest of
/// some tries says what it adds up to, whatever else the machine does.
#[test]
fn the_deadline_is_met_within_100_ms_when_everything_hangs() {
    const LIMIT: Duration = Duration::from_millis(150);
    // What hangs besides the rendezvous; a failure shortly before the deadline is told after it.
    for (step, kind) in [
        (Step::InitProgress, Kind::Hang),
        (Step::Init, Kind::Hang),
        (Step::Shape, Kind::Hang),
        (Step::Init, Kind::Fail(Status::SYSTEM_ERROR)),
    ] {
        let tries = (0..6).map(|_| {
            let job = Job::new(&[2]);
            let let_go = Arc::new(AtomicBool::new(false));
            job.processes[0].inject(Fault::new(step, None, kind));
            job.processes[0].inject(Fault::new(Step::Abort, None, Kind::Hang));
            if matches!(kind, Kind::Fail(_)) {
                job.processes[0].inject(Fault::new(Step::Workspace, None, Kind::Delay(LIMIT / 2)));
            }
            let is_let_go = let_go.clone();
            let meddle = move |call, phase: &str| {
                if phase == "up" && matches!(call, Call::Post | Call::Gather) {
                    until(PATIENT, "being let go", || is_let_go.load(Ordering::Acquire));
                }
                Ok(())
            };
            let place = Arc::new(Meddled(job.places[0].clone(), Box::new(meddle)));
            let (start, builder) = (Instant::now(), job.builder(0, 0));
            let result = builder.bring_up(job.processes[0].clone(), place, LIMIT);
            let took = start.elapsed();
            assert!(result.is_err());
            let_go.store(true, Ordering::Release);
            job.fabric.release();
            took.saturating_sub(LIMIT)
        });
        let late = tries.min().unwrap();
        println!("recorded: {step:?} {kind:?}: {late:?} after the deadline");
        assert!(late <= Duration::from_millis(100), "{step:?} {kind:?}: {late:?} after the deadline");
    }
}

/// A peer hears of a failure when it happens, not at the deadline.
#[test]
fn a_failure_reaches_the_others_at_once() {
    let mut job = Job::new(&[1, 1]);
    job.within = Duration::from_secs(60);
    job.processes[1].inject(Fault::new(Step::Init, None, Kind::Fail(Status::INTERNAL_ERROR)));
    let start = Instant::now();
    for (result, _) in job.bring_up(0) {
        assert_eq!(failure(&result.unwrap_err()).rank, Some(1));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// Two participants fail at about the same time: all name the same one, whose word the rendezvous got first.
#[test]
fn of_two_failures_all_name_the_first() {
    let mut differ = 0;
    for round in 0..50u64 {
        let job = Job::new(&[1, 1, 1]);
        let process = |one: usize| job.processes[one].clone();
        let fail = Kind::Fail(Status::SYSTEM_ERROR);
        process(0).inject(Fault::new(Step::Init, None, fail));
        process(2).inject(Fault::new(Step::Init, None, fail));
        process(round as usize % 2 * 2).inject(Fault::new(
            Step::Workspace,
            None,
            Kind::Delay(Duration::from_micros(round * 20)),
        ));
        let first: Vec<Option<u32>> =
            job.bring_up(0).into_iter().map(|(result, _)| failure(&result.unwrap_err()).rank).collect();
        assert!(first.iter().all(|rank| matches!(rank, Some(0 | 2))), "{first:?}");
        differ += u32::from(first.iter().any(|rank| *rank != first[0]));
    }
    assert_eq!(differ, 0, "of 50 pairs of failures");
}

/// An abort that hangs is waited for within its bound, and counted until it comes back.
#[test]
fn an_abort_that_hangs_is_in_quarantine() {
    let mut job = Job::new(&[2]);
    job.within = SHORT;
    job.processes[0].inject(Fault::new(Step::InitProgress, Some(0), Kind::Hang));
    job.processes[0].inject(Fault::new(Step::Abort, Some(1), Kind::Hang));
    let (result, took) = job.bring_up(0).remove(0);
    let error = result.unwrap_err();
    assert!(took < SHORT + LATE, "{took:?}");
    let quarantine = failure(&error).quarantine.clone();
    assert!(error.to_string().ends_with(" in quarantine"), "{error}");
    until(PATIENT, "one in quarantine", || quarantine.count() == 1);
    assert_eq!(job.fabric.live().communicators, 1);
    job.fabric.release();
    until(PATIENT, "the abort to come back", || quarantine.count() == 0);
    assert_eq!(job.fabric.live(), Live::default());
}

/// The keys of an attempt that came up are used again by a later run, in a rendezvous of its own; in the same one they
/// are refused.
#[test]
fn keys_are_used_again_by_a_later_run_only() {
    for _run in 0..3 {
        let job = Job::new(&[1, 1]);
        for closed in each(PATIENT, job.up(7), |_, clique| clique.close(PATIENT)) {
            closed.unwrap();
        }
        for (result, _) in job.bring_up(7) {
            let error = result.map(drop).unwrap_err();
            assert!(error.to_string().contains("attempt 7 of clique"), "{error}");
        }
    }
}

#[test]
fn a_device_that_is_not_there() {
    let job = Job::new(&[1, 1]);
    let outcomes = job.bring_up_with(0, |participant, builder| {
        Some(if participant == 1 { builder.local(5, 77) } else { builder })
    });
    for (result, _) in outcomes {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("device 77") && error.contains("no such device"), "{error}");
    }
    let _ = Software::new(&job.fabric);
}
