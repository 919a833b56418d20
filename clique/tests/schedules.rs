//! The deadlock that the barrier is there for: a rank whose communicator is ready launches an operation and allocates,
//! which takes the driver's lock and waits for the device, while its peer still allocates in its initialisation and waits
//! for the lock.
//!
//! Without the barrier it is seen, by a deadline; with it, 10,000 random schedules end. A schedule is a seed: it says how
//! many participants and ranks there are, and how long each rank takes for each of its steps. `PORTWAY_SEED=N` runs one of
//! them again, 200 times.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each};
use portway_clique::backend::{
    Backend, CommConfig, DataType, Enqueue, LocalRank, Operation, RawComm, ReduceOp, Status,
};
use portway_clique::software::{Fabric, Fault, Kind, Live, Software, Step};
use portway_clique::{Clique, FirstUse};

/// How many schedules are run with the barrier.
const SCHEDULES: u64 = 10_000;
/// When a run without the barrier counts as a deadlock.
const STUCK: Duration = Duration::from_millis(150);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    /// Nothing, mostly; else up to 300 µs.
    fn delay(&mut self) -> Duration {
        if self.below(3) > 0 { Duration::ZERO } else { Duration::from_micros(self.below(300)) }
    }
}

/// What a rank does once it has its communicator: launches an all-reduce, allocates, and waits for the result. The
/// library's calls are the unsafe ones, since the safe members keep away from what is shown here.
fn launch_then_allocate(
    process: &Software,
    comm: RawComm,
    device: u32,
    pause: Duration,
) -> Result<(), String> {
    let start = Instant::now();
    let mut memory = process.workspace(device, 64).map_err(|error| error.to_string())?;
    memory.write(&1i32.to_le_bytes()).map_err(|error| error.to_string())?;
    let (send, recv) = (memory.send_address(), memory.recv_address());
    let (count, data_type, op) = (1, DataType::I32, ReduceOp::Sum);
    let operation = Operation::AllReduce { send, recv, count, data_type, op };
    // SAFETY: the communicator was made by this library, is up, and ends after this; so does the workspace.
    let mut status = unsafe { process.enqueue(&[Enqueue { comm, operation, stream: memory.stream() }]) };
    while status == Status::IN_PROGRESS && start.elapsed() < STUCK {
        std::thread::sleep(Duration::from_micros(10));
        // SAFETY: as above.
        status = unsafe { process.state(comm) };
    }
    std::thread::sleep(pause);
    process.allocate(device, STUCK.saturating_sub(start.elapsed())).map_err(|error| error.to_string())?;
    while !memory.is_idle().map_err(|error| error.to_string())? {
        if start.elapsed() >= STUCK {
            return Err("the all-reduce did not end".to_owned());
        }
        std::thread::sleep(Duration::from_micros(10));
    }
    Ok(())
}

/// Without the barrier: each rank of one process goes on as soon as its own communicator is up.
fn without_barrier(fabric: &Fabric, ranks: u32, slow: Option<Duration>, random: &mut Random) -> bool {
    let process = Arc::new(Software::new(fabric));
    let id = process.unique_id().unwrap();
    if let Some(time) = slow {
        process.inject(Fault::new(Step::InitProgress, Some(ranks - 1), Kind::Delay(time)));
    }
    let pauses: Vec<(u32, Duration)> = (0..ranks).map(|rank| (rank, random.delay())).collect();
    let results = each(PATIENT, pauses, move |_, (rank, pause)| {
        let (locals, mut comms) = ([LocalRank { rank, device: rank }], [RawComm::NULL]);
        std::thread::sleep(pause);
        // SAFETY: one place for one rank; the id is used by this group alone.
        let mut status = unsafe { process.init(ranks, &[id], &CommConfig::default(), &locals, &mut comms) };
        let start = Instant::now();
        while status == Status::IN_PROGRESS && start.elapsed() < STUCK {
            std::thread::sleep(Duration::from_micros(10));
            // SAFETY: made above, and ended below.
            status = unsafe { process.state(comms[0]) };
        }
        let result = match status {
            Status::SUCCESS => launch_then_allocate(&process, comms[0], rank, pause),
            _ => Err("the initialisation did not end".to_owned()),
        };
        // SAFETY: made above, and not used again.
        unsafe { process.abort(comms[0]) };
        result
    });
    results.iter().any(Result::is_err)
}

/// Control: rank 1 is slow, so rank 0 launches and allocates while rank 1 is still in its initialisation. Every time.
#[test]
fn without_the_barrier_a_slow_rank_is_a_deadlock() {
    for seed in 0..5 {
        let slow = Some(Duration::from_millis(20));
        assert!(
            without_barrier(&Fabric::eager(2), 2, slow, &mut Random(seed)),
            "seed {seed}: no deadlock, so this shows nothing"
        );
    }
}

