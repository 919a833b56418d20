//! The machine: what it is called, which cores there are, and pinning threads to them.

use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::devices::{self, GpuDevice, Nic};

/// What a result has to say about where it was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub host: String,
    pub cpu: String,
    /// The cores that this process may use.
    pub cores: Vec<usize>,
    /// Runnable threads of the whole machine over the last minute, before the first measurement.
    pub load: Option<f64>,
    /// Of the system.
    #[serde(default)]
    pub kernel: String,
    /// How the cores choose their clock.
    #[serde(default)]
    pub governor: Option<String>,
    /// The version of the NVIDIA driver.
    #[serde(default)]
    pub driver: Option<String>,
    #[serde(default)]
    pub gpus: Vec<GpuDevice>,
    #[serde(default)]
    pub nics: Vec<Nic>,
}

impl Machine {
    pub fn look() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
        let loadavg = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let governor = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
        let (root, uname) = (Path::new("/"), rustix::system::uname());
        Machine {
            host: uname.nodename().to_string_lossy().into_owned(),
            cpu: model.unwrap_or("unknown").trim().to_owned(),
            cores: cores(),
            load: loadavg.split_whitespace().next().and_then(|load| load.parse().ok()),
            kernel: uname.release().to_string_lossy().into_owned(),
            governor: governor.ok().map(|name| name.trim().to_owned()),
            driver: devices::driver(root),
            gpus: devices::gpus(root),
            nics: devices::nics(root),
        }
    }
}

/// The cores that this process may use, by number.
fn cores() -> Vec<usize> {
    // A kernel with more cores than a `CpuSet` holds refuses; then nothing is pinned, and the header says so.
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// Which thread runs on which core: the consumer on the first, with nobody else if there are two; producers share the
/// others.
#[derive(Clone, Debug)]
pub struct Pinning {
    cores: Vec<usize>,
}

impl Pinning {
    /// Over the cores that this process may use.
    pub fn new(machine: &Machine) -> Self {
        Pinning { cores: machine.cores.clone() }
    }

    /// Over those of its cores that stand in a list as the system writes it (`0-3,8`), or over all if none does.
    pub fn among(&self, list: &str) -> Self {
        let number = |text: &str| text.trim().parse::<usize>().ok();
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(number(first)?..=number(last)?)
        };
        let ranges: Vec<_> = list.split(',').filter_map(range).collect();
        let near = self.cores.iter().copied().filter(|core| ranges.iter().any(|range| range.contains(core)));
        match near.collect::<Vec<_>>() {
            none if none.is_empty() => self.clone(),
            cores => Pinning { cores },
        }
    }

    /// The consumer's core.
    pub fn consumer(&self) -> Option<usize> {
        self.cores.first().copied()
    }

    /// The consumer's core if it has that for itself, for an engine's thread.
    pub fn engine(&self) -> Option<usize> {
        self.consumer().filter(|_| self.cores.len() > 1)
    }

    /// The core of the n-th producer.
    pub fn producer(&self, n: usize) -> Option<usize> {
        match self.cores.len() {
            0 | 1 => self.consumer(),
            len => Some(self.cores[1 + n % (len - 1)]),
        }
    }

    /// In words, for up to `producers` producers.
    pub fn describe(&self, producers: usize) -> String {
        let Some(consumer) = self.consumer() else { return "threads are not pinned".into() };
        let mut others: Vec<_> = (0..producers).filter_map(|n| self.producer(n)).collect();
        others.sort_unstable();
        others.dedup();
        format!("consumer pinned to core {consumer}, producers to {}", join(&others))
    }
}

/// Pins the calling thread. A refusal is no failure: the thread runs where the system puts it.
pub fn pin(core: Option<usize>) {
    if let Some(core) = core {
        let mut set = CpuSet::new();
        set.set(core);
        if let Err(error) = sched_setaffinity(None, &set) {
            eprintln!("portway-bench: a thread stays unpinned: core {core}: {error}");
        }
    }
}

/// Numbers with commas between them.
pub fn join<T: ToString>(numbers: &[T]) -> String {
    numbers.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_consumer_shares_its_core_only_when_there_is_one() {
        let on = |cores: &[usize]| {
            let pinning = Pinning { cores: cores.to_vec() };
            (pinning.consumer(), [0, 1, 2].map(|n| pinning.producer(n)))
        };
        assert_eq!(on(&[]), (None, [None; 3]));
        assert_eq!(on(&[5]), (Some(5), [Some(5); 3]));
        assert_eq!(on(&[0, 1]), (Some(0), [Some(1); 3]));
        assert_eq!(on(&[2, 4, 6]), (Some(2), [Some(4), Some(6), Some(4)]));
    }

    #[test]
    fn near_cores_are_chosen_if_there_are_any() {
        let among = |list: &str| Pinning { cores: vec![1, 2, 9, 40] }.among(list).cores;
        assert_eq!(among("0-3,9\n"), [1, 2, 9]);
        assert_eq!(among("40"), [40]);
        assert_eq!(among("64-127"), [1, 2, 9, 40]);
        assert_eq!(among("nonsense"), [1, 2, 9, 40]);
    }

    #[test]
    fn a_thread_is_where_it_was_pinned() {
        for core in cores() {
            std::thread::spawn(move || {
                pin(Some(core));
                assert_eq!(cores(), [core]);
            })
            .join()
            .unwrap();
        }
    }
}
