//! The `fifo` layer with kernels as producers.

mod latency;
mod load;
mod throughput;

use bytemuck::bytes_of;
use portway_fifo::{Config, Consumer, Fifo};

use super::NAME;
use super::payload::Check;
use crate::args::Args;
use crate::failure::Failure;
use crate::gpu::{self, Gpu};
use crate::load::kernel::{KERNELS, Sent};
use crate::machine::Pinning;
use crate::report::Report;

/// The kernels behind the text that they share with others.
pub fn kernels() -> String {
    [KERNELS, include_str!("../../../device/fifo.cu")].concat()
}

/// Rings unless `--depth` says otherwise.
const DEPTH: &[u64] = &[512, 2048];

/// Measures, if there is a GPU.
pub fn run(args: &Args, pinning: &Pinning, report: &mut Report) -> Result<(), Failure> {
    gpu::with(NAME, pinning, report, |gpu, pinning, report| {
        let module = gpu.module("fifo.cu", &kernels()).map_err(|source| Failure::gpu("fifo.cu", source))?;
        let step_ns = timer_step(gpu, args, &module)?;
        report.note(NAME, format!("gpu: its global timer steps by {step_ns} ns"));
        let bench = Bench { gpu, module: &module, args, pinning };
        report.note(
            NAME,
            "gpu-throughput: each run ends by -D; proc by the consumer's clock, push by the GPU's; the sum",
        );
        report.note(
            NAME,
            "of all triggers is verified in each run, every trigger and its order in one more run before",
        );
        report.results.extend(throughput::rows(&bench)?);
        report.note(
            NAME,
            "gpu-push-sync: by one thread, half of it, in cycles of the SM scaled by the global timer; ref =",
        );
        report.note(
            NAME,
            "half of a ping-pong between the thread and the consumer's core over two pinned words",
        );
        report.results.extend(latency::rows(&bench)?);
        report.note(NAME, "gpu-load: triggers due at a fixed rate; time = from due to the return of sync, lateness included,");
        report.note(
            NAME,
            "by the global timer, for the clocks of GPU and processor cannot be compared: a round trip, NOT",
        );
        report.note(NAME, "half of it");
        report.results.extend(load::rows(&bench)?);
        if args.check() {
            report.control(throughput::control(&bench)?);
            report.control(latency::control(&bench)?);
            report.control(load::control(&bench)?);
        }
        Ok(())
    })
}

/// What every measurement needs.
struct Bench<'a> {
    gpu: &'a Gpu,
    module: &'a portway_fifo::cuda::Module,
    args: &'a Args,
    pinning: &'a Pinning,
}

impl Bench<'_> {
    fn fifo(&self, measurement: &str, slots: u64) -> Result<(Fifo, Consumer), Failure> {
        let config = Config { slots, timeout: self.args.deadline(), ..Config::default() };
        Fifo::new(&self.gpu.context, config).map_err(|source| Failure::gpu(measurement, source))
    }
}

/// What the consumer verifies.
#[derive(Debug)]
enum Verify {
    /// Every trigger and its place.
    All(Check),
    /// How many there are and what their words come to.
    Sum { count: u64, sum: u64 },
}

impl Verify {
    #[inline]
    fn see(&mut self, words: [u64; 2]) {
        match self {
            Verify::All(check) => check.see(words),
            Verify::Sum { count, sum } => {
                *count += 1;
                // `weight` of the kernels.
                *sum = sum.wrapping_add(words[0]).wrapping_add(words[1].wrapping_mul(3));
            }
        }
    }

    /// The mistakes.
    fn finish(&self, sent: &[Sent]) -> u64 {
        match self {
            Verify::All(check) => check.finish(&sent.iter().map(|sent| sent.count).collect::<Vec<_>>()),
            Verify::Sum { count, sum } => {
                let all: u64 = sent.iter().map(|sent| sent.count).sum();
                let right = sent.iter().fold(0u64, |sum, sent| sum.wrapping_add(sent.sum));
                all.abs_diff(*count).max((right != *sum).into())
            }
        }
    }
}

/// The smallest step of the GPU's global timer, in nanoseconds.
fn timer_step(gpu: &Gpu, args: &Args, module: &portway_fifo::cuda::Module) -> Result<u64, Failure> {
    let failed = |source| Failure::gpu("timer_step", source);
    let kernel = gpu::function(module, "timer_step")?;
    let memory = gpu.memory::<u64>(1).map_err(failed)?;
    let address = memory.address();
    // SAFETY: the kernel takes this parameter, and the memory outlives it.
    unsafe { kernel.launch(gpu.stream(), [1; 3], [1; 3], 0, &[bytes_of(&address)]) }.map_err(failed)?;
    gpu.wait(args.deadline()).map_err(failed)?;
    gpu.read::<u64>(&memory, 1).map(|step| step.iter().sum()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::super::payload::trigger;
    use super::*;

    #[test]
    fn both_checks_find_mistakes() {
        let sent = |count, sum| [Sent { count, sum, start_ns: 0, end_ns: 0, status: 0 }];
        let all: Vec<_> = (0..5).map(|n| trigger(0, n).words()).collect();
        let sum = all.iter().fold(0u64, |sum, [a, b]| sum.wrapping_add(*a).wrapping_add(b.wrapping_mul(3)));
        let wrong = |words: &[[u64; 2]]| {
            [Verify::All(Check::new(1)), Verify::Sum { count: 0, sum: 0 }].map(|mut verify| {
                words.iter().for_each(|words| verify.see(*words));
                verify.finish(&sent(5, sum))
            })
        };
        assert_eq!(wrong(&all), [0, 0]);
        assert_eq!(wrong(&all[..4]), [1, 1]);
        let mut flipped = all.clone();
        flipped[2][1] ^= 1;
        assert_eq!(wrong(&flipped), [1, 1]);
    }
}
