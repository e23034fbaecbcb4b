//! A decoder of Burn's own modules, with the names that `transformers` gives its parts.

use anyhow::Result;
use burn::module::{Module, ModuleDisplay};
use burn::nn::{
    Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig,
};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::module::linear;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_fp4::Fp4Linear;

use super::config::LlamaConfig;
use super::rotation::Rotation;

/// A linear layer: Burn's, or one of the same parameters that is fast on hosts once it is
/// quantized.
pub trait Projection: Module + ModuleDisplay + From<Linear> {
    /// The outputs `[batch, tokens, out]` of inputs `[batch, tokens, in]`.
    fn project(&self, input: Tensor<3>) -> Tensor<3>;
}

impl Projection for Linear {
    fn project(&self, input: Tensor<3>) -> Tensor<3> {
        self.forward(input)
    }
}

impl Projection for Fp4Linear {
    fn project(&self, input: Tensor<3>) -> Tensor<3> {
        self.forward(input)
    }
}

/// A decoder.
#[derive(Module, Debug)]
pub struct Llama<L: Module> {
    embed_tokens: Embedding,
    layers: Vec<Block<L>>,
    norm: RmsNorm,
    /// None: the embedding, transposed.
    lm_head: Option<L>,
    rotation: Rotation,
}

#[derive(Module, Debug)]
struct Block<L: Module> {
    input_layernorm: RmsNorm,
    self_attn: Attention<L>,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp<L>,
}

/// Heads of queries, of which several share a head of keys and values.
#[derive(Module, Debug)]
struct Attention<L: Module> {
    q_proj: L,
    k_proj: L,
    v_proj: L,
    o_proj: L,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    heads: usize,
    key_value_heads: usize,
    depth: usize,
}

#[derive(Module, Debug)]
struct Mlp<L: Module> {
    gate_proj: L,
    up_proj: L,
    down_proj: L,
}

/// The keys and values of the tokens that a model has seen.
#[derive(Debug, Clone, Default)]
pub struct Cache {
    blocks: Vec<KeysAndValues>,
    tokens: usize,
}

/// Those of a block, each `[batch, heads, tokens, depth]`, once there are tokens.
type KeysAndValues = Option<[Tensor<4>; 2]>;

impl<L: Projection> Llama<L> {
    /// A model that has learned nothing yet.
    ///
    /// # Errors
    /// If the config scales rotations in a way that is unknown here.
    pub fn new(config: &LlamaConfig, device: &Device) -> Result<Self> {
        let width = config.hidden_size;
        let norm = |width| RmsNormConfig::new(width).with_epsilon(config.rms_norm_eps).init(device);
        let block = |_| Block {
            input_layernorm: norm(width),
            self_attn: Attention::new(config, device),
            post_attention_layernorm: norm(width),
            mlp: Mlp::new(config, device),
        };
        let vocabulary = config.vocab_size;
        let embedding = EmbeddingConfig::new(vocabulary, width).with_initializer(INITIALIZER);
        let head = || layer(width, vocabulary, false, device);
        let frequencies = config.frequencies()?;
        Ok(Self {
            embed_tokens: embedding.init(device),
            layers: (0..config.num_hidden_layers).map(block).collect(),
            norm: norm(width),
            lm_head: (!config.tie_word_embeddings).then(head),
            rotation: Rotation::new(&frequencies, config.max_position_embeddings, device),
        })
    }

    /// Scores of the next token `[batch, tokens, vocabulary]`, for tokens `[batch, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.scores(self.read(tokens, &mut Cache::default()))
    }

    /// The scores of the token that follows tokens `[batch, tokens]`, which follow those of the
    /// cache: `[batch, vocabulary]`.
    pub fn next(&self, tokens: Tensor<2, Int>, cache: &mut Cache) -> Tensor<2> {
        let hidden = self.read(tokens, cache);
        let [_, tokens, _] = hidden.dims();
        self.scores(hidden.narrow(1, tokens - 1, 1)).squeeze_dim(1)
    }

    /// What the model makes of tokens `[batch, tokens]`: `[batch, tokens, channels]`.
    fn read(&self, tokens: Tensor<2, Int>, cache: &mut Cache) -> Tensor<3> {
        let [_, count] = tokens.dims();
        let mut hidden = self.embed_tokens.forward(tokens);
        cache.blocks.resize(self.layers.len(), None);
        for (block, known) in self.layers.iter().zip(&mut cache.blocks) {
            let input = block.input_layernorm.forward(hidden.clone());
            hidden = hidden + block.self_attn.forward(input, &self.rotation, known);
            let input = block.post_attention_layernorm.forward(hidden.clone());
            hidden = hidden + block.mlp.forward(input);
        }
        cache.tokens += count;
        self.norm.forward(hidden)
    }

    fn scores(&self, hidden: Tensor<3>) -> Tensor<3> {
        match &self.lm_head {
            Some(head) => head.project(hidden),
            None => linear(hidden, self.embed_tokens.weight.val().transpose(), None),
        }
    }

    /// Whether the output layer has weights of its own.
    pub fn has_head(&self) -> bool {
        self.lm_head.is_some()
    }
}

