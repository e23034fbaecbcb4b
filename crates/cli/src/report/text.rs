//! The page of a report for a terminal.

use crate::accuracy::mean;
use crate::counted::counted;
use crate::fold::{Folded, fold_weights};
use crate::percent::Percent;
use crate::print::warning;
use crate::size::Size;
use crate::table::{Column, ColumnOrder, table, wrapped};

use super::findings::{Report, Row, Side, Text};

/// The differences of the losses go last.
const TEXTS: ColumnOrder<'_> = ColumnOrder {
    first: &["tokens", "KL\n99 %", "same\ntop 1", "perplexity", "reference"],
    then: &[],
    last: &[],
};
/// The largest errors go last.
const WEIGHTS: ColumnOrder<'_> = ColumnOrder {
    first: &["shape", "bits", "saturated\nblocks", "format"],
    then: &["largest\nerror"],
    last: &["largest of\noutputs"],
};

/// Rows of a table that are printed without --all.
const SHOWN: usize = 20;

/// Lays out the page.
pub(super) fn page(report: &Report, all: bool, width: Option<u16>) -> String {
    let mut parts = vec![head(report, width)];
    if !report.texts.is_empty() {
        let legend = "loss: nats per token more than the reference, with its standard error; KL: \
                      divergence from the reference in nats, mean and 99th percentile; same top 1: \
                      tokens for which both find the same next token most likely";
        parts.push(format!("{}\n{}", texts(&report.texts, width), wrapped(legend, width)));
    }
    let rows: Vec<&Row> = report.weights.iter().filter(|row| row.severity() > 0.0).collect();
    if !rows.is_empty() {
        parts.push(weights(&rows, all, width));
    }
    parts.push(
        summary(report).iter().map(|line| wrapped(line, width)).collect::<Vec<_>>().join("\n"),
    );
    parts.join("\n\n")
}

fn head(report: &Report, width: Option<u16>) -> String {
    let line = |what: &str, side: &Side| {
        let Side { path, dialect, weights, bytes, bits_per_weight } = side;
        let (weights, size) = (counted(*weights, "weight"), Size(*bytes as u64));
        let line = format!(
            "{what} {path}: {dialect}, {weights}, {size}, {bits_per_weight:.2} bits a weight"
        );
        wrapped(&line, width)
    };
    format!("{}\n{}", line("model", &report.model), line("reference", &report.reference))
}

/// Formats a difference with its standard error.
pub(super) fn loss(text: &Text) -> String {
    match text.standard_error {
        Some(error) => format!("{:.4} ± {error:.4}", text.difference),
        None => format!("{:.4}", text.difference),
    }
}

fn texts(texts: &[Text], width: Option<u16>) -> String {
    let columns = [
        ("text", Column::Name),
        ("tokens", Column::Figure),
        ("perplexity", Column::Figure),
        ("reference", Column::Figure),
        ("loss", Column::Figure),
        ("KL", Column::Figure),
        ("KL\n99 %", Column::Figure),
        ("same\ntop 1", Column::Figure),
    ];
    let row = |text: &Text| {
        vec![
            text.name.clone(),
            text.tokens.to_string(),
            format!("{:.3}", text.perplexity),
            format!("{:.3}", text.reference_perplexity),
            loss(text),
            format!("{:.4}", text.divergence),
            format!("{:.3}", text.divergence_percentile_99),
            format!("{:.1} %", text.top1_agreement_percent),
        ]
    };
    table(&columns, &TEXTS, texts.iter().map(row).collect(), width)
}

fn weights(rows: &[&Row], all: bool, width: Option<u16>) -> String {
    let folded: Vec<Folded> = match all {
        true => rows.iter().enumerate().map(|(at, row)| Folded::alone(row.module(), at)).collect(),
        false => {
            let key = |row: &Row| (row.format.clone(), row.problem.clone());
            let weights = rows.iter().map(|row| (row.module(), &row.shape[..], key(row)));
            let mut folded = fold_weights(&weights.collect::<Vec<_>>());
            // Members are in the order of the rows, so the first is the worst.
            folded.sort_by_key(|one| one.members[0]);
            folded
        }
    };
    let shown = if all { folded.len() } else { folded.len().min(SHOWN) };
    let columns = [
        ("weight", Column::Name),
        ("format", Column::Name),
        ("shape", Column::Name),
        ("bits", Column::Figure),
        ("saturated\nblocks", Column::Figure),
        ("mean\nerror", Column::Figure),
        ("largest\nerror", Column::Figure),
        ("mean of\noutputs", Column::Figure),
        ("largest of\noutputs", Column::Figure),
        ("problem", Column::Text),
    ];
    let lines = folded[..shown].iter().map(|one| line(one, rows)).collect();
    let mut text = table(&columns, &WEIGHTS, lines, width);
    let rest: usize = folded[shown..].iter().map(|one| one.members.len()).sum();
    if rest > 0 {
        let rest = counted(rest, "more weight");
        text.push_str(&format!("\nand {rest} with smaller errors; --all lists all"));
    }
    text
}

