//! `llama generate`: a text continued.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use burn_fp4::Fp4Linear;
use examples::OnDevice;
use llama::{Folder, Generated, Projection, Sampling, generate};
use serde::Serialize;

use super::{Tied, Where, print};

/// Continue a text.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face: dense, FP8, or FP4 in any dialect.
    folder: PathBuf,
    /// What to continue.
    #[arg(long, default_value = "In the beginning ")]
    prompt: String,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    tied: Tied,
    #[command(flatten)]
    place: Where,
    /// Print an object instead of the text.
    #[arg(long)]
    json: bool,
}

/// What was generated.
#[derive(Serialize)]
struct Report {
    texts: Vec<String>,
    #[serde(flatten)]
    generated: Generated,
    prompt_tokens_per_second: f64,
    /// To open the folder and load the weights.
    load_seconds: f64,
    /// Of the host, over the whole run.
    peak_memory_mb: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    // On hosts Burn's own layer would decode its whole weight for every token.
    let report = match arguments.place.device {
        OnDevice::Flex => generated::<Fp4Linear>(arguments),
        #[cfg(feature = "ndarray")]
        OnDevice::Ndarray => generated::<Fp4Linear>(arguments),
        #[cfg(any(feature = "cuda", feature = "cpu"))]
        _ => generated::<burn::nn::Linear>(arguments),
    }?;
    print(&report, arguments.json, || {
        let found = &report.generated;
        let texts = report.texts.iter().map(|text| format!("{}{text}\n\n", arguments.prompt));
        format!(
            "{}{} tokens{}{}; {} of the prompt, {:.1} a second; loaded in {:.1} s, \
             peak memory {:.0} MB",
            texts.collect::<String>(),
            found.sequences.iter().map(Vec::len).sum::<usize>(),
            found.tokens_per_second.map_or(String::new(), |rate| format!(", {rate:.1} a second")),
            if found.replayed { ", replayed" } else { "" },
            found.prompt_tokens,
            report.prompt_tokens_per_second,
            report.load_seconds,
            report.peak_memory_mb,
        )
    })
}

fn generated<L: Projection>(arguments: &Arguments) -> Result<Report> {
    let start = std::time::Instant::now();
    let device = arguments.place.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let model = arguments.tied.load::<L>(&folder, &device)?;
    let load_seconds = start.elapsed().as_secs_f64();
    let tokenizer = folder.tokenizer()?;
    let prompt = tokenizer.encode(arguments.prompt.as_str(), true);
    let prompt = prompt.map_err(|error| anyhow!(error))?;
    let (count, sampling) = (arguments.tokens, arguments.sampling);
    let found = generate(&model, &folder.config, prompt.get_ids(), count, sampling, &device)?;
    let text = |tokens: &Vec<u32>| tokenizer.decode(tokens, true).map_err(|error| anyhow!(error));
    Ok(Report {
        texts: found.sequences.iter().map(text).collect::<Result<_>>()?,
        prompt_tokens_per_second: found.prompt_tokens as f64 / found.prompt_seconds,
        generated: found,
        load_seconds,
        peak_memory_mb: crate::peak_memory_mb(),
    })
}
