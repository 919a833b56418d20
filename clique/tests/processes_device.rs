//! Whole cliques of NCCL by processes, on as many GPUs as there are: each with one rank or several; that see all GPUs or
//! their own; that share a GPU; that die. Everything has a deadline; what the machine lacks is waived.
#![cfg(feature = "cuda")]

mod device_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device_support::child::{Child, pause, told};
use device_support::twisted::{Instead, Twisted};
use device_support::{
    Machine, PATIENT, Participant, all_work, bring_up, builder, errors, failure, sizes, wait_until,
    works_afterwards,
};
use portway_clique::CliqueError;
use portway_clique::backend::{Backend, DataType, ReduceOp};
use portway_clique::nccl::Nccl;
use portway_clique::rendezvous::{JobToken, Membership, Tcp, TcpConfig};

fn join(participant: u32, participants: u32, address: &str) -> Arc<Tcp> {
    let token = JobToken::new(*b"processes_device").unwrap();
    let member = Membership { token, participant, participants };
    let config = TcpConfig { member, address: address.parse().unwrap(), within: PATIENT };
    Arc::new(Tcp::start(config).unwrap_or_else(|error| panic!("{error}")))
}

/// The other end of the tests below; without the variable it has nothing to do. Is told: what it does, the store's
/// address, its participant, their number, its first rank, how many ranks and from which device on, and the size.
#[test]
fn child_process() {
    let Some(told) = told() else { return };
    let number = |index: usize| told[index].parse::<u32>().unwrap();
    let (what, place) = (told[0].as_str(), join(number(2), number(3), &told[1]));
    let (first, ranks, device, size) = (number(4), number(5), number(6), number(7));
    let builder =
        (0..ranks).fold(builder("device", size, 0), |builder, at| builder.local(first + at, device + at));
    let nccl = Nccl::load().unwrap();
    if what == "stays" || what == "fails" {
        let stays = Instead::Stay(PATIENT);
        let instead = if what == "stays" { stays } else { Instead::Fail(Duration::from_millis(300)) };
        let twisted = Twisted::new(nccl, instead);
        let watched = twisted.clone();
        std::thread::spawn(move || {
            wait_until("its initialisation", PATIENT, || watched.begun(), |begun| *begun > 0);
            println!("begun");
        });
        let error = builder.bring_up(twisted, place, PATIENT).map(drop).unwrap_err();
        println!("ended: {error}");
        return;
    }
    let mut clique = match builder.bring_up(nccl, place, PATIENT) {
        Ok(clique) => clique,
        Err(error) => {
            println!("error: {error}");
            return;
        }
    };
    let members = all_work(clique.members());
    if what == "dies" {
        pause("about to die");
        std::process::abort();
    }
    drop(members);
    assert!(clique.close(PATIENT).unwrap().everybody);
    println!("closed");
}

/// `processes` processes of `ranks` ranks each, of which this one is the first; each sees all GPUs, or its own alone.
fn processes(processes: u32, ranks: u32, each_sees_its_own: bool) {
    let size = processes * ranks;
    let Some(machine) = Machine::with(size) else { return };
    let place = join(0, processes, "127.0.0.1:0");
    let children: Vec<Child> = (1..processes)
        .map(|participant| {
            let first = participant * ranks;
            let own: Vec<String> = (first..first + ranks).map(|device| device.to_string()).collect();
            let (device, visible) = if each_sees_its_own { (0, Some(own.join(","))) } else { (first, None) };
            let address = place.address();
            let told = format!("works {address} {participant} {processes} {first} {ranks} {device} {size}");
            let visible = visible.as_deref().map(|own| ("CUDA_VISIBLE_DEVICES", own));
            Child::start(&told, visible.as_slice())
        })
        .collect();
    let builder = (0..ranks).fold(builder("device", size, 0), |builder, rank| builder.local(rank, rank));
    let mut clique =
        builder.bring_up(machine.backend(), place, PATIENT).unwrap_or_else(|error| panic!("{error}"));
    println!("recorded: {processes} processes of {ranks}: {:?}", clique.durations());
    drop(all_work(clique.members()));
    assert!(clique.close(PATIENT).unwrap().everybody);
    for child in children {
        let lines = child.succeed(PATIENT);
        assert!(lines.iter().any(|line| line == "closed"), "{lines:?}");
    }
}

#[test]
fn processes_of_2() {
    processes(2, 1, false);
}

#[test]
fn processes_of_4() {
    processes(4, 1, false);
}

#[test]
fn processes_of_8() {
    processes(8, 1, false);
}

#[test]
fn processes_that_see_their_own_gpus_alone() {
    processes(2, 1, true);
}

#[test]
fn two_processes_of_two_ranks() {
    processes(2, 2, false);
}

#[test]
fn two_processes_of_four_ranks() {
    processes(2, 4, false);
}

/// Two processes take the same GPU, which each knows by another name: both get the same verdict.
#[test]
fn the_same_gpu_in_two_processes_is_a_verdict() {
    let Some(machine) = Machine::with(1) else { return };
    let uuid = machine.nccl.device_uuid(0).unwrap();
    let place = join(0, 2, "127.0.0.1:0");
    let told = format!("works {} 1 2 1 1 0 2", place.address());
    let mut child = Child::start(&told, &[("CUDA_VISIBLE_DEVICES", &uuid)]);
    let result = builder("device", 2, 0).local(0, 0).bring_up(machine.backend(), place, PATIENT);
    let error = result.map(drop).unwrap_err();
    println!("recorded: {error}");
    assert!(matches!(error, CliqueError::Disagreement(_)), "{error}");
    assert!(error.to_string().contains("a device of its own"), "{error}");
    assert_eq!(child.wait_for("error:", PATIENT), error.to_string());
    child.succeed(PATIENT);
}

