//! Cliques of NCCL where the driver is in the way: a GPU without memory, a captured graph that keeps a communicator, and a
//! kernel that stays while others initialise, with lazy and eager module loading. Nothing has to come up here, but
//! everything has to end by its deadline, with an error that says why, and the next clique comes up. What the machine
//! lacks is waived.
#![cfg(feature = "cuda")]

mod device_support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device_support::child::{Child, told};
use device_support::gpu::{Collectives, Gpu, Graph, Lane};
use device_support::{
    LATE, Machine, Outcome, PATIENT, Participant, bring_up, builder, close, each, failure, participants, up,
    wait_until, works_afterwards,
};
use portway_clique::rendezvous::Hub;
use portway_clique::{Clique, CliqueError, FirstUse, Member, Quarantine};

/// How long a child process may take.
const CHILD: Duration = Duration::from_secs(110);
/// How long an abort may take, with some time for the processor.
const ABORT: Duration = Duration::from_millis(3200);

/// The other end of the tests below; without the variable it has nothing to do.
#[test]
fn child_process() {
    let Some(told) = told() else { return };
    let Some(machine) = Machine::with_kernels(1) else { return };
    match told[0].as_str() {
        "fills" => fills(&machine, told[1].parse::<usize>().unwrap() << 20),
        "spins" => spins(&machine),
        what => panic!("told to do {what:?}, which nobody knows"),
    }
    println!("done");
}

fn child(told: &str, variables: &[(&str, &str)]) {
    let lines = Child::start(told, variables).succeed(CHILD);
    assert!(lines.iter().any(|line| line == "done"), "{lines:?}");
}

/// The outcomes of bring-ups that may come up or fail: all alike, each in time. Returns the cliques, or the first error.
fn alike(outcomes: Vec<Outcome>, within: Duration, what: &str) -> Result<Vec<Clique>, CliqueError> {
    let took: Vec<Duration> = outcomes.iter().map(|(_, took)| *took).collect();
    assert!(took.iter().all(|took| *took < within + LATE), "{what}: {took:?}, of {within:?}");
    let (cliques, errors): (Vec<_>, Vec<_>) =
        outcomes.into_iter().map(|(result, _)| result).partition(Result::is_ok);
    let cliques: Vec<Clique> = cliques.into_iter().flatten().collect();
    let errors: Vec<CliqueError> = errors.into_iter().filter_map(Result::err).collect();
    let Some(first) = errors.first() else {
        println!("recorded: {what}: up after {took:?}");
        return Ok(cliques);
    };
    println!("recorded: {what}: after {took:?}: {first}");
    assert!(cliques.is_empty(), "{what}: {} are ready, and others are not: {errors:?}", cliques.len());
    for error in &errors {
        let (this, first) = (failure(error), failure(first));
        let verdict = |of: &portway_clique::Failure| (of.phase, of.rank, of.process.clone());
        assert_eq!(verdict(this), verdict(first), "{what}: {errors:?}");
    }
    Err(first.clone())
}

/// In a fresh process: takes the memory of the first GPU but some, brings a clique up, gives the memory back, and the
/// next one works; with all operations declared, and with none.
fn fills(machine: &Machine, leave_bytes: usize) {
    let gpus = machine.gpus.min(2);
    let gpu = Gpu::open(&machine.driver, 0);
    let within = Duration::from_secs(20);
    for attempt in [0, 2] {
        let filled = gpu.fill(leave_bytes);
        let free = gpu.free_bytes();
        assert!(free <= leave_bytes + (8 << 20), "{free} bytes are free, and {leave_bytes} were to be left");
        let none =
            |one: Participant| Participant { builder: one.builder.first_use(FirstUse::default()), ..one };
        let all = participants(machine, gpus, attempt);
        let participants = if attempt == 0 { all } else { all.into_iter().map(none).collect() };
        let what = format!(
            "{} bytes free, {} declared",
            free,
            if attempt == 0 { "all operations" } else { "nothing" }
        );
        if let Ok(cliques) = alike(bring_up(participants, within), within, &what) {
            close(cliques);
        }
        filled.free();
        machine.wait_until_nothing_lives();
        works_afterwards(machine, gpus, attempt + 1);
    }
}

#[test]
fn a_gpu_without_memory_is_an_error_in_time() {
    let Some(_machine) = Machine::with_kernels(1) else { return };
    for leave_mib in [0, 16, 128, 1024] {
        child(&format!("fills {leave_mib}"), &[]);
    }
}

/// In a fresh process: cliques come up, or fail in time, while a kernel stays on the first GPU.
fn spins(machine: &Machine) {
    let within = Duration::from_secs(6);
    let gpu = Gpu::open(&machine.driver, 0);
    let others: Vec<u32> = (1..machine.gpus).collect();
    let all: Vec<u32> = (0..machine.gpus).collect();
    let loading = std::env::var("CUDA_MODULE_LOADING").unwrap_or_default();
    let cases = [(&others, "the others, cold"), (&all, "all, cold"), (&all, "all, warm")];
    for (attempt, (devices, what)) in (0u64..).zip(cases).filter(|(_, (devices, _))| !devices.is_empty()) {
        let (hub, size) = (Hub::new(devices.len() as u32).unwrap(), devices.len() as u32);
        let participants = (0..).zip(devices).map(|(rank, device)| Participant {
            builder: builder("spins", size, attempt).local(rank, *device),
            backend: machine.backend(),
            place: Arc::new(hub.join(rank).unwrap()),
        });
        let kernel = gpu.spin(PATIENT);
        let what = format!("{loading}, a kernel stays on GPU 0, {size} of {what}");
        let quarantines: Vec<Quarantine> =
            match alike(bring_up(participants.collect(), within), within, &what) {
                Ok(cliques) => {
                    let quarantines = cliques.iter().map(Clique::quarantine).collect();
                    let start = Instant::now();
                    let closed = each(cliques, |clique: Clique| clique.close(Duration::from_secs(3)));
                    println!("recorded: {what}: closed after {:?}: {closed:?}", start.elapsed());
                    assert!(
                        start.elapsed() < Duration::from_secs(3) + ABORT,
                        "{what}: {:?}",
                        start.elapsed()
                    );
                    quarantines
                }
                Err(error) => vec![failure(&error).quarantine.clone()],
            };
        assert!(!kernel.release(PATIENT), "{what}: the kernel went by itself, so nothing was shown");
        for quarantine in quarantines {
            wait_until("what stayed to come back", PATIENT, || quarantine.count(), |count| *count == 0);
        }
        machine.wait_until_nothing_lives();
        works_afterwards(machine, machine.gpus, 100 + attempt);
    }
}

