//! `fp4 inspect`: the weights of a checkpoint, and defects that no reader reports.

use burn_fp4_checkpoints::selection::Selection;
use burn_fp4_checkpoints::{
    ALL_ZERO, Checkpoint, DefectKind, Fp4Facts, Reader, Value, Weight, defects,
};
use burn_fp4_policy::Decision;
use serde::Serialize;

use crate::accuracy::{Errors, bits};
use crate::checkpoint::{Input, is_of_ggml, is_quantized, model};
use crate::counted::counted;
use crate::error::CliError;
use crate::finite::{self, NOT_FINITE};
use crate::fold::{Folded, fold_weights, natural};
use crate::number::number;
use crate::print::{print, print_json, warning};
use crate::progress;
use crate::quantize::by_default;
use crate::remarks::{Remarks, Warning};
use crate::size::Size;
use crate::table::{Column, ColumnOrder, table, width, wrapped};
use crate::tried::{Trial, Tried};
use crate::unmet::unmet;
use crate::warnings::help;

/// List the weights of a checkpoint with formats, sizes and scales, and warn of defects that no
/// reader reports.
///
/// A saturated block has the largest block scale of its format: it has no room for larger values. A
/// zero block holds nothing but zeros.
///
/// Warnings are about values that are NaN, infinite or implausible, wrong scales, and layers that
/// engines cannot run as one; `fp4 warnings` lists all of them. Of a model of floats it also says
/// what `fp4 quantize` without options would do. It quantizes 4096 blocks of each matrix of floats
/// that is stored as [outputs, inputs], and warns as that would; of stacks and of matrices stored
/// the other way round only the run itself warns.
#[derive(clap::Args)]
#[command(after_long_help = help())]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,
    /// Print a line for every tensor. Otherwise names that differ in numbers alone are one line,
    /// with the range of their scales, and so are vectors.
    #[arg(long)]
    all: bool,
    /// Print a JSON object with weights, warnings and totals instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    dialect: &'static str,
    /// In the natural order of their names.
    weights: Vec<Row>,
    /// The result of `fp4 quantize` without options, of a model without quantized weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<String>,
    #[serde(flatten)]
    remarks: Remarks,
    totals: Totals,
}

#[derive(Serialize)]
struct Row {
    name: String,
    format: String,
    shape: Vec<usize>,
    bytes: usize,
    bits_per_weight: f64,
    /// Values that are NaN or infinite, of weights in F64, F32, F16, BF16, and FP8 without scales.
    not_finite: u64,
    /// True if it has values, and all of them are zero.
    #[serde(skip)]
    all_zero: bool,
    /// True if `fp4 quantize` would quantize it unasked.
    #[serde(skip)]
    chosen: bool,
    #[serde(flatten)]
    fp4: Option<Blocks>,
    #[serde(skip)]
    group: FormatGroup,
}

/// Facts that only FP4 has.
#[derive(Serialize)]
struct Blocks {
    #[serde(serialize_with = "number")]
    smallest_scale: f32,
    #[serde(serialize_with = "number")]
    largest_scale: f32,
    #[serde(serialize_with = "number")]
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
    /// By format, the quantized ones first.
    formats: Vec<FormatTotals>,
}

/// The group in which a format is counted, quantized ones first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum FormatGroup {
    Quantized,
    OfGgml,
    #[default]
    Dense,
}

/// The weights of a format.
#[derive(Serialize)]
struct FormatTotals {
    format: String,
    weights: usize,
    bytes: usize,
    bits_per_weight: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let mut remarks = Remarks::default();
    let checkpoint = arguments.input.open(&mut remarks)?;
    let report = examine(&checkpoint, remarks).map_err(CliError::during_run)?;
    match arguments.json {
        true => print_json(&report),
        false => print(&report.text(arguments.all, width())),
    }
}

