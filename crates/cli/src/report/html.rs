//! The page of a report for a browser: tables and a plot, in light and dark.

use std::fmt::Write as _;
use std::path::Path;

use crate::page::{bars, document, escaped};
use crate::percent::Percent;
use crate::size::Size;

use super::findings::{Report, Row};
use super::text::{loss, share, summary};

/// An error of a weight, in percent.
type Measure = fn(&Row) -> Option<f64>;

/// Renders the page.
pub(super) fn page(report: &Report) -> String {
    let mut body = String::new();
    for (what, side) in [("model", &report.model), ("reference", &report.reference)] {
        let _ = writeln!(
            body,
            "<p>{what} {}: {}, {}, {:.2} bits a weight</p>",
            escaped(&side.path),
            side.dialect,
            Size(side.bytes as u64),
            side.bits_per_weight
        );
    }
    for line in summary(report) {
        let _ =
            writeln!(body, "<p>{}</p>", escaped(&anstream::adapter::strip_str(&line).to_string()));
    }
    if !report.texts.is_empty() {
        let _ = write!(body, "<h2>Predictions</h2>\n{}", texts(report));
    }
    // A plot for each of the two measures.
    let measures: [(&str, Measure); 2] =
        [("outputs", |row| row.output_error_percent), ("weights", |row| row.error_percent)];
    for (of, error) in measures {
        let errors = report.weights.iter().filter_map(|row| Some((row.module(), error(row)?)));
        let mut errors: Vec<(&str, f64)> = errors.collect();
        errors.sort_by(|a, b| b.1.total_cmp(&a.1));
        if !errors.is_empty() {
            let _ = write!(body, "<h2>Largest errors of {of}, in percent</h2>\n{}", bars(&errors));
        }
    }
    let _ = write!(body, "<h2>All weights, worst first</h2>\n{}", weights(&report.weights));
    document(&title(report), &body)
}

/// States the result in a sentence that names the model by the end of its path.
fn title(report: &Report) -> String {
    let [model, reference] = [&report.model.path, &report.reference.path].map(|path| {
        Path::new(path).file_name().map_or(path.clone(), |name| name.to_string_lossy().into_owned())
    });
    match (report.texts.first(), report.weight_error_percent) {
        (Some(text), _) => {
            let (name, loss) = (&text.name, loss(text));
            format!("{model} against {reference}: {loss} nats per token of {name}")
        }
        (None, Some(error)) => {
            format!(
                "The quantized weights of {model} differ from {reference} by {}",
                Percent(error)
            )
        }
        (None, None) => format!("{model} has no quantized weight that {reference} has"),
    }
}

fn texts(report: &Report) -> String {
    let mut html = String::from(
        "<div class=\"wide\"><table>\n<tr><th>text</th><th class=\"number\">tokens</th>\
         <th class=\"number\">perplexity</th><th class=\"number\">reference</th>\
         <th class=\"number\">loss, nats per token</th><th class=\"number\">KL</th>\
         <th class=\"number\">KL, 99 %</th><th class=\"number\">same top 1</th></tr>\n",
    );
    for text in &report.texts {
        let _ = writeln!(
            html,
            "<tr><td class=\"name\">{}</td><td class=\"number\">{}</td>\
             <td class=\"number\">{:.3}</td><td class=\"number\">{:.3}</td>\
             <td class=\"number\">{}</td><td class=\"number\">{:.4}</td>\
             <td class=\"number\">{:.3}</td><td class=\"number\">{:.1} %</td></tr>",
            escaped(&text.name),
            text.tokens,
            text.perplexity,
            text.reference_perplexity,
            loss(text),
            text.divergence,
            text.divergence_percentile_99,
            text.top1_agreement_percent
        );
    }
    html + "</table></div>\n"
}

fn weights(rows: &[Row]) -> String {
    let has_outputs = rows.iter().any(|row| row.output_error_percent.is_some());
    let outputs = |cell: String| if has_outputs { cell } else { String::new() };
    let mut html = String::from(
        "<div class=\"wide\"><table>\n<tr><th>weight</th><th>format</th>\
         <th class=\"number\">bits</th><th class=\"number\">saturated blocks</th>\
         <th class=\"number\">error</th>",
    );
    html += &outputs("<th class=\"number\">error of outputs</th>".to_owned());
    html += "</tr>\n";
    for row in rows {
        let percent = |error: Option<f64>| error.map_or(String::new(), |e| Percent(e).to_string());
        let errors = match &row.problem {
            Some(problem) => {
                let columns = 1 + usize::from(has_outputs);
                format!("<td colspan=\"{columns}\">{}</td>", escaped(problem))
            }
            None => {
                let of_outputs = percent(row.output_error_percent);
                let of_outputs = outputs(format!("<td class=\"number\">{of_outputs}</td>"));
                format!("<td class=\"number\">{}</td>{of_outputs}", percent(row.error_percent))
            }
        };
        let blocks = match row.blocks {
            0 => String::new(),
            blocks => share(row.saturated_blocks, blocks),
        };
        let _ = writeln!(
            html,
            "<tr><td class=\"name\">{}</td><td>{}</td><td class=\"number\">{:.2}</td>\
             <td class=\"number\">{blocks}</td>{errors}</tr>",
            escaped(&row.name),
            escaped(&row.format),
            row.bits_per_weight
        );
    }
    html + "</table></div>\n"
}
