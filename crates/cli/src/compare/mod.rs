//! `fp4 compare`: how far two checkpoints are apart.

mod html;
mod report;

use std::collections::HashMap;
use std::path::PathBuf;

use crate::checkpoint::{model, open, readable};
use crate::error::CliError;
use crate::print::{print, print_json};
use crate::progress;
use crate::table::{Column, table};
use burn_fp4_checkpoints::{Checkpoint, Reader, Value, Weight};
use report::{Report, Row};

/// Compare the values of two checkpoints, whatever their formats and dialects; either may be dense.
///
/// The error of a weight is the Euclidean norm of B - A over that of A. The exit code is 0 if no
/// weight differs by more than the tolerance, and 1 if one does or is missing.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// What is compared with: the original.
    #[arg(value_name = "A")]
    left: PathBuf,
    /// What is compared.
    #[arg(value_name = "B")]
    right: PathBuf,
    /// The dialect to read A in, where its config does not say.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_a: Option<String>,
    /// The dialect to read B in, where its config does not say.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_b: Option<String>,
    /// Largest relative error in percent that is no difference.
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = tolerance)]
    tolerance: f64,
    /// Write a page with plots that stands alone.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print an object instead of a table.
    #[arg(long)]
    json: bool,
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if f64::is_finite(number) && number >= 0.0 => Ok(number),
        Ok(_) | Err(_) => Err("expected a finite number, 0 or more".to_owned()),
    }
}

/// Sums over a weight.
#[derive(Default, Clone, Copy)]
struct Sums {
    error: f64,
    energy: f64,
    largest: f64,
}

/// The options that name the dialects of A and of B.
const FROM: [&str; 2] = ["--from-a", "--from-b"];

/// Rows of a table on a terminal.
const SHOWN: usize = 20;

/// Runs the command; whether a difference was found.
pub(crate) fn run(arguments: &Arguments) -> Result<bool, CliError> {
    let left = open(&arguments.left, arguments.from_a.as_deref());
    let left = left.map_err(|error| error.with_option(FROM[0]))?;
    let right = open(&arguments.right, arguments.from_b.as_deref());
    let right = right.map_err(|error| error.with_option(FROM[1]))?;
    let report = compare(arguments, &left, &right).map_err(CliError::meanwhile)?;
    if let Some(path) = &arguments.html {
        let write = std::fs::write(path, html::page(&report));
        write.map_err(|source| CliError::File { path: path.clone(), source })?;
    }
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&summary(&report))?;
    }
    Ok(report.different + report.only_left.len() + report.only_right.len() > 0)
}

