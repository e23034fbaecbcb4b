//! The decoder, of Burn's own modules, with the parameter names of `transformers`.

use anyhow::{Result, ensure};
use burn::module::{Module, ModuleDisplay, Param};
use burn::nn::{EmbeddingConfig, Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4::ops::{self, Int8Matrix, KvCache, KvFormat, Positions, RotaryEmbedding};
use burn_fp4::{
    Activations, Fp4Config, Fp4Embedding, Fp4Format, Fp4Linear, Fp4Module, Fp4Scheme, Method,
    PackedWeight, ScaleRule,
};

use super::config::LlamaConfig;

/// A linear layer: Burn's `Linear`, or `Fp4Linear`, which is fast on hosts once it is quantized.
/// Both have the same parameters.
pub trait Projection: Module + ModuleDisplay + From<Linear> + Sync + 'static {
    /// Returns the outputs `[batch, tokens, out_features]` of inputs `[batch, tokens,
    /// in_features]`.
    fn project(&self, input: Tensor<3>) -> Tensor<3>;

    /// Returns the weight `[in_features, out_features]`.
    fn weight(&self) -> &Param<Tensor<2>>;
}

impl Projection for Linear {
    fn project(&self, input: Tensor<3>) -> Tensor<3> {
        self.forward(input)
    }

    fn weight(&self) -> &Param<Tensor<2>> {
        &self.weight
    }
}

impl Projection for Fp4Linear {
    fn project(&self, input: Tensor<3>) -> Tensor<3> {
        self.forward(input)
    }

    fn weight(&self) -> &Param<Tensor<2>> {
        &self.weight
    }
}

/// A Llama model with its `lm_head`.
#[derive(Module, Debug)]
pub struct Llama<L: Module> {
    pub(super) embed_tokens: Fp4Embedding,
    pub(super) layers: Vec<DecoderLayer<L>>,
    pub(super) norm: RmsNorm,
    /// None if the embedding is tied: it is the `lm_head` too. Also None if it was rounded.
    pub(super) lm_head: Option<L>,
    /// Multiplies in place of the `lm_head`, tied or not.
    int8_head: Option<Int8Matrix>,
    pub(super) rotary_emb: RotaryEmbedding,
    /// Format of the KV cache; none keeps it dense.
    #[module(skip)]
    kv_format: Option<KvFormat>,
}

