//! Whole programs: the one that failed first of all, and overlapping sets of GPUs. What the machine lacks is waived; the
//! sets run in software, too.
//!
//! The program that failed: one process, a thread for each GPU; each makes its communicator, then does work on its
//! device, a collective, and a copy to pageable memory, in a loop. A thread whose communicator was ready launched a
//! collective and then touched the driver's page tables, while its peer was still allocating in its initialisation.
#![cfg(feature = "cuda")]

mod device_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device_support::child::{Child, told};
use device_support::gpu::{Collectives, Gpu, Lane, Places};
use device_support::stage::{Stage, run_watched};
use device_support::subsets::{
    Limit, by_a_thread_for_each_device, by_threads_in_orders_of_their_own, family,
};
use device_support::{LATE, Machine, PATIENT, alone, builder, wait_until, works_afterwards};
use portway_clique::backend::{Backend, CommConfig, DataType, LocalRank, RawComm, ReduceOp, Status};
use portway_clique::rendezvous::Hub;
use portway_clique::software::{Fabric, Software};
use portway_clique::{Clique, CliqueError, FirstUse, Member};

/// How many runs a process does, each with communicators of its own.
const RUNS: u64 = 25;
/// How often a run goes through the loop.
const ROUNDS: u32 = 5;
/// Floats in a collective: 4 MiB.
const COUNT: usize = 1 << 20;
/// How long a run may take; the control's count as stuck then.
const RUN: Duration = Duration::from_secs(30);
/// How long a process of so many runs may take.
const CHILD: Duration = Duration::from_secs(130);

/// The other end of the tests below; without the variable it has nothing to do. Is told: the program, the number of
/// GPUs, of runs, and a seed.
#[test]
fn child_process() {
    let Some(told) = told() else { return };
    if told[0] == "hang" {
        println!("hanging");
        std::thread::sleep(CHILD);
        return;
    }
    let number = |index: usize| told[index].parse::<u64>().unwrap();
    let (gpus, runs, seed) = (number(1) as u32, number(2), number(3));
    let Some(machine) = Machine::with_kernels(gpus) else { return };
    let mut lanes: Vec<Lane> =
        (0..gpus).map(|device| Gpu::open(&machine.driver, device).lane(COUNT)).collect();
    let start = Instant::now();
    for run in 0..runs {
        let done = match told[0].as_str() {
            "with-the-barrier" => with_the_barrier(&machine, lanes, run, seed),
            "without-the-barrier" => without_the_barrier(&machine, lanes, run, seed),
            what => panic!("told to do {what:?}, which nobody knows"),
        };
        match done {
            Ok(back) => lanes = back,
            Err(stuck) => {
                println!("stuck: run {run}: {stuck}");
                // Threads that are inside the driver do not let the process end in order.
                std::process::abort();
            }
        }
    }
    println!("done: {runs} runs in {:?}", start.elapsed());
}

