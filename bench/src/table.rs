//! The report as text. Lines that begin with `#` are not data; a dash stands for a value that there is not.

use std::fmt::Write;

use crate::baseline::describe;
use crate::devices::{GpuDevice, Nic};
use crate::layer::Layer;
use crate::load::knees;
use crate::machine::{Machine, join};
use crate::report::{Phase, Report, Row, Status, TimeUnit};
use crate::stats::{Bin, Times};

/// The lines before the first layer.
pub fn header(report: &Report) -> String {
    let Report { version, schema, machine, config, .. } = report;
    let load = machine.load.map_or("-".into(), |load| load.to_string());
    let iterations = config.iterations.map_or(String::new(), |count| format!(" -n {count}"));
    let (warmup, runs, deadline, check) =
        (config.warmup, config.runs, config.deadline_s, u8::from(config.check));
    let shape: String = config.shape.iter().map(|(flag, value)| format!(" {flag} {value}")).collect();
    format!(
        "# portway-bench {version} schema {schema}  host={} cpu=\"{}\" cores={} load={load}\n\
         # kernel={} governor={} driver={} {}\n\
         # params:{iterations} -w {warmup} -N {runs} -D {} -T {deadline} -c {check}{shape}\n\
         # latency is ONE WAY = round trip / 2; GB/s = 1e9 B/s; Mops = 1e6/s; percentiles by nearest rank\n",
        machine.host,
        machine.cpu,
        join(&machine.cores),
        machine.kernel,
        machine.governor.as_deref().unwrap_or("-"),
        machine.driver.as_deref().unwrap_or("-"),
        devices(machine),
        config.limit_s,
    )
}

/// The GPUs and RDMA ports of a machine.
pub fn devices(machine: &Machine) -> String {
    let or_dash = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".into());
    let node = |node: Option<i64>| node.map_or("-".into(), |node| node.to_string());
    let gpu = |gpu: &GpuDevice| {
        format!(
            "gpu=\"{}\" pci={} link=\"{}\" numa={}",
            gpu.name,
            gpu.pci,
            or_dash(&gpu.link),
            node(gpu.numa)
        )
    };
    let nic = |nic: &Nic| {
        let [state, rate, layer] = [&nic.state, &nic.rate, &nic.link_layer].map(or_dash);
        let Nic { name, port, numa, .. } = nic;
        format!("nic={name}:{port} {state} link=\"{rate}\" {layer} numa={}", node(*numa))
    };
    let list = |each: Vec<String>, none: &str| if each.is_empty() { none.into() } else { each.join(" ") };
    let gpus = list(machine.gpus.iter().map(gpu).collect(), "gpu=-");
    format!("{gpus} {}", list(machine.nics.iter().map(nic).collect(), "nic=-"))
}

/// A layer that has just ended: its status, and its rows, which begin at `first_row`.
pub fn layer(report: &Report, layer: &Layer, first_row: usize) -> String {
    let mut text = String::new();
    let Some(result) = report.layers.last() else { return text };
    let reason = result.reason.as_deref().unwrap_or("");
    let _ = match result.status {
        Status::Waived => writeln!(text, "#\n# {}: waived: {reason}", layer.name),
        _ if layer.transport.is_empty() => writeln!(text, "#\n# {}: {}", layer.name, layer.measures),
        _ => {
            let Layer { name, measures, transport, .. } = layer;
            writeln!(text, "#\n# {name}: {measures}; transport={transport}")
        }
    };
    for note in report.notes.iter().filter(|note| note.layer == layer.name) {
        let _ = writeln!(text, "# {}", note.text);
    }
    for rows in report.results[first_row..].chunk_by(|a, b| a.test == b.test) {
        text.push_str(&block(rows, layer.unit));
        for row in rows {
            text.push_str(&histogram(row, layer.unit));
        }
        for knee in knees(rows) {
            let _ = writeln!(text, "# {knee}");
        }
    }
    for control in report.controls.iter().filter(|control| control.layer == layer.name) {
        let verdict = if control.held() { "OK" } else { "FAILED" };
        let (test, corrupted, found) = (&control.test, control.corrupted, control.found);
        let _ = writeln!(
            text,
            "# negative control of {test}: {corrupted} corrupted on purpose, {found} found wrong {verdict}"
        );
    }
    if result.status == Status::Failed {
        let _ = writeln!(text, "# {}: FAILED: {reason}", layer.name);
    }
    text
}

