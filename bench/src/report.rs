//! [`Report`]: the result of a run as data; with `-J` it is written as it stands here.
//!
//! Readers ignore keys that they do not know. [`SCHEMA`] rises when a key is removed or changes its meaning, and only
//! then. Every number with a unit has it in its key; times are microseconds in every layer.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::args::{Args, What};
use crate::machine::Machine;
use crate::stats::{Bin, Spread, Times, histogram};

/// The version of the JSON format.
pub const SCHEMA: u32 = 1;

/// Everything that a run found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub schema: u32,
    pub tool: String,
    pub version: String,
    pub start_unix_s: u64,
    pub end_unix_s: u64,
    pub argv: Vec<String>,
    /// The variables that the driver, NCCL, verbs or portway read.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    pub machine: Machine,
    pub config: Config,
    pub layers: Vec<LayerResult>,
    pub notes: Vec<Note>,
    pub results: Vec<Row>,
    pub controls: Vec<Control>,
    pub errors: Vec<String>,
}

/// What was asked for, with defaults filled in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// None if each test took its own.
    pub iterations: Option<u64>,
    pub warmup: u64,
    /// At most.
    pub runs: u64,
    pub limit_s: f64,
    pub deadline_s: u64,
    pub check: bool,
    /// The flags that shape the layers; those left out have a value of their own in each test.
    #[serde(default)]
    pub shape: BTreeMap<String, String>,
}

/// How a layer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ran,
    /// The machine lacks something.
    Waived,
    Failed,
}

/// A layer, and why it has no rows if so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerResult {
    pub layer: String,
    pub status: Status,
    pub reason: Option<String>,
}

/// What a reader has to know about a layer's rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Note {
    pub layer: String,
    pub text: String,
}

/// What a row's iterations were to their connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The first.
    Cold,
    /// Those between the first and the counted ones.
    Ramp,
    /// The counted ones.
    #[default]
    Warm,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Cold => "cold",
            Phase::Ramp => "ramp",
            Phase::Warm => "warm",
        }
    }
}

/// The key in [`Row::shape`] of a load that is offered, in thousands a second.
pub const OFFERED: &str = "offered_kops";

/// One configuration of one test.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub layer: String,
    pub test: String,
    /// What carries the data; empty where nothing is carried.
    #[serde(default)]
    pub transport: String,
    /// What was measured, where a test has more than one subject.
    pub subject: String,
    #[serde(default)]
    pub phase: Phase,
    /// The parameters in which the rows of a test differ.
    pub shape: BTreeMap<String, u64>,
    pub size_bytes: u64,
    /// How often it was measured.
    pub runs: u64,
    /// Iterations of this phase of all runs.
    pub iterations: u64,
    pub time_us: Option<Times>,
    /// Of a stage: its mean time as percent of that of the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<f64>,
    /// With `-H`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub histogram: Option<Vec<Bin>>,
    /// With `-U`: every time, in the order in which they were taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples_us: Option<Vec<f64>>,
    pub rate_mops: Option<Rate>,
    pub bandwidth_gb_per_s: Option<f64>,
    pub reference: Option<Reference>,
    /// Payloads that were not what they had to be; None if nothing was verified.
    pub wrong: Option<u64>,
}

impl Row {
    /// The row with what its samples come to, in microseconds and in the order in which they were taken.
    pub fn with_times(self, args: &Args, mut samples: Vec<f64>) -> Self {
        let counted = self.phase == Phase::Warm;
        Row {
            iterations: samples.len() as u64,
            histogram: (args.histogram && counted).then(|| histogram(&samples)),
            samples_us: (args.unsorted && counted).then(|| samples.clone()),
            time_us: Times::of(&mut samples),
            ..self
        }
    }
}

/// Rows of the counted iterations before the others.
pub fn counted_first(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort_by_key(|row| row.phase != Phase::Warm);
    rows
}

/// Millions a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// By the producers' clocks, from the first push to the end of the last.
    pub push: Spread,
    /// By the consumer's clock.
    pub proc: Spread,
}

/// The same work done by something that the reader knows, in the same run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    pub name: String,
    /// Its rate, where rates are compared.
    pub proc_mops: Option<Spread>,
    /// Its median one-way time, where times are compared.
    pub time_us: Option<Spread>,
    /// Its bandwidth, where bandwidths are compared.
    pub bandwidth_gb_per_s: Option<Spread>,
    /// Ours divided by the reference's, each pair from one run.
    pub ratio: Spread,
}

impl Reference {
    /// A reference by name, with the ratio to it and without the value of its own.
    pub fn new(name: &str, ratio: Spread) -> Self {
        Reference { name: name.into(), proc_mops: None, time_us: None, bandwidth_gb_per_s: None, ratio }
    }
}

/// A payload that was corrupted on purpose, to see that the check finds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Control {
    pub layer: String,
    /// The test whose check it tries.
    pub test: String,
    pub corrupted: u64,
    pub found: u64,
}

impl Control {
    /// What the check of a test found, when this many payloads were corrupted.
    pub fn new(layer: &str, test: &str, corrupted: u64, found: u64) -> Self {
        Control { layer: layer.into(), test: test.into(), corrupted, found }
    }

    pub fn held(&self) -> bool {
        self.found == self.corrupted
    }
}

/// The unit of times in a layer's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    Nanoseconds,
    Microseconds,
}

