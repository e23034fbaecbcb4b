//! A book as characters, and a small transformer that models it.

use anyhow::ensure;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_fp4::{Fp4TrainLinear, TrainRecipe};

use crate::random::Random;
use crate::training::{Schedule, train};

/// Characters of a window.
pub const CONTEXT: usize = 64;

/// A text as character ids, the last tenth of it for validation.
#[derive(Debug, Clone)]
pub struct Text {
    train: Vec<i32>,
    valid: Vec<i32>,
    /// Number of different characters.
    pub vocab_size: usize,
}

impl Text {
    /// Reads the embedded book.
    ///
    /// # Errors
    /// The book is too short to train and validate.
    pub fn genesis() -> anyhow::Result<Self> {
        let book = include_str!("data/genesis.txt");
        let mut alphabet: Vec<char> = book.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let id = |character| alphabet.binary_search(&character).map(|at| at as i32);
        let ids: Vec<_> = book.chars().filter_map(|character| id(character).ok()).collect();
        ensure!(ids.len() > 40 * CONTEXT, "the text has {} characters", ids.len());
        Ok(Self::of(&ids, alphabet.len()))
    }

    /// Returns the two halves of the text, each with its last tenth for validation.
    pub fn halves(&self) -> [Self; 2] {
        let whole = [&self.train[..], &self.valid[..]].concat();
        let (first, second) = whole.split_at(whole.len() / 2);
        [first, second].map(|half| Self::of(half, self.vocab_size))
    }

    fn of(ids: &[i32], vocab_size: usize) -> Self {
        let (train, valid) = ids.split_at(ids.len() / 10 * 9);
        Self { train: train.to_vec(), valid: valid.to_vec(), vocab_size }
    }

    /// Returns windows `[n, CONTEXT]` of a part of the text, and the next character of each
    /// character.
    fn windows(part: &[i32], starts: &[usize], device: &Device) -> [Tensor<2, Int>; 2] {
        [0, 1].map(|shift| {
            let ids: Vec<_> = starts
                .iter()
                .flat_map(|start| &part[start + shift..][..CONTEXT])
                .copied()
                .collect();
            Tensor::from_data(TensorData::new(ids, [starts.len(), CONTEXT]), device)
        })
    }

    /// Iterates over batches of the windows of the validation part.
    pub fn validation(&self, device: &Device) -> impl Iterator<Item = [Tensor<2, Int>; 2]> {
        let starts: Vec<_> = (0..self.valid.len() - CONTEXT).step_by(CONTEXT).collect();
        let batches: Vec<_> = starts.chunks(32).map(<[usize]>::to_vec).collect();
        let batch = move |starts: Vec<usize>| Self::windows(&self.valid, &starts, device);
        batches.into_iter().map(batch)
    }

    /// Draws a batch of windows of the training part.
    pub fn batch(&self, size: usize, random: &mut Random, device: &Device) -> [Tensor<2, Int>; 2] {
        let last = self.train.len() - CONTEXT;
        let starts: Vec<_> = (0..size).map(|_| random.below(last)).collect();
        Self::windows(&self.train, &starts, device)
    }
}

/// A model that predicts the next character of each character in a window.
pub trait CharModel: Module {
    /// Returns the logits `[n, CONTEXT, vocab_size]` of windows `[n, CONTEXT]`.
    fn logits(&self, windows: Tensor<2, Int>) -> Tensor<3>;

    /// Computes the mean cross-entropy of a character, in nats.
    fn loss(&self, [windows, next]: [Tensor<2, Int>; 2]) -> Tensor<1> {
        let logits = self.logits(windows);
        let [n, context, vocab_size] = logits.dims();
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits.reshape([n * context, vocab_size]), next.reshape([n * context]))
    }

    /// Computes the mean loss of a character over the validation part, in nats.
    fn validate(&self, text: &Text, device: &Device) -> f64 {
        let (mut sum, mut count) = (0.0, 0);
        for [windows, next] in text.validation(device) {
            let [n, _] = windows.dims();
            sum += self.loss([windows, next]).into_scalar::<f64>() * n as f64;
            count += n;
        }
        sum / count as f64
    }

    /// Trains with AdamW and a cosine schedule; calls `progress` with the step and its loss.
    fn train_on(
        self,
        text: &Text,
        steps: usize,
        seed: u64,
        device: &Device,
        progress: impl FnMut(usize, f64),
    ) -> Self {
        const BATCH: usize = 16;
        let device = &device.clone().autodiff();
        let mut random = Random::new(seed + 1);
        let schedule = Schedule { steps, learning_rate: 3e-3, warm_up: 20 };
        let loss = |model: &Self| model.loss(text.batch(BATCH, &mut random, device));
        train(self, &AdamWConfig::new(), schedule, loss, progress)
    }
}

