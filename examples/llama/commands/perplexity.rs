//! `llama perplexity`: measures the perplexity of a model on a text, also against a reference.

use std::path::PathBuf;

use anyhow::Result;
use burn_fp4::Fp4Linear;
use llama::{Fidelity, Folder, Perplexity, Windows, fidelity, perplexity};
use serde::Serialize;

use super::{
    CacheOptions, CacheReport, DeviceOptions, ProductFormats, ProductOptions, TextOptions, print,
};

/// Measure the perplexity of a model on a text.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder: dense, FP8, or FP4 in any dialect.
    folder: PathBuf,
    /// Folder of the original model: also print the difference of the losses on the same windows
    /// with its standard error, the divergence from it, and how often both find the same token
    /// most likely.
    #[arg(long, value_name = "FOLDER")]
    reference: Option<PathBuf>,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    products: ProductOptions,
    #[command(flatten)]
    cache: CacheOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The perplexity, and the formats that it was measured with.
#[derive(Serialize)]
struct Report<M> {
    #[serde(flatten)]
    products: ProductFormats,
    #[serde(flatten)]
    cache: CacheReport,
    #[serde(flatten)]
    found: M,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (mut model, products) = arguments.products.load::<Fp4Linear>(&folder, &device, None)?;
    arguments.cache.check(arguments.device.device)?;
    let cache = arguments.cache.set(&mut model)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let (tokens, windows) = (tokens.held_out(), arguments.windows);
    let Some(reference) = &arguments.reference else {
        let found = perplexity(&model, tokens, windows, &device)?;
        let report = Report { products, cache, found };
        return print(&report, arguments.json, || {
            format!("{}\n{}", line(&found), report.products.line())
        });
    };
    let reference = Folder::open(reference)?;
    folder.check_vocabulary(&reference)?;
    let (reference, _) = reference.load::<Fp4Linear>(&device)?;
    let mut found = fidelity(&[&model], &reference, tokens, windows, &device)?;
    let report = Report { products, cache, found: found.remove(0) };
    print(&report, arguments.json, || {
        format!("{}\n{}", lines(&report.found), report.products.line())
    })
}

fn line(Perplexity { tokens, nats, perplexity }: &Perplexity) -> String {
    format!("perplexity {perplexity:.4} ({nats:.5} nats per token, {tokens} tokens)")
}

fn lines(found: &Fidelity) -> String {
    let (difference, divergence) = (found.difference, found.divergence);
    let error = difference.standard_error;
    let error = error.map_or(String::new(), |error| format!(", standard error {error:.5}"));
    format!(
        "{}\n\
         reference: {}\n\
         difference: {:.5} nats per token{error}\n\
         divergence: mean {:.5} nats, 99th percentile {:.4}\n\
         same most likely token: {:.2} %",
        line(&found.perplexity),
        line(&found.reference),
        difference.nats,
        divergence.mean,
        divergence.percentile_99,
        found.top1_agreement_percent,
    )
}
