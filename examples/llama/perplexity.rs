//! Losses and perplexity over overlapping windows of a text.

use core::ops::Range;

use anyhow::{Result, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor};
use examples::progress;
use serde::Serialize;

use super::model::{Llama, Projection};
use super::quantize::at_least;
use super::tokens::batch_of;

/// Overlapping windows of a text.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Windows {
    /// Tokens of a window.
    #[arg(long, default_value_t = 256, value_parser = at_least(2))]
    pub window: usize,
    /// Tokens between the starts of two windows. Tokens in both windows are context in the second:
    /// every token is predicted once.
    #[arg(long, default_value_t = 128, value_parser = at_least(1))]
    pub stride: usize,
    /// Windows of a batch.
    #[arg(long, default_value_t = 8, value_parser = at_least(1))]
    pub batch: usize,
}

/// Windows of the same length and with the same number of context tokens, to be run as one batch.
pub(super) struct Batch {
    /// Tokens `[windows, tokens]`.
    pub(super) windows: Tensor<2, Int>,
    /// Tokens of a window that are not predicted, at its start.
    pub(super) context: usize,
}

impl Windows {
    /// Divides a text into batches of windows. Each token but the first is predicted once, from the
    /// tokens before it in its window.
    ///
    /// # Errors
    /// There is nothing to predict, or windows do not overlap.
    pub(super) fn batches<'t>(
        self,
        tokens: &'t [u32],
        device: &'t Device,
    ) -> Result<impl Iterator<Item = Batch> + use<'t>> {
        let Self { window, stride, batch } = self;
        ensure!(
            tokens.len() > 1,
            "{} tokens to predict: expected at least 2; pass a longer --text, or a larger \
             --held-out",
            tokens.len()
        );
        ensure!(batch > 0, "--batch: expected at least 1, found 0");
        ensure!(
            0 < stride && stride < window,
            "--stride {stride}, --window {window}: windows do not overlap; pass a smaller stride"
        );
        let (mut spans, mut predicted) = (Vec::new(), 1);
        for start in (0..).step_by(stride) {
            let end = (start + window).min(tokens.len());
            spans.push((start..end, predicted - start));
            predicted = end;
            if end == tokens.len() {
                break;
            }
        }
        let alike = |left: &Span, right: &Span| left.0.len() == right.0.len() && left.1 == right.1;
        let batches: Vec<Vec<Span>> = spans
            .chunk_by(alike)
            .flat_map(|alike| alike.chunks(batch))
            .map(<[Span]>::to_vec)
            .collect();
        let bar = progress::bar(batches.len()).with_message("predicts the text");
        Ok(batches.into_iter().enumerate().map(move |(at, spans)| {
            bar.set_position(at as u64);
            let (length, context) = (spans[0].0.len(), spans[0].1);
            let rows = spans.into_iter().flat_map(|(span, _)| &tokens[span]).copied();
            Batch { windows: batch_of(&rows.collect::<Vec<_>>(), length, device), context }
        }))
    }
}

/// Range of a window in the text, and its number of context tokens.
type Span = (Range<usize>, usize);

/// Loss of a model on a window.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct WindowLoss {
    /// Predicted tokens.
    pub tokens: usize,
    /// Negative log-likelihood of the predicted tokens, in nats.
    pub nats: f64,
}

/// Losses of a model on the windows of a text, in their order.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(transparent)]
pub struct Losses(pub Vec<WindowLoss>);

/// Perplexity of a model on a text.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Perplexity {
    /// Predicted tokens: all but the first.
    pub tokens: usize,
    /// Mean negative log-likelihood of a token, in nats.
    pub nats: f64,
    /// `exp(nats)`.
    pub perplexity: f64,
}

/// Difference of the losses of two models on the same windows.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Difference {
    /// Mean difference of a token, in nats.
    pub nats: f64,
    /// Standard error of the mean, from the spread over windows. None for a single window.
    pub standard_error: Option<f64>,
}

