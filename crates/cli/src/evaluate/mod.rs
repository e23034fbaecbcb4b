//! `fp4 evaluate`: the errors of methods on weights and activations of a file.

mod evaluation;
mod plot;
mod tensors;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use burn_fp4_checkpoints::Container;
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::host::View;
use burn_fp4_search::{Gptq, Gram, Method, Metrics, SearchError, Statistics};

use crate::checkpoint::missing;
use crate::counted::counted;
use crate::error::CliError;
use crate::fold::natural;
use crate::listed::{file_ending, methods, one_of};
use crate::print::{note, print, print_json};
use crate::progress;
use crate::table::width;
use evaluation::{Evaluation, EvaluationResult, Figures, folded, table};
use tensors::{Matrix, matrix};

/// Compare methods on the weights of a file: the error of the weights, and of the outputs of their
/// layers.
///
/// For every tensor `<name>.weight` [out, in] the file has activations `<name>.calibration`
/// [any, in], which methods may use, and `<name>.evaluation` [any, in], which they may not.
///
/// If a method fails on a weight, all others are evaluated, and the error is printed at the end.
/// The exit code is 0 if none failed and 2 otherwise, also if nothing could be evaluated or drawn.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A safetensors or GGUF file of weights and activations: f32, f16 or bf16, or types of ggml
    /// that are decoded.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    // The help lists the methods.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = one_of::<MethodArg>(choices()),
        hide_possible_values = true,
        help = METHODS,
        long_help = methods(METHODS),
    )]
    methods: Vec<MethodArg>,
    /// Formats, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "nvfp4,mxfp4")]
    formats: Vec<Fp4Format>,
    /// Block sizes, separated by commas. The default is each format's own.
    #[arg(long, value_delimiter = ',')]
    blocks: Vec<usize>,
    /// Dampings of GPTQ to try, separated by commas: multiples of the mean of the diagonal of
    /// `X^T X`, which are added to it.
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true)]
    damping: Vec<f64>,
    /// Print a line for every weight. Otherwise names that differ in numbers alone are one line,
    /// with the means of their figures.
    #[arg(long)]
    all: bool,
    /// Draw the errors on the evaluation activations, after everything is printed.
    #[arg(long, value_name = "FILE.svg", value_parser = svg_file)]
    plot: Option<PathBuf>,
    /// Print a JSON array of objects instead of a table. A method that failed has an `error`
    /// instead of figures. Infinite figures are the texts "inf" and "-inf", and NaN is "nan".
    #[arg(long)]
    json: bool,
}

fn svg_file(name: &str) -> Result<PathBuf, String> {
    file_ending(name, &["svg"])
}

/// A method, or all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
enum MethodArg {
    All,
    One(Method),
}

/// The help of `--methods`.
const METHODS: &str = "Methods, separated by commas, or `all`, the default; methods with a star \
                       use the calibration activations";

/// The names that `--methods` takes.
fn choices() -> Vec<&'static str> {
    ["all"].into_iter().chain(Method::NAMED.map(|row| row.name)).collect()
}

impl FromStr for MethodArg {
    type Err = SearchError;

    fn from_str(name: &str) -> Result<Self, SearchError> {
        match name {
            "all" => Ok(Self::All),
            name => name.parse().map(Self::One),
        }
    }
}

/// A weight and the activations of its layer.
struct Layer {
    name: String,
    weight: Matrix,
    calibration: Matrix,
    evaluation: Matrix,
}

/// A method with its format, block size and damping.
#[derive(Clone, Copy)]
struct Combination {
    method: Method,
    format: Fp4Format,
    block: usize,
    damping: Option<f64>,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let combinations = arguments.combinations()?;
    let layers = layers(arguments)?;

