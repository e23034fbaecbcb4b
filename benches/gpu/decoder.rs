//! A decoder of Burn's own layers in the shapes of an 8B model, with attention and a cache of keys
//! and values: one token, chosen on the device and read, launched and replayed, in bf16 and
//! quantized in place.

use benches::Row;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_fp4::{Fp4Config, Fp4Module, Replay};

use crate::Arguments;
use crate::figures::Figures;
use crate::model::wall;

const BLOCKS: usize = 32;
const HIDDEN: usize = 4096;
const INNER: usize = 14336;
const HEADS: usize = 32;
/// Heads of keys and values.
const GROUPS: usize = 8;
const HEAD: usize = HIDDEN / HEADS;
/// Heads of queries, then of keys, then of values.
const ALL: usize = HEADS + 2 * GROUPS;
/// Queries that share a head of keys; it divides `ALL`.
const SHARING: usize = HEADS / GROUPS;
const WORDS: usize = 128_256;

#[derive(Module, Debug)]
struct Block {
    before_attention: RmsNorm,
    /// Queries, keys and values, as engines have them: one product.
    heads: Linear,
    output: Linear,
    before_mlp: RmsNorm,
    /// Gate, then up: one product too.
    inner: Linear,
    down: Linear,
}

#[derive(Module, Debug)]
struct Decoder {
    words: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
}

/// With the cosines and sines of every position, `[context, HEAD]`.
#[derive(Module, Debug)]
struct Model {
    decoder: Decoder,
    cosines: Tensor<2>,
    sines: Tensor<2>,
    /// The channel that each channel of a head is rotated with, `[HEAD]`.
    partners: Tensor<1, Int>,
}

/// Keys, then values, of every block, `[batch, 2 * GROUPS, context, HEAD]`.
type Cache = Vec<Tensor<4>>;

/// Tokens `[batch, 1]`, and where they are, `[1]`.
type Inputs = (Tensor<2, Int>, Tensor<1, Int>);

/// Of a token, and the one chosen.
type Scores = (Tensor<3>, Tensor<3, Int>);

impl Block {
    fn new(device: &Device) -> Self {
        let linear =
            |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(device);
        let norm = || RmsNormConfig::new(HIDDEN).init(device);
        in_bf16(Self {
            before_attention: norm(),
            heads: linear(HIDDEN, ALL * HEAD),
            output: linear(HIDDEN, HIDDEN),
            before_mlp: norm(),
            inner: linear(HIDDEN, 2 * INNER),
            down: linear(INNER, HIDDEN),
        })
    }

    fn forward(&self, x: Tensor<3>, cache: Tensor<4>, token: &Token) -> (Tensor<3>, Tensor<4>) {
        let [batch, ..] = x.dims();
        let normed = self.before_attention.forward(x.clone());
        let heads = token.rotate(self.heads.forward(normed));
        let written = heads.clone().narrow(1, HEADS, 2 * GROUPS);
        let position = token.position.clone();
        let cache = cache.select_assign(2, position, written, IndexingUpdateOp::Assign);
        let [keys, values] = [0, GROUPS].map(|first| cache.clone().narrow(1, first, GROUPS));
        // The queries that share keys are rows of one product.
        let query = heads.reshape([batch, ALL / SHARING, SHARING, HEAD]).narrow(1, 0, GROUPS);
        let [.., context] = token.later.dims();
        let scores = query.matmul(keys.transpose()).reshape([batch, HEADS, 1, context]);
        // Before the scale, which is then fused with the softmax, and the product tuned alone.
        let later = token.later.clone().expand(scores.shape());
        let scores = scores.mul_scalar((HEAD as f64).powf(-0.5));
        let weights = softmax(scores.mask_fill(later, f32::NEG_INFINITY), 3);
        let weights = weights.reshape([batch, GROUPS, SHARING, context]);
        let attended = weights.matmul(values).reshape([batch, 1, HIDDEN]);
        let x = x + self.output.forward(attended);
        let inner = self.inner.forward(self.before_mlp.forward(x.clone()));
        let (gate, up) = (inner.clone().narrow(2, 0, INNER), inner.narrow(2, INNER, INNER));
        (x + self.down.forward(silu(gate) * up), cache)
    }
}

/// What all blocks need of a token.
struct Token {
    position: Tensor<1, Int>,
    /// Of every head, `[1, ALL, 1, HEAD]`: values are not rotated.
    cosines: Tensor<4>,
    sines: Tensor<4>,
    partners: Tensor<1, Int>,
    /// Which positions are behind it, `[1, 1, 1, context]`.
    later: Tensor<4, Bool>,
}

impl Token {
    /// Heads `[batch, 1, ALL * HEAD]` as `[batch, ALL, 1, HEAD]`, queries and keys rotated.
    fn rotate(&self, heads: Tensor<3>) -> Tensor<4> {
        let [batch, ..] = heads.dims();
        // Two tensors in the same memory: Burn fuses `select` with what follows only if nothing
        // else there reads the tensor that it selects from.
        let [heads, partners] =
            [heads.clone(), heads].map(|heads| heads.reshape([batch, ALL, 1, HEAD]));
        let partners = partners.select(3, self.partners.clone());
        heads * self.cosines.clone() + partners * self.sines.clone()
    }
}

