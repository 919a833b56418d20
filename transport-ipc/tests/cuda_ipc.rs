//! The port contract on real devices: one GPU or two, one process or two. What the machine lacks is waived.

#[path = "support/pairs.rs"]
mod pairs;
#[path = "support/peer.rs"]
mod peer;
mod support;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// Peers on the same device that are killed in the middle of puts, one after the other: threads and descriptors stay as
/// many as they were, and nothing is left in quarantine.
#[test]
fn one_gpu_fifty_peers_are_killed() {
    const TEST: &str = "one_gpu_fifty_peers_are_killed";
    // Fewer where a process takes long to begin.
    const PEERS: usize = 50;
    const LONGEST: Duration = Duration::from_secs(100);
    const WARM: usize = 3;
    let Some(driver) = devices(TEST, 1) else { return };
    if support::child().is_some() {
        peer::child(&driver, 0);
    }
    let context = Context::new(&driver, 0).unwrap();
    let entries = |path: &str| std::fs::read_dir(path).unwrap().count();
    let counts = || {
        context.reclaim().unwrap();
        [entries("/proc/self/task"), entries("/proc/self/fd")]
    };
    let (start, mut first, mut killed) = (Instant::now(), None, 0);
    while killed < PEERS && (start.elapsed() < LONGEST || killed < WARM + 5) {
        peer::killed_in_the_middle_of_a_put(TEST, "child", &context, killed % 2 == 1, |_| ());
        killed += 1;
        if killed == WARM {
            first = Some(settled(counts));
        }
    }
    let (first, last) = (first.unwrap(), settled(counts));
    say(&format!("recorded: {killed} peers killed: {first:?} threads and descriptors, then {last:?}"));
    assert_eq!(first, last, "threads and descriptors");
    assert_eq!(context.quarantined(), Default::default());
}

/// Counts once threads that are ending have ended.
fn settled(counts: impl Fn() -> [usize; 2]) -> [usize; 2] {
    let start = Instant::now();
    let mut last = counts();
    loop {
        std::thread::sleep(Duration::from_millis(100));
        let now = counts();
        if now == last {
            return now;
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "counts do not stand still: {last:?}, then {now:?}"
        );
        last = now;
    }
}

/// All pairs of all devices, at most eight, at the same time; then the suite between the first and the last.
#[test]
fn all_gpus_all_pairs_at_once() {
    const TEST: &str = "all_gpus_all_pairs_at_once";
    let Some(driver) = devices(TEST, 2) else { return };
    let count = driver.device_count().unwrap().min(8);
    let contexts: Vec<Context> = (0..count).map(|ordinal| Context::new(&driver, ordinal).unwrap()).collect();
    assert_eq!(pairs::all_at_once(&contexts, |_, _, _| ()), [""; 0]);
    say(&format!("recorded: {} pairs of {count} GPUs at once", count * (count - 1)));
    let ends = [contexts[0].clone(), contexts[count as usize - 1].clone()];
    support::run(&OneProcess { setup: DESCRIPTORS, beside: true, contexts: ends, spoil: None }, WAIVED);
}

/// The same with four ranks on one device.
#[test]
fn one_gpu_all_pairs_of_four_ranks_at_once() {
    let Some(driver) = devices("one_gpu_all_pairs_of_four_ranks_at_once", 1) else { return };
    let context = Context::new(&driver, 0).unwrap();
    assert_eq!(pairs::all_at_once(&vec![context; 4], |_, _, _| ()), [""; 0]);
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
