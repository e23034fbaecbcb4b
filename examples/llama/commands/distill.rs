//! `llama distill`: trains a fake-quantized model on the logits of the dense one.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{Fp4Format, Fp4Module, Fp4Report, Fp4Scheme, Method, TensorScaling, WriteReport};
use examples::progress;
use examples::training::Schedule;
use llama::{Batches, Folder, Llama, Tokens, distill, fp4_config, methods_where, positive, scheme};
use serde::Serialize;

use super::quantize::{OutputOptions, has_tensor_scales};
use super::{DeviceOptions, TextOptions, print, saved_lines};

/// Distill a dense model into a quantized one: train it, fake-quantized, on the dense logits.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder, dense or FP8.
    folder: PathBuf,
    /// Folder to create, or file that ends in .gguf.
    out: PathBuf,
    #[command(flatten)]
    distillation: Distillation,
    /// Format: nvfp4 or mxfp4.
    #[arg(long, default_value_t = Fp4Format::NvFp4)]
    format: Fp4Format,
    #[command(flatten)]
    batches: Batches,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Largest weight that a shared tensor scale has room for, relative to the largest before training.
const HEADROOM: f32 = 1.25;

/// Options of distillation.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Distillation {
    /// Method that chooses scales at every step.
    #[arg(long, value_parser = methods_where(Method::is_blockwise), default_value_t = Method::SSE)]
    pub(crate) distill_method: Method,
    /// Batches to distill on; with 0, `compare` skips distillation.
    #[arg(long, default_value_t = 600)]
    pub(crate) steps: usize,
    /// Peak learning rate.
    #[arg(long, default_value_t = 1e-4, value_parser = positive)]
    pub(crate) learning_rate: f64,
}

/// Report of the quantization, and the divergence from the dense model.
#[derive(Serialize)]
struct Report {
    quantized: Fp4Report,
    /// Mean `KL(dense | quantized)` of the first ten steps and of the last ten, in nats per token.
    divergence: [f64; 2],
    files: usize,
    bytes: u64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let dialect = arguments.output.dialect_or(None, &arguments.out)?;
    let scheme = scheme(arguments.format, arguments.distillation.distill_method);
    let scheme = if has_tensor_scales(&dialect)? { scheme } else { scheme.without_tensor_scale() };
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (teacher, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let batches = arguments.batches;
    let (student, quantized, divergence) =
        arguments.distillation.run(&teacher, scheme, &tokens, batches, &device)?;
    let WriteReport { files, bytes, .. } = folder.save(&student, &arguments.out, &dialect)?;
    let report = Report { quantized, divergence, files, bytes };
    print(&report, arguments.json, || {
        let ([before, after], quantized) = (divergence, &report.quantized);
        let Arguments { text, out, folder, device, .. } = arguments;
        let next = text.report_command(out, folder, device);
        let saved = saved_lines(&arguments.out, files, bytes, &next);
        format!(
            "{quantized}\n\
             divergence from the dense model: {before:.5} nats per token, {after:.5} at the end\n\
             {saved}"
        )
    })
}

impl Distillation {
    /// Distills a dense model. Returns the quantized model, its report, and the mean divergence of
    /// the first ten steps and of the last ten.
    pub(crate) fn run(
        self,
        teacher: &Llama<Linear>,
        scheme: Fp4Scheme,
        tokens: &Tokens,
        batches: Batches,
        device: &Device,
    ) -> Result<(Llama<Linear>, Fp4Report, [f64; 2])> {
        ensure!(self.steps > 0, "--steps: expected at least 1, found 0");
        let mut student = teacher.clone().train();
        let mut config = fp4_config(teacher, scheme);
        // While weights train, those that share a tensor scale keep the one they began with, with
        // room to grow.
        config.share_scale.clear();
        if scheme.rule.row().tensor_scale && scheme.tensor_scale == TensorScaling::Tensor {
            for (paths, amax) in teacher.fused_layers()? {
                let fixed = scheme.with_tensor_scale(TensorScaling::Amax(amax * HEADROOM));
                config = paths.into_iter().fold(config, |config, path| config.with(path, fixed));
            }
        }
        student.fake_quantize_fp4(&config)?;
        let schedule =
            Schedule { steps: self.steps, learning_rate: self.learning_rate, warm_up: 20 };
        let bar = progress::bar(self.steps);
        let mut losses = Vec::new();
        let progress = |_, loss| {
            losses.push(loss);
            bar.set_message(format!("{}, divergence {loss:.5}", scheme.format()));
            bar.inc(1);
        };
        let student = distill(student, teacher, tokens, schedule, batches, device, progress)?;
        bar.finish_and_clear();
        let mut student = student.valid();
        let report = student.convert_fp4()?;
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let ends = losses.len().min(10);
        Ok((student, report, [mean(&losses[..ends]), mean(&losses[losses.len() - ends..])]))
    }
}
