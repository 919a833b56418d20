//! The page around the plots: where the results come from, a table below each plot, and what stands in no plot.

use std::fmt::Write;

use super::series::{Line, Plot, Point, is_plotted};
use super::svg::{COLOURS, label, picture};
use super::{Named, escape};
use crate::baseline::describe;
use crate::load::{KNEE_SHARE, KNEE_TIMES};
use crate::report::{Report, Row, Status};
use crate::table::{devices, number};

const STYLE: &str = include_str!("style.css");

/// Nothing may be loaded or run, whatever a result holds.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

pub fn document(results: &[Named], plots: &[Plot]) -> String {
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>portway-bench: {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>portway-bench</h1>\n\
         <p class=\"soft\">Latency is one way, half of a round trip, unless a note of its layer says otherwise. GB/s are 10<sup>9</sup> \
         bytes a second, Mops 10<sup>6</sup> a second. Percentiles are by nearest rank; a dash stands where there are too few \
         samples. Dashed lines are references of the same run.</p>\n",
        escape(&results.iter().map(|result| result.file.as_str()).collect::<Vec<_>>().join(", ")),
    );
    html += &machines(results);
    if plots.is_empty() {
        html += "<section><p>No plot: no test has a row for more than one size, load or number of producers.</p></section>\n";
    }
    for plot in plots {
        html += &section(plot, results);
    }
    html += &others(results);
    html += &notes(results);
    html + "</body>\n</html>\n"
}

/// What a result is called where there are more than one.
fn letter(n: usize) -> String {
    char::from_u32('A' as u32 + n as u32)
        .filter(char::is_ascii_uppercase)
        .map_or_else(|| n.to_string(), String::from)
}

/// A row for each thing to know about a result, a column for each result.
fn machines(results: &[Named]) -> String {
    let layers = |report: &Report| {
        let layer = |layer: &crate::report::LayerResult| {
            let reason = layer.reason.as_deref().map_or(String::new(), |reason| format!(" ({reason})"));
            match layer.status {
                Status::Ran => layer.layer.clone(),
                Status::Waived => format!("{}: waived{reason}", layer.layer),
                Status::Failed => format!("{}: FAILED{reason}", layer.layer),
            }
        };
        report.layers.iter().map(layer).collect::<Vec<_>>().join("; ")
    };
    let controls = |report: &Report| {
        let held = report.controls.iter().filter(|control| control.held()).count();
        format!("{} of {} corruptions on purpose found", held, report.controls.len())
    };
    let pairs = |map: &std::collections::BTreeMap<String, String>, between: &str| {
        let words: Vec<_> = map.iter().map(|(name, value)| format!("{name}{between}{value}")).collect();
        words.join(" ")
    };
    let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "–".into());
    type Fact<'a> = (&'a str, &'a dyn Fn(&Report) -> String);
    let facts: [Fact; 13] = [
        ("measured", &|report| utc(report.start_unix_s)),
        ("version", &|report| format!("{}, schema {}", report.version, report.schema)),
        ("host", &|report| report.machine.host.clone()),
        ("processor", &|report| format!("{}, {} cores", report.machine.cpu, report.machine.cores.len())),
        ("kernel", &|report| report.machine.kernel.clone()),
        ("load before", &|report| report.machine.load.map_or("–".into(), |load| load.to_string())),
        ("GPUs and ports", &|report| {
            format!("driver {}, {}", dash(&report.machine.driver), devices(&report.machine))
        }),
        ("variables", &|report| pairs(&report.env, "=")),
        ("command", &|report| report.argv.join(" ")),
        ("parameters", &|report| pairs(&report.config.shape, " ")),
        ("layers", &layers),
        ("checks", &|report| format!("{} wrong; {}", report.wrong(), controls(report))),
        ("errors", &|report| if report.errors.is_empty() { "none".into() } else { report.errors.join("; ") }),
    ];
    let mut html =
        String::from("<section><h2>Results</h2><div class=\"wide\"><table class=\"words\">\n<tr><th></th>");
    for (n, result) in results.iter().enumerate() {
        let letter = if results.len() > 1 { format!("{}: ", letter(n)) } else { String::new() };
        let _ = write!(html, "<th>{letter}{}</th>", escape(&result.file));
    }
    html.push_str("</tr>\n");
    for (name, value) in facts {
        let _ = write!(html, "<tr><th>{name}</th>");
        for result in results {
            let is_bad = name == "errors" && !result.report.errors.is_empty()
                || name == "checks" && result.report.exit_status() != 0;
            let class = if is_bad { " class=\"bad\"" } else { "" };
            let _ = write!(html, "<td{class}>{}</td>", escape(&value(&result.report)));
        }
        html.push_str("</tr>\n");
    }
    html + "</table></div></section>\n"
}

