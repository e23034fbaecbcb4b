//! `llama quantize`: a folder becomes one in FP4.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use burn::nn::Linear;
use burn_fp4::{Fp4Report, WriteReport};
use llama::{Folder, Recipe};
use serde::Serialize;

use super::{Text, Where, print};

/// Quantize a model, calibrated on a text if the method needs it.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face, dense or FP8.
    folder: PathBuf,
    /// The folder to make.
    out: PathBuf,
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
    /// `fp4 convert --help` lists.
    #[arg(long, default_value = "compressed-tensors")]
    pub(crate) dialect: String,
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
    let config = arguments.recipe.config(&model);
    let quantized = arguments.recipe.apply(&mut model, &config, &tokens, &device)?;
    let quantize_seconds = lap()?;
    let WriteReport { files, bytes, .. } =
        folder.save(&model, &arguments.out, &arguments.saved.dialect)?;
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
