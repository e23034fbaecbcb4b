//! `fp4 quantize`: a checkpoint of any size becomes one in FP4.
//!
//! | file            | what it holds                                                       |
//! |-----------------|---------------------------------------------------------------------|
//! | `options.rs`    | the choices of a user, on the command line or in a recipe           |
//! | `device.rs`     | the device on which matrices are quantized                          |
//! | `engine.rs`     | the engine that quantizes them there                                |
//! | `kernels.rs`    | matrices quantized by the kernels of a device                       |
//! | `plan.rs`       | the plan for every tensor                                           |
//! | `jobs.rs`       | the work in parts, and the memory of each                           |
//! | `group.rs`      | weights that are quantized together                                 |
//! | `statistics.rs` | statistics of the inputs of layers, in a file                       |
//! | `matrix.rs`     | a group of weights: read, and quantized                             |
//! | `readahead.rs`  | advice to the system about reads that follow                        |
//! | `pipeline.rs`   | reading ahead, quantizing, writing behind                           |
//! | `budget.rs`     | a semaphore over the bytes of memory that these share               |

mod budget;
mod device;
mod engine;
mod group;
mod jobs;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod kernels;
mod matrix;
mod options;
mod pipeline;
mod plan;
mod readahead;
mod statistics;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use burn_fp4_checkpoints::selection::{Matrices, Selection};
use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Dtype, Model, Output, Planned, Reader, Start, Value, Weight,
    WriteOptions, missing_layers, planned_defects,
};
use burn_fp4_policy::{Recipe, RecipeFile};
use burn_fp4_search::Fp4Scheme;
use chrono::{DateTime, Utc};

use crate::accuracy::{Errors, TallyAt};
use crate::checkpoint::{Input, model, not_copied, target};
use crate::convert::unconfirmed;
use crate::error::CliError;
use crate::finite::Copied;
use crate::interrupt::Announced;
use crate::print::{next, print, print_json, say};
use crate::progress;
use crate::readers;
use crate::remarks::Remarks;
use crate::size::Size;
use crate::table::{width, wrapped};
use crate::unheld::{holders, pattern};
use crate::unmet::unmet;
use crate::warnings::help;
use budget::Budget;
use device::Device;
use engine::Engine;
use jobs::{Job, jobs};
use matrix::Quantizer;
use options::{Options, ResolvedOptions};
use pipeline::{Work, noted};
use plan::Report;
use readahead::{Readahead, StopOnDrop};
use statistics::{MADE_BY, StatisticsFile};

