//! The draw of the next token from logits.

/// Options of the draw of a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleOptions {
    /// Divides the logits; above 0.
    pub temperature: f32,
    /// Draws only from logits that are as large as the `k`-th largest. Equal logits are all kept,
    /// as in `transformers`.
    pub top_k: Option<usize>,
    /// Draws only from the largest logits that together have this probability, after `top_k`. The
    /// one that reaches it is kept, and all that equal it.
    pub top_p: Option<f32>,
}

/// Draws the index of a logit from their softmax, given a random value of `[0, 1)`. NaN counts as
/// the least logit; among NaN alone it is the first.
#[must_use]
pub fn sample(logits: &[f32], uniform: f32, options: &SampleOptions) -> usize {
    let &SampleOptions { temperature, top_k, top_p } = options;
    let mut kept: Vec<_> = (0..logits.len()).filter(|&at| !logits[at].is_nan()).collect();
    kept.sort_by(|&left, &right| logits[right].total_cmp(&logits[left]));
    let keep = |kept: &mut Vec<usize>, count: usize| {
        let Some(&last) = count.checked_sub(1).and_then(|last| kept.get(last)) else { return };
        kept.retain(|&at| logits[at] >= logits[last]);
    };
    let Some(&largest) = kept.first() else { return 0 };
    let weight = |at: usize| match logits[at] == logits[largest] {
        // Also if it is infinite.
        true => 1.0,
        false => f64::from((logits[at] - logits[largest]) / temperature).exp(),
    };
    if let Some(top_k) = top_k {
        keep(&mut kept, top_k.max(1));
    }
    if let Some(top_p) = top_p {
        let needed = f64::from(top_p) * kept.iter().map(|&at| weight(at)).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|&at| {
            sum += weight(at);
            sum >= needed
        });
        if let Some(last) = reached {
            keep(&mut kept, last + 1);
        }
    }
    let total: f64 = kept.iter().map(|&at| weight(at)).sum();
    let mut left = total * f64::from(uniform);
    let drawn = kept.iter().find(|&&at| {
        left -= weight(at);
        left < 0.0
    });
    *drawn.unwrap_or(&largest)
}
