//! `llama distill`: a quantized model trained to give the scores of the dense one.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{Fp4Format, Fp4Module, Fp4Report, Method, WriteReport};
use examples::progress;
use examples::training::Schedule;
use llama::{Batches, Folder, Llama, Tokens, distill, fp4_config, methods};
use serde::Serialize;

use super::quantize::Saved;
use super::{Text, Where, print};

/// Quantize a model, and train it behind fake quantization to give the scores that it had.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face, dense or FP8.
    folder: PathBuf,
    /// The folder to make.
    out: PathBuf,
    #[command(flatten)]
    distillation: Distillation,
    /// nvfp4 or mxfp4.
    #[arg(long, default_value_t = Fp4Format::NvFp4)]
    format: Fp4Format,
    #[command(flatten)]
    batches: Batches,
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

/// How a model is trained behind fake quantization.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Distillation {
    /// How scales are chosen at every step, by a method that needs no calibration.
    #[arg(long, value_parser = methods(), default_value_t = Method::SSE)]
    pub(crate) distill_method: Method,
    /// Batches to train on; 0: `compare` leaves it out.
    #[arg(long, default_value_t = 600)]
    pub(crate) steps: usize,
    /// The largest learning rate.
    #[arg(long, default_value_t = 1e-4)]
    pub(crate) learning_rate: f64,
}

/// What became of each weight, and what was written.
#[derive(Serialize)]
struct Report {
    quantized: Fp4Report,
    /// `KL(dense | quantized)` of a token, in nats: mean of the first ten steps and of the last.
    divergence: [f64; 2],
    files: usize,
    bytes: u64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.place.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (teacher, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let (format, batches) = (arguments.format, arguments.batches);
    let (student, quantized, divergence) =
        arguments.distillation.run(&teacher, format, &tokens, batches, &device)?;
    let WriteReport { files, bytes, .. } =
        folder.save(&student, &arguments.out, &arguments.saved.dialect_or(None))?;
    let report = Report { quantized, divergence, files, bytes };
    print(&report, arguments.json, || {
        let [before, after] = divergence;
        let out = arguments.out.display();
        format!(
            "{}\n{out}: {bytes} bytes, divergence from {before:.5} to {after:.5} nats a token",
            report.quantized
        )
    })
}

impl Distillation {
    /// A model distilled from a dense one, what became of its weights, and the divergence at the
    /// beginning and at the end.
    pub(crate) fn run(
        self,
        teacher: &Llama<Linear>,
        format: Fp4Format,
        tokens: &Tokens,
        batches: Batches,
        device: &Device,
    ) -> Result<(Llama<Linear>, Fp4Report, [f64; 2])> {
        ensure!(self.steps > 0, "distillation takes at least one step");
        let mut student = teacher.clone().train();
        // While it is trained, each weight has a tensor scale of its own.
        let mut config = fp4_config(teacher, format, self.distill_method);
        config.share_scale.clear();
        student.fake_quantize_fp4(&config)?;
        let schedule =
            Schedule { steps: self.steps, learning_rate: self.learning_rate, warm_up: 20 };
        let bar = progress::bar(self.steps);
        let mut losses = Vec::new();
        let told = |_, loss| {
            losses.push(loss);
            bar.set_message(format!("{format}, divergence {loss:.5}"));
            bar.inc(1);
        };
        let student = distill(student, teacher, tokens, schedule, batches, device, told)?;
        bar.finish_and_clear();
        let mut student = student.valid();
        let report = student.convert_fp4()?;
        let mean = |some: &[f64]| some.iter().sum::<f64>() / some.len() as f64;
        let ends = losses.len().min(10);
        Ok((student, report, [mean(&losses[..ends]), mean(&losses[losses.len() - ends..])]))
    }
}
