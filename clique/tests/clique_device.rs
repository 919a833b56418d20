//! Whole cliques of NCCL by threads of one process, on as many GPUs as there are; with ranks that are missing, fail, or
//! share a GPU; and aborts. Everything has a deadline; what the machine lacks is waived.
#![cfg(feature = "cuda")]

mod device_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device_support::twisted::{Instead, with_a_twisted_one};
use device_support::{
    LATE, Machine, PATIENT, Participant, all_work, alone, bring_up, builder, close, each, errors, failure,
    participants, sizes, up, wait_until, works_afterwards,
};
use portway_clique::backend::{DataType, RawComm, ReduceOp};
use portway_clique::rendezvous::Hub;
use portway_clique::{Clique, CliqueBuilder, CliqueError, Member};

/// How long a bring-up may take that is not to succeed.
const BRIEF: Duration = Duration::from_secs(4);

/// One participant with a rank on each GPU, whose members go to threads; what they can do beside their work.
fn one_participant(gpus: u32) {
    let Some(machine) = Machine::with(gpus) else { return };
    let mut clique = up(&machine, gpus, 0);
    println!(
        "recorded: {}, {gpus} ranks in one participant: {:?}",
        machine.backend().name(),
        clique.durations()
    );
    let members = each(all_work(clique.members()), |mut member: Member| {
        // What was not declared passes the barrier.
        let mut buffers = member.buffers(4096).unwrap();
        member.all_reduce(&mut buffers, 64, DataType::I64, ReduceOp::Max).unwrap();
        member.wait(&mut buffers, PATIENT).unwrap();
        member.barrier().unwrap();
        let device = member.device();
        assert!(member.with_raw(move |comm, at| comm != RawComm::NULL && at == device).unwrap());
        member
    });
    // Two halves of four or more, else one whole, each in reverse order.
    let size = if gpus < 4 { gpus } else { gpus / 2 };
    let members = each(members, move |mut member: Member| {
        let rank = member.rank();
        let mut child = member.split(Some(rank / size), -(rank as i32)).unwrap().unwrap();
        assert_eq!((child.size(), child.rank()), (size, size - 1 - rank % size));
        let mut buffers = child.buffers(4).unwrap();
        buffers.write(&1f32.to_le_bytes()).unwrap();
        child.all_reduce(&mut buffers, 1, DataType::F32, ReduceOp::Sum).unwrap();
        child.wait(&mut buffers, PATIENT).unwrap();
        let mut sum = [0; 4];
        buffers.read(&mut sum).unwrap();
        assert_eq!(f32::from_le_bytes(sum), size as f32);
        assert!(child.close(PATIENT).unwrap().everybody);
        member
    });
    drop(members);
    println!("recorded: {:?}", clique.close(PATIENT).unwrap());
    assert_eq!(machine.nccl.live_communicators(), 0);
}

/// One participant for each GPU, each with a thread.
fn a_thread_for_each_gpu(gpus: u32) {
    let Some(machine) = Machine::with(gpus) else { return };
    let outcomes = bring_up(participants(&machine, gpus, 0), PATIENT);
    let mut cliques: Vec<Clique> =
        outcomes.into_iter().map(|(result, _)| result.unwrap_or_else(|error| panic!("{error}"))).collect();
    println!("recorded: {gpus} participants in one process: {:?}", cliques[0].durations());
    drop(all_work(cliques.iter_mut().flat_map(Clique::members).collect()));
    close(cliques);
    assert_eq!(machine.nccl.live_communicators(), 0);
}

#[test]
fn one_participant_of_1() {
    one_participant(1);
}

#[test]
fn one_participant_of_2() {
    one_participant(2);
}

#[test]
fn one_participant_of_4() {
    one_participant(4);
}

#[test]
fn one_participant_of_8() {
    one_participant(8);
}

#[test]
fn threads_of_2() {
    a_thread_for_each_gpu(2);
}

#[test]
fn threads_of_4() {
    a_thread_for_each_gpu(4);
}

#[test]
fn threads_of_8() {
    a_thread_for_each_gpu(8);
}

/// A rank that does not come is named, in time, by all others.
#[test]
fn a_rank_that_does_not_come_is_named() {
    let Some(machine) = Machine::with(1) else { return };
    works_afterwards(&machine, machine.gpus, 0);
    for size in sizes(&machine) {
        let hub = Hub::new(size).unwrap();
        let others = (0..size - 1).map(|rank| Participant {
            builder: builder("device", size, 1).local(rank, rank),
            backend: machine.backend(),
            place: Arc::new(hub.join(rank).unwrap()),
        });
        for error in errors(bring_up(others.collect(), BRIEF), BRIEF) {
            println!("recorded: {error}");
            assert!(error.to_string().contains(&format!("participant {}", size - 1)), "{error}");
        }
    }
    works_afterwards(&machine, machine.gpus, 2);
}

