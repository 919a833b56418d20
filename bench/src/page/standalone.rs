//! A plot as a file of its own, for a page that is written by hand: with its title, its legend and its colours.

use std::fmt::Write;

use super::escape;
use super::series::Plot;
use super::svg::{COLOURS, HEIGHT, WIDTH, picture};

const STYLE: &str = include_str!("standalone.css");
/// What stands above the picture, and a line of the legend.
const HEAD: f64 = 32.0;
const LINE: f64 = 20.0;

/// The name of a file for the n-th of so many results, and what is in it.
pub fn file(plot: &Plot, result: usize, results: usize, of: &str) -> (String, String) {
    let mut lines: Vec<(usize, &str, String)> = Vec::new();
    for line in &plot.results[result] {
        lines.push((line.name, "solid", plot.names[line.name].clone()));
        if let Some(reference) = &line.reference {
            lines.push((line.name, "dashed", format!("{reference}, beside {}", plot.names[line.name])));
        }
    }
    let height = HEAD + HEIGHT + LINE * (lines.len() as f64 + 1.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\">\n\
         <style>\n{STYLE}</style>\n<rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
         <text class=\"head\" x=\"14\" y=\"22\">{}</text>\n",
        escape(&format!("{} ({of})", plot.title)),
    );
    svg += &picture(plot, result).replacen(
        "<svg ",
        &format!("<svg x=\"0\" y=\"{HEAD}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" "),
        1,
    );
    for (n, (name, class, text)) in lines.iter().enumerate() {
        let y = HEAD + HEIGHT + LINE * (n as f64 + 0.7);
        let _ = write!(
            svg,
            "\n<g class=\"s{}\"><path class=\"{class}\" d=\"M66 {y:.0}h30\"/></g>\
             <text class=\"legend\" x=\"104\" y=\"{:.0}\">{}</text>",
            name % COLOURS,
            y + 4.0,
            escape(text),
        );
    }
    svg += "\n</svg>\n";
    // A layer's name comes from a result, and is no path.
    let safe = |char: char| if char.is_ascii_alphanumeric() { char.to_ascii_lowercase() } else { '-' };
    let name: String = plot.id.chars().map(safe).collect();
    let number = if results > 1 { format!("-{}", result + 1) } else { String::new() };
    (format!("{name}{number}.svg"), svg)
}
