//! Bytes a second: one way, and both ways at once.

use std::time::Duration;

use portway_fifo::cuda::Kind;
use portway_transport_ipc::WordPlace;

use super::NAME;
use super::kernels::{Gpus, Plan};
use super::plain::{Plain, Way};
use crate::args::Args;
use crate::failure::Failure;
use crate::put::throughput::of_windows;
use crate::rate::{self, Outcome, over};
use crate::report::{Control, Reference, Report, Row, counted_first};

/// Bytes of a put unless the command line says otherwise.
const SIZES: [u64; 5] = [64 << 10, 1 << 20, 16 << 20, 32 << 20, 256 << 20];

/// Bytes of a window, and the puts that it has at most: what a channel has under way.
const WINDOW_BYTES: u64 = 1 << 30;
const WINDOW_PUTS: u64 = 128;

/// Windows of a run that count, and those before them, at most.
const WINDOWS: u64 = 3;
const WINDOWS_BEFORE: u64 = 2;

const TEST: &str = "bandwidth";

/// Puts of a window that has so many bytes at most.
pub fn puts(size_bytes: u64, window_bytes: u64) -> u64 {
    (window_bytes / size_bytes).clamp(1, WINDOW_PUTS)
}

/// How many windows of so many puts do not count, and how many do.
pub fn windows_of(args: &Args, puts: u64) -> (u64, u64) {
    let counted = args.iterations.map_or(WINDOWS, |count| count.div_ceil(puts).min(WINDOWS));
    (args.warmup.div_ceil(puts).min(WINDOWS_BEFORE), counted)
}

/// Rows for one way and for both.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    let sizes = gpus.args.sizes_or(&SIZES);
    let mut rows = Vec::new();
    for (both, subject) in [(false, "one way"), (true, "both ways")] {
        // Each run's outcome with the reference's bandwidth beside it.
        let mut found: Vec<Vec<(Outcome, f64)>> = vec![Vec::new(); sizes.len()];
        for _ in 0..gpus.args.most_runs {
            for (&size, runs) in sizes.iter().zip(&mut found) {
                let ours = windows(gpus, size, both, None)?;
                runs.push((ours, copies(gpus, size, puts(size, WINDOW_BYTES), both)?));
            }
        }
        let of_size = |(&size_bytes, runs): (&u64, Vec<(Outcome, f64)>)| {
            let gb_per_s = |run: &Outcome| run.warm.proc_mops * size_bytes as f64 / 1e3;
            let row = Row {
                layer: NAME.into(),
                test: TEST.into(),
                subject: subject.into(),
                shape: [("window".to_owned(), puts(size_bytes, WINDOW_BYTES))].into(),
                size_bytes,
                reference: over(&runs, |(ours, theirs)| gb_per_s(ours) / theirs).map(|ratio| Reference {
                    bandwidth_gb_per_s: over(&runs, |(_, theirs)| *theirs),
                    ..Reference::new("cuMemcpyPeerAsync", ratio)
                }),
                ..Row::default()
            };
            rate::rows(&row, true, &runs.iter().map(|(run, _)| *run).collect::<Vec<_>>())
        };
        rows.extend(sizes.iter().zip(found).flat_map(of_size));
    }
    report.results.extend(counted_first(rows));
    Ok(())
}

/// GB/s of plain copies, each where a put of a window lands.
fn copies(gpus: &Gpus, size_bytes: u64, puts: u64, both: bool) -> Result<f64, Failure> {
    let name = format!("{NAME} plain copies, {size_bytes} bytes");
    crate::progress::begin(&name);
    let contexts = gpus.contexts();
    let memory = |side: usize| {
        let allocate = || contexts[side].allocate(Kind::Vmm, size_bytes * puts);
        Ok([allocate()?, allocate()?])
    };
    let memories = memory(0).and_then(|near| Ok([near, memory(1)?]));
    let memories = memories.map_err(|source| Failure::gpu(&name, source))?;
    let way = |here: usize| Way {
        contexts: [contexts[here], contexts[1 - here]],
        source: &memories[here][0],
        destination: &memories[1 - here][1],
        core: gpus.pinning.producer(3 + here),
    };
    let ways = if both { vec![way(0), way(1)] } else { vec![way(0)] };
    let bytes = ways.len() as u64 * puts * size_bytes;
    let seconds = Plain::new(&name, gpus.limit(), ways)?.window_s(size_bytes, puts, false)?;
    drop(memories);
    gpus.reclaim(&name)?;
    Ok(bytes as f64 / seconds / 1e9)
}

/// A run, and how many of its windows were not whole.
fn windows(gpus: &Gpus, size_bytes: u64, both: bool, corrupt: Option<u64>) -> Result<Outcome, Failure> {
    let name = format!("{NAME} bandwidth, {size_bytes} bytes");
    let (puts, check) = (puts(size_bytes, WINDOW_BYTES), gpus.args.check());
    let (before, counted) = windows_of(gpus.args, puts);
    let (count, corrupt) = (before + counted, corrupt.unwrap_or(u64::MAX));
    let plan = |follows| Plan { len_bytes: size_bytes, puts, count, follows, check: check.into(), corrupt };
    let plans = if both { [plan(2), plan(3)] } else { [plan(0), plan(1)] };
    let [lead, follow] =
        gpus.run(&name, ("windows", 2 * count), WordPlace::default(), puts * size_bytes, plans)?;
    // Of both ways, the slower end's time counts for both.
    let us =
        lead.us.iter().zip(&follow.us).map(|(lead, follow)| if both { lead.max(*follow) } else { *lead });
    let took: Vec<Duration> = us.map(|us| Duration::from_nanos((us * 1e3) as u64)).collect();
    let took: Vec<_> = took.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
    let all = puts * (1 + u64::from(both));
    Ok(of_windows(all, &took, counted as usize, check.then_some(lead.wrong + follow.wrong)))
}

/// A run in which one window has a flipped bit.
pub fn control(gpus: &Gpus) -> Result<Control, Failure> {
    let found = windows(gpus, SIZES[0], false, Some(0))?.wrong;
    Ok(Control::new(NAME, TEST, 1, found.unwrap_or(0)))
}
