//! Many puts with signals one way, each in a place of its own and checked whole by the receiver on sight of its signal.

use portway_fifo::cuda::Kind;
use portway_transport_ipc::WordPlace;

use super::kernels::{Gpus, Plan};
use super::plain::{Plain, Way};
use super::{NAME, PLACES};
use crate::failure::Failure;
use crate::rate::over;
use crate::report::{Rate, Reference, Report, Row};

/// Messages of a run unless `-n` says otherwise.
const MESSAGES: u64 = 20_000;

/// Places that they take turns at: what is under way at most, of which the receiver gives back a half at a time.
const WINDOW: u64 = 128;

/// A run: millions of messages a second by the sender's, the receiver's and the reference's clock.
type Run = ([f64; 2], f64);

/// A row for each place of the word, with messages of the smallest size.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    let size_bytes = gpus.args.sizes()[0];
    let count = gpus.args.iterations.unwrap_or(MESSAGES);
    let mut found: Vec<(Vec<Run>, u64)> = vec![Default::default(); PLACES.len()];
    for _ in 0..gpus.args.most_runs {
        for ((place, _), (runs, wrong)) in PLACES.iter().zip(&mut found) {
            let (rates, mistakes) = messages(gpus, *place, size_bytes, count, None)?;
            runs.push((rates, copies(gpus, size_bytes)?));
            *wrong += mistakes;
        }
    }
    let row = |((_, subject), (runs, wrong)): (&(WordPlace, &str), (Vec<Run>, u64))| Row {
        layer: NAME.into(),
        test: "messages".into(),
        subject: (*subject).into(),
        shape: [("window".to_owned(), WINDOW)].into(),
        size_bytes,
        runs: runs.len() as u64,
        iterations: runs.len() as u64 * count,
        rate_mops: over(&runs, |([push, _], _)| *push)
            .zip(over(&runs, |([_, proc], _)| *proc))
            .map(|(push, proc)| Rate { push, proc }),
        reference: over(&runs, |([_, ours], theirs)| ours / theirs).map(|ratio| Reference {
            proc_mops: over(&runs, |(_, theirs)| *theirs),
            ..Reference::new("copy and value in a loop", ratio)
        }),
        wrong: gpus.args.check().then_some(wrong),
        ..Row::default()
    };
    report.results.extend(PLACES.iter().zip(found).map(row));
    Ok(())
}

/// Millions of messages a second at both ends, and those that were not whole.
fn messages(
    gpus: &Gpus,
    place: WordPlace,
    size_bytes: u64,
    count: u64,
    corrupt: Option<u64>,
) -> Result<([f64; 2], u64), Failure> {
    let name = format!("{NAME} messages, {size_bytes} bytes");
    let (check, corrupt) = (gpus.args.check().into(), corrupt.unwrap_or(u64::MAX));
    let plan = |follows| Plan { len_bytes: size_bytes, puts: WINDOW, count, follows, check, corrupt };
    let len_bytes = WINDOW * size_bytes;
    let [lead, follow] = gpus.run(&name, "messages", place, len_bytes, [plan(0), plan(1)])?;
    let rate = |whole_us: f64| count as f64 / whole_us;
    Ok(([rate(lead.whole_us), rate(follow.whole_us)], lead.wrong + follow.wrong))
}

/// Millions a second of plain copies with a value behind each.
fn copies(gpus: &Gpus, size_bytes: u64) -> Result<f64, Failure> {
    const COUNT: u64 = 4_000;
    let name = format!("{NAME} copies with values, {size_bytes} bytes");
    crate::progress::begin(&name);
    let contexts = gpus.contexts();
    let memory = |side: usize| {
        let memory = contexts[side].allocate(Kind::Vmm, COUNT * size_bytes);
        memory.map_err(|source| Failure::gpu(&name, source))
    };
    let (source, destination) = (memory(0)?, memory(1)?);
    let core = gpus.pinning.producer(3);
    let way = Way { contexts, source: &source, destination: &destination, core };
    let seconds = Plain::new(&name, gpus.limit(), vec![way])?.window_s(size_bytes, COUNT, true)?;
    drop((source, destination));
    gpus.reclaim(&name)?;
    Ok(COUNT as f64 / seconds / 1e6)
}

/// A run in which one message has a flipped bit.
pub fn wrong_of_a_corrupted_run(gpus: &Gpus) -> Result<u64, Failure> {
    Ok(messages(gpus, WordPlace::default(), 64, 4 * WINDOW, Some(2 * WINDOW + 7))?.1)
}
