//! A thousand cliques made and closed in a row leave nothing on the heap, by the allocator's own count. Each test runs in a
//! process of its own, where the allocator gives no caches to threads: what is in them counts as in use.
#![cfg(not(loom))]

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;
#[path = "support/heap.rs"]
mod heap;
#[cfg(feature = "cuda")]
#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[cfg(feature = "cuda")]
#[allow(dead_code, reason = "each test program uses some of it")]
mod libnccl;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use heap::Heap;

/// Enough for the rounds that a rendezvous remembers, 1,024, to be all there.
const WARM_UP: u64 = 300;
const COUNT: u64 = 1000;
/// What the count may differ by: arenas, threads that end just now, tables that have grown to their size.
const SLACK_BYTES: i64 = 16 << 10;

/// How long a process may take; on a machine that is free it takes less than 10 s.
const CHILD: Duration = Duration::from_secs(300);
/// Says that this is such a process.
const TOLD: &str = "PORTWAY_TEST_COUNTS_ITS_HEAP";

/// Whether this is the process that counts; if not, it runs it, with the test of this name, which has to pass.
fn counts_here(test: &str) -> bool {
    if std::env::var_os(TOLD).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(TOLD, "1")
        .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
        .stdin(Stdio::null())
        // It says less than a pipe holds.
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > CHILD {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{test}: the process that counts has not ended after {CHILD:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    print!("{said}");
    assert!(ended.status.success(), "{test}: the process that counts: {}", ended.status);
    assert!(said.contains("recorded: ") || said.contains("waived: "), "{test}: nothing was counted");
    false
}

fn resident_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What is in use once the threads of the cliques are gone, and what is resident.
fn settled(threads: usize) -> Option<(i64, i64)> {
    until(PATIENT, "threads to end", || std::fs::read_dir("/proc/self/task").unwrap().count() <= threads);
    // The kernel lists a thread a moment longer, or shorter, than it lives for the C library.
    std::thread::sleep(Duration::from_millis(50));
    Some((Heap::now()?.in_use_bytes as i64, resident_kib()))
}

/// How many bytes more are in use after many runs than before.
fn grown(what: &str, mut run: impl FnMut(u64)) -> Option<i64> {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    (0..WARM_UP).for_each(&mut run);
    let (in_use, resident) = settled(threads)?;
    (WARM_UP..WARM_UP + COUNT).for_each(&mut run);
    let (in_use_then, resident_then) = settled(threads)?;
    let (grown, resident) = (in_use_then - in_use, resident_then - resident);
    println!("recorded: {COUNT} {what}: {grown} bytes more of {in_use} in use, {resident} KiB more resident");
    Some(grown)
}

fn over_software(what: &str, mut also: impl FnMut()) -> Option<i64> {
    let job = Job::new(&[2, 1]);
    grown(what, |attempt| {
        for closed in each(PATIENT, job.up(attempt), |_, clique| clique.close(PATIENT)) {
            assert!(closed.unwrap().everybody);
        }
        also();
    })
}

#[test]
fn cliques_in_software_leave_nothing() {
    if !counts_here("cliques_in_software_leave_nothing") {
        return;
    }
    let Some(grown) = over_software("cliques in software", || {}) else { return };
    assert!(grown < SLACK_BYTES, "{grown} bytes more");
}

/// The control: 64 bytes for each clique are noticed.
#[test]
fn what_stays_is_noticed() {
    if !counts_here("what_stays_is_noticed") {
        return;
    }
    let also = || std::mem::forget(std::hint::black_box(Box::new([1u8; 64])));
    let Some(grown) = over_software("cliques in software with 64 bytes lost for each", also) else { return };
    assert!(grown >= 64 * COUNT as i64 - SLACK_BYTES && grown >= SLACK_BYTES, "{grown} bytes more");
}

#[cfg(feature = "cuda")]
#[test]
fn cliques_over_nccls_stand_in_leave_nothing() {
    use std::sync::Arc;

    use portway_clique::nccl::Nccl;
    use portway_clique::rendezvous::Hub;
    use portway_clique::{Clique, FirstUse};
    use portway_fifo::cuda::Driver;

    if !counts_here("cliques_over_nccls_stand_in_leave_nothing") {
        return;
    }
    let cuda = libcuda::Standin::new();
    let nccl = libnccl::Nccl::new(&[], cuda.path());
    // About what NCCL itself takes for a communicator in the thread that makes it.
    nccl.set("ballast", 400 << 10);
    let backend = Nccl::open(nccl.path(), Some(Driver::open(cuda.path()).unwrap())).unwrap();
    let run = |attempt| {
        let builder = Clique::builder("heap", 2).attempt(attempt).local(0, 0).local(1, 1);
        let place = Arc::new(Hub::new(1).unwrap().join(0).unwrap());
        let clique =
            builder.first_use(FirstUse::default()).bring_up(backend.clone(), place, PATIENT).unwrap();
        assert!(clique.close(PATIENT).unwrap().everybody);
    };
    run(u64::MAX);
    let objects = cuda.live();
    let Some(grown) = grown("cliques over NCCL's stand-in", run) else { return };
    assert!(grown < SLACK_BYTES, "{grown} bytes more");
    assert_eq!((nccl.live(), backend.live_communicators(), cuda.live()), (0, 0, objects));
}