/// Quantize the weights of a checkpoint to 4 bits.
///
/// INPUT is a safetensors file, a folder of a Hugging Face model or a GGUF file of any size, in
/// f64, f32, f16, bf16 or FP8; of GGUF also the types that `fp4 formats` lists. One weight after
/// another passes through memory. OUT appears only when it is complete. Start with --dry-run, which
/// shows the plan for every weight.
///
/// `config.json` names the architecture, which says what is a linear layer. If it is not known,
/// names and shapes decide, and a warning says so.
///
/// vLLM, SGLang and TensorRT-LLM run query, key and value as one layer, and gate and up. Dialects
/// for them keep or quantize these together, with one tensor scale.
///
/// The last lines are the mean and the largest error. The error of a weight is |Q - W| / |W|; in
/// the mean each quantized weight counts once, whatever its size. `fp4 compare` has the same mean.
#[derive(clap::Args)]
#[command(after_long_help = [&readers::table(), help(), EXAMPLES].join("\n\n"))]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,
    /// The folder to make, or the file (.gguf) for GGUF. Nothing may exist there.
    #[arg(long, value_name = "PATH", required_unless_present = "dry_run")]
    out: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
    /// A TOML file with any of the options from --format to --calibration, without their dashes:
    /// `preset = "mlp-only"`, `keep = ["*.o_proj"]`. The command line replaces the choices of the
    /// file, with a note that names them; --keep adds to its `keep`, and --preset and --only each
    /// replace both. Only a file can choose another format, block size, method or rule for
    /// some of the weights, or keep them dense, in tables `[[weights]]` with their `names`. If
    /// several tables name a weight, the last one wins. Only a file can say with `together` whether
    /// layers that run as one stay together, whatever the dialect is. A path of `calibration` in it
    /// is relative to its own folder. `save_recipe` of burn-fp4 writes such a file.
    #[arg(long, value_name = "FILE.toml")]
    recipe: Option<PathBuf>,
    /// Where weights are quantized. The result has the same bytes everywhere.
    #[arg(long, value_enum, default_value_t)]
    device: Device,
    /// The most memory to use, such as 2GB, without what CUDA takes for itself. The default is
    /// twice what the largest group of weights takes with its statistics, and 256 MB.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    memory: Option<Size>,
    /// Print the plan for every weight, and stop. Names that differ in numbers alone are one line,
    /// and so are vectors.
    #[arg(long)]
    dry_run: bool,
    /// With --dry-run: a line for every tensor.
    #[arg(long, requires = "dry_run")]
    all: bool,
    /// Cast the matrices that stay in f32 or f64, such as embeddings, to bf16 or f16. The default
    /// leaves them in their dtype. A value beyond the range of the new dtype is an error, and a
    /// matrix that the cast changes by more than 1 % is warned of.
    #[arg(long, value_name = "DTYPE", value_parser = narrow)]
    cast_kept: Option<Dtype>,
    /// Go on where an interrupted run of the same command stopped.
    #[arg(long)]
    resume: bool,
    /// Print the plan, or what was done with its errors, as JSON.
    #[arg(long)]
    json: bool,
}

/// Commands for a new user.
const EXAMPLES: &str = "\
Examples:
  fp4 quantize Qwen3-8B --dry-run
  fp4 quantize Qwen3-8B --out Qwen3-8B-NVFP4
  fp4 quantize Qwen3-8B --out Qwen3-8B-MXFP4 --format mxfp4 --keep '*.o_proj'
  fp4 quantize model-f16.gguf --out nvfp4.gguf --method sse-weighted \\
    --calibration imatrix.gguf";

/// The remedy after a signal has ended a run.
const RESUME: &str = "run the same command with --resume to go on";

/// Memory of the program without weights: code, headers, buffers, the stacks of threads.
const OWN_MEMORY: u64 = 64 << 20;
/// Memory that the default allows beyond the largest group twice.
const ROOM: u64 = 256_000_000;

