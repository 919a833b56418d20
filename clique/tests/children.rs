//! Splits and shrinks: every member joins, or none.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;
#[path = "support/meddled.rs"]
mod meddled;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use meddled::{Call, Meddle, Meddled};
use portway_clique::backend::{BackendError, Capabilities, DataType, ReduceOp, Status};
use portway_clique::software::{Fault, Kind, Live, Software, Step};
use portway_clique::{Clique, CliqueError, Member};

fn all_members(cliques: &mut [Clique]) -> Vec<Member> {
    cliques.iter_mut().flat_map(Clique::members).collect()
}

/// An all-reduce of one number a rank, on each member's own thread.
fn sum(members: Vec<Member>) -> Vec<(Member, Result<i64, CliqueError>)> {
    each(PATIENT, members, |_, mut member| {
        let mut run = || {
            let mut buffers = member.buffers(64)?;
            buffers.write(&(i64::from(member.rank()) + 1).to_le_bytes())?;
            member.all_reduce(&mut buffers, 1, DataType::I64, ReduceOp::Sum)?;
            member.wait(&mut buffers, PATIENT)?;
            let mut result = [0; 8];
            buffers.read(&mut result)?;
            Ok(i64::from_le_bytes(result))
        };
        let result = run();
        (member, result)
    })
}

fn close(cliques: Vec<Clique>) {
    for closed in each(PATIENT, cliques, |_, clique| clique.close(PATIENT)) {
        assert!(closed.unwrap().everybody);
    }
}

/// Rank r joins the colour of its parity; the children reduce among themselves, the last in front.
#[test]
fn a_split_that_every_member_joins() {
    for ranks in [&[4][..], &[2, 2], &[1, 1, 1, 1], &[3, 1]] {
        let job = Job::new(ranks);
        let mut cliques = job.up(0);
        let members = all_members(&mut cliques);
        let members = each(PATIENT, members, |_, mut member| {
            let rank = member.rank();
            let mut child = member.split(Some(rank % 2), -(rank as i32)).unwrap().unwrap();
            assert_eq!((child.size(), child.rank()), (2, 1 - rank / 2));
            let mut buffers = child.buffers(64).unwrap();
            buffers.write(&(rank as i32).to_le_bytes()).unwrap();
            child.all_reduce(&mut buffers, 1, DataType::I32, ReduceOp::Sum).unwrap();
            child.wait(&mut buffers, PATIENT).unwrap();
            let mut seen = [0; 4];
            buffers.read(&mut seen).unwrap();
            assert_eq!(i32::from_le_bytes(seen), if rank % 2 == 0 { 2 } else { 4 });
            // Some join none, and a child can be split again.
            let again = member.split((rank == 0).then_some(7), 0).unwrap();
            assert_eq!(again.map(|child| child.size()), (rank == 0).then_some(1));
            let alone = child.split(Some(child.rank()), 0).unwrap().unwrap();
            assert_eq!((alone.size(), alone.rank()), (1, 0));
            drop(buffers);
            alone.close(PATIENT).unwrap();
            assert!(child.close(PATIENT).unwrap().everybody);
            member
        });
        // They go with their members, not with their parent; one of rank 0 alone was dropped.
        until(PATIENT, "the children to be gone", || job.fabric.live().communicators == 4);
        drop(members);
        close(cliques);
        assert_eq!(job.fabric.live(), Live::default());
    }
}

/// One that fails in a split keeps all from joining; the parent goes on.
#[test]
fn a_split_that_fails_is_joined_by_none() {
    for (step, kind) in [
        (Step::SplitProgress, Kind::Fail(Status::SYSTEM_ERROR)),
        (Step::SplitProgress, Kind::Panic),
        (Step::SplitProgress, Kind::Hang),
        (Step::Shape, Kind::Fail(Status::INTERNAL_ERROR)),
    ] {
        let job = Job::new(&[2, 1]);
        let outcomes =
            job.bring_up_with(0, |_, builder| Some(builder.call_within(Duration::from_millis(400))));
        let mut cliques: Vec<Clique> = outcomes.into_iter().map(|(result, _)| result.unwrap()).collect();
        job.processes[1].inject(Fault::new(step, None, kind));
        let members = each(PATIENT, all_members(&mut cliques), |_, mut member| {
            let start = Instant::now();
            let error = member.split(Some(0), 0).map(drop).unwrap_err();
            assert!(matches!(error, CliqueError::Failed(_)), "{error}");
            (member, start.elapsed())
        });
        for (_, took) in &members {
            assert!(*took < Duration::from_secs(3), "{took:?}");
        }
        job.processes[1].heal();
        until(PATIENT, "only the parent's to be left", || job.fabric.live().communicators == 3);
        let members: Vec<Member> = members.into_iter().map(|(member, _)| member).collect();
        for (_, result) in sum(members) {
            assert!(result.is_ok(), "{step:?} {kind:?}: {result:?}");
        }
        close(cliques);
    }
}

