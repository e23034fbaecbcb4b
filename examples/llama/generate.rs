//! Generation: the prompt in one forward pass, then one token of each sequence at a time.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fp4::Replay;
use burn_fp4::ops::{SampleOptions, argmax, is_host, on_awake_threads, sample};
use serde::Serialize;

use super::config::LlamaConfig;
use super::model::{KvCaches, Llama, Projection};
use super::sampling::Sampling;
use super::tokens::batch_of;
use examples::random::Random;

/// Generated tokens, and the time they took.
#[derive(Debug, Clone, Serialize)]
pub struct Generated {
    /// Tokens after the prompt, for each sequence.
    pub sequences: Vec<Vec<u32>>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time to the first token: the forward pass of the prompt.
    pub prompt_seconds: f64,
    /// Time from the first token to the second. On a device with graphs, it captures one.
    pub second_token_seconds: f64,
    /// Mean time of a decode step after the second token, of all sequences at once.
    pub seconds_per_token: Option<f64>,
    /// Decoded tokens per second after the second token, of all sequences together. A graph decodes
    /// up to seven tokens beyond an end, whose time counts.
    pub tokens_per_second: Option<f64>,
    /// True if decode steps were replays of a captured graph.
    pub replayed: bool,
}

/// Steps of a captured graph between two reads of their tokens. The device idles during a read,
/// which comes after all that was launched before.
const STEPS_AHEAD: usize = 8;

/// The next tokens of all sequences, their positions, and a random value for each sequence if their
/// successors are drawn.
type StepInput = (Tensor<2, Int>, Tensor<1, Int>, Option<Tensor<1>>);

/// A model, and how it draws tokens.
#[derive(Module, Debug)]
struct Generator<L: Module> {
    model: Llama<L>,
    #[module(skip)]
    options: SampleOptions,
}

impl<L: Projection> Generator<L> {
    /// Runs the model on the next tokens, and returns their successors, `[sequences, 1]`.
    fn step(
        &self,
        kv_cache: KvCaches,
        (tokens, positions, uniform): StepInput,
    ) -> (KvCaches, Tensor<2, Int>) {
        let (kv_cache, logits) = self.model.forward_cached(kv_cache, (tokens, positions));
        let tokens = match uniform {
            Some(uniform) => sample(logits, uniform, self.options),
            None => argmax(logits),
        };
        (kv_cache, tokens)
    }
}

/// Generates up to `max_new_tokens` tokens after a prompt, fewer if every sequence ends before.
///
/// # Errors
/// The prompt is empty, no tokens are asked for, or they do not fit the positions of the model;
/// and errors of the device.
pub fn generate<L: Projection>(
    model: &Llama<L>,
    config: &LlamaConfig,
    prompt: &[u32],
    max_new_tokens: usize,
    sampling: Sampling,
    device: &Device,
) -> Result<Generated> {
    ensure!(!prompt.is_empty(), "the prompt has no tokens; pass a longer --prompt");
    ensure!(
        max_new_tokens > 0 && sampling.sequences > 0,
        "nothing to generate; pass --tokens and --sequences of 1 or more"
    );
    let (length, positions) = (prompt.len() + max_new_tokens, config.max_position_embeddings);
    ensure!(
        length <= positions,
        "prompt and --tokens: {length} tokens, but the model has {positions} positions; \
         lower --tokens"
    );
    let run = || generate_tokens(model, config, prompt, max_new_tokens, sampling, device);
    // One pass for all steps: a step calls back only the threads that fell asleep.
    if is_host(device) { on_awake_threads(run) } else { run() }
}