#[derive(Module, Debug)]
pub(super) struct DecoderLayer<L: Module> {
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

/// The KV cache of each layer.
pub type KvCaches = Vec<KvCache>;

impl Llama<Linear> {
    /// Returns the paths of the weights that inference engines run as one (queries, keys and
    /// values; gate and up), with the largest magnitude of each group.
    ///
    /// # Errors
    /// A magnitude cannot be read from the device.
    pub fn fused_layers(&self) -> Result<Vec<(Vec<String>, f32)>> {
        let (mut groups, mut largest) = (Vec::new(), Vec::new());
        for (at, DecoderLayer { self_attn, mlp, .. }) in self.layers.iter().enumerate() {
            let Attention { q_proj, k_proj, v_proj, .. } = self_attn;
            let attention = [("q_proj", q_proj), ("k_proj", k_proj), ("v_proj", v_proj)];
            let gated = [("gate_proj", &mlp.gate_proj), ("up_proj", &mlp.up_proj)];
            for (parent, layers) in [("self_attn", &attention[..]), ("mlp", &gated[..])] {
                let path = |(name, _): &(&str, _)| format!("layers.{at}.{parent}.{name}.weight");
                let of_each = layers.iter().map(|(_, layer)| layer.weight.val().abs().max());
                groups.push(layers.iter().map(path).collect());
                largest.push(Tensor::<1>::cat(of_each.collect(), 0).max());
            }
        }
        // One read for all of them.
        let largest = Tensor::<1>::cat(largest, 0).cast(DType::F32).into_data();
        Ok(groups.into_iter().zip(largest.try_to_vec::<f32>()?).collect())
    }
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
            int8_head: None,
            rotary_emb: RotaryEmbedding::new(&inv_freq, positions, device),
            kv_format: None,
        })
    }

    /// Returns the logits `[batch, tokens, vocab_size]` of tokens `[batch, tokens]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.forward_from(tokens, 0)
    }

    /// Returns the logits `[batch, tokens - first, vocab_size]` of tokens `[batch, tokens]` but the
    /// `first`, which are context. Keys and values are those that a KV cache of the model's format
    /// holds.
    pub fn forward_from(&self, tokens: Tensor<2, Int>, first: usize) -> Tensor<3> {
        let [batch, count] = tokens.dims();
        let caches = self.kv_format.map(|_| self.kv_cache(batch, count));
        let mut caches = caches.into_iter().flatten();
        let positions = positions(&self.rotary_emb, count, self.dtype(), &tokens.device());
        let mut stream = Stream { hidden: self.embed_tokens.forward(tokens), update: None };
        for layer in &self.layers {
            // One after the other: calibration records such passes, in one order.
            (stream, _) = layer.forward(stream, caches.next(), &positions, false);
        }
        if first > 0 {
            stream = stream.narrow(first, count - first);
        }
        self.logits(stream.normalized(&self.norm).1)
    }

    /// Writes tokens `[batch, tokens]` at positions `[tokens]` into the KV cache, and returns the
    /// logits of the last one, `[batch, vocab_size]`.
    ///
    /// The signature is that of [`Replay`](burn_fp4::Replay), with the KV cache as its state.
    pub fn forward_cached(
        &self,
        kv_cache: KvCaches,
        (tokens, positions): (Tensor<2, Int>, Tensor<1, Int>),
    ) -> (KvCaches, Tensor<2>) {
        let [_, count] = tokens.dims();
        let capacity = kv_cache.first().map_or(count, |cache| cache.dims()[2]);
        let on_host = ops::is_host(&tokens.device());
        let positions = self.rotary_emb.at(positions, capacity, self.dtype());
        let mut stream = Stream { hidden: self.embed_tokens.forward(tokens), update: None };
        let mut updated = KvCaches::with_capacity(kv_cache.len());
        for (layer, cache) in self.layers.iter().zip(kv_cache) {
            let cache_after;
            (stream, cache_after) = layer.forward(stream, Some(cache), &positions, on_host);
            updated.push(cache_after);
        }
        let (_, last) = stream.narrow(count - 1, 1).normalized(&self.norm);
        (updated, self.logits(last).squeeze_dim(1))
    }

    /// Allocates a KV cache with room for `capacity` tokens of each sequence of a batch.
    pub fn kv_cache(&self, batch: usize, capacity: usize) -> KvCaches {
        let (dtype, device) = (self.dtype(), self.embed_tokens.weight.base().device());
        let layer_cache = |layer: &DecoderLayer<L>| {
            let Attention { num_key_value_heads, head_dim, .. } = layer.self_attn;
            let shape = [batch, num_key_value_heads, capacity, head_dim];
            match self.kv_format {
                None => KvCache::zeros(shape, dtype, &device),
                Some(format) => KvCache::packed_zeros(shape, format, &device)
                    .expect("`set_kv_format` checks the heads"),
            }
        };
        self.layers.iter().map(layer_cache).collect()
    }

    /// Returns the bytes of the matrices that a decode step multiplies by, as they are stored:
    /// of all layers and the `lm_head`.
    pub fn bytes_of_weights(&self) -> usize {
        let head = match (&self.int8_head, &self.lm_head) {
            (Some(int8_head), _) => int8_head.bytes(),
            (None, Some(lm_head)) => stored_bytes(lm_head.weight()),
            (None, None) => stored_bytes(&self.embed_tokens.weight),
        };
        head + self.projections().map(|layer| stored_bytes(layer.weight())).sum::<usize>()
    }

    /// Returns the linear layers of all decoder layers.
    fn projections(&self) -> impl Iterator<Item = &L> {
        self.layers.iter().flat_map(|layer| {
            let Attention { q_proj, k_proj, v_proj, o_proj, .. } = &layer.self_attn;
            let Mlp { gate_proj, up_proj, down_proj } = &layer.mlp;
            [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
        })
    }

    /// Returns the bytes of a position of a sequence in the KV cache.
    pub fn bytes_of_position(&self) -> usize {
        let layer_bytes = |layer: &DecoderLayer<L>| {
            let Attention { num_key_value_heads, head_dim, .. } = layer.self_attn;
            let head = match self.kv_format {
                None => head_dim * self.dtype().size(),
                Some(format) => format.bytes_of_head(head_dim).iter().sum(),
            };
            2 * num_key_value_heads * head
        };
        self.layers.iter().map(layer_bytes).sum()
    }

    /// Returns the dtype of activations.
    pub fn dtype(&self) -> DType {
        self.embed_tokens.weight.base().dtype()
    }

    fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        match (&self.int8_head, &self.lm_head) {
            (Some(int8_head), _) => int8_head.product(hidden),
            (None, Some(lm_head)) => match lm_head.weight().reparameterization::<PackedWeight>() {
                Some(_) => lm_head.project(hidden),
                // Few rows are one kernel there, of its own for this shape.
                None => ops::dense_matmul(hidden, lm_head.weight().val()),
            },
            (None, None) => self.embed_tokens.project(hidden),
        }
    }

    /// Sets how products with packed weights, and with an `lm_head` in int8, read their input.
    /// Returns false if there are none.
    pub fn set_activations(&mut self, activations: Activations) -> bool {
        let any = self.set_fp4_activations(activations).is_ok();
        let (device, dtype) = (self.embed_tokens.weight.base().device(), self.dtype());
        let Some(int8_head) = &mut self.int8_head else { return any };
        int8_head.activations = activations;
        any | Int8Matrix::multiplies_codes(&device, dtype, 1, int8_head.dims())
    }

    /// Sets the format of the KV cache; none keeps it dense.
    ///
    /// # Errors
    /// Blocks of 16 do not divide the heads.
    pub fn set_kv_format(&mut self, format: Option<KvFormat>) -> Result<()> {
        let mut heads = self.layers.iter().map(|layer| layer.self_attn.head_dim);
        if let Some(head_dim) = heads.find(|head_dim| !head_dim.is_multiple_of(16)) {
            ensure!(
                format.is_none(),
                "--kv-cache: heads have {head_dim} channels, which 16 does not divide; pass dense"
            );
        }
        self.kv_format = format;
        Ok(())
    }

    /// Rounds a dense `lm_head` to 8 bits. A tied embedding keeps its values for lookups, any other
    /// `lm_head` is freed, and [`Folder::save`](crate::Folder::save) refuses the model. Returns
    /// false if the `lm_head` is quantized already.
    ///
    /// # Errors
    /// `hidden_size` is not a multiple of 32, or the weight cannot be read.
    pub fn round_head_to_int8(&mut self) -> Result<bool> {
        let weight = match &self.lm_head {
            Some(lm_head) => lm_head.weight(),
            None => &self.embed_tokens.weight,
        };
        if self.int8_head.is_some() || weight.reparameterization::<PackedWeight>().is_some() {
            return Ok(false);
        }
        let rows = if self.has_lm_head() { weight.val().transpose() } else { weight.val() };
        self.int8_head = Some(Int8Matrix::quantize(rows)?);
        self.lm_head = None;
        Ok(true)
    }

    /// Quantizes a tied embedding, for both of its uses. Returns false if the model has an
    /// `lm_head` of its own, or one that is rounded to int8.
    ///
    /// # Errors
    /// The blocks of the format do not divide the vectors, or a value is not finite.
    pub fn quantize_tied_embedding(&mut self, format: Fp4Format) -> Result<bool> {
        if self.has_lm_head() || self.int8_head.is_some() {
            return Ok(false);
        }
        let scheme = Fp4Scheme::of(ScaleRule::of_format(format));
        self.embed_tokens.quantize_fp4(&Fp4Config::new(scheme).method(Method::SSE))?;
        Ok(true)
    }

    /// Returns true if the `lm_head` is a layer of its own.
    pub fn has_lm_head(&self) -> bool {
        self.lm_head.is_some()
    }
}

