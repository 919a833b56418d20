//! What every rendezvous has to do, asked of each of them; participants are threads here.

mod meeting;

use std::sync::Arc;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use meeting::{KINDS, Kind, PATIENCE, meet, ok, round, text};
use portway_clique::CliqueError;
use portway_clique::rendezvous::{Gathered, MAX_MESSAGE_BYTES, Post, Rendezvous};

fn each_kind(test: impl Fn(Kind)) {
    for kind in KINDS {
        println!("{kind:?}");
        test(kind);
    }
}

#[test]
fn everybody_gets_what_everybody_said_round_after_round() {
    each_kind(|kind| {
        let members = meet(kind, 4);
        std::thread::scope(|scope| {
            for member in members.iter() {
                scope.spawn(move || {
                    for attempt in 0..50 {
                        for phase in ["one", "two"] {
                            let own = format!("{} {attempt} {phase}", member.participant());
                            let round = round(attempt, phase);
                            member.post(&round, ok(&own)).unwrap();
                            let all = member.gather(&round, PATIENCE).unwrap();
                            for (said, participant) in all.0.into_iter().zip(0..) {
                                assert_eq!(text(said), format!("{participant} {attempt} {phase}"));
                            }
                        }
                    }
                });
            }
        });
    });
}

#[test]
fn a_gather_ends_at_its_limit_with_gaps_and_may_be_repeated() {
    each_kind(|kind| {
        let members = meet(kind, 3);
        members[0].post(&round(0, "a"), ok("0")).unwrap();
        members[2].post(&round(0, "a"), ok("2")).unwrap();
        for limit in [Duration::ZERO, Duration::from_millis(50), Duration::from_millis(300)] {
            // A busy machine is late now and then, but not every time.
            let on_time = (0..5).any(|_| {
                let began = Instant::now();
                let said = members[0].gather(&round(0, "a"), limit);
                let took = began.elapsed();
                println!("{limit:?} took {took:?}");
                match said {
                    Ok(said) => assert_eq!(said, Gathered(vec![Some(ok("0")), None, Some(ok("2"))])),
                    Err(error) => assert!(matches!(error, CliqueError::Timeout { .. }), "{error}"),
                }
                assert!(took >= limit, "{took:?}");
                took < limit + Duration::from_millis(100)
            });
            assert!(on_time, "{kind:?}: {limit:?}");
        }
        // The control: with everybody there, the same gather ends long before its limit.
        members[1].post(&round(0, "a"), ok("1")).unwrap();
        let began = Instant::now();
        let said = members[0].gather(&round(0, "a"), PATIENCE).unwrap();
        assert!(said.0.iter().all(Option::is_some) && began.elapsed() < PATIENCE / 4);
    });
}

#[test]
fn nobody_has_said_anything_is_an_answer_too() {
    each_kind(|kind| {
        let members = meet(kind, 2);
        let said = members[1].gather(&round(3, "silence"), Duration::from_millis(20)).unwrap();
        assert_eq!(said, Gathered(vec![None, None]));
    });
}

#[test]
fn a_failure_reaches_those_who_wait_at_once() {
    each_kind(|kind| {
        // Participant 3 says nothing, so only the failure can end the wait.
        let members = meet(kind, 4);
        let ready = Barrier::new(3);
        std::thread::scope(|scope| {
            for member in &members[..2] {
                let ready = &ready;
                scope.spawn(move || {
                    member.post(&round(0, "a"), ok("fine")).unwrap();
                    ready.wait();
                    let began = Instant::now();
                    let said = member.gather(&round(0, "a"), PATIENCE).unwrap();
                    assert_eq!(said.0[2], Some(Post::Failed(b"no memory".to_vec())));
                    assert!(said.0[3].is_none() && began.elapsed() < PATIENCE / 4);
                });
            }
            ready.wait();
            members[2].post(&round(0, "a"), Post::Failed(b"no memory".to_vec())).unwrap();
        });
    });
}

/// Whoever gathers when gets the same failure: the one that came first, also when a later one is of a lower participant.
#[test]
fn of_several_failures_all_get_the_first() {
    each_kind(|kind| {
        let members = meet(kind, 3);
        let (round, failed) = (round(0, "a"), |text: &str| Post::Failed(text.as_bytes().to_vec()));
        assert_eq!(members[0].look(&round).unwrap(), None);
        members[2].post(&round, failed("first")).unwrap();
        let early = members[1].gather(&round, PATIENCE).unwrap();
        assert_eq!(early, Gathered(vec![None, None, Some(failed("first"))]));
        members[0].post(&round, failed("second")).unwrap();
        members[1].post(&round, failed("third")).unwrap();
        for member in [&members[0], &members[2]] {
            // A look is no gather.
            assert_eq!(member.look(&round).unwrap(), Some(early.clone()));
            assert_eq!(member.gather(&round, PATIENCE).unwrap(), early);
        }
    });
}

