//! [`Args`]: the command line.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser};

use crate::ipc::MOST_RANKS;
use crate::layer::{self, Layer};
use crate::values::{percent, put_bytes, rates, ring_size, seconds};
use shape::{SHAPE, as_layers_say, dashed};

mod shape;

/// Measures portway layer by layer. What this machine lacks is waived, not failed.
///
/// Exit status: 0 if every check held, 1 if one failed, a measurement did not end or something got slower than --baseline
/// allows, 2 for a wrong command line.
#[derive(Parser, Debug, Clone)]
#[command(name = "portway-bench", version)]
pub struct Args {
    /// The layer to measure, all of them if left out; `list` shows them; `report` makes a page of results
    #[arg(value_name = "LAYER", value_parser = PossibleValuesParser::new(names()))]
    layer: Option<String>,

    /// Results of `-J` that `report` makes a page of, side by side
    #[arg(value_name = "RESULT.json")]
    results: Vec<PathBuf>,

    /// Write the page of `report` to this file [default: standard output, unless --svg is given]
    #[arg(short = 'o', value_name = "FILE")]
    pub page: Option<PathBuf>,

    /// Write each plot of `report` to this folder as SVG too
    #[arg(long, value_name = "FOLDER")]
    pub svg: Option<PathBuf>,

    /// Iterations of each measurement and run at most; each test has a default of its own
    #[arg(short = 'n', value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub iterations: Option<u64>,

    /// Iterations before those at most, not counted
    #[arg(short = 'w', value_name = "COUNT", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(..=1 << 40))]
    pub warmup: u64,

    /// Runs of each test at most, its configurations interleaved; rates are the median run. Without a GPU, a test that has
    /// taken 50 times -D begins no further run
    #[arg(short = 'N', value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub most_runs: u64,

    /// Seconds that the counted iterations take at most; those before them, a fifth of that
    #[arg(short = 'D', value_name = "SECONDS", default_value = "0.05", value_parser = seconds)]
    limit: Duration,

    /// Seconds until a measurement that has not ended fails
    #[arg(short = 'T', value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    deadline: u64,

    /// Verify every payload, and corrupt one on purpose to see that it is found
    #[arg(short = 'c', value_name = "0|1", default_value_t = 1, value_parser = clap::value_parser!(u8).range(..=1))]
    check: u8,

    /// Write the result to this file as JSON too
    #[arg(short = 'J', value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write the rows to this file as comma-separated values too
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Compare with this earlier result of -J, row by row; exit with 1 if something got slower
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,

