//! Participants that are processes are killed, and stopped, at each step of a bring-up: the others get an error in time
//! that says who was missing.

mod child;
mod library;
#[path = "../meeting/mod.rs"]
mod meeting;

use std::path::PathBuf;
use std::time::Duration;

use child::{Part, Participant};
use rustix::process::Signal;

/// The deadline of a bring-up, and of each call after it.
const LIMIT: Duration = Duration::from_millis(2500);
/// How much later than 100 ms after its deadline a busy machine may be with it.
const LATE: Duration = Duration::from_millis(1000);

/// Where the victim stops, and what the others then fail in: the bring-up in one of these phases, or the barrier after it.
/// A gather goes on beside what is gathered, so it may stop a participant that still does its part, or has done it.
const STEPS: [(&str, &[&str]); 11] = [
    ("post-hello", &["gathering"]),
    ("gather-hello", &["verified"]),
    ("post-ids", &["verified"]),
    ("post-begun", &["initialising"]),
    ("init", &["initialising"]),
    ("post-up", &["initialising"]),
    ("gather-up", &["initialising", "first use"]),
    ("enqueue", &["first use"]),
    ("post-used", &["first use"]),
    ("gather-used", &["first use", "ready"]),
    ("ready", &["ready"]),
];

/// Not a test: what a child process runs.
#[test]
fn participant() {
    child::play();
}

/// Three participants that have come to the store. The first has the store, at a port that the system chooses.
struct All {
    folder: PathBuf,
    participants: Vec<Participant>,
}

impl All {
    fn start(change: impl Fn(&mut Part)) -> Self {
        let folder = meeting::fresh_folder();
        let mut all = All { folder, participants: Vec::new() };
        let mut address = meeting::LOCALHOST.to_string();
        for participant in 0..3 {
            let mut part = Part {
                address: address.clone(),
                folder: all.folder.clone(),
                participant,
                participants: 3,
                rank: participant,
                size: 3,
                stops_at: "nowhere".to_owned(),
                limit: LIMIT,
            };
            change(&mut part);
            let one = Participant::start(&part);
            let said = one.read_until("ok connect", meeting::PATIENCE);
            address = lines(&said, "address ")[0].to_owned();
            all.participants.push(one);
        }
        all
    }

    /// What each says up to its end.
    fn finish(&self) -> Vec<Vec<String>> {
        self.participants.iter().map(|one| one.read_until("end", meeting::PATIENCE)).collect()
    }
}

impl Drop for All {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The lines that begin like this, without that beginning.
fn lines<'a>(said: &'a [String], beginning: &str) -> Vec<&'a str> {
    said.iter().filter_map(|line| line.strip_prefix(beginning)).collect()
}

/// Three participants, of which one gets a signal at a step, or is told to go on. What the others say.
fn with_signal(victim: u32, step: &str, signal: Option<Signal>) -> Vec<Vec<String>> {
    let mut all = All::start(|part| {
        if part.participant == victim {
            part.stops_at = step.to_owned();
        }
    });
    let mut victim = all.participants.remove(victim as usize);
    victim.read_until(&format!("at {step}"), meeting::PATIENCE);
    match signal {
        Some(signal) => victim.signal(signal),
        None => victim.go(),
    }
    let mut said = all.finish();
    if signal.is_none() {
        said.push(victim.read_until("end", meeting::PATIENCE));
    }
    said
}

/// The error of whoever lives, which came in time.
fn the_error<'a>(said: &'a [String], context: &str) -> &'a str {
    for took in lines(said, "took ").iter().filter(|took| !took.starts_with("connect ")) {
        let (what, millis) = took.split_once(' ').unwrap();
        let took = Duration::from_millis(millis.parse().unwrap());
        assert!(took < LIMIT + Duration::from_millis(100) + LATE, "{context}: {what} took {took:?}");
    }
    let errors = lines(said, "error ");
    assert_eq!(errors.len(), 1, "{context}: {said:#?}");
    errors[0]
}

/// At each step at the same time, since they do nothing but wait.
fn at_each_step(test: impl Fn(&str, &[&str]) + Sync) {
    std::thread::scope(|scope| {
        for (step, phases) in STEPS {
            let test = &test;
            scope.spawn(move || test(step, phases));
        }
    });
}

#[test]
fn the_control_one_stops_and_goes_on_and_all_are_ready() {
    at_each_step(|step, _| {
        for said in with_signal(1, step, None) {
            assert!(lines(&said, "error").is_empty(), "{step}: {said:#?}");
            assert_eq!(lines(&said, "everybody "), ["true"], "{step}: {said:#?}");
        }
    });
}

fn others_name_the_one(signal: Signal) {
    at_each_step(|step, phases| {
        for said in with_signal(1, step, Some(signal)) {
            let context = format!("{signal:?} at {step}");
            let error = the_error(&said, &context);
            println!("recorded: {context}: {error}");
            let in_phase = |phase: &&str| error.contains(&format!("failed in {phase}"));
            assert!(phases.iter().any(in_phase), "{context}: {phases:?}; {error}");
            // Those who wait for it inside the library did not end either.
            let names = ["participant 1", "the ranks [1] of", "the ranks [1, 2] of", "the ranks [0, 1] of"];
            assert!(names.iter().any(|name| error.contains(name)), "{context}: {error}");
        }
    });
}

#[test]
fn a_participant_that_is_killed_is_named() {
    others_name_the_one(Signal::KILL);
}

#[test]
fn a_participant_that_is_stopped_is_named() {
    others_name_the_one(Signal::STOP);
}

/// With participant 0 the store goes, or answers no more, so the others say that instead.
fn others_lose_the_store(signal: Signal) {
    at_each_step(|step, _| {
        for said in with_signal(0, step, Some(signal)) {
            let context = format!("{signal:?} of the store at {step}");
            let error = the_error(&said, &context);
            println!("recorded: {context}: {error}");
            assert!(
                error.contains("the store of participant 0") || error.contains("the rendezvous"),
                "{error}"
            );
        }
    });
}

#[test]
fn a_store_that_is_killed_is_an_error() {
    others_lose_the_store(Signal::KILL);
}

#[test]
fn a_store_that_is_stopped_is_an_error() {
    others_lose_the_store(Signal::STOP);
}

/// All get the same verdict, before the library is called.
fn verdict(change: impl Fn(&mut Part), expected: &str) {
    let said = All::start(|part| {
        if part.participant == 2 {
            change(part);
        }
    })
    .finish();
    let errors: Vec<&str> = said.iter().map(|said| the_error(said, expected)).collect();
    assert!(errors[0].contains(expected), "{errors:#?}");
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:#?}");
}

#[test]
fn a_rank_twice_is_every_process_s_verdict() {
    verdict(|part| part.rank = 1, "rank of rank 1");
}

#[test]
fn another_size_is_every_process_s_verdict() {
    verdict(|part| part.size = 4, "expected 3, seen 4");
}