impl Losses {
    /// Computes the perplexity over all windows.
    pub fn perplexity(&self) -> Perplexity {
        let tokens = self.0.iter().map(|window| window.tokens).sum();
        let nats = self.0.iter().map(|window| window.nats).sum::<f64>() / tokens as f64;
        Perplexity { tokens, nats, perplexity: nats.exp() }
    }

    /// Computes the loss of this model less that of another on the same windows.
    ///
    /// Both predict the same tokens, so the difficulty of a window cancels: the standard error is
    /// that of the difference, not of the losses.
    pub fn less(&self, other: &Self) -> Difference {
        let pairs = || self.0.iter().zip(&other.0);
        let tokens = pairs().map(|(one, _)| one.tokens).sum::<usize>() as f64;
        let nats = pairs().map(|(one, other)| one.nats - other.nats).sum::<f64>() / tokens;
        let residual = |(one, other): (&WindowLoss, &WindowLoss)| {
            (one.nats - other.nats - nats * one.tokens as f64).powi(2)
        };
        let (squares, windows) = (pairs().map(residual).sum::<f64>(), self.0.len() as f64);
        let standard_error = || (squares * windows / (windows - 1.0)).sqrt() / tokens;
        Difference { nats, standard_error: (self.0.len() > 1).then(standard_error) }
    }
}

/// Measures the perplexity of a model: each token is predicted from the tokens before it in its
/// window.
///
/// # Errors
/// There is nothing to predict, or windows do not overlap.
pub fn perplexity<L: Projection>(
    model: &Llama<L>,
    tokens: &[u32],
    windows: Windows,
    device: &Device,
) -> Result<Perplexity> {
    let batches = windows.batches(tokens, device)?;
    Ok(Losses(batches.flat_map(|batch| batch_losses(model, &batch)).collect()).perplexity())
}

/// Sums `-ln p` over the predicted tokens of each window.
fn batch_losses<L: Projection>(model: &Llama<L>, batch: &Batch) -> Vec<WindowLoss> {
    let [windows, length] = batch.windows.dims();
    let tokens = length - batch.context;
    let logits = model.forward_from(batch.windows.clone(), batch.context - 1);
    let logits = logits.narrow(1, 0, tokens);
    let targets = batch.windows.clone().narrow(1, batch.context, tokens).unsqueeze_dim(2);
    let log_probs = log_softmax(logits.cast(DType::F32), 2).gather(2, targets);
    // An f32 sum over thousands of values would lose digits.
    let log_probs: Vec<f64> = log_probs.into_data().iter::<f64>().collect();
    let loss = |window: usize| {
        let of_window = &log_probs[window * tokens..][..tokens];
        WindowLoss { tokens, nats: -of_window.iter().sum::<f64>() }
    };
    (0..windows).map(loss).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(windows: &[(usize, f64)]) -> Losses {
        Losses(windows.iter().map(|&(tokens, nats)| WindowLoss { tokens, nats }).collect())
    }

    #[test]
    fn a_difference_is_paired_by_window() {
        let hard_and_easy = losses(&[(10, 50.0), (10, 10.0), (10, 30.0)]);
        let worse = losses(&[(10, 51.0), (10, 11.0), (10, 31.0)]);
        let difference = worse.less(&hard_and_easy);
        assert!((difference.nats - 0.1).abs() < 1e-12, "{difference:?}");
        let error = difference.standard_error.expect("three windows");
        assert!(error < 1e-12, "every window differs by the same: {error}");

        let uneven = losses(&[(10, 50.0), (10, 12.0), (10, 31.0)]);
        let Difference { nats, standard_error } = uneven.less(&hard_and_easy);
        // 0, 0.2 and 0.1 nats a token: mean 0.1, standard deviation 0.1, over the root of 3.
        assert!((nats - 0.1).abs() < 1e-12, "{nats}");
        let error = standard_error.expect("three windows");
        assert!((error - 0.1 / 3_f64.sqrt()).abs() < 1e-12, "{error}");
        assert!(losses(&[(1, 1.0)]).less(&losses(&[(1, 2.0)])).standard_error.is_none());
    }
}
