//! A page of a comparison that needs nothing else: tables and plots, in light and dark.

use std::fmt::Write as _;
use std::path::Path;

use burn_fp4_search::formats::E2M1;

use super::report::{Relation, Report, Row};
use crate::page::{bars, document, escaped};
use crate::percent::Percent;

/// Renders the page.
pub(super) fn page(report: &Report) -> String {
    let rows = report.worst();
    let mut body = String::new();
    let [a, b] = [&report.a, &report.b].map(|path| escaped(path));
    let title = title(report);
    let _ = write!(body, "<p>A: {a}<br>B: {b}</p>\n<p>{}</p>\n", escaped(&report.counts()));
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
    let rows_of = rows.iter().filter(|row| row.quantized == quantized);
    let errors: Vec<(&str, f64)> = rows_of.map(|row| (row.module(), error_of(row))).collect();
    let _ = write!(body, "<h2>Largest errors of {of}, in percent</h2>\n{}", bars(&errors));
    if report.codes != [0; 16] {
        let _ = write!(body, "<h2>Share of each code, in percent</h2>\n{}", codes(&report.codes));
    }
    let _ = write!(body, "<h2>All weights, worst first</h2>\n{}", table(&rows));
    document(&title, &body)
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
