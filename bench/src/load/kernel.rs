//! Loads that a kernel offers, by many threads that take turns.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::cuda::Module;

use super::{Pace, Run};
use crate::args::Args;
use crate::failure::Failure;
use crate::gpu::{self, Gpu};
use crate::machine::Pinning;
use crate::rate::mops;

/// What kernels that offer a load share; it goes before them.
pub const KERNELS: &str = include_str!("../../device/load.cu");

/// Blocks of one thread each, for each multiprocessor: enough that their round trips do not limit the rate.
const BLOCKS_OF_EACH: u64 = 8;

/// The blocks of a load.
pub fn blocks(gpu: &Gpu) -> u64 {
    u64::from(gpu.context.attributes().multiprocessors) * BLOCKS_OF_EACH
}

/// What a thread has sent: `Sent` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Sent {
    pub count: u64,
    pub sum: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub status: u64,
}

impl Sent {
    /// Nanoseconds from the first start to the last end.
    pub fn duration_ns(all: &[Sent]) -> u64 {
        let start = all.iter().map(|sent| sent.start_ns).min().unwrap_or(0);
        let end = all.iter().map(|sent| sent.end_ns).max().unwrap_or(0);
        end.saturating_sub(start)
    }
}

/// `Offer` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Offer {
    start: u64,
    period_ps: u64,
    each: u64,
    limit_ns: u64,
    samples: u64,
    sent: u64,
}

const _: () = assert!(size_of::<Sent>() == 40 && size_of::<Offer>() == 48);

/// What a load is offered with.
pub struct Bench<'a> {
    pub gpu: &'a Gpu,
    pub module: &'a Module,
    pub args: &'a Args,
    pub pinning: &'a Pinning,
}

/// One run of the kernel `name`, which takes these parameters and the offer behind them, while `serve` serves it: what each
/// thread sent, and what `serve` returned. The run has no mistakes yet.
pub fn offer<T: Send>(
    bench: &Bench,
    measurement: &str,
    kops: u64,
    name: &str,
    parameters: &[&[u8]],
    serve: impl FnOnce(&AtomicBool) -> T + Send,
) -> Result<(Run, Vec<Sent>, T), Failure> {
    let Bench { gpu, module, args, pinning } = bench;
    let failed = |source| Failure::gpu(measurement, source);
    let [set_start, kernel] = [gpu::function(module, "set_start")?, gpu::function(module, name)?];
    let (pace, blocks) = (Pace::new(args, kops), blocks(gpu));
    let each = pace.all.div_ceil(blocks);
    let start = gpu.memory::<u64>(1).map_err(failed)?;
    let samples = gpu.memory::<u32>(each * blocks).map_err(failed)?;
    let memory = gpu.memory::<Sent>(blocks).map_err(failed)?;
    let offer = Offer {
        start: start.address(),
        period_ps: pace.period_ps,
        each,
        limit_ns: pace.limit.as_nanos() as u64,
        samples: samples.address(),
        sent: memory.address(),
    };
    let parameters: Vec<&[u8]> = parameters.iter().copied().chain([bytes_of(&offer)]).collect();
    let served = gpu.run(
        measurement,
        args.deadline(),
        pinning,
        |stream| {
            // SAFETY: the kernel takes this parameter; its memory outlives it, for the wait for it is in this call.
            unsafe { set_start.launch(stream, [1; 3], [1; 3], 0, &[bytes_of(&offer.start)]) }?;
            // SAFETY: as above, and the caller passes what the kernel takes before the offer.
            unsafe { kernel.launch(stream, [blocks as u32, 1, 1], [1; 3], 0, &parameters) }
        },
        serve,
    )?;
    let sent: Vec<Sent> = gpu.read(&memory, blocks).map_err(failed)?;
    Failure::on_device(measurement, sent.iter().map(|sent| sent.status))?;
    let times: Vec<u32> = gpu.read(&samples, each * blocks).map_err(failed)?;
    let of_each = times.chunks_exact(each as usize).zip(&sent);
    let us: Vec<f64> = of_each
        .flat_map(|(times, sent)| &times[..(sent.count as usize).min(times.len())])
        .map(|&ns| f64::from(ns) / 1e3)
        .collect();
    let mops = mops(us.len() as u64, Duration::from_nanos(Sent::duration_ns(&sent)));
    Ok((Run { mops, us, wrong: 0 }, sent, served))
}
