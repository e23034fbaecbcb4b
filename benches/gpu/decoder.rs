//! A decode step of an 8B model of Burn's own layers, with attention and a KV cache. The next token
//! is chosen on the device. Launched and replayed, in bf16 and quantized in place.

use benches::Row;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
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
/// Query heads that share a key head; divides `QKV_HEADS`.
const QUERIES_PER_KV_HEAD: usize = HEADS / KV_HEADS;
const VOCAB: usize = 128_256;

#[derive(Module, Debug)]
struct DecoderLayer {
    input_layernorm: RmsNorm,
    /// Fused projection of queries, keys and values.
    qkv_proj: Linear,
    o_proj: Linear,
    post_attention_layernorm: RmsNorm,
    /// Fused projection of gate and up.
    gate_up_proj: Linear,
    down_proj: Linear,
}

#[derive(Module, Debug)]
struct Decoder {
    embed_tokens: Embedding,
    layers: Vec<DecoderLayer>,
    norm: RmsNorm,
    lm_head: Linear,
}

/// A decoder with the cosines and sines of every position, `[context, HEAD_DIM]`.
#[derive(Module, Debug)]
struct Model {
    decoder: Decoder,
    cos: Tensor<2>,
    sin: Tensor<2>,
    /// Index of the channel that each channel of a head is paired with, `[HEAD_DIM]`.
    partners: Tensor<1, Int>,
}

/// Keys, then values, of each layer, `[batch, 2 * KV_HEADS, context, HEAD_DIM]`.
type KvCache = Vec<Tensor<4>>;

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
            gate_up_proj: linear(HIDDEN, 2 * INTERMEDIATE),
            down_proj: linear(INTERMEDIATE, HIDDEN),
        })
    }

    fn forward(
        &self,
        x: Tensor<3>,
        cache: Tensor<4>,
        position: &Position,
    ) -> (Tensor<3>, Tensor<4>) {
        let [batch, ..] = x.dims();
        let normed = self.input_layernorm.forward(x.clone());
        let heads = position.rotate(self.qkv_proj.forward(normed));
        let written = heads.clone().narrow(1, HEADS, 2 * KV_HEADS);
        let index = position.index.clone();
        let cache = cache.select_assign(2, index, written, IndexingUpdateOp::Assign);
        let [keys, values] = [0, KV_HEADS].map(|first| cache.clone().narrow(1, first, KV_HEADS));
        // Queries that share a key head are rows of one product.
        let query = heads
            .reshape([batch, QKV_HEADS / QUERIES_PER_KV_HEAD, QUERIES_PER_KV_HEAD, HEAD_DIM])
            .narrow(1, 0, KV_HEADS);
        let [.., context] = position.causal_mask.dims();
        let attn_weights = query.matmul(keys.transpose()).reshape([batch, HEADS, 1, context]);
        // Expanded before the scale: the scale is then fused with the softmax, and the product is
        // tuned alone.
        let causal_mask = position.causal_mask.clone().expand(attn_weights.shape());
        let attn_weights = attn_weights.mul_scalar((HEAD_DIM as f64).powf(-0.5));
        let attn_weights = softmax(attn_weights.mask_fill(causal_mask, f32::NEG_INFINITY), 3);
        let attn_weights = attn_weights.reshape([batch, KV_HEADS, QUERIES_PER_KV_HEAD, context]);
        let attended = attn_weights.matmul(values).reshape([batch, 1, HIDDEN]);
        let x = x + self.o_proj.forward(attended);
        let gate_up = self.gate_up_proj.forward(self.post_attention_layernorm.forward(x.clone()));
        let (gate, up) = (
            gate_up.clone().narrow(2, 0, INTERMEDIATE),
            gate_up.narrow(2, INTERMEDIATE, INTERMEDIATE),
        );
        (x + self.down_proj.forward(silu(gate) * up), cache)
    }
}

/// Inputs of a decode step that all layers share.
struct Position {
    index: Tensor<1, Int>,
    /// Cosine for each channel of each head, `[1, QKV_HEADS, 1, HEAD_DIM]`; 1 for values.
    cos: Tensor<4>,
    sin: Tensor<4>,
    partners: Tensor<1, Int>,
    /// True for later positions, `[1, 1, 1, context]`.
    causal_mask: Tensor<4, Bool>,
}

