//! The choice of the next token.

use examples::random::Random;

/// Options of sampling.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Sampling {
    /// Divide the logits by this before sampling; 0 decodes greedily: the largest logit wins, the
    /// first of equals.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Sample from the `k` largest logits only.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Seed of the first sequence; each further sequence adds one.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Sequences to generate from the prompt, in one batch.
    #[arg(long, default_value_t = 1)]
    pub sequences: usize,
}

impl Sampling {
    /// Samples a token from the softmax of the logits.
    pub(super) fn sample(&self, logits: &[f32], random: &mut Random) -> u32 {
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |token: u32| logits[token as usize];
        tokens.sort_by(|&left, &right| logit(right).total_cmp(&logit(left)));
        tokens.truncate(self.top_k.unwrap_or(logits.len()).max(1));
        let largest = logit(tokens[0]);
        let weight = |token: u32| (f64::from(logit(token) - largest) / self.temperature).exp();
        let total: f64 = tokens.iter().map(|&token| weight(token)).sum();
        const STEPS: usize = 1 << 53;
        let mut left = total * random.below(STEPS) as f64 / STEPS as f64;
        let sampled = tokens.iter().find(|&&token| {
            left -= weight(token);
            left < 0.0
        });
        *sampled.unwrap_or(&tokens[0])
    }
}
