//! The flags that shape layers: which there are, and how they are written.

use super::Args;
use crate::layer::Layer;
use crate::machine::join;

/// The flags that shape a layer; the others mean the same to each.
pub const SHAPE: &[&str] = &[
    "producers",
    "depth",
    "batch",
    "channels",
    "drain",
    "begin",
    "end",
    "factor",
    "size",
    "all_sizes",
    "step",
    "rate",
    "stages",
    "ctas",
    "threads",
    "histogram",
    "unsorted",
    "proxies",
    "gpus",
    "devices",
    "gid_index",
    "queue_pairs",
    "tx_depth",
    "inline_bytes",
    "post_list",
    "poll",
];

impl Args {
    /// The flags that shape these layers, with their values, as one would write them.
    pub fn shape(&self, layers: &[&Layer]) -> Vec<(String, String)> {
        let sizes = match (self.size, self.all_sizes, self.step) {
            (Some(size), ..) => vec![("-s".into(), size.to_string())],
            (_, true, _) => vec![("-a".into(), String::new())],
            (.., step) => {
                let pace = step.map_or(("-f", self.factor), |step| ("-i", step));
                [("-b", self.begin), ("-e", self.end), pace]
                    .map(|(flag, n)| (flag.into(), n.to_string()))
                    .into()
            }
        };
        let mops = |kops: u64| (kops as f64 / 1e3).to_string();
        let rate = self.rate.map(|(low, high, step)| [low, high, step].map(mops).join(":"));
        let given = |flag: bool| flag.then(|| "1".to_owned());
        let value = |flag: &&str| match *flag {
            "producers" => Some(join(&self.producers)),
            "depth" => Some(join(&self.depth)),
            "batch" => Some(join(&self.batch)),
            "channels" => Some(join(&self.channels)),
            "drain" => Some(join(&self.drain)),
            "rate" => rate.clone(),
            "stages" => given(self.stages),
            "ctas" => self.ctas.map(|count| count.to_string()),
            "threads" => self.threads.map(|count| count.to_string()),
            "histogram" => given(self.histogram),
            "unsorted" => given(self.unsorted),
            "proxies" => Some(join(&self.proxies)),
            "gpus" => Some(join(&self.gpus)),
            "devices" => Some(self.devices.join(",")),
            "gid_index" => self.gid_index.map(|index| index.to_string()),
            "queue_pairs" => Some(self.queue_pairs.to_string()),
            "tx_depth" => Some(self.tx_depth.to_string()),
            "inline_bytes" => Some(self.inline_bytes.to_string()),
            "post_list" => Some(self.post_list.to_string()),
            "poll" => Some(self.poll.to_string()),
            _ => None,
        };
        let used = |flag: &&&str| layers.iter().any(|layer| layer.flags.contains(flag));
        let of_layers = SHAPE.iter().filter(used).filter_map(|flag| Some((dashed(flag), value(flag)?)));
        let sizes = sizes.into_iter().filter(|_| used(&&"begin"));
        // An empty list means that each test takes its own.
        of_layers.filter(|(_, value)| !value.is_empty()).chain(sizes).collect()
    }
}

/// Layers that take sizes say `begin`, and take them in every form.
pub fn as_layers_say<'a>(flag: &'a &'static str) -> &'a &'static str {
    if matches!(*flag, "size" | "all_sizes" | "step") { &"begin" } else { flag }
}

/// A flag of [`SHAPE`] as the user writes it.
pub fn dashed(id: &str) -> String {
    match id {
        "begin" => "-b".into(),
        "end" => "-e".into(),
        "factor" => "-f".into(),
        "size" => "-s".into(),
        "all_sizes" => "-a".into(),
        "step" => "-i".into(),
        "gpus" => "--devices".into(),
        "devices" => "-d".into(),
        "gid_index" => "-x".into(),
        "queue_pairs" => "-q".into(),
        "tx_depth" => "-t".into(),
        "inline_bytes" => "-I".into(),
        "histogram" => "-H".into(),
        "unsorted" => "-U".into(),
        "post_list" => "-l".into(),
        long => format!("--{long}"),
    }
}
