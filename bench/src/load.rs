//! Latency under an offered load: operations are due at a fixed rate, whether those before them are done or not, and each
//! is timed from when it is due, so that lateness shows.

pub mod kernel;
pub mod software;

use std::time::Duration;

use crate::args::Args;
use crate::failure::Failure;
use crate::rate::over;
use crate::report::{OFFERED, Rate, Row};

/// Up to the knee the 99th percentile is at most this many times that of the lowest load, and the rate at least this share
/// of the offered one.
pub const KNEE_TIMES: f64 = 2.0;
pub const KNEE_SHARE: f64 = 0.95;

/// One run under one load.
pub struct Run {
    /// Operations carried out a second, in millions.
    pub mops: f64,
    /// From due to done, in microseconds.
    pub us: Vec<f64>,
    pub wrong: u64,
}

/// How many operations of a run are due a time.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub period_ps: u64,
    /// How many are due, at most within the limit of a run.
    pub all: u64,
    pub limit: Duration,
}

impl Pace {
    pub fn new(args: &Args, kops: u64) -> Self {
        let (period_ps, limit) = (1_000_000_000 / kops, args.limit());
        let within = (limit.as_nanos() as u64).saturating_mul(1000) / period_ps;
        Pace { period_ps, all: args.iterations.unwrap_or(u64::MAX).min(within).max(1), limit }
    }

    /// When an operation is due, from the start.
    pub fn due(&self, n: u64) -> Duration {
        Duration::from_nanos((u128::from(n) * u128::from(self.period_ps) / 1000) as u64)
    }
}

/// A row for each case and load, one case after the other. Each run goes through all of them; `offer` makes one.
pub fn rows<C>(
    args: &Args,
    runs: impl Iterator<Item = u64>,
    cases: &[(C, Row)],
    kops: &[u64],
    mut offer: impl FnMut(&C, u64) -> Result<Run, Failure>,
) -> Result<Vec<Row>, Failure> {
    let each = || cases.iter().flat_map(|case| kops.iter().map(move |kops| (case, *kops)));
    let mut found: Vec<Vec<Run>> = each().map(|_| Vec::new()).collect();
    for _ in runs {
        for (((case, _), kops), found) in each().zip(&mut found) {
            found.push(offer(case, kops)?);
        }
    }
    let row = |(((_, row), kops), runs): ((&(C, Row), u64), Vec<Run>)| {
        let rate = over(&runs, |run| run.mops);
        let mut row = Row {
            runs: runs.len() as u64,
            // What was offered and timed was carried out.
            rate_mops: rate.map(|rate| Rate { push: rate, proc: rate }),
            wrong: args.check().then(|| runs.iter().map(|run| run.wrong).sum()),
            ..row.clone()
        };
        row.shape.insert(OFFERED.into(), kops);
        row.with_times(args, runs.into_iter().flat_map(|run| run.us).collect())
    };
    Ok(each().zip(found).map(row).collect())
}

/// The last load before the first at which latency has risen or the rate has fallen behind. None if no load is such, or the
/// lowest is.
pub fn knee(rows: &[&Row]) -> Option<usize> {
    let high = |row: &Row| row.time_us.map(|times| times.p99.unwrap_or(times.p50));
    let lowest = high(rows.first()?)?;
    let holds = |row: &&Row| {
        let offered = row.shape.get(OFFERED).map_or(0.0, |kops| *kops as f64 / 1e3);
        let carried = row.rate_mops.is_none_or(|rate| rate.proc.median >= KNEE_SHARE * offered);
        carried && high(row).is_some_and(|us| us <= KNEE_TIMES * lowest)
    };
    let first_that_fails = rows.iter().position(|row| !holds(row))?;
    first_that_fails.checked_sub(1)
}

