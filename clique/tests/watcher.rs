//! What a clique in use makes of answers that are late, or do not come.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;
#[path = "support/meddled.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod meddled;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cliques::{Job, PATIENT, each, until};
use meddled::{Call, Meddled};
use portway_clique::backend::Status;
use portway_clique::rendezvous::InProcess;
use portway_clique::software::{Fault, Kind, Step};
use portway_clique::{Clique, CliqueError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const CALL_WITHIN: Duration = Duration::from_millis(300);

/// A rendezvous that is late with so many answers of one phase.
fn late_with(place: &Arc<InProcess>, phase: &'static str, late: &Arc<AtomicU32>) -> Arc<Meddled> {
    let late = late.clone();
    let meddle = move |call, of: &str| {
        let one_less = |left: u32| left.checked_sub(1);
        let is_late = || late.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_ok();
        if matches!(call, Call::Look | Call::Gather) && of == phase && is_late() {
            return Err(CliqueError::Timeout {
                what: "a test".to_owned(),
                expected: "an answer".to_owned(),
                seen: "none".to_owned(),
                waited: Duration::ZERO,
            });
        }
        Ok(())
    };
    Arc::new(Meddled(place.clone(), Box::new(meddle)))
}

fn up(job: &Job, late: &Arc<AtomicU32>) -> Clique {
    let place = late_with(&job.places[0], "life", late);
    let builder = job.builder(0, 0).call_within(CALL_WITHIN);
    builder.bring_up(job.processes[0].clone(), place, PATIENT).unwrap()
}

#[test]
fn some_late_answers_of_the_rendezvous_end_nothing_and_a_silence_does() {
    let job = Job::new(&[1]);
    let late = Arc::new(AtomicU32::new(0));
    let clique = up(&job, &late);
    late.store(3, Ordering::Release);
    let before = clique.heartbeats();
    until(PATIENT, "more heartbeats", || clique.heartbeats() > before + 5 || clique.end().is_some());
    assert!(clique.end().is_none(), "{:?}", clique.end());
    late.store(u32::MAX, Ordering::Release);
    let start = Instant::now();
    until(PATIENT, "the end", || clique.end().is_some());
    assert!(start.elapsed() >= CALL_WITHIN, "{:?}", start.elapsed());
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("the rendezvous was lost"), "{end}");
}

#[test]
fn a_library_that_does_not_say_how_it_is_ends_the_clique() {
    let job = Job::new(&[1]);
    let clique = up(&job, &Arc::default());
    job.processes[0].inject(Fault::new(Step::State, None, Kind::Hang));
    until(PATIENT, "the end", || clique.end().is_some());
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("watching did not return after"), "{end}");
    until(PATIENT, "the owner to be in quarantine", || clique.quarantine().count() == 1);
    job.fabric.release();
    until(PATIENT, "the owner to come back", || clique.quarantine().count() == 0);
}

/// In a child of some of the participants each waits by looking again and again.
#[test]
fn some_late_answers_are_no_loss_at_the_barrier_of_a_child() {
    let job = Job::new(&[1, 1, 1]);
    let late = Arc::new(AtomicU32::new(0));
    let parts: Vec<_> = (0..3)
        .map(|one| (job.builder(one, 0), job.processes[one].clone(), job.places[one].clone(), late.clone()))
        .collect();
    let cliques = each(PATIENT, parts, |_, (builder, process, place, late)| {
        builder.bring_up(process, late_with(&place, "meet", &late), PATIENT).unwrap()
    });
    let children = each(PATIENT, cliques, |rank, mut clique| {
        let mut member = clique.members().remove(0);
        let child = member.split((rank < 2).then_some(0), 0).unwrap();
        (child, member, clique)
    });
    late.store(4, Ordering::Release);
    let passed = each(PATIENT, children, |_, (child, member, clique)| {
        (child.map(|mut child| child.barrier().map(|()| child)), member, clique)
    });
    for (passed, ..) in &passed {
        assert!(!matches!(passed, Some(Err(_))), "{passed:?}");
    }
    assert_eq!(late.load(Ordering::Acquire), 0, "the answers were late");
}

/// A rendezvous whose looks do not return while it is told so.
fn stuck_while(place: &Arc<InProcess>, stuck: &Arc<AtomicBool>) -> Arc<Meddled> {
    let stuck = stuck.clone();
    let meddle = move |call, _: &str| {
        if call == Call::Look {
            until(PATIENT, "being let go", || !stuck.load(Ordering::Acquire));
        }
        Ok(())
    };
    Arc::new(Meddled(place.clone(), Box::new(meddle)))
}

