//! The findings about a model: its weights compared with the original's, and its readers.

use std::collections::{BTreeSet, HashMap};

use burn_fp4_checkpoints::dialect::{Known, writer};
use burn_fp4_checkpoints::{
    Checkpoint, DefectKind, Fp4Facts, Model, Reader, Value, Weight, defects,
};
use burn_fp4_search::formats::{Fp4Format, Packed};
use burn_fp4_search::{Gram, fp8_rounding_error, fp8_rows};
use serde::Serialize;

use crate::accuracy::{bits, mean};
use crate::checkpoint::model;
use crate::compare::{between, difference, exact_difference, is_changed, values};
use crate::error::CliError;
use crate::fold::natural;
use crate::number::optional;
use crate::percent::Percent;
use crate::progress;
use crate::readers;
use crate::remarks::Remarks;

/// A finished model against its original.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    pub(super) model: Side,
    pub(super) reference: Side,
    /// Weights of the model whose format is quantized and not that of the original.
    pub(super) quantized: usize,
    /// Bits of a quantized weight, with scales. None: there are none.
    pub(super) quantized_bits_per_weight: Option<f64>,
    /// Mean error of quantized weights, in percent.
    #[serde(serialize_with = "optional")]
    pub(super) weight_error_percent: Option<f64>,
    /// Mean error of the outputs of their layers, if inputs were given.
    #[serde(serialize_with = "optional")]
    pub(super) output_error_percent: Option<f64>,
    /// Mean error that products in FP8 add to FP4 weights, in percent.
    #[serde(serialize_with = "optional")]
    pub(super) fp8_rounding_percent: Option<f64>,
    /// Predictions on texts, if they were measured.
    pub(super) texts: Vec<Text>,
    /// Programs that read the dialect and formats of the model.
    pub(super) readers: Vec<ReaderRow>,
    /// Notes on these programs, and warnings.
    #[serde(flatten)]
    pub(super) remarks: Remarks,
    /// Weights that both have, the worst first.
    pub(super) weights: Vec<Row>,
    pub(super) only_in_model: Vec<String>,
    pub(super) only_in_reference: Vec<String>,
}

/// The model, or its original.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Side {
    pub(super) path: String,
    pub(super) dialect: &'static str,
    pub(super) weights: usize,
    pub(super) bytes: usize,
    pub(super) bits_per_weight: f64,
}

/// Predictions on a text, compared with the original's on the same windows.
#[derive(Debug, Clone, Serialize)]
pub struct Text {
    /// Name of the text.
    pub name: String,
    /// Predicted tokens.
    pub tokens: usize,
    /// Perplexity of the model.
    pub perplexity: f64,
    /// Perplexity of the original.
    pub reference_perplexity: f64,
    /// Loss of the model less that of the original, in nats per token.
    pub difference: f64,
    /// Standard error of the difference, paired by window. None for a single window.
    pub standard_error: Option<f64>,
    /// Mean divergence from the original, in nats.
    pub divergence: f64,
    /// 99th percentile of the divergence over tokens.
    pub divergence_percentile_99: f64,
    /// Tokens for which both find the same next token most likely, in percent.
    pub top1_agreement_percent: f64,
}

/// A program that reads the model.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ReaderRow {
    pub(super) format: String,
    pub(super) program: &'static str,
    pub(super) version: &'static str,
    /// True if a test runs it on files of this project; otherwise its source accepts them.
    pub(super) tested: bool,
    /// Transform of the inputs of a layer. Empty: there is none.
    pub(super) inputs: &'static str,
}

/// A weight of the model.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) format: String,
    pub(super) reference_format: String,
    pub(super) shape: Vec<usize>,
    /// True if its format is quantized and not that of the original.
    pub(super) quantized: bool,
    pub(super) bits_per_weight: f64,
    /// Blocks of an FP4 weight, and those that have the largest block scale.
    pub(super) blocks: u64,
    pub(super) saturated_blocks: u64,
    /// Blocks of an FP4 weight whose products E4M3 does not hold.
    pub(super) fp8_inexact_blocks: u64,
    /// Error that their rounding for products in FP8 adds, `|FP8 - W'| / |W'|`, in percent.
    #[serde(serialize_with = "optional")]
    pub(super) fp8_rounding_percent: Option<f64>,
    /// `|W' - W| / |W|`. None: see `problem`.
    #[serde(serialize_with = "optional")]
    pub(super) error_percent: Option<f64>,
    /// The same of the outputs of the layer.
    #[serde(serialize_with = "optional")]
    pub(super) output_error_percent: Option<f64>,
    /// Reason for which there is no error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
}

