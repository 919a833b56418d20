//! What the tests share: ends of the conformance suite, in this process and in another.
#![allow(dead_code, reason = "each test uses its part")]

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use portway_fifo::cuda::{Context, Driver, Kind};
use portway_proxy::TransportError;
use portway_proxy::conformance::{self, End, Failing, Fixture, Pair, serve};
use portway_transport_ipc::{Config, Ipc, Way, WordPlace};

/// How an end is made.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub kind: Kind,
    pub word_place: WordPlace,
    /// The only way to another process.
    pub way: Way,
}

pub const DESCRIPTORS: Setup = Setup { kind: Kind::Vmm, word_place: WordPlace::Pinned, way: Way::Descriptor };
pub const LEGACY: Setup = Setup { kind: Kind::Legacy, word_place: WordPlace::Pinned, way: Way::Legacy };
pub const FABRIC: Setup = Setup { way: Way::Fabric, ..DESCRIPTORS };
pub const DEVICE_WORDS: Setup = Setup { word_place: WordPlace::Device, ..DESCRIPTORS };

impl Setup {
    pub fn config(&self) -> Config {
        let ways = vec![Way::SameProcess, self.way];
        Config { word_place: self.word_place, ways, depth: 64, ..Config::default() }
    }

    pub fn end(&self, ipc: Ipc, context: &Context) -> End {
        let (context, kind) = (context.clone(), self.kind);
        End::new(ipc, move |len_bytes| context.allocate(kind, len_bytes))
    }
}

/// What makes A's ports fail.
pub type Spoil = Arc<dyn Fn() + Send + Sync>;

fn failing(pair: Pair, spoil: &Option<Spoil>) -> Failing {
    match spoil {
        Some(spoil) => {
            spoil();
            Failing::Pair(pair)
        }
        None => Failing::Waived("this driver does not fail on demand".into()),
    }
}

/// Two transports of one process, which know each other or not.
pub struct OneProcess {
    pub setup: Setup,
    pub beside: bool,
    pub contexts: [Context; 2],
    pub spoil: Option<Spoil>,
}

impl Fixture for OneProcess {
    fn pair(&self) -> Result<Pair, TransportError> {
        let [near, far] = &self.contexts;
        let a = Ipc::open(near, self.setup.config())?;
        let b = if self.beside { a.beside(far)? } else { Ipc::open(far, self.setup.config())? };
        Ok(Pair { a: self.setup.end(a, near), b: self.setup.end(b, far) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(failing(self.pair()?, &self.spoil))
    }
}

/// Tells a child of a test what it is to be.
const CHILD: &str = "PORTWAY_IPC_CHILD";

/// A process that this one has started. It is ended with this value.
pub struct Other(pub Child);

impl Other {
    /// Starts this program again, for the test of this name, which calls [`child`] first of all. The child's standard
    /// output is the harness's, so it talks on its standard error.
    pub fn start(test: &str, argument: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, argument)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        Other(child.unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What this process is to be, if it is a child.
pub fn child() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// One end here, one in another process.
pub struct TwoProcesses {
    pub setup: Setup,
    pub context: Context,
    pub spoil: Option<Spoil>,
    far: End,
    _other: Mutex<Other>,
}

impl TwoProcesses {
    pub fn start(test: &str, argument: &str, setup: Setup, context: Context, spoil: Option<Spoil>) -> Self {
        let mut other = Other::start(test, argument);
        let far = End::remote(other.0.stderr.take().unwrap(), other.0.stdin.take().unwrap());
        TwoProcesses { setup, context, spoil, far, _other: Mutex::new(other) }
    }
}

impl Fixture for TwoProcesses {
    fn pair(&self) -> Result<Pair, TransportError> {
        let a = Ipc::open(&self.context, self.setup.config())?;
        Ok(Pair { a: self.setup.end(a, &self.context), b: self.far.clone() })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(failing(self.pair()?, &self.spoil))
    }
}

/// Serves the other end, as a child.
pub fn serve_end(driver: &Arc<Driver>, ordinal: u32, setup: Setup) -> ! {
    let context = Context::new(driver, ordinal).unwrap();
    let end = setup.end(Ipc::open(&context, setup.config()).unwrap(), &context);
    let served = serve(&end, std::io::stdin(), std::io::stderr(), Duration::from_secs(120));
    // Nothing else may go to the suite's stream.
    std::process::exit(served.is_err().into());
}

/// Runs the suite, of which so many checks are waived.
pub fn run(fixture: &dyn Fixture, waived: usize) {
    let report = conformance::run(fixture);
    // Indented: a check that is waived does not waive the whole.
    println!("    {}", report.to_string().replace('\n', "\n    "));
    if waived > 0 {
        println!("recorded: checks of the suite that were waived: {waived}");
    }
    report.assert();
    assert_eq!(report.waived().count(), waived, "{report}");
}
