//! The `ipc` layer: puts and signals between the GPUs of this machine, from kernel to kernel.

mod bandwidth;
mod gate;
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
use crate::report::{Report, TimeUnit};

use kernels::Gpus;
pub use pairs::MOST_RANKS;

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "the CUDA IPC transport: put and signal from kernel to kernel, and bandwidth",
    needs: "libcuda, NVRTC, and two GPUs or one twice",
    find,
    flags: &["begin", "end", "factor", "proxies", "gpus", "histogram", "unsorted"],
    transport: "ipc",
    unit: TimeUnit::Microseconds,
};

const NAME: &str = "ipc";

/// The places of signal words that are compared.
const PLACES: [(WordPlace, &str); 2] =
    [(WordPlace::Pinned, "word in pinned memory"), (WordPlace::Device, "word on the device")];

const NOTES: [&str; 13] = [
    "latency, signal = there and back between two kernels, without what the second does between; half of it, in",
    "cycles of each SM scaled by the global timer. Each end has an engine and an executor. After each wait the signal",
    "word must count no signal more than were waited for; a message is checked whole. ref (us) = the floor: the",
    "same two kernels without FIFO and engine; a thread of the host sees a word, submits one copy, then one written",
    "value",
    "bandwidth = windows of puts that land side by side, a signal with the last, each from the first push to the",
    "last (push) and to the return of a flush (proc, bw), and of both ways to the peer's signal as well; both ways",
    "is the sum of both. Of 64K to 256M unless the command line has sizes. ref (GB/s) = the same copies by",
    "cuMemcpyPeerAsync in a loop of the host",
    "messages = puts with signals one way, of the smallest size, 128 under way at most, each checked on sight of its",
    "signal; push by the sender's clock, proc by the receiver's. ref = copies with a value behind each, in a loop",
    "cold = the first round trip or window of each run, ramp = those between, warm = those that count; messages",
    "stream, so all before the counted ones are ramp",
];

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
        for note in NOTES {
            report.note(NAME, note);
        }
        latency::rows(&gpus, report)?;
        bandwidth::rows(&gpus, report)?;
        messages::rows(&gpus, report)?;
        pairs::rows(&gpus, report)?;
        if args.check() {
            latency::controls(&gpus)?.into_iter().for_each(|control| report.control(control));
            report.control(bandwidth::control(&gpus)?);
            report.control(messages::control(&gpus)?);
        }
        gpus.close()
    })
}
