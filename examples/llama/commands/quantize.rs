//! `llama quantize`: a folder becomes one in FP4.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::nn::Linear;
use burn_fp4::{Fp4Config, Fp4Report, WriteReport};
use llama::{Folder, Llama, Recipe, names};
use serde::Serialize;

use super::{Text, Where, print};

/// Quantize a model, calibrated on a text if the method needs it.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face, dense or FP8.
    folder: PathBuf,
    /// The folder to make.
    out: PathBuf,
    /// A recipe of `fp4 quantize`, as `llama sensitivity --recipe` saves one, instead of --format
    /// and --method.
    #[arg(
        long = "recipe",
        value_name = "FILE.toml",
        conflicts_with_all = ["format", "method", "damping"],
    )]
    file: Option<PathBuf>,
    #[command(flatten)]
    recipe: Recipe,
    #[command(flatten)]
    saved: Saved,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    place: Where,
    /// Print an object instead of a table.
    #[arg(long)]
    json: bool,
}

/// How a model is saved.
#[derive(clap::Args)]
pub(crate) struct Saved {
    /// How tensors are named and laid out: compressed-tensors, modelopt, mlx and others that
    /// `fp4 convert --help` lists; without, as a recipe says, or compressed-tensors.
    #[arg(long)]
    dialect: Option<String>,
}

impl Saved {
    /// The dialect to save in, where a recipe may name one.
    pub(crate) fn dialect_or(&self, of_recipe: Option<String>) -> String {
        let said = self.dialect.clone().or(of_recipe);
        said.unwrap_or_else(|| "compressed-tensors".to_owned())
    }
}

/// What became of each weight, and what was written.
#[derive(Serialize)]
struct Report {
    quantized: Fp4Report,
    files: usize,
    bytes: u64,
    /// To open the folder and load the weights.
    load_seconds: f64,
    /// To calibrate, if the method needs it, and to quantize.
    quantize_seconds: f64,
    save_seconds: f64,
    /// Of the host, over the whole run.
    peak_memory_mb: f64,
}

/// What of a model is quantized, and how, and the dialect to save it in.
fn chosen(arguments: &Arguments, model: &Llama<Linear>) -> Result<(Fp4Config, String)> {
    let Some(path) = &arguments.file else {
        return Ok((arguments.recipe.config(model), arguments.saved.dialect_or(None)));
    };
    let mut recipe = burn_fp4::Recipe::read(path)?;
    ensure!(
        recipe.calibration.is_none(),
        "{}: `calibration` is for `fp4 quantize`: leave it out, this calibrates on a text",
        path.display()
    );
    let dialect = arguments.saved.dialect_or(recipe.dialect.take());
    // Whether layers that run as one go together depends on it.
    recipe.dialect = Some(dialect.clone());
    Ok((Fp4Config::of_recipe(&recipe, model, &names())?, dialect))
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.place.device()?;
    let mut start = Instant::now();
    let mut lap = || -> Result<f64> {
        device.sync()?;
        let seconds = start.elapsed().as_secs_f64();
        start = Instant::now();
        Ok(seconds)
    };
    let folder = Folder::open(&arguments.folder)?;
    let (mut model, _) = folder.load::<Linear>(&device)?;
    let load_seconds = lap()?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let (config, dialect) = chosen(arguments, &model)?;
    let quantized = arguments.recipe.apply(&mut model, &config, &tokens, &device)?;
    let quantize_seconds = lap()?;
    let WriteReport { files, bytes, .. } = folder.save(&model, &arguments.out, &dialect)?;
    let report = Report {
        quantized,
        files,
        bytes,
        load_seconds,
        quantize_seconds,
        save_seconds: lap()?,
        peak_memory_mb: crate::peak_memory_mb(),
    };
    print(&report, arguments.json, || {
        format!(
            "{}\n{}: {bytes} bytes; loaded in {load_seconds:.1} s, quantized in \
             {quantize_seconds:.1} s, saved in {:.1} s, peak memory {:.0} MB",
            report.quantized,
            arguments.out.display(),
            report.save_seconds,
            report.peak_memory_mb,
        )
    })
}
