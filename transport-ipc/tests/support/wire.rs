//! [`Wire`]: two connected ends in one process, for tests that call ports themselves.
#![allow(dead_code, reason = "each test uses its part")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use portway_fifo::cuda::{Context, Driver, Kind};
use portway_fifo::{Region, Words};
use portway_proxy::TransportError;
use portway_proxy::transport::{
    Binding, Close, Completion, Lane, LocalMemory, Op, Port, Put, RemoteMemory, Submit, Transport,
};
use portway_transport_ipc::{Config, Ipc};

use crate::libcuda::Standin;

/// How long a test waits for what has to happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for a condition; panics with what was awaited and what was seen if it does not come.
pub fn wait_until<T: std::fmt::Debug>(
    what: &str,
    mut see: impl FnMut() -> T,
    enough: impl Fn(&T) -> bool,
) -> T {
    let start = Instant::now();
    loop {
        let seen = see();
        if enough(&seen) {
            return seen;
        }
        assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}, saw {seen:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A stand-in with contexts of its two devices.
pub struct Machine {
    pub standin: Arc<Standin>,
    pub driver: Arc<Driver>,
    pub contexts: [Context; 2],
}

impl Machine {
    pub fn new() -> Self {
        let standin = Arc::new(Standin::new());
        let driver = Driver::open(standin.path()).unwrap();
        let contexts = [0, 1].map(|ordinal| Context::new(&driver, ordinal).unwrap());
        Machine { standin, driver, contexts }
    }

    /// Two transports that know each other.
    pub fn transports(&self, config: Config) -> [Ipc; 2] {
        let near = Ipc::open(&self.contexts[0], config).unwrap();
        let far = near.beside(&self.contexts[1]).unwrap();
        [near, far]
    }

    /// Two ends with a lane from the first to the second.
    pub fn wire(&self, transports: &[Ipc; 2]) -> Wire {
        Wire::between(transports, &self.contexts)
    }
}

/// Two ports, and a lane from the first to the second.
pub struct Wire {
    pub a: Box<dyn Port>,
    pub b: Box<dyn Port>,
    pub source: LocalMemory,
    pub destination: LocalMemory,
    pub word: LocalMemory,
    pub remotes: [RemoteMemory; 2],
    pub lane: Lane,
    sequence: u64,
}

pub const LEN_BYTES: u64 = 64 << 10;

impl Wire {
    pub fn between(transports: &[Ipc; 2], contexts: &[Context; 2]) -> Self {
        Wire::over(transports, contexts, Kind::Legacy)
    }

    /// The same over memory of this kind.
    pub fn over(transports: &[Ipc; 2], contexts: &[Context; 2], kind: Kind) -> Self {
        let [near, far] = transports;
        let ([a_end, b_end], [a_bytes, b_bytes]) = {
            let ((a, a_bytes), (b, b_bytes)) = (near.endpoint().unwrap(), far.endpoint().unwrap());
            ([a, b], [a_bytes, b_bytes])
        };
        let (mut a, b) =
            (a_end.connect(&b_bytes, PATIENCE).unwrap(), b_end.connect(&a_bytes, PATIENCE).unwrap());
        let source = near.register(&contexts[0].allocate(kind, LEN_BYTES).unwrap()).unwrap();
        let destination = far.register(&contexts[1].allocate(kind, LEN_BYTES).unwrap()).unwrap();
        let word = far.signal_word().unwrap();
        let remotes = [&destination, &word].map(|memory| near.import(&far.export(memory).unwrap()).unwrap());
        let binding = Binding { source: source.id, destination: remotes[0].id, signal: remotes[1].id };
        let lane = a.bind(&binding).unwrap();
        Wire { a, b, source, destination, word, remotes, lane, sequence: 0 }
    }

    pub fn op(&mut self, put_len_bytes: u64, signal: Option<u64>, flush: bool) -> Op {
        let put = (put_len_bytes > 0).then_some(Put {
            source_offset_bytes: 0,
            destination_offset_bytes: 0,
            len_bytes: put_len_bytes,
        });
        let sequence = self.sequence;
        self.sequence += 1;
        Op { lane: self.lane, sequence, put, signal, flush }
    }

    /// Submits an op and releases it.
    pub fn submit(&mut self, put_len_bytes: u64, signal: Option<u64>, flush: bool) {
        let op = self.op(put_len_bytes, signal, flush);
        assert_eq!(self.a.submit(&op).unwrap(), Submit::Accepted);
        self.a.kick().unwrap();
    }

    /// Polls until so many ops are complete.
    pub fn complete(&mut self, count: usize) {
        let mut seen = 0;
        let port = &mut self.a;
        wait_until(
            "completions",
            || {
                seen += poll(&mut **port).unwrap();
                seen
            },
            |seen| *seen >= count,
        );
        assert_eq!(seen, count);
    }

    /// Polls until the port fails.
    pub fn failure(&mut self) -> TransportError {
        let port = &mut self.a;
        wait_until("the port's error", || poll(&mut **port).err(), Option::is_some).unwrap()
    }

    pub fn word_value(&self) -> u64 {
        value(&self.word.region)
    }

    /// Closes both ports until they are quiesced.
    pub fn close(&mut self) {
        for port in [&mut self.a, &mut self.b] {
            close(&mut **port);
        }
    }
}

pub fn close(port: &mut dyn Port) {
    wait_until("a quiesced port", || port.close().unwrap(), |close| *close == Close::Quiesced);
}

pub fn poll(port: &mut dyn Port) -> Result<usize, TransportError> {
    let none = Completion { lane: Lane(u32::MAX), sequence: u64::MAX };
    port.poll(&mut [none; 16])
}

/// A word of memory, wherever it lies.
pub fn value(region: &Region) -> u64 {
    if region.place().is_host() {
        return Words::new(region.clone()).unwrap()[0].load(Ordering::Acquire);
    }
    let mut bytes = [0; 8];
    region.read(0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}
