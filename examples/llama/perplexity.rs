//! Perplexity over overlapping windows of a text.

use anyhow::{Result, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor};
use serde::Serialize;

use super::model::{Llama, Projection};
use super::tokens::tensor;

/// Overlapping windows of a text.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Windows {
    /// Tokens of a window.
    #[arg(long, default_value_t = 256)]
    pub window: usize,
    /// Tokens between the starts of two windows. Tokens in both windows are context in the second:
    /// every token is predicted once.
    #[arg(long, default_value_t = 128)]
    pub stride: usize,
    /// Windows of a batch.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
}

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
    let Windows { window, stride, batch } = windows;
    ensure!(
        tokens.len() > 1,
        "{} tokens to predict: expected at least 2; hold out more",
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
    let mut sum = 0.0;
    // Windows of a batch have the same length and the same number of context tokens.
    let alike = |left: &Span, right: &Span| left.0.len() == right.0.len() && left.1 == right.1;
    for batch in spans.chunk_by(alike).flat_map(|alike| alike.chunks(batch)) {
        let (span, context) = &batch[0];
        let rows = batch.iter().flat_map(|(span, _)| &tokens[span.clone()]).copied();
        let rows = tensor(&rows.collect::<Vec<_>>(), span.len(), device);
        sum += negative_log_likelihood(model, rows, *context);
    }
    let count = tokens.len() - 1;
    let nats = sum / count as f64;
    Ok(Perplexity { tokens: count, nats, perplexity: nats.exp() })
}

/// Range of a window in the text, and its number of context tokens.
type Span = (core::ops::Range<usize>, usize);

/// Sums `-ln p` over the tokens of windows `[batch, tokens]` after the first `context` tokens.
fn negative_log_likelihood<L: Projection>(
    model: &Llama<L>,
    windows: Tensor<2, Int>,
    context: usize,
) -> f64 {
    let [_, length] = windows.dims();
    let logits = model.forward(windows.clone()).narrow(1, context - 1, length - context);
    let targets = windows.narrow(1, context, length - context).unsqueeze_dim(2);
    let log_probs = log_softmax(logits.cast(DType::F32), 2).gather(2, targets);
    // An f32 sum over thousands of values would lose digits.
    -log_probs.into_data().iter::<f64>().sum::<f64>()
}
