//! A page of results: one HTML file that loads nothing, with a plot for each question that the results answer.

mod document;
mod series;
mod standalone;
mod svg;

use std::path::Path;

use crate::report::Report;

/// A result, and the file that it comes from.
pub struct Named {
    pub file: String,
    pub report: Report,
}

impl Named {
    pub fn new(path: &Path, report: Report) -> Self {
        let file = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy());
        Named { file: file.into_owned(), report }
    }
}

/// The page.
pub fn page(results: &[Named]) -> String {
    document::document(results, &series::plots(results))
}

/// Each plot of each result as a file of its own: its name and what is in it.
pub fn plots(results: &[Named]) -> Vec<(String, String)> {
    let plots = series::plots(results);
    let of = |(n, result): (usize, &Named), plot| {
        let of = format!("{}, {}", result.file, result.report.machine.host);
        standalone::file(plot, n, results.len(), &of)
    };
    plots.iter().flat_map(|plot| results.iter().enumerate().map(move |each| of(each, plot))).collect()
}

/// A value within HTML.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::report::{OFFERED, Rate, Reference, Row, Status};
    use crate::stats::{Spread, Times};

    fn spread(median: f64) -> Spread {
        Spread { min: median, median, max: median }
    }

    fn row(test: &str, shape: &[(&str, u64)], size_bytes: u64) -> Row {
        Row {
            layer: "put".into(),
            test: test.into(),
            shape: shape.iter().map(|(key, value)| ((*key).to_owned(), *value)).collect(),
            size_bytes,
            ..Row::default()
        }
    }

    /// Three sizes, three loads, three numbers of producers, and a row that stands in no plot.
    fn result(factor: f64) -> Named {
        let mut report = Report::new(&args::parse("put").unwrap());
        for size in [8, 64, 512] {
            let time = Times::of(&mut vec![factor * size as f64; 1000]);
            let reference = Reference { time_us: Some(spread(4.0)), ..Reference::new("memcpy", spread(2.0)) };
            let latency = row("latency", &[], size);
            report.results.push(Row { time_us: time, reference: Some(reference), ..latency });
            // Its window follows from the size, and makes no series of its own.
            let bandwidth = row("throughput", &[("window", 4096 / size)], size);
            report.results.push(Row { bandwidth_gb_per_s: Some(factor * size as f64), ..bandwidth });
        }
        for (kops, us) in [(1000, 2.0), (2000, 3.0), (3000, 40.0)] {
            let rate = spread(kops as f64 / 1000.0);
            report.results.push(Row {
                time_us: Times::of(&mut vec![us; 1000]),
                rate_mops: Some(Rate { push: rate, proc: rate }),
                ..row("load", &[(OFFERED, kops), ("slots", 64)], 16)
            });
        }
        for producers in [1, 2, 4] {
            let rate = Some(Rate { push: spread(1.0), proc: spread(producers as f64) });
            report.results.push(Row { rate_mops: rate, ..row("rate", &[("producers", producers)], 16) });
        }
        let share_percent = Some(37.5);
        report.results.push(Row { time_us: Times::of(&mut [0.125]), share_percent, ..row("alone", &[], 16) });
        report.layer_done("put", Status::Ran, None);
        Named { file: "a.json".into(), report }
    }

    fn count(page: &str, what: &str) -> usize {
        page.matches(what).count()
    }

    #[test]
    fn a_result_has_a_plot_for_each_question_with_a_point_for_each_row() {
        let html = page(&[result(1.0)]);
        for plot in ["latency-size", "bandwidth-size", "latency-load", "rate-producers"] {
            assert_eq!(count(&html, &format!("data-plot=\"{plot}")), 1, "{plot}");
        }
        // The load has a line for the median and one for the 99th percentile.
        assert_eq!(count(&html, "class=\"point\""), 3 + 3 + 2 * 3 + 3);
        assert_eq!(count(&html, "class=\"reference\""), 3);
        assert_eq!(count(&html, "class=\"knee\""), 2);
        assert!(html.contains("knee at 2 Mops"), "{html}");
        assert!(html.contains("alone") && html.contains("0.125"), "a row without a plot is in a table");
        assert!(html.contains("<td>37.5</td>"), "and so is a share");
    }

    #[test]
    fn two_results_stand_side_by_side_on_the_same_axes() {
        let html = page(&[result(1.0), result(10.0)]);
        assert_eq!(count(&html, "data-plot=\"latency-size"), 2);
        assert_eq!(count(&html, "class=\"point\""), 2 * 15);
        let ticks = |n: usize| {
            let svg = html.split("data-plot=\"latency-size").nth(n).unwrap().split("</svg>").next().unwrap();
            svg.split("<text")
                .skip(1)
                .map(|text| text.split('<').next().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(ticks(1), ticks(2));
        assert!(html.contains("<td>10.0</td>"), "the second divided by the first");
    }

    #[test]
    fn a_page_loads_nothing_and_a_result_cannot_put_markup_into_it() {
        let mut hostile = result(1.0);
        let evil = "<img src=http://example.invalid/x onerror=alert(1)>\"'&";
        hostile.file = evil.into();
        hostile.report.machine.host = evil.into();
        hostile.report.machine.cpu = evil.into();
        hostile.report.argv = vec![evil.into()];
        hostile.report.note("put", evil);
        hostile.report.errors.push(evil.into());
        for row in &mut hostile.report.results {
            row.test += evil;
            row.subject = evil.into();
            row.shape.insert(evil.into(), 1);
        }
        let html = page(&[hostile]);
        assert!(!html.contains("<img"), "{html}");
        for loading in [" src=", "href=", "url(", "@import", "<script", "<link"] {
            let found = html.replace("&lt;img src=", "").contains(loading);
            assert!(!found, "{loading}");
        }
    }

    #[test]
    fn a_plot_is_a_file_of_its_own_whose_name_is_no_path() {
        let files = plots(&[result(1.0)]);
        let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "latency-size-put.svg",
                "bandwidth-size-put.svg",
                "latency-load-put.svg",
                "rate-producers-put.svg"
            ]
        );
        for (name, svg) in &files {
            assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"), "{name}");
            // One around the picture; as many are closed as are opened.
            assert_eq!((count(svg, "<svg "), count(svg, "</svg>")), (2, 2), "{name}");
            assert!(!svg.contains("var(") && !svg.contains("url("), "{name} needs nothing else");
        }
        assert_eq!(count(&files[2].1, "class=\"knee\""), 2);
        assert!(files[0].1.contains("memcpy, beside"), "a reference has a line in the legend");
        assert_eq!(plots(&[result(1.0), result(2.0)])[1].0, "latency-size-put-2.svg");
        let mut hostile = result(1.0);
        hostile.report.results.iter_mut().for_each(|row| row.layer = "../<x>".into());
        for (name, svg) in plots(&[hostile]) {
            assert!(!name.contains('/') && !name.contains("..") && !svg.contains("<x>"), "{name}");
        }
    }

    #[test]
    fn a_result_without_rows_is_a_page_too() {
        let report = Report::new(&args::parse("ib").unwrap());
        let html = page(&[Named { file: "empty.json".into(), report }]);
        assert!(html.contains("No plot"), "{html}");
    }
}
