//! Many cliques of NCCL in a row, and attempts that fail: threads, descriptors and memory stay as they were. A program of
//! its own, since it counts what its process has. Everything has a deadline; what the machine lacks is waived.
#![cfg(feature = "cuda")]

mod device_support;

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use device_support::gpu::Gpu;
use device_support::twisted::{Instead, with_a_twisted_one};
use device_support::{Machine, PATIENT, alone, bring_up, builder, errors, wait_until, works_afterwards};
use portway_clique::backend::{Backend, CommConfig, LocalRank, RawComm, Status};
use portway_clique::nccl::Nccl;
use portway_clique::{Clique, CliqueError, FirstUse};

/// The library's own initialisation and end of these ranks, without a clique.
fn bare(nccl: &Nccl, locals: &[LocalRank]) -> [Duration; 2] {
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
    let up = start.elapsed();
    // SAFETY: made above, up, and not used again.
    let status = unsafe { nccl.finalize(&comms) };
    assert!(!status.is_error(), "{status}");
    settled("finalizing");
    for comm in comms {
        // SAFETY: finalized, and not used again.
        unsafe { nccl.destroy(comm) };
    }
    [up, start.elapsed() - up]
}

/// How many cliques may be closing while the next one comes up.
const CLOSING: usize = 4;

/// Closes cliques beside the test, since the library takes its time.
#[derive(Default)]
struct Closers(VecDeque<Receiver<Result<(), CliqueError>>>);

impl Closers {
    fn close(&mut self, clique: Clique) {
        let (done, is_done) = sync_channel(1);
        std::thread::spawn(move || drop(done.send(clique.close(PATIENT).map(drop))));
        self.0.push_back(is_done);
        self.wait_for_all_but(CLOSING);
    }

    fn wait_for_all_but(&mut self, count: usize) {
        while self.0.len() > count {
            let closed = self.0.pop_front().unwrap().recv_timeout(PATIENT * 2);
            let closed = closed.unwrap_or_else(|why| panic!("a close did not come back: {why}"));
            closed.unwrap_or_else(|error| panic!("{error}"));
        }
    }
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
    let Some(machine) = Machine::with_kernels(1) else { return };
    let gpus = machine.gpus.min(2);
    let gpu = Gpu::open(&machine.driver, 0);
    let locals: Vec<LocalRank> = (0..gpus).map(|rank| LocalRank { rank, device: rank }).collect();
    let ours = |attempt: u64| {
        let builder = builder("device", gpus, attempt).first_use(FirstUse::default());
        let builder = (0..gpus).fold(builder, |builder, rank| builder.local(rank, rank));
        let start = Instant::now();
        let clique = builder.bring_up(machine.backend(), alone(), PATIENT).unwrap();
        (clique, start.elapsed())
    };
    let (mut bare_times, mut our_times) = (Vec::new(), Vec::new());
    for attempt in 0..14 {
        let bare = bare(&machine.nccl, &locals);
        let (clique, up) = ours(attempt);
        let start = Instant::now();
        clique.close(PATIENT).unwrap();
        if attempt >= 4 {
            bare_times.push(bare);
            our_times.push([up, start.elapsed()]);
        }
    }
    let mut closers = Closers::default();
    (100..110).for_each(|attempt| closers.close(ours(attempt).0));
    closers.wait_for_all_but(0);
    std::thread::sleep(Duration::from_secs(1)); // what has been told to end, and is not waited for, has gone
    let (before, start) = (Counts::now(&gpu), Instant::now());
    (200..400).for_each(|attempt| closers.close(ours(attempt).0));
    closers.wait_for_all_but(0);
    let took = start.elapsed();
    let after = Counts::settled(&gpu, before.threads + 2);
    let median = |times: &[[Duration; 2]], part: usize| {
        let mut sorted: Vec<Duration> = times.iter().map(|time| time[part]).collect();
        sorted.sort_unstable();
        sorted[sorted.len() / 2]
    };
    for (part, name) in ["initialisation", "end"].into_iter().enumerate() {
        let (bare, ours) = (median(&bare_times, part), median(&our_times, part));
        println!("recorded: {name} of {gpus}, medians of 10: {bare:?} of the library, {ours:?} of a clique");
    }
    println!("recorded: {before:?} before, {after:?} after 200 in {took:?}");
    let (bare, ours) = (median(&bare_times, 0), median(&our_times, 0));
    assert!(ours.saturating_sub(bare) <= Duration::from_millis(5), "{bare:?} {ours:?}");
    assert!(after.descriptors <= before.descriptors + 4, "{before:?} {after:?}");
    assert!(after.resident_kib <= before.resident_kib + 65_536, "{before:?} {after:?}");
    assert!(after.free_mib_of_gpu + 64 >= before.free_mib_of_gpu, "{before:?} {after:?}");
    assert_eq!(machine.nccl.live_communicators(), 0);
}

/// 30 attempts that fail leave nothing either.
#[test]
fn attempts_that_fail_are_flat() {
    let Some(machine) = Machine::with_kernels(1) else { return };
    let gpu = Gpu::open(&machine.driver, 0);
    works_afterwards(&machine, 1, 0);
    let fail = |attempt: u64| {
        let instead = Instead::Fail(Duration::from_millis(20));
        errors(bring_up(with_a_twisted_one(&machine, 2, attempt, instead), PATIENT), PATIENT);
        machine.wait_until_nothing_lives();
    };
    (1..6).for_each(fail);
    std::thread::sleep(Duration::from_secs(1)); // what has been told to end, and is not waited for, has gone
    let before = Counts::now(&gpu);
    (10..40).for_each(fail);
    let after = Counts::settled(&gpu, before.threads + 2);
    println!("recorded: {before:?} before, {after:?} after 30 that failed");
    assert!(after.descriptors <= before.descriptors + 4, "{before:?} {after:?}");
    assert!(after.resident_kib <= before.resident_kib + 65_536, "{before:?} {after:?}");
    assert!(after.free_mib_of_gpu + 64 >= before.free_mib_of_gpu, "{before:?} {after:?}");
    works_afterwards(&machine, 1, 100);
}