/// A clique whose rendezvous has not answered for some heartbeats.
fn with_stuck_rendezvous(job: &Job, call_within: Duration) -> (Clique, Arc<AtomicBool>) {
    let stuck = Arc::new(AtomicBool::new(false));
    let place = stuck_while(&job.places[0], &stuck);
    let builder = job.builder(0, 0).call_within(call_within);
    let clique = builder.bring_up(job.processes[0].clone(), place, PATIENT).unwrap();
    stuck.store(true, Ordering::Release);
    let before = clique.heartbeats();
    until(PATIENT, "heartbeats that wait for nobody", || clique.heartbeats() > before + 3);
    (clique, stuck)
}

#[test]
fn a_rendezvous_that_hangs_hides_no_error_of_the_library() {
    let job = Job::new(&[1]);
    let (clique, stuck) = with_stuck_rendezvous(&job, PATIENT);
    assert!(clique.end().is_none(), "{:?}", clique.end());
    job.processes[0].inject(Fault::new(Step::State, Some(0), Kind::Fail(Status::REMOTE_ERROR)));
    until(PATIENT / 4, "the library's error", || clique.end().is_some());
    assert!(stuck.swap(false, Ordering::AcqRel), "the rendezvous hung all the time");
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("remote error"), "{end}");
}

/// A watcher that waits for an answer does not keep a close waiting, however long its heartbeat is.
#[test]
fn a_long_heartbeat_keeps_no_close_waiting() {
    const HEARTBEAT: Duration = Duration::from_secs(4);
    let job = Job::new(&[1]);
    let asks = Arc::new(AtomicBool::new(false));
    let (asked, let_go) = (asks.clone(), Arc::new(AtomicBool::new(false)));
    let is_let_go = let_go.clone();
    let meddle = move |call, _: &str| {
        if call == Call::Look {
            asked.store(true, Ordering::Release);
            until(PATIENT, "being let go", || is_let_go.load(Ordering::Acquire));
        }
        Ok(())
    };
    let place = Arc::new(Meddled(job.places[0].clone(), Box::new(meddle)));
    let clique =
        job.builder(0, 0).heartbeat(HEARTBEAT).bring_up(job.processes[0].clone(), place, PATIENT).unwrap();
    until(PATIENT, "the first heartbeat", || asks.load(Ordering::Acquire));
    let start = Instant::now();
    clique.close(PATIENT).unwrap();
    assert!(start.elapsed() < HEARTBEAT / 4, "{:?}", start.elapsed());
    let_go.store(true, Ordering::Release);
}

/// Says that this is the process in which there are no threads to be had.
const TOLD: &str = "PORTWAY_TEST_HAS_NO_THREADS";

/// Whether a thread can be started.
fn has_threads() -> bool {
    let started = std::thread::Builder::new().spawn(|| ());
    started.map(std::thread::JoinHandle::join).is_ok()
}

/// For some heartbeats the system has no thread to ask the other participants with. It runs in a process of its own, whose
/// address space is limited then, and whose ended threads leave their stacks at once.
#[test]
fn a_heartbeat_without_a_thread_ends_nothing() {
    if std::env::var_os(TOLD).is_none() {
        let test = "a_heartbeat_without_a_thread_ends_nothing";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .envs([(TOLD, "1"), ("GLIBC_TUNABLES", "glibc.pthread.stack_cache_size=0")])
            .spawn()
            .unwrap();
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if start.elapsed() > PATIENT * 2 {
                child.kill().unwrap();
                panic!("{:?}: the process has not ended after {:?}", child.wait(), PATIENT * 2);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(child.wait().unwrap().success());
        return;
    }
    let job = Job::new(&[1]);
    let clique = job.up(0).remove(0);
    let unlimited = getrlimit(Resource::As);
    let limit = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
        let kib: u64 = size.split_whitespace().next().unwrap().parse().unwrap();
        let bytes = (kib + 256) << 10;
        setrlimit(Resource::As, Rlimit { current: Some(bytes), maximum: unlimited.maximum }).unwrap();
    };
    let mut since = clique.heartbeats();
    until(PATIENT, "heartbeats without a thread", || {
        // One that has ended just now has made room for another.
        if has_threads() {
            limit();
            since = clique.heartbeats();
        }
        clique.heartbeats() > since + 5 || clique.end().is_some()
    });
    setrlimit(Resource::As, unlimited).unwrap();
    assert!(clique.end().is_none(), "{:?}", clique.end());
    clique.close(PATIENT).unwrap();
}

#[test]
fn a_rendezvous_that_hangs_ends_the_clique_when_its_time_is_over() {
    let job = Job::new(&[1]);
    let (clique, stuck) = with_stuck_rendezvous(&job, CALL_WITHIN);
    let start = Instant::now();
    until(PATIENT / 4, "the end", || clique.end().is_some());
    println!("recorded: ended after {:?}, of {CALL_WITHIN:?}", start.elapsed());
    let end = clique.end().unwrap().to_string();
    assert!(end.contains("the rendezvous was lost: no answer in"), "{end}");
    stuck.store(false, Ordering::Release);
}
