//! Speed of made-up decoders on the host, and the shares of their time: `cargo bench-host
//! --language-model`. Packed weights multiply activations in int8, as in the example `llama`.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4::ops::{
    Int8Matrix, KvCache, Positions, RotaryEmbedding, add_rms_norm, attention, on_awake_threads,
    rms_norm, swiglu,
};
use burn_fp4::{Activations, Fp4Config, Fp4Embedding, Fp4Linear, Fp4Module};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

const PROMPT: usize = 128;
const GENERATED: usize = 64;
const EPSILON: f64 = 1e-5;

/// Lengths of the axes of a model.
struct Shape {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
}

const SHAPES: [Shape; 2] = [
    Shape {
        name: "SmolLM2 135M",
        hidden: 576,
        intermediate: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        vocab: 49152,
    },
    Shape {
        name: "Qwen2 0.5B",
        hidden: 896,
        intermediate: 4864,
        layers: 24,
        heads: 14,
        kv_heads: 2,
        vocab: 151_936,
    },
];

/// Parts of the time of a token.
#[derive(Clone, Copy)]
enum Part {
    Products,
    Attention,
    Norms,
    Head,
}

const PARTS: usize = 4;

/// Speed of a model, and the shares of the time of a generated token.
#[derive(Serialize)]
struct Row {
    model: &'static str,
    weights: &'static str,
    /// Dtype of the activations that layers multiply.
    activations: &'static str,
    /// Format of the output layer.
    head: &'static str,
    prompt_tokens_per_second: f64,
    generated_tokens_per_second: f64,
    products_percent: f64,
    /// RoPE, and the KV cache.
    attention_percent: f64,
    /// Residual streams, and SwiGLU.
    norms_percent: f64,
    head_percent: f64,
    rest_percent: f64,
}

#[derive(Module, Debug)]
struct Layer {
    input_layernorm: Tensor<1>,
    q_proj: Fp4Linear,
    k_proj: Fp4Linear,
    v_proj: Fp4Linear,
    o_proj: Fp4Linear,
    post_attention_layernorm: Tensor<1>,
    gate_proj: Fp4Linear,
    up_proj: Fp4Linear,
    down_proj: Fp4Linear,
}

struct Decoder {
    embed_tokens: Fp4Embedding,
    layers: Vec<Layer>,
    norm: Tensor<1>,
    /// None if the embedding is the head, in f32.
    int8_head: Option<Int8Matrix>,
    rotary_emb: RotaryEmbedding,
    head_dim: usize,
}

impl Layer {
    fn new(shape: &Shape, device: &Device) -> Self {
        let linear = |inputs, outputs| {
            let linear = LinearConfig::new(inputs, outputs).with_bias(false).init(device);
            Fp4Linear::from(linear)
        };
        let norm = || Tensor::ones([shape.hidden], device);
        let kv_size = shape.hidden / shape.heads * shape.kv_heads;
        Self {
            input_layernorm: norm(),
            q_proj: linear(shape.hidden, shape.hidden),
            k_proj: linear(shape.hidden, kv_size),
            v_proj: linear(shape.hidden, kv_size),
            o_proj: linear(shape.hidden, shape.hidden),
            post_attention_layernorm: norm(),
            gate_proj: linear(shape.hidden, shape.intermediate),
            up_proj: linear(shape.hidden, shape.intermediate),
            down_proj: linear(shape.intermediate, shape.hidden),
        }
    }

    fn forward(
        &self,
        hidden: Tensor<3>,
        cache: KvCache,
        positions: &Positions,
        head_dim: usize,
        times: &mut Times,
    ) -> (Tensor<3>, KvCache) {
        let [batch, count, _] = hidden.dims();
        let norm = self.input_layernorm.clone();
        let input = times.of(Part::Norms, || rms_norm(hidden.clone(), norm, EPSILON));
        let [queries, keys, values] = times.of(Part::Products, || {
            [&self.q_proj, &self.k_proj, &self.v_proj].map(|layer| layer.forward(input.clone()))
        });
        let [queries, keys, values] = [queries, keys, values].map(|values| {
            let heads = values.dims()[2] / head_dim;
            values.reshape([batch, count, heads, head_dim])
        });
        let (attended, cache) =
            times.of(Part::Attention, || attention(queries, keys, values, Some(cache), positions));
        let update = times.of(Part::Products, || self.o_proj.forward(attended));
        let norm = self.post_attention_layernorm.clone();
        let [hidden, input] = times.of(Part::Norms, || add_rms_norm(hidden, update, norm, EPSILON));
        let (up, gate) = times.of(Part::Products, || {
            (self.up_proj.forward(input.clone()), self.gate_proj.forward(input))
        });
        let gated = times.of(Part::Norms, || swiglu(gate, up));
        let update = times.of(Part::Products, || self.down_proj.forward(gated));
        (times.of(Part::Norms, || hidden + update), cache)
    }
}

impl Decoder {
    fn new(shape: &Shape, device: &Device) -> Self {
        let head_dim = shape.hidden / shape.heads;
        let inv_freq: Vec<f32> = (0..head_dim / 2).map(|at| 0.8f32.powi(at as i32)).collect();
        Self {
            embed_tokens: EmbeddingConfig::new(shape.vocab, shape.hidden).init(device).into(),
            layers: (0..shape.layers).map(|_| Layer::new(shape, device)).collect(),
            norm: Tensor::ones([shape.hidden], device),
            int8_head: None,
            rotary_emb: RotaryEmbedding::new(&inv_freq, PROMPT + GENERATED, device),
            head_dim,
        }
    }

