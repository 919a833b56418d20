//! 200 cliques made and closed in a row, and 50 that fail: threads, descriptors and memory stay as they were. A program
//! of its own, since it counts what its process has.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::time::Duration;

use cliques::{Job, PATIENT, each, until};
use portway_clique::FirstUse;
use portway_clique::backend::Status;
use portway_clique::software::{Fault, Kind, Live, Step};

fn entries(path: &str) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// Resident memory in KiB.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn counts_stay_flat() {
    let mut job = Job::new(&[2, 1]);
    let mut attempt = 0;
    let mut run = |job: &Job| {
        let mut cliques = job.up(attempt);
        attempt += 1;
        let members = cliques.iter_mut().flat_map(portway_clique::Clique::members).collect::<Vec<_>>();
        drop(members);
        for closed in each(PATIENT, cliques, |_, clique| clique.close(PATIENT)) {
            assert!(closed.unwrap().everybody);
        }
    };
    (0..20).for_each(|_| run(&job));
    let settled = |threads: usize| entries("/proc/self/task") <= threads;
    // The test's own threads; those that just ended may still be listed.
    until(PATIENT, "threads to end", || settled(2));
    let (threads, descriptors, memory) =
        (entries("/proc/self/task"), entries("/proc/self/fd"), resident_kib());
    (0..200).for_each(|_| run(&job));
    until(PATIENT, "threads to end", || settled(threads));
    assert_eq!(entries("/proc/self/fd"), descriptors);
    let grown = resident_kib().saturating_sub(memory);
    println!(
        "recorded: {threads} threads, {descriptors} descriptors, {memory} KiB before, {grown} KiB more after 200"
    );
    assert!(grown < 4096, "{memory} KiB before, {grown} KiB more");

    // What this crate takes by itself, since the library in software takes next to nothing.
    let alone = Job::new(&[2]);
    let mut took: Vec<Duration> = (0..100)
        .map(|attempt| {
            let outcomes =
                alone.bring_up_with(attempt, |_, builder| Some(builder.first_use(FirstUse::default())));
            let clique = outcomes.into_iter().next().unwrap().0.unwrap();
            let durations = clique.durations();
            clique.close(PATIENT).unwrap();
            durations.total
        })
        .collect();
    took.sort_unstable();
    println!("recorded: bring-up of two ranks without a first use: median {:?}", took[50]);

    job.within = Duration::from_secs(5);
    for attempt in 1000..1050 {
        job.processes[1].inject(Fault::new(Step::InitProgress, None, Kind::Fail(Status::SYSTEM_ERROR)));
        assert!(job.bring_up(attempt).into_iter().all(|(result, _)| result.is_err()));
        job.processes[1].heal();
    }
    until(PATIENT, "threads to end", || settled(threads));
    assert_eq!(job.fabric.live(), Live::default());
    assert_eq!(entries("/proc/self/fd"), descriptors);
}
