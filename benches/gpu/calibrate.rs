//! Calibration of a stack of decoder layers, and GPTQ with its statistics.

use std::time::Instant;

use benches::Row;
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_fp4::{
    Calibration, CalibrationOptions, Fp4Config, Fp4Module, Fp4Scheme, Method, PackedWeight,
};

use crate::figures::Figures;

/// Hidden size and intermediate size.
const WIDTH: usize = 4096;
const HIDDEN: usize = 11008;
const HEADS: usize = 32;
const CHARACTERS: usize = 4096;
/// Calibration batches, sequences of a batch, and tokens of a sequence.
const BATCHES: usize = 16;
const SEQUENCES: usize = 8;
const TOKENS: usize = 512;

#[derive(Module, Debug)]
struct Decoder {
    tokens: Embedding,
    blocks: Vec<Block>,
}

#[derive(Module, Debug)]
struct Block {
    attention_norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    hidden_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

struct Bf16;

impl ModuleMapper for Bf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(DType::BF16))
    }
}

impl Decoder {
    fn new(blocks: usize, device: &Device) -> Self {
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs).with_bias(false).init(device).map(&mut Bf16)
        };
        let norm = || RmsNormConfig::new(WIDTH).init(device).map(&mut Bf16);
        let block = |_| Block {
            attention_norm: norm(),
            query: linear(WIDTH, WIDTH),
            key: linear(WIDTH, WIDTH),
            value: linear(WIDTH, WIDTH),
            output: linear(WIDTH, WIDTH),
            hidden_norm: norm(),
            gate: linear(WIDTH, HIDDEN),
            up: linear(WIDTH, HIDDEN),
            down: linear(HIDDEN, WIDTH),
        };
        Self {
            tokens: EmbeddingConfig::new(CHARACTERS, WIDTH).init(device).map(&mut Bf16),
            blocks: (0..blocks).map(block).collect(),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let hidden = self.tokens.forward(tokens);
        self.blocks.iter().fold(hidden, |hidden, block| block.forward(hidden))
    }
}

impl Block {
    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let [n, tokens, _] = input.dims();
        let normed = self.attention_norm.forward(input.clone());
        let split = |x: Tensor<3>| x.reshape([n, tokens, HEADS, WIDTH / HEADS]).swap_dims(1, 2);
        let query = split(self.query.forward(normed.clone()));
        let key = split(self.key.forward(normed.clone()));
        let value = split(self.value.forward(normed));
        let scores = query.matmul(key.swap_dims(2, 3)) / ((WIDTH / HEADS) as f64).sqrt();
        let read = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        let hidden = input + self.output.forward(read.reshape([n, tokens, WIDTH]));
        let normed = self.hidden_norm.forward(hidden.clone());
        let inner = silu(self.gate.forward(normed.clone())) * self.up.forward(normed);
        hidden + self.down.forward(inner)
    }
}

/// Measures calibration and quantization of decoder layers, on one device and on several.
pub(crate) fn measure(blocks: usize, devices: usize, figures: &mut Figures) {
    let device = Device::cuda(0);
    let model = Decoder::new(blocks, &device);
    let batches: Vec<_> = (0..BATCHES)
        .map(|_| {
            let uniform = Distribution::Uniform(0.0, CHARACTERS as f64);
            Tensor::<2>::random([SEQUENCES, TOKENS], uniform, &device).int()
        })
        .collect();
    // The first run compiles and tunes kernels on every device.
    let first = &batches[..devices];
    eprintln!("{} sequences, the first time:", devices * SEQUENCES);
    measure_on(&model, first, devices, drop);
    if devices > 1 {
        measure_on(&model, &first[..1], 1, drop);
    }
    eprintln!("{} sequences:", BATCHES * SEQUENCES);
    let on_one = measure_on(&model, &batches, 1, |row| figures.push(row));
    if devices > 1 {
        let on_several = measure_on(&model, &batches, devices, |row| figures.push(row));
        let same = agreement(&on_one.0, &on_several.0);
        eprintln!("{same} sums of products, as f32, are the same on {devices} devices");
        let same = agreement(&on_one.1, &on_several.1);
        eprintln!("{same} block scales are the same on {devices} devices");
    }
}

/// Counts the equal scales, and all scales.
fn agreement<T: PartialEq>(left: &[Vec<T>], right: &[Vec<T>]) -> String {
    let pairs = || left.iter().flatten().zip(right.iter().flatten());
    format!("{} of {}", pairs().filter(|(left, right)| left == right).count(), pairs().count())
}

/// Statistics of the layer inputs, and the block scales of each weight from GPTQ.
fn measure_on(
    model: &Decoder,
    batches: &[Tensor<2, Int>],
    devices: usize,
    mut measured: impl FnMut(Row),
) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let device = Device::cuda(0);
    let reserved = || {
        device.sync().expect("the device answers");
        device.memory_pool_usage().expect("reported").bytes_reserved as usize
    };
    device.memory_cleanup();
    let before = reserved();
    let blocks = model.blocks.len();
    let forward = |model: &Decoder, tokens: Tensor<2, Int>| model.forward(tokens);
    let weights = blocks * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN);
    let mut row = |name: &str, start: Instant| {
        device.sync().expect("the device answers");
        let seconds = start.elapsed().as_secs_f64();
        let more = reserved().saturating_sub(before);
        let name = format!("{name}, {blocks} decoder blocks, {devices} GPUs");
        eprintln!("{name}: {seconds:.1} s, {more} bytes of the device more than {before}");
        measured(Row::new(&name, weights, 2 * weights, seconds, seconds));
    };

    let start = Instant::now();
    let options = CalibrationOptions::default().devices((0..devices).map(Device::cuda));
    let calibration = Calibration::of(model).options(options).run(batches.iter().cloned(), forward);
    let calibration = calibration.expect("it can be recorded");
    row("calibrate", start);

    let hessian = Fp4Scheme::nvfp4().with_method(Method::Hessian);
    let gptq = Fp4Config::nvfp4().method(Method::GPTQ);
    let mut quantized = model.clone();
    for (name, config) in [("hessian", Fp4Config::new(hessian)), ("gptq", gptq)] {
        let start = Instant::now();
        quantized = model.clone();
        quantized.quantize_fp4(&config.with_calibration(&calibration)).expect("a valid model");
        row(&format!("quantize by {name}"), start);
    }
    let scales = |layer: &Linear| {
        let packed = layer.weight.reparameterization::<PackedWeight>().expect("quantized");
        packed.tensor::<2>().scales().into_data().iter::<u8>().collect()
    };
    let layers = quantized.blocks.iter().flat_map(|block| {
        let Block { query, key, value, output, gate, up, down, .. } = block;
        [query, key, value, output, gate, up, down]
    });
    let met = (0..blocks).flat_map(|block| {
        ["query", "output", "gate", "down"].map(|layer| format!("blocks.{block}.{layer}.weight"))
    });
    let met = met.map(|path| calibration.get(&path, 0).expect("it was met").to_f32());
    (met.collect(), layers.map(scales).collect())
}
