//! The latency under an offered load.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytemuck::{Zeroable, bytes_of};
use portway_fifo::{Consumer, FifoHandle};

use super::{Bench, DEPTH, Sent, Verify};
use crate::failure::Failure;
use crate::fifo::NAME;
use crate::fifo::payload::Check;
use crate::gpu;
use crate::machine::{Pinning, pin};
use crate::rate::{mops, over};
use crate::report::{Rate, Row};
use crate::stats::Times;

/// Blocks of one thread each, for each multiprocessor: enough that their round trips do not limit the rate.
const BLOCKS_OF_EACH: u64 = 8;

/// A row for each number of FIFOs and each rate; the whole is run `-N` times.
pub fn rows(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let args = bench.args;
    let slots = args.depth(DEPTH).into_iter().max().unwrap_or(portway_fifo::MIN_SLOTS);
    let blocks = u64::from(bench.gpu.context.attributes().multiprocessors) * BLOCKS_OF_EACH;
    let mut found = Vec::new();
    for &proxies in &args.proxies {
        found.extend(
            args.rates_kops().into_iter().map(|kops| (Load { proxies, kops, blocks, slots }, vec![])),
        );
    }
    for _ in 0..args.most_runs {
        for (load, runs) in &mut found {
            runs.push(offer(bench, load)?);
        }
    }
    let row = |(load, runs): (Load, Vec<Run>)| {
        let Load { proxies, kops, blocks, slots } = load;
        let rate = over(&runs, |run| run.mops);
        let mut samples: Vec<f64> = runs.iter().flat_map(|run| run.samples.iter().copied()).collect();
        let shape = [("blocks", blocks), ("offered_kops", kops), ("proxies", proxies), ("slots", slots)];
        Row {
            layer: NAME.into(),
            test: "gpu-load".into(),
            shape: shape.map(|(key, value)| (key.to_owned(), value)).into(),
            size_bytes: 16,
            runs: runs.len() as u64,
            iterations: samples.len() as u64,
            time_us: Times::of(&mut samples),
            // Every push is synced, so what was pushed was handed on.
            rate_mops: rate.map(|rate| Rate { push: rate, proc: rate }),
            wrong: args.check().then(|| runs.iter().map(|run| run.wrong).sum()),
            ..Row::default()
        }
    };
    Ok(found.into_iter().map(row).collect())
}

/// What is offered to what.
struct Load {
    /// FIFOs, each with a consumer.
    proxies: u64,
    kops: u64,
    blocks: u64,
    slots: u64,
}

struct Run {
    mops: f64,
    /// From due to synced, in microseconds.
    samples: Vec<f64>,
    wrong: u64,
}

