//! The `ipc` layer: puts and signals between the GPUs of this machine, from kernel to kernel.

mod bandwidth;
pub mod kernels;
mod latency;
mod mesh;
mod messages;
mod pairs;
mod peer_copy;
mod plain;

use portway_fifo::cuda::Driver;
use portway_transport_ipc::WordPlace;

use crate::args::Args;
use crate::failure::Failure;
use crate::gpu;
use crate::layer::{Layer, Run};
use crate::machine::Pinning;
use crate::report::{Control, Report, TimeUnit};

use kernels::Gpus;
pub use pairs::MOST_RANKS;

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "the CUDA IPC transport: put and signal from kernel to kernel, and bandwidth",
    needs: "libcuda, NVRTC, and two GPUs or one twice",
    find,
    flags: &["begin", "end", "factor", "proxies", "gpus"],
    transport: "ipc",
    unit: TimeUnit::Microseconds,
};

const NAME: &str = "ipc";

/// The places of signal words that are compared.
const PLACES: [(WordPlace, &str); 2] =
    [(WordPlace::Pinned, "word in pinned memory"), (WordPlace::Device, "word on the device")];

fn find(_: &Args) -> Result<Run, String> {
    match Driver::load() {
        Ok(_) => Ok(run),
        Err(lacking) => Err(lacking.to_string()),
    }
}

fn run(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let pinning = Pinning::new(&report.machine);
    gpu::with(NAME, &pinning, report, |gpu, pinning, report| {
        let gpus = Gpus::open(gpu, args, pinning)?;
        report.note(NAME, gpus.describe());
        report.note(
            NAME,
            "latency, signal = there and back between two kernels, without what the second does between; half of",
        );
        report.note(
            NAME,
            "it, in cycles of each SM scaled by the global timer. Each end has an engine and an executor.",
        );
        report.note(
            NAME,
            "ref (us) = the floor: the same two kernels without FIFO and engine; a thread of the host sees a word,",
        );
        report.note(NAME, "submits one copy, then one written value");
        latency::rows(&gpus, report)?;
        report.note(
            NAME,
            "bandwidth = windows of puts that land side by side, a signal with the last, each from the first push",
        );
        report.note(
            NAME,
            "to the return of a flush. ref (GB/s) = the same copies by cuMemcpyPeerAsync in a loop of the host. GB/s of",
        );
        report.note(NAME, "both ways is the sum of both");
        bandwidth::rows(&gpus, report)?;
        report.note(
            NAME,
            "messages = puts with signals one way, 128 under way at most, each checked on sight of its signal; push by",
        );
        report.note(
            NAME,
            "the sender's clock, proc by the receiver's. ref = copies with a value behind each, in a loop",
        );
        messages::rows(&gpus, report)?;
        pairs::rows(&gpus, report)?;
        if args.check() {
            report.control(control(&gpus)?);
        }
        gpus.close()
    })
}

/// Runs in which one message has a flipped bit, to see that a kernel finds it.
fn control(gpus: &Gpus) -> Result<Control, Failure> {
    let found = latency::wrong_of_a_corrupted_run(gpus)?
        + bandwidth::wrong_of_a_corrupted_run(gpus)?
        + messages::wrong_of_a_corrupted_run(gpus)?;
    Ok(Control::new(NAME, "", 3, found))
}
