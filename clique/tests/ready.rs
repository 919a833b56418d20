//! A clique that comes up, and what can be done with it.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use portway_clique::backend::{DataType, ReduceOp, Status};
use portway_clique::software::{Fault, Kind, Live, Step};
use portway_clique::{Clique, CliqueError, FirstUse, Member};

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

#[test]
fn threads_processes_and_mixtures() {
    for ranks in [&[1][..], &[2], &[1, 1], &[4], &[2, 2], &[1, 3], &[1, 1, 1, 1]] {
        let job = Job::new(ranks);
        let mut cliques = job.up(0);
        let size = i64::from(job.size());
        let members = sum(all_members(&mut cliques));
        for (_, result) in &members {
            assert_eq!(*result.as_ref().unwrap(), size * (size + 1) / 2, "{ranks:?}");
        }
        drop(members);
        close(cliques);
        assert_eq!(job.fabric.live(), Live::default(), "{ranks:?}");
    }
}

/// What was not declared passes the barrier the first time it is small and the first time it is large, and works.
#[test]
fn undeclared_operations_pass_the_barrier() {
    let mut job = Job::new(&[2, 1]);
    job.first_use = FirstUse::default();
    let mut cliques = job.up(0);
    let members = each(PATIENT, all_members(&mut cliques), |_, mut member| {
        let mut buffers = member.buffers(1 << 20).unwrap();
        for count in [1, 2, 1 << 16, 1 << 17] {
            buffers.write(&vec![1; count * 4]).unwrap();
            member.all_reduce(&mut buffers, count, DataType::U32, ReduceOp::Sum).unwrap();
            member.wait(&mut buffers, PATIENT).unwrap();
            let mut seen = vec![0; count * 4];
            buffers.read(&mut seen).unwrap();
            assert!(seen.iter().all(|byte| *byte == 3), "{count}");
            let count = count / 4 + 1;
            member.all_gather(&mut buffers, count, DataType::U8).unwrap();
            member.wait(&mut buffers, PATIENT).unwrap();
        }
        // Not all ranks are there when two send to each other.
        let peer = (member.rank() + 1) % 3;
        let error = member.send(&mut buffers, 1, DataType::U8, peer).unwrap_err();
        assert!(matches!(error, CliqueError::Undeclared { .. }), "{error}");
        member
    });
    drop(members);
    close(cliques);
}

/// One that does not come to an operation that nobody declared: the others are told who, and the clique ends.
#[test]
fn undeclared_operations_have_a_deadline() {
    let mut job = Job::new(&[1, 1]);
    job.first_use = FirstUse::default();
    let outcomes = job.bring_up_with(0, |_, builder| Some(builder.call_within(Duration::from_millis(200))));
    let mut cliques: Vec<Clique> = outcomes.into_iter().map(|(result, _)| result.unwrap()).collect();
    let mut member = cliques[0].members().remove(0);
    let mut buffers = member.buffers(64).unwrap();
    let start = Instant::now();
    let error = member.all_reduce(&mut buffers, 1, DataType::I32, ReduceOp::Sum).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert!(error.to_string().contains("participant 1"), "{error}");
    // The other hears of it from its watcher.
    until(PATIENT, "the other participant to hear of it", || cliques[1].end().is_some());
    let end = cliques[1].end().unwrap();
    assert!(matches!(end, CliqueError::Failed(_)) && end.to_string().contains("participant 1"), "{end}");
    drop((member, buffers, cliques));
    assert_eq!(job.fabric.live(), Live::default());
}

#[test]
fn send_and_receive_between_declared_peers() {
    let job = Job::new(&[2, 1]);
    let mut cliques = job.up(0);
    let members = each(PATIENT, all_members(&mut cliques), |_, mut member| {
        let (rank, size) = (member.rank(), member.size());
        let (mut sends, mut receives) = (member.buffers(16).unwrap(), member.buffers(16).unwrap());
        sends.write(&[rank as u8; 16]).unwrap();
        member.send(&mut sends, 16, DataType::U8, (rank + 1) % size).unwrap();
        member.recv(&mut receives, 16, DataType::U8, (rank + size - 1) % size).unwrap();
        member.wait(&mut sends, PATIENT).unwrap();
        member.wait(&mut receives, PATIENT).unwrap();
        let mut seen = [0; 16];
        receives.read(&mut seen).unwrap();
        assert_eq!(seen, [((rank + size - 1) % size) as u8; 16]);
        // The ring goes one way.
        let error = member.send(&mut sends, 1, DataType::U8, (rank + size - 1) % size).unwrap_err();
        assert!(matches!(error, CliqueError::Undeclared { .. }), "{error}");
        member
    });
    drop(members);
    close(cliques);
}

