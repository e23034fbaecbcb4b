//! Training from random weights, and distillation with fake quantization.

use anyhow::Result;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, Device, Int, Tensor};

use super::model::{Llama, Projection};
use super::quantize::at_least;
use super::tokens::Tokens;
use examples::random::Random;
use examples::training::{self, Schedule};

/// Batches of random windows.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Batches {
    /// Windows of a batch.
    #[arg(long, default_value_t = 8, value_parser = at_least(1))]
    pub batch: usize,
    /// Tokens of a window.
    #[arg(long, default_value_t = 128, value_parser = at_least(2))]
    pub context: usize,
    /// Seed of the training windows.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl Default for Batches {
    /// Returns the defaults of the command line.
    fn default() -> Self {
        Self { batch: 8, context: 128, seed: 1 }
    }
}

/// Trains a model to predict the next token; calls `progress` with the step and its loss in nats.
///
/// # Errors
/// The text is shorter than a window.
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

/// Sums `-ln p` over the tokens of windows `[batch, tokens]` after the first of each.
pub(super) fn next_token_loss<L: Projection>(
    model: &Llama<L>,
    windows: Tensor<2, Int>,
) -> Tensor<1> {
    let [_, length] = windows.dims();
    let logits = model.forward(windows.clone().narrow(1, 0, length - 1)).cast(DType::F32);
    let targets = windows.narrow(1, 1, length - 1).unsqueeze_dim(2);
    log_softmax(logits, 2).gather(2, targets).sum().neg()
}

/// Trains a student, usually fake-quantized, on the logits of a teacher. The loss is the divergence
/// `KL(teacher | student)` of the next token. Calls `progress` with the step and its loss in nats.
///
/// # Errors
/// The text is shorter than a window.
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
        let teacher_logits = teacher.forward(windows.clone().without_autodiff());
        let teacher_logits = teacher_logits.cast(DType::F32);
        let log_probs = log_softmax(student.forward(windows).cast(DType::F32), 2);
        let log_ratio = log_softmax(teacher_logits.clone(), 2) - log_probs;
        let divergence = softmax(teacher_logits, 2) * log_ratio;
        divergence.sum().div_scalar((count * length) as f64)
    };
    // No weight decay: it would pull the weights away from the teacher's.
    Ok(training::train(student, &optimizer(0.0), schedule, loss, progress))
}

fn optimizer(weight_decay: f32) -> AdamWConfig {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_weight_decay(weight_decay)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
}

impl Batches {
    /// Draws random windows of a text, on the autodiff device.
    fn windows<'t>(
        self,
        tokens: &'t Tokens,
        device: &Device,
    ) -> Result<impl FnMut() -> Tensor<2, Int> + 't> {
        let device = device.clone().autodiff();
        let mut random = Random::new(self.seed);
        let mut next = move || tokens.windows(self.batch, self.context, &mut random, &device);
        // Every draw fails or none does: the error is returned here, before the training.
        next()?;
        Ok(move || next().expect("the first draw succeeded"))
    }
}
