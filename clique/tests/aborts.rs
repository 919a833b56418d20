//! How long an abort of a clique in use is waited for: one that is slow, as NCCL's is, is not taken for one that hangs.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, until};
use portway_clique::Clique;
use portway_clique::software::{Fault, Kind, Live, Step};

/// Longer than NCCL's own takes, which is 0.86 to 0.98 s for one communicator on an H200.
const SLOW: Duration = Duration::from_millis(1500);
/// What is promised.
const LIMIT: Duration = Duration::from_secs(3);
/// What a busy machine adds.
const LATE: Duration = Duration::from_secs(1);

fn up_with(kind: Kind) -> (Job, Clique) {
    let job = Job::new(&[2]);
    let clique = job.up(0).remove(0);
    job.processes[0].inject(Fault::new(Step::Abort, Some(1), kind));
    (job, clique)
}

#[test]
fn a_slow_abort_is_waited_for() {
    let (job, clique) = up_with(Kind::Delay(SLOW));
    let start = Instant::now();
    let quarantine = clique.abort();
    assert_eq!(quarantine.count(), 0, "after {:?}", start.elapsed());
    assert!(start.elapsed() >= SLOW, "{:?}", start.elapsed());
    assert_eq!(job.fabric.live().communicators, 0);
    drop(clique);
    let (job, clique) = up_with(Kind::Delay(SLOW));
    drop(clique);
    assert_eq!(job.fabric.live(), Live::default());
}

/// The control: one that does not return is waited for no longer than promised, and counted.
#[test]
fn an_abort_that_does_not_return_is_not_waited_for() {
    let (job, clique) = up_with(Kind::Hang);
    let start = Instant::now();
    let quarantine = clique.abort();
    let took = start.elapsed();
    assert_eq!(quarantine.count(), 1, "after {took:?}");
    assert!(took >= LIMIT && took < LIMIT + LATE, "{took:?}");
    job.fabric.release();
    until(PATIENT, "the abort to come back", || quarantine.count() == 0);
    drop(clique);
    assert_eq!(job.fabric.live(), Live::default());
}
