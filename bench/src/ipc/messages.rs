//! Many puts with signals one way, each in a place of its own and checked whole by the receiver on sight of its signal.

use portway_fifo::cuda::Kind;
use portway_transport_ipc::WordPlace;

use super::kernels::{Gpus, Plan};
use super::plain::{Plain, Way};
use super::{NAME, PLACES};
use crate::failure::Failure;
use crate::rate::{self, Outcome, Pace, over};
use crate::report::{Control, Reference, Report, Row, counted_first};

/// Messages of a run unless `-n` says otherwise.
const MESSAGES: u64 = 20_000;

/// Places that they take turns at: what is under way at most, of which the receiver gives back a half at a time.
const WINDOW: u64 = 128;

const TEST: &str = "messages";

/// Rows for each place of the word, with messages of the smallest size.
pub fn rows(gpus: &Gpus, report: &mut Report) -> Result<(), Failure> {
    let size_bytes = gpus.args.sizes().into_iter().min().unwrap_or(8);
    let count = gpus.args.iterations.unwrap_or(MESSAGES);
    // Each run's outcome with the reference's rate beside it.
    let mut found: [Vec<(Outcome, f64)>; PLACES.len()] = Default::default();
    for _ in 0..gpus.args.most_runs {
        for ((place, _), runs) in PLACES.iter().zip(&mut found) {
            let ours = messages(gpus, *place, size_bytes, count, None)?;
            runs.push((ours, copies(gpus, size_bytes)?));
        }
    }
    let rows = |((_, subject), runs): (&(WordPlace, &str), Vec<(Outcome, f64)>)| {
        let row = Row {
            layer: NAME.into(),
            test: TEST.into(),
            subject: (*subject).into(),
            shape: [("window".to_owned(), WINDOW)].into(),
            size_bytes,
            reference: over(&runs, |(ours, theirs)| ours.warm.proc_mops / theirs).map(|ratio| Reference {
                proc_mops: over(&runs, |(_, theirs)| *theirs),
                ..Reference::new("copy and value in a loop", ratio)
            }),
            ..Row::default()
        };
        rate::rows(&row, true, &runs.iter().map(|(run, _)| *run).collect::<Vec<_>>())
    };
    report.results.extend(counted_first(PLACES.iter().zip(found).flat_map(rows).collect()));
    Ok(())
}

/// One run, with so many messages that count, and how many were not whole.
fn messages(
    gpus: &Gpus,
    place: WordPlace,
    size_bytes: u64,
    counted: u64,
    corrupt: Option<u64>,
) -> Result<Outcome, Failure> {
    let name = format!("{NAME} messages, {size_bytes} bytes");
    let (check, corrupt) = (gpus.args.check(), corrupt.unwrap_or(u64::MAX));
    let before = gpus.args.warmup.min(counted);
    let count = before + counted;
    let plan =
        |follows| Plan { len_bytes: size_bytes, puts: WINDOW, count, follows, check: check.into(), corrupt };
    let plans = [plan(0), plan(1)];
    let [lead, follow] = gpus.run(&name, ("messages", count), place, WINDOW * size_bytes, plans)?;
    let [ramp, warm] = paces(before as usize, [&lead.us, &follow.us]);
    let wrong = check.then_some(lead.wrong + follow.wrong);
    Ok(Outcome { cold: None, ramp: (before > 0).then_some(ramp), warm, wrong })
}

/// The pace of the first `before` messages and of the others, by when sender and receiver were done with each, in microseconds
/// from the begin.
fn paces(before: usize, done_us: [&[f64]; 2]) -> [Pace; 2] {
    let pace = |from: usize, to: usize| {
        let at = |us: &[f64], n: usize| n.checked_sub(1).map_or(0.0, |last| us[last]);
        let [push_mops, proc_mops] = done_us.map(|us| (to - from) as f64 / (at(us, to) - at(us, from)));
        Pace { iterations: (to - from) as u64, push_mops, proc_mops }
    };
    [pace(0, before), pace(before, done_us[0].len())]
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
pub fn control(gpus: &Gpus) -> Result<Control, Failure> {
    let found = messages(gpus, WordPlace::default(), 64, 4 * WINDOW, Some(2 * WINDOW + 7))?.wrong;
    Ok(Control::new(NAME, TEST, 1, found.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_do_not_count_are_apart_from_the_others() {
        let [ramp, warm] = paces(2, [&[1.0, 4.0, 5.0, 5.5], &[2.0, 8.0, 9.0, 10.0]]);
        assert_eq!((ramp.iterations, ramp.push_mops, ramp.proc_mops), (2, 0.5, 0.25));
        assert_eq!((warm.iterations, warm.push_mops, warm.proc_mops), (2, 2.0 / 1.5, 1.0));
        let [_, warm] = paces(0, [&[1.0, 4.0], &[2.0, 8.0]]);
        assert_eq!((warm.iterations, warm.push_mops, warm.proc_mops), (2, 0.5, 0.25));
    }
}
