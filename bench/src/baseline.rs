//! Comparing a result with an earlier one, row by row.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::Path;

use crate::report::{OFFERED, Phase, Report, Row, SCHEMA};
use crate::table;

/// Why a file is not a result.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not a result: {0}")]
    Json(#[from] serde_json::Error),
    #[error("its schema is {found}, and {SCHEMA} is what can be read")]
    Schema { found: u64 },
}

/// Reads a result as `-J` wrote it. The schema number goes before everything else, for another one may have other keys.
pub fn read(path: &Path) -> Result<Report, Unreadable> {
    let json: serde_json::Value = serde_json::from_reader(BufReader::new(File::open(path)?))?;
    match json.get("schema").and_then(serde_json::Value::as_u64) {
        Some(found) if found != u64::from(SCHEMA) => Err(Unreadable::Schema { found }),
        _ => Ok(serde_json::from_value(json)?),
    }
}

/// What two results have to say about each other.
#[derive(Debug, Default)]
pub struct Comparison {
    /// What differs that may explain the rest.
    pub warnings: Vec<String>,
    /// What got slower than allowed, with both numbers.
    pub slower: Vec<String>,
    /// Rows that only one of them has.
    pub missing: Vec<String>,
    /// Numbers that both have.
    pub compared: usize,
}

/// A number of a row that is compared.
struct Measure {
    name: &'static str,
    unit: &'static str,
    /// Whether more of it is better.
    more: bool,
    pick: fn(&Row) -> Option<f64>,
}

const MEASURES: [Measure; 3] = [
    Measure { name: "t_p50", unit: "us", more: false, pick: |row| row.time_us.map(|times| times.p50) },
    Measure {
        name: "proc",
        unit: "Mops",
        more: true,
        pick: |row| row.rate_mops.map(|rate| rate.proc.median),
    },
    // Where there is a rate, the bandwidth says the same.
    Measure {
        name: "bw",
        unit: "GB/s",
        more: true,
        pick: |row| row.bandwidth_gb_per_s.filter(|_| row.rate_mops.is_none()),
    },
];

impl Comparison {
    /// A row is slower if one operation, or byte, takes more than `tolerance` percent longer than it did. Layers that were
    /// not asked for this time are left out.
    pub fn of(now: &Report, before: &Report, tolerance: f64) -> Self {
        let mut found = Comparison { warnings: differences(now, before), ..Comparison::default() };
        let asked = |row: &&Row| now.layers.iter().any(|layer| layer.layer == row.layer);
        // The first iteration, and the few between, are too few to compare; and behind the knee of a load a time says no more
        // than how long it was offered.
        let counted = |row: &&Row| row.phase == Phase::Warm && !row.shape.contains_key(OFFERED);
        for row in now.results.iter().filter(counted) {
            match before.results.iter().find(|other| key(other) == key(row)) {
                Some(other) => found.row(row, other, tolerance),
                None => found.missing.push(format!("only in this result: {}", describe(row))),
            }
        }
        for row in before.results.iter().filter(asked).filter(counted) {
            if !now.results.iter().any(|other| key(other) == key(row)) {
                found.missing.push(format!("only in the baseline: {}", describe(row)));
            }
        }
        found
    }

    fn row(&mut self, now: &Row, before: &Row, tolerance: f64) {
        for Measure { name, unit, more, pick } in &MEASURES {
            match (pick(now), pick(before)) {
                (Some(is), Some(was)) => {
                    self.compared += 1;
                    let longer = 100.0 * (if *more { was / is } else { is / was } - 1.0);
                    // What cannot be compared, as 0 / 0, is no reason to pass.
                    if longer > tolerance || longer.is_nan() {
                        let row = describe(now);
                        self.slower.push(format!(
                            "{row}: {name} was {} {unit}, is {} {unit}: {longer:.1} % slower, {tolerance} % allowed",
                            table::number(was),
                            table::number(is),
                        ));
                    }
                }
                (None, None) => {}
                (is, _) => {
                    let side = if is.is_some() { "this result" } else { "the baseline" };
                    self.missing.push(format!("only in {side}: {name} of {}", describe(now)));
                }
            }
        }
    }

    /// Why the comparison fails, if it does. Nothing in common is no proof that nothing got slower.
    pub fn failure(&self) -> Option<String> {
        match (self.compared, self.slower.len()) {
            (0, _) => Some("baseline: no row in common, so nothing was compared".into()),
            (_, 0) => None,
            (compared, slower) => {
                Some(format!("baseline: {slower} of {compared} numbers are slower than allowed"))
            }
        }
    }

    /// As lines that are not data.
    pub fn lines(&self) -> String {
        let warnings = self.warnings.iter().map(|text| format!("warning: {text}"));
        let slower = self.slower.iter().map(|text| format!("SLOWER: {text}"));
        let all = warnings.chain(self.missing.iter().cloned()).chain(slower);
        let end = format!("{} numbers compared, {} slower", self.compared, self.slower.len());
        let lines = all.chain([end]).map(|text| format!("# baseline: {text}\n"));
        std::iter::once("#\n".to_owned()).chain(lines).collect()
    }
}

/// What makes two rows the same.
fn key(row: &Row) -> impl PartialEq + '_ {
    (&row.layer, &row.test, &row.subject, row.phase, &row.shape, row.size_bytes)
}

/// A row in words.
pub fn describe(row: &Row) -> String {
    let mut words = vec![row.layer.clone(), row.test.clone(), row.subject.clone()];
    words.extend(row.shape.iter().map(|(key, value)| format!("{key}={value}")));
    words.push(format!("{} B", row.size_bytes));
    if row.phase != Default::default() {
        words.push(row.phase.name().into());
    }
    words.retain(|word| !word.is_empty());
    words.join(" ")
}

