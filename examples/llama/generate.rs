//! Texts continued.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device};
use serde::Serialize;

use super::config::LlamaConfig;
use super::model::{Cache, Llama, Projection};
use super::tokens::tensor;
use crate::random::Random;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Sampling {
    /// What scores are divided by before a token is drawn; 0: the best is taken.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Draw among so many of the best only.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Seed of what is drawn.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// What was generated, and how fast.
#[derive(Debug, Clone, Serialize)]
pub struct Generated {
    /// The tokens that follow the prompt.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// To read the prompt and choose the first token.
    pub prompt_seconds: f64,
    /// For each of the other tokens.
    pub seconds_per_token: f64,
}

/// Continues a prompt by so many tokens, or until one of them ends the text.
///
/// # Errors
/// If the prompt is empty, or there would be more tokens than the model has positions.
pub fn generate<L: Projection>(
    model: &Llama<L>,
    config: &LlamaConfig,
    prompt: &[u32],
    count: usize,
    sampling: Sampling,
    device: &Device,
) -> Result<Generated> {
    ensure!(!prompt.is_empty(), "the prompt has no tokens");
    let (asked, positions) = (prompt.len() + count, config.max_position_embeddings);
    ensure!(asked <= positions, "{asked} tokens: the model has {positions} positions");
    let mut random = Random::new(sampling.seed);
    let (mut cache, mut tokens) = (Cache::default(), Vec::with_capacity(count));
    let start = Instant::now();
    let mut prompt_seconds = 0.0;
    let mut input = prompt.to_vec();
    while tokens.len() < count && !tokens.last().is_some_and(|&last| config.ends(last)) {
        let scores = model.next(tensor(&input, input.len(), device), &mut cache);
        let scores: Vec<f32> = scores.cast(DType::F32).into_data().iter().collect();
        let token = sampling.choose(&scores, &mut random);
        if tokens.is_empty() {
            prompt_seconds = start.elapsed().as_secs_f64();
        }
        tokens.push(token);
        input = vec![token];
    }
    let others = tokens.len().saturating_sub(1).max(1) as f64;
    let seconds_per_token = (start.elapsed().as_secs_f64() - prompt_seconds) / others;
    Ok(Generated { tokens, prompt_tokens: prompt.len(), prompt_seconds, seconds_per_token })
}

impl Sampling {
    /// A token, by the scores of all of them. Of equal scores the first counts.
    fn choose(&self, scores: &[f32], random: &mut Random) -> u32 {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        let score = |token: u32| scores[token as usize];
        if self.temperature <= 0.0 {
            let best = order.into_iter().reduce(|best, token| match score(token) > score(best) {
                true => token,
                false => best,
            });
            return best.unwrap_or(0);
        }
        order.sort_by(|&left, &right| score(right).total_cmp(&score(left)));
        order.truncate(self.top_k.unwrap_or(scores.len()).max(1));
        let best = score(order[0]);
        let weight = |token: u32| (f64::from(score(token) - best) / self.temperature).exp();
        let all: f64 = order.iter().map(|&token| weight(token)).sum();
        const STEPS: usize = 1 << 53;
        let mut left = all * random.below(STEPS) as f64 / STEPS as f64;
        let drawn = order.iter().find(|&&token| {
            left -= weight(token);
            left < 0.0
        });
        *drawn.unwrap_or(&order[0])
    }
}