impl Report {
    /// Reads the weights of a model and of its original, and compares them.
    ///
    /// `inputs` returns `X^T X` of the inputs of a weight `[outputs, inputs]` by its name, if it is
    /// known: the errors of its outputs are then measured.
    ///
    /// # Errors
    /// A file cannot be read, the reference alone is in FP4, or no weight has a name and a shape in
    /// common with it.
    pub fn new<'g>(
        checkpoint: &Checkpoint,
        original: &Checkpoint,
        inputs: impl Fn(&str) -> Option<&'g Gram>,
    ) -> Result<Self, CliError> {
        let mut remarks = Remarks::default();
        let (found, reference) = (model(checkpoint, &mut remarks)?, model(original, &mut remarks)?);
        let sides =
            [Side::new(checkpoint, &found.weights), Side::new(original, &reference.weights)];
        check_not_swapped(&sides, [&found, &reference])?;
        let by_name: HashMap<&str, &Weight<'_>> =
            reference.weights.iter().map(|weight| (weight.name.as_str(), weight)).collect();
        let [reader, of_reference] =
            [checkpoint, original].map(|checkpoint| Reader::new(checkpoint.container()));
        let bar = progress::bytes(found.weights.iter().map(|one| one.bytes() as u64).sum(), 0);
        let (mut weights, mut facts, mut only_in_model) = (Vec::new(), Vec::new(), Vec::new());
        let mut unlike_shapes = 0;
        for weight in &found.weights {
            bar.set_message(weight.name.clone());
            let read = reader.weight(weight)?;
            let counted = match &read.value {
                Value::Fp4(fp4) => Some(fp4.facts()),
                Value::Plain(_) | Value::Fp8(_) => None,
            };
            facts.push(counted);
            match by_name.get(weight.name.as_str()) {
                None => only_in_model.push(weight.name.clone()),
                Some(other) => {
                    let pair = [of_reference.weight(other)?, read];
                    unlike_shapes += usize::from(pair[0].shape() != pair[1].shape());
                    weights.push(Row::new(&pair, counted, inputs(&weight.name)));
                }
            }
            bar.inc(weight.bytes() as u64);
        }
        bar.finish_and_clear();
        if weights.is_empty() {
            return Err(nothing_in_common(&sides, &found, &reference));
        }
        if unlike_shapes == weights.len() {
            check_problems(&sides, &weights)?;
        }
        let apart = [DefectKind::UnlikeScales, DefectKind::UnlikeFormats];
        let unlike = defects(&found, &facts);
        remarks.warn_each(unlike.into_iter().filter(|defect| apart.contains(&defect.kind)));
        let known: BTreeSet<&str> = found.weights.iter().map(|one| one.name.as_str()).collect();
        let names = reference.weights.iter().map(|weight| &weight.name);
        let mut only_in_reference: Vec<String> =
            names.filter(|name| !known.contains(name.as_str())).cloned().collect();
        for names in [&mut only_in_model, &mut only_in_reference] {
            names.sort_by(|a, b| natural(a).cmp(&natural(b)));
        }
        weights.sort_by(|a, b| {
            let worse = b.severity().total_cmp(&a.severity());
            worse.then_with(|| natural(&a.name).cmp(&natural(&b.name)))
        });
        let readers = readers_of(checkpoint.dialect(), &found, &mut remarks)?;
        let quantized = || weights.iter().filter(|row| row.quantized);
        let [model, reference] = sides;
        Ok(Self {
            model,
            reference,
            quantized: quantized().count(),
            quantized_bits_per_weight: bits_of(quantized()),
            weight_error_percent: mean(quantized().filter_map(|row| row.error_percent)),
            fp8_rounding_percent: mean(weights.iter().filter_map(|row| row.fp8_rounding_percent)),
            output_error_percent: mean(quantized().filter_map(|row| row.output_error_percent)),
            texts: Vec::new(),
            readers,
            remarks,
            weights,
            only_in_model,
            only_in_reference,
        })
    }

    /// Adds predictions on texts.
    #[must_use]
    pub fn with_texts(self, texts: Vec<Text>) -> Self {
        Self { texts, ..self }
    }

    /// Returns the saturated blocks of all weights, and all blocks.
    pub(super) fn saturated(&self) -> [u64; 2] {
        let add = |[saturated, blocks]: [u64; 2], row: &Row| {
            [saturated + row.saturated_blocks, blocks + row.blocks]
        };
        self.weights.iter().fold([0; 2], add)
    }
}

