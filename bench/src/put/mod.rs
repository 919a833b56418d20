//! The `put` layer: the whole stack, from the put of one end to the signal and the data at the other.

pub mod gpu;
pub mod latency;
mod pattern;
mod reference;
pub mod side;
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
    flags: &["begin", "end", "factor"],
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
    if args.check() {
        report.control(control(args, &pinning)?);
    }
    gpu::run(args, &pinning, report)
}

/// Runs in which one payload has a flipped bit, and one signal comes without its data, to see that both are found.
fn control(args: &Args, pinning: &Pinning) -> Result<Control, Failure> {
    let mut args = args.clone();
    args.iterations = Some(100);
    let mut found = 0;
    for spoil in [Spoil::FlippedBit, Spoil::NoData] {
        let (_, wrong) = latency::round_trips(&args, 64, Some((spoil, 0)), pinning)?;
        found += wrong;
    }
    Ok(Control { layer: NAME.into(), corrupted: 2, found })
}
