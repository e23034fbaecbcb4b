//! `fp4 compare`: how far two checkpoints are apart.

mod html;
mod report;

use std::collections::HashMap;
use std::path::PathBuf;

use crate::checkpoint::{model, open, readable};
use crate::error::CliError;
use crate::percent::Percent;
use crate::print::{counted, print, print_json};
use crate::progress;
use crate::table::{Column, table};
use burn_fp4_checkpoints::{Checkpoint, Reader, Value, Weight};
use report::{Relation, Report, Row};

/// Compare the values of two checkpoints, whatever their formats and dialects; either may be dense.
///
/// The error of a weight is the Euclidean norm of B - A over that of A.
#[derive(clap::Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    /// The original.
    #[arg(value_name = "A")]
    left: PathBuf,
    /// The checkpoint to compare with it.
    #[arg(value_name = "B")]
    right: PathBuf,
    /// The dialect to read A in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_a: Option<String>,
    /// The dialect to read B in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_b: Option<String>,
    /// The largest relative error, in percent, that is not a difference.
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = tolerance)]
    tolerance: f64,
    /// Write a page with plots, in one file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print a JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The last line of a comparison.
const EXIT_CODES: &str = "\
Exit codes: 0 every weight is the same or within the tolerance; 1 a weight differs by more, is \
missing in A or B, or cannot be compared (another shape, NaN); 2 the command or a file is wrong; \
3 the machine failed.";

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if f64::is_finite(number) && number >= 0.0 => Ok(number),
        Ok(_) | Err(_) => Err("expected a finite number, 0 or more".to_owned()),
    }
}

/// Sums of squares over a weight, and its largest difference.
#[derive(Default, Clone, Copy)]
struct Sums {
    squares: [f64; 2],
    largest: f64,
}

/// The options that name the dialects of A and of B.
const FROM: [&str; 2] = ["--from-a", "--from-b"];

/// Rows of a table on a terminal.
const SHOWN: usize = 20;

/// Runs the command. Returns true if a difference was found.
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
    Ok(report.finds_difference())
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
        tolerance_percent: arguments.tolerance,
        error_percent: 0.0,
        quantized_error_percent: None,
        kept_error_percent: None,
        different: 0,
        not_comparable: 0,
        weights: Vec::new(),
        only_left: Vec::new(),
        only_right: Vec::new(),
        codes: [0; 16],
        verdict: String::new(),
    };
    let readers = (Reader::new(left.container()), Reader::new(right.container()));
    let bar = progress::bytes(a.weights.iter().map(|weight| weight.bytes() as u64).sum(), 0);
    // Of weights that are quantized in A or B, and of all others.
    let mut totals: [Option<[f64; 2]>; 2] = [None; 2];
    let mut codes = [[0; 16]; 2];
    for weight in &a.weights {
        bar.set_message(weight.name.clone());
        match by_name.get(weight.name.as_str()) {
            None => report.only_left.push(weight.name.clone()),
            Some(other) => {
                let pair = [readers.0.weight(weight)?, readers.1.weight(other)?];
                let (row, squares) = pair_of(&pair, arguments.tolerance, &mut codes);
                let quantized = pair.iter().any(Weight::is_quantized);
                if row.problem.is_none() {
                    let total = totals[usize::from(!quantized)].get_or_insert_default();
                    total.iter_mut().zip(squares).for_each(|(sum, square)| *sum += square);
                }
                report.different += usize::from(row.relation == Relation::Different);
                report.not_comparable += usize::from(row.relation == Relation::NotComparable);
                report.weights.push(row);
            }
        }
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    let known: HashMap<&str, ()> = a.weights.iter().map(|w| (w.name.as_str(), ())).collect();
    let extra = b.weights.iter().filter(|weight| !known.contains_key(weight.name.as_str()));
    report.only_right = extra.map(|weight| weight.name.clone()).collect();
    let all =
        totals.iter().flatten().fold([0.0; 2], |sum, part| [sum[0] + part[0], sum[1] + part[1]]);
    report.error_percent = Percent::of(all).0;
    let percents = totals.map(|total| total.map(|squares| Percent::of(squares).0));
    [report.quantized_error_percent, report.kept_error_percent] = percents;
    report.codes = if codes[1] == [0; 16] { codes[0] } else { codes[1] };
    report.verdict = report.verdict_of();
    Ok(report)
}