fn line(folded: &Folded, rows: &[&Row]) -> Vec<String> {
    let members: Vec<&Row> = folded.members.iter().map(|&at| rows[at]).collect();
    let first = members[0];
    let [blocks, saturated] = [|row: &Row| row.blocks, |row: &Row| row.saturated_blocks]
        .map(|of: fn(&Row) -> u64| members.iter().map(|row| of(row)).sum::<u64>());
    let mut line = vec![
        folded.name.clone(),
        first.format.clone(),
        folded.shape(&first.shape),
        format!("{:.2}", first.bits_per_weight),
        if blocks == 0 { String::new() } else { share(saturated, blocks) },
    ];
    for of in [|row: &Row| row.error_percent, |row: &Row| row.output_error_percent] {
        let errors = || members.iter().filter_map(|row| of(row));
        let most = mean(errors()).map(|_| errors().fold(0.0, f64::max));
        line.extend([mean(errors()), most].map(|percent| {
            percent.map_or_else(String::new, |percent| Percent(percent).to_string())
        }));
    }
    line.push(first.problem.clone().unwrap_or_default());
    line
}

/// Returns a share of blocks in percent. One that is not 0 does not look like 0.
pub(super) fn share(count: u64, of: u64) -> String {
    Percent(100.0 * count as f64 / of.max(1) as f64).to_string()
}

/// Returns the weight with the largest error of outputs, unless it is the worst by its own error.
fn worst_outputs(report: &Report) -> Option<(&Row, f64)> {
    let known = report.weights.iter().filter_map(|row| Some((row, row.output_error_percent?)));
    let worst = known.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let first = report.weights.first()?.output_error_percent.unwrap_or(0.0);
    Some(worst).filter(|&(_, error)| error > first)
}

/// States the findings in lines, which both pages have.
pub(super) fn summary(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = format!("{} quantized", counted(report.quantized, "weight"));
    if let Some(bits) = report.quantized_bits_per_weight {
        line.push_str(&format!(" ({bits:.2} bits a weight)"));
    }
    if let Some(error) = report.weight_error_percent {
        line.push_str(&format!(": mean error {}", Percent(error)));
    }
    if let Some(error) = report.output_error_percent {
        line.push_str(&format!(", of outputs {}", Percent(error)));
    }
    let [saturated, blocks] = report.saturated();
    if blocks > 0 {
        line.push_str(&format!("; {} of blocks saturated", share(saturated, blocks)));
    }
    lines.push(line);
    if let Some(error) = report.fp8_rounding_percent {
        let is_exact = report.weights.iter().all(|row| row.fp8_inexact_blocks == 0);
        lines.push(match is_exact {
            true => "products in FP8 are exact (`Activations::Fp8`)".to_owned(),
            false => format!(
                "products in FP8 round the weights by {} (`Activations::Fp8Rounded`)",
                Percent(error)
            ),
        });
    }
    if let Some(worst) = report.weights.first().filter(|worst| worst.severity() > 0.0) {
        let name = &worst.name;
        lines.push(match (&worst.problem, worst.output_error_percent, worst.error_percent) {
            (Some(problem), _, _) => warning(format!("`{name}`: {problem}"), None),
            (None, Some(outputs), Some(error)) => {
                let [outputs, error] = [outputs, error].map(Percent);
                format!("worst: {name}, error {error}, of outputs {outputs}")
            }
            (None, _, error) => format!("worst: {name}, error {}", Percent(error.unwrap_or(0.0))),
        });
    }
    if let Some((row, error)) = worst_outputs(report) {
        lines.push(format!("worst outputs: {}, error {}", row.name, Percent(error)));
    }
    for (names, side) in
        [(&report.only_in_model, "the model"), (&report.only_in_reference, "the reference")]
    {
        if let Some(first) = names.first() {
            let count = counted(names.len(), "weight");
            lines.push(warning(format!("{count} only in {side}, `{first}` first"), None));
        }
    }
    lines.push(readers(report));
    lines.extend(report.remarks.notes().iter().map(|note| format!("note: {note}")));
    lines.extend(report.remarks.lines().iter().map(|line| warning(line, None)));
    lines
}

/// States the programs that read the model.
fn readers(report: &Report) -> String {
    if report.readers.is_empty() {
        return "readers: no program is known".to_owned();
    }
    let all = report.readers.iter().map(|reader| {
        let star = if reader.tested { "*" } else { "" };
        format!("{}{star} ({})", reader.program, reader.format)
    });
    let all = all.collect::<Vec<_>>().join(", ");
    format!("readers: {all}; * in a test, the others according to their source")
}
