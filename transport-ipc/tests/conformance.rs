//! The port contract, held by the transport over a driver in software: within one process, and between two.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libcuda::Standin;
use portway_fifo::cuda::{Context, Driver, Kind};
use portway_proxy::TransportError;
use portway_proxy::conformance::{self, End, Failing, Fixture, Pair, serve};
use portway_transport_ipc::{Config, Ipc, Way, WordPlace};

/// `CUDA_ERROR_LAUNCH_FAILED`.
const LAUNCH_FAILED: i32 = 719;

/// Says to a child of this test which driver to load, and how to open the transport.
const CHILD: &str = "PORTWAY_IPC_CHILD";

/// How an end is made.
#[derive(Clone, Debug)]
struct Setup {
    kind: Kind,
    word_place: WordPlace,
    ways: Vec<Way>,
}

impl Setup {
    fn config(&self) -> Config {
        Config { word_place: self.word_place, ways: self.ways.clone(), depth: 64, ..Config::default() }
    }

    fn end(&self, ipc: Ipc, context: &Context) -> End {
        let (context, kind) = (context.clone(), self.kind);
        End::new(ipc, move |len_bytes| context.allocate(kind, len_bytes))
    }

    /// As an argument for a child.
    fn encode(&self) -> String {
        let Setup { kind, word_place, ways } = self;
        format!(
            "{}{}{}",
            u8::from(*kind == Kind::Legacy),
            *word_place as u8,
            u8::from(ways.contains(&Way::Fabric))
        )
    }

    fn decode(text: &str) -> Self {
        let flag = |at: usize| text.as_bytes()[at] == b'1';
        Setup {
            kind: if flag(0) { Kind::Legacy } else { Kind::Vmm },
            word_place: if flag(1) { WordPlace::Device } else { WordPlace::Pinned },
            ways: if flag(2) { vec![Way::Fabric] } else { vec![Way::Descriptor, Way::Legacy] },
        }
    }
}

/// Two devices of one process, whose transports know each other or not.
struct OneProcess {
    standin: Standin,
    setup: Setup,
    beside: bool,
    contexts: [Context; 2],
}

impl OneProcess {
    fn new(setup: Setup, beside: bool) -> Self {
        let standin = Standin::new();
        let driver = Driver::open(standin.path()).unwrap();
        let contexts = [0, 1].map(|ordinal| Context::new(&driver, ordinal).unwrap());
        OneProcess { standin, setup, beside, contexts }
    }
}

impl Fixture for OneProcess {
    fn pair(&self) -> Result<Pair, TransportError> {
        let [near, far] = &self.contexts;
        let a = Ipc::open(near, self.setup.config())?;
        let b = if self.beside { a.beside(far)? } else { Ipc::open(far, self.setup.config())? };
        Ok(Pair { a: self.setup.end(a, near), b: self.setup.end(b, far) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        let pair = self.pair()?;
        self.standin.fail("cuMemcpyAsync", 20, LAUNCH_FAILED);
        Ok(Failing::Pair(pair))
    }
}

fn setup(kind: Kind, word_place: WordPlace) -> Setup {
    let ways = vec![Way::SameProcess, Way::Descriptor, Way::Legacy];
    Setup { kind, word_place, ways }
}

#[test]
fn in_one_process_with_words_in_pinned_memory() {
    let report = conformance::run(&OneProcess::new(setup(Kind::Legacy, WordPlace::Pinned), true));
    println!("{report}");
    report.assert();
    assert_eq!(report.waived().count(), 0);
}

#[test]
fn in_one_process_with_words_on_the_device() {
    conformance::run(&OneProcess::new(setup(Kind::Vmm, WordPlace::Device), true)).assert();
}

#[test]
fn in_one_process_between_transports_that_do_not_know_each_other() {
    conformance::run(&OneProcess::new(setup(Kind::Vmm, WordPlace::Pinned), false)).assert();
}

/// Streams that stand still now and then, so that much is under way at any time.
#[test]
fn over_streams_that_lag_behind() {
    let fixture = Arc::new(OneProcess::new(setup(Kind::Legacy, WordPlace::Pinned), true));
    let (stop, paused) = (Arc::new(AtomicBool::new(false)), fixture.clone());
    let stopped = stop.clone();
    let pauses = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            for pause in [1, 0] {
                paused.standin.set("paused", pause);
                std::thread::sleep(Duration::from_micros(300));
            }
        }
    });
    let report = conformance::run(&*fixture);
    stop.store(true, Ordering::Relaxed);
    pauses.join().unwrap();
    report.assert();
}

/// A child process that serves the other end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct TwoProcesses {
    near: OneProcess,
    children: Mutex<Vec<Server>>,
}

impl TwoProcesses {
    fn new(setup: Setup) -> Self {
        let near = OneProcess::new(setup, false);
        near.standin.set("fabric allowed", 1);
        TwoProcesses { near, children: Mutex::default() }
    }
}

impl Fixture for TwoProcesses {
    fn pair(&self) -> Result<Pair, TransportError> {
        let OneProcess { standin, setup, contexts: [context, _], .. } = &self.near;
        let a = Ipc::open(context, setup.config())?;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
            .env(CHILD, format!("{} {}", setup.encode(), standin.path()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The harness writes to the standard output, so the child answers on the other one.
        let b = End::remote(child.stderr.take().unwrap(), child.stdin.take().unwrap());
        self.children.lock().unwrap().push(Server(child));
        Ok(Pair { a: setup.end(a, context), b })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        let pair = self.pair()?;
        self.near.standin.fail("cuMemcpyAsync", 20, LAUNCH_FAILED);
        Ok(Failing::Pair(pair))
    }
}

#[test]
#[ignore = "run by the tests between two processes"]
fn the_other_process() {
    let text = std::env::var(CHILD).unwrap();
    let (setup, path) = text.split_once(' ').unwrap();
    let setup = Setup::decode(setup);
    let driver = Driver::open(path).unwrap();
    if setup.ways.contains(&Way::Fabric) {
        libcuda::set_in(path, "fabric allowed", 1);
    }
    let context = Context::new(&driver, 1).unwrap();
    let end = setup.end(Ipc::open(&context, setup.config()).unwrap(), &context);
    serve(&end, std::io::stdin(), std::io::stderr(), Duration::from_secs(60)).unwrap();
    // Nothing else may go to the suite's stream.
    std::process::exit(0);
}

fn between_two_processes(setup: &str) {
    let report = conformance::run(&TwoProcesses::new(Setup::decode(setup)));
    println!("{report}");
    report.assert();
    assert_eq!(report.waived().count(), 0);
}

#[test]
fn between_two_processes_by_descriptors() {
    between_two_processes("000");
}

#[test]
fn between_two_processes_by_legacy_handles() {
    between_two_processes("100");
}

#[test]
fn between_two_processes_with_words_on_the_device() {
    between_two_processes("010");
}

#[test]
fn between_two_processes_by_fabric_handles() {
    between_two_processes("001");
}