impl Side {
    fn new(checkpoint: &Checkpoint, weights: &[Weight<'_>]) -> Self {
        let bytes = weights.iter().map(Weight::bytes).sum();
        let values: usize = weights.iter().map(Weight::len).sum();
        Self {
            path: checkpoint.container().root().display().to_string(),
            dialect: checkpoint.dialect(),
            weights: weights.len(),
            bytes,
            bits_per_weight: bits(bytes, values),
        }
    }
}

impl Row {
    /// Compares the original form of a weight with the finished one.
    fn new(pair: &[Weight<'_>; 2], facts: Option<Fp4Facts>, inputs: Option<&Gram>) -> Self {
        let weight = &pair[1];
        let matrices = match &weight.value {
            Value::Fp4(fp4) => fp4.to_packed(),
            Value::Plain(_) | Value::Fp8(_) => Vec::new(),
        };
        let inexact = |matrix: &Packed| {
            fp8_rows(matrix)[matrix.rows..].iter().map(|&blocks| blocks as u64).sum::<u64>()
        };
        let rounding = matrices.iter().map(|matrix| 100.0 * fp8_rounding_error(matrix));
        let mut row = Self {
            name: weight.name.clone(),
            format: weight.kind(),
            reference_format: pair[0].kind(),
            shape: weight.shape().to_vec(),
            quantized: is_changed(pair),
            bits_per_weight: bits(weight.bytes(), weight.len()),
            blocks: facts.map_or(0, |facts| facts.blocks),
            saturated_blocks: facts.map_or(0, |facts| facts.saturated_blocks),
            fp8_inexact_blocks: matrices.iter().map(inexact).sum(),
            fp8_rounding_percent: mean(rounding),
            error_percent: None,
            output_error_percent: None,
            problem: None,
        };
        match errors(pair, inputs) {
            Ok((values, outputs)) => {
                row.error_percent = Some(values.0);
                row.output_error_percent = outputs.map(|outputs| outputs.0);
            }
            Err(problem) => row.problem = Some(problem),
        }
        row
    }

    /// The name without `.weight`.
    pub(super) fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    /// Returns the error of the weight; more than any for one that cannot be compared. Errors of
    /// outputs are another measure, which not every weight has.
    pub(super) fn severity(&self) -> f64 {
        match self.problem {
            Some(_) => f64::INFINITY,
            None => self.error_percent.unwrap_or(0.0),
        }
    }
}

/// Computes the error of a weight, and of the outputs of its layer if its inputs are known.
fn errors(
    pair: &[Weight<'_>; 2],
    inputs: Option<&Gram>,
) -> Result<(Percent, Option<Percent>), String> {
    let fits = |gram: &&Gram| {
        let shape = pair[0].shape();
        gram.is_whole() && shape.len() == 2 && shape[1] == gram.channels()
    };
    let Some(gram) = inputs.filter(fits) else {
        return Ok((Percent::of(difference(pair)?.squares), None));
    };
    let exact = exact_difference(pair).transpose()?;
    let Some(mut values) = values(pair)? else { return Ok((Percent(0.0), None)) };
    let error = match exact {
        Some(exact) => exact,
        None => between(&values)?,
    };
    let [original, found] = &mut values;
    found.iter_mut().zip(&*original).for_each(|(found, original)| *found -= original);
    let squares = |rows: &[f32]| gram.squared_outputs(rows).map_err(|error| error.to_string());
    let outputs = Percent::of([squares(found)?, squares(original)?]);
    Ok((Percent::of(error.squares), Some(outputs)))
}

/// Returns the mean bits of the values of weights. None: there are none.
fn bits_of<'r>(rows: impl Iterator<Item = &'r Row>) -> Option<f64> {
    let (bits, values) = rows.fold((0.0, 0.0), |(bits, values), row| {
        let of_row = row.shape.iter().product::<usize>() as f64;
        (bits + row.bits_per_weight * of_row, values + of_row)
    });
    (values > 0.0).then(|| bits / values)
}

/// Checks that MODEL and the reference are not swapped.
fn check_not_swapped(sides: &[Side; 2], models: [&Model<'_>; 2]) -> Result<(), CliError> {
    let is_fp4 = |weight: &&Weight<'_>| matches!(weight.value, Value::Fp4(_));
    let [found, of_reference] = models.map(|model| model.weights.iter().filter(is_fp4).count());
    if found > 0 || of_reference == 0 {
        return Ok(());
    }
    let [model, reference] = [&sides[0].path, &sides[1].path];
    Err(CliError::Conflict(format!(
        "{model}: no weight is in FP4, but {of_reference} of {reference} are; pass the quantized \
         model first and the dense one as --reference"
    )))
}

/// Checks that some weight could be compared with that of the reference.
fn check_problems(sides: &[Side; 2], weights: &[Row]) -> Result<(), CliError> {
    if weights.iter().any(|row| row.problem.is_none()) {
        return Ok(());
    }
    let [model, reference] = [&sides[0].path, &sides[1].path];
    let Row { name, problem, .. } = &weights[0];
    let problem = problem.as_deref().unwrap_or_default();
    Err(CliError::Conflict(format!(
        "{model}: no weight could be compared with {reference} ({name}: {problem}); pass the model \
         that it was made from"
    )))
}

/// Returns the error of two checkpoints whose weights have different names.
fn nothing_in_common(sides: &[Side; 2], found: &Model<'_>, reference: &Model<'_>) -> CliError {
    let first = |model: &Model<'_>| {
        model
            .weights
            .first()
            .map_or_else(|| "no weight".to_owned(), |one| format!("`{}`", one.name))
    };
    CliError::Conflict(format!(
        "{}: no weight has the name of one in {} (found {} and {}); pass a reference with the same \
         names",
        sides[0].path,
        sides[1].path,
        first(found),
        first(reference)
    ))
}

/// Returns the programs that read the FP4 weights of a model, and adds notes on them.
fn readers_of(
    dialect: &'static str,
    model: &Model<'_>,
    remarks: &mut Remarks,
) -> Result<Vec<ReaderRow>, CliError> {
    let formats: BTreeSet<(&str, usize)> = model
        .weights
        .iter()
        .filter_map(|weight| match &weight.value {
            Value::Fp4(fp4) => Some((fp4.format.row().name, fp4.block_size)),
            Value::Plain(_) | Value::Fp8(_) => None,
        })
        .collect();
    let named = |(name, size): (&str, usize)| {
        let format = Fp4Format::ALL.into_iter().find(|format| format.row().name == name);
        format.map(|format| (format, size))
    };
    let formats: Vec<(Fp4Format, usize)> = formats.into_iter().filter_map(named).collect();
    let Ok((_, written)) = writer(dialect) else {
        remarks.note(format!("the dialect `{dialect}` is only read here, so no reader is known"));
        return Ok(Vec::new());
    };
    let mut rows = Vec::new();
    for &(format, size) in formats.iter().filter(|(f, size)| *size == f.row().block_size) {
        rows.extend(written.readers(format).iter().map(|reader| ReaderRow {
            format: format!("{format} {size}"),
            program: reader.program.row().name,
            version: reader.program.row().version,
            tested: reader.known == Known::Test,
            inputs: reader.inputs,
        }));
    }
    remarks.note_each(readers::notes(dialect, formats)?);
    let is_packed = |at: &usize| matches!(model.weights[*at].value, Value::Fp4(_));
    let packed: Vec<usize> = (0..model.weights.len()).filter(is_packed).collect();
    readers::remark_transformers(dialect, model, &packed, remarks);
    if dialect == crate::checkpoint::GGUF {
        remarks.note_each(readers::gguf_note(model));
    }
    Ok(rows)
}