/// Control of the control: on one rank there is nobody to wait for.
#[test]
fn without_the_barrier_a_single_rank_is_no_deadlock() {
    for seed in 0..5 {
        assert!(!without_barrier(&Fabric::eager(1), 1, None, &mut Random(seed)), "seed {seed}");
    }
}

/// Control: some of the random schedules are deadlocks without the barrier, with a library that allocates in its
/// initialisation, and with one that allocates in the first operation.
#[test]
fn without_the_barrier_some_random_schedules_are_deadlocks() {
    for (what, make) in
        [("initialisation", Fabric::eager as fn(u32) -> Fabric), ("first operation", Fabric::new)]
    {
        let is_stuck = |seed: &u64| {
            let mut random = Random(*seed);
            let slow = Some(Duration::from_micros(random.below(600)));
            without_barrier(&make(2), 2, slow, &mut random)
        };
        let stuck = (0..40u64).filter(is_stuck).count();
        println!(
            "recorded: allocating in the {what}, {stuck} of 40 schedules without the barrier are deadlocks"
        );
        assert!(stuck > 0, "{what}");
    }
}

/// One schedule with the barrier: the same operations, by members, on threads of their own.
fn with_barrier(seed: u64) {
    let mut random = Random(seed);
    let participants = 1 + random.below(2) as usize;
    let locals: Vec<u32> = (0..participants).map(|_| 1 + random.below(2) as u32).collect();
    let fabric = if random.below(2) == 0 { Fabric::new } else { Fabric::eager };
    let mut job = Job::on(fabric(locals.iter().sum()), &locals);
    let declared = random.below(2) == 0;
    job.first_use = FirstUse::default().large_bytes(256);
    if declared {
        job.first_use = job.first_use.clone().all_reduce(DataType::I32, ReduceOp::Sum);
    }
    for (process, ranks) in job.processes.iter().zip(&job.ranks) {
        for rank in ranks {
            for step in [Step::InitProgress, Step::EnqueueProgress] {
                let delay = random.delay();
                if !delay.is_zero() {
                    process.inject(Fault::new(step, Some(*rank), Kind::Delay(delay)));
                }
            }
        }
    }
    let mut cliques = job.up(0);
    let mut members = Vec::new();
    for (participant, clique) in cliques.iter_mut().enumerate() {
        for member in clique.members() {
            members.push((member, job.processes[participant].clone(), random.delay()));
        }
    }
    let size = job.size() as i32;
    let members = each(PATIENT, members, move |_, (mut member, process, pause)| {
        let mut buffers = member.buffers(64).unwrap();
        // Everybody has its buffers before anybody launches.
        member.barrier().unwrap();
        buffers.write(&1i32.to_le_bytes()).unwrap();
        member.all_reduce(&mut buffers, 1, DataType::I32, ReduceOp::Sum).unwrap();
        std::thread::sleep(pause);
        // What hung without the barrier.
        process.allocate(member.device(), PATIENT).unwrap();
        member.wait(&mut buffers, PATIENT).unwrap();
        let mut seen = [0; 4];
        buffers.read(&mut seen).unwrap();
        assert_eq!(i32::from_le_bytes(seen), size);
        member
    });
    drop(members);
    // Half of them are closed, half are dropped.
    if random.below(2) == 0 {
        for closed in each(PATIENT, cliques, |_, clique: Clique| clique.close(PATIENT)) {
            closed.unwrap();
        }
    } else {
        drop(cliques);
    }
    assert_eq!(job.fabric.live(), Live::default());
}

#[test]
fn with_the_barrier_ten_thousand_random_schedules_end() {
    let start = Instant::now();
    let seeds: Vec<u64> = match std::env::var("PORTWAY_SEED") {
        Ok(seed) => vec![seed.parse().expect("PORTWAY_SEED is a number"); 200],
        Err(_) => (0..SCHEDULES).collect(),
    };
    let count = seeds.len();
    // Four at a time, since each of them mostly sleeps. Whoever gets stuck is named by its seed.
    let (next, seeds_left) = sync_channel(count);
    seeds.into_iter().for_each(|seed| next.send(seed).unwrap());
    drop(next);
    let seeds_left = Arc::new(std::sync::Mutex::new(seeds_left));
    each(Duration::from_secs(300), vec![(); 4], move |_, ()| {
        loop {
            let seed = seeds_left.lock().unwrap().try_recv();
            let Ok(seed) = seed else { return };
            each(PATIENT * 2, vec![seed], |_, seed| {
                let result = std::panic::catch_unwind(|| with_barrier(seed));
                assert!(result.is_ok(), "schedule with PORTWAY_SEED={seed}");
            });
        }
    });
    println!("recorded: {count} schedules in {:?}", start.elapsed());
}
