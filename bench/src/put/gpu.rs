//! The `put` layer with kernels at both ends: two blocks of one launch, the data in pinned memory.

use std::time::Duration;

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::cuda::Module;
use portway_proxy::PortChannelHandle;

use super::NAME;
use super::throughput::window;
use super::wired::{End, Wired};
use crate::args::Args;
use crate::failure::Failure;
use crate::gpu::{self, Gpu, cycle_ns};
use crate::machine::Pinning;
use crate::rate::{self, Outcome, mops, over};
use crate::report::{Control, Report, Row};
use crate::stats::{Times, middle};

/// Threads of a block. One of them calls the channel in a round trip; all of them put in a window.
const THREADS: u32 = 256;

/// Round trips, and puts in windows, of a run unless `-n` says otherwise.
const ROUND_TRIPS: u64 = 10_000;
const PUTS: u64 = 100_000;

/// The kernels behind the text of the header that they include.
pub fn kernels() -> String {
    [portway_proxy::header::PORT_CHANNEL, include_str!("../../device/put.cu")].concat()
}

/// Measures, if there is a GPU.
pub fn run(args: &Args, pinning: &Pinning, report: &mut Report) -> Result<(), Failure> {
    gpu::with(NAME, pinning, report, |gpu, pinning, report| {
        let module = &gpu.module("put.cu", &kernels()).map_err(|source| Failure::gpu("put.cu", source))?;
        let bench = Bench { gpu, module, args, pinning };
        report.note(
            NAME,
            "gpu: block 0 puts, block 1 waits, the data lies in pinned memory, one engine serves both",
        );
        report.note(
            NAME,
            "gpu-latency = put and signal there and back, without what block 1 does between; half of it, in",
        );
        report.note(NAME, "cycles of the SM scaled by the global timer");
        report.note(
            NAME,
            "gpu-throughput = windows of puts with signals by 256 threads, each to the return of a flush",
        );
        report.results.extend(latency(&bench)?);
        report.results.extend(throughput(&bench)?);
        if args.check() {
            report.control(control(&bench)?);
        }
        Ok(())
    })
}

/// What every measurement needs.
struct Bench<'a> {
    gpu: &'a Gpu,
    module: &'a Module,
    args: &'a Args,
    pinning: &'a Pinning,
}

/// A row a size; the whole is run `-N` times.
fn latency(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let sizes = bench.args.sizes();
    let mut found = vec![(Vec::new(), 0); sizes.len()];
    for _ in 0..bench.args.most_runs {
        for (&size, (samples, wrong)) in sizes.iter().zip(&mut found) {
            let (new, mistakes) = round_trips(bench, size, None)?;
            samples.extend(new);
            *wrong += mistakes;
        }
    }
    let row = |(size_bytes, (mut samples, wrong)): (u64, (Vec<f64>, u64))| Row {
        layer: NAME.into(),
        test: "gpu-latency".into(),
        size_bytes,
        runs: bench.args.most_runs,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        wrong: bench.args.check().then_some(wrong),
        ..Row::default()
    };
    Ok(sizes.into_iter().zip(found).map(row).collect())
}

/// A row a size; the whole is run `-N` times.
fn throughput(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let sizes = bench.args.sizes();
    let mut found = vec![Vec::new(); sizes.len()];
    for _ in 0..bench.args.most_runs {
        for (&size, runs) in sizes.iter().zip(&mut found) {
            runs.push(windows(bench, size)?);
        }
    }
    let row = |(size_bytes, runs): (u64, Vec<Outcome>)| Row {
        layer: NAME.into(),
        test: "gpu-throughput".into(),
        shape: [("window".to_owned(), window(size_bytes))].into(),
        size_bytes,
        runs: runs.len() as u64,
        iterations: runs.iter().map(|run| run.iterations).sum(),
        rate_mops: rate::rates(&runs, |run| *run),
        bandwidth_gb_per_s: over(&runs, |run| run.proc_mops * size_bytes as f64 / 1e3)
            .map(|spread| spread.median),
        wrong: runs.iter().map(|run| run.wrong).sum(),
        ..Row::default()
    };
    Ok(sizes.into_iter().zip(found).map(row).collect())
}

/// A run in which one message has a flipped bit, to see that a kernel finds it.
fn control(bench: &Bench) -> Result<Control, Failure> {
    let (_, wrong) = round_trips(bench, 64, Some(0))?;
    Ok(Control { layer: NAME.into(), corrupted: 1, found: wrong })
}

/// `Plan` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Plan {
    len_bytes: u64,
    window: u64,
    warmup: u64,
    most: u64,
    limit_ns: u64,
    check: u64,
    corrupt: u64,
}

/// `End` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Handle {
    channel: PortChannelHandle,
    source: u64,
    destination: u64,
}