fn offer(bench: &Bench, load: &Load) -> Result<Run, Failure> {
    let Bench { gpu, module, args, pinning } = bench;
    let &Load { proxies, kops, blocks, slots } = load;
    let name = format!("gpu load, {kops} thousand a second into {proxies}");
    let failed = |source| Failure::gpu(&name, source);
    let [set_start, offer] = [gpu::function(module, "set_start")?, gpu::function(module, "offer")?];
    let (fifos, mut consumers): (Vec<_>, Vec<_>) =
        (0..proxies).map(|_| bench.fifo(&name, slots)).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let limit_ns = args.limit().as_nanos() as u64;
    let period_ps = 1_000_000_000 / kops;
    let all = args.iterations.unwrap_or(u64::MAX).min(limit_ns * 1000 / period_ps);
    let each = all.div_ceil(blocks);
    let start = gpu.memory::<u64>(1).map_err(failed)?;
    let samples = gpu.memory::<u32>(each * blocks).map_err(failed)?;
    let memory = gpu.memory::<Sent>(blocks).map_err(failed)?;
    let handles = gpu.memory::<FifoHandle>(proxies).map_err(failed)?;
    for (index, fifo) in fifos.iter().enumerate() {
        handles.write((index * size_of::<FifoHandle>()) as u64, bytes_of(&fifo.handle())).map_err(failed)?;
    }
    let [handles_at, start_at, samples_at, sent_at] =
        [&handles, &start, &samples, &memory].map(|memory| memory.address());
    let parameters = [
        bytes_of(&handles_at),
        bytes_of(&proxies),
        bytes_of(&start_at),
        bytes_of(&period_ps),
        bytes_of(&each),
        bytes_of(&limit_ns),
        bytes_of(&samples_at),
        bytes_of(&sent_at),
    ];
    let verify =
        || if args.check() { Verify::All(Check::new(blocks)) } else { Verify::Sum { count: 0, sum: 0 } };
    let verified = gpu.run(
        &name,
        args.deadline(),
        pinning,
        |stream| {
            // SAFETY: the kernel takes this parameter; its memory outlives it, for the wait for it is in this call.
            unsafe { set_start.launch(stream, [1; 3], [1; 3], 0, &[bytes_of(&start_at)]) }?;
            // SAFETY: as above.
            unsafe { offer.launch(stream, [blocks as u32, 1, 1], [1; 3], 0, &parameters) }
        },
        |ended| drain(&mut consumers, pinning, ended, verify),
    )?;
    let sent: Vec<Sent> = gpu.read(&memory, blocks).map_err(failed)?;
    Failure::on_device(&name, sent.iter().map(|sent| sent.status))?;
    let times: Vec<u32> = gpu.read(&samples, each * blocks).map_err(failed)?;
    let of_each = times.chunks_exact(each as usize).zip(&sent);
    let samples: Vec<f64> = of_each
        .flat_map(|(times, sent)| &times[..sent.count as usize])
        .map(|&ns| f64::from(ns) / 1e3)
        .collect();
    let mut wrong = 0;
    for (index, verify) in verified.into_iter().enumerate() {
        let Some(verify) = verify else { return Err(Failure::Panicked { measurement: name }) };
        // What the blocks of this FIFO have sent.
        let of_these = |(block, sent): (usize, &Sent)| {
            if block % fifos.len() == index { *sent } else { Sent::zeroed() }
        };
        wrong += verify.finish(&sent.iter().enumerate().map(of_these).collect::<Vec<_>>());
    }
    let mops = mops(samples.len() as u64, Duration::from_nanos(Sent::duration_ns(&sent)));
    drop((fifos, consumers, handles, start, memory));
    gpu.reclaim(&name)?;
    Ok(Run { mops, samples, wrong })
}

/// Drains each FIFO on a thread of its own, the first on this one, until the kernels have ended; `None` of one that panicked.
fn drain(
    consumers: &mut [Consumer],
    pinning: &Pinning,
    ended: &AtomicBool,
    verify: impl Fn() -> Verify,
) -> Vec<Option<Verify>> {
    let serve = |consumer: &mut Consumer, mut verify: Verify| loop {
        let over = ended.load(Ordering::Acquire);
        let taken = consumer.drain(32, |_, trigger| verify.see(trigger.words()));
        if taken == 0 && over {
            return verify;
        }
    };
    let Some((first, others)) = consumers.split_first_mut() else { return Vec::new() };
    let (all, there) = (others.len(), &AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let others: Vec<_> = others
            .iter_mut()
            .enumerate()
            .map(|(n, consumer)| {
                let verify = verify();
                scope.spawn(move || {
                    pin(pinning.producer(n + 1)); // the first of the others waits for the kernels
                    there.fetch_add(1, Ordering::AcqRel);
                    serve(consumer, verify)
                })
            })
            .collect();
        // They begin on this thread's core, and would have to wait for it.
        while there.load(Ordering::Acquire) < all && !ended.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let first = serve(first, verify());
        std::iter::once(Some(first)).chain(others.into_iter().map(|other| other.join().ok())).collect()
    })
}