#[test]
fn bad_input_is_refused_before_anything_happens() {
    let job = Job::new(&[2]);
    let mut cliques = job.up(0);
    let mut members = cliques[0].members();
    assert!(cliques[0].members().is_empty());
    let mut buffers = members[0].buffers(16).unwrap();
    let refused = |result: Result<(), CliqueError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, CliqueError::Config { .. }), "{error}");
    };
    refused(members[0].all_reduce(&mut buffers, 0, DataType::I32, ReduceOp::Sum));
    refused(members[0].all_reduce(&mut buffers, 5, DataType::I32, ReduceOp::Sum));
    refused(members[0].all_reduce(&mut buffers, usize::MAX, DataType::F64, ReduceOp::Sum));
    refused(members[0].all_gather(&mut buffers, 9, DataType::U8));
    refused(members[1].all_reduce(&mut buffers, 1, DataType::I32, ReduceOp::Sum));
    assert!(buffers.write(&[0; 17]).is_err());
    assert!(buffers.read(&mut [0; 17]).is_err());
    assert!(members[0].shrink(&[2]).is_err());
    assert!(members[0].shrink(&[0, 1]).is_err());
    assert_eq!(sum(members).len(), 2);
    let expected = "expected 1 to 128 bytes without a '/', which the names of children have";
    for (name, seen) in
        [("", "\"\""), (&"x".repeat(129), "129 bytes"), ("test/split1", "\"test/split1\""), ("/", "\"/\"")]
    {
        let place: Arc<portway_clique::rendezvous::InProcess> = job.places[0].clone();
        let result = Clique::builder(name, 2).bring_up(job.processes[0].clone(), place, PATIENT);
        let error = result.map(drop).unwrap_err();
        assert!(matches!(error, CliqueError::Config { .. }), "{error}");
        assert_eq!(error.to_string(), format!("name of a clique: {expected}, seen {seen}"));
    }
}

/// An error that comes later, in a clique that nobody uses: the watcher finds it, aborts, and tells the others.
#[test]
fn later_errors_are_found_and_reach_all() {
    let job = Job::new(&[2, 1]);
    let mut cliques = job.up(0);
    let members = all_members(&mut cliques);
    until(PATIENT, "heartbeats", || cliques.iter().all(|clique| clique.heartbeats() > 2));
    job.processes[1].inject(Fault::new(Step::State, Some(2), Kind::Fail(Status::REMOTE_ERROR)));
    until(PATIENT, "all to hear of it", || cliques.iter().all(|clique| clique.end().is_some()));
    for member in &members {
        let error = member.end().unwrap();
        let CliqueError::Failed(failure) = &error else { panic!("{error}") };
        assert_eq!((failure.rank, failure.status), (Some(2), Some(Status::REMOTE_ERROR)), "{error}");
    }
    // Whoever calls gets it, at once.
    for (_, result) in sum(members) {
        assert!(matches!(result, Err(CliqueError::Failed(_))));
    }
    until(PATIENT, "the aborts", || job.fabric.live() == Live::default());
}

/// Members that wait in the middle of an operation are told, too.
#[test]
fn an_abort_ends_every_wait() {
    let job = Job::new(&[3]);
    let mut clique = job.up(0).remove(0);
    let mut members = clique.members();
    // Rank 2 never takes part.
    let absent = members.pop().unwrap();
    let clique = Arc::new(clique);
    let aborter = clique.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        aborter.abort().count()
    });
    let start = Instant::now();
    let results = sum(members);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    for (member, result) in results {
        assert!(matches!(result, Err(CliqueError::Ended { how: "aborted", .. })), "{result:?}");
        assert!(member.end().is_some());
    }
    assert_eq!(thread.join().unwrap(), 0, "nothing in quarantine");
    drop(absent);
    until(PATIENT, "everything to be gone", || job.fabric.live() == Live::default());
}

