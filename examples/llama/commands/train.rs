//! `llama train`: a small model of bytes, from nothing.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use burn::module::Module;
use burn::nn::Linear;
use burn_fp4::WriteReport;
use examples::progress;
use examples::training::Schedule;
use llama::{Batches, Llama, LlamaConfig, Windows, byte_tokenizer, create, perplexity};
use serde::Serialize;

use super::{Text, Where, print};

/// Train a small model whose tokens are bytes, and write its folder.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The folder to make.
    out: PathBuf,
    /// A `config.json` of 256 tokens or more; without, a Llama of 0.8 M parameters.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Batches to train on; 0: the model stays as random as it begins.
    #[arg(long, default_value_t = 800)]
    steps: usize,
    /// The largest learning rate.
    #[arg(long, default_value_t = 3e-3)]
    learning_rate: f64,
    #[command(flatten)]
    batches: Batches,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    place: Where,
    /// Print an object instead of a line.
    #[arg(long)]
    json: bool,
}

/// What was trained.
#[derive(Serialize)]
struct Report {
    parameters: usize,
    bytes: u64,
    /// Mean loss of the last tenth of the steps, in nats.
    training_nats: Option<f64>,
    /// Of the part of the text that is held out.
    held_out_nats: Option<f64>,
}

/// Of the model that is trained without another.
const CONFIG: &str = include_str!("../config.json");

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let config = match &arguments.config {
        None => CONFIG.to_owned(),
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
    };
    let (steps, learning_rate) = (arguments.steps, arguments.learning_rate);
    let device = arguments.place.device()?;
    device.seed(arguments.batches.seed);
    let built = LlamaConfig::parse(config.as_bytes())?;
    let mut model = Llama::<Linear>::new(&built, &device)?;
    let (mut training, mut held_out_nats) = (Vec::new(), None);
    if steps > 0 {
        let tokenizer = serde_json::to_vec(&byte_tokenizer())?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer);
        let tokens = arguments.text.tokens(&tokenizer.map_err(|error| anyhow!(error))?)?;
        let bar = progress::bar(steps);
        let schedule = Schedule { steps, learning_rate, warm_up: 50 };
        let told = |step, loss| {
            if step >= steps - steps.div_ceil(10) {
                training.push(loss);
            }
            bar.set_message(format!("loss {loss:.3}"));
            bar.inc(1);
        };
        let batches = arguments.batches;
        model = llama::train(model.train(), &tokens, schedule, batches, &device, told)?;
        model = model.valid();
        bar.finish_and_clear();
        let windows = Windows { window: 256, stride: 128, batch: 8 };
        held_out_nats = Some(perplexity(&model, tokens.held_out(), windows, &device)?.nats);
    }
    let parameters = model.num_params();
    let WriteReport { bytes, .. } = create(&model, &config, &arguments.out)?;
    let mean = training.iter().sum::<f64>() / training.len() as f64;
    let training_nats = (steps > 0).then_some(mean);
    let report = Report { parameters, bytes, training_nats, held_out_nats };
    print(&report, arguments.json, || {
        let out = arguments.out.display();
        let learned = match (training_nats, held_out_nats) {
            (Some(training), Some(held_out)) => {
                format!("; {training:.4} nats a token in training, {held_out:.4} held out")
            }
            _ => String::new(),
        };
        format!("{out}: {parameters} parameters, {bytes} bytes{learned}")
    })
}
