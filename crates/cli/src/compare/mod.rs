//! `fp4 compare`: the difference of two checkpoints, weight by weight.

mod html;
mod report;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Fp4Weight, Reader, TensorProblem, Value, Weight,
};

use crate::accuracy::mean;
use crate::checkpoint::{is_quantized, model, open, readable};
use crate::counted::counted;
use crate::error::CliError;
use crate::fold::{Folded, fold, fold_weights, natural};
use crate::listed::file_ending;
use crate::page::check_writable;
use crate::percent::Percent;
use crate::print::{print, print_json};
use crate::progress;
use crate::remarks::Remarks;
use crate::table::{Column, ColumnOrder, table, width, wrapped};
use crate::warnings::help;
use report::{Relation, Report, Row};

/// Compare the values of two checkpoints, whatever their formats and dialects; either may be dense.
///
/// The error of a weight is |B - A| / |A|, with Euclidean norms. A mean error is the mean of the
/// errors of the weights, as `fp4 quantize` prints it: each weight counts once, whatever its size.
/// Quantized weights are counted apart from the others, which `fp4 quantize` keeps. Two FP4 weights
/// are compared by their codes and scales: the order in which their dialects multiply these in f32
/// is no difference.
#[derive(clap::Args)]
#[command(after_help = EXIT_CODES)]
#[command(after_long_help = [EXIT_CODES, help()].join("\n\n"))]
pub(crate) struct Arguments {
    /// The original.
    #[arg(value_name = "A")]
    a: PathBuf,
    /// The checkpoint to compare with it.
    #[arg(value_name = "B")]
    b: PathBuf,
    /// The dialect to read A in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_a: Option<String>,
    /// The dialect to read B in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_b: Option<String>,
    /// Errors up to this, in percent, are no difference.
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 0.0,
        value_parser = tolerance,
        allow_negative_numbers = true,
    )]
    tolerance: f64,
    /// Write a page with plots, in one file.
    #[arg(long, value_name = "FILE.html", value_parser = html_file)]
    html: Option<PathBuf>,
    /// Print a line for every weight that differs. Otherwise names that differ in numbers alone are
    /// one line, with the mean and the largest error.
    #[arg(long)]
    all: bool,
    /// Print a JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The last line of a comparison.
const EXIT_CODES: &str = "\
Exit codes: 0 every weight is the same or within the tolerance; 1 a weight differs by more, is \
missing in A or B, or cannot be compared (another shape, NaN); 2 the command or a file is wrong; \
3 the machine failed.";

pub(crate) fn html_file(name: &str) -> Result<PathBuf, String> {
    file_ending(name, &["html", "htm"])
}

fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if f64::is_finite(number) && number >= 0.0 => Ok(number),
        Ok(_) | Err(_) => Err("expected a finite number, 0 or more".to_owned()),
    }
}

/// Sums of squares over a weight, and its largest difference.
#[derive(Default, Clone, Copy)]
pub(crate) struct Sums {
    pub(crate) squares: [f64; 2],
    largest: f64,
}

/// The options that name the dialects of A and of B.
const FROM: [&str; 2] = ["--from-a", "--from-b"];

/// The errors and the format of B go last.
const ORDER: ColumnOrder<'_> = ColumnOrder {
    first: &["largest\ndifference", "shape", "A"],
    then: &[],
    last: &["mean\nerror", "B"],
};

/// Rows of a table, and names, that are printed without --all.
const SHOWN: usize = 20;

/// Runs the command. Returns true if a difference was found.
pub(crate) fn run(arguments: &Arguments) -> Result<bool, CliError> {
    arguments.html.as_deref().map(check_writable).transpose()?;
    let mut remarks = Remarks::default();
    let a = open(&arguments.a, arguments.from_a.as_deref(), &mut remarks);
    let a = a.map_err(|error| error.with_option(FROM[0]))?;
    let b = open(&arguments.b, arguments.from_b.as_deref(), &mut remarks);
    let b = b.map_err(|error| error.with_option(FROM[1]))?;
    let report = compare(arguments, [&a, &b], remarks).map_err(CliError::during_run)?;
    if let Some(path) = &arguments.html {
        let write = std::fs::write(path, html::page(&report));
        write.map_err(|source| CliError::File { path: path.clone(), source })?;
    }
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&summary(&report, arguments.all, width()))?;
    }
    Ok(report.finds_difference())
}

