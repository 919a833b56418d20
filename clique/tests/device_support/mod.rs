//! What the tests on real GPUs share: how many there are, cliques on them, and limits for everything.
//!
//! A test that needs more GPUs than there are prints `waived: needs N GPUs, has M`. With `PORTWAY_REQUIRE_CUDA` a driver
//! or an NCCL that is missing is a failure.
#![allow(dead_code, reason = "each test program uses some of it")]

pub mod child;
pub mod gpu;
pub mod stage;
pub mod subsets;
pub mod twisted;

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use portway_clique::backend::{Backend, DataType, ReduceOp};
use portway_clique::nccl::Nccl;
use portway_clique::rendezvous::{Hub, InProcess, Rendezvous};
use portway_clique::{Clique, CliqueBuilder, CliqueError, Failure, FirstUse, Member};
use portway_fifo::cuda::Driver;
use portway_fifo::cuda::nvrtc::Compiler;

/// For what has to succeed.
pub const PATIENT: Duration = Duration::from_secs(60);
/// How late a deadline may be met.
pub const LATE: Duration = Duration::from_millis(100);

/// The GPUs of this machine, for one test at a time: some fill a GPU, or count what their process has.
pub struct Machine {
    pub nccl: Arc<Nccl>,
    pub driver: Arc<Driver>,
    pub gpus: u32,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    /// Of a machine with so many GPUs, or more; else `None`, after a line that says why the test is waived.
    pub fn with(needed: u32) -> Option<Machine> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = Driver::load().and_then(|driver| Ok((driver.device_count()?, driver)));
        let (gpus, driver) = match found {
            Ok(found) => found,
            Err(error) => return lacks(&format!("needs {needed} GPUs, has 0: {error}")),
        };
        if gpus < needed {
            println!("waived: needs {needed} GPUs, has {gpus}");
            return None;
        }
        match Nccl::load() {
            Ok(nccl) => Some(Machine { nccl, driver, gpus, _alone: alone }),
            Err(error) => lacks(&format!("needs NCCL: {error}")),
        }
    }

    /// The same where kernels can be compiled.
    pub fn with_kernels(needed: u32) -> Option<Machine> {
        let machine = Machine::with(needed)?;
        match Compiler::load() {
            Ok(_) => Some(machine),
            Err(error) => lacks(&format!("needs NVRTC: {error}")),
        }
    }

    pub fn backend(&self) -> Arc<dyn Backend> {
        self.nccl.clone()
    }

    /// Waits until no communicator is left. Those that were in quarantine may come back late.
    pub fn wait_until_nothing_lives(&self) {
        wait_until(
            "no communicator to be left",
            PATIENT,
            || self.nccl.live_communicators(),
            |count| *count == 0,
        );
    }
}

fn lacks(what: &str) -> Option<Machine> {
    println!("waived: {what}");
    assert!(std::env::var_os("PORTWAY_REQUIRE_CUDA").is_none(), "PORTWAY_REQUIRE_CUDA, and {what}");
    None
}

