//! The latency of pushes with their syncs under an offered load.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytemuck::{Zeroable, bytes_of};
use portway_fifo::{Consumer, FifoHandle};

use super::{Bench, DEPTH, Sent, Verify};
use crate::failure::Failure;
use crate::fifo::NAME;
use crate::fifo::payload::Check;
use crate::load::{self, Run, kernel};
use crate::machine::{Pinning, pin};
use crate::progress;
use crate::report::{Control, Row};

/// Loads unless `--rate` says otherwise, in thousands a second.
const KOPS: (u64, u64, u64) = (10_000, 80_000, 10_000);

const TEST: &str = "gpu-load";

/// A row for each number of FIFOs and each rate; the whole is run `-N` times.
pub fn rows(bench: &Bench) -> Result<Vec<Row>, Failure> {
    let args = bench.args;
    let slots = slots(bench);
    let case = |&proxies: &u64| {
        let shape = [("blocks", kernel::blocks(bench.gpu)), ("proxies", proxies), ("slots", slots)];
        let row = Row {
            layer: NAME.into(),
            test: TEST.into(),
            shape: shape.map(|(key, value)| (key.to_owned(), value)).into(),
            size_bytes: 16,
            ..Row::default()
        };
        (proxies, row)
    };
    let cases: Vec<_> = args.proxies.iter().map(case).collect();
    let offer = |&proxies: &u64, kops| offer(bench, proxies, kops, None);
    load::rows(args, 0..args.most_runs, &cases, &args.rates_kops(KOPS), offer)
}

/// A run in which one trigger is corrupted.
pub fn control(bench: &Bench) -> Result<Control, Failure> {
    let (lowest, ..) = KOPS;
    Ok(Control::new(NAME, TEST, 1, offer(bench, 1, lowest, Some(0))?.wrong))
}

fn slots(bench: &Bench) -> u64 {
    bench.args.depth(DEPTH).into_iter().max().unwrap_or(portway_fifo::MIN_SLOTS)
}

/// Offers a load to FIFOs with a consumer each.
fn offer(bench: &Bench, proxies: u64, kops: u64, corrupt: Option<u64>) -> Result<Run, Failure> {
    let &Bench { gpu, module, args, pinning } = bench;
    let name = format!("gpu load, {kops} thousand a second into {proxies}");
    let failed = |source| Failure::gpu(&name, source);
    let fifos = (0..proxies).map(|_| bench.fifo(&name, slots(bench))).collect::<Result<Vec<_>, _>>()?;
    let (fifos, mut consumers): (Vec<_>, Vec<_>) = fifos.into_iter().unzip();
    let handles = gpu.memory::<FifoHandle>(proxies).map_err(failed)?;
    for (index, fifo) in fifos.iter().enumerate() {
        handles.write((index * size_of::<FifoHandle>()) as u64, bytes_of(&fifo.handle())).map_err(failed)?;
    }
    let (handles_at, corrupt) = (handles.address(), corrupt.unwrap_or(u64::MAX));
    let blocks = kernel::blocks(gpu);
    let verify =
        || if args.check() { Verify::All(Check::new(blocks)) } else { Verify::Sum { count: 0, sum: 0 } };
    let with = kernel::Bench { gpu, module, args, pinning };
    let parameters = [bytes_of(&handles_at), bytes_of(&proxies), bytes_of(&corrupt)];
    let (run, sent, verified) = kernel::offer(&with, &name, kops, "offer_pushes", &parameters, |ended| {
        drain(&mut consumers, pinning, ended, verify)
    })?;
    let mut wrong = 0;
    for (index, verify) in verified.into_iter().enumerate() {
        let Some(verify) = verify else { return Err(Failure::Panicked { measurement: name }) };
        // What the blocks of this FIFO have sent.
        let of_these = |(block, sent): (usize, &Sent)| {
            if block % fifos.len() == index { *sent } else { Sent::zeroed() }
        };
        wrong += verify.finish(&sent.iter().enumerate().map(of_these).collect::<Vec<_>>());
    }
    drop((fifos, consumers, handles));
    gpu.reclaim(&name)?;
    Ok(Run { wrong, ..run })
}

/// Drains each FIFO on a thread of its own, the first on this one, until the kernels have ended; `None` of one that panicked.
fn drain(
    consumers: &mut [Consumer],
    pinning: &Pinning,
    ended: &AtomicBool,
    verify: impl Fn() -> Verify,
) -> Vec<Option<Verify>> {
    let done = &progress::current();
    let serve = |consumer: &mut Consumer, mut verify: Verify| loop {
        let over = ended.load(Ordering::Acquire);
        let taken = consumer.drain(32, |_, trigger| verify.see(trigger.words()));
        if taken > 0 {
            done.store(consumer.position().0, Ordering::Relaxed);
        } else if over {
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
