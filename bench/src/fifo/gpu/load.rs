//! The latency under an offered load.

use std::sync::atomic::Ordering;
use std::time::Duration;

use bytemuck::bytes_of;

use super::{Bench, DEPTH, Sent, Verify};
use crate::failure::Failure;
use crate::fifo::NAME;
use crate::fifo::payload::Check;
use crate::gpu;
use crate::rate::{mops, over};
use crate::report::{Rate, Row};
use crate::stats::Times;

/// Blocks of one thread each, for each multiprocessor: enough that their round trips do not limit the rate.
const BLOCKS_OF_EACH: u64 = 8;

/// A row a rate; the whole is run `-N` times.
pub fn rows(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let args = bench.args;
    let slots = args.depth(DEPTH).into_iter().max().unwrap_or(portway_fifo::MIN_SLOTS);
    let blocks = u64::from(bench.gpu.context.attributes().multiprocessors) * BLOCKS_OF_EACH;
    let mut found: Vec<(u64, Vec<Run>)> = args.rates_kops().into_iter().map(|kops| (kops, vec![])).collect();
    for _ in 0..args.most_runs {
        for (kops, runs) in &mut found {
            runs.push(offer(bench, *kops, blocks, slots)?);
        }
    }
    let row = |(kops, runs): (u64, Vec<Run>)| {
        let rate = over(&runs, |run| run.mops);
        let mut samples: Vec<f64> = runs.iter().flat_map(|run| run.samples.iter().copied()).collect();
        let shape = [("blocks", blocks), ("offered_kops", kops), ("slots", slots)];
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

struct Run {
    mops: f64,
    /// From due to synced, in microseconds.
    samples: Vec<f64>,
    wrong: u64,
}

fn offer(bench: &Bench, kops: u64, blocks: u64, slots: u64) -> Result<Run, Failure> {
    let Bench { gpu, module, args, pinning } = bench;
    let name = format!("gpu load, {kops} thousand a second");
    let failed = |source| Failure::gpu(&name, source);
    let [set_start, offer] = [gpu::function(module, "set_start")?, gpu::function(module, "offer")?];
    let (fifo, mut consumer) = bench.fifo(&name, slots)?;
    let limit_ns = args.limit().as_nanos() as u64;
    let period_ps = 1_000_000_000 / kops;
    let all = args.iterations.unwrap_or(u64::MAX).min(limit_ns * 1000 / period_ps);
    let each = all.div_ceil(blocks);
    let start = gpu.memory::<u64>(1).map_err(failed)?;
    let samples = gpu.memory::<u32>(each * blocks).map_err(failed)?;
    let memory = gpu.memory::<Sent>(blocks).map_err(failed)?;
    let handle = fifo.handle();
    let [start_at, samples_at, sent_at] = [&start, &samples, &memory].map(|memory| memory.address());
    let parameters = [
        bytes_of(&handle),
        bytes_of(&start_at),
        bytes_of(&period_ps),
        bytes_of(&each),
        bytes_of(&limit_ns),
        bytes_of(&samples_at),
        bytes_of(&sent_at),
    ];
    let mut verify =
        if args.check() { Verify::All(Check::new(blocks)) } else { Verify::Sum { count: 0, sum: 0 } };
    gpu.run(
        &name,
        args.deadline(),
        pinning,
        |stream| {
            // SAFETY: the kernel takes this parameter; its memory outlives it, for the wait for it is in this call.
            unsafe { set_start.launch(stream, [1; 3], [1; 3], 0, &[bytes_of(&start_at)]) }?;
            // SAFETY: as above.
            unsafe { offer.launch(stream, [blocks as u32, 1, 1], [1; 3], 0, &parameters) }
        },
        |ended| loop {
            let over = ended.load(Ordering::Acquire);
            let taken = consumer.drain(32, |_, trigger| verify.see(trigger.words()));
            if taken == 0 && over {
                return;
            }
        },
    )?;
    let sent: Vec<Sent> = gpu.read(&memory, blocks).map_err(failed)?;
    Failure::on_device(&name, sent.iter().map(|sent| sent.status))?;
    let times: Vec<u32> = gpu.read(&samples, each * blocks).map_err(failed)?;
    let of_each = times.chunks_exact(each as usize).zip(&sent);
    let samples: Vec<f64> = of_each
        .flat_map(|(times, sent)| &times[..sent.count as usize])
        .map(|&ns| f64::from(ns) / 1e3)
        .collect();
    let wrong = verify.finish(&sent);
    let mops = mops(samples.len() as u64, Duration::from_nanos(Sent::duration_ns(&sent)));
    drop((fifo, consumer, start, memory));
    gpu.reclaim(&name)?;
    Ok(Run { mops, samples, wrong })
}
