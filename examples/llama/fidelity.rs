//! Distance of models from a reference, on the same windows of a text.

use anyhow::Result;
use burn::tensor::{DType, Device, Int, Tensor};
use rayon::prelude::*;
use serde::Serialize;

use super::model::{Llama, Projection};
use super::perplexity::{Batch, Difference, Losses, Perplexity, WindowLoss, Windows};

/// Distance of a model from a reference on a text.
#[derive(Debug, Clone, Serialize)]
pub struct Fidelity {
    /// Perplexity of the model.
    #[serde(flatten)]
    pub perplexity: Perplexity,
    /// Perplexity of the reference.
    pub reference: Perplexity,
    /// Loss of the model less that of the reference.
    pub difference: Difference,
    /// Divergence `KL(reference | model)` of the next token.
    pub divergence: Divergence,
    /// Tokens for which both find the same next token most likely, in percent.
    pub top1_agreement_percent: f64,
    /// Losses of the model by window.
    pub windows: Losses,
}

/// Divergence of the next token over the tokens of a text, in nats.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Divergence {
    /// Mean over tokens.
    pub mean: f64,
    /// 99th percentile over tokens.
    pub percentile_99: f64,
}

/// Compares the predictions of two models for one token.
struct TokenFidelity {
    nats: [f64; 2],
    divergence: f64,
    agrees: bool,
}

/// Measures the distance of each model from a reference. The reference runs once for all models.
///
/// # Errors
/// There is nothing to predict, or windows do not overlap.
pub fn fidelity<L: Projection, R: Projection>(
    models: &[&Llama<L>],
    reference: &Llama<R>,
    tokens: &[u32],
    windows: Windows,
    device: &Device,
) -> Result<Vec<Fidelity>> {
    let mut found: Vec<Sums> = models.iter().map(|_| Sums::default()).collect();
    for batch in windows.batches(tokens, device)? {
        let targets = targets(&batch);
        let of_reference = logits(reference, &batch);
        for (model, sums) in models.iter().zip(&mut found) {
            sums.add(&batch, &targets, &of_reference, &logits(*model, &batch));
        }
    }
    Ok(found.into_iter().map(Sums::fidelity).collect())
}

/// Returns the predicted tokens of each window.
fn targets(batch: &Batch) -> Vec<usize> {
    let [_, length] = batch.windows.dims();
    let tokens = length - batch.context;
    let targets: Tensor<2, Int> = batch.windows.clone().narrow(1, batch.context, tokens);
    targets.into_data().iter::<i64>().map(|token| token as usize).collect()
}

/// Computes the logits of each predicted token.
fn logits<L: Projection>(model: &Llama<L>, batch: &Batch) -> Vec<f32> {
    let [_, length] = batch.windows.dims();
    let tokens = length - batch.context;
    let logits = model.forward_from(batch.windows.clone(), batch.context - 1).narrow(1, 0, tokens);
    logits.cast(DType::F32).into_data().try_into_vec().expect("the logits were cast to f32")
}

/// Sums over the tokens of a text.
#[derive(Default)]
struct Sums {
    model: Losses,
    reference: Losses,
    divergences: Vec<f64>,
    agreeing: usize,
}

impl Sums {
    fn add(&mut self, batch: &Batch, targets: &[usize], reference: &[f32], model: &[f32]) {
        let vocabulary = reference.len() / targets.len();
        let of_token = |(at, &target): (usize, &usize)| {
            let row = at * vocabulary..(at + 1) * vocabulary;
            TokenFidelity::of(&reference[row.clone()], &model[row], target)
        };
        let found: Vec<TokenFidelity> = targets.par_iter().enumerate().map(of_token).collect();
        let [windows, _] = batch.windows.dims();
        for window in found.chunks(targets.len() / windows) {
            let loss = |of: usize| WindowLoss {
                tokens: window.len(),
                nats: window.iter().map(|token| token.nats[of]).sum(),
            };
            self.reference.0.push(loss(0));
            self.model.0.push(loss(1));
        }
        self.agreeing += found.iter().filter(|token| token.agrees).count();
        self.divergences.extend(found.iter().map(|token| token.divergence));
    }

    fn fidelity(self) -> Fidelity {
        let Self { model, reference, mut divergences, agreeing } = self;
        let count = divergences.len();
        divergences.sort_by(f64::total_cmp);
        let mean = divergences.iter().sum::<f64>() / count as f64;
        // By nearest rank.
        let percentile_99 = divergences[(count * 99).div_ceil(100) - 1];
        Fidelity {
            perplexity: model.perplexity(),
            reference: reference.perplexity(),
            difference: model.less(&reference),
            divergence: Divergence { mean, percentile_99 },
            top1_agreement_percent: 100.0 * agreeing as f64 / count as f64,
            windows: model,
        }
    }
}

impl TokenFidelity {
    /// Compares the logits of a token.
    fn of(reference: &[f32], model: &[f32], target: usize) -> Self {
        let largest = [reference, model].map(largest);
        let [most, most_of_model] = [reference[largest[0]], model[largest[1]]];
        let (mut sum, mut sum_of_model, mut distance) = (0.0, 0.0, 0.0);
        for (&of_reference, &of_model) in reference.iter().zip(model) {
            let weight = f64::from((of_reference - most).exp());
            sum += weight;
            distance += weight * f64::from(of_reference - of_model);
            sum_of_model += f64::from((of_model - most_of_model).exp());
        }
        let log_sum = f64::from(most) + sum.ln();
        let log_sum_of_model = f64::from(most_of_model) + sum_of_model.ln();
        Self {
            nats: [
                log_sum - f64::from(reference[target]),
                log_sum_of_model - f64::from(model[target]),
            ],
            // sum of p (ln p - ln q), whose normalizations are constants.
            divergence: distance / sum - log_sum + log_sum_of_model,
            agrees: largest[0] == largest[1],
        }
    }
}

/// Returns the place of the largest logit, the first of equals.
fn largest(logits: &[f32]) -> usize {
    let larger = |best: usize, (at, logit): (usize, &f32)| {
        if *logit > logits[best] { at } else { best }
    };
    logits.iter().enumerate().fold(0, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_losses_a_divergence_and_the_likeliest_tokens() {
        let probabilities: [[f64; 3]; 2] = [[0.5, 0.3, 0.2], [0.25, 0.5, 0.25]];
        // Logits are known but for a constant.
        let logits = [4.0, -2.0]
            .into_iter()
            .zip(probabilities)
            .map(|(constant, row)| row.map(|probability| (probability.ln() + constant) as f32));
        let logits: Vec<[f32; 3]> = logits.collect();
        let token = TokenFidelity::of(&logits[0], &logits[1], 1);
        let near = |found: f64, expected: f64| {
            assert!((found - expected).abs() < 1e-6, "{found}, expected {expected}");
        };
        near(token.nats[0], -0.3_f64.ln());
        near(token.nats[1], -0.5_f64.ln());
        let pairs = probabilities[0].into_iter().zip(probabilities[1]);
        near(token.divergence, pairs.map(|(p, q)| p * (p / q).ln()).sum());
        assert!(!token.agrees);
        assert!(TokenFidelity::of(&logits[0], &logits[0], 0).agrees);
    }
}
