//! `llama quantize`: quantizes a folder to FP4.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use burn::nn::Linear;
use burn_fp4::checkpoints::dialect::{self, ScaleConvention};
use burn_fp4::{Fp4Config, Fp4Report, Method, Sse};
use llama::{Folder, Llama, QuantizeFolder, QuantizeOptions, QuantizedFolder, names};
use serde::Serialize;

use super::{DeviceOptions, TextOptions, is_gguf, print, saved_lines};

/// Quantize a model of any size; calibrate it on a text if the method needs it. In memory are one
/// decoder layer at a time (or the embedding, or the lm_head), the statistics of its inputs, and
/// the activations of all windows: about 16 bytes for each token and channel, or 32 with
/// --sequential and a correction.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder, dense or FP8.
    folder: PathBuf,
    /// Folder to create, or file that ends in .gguf.
    out: PathBuf,
    /// Recipe of `fp4 quantize` or `llama sensitivity --recipe`, instead of --format and --method.
    #[arg(
        long,
        value_name = "FILE.toml",
        conflicts_with_all = ["format", "method", "damping", "correction", "hadamard"],
    )]
    recipe: Option<PathBuf>,
    #[command(flatten)]
    options: QuantizeOptions,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Go on where an interrupted run of the same command stopped.
    #[arg(long)]
    resume: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Options of the saved folder.
#[derive(clap::Args)]
pub(crate) struct OutputOptions {
    /// Dialect of the tensors: compressed-tensors, modelopt, mlx, or another that `fp4 convert
    /// --help` lists. The default is that of the recipe, else fp-quant with --hadamard, gguf if OUT
    /// ends in .gguf, and compressed-tensors otherwise.
    #[arg(long)]
    dialect: Option<String>,
}

impl OutputOptions {
    /// Returns the dialect for a path, given the dialect of a recipe.
    ///
    /// # Errors
    /// GGUF alone is a file, whose name ends so.
    pub(crate) fn dialect_or(&self, of_recipe: Option<String>, out: &Path) -> Result<String> {
        let dialect = self.dialect.clone().or(of_recipe);
        let by_name = || if is_gguf(out) { "gguf" } else { "compressed-tensors" }.to_owned();
        let dialect = dialect.unwrap_or_else(by_name);
        let shown = out.display();
        ensure!(
            dialect != "gguf" || is_gguf(out),
            "{shown}: the dialect `gguf` is a file; end its name in .gguf, or pass another \
             --dialect"
        );
        ensure!(
            dialect == "gguf" || !is_gguf(out),
            "{shown}: the dialect `{dialect}` is a folder; rename it, or pass --dialect gguf"
        );
        Ok(dialect)
    }
}

/// Report of the quantization, and the time it took.
#[derive(Serialize)]
struct Report {
    quantized: Fp4Report,
    files: usize,
    bytes: u64,
    /// Time to open the folder and load the weights.
    load_seconds: f64,
    /// Time to calibrate, if the method needs it, and to quantize.
    quantize_seconds: f64,
    save_seconds: f64,
    /// Peak memory of the host over the whole run.
    peak_memory_mb: f64,
}

/// Returns true if a dialect has a place for tensor scales.
pub(crate) fn has_tensor_scales(dialect: &str) -> Result<bool> {
    let (_, writer) = dialect::writer(dialect)?;
    Ok(writer.scale_support().tensor_scale != ScaleConvention::Folded)
}

/// Returns the configuration and the dialect that the options or the recipe ask for.
fn configuration(arguments: &Arguments, model: &Llama<Linear>) -> Result<(Fp4Config, String)> {
    let Some(path) = &arguments.recipe else {
        let transforms = arguments.options.hadamard.map(|_| "fp-quant".to_owned());
        let dialect = arguments.output.dialect_or(transforms, &arguments.out)?;
        let mut config = arguments.options.config(model)?;
        if !has_tensor_scales(&dialect)? {
            let method = config.scheme.method;
            ensure!(
                method != Method::Sse(Sse::TensorScale),
                "--method {method}: the dialect `{dialect}` has no tensor scales; choose another \
                 method or --dialect"
            );
            config.share_scale.clear();
            config.scheme = config.scheme.without_tensor_scale();
        }
        return Ok((config, dialect));
    };
    let mut recipe = burn_fp4::Recipe::read(path)?;
    ensure!(
        recipe.calibration.is_none(),
        "{}: `calibration` is for `fp4 quantize`, but `llama quantize` calibrates on a text; \
         remove it",
        path.display()
    );
    let dialect = arguments.output.dialect_or(recipe.dialect.take(), &arguments.out)?;
    // The dialect decides if layers that engines fuse share a tensor scale.
    recipe.dialect = Some(dialect.clone());
    Ok((Fp4Config::of_recipe(&recipe, &names())?, dialect))
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let (config, dialect) = configuration(arguments, &Llama::new(&folder.config, &device)?)?;
    let job = QuantizeFolder {
        folder: &folder,
        config: &config,
        options: &arguments.options,
        tokens: &tokens,
        dialect: &dialect,
        device: &device,
        resume: arguments.resume,
    };
    let QuantizedFolder { report: quantized, files, bytes, seconds } = job.run(&arguments.out)?;
    let report = Report {
        quantized,
        files,
        bytes,
        load_seconds: seconds.load,
        quantize_seconds: seconds.quantize,
        save_seconds: seconds.save,
        peak_memory_mb: crate::peak_memory_mb(),
    };
    print(&report, arguments.json, || {
        let Report { quantized, load_seconds, quantize_seconds, .. } = &report;
        let Report { save_seconds, peak_memory_mb, .. } = &report;
        let Arguments { text, out, folder, device, .. } = arguments;
        let next = text.report_command(out, folder, device);
        let saved = saved_lines(&arguments.out, files, bytes, &next);
        format!(
            "{quantized}\n\
             load {load_seconds:.1} s, quantize {quantize_seconds:.1} s, save {save_seconds:.1} s, \
             peak memory {peak_memory_mb:.0} MB\n\
             {saved}"
        )
    })
}