/// The lines after the last layer.
pub fn footer(report: &Report) -> String {
    let mut text = String::from("#\n");
    for error in &report.errors {
        let _ = writeln!(text, "# error: {error}");
    }
    let verdict = if report.exit_status() == 0 { "OK" } else { "FAILED" };
    let _ = writeln!(text, "# wrong: {} {verdict}", report.wrong());
    text
}

/// The rows of one test, with the columns that its first row has.
fn block(rows: &[Row], unit: TimeUnit) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let mut lines = vec![vec![]; 2 + rows.len()];
    let mut add = |name: &str, unit: &str, cell: &dyn Fn(&Row) -> Option<String>| {
        let cells = rows.iter().map(|row| cell(row).unwrap_or_else(|| "-".into()));
        let cells: Vec<_> = [name.into(), unit.into()].into_iter().chain(cells).collect();
        let width = cells.iter().map(String::len).max().unwrap_or(0);
        for (line, cell) in lines.iter_mut().zip(cells) {
            line.push(format!("{cell:>width$}"));
        }
    };
    if !first.subject.is_empty() {
        add("subject", "", &|row| Some(row.subject.clone()));
    }
    if rows.iter().any(|row| row.phase != Phase::Warm) {
        add("phase", "", &|row| Some(row.phase.name().into()));
    }
    for key in first.shape.keys() {
        add(key, "", &|row| row.shape.get(key).map(u64::to_string));
    }
    add("size", "(B)", &|row| Some(row.size_bytes.to_string()));
    add("runs", "", &|row| Some(row.runs.to_string()));
    add("iters", "", &|row| Some(row.iterations.to_string()));
    let (per_us, time_unit) = match unit {
        TimeUnit::Nanoseconds => (1000.0, "(ns)"),
        TimeUnit::Microseconds => (1.0, "(us)"),
    };
    for (name, pick) in TIMES.iter().filter(|_| first.time_us.is_some()) {
        add(name, time_unit, &|row| row.time_us.as_ref().and_then(pick).map(|us| number(us * per_us)));
    }
    if rows.iter().any(|row| row.share_percent.is_some()) {
        add("share", "(%)", &|row| row.share_percent.map(number));
    }
    for (present, group) in [
        (first.rate_mops.is_some(), RATE),
        (first.bandwidth_gb_per_s.is_some(), BANDWIDTH),
        (first.reference.is_some(), REFERENCE),
    ] {
        let own = |pick: &Pick<Row>| rows.iter().any(|row| pick(row).is_some());
        for (name, unit, pick) in group.iter().filter(|(_, _, pick)| present && own(pick)) {
            add(name, unit, &|row| pick(row).map(number));
        }
    }
    add("wrong", "", &|row| row.wrong.map(|wrong| wrong.to_string()));

    let mut text = format!("# {} {}\n", first.layer, first.test);
    for (n, line) in lines.iter().enumerate() {
        let _ = writeln!(text, "{} {}", if n < 2 { '#' } else { ' ' }, line.join("  "));
    }
    text
}

/// The counted times of a row, as lines that are not data.
fn histogram(row: &Row, unit: TimeUnit) -> String {
    let Some(bins) = &row.histogram else { return String::new() };
    let mut text = format!("# histogram of {}\n", describe(row));
    let (scale, unit) = match unit {
        TimeUnit::Nanoseconds => (1000.0, "ns"),
        TimeUnit::Microseconds => (1.0, "us"),
    };
    let most = bins.iter().map(|bin| bin.count).max().unwrap_or(1).max(1);
    for Bin { below_us, count } in bins {
        let bar = "*".repeat((count * 50).div_ceil(most) as usize);
        let below = number(below_us * scale);
        let _ = writeln!(text, "#   < {below:>9} {unit} {count:>9} {bar}");
    }
    text
}

