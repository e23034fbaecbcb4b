//! Sensitivity of each layer to FP4: predicted from gradients, and measured one layer at a time.

use anyhow::Result;
use burn::nn::Linear;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, Device};
use burn_fp4::{
    Candidate, CandidateSensitivity, Fp4Config, Fp4Module, GroupSensitivity, Sensitivity, Unused,
};

use super::model::Llama;
use super::tokens::{Tokens, batch_of};
use super::train::{Batches, next_token_loss};
use examples::random::Random;

/// Predicts the growth of the next-token loss for each candidate format of each selected layer. A
/// dense layer takes `value_bytes` for each value, as where it is stored, whatever computes.
///
/// # Errors
/// The text is shorter than a window, or `fp4_sensitivity_of_loss` fails.
pub fn sensitivity(
    model: &Llama<Linear>,
    config: &Fp4Config,
    candidates: &[Candidate],
    value_bytes: usize,
    (count, batches): (usize, Batches),
    tokens: &Tokens,
    device: &Device,
) -> Result<Sensitivity> {
    let device = device.clone().autodiff();
    let mut random = Random::new(batches.seed);
    let windows = (0..count)
        .map(|_| tokens.windows(batches.batch, batches.context, &mut random, &device))
        .collect::<Result<Vec<_>>>()?;
    let mut sensitivity =
        model.fp4_sensitivity_of_loss(config, candidates, windows, next_token_loss)?;
    for group in &mut sensitivity.groups {
        let is_dense = |one: &&mut CandidateSensitivity| one.candidate == Candidate::Dense;
        let bytes = group.values * value_bytes;
        group.candidates.iter_mut().filter(is_dense).for_each(|one| one.bytes = bytes);
    }
    Ok(sensitivity)
}

/// Clones a model and quantizes one group of its weights in a candidate format.
///
/// # Errors
/// `quantize_fp4` fails.
pub fn quantized_alone(
    model: &Llama<Linear>,
    config: &Fp4Config,
    group: &GroupSensitivity,
    candidate: &CandidateSensitivity,
) -> Result<Llama<Linear>> {
    let mut model = model.clone();
    if let Candidate::Fp4(scheme) = candidate.candidate {
        let mut config = config.clone().unused(Unused::Report);
        config.scheme = scheme.with_method(config.scheme.method);
        config.include.clone_from(&group.paths);
        model.quantize_fp4(&config)?;
    }
    Ok(model)
}

/// Measures the mean divergence `KL(teacher | model)` of the next token in nats, over consecutive
/// windows of a text.
pub fn divergence(
    model: &Llama<Linear>,
    teacher: &Llama<Linear>,
    tokens: &[u32],
    window: usize,
    device: &Device,
) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for windows in tokens.chunks_exact(window).collect::<Vec<_>>().chunks(8) {
        let batch = batch_of(&windows.concat(), window, device);
        let [teacher_logits, logits] =
            [teacher, model].map(|model| model.forward(batch.clone()).cast(DType::F32));
        let log_ratio = log_softmax(teacher_logits.clone(), 2) - log_softmax(logits, 2);
        let divergence = softmax(teacher_logits, 2) * log_ratio;
        sum += divergence.sum_dim(2).into_data().iter::<f64>().sum::<f64>();
        count += windows.len() * window;
    }
    sum / count as f64
}

/// Computes Spearman's rank correlation of two lists.
pub fn rank_correlation(left: &[f64], right: &[f64]) -> f64 {
    let ranks = |values: &[f64]| -> Vec<f64> {
        let below = |value: &f64| values.iter().filter(|other| *other < value).count();
        let equal = |value: &f64| values.iter().filter(|other| *other == value).count();
        // Equal values share the mean of their ranks.
        values.iter().map(|value| below(value) as f64 + equal(value) as f64 / 2.0).collect()
    };
    let [left, right] = [left, right].map(|values| {
        let ranks = ranks(values);
        let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
        ranks.into_iter().map(|rank| rank - mean).collect::<Vec<_>>()
    });
    let product = |left: &[f64], right: &[f64]| -> f64 {
        left.iter().zip(right).map(|(left, right)| left * right).sum()
    };
    product(&left, &right) / (product(&left, &left) * product(&right, &right)).sqrt()
}