fn compare(
    arguments: &Arguments,
    checkpoints: [&Checkpoint; 2],
    mut remarks: Remarks,
) -> Result<Report, CliError> {
    let a = model(checkpoints[0], &mut remarks).map_err(|error| error.with_option(FROM[0]))?;
    let b = model(checkpoints[1], &mut remarks).map_err(|error| error.with_option(FROM[1]))?;
    remarks.print();
    let by_name: HashMap<&str, &Weight<'_>> =
        b.weights.iter().map(|weight| (weight.name.as_str(), weight)).collect();
    let mut report = Report {
        a: arguments.a.display().to_string(),
        b: arguments.b.display().to_string(),
        tolerance_percent: arguments.tolerance,
        quantized_error_percent: None,
        kept_error_percent: None,
        different: 0,
        not_comparable: 0,
        weights: Vec::new(),
        only_in_a: Vec::new(),
        only_in_b: Vec::new(),
        codes: [0; 16],
        remarks,
        verdict: String::new(),
    };
    let readers = checkpoints.map(|checkpoint| Reader::new(checkpoint.container()));
    let bar = progress::bytes(a.weights.iter().map(|weight| weight.bytes() as u64).sum(), 0);
    let mut codes = [[0; 16]; 2];
    for weight in &a.weights {
        bar.set_message(weight.name.clone());
        match by_name.get(weight.name.as_str()) {
            None => report.only_in_a.push(weight.name.clone()),
            Some(other) => {
                let pair = [readers[0].weight(weight)?, readers[1].weight(other)?];
                let row = row_of(&pair, arguments.tolerance, &mut codes);
                report.different += usize::from(row.relation == Relation::Different);
                report.not_comparable += usize::from(row.relation == Relation::NotComparable);
                report.weights.push(row);
            }
        }
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    let known: HashSet<&str> = a.weights.iter().map(|weight| weight.name.as_str()).collect();
    let extra = b.weights.iter().filter(|weight| !known.contains(weight.name.as_str()));
    report.only_in_b = extra.map(|weight| weight.name.clone()).collect();
    report.weights.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
    for names in [&mut report.only_in_a, &mut report.only_in_b] {
        names.sort_by(|a, b| natural(a).cmp(&natural(b)));
    }
    report.codes = if codes[1] == [0; 16] { codes[0] } else { codes[1] };
    report.conclude();
    Ok(report)
}

/// Compares the two forms of a weight.
fn row_of(pair: &[Weight<'_>; 2], tolerance: f64, codes: &mut [[u64; 16]; 2]) -> Row {
    for (weight, codes) in pair.iter().zip(codes) {
        if let Value::Fp4(fp4) = &weight.value {
            codes.iter_mut().zip(fp4.facts().codes).for_each(|(sum, count)| *sum += count);
        }
    }
    let mut row = Row {
        name: pair[0].name.clone(),
        a: pair[0].kind(),
        b: pair[1].kind(),
        shape: pair[0].shape().to_vec(),
        quantized: is_changed(pair),
        relation: Relation::NotComparable,
        error_percent: None,
        largest_difference: None,
        problem: None,
    };
    match difference(pair) {
        Ok(Sums { squares, largest }) => {
            let percent = Percent::of(squares).0;
            (row.error_percent, row.largest_difference) = (Some(percent), Some(largest));
            row.relation = match largest == 0.0 {
                true => Relation::Same,
                false if percent <= tolerance => Relation::Within,
                false => Relation::Different,
            };
        }
        Err(problem) => row.problem = Some(problem),
    }
    row
}

/// Returns true if a weight is FP4 in A or B, or if only one of them has its quantized format: a
/// weight that was kept in FP8 or in a type of ggml has no error.
pub(crate) fn is_changed(pair: &[Weight<'_>; 2]) -> bool {
    let is_fp4 = |weight: &Weight<'_>| matches!(weight.value, Value::Fp4(_));
    let kinds_differ = pair[0].kind() != pair[1].kind();
    pair.iter().any(is_fp4) || (kinds_differ && pair.iter().any(is_quantized))
}

/// Measures the distance of the two forms of a weight; otherwise, says why there is none.
pub(crate) fn difference(pair: &[Weight<'_>; 2]) -> Result<Sums, String> {
    match exact_difference(pair) {
        Some(sums) => sums,
        None => values(pair)?.map_or_else(|| Ok(Sums::default()), |values| between(&values)),
    }
}

/// Measures the distance of a weight that is FP4 in both forms, by codes and scales: the order in
/// which a dialect multiplies these in f32 is no difference of its numbers.
pub(crate) fn exact_difference(pair: &[Weight<'_>; 2]) -> Option<Result<Sums, String>> {
    let [Value::Fp4(a), Value::Fp4(b)] = pair.each_ref().map(|weight| &weight.value) else {
        return None;
    };
    let facts = |one: &Fp4Weight<'_>| (one.shape.clone(), one.transposed, one.hadamard);
    let alike = facts(a) == facts(b);
    alike.then(|| Ok(sums_of(a.exact_values(), b.exact_values())?))
}

/// Decodes the two forms of a weight to values of one shape; otherwise, says why they cannot be
/// compared. None: numbers of another type, with the same bytes.
pub(crate) fn values(pair: &[Weight<'_>; 2]) -> Result<Option<[Vec<f32>; 2]>, String> {
    let (a, b) = match pair.each_ref().map(|weight| weight.values()) {
        [Ok(a), Ok(b)] => (a, b),
        errors => {
            // Integers and records of ggml are the same or not.
            let [a, b] = pair.each_ref().map(|weight| match &weight.value {
                Value::Plain(tensor) => Some((tensor.dtype, &tensor.shape, &tensor.bytes)),
                Value::Fp8(_) | Value::Fp4(_) => None,
            });
            if a.is_some() && a == b {
                return Ok(None);
            }
            let beyond = errors.into_iter().find_map(|found| match found {
                Err(CheckpointError::Tensor {
                    problem: TensorProblem::Beyond { found, .. },
                    ..
                }) => Some(found),
                Ok(_) | Err(_) => None,
            });
            return Err(match beyond {
                Some(found) => {
                    format!("{found:e} is beyond the range of f32, in which values are compared")
                }
                None => "values of such types are not compared, and their bytes differ".to_owned(),
            });
        }
    };
    match a.0 == b.0 {
        true => Ok(Some([a.1, b.1])),
        false => Err(format!("shapes {:?} and {:?}", a.0, b.0)),
    }
}

/// Measures the distance of values; otherwise, says why there is none.
pub(crate) fn between(values: &[Vec<f32>; 2]) -> Result<Sums, String> {
    let [a, b] = values.each_ref().map(|values| values.iter().map(|&value| f64::from(value)));
    Ok(sums_of(a, b)?)
}

/// The sums over values that can be subtracted; otherwise, why some cannot.
fn sums_of(
    a: impl Iterator<Item = f64>,
    b: impl Iterator<Item = f64>,
) -> Result<Sums, &'static str> {
    let mut sums = Sums::default();
    for (a, b) in a.zip(b) {
        if a.is_nan() || b.is_nan() {
            return Err("a value is NaN");
        }
        if a.is_infinite() || b.is_infinite() {
            // Equal infinities are no difference, and have no energy that others compare with.
            if a != b {
                return Err("a value is infinite in one alone, or with the other sign");
            }
            continue;
        }
        let difference = b - a;
        sums.squares[0] += difference * difference;
        sums.squares[1] += a * a;
        sums.largest = sums.largest.max(difference.abs());
    }
    Ok(sums)
}

/// Rows of weights that differ, the worst first.
fn folded(report: &Report, all: bool) -> Vec<(Folded, Vec<&Row>)> {
    let rows: Vec<&Row> =
        report.weights.iter().filter(|row| row.relation != Relation::Same).collect();
    let key = |row: &Row| (row.a.clone(), row.b.clone(), row.problem.clone());
    let folded: Vec<Folded> = match all {
        true => rows.iter().enumerate().map(|(at, row)| Folded::alone(row.module(), at)).collect(),
        false => {
            let weights = rows.iter().map(|row| (row.module(), &row.shape[..], key(row)));
            fold_weights(&weights.collect::<Vec<_>>())
        }
    };
    let with_members = |one: Folded| {
        let members: Vec<&Row> = one.members.iter().map(|&at| rows[at]).collect();
        (one, members)
    };
    let mut folded: Vec<_> = folded.into_iter().map(with_members).collect();
    let worst = |members: &[&Row]| {
        // Weights that cannot be compared are before all errors.
        let error = |row: &&Row| row.error_percent.unwrap_or(f64::INFINITY);
        members.iter().map(error).fold(0.0, f64::max)
    };
    folded.sort_by(|(_, a), (_, b)| worst(b).total_cmp(&worst(a)));
    folded
}

/// The cells of a row. Without a tolerance none is marked: all rows are of weights that differ.
fn line((folded, members): &(Folded, Vec<&Row>), tolerance: f64) -> Vec<String> {
    let differs = |row: &&&Row| row.relation == Relation::Different && tolerance > 0.0;
    let beyond = members.iter().filter(differs).count();
    let first = members[0];
    let mut line =
        vec![folded.name.clone(), folded.shape(&first.shape), first.a.clone(), first.b.clone()];
    match &first.problem {
        Some(problem) => {
            line.extend([const { String::new() }; 4]);
            line.push(problem.clone());
        }
        None => {
            let errors = members.iter().filter_map(|row| row.error_percent);
            let most = Percent(errors.clone().fold(0.0, f64::max));
            let mean = Percent(mean(errors).unwrap_or(0.0));
            let differences = members.iter().filter_map(|row| row.largest_difference);
            let difference = differences.fold(0.0, f64::max);
            let beyond = match (beyond, members.len()) {
                (0, _) => String::new(),
                (1, 1) => "yes".to_owned(),
                (count, of) => format!("{count} of {of}"),
            };
            line.extend([mean.to_string(), most.to_string(), format!("{difference:.1e}"), beyond]);
        }
    }
    line
}

fn summary(report: &Report, all: bool, width: Option<u16>) -> String {
    let rows = folded(report, all);
    let shown = if all { rows.len() } else { rows.len().min(SHOWN) };
    let tolerance = report.tolerance_percent;
    let beyond = format!("beyond\n{tolerance} %");
    let mut columns = vec![
        ("weight", Column::Name),
        ("shape", Column::Name),
        ("A", Column::Name),
        ("B", Column::Name),
        ("mean\nerror", Column::Figure),
        ("largest\nerror", Column::Figure),
        ("largest\ndifference", Column::Figure),
        (beyond.as_str(), Column::Figure),
    ];
    if rows.iter().any(|(_, members)| members[0].problem.is_some()) {
        columns.push(("problem", Column::Text));
    }
    let mut text = String::new();
    if !rows.is_empty() {
        let lines = rows[..shown].iter().map(|row| line(row, tolerance)).collect();
        text.push_str(&format!("{}\n\n", table(&columns, &ORDER, lines, width)));
    }
    if rows.len() > shown {
        let rest = rows[shown..].iter().map(|(_, members)| members.len()).sum();
        let rest = counted(rest, "more weight");
        text.push_str(&format!("and {rest} with smaller errors; --all lists all\n"));
    }
    for (side, names) in [("A", &report.only_in_a), ("B", &report.only_in_b)] {
        text.push_str(&only_in(side, names, all));
    }
    let (counts, errors) = (report.counts(), report.errors());
    let lines = [Some(&counts), errors.as_ref(), Some(&report.verdict)];
    for line in lines.into_iter().flatten().filter(|line| !line.is_empty()) {
        text.push_str(&format!("{}\n", wrapped(line, width)));
    }
    text
}

/// Lists the weights that one checkpoint has alone, a line for every pattern of names, or with
/// `all` for every weight.
fn only_in(side: &str, names: &[String], all: bool) -> String {
    let folded = match all {
        true => names.iter().enumerate().map(|(at, name)| Folded::alone(name, at)).collect(),
        false => fold(names.iter().map(|name| (name.as_str(), ()))),
    };
    let shown = if all { folded.len() } else { folded.len().min(SHOWN) };
    let mut text = String::new();
    for one in &folded[..shown] {
        text.push_str(&match one.members.len() {
            1 => format!("only in {side}: {}\n", one.name),
            count => format!("only in {side}: {count} x {}\n", one.name),
        });
    }
    let rest: usize = folded[shown..].iter().map(|one| one.members.len()).sum();
    if rest > 0 {
        let rest = counted(rest, "more weight");
        text.push_str(&format!("and {rest} only in {side}; --all lists all\n"));
    }
    text
}