type Pick<T> = fn(&T) -> Option<f64>;

const TIMES: [(&str, Pick<Times>); 7] = [
    ("t_min", |times| Some(times.min)),
    ("t_p50", |times| Some(times.p50)),
    ("t_avg", |times| Some(times.avg)),
    ("t_p99", |times| times.p99),
    ("t_p999", |times| times.p999),
    ("t_max", |times| Some(times.max)),
    ("t_stdev", |times| Some(times.stdev)),
];

const RATE: &[(&str, &str, Pick<Row>)] = &[
    ("push", "(Mops)", |row| Some(row.rate_mops?.push.median)),
    ("proc", "(Mops)", |row| Some(row.rate_mops?.proc.median)),
    ("proc_min", "(Mops)", |row| Some(row.rate_mops?.proc.min)),
    ("proc_max", "(Mops)", |row| Some(row.rate_mops?.proc.max)),
];

const BANDWIDTH: &[(&str, &str, Pick<Row>)] = &[("bw", "(GB/s)", |row| row.bandwidth_gb_per_s)];

const REFERENCE: &[(&str, &str, Pick<Row>)] = &[
    ("ref", "(Mops)", |row| Some(row.reference.as_ref()?.proc_mops?.median)),
    ("ref", "(us)", |row| Some(row.reference.as_ref()?.time_us?.median)),
    ("ref", "(GB/s)", |row| Some(row.reference.as_ref()?.bandwidth_gb_per_s?.median)),
    ("ratio", "", |row| Some(row.reference.as_ref()?.ratio.median)),
    ("r_min", "", |row| Some(row.reference.as_ref()?.ratio.min)),
    ("r_max", "", |row| Some(row.reference.as_ref()?.ratio.max)),
];

/// Three significant digits or more down to 0.01, never an exponent.
pub fn number(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        0.1.. => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args, layer, report::Control};

    #[test]
    fn a_percentile_without_samples_is_a_dash_and_data_lines_have_no_hash() {
        let row = |len| Row {
            layer: "fifo".into(),
            test: "latency".into(),
            time_us: Times::of(&mut vec![0.25; len]),
            wrong: Some(0),
            ..Row::default()
        };
        let text = block(&[row(100), row(1_000), row(10_000)], TimeUnit::Nanoseconds);
        let names: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().skip(1).collect();
        let p99 = names.iter().position(|name| *name == "t_p99").unwrap();
        let data: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let cells: Vec<Vec<_>> = data.iter().map(|line| line.split_whitespace().collect()).collect();
        assert!(cells.iter().all(|line| line.len() == names.len()), "{text}");
        assert_eq!(cells[0][p99..p99 + 2], ["-", "-"]);
        assert_eq!(cells[1][p99..p99 + 2], ["250", "-"]);
        assert_eq!(cells[2][p99..p99 + 2], ["250", "250"]);
    }

    #[test]
    fn a_waived_layer_says_why() {
        let mut report = Report::new(&args::parse("ib").unwrap());
        report.layer_done("ib", Status::Waived, Some("no device".into()));
        let text = layer(&report, layer::by_name("ib").unwrap(), 0);
        assert!(text.contains("ib: waived: no device"), "{text}");
        assert!(footer(&report).contains("# wrong: 0 OK"));
    }

    #[test]
    fn what_went_wrong_is_printed() {
        let mut report = Report::new(&args::parse("fifo").unwrap());
        report.control(Control::new("fifo", "throughput", 1, 0));
        report.layer_done("fifo", Status::Failed, Some("no end".into()));
        let text = layer(&report, layer::by_name("fifo").unwrap(), 0);
        assert!(text.contains("0 found wrong FAILED") && text.contains("fifo: FAILED: no end"), "{text}");
        assert!(footer(&report).contains("FAILED"));
    }
}
