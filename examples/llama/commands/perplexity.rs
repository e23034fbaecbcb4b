//! `llama perplexity`: how well a text is predicted.

use std::path::PathBuf;

use anyhow::Result;
use burn_fp4::Fp4Linear;
use llama::{Folder, Windows, perplexity};

use super::{Text, Tied, Where, print};

/// Measure how well a model predicts a text.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face: dense, FP8, or FP4 in any dialect.
    folder: PathBuf,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    tied: Tied,
    #[command(flatten)]
    place: Where,
    /// Print an object instead of a line.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.place.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let model = arguments.tied.load::<Fp4Linear>(&folder, &device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let found = perplexity(&model, tokens.held_out(), arguments.windows, &device)?;
    print(&found, arguments.json, || {
        let (tokens, nats) = (found.tokens, found.nats);
        format!("perplexity {:.4}, {nats:.5} nats a token, {tokens} tokens", found.perplexity)
    })
}