/// Returns the stored bytes of a weight.
fn stored_bytes(weight: &Param<Tensor<2>>) -> usize {
    match weight.reparameterization::<PackedWeight>() {
        Some(packed) => packed.bytes(),
        None => weight.shape().num_elements() * weight.base().dtype().size(),
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

/// Computes both, in parallel on a host: threads then wait for each other once, not for each
/// product.
fn both<A: Send, B: Send>(
    on_host: bool,
    first: impl FnOnce() -> A + Send,
    second: impl FnOnce() -> B + Send,
) -> (A, B) {
    if on_host {
        return rayon::join(first, second);
    }
    let first = first();
    (first, second())
}

/// Returns the positions from 0 on.
pub(super) fn positions(
    rotary_emb: &RotaryEmbedding,
    count: usize,
    dtype: DType,
    device: &Device,
) -> Positions {
    rotary_emb.at(Tensor::arange(0..count as i64, device), count, dtype)
}

/// Applies a norm as one operation, where the device has it.
fn normalize<const D: usize>(norm: &RmsNorm, hidden: Tensor<D>) -> Tensor<D> {
    ops::rms_norm(hidden, norm.gamma.val(), norm.epsilon)
}

/// The residual stream, and an update that the next norm adds to it.
pub(super) struct Stream {
    pub(super) hidden: Tensor<3>,
    pub(super) update: Option<Tensor<3>>,
}

impl Stream {
    /// Selects tokens.
    fn narrow(self, first: usize, count: usize) -> Self {
        let narrow = |values: Tensor<3>| values.narrow(1, first, count);
        Self { hidden: narrow(self.hidden), update: self.update.map(narrow) }
    }

    /// Returns the stream with its update, and normalized.
    pub(super) fn normalized(self, norm: &RmsNorm) -> (Tensor<3>, Tensor<3>) {
        let Self { hidden, update } = self;
        match update {
            Some(update) => {
                let [hidden, normalized] =
                    ops::add_rms_norm(hidden, update, norm.gamma.val(), norm.epsilon);
                (hidden, normalized)
            }
            None => (hidden.clone(), normalize(norm, hidden)),
        }
    }
}

impl<L: Projection> DecoderLayer<L> {
    pub(super) fn forward(
        &self,
        stream: Stream,
        cache: Option<KvCache>,
        positions: &Positions,
        on_host: bool,
    ) -> (Stream, KvCache) {
        let (hidden, input) = stream.normalized(&self.input_layernorm);
        let (attended, cache) = self.self_attn.forward(input, cache, positions, on_host);
        let stream = Stream { hidden, update: Some(attended) };
        let (hidden, input) = stream.normalized(&self.post_attention_layernorm);
        let update = Some(self.mlp.forward(input, on_host));
        (Stream { hidden, update }, cache)
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

    /// Returns the attention output, and the cache with the new keys and values.
    fn forward(
        &self,
        input: Tensor<3>,
        cache: Option<KvCache>,
        positions: &Positions,
        on_host: bool,
    ) -> (Tensor<3>, KvCache) {
        let [batch, count, _] = input.dims();
        let split = |values: Tensor<3>, heads: usize, norm: &Option<RmsNorm>| {
            let heads = values.reshape([batch, count, heads, self.head_dim]);
            match norm {
                Some(norm) => normalize(norm, heads),
                None => heads,
            }
        };
        let (num_heads, num_kv_heads) = (self.num_heads, self.num_key_value_heads);
        let of_keys = input.clone();
        let of_values = input.clone();
        let (queries, (keys, values)) = both(
            on_host,
            || self.q_proj.project(input),
            || {
                let keys = || self.k_proj.project(of_keys);
                both(on_host, keys, || self.v_proj.project(of_values))
            },
        );
        let queries = split(queries, num_heads, &self.q_norm);
        let keys = split(keys, num_kv_heads, &self.k_norm);
        let values = split(values, num_kv_heads, &None);
        let (output, cache) = ops::attention(queries, keys, values, cache, positions);
        (self.o_proj.project(output), cache)
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

    fn forward(&self, input: Tensor<3>, on_host: bool) -> Tensor<3> {
        let of_up = input.clone();
        let up = || self.up_proj.project(of_up);
        let (up, gate) = both(on_host, up, || self.gate_proj.project(input));
        self.down_proj.project(ops::swiglu(gate, up))
    }
}
