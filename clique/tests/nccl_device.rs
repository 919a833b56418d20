//! NCCL as a backend on two GPUs, or on one where that will do. Each test has a deadline; what the machine lacks is
//! waived.
#![cfg(feature = "cuda")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use portway_clique::backend::{
    Backend, CommConfig, DataType, Enqueue, LocalRank, Operation, RawComm, ReduceOp, Shape, SplitCall,
    Status, Workspace,
};
use portway_clique::nccl::Nccl;
use portway_fifo::cuda::Driver;

const LOCALS: [LocalRank; 2] = [LocalRank { rank: 0, device: 0 }, LocalRank { rank: 1, device: 1 }];
/// For what has to happen.
const PATIENCE: Duration = Duration::from_secs(60);
/// For what has to end.
const BOUND: Duration = Duration::from_secs(20);

/// NCCL on a machine with so many GPUs, or more.
fn setup(needed: u32) -> Option<Arc<Nccl>> {
    let lacks = match (Driver::load().and_then(|driver| driver.device_count()), Nccl::load()) {
        (Err(error), _) => format!("needs {needed} GPUs, has 0: {error}"),
        (Ok(count), _) if count < needed => {
            println!("waived: needs {needed} GPUs, has {count}");
            return None;
        }
        (_, Err(error)) => format!("needs NCCL: {error}"),
        (Ok(_), Ok(nccl)) => return Some(nccl),
    };
    println!("waived: {lacks}");
    assert!(std::env::var_os("PORTWAY_REQUIRE_CUDA").is_none(), "PORTWAY_REQUIRE_CUDA, and {lacks}");
    None
}

/// The ranks of a test that can do with one GPU: two if there are two.
fn locals() -> &'static [LocalRank] {
    let count = Driver::load().and_then(|driver| driver.device_count()).unwrap();
    &LOCALS[..count.min(2) as usize]
}

fn init(nccl: &Nccl, size: u32, locals: &[LocalRank]) -> (Status, Vec<RawComm>) {
    let id = nccl.unique_id().unwrap();
    let mut comms = vec![RawComm::NULL; locals.len()];
    // SAFETY: the lengths are equal, and the id is used once.
    let status = unsafe { nccl.init(size, &[id], &CommConfig::default(), locals, &mut comms) };
    (status, comms)
}

fn state(nccl: &Nccl, comm: RawComm) -> Status {
    // SAFETY: the tests ask for communicators that are alive.
    unsafe { nccl.state(comm) }
}

fn explain(nccl: &Nccl, status: Status) -> String {
    // SAFETY: names no communicator.
    unsafe { nccl.explain(status, None) }
}

