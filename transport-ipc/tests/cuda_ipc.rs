//! The port contract on real devices: one GPU or two, one process or two. What the machine lacks is waived.

#[path = "support/peer.rs"]
mod peer;
mod support;

use std::io::Write;
use std::sync::Arc;

use portway_fifo::Error;
use portway_fifo::cuda::{Context, Driver, Kind};
use portway_proxy::transport::Transport;
use portway_transport_ipc::{Config, Ipc};
use support::{DESCRIPTORS, DEVICE_WORDS, FABRIC, LEGACY, OneProcess, Setup, TwoProcesses};

/// Of the suite: there is no way to make a real driver fail.
const WAIVED: usize = 1;

fn say(line: &str) {
    // Not through `eprintln!`, which the test harness keeps to itself.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The driver and so many devices, or `None` after a line that says why `test` is waived.
fn devices(test: &str, count: u32) -> Option<Arc<Driver>> {
    let required = std::env::var("PORTWAY_REQUIRE_CUDA").is_ok_and(|value| value == "1");
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(lacking @ (Error::NoLibrary { .. } | Error::Driver { call: "cuInit", status: 100, .. })) => {
            assert!(!required, "PORTWAY_REQUIRE_CUDA=1, and {lacking}");
            say(&format!("waived: {test}: {lacking}"));
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let seen = driver.device_count().unwrap();
    if seen < count {
        say(&format!("waived: {test}: needs {count} GPUs, there is {seen}"));
        return None;
    }
    Some(driver)
}

fn in_one_process(test: &str, ordinals: [u32; 2], setup: Setup, beside: bool) {
    let Some(driver) = devices(test, 1 + ordinals[1]) else { return };
    let contexts = ordinals.map(|ordinal| Context::new(&driver, ordinal).unwrap());
    support::run(&OneProcess { setup, beside, contexts, spoil: None }, WAIVED);
}

fn between_two_processes(test: &str, ordinals: [u32; 2], setup: Setup) {
    let Some(driver) = devices(test, 1 + ordinals[1]) else { return };
    if support::child().is_some() {
        support::serve_end(&driver, ordinals[1], setup);
    }
    let context = Context::new(&driver, ordinals[0]).unwrap();
    if setup.way == FABRIC.way && !exports_fabric_handles(&context) {
        say(&format!("waived: {test}: the device or this process has no fabric handles"));
        return;
    }
    support::run(&TwoProcesses::start(test, "child", setup, context, None), WAIVED);
}

/// A peer on the same device is killed in the middle of puts; the port says so, and the process goes on.
fn with_a_killed_peer(test: &str, legacy: bool) {
    let Some(driver) = devices(test, 1) else { return };
    if support::child().is_some() {
        peer::child(&driver, 0);
    }
    let context = Context::new(&driver, 0).unwrap();
    for _ in 0..3 {
        peer::killed_in_the_middle_of_a_put(test, "child", &context, legacy, |_| ());
    }
    let contexts = [context.clone(), context];
    support::run(&OneProcess { setup: DESCRIPTORS, beside: true, contexts, spoil: None }, WAIVED);
}

#[test]
fn one_gpu_peer_is_killed_descriptors() {
    with_a_killed_peer("one_gpu_peer_is_killed_descriptors", false);
}

#[test]
fn one_gpu_peer_is_killed_legacy() {
    with_a_killed_peer("one_gpu_peer_is_killed_legacy", true);
}

fn exports_fabric_handles(context: &Context) -> bool {
    let region = context.allocate(Kind::Vmm, 4096).unwrap();
    region.owner().ipc_handle(region.range(), portway_fifo::memory::IpcKind::Fabric).is_ok()
}

macro_rules! tests {
    ($($name:ident: $run:ident($ordinals:expr, $($argument:expr),+);)*) => {
        $(
            #[test]
            fn $name() {
                $run(stringify!($name), $ordinals, $($argument),+);
            }
        )*
    };
}

tests! {
    one_gpu_one_process: in_one_process([0, 0], DESCRIPTORS, true);
    one_gpu_one_process_words_on_the_device: in_one_process([0, 0], DEVICE_WORDS, true);
    one_gpu_one_process_apart: in_one_process([0, 0], DESCRIPTORS, false);
    one_gpu_two_processes_descriptors: between_two_processes([0, 0], DESCRIPTORS);
    one_gpu_two_processes_legacy: between_two_processes([0, 0], LEGACY);
    one_gpu_two_processes_fabric: between_two_processes([0, 0], FABRIC);
    one_gpu_two_processes_words_on_the_device: between_two_processes([0, 0], DEVICE_WORDS);
    two_gpus_one_process: in_one_process([0, 1], DESCRIPTORS, true);
    two_gpus_one_process_legacy: in_one_process([0, 1], LEGACY, true);
    two_gpus_two_processes_descriptors: between_two_processes([0, 1], DESCRIPTORS);
    two_gpus_two_processes_legacy: between_two_processes([0, 1], LEGACY);
    two_gpus_two_processes_words_on_the_device: between_two_processes([0, 1], DEVICE_WORDS);
}

/// What was allocated in which way is exported in which, for the record.
#[test]
fn forms_of_memory_are_recorded() {
    let Some(driver) = devices("forms_of_memory_are_recorded", 1) else { return };
    let context = Context::new(&driver, 0).unwrap();
    let (near, far) =
        (Ipc::open(&context, Config::default()).unwrap(), Ipc::open(&context, Config::default()).unwrap());
    for kind in [Kind::Vmm, Kind::Legacy] {
        let memory = near.register(&context.allocate(kind, 1 << 20).unwrap()).unwrap();
        match far.import(&near.export(&memory).unwrap()) {
            Ok(remote) => say(&format!("recorded: {kind:?}: {}", far.describe(&remote).unwrap())),
            Err(error) => say(&format!("recorded: {kind:?} within one process, apart: {error}")),
        }
    }
    let word = near.signal_word().unwrap();
    let remote = far.import(&near.export(&word).unwrap()).unwrap();
    say(&format!("recorded: signal word: {}", far.describe(&remote).unwrap()));
}