impl Report {
    /// An empty report that says what was asked for, and where.
    pub fn new(args: &Args) -> Self {
        let now = unix_s();
        let shape = match args.what() {
            What::Layers(layers) => args.shape(&layers).into_iter().collect(),
            What::List | What::Page(_) => BTreeMap::new(),
        };
        Report {
            schema: SCHEMA,
            tool: env!("CARGO_PKG_NAME").into(),
            version: env!("CARGO_PKG_VERSION").into(),
            start_unix_s: now,
            end_unix_s: now,
            argv: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            env: variables(std::env::vars_os()),
            machine: Machine::look(),
            config: Config {
                iterations: args.iterations,
                warmup: args.warmup,
                runs: args.most_runs,
                limit_s: args.limit().as_secs_f64(),
                deadline_s: args.deadline().as_secs(),
                check: args.check(),
                shape,
            },
            layers: Vec::new(),
            notes: Vec::new(),
            results: Vec::new(),
            controls: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Records how a layer ended.
    pub fn layer_done(&mut self, layer: &str, status: Status, reason: Option<String>) {
        if status == Status::Failed {
            self.errors.extend(reason.clone());
        }
        self.layers.push(LayerResult { layer: layer.into(), status, reason });
    }

    /// Records what a reader has to know about a layer's rows.
    pub fn note(&mut self, layer: &str, text: impl Into<String>) {
        self.notes.push(Note { layer: layer.into(), text: text.into() });
    }

    /// Records a control, and an error if the check missed it.
    pub fn control(&mut self, control: Control) {
        if !control.held() {
            let Control { layer, test, corrupted, found } = &control;
            self.errors
                .push(format!("{layer} {test}: {corrupted} corrupted on purpose, but {found} found wrong"));
        }
        self.controls.push(control);
    }

    /// Sets the end.
    pub fn finish(&mut self) {
        self.end_unix_s = unix_s();
    }

    /// Payloads that were not what they had to be, the controls' apart.
    pub fn wrong(&self) -> u64 {
        self.results.iter().filter_map(|row| row.wrong).sum()
    }

    /// 0 if every check held and every measurement ended, else 1. A waived layer is no failure.
    pub fn exit_status(&self) -> u8 {
        (self.wrong() != 0 || !self.errors.is_empty()).into()
    }

    pub fn write_json(&self, file: impl Write) -> io::Result<()> {
        let mut file = io::BufWriter::new(file);
        serde_json::to_writer_pretty(&mut file, self)?;
        writeln!(file)?;
        file.flush()
    }
}

/// Those of the variables that change what is measured.
fn variables(all: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<String, String> {
    const PREFIXES: [&str; 5] = ["CUDA_", "NCCL_", "PORTWAY_", "MLX5_", "RDMAV_"];
    all.map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect()
}

fn unix_s() -> u64 {
    // A clock before 1970 is no reason to lose a measurement.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args, stats};
    use serde_json::Value;

    fn spread(median: f64) -> Spread {
        Spread { min: median / 2.0, median, max: median * 2.0 }
    }

    fn full() -> Report {
        let mut report = Report::new(&args::parse("fifo -n 10").unwrap());
        report.results.push(Row {
            layer: "fifo".into(),
            test: "throughput".into(),
            transport: "loopback".into(),
            subject: "fifo".into(),
            phase: Phase::Warm,
            shape: BTreeMap::from([("producers".into(), 2)]),
            size_bytes: 16,
            runs: 1,
            iterations: 10,
            time_us: Times::of(&mut [0.5, 1.5]),
            share_percent: Some(50.0),
            histogram: Some(stats::histogram(&[0.5, 1.5])),
            samples_us: Some(vec![0.5, 1.5]),
            rate_mops: Some(Rate { push: spread(8.0), proc: spread(7.0) }),
            bandwidth_gb_per_s: Some(0.112),
            reference: Some(Reference {
                proc_mops: Some(spread(3.5)),
                ..Reference::new("array-queue", spread(2.0))
            }),
            wrong: Some(0),
        });
        report.layer_done("fifo", Status::Ran, None);
        report.layer_done("ib", Status::Waived, Some("no device".into()));
        report.control(Control::new("fifo", "throughput", 1, 1));
        report.finish();
        report
    }

    #[test]
    fn json_comes_back_as_it_went() {
        let report = full();
        let mut text = Vec::new();
        report.write_json(&mut text).unwrap();
        assert_eq!(serde_json::from_slice::<Report>(&text).unwrap(), report);
    }

    #[test]
    fn of_the_variables_only_those_that_matter_are_kept() {
        let all = [("CUDA_MODULE_LOADING", "EAGER"), ("SECRET", "x"), ("NCCL_DEBUG", "INFO")];
        let kept = variables(all.into_iter().map(|(name, value)| (name.into(), value.into())));
        assert_eq!(kept.into_keys().collect::<Vec<_>>(), ["CUDA_MODULE_LOADING", "NCCL_DEBUG"]);
    }

    #[test]
    fn readers_ignore_what_they_do_not_know() {
        let report = full();
        let mut json = serde_json::to_value(&report).unwrap();
        json["later"] = Value::from(1);
        json["results"][0]["later"] = Value::from("x");
        assert_eq!(serde_json::from_value::<Report>(json).unwrap(), report);
    }

    #[test]
    fn exit_status_is_0_only_if_all_held() {
        assert_eq!(full().exit_status(), 0);
        let mut wrong = full();
        wrong.results[0].wrong = Some(1);
        assert_eq!(wrong.exit_status(), 1);
        let mut failed = full();
        failed.layer_done("put", Status::Failed, Some("no end".into()));
        assert_eq!(failed.exit_status(), 1);
        for found in [0, 2] {
            let mut blind = full();
            blind.control(Control::new("put", "latency", 1, found));
            assert_eq!(blind.exit_status(), 1, "{found} found");
        }
    }

    #[test]
    fn a_waived_layer_is_no_failure() {
        let mut report = Report::new(&args::parse("ib").unwrap());
        report.layer_done("ib", Status::Waived, Some("no device".into()));
        assert_eq!(report.exit_status(), 0);
    }
}
