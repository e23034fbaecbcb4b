//! `fp4 inspect`: what is in a checkpoint, and what is suspicious about it.

use burn_fp4_checkpoints::{Checkpoint, Fp4Facts, Reader, Value, Weight, traps};
use comfy_table::Table;
use serde::Serialize;

use crate::checkpoint::{Input, model};
use crate::error::CliError;
use crate::print::{self, print, print_json};
use crate::progress;
use crate::size::Size;
use crate::table::{Column, table};

/// List the weights of a checkpoint (format, bits, scales, saturated and zero blocks), and warn of
/// frequent defects that no reader reports.
///
/// Warnings: tensor scales that look like their reciprocal, blocks lost to a scale of 0, NaN
/// scales, saturated scales, constant input scales, and query/key/value or gate/up layers that
/// engines cannot run as one.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,
    /// Print a JSON object with weights, warnings and totals instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    dialect: &'static str,
    weights: Vec<Row>,
    warnings: Vec<String>,
    totals: Totals,
}

#[derive(Serialize)]
struct Row {
    name: String,
    format: String,
    shape: Vec<usize>,
    bytes: usize,
    bits_per_weight: f64,
    #[serde(flatten)]
    fp4: Option<Blocks>,
}

/// What only FP4 has.
#[derive(Serialize)]
struct Blocks {
    smallest_scale: f32,
    largest_scale: f32,
    tensor_scale: f32,
    blocks: u64,
    zero_blocks: u64,
    saturated_blocks: u64,
}

#[derive(Serialize, Default)]
struct Totals {
    weights: usize,
    quantized: usize,
    values: usize,
    bytes: usize,
    bits_per_weight: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let report = examine(&arguments.input.open()?).map_err(CliError::meanwhile)?;
    if arguments.json {
        return print_json(&report);
    }
    let totals = &report.totals;
    let mut text = format!("{}\n", table_of(&report.weights));
    text.push_str(&format!(
        "{}: {} of {} weights quantized, {}, {:.3} bits a value\n",
        report.dialect,
        totals.quantized,
        totals.weights,
        Size(totals.bytes as u64),
        totals.bits_per_weight
    ));
    for warning in &report.warnings {
        text.push_str(&format!("{}\n", print::warning(warning)));
    }
    print(&text)
}

fn examine(checkpoint: &Checkpoint) -> Result<Report, CliError> {
    let model = model(checkpoint)?;
    let reader = Reader::new(checkpoint.container());
    let total: usize = model.weights.iter().map(Weight::bytes).sum();
    let bar = progress::bytes(total as u64, 0);
    let (mut weights, mut facts) = (Vec::new(), Vec::new());
    let mut totals = Totals { weights: model.weights.len(), ..Totals::default() };
    for weight in &model.weights {
        bar.set_message(weight.name.clone());
        let found = match &weight.value {
            Value::Fp4(_) => match reader.weight(weight)?.value {
                Value::Fp4(fp4) => Some(fp4.facts()),
                Value::Plain(_) | Value::Fp8(_) => None,
            },
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        totals.quantized += usize::from(weight.is_quantized());
        totals.values += weight.len();
        totals.bytes += weight.bytes();
        weights.push(row(weight, found.as_ref()));
        facts.push(found);
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    totals.bits_per_weight = bits(totals.bytes, totals.values);
    let warnings = traps(&model, &facts).iter().map(ToString::to_string).collect();
    Ok(Report { dialect: checkpoint.dialect(), weights, warnings, totals })
}

fn bits(bytes: usize, values: usize) -> f64 {
    8.0 * bytes as f64 / values.max(1) as f64
}

fn row(weight: &Weight<'_>, facts: Option<&Fp4Facts>) -> Row {
    let fp4 = facts.map(|facts| Blocks {
        smallest_scale: facts.scales[0],
        largest_scale: facts.scales[1],
        tensor_scale: facts.multiplier,
        blocks: facts.blocks,
        zero_blocks: facts.zero_blocks,
        saturated_blocks: facts.saturated_blocks,
    });
    Row {
        name: weight.name.clone(),
        format: weight.kind(),
        shape: weight.shape().to_vec(),
        bytes: weight.bytes(),
        bits_per_weight: bits(weight.bytes(), weight.len()),
        fp4,
    }
}

fn table_of(rows: &[Row]) -> Table {
    let mut table = table(&[
        ("weight", Column::Name),
        ("format", Column::Name),
        ("shape", Column::Name),
        ("bits", Column::Figure),
        ("largest\nscale", Column::Figure),
        ("tensor\nscale", Column::Figure),
        ("saturated\nblocks", Column::Figure),
        ("zero\nblocks", Column::Figure),
    ]);
    for row in rows {
        let bits = format!("{:.2}", row.bits_per_weight);
        let mut cells =
            vec![row.name.clone(), row.format.clone(), format!("{:?}", row.shape), bits];
        if let Some(fp4) = &row.fp4 {
            let percent = |count: u64| match (count, 100.0 * count as f64 / fp4.blocks as f64) {
                (0, _) => "0 %".to_owned(),
                (_, share) if share < 0.01 => "< 0.01 %".to_owned(),
                (_, share) => format!("{share:.2} %"),
            };
            cells.extend([
                format!("{:.2e}", fp4.largest_scale),
                format!("{:.2e}", fp4.tensor_scale),
                percent(fp4.saturated_blocks),
                percent(fp4.zero_blocks),
            ]);
        }
        table.add_row(cells);
    }
    table
}