/// Compares the two forms of a weight; the sums of squares are those of its difference and of A.
fn pair_of(pair: &[Weight<'_>; 2], tolerance: f64, codes: &mut [[u64; 16]; 2]) -> (Row, [f64; 2]) {
    for (weight, codes) in pair.iter().zip(codes) {
        if let Value::Fp4(fp4) = &weight.value {
            codes.iter_mut().zip(fp4.facts().codes).for_each(|(sum, count)| *sum += count);
        }
    }
    let mut row = Row {
        name: pair[0].name.clone(),
        left: pair[0].kind(),
        right: pair[1].kind(),
        relation: Relation::NotComparable,
        error_percent: f64::NAN,
        largest_difference: f64::NAN,
        problem: None,
    };
    match difference(pair) {
        Ok(Sums { squares, largest }) => {
            let percent = Percent::of(squares).0;
            (row.error_percent, row.largest_difference) = (percent, largest);
            row.relation = match largest == 0.0 {
                true => Relation::Same,
                false if percent <= tolerance => Relation::Within,
                false => Relation::Different,
            };
            (row, squares)
        }
        Err(problem) => {
            row.problem = Some(problem);
            (row, [0.0; 2])
        }
    }
}

/// How far the two forms of a weight are apart; otherwise, why that cannot be said.
fn difference(pair: &[Weight<'_>; 2]) -> Result<Sums, String> {
    let (Ok(a), Ok(b)) = (pair[0].values(), pair[1].values()) else {
        // Integers, float64 and records of ggml are the same or not.
        let [a, b] = pair.each_ref().map(|weight| match &weight.value {
            Value::Plain(tensor) => Some((tensor.dtype, &tensor.shape, &tensor.bytes)),
            Value::Fp8(_) | Value::Fp4(_) => None,
        });
        return match a.is_some() && a == b {
            true => Ok(Sums::default()),
            false => {
                Err("values of such types are not compared, and their bytes differ".to_owned())
            }
        };
    };
    if a.0 != b.0 {
        return Err(format!("shapes {:?} and {:?}", a.0, b.0));
    }
    Ok(sums_of(&a.1, &b.1)?)
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
                return Err("a value is infinite in A or B alone");
            }
            continue;
        }
        let difference = f64::from(b) - f64::from(a);
        sums.squares[0] += difference * difference;
        sums.squares[1] += f64::from(a) * f64::from(a);
        sums.largest = sums.largest.max(difference.abs());
    }
    Ok(sums)
}

fn summary(report: &Report) -> String {
    let mut table = table(&[
        ("weight", Column::Name),
        ("A", Column::Name),
        ("B", Column::Name),
        ("error", Column::Figure),
        ("largest difference", Column::Figure),
    ]);
    let differing: Vec<&Row> =
        report.worst().into_iter().filter(|row| row.relation != Relation::Same).collect();
    for row in differing.iter().take(SHOWN) {
        let numbers = match &row.problem {
            Some(problem) => [problem.clone(), String::new()],
            None => {
                let error = Percent(row.error_percent).to_string();
                [error, format!("{:.3e}", row.largest_difference)]
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
        let rest = counted(differing.len() - SHOWN, "more weight");
        text.push_str(&format!("and {rest} with smaller errors; --json lists all\n"));
    }
    for (side, names) in [("A", &report.only_left), ("B", &report.only_right)] {
        for name in names.iter().take(SHOWN) {
            text.push_str(&format!("only in {side}: {name}\n"));
        }
        if names.len() > SHOWN {
            text.push_str(&format!("and {} more only in {side}\n", names.len() - SHOWN));
        }
    }
    text.push_str(&format!("{}\n", report.counts()));
    if let Some(errors) = report.errors() {
        text.push_str(&format!("{errors}\n"));
    }
    text.push_str(&report.verdict);
    text
}
