//! What a set of samples comes to.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A summary of durations, all in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub min: f64,
    pub p50: f64,
    /// None of fewer than 100 samples.
    #[serde(default)]
    pub p90: Option<f64>,
    pub avg: f64,
    /// None of fewer than 1,000 samples.
    pub p99: Option<f64>,
    /// None of fewer than 10,000 samples.
    pub p999: Option<f64>,
    pub max: f64,
    /// Of the population: divided by the number of samples.
    pub stdev: f64,
}

impl Times {
    /// Summarises the samples, which it sorts. None if there are none.
    pub fn of(samples: &mut [f64]) -> Option<Times> {
        samples.sort_by(f64::total_cmp);
        let (min, max) = (*samples.first()?, *samples.last()?);
        let len = samples.len() as f64;
        let avg = samples.iter().sum::<f64>() / len;
        let variance = samples.iter().map(|sample| (sample - avg).powi(2)).sum::<f64>() / len;
        let rank = |per_mille| samples[nearest_rank(samples.len(), per_mille)];
        let rank_from = |least: usize, per_mille| (samples.len() >= least).then(|| rank(per_mille));
        Some(Times {
            min,
            p50: rank(500),
            p90: rank_from(100, 900),
            avg,
            p99: rank_from(1_000, 990),
            p999: rank_from(10_000, 999),
            max,
            stdev: variance.sqrt(),
        })
    }
}

/// The index of a percentile among `len` sorted samples, by nearest rank: the smallest sample that at least
/// `per_mille` thousandths of all samples do not exceed.
fn nearest_rank(len: usize, per_mille: usize) -> usize {
    (len * per_mille).div_ceil(1000).max(1) - 1
}

/// The median, by nearest rank, with the smallest and the largest. None if there are no values.
pub fn median(values: &[f64]) -> Option<Spread> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    Some(Spread { min, median: sorted[nearest_rank(sorted.len(), 500)], max })
}

/// The duration in the middle, by nearest rank; zero if there are none.
pub fn middle(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(nearest_rank(times.len(), 500)).copied().unwrap_or_default()
}

/// A median between its extremes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

/// Bins of a histogram to a doubling.
const BINS: f64 = 4.0;

/// A bin of a histogram, in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bin {
    /// Samples below this, and not below the bin before.
    pub below_us: f64,
    pub count: u64,
}

/// Every sample, counted in bins of which four make a doubling; those without a sample are left out.
pub fn histogram(samples: &[f64]) -> Vec<Bin> {
    let mut bins: BTreeMap<i64, u64> = BTreeMap::new();
    for sample in samples {
        // What is not above 0 goes to the first bin that a clock can tell, a nanosecond.
        let bin = (sample.max(1e-3).log2() * BINS).floor() as i64;
        *bins.entry(bin).or_default() += 1;
    }
    let bin = |(bin, count)| Bin { below_us: ((bin + 1) as f64 / BINS).exp2(), count };
    bins.into_iter().map(bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_to(len: usize) -> Vec<f64> {
        // Backwards, so that a summary that forgets to sort is wrong.
        (1..=len).rev().map(|n| n as f64).collect()
    }

    #[test]
    fn percentiles_are_the_nearest_rank() {
        // Of n samples 1, 2 ... n the p-th percentile is ceil(p n).
        let times = Times::of(&mut one_to(10_000)).unwrap();
        assert_eq!((times.p50, times.p99, times.p999), (5_000.0, Some(9_900.0), Some(9_990.0)));
        let times = Times::of(&mut one_to(10_001)).unwrap();
        assert_eq!((times.p50, times.p99, times.p999), (5_001.0, Some(9_901.0), Some(9_991.0)));
        let times = Times::of(&mut one_to(1)).unwrap();
        assert_eq!((times.min, times.p50, times.max), (1.0, 1.0, 1.0));
        let times = Times::of(&mut one_to(2)).unwrap();
        assert_eq!((times.min, times.p50, times.max), (1.0, 1.0, 2.0));
    }

    #[test]
    fn too_few_samples_have_no_high_percentile() {
        let p = |len| Times::of(&mut one_to(len)).map(|times| (times.p99.is_some(), times.p999.is_some()));
        assert_eq!(p(0), None);
        assert_eq!(p(999), Some((false, false)));
        assert_eq!(p(1_000), Some((true, false)));
        assert_eq!(p(9_999), Some((true, false)));
        assert_eq!(p(10_000), Some((true, true)));
    }

    #[test]
    fn mean_and_deviation() {
        let times = Times::of(&mut [9.0, 2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0]).unwrap();
        assert_eq!((times.avg, times.stdev), (5.0, 2.0));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(Spread { min: 1.0, median: 2.0, max: 3.0 }));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(Spread { min: 1.0, median: 2.0, max: 4.0 }));
    }

    #[test]
    fn a_histogram_has_every_sample_once_and_below_the_end_of_its_bin() {
        let samples = [0.0, 0.9, 1.0, 1.1, 1.9, 2.0, 100.0];
        let bins = histogram(&samples);
        assert_eq!(bins.iter().map(|bin| bin.count).sum::<u64>(), 7);
        for limit in [1.0, 2.0, 128.0] {
            let below = bins.iter().filter(|bin| bin.below_us <= limit).map(|bin| bin.count).sum::<u64>();
            assert_eq!(below, samples.iter().filter(|sample| **sample < limit).count() as u64, "{limit}");
        }
        assert_eq!(histogram(&[]), []);
    }
}
