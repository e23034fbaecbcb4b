//! `fp4 convert`: the same numbers in another dialect.

use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::dialect::{self, ScaleConvention};
use burn_fp4_checkpoints::{
    CheckpointError, DefectKind, Dtype, Kept, Model, Output, Planned, Reader, Start, Value, Weight,
    WriteOptions, WriteReport, missing_layers, packed_embedding, unlike_scales,
};
use burn_fp4_search::formats::Fp4Format;
use serde::Serialize;

use crate::accuracy::{Errors, Tally, TallyAt};
use crate::cast::error_of_decoding;
use crate::checkpoint::{GGUF, Input, is_gguf, model, not_copied, target, writable};
use crate::counted::counted;
use crate::error::CliError;
use crate::finite::Copied;
use crate::fold::{Folded, fold, short_reason};
use crate::interrupt::Announced;
use crate::percent::Percent;
use crate::print::{next, print, print_json};
use crate::progress;
use crate::readers;
use crate::remarks::{Remarks, Warning};
use crate::size::Size;
use crate::table::{width, wrapped};
use crate::unheld::{holders, pattern};
use crate::warnings::help;

/// Write a checkpoint in another dialect: the same codes and scales under other names, with the
/// configs that its readers expect.
///
/// Whatever changes on the way is counted and printed, with the error that it causes: tensor scales
/// that had to be inverted, block scales that took in a tensor scale, blocks that were cast to
/// another format. The error is that against INPUT, not against the model that INPUT was quantized
/// from. A weight whose columns do not fit the new format or dialect is kept in its own
/// format, or as bf16 where the dialect has no place for that.
#[derive(clap::Args)]
#[command(after_long_help = help())]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,
    /// The folder to make, or the file (.gguf) for GGUF. Nothing may exist there.
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// The dialect to write; `fp4 formats` prints its readers. The default is gguf if OUT ends in
    /// .gguf; otherwise it is required.
    #[arg(long, value_name = "DIALECT", value_parser = writable())]
    dialect: Option<String>,
    /// Cast FP4 weights to this format: exactly where possible, counted where not.
    #[arg(long)]
    format: Option<Fp4Format>,
    /// Decode FP4 weights to floats: bf16 or f32.
    #[arg(long, value_name = "DTYPE", value_parser = float)]
    decode_fp4: Option<Dtype>,
    /// Decode FP8 weights to floats: bf16 or f32, with their scales if they have any.
    #[arg(long, value_name = "DTYPE", value_parser = float)]
    decode_fp8: Option<Dtype>,
    /// Decode records of ggml other than FP4, such as Q4_K, to floats: bf16 or f32.
    #[arg(long, value_name = "DTYPE", value_parser = float)]
    decode_ggml: Option<Dtype>,
    /// Neither cast nor decode the weights of this name or pattern; may be repeated. Patterns have
    /// the syntax of `fp4 quantize --keep`. Weights that the dialect has no place for become bf16.
    #[arg(long, value_name = "PATTERN")]
    keep: Vec<String>,
    /// Allow folding a tensor scale into block scales to change values, for dialects without
    /// tensor scales.
    #[arg(long)]
    inexact: bool,
    /// Print what was done as JSON.
    #[arg(long)]
    json: bool,
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
    let mut remarks = Remarks::default();
    let checkpoint = arguments.input.open(&mut remarks)?;
    let options = WriteOptions {
        cast: arguments.format,
        decode_fp8: arguments.decode_fp8,
        decode_fp4: arguments.decode_fp4,
        decode_ggml: arguments.decode_ggml,
        inexact: arguments.inexact,
        ..WriteOptions::default()
    };
    let model = model(&checkpoint, &mut remarks)?;
    remarks.print();
    let reader = Reader::new(checkpoint.container());
    let planned = model.plan_keeping(dialect, &options, &reader, &arguments.keep);
    let planned = planned.map_err(|error| unheld(error, &model).of_option().during_run())?;
    let mut output = planned.create(&out, "convert", Start::Over)?;
    let copied = Copied::default();
    let written = write(&planned, &mut output, &model, &reader, &copied);
    let finished = written.and_then(|decoded| Ok((decoded, output.finish()?)));
    let (decoded, lost) = finished.map_err(CliError::during_run)?;
    remarks.warn_each(lost.iter().map(unconfirmed));
    copied.warn(&model, &mut remarks);
    remarks.note_each(changes(&planned.report(), dialect)?);
    remarks.note_each(kept_notes(&model, planned.kept()));
    remark(&model, dialect, &options, planned.kept(), &mut remarks)?;
    remarks.note_each(not_copied(&checkpoint, dialect));
    remarks.warn_each(missing_layers(&model));
    let mut report = Report::new(&model, dialect, &planned, decoded, remarks, next(&out));
    report.remarks.print_warnings();
    match arguments.json {
        true => print_json(&report),
        false => print(&report.text(&out)),
    }
}

