//! A book, character by character, and a small transformer that continues it.

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

/// Characters that the transformer sees at once.
pub const CONTEXT: usize = 64;

/// A text as numbers, the last tenth of it for validation.
#[derive(Debug, Clone)]
pub struct Text {
    train: Vec<i32>,
    valid: Vec<i32>,
    /// Different characters.
    pub characters: usize,
}

impl Text {
    /// The embedded book.
    ///
    /// # Errors
    /// If it is shorter than what is needed to train and validate.
    pub fn genesis() -> anyhow::Result<Self> {
        let book = include_str!("data/genesis.txt");
        let mut alphabet: Vec<char> = book.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let number = |character| alphabet.binary_search(&character).map(|at| at as i32);
        let numbers: Vec<_> = book.chars().filter_map(|character| number(character).ok()).collect();
        ensure!(numbers.len() > 40 * CONTEXT, "the text has {} characters", numbers.len());
        Ok(Self::of(&numbers, alphabet.len()))
    }

    /// The two halves of the text, each with its last tenth for validation.
    pub fn halves(&self) -> [Self; 2] {
        let whole = [&self.train[..], &self.valid[..]].concat();
        let (first, second) = whole.split_at(whole.len() / 2);
        [first, second].map(|half| Self::of(half, self.characters))
    }

    fn of(numbers: &[i32], characters: usize) -> Self {
        let (train, valid) = numbers.split_at(numbers.len() / 10 * 9);
        Self { train: train.to_vec(), valid: valid.to_vec(), characters }
    }

    /// Windows `[n, CONTEXT]` of a part of the text, and what follows each of their characters.
    fn windows(part: &[i32], starts: &[usize], device: &Device) -> [Tensor<2, Int>; 2] {
        [0, 1].map(|shift| {
            let characters: Vec<_> = starts
                .iter()
                .flat_map(|start| &part[start + shift..][..CONTEXT])
                .copied()
                .collect();
            Tensor::from_data(TensorData::new(characters, [starts.len(), CONTEXT]), device)
        })
    }

    /// The validation part, window after window.
    pub fn validation(&self, device: &Device) -> impl Iterator<Item = [Tensor<2, Int>; 2]> {
        let starts: Vec<_> = (0..self.valid.len() - CONTEXT).step_by(CONTEXT).collect();
        let batches: Vec<_> = starts.chunks(32).map(<[usize]>::to_vec).collect();
        let batch = move |starts: Vec<usize>| Self::windows(&self.valid, &starts, device);
        batches.into_iter().map(batch)
    }

    /// A random batch of the training part.
    pub fn batch(&self, size: usize, random: &mut Random, device: &Device) -> [Tensor<2, Int>; 2] {
        let last = self.train.len() - CONTEXT;
        let starts: Vec<_> = (0..size).map(|_| random.below(last)).collect();
        Self::windows(&self.train, &starts, device)
    }
}

/// What predicts the next character of every character in a window.
pub trait Predicts: Module {
    /// Scores of the next characters, `[n, CONTEXT, characters]`, for windows `[n, CONTEXT]`.
    fn scores(&self, windows: Tensor<2, Int>) -> Tensor<3>;

    /// Mean cross-entropy of a character, in nats.
    fn loss(&self, [windows, next]: [Tensor<2, Int>; 2]) -> Tensor<1> {
        let scores = self.scores(windows);
        let [n, context, characters] = scores.dims();
        let loss = CrossEntropyLossConfig::new().init(&scores.device());
        loss.forward(scores.reshape([n * context, characters]), next.reshape([n * context]))
    }

    /// Mean loss of a character over the validation part, in nats.
    fn validate(&self, text: &Text, device: &Device) -> f64 {
        let (mut sum, mut count) = (0.0, 0);
        for [windows, next] in text.validation(device) {
            let [n, _] = windows.dims();
            sum += self.loss([windows, next]).into_scalar::<f64>() * n as f64;
            count += n;
        }
        sum / count as f64
    }

