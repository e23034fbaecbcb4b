//! The decoder, of Burn's own modules, with the parameter names of `transformers`.

use anyhow::Result;
use burn::module::{Module, ModuleDisplay};
use burn::nn::{EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, DType, Device, IndexingUpdateOp, Int, Tensor};
use burn_fp4::{
    Fp4Config, Fp4Embedding, Fp4Format, Fp4Linear, Fp4Module, Fp4Scheme, Method, ScaleRule,
};

use super::config::LlamaConfig;
use super::rope::{PositionEmbeddings, RotaryEmbedding};

/// A linear layer: Burn's `Linear`, or `Fp4Linear`, which is fast on hosts once it is quantized.
/// Both have the same parameters.
pub trait Projection: Module + ModuleDisplay + From<Linear> + Sync + 'static {
    /// Returns the outputs `[batch, tokens, out_features]` of inputs `[batch, tokens,
    /// in_features]`.
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

/// A Llama model with its `lm_head`.
#[derive(Module, Debug)]
pub struct Llama<L: Module> {
    embed_tokens: Fp4Embedding,
    layers: Vec<DecoderLayer<L>>,
    norm: RmsNorm,
    /// None if the embedding is tied: it is the `lm_head` too.
    lm_head: Option<L>,
    rotary_emb: RotaryEmbedding,
}

#[derive(Module, Debug)]
struct DecoderLayer<L: Module> {
    input_layernorm: RmsNorm,
    self_attn: Attention<L>,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp<L>,
}

/// Grouped-query attention.
#[derive(Module, Debug)]
struct Attention<L: Module> {
    q_proj: L,
    k_proj: L,
    v_proj: L,
    o_proj: L,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    num_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
}

#[derive(Module, Debug)]
struct Mlp<L: Module> {
    gate_proj: L,
    up_proj: L,
    down_proj: L,
}

/// The KV cache: keys and values of each layer.
pub type KvCache = Vec<LayerCache>;

/// Keys and values `[batch, num_key_value_heads, capacity, head_dim]`, by position.
type LayerCache = [Tensor<4>; 2];

/// Inputs of a forward pass that all layers share.
struct Positions {
    positions: Tensor<1, Int>,
    embeddings: PositionEmbeddings,
    /// True where a key is at a later position than a query, `[1, 1, tokens, keys]`.
    causal_mask: Tensor<4, Bool>,
}

impl<L: Projection> Llama<L> {
    /// Creates a model with random weights.
    ///
    /// # Errors
    /// The config asks for a RoPE scaling that is unknown.
    pub fn new(config: &LlamaConfig, device: &Device) -> Result<Self> {
        let hidden_size = config.hidden_size;
        let norm =
            || RmsNormConfig::new(hidden_size).with_epsilon(config.rms_norm_eps).init(device);
        let layer = |_| DecoderLayer {
            input_layernorm: norm(),
            self_attn: Attention::new(config, device),
            post_attention_layernorm: norm(),
            mlp: Mlp::new(config, device),
        };
        let embedding =
            EmbeddingConfig::new(config.vocab_size, hidden_size).with_initializer(INITIALIZER);
        let lm_head = || linear(hidden_size, config.vocab_size, false, device);
        let (inv_freq, positions) = (config.inv_freq()?, config.max_position_embeddings);
        Ok(Self {
            embed_tokens: embedding.init(device).into(),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            norm: norm(),
            lm_head: (!config.tie_word_embeddings).then(lm_head),
            rotary_emb: RotaryEmbedding::new(&inv_freq, positions, device),
        })
    }