fn examine(checkpoint: &Checkpoint, mut remarks: Remarks) -> Result<Report, CliError> {
    let model = model(checkpoint, &mut remarks)?;
    remarks.print_notes();
    let reader = Reader::new(checkpoint.container());
    let total: usize = model.weights.iter().map(Weight::bytes).sum();
    let bar = progress::bytes(total as u64, 0);
    let (mut weights, mut facts) = (Vec::new(), Vec::new());
    let by_default = by_default(&model).filter(|_| !model.weights.iter().any(is_quantized));
    let mut trial = by_default.as_ref().map(|(selection, _)| Trial::new(selection));
    // The first weight at whose values a run would end.
    let mut not_finite = None;
    for (at, weight) in model.weights.iter().enumerate() {
        bar.set_message(weight.name.clone());
        let found = match &weight.value {
            Value::Fp4(_) => match reader.weight(weight)?.value {
                Value::Fp4(fp4) => Some(fp4.facts()),
                Value::Plain(_) | Value::Fp8(_) => None,
            },
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        let mut tried = trial.as_ref().and_then(|trial| trial.begin(&model, at));
        let values = values(&reader, weight, &mut tried)?;
        if let (Some(trial), Some(tried), 0) = (&mut trial, tried, values.not_finite) {
            trial.end(at, tried);
        }
        let decision = by_default.as_ref().map(|(selection, _)| &selection.decisions[at]);
        let chosen = matches!(decision, Some(Decision::Quantize { .. }));
        if chosen && values.not_finite > 0 {
            not_finite = not_finite.or(Some(weight.name.as_str()));
        }
        let mut row = Row::new(weight, found.as_ref(), values);
        row.chosen = chosen;
        weights.push(row);
        facts.push(found);
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    weights.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
    let totals = Totals::new(&weights);
    remarks.warn_each(weights.iter().filter_map(Row::warning));
    let zero = weights.iter().filter(|row| row.all_zero && row.chosen);
    let zero = zero.map(|row| row.name.clone()).collect();
    remarks.warn_all(DefectKind::AllZero.name(), zero, ALL_ZERO);
    remarks.warn_each(defects(&model, &facts));
    let mut plan = None;
    if let Some((selection, refused)) = &by_default
        && totals.weights > 0
    {
        if let Some(Trial { tallies, .. }) = &trial {
            Errors::warn_of_trial(&model, &selection.groups, tallies, &mut remarks);
        }
        remarks.warn_each(unmet(&model, &selection.decisions));
        let refused = refused.as_ref().map(CliError::to_string).or_else(|| {
            let name = not_finite?;
            Some(format!("`{name}` has NaN or infinite values; pass --keep '{name}'"))
        });
        plan = Some(outlook(totals.weights, selection, refused));
    }
    Ok(Report { dialect: checkpoint.dialect(), weights, plan, remarks, totals })
}

/// Says what `fp4 quantize` without options makes of a model.
fn outlook(weights: usize, selection: &Selection, refused: Option<String>) -> String {
    let quantized: usize = selection.groups.iter().map(Vec::len).sum();
    match refused {
        None => format!(
            "`fp4 quantize` would quantize {quantized} of {}; --dry-run shows its plan",
            counted(weights, "weight")
        ),
        Some(error) => format!("`fp4 quantize` would end with an error: {error}"),
    }
}

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// The values of a weight that is not quantized.
#[derive(Default)]
struct Values {
    /// Number of those that are NaN or infinite.
    not_finite: u64,
    /// True if there are some, and all of them are zero.
    all_zero: bool,
}

/// Looks at the values of a weight, in the memory of a piece. `tried` becomes none if it cannot be
/// tried.
fn values<'c>(
    reader: &Reader<'c>,
    weight: &Weight<'c>,
    tried: &mut Option<Tried>,
) -> Result<Values, CliError> {
    let Value::Plain(tensor) = &weight.value else { return Ok(Values::default()) };
    let mut piece = vec![0; PIECE.min(tensor.bytes.len())];
    let mut values = Values { not_finite: 0, all_zero: !tensor.bytes.is_empty() };
    for mapped in tensor.bytes.chunks(PIECE) {
        let piece = &mut piece[..mapped.len()];
        reader.read(&tensor.name, mapped, piece)?;
        values.not_finite += finite::count_not_finite(tensor.plain(), piece);
        values.all_zero &= piece.iter().all(|&byte| byte == 0);
        let look = |mut one: Tried| one.look(tensor, piece).map(|()| one);
        *tried = tried.take().and_then(look);
    }
    Ok(values)
}

impl Row {
    fn new(weight: &Weight<'_>, facts: Option<&Fp4Facts>, values: Values) -> Self {
        let fp4 = facts.map(|facts| Blocks {
            smallest_scale: facts.scales[0],
            largest_scale: facts.scales[1],
            tensor_scale: facts.multiplier,
            blocks: facts.blocks,
            zero_blocks: facts.zero_blocks,
            saturated_blocks: facts.saturated_blocks,
        });
        Self {
            name: weight.name.clone(),
            format: weight.kind(),
            shape: weight.shape().to_vec(),
            bytes: weight.bytes(),
            bits_per_weight: bits(weight.bytes(), weight.len()),
            not_finite: values.not_finite,
            all_zero: values.all_zero,
            chosen: false,
            fp4,
            group: match (is_of_ggml(weight), is_quantized(weight)) {
                (true, _) => FormatGroup::OfGgml,
                (false, true) => FormatGroup::Quantized,
                (false, false) => FormatGroup::Dense,
            },
        }
    }

    /// The name without `.weight`.
    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Warns of values that no command quantizes.
    fn warning(&self) -> Option<Warning> {
        let (name, found) = (&self.name, self.not_finite);
        let keep = match self.chosen {
            false => String::new(),
            true => format!(", or pass --keep '{name}' to `fp4 quantize`"),
        };
        let what = format!("{}; fix the weight{keep}", finite::described(found));
        (found > 0).then(|| Warning::of(NOT_FINITE, name, what))
    }
}

impl Totals {
    fn new(rows: &[Row]) -> Self {
        let [bytes, values] = sums(rows);
        let mut formats: Vec<(FormatGroup, &str)> =
            rows.iter().map(|row| (row.group, row.format.as_str())).collect();
        formats.sort_unstable();
        formats.dedup();
        let of_format = |(_, format): (FormatGroup, &str)| {
            let of: Vec<&Row> = rows.iter().filter(|row| row.format == format).collect();
            let ([bytes, values], weights) = (sums(of.iter().copied()), of.len());
            let format = format.to_owned();
            FormatTotals { format, weights, bytes, bits_per_weight: bits(bytes, values) }
        };
        Self {
            weights: rows.len(),
            quantized: rows.iter().filter(|row| row.group != FormatGroup::Dense).count(),
            values,
            bytes,
            bits_per_weight: bits(bytes, values),
            formats: formats.into_iter().map(of_format).collect(),
        }
    }
}

/// The format of a weight goes last.
const WEIGHTS: ColumnOrder<'_> = ColumnOrder {
    first: &[
        "largest\nscale",
        "tensor\nscale",
        "shape",
        "saturated\nblocks",
        "zero\nblocks",
        "size",
    ],
    then: &["bits"],
    last: &[],
};
/// The size of the weights of a format goes last.
const FORMATS: ColumnOrder<'_> =
    ColumnOrder { first: &["share", "bits a\nweight", "weights"], then: &[], last: &[] };

