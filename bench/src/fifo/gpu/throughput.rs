//! Triggers a second that kernels of different shapes push.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable, bytes_of};
use portway_fifo::Consumer;

use super::{Bench, DEPTH, Sent, Verify};
use crate::args::Args;
use crate::failure::Failure;
use crate::fifo::NAME;
use crate::fifo::payload::Check;
use crate::gpu;
use crate::progress;
use crate::rate::{self, Outcome, Pace, mops};
use crate::report::{Control, Row};
use crate::trial::warm_limit;

/// Blocks, threads of each, triggers of a call.
const LAUNCHES: [(u64, u64, u64); 9] = [
    (132, 256, 1),
    (132, 32, 1),
    (132, 1, 1),
    (32, 1, 1),
    (1, 256, 1),
    (1, 32, 1),
    (1, 1, 1),
    (1, 1, 16),
    (32, 1, 16),
];

const TEST: &str = "gpu-throughput";

/// Who pushes into which ring. Rows stand in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    slots: u64,
    /// Its place in the table.
    place: usize,
    blocks: u64,
    threads: u64,
    batch: u64,
    drain: u64,
}

impl Shape {
    /// The call by which it pushes: its kernel, and the name for it.
    fn form(&self) -> (&'static str, &'static str) {
        match self {
            Shape { batch: 2.., .. } => ("push_batches", "batch"),
            // Whole warps alone can be kept together.
            Shape { threads, .. } if threads % 32 == 0 => ("push_warps", "warp"),
            _ => ("push_scalar", "scalar"),
        }
    }

    fn producers(&self) -> u64 {
        self.blocks * self.threads
    }
}

/// All shapes and rings; the whole is run `-N` times.
pub fn rows(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let args = bench.args;
    let mut found: BTreeMap<Shape, Vec<Outcome>> = BTreeMap::new();
    for _ in 0..args.most_runs {
        for slots in args.depth(DEPTH) {
            for (place, (blocks, threads, batch)) in launches(args).into_iter().enumerate() {
                for drain in args.drain(&[32]) {
                    let shape = Shape { slots, place, blocks, threads, batch, drain };
                    found.entry(shape).or_default().push(measure(bench, &shape)?);
                }
            }
        }
    }
    Ok(found.iter().flat_map(|(shape, runs)| of_shape(shape, runs)).collect())
}

/// The shapes of launches, or the one that the command line asks for.
fn launches(args: &Args) -> Vec<(u64, u64, u64)> {
    match (args.ctas, args.threads) {
        (None, None) => LAUNCHES.to_vec(),
        (ctas, threads) => vec![(ctas.unwrap_or(1), threads.unwrap_or(1), 1)],
    }
}

fn of_shape(shape: &Shape, runs: &[Outcome]) -> Vec<Row> {
    let &Shape { slots, blocks, threads, batch, drain, .. } = shape;
    let keys =
        [("batch", batch), ("blocks", blocks), ("drain", drain), ("slots", slots), ("threads", threads)];
    let row = Row {
        layer: NAME.into(),
        test: TEST.into(),
        subject: shape.form().1.into(),
        shape: keys.map(|(key, value)| (key.to_owned(), value)).into(),
        size_bytes: 16,
        ..Row::default()
    };
    rate::rows(&row, true, runs)
}

/// A checked run, which also warms up, then one for the time.
fn measure(bench: &Bench, shape: &Shape) -> Result<Outcome, Failure> {
    let args = bench.args;
    let mut checked = 0;
    if args.check() {
        let all = Verify::All(Check::new(shape.producers()));
        checked = push(bench, shape, warm_limit(args.limit()), all, None)?.wrong.unwrap_or(0);
    }
    let sum = Verify::Sum { count: 0, sum: 0 };
    let outcome = push(bench, shape, args.limit(), sum, None)?;
    Ok(Outcome { wrong: outcome.wrong.filter(|_| args.check()).map(|wrong| wrong + checked), ..outcome })
}

