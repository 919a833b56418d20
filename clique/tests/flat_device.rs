//! Many cliques of NCCL in a row, and attempts that fail: they take no more time, threads, descriptors and memory than the
//! library does by itself. A program of its own, since it counts what its process has. Everything has a deadline; what
//! the machine lacks is waived.
//!
//! The library allocates a communicator, hundreds of KiB, in the thread that makes it. A clique has a thread of its own for
//! that, so the reference gives each of its communicators a fresh thread as well, as a program with a thread for each GPU
//! does: a reference that makes all of them in one thread takes them from one arena, again and again. What is still in use on
//! the heap is counted by the allocator itself. What it keeps in arenas for its threads after it was freed is recorded, and
//! is no leak: resident memory is compared without it.
#![cfg(feature = "cuda")]

mod device_support;
#[path = "support/heap.rs"]
mod heap;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use device_support::gpu::Gpu;
use device_support::twisted::{Instead, with_a_twisted_one};
use device_support::{Machine, PATIENT, alone, bring_up, builder, errors, works_afterwards};
use heap::Heap;
use portway_clique::backend::{Backend, CommConfig, LocalRank, RawComm, Status};
use portway_clique::nccl::Nccl;
use portway_clique::{Clique, FirstUse};

/// How many cliques may be ending while the next one comes up: the library takes half a second for it.
const ENDING: usize = 4;
/// How many are made in a row before counts are compared, and how often.
const ROW: u64 = 50;
const ROWS: u64 = 4;

/// The communicators of an initialisation without a clique.
fn bare_up(nccl: &Nccl, locals: &[LocalRank]) -> Vec<RawComm> {
    let id = nccl.unique_id().unwrap();
    let mut comms = vec![RawComm::NULL; locals.len()];
    // SAFETY: as many places as ranks; the id is used by this group alone.
    let status = unsafe { nccl.init(locals.len() as u32, &[id], &CommConfig::default(), locals, &mut comms) };
    assert!(!status.is_error(), "{status}");
    settled(nccl, &comms, "initialisation");
    comms
}

fn settled(nccl: &Nccl, comms: &[RawComm], what: &str) {
    let start = Instant::now();
    for comm in comms {
        loop {
            // SAFETY: made by the caller, and not ended.
            match unsafe { nccl.state(*comm) } {
                Status::SUCCESS => break,
                Status::IN_PROGRESS => std::hint::spin_loop(),
                status => panic!("{what}: {status}"),
            }
            assert!(start.elapsed() < PATIENT, "{what}: in progress after {PATIENT:?}");
        }
    }
}

fn bare_end(nccl: &Nccl, comms: Vec<RawComm>) {
    // SAFETY: made by `bare_up`, up, and not used again.
    let status = unsafe { nccl.finalize(&comms) };
    assert!(!status.is_error(), "{status}");
    settled(nccl, &comms, "finalizing");
    for comm in comms {
        // SAFETY: finalized, and not used again.
        unsafe { nccl.destroy(comm) };
    }
}

/// Ends cliques beside the test.
#[derive(Default)]
struct Enders(VecDeque<Receiver<()>>);

impl Enders {
    fn run(&mut self, end: impl FnOnce() + Send + 'static) {
        self.start(end);
        self.wait_for_all_but(ENDING);
    }

    fn start(&mut self, end: impl FnOnce() + Send + 'static) {
        let (done, is_done) = sync_channel(1);
        std::thread::spawn(move || {
            end();
            // The test may have given up.
            let _ = done.send(());
        });
        self.0.push_back(is_done);
    }

    fn wait_for_all_but(&mut self, count: usize) {
        while self.0.len() > count {
            let ended = self.0.pop_front().unwrap().recv_timeout(PATIENT * 2);
            ended.unwrap_or_else(|why| panic!("an end did not come back well: {why}"));
        }
    }
}

/// What a process has, and its GPU.
#[derive(Clone, Debug)]
struct Counts {
    threads: BTreeMap<String, i64>,
    descriptors: i64,
    /// In use on the heap.
    heap_kib: i64,
    /// Free on the heap, and kept by the allocator.
    kept_kib: i64,
    /// Without what the allocator has.
    resident_kib: i64,
    resident_kib_of: BTreeMap<&'static str, i64>,
    used_mib_of_gpu: i64,
}

impl Counts {
    /// Those after a time in which threads that have been told to end are gone.
    fn settled(gpu: &Gpu) -> Counts {
        std::thread::sleep(Duration::from_secs(1));
        let heap = Heap::now().unwrap_or_default();
        let entries = |of: &str| std::fs::read_dir(of).unwrap();
        let mut threads = BTreeMap::new();
        for thread in entries("/proc/self/task") {
            // It may end just now.
            if let Ok(name) = std::fs::read_to_string(thread.unwrap().path().join("comm")) {
                *threads.entry(name.trim().to_owned()).or_insert(0) += 1;
            }
        }
        let resident_kib_of = heap::resident_kib();
        let others = resident_kib_of.iter().filter(|(kind, _)| **kind != "allocator");
        Counts {
            threads,
            descriptors: entries("/proc/self/fd").count() as i64,
            heap_kib: (heap.in_use_bytes >> 10) as i64,
            kept_kib: (heap.kept_bytes >> 10) as i64,
            resident_kib: others.map(|(_, kib)| kib).sum(),
            resident_kib_of,
            used_mib_of_gpu: -((gpu.free_bytes() >> 20) as i64),
        }
    }

