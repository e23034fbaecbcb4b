//! A decode step of an 8B model of Burn's own layers, with attention and a KV cache. The next token
//! is chosen on the device. Launched and replayed, in bf16 and quantized in place, then with packed
//! KV caches.

use benches::Row;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fp4::ops::{
    KvCache, KvFormat, Positions, RotaryEmbedding, add_rms_norm, attention, rms_norm, swiglu,
};
use burn_fp4::{Fp4Config, Fp4Module, Replay};

use crate::Arguments;
use crate::figures::Figures;
use crate::model::wall;

const LAYERS: usize = 32;
const HIDDEN: usize = 4096;
const INTERMEDIATE: usize = 14336;
const HEADS: usize = 32;
/// Key and value heads.
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = HIDDEN / HEADS;
/// Heads of the fused QKV projection: queries, keys, values.
const QKV_HEADS: usize = HEADS + 2 * KV_HEADS;
const VOCAB: usize = 128_256;
/// Replayed steps of a measurement.
const TOKENS: usize = 16;

#[derive(Module, Debug)]
struct DecoderLayer {
    input_layernorm: RmsNorm,
    /// Fused projection of queries, keys and values.
    qkv_proj: Linear,
    o_proj: Linear,
    post_attention_layernorm: RmsNorm,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

#[derive(Module, Debug)]
struct Decoder {
    embed_tokens: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Linear,
}

/// A decoder with the rotations of its positions.
#[derive(Module, Debug)]
struct Model {
    decoder: Decoder,
    rotary_emb: RotaryEmbedding,
}

/// Tokens `[batch, 1]` and their position `[1]`.
type Inputs = (Tensor<2, Int>, Tensor<1, Int>);

/// Logits `[batch, 1, VOCAB]`, and the next token of each sequence.
type Outputs = (Tensor<3>, Tensor<3, Int>);

impl DecoderLayer {
    fn new(device: &Device) -> Self {
        let linear =
            |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(HIDDEN).init(device);
        in_bf16(Self {
            input_layernorm: norm(),
            qkv_proj: linear(HIDDEN, QKV_HEADS * HEAD_DIM),
            o_proj: linear(HIDDEN, HIDDEN),
            post_attention_layernorm: norm(),
            gate_proj: linear(HIDDEN, INTERMEDIATE),
            up_proj: linear(HIDDEN, INTERMEDIATE),
            down_proj: linear(INTERMEDIATE, HIDDEN),
        })
    }

    /// Returns the hidden states after the layer, and its MLP's output, which is not added yet.
    fn forward(
        &self,
        hidden: Tensor<3>,
        update: Option<Tensor<3>>,
        cache: KvCache,
        positions: &Positions,
    ) -> ([Tensor<3>; 2], KvCache) {
        let [batch, ..] = hidden.dims();
        let norm = &self.input_layernorm;
        let [hidden, normed] = match update {
            Some(update) => add_rms_norm(hidden, update, norm.gamma.val(), norm.epsilon),
            None => [hidden.clone(), rms_norm(hidden, norm.gamma.val(), norm.epsilon)],
        };
        let qkv = self.qkv_proj.forward(normed);
        let heads = |first: usize, count: usize| {
            let heads = qkv.clone().narrow(2, first * HEAD_DIM, count * HEAD_DIM);
            heads.reshape([batch, 1, count, HEAD_DIM])
        };
        let queries = heads(0, HEADS);
        let [keys, values] = [HEADS, HEADS + KV_HEADS].map(|first| heads(first, KV_HEADS));
        let (attended, cache) = attention(queries, keys, values, Some(cache), positions);
        let norm = &self.post_attention_layernorm;
        let update = self.o_proj.forward(attended);
        let [hidden, normed] = add_rms_norm(hidden, update, norm.gamma.val(), norm.epsilon);
        let up = self.up_proj.forward(normed.clone());
        let gate = self.gate_proj.forward(normed);
        ([hidden, self.down_proj.forward(swiglu(gate, up))], cache)
    }
}

impl Model {
    /// Creates a model layer by layer; each is packed before the next is created.
    fn new(config: Option<&Fp4Config>, positions: usize, device: &Device) -> (Self, [usize; 2]) {
        let mut bytes = [0, 0];
        let mut pack = |report: burn_fp4::Fp4Report| {
            bytes = [bytes[0] + report.bytes_before(), bytes[1] + report.bytes_after()];
        };
        let layers = (0..LAYERS).map(|_| {
            let mut layer = DecoderLayer::new(device);
            if let Some(config) = config {
                pack(layer.quantize_fp4(config).expect("a valid layer"));
            }
            device.sync().expect("the device answers");
            layer
        });
        let layers = layers.collect();
        let mut lm_head = in_bf16(LinearConfig::new(HIDDEN, VOCAB).with_bias(false).init(device));
        if let Some(config) = config {
            pack(lm_head.quantize_fp4(config).expect("a valid layer"));
        }
        let embed_tokens = in_bf16(EmbeddingConfig::new(VOCAB, HIDDEN).init(device));
        let norm = in_bf16(RmsNormConfig::new(HIDDEN).init(device));
        let inv_freq = |pair: usize| 500_000f32.powf(-(pair as f32) / (HEAD_DIM / 2) as f32);
        let inv_freq: Vec<_> = (0..HEAD_DIM / 2).map(inv_freq).collect();
        let rotary_emb = RotaryEmbedding::new(&inv_freq, positions, device);
        let decoder = Decoder { embed_tokens, layers, norm, lm_head };
        (Self { decoder, rotary_emb }, bytes)
    }

