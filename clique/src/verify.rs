//! The verdict over what the participants said of themselves, before the library is called: it would turn a difference
//! into a hang.
//!
//! The verdict is a function of the messages alone, so every participant reaches the same one.

use core::fmt;
use std::collections::BTreeMap;

use crate::message::Hello;
use crate::uses::Use;

/// How many differences a verdict names.
const MAX_NAMED: usize = 16;

/// One thing in which a participant differs from the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// In what.
    pub what: String,
    /// Which rank; the participant's lowest if it is the same for all of them.
    pub rank: Option<u32>,
    /// The participant, `host:pid`; "nobody" if it is about somebody who is not there.
    pub process: String,
    /// What it has to be.
    pub expected: String,
    /// What it is.
    pub seen: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { what, rank, process, expected, seen } = self;
        match rank {
            Some(rank) => write!(f, "{what} of rank {rank} ({process})")?,
            None => write!(f, "{what} of {process}")?,
        }
        write!(f, ": expected {expected}, seen {seen}")
    }
}

/// Why a clique does not agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// The first differences, at most 16.
    pub differences: Vec<Difference>,
    /// How many there are in all.
    pub total: usize,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, difference) in self.differences.iter().enumerate() {
            let gap = if index == 0 { "" } else { "; " };
            write!(f, "{gap}{difference}")?;
        }
        match self.total - self.differences.len() {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

/// One rank of a clique that agrees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    /// Which participant has it.
    pub(crate) participant: u32,
    /// The participant, `host:pid`.
    pub(crate) process: String,
    pub(crate) uuid: String,
}

/// What a clique agrees on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agreement {
    /// By rank.
    pub(crate) seats: Vec<Seat>,
    /// What is run before it is ready, sorted.
    pub(crate) uses: Vec<Use>,
    /// The variables that name what a host has, each value with who has it.
    pub(crate) hardware: Vec<String>,
}

/// The verdict. `hellos` is in the order of the participants.
pub(crate) fn verdict(hellos: &[Hello]) -> Result<Agreement, Disagreement> {
    let mut found = Vec::new();
    compare(hellos, "size", &mut found, |hello| hello.size.to_string());
    compare(hellos, "library", &mut found, |hello| hello.library.clone());
    compare(hellos, "library version", &mut found, |hello| hello.library_version.to_string());
    compare(hellos, "configuration", &mut found, |hello| format!("{:?}", hello.config));
    compare(hellos, "large size of the first use", &mut found, |hello| hello.large_bytes.to_string());
    compare(hellos, "number of unique ids", &mut found, |hello| {
        if hello.several_ids { "several".to_owned() } else { "one".to_owned() }
    });
    environment(hellos, &mut found);
    let size = common(hellos, |hello| hello.size).unwrap_or(0);
    let seats = ranks(hellos, size, &mut found);
    devices(hellos, &mut found);
    let uses = uses(hellos, size, &mut found);
    if found.is_empty() {
        return Ok(Agreement { seats, uses, hardware: hardware(hellos) });
    }
    let total = found.len();
    found.truncate(MAX_NAMED);
    Err(Disagreement { differences: found, total })
}

/// The value that most participants have; of several, the one that comes first.
fn common<T: Ord>(hellos: &[Hello], value: impl Fn(&Hello) -> T) -> Option<T> {
    let mut counts: BTreeMap<T, (usize, usize)> = BTreeMap::new();
    for (index, hello) in hellos.iter().enumerate() {
        counts.entry(value(hello)).or_insert((0, index)).0 += 1;
    }
    let best = counts.into_iter().max_by_key(|(_, (count, first))| (*count, usize::MAX - first));
    best.map(|(value, _)| value)
}

fn compare(hellos: &[Hello], what: &str, found: &mut Vec<Difference>, value: impl Fn(&Hello) -> String) {
    let Some(expected) = common(hellos, &value) else { return };
    for hello in hellos {
        let seen = value(hello);
        if seen != expected {
            found.push(difference(hello, what, None, &expected, seen));
        }
    }
}

fn difference(
    hello: &Hello,
    what: &str,
    rank: Option<u32>,
    expected: impl ToString,
    seen: impl ToString,
) -> Difference {
    Difference {
        what: what.to_owned(),
        rank: rank.or_else(|| hello.locals.iter().map(|local| local.rank).min()),
        process: hello.process.clone(),
        expected: expected.to_string(),
        seen: seen.to_string(),
    }
}