    /// Returns the logits `[batch, tokens, vocab_size]` of tokens `[batch, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, count] = tokens.dims();
        let positions = Tensor::arange(0..count as i64, &tokens.device());
        let positions = self.positions(positions, count);
        let mut hidden = self.embed_tokens.forward(tokens);
        for layer in &self.layers {
            (hidden, _) = layer.forward(hidden, None, &positions);
        }
        self.logits(self.norm.forward(hidden))
    }

    /// Writes tokens `[batch, tokens]` at positions `[tokens]` into the KV cache, and returns the
    /// logits of the last one, `[batch, vocab_size]`.
    ///
    /// The signature is that of [`Replay`](burn_fp4::Replay), with the KV cache as its state.
    pub fn forward_cached(
        &self,
        kv_cache: KvCache,
        (tokens, positions): (Tensor<2, Int>, Tensor<1, Int>),
    ) -> (KvCache, Tensor<2>) {
        let [_, count] = tokens.dims();
        let capacity = kv_cache.first().map_or(count, |[keys, _]| keys.dims()[2]);
        let positions = self.positions(positions, capacity);
        let mut hidden = self.embed_tokens.forward(tokens);
        let mut updated = KvCache::with_capacity(kv_cache.len());
        for (layer, cache) in self.layers.iter().zip(kv_cache) {
            let cache_after;
            (hidden, cache_after) = layer.forward(hidden, Some(cache), &positions);
            updated.push(cache_after);
        }
        let last = self.norm.forward(hidden.narrow(1, count - 1, 1));
        (updated, self.logits(last).squeeze_dim(1))
    }

    /// Allocates a KV cache with room for `capacity` tokens of each sequence of a batch.
    pub fn kv_cache(&self, batch: usize, capacity: usize) -> KvCache {
        let weight = self.embed_tokens.weight.base();
        let options = (&weight.device(), weight.dtype());
        let layer_cache = |layer: &DecoderLayer<L>| {
            let Attention { num_key_value_heads, head_dim, .. } = layer.self_attn;
            let shape = [batch, num_key_value_heads, capacity, head_dim];
            [Tensor::zeros(shape, options), Tensor::zeros(shape, options)]
        };
        self.layers.iter().map(layer_cache).collect()
    }

    /// Prepares RoPE and the causal mask for queries at these positions and `keys` keys.
    fn positions(&self, positions: Tensor<1, Int>, keys: usize) -> Positions {
        let [count] = positions.dims();
        let keys_at = Tensor::<1, Int>::arange(0..keys as i64, &positions.device());
        let keys_at = keys_at.unsqueeze_dim::<2>(0).expand([count, keys]);
        let queries_at = positions.clone().unsqueeze_dim::<2>(1).expand([count, keys]);
        let causal_mask = keys_at.greater(queries_at).unsqueeze();
        let dtype = self.embed_tokens.weight.base().dtype();
        let embeddings = self.rotary_emb.at(&positions, dtype);
        Positions { positions, embeddings, causal_mask }
    }

    fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        match &self.lm_head {
            Some(lm_head) => lm_head.project(hidden),
            None => self.embed_tokens.project(hidden),
        }
    }

    /// Quantizes a tied embedding, for both of its uses. Returns false if the model has an
    /// `lm_head` of its own.
    ///
    /// # Errors
    /// The blocks of the format do not divide the vectors, or a value is not finite.
    pub fn quantize_tied_embedding(&mut self, format: Fp4Format) -> Result<bool> {
        if self.has_lm_head() {
            return Ok(false);
        }
        let scheme = Fp4Scheme::of(ScaleRule::of_format(format));
        self.embed_tokens.quantize_fp4(&Fp4Config::new(scheme).method(Method::Sse))?;
        Ok(true)
    }

    /// Returns true if the `lm_head` has weights of its own.
    pub fn has_lm_head(&self) -> bool {
        self.lm_head.is_some()
    }
}

/// The `initializer_range` of `transformers`.
const INITIALIZER: Initializer = Initializer::Normal { mean: 0.0, std: 0.02 };

fn linear<L: Projection>(
    in_features: usize,
    out_features: usize,
    bias: bool,
    device: &Device,
) -> L {
    let config = LinearConfig::new(in_features, out_features).with_bias(bias);
    L::from(config.with_initializer(INITIALIZER).init(device))
}

impl<L: Projection> DecoderLayer<L> {
    fn forward(
        &self,
        hidden: Tensor<3>,
        cache: Option<LayerCache>,
        positions: &Positions,
    ) -> (Tensor<3>, LayerCache) {
        let input = self.input_layernorm.forward(hidden.clone());
        let (attended, cache) = self.self_attn.forward(input, cache, positions);
        let hidden = hidden + attended;
        let input = self.post_attention_layernorm.forward(hidden.clone());
        (hidden + self.mlp.forward(input), cache)
    }
}