/// Report of a conversion, and of what it changed.
#[derive(Serialize)]
struct Report {
    dialect: String,
    files: usize,
    tensors: usize,
    /// Bytes of all files with tensors, headers included.
    bytes: u64,
    /// Bytes of the tensors in them.
    tensor_bytes: u64,
    /// Changes, and whatever else is worth knowing, in sentences.
    #[serde(flatten)]
    remarks: Remarks,
    /// The errors of weights whose values changed, against the input, not the model before it.
    errors: Errors,
    /// The command that looks at what was written.
    next: String,
}

impl Report {
    fn new(
        model: &Model<'_>,
        dialect: &str,
        planned: &Planned<'_>,
        decoded: Vec<TallyAt>,
        mut remarks: Remarks,
        next: String,
    ) -> Self {
        let WriteReport { files, tensors, bytes: tensor_bytes, .. } = planned.report();
        let changed = planned.changed().iter().map(|&(at, values)| (at, Tally::of_values(values)));
        let measured = changed.chain(decoded).collect();
        let errors = Errors::of_quantized(model, &[], measured, &mut remarks);
        let (dialect, bytes) = (dialect.to_owned(), planned.length());
        Self { dialect, files, tensors, bytes, tensor_bytes, remarks, errors, next }
    }

    fn text(&self, out: &Path) -> String {
        let [tensors, files] =
            [(self.tensors, "tensor"), (self.files, "file")].map(|(n, noun)| counted(n, noun));
        let mut text = format!("{}: {tensors}, {files}, {}\n", out.display(), Size(self.bytes));
        for note in self.remarks.notes() {
            text.push_str(&format!("{}\n", wrapped(&format!("note: {note}"), width())));
        }
        match self.errors.count() {
            0 => {}
            count => {
                let changed = counted(count, "weight");
                let line =
                    format!("{changed} changed against the input: {}", self.errors.summary());
                text.push_str(&format!("{}\n", wrapped(&line, width())));
            }
        }
        text + "next: " + &self.next
    }
}

/// Writes the weights as they are: their tensors, or what another dialect makes of their codes and
/// scales. Returns the errors of those that are decoded to floats and changed by that.
fn write<'m>(
    planned: &Planned<'_>,
    output: &mut Output<'_>,
    model: &Model<'m>,
    reader: &Reader<'m>,
    copied: &Copied,
) -> Result<Vec<TallyAt>, CliError> {
    let mut decoded = Vec::new();
    let bar = progress::bytes(model.weights.iter().map(|weight| weight.bytes() as u64).sum(), 0);
    let _announced = Announced::new(&bar, "run the same command to start over");
    for (at, weight) in model.weights.iter().enumerate() {
        bar.set_message(weight.name.clone());
        match planned.copies(at) {
            true => {
                for piece in planned.pieces(at)? {
                    let bytes = piece.read(reader)?;
                    copied.look(model, at, &bytes);
                    output.put(&piece, &bytes)?;
                }
            }
            false => {
                let weight = reader.weight(weight)?;
                let dtype = planned.decoded_to(at);
                let error = dtype.and_then(|dtype| error_of_decoding(&weight, dtype));
                decoded.extend(error.filter(|error| error.values[0] > 0.0).map(|one| (at, one)));
                output.write(at, &weight)?;
            }
        }
        bar.inc(weight.bytes() as u64);
    }
    bar.finish_and_clear();
    Ok(decoded)
}

