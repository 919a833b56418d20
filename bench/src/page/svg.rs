//! A plot as SVG within the page. Colours and fonts come from the page's style.

use std::fmt::Write;

use super::escape;
use super::series::{Axis, Line, Plot};
use crate::table::number;

pub const WIDTH: f64 = 600.0;
pub const HEIGHT: f64 = 360.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 52.0;

/// Colours of the style; further lines begin again.
pub const COLOURS: usize = 8;

/// An axis with a range, between two places on the picture.
struct Scale {
    axis: Axis,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Over all values that are drawn, of all results, so that pictures side by side can be compared.
    fn new(axis: Axis, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (mut low, mut high) =
            values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        if axis.logarithmic {
            // Some air, and at least a doubling.
            let air = ((high / low).log2() * 0.04).exp2().max(1.08);
            (low, high) = (low / air, high * air);
            if high / low < 2.0 {
                (low, high) = (low / 1.5, high * 1.5);
            }
        } else {
            (low, high) = (0.0, high * 1.04);
        }
        Scale { axis, low, high, from, to }
    }

    fn place(&self, value: f64) -> f64 {
        let share = if self.axis.logarithmic {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.from + share * (self.to - self.from)
    }

    /// Values that stand at the axis: round ones, not too many.
    fn ticks(&self) -> Vec<f64> {
        const MOST: usize = 9;
        let within = |values: Vec<f64>| -> Vec<f64> {
            values.into_iter().filter(|value| (self.low..=self.high).contains(value)).collect()
        };
        if !self.axis.logarithmic {
            let rough = self.high / 6.0;
            let power = 10_f64.powf(rough.log10().floor());
            let step = [1.0, 2.0, 5.0, 10.0].map(|of| of * power).into_iter().find(|step| *step >= rough);
            let step = step.unwrap_or(rough);
            return within((0..=MOST + 1).map(|n| n as f64 * step).collect());
        }
        let powers = |base: f64| {
            let (first, last) = (self.low.log(base).floor() as i32, self.high.log(base).ceil() as i32);
            first..=last
        };
        let two = self.axis.bytes || self.high < 2000.0 && self.low >= 0.9 && self.axis.short == "producers";
        if two {
            let all = within(powers(2.0).map(|power| 2_f64.powi(power)).collect());
            return every(&all, MOST);
        }
        let of = |digits: &[f64]| {
            within(
                powers(10.0).flat_map(|power| digits.iter().map(move |d| d * 10_f64.powi(power))).collect(),
            )
        };
        let choices = [&[1.0, 2.0, 3.0, 5.0, 7.0][..], &[1.0, 2.0, 5.0], &[1.0, 3.0], &[1.0]].map(of);
        let fits = choices.iter().find(|ticks| ticks.len() <= MOST);
        fits.cloned().unwrap_or_else(|| every(&choices[3], MOST))
    }
}

/// So many of them that no more than `most` are left.
fn every(all: &[f64], most: usize) -> Vec<f64> {
    all.iter().copied().step_by(all.len().div_ceil(most).max(1)).collect()
}

/// A value at an axis or in a table.
pub fn label(axis: Axis, value: f64) -> String {
    if axis.bytes {
        return match value as u64 {
            bytes if bytes >= 1 << 30 && bytes % (1 << 30) == 0 => format!("{}G", bytes >> 30),
            bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => format!("{}M", bytes >> 20),
            bytes if bytes >= 1 << 10 && bytes % (1 << 10) == 0 => format!("{}K", bytes >> 10),
            bytes => bytes.to_string(),
        };
    }
    if value >= 1.0 && value.fract() == 0.0 {
        return format!("{value:.0}");
    }
    let text = number(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// The picture of the n-th result.
pub fn picture(plot: &Plot, result: usize) -> String {
    let points = || plot.results.iter().flatten().flat_map(|line| &line.points);
    let x = Scale::new(plot.x, points().map(|point| point.x), LEFT, WIDTH - RIGHT);
    let ys = points().flat_map(|point| [Some(point.y), point.reference]).flatten();
    let y = Scale::new(plot.y, ys, HEIGHT - BOTTOM, TOP);
    let lines = &plot.results[result];
    let count: usize = lines.iter().map(|line| line.points.len()).sum();
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\" data-plot=\"{}\" data-points=\"{count}\">\n",
        escape(&plot.title),
        escape(&plot.id),
    );
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in x.ticks() {
        let (at, text) = (x.place(tick), label(plot.x, tick));
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
            bottom + 18.0
        );
    }
    for tick in y.ticks() {
        let (at, text) = (y.place(tick), label(plot.y, tick));
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT - 8.0,
            at + 4.0
        );
    }
    let middle = [(LEFT + right) / 2.0, (TOP + bottom) / 2.0];
    let _ = writeln!(
        svg,
        "<path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/>\
         <text class=\"title\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
         <text class=\"title\" transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        middle[0],
        HEIGHT - 10.0,
        escape(plot.x.label),
        middle[1],
        escape(plot.y.label),
    );
    // References below, so that what was measured stays visible.
    for line in lines {
        references(&mut svg, plot, line, &x, &y);
    }
    for line in lines {
        measured(&mut svg, plot, line, &x, &y);
    }
    svg + "</svg>"
}