impl Handle {
    fn of(end: &End) -> Self {
        let (source, destination) = (end.source.address(), end.destination.address());
        Handle { channel: end.channels[0].handle(), source, destination }
    }
}

/// `Done` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Done {
    count: u64,
    counted: u64,
    wrong: u64,
    statuses: [u64; 2],
    ns: [u64; 2],
    cycles: [u64; 2],
    stop: u64,
}

const _: () = assert!(size_of::<Handle>() == 192 && size_of::<Plan>() == 56 && size_of::<Done>() == 80);

/// Half of each round trip in microseconds, and the messages that were not whole.
fn round_trips(bench: &Bench, size_bytes: u64, corrupt: Option<u64>) -> Result<(Vec<f64>, u64), Failure> {
    let name = format!("gpu put latency, {size_bytes} bytes");
    let most = bench.args.iterations.unwrap_or(ROUND_TRIPS);
    let plan = Plan { warmup: bench.args.warmup, most, ..plan(bench, size_bytes, 1, corrupt) };
    let (done, samples) = launch(bench, &name, "round_trips", plan, |done| 2 * done.count + 1)?;
    let us = cycle_ns(done.ns, done.cycles) / 1e3 / 2.0;
    // Without what block 1 spent between its wait and its put.
    let way = |pair: &[u32; 2]| f64::from(pair[0].saturating_sub(pair[1])) * us;
    Ok((samples.iter().map(way).collect(), done.wrong))
}

fn windows(bench: &Bench, size_bytes: u64) -> Result<Outcome, Failure> {
    let name = format!("gpu put throughput, {size_bytes} bytes");
    let (args, count) = (bench.args, window(size_bytes));
    let most = args.iterations.unwrap_or(PUTS).div_ceil(count);
    let plan = Plan { warmup: args.warmup.div_ceil(count), most, ..plan(bench, size_bytes, count, None) };
    // Of a window: its puts, the flush, and the signal back.
    let (done, samples) = launch(bench, &name, "windows", plan, |done| (count + 2) * done.count + 1)?;
    let ns = cycle_ns(done.ns, done.cycles);
    let median = |of: usize| {
        let time = |pair: &[u32; 2]| Duration::from_nanos((f64::from(pair[of]) * ns) as u64);
        middle(&mut samples.iter().map(time).collect::<Vec<_>>())
    };
    Ok(Outcome {
        iterations: count * done.counted,
        push_mops: mops(count, median(0)),
        proc_mops: mops(count, median(1)),
        wrong: args.check().then_some(done.wrong),
    })
}

fn plan(bench: &Bench, len_bytes: u64, window: u64, corrupt: Option<u64>) -> Plan {
    Plan {
        len_bytes,
        window,
        warmup: 0,
        most: 0,
        limit_ns: bench.args.limit().as_nanos() as u64,
        check: bench.args.check().into(),
        corrupt: corrupt.unwrap_or(u64::MAX),
    }
}

/// Runs a kernel over two ends of its own: what it says, and the counted pairs of its samples. `triggers` tells how many
/// triggers it must have pushed.
fn launch(
    bench: &Bench,
    name: &str,
    kernel: &str,
    plan: Plan,
    triggers: impl FnOnce(&Done) -> u64,
) -> Result<(Done, Vec<[u32; 2]>), Failure> {
    let Bench { gpu, module, args, pinning } = bench;
    crate::progress::begin(name);
    let failed = |source| Failure::gpu(name, source);
    let function = gpu::function(module, kernel)?;
    let wired = Wired::new(&gpu.context, plan.len_bytes * plan.window, args.deadline(), pinning.engine())
        .map_err(|source| Failure::proxy(name, source))?;
    let samples = gpu.memory::<[u32; 2]>(plan.warmup + plan.most).map_err(failed)?;
    let done = gpu.memory::<Done>(1).map_err(failed)?;
    let [a, b] = wired.ends.each_ref().map(Handle::of);
    let (samples_at, done_at) = (samples.address(), done.address());
    let parameters = [bytes_of(&a), bytes_of(&b), bytes_of(&plan), bytes_of(&samples_at), bytes_of(&done_at)];
    // SAFETY: the kernel takes these parameters. Its memory outlives it: what is dropped is freed by `reclaim` alone,
    // which is called once it has ended.
    unsafe { function.launch(gpu.stream(), [2, 1, 1], [THREADS, 1, 1], 0, &parameters) }.map_err(failed)?;
    gpu.wait(args.deadline()).map_err(failed)?;
    let done: Done = gpu.read(&done, 1).map_err(failed)?[0];
    Failure::on_device(name, done.statuses)?;
    let pairs: Vec<[u32; 2]> = gpu.read(&samples, done.count).map_err(failed)?;
    wired.stop(name, triggers(&done), args.deadline())?;
    drop(samples);
    gpu.reclaim(name)?;
    let skipped = (done.count - done.counted) as usize;
    Ok((done, pairs[skipped..].to_vec()))
}