/// Warns that the file system has not confirmed that a result stays.
pub(crate) fn unconfirmed(error: &CheckpointError) -> Warning {
    let what = "the result is whole, but its name may be lost if power fails now";
    Warning::of_all("unconfirmed", format!("{error}: {what}"))
}

/// The dialect that is asked for, or that the name of the file says.
fn dialect_of(arguments: &Arguments) -> Result<&str, CliError> {
    match &arguments.dialect {
        Some(dialect) => Ok(dialect),
        None if is_gguf(&arguments.out) => Ok(GGUF),
        None => {
            let names = dialect::written().join(", ");
            let what =
                format!("nothing says which dialect to write; pass --dialect, one of {names}");
            Err(CliError::Conflict(what))
        }
    }
}

/// Adds notes and warnings about readers of the result.
fn remark(
    model: &Model<'_>,
    dialect: &str,
    options: &WriteOptions,
    kept: &[Kept],
    remarks: &mut Remarks,
) -> Result<(), CliError> {
    let (_, writer) = dialect::writer(dialect)?;
    let scaled = options.cast.is_none_or(|format| format.row().tensor_scale);
    if let Some(pair) = unlike_scales(model).first()
        && writer.fuses()
        && scaled
        && options.decode_fp4.is_none()
    {
        let [one, other] = pair.map(|at| &model.weights[at].name);
        let text = format!(
            "`{one}` and `{other}` have different tensor scales: engines that run both as one \
             scale one of them again, which changes its values"
        );
        let weights = vec![one.clone(), other.clone()];
        remarks.warn(Warning { kind: DefectKind::UnlikeScales.name(), weights, text });
    }
    let stays = |at: usize| {
        let kept = kept.iter().find(|kept| kept.weight == at);
        matches!(model.weights[at].value, Value::Fp4(_))
            && kept.map_or(options.decode_fp4.is_none(), |kept| kept.floats.is_none())
    };
    remarks.warn_each(packed_embedding(model, dialect, stays));
    if !model.weights.iter().any(|weight| weight.is_quantized()) {
        remarks.note("no weight is FP4; `fp4 quantize` makes them FP4");
    }
    if dialect == GGUF {
        remarks.note_each(readers::gguf_note(model));
    } else if model.gguf.is_some() {
        remarks.note(readers::from_gguf_note(model));
    }
    let becomes = |(at, weight): (usize, &Weight<'_>)| {
        let Value::Fp4(fp4) = &weight.value else { return None };
        let own = (fp4.format, fp4.block_size);
        match kept.iter().find(|kept| kept.weight == at) {
            Some(kept) => kept.floats.is_none().then_some(own),
            None if options.decode_fp4.is_some() => None,
            None => Some(options.cast.map_or(own, |cast| (cast, cast.row().block_size))),
        }
    };
    let formats: Vec<_> = model.weights.iter().enumerate().filter_map(becomes).collect();
    // The configs of a copy are the source's own.
    let changed = options.cast.is_some() || options.decode_fp4.is_some();
    let copied = !changed && model.quantization.dialect == dialect;
    if !copied && !formats.is_empty() {
        remarks.note_each(readers::notes(dialect, formats)?);
        remarks.note_each(readers::cache_note(dialect, model));
    }
    let packed: Vec<usize> = (0..model.weights.len()).filter(|&at| stays(at)).collect();
    let turned = packed.iter().map(|&at| &model.weights[at]).filter(|one| readers::is_turned(one));
    let turned: Vec<String> = turned.map(|weight| weight.name.clone()).collect();
    if copied || packed.is_empty() || model.gguf.is_some() {
        // There is nothing to say of another project's own files.
    } else if !turned.is_empty() {
        remarks.warn(readers::turned_warning(dialect, turned)?);
    } else {
        readers::remark_transformers(dialect, model, &packed, remarks);
    }
    Ok(())
}

