//! `fp4 convert`: the same numbers in another dialect.

use std::path::PathBuf;

use burn_fp4_checkpoints::dialect;
use burn_fp4_checkpoints::{
    CheckpointError, Dtype, Model, Output, Planned, Reader, Start, Value, WriteOptions,
    WriteReport, unlike_scales,
};
use burn_fp4_search::formats::Fp4Format;

use crate::checkpoint::{GGUF, Input, is_gguf, model, not_copied, target, writable};
use crate::error::CliError;
use crate::print::print;
use crate::progress;
use crate::readers;
use crate::size::Size;

/// Write a checkpoint in another dialect: the same codes and scales under other names, with the
/// configs that its readers expect.
///
/// What changes on the way is counted and printed: tensor scales that had to be inverted, block
/// scales that took in a tensor scale, blocks that were cast to another format.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,
    /// The folder, or for GGUF the file (which ends in .gguf), to make. Nothing may be there.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// The dialect to write; `fp4 formats` prints its readers. Without, gguf if OUT ends in .gguf.
    #[arg(long, value_name = "DIALECT", value_parser = writable())]
    dialect: Option<String>,
    /// Cast FP4 weights to this format: exactly where that is possible, counted where it is not.
    #[arg(long)]
    format: Option<Fp4Format>,
    /// Decode FP4 weights to floats: bf16 or f32.
    #[arg(long, value_name = "DTYPE", value_parser = float)]
    decode_fp4: Option<Dtype>,
    /// Decode FP8 weights to floats: bf16 or f32.
    #[arg(long, value_name = "DTYPE", value_parser = float)]
    decode_fp8: Option<Dtype>,
    /// Decode records of ggml other than FP4, such as Q4_K, to floats: bf16 or f32.
    #[arg(long, value_name = "DTYPE", value_parser = float)]
    decode_ggml: Option<Dtype>,
    /// Allow a tensor scale to be folded into block scales where that changes values, for dialects
    /// without one.
    #[arg(long)]
    inexact: bool,
}

fn float(name: &str) -> Result<Dtype, String> {
    match name {
        "bf16" => Ok(Dtype::BF16),
        "f32" => Ok(Dtype::F32),
        _ => Err("expected bf16 or f32".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let dialect = dialect_of(arguments)?;
    let out = target(&arguments.out, dialect)?;
    let checkpoint = arguments.input.open()?;
    let options = WriteOptions {
        cast: arguments.format,
        decode_fp8: arguments.decode_fp8,
        decode_fp4: arguments.decode_fp4,
        decode_ggml: arguments.decode_ggml,
        inexact: arguments.inexact,
        ..WriteOptions::default()
    };
    let model = model(&checkpoint)?;
    let reader = Reader::new(checkpoint.container());
    let planned = model.plan_reading(dialect, &options, &reader).map_err(CliError::from);
    let planned = planned.map_err(CliError::meanwhile)?;
    let mut output = planned.create(&out, "convert", Start::Anew)?;
    let written = write(&planned, &mut output, &model, &reader);
    let finished = written.and_then(|()| Ok(output.finish()?));
    warn(finished.map_err(CliError::meanwhile)?);
    print(&summary(&planned.report(), &out.display().to_string()))?;
    let notes = notes(&model, dialect, &options)?.into_iter().chain(not_copied(&checkpoint));
    notes.into_iter().try_for_each(|note| print(&format!("note: {note}\n")))
}

/// Writes the weights as they are: their tensors, or what another dialect makes of their codes and
/// scales.
fn write<'m>(
    planned: &Planned<'_>,
    output: &mut Output<'_>,
    model: &Model<'m>,
    reader: &Reader<'m>,
) -> Result<(), CliError> {
    let bar = progress::bytes(model.weights.iter().map(|weight| weight.bytes() as u64).sum(), 0);
    for (at, weight) in model.weights.iter().enumerate() {
        bar.set_message(weight.name.clone());
        match planned.copies(at) {
            true => output.copy(at, reader)?,
            false => output.write(at, &reader.weight(weight)?)?,
        }
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Says that a result is there, of which the file system has not confirmed that it stays.
pub(crate) fn warn(unconfirmed: Option<CheckpointError>) {
    if let Some(error) = unconfirmed {
        eprintln!("warning: {error}: the result is whole, but may lose its name if power fails");
    }
}

/// The dialect that is asked for, or that the name of the file says.
fn dialect_of(arguments: &Arguments) -> Result<&str, CliError> {
    match &arguments.dialect {
        Some(dialect) => Ok(dialect),
        None if is_gguf(&arguments.out) => Ok(GGUF),
        None => {
            let names = dialect::written().join(", ");
            let what = format!("nothing says what to write: name the --dialect, one of {names}");
            Err(CliError::Choice(what))
        }
    }
}

/// What is worth knowing of the result, beside what changed on the way.
fn notes(
    model: &Model<'_>,
    dialect: &str,
    options: &WriteOptions,
) -> Result<Vec<String>, CliError> {
    let (_, writer) = dialect::writer(dialect)?;
    let mut notes = Vec::new();
    let scaled = options.cast.is_none_or(|format| format.row().tensor_scale);
    if let Some(pair) = unlike_scales(model).first()
        && writer.fuses()
        && scaled
        && options.decode_fp4.is_none()
    {
        let [one, other] = pair.map(|at| &model.weights[at].name);
        notes.push(format!(
            "`{one}` and `{other}` have different tensor scales: engines that run both as one \
             round block scales again"
        ));
    }
    if dialect == GGUF && model.gguf.is_none() {
        notes.push(UNKNOWN_NAMES.to_owned());
    }
    let formats = model.weights.iter().filter_map(|weight| match (&weight.value, options.cast) {
        (Value::Fp4(_), Some(cast)) => Some((cast, cast.row().block_size)),
        (Value::Fp4(fp4), None) => Some((fp4.format, fp4.block_size)),
        (Value::Plain(_) | Value::Fp8(_), _) => None,
    });
    // The configs of a copy are the source's own.
    let copied = options.cast.is_none() && model.quantization.dialect == dialect;
    if options.decode_fp4.is_none() && !copied {
        notes.extend(readers::notes(dialect, formats)?);
    }
    Ok(notes)
}

/// What is true of GGUF files that were made from no GGUF file.
pub(crate) const UNKNOWN_NAMES: &str =
    "the tensors keep the names that they have in the input, which llama.cpp does not run";

/// What was written, and what changed on the way.
fn summary(report: &WriteReport, path: &str) -> String {
    let (tensors, files, size) = (report.tensors, report.files, Size(report.bytes));
    let mut text = format!("{path}: {tensors} tensors in {files} files, {size}\n");
    let mut note = |count: u64, what: String| {
        if count > 0 {
            text.push_str(&format!("note: {what}\n"));
        }
    };
    let (inverted, inexactly) = (report.inverted, report.inverted_inexactly);
    note(
        inverted,
        format!("{inverted} scales were inverted, {inexactly} do not come back by inverting again"),
    );
    for (what, cast) in [("cast", report.cast), ("folded", report.folded)] {
        let (blocks, changed, values) = (cast.blocks, cast.changed_blocks, cast.changed_values);
        note(
            blocks,
            format!("{blocks} blocks were {what}: {values} values in {changed} of them changed"),
        );
    }
    let left_out = report.input_scales_left_out;
    note(left_out, format!("{left_out} input scales have no place in this dialect"));
    let dynamic = report.dynamic_inputs_left_out;
    note(dynamic, format!("the inputs of {dynamic} layers are no longer quantized as they run"));
    note(report.decoded, format!("{} weights were decoded to floats", report.decoded));
    text
}