/// A plot: a picture for each result, which colour is what, and the numbers.
fn section(plot: &Plot, results: &[Named]) -> String {
    let mut html = format!("<section><h2>{}</h2>\n<div class=\"pair\">\n", escape(&plot.title));
    for (n, result) in results.iter().enumerate() {
        let letter = if results.len() > 1 { format!("{}: ", letter(n)) } else { String::new() };
        let caption = format!("{letter}{}, {}", result.file, result.report.machine.host);
        let svg = picture(plot, n);
        let _ = writeln!(html, "<figure>{svg}<figcaption>{}</figcaption></figure>", escape(&caption));
    }
    html += "</div>\n<ul class=\"legend\">\n";
    for (n, name) in plot.names.iter().enumerate() {
        html += &key(n, "solid", name);
        let mut lines = plot.results.iter().flatten().filter(|line| line.name == n);
        if let Some(reference) = lines.find_map(|line| line.reference.as_ref()) {
            html += &key(n, "dashed", &format!("{reference}, beside it"));
        }
    }
    html += "</ul>\n";
    if plot.id.starts_with("latency-load") {
        html += &knees(plot, results.len());
    }
    html + &numbers(plot) + "</section>\n"
}

fn key(name: usize, class: &str, text: &str) -> String {
    format!(
        "<li><svg viewBox=\"0 0 30 10\" class=\"s{}\" aria-hidden=\"true\"><path class=\"{class}\" d=\"M0 5H30\"/></svg>{}</li>\n",
        name % COLOURS,
        escape(text),
    )
}

/// What the marks say, also where there is none.
fn knees(plot: &Plot, results: usize) -> String {
    let mut html = format!(
        "<p class=\"soft\">The knee is the last load before the 99th percentile, or the median where there are too few samples, is more \
         than {KNEE_TIMES} times that of the lowest load, or less than {} % of the load is carried.</p>\n<ul>\n",
        KNEE_SHARE * 100.0
    );
    for (n, lines) in plot.results.iter().enumerate() {
        let letter = if results > 1 { format!("{}: ", letter(n)) } else { String::new() };
        for line in lines {
            let name = escape(&plot.names[line.name]);
            let text = match line.knee.map(|knee| line.points[knee].x) {
                Some(x) => format!("knee at {} Mops", label(plot.x, x)),
                None => "no knee within these loads".into(),
            };
            let _ = writeln!(html, "<li>{letter}{name}: {text}</li>");
        }
    }
    html + "</ul>\n"
}

/// The numbers of a plot.
fn numbers(plot: &Plot) -> String {
    let has_reference = plot.results.iter().flatten().any(|line| line.reference.is_some());
    let several = plot.results.len() > 1;
    let mut html = format!("<div class=\"wide\"><table>\n<tr><th></th><th>{}</th>", escape(plot.x.short));
    for n in 0..plot.results.len() {
        let letter = if several { format!("{}: ", letter(n)) } else { String::new() };
        let _ = write!(html, "<th>{letter}{}</th>", escape(plot.y.short));
        if has_reference {
            let _ = write!(html, "<th>{letter}ref</th><th>{letter}÷ ref</th>");
        }
    }
    if plot.results.len() == 2 {
        html += "<th>B ÷ A</th>";
    }
    html += "</tr>\n";
    for (n, name) in plot.names.iter().enumerate() {
        let lines: Vec<Option<&Line>> =
            plot.results.iter().map(|lines| lines.iter().find(|line| line.name == n)).collect();
        let points = |line: &Option<&Line>| line.map_or(&[][..], |line| &line.points[..]).to_vec();
        let mut xs: Vec<f64> = lines.iter().flat_map(points).map(|point| point.x).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        for x in xs {
            let at: Vec<Vec<Point>> = lines
                .iter()
                .map(|line| points(line).into_iter().filter(|point| point.x == x).collect())
                .collect();
            // Several shapes of a launch may have as many producers.
            for k in 0..at.iter().map(Vec::len).max().unwrap_or(0) {
                let here: Vec<Option<Point>> = at.iter().map(|points| points.get(k).copied()).collect();
                let _ = write!(html, "<tr><td>{}</td><td>{}</td>", escape(name), label(plot.x, x));
                html += &cells(&here, has_reference);
                html += "</tr>\n";
            }
        }
    }
    html + "</table></div>\n"
}

