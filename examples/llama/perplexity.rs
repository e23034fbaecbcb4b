//! How well a model predicts a text.

use anyhow::{Result, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor};
use serde::Serialize;

use super::model::{Llama, Projection};
use super::tokens::tensor;

/// The windows that a text is read in.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Windows {
    /// Tokens of a window.
    #[arg(long, default_value_t = 256)]
    pub window: usize,
    /// Tokens from the start of a window to that of the next. What windows share is the context of
    /// the later one: every token is predicted once.
    #[arg(long, default_value_t = 128)]
    pub stride: usize,
    /// Windows that are read at once.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
}

/// How well a text was predicted.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Perplexity {
    /// Tokens that were predicted: all but the first.
    pub tokens: usize,
    /// Mean of `-ln p` of a token.
    pub nats: f64,
    /// `e` to the power of that.
    pub perplexity: f64,
}

/// Predicts each token of a text but the first from those before it in its window.
///
/// # Errors
/// If there is nothing to predict, or windows do not overlap.
pub fn perplexity<L: Projection>(
    model: &Llama<L>,
    tokens: &[u32],
    windows: Windows,
    device: &Device,
) -> Result<Perplexity> {
    let Windows { window, stride, batch } = windows;
    ensure!(tokens.len() > 1, "{} tokens: expected at least 2", tokens.len());
    ensure!(batch > 0, "a batch of no windows");
    let overlap = 0 < stride && stride < window;
    ensure!(overlap, "a window of {window} tokens at every {stride}th: expected them to overlap");
    let (mut spans, mut known) = (Vec::new(), 1);
    for start in (0..).step_by(stride) {
        let end = (start + window).min(tokens.len());
        spans.push((start..end, known - start));
        known = end;
        if end == tokens.len() {
            break;
        }
    }
    let mut sum = 0.0;
    // Those of a batch are equally long, and begin to count at the same place.
    let alike = |left: &Span, right: &Span| left.0.len() == right.0.len() && left.1 == right.1;
    for batch in spans.chunk_by(alike).flat_map(|alike| alike.chunks(batch)) {
        let (span, first) = &batch[0];
        let rows = batch.iter().flat_map(|(span, _)| &tokens[span.clone()]).copied();
        let rows = tensor(&rows.collect::<Vec<_>>(), span.len(), device);
        sum += losses(model, rows, *first);
    }
    let count = tokens.len() - 1;
    let nats = sum / count as f64;
    Ok(Perplexity { tokens: count, nats, perplexity: nats.exp() })
}

/// The tokens of a window, and the first of it that counts.
type Span = (core::ops::Range<usize>, usize);

/// The sum of `-ln p` of the tokens of windows `[batch, tokens]`, from one on.
fn losses<L: Projection>(model: &Llama<L>, windows: Tensor<2, Int>, first: usize) -> f64 {
    let [_, length] = windows.dims();
    let scores = model.forward(windows.clone()).narrow(1, first - 1, length - first);
    let known = windows.narrow(1, first, length - first).unsqueeze_dim(2);
    let logarithms = log_softmax(scores.cast(DType::F32), 2).gather(2, known);
    // Of thousands of logarithms a sum in f32 would lose digits.
    -logarithms.into_data().iter::<f64>().sum::<f64>()
}