    /// Trains by AdamW with a cosine schedule; calls `progress` with the step and its loss.
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
    /// Blocks of attention and a hidden layer.
    pub blocks: usize,
    /// Channels.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
}

/// A decoder whose linear layers are trained by a recipe.
#[derive(Module, Debug)]
pub struct CharTransformer {
    characters: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    query: Fp4TrainLinear,
    key: Fp4TrainLinear,
    value: Fp4TrainLinear,
    output: Fp4TrainLinear,
    hidden_norm: LayerNorm,
    up: Fp4TrainLinear,
    down: Fp4TrainLinear,
    heads: usize,
}

impl CharTransformer {
    /// A transformer that has learned nothing yet. The last `keep_last` blocks are in high
    /// precision, and what predicts the next character always is.
    ///
    /// # Errors
    /// If the recipe is inconsistent.
    pub fn new(
        text: &Text,
        size: Size,
        recipe: TrainRecipe,
        keep_last: usize,
        seed: u64,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let Size { blocks, width, heads } = size;
        let block = |block: usize| {
            let recipe = recipe.for_layer(block, blocks, keep_last);
            let linear = |layer: u64, inputs, outputs| {
                let linear = LinearConfig::new(inputs, outputs).init(device);
                Fp4TrainLinear::new(linear, recipe, seed << 32 | (block as u64) << 8 | layer)
            };
            anyhow::Ok(Block {
                attention_norm: LayerNormConfig::new(width).init(device),
                query: linear(0, width, width)?,
                key: linear(1, width, width)?,
                value: linear(2, width, width)?,
                output: linear(3, width, width)?,
                hidden_norm: LayerNormConfig::new(width).init(device),
                up: linear(4, width, 4 * width)?,
                down: linear(5, 4 * width, width)?,
                heads,
            })
        };
        Ok(Self {
            characters: EmbeddingConfig::new(text.characters, width).init(device),
            positions: EmbeddingConfig::new(CONTEXT, width).init(device),
            blocks: (0..blocks).map(block).collect::<anyhow::Result<_>>()?,
            norm: LayerNormConfig::new(width).init(device),
            head: LinearConfig::new(width, text.characters).init(device),
        })
    }

    /// Scores of the next characters, `[n, CONTEXT, characters]`, for windows `[n, CONTEXT]`.
    pub fn forward(&self, windows: Tensor<2, Int>) -> Tensor<3> {
        let device = windows.device();
        let [_, context] = windows.dims();
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device).unsqueeze();
        let future = Tensor::<2, Bool>::tril_mask([context, context], 0, &device);
        let mut hidden = self.characters.forward(windows) + self.positions.forward(positions);
        for block in &self.blocks {
            hidden = block.forward(hidden, future.clone());
        }
        self.head.forward(self.norm.forward(hidden))
    }
}

impl Predicts for CharTransformer {
    fn scores(&self, windows: Tensor<2, Int>) -> Tensor<3> {
        self.forward(windows)
    }
}

impl Block {
    fn forward(&self, input: Tensor<3>, future: Tensor<2, Bool>) -> Tensor<3> {
        let normed = self.attention_norm.forward(input.clone());
        let [n, context, width] = normed.dims();
        let depth = width / self.heads;
        let split =
            |values: Tensor<3>| values.reshape([n, context, self.heads, depth]).swap_dims(1, 2);
        let query = split(self.query.forward(normed.clone()));
        let key = split(self.key.forward(normed.clone()));
        let value = split(self.value.forward(normed));
        let scores = query.matmul(key.swap_dims(2, 3)) / (depth as f64).sqrt();
        let scores = scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY);
        let read = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        let hidden = input + self.output.forward(read.reshape([n, context, width]));
        let normed = self.hidden_norm.forward(hidden.clone());
        hidden + self.down.forward(gelu(self.up.forward(normed)))
    }
}