impl<L: Projection> Attention<L> {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (hidden_size, head_dim) = (config.hidden_size, config.head_dim());
        let num_heads = config.num_attention_heads;
        let num_key_value_heads = config.num_key_value_heads();
        let (q_size, kv_size) = (num_heads * head_dim, num_key_value_heads * head_dim);
        let [bias, output_bias] = config.attention_biases();
        let norm = || RmsNormConfig::new(head_dim).with_epsilon(config.rms_norm_eps).init(device);
        Self {
            q_proj: linear(hidden_size, q_size, bias, device),
            k_proj: linear(hidden_size, kv_size, bias, device),
            v_proj: linear(hidden_size, kv_size, bias, device),
            o_proj: linear(q_size, hidden_size, output_bias, device),
            q_norm: config.has_qk_norm().then(norm),
            k_norm: config.has_qk_norm().then(norm),
            num_heads,
            num_key_value_heads,
            head_dim,
        }
    }

    /// Returns the attention output, and the keys and values it attended to: the cache updated at
    /// the positions, or only the new ones without a cache.
    fn forward(
        &self,
        input: Tensor<3>,
        cache: Option<LayerCache>,
        positions: &Positions,
    ) -> (Tensor<3>, LayerCache) {
        let Self { num_heads, num_key_value_heads, head_dim, .. } = *self;
        let [batch, count, _] = input.dims();
        let split = |values: Tensor<3>, heads: usize, norm: &Option<RmsNorm>| {
            let heads = values.reshape([batch, count, heads, head_dim]);
            norm.as_ref().map_or(heads.clone(), |norm| norm.forward(heads))
        };
        let queries = split(self.q_proj.project(input.clone()), num_heads, &self.q_norm);
        let keys = split(self.k_proj.project(input.clone()), num_key_value_heads, &self.k_norm);
        let values = split(self.v_proj.project(input), num_key_value_heads, &None);
        let values = values.swap_dims(1, 2);
        let [queries, keys] = positions.embeddings.rotate([queries, keys]);
        let [keys, values] = match cache {
            None => [keys, values],
            Some([cached_keys, cached_values]) => {
                let update = |cached: Tensor<4>, new| {
                    let positions = positions.positions.clone();
                    cached.select_assign(2, positions, new, IndexingUpdateOp::Assign)
                };
                [update(cached_keys, keys), update(cached_values, values)]
            }
        };

        // Queries that share a key head are rows of one product: keys are not repeated.
        let rows = num_heads / num_key_value_heads * count;
        let queries = queries.reshape([batch, num_key_value_heads, rows, head_dim]);
        let attn_weights = queries.matmul(keys.clone().swap_dims(2, 3));
        let [_, _, _, key_count] = attn_weights.dims();
        let attn_weights = attn_weights.reshape([batch, num_heads, count, key_count]);
        let dtype = attn_weights.dtype();
        let causal_mask = positions.causal_mask.clone().expand(attn_weights.shape());
        // The scale comes after the views: there it is fused with the softmax.
        let attn_weights = attn_weights.div_scalar((head_dim as f64).sqrt());
        let attn_weights = attn_weights.mask_fill(causal_mask, f32::NEG_INFINITY);
        let attn_weights = softmax(attn_weights.cast(DType::F32), 3).cast(dtype);
        let attn_weights = attn_weights.reshape([batch, num_key_value_heads, rows, key_count]);
        let output = attn_weights.matmul(values.clone());
        let output = output.reshape([batch, num_heads, count, head_dim]);
        let output = output.swap_dims(1, 2).reshape([batch, count, num_heads * head_dim]);
        (self.o_proj.project(output), [keys, values])
    }
}

impl<L: Projection> Mlp<L> {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (hidden_size, bias) = (config.hidden_size, config.mlp_bias);
        let intermediate_size = config.intermediate_size;
        Self {
            gate_proj: linear(hidden_size, intermediate_size, bias, device),
            up_proj: linear(hidden_size, intermediate_size, bias, device),
            down_proj: linear(intermediate_size, hidden_size, bias, device),
        }
    }

    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        // The gate comes last: the SiLU and the product then follow it directly and are one kernel.
        let up = self.up_proj.project(input.clone());
        let gate = self.gate_proj.project(input);
        self.down_proj.project(silu(gate) * up)
    }
}
