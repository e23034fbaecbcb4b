//! Texts continued.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4::Replay;
use serde::Serialize;

use super::config::LlamaConfig;
use super::model::{Cache, Llama, Projection};
use super::tokens::tensor;
use examples::random::Random;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Sampling {
    /// What scores are divided by before a token is drawn; 0: the best is taken, the first of
    /// equals.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Draw among so many of the best only.
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Seed of what is drawn; of each further sequence, the number after.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// How often the prompt is continued, all at once.
    #[arg(long, default_value_t = 1)]
    pub sequences: usize,
}

/// What was generated, and how fast.
#[derive(Debug, Clone, Serialize)]
pub struct Generated {
    /// The tokens that follow the prompt, of each sequence.
    pub sequences: Vec<Vec<u32>>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// To read the prompt and choose the first token.
    pub prompt_seconds: f64,
    /// To choose the second token, which is when a device records that has graphs.
    pub second_token_seconds: f64,
    /// From each further token to the next, of all sequences at once.
    pub seconds_per_token: Option<f64>,
    /// Of all sequences, after the second.
    pub tokens_per_second: Option<f64>,
    /// Whether they were replayed as a graph of the device.
    pub replayed: bool,
}

/// Of each sequence the best token, or the scores of all where one is drawn.
type Found = (Option<Tensor<2, Int>>, Option<Tensor<2>>);

/// A pass, and what the next token is chosen from.
fn next<L: Projection, const DRAWN: bool>(
    model: &Llama<L>,
    cache: Cache,
    read: (Tensor<2, Int>, Tensor<1, Int>),
) -> (Cache, Found) {
    let (cache, scores) = model.next(cache, read);
    let found = match DRAWN {
        true => (None, Some(scores)),
        false => (Some(scores.argmax(1)), None),
    };
    (cache, found)
}

/// Continues a prompt by so many tokens, or until one of them ends the text, in so many sequences
/// at once.
///
/// # Errors
/// If the prompt is empty, or there would be more tokens than the model has positions; and what a
/// device says.
pub fn generate<L: Projection>(
    model: &Llama<L>,
    config: &LlamaConfig,
    prompt: &[u32],
    count: usize,
    sampling: Sampling,
    device: &Device,
) -> Result<Generated> {
    ensure!(!prompt.is_empty(), "the prompt has no tokens");
    ensure!(count > 0 && sampling.sequences > 0, "no tokens are asked for");
    let (asked, positions) = (prompt.len() + count, config.max_position_embeddings);
    ensure!(asked <= positions, "{asked} tokens: the model has {positions} positions");
    let mut randoms: Vec<_> =
        (0..sampling.sequences as u64).map(|i| Random::new(sampling.seed + i)).collect();
    let mut sequences = vec![Vec::new(); sampling.sequences];
    let ended = |tokens: &Vec<u32>| tokens.last().is_some_and(|&last| config.ends(last));
    let mut choose = |sequences: &mut [Vec<u32>], (best, scores): Found| -> Result<()> {
        let best = best.map(Tensor::try_into_data).transpose()?;
        let mut chosen: Vec<u32> = best.iter().flat_map(|best| best.iter::<u32>()).collect();
        if let Some(scores) = scores {
            let [_, words] = scores.dims();
            let scores: Vec<f32> = scores.cast(DType::F32).try_into_data()?.iter().collect();
            let each = scores.chunks_exact(words).zip(&mut randoms);
            chosen = each.map(|(scores, random)| sampling.draw(scores, random)).collect();
        }
        let all = sequences.iter_mut().zip(chosen);
        for (tokens, token) in all.filter(|(tokens, _)| !ended(tokens)) {
            tokens.push(token);
        }
        Ok(())
    };
    let pass = if sampling.temperature > 0.0 { next::<L, true> } else { next::<L, false> };

    let start = Instant::now();
    let cache = model.cache(sampling.sequences, asked);
    let tokens = tensor(&prompt.repeat(sampling.sequences), prompt.len(), device);
    let read = Tensor::arange(0..prompt.len() as i64, device);
    let (cache, found) = pass(model, cache, (tokens, read));
    choose(&mut sequences, found)?;
    let prompt_seconds = start.elapsed().as_secs_f64();

    // One token of each sequence at a time, launched as one where the device can.
    let mut replay = Replay::with_state(model.clone(), cache, pass);
    let written = |sequences: &[Vec<u32>]| sequences.iter().map(Vec::len).sum::<usize>();
    let (mut passes, mut start, mut before) = (0, Instant::now(), 0);
    let mut second_token_seconds = 0.0;
    while passes + 1 < count && !sequences.iter().all(ended) {
        let last: Vec<u32> = sequences.iter().filter_map(|tokens| tokens.last().copied()).collect();
        let position = Tensor::from_ints([(prompt.len() + passes) as i32], device);
        choose(&mut sequences, replay.run((tensor(&last, 1, device), position))?)?;
        passes += 1;
        if passes == 1 {
            second_token_seconds = start.elapsed().as_secs_f64();
            (start, before) = (Instant::now(), written(&sequences));
        }
    }
    let (seconds, others) = (start.elapsed().as_secs_f64(), passes.saturating_sub(1));
    let further = written(&sequences) - before;
    Ok(Generated {
        sequences,
        prompt_tokens: prompt.len(),
        prompt_seconds,
        second_token_seconds,
        seconds_per_token: (others > 0).then(|| seconds / others as f64),
        tokens_per_second: (others > 0).then(|| further as f64 / seconds),
        replayed: replay.is_graph(),
    })
}

impl Sampling {
    /// A token, by the scores of all of them.
    fn draw(&self, scores: &[f32], random: &mut Random) -> u32 {
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        let score = |token: u32| scores[token as usize];
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