/// One fails in the call of the library, or its clique is aborted, while the other is inside: it does not wait there to
/// its deadline.
#[test]
fn whoever_is_in_the_library_hears_of_a_failure_and_of_the_end() {
    for is_aborted in [false, true] {
        let job = Job::new(&[1, 1]);
        let mut cliques = up_with_limit(&job, PATIENT / 2);
        let (here, there) = if is_aborted {
            (Fault::new(Step::SplitProgress, None, Kind::Hang), None)
        } else {
            let fails = Kind::Fail(Status::SYSTEM_ERROR);
            (Fault::new(Step::Split, None, Kind::Hang), Some(Fault::new(Step::Split, None, fails)))
        };
        job.processes[0].inject(here);
        there.into_iter().for_each(|fault| job.processes[1].inject(fault));
        let members = all_members(&mut cliques);
        let begun = Instant::now();
        let left = std::thread::scope(|scope| {
            let splitting = scope.spawn(move || {
                each(PATIENT, members, move |_, mut member| {
                    let error = member.split(Some(0), 0).map(drop).unwrap_err();
                    (error.to_string(), begun.elapsed(), member)
                })
            });
            if is_aborted {
                until(PATIENT, "the split to be under way", || job.fabric.live().communicators > 2);
                cliques[0].abort();
            }
            splitting.join().unwrap()
        });
        for (error, took, member) in &left {
            println!("recorded: aborted {is_aborted}, rank {}: {took:?}: {error}", member.rank());
            assert!(*took < PATIENT / 4, "aborted {is_aborted}, rank {}: {took:?}: {error}", member.rank());
            assert!(member.end().is_some() || !is_aborted);
        }
        job.processes.iter().for_each(|process| process.heal());
        job.fabric.release();
    }
}

/// How long the calls of the next two may take.
const CALL_WITHIN: Duration = Duration::from_millis(400);

fn up_with_limit(job: &Job, limit: Duration) -> Vec<Clique> {
    let outcomes = job.bring_up_with(0, |_, builder| Some(builder.call_within(limit)));
    outcomes.into_iter().map(|(result, _)| result.unwrap()).collect()
}

/// The same with a rendezvous for participant 0 in which something goes wrong once the cliques are up. The next one waits
/// twice as long, so that participant 0 is first.
fn up_with_meddling(
    job: &Job,
    meddle: impl Fn(Call, &str) -> Result<(), CliqueError> + Send + Sync + 'static,
) -> Vec<Clique> {
    let is_up = Arc::new(AtomicBool::new(false));
    let begins = is_up.clone();
    let meddle =
        move |call, phase: &str| if begins.load(Ordering::Acquire) { meddle(call, phase) } else { Ok(()) };
    let mut meddle = Some(Box::new(meddle) as Meddle);
    let parts = (0..job.places.len()).map(|one| {
        let meddle = meddle.take().unwrap_or_else(|| Box::new(|_, _| Ok(())));
        let place = Arc::new(Meddled(job.places[one].clone(), meddle));
        (job.builder(one, 0).call_within(CALL_WITHIN * (one as u32 + 1)), job.processes[one].clone(), place)
    });
    let cliques = each(PATIENT, parts.collect(), |_, (builder, process, place)| {
        builder.bring_up(process, place, PATIENT).unwrap()
    });
    is_up.store(true, Ordering::Release);
    cliques
}

fn works(members: Vec<Member>, job: &Job) -> Vec<Member> {
    let size = i64::from(job.size());
    let sums = sum(members).into_iter().map(|(member, result)| {
        assert_eq!(result.unwrap(), size * (size + 1) / 2);
        member
    });
    sums.collect()
}