    fn all_threads(&self) -> i64 {
        self.threads.values().sum()
    }
}

/// How much more there is afterwards.
#[derive(Clone, Debug, Default)]
struct Grown {
    threads: i64,
    descriptors: i64,
    heap_kib: i64,
    kept_kib: i64,
    resident_kib: i64,
    resident_kib_of: BTreeMap<&'static str, i64>,
    used_mib_of_gpu: i64,
    /// By name.
    new_threads: BTreeMap<String, i64>,
}

impl Grown {
    fn add(&mut self, before: &Counts, after: &Counts) {
        self.threads += after.all_threads() - before.all_threads();
        self.descriptors += after.descriptors - before.descriptors;
        self.heap_kib += after.heap_kib - before.heap_kib;
        self.kept_kib += after.kept_kib - before.kept_kib;
        self.resident_kib += after.resident_kib - before.resident_kib;
        self.used_mib_of_gpu += after.used_mib_of_gpu - before.used_mib_of_gpu;
        for (kind, kib) in &after.resident_kib_of {
            *self.resident_kib_of.entry(kind).or_insert(0) +=
                kib - before.resident_kib_of.get(kind).unwrap_or(&0);
        }
        for (name, count) in &after.threads {
            let more = count - before.threads.get(name).unwrap_or(&0);
            if more != 0 {
                *self.new_threads.entry(name.clone()).or_insert(0) += more;
            }
        }
    }

    /// Nothing may grow by more than the library's own does, but for what allocators and threads that end just now make
    /// of it.
    fn is_no_more_than(&self, bare: &Grown) -> bool {
        let a_quarter_more = |kib: i64| kib + kib.max(0) / 4;
        self.threads <= bare.threads + 2
            && self.descriptors <= bare.descriptors + 4
            && self.heap_kib <= a_quarter_more(bare.heap_kib) + (4 << 10)
            && self.resident_kib <= a_quarter_more(bare.resident_kib) + (16 << 10)
            && self.used_mib_of_gpu <= bare.used_mib_of_gpu.max(0) + 16
    }
}

/// What rows of the library's own, and ours, leave behind: by turns, since what both keep grows more at the beginning.
fn by_turns(gpu: &Gpu, mut bare: impl FnMut(u64), mut ours: impl FnMut(u64)) -> [Grown; 2] {
    let mut grown = [Grown::default(), Grown::default()];
    for row in 0..ROWS {
        let before = Counts::settled(gpu);
        bare(row);
        let between = Counts::settled(gpu);
        ours(row);
        let after = Counts::settled(gpu);
        let both = [("the library's own", &before, &between), ("cliques", &between, &after)];
        for (total, (who, before, after)) in grown.iter_mut().zip(both) {
            let mut this = Grown::default();
            this.add(before, after);
            println!("recorded: row {row} of {who}: {this:?}");
            total.add(before, after);
        }
    }
    grown
}

/// What this crate adds to the library's own initialisation and end, side by side.
#[test]
fn a_clique_costs_little_more_than_the_library() {
    let Some(machine) = Machine::with(1) else { return };
    let locals = locals(&machine);
    let (mut bare_times, mut our_times) = (Vec::new(), Vec::new());
    for attempt in 0..24 {
        let start = Instant::now();
        let comms = bare_up(&machine.nccl, &locals);
        let up = start.elapsed();
        bare_end(&machine.nccl, comms);
        let bare = [up, start.elapsed() - up];
        let start = Instant::now();
        let clique = clique(&machine, attempt);
        let up = start.elapsed();
        clique.close(PATIENT).unwrap();
        if attempt >= 4 {
            bare_times.push(bare);
            our_times.push([up, start.elapsed() - up]);
        }
    }
    let medians = [0, 1].map(|part| {
        [&bare_times, &our_times].map(|times| {
            let mut sorted: Vec<Duration> = times.iter().map(|time| time[part]).collect();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        })
    });
    for (name, [bare, ours]) in ["initialisation", "end"].into_iter().zip(medians) {
        let ranks = locals.len();
        println!("recorded: {name} of {ranks}, medians of 20: {bare:?} of the library, {ours:?} of a clique");
    }
    let [[bare, ours], _] = medians;
    assert!(ours.saturating_sub(bare) <= Duration::from_millis(5), "{bare:?} {ours:?}");
    assert_eq!(machine.nccl.live_communicators(), 0);
}

/// Two ranks, or one where there is one GPU.
fn locals(machine: &Machine) -> Vec<LocalRank> {
    (0..machine.gpus.min(2)).map(|rank| LocalRank { rank, device: rank }).collect()
}

