//! The port contract, held by the transport over a driver in software: within one process, and between two.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libcuda::Standin;
use portway_fifo::cuda::{Context, Driver};
use support::{DESCRIPTORS, DEVICE_WORDS, FABRIC, LEGACY, OneProcess, Setup, Spoil, TwoProcesses};

/// `CUDA_ERROR_LAUNCH_FAILED`.
const LAUNCH_FAILED: i32 = 719;

fn spoil(standin: &Arc<Standin>) -> Option<Spoil> {
    let standin = standin.clone();
    Some(Arc::new(move || standin.fail("cuMemcpyAsync", 20, LAUNCH_FAILED)))
}

fn in_one_process(setup: Setup, beside: bool) -> (Arc<Standin>, OneProcess) {
    let standin = Arc::new(Standin::new());
    let driver = Driver::open(standin.path()).unwrap();
    let contexts = [0, 1].map(|ordinal| Context::new(&driver, ordinal).unwrap());
    let spoil = spoil(&standin);
    (standin, OneProcess { setup, beside, contexts, spoil })
}

#[test]
fn in_one_process_with_words_in_pinned_memory() {
    support::run(&in_one_process(LEGACY, true).1, 0);
}

#[test]
fn in_one_process_with_words_on_the_device() {
    support::run(&in_one_process(DEVICE_WORDS, true).1, 0);
}

#[test]
fn in_one_process_between_transports_that_do_not_know_each_other() {
    support::run(&in_one_process(DESCRIPTORS, false).1, 0);
}

/// Streams that stand still now and then, so that much is under way at any time.
#[test]
fn over_streams_that_lag_behind() {
    let (standin, fixture) = in_one_process(LEGACY, true);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let pauses = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            for pause in [1, 0] {
                standin.set("paused", pause);
                std::thread::sleep(Duration::from_micros(300));
            }
        }
    });
    support::run(&fixture, 0);
    stop.store(true, Ordering::Relaxed);
    pauses.join().unwrap();
}

/// The suite over two processes: `test` is the name of the calling test, which the other process runs as well.
fn between_two_processes(test: &str, setup: Setup) {
    if let Some(path) = support::child() {
        let driver = Driver::open(&path).unwrap();
        libcuda::set_in(&path, "fabric allowed", 1);
        support::serve_end(&driver, 1, setup);
    }
    let standin = Arc::new(Standin::new());
    standin.set("fabric allowed", 1);
    let driver = Driver::open(standin.path()).unwrap();
    let context = Context::new(&driver, 0).unwrap();
    support::run(&TwoProcesses::start(test, standin.path(), setup, context, spoil(&standin)), 0);
}

#[test]
fn between_two_processes_by_descriptors() {
    between_two_processes("between_two_processes_by_descriptors", DESCRIPTORS);
}

#[test]
fn between_two_processes_by_legacy_handles() {
    between_two_processes("between_two_processes_by_legacy_handles", LEGACY);
}

#[test]
fn between_two_processes_with_words_on_the_device() {
    between_two_processes("between_two_processes_with_words_on_the_device", DEVICE_WORDS);
}

#[test]
fn between_two_processes_by_fabric_handles() {
    between_two_processes("between_two_processes_by_fabric_handles", FABRIC);
}