/// Up to 10 ms, from the run, the rank and the seed.
fn delay(seed: u64, run: u64, rank: u32) -> Duration {
    let mixed = (seed << 32 ^ run << 8 ^ u64::from(rank)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Duration::from_micros((mixed >> 40) % 10_000)
}

/// What a thread does once it has its communicator. `collective` puts the all-reduce into the stream.
fn rounds(
    stage: &Stage,
    lane: &mut Lane,
    rank: u32,
    size: u32,
    mut collective: impl FnMut(Places) -> Result<(), String>,
) -> Result<(), String> {
    let mut scratch = Vec::new();
    for round in 1..=ROUNDS {
        stage.is(format!("rank {rank}, round {round}: work on its device"));
        scratch.push(lane.scratch(4 << 20));
        lane.work((round * (rank + 1)) as f32);
        stage.is(format!("rank {rank}, round {round}: the collective"));
        collective(lane.places())?;
        stage.is(format!("rank {rank}, round {round}: the pageable copy"));
        lane.pageable_copy();
        let sum = (round * size * (size + 1) / 2) as f32;
        lane.check(sum, PATIENT * 2, "the collective to be copied");
    }
    stage.is(format!("rank {rank}: freeing"));
    Ok(())
}

/// A run over a clique: in even ones each thread is a participant, in odd ones one participant has all ranks.
fn with_the_barrier(machine: &Machine, lanes: Vec<Lane>, run: u64, seed: u64) -> Result<Vec<Lane>, String> {
    let (gpus, backend, nccl) = (lanes.len() as u32, machine.backend(), Collectives::load());
    let first_use = FirstUse::default().all_reduce(DataType::F32, ReduceOp::Sum);
    let named = builder("program", gpus, seed << 32 | run).first_use(first_use);
    let work = move |stage: &Stage, mut member: Member, lane: &mut Lane| {
        let (rank, size) = (member.rank(), member.size());
        let result = rounds(stage, lane, rank, size, |places| {
            let nccl = nccl.clone();
            // SAFETY: the communicator is ready; the memory and the stream are kept until the process ends.
            let call = move |comm, _| unsafe { nccl.all_reduce(comm, &places) };
            match member.with_raw(call) {
                Ok(0 | 7) => Ok(()),
                other => Err(format!("rank {rank}: the collective: {other:?}")),
            }
        });
        result.unwrap_or_else(|error| panic!("{error}"));
    };
    if run % 2 == 1 {
        let builder = (0..gpus).fold(named, |builder, rank| builder.local(rank, rank));
        let mut clique = builder.bring_up(backend, alone(), RUN).unwrap_or_else(|error| panic!("{error}"));
        let members = clique.members().into_iter().zip(lanes).collect();
        let lanes = run_watched(RUN, members, move |(member, mut lane): (Member, Lane), stage| {
            std::thread::sleep(delay(seed, run, member.rank()));
            work(stage, member, &mut lane);
            lane
        })?;
        clique.close(RUN).unwrap_or_else(|error| panic!("{error}"));
        return Ok(lanes);
    }
    let hub = Hub::new(gpus).unwrap();
    let threads = (0..).zip(lanes).map(|(rank, lane)| {
        let place = Arc::new(hub.join(rank).unwrap());
        (rank, place, named.clone().local(rank, rank), backend.clone(), lane)
    });
    run_watched(RUN * 2, threads.collect(), move |(rank, place, builder, backend, mut lane), stage| {
        std::thread::sleep(delay(seed, run, rank));
        stage.is(format!("rank {rank}: its bring-up"));
        let mut clique: Clique =
            builder.bring_up(backend, place, RUN).unwrap_or_else(|error| panic!("{error}"));
        work(stage, clique.members().remove(0), &mut lane);
        stage.is(format!("rank {rank}: its close"));
        clique.close(RUN).unwrap_or_else(|error| panic!("{error}"));
        lane
    })
}

/// The same over the library alone: each thread goes on as soon as its own communicator is there.
fn without_the_barrier(
    machine: &Machine,
    lanes: Vec<Lane>,
    run: u64,
    seed: u64,
) -> Result<Vec<Lane>, String> {
    let (gpus, library, nccl) = (lanes.len() as u32, machine.nccl.clone(), Collectives::load());
    let id = library.unique_id().unwrap();
    let threads = (0..).zip(lanes).collect();
    let ended = run_watched(RUN, threads, move |(rank, mut lane): (u32, Lane), stage| {
        std::thread::sleep(delay(seed, run, rank));
        stage.is(format!("rank {rank}: its initialisation"));
        let (locals, mut comms) = ([LocalRank { rank, device: rank }], [RawComm::NULL]);
        // SAFETY: one place for one rank; the id is used by this group alone.
        let status = unsafe { library.init(gpus, &[id], &CommConfig::default(), &locals, &mut comms) };
        let [comm] = comms;
        let settled = |what: &str| {
            // SAFETY: made above, and not ended.
            let see = || unsafe { library.state(comm) };
            let status = wait_until(what, PATIENT * 2, see, |status| *status != Status::IN_PROGRESS);
            assert_eq!(status, Status::SUCCESS, "rank {rank}: {what}");
        };
        assert!(!status.is_error(), "rank {rank}: {status}");
        settled("its initialisation");
        let result = rounds(stage, &mut lane, rank, gpus, |places| {
            // SAFETY: the communicator is up; the memory and the stream are kept until the process ends.
            let status = unsafe { nccl.all_reduce(library.handle(comm), &places) };
            assert!([0, 7].contains(&status), "rank {rank}: the collective: status {status}");
            settled("its collective");
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{error}"));
        (comm, lane)
    })?;
    let (comms, lanes): (Vec<RawComm>, Vec<Lane>) = ended.into_iter().unzip();
    let library = machine.nccl.clone();
    run_watched(RUN, comms, move |comm, stage| {
        stage.is("its end");
        // SAFETY: made by the threads above, which use it no more.
        unsafe { library.abort(comm) }
    })?;
    Ok(lanes)
}

/// Runs it in several processes one after the other, so that some runs are the first of their process.
fn original(needed: u32, gpus: impl Fn(&Machine) -> u32, processes: u64, runs: u64, loading: &str) {
    let Some(machine) = Machine::with_kernels(needed) else { return };
    let (gpus, start) = (gpus(&machine), Instant::now());
    for seed in 0..processes {
        let told = format!("with-the-barrier {gpus} {runs} {seed}");
        let lines = Child::start(&told, &[("CUDA_MODULE_LOADING", loading)]).succeed(CHILD);
        let done = format!("done: {runs} runs");
        assert!(lines.iter().any(|line| line.starts_with(&done)), "{lines:?}");
    }
    let all = processes * runs;
    println!("recorded: {loading}, {gpus} GPUs: {all} runs with the barrier in {:?}", start.elapsed());
}

#[test]
fn the_original_program_on_one_gpu() {
    original(1, |_| 1, 1, 8, "LAZY");
}

#[test]
fn the_original_program_on_all_gpus_with_lazy_loading() {
    original(2, |machine| machine.gpus, 100 / RUNS, RUNS, "LAZY");
}

#[test]
fn the_original_program_on_all_gpus_with_eager_loading() {
    original(2, |machine| machine.gpus, 100 / RUNS, RUNS, "EAGER");
}

/// The control: what comes of it is written down, whatever it is.
fn control(needed: u32, gpus: impl Fn(&Machine) -> u32, runs: u64) -> bool {
    let Some(machine) = Machine::with_kernels(needed) else { return true };
    let gpus = gpus(&machine);
    let mut all_ended = true;
    for loading in ["LAZY", "EAGER"] {
        let told = format!("without-the-barrier {gpus} {runs} 0");
        let ended = Child::start(&told, &[("CUDA_MODULE_LOADING", loading)]).finish(CHILD);
        let said = |start: &str| ended.lines.iter().find(|line| line.starts_with(start)).cloned();
        let outcome = match (said("done:"), said("stuck:"), ended.was_killed) {
            (Some(done), _, false) => done,
            (None, Some(stuck), _) => stuck,
            (_, _, true) => format!("killed after {CHILD:?}"),
            _ => format!("ended otherwise: {}", ended.lines.join(" / ")),
        };
        println!("recorded: without the barrier, {loading}, {gpus} GPUs: {outcome}");
        all_ended &= ended.is_good;
    }
    all_ended
}

#[test]
fn the_control_without_the_barrier() {
    control(2, |machine| machine.gpus, RUNS);
}

/// A single rank has nobody to wait for, so here the control must end.
#[test]
fn the_control_on_one_gpu() {
    assert!(control(1, |_| 1, 3));
}

/// The control of the tests here: a thread that does not end is named with what it is at, and a process that does not
/// end is killed.
#[test]
fn what_hangs_is_noticed() {
    let limit = Duration::from_millis(200);
    let stuck = run_watched(limit, vec![0, 1], |number, stage: &Stage| {
        stage.is(format!("place {number}"));
        std::thread::sleep(if number == 1 { Duration::from_secs(2) } else { Duration::ZERO });
    });
    let stuck = stuck.unwrap_err();
    assert!(stuck.contains("thread 0 is at its end; thread 1 is at place 1"), "{stuck}");
    let mut child = Child::start("hang", &[]);
    child.wait_for("hanging", PATIENT);
    let ended = child.finish(limit);
    assert!(ended.was_killed && !ended.is_good);
}

fn no_error(what: &str, (up, errors): (usize, Vec<CliqueError>), expected: usize) {
    println!("recorded: {what}: {up} cliques came up");
    assert!(errors.is_empty() && up == expected, "{what}: {up} of {expected} came up: {errors:?}");
}

/// Cliques of one another's GPUs may get in each other's way, since the barrier of each is its own. They do not hang.
fn in_time(what: &str, (up, errors): (usize, Vec<CliqueError>)) {
    println!("recorded: {what}: {up} cliques came up, {} bring-ups failed", errors.len());
    for error in errors.iter().take(3) {
        println!("recorded: {what}: {error}");
    }
}

/// How long a bring-up may take whose peers are elsewhere.
const BRIEF: Duration = Duration::from_secs(3);

fn subsets(needed: u32) {
    let Some(machine) = Machine::with(needed) else { return };
    works_afterwards(&machine, machine.gpus, 0);
    let (backend, gpus) = (machine.backend(), needed);
    let count = family(gpus).len();
    let (start, limit) = (Instant::now(), |within| Limit { within, late: LATE });
    let ended = by_a_thread_for_each_device(&backend, gpus, true, limit(PATIENT));
    no_error(&format!("a thread for each of {gpus} GPUs, all in one order"), ended, count);
    let ended = by_threads_in_orders_of_their_own(&backend, gpus, 4, limit(Duration::from_secs(20)));
    in_time(&format!("4 threads, sets of {gpus} GPUs, at the same time"), ended);
    let ended = by_a_thread_for_each_device(&backend, gpus, false, limit(BRIEF));
    in_time(&format!("a thread for each of {gpus} GPUs, in different orders"), ended);
    machine.wait_until_nothing_lives();
    println!("recorded: sets of {gpus} GPUs took {:?}", start.elapsed());
    works_afterwards(&machine, machine.gpus, 1);
}

#[test]
fn overlapping_sets_of_1() {
    subsets(1);
}

#[test]
fn overlapping_sets_of_2() {
    subsets(2);
}

#[test]
fn overlapping_sets_of_4() {
    subsets(4);
}

#[test]
fn overlapping_sets_of_8() {
    subsets(8);
}

/// The same in software, where an allocation waits while a kernel is there. The processors may be busy with other tests,
/// so how punctual it is is not looked at here.
#[test]
fn overlapping_sets_in_software() {
    let limit = |within| Limit { within, late: Duration::from_secs(2) };
    for devices in [1, 2, 4] {
        let backend: Arc<dyn Backend> = Arc::new(Software::new(&Fabric::new(devices)));
        let count = family(devices).len();
        let ended = by_a_thread_for_each_device(&backend, devices, true, limit(PATIENT));
        no_error(&format!("software, a thread for each of {devices} devices"), ended, count);
        let ended = by_threads_in_orders_of_their_own(&backend, devices, 4, limit(BRIEF));
        in_time(&format!("software, 4 threads, sets of {devices} devices"), ended);
        let brief = limit(Duration::from_millis(500));
        let (up, errors) = by_a_thread_for_each_device(&backend, devices, false, brief);
        println!(
            "recorded: software, {devices} devices in different orders: {up} up, {} failed",
            errors.len()
        );
        assert_eq!(errors.is_empty(), devices == 1, "threads that wait for each other in a ring: {errors:?}");
    }
}