/// What there is to say of the knees of a test's rows: a line for each series of loads.
pub fn knees(rows: &[Row]) -> Vec<String> {
    let series = |row: &Row| {
        let mut shape = row.shape.clone();
        (shape.remove(OFFERED), shape)
    };
    let mut lines = Vec::new();
    let under_load: Vec<&Row> = rows.iter().filter(|row| row.shape.contains_key(OFFERED)).collect();
    let chunks: Vec<&[&Row]> = under_load.chunk_by(|a, b| series(a).1 == series(b).1).collect();
    let several = chunks.len() > 1;
    for loads in chunks {
        let mops = |row: &Row| series(row).0.unwrap_or(0) as f64 / 1e3;
        let names = loads.first().map_or(Default::default(), |row| series(row).1);
        let names: Vec<_> = names.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let of = if several { format!(" of {}", names.join(" ")) } else { String::new() };
        let (first, last) =
            (loads.first().map_or(0.0, |row| mops(row)), loads.last().map_or(0.0, |row| mops(row)));
        lines.push(match knee(loads) {
            Some(at) => format!("knee{of}: {} Mops", mops(loads[at])),
            None if falls_behind(loads) => format!("knee{of}: below {first} Mops, the lowest load"),
            None => format!("knee{of}: above {last} Mops, the highest load"),
        });
    }
    lines
}

/// Whether not even the lowest load was carried.
fn falls_behind(loads: &[&Row]) -> bool {
    let carried = |row: &&Row| {
        let offered = row.shape.get(OFFERED).map_or(0.0, |kops| *kops as f64 / 1e3);
        row.rate_mops.is_none_or(|rate| rate.proc.median >= KNEE_SHARE * offered)
    };
    loads.first().is_some_and(|lowest| !carried(lowest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::stats::{Spread, Times};

    /// Offered and carried in thousands a second, and the latency.
    fn rows_of(loads: &[(u64, f64, f64)]) -> Vec<Row> {
        let row = |&(kops, carried, us): &(u64, f64, f64)| {
            let rate = Spread { min: 0.0, median: carried / 1e3, max: 0.0 };
            Row {
                shape: [(OFFERED.to_owned(), kops)].into(),
                time_us: Times::of(&mut vec![us; 1000]),
                rate_mops: Some(Rate { push: rate, proc: rate }),
                ..Row::default()
            }
        };
        loads.iter().map(row).collect()
    }

    #[test]
    fn the_knee_is_the_last_load_before_latency_rises_or_the_rate_falls_behind() {
        let loads = |loads: &[(u64, f64, f64)]| knee(&rows_of(loads).iter().collect::<Vec<_>>());
        assert_eq!(loads(&[(10, 10.0, 1.0), (20, 20.0, 1.9), (30, 30.0, 2.1), (40, 40.0, 1.0)]), Some(1));
        assert_eq!(loads(&[(10, 10.0, 1.0), (20, 18.0, 1.0)]), Some(0));
        assert_eq!(loads(&[(10, 10.0, 1.0), (20, 20.0, 1.5)]), None, "all loads hold");
        assert_eq!(loads(&[(10, 5.0, 1.0), (20, 5.0, 1.0)]), None, "none holds");
        assert_eq!(loads(&[]), None);
    }

    #[test]
    fn the_knee_is_told_for_each_series_also_where_no_load_shows_it() {
        let words = |loads: &[(u64, f64, f64)]| knees(&rows_of(loads));
        assert_eq!(words(&[(1000, 1000.0, 1.0), (2000, 1000.0, 1.0)]), ["knee: 1 Mops"]);
        assert_eq!(
            words(&[(1000, 1000.0, 1.0), (2000, 2000.0, 1.0)]),
            ["knee: above 2 Mops, the highest load"]
        );
        assert_eq!(words(&[(1000, 5.0, 1.0), (2000, 5.0, 1.0)]), ["knee: below 1 Mops, the lowest load"]);
        let mut rows = [rows_of(&[(1000, 1000.0, 1.0)]), rows_of(&[(1000, 1.0, 1.0)])].concat();
        rows[1].shape.insert("proxies".into(), 2);
        assert_eq!(knees(&rows).len(), 2);
        assert!(knees(&rows)[1].starts_with("knee of proxies=2: below"), "{:?}", knees(&rows));
        assert!(knees(&[Row::default()]).is_empty());
    }

    #[test]
    fn a_pace_ends_by_time_or_by_count() {
        let pace = |line: &str, kops| Pace::new(&args::parse(line).unwrap(), kops);
        assert_eq!(pace("put -D 0.01", 1000).all, 10_000);
        assert_eq!(pace("put -D 0.01 -n 7", 1000).all, 7);
        assert_eq!(pace("put -D 0.0001", 1).all, 1, "one at least");
        assert_eq!(pace("put", 2000).due(4), Duration::from_micros(2));
    }
}