fn narrow(name: &str) -> Result<Dtype, String> {
    match name {
        "bf16" => Ok(Dtype::BF16),
        "f16" => Ok(Dtype::F16),
        _ => Err("expected bf16 or f16".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let mut remarks = Remarks::default();
    let checkpoint = arguments.input.open(&mut remarks)?;
    let model = model(&checkpoint, &mut remarks)?;
    remarks.print();
    let file = arguments.recipe.as_ref().map(RecipeFile::read).transpose()?;
    let recipe = arguments.options.with_recipe(file.as_ref(), &mut remarks)?;
    let out_path = arguments.out.as_deref();
    let mut resolved = ResolvedOptions::of(recipe, file.as_ref(), &model, out_path)?;
    resolved.cast_kept = arguments.cast_kept;
    let dialect = resolved.dialect();
    let out = out(arguments, dialect)?;
    let selection = Selection::of(&model, &resolved.policy);
    let mut selection = selection.map_err(|error| arguments.options.blame(error, file.as_ref()))?;
    let refused = match refusal(&mut selection, &model) {
        Some(refused) if !arguments.dry_run => return Err(refused),
        // The plan is shown before.
        refused => refused,
    };
    let schemes = options::schemes(&selection);
    let statistics = resolved.policy.recipe().calibration.as_deref();
    let statistics = statistics.map(StatisticsFile::open).transpose()?;
    check_statistics(&model, &selection, &schemes, statistics.as_ref())?;
    let (outline, reader) = (selection.outline(&model), Reader::new(checkpoint.container()));
    let options = WriteOptions { cast_floats: arguments.cast_kept, ..WriteOptions::default() };
    let planned = outline.plan_reading(dialect, &options, &reader)?;
    let before = checkpoint.container().files().map(|(_, bytes)| bytes).sum();
    let mut report =
        Report::new(&resolved, arguments.device, &model, &outline, &selection, &planned, before);
    let statistics = statistics.as_ref();
    let jobs = jobs(&model, &selection, &planned, statistics);
    let memory = memory(arguments.memory, &model, &jobs)?;
    let readahead = Readahead::default();
    thread::scope(|scope| {
        let _stop = StopOnDrop(&readahead);
        let advise =
            |jobs: Vec<_>| scope.spawn(|| readahead.advise(&model, jobs.into_iter(), &reader));
        if !arguments.dry_run && !arguments.resume {
            // While the device is made ready.
            advise(jobs.iter().collect());
        }
        let engine = Engine::open(arguments.device)?;
        let quantizer = Quantizer::new(&engine, statistics);
        quantizer.check(&model, &jobs)?;
        resolved.remark(&model, &selection, &schemes, statistics, &mut remarks)?;
        let notes = [not_copied(&checkpoint, dialect), wide_note(&outline, &planned)];
        remarks.note_each(notes.into_iter().flatten());
        remarks.warn_each(&selection.warnings);
        let planned_defects = planned_defects(&outline, &selection.groups, dialect);
        remarks.warn_each(missing_layers(&model).into_iter().chain(planned_defects));
        if refused.is_none() {
            remarks.warn_each(unmet(&model, &selection.decisions));
        }
        remarks.print();
        if !arguments.dry_run && !selection.warnings.is_empty() {
            // Nothing else shows the plan that they are about.
            say(report.table(false, width()));
        }
        let out = match &out {
            Some(out) if !arguments.dry_run => out,
            _ => {
                print_plan(&report, &remarks, arguments)?;
                return refused.map_or(Ok(()), Err);
            }
        };
        let start = if arguments.resume { Start::Resume } else { Start::First };
        let output = planned.create(out, &task(&checkpoint, &resolved)?, start)?;
        remarks.note_each(start_note(start, &output, &model));
        remarks.print_notes();
        let todo = |job: &&Job| !job.weights.iter().all(|&at| output.is_done(at));
        let todo: Vec<&Job> = jobs.iter().filter(todo).collect();
        if arguments.resume {
            advise(todo.clone());
        }
        let (all, left) = (bytes(jobs.iter()), bytes(todo.iter().copied()));
        let bar = progress::bytes(all, all - left);
        let announced = Announced::new(&bar, RESUME);
        let copied = Copied::noted(&output);
        let work = Work {
            reader,
            model: &model,
            outline: &outline,
            planned: &planned,
            jobs: &todo,
            quantizer: &quantizer,
            budget: &Budget::new(memory),
            readahead: &readahead,
            bar: &bar,
            copied: &copied,
        };
        let (error, measured) = write(&work, output)?;
        drop(announced);
        remarks.warn_each(error.iter().map(unconfirmed));
        copied.warn(&model, &mut remarks);
        let unusable = quantizer.warn(&mut remarks);
        let is_cast = |(at, _): &TallyAt| planned.decoded_to(*at).is_some();
        let (cast, measured): (Vec<_>, Vec<_>) = measured.into_iter().partition(is_cast);
        remarks.warn_each(report.fell_back(&model, &measured));
        let errors = Errors::of_quantized(&model, &selection.groups, measured, &mut remarks);
        errors.warn_of_outputs(&unusable, &mut remarks);
        let cast = Errors::of_casts(&model, cast, &mut remarks);
        finish(arguments.json, out, &report, remarks, errors, cast)
    })
}

/// Returns the weights that a run without options would quantize, and the error that would end it.
/// `None` if the run would be refused before.
pub(crate) fn by_default(model: &Model<'_>) -> Option<(Selection, Option<CliError>)> {
    let resolved = ResolvedOptions::of(Recipe::default(), None, model, None).ok()?;
    let mut selection = Selection::of(model, &resolved.policy).ok()?;
    let refused = refusal(&mut selection, model);
    Some((selection, refused))
}

/// The path to write to, if it is given.
fn out(arguments: &Arguments, dialect: &str) -> Result<Option<PathBuf>, CliError> {
    let out = arguments.out.as_deref().map(|out| target(out, dialect)).transpose();
    out.map_err(|error| match error {
        CliError::Checkpoint(CheckpointError::TargetExists { path }) if arguments.resume => {
            CliError::NothingToResume { path }
        }
        error => error,
    })
}

/// The note on what an earlier run has left.
fn start_note(start: Start, output: &Output<'_>, model: &Model<'_>) -> Option<&'static str> {
    let done = (0..model.weights.len()).any(|at| output.is_done(at));
    if start == Start::Resume && !done {
        Some("no earlier run has left weights to go on from; all are quantized")
    } else if output.restarts() {
        Some("an earlier run left no weight on the disk; this one starts over")
    } else {
        None
    }
}

/// Prints the plan for every weight.
fn print_plan(report: &Report, remarks: &Remarks, arguments: &Arguments) -> Result<(), CliError> {
    if arguments.json {
        return print_json(&Done { plan: report, remarks, errors: None, cast: None, next: None });
    }
    let summary = wrapped(&report.summary(), width());
    print(format!("{}\n{summary}", report.table(arguments.all, width())).trim_start())
}

/// The note on a result that is mostly matrices of wide floats.
fn wide_note(outline: &Model<'_>, planned: &Planned<'_>) -> Option<String> {
    let is_wide = |at: &usize| match &outline.weights[*at].value {
        Value::Plain(tensor) => tensor.is_wide_matrix() && planned.decoded_to(*at).is_none(),
        Value::Fp8(_) | Value::Fp4(_) => false,
    };
    let bytes = planned.bytes();
    let wide: u64 = (0..bytes.len()).filter(is_wide).map(|at| bytes[at]).sum();
    let share = 100.0 * wide as f64 / planned.length().max(1) as f64;
    (share > 50.0).then(|| {
        format!(
            "{share:.0} % of the result are matrices that stay in f32 or f64; pass --cast-kept \
             bf16 to make them smaller"
        )
    })
}

/// Keeps the weights that the dialect cannot hold. Returns the error of the first of them, or that
/// nothing is quantized.
fn refusal(selection: &mut Selection, model: &Model<'_>) -> Option<CliError> {
    let wanted = selection.outline(model);
    let held = selection.keep_unheld(model).map_err(|error| unheld(error, &wanted));
    held.and_then(|()| Ok(selection.check_not_empty(model)?)).err()
}

/// The error of a weight that the dialect cannot hold, with the options that help: --keep with its
/// name, where numbers of layers become stars, and the dialects that hold it.
fn unheld(error: CheckpointError, wanted: &Model<'_>) -> CliError {
    let CheckpointError::CannotHold { weight, .. } = &error else { return error.into() };
    let weight = weight.as_str();
    let found = wanted.weights.iter().find(|found| found.name == weight);
    let (other, keep) = (holders(found), pattern(weight));
    let wide = found.is_some_and(|found| match &found.value {
        Value::Fp4(fp4) => fp4.block_size != fp4.format.row().block_size,
        Value::Plain(_) | Value::Fp8(_) => false,
    });
    let cannot = |what: &str| {
        matches!(&error, CheckpointError::CannotHold { what: found, .. }
        if *found == what)
    };
    let has_stacks = wanted.weights.iter().any(|weight| weight.shape().len() > 2);
    let remedy = match wide {
        _ if cannot(CheckpointError::NOT_MXFP4) => format!("use --format mxfp4, or {other}"),
        _ if cannot(CheckpointError::NOT_EXPERTS) && has_stacks => {
            format!("use --preset experts-only, or {other}")
        }
        _ if cannot(CheckpointError::NOT_EXPERTS) => {
            format!("the model has no stacked experts; use {other}")
        }
        true => format!("leave out the block size, or use {other}"),
        false => format!("use --keep '{keep}' to leave it dense, or {other}"),
    };
    CliError::Unheld { error: error.into(), remedy }
}

/// Says what was made, how good it is, and what to type next.
fn finish(
    json: bool,
    out: &Path,
    report: &Report,
    mut remarks: Remarks,
    errors: Errors,
    cast: Errors,
) -> Result<(), CliError> {
    remarks.print();
    if json {
        let cast = Some(cast).filter(|cast| cast.count() > 0);
        let (errors, next) = (Some(errors), Some(next(out)));
        return print_json(&Done { plan: report, remarks: &remarks, errors, cast, next });
    }
    let made = format!("{}: {}", out.display(), report.summary());
    let [made, errors] = [made, errors.summary()].map(|line| wrapped(&line, width()));
    print(&format!("{made}\n{errors}\nnext: {}", next(out)))
}

/// Report of a run as JSON: the plan, the warnings and notes, and the errors.
#[derive(serde::Serialize)]
struct Done<'r> {
    #[serde(flatten)]
    plan: &'r Report,
    #[serde(flatten)]
    remarks: &'r Remarks,
    /// None: nothing is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<Errors>,
    /// The errors of matrices that stay and are cast.
    #[serde(skip_serializing_if = "Option::is_none")]
    cast: Option<Errors>,
    /// The command that looks at what was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Bytes of jobs.
fn bytes<'j>(jobs: impl Iterator<Item = &'j Job>) -> u64 {
    jobs.map(|job| job.bytes).sum()
}

