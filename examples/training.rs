//! Training by AdamW.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Tensor;

/// How long, and how fast: the learning rate rises to its largest in a few steps, and falls to 0 as
/// a cosine does.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    /// Batches.
    pub steps: usize,
    /// The largest learning rate.
    pub learning_rate: f64,
    /// Steps in which the learning rate rises.
    pub warm_up: usize,
}

/// Trains a model by the loss of one batch after another; calls `progress` with the step and its
/// loss.
pub fn train<M: Module>(
    mut model: M,
    optimizer: &AdamWConfig,
    schedule: Schedule,
    mut loss: impl FnMut(&M) -> Tensor<1>,
    mut progress: impl FnMut(usize, f64),
) -> M {
    let mut optimizer = optimizer.init();
    for step in 0..schedule.steps {
        let loss = loss(&model);
        progress(step, loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let way = step as f64 / schedule.steps as f64;
        let rate = 0.5 * (1.0 + (core::f64::consts::PI * way).cos());
        let rate = rate * ((step + 1) as f64 / schedule.warm_up as f64).min(1.0);
        model = optimizer.step(schedule.learning_rate * rate, model, gradients);
    }
    model
}
