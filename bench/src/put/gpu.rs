//! The `put` layer with kernels at both ends: two blocks of one launch, the data in pinned memory.

use std::time::Duration;

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::cuda::Module;
use portway_proxy::PortChannelHandle;

use super::NAME;
use super::stages::{self, Rig};
use super::stamped::Stamp;
use super::throughput::{of_windows, window};
use super::wired::{End, Wired, triggers};
use crate::args::Args;
use crate::failure::Failure;
use crate::gpu::{self, Gpu, cycle_ns};
use crate::load::{self, Run, kernel};
use crate::machine::{Pinning, pin};
use crate::proxy::serve;
use crate::rate::{self, Outcome};
use crate::report::{Control, Report, Row, counted_first};
use crate::round::Samples;
use crate::trial::{Phase, Trial};

/// Threads of a block. One of them calls the channel in a round trip; all of them put in a window.
const THREADS: u64 = 256;

/// Round trips, and puts in windows, of a run unless `-n` says otherwise.
const ROUND_TRIPS: u64 = 10_000;
const PUTS: u64 = 100_000;

/// Loads unless `--rate` says otherwise, in thousands a second.
const KOPS: (u64, u64, u64) = (2_000, 16_000, 2_000);

const LATENCY: &str = "gpu-latency";
const THROUGHPUT: &str = "gpu-throughput";
const LOAD: &str = "gpu-load";
const STAGES: &str = "gpu-stages";