/// As `transformers` initializes them.
const INITIALIZER: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

fn layer<L: Projection>(inputs: usize, outputs: usize, bias: bool, device: &Device) -> L {
    let config = LinearConfig::new(inputs, outputs).with_bias(bias);
    L::from(config.with_initializer(INITIALIZER).init(device))
}

impl<L: Projection> Attention<L> {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (width, depth) = (config.hidden_size, config.head_depth());
        let (heads, key_value_heads) = (config.num_attention_heads, config.key_value_heads());
        let [bias, output_bias] = config.attention_biases();
        let norm = || RmsNormConfig::new(depth).with_epsilon(config.rms_norm_eps).init(device);
        Self {
            q_proj: layer(width, heads * depth, bias, device),
            k_proj: layer(width, key_value_heads * depth, bias, device),
            v_proj: layer(width, key_value_heads * depth, bias, device),
            o_proj: layer(heads * depth, width, output_bias, device),
            q_norm: config.normalizes_heads().then(norm),
            k_norm: config.normalizes_heads().then(norm),
            heads,
            key_value_heads,
            depth,
        }
    }

    fn forward(
        &self,
        input: Tensor<3>,
        rotation: &Rotation,
        known: &mut KeysAndValues,
    ) -> Tensor<3> {
        let [batch, tokens, _] = input.dims();
        let start = known.as_ref().map_or(0, |[keys, _]| keys.dims()[2]);
        let split = |values: Tensor<3>, heads: usize, norm: &Option<RmsNorm>| {
            let heads = values.reshape([batch, tokens, heads, self.depth]);
            let heads = norm.as_ref().map_or(heads.clone(), |norm| norm.forward(heads));
            heads.swap_dims(1, 2)
        };
        let queries = split(self.q_proj.project(input.clone()), self.heads, &self.q_norm);
        let keys = split(self.k_proj.project(input.clone()), self.key_value_heads, &self.k_norm);
        let values = split(self.v_proj.project(input), self.key_value_heads, &None);
        let (queries, keys) = (rotation.turn(queries, start), rotation.turn(keys, start));
        let [keys, values] = match known.take() {
            None => [keys, values],
            Some([old_keys, old_values]) => {
                [Tensor::cat(vec![old_keys, keys], 2), Tensor::cat(vec![old_values, values], 2)]
            }
        };
        *known = Some([keys.clone(), values.clone()]);

        // The queries that share keys and values are rows of one product.
        let rows = self.heads / self.key_value_heads * tokens;
        let queries = queries.reshape([batch, self.key_value_heads, rows, self.depth]);
        let scores = queries.matmul(keys.swap_dims(2, 3)).div_scalar((self.depth as f64).sqrt());
        let scores = scores.reshape([batch, self.heads, tokens, start + tokens]);
        let dtype = scores.dtype();
        let read = softmax(hidden_future(scores, start).cast(DType::F32), 3).cast(dtype);
        let read = read.reshape([batch, self.key_value_heads, rows, start + tokens]);
        let output = read.matmul(values).reshape([batch, self.heads, tokens, self.depth]);
        let output = output.swap_dims(1, 2).reshape([batch, tokens, self.heads * self.depth]);
        self.o_proj.project(output)
    }
}

/// Scores `[batch, heads, tokens, start + tokens]` without those of tokens that are still to come.
fn hidden_future(scores: Tensor<4>, start: usize) -> Tensor<4> {
    let [_, _, tokens, all] = scores.dims();
    if tokens == 1 {
        return scores;
    }
    let future = Tensor::<2, Bool>::tril_mask([tokens, all], start as i64, &scores.device());
    scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY)
}

impl<L: Projection> Mlp<L> {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (width, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        Self {
            gate_proj: layer(width, inner, bias, device),
            up_proj: layer(width, inner, bias, device),
            down_proj: layer(inner, width, bias, device),
        }
    }

    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let gate = silu(self.gate_proj.project(input.clone()));
        self.down_proj.project(gate * self.up_proj.project(input))
    }
}

impl Cache {
    /// How many tokens it knows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}