/// The library waits for a rank that is in its initialisation for ever: the others end by their deadline, name it, and
/// get rid of what the library had begun.
#[test]
fn a_rank_that_is_left_out_of_the_initialisation_is_named() {
    let Some(machine) = Machine::with(1) else { return };
    works_afterwards(&machine, machine.gpus, 0);
    for size in sizes(&machine) {
        let instead = Instead::Stay(BRIEF + Duration::from_secs(2));
        let mut outcomes = bring_up(with_a_twisted_one(&machine, size, 1, instead), BRIEF);
        let (own, took) = outcomes.pop().unwrap();
        assert!(own.is_err() && took < BRIEF + LATE, "the one that stays: {took:?}, {own:?}");
        for error in errors(outcomes, BRIEF) {
            println!("recorded: size {size}: {error}");
            // Those that the library holds meanwhile did not come up either.
            assert!(failure(&error).missing.contains(&(size - 1)), "{error}");
            let quarantine = failure(&error).quarantine.clone();
            wait_until("its aborts to come back", PATIENT, || quarantine.count(), |count| *count == 0);
        }
        machine.wait_until_nothing_lives();
    }
    works_afterwards(&machine, machine.gpus, 2);
}

/// One fails while the library waits for it: all others are told at once, and which it was.
#[test]
fn a_rank_that_fails_in_its_initialisation_is_named() {
    let Some(machine) = Machine::with(1) else { return };
    works_afterwards(&machine, machine.gpus, 0);
    for size in sizes(&machine) {
        let instead = Instead::Fail(Duration::from_millis(300));
        let start = Instant::now();
        let outcomes = bring_up(with_a_twisted_one(&machine, size, 1, instead), PATIENT);
        let took = start.elapsed();
        for error in errors(outcomes, PATIENT) {
            println!("recorded: size {size}, after {took:?}: {error}");
            assert_eq!(failure(&error).rank, Some(size - 1), "{error}");
        }
        assert!(took < Duration::from_secs(5), "{took:?} until all knew of a failure after 300 ms");
        machine.wait_until_nothing_lives();
    }
    works_afterwards(&machine, machine.gpus, 2);
}

/// NCCL waits for a rank that the wrong size promises, and may for a GPU that has two ranks; the verdict comes before it.
#[test]
fn wrong_sizes_and_the_same_gpu_twice_are_verdicts() {
    let Some(machine) = Machine::with(1) else { return };
    let verdict = |builder: CliqueBuilder| {
        let error = builder.bring_up(machine.backend(), alone(), PATIENT).map(drop).unwrap_err();
        println!("recorded: {error}");
        assert!(matches!(error, CliqueError::Disagreement(_)), "{error}");
        error.to_string()
    };
    let twice = verdict(builder("device", 2, 0).local(0, 0).local(1, 0));
    assert!(twice.contains("a device of its own; rank 0"), "{twice}");
    let all = (0..machine.gpus)
        .fold(builder("device", machine.gpus + 1, 1), |builder, rank| builder.local(rank, rank));
    let missing = verdict(all);
    assert!(missing.contains(&format!("rank {} (nobody)", machine.gpus)), "{missing}");
    let same = verdict(builder("device", 2, 2).local(0, 0).local(0, 0));
    assert!(same.contains("this rank once"), "{same}");
    assert_eq!(machine.nccl.live_communicators(), 0);
}

fn abort_under_traffic(machine: &Machine, attempt: u64, after: Duration) {
    let mut clique = up(machine, machine.gpus, attempt);
    let members = clique.members();
    let aborter = std::thread::spawn(move || {
        std::thread::sleep(after);
        let start = Instant::now();
        let quarantine = clique.abort();
        (start.elapsed(), quarantine.count(), quarantine)
    });
    let operations = each(members, |mut member: Member| {
        let mut buffers = member.buffers(1 << 20);
        let start = Instant::now();
        let mut operations = 0;
        loop {
            let result = buffers.as_mut().map_err(|error| error.clone()).and_then(|buffers| {
                member.all_reduce(buffers, 1 << 18, DataType::F32, ReduceOp::Sum)?;
                member.wait(buffers, PATIENT)
            });
            match result {
                Ok(()) => operations += 1,
                Err(CliqueError::Ended { how: "aborted", .. }) => return operations,
                Err(error) => panic!("rank {}: expected an abort, seen {error}", member.rank()),
            }
            assert!(start.elapsed() < PATIENT, "the abort was not noticed");
        }
    });
    let (took, left, quarantine) = aborter.join().unwrap();
    println!(
        "recorded: abort {after:?} into traffic, after {operations:?} operations: {took:?}, {left} in quarantine"
    );
    assert!(took < Duration::from_millis(3200), "{took:?}");
    // The library takes most of a second for an abort by itself; what takes longer than 3 s comes back.
    wait_until("what was aborted to come back", PATIENT, || quarantine.count(), |count| *count == 0);
}

#[test]
fn aborts_at_random_moments_under_traffic() {
    let Some(machine) = Machine::with(1) else { return };
    for round in 0..10u64 {
        abort_under_traffic(&machine, round, Duration::from_micros(round * 7919 % 20_000));
    }
    machine.wait_until_nothing_lives();
    works_afterwards(&machine, machine.gpus, 100);
}