/// A job of processes of one rank each: this one is the first, the last does what it is told in place of its
/// initialisation, and needs no GPU of its own for that.
struct Job {
    first: Participant,
    others: Vec<Child>,
    last: Child,
}

fn job(machine: &Machine, size: u32, last: &str) -> Job {
    let place = join(0, size, "127.0.0.1:0");
    let start = |what: &str, rank: u32, device: u32| {
        Child::start(&format!("{what} {} {rank} {size} {rank} 1 {device} {size}", place.address()), &[])
    };
    let others = (1..size - 1).map(|rank| start("works", rank, rank)).collect();
    let last = start(last, size - 1, 0);
    let first =
        Participant { builder: builder("device", size, 0).local(0, 0), backend: machine.backend(), place };
    Job { first, others, last }
}

/// Every other process has heard of it, with the rank.
fn all_have_heard(others: Vec<Child>, rank: u32) {
    for mut other in others {
        let error = other.wait_for("error:", Duration::from_secs(20));
        assert!(error.contains(&rank.to_string()), "the last rank is {rank}: {error}");
        other.succeed(PATIENT);
    }
}

/// The process that the library waits for is killed: the others end, name its rank, and get rid of what was begun.
#[test]
fn a_process_that_dies_in_the_initialisation_is_named() {
    let Some(machine) = Machine::with(1) else { return };
    works_afterwards(&machine, 1, 0);
    for size in sizes(&machine) {
        let Job { first, others, mut last } = job(&machine, size, "stays");
        let within = Duration::from_secs(20);
        let waits = std::thread::spawn(move || bring_up(vec![first], within));
        last.wait_for("begun", PATIENT);
        std::thread::sleep(Duration::from_millis(500)); // the library waits for it by now
        last.kill();
        let killed = Instant::now();
        let outcomes = waits.join().unwrap();
        println!("recorded: back {:?} after one of {size} was killed, of {within:?}", killed.elapsed());
        let error = errors(outcomes, within).remove(0);
        println!("recorded: {error}");
        let last_rank = size - 1;
        let participant = format!("participant {last_rank}");
        let names_it =
            failure(&error).missing.contains(&last_rank) || error.to_string().contains(&participant);
        assert!(names_it, "{error}");
        all_have_heard(others, last_rank);
        assert!(!last.finish(PATIENT).is_good);
        machine.wait_until_nothing_lives();
    }
    works_afterwards(&machine, 1, 2);
}

/// A process fails while the library of the others waits for it: all are told at once.
#[test]
fn a_process_that_fails_in_the_initialisation_is_named() {
    let Some(machine) = Machine::with(1) else { return };
    works_afterwards(&machine, 1, 0);
    for size in sizes(&machine) {
        let Job { first, others, mut last } = job(&machine, size, "fails");
        let waits = std::thread::spawn(move || bring_up(vec![first], PATIENT));
        last.wait_for("begun", PATIENT);
        let begun = Instant::now();
        let outcomes = waits.join().unwrap();
        let took = begun.elapsed();
        let error = errors(outcomes, PATIENT).remove(0);
        println!("recorded: {took:?} after one of {size} began to fail: {error}");
        assert_eq!(failure(&error).rank, Some(size - 1), "{error}");
        assert!(took < Duration::from_secs(5), "{took:?} until the first knew of it");
        all_have_heard(others, size - 1);
        last.wait_for("ended:", PATIENT);
        last.succeed(PATIENT);
        machine.wait_until_nothing_lives();
    }
    works_afterwards(&machine, 1, 2);
}

/// The other process dies while this one waits for it in an operation: the wait ends by its deadline, the abort in time.
#[test]
fn a_process_that_dies_in_use_is_survived() {
    let Some(machine) = Machine::with(2) else { return };
    let place = join(0, 2, "127.0.0.1:0");
    let mut child = Child::start(&format!("dies {} 1 2 1 1 1 2", place.address()), &[]);
    let mut clique = builder("device", 2, 0).local(0, 0).bring_up(machine.backend(), place, PATIENT).unwrap();
    let mut member = all_work(clique.members()).remove(0);
    child.wait_for("about to die", PATIENT);
    child.go();
    assert!(!child.finish(PATIENT).is_good);
    let mut buffers = member.buffers(64).unwrap();
    let start = Instant::now();
    let result = member
        .all_reduce(&mut buffers, 16, DataType::F32, ReduceOp::Sum)
        .and_then(|()| member.wait(&mut buffers, Duration::from_secs(5)));
    let error = result.unwrap_err();
    println!("recorded: {error} after {:?}", start.elapsed());
    let start = Instant::now();
    let quarantine = clique.abort();
    let (took, left) = (start.elapsed(), quarantine.count());
    println!("recorded: abort with the peer dead: {took:?}, {left} in quarantine");
    assert!(took < Duration::from_millis(3200), "{took:?}");
    drop((member, clique));
    machine.wait_until_nothing_lives();
    works_afterwards(&machine, 2, 1);
}