/// Size of a [`CharTransformer`].
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Number of layers.
    pub layers: usize,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Attention heads.
    pub heads: usize,
}

/// A decoder whose linear layers train in FP4 with a recipe.
#[derive(Module, Debug)]
pub struct CharTransformer {
    characters: Embedding,
    positions: Embedding,
    layers: Vec<DecoderLayer>,
    norm: LayerNorm,
    lm_head: Linear,
}

#[derive(Module, Debug)]
struct DecoderLayer {
    attention_norm: LayerNorm,
    query: Fp4TrainLinear,
    key: Fp4TrainLinear,
    value: Fp4TrainLinear,
    output: Fp4TrainLinear,
    mlp_norm: LayerNorm,
    up: Fp4TrainLinear,
    down: Fp4TrainLinear,
    heads: usize,
}

impl CharTransformer {
    /// Creates a transformer with random weights. The last `keep_last` layers and the `lm_head` are
    /// in high precision.
    ///
    /// # Errors
    /// The recipe is inconsistent.
    pub fn new(
        text: &Text,
        size: Size,
        recipe: TrainRecipe,
        keep_last: usize,
        seed: u64,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let Size { layers, hidden_size, heads } = size;
        let layer = |layer: usize| {
            let recipe = recipe.for_layer(layer, layers, keep_last);
            let linear = |index: u64, in_features, out_features| {
                let linear = LinearConfig::new(in_features, out_features).init(device);
                Fp4TrainLinear::new(linear, recipe, seed << 32 | (layer as u64) << 8 | index)
            };
            anyhow::Ok(DecoderLayer {
                attention_norm: LayerNormConfig::new(hidden_size).init(device),
                query: linear(0, hidden_size, hidden_size)?,
                key: linear(1, hidden_size, hidden_size)?,
                value: linear(2, hidden_size, hidden_size)?,
                output: linear(3, hidden_size, hidden_size)?,
                mlp_norm: LayerNormConfig::new(hidden_size).init(device),
                up: linear(4, hidden_size, 4 * hidden_size)?,
                down: linear(5, 4 * hidden_size, hidden_size)?,
                heads,
            })
        };
        Ok(Self {
            characters: EmbeddingConfig::new(text.vocab_size, hidden_size).init(device),
            positions: EmbeddingConfig::new(CONTEXT, hidden_size).init(device),
            layers: (0..layers).map(layer).collect::<anyhow::Result<_>>()?,
            norm: LayerNormConfig::new(hidden_size).init(device),
            lm_head: LinearConfig::new(hidden_size, text.vocab_size).init(device),
        })
    }

    /// Returns the logits `[n, CONTEXT, vocab_size]` of windows `[n, CONTEXT]`.
    pub fn forward(&self, windows: Tensor<2, Int>) -> Tensor<3> {
        let device = windows.device();
        let [_, context] = windows.dims();
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device).unsqueeze();
        let causal_mask = Tensor::<2, Bool>::tril_mask([context, context], 0, &device);
        let mut hidden = self.characters.forward(windows) + self.positions.forward(positions);
        for layer in &self.layers {
            hidden = layer.forward(hidden, causal_mask.clone());
        }
        self.lm_head.forward(self.norm.forward(hidden))
    }
}

impl CharModel for CharTransformer {
    fn logits(&self, windows: Tensor<2, Int>) -> Tensor<3> {
        self.forward(windows)
    }
}

impl DecoderLayer {
    fn forward(&self, input: Tensor<3>, causal_mask: Tensor<2, Bool>) -> Tensor<3> {
        let normed = self.attention_norm.forward(input.clone());
        let [n, context, hidden_size] = normed.dims();
        let head_dim = hidden_size / self.heads;
        let split =
            |values: Tensor<3>| values.reshape([n, context, self.heads, head_dim]).swap_dims(1, 2);
        let query = split(self.query.forward(normed.clone()));
        let key = split(self.key.forward(normed.clone()));
        let value = split(self.value.forward(normed));
        let attn_weights = query.matmul(key.swap_dims(2, 3)) / (head_dim as f64).sqrt();
        let attn_weights = attn_weights.mask_fill(causal_mask.unsqueeze(), f32::NEG_INFINITY);
        let attended = softmax(attn_weights, 3).matmul(value).swap_dims(1, 2);
        let attended = attended.reshape([n, context, hidden_size]);
        let hidden = input + self.output.forward(attended);
        let normed = self.mlp_norm.forward(hidden.clone());
        hidden + self.down.forward(gelu(self.up.forward(normed)))
    }
}
