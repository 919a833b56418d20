//! The `put` layer: the whole stack, from the put of one end to the signal and the data at the other.

pub mod gpu;
pub mod latency;
pub mod load;
mod pattern;
mod reference;
pub mod side;
pub mod stages;
mod stamped;
pub mod throughput;
pub mod wired;

use crate::args::Args;
use crate::failure::Failure;
use crate::layer::Layer;
use crate::machine::Pinning;
use crate::report::{Control, Report, TimeUnit};

use latency::Spoil;

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "the whole stack over the loopback transport: put and signal, until the peer has both",
    needs: "nothing, or a GPU for kernels",
    find: |_| Ok(run),
    flags: &["begin", "end", "factor", "rate", "stages", "threads", "histogram", "unsorted"],
    transport: "loopback",
    unit: TimeUnit::Microseconds,
};

const NAME: &str = "put";

fn run(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let pinning = Pinning::new(&report.machine);
    report.note(NAME, pinning.describe(1).replace("consumer", "engine").replace("producers", "both ends"));
    report.note(NAME, "one thread plays both ends, which never run at the same time; one engine serves both");
    report.note(
        NAME,
        "latency = put and signal there, wait, put and signal back, wait: half of the round trip;",
    );
    report.note(
        NAME,
        "filling and checking the bytes is not in it. ref = half of a ping-pong of two threads over",
    );
    report.note(NAME, "two atomics, which crosses between cores once a way; put and signal does so twice");
    report.results.extend(latency::rows(args, &pinning)?);
    report.note(
        NAME,
        "throughput = windows of puts with signals, each from the first push to the last signal seen;",
    );
    report.note(NAME, "checked between the windows. ref = memcpy over the same window, by one thread");
    report.results.extend(throughput::rows(args, &pinning)?);
    report.note(
        NAME,
        "load = puts with signals due at a fixed rate, of the smallest size; from due to the signal seen by the",
    );
    report.note(NAME, "peer, lateness included: ONE WAY, not halved");
    report.results.extend(load::rows(args, &pinning)?);
    if args.stages {
        report.note(NAME, "stages: push = the call; pop = the step of the engine began that took the trigger, or the push where that step was");
        report.note(NAME, "under way; post = the port was offered the put; seen = the peer's wait returned. They come to the whole. The");
        report.note(NAME, "completion is polled while the signal is on its way, so it is beside them. All by the processor's one clock, in the");
        report.note(NAME, "bench's own transport and loop around the engine; ref = the whole without stamps; share is of mean times");
        report.results.extend(stages::rows(args, &pinning)?);
    }
    if args.check() {
        for control in controls(args, &pinning)? {
            report.control(control);
        }
    }
    gpu::run(args, &pinning, report)
}

/// Runs in which one payload has a flipped bit, and one signal comes without its data, to see that both are found.
fn controls(args: &Args, pinning: &Pinning) -> Result<Vec<Control>, Failure> {
    let mut args = args.clone();
    args.iterations = Some(100);
    let mut latency = 0;
    for spoil in [Spoil::FlippedBit, Spoil::NoData] {
        latency += latency::round_trips(&args, 64, Some((spoil, 0)), pinning)?.wrong;
    }
    let (throughput, _) = throughput::measure(&args, 64, Some(0), pinning)?;
    let load = load::offer(&args, 64, load::KOPS.0, Some(0), pinning)?;
    let stages = args.stages.then(|| stages::control(&args, pinning)).transpose()?;
    let controls = vec![
        Control::new(NAME, "latency", 2, latency),
        Control::new(NAME, "throughput", 1, throughput.wrong.unwrap_or(0)),
        Control::new(NAME, "load", 1, load.wrong),
    ];
    Ok(controls.into_iter().chain(stages).collect())
}
