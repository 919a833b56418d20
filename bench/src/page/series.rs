//! What of the results stands in which plot.

use std::collections::BTreeMap;

use super::Named;
use crate::load::knee;
use crate::report::{OFFERED, Phase, Row};

/// A question, and what each result answers.
pub struct Plot {
    /// Begins with the kind.
    pub id: String,
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    /// The names of the lines, in the order of their colours.
    pub names: Vec<String>,
    /// The lines of each result.
    pub results: Vec<Vec<Line>>,
}

/// An axis.
#[derive(Clone, Copy)]
pub struct Axis {
    pub label: &'static str,
    /// As the head of a column.
    pub short: &'static str,
    pub logarithmic: bool,
    /// Whether numbers are bytes, which have binary multiples.
    pub bytes: bool,
}

/// Points that belong together.
pub struct Line {
    /// Of [`Plot::names`].
    pub name: usize,
    /// Which number of its rows it shows, where a plot shows more than one.
    what: &'static str,
    pub points: Vec<Point>,
    pub reference: Option<String>,
    /// The point after which latency rises, where load is offered.
    pub knee: Option<usize>,
}

#[derive(Clone, Copy, PartialEq)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// Of a reference in the same run.
    pub reference: Option<f64>,
}

const SIZE: Axis = Axis { label: "size (bytes)", short: "size (B)", logarithmic: true, bytes: true };

/// Keys of a shape that follow from the size and make no line of their own.
const FOLLOWS_SIZE: &[&str] = &["window"];

/// A kind of plot: which rows it takes, and what of them.
struct Kind {
    id: &'static str,
    title: &'static str,
    x: Axis,
    y: Axis,
    /// Keys of a shape that are the abscissa or follow from it.
    along: &'static [&'static str],
    x_of: fn(&Row) -> Option<f64>,
    /// Names of what is plotted, beside what a line's name says already, and its value.
    y_of: &'static [(&'static str, Pick)],
    reference: Pick,
}

type Pick = fn(&Row) -> Option<f64>;

const LOADS: &[(&str, Pick)] = &[
    ("p50", |row| row.time_us.map(|times| times.p50)),
    ("p99", |row| row.time_us.and_then(|times| times.p99)),
];

const KINDS: &[Kind] = &[
    Kind {
        id: "latency-size",
        title: "latency against size",
        x: SIZE,
        y: Axis {
            label: "median latency, one way (µs)", short: "p50 (µs)", logarithmic: true, bytes: false
        },
        along: FOLLOWS_SIZE,
        x_of: |row| (row.size_bytes > 0).then_some(row.size_bytes as f64),
        y_of: &[("", |row| row.time_us.map(|times| times.p50))],
        reference: |row| Some(row.reference.as_ref()?.time_us?.median),
    },
    Kind {
        id: "bandwidth-size",
        title: "bandwidth against size",
        x: SIZE,
        y: Axis { label: "bandwidth (GB/s)", short: "GB/s", logarithmic: true, bytes: false },
        along: FOLLOWS_SIZE,
        x_of: |row| (row.size_bytes > 0).then_some(row.size_bytes as f64),
        y_of: &[("", |row| row.bandwidth_gb_per_s)],
        reference: |row| Some(row.reference.as_ref()?.bandwidth_gb_per_s?.median),
    },
    Kind {
        id: "latency-load",
        title: "latency against offered load",
        x: Axis { label: "offered load (Mops)", short: "offered (Mops)", logarithmic: false, bytes: false },
        y: Axis { label: "latency (µs)", short: "µs", logarithmic: true, bytes: false },
        along: &[OFFERED],
        x_of: |row| Some(*row.shape.get(OFFERED)? as f64 / 1e3),
        y_of: LOADS,
        reference: |_| None,
    },
    Kind {
        id: "rate-producers",
        title: "rate against producers",
        x: Axis { label: "producers (threads)", short: "producers", logarithmic: true, bytes: false },
        y: Axis { label: "rate, processed (Mops)", short: "Mops", logarithmic: true, bytes: false },
        along: &["producers", "blocks", "threads"],
        x_of: producers,
        y_of: &[("", |row| row.rate_mops.map(|rate| rate.proc.median))],
        reference: |row| Some(row.reference.as_ref()?.proc_mops?.median),
    },
];

/// Producer threads, those of a kernel among them.
fn producers(row: &Row) -> Option<f64> {
    let of = |key| row.shape.get(key).map(|value| *value as f64);
    of("producers").or_else(|| Some(of("blocks")? * of("threads")?))
}

/// All plots, by kind and then by layer.
pub fn plots(results: &[Named]) -> Vec<Plot> {
    let mut layers: Vec<&str> = Vec::new();
    for row in results.iter().flat_map(|result| &result.report.results) {
        if !layers.contains(&row.layer.as_str()) {
            layers.push(&row.layer);
        }
    }
    let of_kind = |kind| layers.iter().filter_map(move |layer| plot(kind, layer, results));
    KINDS.iter().flat_map(of_kind).collect()
}

/// Whether some plot may take the row.
pub fn is_plotted(row: &Row, results: &[Named]) -> bool {
    KINDS.iter().any(|kind| {
        let same = |other: &&Row| key(kind, other) == key(kind, row) && kind.takes(other).is_some();
        let rows = results.iter().flat_map(|result| result.report.results.iter().filter(same));
        let xs = rows.filter_map(|row| kind.takes(row)).map(f64::to_bits);
        kind.takes(row).is_some() && xs.collect::<std::collections::BTreeSet<_>>().len() > 1
    })
}