    let bar = progress::bar(layers.len() * combinations.len());
    let mut evaluations = Vec::new();
    for layer in &layers {
        bar.set_message(format!("{}: activations", layer.name));
        let start = Instant::now();
        let calibrated = combinations.iter().any(|combination| combination.method.row().calibrated);
        let gram = calibrated.then(|| Gram::of(&layer.calibration.values, layer.weight.cols));
        let gram_seconds = start.elapsed().as_secs_f64();
        for combination in &combinations {
            bar.set_message(format!(
                "{} {} {}",
                layer.name, combination.format, combination.method
            ));
            evaluations.push(evaluate(layer, *combination, gram.as_ref(), gram_seconds));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    let rows = if arguments.all { evaluations.clone() } else { folded(&evaluations) };
    match arguments.json {
        true => print_json(&evaluations)?,
        false => print(&table(&rows, width()))?,
    }
    if let Some(path) = &arguments.plot {
        plot::draw(path, &rows)?;
    }
    failures(&evaluations)
}

/// Errors that are told of the evaluations that failed.
const TOLD: usize = 5;

/// Tells each error once, with the methods that it stopped.
fn failures(evaluations: &[Evaluation]) -> Result<(), CliError> {
    let mut errors: Vec<(&str, Vec<String>)> = Vec::new();
    let failed = evaluations.iter().filter_map(|one| Some((one.error()?, one.label())));
    for (error, method) in failed.clone() {
        match errors.iter_mut().find(|(known, _)| *known == error) {
            Some((_, methods)) if methods.contains(&method) => {}
            Some((_, methods)) => methods.push(method),
            None => errors.push((error, vec![method])),
        }
    }
    if errors.is_empty() {
        return Ok(());
    }
    let told = errors.iter().take(TOLD);
    let told = told.map(|(error, methods)| format!("{}: {error}", methods.join(", ")));
    let mut told = told.collect::<Vec<_>>().join("; ");
    if errors.len() > TOLD {
        let more = counted(errors.len() - TOLD, "more error");
        told.push_str(&format!("; and {more} (--json lists all)"));
    }
    Err(CliError::Failed { failed: failed.count(), of: evaluations.len(), errors: told })
}

impl Arguments {
    /// Every method with every format and block size it is defined for. What was asked for by name
    /// but does not go together is reported.
    fn combinations(&self) -> Result<Vec<Combination>, CliError> {
        let by_name = !self.methods.is_empty() && !self.methods.contains(&MethodArg::All);
        let wanted = |method: &Method| !by_name || self.methods.contains(&MethodArg::One(*method));
        let named = Method::NAMED.into_iter().map(|row| row.method);
        let methods: Vec<_> = named.filter(wanted).collect();
        let mut combinations = Vec::new();
        let mut refused = Vec::new();
        for &format in &self.formats {
            let own = [format.row().block_size];
            let blocks = if self.blocks.is_empty() { &own[..] } else { &self.blocks };
            for &block in blocks {
                format
                    .check_block_size(block)
                    .map_err(|error| CliError::Nothing(error.to_string()))?;
                for &method in &methods {
                    if method.row().formats.contains(&format) {
                        let combination = |damping| Combination { method, format, block, damping };
                        if method.gptq().is_some() && !self.damping.is_empty() {
                            combinations.extend(
                                self.damping.iter().map(|&damping| combination(Some(damping))),
                            );
                        } else {
                            combinations.push(combination(None));
                        }
                    } else {
                        refused.push(format!("{method} is not defined for {format} {block}"));
                    }
                }
            }
        }
        if combinations.is_empty() {
            return Err(CliError::Nothing(refused.join(", ")));
        }
        if by_name {
            refused.iter().for_each(note);
        }
        if !self.damping.is_empty()
            && combinations.iter().all(|combination| combination.damping.is_none())
        {
            let gptq = Method::NAMED.into_iter().filter(|row| row.method.gptq().is_some());
            let names: Vec<_> = gptq.map(|row| row.name).collect();
            let names = names.join(" and ");
            note(format!("--damping is for {names}, and neither is evaluated"));
        }
        Ok(combinations)
    }
}

fn layers(arguments: &Arguments) -> Result<Vec<Layer>, CliError> {
    if arguments.file.is_dir() {
        return Err(CliError::Folder { path: arguments.file.clone() });
    }
    let file = Container::open(&arguments.file).map_err(|error| missing(&arguments.file, error))?;
    let mut names: Vec<String> = file.tensors().map(|tensor| tensor.name.into_owned()).collect();
    names.sort_by(|a, b| natural(a).cmp(&natural(b)));
    let weights: Vec<_> = names.iter().filter_map(|name| name.strip_suffix(".weight")).collect();
    if weights.is_empty() {
        let found = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
        return Err(CliError::NoWeights { path: arguments.file.clone(), found });
    }
    weights
        .into_iter()
        .map(|name| {
            let weight_name = format!("{name}.weight");
            let weight = matrix(&file, &weight_name, None)?;
            let of = Some((weight_name.as_str(), weight.cols));
            let activations = |kind| matrix(&file, &format!("{name}.{kind}"), of);
            let (calibration, evaluation) =
                (activations("calibration")?, activations("evaluation")?);
            Ok(Layer { name: name.to_owned(), weight, calibration, evaluation })
        })
        .collect()
}

fn evaluate(
    layer: &Layer,
    combination: Combination,
    gram: Option<&Result<Gram, SearchError>>,
    gram_seconds: f64,
) -> Evaluation {
    let Combination { method, format, block, damping } = combination;
    let outcome = match measure(layer, combination, gram, gram_seconds) {
        Ok(figures) => EvaluationResult::Measured(figures),
        Err(error) => EvaluationResult::Failed { error: error.to_string() },
    };
    Evaluation { name: layer.name.clone(), format, block, method, damping, outcome }
}

fn measure(
    layer: &Layer,
    combination: Combination,
    gram: Option<&Result<Gram, SearchError>>,
    gram_seconds: f64,
) -> Result<Figures, CliError> {
    let Combination { method, format, block, damping } = combination;
    let weight = &layer.weight;
    let named = |kind: &str| {
        let name = format!("{}.{kind}", layer.name);
        move |source| CliError::Tensor { name: name.clone(), source }
    };
    let gram = match gram {
        Some(gram) if method.row().calibrated => {
            Some(gram.as_ref().map_err(SearchError::clone).map_err(named("calibration"))?)
        }
        _ => None,
    };
    if gram.is_some() && layer.calibration.values.iter().all(|&value| value == 0.0) {
        let name = &layer.name;
        return Err(CliError::Conflict(format!(
            "tensor `{name}.calibration`: every value is 0, so a method cannot choose by it; \
             record activations of `{name}.weight` again"
        )));
    }
    let start = Instant::now();
    let Matrix { values, rows, cols, .. } = weight;
    let tuned = match (damping, method.gptq()) {
        (Some(damping), Some(options)) => Gptq { damping, ..options }.into(),
        _ => method,
    };
    let statistics = gram.map_or(Statistics::None, Statistics::Gram);
    let (view, scheme) = (View::rows(*rows, *cols), method.scheme(format, block));
    let packed = tuned.quantize_view(values, view, &scheme, statistics);
    let packed = packed.map_err(named("weight"))?;
    let seconds = start.elapsed().as_secs_f64();
    let seconds = if method.row().calibrated { seconds + gram_seconds } else { seconds };
    let metrics = Metrics::of(&weight.values, &packed).map_err(named("weight"))?;
    let output = |activations: &Matrix, kind| {
        Metrics::output_error_percent(&weight.values, &packed, &activations.values)
            .map_err(named(kind))
    };
    Ok(Figures {
        weight_error_percent: metrics.weight_error_percent,
        calibration_error_percent: output(&layer.calibration, "calibration")?,
        evaluation_error_percent: output(&layer.evaluation, "evaluation")?,
        sqnr_db: metrics.sqnr_db,
        seconds,
    })
}
