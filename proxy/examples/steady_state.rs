//! The engine's steady state and nothing else: `steady_state COUNT [control]` takes COUNT triggers in batches of 32 and hands
//! them to a port that accepts and completes everything. Everything else it does is the same for every COUNT, so the
//! difference of two runs belongs to the triggers alone. It writes a line before and after, for whoever traces its
//! system calls; as a control it makes some in between.

use std::process::ExitCode;
use std::time::Duration;

use portway_fifo::{Config, Fifo, Heap};
use portway_proxy::transport::{
    Binding, Close, Completion, Lane, LocalMemory, MemoryId, Op, Port, RemoteMemory, Submit,
};
use portway_proxy::{ChannelConfig, Engine, TransportError};

/// Triggers that wait in the ring, so that no push runs beside the steps.
const PUSHED: u64 = 1 << 16;

/// Accepts every op and completes it at the next poll.
#[derive(Debug, Default)]
struct Obliging {
    lanes: u32,
    sent: u64,
    complete: u64,
}

impl Port for Obliging {
    fn bind(&mut self, _: &Binding) -> Result<Lane, TransportError> {
        self.lanes += 1;
        Ok(Lane(self.lanes - 1))
    }

    fn submit(&mut self, op: &Op) -> Result<Submit, TransportError> {
        self.sent = op.sequence + 1;
        Ok(Submit::Accepted)
    }

    fn kick(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> Result<usize, TransportError> {
        let mut count = 0;
        while self.complete < self.sent && count < completions.len() {
            completions[count] = Completion { lane: Lane(0), sequence: self.complete };
            self.complete += 1;
            count += 1;
        }
        Ok(count)
    }

    fn close(&mut self) -> Result<Close, TransportError> {
        Ok(Close::Quiesced)
    }
}

fn run(count: u64, is_control: bool) -> Result<(), Box<dyn std::error::Error>> {
    let mut engine = Engine::new(&Heap, Default::default())?;
    let (fifo, consumer) = Fifo::new(&Heap, Config { slots: PUSHED, ..Config::default() })?;
    let fifo = engine.add_fifo(fifo, consumer)?;
    let port = engine.add_port(Box::new(Obliging::default()))?;
    let memory = |index, len_bytes| {
        let id = MemoryId { transport: 0, index };
        Ok::<_, portway_fifo::Error>(LocalMemory { id, region: Heap.allocate(len_bytes)? })
    };
    let channel = engine.add_channel(ChannelConfig {
        fifo,
        port,
        source: memory(0, 1 << 20)?,
        destination: RemoteMemory { id: MemoryId { transport: 0, index: 1 }, len_bytes: 1 << 20 },
        outbound: RemoteMemory { id: MemoryId { transport: 0, index: 2 }, len_bytes: 8 },
        inbound: memory(3, 8)?,
    })?;
    let producer = channel.producer()?;
    for n in 0..PUSHED {
        producer.put_signal(n * 8, n * 4, 8)?;
    }
    let mut taken = 0;
    eprintln!("steady state begins");
    for step in 0..count / 32 {
        taken += engine.step(Duration::from_nanos(step)).triggers;
        if is_control {
            std::thread::yield_now();
        }
    }
    eprintln!("steady state ends");
    if taken != count {
        return Err(format!("took {taken} triggers instead of {count}").into());
    }
    let stats = engine.stats();
    if (stats.completions, stats.publishes) != (count, count / 32) {
        return Err(format!("{count} triggers in batches of 32 came to {stats:?}").into());
    }
    Ok(())
}

fn main() -> ExitCode {
    let count = std::env::args().nth(1).and_then(|word| word.parse().ok());
    let Some(count) = count.filter(|count: &u64| *count <= PUSHED && count % 32 == 0) else {
        eprintln!("usage: steady_state COUNT [control], COUNT a multiple of 32 and at most {PUSHED}");
        return ExitCode::from(2);
    };
    let is_control = std::env::args().nth(2).is_some_and(|word| word == "control");
    match run(count, is_control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("steady_state: {error}");
            ExitCode::FAILURE
        }
    }
}
