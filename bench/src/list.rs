//! What `portway-bench list` prints: every measurement, what it needs, and whether this machine has it.

use std::fmt::Write;

use crate::args::Args;
use crate::clique;
use crate::gpu;
use crate::ib::perftest::Perftest;
use crate::layer::{self, Layer};

/// What a measurement needs beside what its layer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Nothing,
    Gpu,
    /// Or one that `--devices` names twice.
    TwoGpus,
    Nccl,
    Perftest,
}

/// Every test of every layer, by the name that its rows have.
const TESTS: &[(&str, &str, Need)] = &[
    ("fifo", "throughput", Need::Nothing),
    ("fifo", "push-pop", Need::Nothing),
    ("fifo", "push-sync", Need::Nothing),
    ("fifo", "load", Need::Nothing),
    ("fifo", "gpu-throughput", Need::Gpu),
    ("fifo", "gpu-push-sync", Need::Gpu),
    ("fifo", "gpu-load", Need::Gpu),
    ("proxy", "throughput", Need::Nothing),
    ("proxy", "push-flush", Need::Nothing),
    ("proxy", "load", Need::Nothing),
    ("put", "latency", Need::Nothing),
    ("put", "throughput", Need::Nothing),
    ("put", "load", Need::Nothing),
    ("put", "stages", Need::Nothing),
    ("put", "gpu-latency", Need::Gpu),
    ("put", "gpu-throughput", Need::Gpu),
    ("put", "gpu-load", Need::Gpu),
    ("put", "gpu-stages", Need::Gpu),
    ("ib", "latency beside raw verbs", Need::Nothing),
    ("ib", "throughput beside raw verbs", Need::Nothing),
    ("ib", "load", Need::Nothing),
    ("ib", "latency beside ib_write_lat", Need::Perftest),
    ("ib", "throughput beside ib_write_bw", Need::Perftest),
    ("ipc", "latency", Need::Gpu),
    ("ipc", "signal", Need::Gpu),
    ("ipc", "bandwidth", Need::Gpu),
    ("ipc", "messages", Need::Gpu),
    ("ipc", "all-pairs", Need::TwoGpus),
    ("clique", "bring-up in software", Need::Nothing),
    ("clique", "barrier", Need::Nothing),
    ("clique", "rendezvous over TCP", Need::Nothing),
    ("clique", "bring-up over NCCL", Need::Nccl),
    ("clique", "beside ncclCommInitRankConfig", Need::Nccl),
];

/// What this machine lacks.
struct Lacks {
    gpu: Option<String>,
    two_gpus: Option<String>,
    nccl: Option<String>,
    perftest: Option<String>,
}

impl Lacks {
    fn look() -> Self {
        let perftest = Perftest::find().is_none();
        let perftest = perftest.then(|| "ib_write_lat and ib_write_bw are not installed".to_owned());
        let gpu = gpu::lacks();
        let two_gpus = gpu.clone().or_else(|| gpu::lacks_a_second().map(|why| format!("all-pairs: {why}")));
        Lacks { gpu, two_gpus, nccl: clique::lacks(), perftest }
    }

    fn of(&self, need: Need) -> Option<&str> {
        match need {
            Need::Nothing => None,
            Need::Gpu => self.gpu.as_deref(),
            Need::TwoGpus => self.two_gpus.as_deref(),
            Need::Nccl => self.nccl.as_deref(),
            Need::Perftest => self.perftest.as_deref(),
        }
    }
}

/// A line for each layer, and one for each of its measurements. What they lack is said once.
pub fn list(args: &Args) -> String {
    text(args, &Lacks::look())
}

fn text(args: &Args, lacks: &Lacks) -> String {
    let mut text = String::from("# layer and its measurements        here     needs; what is measured\n");
    for layer in layer::ALL {
        let lacking = (layer.find)(args).err();
        let Layer { name, measures, needs, .. } = layer;
        let why = lacking.as_ref().map_or(String::new(), |lacking| format!(" ({lacking})"));
        line(&mut text, name, lacking.is_some(), &format!("needs {needs}; {measures}{why}"));
        for (_, test, need) in TESTS.iter().filter(|(of, ..)| of == name) {
            let words = match need {
                Need::Nothing => "",
                Need::Gpu => "needs a GPU, libcuda and NVRTC",
                Need::TwoGpus => "needs two GPUs, or --devices 0,0; libcuda and NVRTC",
                Need::Nccl => "needs a GPU, libcuda and libnccl",
                Need::Perftest => "needs perftest",
            };
            line(&mut text, &format!("  {test}"), lacking.is_some() || lacks.of(*need).is_some(), words);
        }
    }
    let mut all: Vec<_> =
        [&lacks.gpu, &lacks.two_gpus, &lacks.nccl, &lacks.perftest].into_iter().flatten().collect();
    all.dedup();
    for lacking in all {
        let _ = writeln!(text, "# {lacking}");
    }
    text
}

fn line(text: &mut String, name: &str, waived: bool, words: &str) {
    let here = if waived { "waived" } else { "yes" };
    let _ = writeln!(text, "{}", format!("  {name:33} {here:8} {words}").trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    #[test]
    fn list_names_each_layer_and_what_it_lacks() {
        let args = args::parse("list").unwrap();
        let text = list(&args);
        for layer in layer::ALL {
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(layer.name)).unwrap();
            assert!(line.contains(layer.needs), "{line}");
            match (layer.find)(&args) {
                Ok(_) => assert!(line.contains(" yes "), "{line}"),
                Err(why) => assert!(line.contains("waived") && line.contains(&why), "{line}"),
            }
        }
    }

    #[test]
    fn a_measurement_is_waived_for_what_it_needs_itself() {
        let lacks = Lacks { gpu: Some("no GPU".into()), two_gpus: None, nccl: None, perftest: None };
        let text = text(&args::parse("list").unwrap(), &lacks);
        let of =
            |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap().to_owned();
        assert!(of("gpu-load").contains(" waived ") && text.ends_with("\n# no GPU\n"), "{text}");
        assert!(of("push-pop").ends_with(" yes"), "{text}");
        let has = Lacks { gpu: None, two_gpus: Some("one GPU".into()), nccl: None, perftest: None };
        let text = super::text(&args::parse("list").unwrap(), &has);
        let here = |test: &str| text.lines().any(|line| line.contains(test) && line.contains(" yes "));
        assert!(here("gpu-load") && !here("all-pairs") && text.ends_with("\n# one GPU\n"), "{text}");
    }
}