fn generate_tokens<L: Projection>(
    model: &Llama<L>,
    config: &LlamaConfig,
    prompt: &[u32],
    max_new_tokens: usize,
    sampling: Sampling,
    device: &Device,
) -> Result<Generated> {
    let length = prompt.len() + max_new_tokens;
    let mut sequences = Sequences::new(config, sampling);
    let generator = Generator { model: model.clone(), options: sampling.options() };

    let start = Instant::now();
    let kv_cache = model.kv_cache(sampling.sequences, length);
    let tokens = batch_of(&prompt.repeat(sampling.sequences), prompt.len(), device);
    let positions = Tensor::arange(0..prompt.len() as i64, device);
    let mut replay = Replay::with_state(generator, kv_cache, Generator::step);
    let uniform = sequences.uniform(device);
    sequences.push(vec![replay.run_once((tokens, positions, uniform))?])?;
    let prompt_seconds = start.elapsed().as_secs_f64();

    let (mut steps, mut start, mut tokens_before) = (0, Instant::now(), 0);
    let mut second_token_seconds = 0.0;
    // Outputs that the host has not read: the next step takes the last one's tokens on the device.
    let mut unread: Vec<Tensor<2, Int>> = Vec::new();
    while steps + 1 < max_new_tokens && !sequences.all_ended() {
        let last = match unread.last() {
            Some(tokens) => tokens.clone(),
            None => batch_of(&sequences.last_tokens(), 1, device),
        };
        let position = Tensor::from_ints([(prompt.len() + steps) as i32], device);
        unread.push(replay.run((last, position, sequences.uniform(device)))?);
        let runs_ahead = steps > 0 && replay.is_graph();
        if !runs_ahead || unread.len() == STEPS_AHEAD {
            sequences.push(core::mem::take(&mut unread))?;
        }
        steps += 1;
        if steps == 1 {
            second_token_seconds = start.elapsed().as_secs_f64();
            (start, tokens_before) = (Instant::now(), sequences.count());
        }
    }
    sequences.push(unread)?;
    let (seconds, timed_steps) = (start.elapsed().as_secs_f64(), steps.saturating_sub(1));
    let timed_tokens = sequences.count() - tokens_before;
    Ok(Generated {
        sequences: sequences.tokens,
        prompt_tokens: prompt.len(),
        prompt_seconds,
        second_token_seconds,
        seconds_per_token: (timed_steps > 0).then(|| seconds / timed_steps as f64),
        tokens_per_second: (timed_steps > 0).then(|| timed_tokens as f64 / seconds),
        replayed: replay.is_graph(),
    })
}

/// Sequences that are generated together.
struct Sequences<'a> {
    config: &'a LlamaConfig,
    sampling: Sampling,
    randoms: Vec<Random>,
    tokens: Vec<Vec<u32>>,
}

impl<'a> Sequences<'a> {
    fn new(config: &'a LlamaConfig, sampling: Sampling) -> Self {
        let seeds = (0..sampling.sequences as u64).map(|index| sampling.seed + index);
        let randoms = seeds.map(Random::new).collect();
        Self { config, sampling, randoms, tokens: vec![Vec::new(); sampling.sequences] }
    }

    /// Appends the next tokens of each sequence, up to its end: an output of each of some steps.
    fn push(&mut self, outputs: Vec<Tensor<2, Int>>) -> Result<()> {
        let steps = outputs.len();
        if steps == 0 {
            return Ok(());
        }
        let next = Tensor::cat(outputs, 1).try_into_data()?;
        for (at, token) in next.iter::<u32>().enumerate() {
            let tokens = &mut self.tokens[at / steps];
            if !ended(self.config, tokens) {
                tokens.push(token);
            }
        }
        Ok(())
    }

    /// Returns a random value of `[0, 1)` for each sequence, if tokens are drawn.
    fn uniform(&mut self, device: &Device) -> Option<Tensor<1>> {
        const STEPS: usize = 1 << 24;
        let uniform = |random: &mut Random| random.below(STEPS) as f32 / STEPS as f32;
        let values: Vec<f32> = self.randoms.iter_mut().map(uniform).collect();
        let count = values.len();
        let values = || Tensor::from_data(TensorData::new(values, [count]), (device, DType::F32));
        (self.sampling.temperature > 0.0).then(values)
    }

    fn all_ended(&self) -> bool {
        self.tokens.iter().all(|tokens| ended(self.config, tokens))
    }

    fn last_tokens(&self) -> Vec<u32> {
        self.tokens.iter().filter_map(|tokens| tokens.last().copied()).collect()
    }

    /// Counts the tokens of all sequences.
    fn count(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }
}

fn ended(config: &LlamaConfig, tokens: &[u32]) -> bool {
    tokens.last().is_some_and(|&last| config.is_eos(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs of several steps go to their sequences in order, and none beyond an end.
    #[test]
    fn tokens_of_several_steps_go_to_their_sequences() {
        let mut config: serde_json::Value =
            serde_json::from_str(include_str!("config.json")).expect("JSON");
        config["eos_token_id"] = 9.into();
        let config: LlamaConfig = serde_json::from_value(config).expect("a configuration");
        let (temperature, top_k, top_p, seed) = (0.0, None, None, 1);
        let sampling = Sampling { temperature, top_k, top_p, seed, sequences: 2 };
        let mut sequences = Sequences::new(&config, sampling);
        let step =
            |tokens: [i32; 2]| Tensor::<1, Int>::from_ints(tokens, &Device::flex()).reshape([2, 1]);
        sequences.push(vec![step([1, 2])]).expect("on the host");
        sequences.push(vec![step([3, 4]), step([9, 5]), step([6, 7])]).expect("on the host");
        sequences.push(Vec::new()).expect("nothing");
        assert_eq!(sequences.tokens, [vec![1, 3, 9], vec![2, 4, 5, 7]]);
        assert!(!sequences.all_ended());
    }
}