    /// By how many percent a row may be slower than its baseline
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = percent, requires = "baseline")]
    pub tolerance: f64,

    /// Fail if this machine lacks what a layer needs
    #[arg(long)]
    pub require: bool,

    /// Producer threads
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', default_values_t = [1, 2, 4], value_parser = clap::value_parser!(u64).range(1..=256))]
    pub producers: Vec<u64>,

    /// Slots of the ring [default: 64,512,2048; on a GPU: 512,2048]
    #[arg(long, value_name = "SLOTS,...", value_delimiter = ',', value_parser = ring_size)]
    depth: Vec<u64>,

    /// Triggers that a producer pushes in one call
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', default_values_t = [1, 16], value_parser = clap::value_parser!(u64).range(1..))]
    pub batch: Vec<u64>,

    /// Channels that the producers of `proxy` put through, in turn
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', default_values_t = [1, 64], value_parser = clap::value_parser!(u64).range(1..=256))]
    pub channels: Vec<u64>,

    /// Triggers that the consumer or the engine takes at most before it publishes the tail [default: 32; proxy: 1,32]
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1024))]
    drain: Vec<u64>,

    /// Bytes of the smallest put, with K, M or G for binary multiples
    #[arg(short = 'b', value_name = "BYTES", default_value = "8", value_parser = put_bytes)]
    begin: u64,

    /// Bytes of the largest put, which is always measured
    #[arg(short = 'e', value_name = "BYTES", default_value = "1M", value_parser = put_bytes)]
    end: u64,

    /// Bytes of every put
    #[arg(short = 's', value_name = "BYTES", value_parser = put_bytes, conflicts_with_all = ["begin", "end", "factor", "step"])]
    size: Option<u64>,

    /// Every power of two from 8 bytes to 8M
    #[arg(short = 'a', conflicts_with_all = ["begin", "end", "factor", "step", "size"])]
    all_sizes: bool,

    /// By how many bytes each size between is larger than the one before, instead of -f
    #[arg(short = 'i', value_name = "BYTES", value_parser = put_bytes, conflicts_with = "factor")]
    step: Option<u64>,

    /// By what each size between is larger than the one before
    #[arg(short = 'f', value_name = "FACTOR", default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1 << 20))]
    factor: u64,

    /// Millions of operations a second that are offered, for the latency under load; each test has a default of its own
    #[arg(long, value_name = "LO:HI:STEP", value_parser = rates)]
    rate: Option<(u64, u64, u64)>,

    /// Take the way of a put apart: push, pop, post, completion, seen by the peer
    #[arg(long)]
    pub stages: bool,

    /// Blocks of the kernels that push for the throughput [default: several shapes]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=65_535))]
    pub ctas: Option<u64>,

    /// Threads of each of these blocks [default: several shapes; put: 256]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub threads: Option<u64>,

    /// Print a histogram of every counted time below its row; it is in -J as well
    #[arg(short = 'H')]
    pub histogram: bool,

    /// Write every counted time to -J, in the order in which they were taken
    #[arg(short = 'U', requires = "json")]
    pub unsorted: bool,

    /// FIFOs that this load is spread over, each with a consumer on a core of its own; `ipc`: engines of each rank
    #[arg(long, value_name = "COUNT,...", value_delimiter = ',', default_values_t = [1, 2, 4], value_parser = clap::value_parser!(u64).range(1..=64))]
    pub proxies: Vec<u64>,

    /// GPUs by number whose pairs `ipc` connects all at once; one that stands there twice has two ranks [default: the
    /// first 8, if there are two]
    #[arg(long = "devices", value_name = "NUMBER,...", value_delimiter = ',', num_args = 1, action = clap::ArgAction::Set)]
    pub gpus: Vec<u32>,

    /// RDMA device by name, or two with a comma between them: one for each end [default: the first with an active port]
    #[arg(short = 'd', value_name = "DEVICE", value_delimiter = ',', num_args = 1, action = clap::ArgAction::Set)]
    pub devices: Vec<String>,

    /// Index in the GID table of both devices [default: RoCE v2, routable]
    #[arg(short = 'x', value_name = "INDEX")]
    pub gid_index: Option<u8>,

    /// Queue pairs of the connection; a channel goes over each
    #[arg(short = 'q', value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub queue_pairs: u64,

    /// Puts with signals that a queue pair has under way at most
    #[arg(short = 't', value_name = "COUNT", default_value_t = 128, value_parser = clap::value_parser!(u64).range(32..=8192))]
    pub tx_depth: u64,

    /// Bytes up to which the references send data inline; the transport does so with signals alone
    #[arg(short = 'I', value_name = "BYTES", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1024))]
    pub inline_bytes: u64,

    /// Puts with signals that are posted together at most
    #[arg(short = 'l', value_name = "COUNT", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub post_list: u64,

    /// Whether the command line has sizes.
    #[arg(skip)]
    has_sizes: bool,

    /// Spins of an idle consumer between two looks
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub poll: u64,
}

/// The rings that software pushes into unless `--depth` says otherwise.
pub const DEPTH: &[u64] = &[64, 512, 2048];

/// The word that asks for a page.
const REPORT: &str = "report";

/// What the command line asks for.
pub enum What {
    List,
    /// A page of these results.
    Page(Vec<PathBuf>),
    Layers(Vec<&'static Layer>),
}

impl Args {
    /// Reads the command line; help, version and mistakes end the process.
    pub fn from_command_line() -> Self {
        Self::read(Args::command().get_matches()).unwrap_or_else(|error| error.exit())
    }