/// Waits for a condition; panics with what was awaited and what was seen if it does not come.
pub fn wait_until<T: std::fmt::Debug>(
    what: &str,
    limit: Duration,
    mut see: impl FnMut() -> T,
    enough: impl Fn(&T) -> bool,
) -> T {
    let start = Instant::now();
    loop {
        let seen = see();
        if enough(&seen) {
            return seen;
        }
        assert!(start.elapsed() < limit, "waited {limit:?} for {what}, saw {seen:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Runs a body for each item, each on a thread of its own; what they return, in order. All together have one limit.
pub fn each_within<T: Send + 'static, R: Send + 'static>(
    limit: Duration,
    items: Vec<T>,
    body: impl Fn(T) -> R + Clone + Send + 'static,
) -> Vec<R> {
    let mut threads = Vec::new();
    for item in items {
        let (done, is_done) = sync_channel(1);
        let body = body.clone();
        threads.push((std::thread::spawn(move || drop(done.send(body(item)))), is_done));
    }
    let (end, count) = (Instant::now() + limit, threads.len());
    let mut results = Vec::new();
    for (thread, is_done) in threads {
        match is_done.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(result) => results.push(result),
            Err(RecvTimeoutError::Timeout) => {
                panic!("waited {limit:?} for {count} threads, of which {} in order are done", results.len())
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => unreachable!("it sends before it returns"),
            },
        }
    }
    results
}

/// The same with the limit for what has to succeed, twice: once for the work, once for its own deadlines.
pub fn each<T: Send + 'static, R: Send + 'static>(
    items: Vec<T>,
    body: impl Fn(T) -> R + Clone + Send + 'static,
) -> Vec<R> {
    each_within(PATIENT * 2, items, body)
}

/// The sizes for which a machine has a GPU for every rank but one.
pub fn sizes(machine: &Machine) -> Vec<u32> {
    [2, 4, 8].into_iter().filter(|size| size - 1 <= machine.gpus).collect()
}

/// What a clique failed of.
pub fn failure(error: &CliqueError) -> &Failure {
    match error {
        CliqueError::Failed(failure) => failure,
        error => panic!("expected a failure, seen {error}"),
    }
}

/// What the tests declare.
pub fn first_use(size: u32) -> FirstUse {
    let first = FirstUse::default().all_reduce(DataType::F32, ReduceOp::Sum).all_gather();
    if size > 1 { first.ring(size) } else { first }
}

pub fn builder(name: &str, size: u32, attempt: u64) -> CliqueBuilder {
    let builder = Clique::builder(name, size).attempt(attempt).first_use(first_use(size));
    builder.heartbeat(Duration::from_millis(50)).call_within(Duration::from_secs(20))
}

/// The meeting place of one participant alone.
pub fn alone() -> Arc<InProcess> {
    Arc::new(Hub::new(1).unwrap().join(0).unwrap())
}

/// A clique of one participant, with a rank on each of these devices.
pub fn up_on(
    backend: &Arc<dyn Backend>,
    name: &str,
    attempt: u64,
    devices: &[u32],
) -> Result<Clique, CliqueError> {
    let builder = builder(name, devices.len() as u32, attempt);
    let builder = (0..).zip(devices).fold(builder, |builder, (rank, device)| builder.local(rank, *device));
    builder.bring_up(backend.clone(), alone(), PATIENT)
}

/// The same on the first devices; it has to come up.
pub fn up(machine: &Machine, gpus: u32, attempt: u64) -> Clique {
    let devices: Vec<u32> = (0..gpus).collect();
    up_on(&machine.backend(), "device", attempt, &devices).unwrap_or_else(|error| panic!("{error}"))
}

/// How a participant's bring-up ended, and after how long.
pub type Outcome = (Result<Clique, CliqueError>, Duration);

/// One participant of a clique.
pub struct Participant {
    pub builder: CliqueBuilder,
    pub backend: Arc<dyn Backend>,
    pub place: Arc<dyn Rendezvous>,
}

/// Participants of one process: each has a thread, a GPU and the rank of its number.
pub fn participants(machine: &Machine, gpus: u32, attempt: u64) -> Vec<Participant> {
    let hub = Hub::new(gpus).unwrap();
    let participant = |rank| Participant {
        builder: builder("device", gpus, attempt).local(rank, rank),
        backend: machine.backend(),
        place: Arc::new(hub.join(rank).unwrap()),
    };
    (0..gpus).map(participant).collect()
}

/// Brings participants up, each on a thread of its own.
pub fn bring_up(participants: Vec<Participant>, within: Duration) -> Vec<Outcome> {
    each_within(within + PATIENT, participants, move |one: Participant| {
        let start = Instant::now();
        let result = one.builder.bring_up(one.backend, one.place, within);
        (result, start.elapsed())
    })
}

/// The errors of bring-ups that must have failed, each no later than its deadline allows.
pub fn errors(outcomes: Vec<Outcome>, within: Duration) -> Vec<CliqueError> {
    let mut errors = Vec::new();
    for (participant, (result, took)) in outcomes.into_iter().enumerate() {
        let late = took.saturating_sub(within);
        assert!(late < LATE, "participant {participant} came back {late:?} after its deadline of {within:?}");
        match result {
            Ok(_) => panic!("participant {participant} is ready, and must have failed"),
            Err(error) => errors.push(error),
        }
    }
    errors
}

/// All-reduces, small and large, an all-gather, and an exchange around the ring, with checked results.
pub fn work(member: &mut Member) -> Result<(), CliqueError> {
    let (rank, size) = (member.rank(), member.size());
    let mut buffers = member.buffers(8 << 20)?;
    let sum = (size * (size + 1) / 2) as f32;
    for count in [1usize, 1000, 2 << 20] {
        buffers.write(&(rank as f32 + 1.0).to_le_bytes().repeat(count))?;
        member.all_reduce(&mut buffers, count, DataType::F32, ReduceOp::Sum)?;
        member.wait(&mut buffers, PATIENT)?;
        let mut seen = vec![0; count * 4];
        buffers.read(&mut seen)?;
        let wrong = seen.chunks(4).position(|word| word != sum.to_le_bytes());
        assert_eq!(wrong, None, "rank {rank}: an all-reduce of {count}: not {sum} there");
    }
    buffers.write(&[rank as u8; 100])?;
    member.all_gather(&mut buffers, 100, DataType::U8)?;
    member.wait(&mut buffers, PATIENT)?;
    let mut seen = vec![0xee; 100 * size as usize];
    buffers.read(&mut seen)?;
    let expected: Vec<u8> = (0..size).flat_map(|rank| [rank as u8; 100]).collect();
    assert!(seen == expected, "rank {rank}: an all-gather: {seen:?}");
    if size > 1 {
        let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut receives = member.buffers(64)?;
        buffers.write(&[rank as u8; 64])?;
        member.send(&mut buffers, 64, DataType::U8, next)?;
        member.recv(&mut receives, 64, DataType::U8, last)?;
        member.wait(&mut receives, PATIENT)?;
        member.wait(&mut buffers, PATIENT)?;
        let mut seen = [0xee; 64];
        receives.read(&mut seen)?;
        assert_eq!(seen, [last as u8; 64], "rank {rank} received from {last}");
    }
    Ok(())
}

/// Each member does its work on a thread of its own; the clique has to be able to.
pub fn all_work(members: Vec<Member>) -> Vec<Member> {
    each(members, |mut member: Member| {
        work(&mut member).unwrap_or_else(|error| panic!("rank {}: {error}", member.rank()));
        member
    })
}

/// A clique on the first devices comes up, works, and is closed: nothing that went before is in the way.
pub fn works_afterwards(machine: &Machine, gpus: u32, attempt: u64) {
    let mut clique = up(machine, gpus, attempt);
    drop(all_work(clique.members()));
    assert!(clique.close(PATIENT).unwrap().everybody);
    machine.wait_until_nothing_lives();
}

/// Closes cliques of participants, all at the same time.
pub fn close(cliques: Vec<Clique>) {
    for closed in each(cliques, |clique: Clique| clique.close(PATIENT)) {
        assert!(closed.unwrap_or_else(|error| panic!("{error}")).everybody);
    }
}
