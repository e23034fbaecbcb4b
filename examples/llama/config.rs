//! `config.json`: the shape of a model.

use anyhow::{Result, bail, ensure};
use serde::Deserialize;

/// Architectures that [`Llama`](super::Llama) computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Meta's Llama.
    Llama,
    /// Mistral without a sliding window.
    Mistral,
    /// Qwen2: queries, keys and values have a bias.
    Qwen2,
    /// Qwen3: queries and keys are normalized per head.
    Qwen3,
}

/// Fields of `config.json` that decide what a model computes, with the defaults of
/// `transformers`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct LlamaConfig {
    /// Architecture of the model.
    pub model_type: ModelType,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Channels inside an MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; defaults to the number of query heads.
    num_key_value_heads: Option<usize>,
    /// Channels of a head; defaults to `hidden_size / num_attention_heads`.
    head_dim: Option<usize>,
    /// Epsilon of every RMSNorm.
    #[serde(default = "default_epsilon")]
    pub rms_norm_eps: f64,
    /// Longest context that the model was trained for.
    pub max_position_embeddings: usize,
    /// Use the embedding as the `lm_head`.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    /// Give the linear layers of the MLPs biases.
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
    rope_scaling: Option<RopeParameters>,
    /// `rope_theta` and `rope_scaling` in one object, as `transformers` 5 writes them.
    rope_parameters: Option<RopeParameters>,
    /// End-of-sequence tokens.
    eos_token_id: Option<OneOrMany>,
    /// Dtype of the weights that are not quantized.
    #[serde(alias = "torch_dtype")]
    pub dtype: Option<String>,
}

/// Parameters of the rotary position embeddings.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
struct RopeParameters {
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
    /// A field is missing, or asks for something that [`Llama`](super::Llama) does not compute.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let config: Self = serde_json::from_slice(text)?;
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads());
        ensure!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "num_attention_heads: {heads} is not a multiple of num_key_value_heads, {kv_heads}"
        );
        let head_dim = config.head_dim();
        ensure!(head_dim.is_multiple_of(2), "head_dim: expected an even number, found {head_dim}");
        let activation = &config.hidden_act;
        ensure!(activation == "silu", "hidden_act: expected `silu`, found `{activation}`");
        // Qwen2 writes `sliding_window` even where `use_sliding_window` is false.
        let sliding = config.use_sliding_window.unwrap_or(config.sliding_window.is_some());
        let full = config.layer_types.iter().all(|kind| kind == "full_attention");
        ensure!(full && !sliding, "sliding window attention is not supported");
        config.inv_freq()?;
        Ok(config)
    }

    /// Returns the number of key and value heads.
    pub fn num_key_value_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Returns the number of channels of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Returns whether `q_proj`, `k_proj` and `v_proj` have a bias, and whether `o_proj` has.
    pub fn attention_biases(&self) -> [bool; 2] {
        match self.model_type {
            ModelType::Qwen2 => [true, false],
            ModelType::Llama | ModelType::Mistral | ModelType::Qwen3 => [self.attention_bias; 2],
        }
    }

    /// Returns true if queries and keys are normalized per head.
    pub fn has_qk_norm(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// Returns true for an end-of-sequence token.
    pub fn is_eos(&self, token: u32) -> bool {
        match &self.eos_token_id {
            None => false,
            Some(OneOrMany::One(eos)) => *eos == token,
            Some(OneOrMany::Many(eos)) => eos.contains(&token),
        }
    }

    /// Returns the bytes of a value of a dense weight: its dtype is f32 if none is named.
    #[must_use]
    pub fn value_bytes(&self) -> usize {
        match self.dtype.as_deref() {
            Some("bfloat16" | "float16") => 2,
            _ => 4,
        }
    }

    /// Computes the rotation of each pair of channels from one position to the next, in radians.
    ///
    /// # Errors
    /// The `rope_type` is unknown, or one of its parameters is missing.
    pub fn inv_freq(&self) -> Result<Vec<f32>> {
        let none = RopeParameters::default();
        let rope = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref()).unwrap_or(&none);
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(10_000.0);
        let head_dim = self.head_dim();
        let exponents = (0..head_dim / 2).map(|pair| 2.0 * pair as f64 / head_dim as f64);
        let unscaled = exponents.map(|exponent| 1.0 / theta.powf(exponent));
        let required = |name: &str, value: Option<f64>| match value {
            Some(value) => Ok(value),
            None => bail!("RoPE scaling: `{name}` is missing"),
        };
        let scaled: Vec<f64> = match rope.rope_type.as_deref().unwrap_or("default") {
            "default" => unscaled.collect(),
            "linear" => {
                let factor = required("factor", rope.factor)?;
                unscaled.map(|inv_freq| inv_freq / factor).collect()
            }
            "llama3" => {
                let factor = required("factor", rope.factor)?;
                let low = required("low_freq_factor", rope.low_freq_factor)?;
                let high = required("high_freq_factor", rope.high_freq_factor)?;
                let context = rope.original_max_position_embeddings;
                let context = required("original_max_position_embeddings", context)?;
                let scaled = |inv_freq: f64| {
                    // High frequencies stay, low ones are divided by the factor, and those between
                    // are interpolated.
                    let rotations = context * inv_freq / core::f64::consts::TAU;
                    let smooth = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                    smooth * inv_freq + (1.0 - smooth) * inv_freq / factor
                };
                unscaled.map(scaled).collect()
            }
            other => bail!("rope_type: expected default, linear or llama3, found `{other}`"),
        };
        Ok(scaled.into_iter().map(|inv_freq| inv_freq as f32).collect())
    }
}