fn colour(line: &Line) -> usize {
    line.name % COLOURS
}

fn path(places: impl Iterator<Item = (f64, f64)>) -> String {
    let places: Vec<_> = places.map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    if places.is_empty() { String::new() } else { format!("M{}", places.join("L")) }
}

fn references(svg: &mut String, plot: &Plot, line: &Line, x: &Scale, y: &Scale) {
    let Some(name) = &line.reference else { return };
    let points = || line.points.iter().filter_map(|point| Some((point.x, point.reference?)));
    let d = path(points().map(|(at, value)| (x.place(at), y.place(value))));
    let _ = writeln!(svg, "<g class=\"s{}\"><path class=\"dashed\" d=\"{d}\"/>", colour(line));
    for (at, value) in points() {
        dot(svg, "reference", [x.place(at), y.place(value)], &title(plot, name, at, value));
    }
    svg.push_str("</g>\n");
}

fn measured(svg: &mut String, plot: &Plot, line: &Line, x: &Scale, y: &Scale) {
    let d = path(line.points.iter().map(|point| (x.place(point.x), y.place(point.y))));
    let _ = writeln!(svg, "<g class=\"s{}\"><path class=\"solid\" d=\"{d}\"/>", colour(line));
    for point in &line.points {
        let text = title(plot, &plot.names[line.name], point.x, point.y);
        dot(svg, "point", [x.place(point.x), y.place(point.y)], &text);
    }
    if let Some(point) = line.knee.map(|knee| line.points[knee]) {
        let (at, up) = (x.place(point.x), y.place(point.y));
        let _ = writeln!(
            svg,
            "<circle class=\"knee\" cx=\"{at:.1}\" cy=\"{up:.1}\" r=\"8\"><title>knee at {} Mops</title></circle>\
             <text class=\"mark\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">knee</text>",
            label(plot.x, point.x),
            at - 8.0,
            up - 11.0
        );
    }
    svg.push_str("</g>\n");
}

fn dot(svg: &mut String, class: &str, [x, y]: [f64; 2], title: &str) {
    let _ = writeln!(
        svg,
        "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\"><title>{}</title></circle>",
        escape(title)
    );
}

fn title(plot: &Plot, name: &str, x: f64, y: f64) -> String {
    let Plot { x: across, y: up, .. } = plot;
    format!("{name}: {} = {}, {} = {}", across.short, label(*across, x), up.short, label(*up, y))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(axis: Axis, low: f64, high: f64) -> Vec<String> {
        let scale = Scale::new(axis, [low, high].into_iter(), 0.0, 1.0);
        scale.ticks().into_iter().map(|tick| label(axis, tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_few() {
        let mut axis = Axis { label: "", short: "", logarithmic: true, bytes: true };
        assert_eq!(ticks(axis, 8.0, 1048576.0), ["8", "32", "128", "512", "2K", "8K", "32K", "128K", "512K"]);
        axis.bytes = false;
        assert_eq!(ticks(axis, 0.9, 120.0), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(ticks(axis, 3.0, 3.0), ["2", "3"]);
        axis.logarithmic = false;
        assert_eq!(ticks(axis, 10.0, 80.0), ["0", "20", "40", "60", "80"]);
    }

    #[test]
    fn a_scale_puts_its_ends_within_the_picture() {
        for logarithmic in [false, true] {
            let axis = Axis { label: "", short: "", logarithmic, bytes: false };
            let scale = Scale::new(axis, [1.0, 100.0].into_iter(), 300.0, 10.0);
            assert!(scale.place(1.0) <= 300.0 && scale.place(100.0) >= 10.0);
            assert!(scale.place(1.0) > scale.place(100.0), "larger values are further up");
        }
    }
}