/// The split of one process hangs, aborts take all the time that they have, and the local members come one after the
/// other: those who came first do not give the parent up while the last one still cleans up.
#[test]
fn a_split_that_times_out_leaves_its_parent() {
    let job = Job::new(&[3, 1]);
    let mut cliques = up_with_limit(&job, CALL_WITHIN);
    job.processes[1].inject(Fault::new(Step::SplitProgress, None, Kind::Hang));
    job.processes.iter().for_each(|process| process.inject(Fault::new(Step::Abort, None, Kind::Hang)));
    let members = each(PATIENT, all_members(&mut cliques), |_, mut member| {
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(60) * member.rank());
        // Each its own child, so that there are several to abort.
        let error = member.split(Some(member.rank()), 0).map(drop).unwrap_err();
        assert!(matches!(error, CliqueError::Failed(_)), "{error}");
        println!("recorded: rank {}: {:?} of {CALL_WITHIN:?}: {error}", member.rank(), start.elapsed());
        assert!(member.end().is_none(), "{:?}", member.end());
        member
    });
    job.processes.iter().for_each(|process| process.heal());
    job.fabric.release();
    let members = works(members, &job);
    until(PATIENT, "only the parent's to be left", || job.fabric.live().communicators == 4);
    drop(members);
    close(cliques);
}

/// A member that does not come to a split keeps all from joining. It can come late: then it learns that it is over, and all
/// can come to the next one.
#[test]
fn a_split_that_a_member_does_not_come_to_leaves_its_parent() {
    let job = Job::new(&[2, 1]);
    let mut cliques = up_with_limit(&job, CALL_WITHIN);
    let mut members = all_members(&mut cliques);
    let mut late = members.remove(1);
    let mut members = each(PATIENT, members, |_, mut member| {
        let error = member.split(Some(0), 0).map(drop).unwrap_err().to_string();
        let missed = ["expected the local seats", "for the local seats below 2, seen [0]", "said nothing"];
        assert!(missed.iter().any(|what| error.contains(what)), "{error}");
        member
    });
    let start = Instant::now();
    let error = late.split(Some(0), 0).map(drop).unwrap_err();
    assert!(matches!(error, CliqueError::Timeout { .. }), "{error}");
    assert!(start.elapsed() < CALL_WITHIN / 2, "{:?}", start.elapsed());
    members.insert(1, late);
    let members = works(members, &job);
    let children = each(PATIENT, members, |_, mut member| {
        let child = member.split(Some(0), 0).unwrap().unwrap();
        assert_eq!(child.size(), 3);
        (child, member)
    });
    drop(children);
    close(cliques);
}

/// How a member asks for a child of all ranks.
type Ask = fn(&mut Member) -> Result<Option<Member>, CliqueError>;

const ASKS: [(&str, Ask); 2] =
    [("split", |member| member.split(Some(0), 0)), ("shrink", |member| member.shrink(&[]))];

/// Rank 0 comes, waits for nothing, and leaves. Whoever comes later hears who has left, at once, and does not enter the
/// library alone; the parent goes on, with a child of all as well.
fn late_for((what, ask): (&str, Ask), ranks: &[u32], missed: &str) {
    // Half of it is far more than an error takes that comes at once, also on a busy machine.
    const LIMIT: Duration = Duration::from_secs(2);
    let context = format!("{what} of {ranks:?}");
    let job = Job::new(ranks);
    let mut cliques = up_with_limit(&job, LIMIT);
    let mut late = all_members(&mut cliques);
    let mut first = late.remove(0);
    let start = Instant::now();
    let error = ask(&mut first).map(drop).unwrap_err().to_string();
    assert!(error.contains(missed), "{context}: {error}");
    assert!(start.elapsed() >= LIMIT, "{context}: it has waited");
    let mut members = each(PATIENT, late, move |_, mut member| {
        let start = Instant::now();
        let error = ask(&mut member).map(drop).unwrap_err();
        (member, error.to_string(), start.elapsed())
    });
    for (member, error, took) in &members {
        assert!(error.contains(missed), "{context}: rank {}: {error}", member.rank());
        assert!(*took < LIMIT / 2, "{context}: rank {} has waited {took:?}: {error}", member.rank());
    }
    let mut all = vec![first];
    all.extend(members.drain(..).map(|(member, ..)| member));
    let size = job.size();
    let children = each(PATIENT, all, move |_, mut member| {
        member.barrier().unwrap();
        let child = ask(&mut member).unwrap().unwrap();
        assert_eq!(child.size(), size);
        (child, member)
    });
    drop(children);
    close(cliques);
    assert_eq!(job.fabric.live(), Live::default(), "{context}");
}

