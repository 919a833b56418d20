//! A process that is killed while its clique comes up, or before it comes to a barrier: over the TCP store the others hear of it long before the deadline.

#[path = "bring_up/child.rs"]
#[allow(dead_code)]
mod child;
#[path = "bring_up/library.rs"]
mod library;
mod meeting;

use std::time::Duration;

use child::{Part, Participant};
use rustix::process::Signal;

/// The deadline of the bring-up where the others do not wait for it.
const LONG: Duration = Duration::from_secs(15);
/// The deadline where they do.
const SHORT: Duration = Duration::from_secs(2);
/// How long they may take in all, to hear of the end of a process and to abort.
const SOON: Duration = Duration::from_secs(1);

/// Not a test: what a child process runs.
#[test]
fn participant() {
    child::play();
}

/// Brings up a clique of three, of whom the second stops at a step and gets a signal there. How long the others' bring-ups
/// took to fail after that, or their first barriers, with their errors.
fn with_signal(step: &str, signal: Signal, limit: Duration) -> Vec<(Duration, String)> {
    let folder = meeting::fresh_folder();
    let mut address = meeting::LOCALHOST.to_string();
    let mut all: Vec<Participant> = Vec::new();
    for participant in 0..3 {
        let one = Participant::start(&Part {
            address: address.clone(),
            folder: folder.clone(),
            participant,
            participants: 3,
            rank: participant,
            size: 3,
            stops_at: if participant == 1 { step.to_owned() } else { "nowhere".to_owned() },
            limit,
        });
        let said = one.read_until("ok connect", meeting::PATIENCE);
        address = said.iter().find_map(|line| line.strip_prefix("address ")).unwrap().to_owned();
        all.push(one);
    }
    let victim = all.remove(1);
    victim.read_until(&format!("at {step}"), meeting::PATIENCE);
    victim.signal(signal);
    let call = if step == "ready" { "barrier" } else { "bring-up" };
    let failed = all.iter().map(|one| {
        let said = one.read_until("end", meeting::PATIENCE);
        let find = |what: &str| said.iter().find_map(|line| line.strip_prefix(&format!("{what} {call} ")));
        let (Some(took), Some(error)) = (find("took"), find("error")) else {
            panic!("{step}, {signal:?}: {said:#?}")
        };
        (Duration::from_millis(took.parse().unwrap()), error.to_owned())
    });
    let failed = failed.collect();
    let _ = std::fs::remove_dir_all(&folder);
    failed
}

/// At each step after the first that the others hear of. Of three tries one has to be in time: a machine that is shared is
/// late now and then.
#[test]
fn who_is_killed_is_heard_of_at_once() {
    std::thread::scope(|scope| {
        let bring_up = ["gather-hello", "post-ids", "post-begun", "init", "post-up", "enqueue", "post-used"];
        for step in bring_up.into_iter().chain(["ready"]) {
            scope.spawn(move || {
                let in_time = (0..3).any(|_| {
                    let failed = with_signal(step, Signal::KILL, LONG);
                    println!("recorded: killed at {step}: {failed:?}");
                    if ["init", "post-up", "enqueue", "post-used"].contains(&step) {
                        assert_eq!(failed[0].1, failed[1].1, "{step}: all name the same one first");
                    }
                    failed.iter().all(|(took, error)| {
                        *took < SOON
                            && error.contains("has gone without a goodbye")
                            && !error.contains("time is over")
                    })
                });
                assert!(in_time, "{step}");
            });
        }
    });
}

/// The controls: one that is stopped may go on, and one that has said nothing may have a successor.
#[test]
fn who_may_still_come_is_waited_for() {
    std::thread::scope(|scope| {
        for (step, signal) in [("init", Signal::STOP), ("post-hello", Signal::KILL)] {
            scope.spawn(move || {
                for (took, error) in with_signal(step, signal, SHORT) {
                    // The deadlines of three processes that began one after the other, of which the first decides.
                    assert!(error.contains("the time is over"), "{step}, {signal:?}: {error}");
                    assert!(took >= SHORT * 3 / 4, "{step}, {signal:?}: {took:?}, {error}");
                }
            });
        }
    });
}