/// One lock around both would let this time out.
#[test]
fn a_post_does_not_stand_behind_a_gather_of_the_same_participant() {
    each_kind(|kind| {
        let members = meet(kind, 2);
        let first: &Arc<dyn Rendezvous> = &members[0];
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| first.gather(&round(0, "a"), PATIENCE).unwrap());
            let other = scope.spawn(|| first.gather(&round(0, "b"), PATIENCE).unwrap());
            members[1].post(&round(0, "a"), ok("1")).unwrap();
            members[1].post(&round(0, "b"), ok("1")).unwrap();
            std::thread::sleep(Duration::from_millis(50)); // both gathers are under way by then, most times
            let began = Instant::now();
            first.post(&round(0, "b"), ok("0")).unwrap();
            first.post(&round(0, "a"), ok("0")).unwrap();
            for gather in [waiting, other] {
                assert!(gather.join().unwrap().0.iter().all(Option::is_some));
            }
            assert!(began.elapsed() < PATIENCE / 4, "{kind:?}");
        });
    });
}

fn config(result: Result<impl std::fmt::Debug, CliqueError>) -> String {
    match result {
        Err(error @ CliqueError::Config { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_round_is_posted_once_and_used_once() {
    each_kind(|kind| {
        let members = meet(kind, 2);
        members[0].post(&round(0, "a"), ok("0")).unwrap();
        let error = config(members[0].post(&round(0, "a"), ok("again")));
        assert!(error.contains("participant 0: expected one post, seen a second one"), "{kind:?}: {error}");
        members[1].post(&round(0, "a"), ok("1")).unwrap();
        for member in members.iter() {
            let said = member.gather(&round(0, "a"), PATIENCE).unwrap();
            assert_eq!(said, Gathered(vec![Some(ok("0")), Some(ok("1"))]), "the second post changed nothing");
        }
        for error in [
            config(members[1].post(&round(0, "a"), ok("a later run"))),
            config(members[1].gather(&round(0, "a"), PATIENCE)),
        ] {
            assert!(error.contains("\"a\" of attempt 0 of clique \"test\""), "{kind:?}: {error}");
        }
        // The control: the next attempt works.
        for member in members.iter() {
            member.post(&round(1, "a"), ok("next")).unwrap();
        }
        assert!(members[1].gather(&round(1, "a"), PATIENCE).unwrap().0.iter().all(Option::is_some));
    });
}

#[test]
fn who_stays_behind_in_an_earlier_attempt_is_told() {
    each_kind(|kind| {
        let members = meet(kind, 2);
        members[1].post(&round(0, "a"), ok("1")).unwrap();
        std::thread::scope(|scope| {
            let behind = scope.spawn(|| members[1].gather(&round(0, "a"), PATIENCE));
            members[0].post(&round(1, "a"), ok("0")).unwrap();
            let error = config(behind.join().unwrap());
            assert!(error.contains("participant 0 has begun attempt 1"), "{kind:?}: {error}");
        });
        let error = config(members[1].post(&round(0, "b"), ok("1")));
        assert!(error.contains("participant 0 has begun attempt 1"), "{kind:?}: {error}");
        members[1].post(&round(1, "a"), ok("1")).unwrap();
        assert!(members[0].gather(&round(1, "a"), PATIENCE).unwrap().0.iter().all(Option::is_some));
    });
}

#[test]
fn messages_have_a_longest_length_and_that_is_carried() {
    each_kind(|kind| {
        let members = meet(kind, 2);
        let longest = Post::Ok((0..MAX_MESSAGE_BYTES).map(|at| at as u8).collect());
        let error = config(members[0].post(&round(0, "a"), Post::Ok(vec![0; MAX_MESSAGE_BYTES + 1])));
        assert!(error.contains("at most 65536 bytes, seen 65537 bytes"), "{error}");
        let mut named = round(0, "a");
        named.clique = "n".repeat(257);
        assert!(config(members[0].post(&named, ok("0"))).contains("the clique's name"));
        for member in members.iter() {
            member.post(&round(0, "a"), longest.clone()).unwrap();
        }
        assert_eq!(
            members[1].gather(&round(0, "a"), PATIENCE).unwrap().0,
            [Some(longest.clone()), Some(longest)]
        );
    });
}

/// Names that are used once and rounds that somebody never gathers: the memory for them has a limit, and no use of them
/// comes to one.
#[test]
fn what_is_left_behind_has_a_limit_and_stops_nobody() {
    each_kind(|kind| {
        let members = meet(kind, 2);
        for number in 0..1100 {
            let mut abandoned = round(0, "a");
            abandoned.clique = format!("abandoned {number}");
            members[number % 2].post(&abandoned, ok("x")).unwrap();
        }
        for member in members.iter() {
            member.post(&round(0, "a"), ok("y")).unwrap();
        }
        assert!(members[0].gather(&round(0, "a"), PATIENCE).unwrap().0.iter().all(Option::is_some));
    });
}