/// Aborts at random moments under traffic, from another thread.
#[test]
fn aborts_at_random_moments_under_traffic() {
    for round in 0..40u64 {
        let job = Job::new(&[2]);
        let mut clique = job.up(0).remove(0);
        let members = clique.members();
        let clique = Arc::new(clique);
        let aborter = clique.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(round * 37 % 1500));
            aborter.abort()
        });
        each(PATIENT, members, |_, mut member| {
            let start = Instant::now();
            let mut buffers = member.buffers(64);
            while start.elapsed() < PATIENT {
                let result = buffers.as_mut().map_err(|error| error.clone()).and_then(|buffers| {
                    member.all_reduce(buffers, 4, DataType::I32, ReduceOp::Sum)?;
                    member.wait(buffers, PATIENT)
                });
                if let Err(error) = result {
                    assert!(matches!(error, CliqueError::Ended { how: "aborted", .. }), "{error}");
                    return;
                }
            }
            panic!("the abort was not noticed");
        });
        assert_eq!(thread.join().unwrap().count(), 0);
        assert_eq!(job.fabric.live(), Live::default(), "round {round}");
    }
}

#[test]
fn raw_handles_on_the_owners_thread() {
    let job = Job::new(&[2]);
    let mut cliques = job.up(0);
    let mut members = cliques[0].members();
    let seen =
        members[1].with_raw(|comm, device| (comm, device, std::thread::current().name().map(str::to_owned)));
    let (comm, device, thread) = seen.unwrap();
    assert!(comm.0 != 0 && device == 1);
    assert_eq!(thread.as_deref(), Some("clique-owner"));
    // A panic does not bring the owner down, but the clique cannot be trusted any more.
    let error = members[0].with_raw(|_, _| panic!("the caller's mistake")).unwrap_err();
    assert!(error.to_string().contains("with_raw panicked: the caller's mistake"), "{error}");
    assert!(matches!(sum(members)[0].1, Err(CliqueError::Failed(_))));
    assert_eq!(job.fabric.live(), Live::default());
}

