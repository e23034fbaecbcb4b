//! [`Part`]: one stage of a model, so that a model larger than memory passes through it.

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Int, Tensor};
use burn_fp4::Fp4Embedding;
use burn_fp4::ops::RotaryEmbedding;

use super::config::LlamaConfig;
use super::model::{DecoderLayer, Llama, Stream, positions};

/// A step of the forward pass whose weights are in memory together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The embedding.
    Embedding,
    /// A decoder layer.
    Layer(usize),
    /// The last norm and the `lm_head`.
    Head,
}

impl Stage {
    /// Returns the stages of a model, in the order of the forward pass.
    pub fn all(config: &LlamaConfig) -> Vec<Self> {
        let layers = (0..config.num_hidden_layers).map(Self::Layer);
        [Self::Embedding].into_iter().chain(layers).chain([Self::Head]).collect()
    }

    /// Returns the stage that a parameter belongs to, given its path in [`Llama`].
    pub fn of(path: &str) -> Self {
        let mut names = path.split('.');
        match (names.next(), names.next().map(str::parse)) {
            (Some("embed_tokens"), _) => Self::Embedding,
            (Some("layers"), Some(Ok(layer))) => Self::Layer(layer),
            _ => Self::Head,
        }
    }
}

/// The parameters of a stage, at the paths that they have in [`Llama`].
#[derive(Module, Debug)]
pub struct Part {
    embed_tokens: Option<Fp4Embedding>,
    layers: Vec<Option<DecoderLayer<Linear>>>,
    norm: Option<RmsNorm>,
    lm_head: Option<Linear>,
    rotary_emb: RotaryEmbedding,
}

/// The activations between two stages for a batch: the residual stream, and an update that the next
/// norm adds to it, except before the first layer.
pub type Activations = Vec<Tensor<3>>;

impl Llama<Linear> {
    /// Returns the parameters of a stage. Those that are not initialized stay so.
    ///
    /// `tied` adds a tied embedding to the head, which multiplies by it.
    pub fn part(&self, stage: Stage, tied: bool) -> Part {
        let head = stage == Stage::Head;
        let embeds = stage == Stage::Embedding || (head && tied && !self.has_lm_head());
        let layers = self.layers.iter().enumerate();
        Part {
            embed_tokens: embeds.then(|| self.embed_tokens.clone()),
            layers: layers
                .map(|(at, layer)| (stage == Stage::Layer(at)).then(|| layer.clone()))
                .collect(),
            norm: head.then(|| self.norm.clone()),
            lm_head: self.lm_head.clone().filter(|_| head),
            rotary_emb: self.rotary_emb.clone(),
        }
    }
}

impl Part {
    /// Looks up tokens `[batch, tokens]`.
    ///
    /// # Panics
    /// If it is another stage than the embedding.
    pub fn embed(&self, tokens: Tensor<2, Int>) -> Activations {
        vec![self.embed_tokens.as_ref().expect("the embedding").forward(tokens)]
    }

    /// Runs a decoder layer, or the head on the activations that the last layer leaves. The head
    /// leaves none.
    pub fn forward(&self, activations: Activations) -> Activations {
        let mut activations = activations.into_iter();
        let hidden = activations.next().expect("the residual stream");
        let stream = Stream { hidden, update: activations.next() };
        let Some(layer) = self.layers.iter().flatten().next() else {
            self.multiply_head(stream);
            return Vec::new();
        };
        let [_, count, _] = stream.hidden.dims();
        let (device, dtype) = (stream.hidden.device(), stream.hidden.dtype());
        let positions = positions(&self.rotary_emb, count, dtype, &device);
        let (Stream { hidden, update }, _) = layer.forward(stream, None, &positions, false);
        [hidden].into_iter().chain(update).collect()
    }

    fn multiply_head(&self, stream: Stream) {
        let norm = self.norm.as_ref().expect("the head has a norm");
        let (_, normalized) = stream.normalized(norm);
        match (&self.lm_head, &self.embed_tokens) {
            (Some(lm_head), _) => drop(lm_head.forward(normalized)),
            (None, Some(tied)) => drop(tied.project(normalized)),
            (None, None) => {}
        }
    }
}