/// Does the work. Returns what the file system has not confirmed at its end, and the errors of
/// weights that are quantized or cast, also those that an earlier run has noted.
fn write(
    work: &Work<'_, '_>,
    mut output: Output<'_>,
) -> Result<(Option<CheckpointError>, Vec<TallyAt>), CliError> {
    let mut measured = noted(&output);
    let done = pipeline::run(work, &mut output);
    work.bar.finish_and_clear();
    let interrupted = |error: CliError, partial: &Path| {
        let (error, partial) = (Box::new(error), partial.to_owned());
        CliError::Interrupted { error, partial }
    };
    match done.map_err(CliError::during_run) {
        Ok(errors) => {
            let partial = output.keep().to_owned();
            let unconfirmed = output.finish();
            let unconfirmed = unconfirmed.map_err(|error| interrupted(error.into(), &partial))?;
            // A group that was half done is quantized again, and measured.
            measured.extend(errors);
            Ok((unconfirmed, measured.into_iter().collect()))
        }
        // What a user has to change makes another task; a machine may do better the next time.
        Err(error) if error.exit_code() == 3 => Err(interrupted(error, output.keep())),
        Err(error) => Err(match output.stays() {
            Some(partial) => {
                let partial = partial.to_owned();
                CliError::PartialKept { error: Box::new(error), partial }
            }
            None => error,
        }),
    }
}

