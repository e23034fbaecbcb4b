//! `llama perplexity`: measures the perplexity of a model on a text.

use std::path::PathBuf;

use anyhow::Result;
use burn_fp4::Fp4Linear;
use llama::{Folder, Perplexity, Windows, perplexity};
use serde::Serialize;

use super::{DeviceOptions, ProductFormats, ProductOptions, TextOptions, print};

/// Measure the perplexity of a model on a text.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder: dense, FP8, or FP4 in any dialect.
    folder: PathBuf,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    products: ProductOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The perplexity, and the formats that it was measured with.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    products: ProductFormats,
    #[serde(flatten)]
    found: Perplexity,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (model, products) = arguments.products.load::<Fp4Linear>(&folder, &device, false)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let found = perplexity(&model, tokens.held_out(), arguments.windows, &device)?;
    let report = Report { products, found };
    print(&report, arguments.json, || {
        let Perplexity { tokens, nats, perplexity } = report.found;
        format!("perplexity {perplexity:.4} ({nats:.5} nats per token, {tokens} tokens)")
    })
}
