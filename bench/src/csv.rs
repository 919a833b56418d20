//! The rows as comma-separated values: one line each, with the units in the names of the columns, and an empty field for
//! what a row does not have. A layer without rows has a line with its status.

use std::io;

use csv::Writer;

use crate::report::{Report, Row, Status};
use crate::stats::Spread;

/// Writes the header and every row.
pub fn write(report: &Report, file: impl io::Write) -> io::Result<()> {
    let mut writer = Writer::from_writer(file);
    writer.write_record(ORIGIN.iter().copied().chain(COLUMNS.iter().map(|(name, _)| *name)))?;
    let origin = [
        report.schema.to_string(),
        report.version.clone(),
        report.machine.host.clone(),
        report.start_unix_s.to_string(),
    ];
    for layer in &report.layers {
        let rows: Vec<_> = report.results.iter().filter(|row| row.layer == layer.layer).collect();
        let status = match layer.status {
            Status::Ran => "ran",
            Status::Waived => "waived",
            Status::Failed => "failed",
        };
        let mut line = |cells: &mut dyn Iterator<Item = String>| {
            writer.write_record(origin.iter().cloned().chain([status.to_owned()]).chain(cells))
        };
        for row in &rows {
            line(&mut COLUMNS.iter().map(|(_, cell)| cell(row)))?;
        }
        if rows.is_empty() {
            let cell =
                |(name, _): &(&str, Cell)| if *name == "layer" { layer.layer.clone() } else { String::new() };
            line(&mut COLUMNS.iter().map(cell))?;
        }
    }
    writer.flush()
}

/// What is the same in every line of a run, and the status of the layer.
const ORIGIN: [&str; 5] = ["schema", "version", "host", "start_unix_s", "status"];

type Cell = fn(&Row) -> String;

const COLUMNS: &[(&str, Cell)] = &[
    ("layer", |row| row.layer.clone()),
    ("test", |row| row.test.clone()),
    ("transport", |row| row.transport.clone()),
    ("subject", |row| row.subject.clone()),
    ("phase", |row| row.phase.name().into()),
    ("shape", |row| row.shape.iter().map(|(key, n)| format!("{key}={n}")).collect::<Vec<_>>().join(" ")),
    ("size_bytes", |row| row.size_bytes.to_string()),
    ("runs", |row| row.runs.to_string()),
    ("iterations", |row| row.iterations.to_string()),
    ("t_min_us", |row| number(row.time_us.map(|t| t.min))),
    ("t_p50_us", |row| number(row.time_us.map(|t| t.p50))),
    ("t_p90_us", |row| number(row.time_us.and_then(|t| t.p90))),
    ("t_avg_us", |row| number(row.time_us.map(|t| t.avg))),
    ("t_p99_us", |row| number(row.time_us.and_then(|t| t.p99))),
    ("t_p999_us", |row| number(row.time_us.and_then(|t| t.p999))),
    ("t_max_us", |row| number(row.time_us.map(|t| t.max))),
    ("t_stdev_us", |row| number(row.time_us.map(|t| t.stdev))),
    ("share_percent", |row| number(row.share_percent)),
    ("push_mops", |row| number(row.rate_mops.map(|rate| rate.push.median))),
    ("push_min_mops", |row| number(row.rate_mops.map(|rate| rate.push.min))),
    ("push_max_mops", |row| number(row.rate_mops.map(|rate| rate.push.max))),
    ("proc_mops", |row| number(row.rate_mops.map(|rate| rate.proc.median))),
    ("proc_min_mops", |row| number(row.rate_mops.map(|rate| rate.proc.min))),
    ("proc_max_mops", |row| number(row.rate_mops.map(|rate| rate.proc.max))),
    ("bw_gb_per_s", |row| number(row.bandwidth_gb_per_s)),
    ("ref", |row| row.reference.as_ref().map(|them| them.name.clone()).unwrap_or_default()),
    ("ref_mops", |row| median(row.reference.as_ref().and_then(|them| them.proc_mops))),
    ("ref_us", |row| median(row.reference.as_ref().and_then(|them| them.time_us))),
    ("ref_gb_per_s", |row| median(row.reference.as_ref().and_then(|them| them.bandwidth_gb_per_s))),
    ("ratio", |row| number(row.reference.as_ref().map(|them| them.ratio.median))),
    ("ratio_min", |row| number(row.reference.as_ref().map(|them| them.ratio.min))),
    ("ratio_max", |row| number(row.reference.as_ref().map(|them| them.ratio.max))),
    ("wrong", |row| row.wrong.map(|wrong| wrong.to_string()).unwrap_or_default()),
];

fn median(spread: Option<Spread>) -> String {
    number(spread.map(|spread| spread.median))
}

fn number(value: Option<f64>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::stats::Times;

    #[test]
    fn a_row_is_a_line_and_what_it_lacks_is_empty() {
        let mut report = Report::new(&args::parse("fifo").unwrap());
        report.results.push(Row {
            layer: "fifo".into(),
            test: "a, \"b\"\nc".into(),
            shape: [("batch".to_owned(), 2), ("slots".to_owned(), 64)].into(),
            time_us: Times::of(&mut [0.5, 1.5]),
            wrong: Some(0),
            ..Row::default()
        });
        report.layer_done("fifo", Status::Ran, None);
        report.layer_done("ib", Status::Waived, Some("no device".into()));
        let mut text = Vec::new();
        write(&report, &mut text).unwrap();
        let mut reader = csv::Reader::from_reader(&text[..]);
        let names = reader.headers().unwrap().clone();
        let rows: Vec<_> = reader.records().collect::<Result<_, _>>().unwrap();
        let cell = |row: usize, name: &str| &rows[row][names.iter().position(|other| other == name).unwrap()];
        assert_eq!(rows.len(), 2);
        assert_eq!(cell(0, "test"), "a, \"b\"\nc");
        assert_eq!(cell(0, "shape"), "batch=2 slots=64");
        assert_eq!((cell(0, "t_min_us"), cell(0, "t_avg_us"), cell(0, "t_p99_us")), ("0.5", "1", ""));
        assert_eq!((cell(0, "wrong"), cell(0, "proc_mops"), cell(0, "schema")), ("0", "", "1"));
        assert_eq!((cell(1, "layer"), cell(1, "status"), cell(1, "wrong")), ("ib", "waived", ""));
        assert_eq!(rows[1].iter().filter(|cell| !cell.is_empty()).count(), ORIGIN.len() + 1, "{rows:?}");
    }
}
