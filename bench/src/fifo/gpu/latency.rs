//! The round trip of one thread of the GPU: push, and back as the tail.

use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::cuda::Stream;
use portway_fifo::{Error, Platform, Words};

use super::{Bench, DEPTH, Verify};
use crate::failure::Failure;
use crate::fifo::NAME;
use crate::fifo::payload::Check;
use crate::gpu::{self, cycle_ns};
use crate::progress;
use crate::rate::over;
use crate::report::{Control, Reference, Row};
use crate::round::Samples;
use crate::stats::median;

/// Round trips of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 10_000;

const TEST: &str = "gpu-push-sync";

/// The rows, with the samples of all runs; ours and the reference's alternate.
pub fn rows(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let slots = bench.args.depth(DEPTH).into_iter().max().unwrap_or(portway_fifo::MIN_SLOTS);
    let (mut samples, mut runs) = (Samples::default(), Vec::new());
    for _ in 0..bench.args.most_runs {
        let theirs = ping_pong(bench)?;
        let ours = push_sync(bench, slots, None)?;
        let medians = median(&ours.warm).zip(median(&theirs.warm));
        runs.extend(medians.map(|(ours, theirs)| (ours.median, theirs.median)));
        samples.add(ours);
    }
    let row = Row {
        layer: NAME.into(),
        test: TEST.into(),
        subject: NAME.into(),
        shape: [("slots".to_owned(), slots)].into(),
        size_bytes: 16,
        runs: runs.len() as u64,
        reference: over(&runs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
            time_us: over(&runs, |(_, theirs)| *theirs),
            ..Reference::new("pinned-ping-pong", ratio)
        }),
        ..Row::default()
    };
    Ok(samples.rows(bench.args, row))
}

/// A run in which one trigger is corrupted.
pub fn control(bench: &Bench) -> Result<Control, Failure> {
    Ok(Control::new(NAME, TEST, 1, push_sync(bench, portway_fifo::MIN_SLOTS, Some(0))?.wrong))
}

/// `Trips` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Trips {
    count: u64,
    counted: u64,
    status: u64,
    ns: [u64; 2],
    cycles: [u64; 2],
}

/// `TripPlan` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Plan {
    warmup: u64,
    most: u64,
    limit_ns: u64,
    corrupt: u64,
}

const _: () = assert!(size_of::<Trips>() == 56 && size_of::<Plan>() == 32);

impl Plan {
    fn of(bench: &Bench, corrupt: Option<u64>) -> Self {
        let args = bench.args;
        Plan {
            warmup: args.warmup,
            most: args.iterations.unwrap_or(ITERATIONS),
            limit_ns: args.limit().as_nanos() as u64,
            corrupt: corrupt.unwrap_or(u64::MAX),
        }
    }
}

/// Half of each round trip, and the triggers that were wrong; `corrupt` is the trigger of which a bit is flipped on purpose.
fn push_sync(bench: &Bench, slots: u64, corrupt: Option<u64>) -> Result<Samples, Failure> {
    let name = "gpu push-sync";
    let kernel = gpu::function(bench.module, "push_sync")?;
    let (fifo, mut consumer) = bench.fifo(name, slots)?;
    let mut verify = Verify::All(Check::new(1));
    let handle = fifo.handle();
    let (samples, sent) = trips(
        bench,
        name,
        corrupt,
        |stream, plan, cycles, trips| {
            let parameters = [bytes_of(&handle), bytes_of(plan), bytes_of(cycles), bytes_of(trips)];
            // SAFETY: the kernel takes these parameters, and their memory outlives it.
            unsafe { kernel.launch(stream, [1; 3], [1; 3], 0, &parameters) }
        },
        |ended| {
            let done = progress::current();
            loop {
                let over = ended.load(Ordering::Acquire);
                let taken = consumer.drain(1, |_, trigger| verify.see(trigger.words()));
                if taken > 0 {
                    done.store(consumer.position().0, Ordering::Relaxed);
                } else if over {
                    return;
                }
            }
        },
    )?;
    let Verify::All(check) = verify else { return Ok(samples) };
    let wrong = check.finish(&[sent]);
    drop((fifo, consumer));
    bench.gpu.reclaim(name)?;
    Ok(Samples { wrong, ..samples })
}

/// Half of each round trip over two pinned words.
fn ping_pong(bench: &Bench) -> Result<Samples, Failure> {
    let name = "gpu ping-pong";
    let failed = |source| Failure::gpu(name, source);
    let kernel = gpu::function(bench.module, "ping_pong")?;
    let word = || Words::new(bench.gpu.context.host_memory(8)?);
    let (there, back) = (word().map_err(failed)?, word().map_err(failed)?);
    let addresses = [there.region().address(), back.region().address()];
    let timeout_ns = bench.args.deadline().as_nanos() as u64;
    let (samples, _) = trips(
        bench,
        name,
        None,
        |stream, plan, cycles, trips| {
            let [there, back] = addresses.each_ref().map(bytes_of);
            let parameters =
                [there, back, bytes_of(&timeout_ns), bytes_of(plan), bytes_of(cycles), bytes_of(trips)];
            // SAFETY: the kernel takes these parameters, and their memory outlives it.
            unsafe { kernel.launch(stream, [1; 3], [1; 3], 0, &parameters) }
        },
        |ended| {
            let mut last = 0;
            while !ended.load(Ordering::Relaxed) {
                let seen = there[0].load(Ordering::Acquire);
                if seen != last {
                    back[0].store(seen, Ordering::Release);
                    last = seen;
                }
            }
        },
    )?;
    drop((there, back));
    bench.gpu.reclaim(name)?;
    Ok(samples)
}

/// Runs a kernel of round trips: half of each, and how many there were with those that do not count.
fn trips(
    bench: &Bench,
    name: &str,
    corrupt: Option<u64>,
    launch: impl FnOnce(&Stream, &Plan, &u64, &u64) -> Result<(), Error>,
    serve: impl FnOnce(&AtomicBool) + Send,
) -> Result<(Samples, u64), Failure> {
    let Bench { gpu, args, pinning, .. } = bench;
    let failed = |source| Failure::gpu(name, source);
    let plan = Plan::of(bench, corrupt);
    let cycles = gpu.memory::<u32>(plan.warmup + plan.most).map_err(failed)?;
    let trips = gpu.memory::<Trips>(1).map_err(failed)?;
    let (cycles_at, trips_at) = (cycles.address(), trips.address());
    let launch = |stream: &Stream| launch(stream, &plan, &cycles_at, &trips_at);
    gpu.run(name, args.deadline(), pinning, launch, serve)?;
    let trips: Trips = gpu.read(&trips, 1).map_err(failed)?[0];
    Failure::on_device(name, [trips.status])?;
    let us = cycle_ns(trips.ns, trips.cycles) / 1e3 / 2.0;
    let cycles: Vec<u32> = gpu.read(&cycles, trips.count).map_err(failed)?;
    let all = cycles.into_iter().map(|cycles| f64::from(cycles) * us);
    Ok((Samples::of_run(all, trips.counted, 0), trips.count))
}
