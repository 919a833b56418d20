//! The `fifo` layer: software producers against the consumer, beside a queue that the reader knows; and kernels.

pub mod gpu;
mod latency;
mod load;
mod payload;
mod queue;
mod throughput;

use crate::args::Args;
use crate::failure::Failure;
use crate::layer::Layer;
use crate::machine::Pinning;
use crate::rate::Plan;
use crate::report::{Control, Report, TimeUnit};

use payload::Corrupting;
use throughput::Shape;

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "the ring alone: software producers or kernels push, one thread drains",
    needs: "nothing, or a GPU for kernels",
    find: |_| Ok(run),
    flags: &[
        "producers",
        "depth",
        "batch",
        "drain",
        "rate",
        "proxies",
        "poll",
        "ctas",
        "threads",
        "histogram",
        "unsorted",
    ],
    transport: "",
    unit: TimeUnit::Nanoseconds,
};

const NAME: &str = "fifo";

/// What the reference is called in rows.
const REFERENCE: &str = "array-queue";

fn run(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let pinning = Pinning::new(&report.machine);
    let most = args.producers.iter().max().copied().unwrap_or(1);
    report.note(NAME, pinning.describe(most as usize));
    report.note(
        NAME,
        "ref = array-queue = crossbeam-queue's ArrayQueue: same payload, capacity, threads and check",
    );
    report.note(NAME, "ref pushes one at a time, for it has no batch; ratio = proc / ref, paired run by run");
    report.note(
        NAME,
        "ref depends on --poll: the oftener an idle consumer looks, the more it slows the producers",
    );
    report.results.extend(throughput::rows(args, &pinning)?);
    report.note(NAME, "push-pop = push to pop in another thread, by ping-pong over two queues");
    report.note(NAME, "push-sync = push to the return of sync, which is a round trip: half of it");
    report.results.extend(latency::rows(args, &pinning)?);
    report.note(NAME, "load = triggers due at a fixed rate by one thread; from due to synced, lateness included: a round trip,");
    report.note(NAME, "NOT half of it");
    report.results.extend(load::rows(args, &pinning)?);
    if args.check() {
        for control in controls(args, &pinning)? {
            report.control(control);
        }
    }
    gpu::run(args, &pinning, report)
}

/// Runs in which one payload is corrupted, to see that each check finds it.
fn controls(args: &Args, pinning: &Pinning) -> Result<Vec<Control>, Failure> {
    const COUNT: u64 = 1000;
    let shape = Shape { producers: 1, slots: 64, batch: 1, drain: 32 };
    let deadline = args.deadline();
    let plan = Plan { warmup: 0, iterations: COUNT, limit: deadline, ..Plan::of(args, COUNT) };
    let name = "fifo, negative control";
    let (senders, receiver) = queue::fifo(shape.slots, shape.producers, deadline)
        .map_err(|source| Failure::Fifo { measurement: name.into(), source })?;
    let senders = senders.into_iter().map(|sender| Corrupting::new(sender, COUNT / 4)).collect();
    let outcome = throughput::measure(name, (senders, receiver), &shape, &plan, true, pinning)?;
    let mut controls = vec![Control::new(NAME, "throughput", 1, outcome.wrong.unwrap_or(0))];
    controls.extend(latency::controls(args, pinning)?);
    controls.push(Control::new(NAME, "load", 1, load::offer(args, load::KOPS.0, Some(0), pinning)?.wrong));
    Ok(controls)
}