impl Report {
    fn text(&self, all: bool, width: Option<u16>) -> String {
        let mut text = format!("{}\n\n{}", self.table(all, width), self.summary(width));
        if self.weights.is_empty() {
            // Without tables there is nothing to set apart.
            text = text.trim_start().to_owned();
        }
        for line in self.remarks.lines() {
            text.push_str(&format!("\n{}", warning(line, width)));
        }
        text
    }

    fn folded(&self, all: bool) -> Vec<Folded> {
        if all {
            let rows = self.weights.iter().enumerate();
            return rows.map(|(at, row)| Folded::alone(row.module(), at)).collect();
        }
        let rows = self.weights.iter();
        let rows = rows.map(|row| (row.module(), &row.shape[..], row.format.as_str()));
        fold_weights(&rows.collect::<Vec<_>>())
    }

    fn table(&self, all: bool, width: Option<u16>) -> String {
        let columns = [
            ("weight", Column::Name),
            ("format", Column::Name),
            ("shape", Column::Name),
            ("bits", Column::Figure),
            ("size", Column::Figure),
            ("largest\nscale", Column::Figure),
            ("tensor\nscale", Column::Figure),
            ("saturated\nblocks", Column::Figure),
            ("zero\nblocks", Column::Figure),
        ];
        let rows = self.folded(all).iter().map(|folded| self.line(folded)).collect();
        table(&columns, &WEIGHTS, rows, width)
    }

