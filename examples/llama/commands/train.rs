//! `llama train`: trains a small model of bytes from random weights.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use burn::module::Module;
use burn::nn::Linear;
use burn_fp4::WriteReport;
use examples::progress;
use examples::training::Schedule;
use llama::{
    Batches, Llama, LlamaConfig, Windows, byte_tokenizer, create, create_random, perplexity,
    positive,
};
use serde::Serialize;

use super::{DeviceOptions, TextOptions, print, quoted, saved_lines};

/// Train a small model whose tokens are bytes, and save its folder.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Folder to create.
    out: PathBuf,
    /// `config.json` with a vocabulary of at least 256; defaults to a Llama of 0.8 M parameters.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Batches to train on; 0 saves the random weights of a model of any size.
    #[arg(long, default_value_t = 800)]
    steps: usize,
    /// Peak learning rate.
    #[arg(long, default_value_t = 3e-3, value_parser = positive)]
    learning_rate: f64,
    #[command(flatten)]
    batches: Batches,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Size and loss of the trained model.
#[derive(Serialize)]
struct Report {
    parameters: usize,
    bytes: u64,
    /// Mean loss of the last tenth of the steps, in nats.
    training_nats: Option<f64>,
    /// Mean loss on the held-out part of the text, in nats.
    held_out_nats: Option<f64>,
}

/// Config of the model without `--config`.
const CONFIG: &str = include_str!("../config.json");

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let config = match &arguments.config {
        None => CONFIG.to_owned(),
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
    };
    let (steps, learning_rate) = (arguments.steps, arguments.learning_rate);
    let device = arguments.device.device()?;
    device.seed(arguments.batches.seed);
    let (mut training, mut held_out_nats) = (Vec::new(), None);
    let (parameters, written) = if steps == 0 {
        create_random(&config, &arguments.out, &device)?
    } else {
        let built = LlamaConfig::parse(config.as_bytes())?;
        let mut model = Llama::<Linear>::new(&built, &device)?;
        let tokenizer = serde_json::to_vec(&byte_tokenizer())?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer);
        let tokens = arguments.text.tokens(&tokenizer.map_err(|error| anyhow!(error))?)?;
        let bar = progress::bar(steps);
        let schedule = Schedule { steps, learning_rate, warm_up: 50 };
        let progress = |step, loss| {
            if step >= steps - steps.div_ceil(10) {
                training.push(loss);
            }
            bar.set_message(format!("loss {loss:.3}"));
            bar.inc(1);
        };
        let batches = arguments.batches;
        model = llama::train(model.train(), &tokens, schedule, batches, &device, progress)?;
        model = model.valid();
        bar.finish_and_clear();
        let windows = Windows { window: 256, stride: 128, batch: 8 };
        held_out_nats = Some(perplexity(&model, tokens.held_out(), windows, &device)?.nats);
        (model.num_params(), create(&model, &config, &arguments.out)?)
    };
    let WriteReport { files, bytes, .. } = written;
    let mean = training.iter().sum::<f64>() / training.len() as f64;
    let training_nats = (steps > 0).then_some(mean);
    let report = Report { parameters, bytes, training_nats, held_out_nats };
    print(&report, arguments.json, || {
        let losses = match (training_nats, held_out_nats) {
            (Some(training), Some(held_out)) => {
                format!(", loss {training:.4} nats per token ({held_out:.4} held out)")
            }
            _ => String::new(),
        };
        let next = format!("llama perplexity {}", quoted(&arguments.out));
        let saved = saved_lines(&arguments.out, files, bytes, &next);
        format!("trained {parameters} parameters{losses}\n{saved}")
    })
}