fn cells(here: &[Option<Point>], has_reference: bool) -> String {
    let cell = |value: Option<f64>| format!("<td>{}</td>", value.map_or("–".into(), number));
    let mut html = String::new();
    for point in here {
        html += &cell(point.map(|point| point.y));
        if has_reference {
            let reference = point.and_then(|point| point.reference);
            html += &cell(reference);
            html += &cell(point.zip(reference).map(|(point, reference)| point.y / reference));
        }
    }
    if let [a, b] = here {
        html += &cell(a.zip(*b).map(|(a, b)| b.y / a.y));
    }
    html
}

/// Rows that no plot takes.
fn others(results: &[Named]) -> String {
    let rows = |result: &Named| -> Vec<Row> {
        result.report.results.iter().filter(|row| !is_plotted(row, results)).cloned().collect()
    };
    let all: Vec<Vec<Row>> = results.iter().map(rows).collect();
    if all.iter().all(Vec::is_empty) {
        return String::new();
    }
    let mut html = String::from(
        "<section><h2>Other measurements</h2><div class=\"wide\"><table>\n<tr><th></th><th>p50 (µs)</th><th>p99 (µs)</th>\
         <th>share (%)</th><th>Mops</th><th>GB/s</th><th>÷ ref</th><th>wrong</th></tr>\n",
    );
    for (n, rows) in all.iter().enumerate() {
        for row in rows {
            let letter = if results.len() > 1 { format!("{}: ", letter(n)) } else { String::new() };
            let _ = write!(html, "<tr><td>{letter}{}</td>", escape(&describe(row)));
            let values = [
                row.time_us.map(|times| times.p50),
                row.time_us.and_then(|times| times.p99),
                row.share_percent,
                row.rate_mops.map(|rate| rate.proc.median),
                row.bandwidth_gb_per_s,
                row.reference.as_ref().map(|reference| reference.ratio.median),
            ];
            for value in values {
                let _ = write!(html, "<td>{}</td>", value.map_or("–".into(), number));
            }
            let wrong = row.wrong.map_or("–".into(), |wrong| wrong.to_string());
            let _ = writeln!(html, "<td>{wrong}</td></tr>");
        }
    }
    html + "</table></div></section>\n"
}

/// What a reader has to know about each layer's rows.
fn notes(results: &[Named]) -> String {
    let mut html = String::from("<section><h2>Notes</h2>\n");
    for (n, result) in results.iter().enumerate() {
        let letter = if results.len() > 1 { format!("{}: ", letter(n)) } else { String::new() };
        let _ = writeln!(html, "<details><summary>{letter}{}</summary>", escape(&result.file));
        for note in &result.report.notes {
            let _ = writeln!(html, "<p>{}: {}</p>", escape(&note.layer), escape(&note.text));
        }
        html += "</details>\n";
    }
    html + "</section>\n"
}

/// A time as people write it.
fn utc(unix_s: u64) -> String {
    let (days, seconds) = (unix_s / 86_400, unix_s % 86_400);
    let (mut year, mut day) = (1970, days);
    let length = |year: u64| 365 + u64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
    while day >= length(year) {
        day -= length(year);
        year += 1;
        if year > 9999 {
            return format!("{unix_s} s after 1970");
        }
    }
    let february = 28 + length(year) - 365;
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    let (hour, minute) = (seconds / 3600, seconds % 3600 / 60);
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02} UTC", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_798_761_599), "2026-12-31 23:59 UTC");
        assert_eq!(utc(1_798_761_600), "2027-01-01 00:00 UTC");
        assert_eq!(utc(u64::MAX), format!("{} s after 1970", u64::MAX));
    }
}
