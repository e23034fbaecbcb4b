//! Parts of pages and pictures: the page around a body and its file, escaped texts, bars with their
//! scale, and the date.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;

use chrono::Utc;

use crate::error::CliError;
use crate::percent::Percent;
use crate::table::end_of;

/// Bars of a plot of errors.
const BARS: usize = 25;
/// Characters of a name for which there is room in front of a bar, and the width of one.
const NAME: usize = 62;
const CHARACTER: f64 = 6.6;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --line: #d7dce1;
  --bar: #bc4c00; --soft: #6b7681; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14181c; --line: #333b43; --bar: #f0883e; --soft: #98a3ad; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p::first-letter { text-transform: uppercase; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.6rem; }
th, td { border-bottom: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.name { overflow-wrap: anywhere; } .soft, footer { color: var(--soft); }
footer { margin-top: 2rem; font-size: 0.85rem; }
.wide { overflow-x: auto; }
svg { width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg rect { fill: var(--bar); } svg line { stroke: var(--line); }
";

/// Puts a body into a page that needs nothing else, in light and dark, below its title.
pub(crate) fn document(title: &str, body: &str) -> String {
    let (title, made) = (escaped(title), made());
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n\
         {body}<footer>{made}</footer>\n</body>\n</html>\n"
    )
}

/// Draws a bar for each of the first errors that are finite and not 0, over a scale. Each has the
/// name of its layer, and percents.
pub(crate) fn bars(errors: &[(&str, f64)]) -> String {
    let finite = |(_, percent): &&(&str, f64)| *percent > 0.0 && percent.is_finite();
    let rows: Vec<&(&str, f64)> = errors.iter().filter(finite).take(BARS).collect();
    let most = rows.iter().map(|(_, percent)| *percent).fold(0.0, f64::max);
    if most == 0.0 {
        return "<p class=\"soft\">none</p>\n".to_owned();
    }
    let (marks, bottom) = (marks(most), 18 * rows.len() + 4);
    let end = marks.last().map_or(most, |(mark, _)| *mark);
    let names: Vec<String> = rows.iter().map(|(name, _)| end_of(name, NAME)).collect();
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let left = 20.0 + CHARACTER * longest as f64;
    let length = |percent: f64| (725.0 - left) * percent / end;
    let height = bottom + 20;
    let mut svg = format!("<div class=\"wide\"><svg viewBox=\"0 0 800 {height}\" role=\"img\">\n");
    for (mark, text) in &marks {
        let x = left + length(*mark);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"0\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
            bottom + 14
        );
    }
    for (at, ((_, percent), name)) in rows.iter().zip(&names).enumerate() {
        let (y, width) = (18 * at + 2, length(*percent));
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{left:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"13\"/>\
             <text x=\"740\" y=\"{}\">{}</text>",
            left - 10.0,
            y + 11,
            escaped(name),
            y + 11,
            Percent(*percent)
        );
    }
    svg + "</svg></div>\n"
}

/// Checks that a page can be written, before the work that it is about.
pub(crate) fn check_writable(path: &Path) -> Result<(), CliError> {
    let file = |source| CliError::File { path: path.to_owned(), source };
    match OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            OpenOptions::new().write(true).create_new(true).open(path).map_err(file)?;
            fs::remove_file(path).map_err(file)
        }
        found => found.map(drop).map_err(file),
    }
}

/// Escapes a text for HTML and SVG.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Returns the marks of a scale from 0 to `most` or a little more, at multiples of 1, 2 or 5 times
/// a power of ten, with their texts. `most` is positive and finite.
pub(crate) fn marks(most: f64) -> Vec<(f64, String)> {
    let power = (most / 5.0).log10().floor();
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * 10_f64.powf(power));
    let step = steps.into_iter().find(|step| most / step <= 5.0).unwrap_or(steps[3]);
    let digits = (-step.log10().floor()).max(0.0) as usize;
    let text = |mark: f64| match digits {
        _ if mark == 0.0 => "0".to_owned(),
        0..=3 => format!("{mark:.digits$}"),
        _ => format!("{mark:.0e}"),
    };
    let last = (most / step).ceil() as usize;
    (0..=last).map(|at| at as f64 * step).map(|mark| (mark, text(mark))).collect()
}

/// Returns the version of this program and the date in UTC, for the end of a page.
pub(crate) fn made() -> String {
    format!("fp4 {}, {}", env!("CARGO_PKG_VERSION"), Utc::now().date_naive())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_has_few_round_marks_that_reach_the_longest_bar() {
        for (most, expected) in [
            (8.1, "0 2 4 6 8 10"),
            (100.0, "0 20 40 60 80 100"),
            (1.0, "0 0.2 0.4 0.6 0.8 1.0"),
            (0.012, "0 0.005 0.010 0.015"),
            (3e-6, "0 1e-6 2e-6 3e-6"),
        ] {
            let marks = marks(most);
            assert!(marks.last().expect("a mark").0 >= most * 0.999_999);
            let texts: Vec<&str> = marks.iter().map(|(_, text)| text.as_str()).collect();
            assert_eq!(texts.join(" "), expected);
        }
    }
}
