//! What `config.json` says of a model.

use anyhow::{Result, bail, ensure};
use serde::Deserialize;

/// Decoders of the same parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Meta's.
    Llama,
    /// Mistral's, where every token sees all before it.
    Mistral,
    /// Queries, keys and values have a bias.
    Qwen2,
    /// Queries and keys are normalized, head by head.
    Qwen3,
}

/// The fields of `config.json` that decide what a model computes, with the defaults of
/// `transformers`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct LlamaConfig {
    /// Which of the relatives it is.
    pub model_type: ModelType,
    /// Different tokens.
    pub vocab_size: usize,
    /// Channels.
    pub hidden_size: usize,
    /// Channels inside the gated layers.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_hidden_layers: usize,
    /// Heads of queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values; without, as many as of queries.
    num_key_value_heads: Option<usize>,
    /// Channels of a head; without, the heads share all channels.
    head_dim: Option<usize>,
    /// What is added to mean squares before their root.
    #[serde(default = "default_epsilon")]
    pub rms_norm_eps: f64,
    /// Tokens that it was made for.
    pub max_position_embeddings: usize,
    /// Whether the embedding, transposed, is the output layer.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    /// Whether the gated layers have biases.
    #[serde(default)]
    pub mlp_bias: bool,
    #[serde(default = "default_activation")]
    hidden_act: String,
    #[serde(default)]
    use_sliding_window: Option<bool>,
    #[serde(default)]
    sliding_window: Option<usize>,
    #[serde(default)]
    layer_types: Vec<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    /// Both of these, as `transformers` 5 has them.
    rope_parameters: Option<Rope>,
    /// Tokens that end a text.
    eos_token_id: Option<OneOrMany>,
    /// The dtype of the weights that were not quantized.
    #[serde(alias = "torch_dtype")]
    pub dtype: Option<String>,
}

/// How positions become angles.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
struct Rope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

fn default_epsilon() -> f64 {
    1e-6
}

fn default_activation() -> String {
    "silu".to_owned()
}

impl LlamaConfig {
    /// Reads and checks the text of a `config.json`.
    ///
    /// # Errors
    /// What is not there, and what this model does not compute.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let config: Self = serde_json::from_slice(text)?;
        let (heads, shared) = (config.num_attention_heads, config.key_value_heads());
        let even = shared > 0 && heads.is_multiple_of(shared);
        ensure!(even, "{heads} heads of queries cannot share {shared} of keys and values");
        let depth = config.head_depth();
        ensure!(depth.is_multiple_of(2), "head_dim {depth}: expected an even number");
        let activation = &config.hidden_act;
        ensure!(activation == "silu", "hidden_act `{activation}`: expected `silu`");
        // Qwen2 names a window that is only used if another field says so.
        let windows = config.use_sliding_window.unwrap_or(config.sliding_window.is_some());
        let all = config.layer_types.iter().all(|kind| kind == "full_attention");
        ensure!(all && !windows, "attention within a sliding window is not computed here");
        config.frequencies()?;
        Ok(config)
    }

    /// Heads of keys and values.
    pub fn key_value_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Channels of a head.
    pub fn head_depth(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Whether queries, keys and values have a bias, and whether their output has.
    pub fn attention_biases(&self) -> [bool; 2] {
        match self.model_type {
            ModelType::Qwen2 => [true, false],
            ModelType::Llama | ModelType::Mistral | ModelType::Qwen3 => [self.attention_bias; 2],
        }
    }

    /// Whether queries and keys are normalized.
    pub fn normalizes_heads(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// Whether a token ends a text.
    pub fn ends(&self, token: u32) -> bool {
        match &self.eos_token_id {
            None => false,
            Some(OneOrMany::One(end)) => *end == token,
            Some(OneOrMany::Many(ends)) => ends.contains(&token),
        }
    }

    /// The angle, in radians, by which each pair of channels turns from one token to the next.
    ///
    /// # Errors
    /// A kind of scaling that is unknown here, or of which a number is missing.
    pub fn frequencies(&self) -> Result<Vec<f32>> {
        let none = Rope::default();
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref()).unwrap_or(&none);
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(10_000.0);
        let depth = self.head_depth();
        let exponents = (0..depth / 2).map(|pair| 2.0 * pair as f64 / depth as f64);
        let plain = exponents.map(|exponent| 1.0 / theta.powf(exponent));
        let number = |name: &str, value: Option<f64>| match value {
            Some(value) => Ok(value),
            None => bail!("scaling of rotations: `{name}` is missing"),
        };
        let scaled: Vec<f64> = match rope.rope_type.as_deref().unwrap_or("default") {
            "default" => plain.collect(),
            "linear" => {
                let factor = number("factor", rope.factor)?;
                plain.map(|frequency| frequency / factor).collect()
            }
            "llama3" => {
                let factor = number("factor", rope.factor)?;
                let low = number("low_freq_factor", rope.low_freq_factor)?;
                let high = number("high_freq_factor", rope.high_freq_factor)?;
                let length = rope.original_max_position_embeddings;
                let length = number("original_max_position_embeddings", length)?;
                let scaled = |frequency: f64| {
                    // How often the pair turns within the length it was trained for: often, it
                    // keeps its frequency; seldom, it is slowed; in between, in between.
                    let turns = length * frequency / core::f64::consts::TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    kept * frequency + (1.0 - kept) * frequency / factor
                };
                plain.map(scaled).collect()
            }
            other => bail!("rope_type `{other}`: expected default, linear or llama3"),
        };
        Ok(scaled.into_iter().map(|frequency| frequency as f32).collect())
    }
}
