//! Whole cliques of NCCL on as many GPUs as there are: by threads of one process, by processes, and by mixtures; with
//! ranks that are missing, fail, die, or share a GPU; and 200 in a row. Everything has a deadline; what the machine lacks
//! is waived.
#![cfg(feature = "cuda")]

mod device_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device_support::child::{Child, pause, told};
use device_support::gpu::Gpu;
use device_support::twisted::{Instead, Twisted};
use device_support::{
    LATE, Machine, PATIENT, Participant, all_work, alone, bring_up, builder, close, each, errors,
    participants, up, wait_until, works_afterwards,
};
use portway_clique::backend::{Backend, CommConfig, DataType, LocalRank, RawComm, ReduceOp, Status};
use portway_clique::nccl::Nccl;
use portway_clique::rendezvous::{Hub, JobToken, Membership, Tcp, TcpConfig};
use portway_clique::{Clique, CliqueBuilder, CliqueError, FirstUse, Member};

/// How long a bring-up may take that is not to succeed.
const BRIEF: Duration = Duration::from_secs(4);

/// One participant with a rank on each GPU, whose members go to threads; what they can do beside their work.
fn one_participant(gpus: u32) {
    let Some(machine) = Machine::with(gpus) else { return };
    let mut clique = up(&machine, gpus, 0);
    println!("recorded: {}, {gpus} ranks in one participant: {:?}", machine.nccl.name(), clique.durations());
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

/// The sizes for which a machine has a GPU for every rank but one.
fn sizes(machine: &Machine) -> Vec<u32> {
    [2, 4, 8].into_iter().filter(|size| size - 1 <= machine.gpus).collect()
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

/// The ranks of the GPUs, and one more that does something else in place of its initialisation, so that the library
/// waits for it.
fn with_a_twisted_one(machine: &Machine, size: u32, attempt: u64, instead: Instead) -> Vec<Participant> {
    let hub = Hub::new(size).unwrap();
    let twisted = Twisted::new(machine.backend(), instead);
    let participant = |rank| {
        let is_last = rank == size - 1;
        let backend: Arc<dyn Backend> = if is_last { twisted.clone() } else { machine.backend() };
        let device = if is_last { 0 } else { rank };
        let builder = builder("device", size, attempt).local(rank, device);
        Participant { builder, backend, place: Arc::new(hub.join(rank).unwrap()) }
    };
    (0..size).map(participant).collect()
}

fn failure(error: &CliqueError) -> &portway_clique::Failure {
    match error {
        CliqueError::Failed(failure) => failure,
        error => panic!("expected a failure, seen {error}"),
    }
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
        (clique.abort().count(), start.elapsed())
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
    let (left, took) = aborter.join().unwrap();
    println!("recorded: abort {after:?} into traffic, after {operations:?} operations: {took:?}");
    assert_eq!(left, 0, "in quarantine after {took:?}");
    assert!(took < Duration::from_millis(1200), "{took:?}");
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

/// The library's own initialisation of these ranks, without a clique.
fn bare(nccl: &Nccl, locals: &[LocalRank]) -> Duration {
    let start = Instant::now();
    let id = nccl.unique_id().unwrap();
    let mut comms = vec![RawComm::NULL; locals.len()];
    // SAFETY: as many places as ranks; the id is used by this group alone.
    let status = unsafe { nccl.init(locals.len() as u32, &[id], &CommConfig::default(), locals, &mut comms) };
    let settled = |what: &str| {
        for comm in &comms {
            loop {
                // SAFETY: made above, and not ended.
                match unsafe { nccl.state(*comm) } {
                    Status::SUCCESS => break,
                    Status::IN_PROGRESS => std::hint::spin_loop(),
                    status => panic!("{what}: {status}"),
                }
                assert!(start.elapsed() < PATIENT, "{what}: in progress after {PATIENT:?}");
            }
        }
    };
    assert!(!status.is_error(), "{status}");
    settled("initialisation");
    let took = start.elapsed();
    // SAFETY: made above, up, and not used again.
    let status = unsafe { nccl.finalize(&comms) };
    assert!(!status.is_error(), "{status}");
    settled("finalizing");
    for comm in comms {
        // SAFETY: finalized, and not used again.
        unsafe { nccl.destroy(comm) };
    }
    took
}

/// What a process has, and its GPU.
#[derive(Clone, Copy, Debug)]
struct Counts {
    threads: usize,
    descriptors: usize,
    resident_kib: usize,
    free_mib_of_gpu: usize,
}

impl Counts {
    fn now(gpu: &Gpu) -> Counts {
        let entries = |of: &str| std::fs::read_dir(of).unwrap().count();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        Counts {
            threads: entries("/proc/self/task"),
            descriptors: entries("/proc/self/fd"),
            resident_kib: line.split_whitespace().nth(1).unwrap().parse().unwrap(),
            free_mib_of_gpu: gpu.free_bytes() >> 20,
        }
    }

    /// Those after a time in which threads that have been told to end are gone.
    fn settled(gpu: &Gpu, threads: usize) -> Counts {
        wait_until(
            &format!("{threads} threads"),
            Duration::from_secs(10),
            || Counts::now(gpu),
            |now| now.threads <= threads,
        )
    }
}

/// What this crate adds to the library's own initialisation, side by side, and 200 cliques in a row that leave nothing.
#[test]
fn many_in_a_row_are_flat_and_cost_little_more_than_the_library() {
    let Some(machine) = Machine::with(1) else { return };
    let gpus = machine.gpus.min(2);
    let gpu = Gpu::open(&machine.driver, 0);
    let locals: Vec<LocalRank> = (0..gpus).map(|rank| LocalRank { rank, device: rank }).collect();
    let ours = |attempt: u64| {
        let builder = builder("device", gpus, attempt).first_use(FirstUse::default());
        let builder = (0..gpus).fold(builder, |builder, rank| builder.local(rank, rank));
        let start = Instant::now();
        let clique = builder.bring_up(machine.backend(), alone(), PATIENT).unwrap();
        let took = start.elapsed();
        clique.close(PATIENT).unwrap();
        took
    };
    let (mut bares, mut all) = (Vec::new(), Vec::new());
    for attempt in 0..10 {
        bare(&machine.nccl, &locals);
        ours(attempt);
    }
    let before = Counts::now(&gpu);
    for attempt in 10..210 {
        if attempt % 10 == 0 {
            bares.push(bare(&machine.nccl, &locals));
        }
        all.push(ours(attempt));
    }
    let after = Counts::settled(&gpu, before.threads + 2);
    bares.sort_unstable();
    all.sort_unstable();
    let (bare, ours) = (bares[bares.len() / 2], all[all.len() / 2]);
    println!("recorded: initialisation of {gpus}, medians: {bare:?} of the library, {ours:?} of a clique");
    println!("recorded: {before:?} before, {after:?} after 200");
    assert!(ours.saturating_sub(bare) <= Duration::from_millis(5), "{bare:?} {ours:?}");
    assert!(after.descriptors <= before.descriptors + 4, "{before:?} {after:?}");
    assert!(after.resident_kib <= before.resident_kib + 65_536, "{before:?} {after:?}");
    assert!(after.free_mib_of_gpu + 64 >= before.free_mib_of_gpu, "{before:?} {after:?}");
    assert_eq!(machine.nccl.live_communicators(), 0);
}

/// 50 attempts that fail leave nothing either.
#[test]
fn attempts_that_fail_are_flat() {
    let Some(machine) = Machine::with(1) else { return };
    let gpu = Gpu::open(&machine.driver, 0);
    works_afterwards(&machine, 1, 0);
    let fail = |attempt: u64| {
        let instead = Instead::Fail(Duration::from_millis(20));
        errors(bring_up(with_a_twisted_one(&machine, 2, attempt, instead), PATIENT), PATIENT);
        machine.wait_until_nothing_lives();
    };
    (1..10).for_each(fail);
    std::thread::sleep(Duration::from_secs(1)); // what has been told to end, and is not waited for, has gone
    let before = Counts::now(&gpu);
    (10..60).for_each(fail);
    let after = Counts::settled(&gpu, before.threads + 2);
    println!("recorded: {before:?} before, {after:?} after 50 that failed");
    assert!(after.descriptors <= before.descriptors + 4, "{before:?} {after:?}");
    assert!(after.resident_kib <= before.resident_kib + 65_536, "{before:?} {after:?}");
    assert!(after.free_mib_of_gpu + 64 >= before.free_mib_of_gpu, "{before:?} {after:?}");
    works_afterwards(&machine, 1, 100);
}

fn join(participant: u32, participants: u32, address: &str) -> Arc<Tcp> {
    let token = JobToken::new(*b"clique_device").unwrap();
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
    if what == "stays" {
        let twisted = Twisted::new(nccl, Instead::Stay(PATIENT));
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

/// The process that the library waits for is killed: the others end, name its rank, and get rid of what was begun.
#[test]
fn a_process_that_dies_in_the_initialisation_is_named() {
    let Some(machine) = Machine::with(1) else { return };
    works_afterwards(&machine, 1, 0);
    let place = join(0, 2, "127.0.0.1:0");
    let mut child = Child::start(&format!("stays {} 1 2 1 1 0 2", place.address()), &[]);
    let within = Duration::from_secs(20);
    let participant =
        Participant { builder: builder("device", 2, 0).local(0, 0), backend: machine.backend(), place };
    let waits = std::thread::spawn(move || bring_up(vec![participant], within));
    child.wait_for("begun", PATIENT);
    std::thread::sleep(Duration::from_millis(500)); // the library waits for it by now
    child.kill();
    let killed = Instant::now();
    let outcomes = waits.join().unwrap();
    println!("recorded: back {:?} after the other was killed, of {within:?}", killed.elapsed());
    let error = errors(outcomes, within).remove(0);
    println!("recorded: {error}");
    let names_it = failure(&error).missing == [1] || error.to_string().contains("participant 1");
    assert!(names_it, "{error}");
    assert!(!child.finish(PATIENT).is_good);
    machine.wait_until_nothing_lives();
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
    assert_eq!(clique.abort().count(), 0);
    println!("recorded: abort with the peer dead: {:?}", start.elapsed());
    drop((member, clique));
    machine.wait_until_nothing_lives();
    works_afterwards(&machine, 2, 1);
}
