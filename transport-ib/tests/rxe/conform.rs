//! The conformance suite over soft-RoCE: two devices, and two hosts.

use std::io::{BufReader, stdin, stdout};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use portway_fifo::{Heap, Region};
use portway_proxy::TransportError;
use portway_proxy::conformance::{self, End, Failing, Fixture, Limits, Pair};
use portway_proxy::transport::{Endpoint, LocalMemory, RemoteMemory, Transport};
use portway_transport_ib::{Config, Ib};

use crate::{Outcome, settings};

/// Two devices of an emulated processor that both ends share: everything takes its time.
const LIMITS: Limits = Limits { wait: Duration::from_secs(60), call: Duration::from_secs(5) };

fn open(device: &str) -> Result<Ib, TransportError> {
    Ok(Ib::open(settings(device))?)
}

/// The hosts' connections have two queue pairs, so that lanes of one port are not ordered by the wire.
fn open_on_host(device: &str) -> Result<Ib, TransportError> {
    Ok(Ib::open(Config { queue_pairs: 2, ..settings(device) })?)
}

fn end(transport: impl Transport + 'static) -> End {
    End::new(transport, |len_bytes| Heap.allocate(len_bytes))
}

/// A transport whose peers' keys are wrong, so that the peer refuses its first request.
#[derive(Debug)]
struct WrongKeys(Ib);

impl Transport for WrongKeys {
    fn register(&self, region: &Region) -> Result<LocalMemory, TransportError> {
        self.0.register(region)
    }
    fn signal_word(&self) -> Result<LocalMemory, TransportError> {
        self.0.signal_word()
    }
    fn release(&self, memory: &LocalMemory) -> Result<(), TransportError> {
        self.0.release(memory)
    }
    fn export(&self, memory: &LocalMemory) -> Result<Vec<u8>, TransportError> {
        self.0.export(memory)
    }
    fn import(&self, bytes: &[u8]) -> Result<RemoteMemory, TransportError> {
        self.0.import(&wrong_key(bytes))
    }
    fn forget(&self, memory: &RemoteMemory) -> Result<(), TransportError> {
        self.0.forget(memory)
    }
    fn endpoint(&self) -> Result<(Box<dyn Endpoint>, Vec<u8>), TransportError> {
        self.0.endpoint()
    }
}

/// An export of one span, with another key: its last four bytes.
pub fn wrong_key(export: &[u8]) -> Vec<u8> {
    let mut bytes = export.to_vec();
    if let Some(first) = bytes.len().checked_sub(4) {
        bytes[first..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    }
    bytes
}

struct Devices;

impl Fixture for Devices {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(open("rxe0")?), b: end(open("rxe1")?) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Pair(Pair { a: end(WrongKeys(open("rxe0")?)), b: end(open("rxe1")?) }))
    }

    fn limits(&self) -> Limits {
        LIMITS
    }
}

fn report(fixture: &dyn Fixture) -> Outcome {
    let report = conformance::run(fixture);
    println!("{report}");
    if report.failed().next().is_none() { Ok(()) } else { Err("the suite found failures".into()) }
}

pub fn two_devices() -> Outcome {
    report(&Devices)
}

/// Device 0 in this process, device 1 in another process and network namespace.
struct Hosts(Mutex<End>);

impl Fixture for Hosts {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(open_on_host("rxe0")?), b: self.remote() })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Pair(Pair { a: end(WrongKeys(open_on_host("rxe0")?)), b: self.remote() }))
    }

    fn limits(&self) -> Limits {
        LIMITS
    }
}

impl Hosts {
    fn remote(&self) -> End {
        self.0.lock().unwrap().clone()
    }
}

pub fn two_hosts() -> Outcome {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let status = Command::new("ip").args(["netns", "exec", "host0"]).arg(program).arg("conform").status();
    match status {
        Ok(status) if status.success() => Ok(()),
        other => Err(format!("the suite on host 0: {other:?}")),
    }
}

/// On host 0: the suite, with the other end on host 1.
pub fn suite() -> Outcome {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut child = Command::new("ip")
        .args(["netns", "exec", "host1"])
        .arg(program)
        .args(["serve", "rxe1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
        return Err("host 1 has no pipes".into());
    };
    let outcome = report(&Hosts(Mutex::new(End::remote(BufReader::new(from), to))));
    // Its stream has ended with the fixture.
    let _ = child.wait();
    outcome
}

/// On host 1: works for the suite. Nothing else may be printed here.
pub fn serve(device: &str) -> Outcome {
    let transport = open_on_host(device).map_err(|error| error.to_string())?;
    let idle = Duration::from_secs(300);
    conformance::serve(&end(transport), BufReader::new(stdin()), stdout(), idle)
        .map_err(|error| error.to_string())
}
