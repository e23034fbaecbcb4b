//! A page of a comparison that needs nothing else: tables and plots, in light and dark.

use std::fmt::Write as _;
use std::path::Path;

use burn_fp4_search::formats::E2M1;

use super::report::{Relation, Report, Row};
use crate::page::{escaped, made, marks};
use crate::percent::Percent;
use crate::table::end_of;

/// Bars of the plot of errors.
const BARS: usize = 25;
/// Characters of a name for which there is room in front of a bar, and the width of one.
const NAME: usize = 62;
const CHARACTER: f64 = 6.6;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --line: #d7dce1;
  --bar: #d6601e; --soft: #6b7681; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14181c; --line: #333b43; --bar: #ee8a4c; --soft: #98a3ad; } }
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

/// Renders the page.
pub(super) fn page(report: &Report) -> String {
    let rows = report.worst();
    let mut body = String::new();
    let [a, b] = [&report.a, &report.b].map(|path| escaped(path));
    let title = escaped(&title(report));
    let _ = write!(
        body,
        "<h1>{title}</h1>\n<p>A: {a}<br>B: {b}</p>\n<p>{}</p>\n",
        escaped(&report.counts())
    );
    for line in report.errors().iter().chain([&report.verdict]) {
        let _ = writeln!(body, "<p>{}</p>", escaped(line));
    }
    for (side, names) in [("A", &report.only_in_a), ("B", &report.only_in_b)] {
        if !names.is_empty() {
            let names: Vec<String> = names.iter().map(|name| escaped(name)).collect();
            let _ = writeln!(body, "<p class=\"name\">Only in {side}: {}</p>", names.join(", "));
        }
    }
    let quantized = rows.iter().any(|row| row.quantized);
    let of = if quantized { "quantized weights" } else { "weights" };
    let bars = rows.iter().filter(|row| row.quantized == quantized).copied();
    let _ = write!(body, "<h2>Largest errors of {of}, in percent</h2>\n{}", errors(bars));
    if report.codes != [0; 16] {
        let _ = write!(body, "<h2>Share of each code, in percent</h2>\n{}", codes(&report.codes));
    }
    let _ = write!(body, "<h2>All weights, worst first</h2>\n{}", table(&rows));
    let _ = writeln!(body, "<footer>{}</footer>", made());
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n\
         </html>\n"
    )
}

/// States the result in a sentence that names both checkpoints by the ends of their paths.
fn title(report: &Report) -> String {
    let name = |path: &str| match Path::new(path).file_name() {
        Some(name) => name.to_string_lossy().into_owned(),
        None => path.to_owned(),
    };
    let [a, b] = [&report.a, &report.b].map(|path| name(path));
    let same = |row: &Row| row.relation == Relation::Same;
    match report.quantized_error_percent.map(Percent) {
        Some(mean) if mean.0 > 0.0 => {
            format!("The quantized weights of {b} differ from {a} by {mean} on average")
        }
        _ if !report.finds_difference() && report.weights.iter().all(same) => {
            format!("{b} has the same weights as {a}")
        }
        _ if !report.finds_difference() => {
            let tolerance = report.tolerance_percent;
            format!("The weights of {b} differ from {a} by no more than {tolerance} %")
        }
        _ => format!("The weights of {b} differ from {a}"),
    }
}

/// The error of a weight, which is 0 where there is none to draw.
fn error_of(row: &Row) -> f64 {
    row.error_percent.unwrap_or(0.0)
}

/// Draws a bar for each of the worst weights, over a scale.
fn errors<'r>(rows: impl Iterator<Item = &'r Row>) -> String {
    let finite = |row: &&Row| error_of(row) > 0.0 && error_of(row).is_finite();
    let rows: Vec<&Row> = rows.filter(finite).take(BARS).collect();
    let most = rows.iter().map(|row| error_of(row)).fold(0.0, f64::max);
    if most == 0.0 {
        return "<p class=\"soft\">none</p>\n".to_owned();
    }
    let (marks, bottom) = (marks(most), 18 * rows.len() + 4);
    let end = marks.last().map_or(most, |(mark, _)| *mark);
    let names: Vec<String> = rows.iter().map(|row| end_of(row.module(), NAME)).collect();
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
    for (at, (row, name)) in rows.iter().zip(&names).enumerate() {
        let (y, width) = (18 * at + 2, length(error_of(row)));
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{left:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"13\"/>\
             <text x=\"740\" y=\"{}\">{}</text>",
            left - 10.0,
            y + 11,
            escaped(name),
            y + 11,
            Percent(error_of(row))
        );
    }
    svg + "</svg></div>\n"
}

/// Draws a bar for each code, from -6 to 6.
fn codes(counts: &[u64; 16]) -> String {
    let total: u64 = counts.iter().sum();
    let order = (8..16).rev().chain(0..8_u8);
    let share = |code: u8| 100.0 * counts[usize::from(code)] as f64 / total as f64;
    let most = (0..16).map(share).fold(0.0, f64::max);
    let mut svg = String::from(
        "<div class=\"wide\"><svg viewBox=\"0 0 800 200\" role=\"img\">\n\
         <line x1=\"0\" y1=\"170\" x2=\"800\" y2=\"170\"/>\n",
    );
    for (at, code) in order.enumerate() {
        let (x, height) = (50 * at + 5, 150.0 * share(code) / most);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{:.1}\" width=\"40\" height=\"{height:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"middle\">{:.2}</text>\
             <text x=\"{}\" y=\"188\" text-anchor=\"middle\">{}</text>",
            170.0 - height,
            x + 20,
            165.0 - height,
            share(code),
            x + 20,
            E2M1.decode(code)
        );
    }
    svg + "</svg></div>\n"
}

fn table(rows: &[&Row]) -> String {
    let mut html = String::from(
        "<div class=\"wide\"><table>\n<tr><th>weight</th><th>A</th><th>B</th>\
         <th class=\"number\">error</th><th class=\"number\">largest difference</th></tr>\n",
    );
    for row in rows {
        let numbers = match &row.problem {
            Some(problem) => format!("<td colspan=\"2\">{}</td>", escaped(problem)),
            None => format!(
                "<td class=\"number\">{}</td><td class=\"number\">{:.3e}</td>",
                Percent(error_of(row)),
                row.largest_difference.unwrap_or(0.0)
            ),
        };
        let [name, a, b] = [&row.name, &row.a, &row.b].map(|text| escaped(text));
        let _ = writeln!(
            html,
            "<tr><td class=\"name\">{name}</td><td>{a}</td><td>{b}</td>{numbers}</tr>"
        );
    }
    html + "</table></div>\n"
}
