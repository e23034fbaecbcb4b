//! Training with AdamW.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Tensor;

/// Cosine schedule of the learning rate, with a linear warm-up.
#[derive(Debug, Clone, Copy)]
pub struct Schedule {
    /// Number of batches.
    pub steps: usize,
    /// The largest learning rate.
    pub learning_rate: f64,
    /// Steps of the warm-up.
    pub warm_up: usize,
}

/// Trains a model with one step for each loss; calls `progress` with the step and its loss.
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
        let done = step as f64 / schedule.steps as f64;
        let cosine = 0.5 * (1.0 + (core::f64::consts::PI * done).cos());
        let rate = cosine * ((step + 1) as f64 / schedule.warm_up as f64).min(1.0);
        model = optimizer.step(schedule.learning_rate * rate, model, gradients);
    }
    model
}