#[test]
fn whoever_comes_late_hears_that_another_participant_has_left() {
    let cases = ASKS.into_iter().flat_map(|ask| [(ask, &[1, 1][..]), (ask, &[1, 2, 1])]).collect();
    each(PATIENT, cases, |_, (ask, ranks)| late_for(ask, ranks, "participant 0 has stopped waiting"));
}

/// The time is over for those of one process, where not all have come; the others hear of it, too.
#[test]
fn whoever_comes_late_hears_that_not_all_members_of_another_participant_came() {
    each(PATIENT, ASKS.to_vec(), |_, ask| late_for(ask, &[2, 1], "for the local seats below 2, seen [0]"));
}

/// Participants that do not exclude the same ranks are told, before the library is called.
#[test]
fn a_shrink_without_other_ranks_is_joined_by_none() {
    let job = Job::new(&[1, 1, 2]);
    let mut cliques = job.up(0);
    let start = Instant::now();
    let members = each(PATIENT, all_members(&mut cliques), |_, mut member| {
        let excluded = if member.rank() < 2 { 2 } else { 3 };
        let error = member.shrink(&[excluded]).map(drop).unwrap_err();
        assert!(error.to_string().contains("sent a wrong set of excluded ranks"), "{error}");
        member
    });
    assert!(start.elapsed() < PATIENT / 4, "{:?}", start.elapsed());
    let children = each(PATIENT, members, |_, mut member| (member.shrink(&[2]).unwrap(), member));
    assert_eq!(children.iter().filter(|(child, _)| child.is_some()).count(), 3);
    drop(children);
    close(cliques);
}

/// The time is over when this participant has said that it goes on to the library, and has not heard that the others do:
/// some may be there. So the parent ends, for all.
#[test]
fn a_split_in_which_nobody_knows_who_goes_on_ends_the_parent() {
    let job = Job::new(&[1, 1]);
    let mut cliques = up_with_meddling(&job, |call, phase| {
        if (call, phase) == (Call::Gather, "meet") {
            std::thread::sleep(CALL_WITHIN * 2);
        }
        Ok(())
    });
    let start = Instant::now();
    let errors = each(PATIENT, all_members(&mut cliques), |_, mut member| {
        member.split(Some(0), 0).map(drop).unwrap_err().to_string()
    });
    assert!(start.elapsed() < CALL_WITHIN * 4, "{:?}", start.elapsed());
    assert!(errors[0].contains("gathering \"meet\""), "{errors:?}");
    until(PATIENT, "both to end", || cliques.iter().all(|clique| clique.end().is_some()));
    drop(cliques);
    until(PATIENT, "everything to be gone", || job.fabric.live() == Live::default());
}

/// Whether the leader of participant 0 has panicked when the children were there. It is in code of the rendezvous, which is
/// asked who it is when the time is over and somebody is missing.
fn leader_panics(aborts_hang: bool) -> Result<(), String> {
    let job = Job::new(&[2, 1]);
    let mut cliques = up_with_meddling(&job, |call, _| match call {
        Call::Participant => panic!("planted"),
        _ => Ok(()),
    });
    job.processes[1].inject(Fault::new(Step::Shape, None, Kind::Hang));
    if aborts_hang {
        job.processes[0].inject(Fault::new(Step::Abort, None, Kind::Hang));
    }
    let quarantine = cliques[0].quarantine();
    let members = each(PATIENT, all_members(&mut cliques), |_, mut member| {
        (member.split(Some(0), 0).map(drop).unwrap_err().to_string(), member)
    });
    let (error, member) = &members[0];
    if !error.contains("the leader of a barrier panicked: planted") {
        job.fabric.release();
        return Err(error.clone());
    }
    assert!(member.end().is_some());
    if aborts_hang {
        assert_eq!(quarantine.count(), 4, "two of the parent, and two children");
    }
    job.fabric.release();
    drop((members, cliques));
    until(PATIENT, "everything to be gone", || job.fabric.live() == Live::default());
    until(PATIENT, "the aborts to come back", || quarantine.count() == 0);
    Ok(())
}

/// A panic of the leader: the children are aborted, and what does not come back is counted. On a machine that is so busy
/// that nobody is heard by the deadline the rendezvous is not asked; so there are some tries.
#[test]
fn a_panic_leaves_no_children() {
    for aborts_hang in [false, true] {
        let said: Vec<_> = (0..5).map(|_| leader_panics(aborts_hang)).take_while(Result::is_err).collect();
        assert!(said.len() < 5, "{said:?}");
    }
}