impl Model {
    /// Made and packed block by block.
    fn new(config: Option<&Fp4Config>, context: usize, device: &Device) -> (Self, [usize; 2]) {
        let mut bytes = [0, 0];
        let mut pack = |report: burn_fp4::Fp4Report| {
            bytes = [bytes[0] + report.bytes_before(), bytes[1] + report.bytes_after()];
        };
        let blocks = (0..BLOCKS).map(|_| {
            let mut block = Block::new(device);
            if let Some(config) = config {
                pack(block.quantize_fp4(config).expect("a valid block"));
            }
            device.sync().expect("the device answers");
            block
        });
        let blocks = blocks.collect();
        let mut head = in_bf16(LinearConfig::new(HIDDEN, WORDS).with_bias(false).init(device));
        if let Some(config) = config {
            pack(head.quantize_fp4(config).expect("a valid layer"));
        }
        let words = in_bf16(EmbeddingConfig::new(WORDS, HIDDEN).init(device));
        let norm = in_bf16(RmsNormConfig::new(HIDDEN).init(device));
        let angles = |at: usize| {
            (0..HEAD).map(move |i| {
                at as f64 * 500_000f64.powf(-((i % (HEAD / 2)) as f64) / (HEAD / 2) as f64)
            })
        };
        let table = |value: &dyn Fn(usize, f64) -> f64| {
            let values: Vec<f32> = (0..context)
                .flat_map(|at| angles(at).enumerate().map(|(i, angle)| value(i, angle) as f32))
                .collect();
            let values = TensorData::new(values, [context, HEAD]);
            Tensor::<2>::from_data(values, device).cast(DType::BF16)
        };
        let cosines = table(&|_, angle| angle.cos());
        let sines = table(&|i, angle| if i < HEAD / 2 { -angle.sin() } else { angle.sin() });
        let partners: Vec<_> = (0..HEAD).map(|i| ((i + HEAD / 2) % HEAD) as i32).collect();
        let partners = Tensor::from_data(TensorData::new(partners, [HEAD]), device);
        let decoder = Decoder { words, blocks, norm, head };
        (Self { decoder, cosines, sines, partners }, bytes)
    }

    /// The scores of all words, `[batch, 1, WORDS]`, and the best of each.
    fn step(&self, cache: Cache, (words, position): Inputs) -> (Cache, Scores) {
        let [context, _] = self.cosines.dims();
        let device = position.device();
        let row = |table: &Tensor<2>, of_values: Tensor<4>| {
            let row = table.clone().select(0, position.clone()).reshape([1, 1, 1, HEAD]);
            Tensor::cat(vec![row.expand([1, HEADS + GROUPS, 1, HEAD]), of_values], 1)
        };
        let (values, place) = ([1, GROUPS, 1, HEAD], (&device, DType::BF16));
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device);
        let later = positions.greater(position.clone().expand([context]));
        let token = Token {
            cosines: row(&self.cosines, Tensor::ones(values, place)),
            sines: row(&self.sines, Tensor::zeros(values, place)),
            partners: self.partners.clone(),
            later: later.reshape([1, 1, 1, context]),
            position,
        };
        let mut x = self.decoder.words.forward(words);
        let mut next = Vec::with_capacity(BLOCKS);
        for (block, cache) in self.decoder.blocks.iter().zip(cache) {
            let (output, cache) = block.forward(x, cache, &token);
            x = output;
            next.push(cache);
        }
        let scores = self.decoder.head.forward(self.decoder.norm.forward(x));
        (next, (scores.clone(), scores.argmax(2)))
    }
}

/// Adds a token for contexts and batches, launched and replayed.
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
                cosines: model.cosines.clone().narrow(0, 0, context),
                sines: model.sines.clone().narrow(0, 0, context),
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

/// Seconds for one token, launched and replayed.
fn token(
    arguments: &Arguments,
    device: &Device,
    model: Model,
    context: usize,
    batch: usize,
    name: &str,
) -> [f64; 2] {
    let zeros = || {
        let shape = [batch, 2 * GROUPS, context, HEAD];
        Tensor::<4>::zeros(shape, device).cast(DType::BF16)
    };
    let empty = || -> Cache { (0..BLOCKS).map(|_| zeros()).collect() };
    let inputs = |at: usize| -> Inputs {
        let words = (0..batch).map(|i| ((at * 7919 + i * 104_729) % WORDS) as i32).collect();
        let words = TensorData::new::<i32, _>(words, [batch, 1]);
        (Tensor::from_data(words, device), Tensor::from_ints([at as i32], device))
    };
    let mut cache = Some(empty());
    let mut logits = Vec::new();
    for at in 0..3 {
        let (next, (scores, _)) = model.step(cache.take().expect("given back"), inputs(at));
        cache = Some(next);
        logits.push(scores.into_data());
    }
    let last = inputs(context - 1);
    let launched = wall(arguments, device, || {
        let (next, (_, best)) = model.step(cache.take().expect("given back"), last.clone());
        cache = Some(next);
        drop(best.into_data());
    });
    drop(cache);
    let mut replay = Replay::with_state(model, empty(), Model::step);
    let mut equal = true;
    for (at, expected) in logits.iter().enumerate() {
        let (scores, _) = replay.run(inputs(at)).expect("recordable");
        equal &= scores.into_data() == *expected;
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