    fn line(&self, folded: &Folded) -> Vec<String> {
        let members: Vec<&Row> = folded.members.iter().map(|&at| &self.weights[at]).collect();
        let first = members[0];
        let [bytes, values] = sums(members.iter().copied());
        let mut line = vec![
            folded.name.clone(),
            first.format.clone(),
            folded.shape(&first.shape),
            format!("{:.2}", bits(bytes, values)),
            Size(bytes as u64).to_string(),
        ];
        let blocks: Vec<&Blocks> = members.iter().filter_map(|row| row.fp4.as_ref()).collect();
        if !blocks.is_empty() {
            let sum = |of: fn(&Blocks) -> u64| blocks.iter().map(|one| of(one)).sum::<u64>();
            let share = |of: fn(&Blocks) -> u64| share(sum(of), sum(|one| one.blocks));
            line.extend([
                range(blocks.iter().map(|one| one.largest_scale)),
                range(blocks.iter().map(|one| one.tensor_scale)),
                share(|one| one.saturated_blocks),
                share(|one| one.zero_blocks),
            ]);
        }
        line
    }

    /// Counts weights and bytes, of all and of each format.
    fn summary(&self, width: Option<u16>) -> String {
        let Totals { weights, quantized, bytes, bits_per_weight, .. } = self.totals;
        let of_ggml = self.weights.iter().any(|row| row.group == FormatGroup::OfGgml);
        let how = if of_ggml { " by types of ggml" } else { "" };
        let weights = counted(weights, "weight");
        let columns = [
            ("format", Column::Name),
            ("weights", Column::Figure),
            ("size", Column::Figure),
            ("share", Column::Figure),
            ("bits a\nweight", Column::Figure),
        ];
        let row = |one: &FormatTotals| {
            let share = 100.0 * one.bytes as f64 / bytes.max(1) as f64;
            vec![
                one.format.clone(),
                one.weights.to_string(),
                Size(one.bytes as u64).to_string(),
                format!("{share:.0} %"),
                format!("{:.2}", one.bits_per_weight),
            ]
        };
        let formats = self.totals.formats.iter().map(row).collect();
        let line = format!(
            "{}: {quantized} of {weights} quantized{how}, {}, {bits_per_weight:.2} bits a weight",
            self.dialect,
            Size(bytes as u64),
        );
        let scales = self.scales().map(|line| format!("\n{}", wrapped(&line, width)));
        let scales = scales.unwrap_or_default();
        let plan = self.plan.as_ref().map(|line| format!("\n{}", wrapped(line, width)));
        let plan = plan.unwrap_or_default();
        format!(
            "{}\n\n{}{scales}{plan}",
            table(&columns, &FORMATS, formats, width),
            wrapped(&line, width)
        )
    }

    /// Describes the scales and blocks of all FP4 weights. None: there are none.
    fn scales(&self) -> Option<String> {
        let all: Vec<&Blocks> = self.weights.iter().filter_map(|row| row.fp4.as_ref()).collect();
        if all.is_empty() {
            return None;
        }
        let sum = |of: fn(&Blocks) -> u64| all.iter().map(|one| of(one)).sum::<u64>();
        let blocks = sum(|one| one.blocks);
        Some(format!(
            "tensor scales {}, largest scales {}; {blocks} blocks: {} saturated, {} zero",
            range(all.iter().map(|one| one.tensor_scale)),
            range(all.iter().map(|one| one.largest_scale)),
            share(sum(|one| one.saturated_blocks), blocks),
            share(sum(|one| one.zero_blocks), blocks)
        ))
    }
}

/// Sums the bytes and the values of weights.
fn sums<'r>(rows: impl IntoIterator<Item = &'r Row>) -> [usize; 2] {
    let add = |[bytes, values]: [usize; 2], row: &Row| [bytes + row.bytes, values + row.len()];
    rows.into_iter().fold([0; 2], add)
}

/// Shows the smallest and the largest of numbers, or the one that all of them are.
fn range(numbers: impl Iterator<Item = f32> + Clone) -> String {
    let least = numbers.clone().fold(f32::INFINITY, f32::min);
    let [least, most] =
        [least, numbers.fold(f32::NEG_INFINITY, f32::max)].map(|n| format!("{n:.2e}"));
    if least == most { most } else { format!("{least}..{most}") }
}

/// Shows a count of blocks in percent. One that is not 0 does not look like 0.
fn share(count: u64, of: u64) -> String {
    match (count, 100.0 * count as f64 / of.max(1) as f64) {
        (0, _) => "0 %".to_owned(),
        (_, share) if share < 0.01 => "< 0.01 %".to_owned(),
        (_, share) => format!("{share:.2} %"),
    }
}
