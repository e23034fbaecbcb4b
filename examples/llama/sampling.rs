//! Options of the choice of the next token.

use burn_fp4::ops::SampleOptions;

use super::quantize::at_least;

/// Options of sampling.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Sampling {
    /// Divide the logits by this before sampling; 0 decodes greedily: the largest logit wins, the
    /// first of equals.
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f32,
    /// Sample from the `k` largest logits only, and those equal to the smallest of them; with
    /// --temperature.
    #[arg(long, value_name = "K", value_parser = at_least(1), requires = "temperature")]
    pub top_k: Option<usize>,
    /// Sample from the largest logits only that together have this probability, after --top-k; with
    /// --temperature.
    #[arg(long, value_name = "P", value_parser = probability, requires = "temperature")]
    pub top_p: Option<f32>,
    /// Seed of the first sequence; each further sequence adds one.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Sequences to generate from the prompt, in one batch.
    #[arg(long, default_value_t = 1, value_parser = at_least(1))]
    pub sequences: usize,
}

impl Sampling {
    pub(super) fn options(self) -> SampleOptions {
        let Self { temperature, top_k, top_p, .. } = self;
        SampleOptions { temperature, top_k, top_p }
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(value) if value >= 0.0 && f32::is_finite(value) => Ok(value),
        _ => Err(String::from("pass a finite number from 0 on")),
    }
}

fn probability(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err(String::from("pass a number above 0, at most 1")),
    }
}