impl Kind {
    /// The abscissa of a row that belongs into the plot. Only what is offered has a latency under load.
    fn takes(&self, row: &Row) -> Option<f64> {
        let under_load = row.shape.contains_key(OFFERED);
        let belongs = row.phase == Phase::Warm && under_load == self.along.contains(&OFFERED);
        let has_value = self.y_of.iter().any(|(_, pick)| pick(row).is_some_and(is_drawn));
        (self.x_of)(row).filter(|_| belongs && has_value)
    }
}

/// A logarithmic axis has no place for anything else.
fn is_drawn(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

type Key<'a> = (&'a str, &'a str, &'a str, Vec<(&'a str, u64)>, u64);

/// What the rows of a line have in common.
fn key<'a>(kind: &Kind, row: &'a Row) -> Key<'a> {
    let shape = row.shape.iter().map(|(key, value)| (key.as_str(), *value));
    let shape = shape.filter(|(key, _)| !kind.along.contains(key)).collect();
    let size = if kind.x.bytes { 0 } else { row.size_bytes };
    (&row.layer, &row.test, &row.subject, shape, size)
}

fn plot(kind: &Kind, layer: &str, results: &[Named]) -> Option<Plot> {
    let mut keys: Vec<Key> = Vec::new();
    let mut found: Vec<BTreeMap<usize, Vec<&Row>>> = Vec::new();
    for result in results {
        let mut lines: BTreeMap<usize, Vec<&Row>> = BTreeMap::new();
        for row in result.report.results.iter().filter(|row| row.layer == layer && kind.takes(row).is_some())
        {
            let key = key(kind, row);
            let at = keys.iter().position(|other| *other == key).unwrap_or_else(|| {
                keys.push(key);
                keys.len() - 1
            });
            lines.entry(at).or_default().push(row);
        }
        found.push(lines);
    }
    // A single point answers nothing.
    let xs = |at: usize| {
        let rows = found.iter().filter_map(|lines| lines.get(&at)).flatten();
        rows.filter_map(|row| kind.takes(row))
            .map(f64::to_bits)
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    let kept: Vec<usize> = (0..keys.len()).filter(|at| xs(*at) > 1).collect();
    let parts: Vec<Vec<String>> = kept.iter().map(|at| words(&keys[*at])).collect();
    let mut names = Vec::new();
    let mut drawn: Vec<Vec<Line>> = results.iter().map(|_| Vec::new()).collect();
    for (n, &at) in kept.iter().enumerate() {
        for (what, pick) in kind.y_of {
            let lines: Vec<_> = found
                .iter()
                .map(|lines| lines.get(&at).and_then(|rows| line(kind, rows, (what, *pick), names.len())))
                .collect();
            // The same measurement may stand in two tests, beside another reference each.
            let is_there = |line: &Option<Line>, drawn: &[Line]| {
                line.as_ref().is_none_or(|line| {
                    let same = |a: &Point, b: &Point| (a.x, a.y) == (b.x, b.y);
                    drawn.iter().any(|other| {
                        other.what == line.what
                            && other.points.len() == line.points.len()
                            && other.points.iter().zip(&line.points).all(|(a, b)| same(a, b))
                            && (line.reference.is_none() || line.reference == other.reference)
                    })
                })
            };
            if lines.iter().zip(&drawn).all(|(line, drawn)| is_there(line, drawn)) {
                continue;
            }
            let varied = parts[n].iter().filter(|word| !parts.iter().all(|other| other.contains(word)));
            let mut name: Vec<&str> = varied.map(String::as_str).collect();
            name.push(what);
            name.retain(|word| !word.is_empty());
            names.push(if name.is_empty() { layer.to_owned() } else { name.join(" ") });
            for (line, drawn) in lines.into_iter().zip(&mut drawn) {
                drawn.extend(line);
            }
        }
    }
    (!names.is_empty()).then(|| Plot {
        id: format!("{}-{layer}", kind.id),
        title: format!("{layer}: {}", kind.title),
        x: kind.x,
        y: kind.y,
        names,
        results: drawn,
    })
}

/// What a line may be called by.
fn words((_, test, subject, shape, size): &Key) -> Vec<String> {
    let mut words = vec![(*test).to_owned(), (*subject).to_owned()];
    words.extend(shape.iter().map(|(key, value)| format!("{key}={value}")));
    if *size > 0 {
        words.push(format!("{size} B"));
    }
    words
}

fn line(kind: &Kind, rows: &[&Row], (what, pick): (&'static str, Pick), name: usize) -> Option<Line> {
    let mut rows = rows.to_vec();
    rows.sort_by(|a, b| (kind.x_of)(a).unwrap_or(0.0).total_cmp(&(kind.x_of)(b).unwrap_or(0.0)));
    let drawn: Vec<&Row> = rows.into_iter().filter(|row| pick(row).is_some_and(is_drawn)).collect();
    let point = |row: &&Row| {
        let reference = (kind.reference)(row).filter(|value| is_drawn(*value));
        Some(Point { x: (kind.x_of)(row)?, y: pick(row)?, reference })
    };
    let points: Vec<Point> = drawn.iter().filter_map(point).collect();
    let reference = drawn.iter().find(|row| (kind.reference)(row).is_some());
    let reference = reference.and_then(|row| Some(row.reference.as_ref()?.name.clone()));
    let knee = kind.along.contains(&OFFERED).then(|| knee(&drawn)).flatten();
    (!points.is_empty()).then_some(Line { name, what, points, reference, knee })
}