    /// Runs a decode step.
    fn step(&self, caches: Vec<KvCache>, (tokens, position): Inputs) -> (Vec<KvCache>, Outputs) {
        let [_, _, context, _] = caches[0].dims();
        let positions = self.rotary_emb.at(position, context, DType::BF16);
        let (mut hidden, mut update) = (self.decoder.embed_tokens.forward(tokens), None);
        let mut next = Vec::with_capacity(LAYERS);
        for (layer, cache) in self.decoder.layers.iter().zip(caches) {
            let (output, cache) = layer.forward(hidden, update, cache, &positions);
            let [sums, mlp] = output;
            (hidden, update) = (sums, Some(mlp));
            next.push(cache);
        }
        let norm = &self.decoder.norm;
        let update = update.expect("there are layers");
        let [_, normed] = add_rms_norm(hidden, update, norm.gamma.val(), norm.epsilon);
        let logits = self.decoder.lm_head.forward(normed);
        (next, (logits.clone(), logits.argmax(2)))
    }
}

/// Measures a decode step for several contexts and batches, launched and replayed.
pub(crate) fn measure(arguments: &Arguments, figures: &mut Figures) {
    let device = Device::cuda(0);
    let mut copy = 0.0;
    for name in ["nvfp4", "bf16"] {
        let config = Fp4Config::nvfp4();
        let config = (name == "nvfp4").then_some(&config);
        let reserved = || device.memory_pool_usage().map_or(0, |usage| usage.bytes_reserved);
        let used = || device.memory_pool_usage().map_or(0, |usage| usage.bytes_in_use);
        let before = used();
        let (model, packed) = Model::new(config, 4096, &device);
        device.sync().expect("the device answers");
        eprintln!(
            "decoder in {name}: {} bytes in use of {} reserved; packed {} of {}",
            used() - before,
            reserved(),
            packed[1],
            packed[0],
        );
        let shapes = [(128, 1), (4096, 1), (128, 16), (4096, 16)];
        let formats = [None].into_iter().chain(KvFormat::ALL.map(Some));
        for (format, (context, batch)) in
            formats.flat_map(|format| shapes.map(|shape| (format, shape)))
        {
            // Caches of dense weights are measured dense.
            if format.is_some() && name == "bf16" {
                continue;
            }
            let cache = match format {
                None => "",
                Some(KvFormat::Fp8) => ", KV in FP8",
                Some(KvFormat::NvFp4) => ", KV in NVFP4",
                Some(KvFormat::NvFp4Hadamard) => ", KV in NVFP4 after Hadamard",
            };
            let zeros = |shape| match format {
                None => KvCache::zeros(shape, DType::BF16, &device),
                Some(format) => {
                    KvCache::packed_zeros(shape, format, &device).expect("whole blocks")
                }
            };
            let what = format!("{name}{cache}");
            let [launched, replayed] =
                token(arguments, &device, model.clone(), zeros, [context, batch], &what);
            if copy == 0.0 {
                copy = launched;
            }
            for (how, seconds) in [("launched", launched), ("replayed", replayed)] {
                let name = format!("8B decoder, {what}, context {context}, batch {batch}, {how}");
                figures.push(Row::new(&name, batch, packed[1], seconds, copy));
            }
            eprintln!("{} bytes in use, {} reserved", used(), reserved());
        }
        drop(model);
        device.sync().expect("the device answers");
        device.memory_cleanup();
    }
}

/// Measures the seconds of a decode step, launched and replayed.
fn token(
    arguments: &Arguments,
    device: &Device,
    model: Model,
    zeros: impl Fn([usize; 4]) -> KvCache,
    [context, batch]: [usize; 2],
    name: &str,
) -> [f64; 2] {
    let shape = [batch, KV_HEADS, context, HEAD_DIM];
    let empty = || -> Vec<KvCache> { (0..LAYERS).map(|_| zeros(shape)).collect() };
    let inputs = |at: usize| -> Inputs {
        let tokens = (0..batch).map(|i| ((at * 7919 + i * 104_729) % VOCAB) as i32).collect();
        let tokens = TensorData::new::<i32, _>(tokens, [batch, 1]);
        (Tensor::from_data(tokens, device), Tensor::from_ints([at as i32], device))
    };
    let mut cache = Some(empty());
    let mut expected = Vec::new();
    for at in 0..3 {
        let (next, (logits, _)) = model.step(cache.take().expect("given back"), inputs(at));
        cache = Some(next);
        expected.push(logits.into_data());
    }
    let last = inputs(context - 1);
    let launched = wall(arguments, device, || {
        let (next, (_, token)) = model.step(cache.take().expect("given back"), last.clone());
        cache = Some(next);
        drop(token.into_data());
    });
    drop(cache);
    let mut replay = Replay::with_state(model, empty(), Model::step);
    let mut equal = true;
    for (at, expected) in expected.iter().enumerate() {
        let (logits, _) = replay.run(inputs(at)).expect("recordable");
        equal &= logits.into_data() == *expected;
    }
    assert!(equal, "{name}, context {context}, batch {batch}: replay differs from forward");
    // As text is made: each token is read while the next step runs.
    let mut before: Option<Tensor<3, Int>> = None;
    let replayed = wall(arguments, device, || {
        for _ in 0..TOKENS {
            let (_, token) = replay.run(last.clone()).expect("recordable");
            drop(before.replace(token).map(Tensor::into_data));
        }
    });
    [launched, replayed / TOKENS as f64]
}

fn in_bf16<M: Module>(module: M) -> M {
    struct InBf16;

    impl ModuleMapper for InBf16 {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(DType::BF16))
        }
    }

    module.map(&mut InBf16)
}