/// Every weight to be quantized by a calibrated method has statistics that it can use.
fn check_statistics(
    model: &Model<'_>,
    selection: &Selection,
    schemes: &[Fp4Scheme],
    statistics: Option<&StatisticsFile>,
) -> Result<(), CliError> {
    let groups = selection.groups.iter().zip(schemes);
    let calibrated = groups.filter(|(_, how)| how.method.row().calibrated);
    let weights = |(group, how): (&Vec<usize>, &Fp4Scheme)| {
        let how = *how;
        let of = |&at: &usize| (&model.weights[at], how);
        group.iter().map(of).collect::<Vec<_>>()
    };
    let chosen: Vec<(&Weight<'_>, Fp4Scheme)> = calibrated.flat_map(weights).collect();
    let Some((_, Fp4Scheme { method, .. })) = chosen.first() else { return Ok(()) };
    let Some(statistics) = statistics else {
        let what = format!(
            "method `{method}` needs input statistics; pass --calibration FILE, which {MADE_BY} \
             writes from a model and a text, `llama sensitivity` with --save-calibration, and \
             Burn with `Calibration::save`; `llama quantize` calibrates on a text itself"
        );
        return Err(CliError::Conflict(what));
    };
    statistics.check_any(&chosen.iter().map(|(weight, _)| *weight).collect::<Vec<_>>())?;
    for (weight, how) in chosen {
        let matrices = Matrices::of(model, weight);
        statistics.check(&weight.name, [matrices.stacked, matrices.cols], &how)?;
    }
    Ok(())
}

/// The memory that weights may take.
fn memory(asked: Option<Size>, model: &Model<'_>, jobs: &[Job]) -> Result<u64, CliError> {
    let largest = jobs.iter().max_by_key(|job| job.memory);
    let Some(largest) = largest else { return Ok(0) };
    let allowed = asked.map_or(2 * largest.memory + ROOM, |size| size.0);
    match allowed.checked_sub(OWN_MEMORY).filter(|left| *left >= largest.memory) {
        Some(left) => Ok(left),
        None => Err(CliError::Memory {
            weight: model.weights[largest.weights[0]].name.clone(),
            // The size that is shown has to be enough.
            needed: Size(largest.memory + OWN_MEMORY).rounded_up(),
            found: Size(allowed),
        }),
    }
}

/// Describes all choices that decide about the bytes written, one in each part, in the words of the
/// command line. A resumed run compares the parts and names the first that differs.
fn task(checkpoint: &Checkpoint, resolved: &ResolvedOptions) -> Result<String, CliError> {
    // Statistics that no method needs only measure.
    let calibrated = |file: PathBuf| resolved.is_calibrated().then_some(file);
    let mut settings = resolved.settings();
    settings.calibration = settings.calibration.and_then(calibrated);
    let calibration = settings.calibration.clone();
    let options = settings.as_options().join("; ");
    let mut task = format!("{options}; an input in the dialect {}", checkpoint.dialect());
    let container = checkpoint.container();
    let files = container.files().map(|(path, _)| path.to_owned());
    let configs: Vec<_> = container.configs().collect();
    for path in files.chain(configs.clone()).chain(calibration) {
        let file = |source| CliError::File { path: path.clone(), source };
        let metadata = std::fs::metadata(&path).map_err(file)?;
        let state = match configs.contains(&path) {
            // Small enough to be compared by its text: only that decides.
            true => {
                let mut hasher = DefaultHasher::new();
                std::fs::read(&path).map_err(file)?.hash(&mut hasher);
                format!("whose text has the hash {:016x}", hasher.finish())
            }
            false => {
                let modified = metadata.modified().map_err(file)?;
                let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
                format!("modified at {}", utc(since))
            }
        };
        let (path, length) = (path.display(), metadata.len());
        task.push_str(&format!("; {path} of {length} bytes, {state}"));
    }
    Ok(task)
}

/// Returns the date and the time in UTC that are a duration after 1970-01-01, to the nanosecond.
/// Journals hold it: another text would end the resuming of runs from before.
fn utc(since: Duration) -> String {
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let time = DateTime::from_timestamp(seconds, since.subsec_nanos());
    time.unwrap_or(DateTime::<Utc>::MAX_UTC).format("%F %T%.9f UTC").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_file_is_in_utc_to_the_nanosecond() {
        let since = Duration::new(11_016 * 24 * 60 * 60 + 3 * 3600 + 4 * 60 + 5, 60_000);
        assert_eq!(utc(since), "2000-02-29 03:04:05.000060000 UTC");
        assert_eq!(utc(Duration::ZERO), "1970-01-01 00:00:00.000000000 UTC");
        // Beyond the last year that is known.
        assert!(utc(Duration::MAX).ends_with("UTC"));
    }
}