#[test]
fn a_kernel_that_stays_while_others_initialise_with_lazy_loading() {
    let Some(_machine) = Machine::with_kernels(1) else { return };
    child("spins", &[("CUDA_MODULE_LOADING", "LAZY")]);
}

#[test]
fn a_kernel_that_stays_while_others_initialise_with_eager_loading() {
    let Some(_machine) = Machine::with_kernels(1) else { return };
    child("spins", &[("CUDA_MODULE_LOADING", "EAGER")]);
}

/// A member with a lane and the graph of an all-reduce on it.
struct Captured {
    member: Member,
    lane: Lane,
    graph: Graph,
}

/// Captures an all-reduce of each rank, by the raw communicator, and runs it twice.
fn capture(machine: &Machine, members: Vec<Member>) -> Vec<Captured> {
    let driver = machine.driver.clone();
    let nccl = Collectives::load();
    each(members, move |mut member: Member| {
        let lane = Gpu::open(&driver, member.device()).lane(1 << 16);
        let places = lane.places();
        let mut status = None;
        let graph = lane.capture(|| {
            let nccl = nccl.clone();
            // SAFETY: the communicator is ready; the memory and the stream outlive the graph.
            let call = move |comm, _| unsafe { nccl.all_reduce(comm, &places) };
            status = Some(member.with_raw(call));
        });
        let status = status.unwrap().unwrap();
        assert!([0, 7].contains(&status), "the captured all-reduce: status {status}");
        let (mut lane, size) = (lane, member.size() as f32);
        for round in [1.0, 2.0] {
            lane.work(round);
            lane.launch(&graph);
            lane.pageable_copy();
            lane.check(round * size, PATIENT, "a captured all-reduce");
        }
        Captured { member, lane, graph }
    })
}

/// The library keeps a communicator for as long as a graph refers to it, aborted or not: what does not come back in time
/// is in quarantine, and comes back when the graph is destroyed.
fn with_a_graph_alive(how: &str, end: impl FnOnce(Clique) -> String, limit: Duration) {
    let Some(machine) = Machine::with_kernels(1) else { return };
    let gpus = machine.gpus.min(2);
    let mut clique = up(&machine, gpus, 0);
    let quarantine = clique.quarantine();
    let captured = capture(&machine, clique.members());
    let start = Instant::now();
    let outcome = end(clique);
    let took = start.elapsed();
    println!(
        "recorded: {how} with a graph alive, {gpus} ranks: {took:?}, {}, {:?}",
        outcome,
        quarantine.clone()
    );
    assert!(took < limit, "{how}: {took:?}, at most {limit:?}");
    for Captured { member, lane, graph } in captured {
        wait_until("the graph to have run", PATIENT, || lane.is_idle(), |idle| *idle);
        let end = member.end();
        assert!(matches!(end, Some(CliqueError::Ended { .. } | CliqueError::Failed(_))), "{how}: {end:?}");
        graph.destroy();
    }
    wait_until("what the graphs kept to come back", PATIENT, || quarantine.count(), |count| *count == 0);
    machine.wait_until_nothing_lives();
    works_afterwards(&machine, gpus, 1);
}

#[test]
fn an_abort_with_a_captured_graph_alive() {
    with_a_graph_alive("an abort", |clique| format!("{} in quarantine", clique.abort().count()), ABORT);
}

#[test]
fn a_close_with_a_captured_graph_alive() {
    let within = Duration::from_secs(3);
    let close = move |clique: Clique| match clique.close(within) {
        Ok(closed) => format!("{closed:?}"),
        Err(error) => error.to_string(),
    };
    with_a_graph_alive("a close", close, within + ABORT);
}

/// One rank's graph runs and waits for the other's, which nobody launches: the abort ends it.
#[test]
fn an_abort_with_a_captured_graph_under_way() {
    let Some(machine) = Machine::with_kernels(2) else { return };
    let mut clique = up(&machine, 2, 0);
    let quarantine = clique.quarantine();
    let captured = capture(&machine, clique.members());
    captured[0].lane.work(1.0);
    captured[0].lane.launch(&captured[0].graph);
    std::thread::sleep(Duration::from_millis(500));
    assert!(!captured[0].lane.is_idle(), "the control: without the other rank it does not end");
    let start = Instant::now();
    let left = clique.abort().count();
    println!("recorded: an abort with a graph under way: {:?}, {left} in quarantine", start.elapsed());
    assert!(start.elapsed() < ABORT, "{:?}", start.elapsed());
    for Captured { member, lane, graph } in captured {
        wait_until("the stream to be idle after the abort", PATIENT, || lane.is_idle(), |idle| *idle);
        drop(member);
        graph.destroy();
    }
    wait_until("what the graphs kept to come back", PATIENT, || quarantine.count(), |count| *count == 0);
    machine.wait_until_nothing_lives();
    works_afterwards(&machine, 2, 1);
}