/// The error of a weight that the dialect cannot hold, with the options that help.
fn unheld(error: CheckpointError, model: &Model<'_>) -> CliError {
    let CheckpointError::CannotHold { weight, .. } = &error else { return error.into() };
    if CliError::has_remedy(&error) {
        return error.into();
    }
    let found = model.weights.iter().find(|found| found.name == *weight);
    let other = holders(found);
    let decode = found.filter(|found| found.pre_quant_scale.is_none());
    let decode = decode.and_then(|found| match found.value {
        Value::Fp4(_) => Some("--decode-fp4 bf16"),
        Value::Fp8(_) => Some("--decode-fp8 bf16"),
        Value::Plain(_) => None,
    });
    let remedy = match decode {
        Some(decode) => {
            let pattern = pattern(weight);
            format!("use --keep '{pattern}' to write it as bf16, {decode}, or {other}")
        }
        None => format!("use {other}"),
    };
    CliError::Unheld { error: error.into(), remedy }
}

/// Says which weights are not changed as all others are, a line for each reason and pattern of
/// names.
fn kept_notes(model: &Model<'_>, kept: &[Kept]) -> Vec<String> {
    let why = |one: &Kept| {
        let weight = &model.weights[one.weight];
        let form = one.floats.map_or_else(|| weight.kind(), |dtype| dtype.to_string());
        format!("kept as {form}: {}", short_reason(&one.reason, &weight.name))
    };
    let named = kept.iter().map(|one| (model.weights[one.weight].name.as_str(), why(one)));
    let note = |folded: Folded| {
        let why = why(&kept[folded.members[0]]);
        match folded.members.len() {
            1 => format!("`{}`: {why}", folded.name),
            count => format!("{count} x `{}`: {why}", folded.name),
        }
    };
    fold(named).into_iter().map(note).collect()
}

/// Says what changed on the way to a dialect.
fn changes(report: &WriteReport, dialect: &str) -> Result<Vec<String>, CliError> {
    let (_, writer) = dialect::writer(dialect)?;
    let mut notes = Vec::new();
    let mut note = |count: u64, what: String| {
        if count > 0 {
            notes.push(what);
        }
    };
    let count = |count: u64, noun: &str| counted(count as usize, noun);
    let again = match report.inverted_inexactly {
        0 => String::new(),
        lost => format!("; converted back, {lost} of them differ in the last bit"),
    };
    let exactness = match report.inverted_rounded {
        0 => "without a change".to_owned(),
        rounded => format!(
            "of which {rounded} are rounded to f32, which changes values by {} at most{again}",
            Percent(100.0 * report.inverted_error)
        ),
    };
    let convention = match writer.scale_support().tensor_scale {
        ScaleConvention::Divisor => "divides by tensor scales, where the input multiplies by them",
        ScaleConvention::Multiplier | ScaleConvention::Folded => {
            "multiplies by tensor scales, where the input divides by them"
        }
    };
    let inverted = count(report.inverted, "reciprocal");
    note(report.inverted, format!("`{dialect}` {convention}: {inverted} written, {exactness}"));
    for (what, cast) in [("cast", report.cast), ("folded", report.folded)] {
        let (blocks, changed, values) = (cast.blocks, cast.changed_blocks, cast.changed_values);
        note(
            blocks,
            format!(
                "{} {what}: {} changed in {}",
                count(blocks, "block"),
                count(values, "value"),
                count(changed, "block")
            ),
        );
    }
    let left_out = report.input_scales_left_out;
    let scales = count(left_out, "input scale");
    note(left_out, format!("{scales} left out: this dialect has no place for them"));
    let dynamic = report.dynamic_inputs_left_out;
    note(dynamic, format!("the inputs of {} are no longer quantized", count(dynamic, "layer")));
    note(report.decoded, format!("{} decoded to floats", count(report.decoded, "weight")));
    Ok(notes)
}
