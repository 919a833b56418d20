//! The rows: each run measures the transport, the raw loop and perftest one after the other.

use super::perftest::{self, Perftest};
use super::raw::{self, Setup};
use super::{NAME, wire};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::put::throughput::window;
use crate::put::{latency, throughput};
use crate::rate::{self, Outcome, over};
use crate::report::{Reference, Report, Row, counted_first};
use crate::round::Samples;
use crate::stats::median;

/// One run of one size.
struct Run<T> {
    ours: T,
    raw: f64,
    perftest: Option<f64>,
}

/// What perftest said, or why it has no figure, which is noted once.
fn beside(measured: Option<Result<f64, String>>, why_not: &mut Option<String>) -> Option<f64> {
    match measured? {
        Ok(value) => Some(value),
        Err(why) => {
            why_not.get_or_insert(why);
            None
        }
    }
}

/// Rows with the time one way: beside the raw loop, and beside `ib_write_lat` where there is one.
pub fn latency(
    args: &Args,
    pinning: &Pinning,
    setup: &Setup,
    perftest: Option<&Perftest>,
    report: &mut Report,
) -> Result<(), Failure> {
    #[derive(Default)]
    struct Found {
        samples: Samples,
        runs: Vec<Run<f64>>,
    }
    let sizes = args.sizes();
    let mut found: Vec<Found> = sizes.iter().map(|_| Found::default()).collect();
    let mut why_not = None;
    for _ in args.runs() {
        for (&size, found) in sizes.iter().zip(&mut found) {
            let name = format!("{NAME} latency, {size} bytes");
            let wired = wire(args, &name, size, pinning)?;
            let mut samples = latency::through(args, &name, wired, size, None, pinning)?;
            let name = raw::name("latency", size);
            let mut sides = raw::connect(args, &name, size)?;
            let (raw, _) = latency::between(args, &name, &mut sides, size, None, pinning)?;
            drop(sides);
            let count = samples.warm.len() as u64;
            let perftest = perftest.map(|perftest| perftest.latency_us(args, setup, size, count));
            let perftest = beside(perftest, &mut why_not);
            samples.wrong += raw.wrong;
            if let (Some(ours), Some(raw)) = (median(&samples.warm), median(&raw.warm)) {
                found.runs.push(Run { ours: ours.median, raw: raw.median, perftest });
            }
            found.samples.add(samples);
        }
    }
    note(report, why_not);
    let of_size = |test: &str, size_bytes, found: &Found, name, theirs: fn(&Run<f64>) -> Option<f64>| {
        let theirs = |run: &Run<f64>| theirs(run).unwrap_or(f64::NAN);
        let ratio = over(&found.runs, |run| run.ours / theirs(run))?;
        let row = Row {
            layer: NAME.into(),
            test: test.into(),
            size_bytes,
            runs: found.runs.len() as u64,
            reference: Some(Reference { time_us: over(&found.runs, theirs), ..Reference::new(name, ratio) }),
            ..Row::default()
        };
        Some(found.samples.clone().rows(args, row))
    };
    let mut rows = |test, name, theirs: fn(&Run<f64>) -> Option<f64>| {
        let found = sizes.iter().zip(&found);
        let rows = found.filter_map(|(&size, found)| of_size(test, size, found, name, theirs));
        report.results.extend(counted_first(rows.flatten().collect()));
    };
    rows("latency beside raw verbs", raw::REFERENCE, |run| Some(run.raw));
    rows("latency beside ib_write_lat", perftest::LAT, |run| run.perftest);
    Ok(())
}

/// Rows with the rate: beside the raw loop, and beside `ib_write_bw` where there is one.
pub fn throughput(
    args: &Args,
    pinning: &Pinning,
    setup: &Setup,
    perftest: Option<&Perftest>,
    report: &mut Report,
) -> Result<(), Failure> {
    let sizes = args.sizes();
    let mut found: Vec<Vec<Run<Outcome>>> = sizes.iter().map(|_| Vec::new()).collect();
    let mut why_not = None;
    for _ in args.runs() {
        for (&size, found) in sizes.iter().zip(&mut found) {
            let name = format!("{NAME} throughput, {size} bytes");
            let wired = wire(args, &name, size * window(size), pinning)?;
            let mut ours = throughput::through(args, &name, wired, size, None, pinning)?;
            let name = raw::name("throughput", size);
            let mut sides = raw::connect(args, &name, size * window(size))?;
            let (raw, _) = throughput::between(args, &name, &mut sides, size, None, pinning)?;
            drop(sides);
            let perftest = perftest.map(|perftest| perftest.mops(args, setup, size, ours.warm.iterations));
            let perftest = beside(perftest, &mut why_not);
            ours.wrong = ours.wrong.zip(raw.wrong).map(|(ours, raw)| ours + raw);
            found.push(Run { ours, raw: raw.warm.proc_mops, perftest });
        }
    }
    note(report, why_not);
    let of_size = |test: &str,
                   size_bytes: u64,
                   runs: &[Run<Outcome>],
                   name,
                   theirs: fn(&Run<Outcome>) -> Option<f64>| {
        let theirs = |run: &Run<Outcome>| theirs(run).unwrap_or(f64::NAN);
        let ratio = over(runs, |run| run.ours.warm.proc_mops / theirs(run))?;
        let row = Row {
            layer: NAME.into(),
            test: test.into(),
            shape: [("window".to_owned(), window(size_bytes))].into(),
            size_bytes,
            reference: Some(Reference { proc_mops: over(runs, theirs), ..Reference::new(name, ratio) }),
            ..Row::default()
        };
        Some(rate::rows(&row, true, &runs.iter().map(|run| run.ours).collect::<Vec<_>>()))
    };
    let mut rows = |test, name, theirs: fn(&Run<Outcome>) -> Option<f64>| {
        let found = sizes.iter().zip(&found);
        let rows = found.filter_map(|(&size, runs)| of_size(test, size, runs, name, theirs));
        report.results.extend(counted_first(rows.flatten().collect()));
    };
    rows("throughput beside raw verbs", raw::REFERENCE, |run| Some(run.raw));
    rows("throughput beside ib_write_bw", perftest::BW, |run| run.perftest);
    Ok(())
}

fn note(report: &mut Report, why_not: Option<String>) {
    if let Some(why) = why_not {
        report.note(NAME, format!("perftest has not given every figure: {why}"));
    }
}