/// A clique of them, without a first use.
fn clique(machine: &Machine, attempt: u64) -> Clique {
    let locals = locals(machine);
    let builder = builder("device", locals.len() as u32, attempt).first_use(FirstUse::default());
    let builder = locals.iter().fold(builder, |builder, local| builder.local(local.rank, local.device));
    builder.bring_up(machine.backend(), alone(), PATIENT).unwrap_or_else(|error| panic!("{error}"))
}

/// 200 cliques in a row leave no more than as many communicators of the library's own, each made in a thread of its own.
#[test]
fn many_in_a_row_are_flat() {
    let Some(machine) = Machine::with_kernels(1) else { return };
    let gpu = Gpu::open(&machine.driver, 0);
    let locals = locals(&machine);
    let bare = |_| {
        let mut enders = Enders::default();
        for _ in 0..ROW {
            let (nccl, locals) = (machine.nccl.clone(), locals.clone());
            let (up, is_up) = sync_channel(1);
            enders.start(move || {
                let comms = bare_up(&nccl, &locals);
                // The test may have given up.
                let _ = up.send(());
                bare_end(&nccl, comms);
            });
            is_up.recv_timeout(PATIENT * 2).unwrap_or_else(|why| panic!("an initialisation: {why}"));
            enders.wait_for_all_but(ENDING);
        }
        enders.wait_for_all_but(0);
    };
    let ours = |row: u64| {
        let mut enders = Enders::default();
        for attempt in 0..ROW {
            let clique = clique(&machine, row * ROW + attempt);
            enders.run(move || {
                clique.close(PATIENT).unwrap_or_else(|error| panic!("{error}"));
            });
        }
        enders.wait_for_all_but(0);
    };
    bare(0);
    ours(1000);
    let [bare, ours] = by_turns(&gpu, bare, ours);
    let count = ROW * ROWS;
    println!("recorded: {count} of the library's own: {bare:?}");
    println!("recorded: {count} cliques: {ours:?}");
    assert!(ours.is_no_more_than(&bare), "{count} cliques: {ours:?}, of the library's own: {bare:?}");
    assert_eq!(machine.nccl.live_communicators(), 0);
}

/// Attempts that fail since a rank does not come leave no more than the library's own do that are aborted.
#[test]
fn attempts_that_fail_are_flat() {
    const TRIES: u64 = 10;
    let Some(machine) = Machine::with_kernels(1) else { return };
    let gpu = Gpu::open(&machine.driver, 0);
    works_afterwards(&machine, 1, 0);
    let bare = |_| {
        for _ in 0..TRIES {
            let (id, mut comms) = (machine.nccl.unique_id().unwrap(), [RawComm::NULL]);
            let locals = [LocalRank { rank: 0, device: 0 }];
            let config = CommConfig::default();
            // SAFETY: one place for one rank; the id is used by this group alone.
            let status = unsafe { machine.nccl.init(2, &[id], &config, &locals, &mut comms) };
            assert!(!status.is_error(), "{status}");
            std::thread::sleep(Duration::from_millis(20));
            let (nccl, [comm]) = (machine.nccl.clone(), comms);
            let mut enders = Enders::default();
            enders.run(move || {
                // SAFETY: made above, and not used again.
                unsafe { nccl.abort(comm) };
            });
            enders.wait_for_all_but(0);
        }
    };
    let ours = |row: u64| {
        for attempt in 0..TRIES {
            let instead = Instead::Fail(Duration::from_millis(20));
            let participants = with_a_twisted_one(&machine, 2, 1 + row * TRIES + attempt, instead);
            errors(bring_up(participants, PATIENT), PATIENT);
            machine.wait_until_nothing_lives();
        }
    };
    bare(0);
    ours(1000);
    let [bare, ours] = by_turns(&gpu, bare, ours);
    let count = TRIES * ROWS;
    println!("recorded: {count} aborted initialisations of the library's own: {bare:?}");
    println!("recorded: {count} attempts that failed: {ours:?}");
    assert!(ours.is_no_more_than(&bare), "{count} attempts: {ours:?}, of the library's own: {bare:?}");
    works_afterwards(&machine, 1, 10_000);
}

/// The control of the tests above: each thing that grows by more than the library's is noticed.
#[test]
fn what_grows_is_noticed() {
    let bare =
        Grown { threads: 5, descriptors: 10, heap_kib: 10_000, resident_kib: 100_000, ..Grown::default() };
    assert!(bare.is_no_more_than(&bare));
    let grown = |change: fn(&mut Grown)| {
        let mut ours = bare.clone();
        change(&mut ours);
        ours
    };
    // A thread, a descriptor and 1 MiB of the GPU for every fifth of 200 cliques; 40 KiB in use and 230 resident for each.
    for ours in [
        grown(|ours| ours.threads += 40),
        grown(|ours| ours.descriptors += 40),
        grown(|ours| ours.heap_kib += 8000),
        grown(|ours| ours.resident_kib += 45 << 10),
        grown(|ours| ours.used_mib_of_gpu += 40),
    ] {
        assert!(!ours.is_no_more_than(&bare), "{ours:?}");
    }
}