/// A body that blocks keeps the owner: at its deadline the clique fails, all is aborted, and the thread is counted.
#[test]
fn a_raw_call_that_blocks_has_a_deadline() {
    let job = Job::new(&[1]);
    let mut outcomes =
        job.bring_up_with(0, |_, builder| Some(builder.call_within(Duration::from_millis(100))));
    let mut clique = outcomes.remove(0).0.unwrap();
    let mut member = clique.members().remove(0);
    let (go, gone) = std::sync::mpsc::sync_channel::<()>(1);
    let start = Instant::now();
    let error = member.with_raw(move |_, _| gone.recv_timeout(PATIENT)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(error.to_string().ends_with("after 100ms; 1 in quarantine"), "{error}");
    assert_eq!(clique.quarantine().count(), 1);
    go.send(()).unwrap();
    until(PATIENT, "the owner to come back", || clique.quarantine().count() == 0);
    assert_eq!(job.fabric.live(), Live::default());
}

#[test]
fn a_member_that_is_dropped_is_not_waited_for() {
    let job = Job::new(&[2]);
    let mut cliques = job.up(0);
    let mut members = cliques[0].members();
    drop(members.pop());
    let start = Instant::now();
    let error = members[0].barrier().unwrap_err();
    assert!(error.to_string().contains("local seat 1 was dropped"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(2));
}

/// More ranks than one unique id is for, and a deadline that is over at once.
#[test]
fn many_ranks_and_no_time() {
    let mut job = Job::new(&[50, 50, 50, 50]);
    job.first_use = FirstUse::default().large_bytes(64).all_gather();
    close(job.up(0));
    job.within = Duration::ZERO;
    let start = Instant::now();
    for (result, _) in job.bring_up(1) {
        assert!(matches!(result, Err(CliqueError::Failed(_))), "{result:?}");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

/// A member that is dropped is not waited for by those of other participants either: all stand at one barrier.
#[test]
fn a_member_that_is_dropped_is_not_waited_for_elsewhere() {
    let job = Job::new(&[2, 1]);
    let mut cliques = job.up(0);
    let mut members = all_members(&mut cliques);
    drop(members.remove(1));
    let start = Instant::now();
    for error in each(PATIENT, members, |_, mut member| member.barrier().unwrap_err()) {
        assert!(error.to_string().contains("local seat 1 was dropped"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// What is declared twice, or by all, is run once; pairs of others are theirs.
#[test]
fn pairs_count_where_one_of_them_lives() {
    let mut job = Job::new(&[1, 1, 1]);
    job.first_use = FirstUse::default().large_bytes(64);
    let outcomes = job.bring_up_with(0, |participant, builder| {
        let first = FirstUse::default().large_bytes(64);
        // Participant 0 alone says that 1 sends to 2.
        Some(builder.first_use(if participant == 0 { first.peers(1, 2).peers(0, 1) } else { first }))
    });
    let mut cliques: Vec<Clique> = outcomes.into_iter().map(|(result, _)| result.unwrap()).collect();
    let mut members = all_members(&mut cliques);
    let mut buffers = members[1].buffers(1).unwrap();
    let error = members[1].send(&mut buffers, 1, DataType::U8, 2).unwrap_err();
    assert!(matches!(error, CliqueError::Undeclared { .. }), "{error}");
    members[1].with_raw(|_, _| ()).unwrap();
    let mut sends = members[0].buffers(1).unwrap();
    members[0].send(&mut sends, 1, DataType::U8, 1).unwrap();
    members[1].recv(&mut buffers, 1, DataType::U8, 0).unwrap();
    members[1].wait(&mut buffers, PATIENT).unwrap();
    let job = Job::new(&[2]);
    let outcomes =
        job.bring_up_with(0, |_, builder| Some(builder.first_use(FirstUse::default().peers(5, 6))));
    let error = outcomes.into_iter().next().unwrap().0.map(drop).unwrap_err();
    assert!(error.to_string().contains("declared peers: expected two ranks below 2"), "{error}");
}

#[test]
fn the_barrier_of_members() {
    let job = Job::new(&[3, 2]);
    let mut cliques = job.up(0);
    let members = all_members(&mut cliques);
    let counts: Arc<Vec<std::sync::atomic::AtomicU32>> =
        Arc::new((0..5).map(|_| std::sync::atomic::AtomicU32::new(0)).collect());
    let members = each(PATIENT, members, move |_, mut member| {
        for pass in 1..=20 {
            counts[member.rank() as usize].store(pass, std::sync::atomic::Ordering::SeqCst);
            member.barrier().unwrap();
            for count in counts.iter() {
                let count = count.load(std::sync::atomic::Ordering::SeqCst);
                assert!(count == pass || count == pass + 1, "{count} in {pass}");
            }
        }
        member
    });
    drop(members);
    close(cliques);
}

/// Dropping never hangs, frees everything, and is heard of by the others.
#[test]
fn dropping_is_an_abort() {
    let job = Job::new(&[1, 1]);
    let mut cliques = job.up(0);
    let start = Instant::now();
    drop(cliques.remove(0));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    until(PATIENT, "the other to hear of it", || cliques[0].end().is_some());
    let end = cliques[0].end().unwrap().to_string();
    assert!(end.contains("this participant dropped its clique without closing it"), "{end}");
    drop(cliques);
    until(PATIENT, "everything to be gone", || job.fabric.live() == Live::default());
}

/// Closing, and what goes wrong with it.
#[test]
fn closing_has_a_deadline() {
    // One that does not close.
    let job = Job::new(&[1, 1]);
    let mut cliques = job.up(0);
    let kept = cliques.pop();
    let closed = cliques.remove(0).close(Duration::from_secs(1)).unwrap();
    assert!(!closed.everybody);
    drop(kept);
    for (step, phase) in [(Step::Finalize, "finalize"), (Step::Destroy, "destroy")] {
        for kind in [Kind::Fail(Status::INTERNAL_ERROR), Kind::Panic, Kind::Hang] {
            let job = Job::new(&[2]);
            let clique = job.up(0).remove(0);
            job.processes[0].inject(Fault::new(step, Some(1), kind));
            let within = if kind == Kind::Hang { Duration::from_millis(200) } else { PATIENT };
            let start = Instant::now();
            let error = clique.close(within).unwrap_err();
            assert!(
                start.elapsed() < within + Duration::from_secs(2),
                "{step:?} {kind:?}: {:?}",
                start.elapsed()
            );
            let CliqueError::Failed(failure) = &error else { panic!("{error}") };
            if kind == Kind::Hang {
                // The aborts come back, the owner does not.
                until(PATIENT, "one in quarantine", || failure.quarantine.count() == 1);
            } else {
                assert!(failure.cause.contains(phase), "{error}");
            }
            job.fabric.release();
            until(PATIENT, "everything to come back", || {
                failure.quarantine.count() == 0 && job.fabric.live().communicators <= 1
            });
        }
    }
}

/// A call that is under way when its clique is closed gets its answer: its communicator cannot be asked later. A close
/// may be there first on a machine that is busy, so there are some tries.
#[test]
fn closing_answers_what_is_under_way() {
    let one_try = || {
        let job = Job::new(&[1]);
        let mut clique = job.up(0).remove(0);
        let member = clique.members().remove(0);
        job.processes[0].inject(Fault::new(
            Step::EnqueueProgress,
            Some(0),
            Kind::Delay(Duration::from_millis(200)),
        ));
        let (begins, is_beginning) = std::sync::mpsc::sync_channel(1);
        let called = std::thread::spawn(move || {
            let mut member = member;
            let mut buffers = member.buffers(64).unwrap();
            begins.send(()).unwrap();
            member.all_reduce(&mut buffers, 1, DataType::I32, ReduceOp::Sum)
        });
        is_beginning.recv_timeout(PATIENT).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        clique.close(PATIENT).unwrap();
        called.join().unwrap()
    };
    let said: Vec<_> = (0..10).map(|_| one_try()).take_while(Result::is_err).collect();
    assert!(said.len() < 10, "{said:?}");
}

/// What differs ends in the same verdict for all, before the library is called.
#[test]
fn a_disagreement_is_the_same_for_all() {
    let job = Job::new(&[1, 1, 1]);
    let outcomes = job.bring_up_with(0, |participant, builder| {
        Some(if participant == 2 { builder.local(1, 0) } else { builder })
    });
    let mut verdicts = outcomes.into_iter().map(|(result, _)| match result.unwrap_err() {
        CliqueError::Disagreement(disagreement) => disagreement,
        other => panic!("{other}"),
    });
    let first = verdicts.next().unwrap();
    assert_eq!(first.total, 2, "{first}");
    assert!(verdicts.all(|other| other == first));
    assert_eq!(job.fabric.live(), Live::default());
}

/// Control: what the verdict keeps away from the library would hang in it.
#[test]
fn the_library_alone_hangs_on_a_wrong_size() {
    use portway_clique::backend::{Backend, CommConfig, LocalRank, RawComm};
    let job = Job::new(&[1, 1]);
    let id = job.processes[0].unique_id().unwrap();
    let comms: Vec<RawComm> = [(0, 2), (1, 3)]
        .into_iter()
        .map(|(rank, size)| {
            let mut comms = [RawComm::NULL];
            let locals = [LocalRank { rank, device: rank }];
            // SAFETY: one place for one rank; the id is this library's, and used by this group alone.
            let status = unsafe {
                job.processes[rank as usize].init(size, &[id], &CommConfig::default(), &locals, &mut comms)
            };
            assert_eq!(status, Status::IN_PROGRESS);
            comms[0]
        })
        .collect();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(100) {
        for comm in &comms {
            // SAFETY: made above, and not ended.
            let status = unsafe { job.processes[0].state(*comm) };
            assert_eq!(status, Status::IN_PROGRESS);
        }
    }
}

#[test]
fn a_heartbeat_without_a_pause_is_refused() {
    let job = Job::new(&[1]);
    for (every, seen) in [(Duration::ZERO, "0ns"), (Duration::from_micros(999), "999µs")] {
        let builder = job.builder(0, 0).heartbeat(every);
        let result = builder.bring_up(job.processes[0].clone(), job.places[0].clone(), PATIENT);
        let error = result.map(drop).unwrap_err();
        assert!(matches!(error, CliqueError::Config { .. }), "{error}");
        assert_eq!(error.to_string(), format!("time between heartbeats: expected 1ms or more, seen {seen}"));
    }
}

/// A call may be given all the time that there is.
#[test]
fn a_call_without_an_end_comes_up() {
    let job = Job::new(&[1]);
    let builder = job.builder(0, 0).call_within(Duration::MAX);
    let clique = builder.bring_up(job.processes[0].clone(), job.places[0].clone(), PATIENT);
    clique.unwrap_or_else(|error| panic!("{error}")).close(PATIENT).unwrap();
}