/// Runs in which one trigger is corrupted, to see that both checks find it.
pub fn control(bench: &Bench) -> Result<Control, Failure> {
    let shape = Shape { slots: 512, place: 0, blocks: 2, threads: 32, batch: 1, drain: 32 };
    let limit = warm_limit(bench.args.limit());
    let mut found = 0;
    for verify in [Verify::All(Check::new(shape.producers())), Verify::Sum { count: 0, sum: 0 }] {
        found += push(bench, &shape, limit, verify, Some(0))?.wrong.unwrap_or(0);
    }
    Ok(Control::new(NAME, TEST, 2, found))
}

/// `Plan` of the kernels.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Plan {
    most: u64,
    limit_ns: u64,
    corrupt: u64,
}

const _: () = assert!(size_of::<Plan>() == 24);

fn push(
    bench: &Bench,
    shape: &Shape,
    limit: Duration,
    mut verify: Verify,
    corrupt: Option<u64>,
) -> Result<Outcome, Failure> {
    let Bench { gpu, module, args, pinning } = bench;
    let (blocks, threads) = (shape.blocks, shape.threads);
    let (kernel, form) = shape.form();
    let name = format!("gpu throughput, {blocks}x{threads} {form}, {} slots", shape.slots);
    let failed = |source| Failure::gpu(&name, source);
    let kernel = gpu::function(module, kernel)?;
    let (fifo, mut consumer) = bench.fifo(&name, shape.slots)?;
    let memory = gpu.memory::<Sent>(shape.producers()).map_err(failed)?;
    let most = args.iterations.map_or(u64::MAX, |all| all.div_ceil(shape.producers()));
    let plan = Plan { most, limit_ns: limit.as_nanos() as u64, corrupt: corrupt.unwrap_or(u64::MAX) };
    let (handle, sent_at) = (fifo.handle(), memory.address());
    let mut parameters = vec![bytes_of(&handle), bytes_of(&plan), bytes_of(&sent_at)];
    if shape.batch > 1 {
        parameters.push(bytes_of(&shape.batch));
    }
    let (taken, time) = gpu.run(
        &name,
        args.deadline(),
        pinning,
        // SAFETY: the kernel takes these parameters; its memory outlives it, for the wait for it is in this call.
        |stream| unsafe {
            kernel.launch(stream, [blocks as u32, 1, 1], [threads as u32, 1, 1], 0, &parameters)
        },
        |ended| drain(&mut consumer, shape.drain, args.poll, ended, &mut verify),
    )?;
    let sent: Vec<Sent> = gpu.read(&memory, shape.producers()).map_err(failed)?;
    Failure::on_device(&name, sent.iter().map(|sent| sent.status))?;
    let pushed = sent.iter().map(|sent| sent.count).sum();
    let wrong = verify.finish(&sent);
    drop((fifo, consumer, memory));
    gpu.reclaim(&name)?;
    let push_mops = mops(pushed, Duration::from_nanos(Sent::duration_ns(&sent)));
    let warm = Pace { iterations: taken, push_mops, proc_mops: mops(taken, time) };
    Ok(Outcome { cold: None, ramp: None, warm, wrong: Some(wrong) })
}

/// Takes everything until the kernel has ended: how many triggers came after the first batch, and how long that took.
fn drain(
    consumer: &mut Consumer,
    max: u64,
    poll: u64,
    ended: &AtomicBool,
    verify: &mut Verify,
) -> (u64, Duration) {
    let done = progress::current();
    let mut start = None;
    let (mut taken, mut idle, mut last) = (0, false, Duration::ZERO);
    loop {
        // In this order: what was pushed before the kernel ended is there.
        let over = ended.load(Ordering::Acquire);
        match consumer.drain(max as usize, |_, trigger| verify.see(trigger.words())) as u64 {
            0 => {
                // The time of the last trigger: of the first look that found no other.
                if let (false, Some(start)) = (idle, start) {
                    last = Instant::now() - start;
                }
                if over {
                    return (taken, last);
                }
                idle = true;
                (0..poll).for_each(|_| std::hint::spin_loop());
            }
            some => {
                idle = false;
                match start {
                    None => start = Some(Instant::now()),
                    Some(_) => taken += some,
                }
                done.store(taken, Ordering::Relaxed);
            }
        }
    }
}