#[test]
fn revoke_and_shrink_where_the_library_can() {
    let job = Job::new(&[2, 1, 1]);
    let mut cliques = job.up(0);
    // The participant of rank 3 takes no part any more; rank 1 is excluded as well, and is in a process that stays.
    let gone = cliques.pop().unwrap();
    for clique in &cliques {
        clique.revoke().unwrap();
    }
    let members = all_members(&mut cliques);
    let children = each(PATIENT, members, |_, mut member| {
        let child = member.shrink(&[1, 3]).unwrap();
        (member, child)
    });
    let sizes: Vec<_> =
        children.iter().map(|(_, child)| child.as_ref().map(|c| (c.rank(), c.size()))).collect();
    assert_eq!(sizes, [Some((0, 2)), None, Some((1, 2))]);
    let (members, children): (Vec<_>, Vec<_>) = children.into_iter().unzip();
    for (_, result) in sum(children.into_iter().flatten().collect()) {
        // It was not declared, and not all participants are there to meet.
        assert!(matches!(result, Err(CliqueError::Undeclared { .. })), "{result:?}");
    }
    drop((members, gone, cliques));
    until(PATIENT, "everything to be gone", || job.fabric.live() == Live::default());
}

#[test]
fn what_an_older_library_lacks_is_not_in_it() {
    let mut job = Job::new(&[1]);
    let old = Capabilities::default();
    job.processes[0] = Arc::new(Software::new(&job.fabric).with_version(22207, old));
    let mut clique = job.up(0).remove(0);
    let mut member = clique.members().remove(0);
    let errors = [member.shrink(&[]).map(drop).unwrap_err(), clique.revoke().unwrap_err()];
    for error in &errors {
        assert!(matches!(error, CliqueError::Backend(BackendError::NotInLibrary { .. })), "{error}");
    }
    assert_eq!(errors[0].to_string(), "shrink is not in this software 22207");
}

/// A child of some of the participants is one as any other: its ends are heard of by those who have a part in it.
#[test]
fn the_ends_of_a_child_of_some_participants_are_heard_of() {
    let children = |job: &Job| {
        let mut cliques = job.up(0);
        let members = all_members(&mut cliques);
        let mut children = each(PATIENT, members, |_, mut member| {
            let color = (member.rank() < 2).then_some(0);
            let child = member.split(color, 0).unwrap();
            (child, member)
        });
        let rest = children.split_off(2);
        let (children, members): (Vec<_>, Vec<_>) = children.into_iter().unzip();
        let children: Vec<Member> = children.into_iter().flatten().collect();
        assert_eq!(children.len(), 2);
        (children, (cliques, rest, members))
    };
    let job = Job::new(&[1, 1, 1]);
    let (mut both, kept) = children(&job);
    drop(both.remove(0));
    until(PATIENT, "the other to hear of it", || both[0].end().is_some());
    let end = both[0].end().unwrap().to_string();
    assert!(end.contains("this participant dropped its clique without closing it"), "{end}");
    drop((both, kept));
    // One that closes alone does not say that all have.
    let job = Job::new(&[1, 1, 1]);
    let (mut both, kept) = children(&job);
    assert!(!both.remove(0).close(Duration::from_millis(300)).unwrap().everybody);
    drop((both, kept));
}

/// The last local member to close comes late, and another participant does not close at all: those who came first still
/// learn that everything here is destroyed, in the time that they gave.
#[test]
fn whoever_closes_first_waits_for_the_last_and_for_what_it_does() {
    const WITHIN: Duration = Duration::from_millis(600);
    let job = Job::new(&[2, 1]);
    let mut cliques = job.up(0);
    let members = all_members(&mut cliques);
    let mut children = each(PATIENT, members, |_, mut member| member.split(Some(0), 0).unwrap().unwrap());
    let open = children.pop();
    let closed = each(PATIENT, children, |seat, child| {
        std::thread::sleep(WITHIN * 3 / 2 * seat as u32);
        let start = Instant::now();
        (child.close(WITHIN), start.elapsed())
    });
    for (seat, (closed, took)) in closed.into_iter().enumerate() {
        assert!(
            matches!(&closed, Ok(closed) if !closed.everybody),
            "seat {seat}, after {took:?}: {closed:?}"
        );
        assert!(took < WITHIN * 2 + Duration::from_millis(500), "seat {seat}: {took:?}");
    }
    drop((open, cliques));
    until(PATIENT, "everything to be gone", || job.fabric.live() == Live::default());
}
