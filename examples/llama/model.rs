//! A decoder of Burn's own modules, with the names that `transformers` gives its parts.

use anyhow::Result;
use burn::module::{Module, ModuleDisplay};
use burn::nn::{EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, DType, Device, IndexingUpdateOp, Int, Tensor};
use burn_fp4::{
    Fp4Config, Fp4Embedding, Fp4Format, Fp4Linear, Fp4Module, Fp4Scheme, Method, ScaleRule,
};

use super::config::LlamaConfig;
use super::rotation::{Rotation, Turn};

/// A linear layer: Burn's, or one of the same parameters that is fast on hosts once it is
/// quantized.
pub trait Projection: Module + ModuleDisplay + From<Linear> + Sync + 'static {
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
    embed_tokens: Fp4Embedding,
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

/// The keys and values of each block, `[batch, heads, positions, depth]`: of the tokens that a
/// model has seen, where they are, and room for those to come.
pub type Cache = Vec<KeysAndValues>;

type KeysAndValues = [Tensor<4>; 2];

/// Some tokens, as attention needs them.
struct Tokens {
    positions: Tensor<1, Int>,
    turn: Turn,
    /// Which keys are of tokens after them, `[1, 1, tokens, keys]`.
    later: Tensor<4, Bool>,
}

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
            embed_tokens: embedding.init(device).into(),
            layers: (0..config.num_hidden_layers).map(block).collect(),
            norm: norm(width),
            lm_head: (!config.tie_word_embeddings).then(head),
            rotation: Rotation::new(&frequencies, config.max_position_embeddings, device),
        })
    }

    /// Scores of the next token `[batch, tokens, vocabulary]`, for tokens `[batch, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, count] = tokens.dims();
        let at = self.tokens(Tensor::arange(0..count as i64, &tokens.device()), count);
        let mut hidden = self.embed_tokens.forward(tokens);
        for block in &self.layers {
            (hidden, _) = block.forward(hidden, None, &at);
        }
        self.scores(self.norm.forward(hidden))
    }

    /// The scores of the token that follows the last of these: `[batch, vocabulary]`, for tokens
    /// `[batch, tokens]` and their positions in the cache, `[tokens]`. The form of
    /// [`Replay`](burn_fp4::Replay), with the cache as its state.
    pub fn next(
        &self,
        cache: Cache,
        (tokens, positions): (Tensor<2, Int>, Tensor<1, Int>),
    ) -> (Cache, Tensor<2>) {
        let [_, count] = tokens.dims();
        let capacity = cache.first().map_or(count, |[keys, _]| keys.dims()[2]);
        let at = self.tokens(positions, capacity);
        let mut hidden = self.embed_tokens.forward(tokens);
        let mut written = Cache::with_capacity(cache.len());
        for (block, known) in self.layers.iter().zip(cache) {
            let known_and_new;
            (hidden, known_and_new) = block.forward(hidden, Some(known), &at);
            written.push(known_and_new);
        }
        let last = self.norm.forward(hidden.narrow(1, count - 1, 1));
        (written, self.scores(last).squeeze_dim(1))
    }

    /// A cache with room for so many tokens of each sequence of a batch.
    pub fn cache(&self, batch: usize, tokens: usize) -> Cache {
        let weight = self.embed_tokens.weight.base();
        let place = (&weight.device(), weight.dtype());
        let of = |block: &Block<L>| {
            let Attention { key_value_heads, depth, .. } = block.self_attn;
            let zeros = || Tensor::zeros([batch, key_value_heads, tokens, depth], place);
            [zeros(), zeros()]
        };
        self.layers.iter().map(of).collect()
    }

    /// Tokens at these positions, among keys of so many.
    fn tokens(&self, positions: Tensor<1, Int>, keys: usize) -> Tokens {
        let [count] = positions.dims();
        let all = Tensor::<1, Int>::arange(0..keys as i64, &positions.device());
        let all = all.unsqueeze_dim::<2>(0).expand([count, keys]);
        let later = all.greater(positions.clone().unsqueeze_dim::<2>(1).expand([count, keys]));
        let turn = self.rotation.at(&positions, self.embed_tokens.weight.base().dtype());
        Tokens { positions, turn, later: later.unsqueeze() }
    }

    fn scores(&self, hidden: Tensor<3>) -> Tensor<3> {
        match &self.lm_head {
            Some(head) => head.project(hidden),
            None => self.embed_tokens.project(hidden),
        }
    }

    /// Quantizes the embedding for both of its uses if the output layer is tied to it, and returns
    /// whether it is.
    ///
    /// # Errors
    /// Vectors that the blocks of the format do not divide, or that are not finite.
    pub fn quantize_tied_embedding(&mut self, format: Fp4Format) -> Result<bool> {
        if self.has_head() {
            return Ok(false);
        }
        let scheme = Fp4Scheme::of(ScaleRule::of_format(format));
        self.embed_tokens.quantize_fp4(&Fp4Config::new(scheme).method(Method::SSE))?;
        Ok(true)
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

impl<L: Projection> Block<L> {
    fn forward(
        &self,
        hidden: Tensor<3>,
        known: Option<KeysAndValues>,
        tokens: &Tokens,
    ) -> (Tensor<3>, KeysAndValues) {
        let input = self.input_layernorm.forward(hidden.clone());
        let (read, written) = self.self_attn.forward(input, known, tokens);
        let hidden = hidden + read;
        let input = self.post_attention_layernorm.forward(hidden.clone());
        (hidden + self.mlp.forward(input), written)
    }
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

    /// What the tokens read, and the keys and values of all: those that are known, if there are,
    /// with those of the tokens at their positions.
    fn forward(
        &self,
        input: Tensor<3>,
        known: Option<KeysAndValues>,
        tokens: &Tokens,
    ) -> (Tensor<3>, KeysAndValues) {
        let [batch, count, _] = input.dims();
        let split = |values: Tensor<3>, heads: usize, norm: &Option<RmsNorm>| {
            let heads = values.reshape([batch, count, heads, self.depth]);
            norm.as_ref().map_or(heads.clone(), |norm| norm.forward(heads))
        };
        let queries = split(self.q_proj.project(input.clone()), self.heads, &self.q_norm);
        let keys = split(self.k_proj.project(input.clone()), self.key_value_heads, &self.k_norm);
        let values = split(self.v_proj.project(input), self.key_value_heads, &None);
        let values = values.swap_dims(1, 2);
        let [queries, keys] = tokens.turn.turn([queries, keys]);
        let [keys, values] = match known {
            None => [keys, values],
            Some([known_keys, known_values]) => {
                let write = |known: Tensor<4>, new| {
                    let positions = tokens.positions.clone();
                    known.select_assign(2, positions, new, IndexingUpdateOp::Assign)
                };
                [write(known_keys, keys), write(known_values, values)]
            }
        };

        // The queries that share keys and values are rows of one product.
        let rows = self.heads / self.key_value_heads * count;
        let queries = queries.reshape([batch, self.key_value_heads, rows, self.depth]);
        let scores = queries.matmul(keys.clone().swap_dims(2, 3));
        let [_, _, _, all] = scores.dims();
        let scores = scores.reshape([batch, self.heads, count, all]);
        let (dtype, later) = (scores.dtype(), tokens.later.clone().expand(scores.shape()));
        // Behind the views, where it is fused with the softmax.
        let scores = scores.div_scalar((self.depth as f64).sqrt());
        let scores = scores.mask_fill(later, f32::NEG_INFINITY);
        let read = softmax(scores.cast(DType::F32), 3).cast(dtype);
        let read = read.reshape([batch, self.key_value_heads, rows, all]);
        let output = read.matmul(values.clone()).reshape([batch, self.heads, count, self.depth]);
        let output = output.swap_dims(1, 2).reshape([batch, count, self.heads * self.depth]);
        (self.o_proj.project(output), [keys, values])
    }
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
        // Both products first, that of the gate last: all that follows is one kernel then.
        let up = self.up_proj.project(input.clone());
        let gate = self.gate_proj.project(input);
        self.down_proj.project(silu(gate) * up)
    }
}