fn environment(hellos: &[Hello], found: &mut Vec<Difference>) {
    let mut tables: Vec<BTreeMap<&str, &str>> = Vec::with_capacity(hellos.len());
    let mut names = BTreeMap::new();
    for hello in hellos {
        let table: BTreeMap<_, _> =
            hello.environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        names.extend(table.keys().map(|name| (*name, ())));
        tables.push(table);
    }
    for name in names.into_keys() {
        let values: Vec<Option<&str>> = tables.iter().map(|table| table.get(name).copied()).collect();
        let mut counts: BTreeMap<Option<&str>, (usize, usize)> = BTreeMap::new();
        for (index, value) in values.iter().enumerate() {
            counts.entry(*value).or_insert((0, index)).0 += 1;
        }
        let best = counts.into_iter().max_by_key(|(_, (count, first))| (*count, usize::MAX - first));
        let Some((expected, _)) = best else { continue };
        let show = |value: Option<&str>| value.map_or("not set".to_owned(), |value| format!("{value:?}"));
        for (hello, seen) in hellos.iter().zip(values) {
            if seen != expected {
                let what = format!("environment variable {name}");
                found.push(difference(hello, &what, None, show(expected), show(seen)));
            }
        }
    }
}

/// Each value of each variable that names what a host has: who has it first, and how many more.
fn hardware(hellos: &[Hello]) -> Vec<String> {
    let mut values: BTreeMap<(&str, &str), (&str, usize)> = BTreeMap::new();
    for hello in hellos {
        for (name, value) in &hello.hardware {
            values.entry((name, value)).or_insert((&hello.process, 0)).1 += 1;
        }
    }
    let line = |((name, value), (process, count)): ((&str, &str), (&str, usize))| match count {
        1 => format!("{name}={value:?} ({process})"),
        count => format!("{name}={value:?} ({process} and {} more)", count - 1),
    };
    values.into_iter().map(line).collect()
}

/// Dense and distinct: each rank below the size, once.
fn ranks(hellos: &[Hello], size: u32, found: &mut Vec<Difference>) -> Vec<Seat> {
    let mut seats: BTreeMap<u32, Seat> = BTreeMap::new();
    for (participant, hello) in (0u32..).zip(hellos) {
        if hello.locals.is_empty() {
            found.push(difference(hello, "number of local ranks", None, "at least 1", 0));
        }
        for local in &hello.locals {
            let rank = local.rank;
            if rank >= size {
                found.push(difference(hello, "rank", Some(rank), format!("below {size}"), rank));
            } else if let Some(first) = seats.get(&rank) {
                let expected = format!("this rank once, at {}", first.process);
                found.push(difference(hello, "rank", Some(rank), expected, "once more"));
            } else {
                let seat = Seat { participant, process: hello.process.clone(), uuid: local.uuid.clone() };
                seats.insert(rank, seat);
            }
        }
    }
    let mut next = 0;
    for missing_up_to in seats.keys().copied().chain([size]) {
        // Neighbours are one difference, so that a wrong size of four thousand million is not as many.
        if next < missing_up_to {
            let last = missing_up_to - 1;
            found.push(Difference {
                what: if next == last {
                    "rank".to_owned()
                } else {
                    format!("ranks up to {last}, from the first")
                },
                rank: Some(next),
                process: "nobody".to_owned(),
                expected: "a participant that has it".to_owned(),
                seen: "none".to_owned(),
            });
        }
        next = missing_up_to.saturating_add(1);
    }
    seats.into_values().collect()
}

fn devices(hellos: &[Hello], found: &mut Vec<Difference>) {
    let mut owners: BTreeMap<&str, (u32, &str)> = BTreeMap::new();
    for hello in hellos {
        for local in &hello.locals {
            if let Some((rank, process)) = owners.get(local.uuid.as_str()) {
                let expected = format!("a device of its own; rank {rank} ({process}) has this one");
                found.push(difference(hello, "device", Some(local.rank), expected, &local.uuid));
            } else {
                owners.insert(&local.uuid, (local.rank, &hello.process));
            }
        }
    }
}

/// What anybody declared.
fn uses(hellos: &[Hello], size: u32, found: &mut Vec<Difference>) -> Vec<Use> {
    let mut all = BTreeMap::new();
    for hello in hellos {
        for one in &hello.uses {
            if let Use::Peers { from, to } = *one {
                if from >= size || to >= size || from == to {
                    let expected = format!("two ranks below {size}");
                    found.push(difference(hello, "declared peers", None, expected, one));
                    continue;
                }
            }
            all.insert(*one, ());
        }
    }
    all.into_keys().collect()
}

#[cfg(all(test, not(loom)))]
#[path = "verify_tests.rs"]
mod tests;
