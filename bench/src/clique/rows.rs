//! The rows of a setting: each part, cold and warm.

use super::NAME;
use super::bring_up::{FIRST_USE, PARTS, Setting, Took};
use crate::args::Args;
use crate::failure::Failure;
use crate::report::{Phase, Row};

/// What was found in all runs of a setting.
#[derive(Default)]
pub struct Found {
    cold: Phased,
    warm: Phased,
}

#[derive(Default)]
struct Phased {
    runs: u64,
    took: Vec<Took>,
    wrong: u64,
}

impl Found {
    /// Makes a clique, and returns what it took.
    pub fn add(&mut self, setting: &mut Setting, phase: Phase) -> Result<Took, Failure> {
        let (took, wrong) = setting.once(false)?;
        let phased = if phase == Phase::Cold { &mut self.cold } else { &mut self.warm };
        phased.took.push(took);
        phased.wrong += u64::from(wrong);
        Ok(took)
    }

    /// A run of this phase has ended.
    pub fn run_done(&mut self, phase: Phase) {
        let phased = if phase == Phase::Cold { &mut self.cold } else { &mut self.warm };
        phased.runs += 1;
    }

    /// A row for each part and phase. The cliques that were wrong are counted once, where results are.
    pub fn rows(&self, args: &Args, test: &str, setting: &Setting) -> Vec<Row> {
        let mut rows = Vec::new();
        for (part, name) in PARTS.into_iter().enumerate() {
            for (phase, phased) in [(Phase::Cold, &self.cold), (Phase::Warm, &self.warm)] {
                let samples = phased.took.iter().map(|took| took[part]).collect();
                let row = Row {
                    layer: NAME.into(),
                    test: test.into(),
                    subject: name.into(),
                    phase,
                    shape: shape(setting),
                    runs: phased.runs,
                    wrong: (args.check() && part == FIRST_USE).then_some(phased.wrong),
                    ..Row::default()
                };
                rows.push(row.with_times(args, samples));
            }
        }
        rows
    }
}

pub fn shape(setting: &Setting) -> std::collections::BTreeMap<String, u64> {
    [("ranks".to_owned(), setting.ranks()), ("processes".to_owned(), setting.processes())].into()
}