/// Where the two were measured, and how, as far as it differs.
fn differences(now: &Report, before: &Report) -> Vec<String> {
    let gpus = |report: &Report| {
        let names: Vec<_> = report.machine.gpus.iter().map(|gpu| gpu.name.clone()).collect();
        names.join(", ")
    };
    let nics = |report: &Report| {
        let ports: Vec<_> =
            report.machine.nics.iter().map(|nic| format!("{} {:?}", nic.name, nic.rate)).collect();
        ports.join(", ")
    };
    let both = |pick: &dyn Fn(&Report) -> String| [pick(before), pick(now)];
    [
        ("host", both(&|report| report.machine.host.clone())),
        ("processor", both(&|report| report.machine.cpu.clone())),
        ("number of cores", both(&|report| report.machine.cores.len().to_string())),
        ("kernel", both(&|report| report.machine.kernel.clone())),
        ("driver", both(&|report| report.machine.driver.clone().unwrap_or_default())),
        ("GPUs", both(&gpus)),
        ("RDMA ports", both(&nics)),
        ("version", both(&|report| report.version.clone())),
        ("-c", both(&|report| u8::from(report.config.check).to_string())),
        ("-D", both(&|report| report.config.limit_s.to_string())),
    ]
    .into_iter()
    .filter(|(_, [was, is])| was != is)
    .map(|(what, [was, is])| format!("another {what}: was {was:?}, is {is:?}"))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::report::{Rate, Status};
    use crate::stats::{Spread, Times};

    fn spread(median: f64) -> Spread {
        Spread { min: median, median, max: median }
    }

    fn report() -> Report {
        let mut report = Report::new(&args::parse("put").unwrap());
        let row = |test: &str, size_bytes| Row {
            layer: "put".into(),
            test: test.into(),
            size_bytes,
            ..Row::default()
        };
        let rate = Rate { push: spread(8.0), proc: spread(4.0) };
        report.results = vec![
            Row { time_us: Times::of(&mut [2.0]), ..row("latency", 8) },
            Row { rate_mops: Some(rate), bandwidth_gb_per_s: Some(1.0), ..row("throughput", 8) },
            Row { bandwidth_gb_per_s: Some(10.0), ..row("bandwidth", 64) },
        ];
        report.layer_done("put", Status::Ran, None);
        report
    }

    #[test]
    fn equal_results_hold_even_without_tolerance() {
        let found = Comparison::of(&report(), &report(), 0.0);
        assert_eq!((found.compared, found.failure()), (3, None), "{found:?}");
        assert!(found.warnings.is_empty() && found.missing.is_empty(), "{found:?}");
    }

    #[test]
    fn each_number_that_got_slower_is_found_and_named_with_both() {
        type Plant = fn(&mut Report);
        let slow: [(Plant, &str); 3] = [
            (
                |report| report.results[0].time_us.as_mut().unwrap().p50 = 2.3,
                "t_p50 was 2.00 us, is 2.30 us: 15.0 %",
            ),
            (
                |report| report.results[1].rate_mops.as_mut().unwrap().proc = spread(3.2),
                "proc was 4.00 Mops, is 3.20 Mops: 25.0 %",
            ),
            (
                |report| report.results[2].bandwidth_gb_per_s = Some(8.0),
                "bw was 10.0 GB/s, is 8.00 GB/s: 25.0 %",
            ),
        ];
        for (plant, words) in slow {
            let mut now = report();
            plant(&mut now);
            let found = Comparison::of(&now, &report(), 10.0);
            assert_eq!(found.slower.len(), 1, "{found:?}");
            assert!(found.slower[0].contains(words), "{found:?}");
            assert!(found.failure().is_some());
            assert_eq!(Comparison::of(&now, &report(), 30.0).failure(), None);
            // The other way round it got faster.
            assert_eq!(Comparison::of(&report(), &now, 10.0).failure(), None);
        }
    }

    #[test]
    fn rows_of_one_side_are_named_and_nothing_in_common_fails() {
        let mut now = report();
        now.results[0].size_bytes = 16;
        let found = Comparison::of(&now, &report(), 10.0);
        assert_eq!(found.missing.len(), 2, "{found:?}");
        assert!(found.lines().contains("only in the baseline: put latency 8 B"), "{found:?}");
        assert!(found.lines().contains("only in this result: put latency 16 B"), "{found:?}");
        assert_eq!(found.failure(), None);
        now.results.truncate(1);
        assert!(Comparison::of(&now, &report(), 10.0).failure().unwrap().contains("nothing was compared"));
    }

    #[test]
    fn layers_that_were_not_asked_for_are_not_missed_but_waived_ones_are() {
        let mut now = report();
        now.results.clear();
        now.layers.clear();
        assert!(Comparison::of(&now, &report(), 10.0).missing.is_empty());
        now.layer_done("put", Status::Waived, Some("nothing there".into()));
        assert_eq!(Comparison::of(&now, &report(), 10.0).missing.len(), 3);
    }

    #[test]
    fn another_machine_or_driver_is_warned_of() {
        let mut now = report();
        now.machine.driver = Some("2".into());
        now.machine.host = "elsewhere".into();
        let lines = Comparison::of(&now, &report(), 10.0).lines();
        assert!(lines.contains("warning: another driver: was \"\", is \"2\""), "{lines}");
        assert!(lines.contains("another host") && lines.contains("is \"elsewhere\""), "{lines}");
    }
}