/// The kernels behind the texts of the header and of what they share with others.
pub fn kernels() -> String {
    [portway_proxy::header::PORT_CHANNEL, kernel::KERNELS, include_str!("../../device/put.cu")].concat()
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
            "gpu-throughput = windows of puts with signals by a block, each to the return of a flush",
        );
        report.results.extend(latency(&bench)?);
        report.results.extend(throughput(&bench)?);
        report.note(NAME, "gpu-load: puts with signals due at a fixed rate; time = from due to the return of a flush, by the");
        report.note(NAME, "global timer, lateness included: a round trip, NOT half of it");
        report.results.extend(load(&bench)?);
        if args.stages {
            report.note(NAME, "gpu-stages: pop to post and post to completion by the processor's clock; the whole, one way, by the");
            report.note(NAME, "GPU's; push to pop and post to seen are what is left of the whole, a difference of mean durations by two");
            report.note(NAME, "clocks: it has a share, and no times of its own, for that of single messages would say nothing");
            report.results.extend(stages(&bench)?);
        }
        if args.check() {
            for control in controls(&bench)? {
                report.control(control);
            }
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

/// Rows for each size; the whole is run `-N` times.
fn latency(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let sizes = bench.args.sizes();
    let mut found = vec![Samples::default(); sizes.len()];
    for _ in 0..bench.args.most_runs {
        for (&size, found) in sizes.iter().zip(&mut found) {
            found.add(round_trips(bench, size, None)?);
        }
    }
    let rows = |(size_bytes, samples): (u64, Samples)| {
        let (layer, test, runs) = (NAME.into(), LATENCY.into(), bench.args.most_runs);
        samples.rows(bench.args, Row { layer, test, size_bytes, runs, ..Row::default() })
    };
    Ok(counted_first(sizes.into_iter().zip(found).flat_map(rows).collect()))
}

/// Rows for each size; the whole is run `-N` times.
fn throughput(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let sizes = bench.args.sizes();
    let mut found = vec![Vec::new(); sizes.len()];
    for _ in 0..bench.args.most_runs {
        for (&size, runs) in sizes.iter().zip(&mut found) {
            runs.push(windows(bench, size, None)?);
        }
    }
    let rows = |(size_bytes, runs): (u64, Vec<Outcome>)| {
        let shape = [("threads", threads(bench.args)), ("window", window(size_bytes))];
        let row = Row {
            layer: NAME.into(),
            test: THROUGHPUT.into(),
            shape: shape.map(|(key, value)| (key.to_owned(), value)).into(),
            size_bytes,
            ..Row::default()
        };
        rate::rows(&row, true, &runs)
    };
    Ok(counted_first(sizes.into_iter().zip(found).flat_map(rows).collect()))
}

/// A row for each load, at the smallest size; the whole is run `-N` times.
fn load(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let args = bench.args;
    let size_bytes = args.sizes().into_iter().min().unwrap_or(8);
    let shape = [("blocks".to_owned(), kernel::blocks(bench.gpu))].into();
    let row = Row { layer: NAME.into(), test: LOAD.into(), shape, size_bytes, ..Row::default() };
    let offer = |&size: &u64, kops| offer(bench, size, kops, None);
    load::rows(args, 0..args.most_runs, &[(size_bytes, row)], &args.rates_kops(KOPS), offer)
}

/// The stages that the processor sees, beside the whole by the GPU's clock. Clocks of the two are not compared. What the GPU's
/// ends took, push to pop and post to seen, is what is left of the whole: a difference of durations by two clocks, of which
/// that of the means says something and that of a single message, which may even be negative, does not.
fn stages(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let args = bench.args;
    let mut rows = Vec::new();
    for size_bytes in args.sizes() {
        let mut found = Staged::default();
        for _ in 0..args.most_runs {
            staged(bench, size_bytes, None, &mut found)?;
        }
        let row = Row {
            layer: NAME.into(),
            test: STAGES.into(),
            size_bytes,
            runs: args.most_runs,
            ..Row::default()
        };
        let Staged { whole, post, completion, wrong } = found;
        let (count, whole_row) =
            (whole.len() as u64, Row { wrong: args.check().then_some(wrong), ..row.clone() });
        let seen = [(stages::POP_POST, post), (stages::POST_COMPLETED, completion)];
        let staged = stages::shares(args, &row, whole_row, whole, seen);
        let share_percent = staged.get(1).and_then(|post| post.share_percent).map(|share| 100.0 - share);
        rows.extend(staged);
        rows.push(Row { subject: stages::REST.into(), iterations: count, share_percent, ..row });
    }
    Ok(rows)
}

/// The stages of counted round trips, half of each, in microseconds.
#[derive(Default)]
struct Staged {
    whole: Vec<f64>,
    post: Vec<f64>,
    completion: Vec<f64>,
    wrong: u64,
}

/// One run of round trips over ports that stamp what they are asked.
fn staged(bench: &Bench, size_bytes: u64, corrupt: Option<u64>, found: &mut Staged) -> Result<(), Failure> {
    let name = format!("gpu put stages, {size_bytes} bytes");
    let &Bench { gpu, args, pinning, .. } = bench;
    let most = args.iterations.unwrap_or(ROUND_TRIPS);
    let plan = Plan { warmup: args.warmup, most, ..plan(bench, size_bytes, 1, corrupt) };
    let mut rig = Rig::new(&gpu.context, args, size_bytes).map_err(|source| Failure::proxy(&name, source))?;
    let stamp = rig.stamp();
    let (stepped, ends) = (&mut rig.engine, &rig.ends);
    let trial = &Trial::new(&name, 1, args.deadline() * 4);
    let (done, samples) = std::thread::scope(|scope| {
        let engine = scope.spawn(|| {
            pin(pinning.consumer());
            trial.part(|| serve(stepped, trial, stamp))
        });
        let launched = launch(bench, &name, "round_trips", plan, THREADS, ends);
        trial.enter(Phase::Over);
        let served = engine.join().ok().flatten();
        launched.and_then(|launched| served.map(|()| launched).ok_or_else(|| trial.why()))
    })?;
    let logs = rig.take(size_bytes);
    drop(rig);
    gpu.reclaim(&name)?;
    let skip = (done.count - done.counted) as usize;
    for (n, whole) in ways(&done, &samples).into_iter().enumerate().skip(skip) {
        let stamps = logs.each_ref().map(|log| log.get(n).copied().unwrap_or_default());
        if stamps.iter().any(|stamp| stamp.completed_ns == 0) {
            let report = format!("message {n} has no stamp of its completion");
            return Err(Failure::Undone { measurement: name, triggers: 2 * done.count + 1, report });
        }
        let half = |of: fn(&Stamp) -> u64| stamps.iter().map(of).sum::<u64>() as f64 / 2e3;
        found.whole.push(whole);
        found.post.push(half(|stamp| stamp.posted_ns - stamp.popped_ns));
        found.completion.push(half(|stamp| stamp.completed_ns - stamp.posted_ns));
    }
    found.wrong += done.wrong;
    Ok(())
}

/// Runs in which one message has a flipped bit, to see that a kernel finds it.
fn controls(bench: &Bench) -> Result<Vec<Control>, Failure> {
    let (lowest, ..) = KOPS;
    let mut found = vec![
        (LATENCY, round_trips(bench, 64, Some(0))?.wrong),
        (THROUGHPUT, windows(bench, 64, Some(0))?.wrong.unwrap_or(0)),
        (LOAD, offer(bench, 64, lowest, Some(0))?.wrong),
    ];
    if bench.args.stages {
        let mut run = Staged::default();
        staged(bench, 64, Some(0), &mut run)?;
        found.push((STAGES, run.wrong));
    }
    Ok(found.into_iter().map(|(test, found)| Control::new(NAME, test, 1, found)).collect())
}

/// Threads of the block that puts, for the throughput.
fn threads(args: &Args) -> u64 {
    args.threads.unwrap_or(THREADS)
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

/// Half of each round trip, and the messages that were not whole.
fn round_trips(bench: &Bench, size_bytes: u64, corrupt: Option<u64>) -> Result<Samples, Failure> {
    let name = format!("gpu put latency, {size_bytes} bytes");
    let most = bench.args.iterations.unwrap_or(ROUND_TRIPS);
    let plan = Plan { warmup: bench.args.warmup, most, ..plan(bench, size_bytes, 1, corrupt) };
    let wired = wire(bench, &name, size_bytes)?;
    let (done, samples) = launch(bench, &name, "round_trips", plan, THREADS, &wired.ends)?;
    stop(bench, &name, wired, 2 * done.count * triggers(size_bytes) + 1)?;
    Ok(Samples::of_run(ways(&done, &samples), done.counted, done.wrong))
}

/// Half of each round trip in microseconds, without what block 1 spent between its wait and its put.
fn ways(done: &Done, samples: &[[u32; 2]]) -> Vec<f64> {
    let us = cycle_ns(done.ns, done.cycles) / 1e3 / 2.0;
    samples.iter().map(|[trip, between]| f64::from(trip.saturating_sub(*between)) * us).collect()
}

fn windows(bench: &Bench, size_bytes: u64, corrupt: Option<u64>) -> Result<Outcome, Failure> {
    let name = format!("gpu put throughput, {size_bytes} bytes");
    let (args, count) = (bench.args, window(size_bytes));
    let most = args.iterations.unwrap_or(PUTS).div_ceil(count);
    let plan = Plan { warmup: args.warmup.div_ceil(count), most, ..plan(bench, size_bytes, count, corrupt) };
    let wired = wire(bench, &name, size_bytes * count)?;
    let (done, samples) = launch(bench, &name, "windows", plan, threads(args), &wired.ends)?;
    // Of a window: its puts, the flush, and the signal back.
    stop(bench, &name, wired, (count * triggers(size_bytes) + 2) * done.count + 1)?;
    let ns = cycle_ns(done.ns, done.cycles);
    let time = |cycles: u32| Duration::from_nanos((f64::from(cycles) * ns) as u64);
    let took: Vec<_> = samples.iter().map(|pair| pair.map(time)).collect();
    Ok(of_windows(count, &took, done.counted as usize, args.check().then_some(done.wrong)))
}

/// Offers a load of puts by many threads.
fn offer(bench: &Bench, size_bytes: u64, kops: u64, corrupt: Option<u64>) -> Result<Run, Failure> {
    let name = format!("gpu put load, {size_bytes} bytes, {kops} thousand a second");
    let &Bench { gpu, module, args, pinning } = bench;
    let failed = |source| Failure::gpu(&name, source);
    let wired = wire(bench, &name, size_bytes * kernel::blocks(gpu))?;
    let wrong = gpu.memory::<u64>(1).map_err(failed)?;
    let ([a, b], wrong_at) = (wired.ends.each_ref().map(Handle::of), wrong.address());
    let plan = plan(bench, size_bytes, 1, corrupt);
    let parameters = [bytes_of(&a), bytes_of(&b), bytes_of(&plan), bytes_of(&wrong_at)];
    let with = kernel::Bench { gpu, module, args, pinning };
    let (run, sent, ()) = kernel::offer(&with, &name, kops, "offer_puts", &parameters, |_| ())?;
    let wrongs = gpu.read::<u64>(&wrong, 1).map_err(failed)?;
    drop(wrong);
    let puts: u64 = sent.iter().map(|sent| sent.count).sum();
    stop(bench, &name, wired, puts * triggers(size_bytes))?;
    Ok(Run { wrong: wrongs.iter().sum(), ..run })
}

fn wire(bench: &Bench, name: &str, len_bytes: u64) -> Result<Wired, Failure> {
    Wired::new(&bench.gpu.context, len_bytes, bench.args.deadline(), bench.pinning.engine())
        .map_err(|source| Failure::proxy(name, source))
}

/// Stops the engine, which must have taken so many triggers, and frees what was dropped.
fn stop(bench: &Bench, name: &str, wired: Wired, triggers: u64) -> Result<(), Failure> {
    wired.stop(name, triggers, bench.args.deadline())?;
    bench.gpu.reclaim(name)
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

/// Runs a kernel over two ends: what it says, and the pairs of its samples, with those that do not count.
fn launch(
    bench: &Bench,
    name: &str,
    kernel: &str,
    plan: Plan,
    threads: u64,
    ends: &[End; 2],
) -> Result<(Done, Vec<[u32; 2]>), Failure> {
    let Bench { gpu, module, args, .. } = bench;
    crate::progress::begin(name);
    let failed = |source| Failure::gpu(name, source);
    let function = gpu::function(module, kernel)?;
    let samples = gpu.memory::<[u32; 2]>(plan.warmup + plan.most).map_err(failed)?;
    let done = gpu.memory::<Done>(1).map_err(failed)?;
    let [a, b] = ends.each_ref().map(Handle::of);
    let (samples_at, done_at) = (samples.address(), done.address());
    let parameters = [bytes_of(&a), bytes_of(&b), bytes_of(&plan), bytes_of(&samples_at), bytes_of(&done_at)];
    // SAFETY: the kernel takes these parameters. Its memory outlives it: what is dropped is freed by `reclaim` alone,
    // which is called once it has ended.
    unsafe { function.launch(gpu.stream(), [2, 1, 1], [threads as u32, 1, 1], 0, &parameters) }
        .map_err(failed)?;
    gpu.wait(args.deadline()).map_err(failed)?;
    let done: Done = gpu.read(&done, 1).map_err(failed)?[0];
    Failure::on_device(name, done.statuses)?;
    let pairs: Vec<[u32; 2]> = gpu.read(&samples, done.count).map_err(failed)?;
    Ok((done, pairs))
}
