//! [`Peer`]: another process that has exported what it has, and is killed.

use std::io::{BufRead, BufReader, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use portway_fifo::cuda::{Context, Driver, Kind};
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, Close, Completion, Lane, Op, Port, Put, Transport};
use portway_transport_ipc::{Config, Ipc};

use crate::support::Other;

/// How long a test waits for what has to happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of a memory, and of each put to it.
const LEN_BYTES: u64 = 1 << 20;

/// Bytes as a line of text, and back.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let text = text.trim().as_bytes();
    text.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// The child: exports a memory of each kind, a word and an endpoint, a line each, and connects to the endpoint that it
/// reads. Then it waits to be killed.
pub fn child(driver: &Arc<Driver>, ordinal: u32) -> ! {
    let context = Context::new(driver, ordinal).unwrap();
    let ipc = Ipc::open(&context, Config::default()).unwrap();
    let mut out = std::io::stderr();
    let mut kept = Vec::new();
    for kind in [Kind::Vmm, Kind::Legacy] {
        let memory = ipc.register(&context.allocate(kind, LEN_BYTES).unwrap()).unwrap();
        writeln!(out, "{}", hex(&ipc.export(&memory).unwrap())).unwrap();
        kept.push(memory);
    }
    let word = ipc.signal_word().unwrap();
    writeln!(out, "{}", hex(&ipc.export(&word).unwrap())).unwrap();
    let (endpoint, bytes) = ipc.endpoint().unwrap();
    writeln!(out, "{}", hex(&bytes)).unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    if line.is_empty() {
        std::process::exit(0);
    }
    let _port = endpoint.connect(&unhex(&line), PATIENCE).unwrap();
    writeln!(out, "connected").unwrap();
    // The end of its input is the end of the test; it is killed before.
    let _ = std::io::stdin().read_line(&mut line);
    std::process::exit(0);
}

/// See the module.
pub struct Peer {
    other: Other,
    lines: BufReader<std::process::ChildStderr>,
    pub vmm: Vec<u8>,
    pub legacy: Vec<u8>,
    pub word: Vec<u8>,
    pub endpoint: Vec<u8>,
}

impl Peer {
    /// Starts this program again, for the test of this name, which calls [`child`].
    pub fn start(test: &str, argument: &str) -> Self {
        let mut other = Other::start(test, argument);
        let mut lines = BufReader::new(other.0.stderr.take().unwrap());
        let mut next = || unhex(&next_line(&mut lines));
        let [vmm, legacy, word, endpoint] = [next(), next(), next(), next()];
        Peer { other, lines, vmm, legacy, word, endpoint }
    }

    pub fn kill(&mut self) {
        self.other.0.kill().unwrap();
        self.other.0.wait().unwrap();
    }
}

fn next_line(lines: &mut impl BufRead) -> String {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    line
}

/// Puts to a peer, which is killed meanwhile: the port fails with its name, and everything can be taken back. `hold` may keep what is
/// submitted from being done.
pub fn killed_in_the_middle_of_a_put(
    test: &str,
    argument: &str,
    context: &Context,
    legacy: bool,
    hold: impl Fn(bool),
) {
    let ipc = Ipc::open(context, Config::default()).unwrap();
    let mut peer = Peer::start(test, argument);
    let (endpoint, bytes) = ipc.endpoint().unwrap();
    writeln!(peer.other.0.stdin.as_mut().unwrap(), "{}", hex(&bytes)).unwrap();
    let mut port = endpoint.connect(&peer.endpoint, PATIENCE).unwrap();
    assert_eq!(next_line(&mut peer.lines), "connected\n");
    let source = ipc.register(&context.allocate(Kind::Vmm, LEN_BYTES).unwrap()).unwrap();
    let destination = ipc.import(if legacy { &peer.legacy } else { &peer.vmm }).unwrap();
    let signal = ipc.import(&peer.word).unwrap();
    let binding = Binding { source: source.id, destination: destination.id, signal: signal.id };
    let lane = port.bind(&binding).unwrap();
    port.submit(&put(lane, 0)).unwrap();
    port.kick().unwrap();
    let start = Instant::now();
    while poll(&mut *port).unwrap() == 0 {
        assert!(start.elapsed() < PATIENCE, "the first put is not complete");
    }
    hold(true);
    for sequence in 1..=100 {
        port.submit(&put(lane, sequence)).unwrap();
    }
    port.kick().unwrap();
    let start = Instant::now();
    peer.kill();
    let error = loop {
        match poll(&mut *port) {
            Ok(_) => assert!(start.elapsed() < PATIENCE, "the port has not noticed"),
            Err(error) => break error,
        }
    };
    match &error {
        TransportError::Remote { peer: name, .. } => {
            let process = format!("process {} ", peer.other.0.id());
            assert!(name.contains(&process) && name.contains("has ended"), "{name}");
        }
        other => panic!("{other:?}"),
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    hold(false);
    let start = Instant::now();
    while port.close().unwrap() != Close::Quiesced {
        assert!(start.elapsed() < PATIENCE, "the port is not quiesced");
    }
    ipc.release(&source).unwrap();
    for remote in [&destination, &signal] {
        ipc.forget(remote).unwrap();
    }
}

fn poll(port: &mut dyn Port) -> Result<usize, TransportError> {
    port.poll(&mut [Completion { lane: Lane(0), sequence: 0 }; 16])
}

fn put(lane: Lane, sequence: u64) -> Op {
    let put = Put { source_offset_bytes: 0, destination_offset_bytes: 0, len_bytes: LEN_BYTES };
    Op { lane, sequence, put: Some(put), signal: Some(sequence + 1), flush: true }
}
