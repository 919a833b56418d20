//! The `proxy` layer: what the engine costs, with nothing behind it.

mod latency;
mod load;
mod null_port;
mod payload;
mod throughput;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{LocalMemory, MemoryId, RemoteMemory};
use portway_proxy::{ChannelConfig, Config, Engine, PortChannel};

use crate::args::Args;
use crate::failure::Failure;
use crate::layer::Layer;
use crate::machine::Pinning;
use crate::rate::Plan;
use crate::report::{Control, Report, TimeUnit};
use crate::trial::{Phase, Trial};

use null_port::{Check, NullPort, Verdict};
use throughput::Shape;

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "the engine alone: software producers put, one thread steps it, a port that moves nothing",
    needs: "nothing",
    find: |_| Ok(run),
    flags: &["producers", "channels", "drain", "poll", "rate", "histogram", "unsorted"],
    transport: "null",
    unit: TimeUnit::Nanoseconds,
};

const NAME: &str = "proxy";

fn run(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let pinning = Pinning::new(&report.machine);
    let most = args.producers.iter().max().copied().unwrap_or(1);
    report.note(NAME, pinning.describe(most as usize).replace("consumer", "engine"));
    report.note(NAME, "the port accepts every put and completes it at the next poll");
    if args.check() {
        report.note(NAME, "the port verifies each put: lane, sequence, offsets, length; that is in proc");
    }
    report.results.extend(throughput::rows(args, &pinning)?);
    report.note(NAME, "push-flush = push of put, signal and flush in one trigger to the return of flush,");
    report.note(NAME, "which is a round trip: half of it");
    report.results.extend(latency::rows(args, &pinning)?);
    report.note(NAME, "load = puts due at a fixed rate by one thread; from due to completed by the port, lateness included:");
    report.note(NAME, "one way, not halved");
    report.results.extend(load::rows(args, &pinning)?);
    if args.check() {
        for control in controls(args, &pinning)? {
            report.control(control);
        }
    }
    Ok(())
}

/// Runs in which one put has a wrong offset, to see that the check finds it.
fn controls(args: &Args, pinning: &Pinning) -> Result<Vec<Control>, Failure> {
    const COUNT: u64 = 1000;
    let shape = Shape { producers: 1, channels: 4, drain: 32 };
    let plan = Plan { warmup: 0, iterations: COUNT, limit: args.deadline(), ..Plan::of(args, COUNT) };
    let corrupt = Some(COUNT / 4);
    let outcome = throughput::measure("proxy, negative control", &shape, &plan, true, corrupt, pinning)?;
    Ok(vec![
        Control::new(NAME, "throughput", 1, outcome.wrong.unwrap_or(0)),
        Control::new(NAME, "push-flush", 1, latency::run(args, Some(0), pinning)?.wrong),
        Control::new(NAME, "load", 1, load::offer(args, load::KOPS.0, Some(0), pinning)?.wrong),
    ])
}

/// Steps an engine until the trial is over and everything that was asked for is done, then shuts it down. `before` is called
/// at once before each step.
pub fn serve(engine: &mut Engine, trial: &Trial, mut before: impl FnMut()) -> Result<(), Failure> {
    let start = Instant::now();
    let mut wait = trial.wait("a trigger to arrive", 1);
    let mut under_way = 0;
    loop {
        let over = trial.phase() == Phase::Over;
        before();
        let step = engine.step(start.elapsed());
        under_way += step.triggers;
        under_way -= step.completions.min(under_way);
        if !step.is_idle() {
            wait.step(0)?;
        } else if over && under_way == 0 && engine.shut_down() {
            return Ok(());
        } else {
            std::hint::spin_loop();
            wait.look(0)?;
        }
    }
}

/// An engine with one FIFO and one null port.
struct Rig {
    engine: Engine,
    channels: Vec<PortChannel>,
    verdict: Verdict,
    /// How many ops the port has completed.
    completed: Arc<AtomicU64>,
}

/// An engine that takes `batch` triggers a step, with `channels` channels.
fn rig(
    channels: u64,
    batch: u64,
    check: Option<Check>,
    deadline: Duration,
) -> Result<Rig, portway_proxy::Error> {
    let max_channels = channels as usize;
    let config = Config { batch: batch as usize, max_channels, deadline, ..Config::default() };
    let mut engine = Engine::new(&Heap, config)?;
    let (fifo, consumer) =
        Fifo::new(&Heap, portway_fifo::Config { timeout: deadline, ..Default::default() })?;
    let fifo = engine.add_fifo(fifo, consumer)?;
    let verdict = Verdict::default();
    let port = NullPort::new(check, verdict.clone());
    let completed = port.completed();
    let port = engine.add_port(Box::new(port))?;
    // The port looks nothing up; the numbers only have to differ.
    let mut next = 0;
    let mut id = || {
        next += 1;
        MemoryId { transport: 0, index: next }
    };
    let mut channel = || {
        engine.add_channel(ChannelConfig {
            fifo,
            port,
            source: LocalMemory { id: id(), region: Heap.allocate(payload::SOURCE_LEN_BYTES)? },
            destination: RemoteMemory { id: id(), len_bytes: payload::DESTINATION_LEN_BYTES },
            outbound: RemoteMemory { id: id(), len_bytes: 8 },
            inbound: LocalMemory { id: id(), region: Heap.allocate(8)? },
        })
    };
    let channels = (0..channels).map(|_| channel()).collect::<Result<_, _>>()?;
    Ok(Rig { engine, channels, verdict, completed })
}