impl Position {
    /// Splits heads `[batch, 1, QKV_HEADS * HEAD_DIM]` into `[batch, QKV_HEADS, 1, HEAD_DIM]`, and
    /// rotates queries and keys.
    fn rotate(&self, heads: Tensor<3>) -> Tensor<4> {
        let [batch, ..] = heads.dims();
        // Two tensors in the same memory: Burn fuses `select` with what follows only if nothing
        // else there reads the tensor that it selects from.
        let [heads, partners] =
            [heads.clone(), heads].map(|heads| heads.reshape([batch, QKV_HEADS, 1, HEAD_DIM]));
        let partners = partners.select(3, self.partners.clone());
        heads * self.cos.clone() + partners * self.sin.clone()
    }
}

impl Model {
    /// Creates a model layer by layer; each is packed before the next is created.
    fn new(config: Option<&Fp4Config>, context: usize, device: &Device) -> (Self, [usize; 2]) {
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
        let angles = |at: usize| {
            (0..HEAD_DIM).map(move |i| {
                at as f64 * 500_000f64.powf(-((i % (HEAD_DIM / 2)) as f64) / (HEAD_DIM / 2) as f64)
            })
        };
        let table = |value: &dyn Fn(usize, f64) -> f64| {
            let values: Vec<f32> = (0..context)
                .flat_map(|at| angles(at).enumerate().map(|(i, angle)| value(i, angle) as f32))
                .collect();
            let values = TensorData::new(values, [context, HEAD_DIM]);
            Tensor::<2>::from_data(values, device).cast(DType::BF16)
        };
        let cos = table(&|_, angle| angle.cos());
        let sin = table(&|i, angle| if i < HEAD_DIM / 2 { -angle.sin() } else { angle.sin() });
        let partners: Vec<_> =
            (0..HEAD_DIM).map(|i| ((i + HEAD_DIM / 2) % HEAD_DIM) as i32).collect();
        let partners = Tensor::from_data(TensorData::new(partners, [HEAD_DIM]), device);
        let decoder = Decoder { embed_tokens, layers, norm, lm_head };
        (Self { decoder, cos, sin, partners }, bytes)
    }

    /// Runs a decode step.
    fn step(&self, cache: KvCache, (tokens, position): Inputs) -> (KvCache, Outputs) {
        let [context, _] = self.cos.dims();
        let device = position.device();
        let row = |table: &Tensor<2>, of_values: Tensor<4>| {
            let row = table.clone().select(0, position.clone()).reshape([1, 1, 1, HEAD_DIM]);
            Tensor::cat(vec![row.expand([1, HEADS + KV_HEADS, 1, HEAD_DIM]), of_values], 1)
        };
        let (values, place) = ([1, KV_HEADS, 1, HEAD_DIM], (&device, DType::BF16));
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device);
        let causal_mask = positions.greater(position.clone().expand([context]));
        let position = Position {
            cos: row(&self.cos, Tensor::ones(values, place)),
            sin: row(&self.sin, Tensor::zeros(values, place)),
            partners: self.partners.clone(),
            causal_mask: causal_mask.reshape([1, 1, 1, context]),
            index: position,
        };
        let mut x = self.decoder.embed_tokens.forward(tokens);
        let mut next = Vec::with_capacity(LAYERS);
        for (layer, cache) in self.decoder.layers.iter().zip(cache) {
            let (output, cache) = layer.forward(x, cache, &position);
            x = output;
            next.push(cache);
        }
        let logits = self.decoder.lm_head.forward(self.decoder.norm.forward(x));
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
        for (context, batch) in [(128, 1), (4096, 1), (128, 16), (4096, 16)] {
            let model = Model {
                cos: model.cos.clone().narrow(0, 0, context),
                sin: model.sin.clone().narrow(0, 0, context),
                ..model.clone()
            };
            let [launched, replayed] = token(arguments, &device, model, context, batch, name);
            if copy == 0.0 {
                copy = launched;
            }
            for (how, seconds) in [("launched", launched), ("replayed", replayed)] {
                let name = format!("8B decoder, {name}, context {context}, batch {batch}, {how}");
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
    context: usize,
    batch: usize,
    name: &str,
) -> [f64; 2] {
    let zeros = || {
        let shape = [batch, 2 * KV_HEADS, context, HEAD_DIM];
        Tensor::<4>::zeros(shape, device).cast(DType::BF16)
    };
    let empty = || -> KvCache { (0..LAYERS).map(|_| zeros()).collect() };
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
    let replayed = wall(arguments, device, || {
        drop(replay.run(last.clone()).expect("recordable").1.into_data());
    });
    [launched, replayed]
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