/// Waits until none is in progress; returns their states.
fn settled(nccl: &Nccl, comms: &[RawComm], what: &str) -> Vec<Status> {
    let began = Instant::now();
    loop {
        let states: Vec<Status> = comms.iter().map(|comm| state(nccl, *comm)).collect();
        if !states.contains(&Status::IN_PROGRESS) {
            return states;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: waited {PATIENCE:?} for success, seen {states:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn ready(nccl: &Nccl, comms: &[RawComm], what: &str) {
    for state in settled(nccl, comms, what) {
        assert_eq!(state, Status::SUCCESS, "{what}: {}", explain(nccl, state));
    }
}

/// Two communicators, or one where there is one GPU.
fn group(nccl: &Nccl) -> Vec<RawComm> {
    let (status, comms) = init(nccl, locals().len() as u32, locals());
    assert!(!status.is_error(), "{}", explain(nccl, status));
    ready(nccl, &comms, "initialisation");
    comms
}

/// Ends communicators, each from a thread of its own, and says how long that took.
fn abort(nccl: &Arc<Nccl>, comms: &[RawComm]) -> Duration {
    let began = Instant::now();
    let (done, ended) = channel();
    for comm in comms.iter().copied() {
        let (nccl, done) = (nccl.clone(), done.clone());
        // SAFETY: nobody uses it any more.
        std::thread::spawn(move || done.send(unsafe { nccl.abort(comm) }));
    }
    for number in 0..comms.len() {
        let status = ended.recv_timeout(BOUND.saturating_sub(began.elapsed()));
        let status = status
            .unwrap_or_else(|_| panic!("{number} of {} aborts have returned after {BOUND:?}", comms.len()));
        assert_eq!(status, Status::SUCCESS);
    }
    began.elapsed()
}

fn all_reduce(nccl: &Nccl, comms: &[RawComm], workspaces: &[Box<dyn Workspace>]) -> Status {
    let calls: Vec<Enqueue> = comms
        .iter()
        .zip(workspaces)
        .map(|(comm, workspace)| Enqueue {
            comm: *comm,
            operation: Operation::AllReduce {
                send: workspace.send_address(),
                recv: workspace.recv_address(),
                count: 1024,
                data_type: DataType::F32,
                op: ReduceOp::Sum,
            },
            stream: workspace.stream(),
        })
        .collect();
    // SAFETY: the communicators are ready; the workspaces go back to a pool that keeps them until their streams are idle.
    unsafe { nccl.enqueue(&calls) }
}

/// One checked all-reduce over communicators of the first devices.
fn check(nccl: &Nccl, comms: &[RawComm], what: &str) {
    let devices = 0..comms.len() as u32;
    let mut workspaces: Vec<_> = devices.map(|device| nccl.workspace(device, 4096).unwrap()).collect();
    let values = &[1.5f32, 2.25][..comms.len()];
    let sum: f32 = values.iter().sum();
    for (workspace, value) in workspaces.iter_mut().zip(values) {
        workspace.write(&value.to_ne_bytes().repeat(1024)).unwrap();
    }
    let status = all_reduce(nccl, comms, &workspaces);
    assert!(!status.is_error(), "{what}: {}", explain(nccl, status));
    ready(nccl, comms, what);
    for workspace in &mut workspaces {
        let began = Instant::now();
        while !workspace.is_idle().unwrap() {
            assert!(began.elapsed() < PATIENCE, "{what}: the stream is not idle after {PATIENCE:?}");
        }
        let mut bytes = [0; 4096];
        workspace.read(&mut bytes).unwrap();
        assert!(bytes.chunks(4).all(|word| word == sum.to_ne_bytes()), "{what}: {:?}", &bytes[..8]);
    }
}

fn end(nccl: &Nccl, comms: &[RawComm]) {
    // SAFETY: the communicators are ready, and nobody uses them any more.
    let status = unsafe { nccl.finalize(comms) };
    assert!(!status.is_error(), "{}", explain(nccl, status));
    ready(nccl, comms, "finalizing");
    for comm in comms {
        // SAFETY: as above.
        assert_eq!(unsafe { nccl.destroy(*comm) }, Status::SUCCESS);
    }
}

fn split(nccl: &Nccl, parents: &[RawComm], colors: [Option<u32>; 2]) -> Vec<RawComm> {
    let calls: Vec<SplitCall> = parents
        .iter()
        .zip(colors)
        .map(|(parent, color)| SplitCall { parent: *parent, color, key: 0 })
        .collect();
    let mut children = vec![RawComm::NULL; calls.len()];
    // SAFETY: the parents are ready; the lengths are equal.
    let status = unsafe { nccl.split(&calls, &mut children) };
    assert!(!status.is_error(), "{}", explain(nccl, status));
    children
}

#[test]
fn a_pair_works_and_so_do_its_children() {
    let Some(nccl) = setup(2) else { return };
    println!("recorded: {}, {:?}", nccl.name(), nccl.capabilities());
    let comms = group(&nccl);
    for (comm, local) in comms.iter().zip(LOCALS) {
        // SAFETY: the communicator is ready.
        let shape = unsafe { nccl.shape(*comm) }.unwrap();
        assert_eq!(shape, Shape { size: 2, rank: local.rank, device: local.device });
    }
    check(&nccl, &comms, "all-reduce");
    let children = split(&nccl, &comms, [Some(7), Some(7)]);
    ready(&nccl, &children, "splitting");
    assert!(children.iter().all(|child| ![RawComm::NULL, *child].contains(&nccl.handle(*child))));
    check(&nccl, &children, "all-reduce of children");
    let one = split(&nccl, &comms, [None, Some(1)]);
    ready(&nccl, &comms, "splitting off one");
    assert_eq!(one[0], RawComm::NULL);
    ready(&nccl, &one[1..], "the one that was split off");
    end(&nccl, &one[1..]);
    end(&nccl, &children);
    check(&nccl, &comms, "all-reduce of parents again");
    end(&nccl, &comms);
    assert_eq!(nccl.live_communicators(), 0);
}

#[test]
fn a_single_rank_works_and_so_does_its_child() {
    let Some(nccl) = setup(1) else { return };
    let (status, comms) = init(&nccl, 1, &LOCALS[..1]);
    assert!(!status.is_error(), "{}", explain(&nccl, status));
    ready(&nccl, &comms, "initialisation");
    check(&nccl, &comms, "all-reduce");
    let mut child = [RawComm::NULL];
    // SAFETY: the parent is ready.
    let status = unsafe { nccl.split(&[SplitCall { parent: comms[0], color: Some(1), key: 0 }], &mut child) };
    assert!(!status.is_error(), "{}", explain(&nccl, status));
    ready(&nccl, &child, "splitting");
    check(&nccl, &child, "all-reduce of the child");
    end(&nccl, &child);
    println!("recorded: abort of a single rank: {:?}", abort(&nccl, &comms));
    assert_eq!(nccl.live_communicators(), 0);
}

#[test]
fn shrinking_leaves_the_rest() {
    let Some(nccl) = setup(2) else { return };
    if !nccl.capabilities().shrink {
        println!("waived: shrinking: not in this {}", nccl.name());
        return;
    }
    let comms = group(&nccl);
    check(&nccl, &comms, "all-reduce");
    let mut child = [RawComm::NULL];
    // SAFETY: the parent is ready, and the excluded one does not call.
    let status = unsafe { nccl.shrink(&comms[..1], &[1], &mut child) }.unwrap();
    assert!(!status.is_error(), "{}", explain(&nccl, status));
    ready(&nccl, &child, "shrinking");
    // SAFETY: the child is ready.
    assert_eq!(unsafe { nccl.shape(child[0]) }.unwrap(), Shape { size: 1, rank: 0, device: 0 });
    println!("recorded: abort after a shrink: {:?}", abort(&nccl, &[child[0], comms[0], comms[1]]));
}

#[test]
fn a_missing_rank_is_in_progress_until_it_is_aborted() {
    let Some(nccl) = setup(1) else { return };
    let (status, comms) = init(&nccl, locals().len() as u32 + 1, locals());
    assert_eq!(status, Status::IN_PROGRESS);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(2) {
        assert!(comms.iter().all(|comm| state(&nccl, *comm) == Status::IN_PROGRESS));
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("recorded: abort with a rank missing: {:?}", abort(&nccl, &comms));
    // And the next attempt works.
    let comms = group(&nccl);
    check(&nccl, &comms, "all-reduce after an abort");
    end(&nccl, &comms);
}

#[test]
fn the_same_device_twice_ends_in_an_error() {
    let Some(nccl) = setup(1) else { return };
    let (status, comms) = init(&nccl, 2, &[LOCALS[0], LocalRank { rank: 1, device: 0 }]);
    let made: Vec<RawComm> = comms.into_iter().filter(|comm| *comm != RawComm::NULL).collect();
    let states = settled(&nccl, &made, "initialisation");
    println!("recorded: the same device twice: {status}, then {states:?}: {}", explain(&nccl, status));
    assert!(status.is_error() || states.iter().any(|state| state.is_error()));
    abort(&nccl, &made);
}

#[test]
fn a_split_that_one_rank_does_not_join_is_aborted() {
    let Some(nccl) = setup(2) else { return };
    let comms = group(&nccl);
    let mut child = [RawComm::NULL];
    // SAFETY: the parent is ready.
    let status = unsafe { nccl.split(&[SplitCall { parent: comms[0], color: Some(1), key: 0 }], &mut child) };
    assert_eq!(status, Status::IN_PROGRESS);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        assert_eq!(state(&nccl, child[0]), Status::IN_PROGRESS);
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("recorded: abort with a split under way: {:?}", abort(&nccl, &[child[0], comms[0], comms[1]]));
    assert_eq!(nccl.live_communicators(), 0);
}

#[test]
fn a_collective_that_one_rank_does_not_join_is_aborted() {
    let Some(nccl) = setup(2) else { return };
    let comms = group(&nccl);
    check(&nccl, &comms, "all-reduce");
    let mut workspaces = vec![nccl.workspace(0, 4096).unwrap()];
    let status = all_reduce(&nccl, &comms[..1], &workspaces);
    assert!(!status.is_error(), "{}", explain(&nccl, status));
    ready(&nccl, &comms[..1], "enqueuing");
    std::thread::sleep(Duration::from_millis(500));
    assert!(!workspaces[0].is_idle().unwrap(), "the control: without its peer it does not end");
    println!("recorded: abort with a collective under way: {:?}", abort(&nccl, &comms));
    let began = Instant::now();
    while !workspaces[0].is_idle().unwrap() {
        assert!(began.elapsed() < BOUND, "the stream is not idle {BOUND:?} after the abort");
    }
}

#[test]
fn many_in_a_row_leave_nothing() {
    let Some(nccl) = setup(1) else { return };
    let count = |of: &str| std::fs::read_dir(of).unwrap().count();
    let mut seen = Vec::new();
    let mut took = Vec::new();
    for turn in 0..20 {
        let began = Instant::now();
        let comms = group(&nccl);
        took.push(began.elapsed());
        check(&nccl, &comms, "all-reduce");
        if turn % 2 == 0 {
            end(&nccl, &comms)
        } else {
            let _ = abort(&nccl, &comms);
        }
        seen.push((count("/proc/self/task"), count("/proc/self/fd")));
    }
    took.sort();
    let count = locals().len();
    println!("recorded: initialisation of {count}: median {:?}, slowest {:?}", took[10], took[19]);
    println!("recorded: threads and descriptors after each: {seen:?}");
    let (tasks, files) = seen[3];
    assert!(seen[4..].iter().all(|(task, file)| *task <= tasks + 2 && *file <= files + 4), "{seen:?}");
}