fn compare(
    arguments: &Arguments,
    left: &Checkpoint,
    right: &Checkpoint,
) -> Result<Report, CliError> {
    let a = model(left).map_err(|error| error.with_option(FROM[0]))?;
    let b = model(right).map_err(|error| error.with_option(FROM[1]))?;
    let by_name: HashMap<&str, &Weight<'_>> =
        b.weights.iter().map(|weight| (weight.name.as_str(), weight)).collect();
    let mut report = Report {
        left: arguments.left.display().to_string(),
        right: arguments.right.display().to_string(),
        error_percent: 0.0,
        different: 0,
        weights: Vec::new(),
        only_left: Vec::new(),
        only_right: Vec::new(),
        codes: [0; 16],
    };
    let readers = (Reader::new(left.container()), Reader::new(right.container()));
    let bar = progress::bytes(a.weights.iter().map(|weight| weight.bytes() as u64).sum(), 0);
    let mut total = Sums::default();
    let mut codes = [[0; 16]; 2];
    for weight in &a.weights {
        bar.set_message(weight.name.clone());
        match by_name.get(weight.name.as_str()) {
            None => report.only_left.push(weight.name.clone()),
            Some(other) => {
                let pair = [readers.0.weight(weight)?, readers.1.weight(other)?];
                let (row, sums) = pair_of(&pair, &mut codes);
                total.error += sums.error;
                total.energy += sums.energy;
                let differs = row.problem.is_some() || row.error_percent > arguments.tolerance;
                report.different += usize::from(differs);
                report.weights.push(row);
            }
        }
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    let known: HashMap<&str, ()> = a.weights.iter().map(|w| (w.name.as_str(), ())).collect();
    let extra = b.weights.iter().filter(|weight| !known.contains_key(weight.name.as_str()));
    report.only_right = extra.map(|weight| weight.name.clone()).collect();
    report.error_percent = percent(total);
    report.codes = if codes[1] == [0; 16] { codes[0] } else { codes[1] };
    Ok(report)
}

/// `|B - A| / |A|` in percent; infinite where A is zero and B is not.
fn percent(sums: Sums) -> f64 {
    if sums.error == 0.0 { 0.0 } else { 100.0 * (sums.error / sums.energy).sqrt() }
}

fn pair_of(pair: &[Weight<'_>; 2], codes: &mut [[u64; 16]; 2]) -> (Row, Sums) {
    for (weight, codes) in pair.iter().zip(codes) {
        if let Value::Fp4(fp4) = &weight.value {
            codes.iter_mut().zip(fp4.facts().codes).for_each(|(sum, count)| *sum += count);
        }
    }
    let mut row = Row {
        name: pair[0].name.clone(),
        left: pair[0].kind(),
        right: pair[1].kind(),
        error_percent: f64::NAN,
        largest_difference: f64::NAN,
        problem: None,
    };
    let (Ok(a), Ok(b)) = (pair[0].values(), pair[1].values()) else {
        // Integers, and records that are not decoded, are the same or not.
        let [a, b] = pair.each_ref().map(|weight| match &weight.value {
            Value::Plain(tensor) => Some((tensor.dtype, &tensor.bytes)),
            Value::Fp8(_) | Value::Fp4(_) => None,
        });
        if a.is_some() && a == b {
            (row.error_percent, row.largest_difference) = (0.0, 0.0);
        } else {
            row.problem = Some("no floats, and other bytes".to_owned());
        }
        return (row, Sums::default());
    };
    if a.0 != b.0 {
        row.problem = Some(format!("shapes {:?} and {:?}", a.0, b.0));
        return (row, Sums::default());
    }
    match sums_of(&a.1, &b.1) {
        Ok(sums) => {
            (row.error_percent, row.largest_difference) = (percent(sums), sums.largest);
            (row, sums)
        }
        Err(problem) => {
            row.problem = Some(problem.to_owned());
            (row, Sums::default())
        }
    }
}

/// The sums over values that can be subtracted; otherwise, why some cannot.
fn sums_of(a: &[f32], b: &[f32]) -> Result<Sums, &'static str> {
    let mut sums = Sums::default();
    for (&a, &b) in a.iter().zip(b) {
        if a.is_nan() || b.is_nan() {
            return Err("a value is NaN");
        }
        if a.is_infinite() || b.is_infinite() {
            // Equal infinities are no difference, and have no energy that others compare with.
            if a != b {
                return Err("a value is infinite in one, and another in the other");
            }
            continue;
        }
        let difference = f64::from(b) - f64::from(a);
        sums.error += difference * difference;
        sums.energy += f64::from(a) * f64::from(a);
        sums.largest = sums.largest.max(difference.abs());
    }
    Ok(sums)
}

fn summary(report: &Report) -> String {
    let mut table = table(&[
        ("weight", Column::Name),
        ("A", Column::Name),
        ("B", Column::Name),
        ("error %", Column::Figure),
        ("largest difference", Column::Figure),
    ]);
    let differing: Vec<&Row> = report
        .worst()
        .into_iter()
        .filter(|row| row.problem.is_some() || row.error_percent > 0.0)
        .collect();
    for row in differing.iter().take(SHOWN) {
        let numbers = match &row.problem {
            Some(problem) => [problem.clone(), String::new()],
            None => {
                [format!("{:.4}", row.error_percent), format!("{:.3e}", row.largest_difference)]
            }
        };
        let names = [row.name.clone(), row.left.clone(), row.right.clone()];
        table.add_row(names.into_iter().chain(numbers));
    }
    let mut text = String::new();
    if !differing.is_empty() {
        text.push_str(&format!("{table}\n"));
    }
    if differing.len() > SHOWN {
        text.push_str(&format!("and {} weights with smaller errors\n", differing.len() - SHOWN));
    }
    for (side, names) in [("A", &report.only_left), ("B", &report.only_right)] {
        for name in names.iter().take(SHOWN) {
            text.push_str(&format!("only in {side}: {name}\n"));
        }
        if names.len() > SHOWN {
            text.push_str(&format!("and {} more only in {side}\n", names.len() - SHOWN));
        }
    }
    let (different, weights) = (report.different, report.weights.len());
    text.push_str(&format!(
        "{different} of {weights} weights differ; all together by {:.4} %\n",
        report.error_percent
    ));
    text
}
