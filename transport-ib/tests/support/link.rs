//! [`Link`]: two ends of a connection, driven by the test.

use std::time::{Duration, Instant};

use portway_fifo::{Heap, Region};
use portway_proxy::TransportError;
use portway_proxy::transport::{
    Binding, Close, Completion, Lane, LocalMemory, Op, Port, Put, Submit, Transport,
};
use portway_transport_ib::Ib;

/// Longer than anything here takes, so that a hang becomes a failure.
pub const LIMIT: Duration = Duration::from_secs(20);

/// The two ports of a connection.
pub type Ports = (Box<dyn Port>, Box<dyn Port>);

/// Connects two ends.
pub fn connect(a: &Ib, b: &Ib) -> Result<Ports, TransportError> {
    let (a_end, a_bytes) = a.endpoint()?;
    let (b_end, b_bytes) = b.endpoint()?;
    Ok((a_end.connect(&b_bytes, LIMIT)?, b_end.connect(&a_bytes, LIMIT)?))
}

/// A connection with one way, from `a` to `b`.
#[derive(Debug)]
pub struct Link {
    pub a: Box<dyn Port>,
    pub b: Box<dyn Port>,
    pub source: LocalMemory,
    pub destination: LocalMemory,
    pub signal: LocalMemory,
    pub lane: Lane,
    pub next: u64,
    pub complete: Vec<u64>,
}

impl Link {
    pub fn new(a: &Ib, b: &Ib, len_bytes: u64) -> Link {
        let region = || Heap.allocate(len_bytes).unwrap();
        Link::with(a, b, &region(), &region())
    }

    pub fn with(a: &Ib, b: &Ib, source: &Region, destination: &Region) -> Link {
        let (mut a_port, b_port) = connect(a, b).unwrap();
        let source = a.register(source).unwrap();
        let destination = b.register(destination).unwrap();
        let signal = b.signal_word().unwrap();
        let import = |memory| a.import(&b.export(memory).unwrap()).unwrap().id;
        let binding =
            Binding { source: source.id, destination: import(&destination), signal: import(&signal) };
        let lane = a_port.bind(&binding).unwrap();
        Link { a: a_port, b: b_port, source, destination, signal, lane, next: 0, complete: Vec::new() }
    }

    pub fn op(&mut self, put: Option<(u64, u64, u64)>, signal: Option<u64>, flush: bool) -> Op {
        let put = put.map(|(source_offset_bytes, destination_offset_bytes, len_bytes)| Put {
            source_offset_bytes,
            destination_offset_bytes,
            len_bytes,
        });
        Op { lane: self.lane, sequence: self.next, put, signal, flush }
    }

    /// Offers an op once.
    pub fn offer(
        &mut self,
        put: Option<(u64, u64, u64)>,
        signal: Option<u64>,
        flush: bool,
    ) -> Result<Submit, TransportError> {
        let op = self.op(put, signal, flush);
        let answer = self.a.submit(&op)?;
        if answer == Submit::Accepted {
            self.next += 1;
        }
        Ok(answer)
    }

    pub fn poll(&mut self) -> Result<usize, TransportError> {
        let mut room = [Completion { lane: Lane(0), sequence: 0 }; 16];
        let count = self.a.poll(&mut room)?;
        self.complete.extend(room[..count].iter().map(|completion| completion.sequence));
        Ok(count)
    }

    /// Kicks and polls until so many ops are complete, or the port fails.
    pub fn until_complete(&mut self, ops: usize) -> Result<(), TransportError> {
        self.a.kick()?;
        let start = Instant::now();
        while self.complete.len() < ops {
            self.poll()?;
            assert!(start.elapsed() < LIMIT, "{} of {ops} ops complete after {LIMIT:?}", self.complete.len());
        }
        Ok(())
    }

    /// The error of one of the ports, which has to come.
    pub fn error_of(port: &mut dyn Port) -> TransportError {
        let start = Instant::now();
        loop {
            if let Err(error) = port.poll(&mut [Completion { lane: Lane(0), sequence: 0 }; 16]) {
                return error;
            }
            assert!(start.elapsed() < LIMIT, "the port has not failed after {LIMIT:?}");
            std::thread::yield_now();
        }
    }

    pub fn word(&self) -> u64 {
        let mut bytes = [0; 8];
        self.signal.region.read(0, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }
}

/// Closes a port until it is quiesced.
pub fn close(port: &mut dyn Port) {
    let start = Instant::now();
    while port.close().unwrap() == Close::Pending {
        assert!(start.elapsed() < LIMIT, "the port is not quiesced after {LIMIT:?}");
        std::thread::yield_now();
    }
}
