//! A comparison as a page that needs nothing else: tables, plots in SVG, in light and dark.

use std::fmt::Write as _;

use burn_fp4_search::formats::E2M1;

use super::report::{Report, Row};
use crate::percent::Percent;

/// Bars of the plot of errors.
const BARS: usize = 25;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --line: #d7dce1;
  --bar: #2f6fb3; --soft: #6b7681; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14181c; --line: #333b43; --bar: #6aa9e8; --soft: #98a3ad; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { text-align: left; padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; } .soft { color: var(--soft); }
.wide { overflow-x: auto; }
svg { width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg rect { fill: var(--bar); } svg line { stroke: var(--line); }
";

/// The page.
pub(super) fn page(report: &Report) -> String {
    let rows = report.worst();
    let mut body = String::new();
    let (left, right) = (escape(&report.left), escape(&report.right));
    let _ = write!(
        body,
        "<h1>{right}</h1>\n<p>B: {right}, compared with A: {left}</p>\n<p>{}</p>\n",
        escape(&report.counts())
    );
    for line in report.errors().iter().chain([&report.verdict]) {
        let _ = writeln!(body, "<p>{}</p>", escape(line));
    }
    for (side, names) in [("A", &report.only_left), ("B", &report.only_right)] {
        if !names.is_empty() {
            let names: Vec<String> = names.iter().map(|name| escape(name)).collect();
            let _ = writeln!(body, "<p>Only in {side}: {}</p>", names.join(", "));
        }
    }
    let _ = write!(body, "<h2>Largest relative errors</h2>\n{}", errors(&rows));
    if report.codes != [0; 16] {
        let _ = write!(body, "<h2>Codes, in percent</h2>\n{}", codes(&report.codes));
    }
    let _ = write!(body, "<h2>All weights, worst first</h2>\n{}", table(&rows));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>fp4 compare</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n\
         </html>\n"
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A bar for each of the worst weights.
fn errors(rows: &[&Row]) -> String {
    let finite = |row: &&&Row| row.error_percent > 0.0 && row.error_percent.is_finite();
    let rows: Vec<_> = rows.iter().filter(finite).take(BARS).collect();
    let most = rows.iter().map(|row| row.error_percent).fold(0.0, f64::max);
    if most == 0.0 {
        return "<p class=\"soft\">none</p>\n".to_owned();
    }
    let height = 18 * rows.len() + 4;
    let mut svg = format!("<div class=\"wide\"><svg viewBox=\"0 0 800 {height}\" role=\"img\">\n");
    for (at, row) in rows.iter().enumerate() {
        let (y, width) = (18 * at + 2, 300.0 * row.error_percent / most);
        let name = escape(&row.name);
        let _ = writeln!(
            svg,
            "<text x=\"415\" y=\"{}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"425\" y=\"{y}\" width=\"{width:.1}\" height=\"13\"/>\
             <text x=\"{:.1}\" y=\"{}\">{}</text>",
            y + 11,
            430.0 + width,
            y + 11,
            Percent(row.error_percent)
        );
    }
    svg + "</svg></div>\n"
}

/// A bar for each code, from -6 to 6.
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
        "<table>\n<tr><th>weight</th><th>A</th><th>B</th><th class=\"number\">error</th>\
         <th class=\"number\">largest difference</th></tr>\n",
    );
    for row in rows {
        let numbers = match &row.problem {
            Some(problem) => format!("<td colspan=\"2\">{}</td>", escape(problem)),
            None => format!(
                "<td class=\"number\">{}</td><td class=\"number\">{:.3e}</td>",
                Percent(row.error_percent),
                row.largest_difference
            ),
        };
        let [name, left, right] = [&row.name, &row.left, &row.right].map(|text| escape(text));
        let _ = writeln!(html, "<tr><td>{name}</td><td>{left}</td><td>{right}</td>{numbers}</tr>");
    }
    html + "</table>\n"
}
