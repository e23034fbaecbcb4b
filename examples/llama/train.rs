//! Training from nothing, and distillation behind fake quantization.

use anyhow::Result;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, Device, Int, Tensor};

use super::model::{Llama, Projection};
use super::tokens::Tokens;
use examples::random::Random;
use examples::training::{self, Schedule};

/// Batches of windows, and how fast to learn from them.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Batches {
    /// Windows of a batch.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
    /// Tokens of a window.
    #[arg(long, default_value_t = 128)]
    pub context: usize,
    /// Seed of the windows.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl Default for Batches {
    /// As without options.
    fn default() -> Self {
        Self { batch: 8, context: 128, seed: 1 }
    }
}

/// Trains a model to predict the next token; calls `progress` with the step and its loss in nats.
///
/// # Errors
/// If the text is shorter than a window.
pub fn train<L: Projection>(
    model: Llama<L>,
    tokens: &Tokens,
    schedule: Schedule,
    batches: Batches,
    device: &Device,
    progress: impl FnMut(usize, f64),
) -> Result<Llama<L>> {
    let mut windows = batches.windows(tokens, device)?;
    let loss = |model: &Llama<L>| {
        let windows = windows();
        let [count, length] = windows.dims();
        next_token_loss(model, windows).div_scalar((count * (length - 1)) as f64)
    };
    Ok(training::train(model, &optimizer(0.1), schedule, loss, progress))
}

/// The sum of `-ln p` of the tokens of windows `[batch, tokens]`, each from those before it.
pub(super) fn next_token_loss<L: Projection>(
    model: &Llama<L>,
    windows: Tensor<2, Int>,
) -> Tensor<1> {
    let [_, length] = windows.dims();
    let scores = in_f32(model.forward(windows.clone().narrow(1, 0, length - 1)));
    let next = windows.narrow(1, 1, length - 1).unsqueeze_dim(2);
    log_softmax(scores, 2).gather(2, next).sum().neg()
}

/// Trains a model, which may be fake-quantized, to give the scores of another: by the divergence
/// `KL(teacher | student)` of each next token. Calls `progress` with the step and the loss in nats.
///
/// # Errors
/// If the text is shorter than a window.
pub fn distill<L: Projection>(
    student: Llama<L>,
    teacher: &Llama<L>,
    tokens: &Tokens,
    schedule: Schedule,
    batches: Batches,
    device: &Device,
    progress: impl FnMut(usize, f64),
) -> Result<Llama<L>> {
    let mut windows = batches.windows(tokens, device)?;
    let teacher = teacher.valid();
    let loss = |student: &Llama<L>| {
        let windows = windows();
        let [count, length] = windows.dims();
        let expected = in_f32(teacher.forward(windows.clone().without_autodiff()));
        let found = log_softmax(in_f32(student.forward(windows)), 2);
        let divergence = softmax(expected.clone(), 2) * (log_softmax(expected, 2) - found);
        divergence.sum().div_scalar((count * length) as f64)
    };
    // Weights are not pulled to 0: they are to stay where the teacher has them.
    Ok(training::train(student, &optimizer(0.0), schedule, loss, progress))
}

/// Scores whose logarithms and sums do not lose digits, whatever a model computes with.
fn in_f32(scores: Tensor<3>) -> Tensor<3> {
    scores.cast(DType::F32)
}

fn optimizer(weight_decay: f32) -> AdamWConfig {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_weight_decay(weight_decay)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
}

impl Batches {
    /// Random windows of a text, on a device that differentiates.
    fn windows<'t>(
        self,
        tokens: &'t Tokens,
        device: &Device,
    ) -> Result<impl FnMut() -> Tensor<2, Int> + 't> {
        let device = device.clone().autodiff();
        let mut random = Random::new(self.seed);
        let mut next = move || tokens.windows(self.batch, self.context, &mut random, &device);
        // All are as long as the first.
        next()?;
        Ok(move || next().expect("a text that has windows"))
    }
}