    /// Returns the next token.
    fn step(
        &self,
        tokens: Tensor<2, Int>,
        first: usize,
        caches: &mut Vec<KvCache>,
        times: &mut Times,
    ) -> Tensor<2, Int> {
        let [_, count] = tokens.dims();
        let positions = first as i64..(first + count) as i64;
        let positions = Tensor::arange(positions, &tokens.device());
        let positions = self.rotary_emb.at(positions, PROMPT + GENERATED, DType::F32);
        let mut hidden = self.embed_tokens.forward(tokens);
        let layers = self.layers.iter().zip(core::mem::take(caches));
        for (layer, cache) in layers {
            let cache_after;
            (hidden, cache_after) = layer.forward(hidden, cache, &positions, self.head_dim, times);
            caches.push(cache_after);
        }
        let last = hidden.narrow(1, count - 1, 1);
        let last = times.of(Part::Norms, || rms_norm(last, self.norm.clone(), EPSILON));
        let logits = times.of(Part::Head, || match &self.int8_head {
            Some(head) => head.product(last),
            None => self.embed_tokens.project(last),
        });
        logits.argmax(2).squeeze_dim(2)
    }

    /// Times a prompt, and the tokens after it.
    fn run(&self, shape: &Shape, device: &Device) -> ([f64; 2], Times) {
        let empty = [1, shape.kv_heads, PROMPT + GENERATED, self.head_dim];
        let empty = || KvCache::zeros(empty, DType::F32, device);
        let mut caches: Vec<_> = (0..shape.layers).map(|_| empty()).collect();
        let start = Instant::now();
        let prompt = Tensor::<1, Int>::arange(0..PROMPT as i64, device).unsqueeze();
        let mut times = Times::default();
        let mut next = self.step(prompt, 0, &mut caches, &mut times);
        let prompt = start.elapsed().as_secs_f64();
        let (mut times, start) = (Times::default(), Instant::now());
        for at in PROMPT..PROMPT + GENERATED {
            next = on_awake_threads(|| self.step(next, at, &mut caches, &mut times));
        }
        ([prompt, start.elapsed().as_secs_f64()], times)
    }
}

/// Time of each part.
#[derive(Default)]
struct Times([Duration; PARTS]);

impl Times {
    fn of<R>(&mut self, part: Part, run: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = run();
        self.0[part as usize] += start.elapsed();
        result
    }
}

/// Measures each model dense and quantized, with medians of `runs` runs.
pub(crate) fn measure(runs: usize, json: bool) {
    let device = Device::flex();
    let mut rows = Vec::new();
    for shape in &SHAPES {
        let mut decoder = Decoder::new(shape, &device);
        rows.push(row(shape, "f32", &decoder, runs, &device));
        let head = Int8Matrix::quantize(decoder.embed_tokens.weight.val());
        let head = head.expect("blocks of 32").with_activations(Activations::Int8);
        decoder.int8_head = Some(head);
        let dense = decoder.layers.clone();
        for (weights, config) in [("nvfp4", Fp4Config::nvfp4()), ("mxfp4", Fp4Config::mxfp4())] {
            decoder.layers = dense.clone();
            decoder.layers.quantize_fp4(&config).expect("valid layers");
            decoder.layers.set_fp4_activations(Activations::Int8).expect("packed layers");
            rows.push(row(shape, weights, &decoder, runs, &device));
        }
    }
    print(&rows, json);
}

fn row(
    shape: &Shape,
    weights: &'static str,
    decoder: &Decoder,
    runs: usize,
    device: &Device,
) -> Row {
    decoder.run(shape, device);
    let mut all: Vec<_> = (0..runs.max(1)).map(|_| decoder.run(shape, device)).collect();
    all.sort_by(|left, right| left.0[0].total_cmp(&right.0[0]));
    let prompt = all[all.len() / 2].0[0];
    all.sort_by(|left, right| left.0[1].total_cmp(&right.0[1]));
    let ([_, seconds], Times(parts)) = &all[all.len() / 2];
    let percent = |part: Part| 100.0 * parts[part as usize].as_secs_f64() / seconds;
    let known: f64 = parts.iter().map(Duration::as_secs_f64).sum();
    Row {
        model: shape.name,
        weights,
        activations: if weights == "f32" { "f32" } else { "int8" },
        head: if decoder.int8_head.is_some() { "int8" } else { "f32" },
        prompt_tokens_per_second: PROMPT as f64 / prompt,
        generated_tokens_per_second: GENERATED as f64 / seconds,
        products_percent: percent(Part::Products),
        attention_percent: percent(Part::Attention),
        norms_percent: percent(Part::Norms),
        head_percent: percent(Part::Head),
        rest_percent: 100.0 * (1.0 - known / seconds),
    }
}

fn print(rows: &[Row], json: bool) {
    if json {
        println!("{}", serde_json::to_string_pretty(rows).expect("plain numbers"));
        return;
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header([
        "model",
        "weights",
        "head",
        "prompt",
        "generated",
        "products %",
        "attention %",
        "norms %",
        "head %",
        "rest %",
    ]);
    for row in rows {
        let figures = [
            row.prompt_tokens_per_second,
            row.generated_tokens_per_second,
            row.products_percent,
            row.attention_percent,
            row.norms_percent,
            row.head_percent,
            row.rest_percent,
        ];
        let names = [row.model, row.weights, row.head].map(str::to_owned);
        table.add_row(names.into_iter().chain(figures.map(|figure| format!("{figure:.1}"))));
    }
    for column in 3..10 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
}
