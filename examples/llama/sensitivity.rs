//! What FP4 costs each layer of a model: predicted, and measured one layer at a time.

use anyhow::Result;
use burn::nn::Linear;
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, Device};
use burn_fp4::{
    Candidate, CandidateSensitivity, Fp4Config, Fp4Module, GroupSensitivity, Sensitivity, Unused,
};

use super::model::Llama;
use super::tokens::{Tokens, tensor};
use super::train::{Batches, next_token_loss};
use examples::random::Random;

/// What every candidate costs every layer that a configuration selects, and the loss of batches.
///
/// # Errors
/// A text shorter than a window, and what `fp4_sensitivity_of_loss` refuses.
pub fn sensitivity(
    model: &Llama<Linear>,
    config: &Fp4Config,
    candidates: &[Candidate],
    (count, batches): (usize, Batches),
    tokens: &Tokens,
    device: &Device,
) -> Result<Sensitivity> {
    let device = device.clone().autodiff();
    let mut random = Random::new(batches.seed);
    let windows = (0..count)
        .map(|_| tokens.windows(batches.batch, batches.context, &mut random, &device))
        .collect::<Result<Vec<_>>>()?;
    Ok(model.fp4_sensitivity_of_loss(config, candidates, windows, next_token_loss)?)
}

/// A model with one group of weights as a candidate has them.
///
/// # Errors
/// What `quantize_fp4` refuses.
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

/// The mean divergence `KL(teacher | model)` of the next token, in nats, over a text cut into
/// windows.
pub fn divergence(
    model: &Llama<Linear>,
    teacher: &Llama<Linear>,
    tokens: &[u32],
    window: usize,
    device: &Device,
) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for windows in tokens.chunks_exact(window).collect::<Vec<_>>().chunks(8) {
        let batch = tensor(&windows.concat(), window, device);
        let [expected, found] =
            [teacher, model].map(|model| model.forward(batch.clone()).cast(DType::F32));
        let rows =
            softmax(expected.clone(), 2) * (log_softmax(expected, 2) - log_softmax(found, 2));
        sum += rows.sum_dim(2).into_data().iter::<f64>().sum::<f64>();
        count += windows.len() * window;
    }
    sum / count as f64
}

/// Spearman's rank correlation of two lists.
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