    fn read(matches: ArgMatches) -> Result<Self, clap::Error> {
        let mut args = Args::from_arg_matches(&matches)?;
        let refuse = |kind, text: String| Err(Args::command().error(kind, text));
        let given = |id: &&&str| matches.value_source(id) == Some(ValueSource::CommandLine);
        args.has_sizes =
            SHAPE.iter().filter(given).any(|flag| as_layers_say(flag) == &"begin" || *flag == "end");
        for flag in SHAPE.iter().filter(given) {
            let read = match args.what() {
                What::List | What::Page(_) => false,
                What::Layers(layers) => layers.iter().any(|layer| layer.flags.contains(as_layers_say(flag))),
            };
            if !read {
                let name = args.layer.as_deref().unwrap_or("no layer");
                return refuse(
                    ErrorKind::ArgumentConflict,
                    format!("`{name}` does not use {}", dashed(flag)),
                );
            }
        }
        let makes_a_page = args.layer.as_deref() == Some(REPORT);
        if makes_a_page == args.results.is_empty() {
            let text =
                if makes_a_page { "`report` needs a result of -J" } else { "only `report` takes results" };
            return refuse(ErrorKind::WrongNumberOfValues, text.into());
        }
        if (args.page.is_some() || args.svg.is_some()) && !makes_a_page {
            return refuse(ErrorKind::ArgumentConflict, "only `report` uses -o and --svg".into());
        }
        if let Some(page) = args.page.as_ref().filter(|page| args.results.contains(page)) {
            let text = format!("-o {} would overwrite a result", page.display());
            return refuse(ErrorKind::ArgumentConflict, text);
        }
        if let (Some(batch), Some(depth)) = (args.batch.iter().max(), args.depth(DEPTH).into_iter().min()) {
            if *batch > depth {
                let text = format!("--batch {batch} does not fit a ring of --depth {depth}");
                return refuse(ErrorKind::ValueValidation, text);
            }
        }
        if args.begin > args.end {
            let text = format!("-b {} is more than -e {}", args.begin, args.end);
            return refuse(ErrorKind::ValueValidation, text);
        }
        if args.devices.len() > 2 {
            let text = format!("-d names {} devices: one, or one for each end", args.devices.len());
            return refuse(ErrorKind::ValueValidation, text);
        }
        if args.gpus.len() == 1 || args.gpus.len() > MOST_RANKS {
            let text = format!("--devices has {} ranks: 2 to {MOST_RANKS}", args.gpus.len());
            return refuse(ErrorKind::ValueValidation, text);
        }
        if args.post_list > args.tx_depth {
            let text = format!("-l {} is more than -t {}", args.post_list, args.tx_depth);
            return refuse(ErrorKind::ValueValidation, text);
        }
        Ok(args)
    }

    /// What to do.
    pub fn what(&self) -> What {
        match self.layer.as_deref() {
            None => What::Layers(layer::ALL.iter().collect()),
            Some(REPORT) => What::Page(self.results.clone()),
            // Every other name that the parser lets through is a layer's.
            Some(name) => layer::by_name(name).map_or(What::List, |layer| What::Layers(vec![layer])),
        }
    }

    /// The values of `--depth`, or those that a test takes otherwise.
    pub fn depth(&self, otherwise: &[u64]) -> Vec<u64> {
        if self.depth.is_empty() { otherwise.to_vec() } else { self.depth.clone() }
    }

    /// The values of `--rate`, or those that a test takes otherwise, in thousands a second.
    pub fn rates_kops(&self, otherwise: (u64, u64, u64)) -> Vec<u64> {
        let (low, high, step) = self.rate.unwrap_or(otherwise);
        (low..=high).step_by(step as usize).collect()
    }

    /// The values of `--drain`, or those that a layer takes otherwise.
    pub fn drain(&self, otherwise: &[u64]) -> Vec<u64> {
        if self.drain.is_empty() { otherwise.to_vec() } else { self.drain.clone() }
    }

    /// The sizes of puts, in bytes.
    pub fn sizes(&self) -> Vec<u64> {
        if let Some(size) = self.size {
            return vec![size];
        }
        if self.all_sizes {
            return (3..=23).map(|power| 1 << power).collect();
        }
        let below = |size: &u64| *size < self.end;
        let next = |size: &u64| Some(self.step.map_or(size * self.factor, |step| size + step));
        std::iter::successors(Some(self.begin), next).take_while(below).chain([self.end]).collect()
    }

    /// The sizes that the command line asks for, or those that a test takes otherwise.
    pub fn sizes_or(&self, otherwise: &[u64]) -> Vec<u64> {
        if self.has_sizes { self.sizes() } else { otherwise.to_vec() }
    }

    /// The runs of a test that begins now.
    pub fn runs(&self) -> impl Iterator<Item = u64> {
        let (begin, limit) = (Instant::now(), self.limit * 50);
        (0..self.most_runs).take_while(move |run| *run == 0 || begin.elapsed() < limit)
    }

    /// How long the iterations of one measurement go on.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// When a measurement that has not ended fails.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline)
    }

    /// Whether payloads are verified.
    pub fn check(&self) -> bool {
        self.check == 1
    }
}

fn names() -> Vec<&'static str> {
    layer::ALL.iter().map(|layer| layer.name).chain(["list", REPORT]).collect()
}

/// The arguments that a command line stands for, for tests.
#[cfg(test)]
pub fn parse(line: &str) -> Result<Args, clap::Error> {
    let words = ["portway-bench"].into_iter().chain(line.split_whitespace());
    Args::read(Args::command().try_get_matches_from(words)?)
}

#[cfg(test)]
mod tests;
