//! Bytes a second: one way, and both ways at once.

use portway_fifo::cuda::Kind;
use portway_transport_ipc::WordPlace;

use super::NAME;
use super::kernels::{Gpus, Plan};
use super::plain::{Plain, Way};
use crate::failure::Failure;
use crate::rate::over;
use crate::report::{Reference, Report, Row};
use crate::stats::median;

/// Bytes of a put.
const SIZES: [u64; 5] = [64 << 10, 1 << 20, 16 << 20, 32 << 20, 256 << 20];

/// Bytes of a window, and the puts that it has at most: what a channel has under way.
const WINDOW_BYTES: u64 = 1 << 30;
const WINDOW_PUTS: u64 = 128;

/// Windows of a run; the first does not count.
const WINDOWS: u64 = 3;

/// Puts of a window.
fn puts(size_bytes: u64) -> u64 {
    (WINDOW_BYTES / size_bytes).min(WINDOW_PUTS)
}

/// One size: each run's bandwidth with the reference's beside it.
#[derive(Clone, Default)]
struct Found {
    runs: Vec<(f64, f64)>,
    wrong: u64,
}

/// Rows for one way and for both.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    for (both, subject) in [(false, "one way"), (true, "both ways")] {
        let mut found = vec![Found::default(); SIZES.len()];
        for _ in 0..gpus.args.most_runs {
            for (&size, Found { runs, wrong }) in SIZES.iter().zip(&mut found) {
                let (ours, mistakes) = windows(gpus, size, both, None)?;
                runs.push((ours, copies(gpus, size, puts(size), both)?));
                *wrong += mistakes;
            }
        }
        let row = |(&size_bytes, Found { runs, wrong }): (&u64, Found)| Row {
            layer: NAME.into(),
            test: "bandwidth".into(),
            subject: subject.into(),
            shape: [("window".to_owned(), puts(size_bytes))].into(),
            size_bytes,
            runs: runs.len() as u64,
            iterations: runs.len() as u64 * (WINDOWS - 1) * puts(size_bytes),
            bandwidth_gb_per_s: over(&runs, |(ours, _)| *ours).map(|spread| spread.median),
            reference: over(&runs, |(ours, theirs)| ours / theirs).map(|ratio| Reference {
                bandwidth_gb_per_s: over(&runs, |(_, theirs)| *theirs),
                ..Reference::new("cuMemcpyPeerAsync", ratio)
            }),
            wrong: gpus.args.check().then_some(wrong),
            ..Row::default()
        };
        report.results.extend(SIZES.iter().zip(found).map(row));
    }
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

/// GB/s of a run, and the windows that were not whole.
fn windows(gpus: &Gpus, size_bytes: u64, both: bool, corrupt: Option<u64>) -> Result<(f64, u64), Failure> {
    let name = format!("{NAME} bandwidth, {size_bytes} bytes");
    let (puts, check) = (puts(size_bytes), gpus.args.check().into());
    let corrupt = corrupt.unwrap_or(u64::MAX);
    let plan = |follows| Plan { len_bytes: size_bytes, puts, count: WINDOWS, follows, check, corrupt };
    let plans = if both { [plan(2), plan(3)] } else { [plan(0), plan(1)] };
    let [lead, follow] = gpus.run(&name, "windows", WordPlace::default(), puts * size_bytes, plans)?;
    // Of both ways, the slower end's time counts for both.
    let us: Vec<f64> = match both {
        true => lead.us.iter().zip(&follow.us).map(|(a, b)| a.max(*b)).collect(),
        false => lead.us,
    };
    let middle = median(&us[1..]).map_or(f64::NAN, |spread| spread.median);
    let bytes = (1 + u64::from(both)) * puts * size_bytes;
    Ok((bytes as f64 / middle / 1e3, lead.wrong + follow.wrong))
}

/// A run in which one window has a flipped bit.
pub fn wrong_of_a_corrupted_run(gpus: &Gpus) -> Result<u64, Failure> {
    Ok(windows(gpus, SIZES[0], false, Some(1))?.1)
}
