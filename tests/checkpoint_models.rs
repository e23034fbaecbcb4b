//! Checkpoints of other projects into modules, and modules into checkpoints.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]

use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout,
    RmsNorm, RmsNormConfig,
};
use burn::tensor::activation::{silu, softmax};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_fp4::checkpoints::{
    Container, DataType, Dtype, Fp4Weight, Fp8Weight, Model, Numbers, Tensor as FileTensor,
    TensorScale, Value, Weight, WriteOptions,
};
use burn_fp4::ops::{Gram, gram};
use burn_fp4::{
    Calibration, Checkpoint, CheckpointError, CheckpointMap, FileLayout, Fp4Config, Fp4Error,
    Fp4Module, Fp4Report, Fp4Scheme, LoadCheckpoint, Loaded, Method, Mismatch, Outcome,
    PackedWeight, Recipe, TensorScaling,
};
use burn_fp4_formats::{E4M3_VALUES, Fp4Format, Packed, TensorScale as Scale, bf16};
use tests::inputs::{Random, normals};
use tests::modules::{Net, seeded};
use tests::tensors::{floats, random};

/// Makes an empty folder.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoint_models").join(name);
    if path.exists() {
        fs::remove_dir_all(&path).expect("an old folder");
    }
    fs::create_dir_all(&path).expect("a folder");
    path
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    floats(tensor).into_iter().map(f32::to_bits).collect()
}

/// Transposes `[rows, cols]`.
fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|at| values[at % rows * cols + at / rows]).collect()
}

fn load<M: Module>(path: &Path, module: &mut M, map: &CheckpointMap) -> burn_fp4::LoadReport {
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    checkpoint.load_into(module, map).unwrap_or_else(|error| panic!("{error}"))
}

fn refused<M: Module>(path: &Path, module: &mut M, map: &CheckpointMap) -> Vec<Mismatch> {
    match Checkpoint::open(path).expect("a checkpoint").load_into(module, map) {
        Err(Fp4Error::Mismatch(mismatches)) => mismatches,
        other => panic!("{other:?}"),
    }
}

/// Makes random codes and scales.
fn packed(seed: u64, format: Fp4Format, rows: usize, cols: usize, g: f32) -> Packed {
    let mut random = Random::new(seed);
    let block_size = format.row().block_size;
    let first = if format.row().tensor_scale { 0 } else { 120 };
    Packed {
        format,
        block_size,
        rows,
        cols,
        codes: (0..rows * cols / 2).map(|_| random.below(256) as u8).collect(),
        scales: (0..rows * cols / block_size).map(|_| (first + random.below(14)) as u8).collect(),
        tensor_scale: Scale::One(g),
    }
}

fn fp4(name: &str, matrices: &[Packed]) -> Weight<'static> {
    Weight::new(name, 0, Value::Fp4(Fp4Weight::stack(name, matrices).expect("valid matrices")))
}

/// bf16 values.
fn dense(name: &str, shape: &[usize], seed: u64) -> (Weight<'static>, Vec<f32>) {
    let values = normals(seed, shape.iter().product());
    let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let tensor = FileTensor::new(name.to_owned(), Dtype::BF16, shape.to_vec(), bytes);
    let weight = Weight::new(name, 0, Value::Plain(tensor.expect("a shape")));
    (weight, values.into_iter().map(|value| value.to_f32()).collect())
}

/// Makes an FP8 tensor with one scale.
fn fp8(name: &str, rows: usize, cols: usize, seed: u64) -> (Weight<'static>, Vec<f32>) {
    let mut random = Random::new(seed);
    let codes: Vec<u8> = (0..rows * cols).map(|_| random.below(0x7F) as u8).collect();
    let values = codes.iter().map(|&code| E4M3_VALUES[usize::from(code)] * 0.375).collect();
    let codes = FileTensor::new(name.to_owned(), Dtype::F8_E4M3, vec![rows, cols], codes);
    let scale = 0.375_f32.to_le_bytes().to_vec();
    let scale = FileTensor::new("scale", Dtype::F32, Vec::new(), scale).expect("a scalar");
    let weight = Fp8Weight::new(codes.expect("a shape"), scale, [128, 128]).expect("FP8");
    (Weight::new(name, 0, Value::Fp8(weight)), values)
}

fn write(weights: Vec<Weight<'static>>, path: &Path, dialect: &str) {
    let model = Model { weights, ..Model::default() };
    model.write(path, dialect, &WriteOptions::default()).unwrap_or_else(|error| panic!("{error}"));
}

/// A Llama with the names of `transformers`, without positions.
#[derive(Module, Debug)]
struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
}

#[derive(Module, Debug)]
struct Layer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
}

#[derive(Module, Debug)]
struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

const VOCABULARY: usize = 48;
const WIDTH: usize = 64;
const HIDDEN: usize = 96;
const LAYERS: usize = 2;

/// Name, inputs and outputs of the linear layers of a layer.
const LINEARS: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", WIDTH, WIDTH),
    ("self_attn.k_proj", WIDTH, 32),
    ("self_attn.v_proj", WIDTH, 32),
    ("self_attn.o_proj", 32, WIDTH),
    ("mlp.gate_proj", WIDTH, HIDDEN),
    ("mlp.up_proj", WIDTH, HIDDEN),
    ("mlp.down_proj", HIDDEN, WIDTH),
];

impl Llama {
    fn new(device: &Device) -> Self {
        let linear = |at: usize| {
            let (_, inputs, outputs) = LINEARS[at];
            LinearConfig::new(inputs, outputs).with_bias(false).init(device)
        };
        let norm = || RmsNormConfig::new(WIDTH).init(device);
        let layer = |_| Layer {
            input_layernorm: norm(),
            self_attn: Attention {
                q_proj: linear(0),
                k_proj: linear(1),
                v_proj: linear(2),
                o_proj: linear(3),
            },
            post_attention_layernorm: norm(),
            mlp: Mlp { gate_proj: linear(4), up_proj: linear(5), down_proj: linear(6) },
        };
        Self {
            embed_tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            layers: (0..LAYERS).map(layer).collect(),
            norm: norm(),
            lm_head: LinearConfig::new(WIDTH, VOCABULARY).with_bias(false).init(device),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut hidden = self.embed_tokens.forward(tokens);
        for layer in &self.layers {
            let Attention { q_proj, k_proj, v_proj, o_proj } = &layer.self_attn;
            let input = layer.input_layernorm.forward(hidden.clone());
            // Two queries for each key.
            let queries = q_proj.forward(input.clone()).narrow(2, 0, 32)
                + q_proj.forward(input.clone()).narrow(2, 32, 32);
            let scores = queries.matmul(k_proj.forward(input.clone()).swap_dims(1, 2));
            let read = softmax(scores.mul_scalar(0.2), 2).matmul(v_proj.forward(input));
            hidden = hidden + o_proj.forward(read);
            let Mlp { gate_proj, up_proj, down_proj } = &layer.mlp;
            let input = layer.post_attention_layernorm.forward(hidden.clone());
            let gated = silu(gate_proj.forward(input.clone())) * up_proj.forward(input);
            hidden = hidden + down_proj.forward(gated);
        }
        self.lm_head.forward(self.norm.forward(hidden))
    }

    fn linears(&self) -> Vec<&Linear> {
        self.layers
            .iter()
            .flat_map(|Layer { self_attn, mlp, .. }| {
                [
                    &self_attn.q_proj,
                    &self_attn.k_proj,
                    &self_attn.v_proj,
                    &self_attn.o_proj,
                    &mlp.gate_proj,
                    &mlp.up_proj,
                    &mlp.down_proj,
                ]
            })
            .collect()
    }
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    Tensor::from_ints([[1, 2, 3, 47, 19], [0, 5, 6, 7, 8]], device)
}

/// Maps the names of `transformers` to parameter paths, and back.
fn llama_map() -> CheckpointMap {
    CheckpointMap::new()
        .rename(r"^model\.", "")
        .rename_back(r"^(embed_tokens|layers|norm)\.", "model.$1.")
}

/// Fills the factors of normalizations, which `seeded` leaves at 1.
fn with_norms<M: Module>(module: M, seed: u64) -> M {
    struct Fill(u64);

    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if D != 1 {
                return param;
            }
            self.0 += 1;
            let values = normals(self.0, param.shape().num_elements());
            let device = param.lazy_device();
            param.map(|_| Tensor::<1>::from_floats(values.as_slice(), &device).unsqueeze())
        }
    }

    module.map(&mut Fill(seed))
}

/// Returns a tensor scale that equals the reciprocal of its reciprocal: dialects that store the
/// reciprocal hold it exactly.
fn invertible(scheme: Fp4Scheme) -> Fp4Config {
    let g = 1.0 / 5_003.0_f32;
    assert_eq!(1.0 / (1.0 / g), g, "the premise");
    Fp4Config::new(scheme.with_tensor_scale(TensorScaling::Multiplier(g)))
}

fn config(format: Fp4Format) -> Fp4Config {
    if format.row().tensor_scale { invertible(Fp4Scheme::nvfp4()) } else { Fp4Config::mxfp4() }
}

fn encoder(device: &Device) -> TransformerEncoder {
    TransformerEncoderConfig::new(64, 96, 4, 2).with_dropout(0.0).init(device)
}

fn files(path: &Path) -> Vec<(String, Vec<u8>)> {
    let entry = |path: PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read(path).expect("a file"))
    };
    let entries = fs::read_dir(path).expect("a folder").map(|one| one.expect("an entry").path());
    let mut files: Vec<_> = entries.map(entry).collect();
    files.sort();
    files
}

/// Returns every dialect with the formats in which it holds a model of linear layers.
const WRITTEN: [(&str, Fp4Format); 4] = [
    ("modelopt", Fp4Format::NvFp4),
    ("modelopt", Fp4Format::MxFp4),
    ("compressed-tensors", Fp4Format::NvFp4),
    ("compressed-tensors", Fp4Format::MxFp4),
];

#[test]
fn a_saved_and_loaded_encoder_computes_the_same_bits() {
    let device = Device::flex();
    let folder = folder("encoder");
    for (dialect, format) in WRITTEN {
        let mut saved = with_norms(seeded(encoder(&device), 3), 50);
        saved.quantize_fp4(&config(format)).unwrap();
        let path = folder.join(format!("{dialect}-{format}"));
        let map = CheckpointMap::new();
        let written = saved.save_fp4(&path, dialect, &map).unwrap();
        assert_eq!(written.inverted_inexactly, 0, "{dialect} {format}");

        let mut loaded = encoder(&device);
        let report = load(&path, &mut loaded, &map);
        assert_eq!(report.packed().count(), 12, "{report}");
        let input = || {
            let values = Tensor::<1>::from_floats(normals(9, 2 * 5 * 64).as_slice(), &device);
            TransformerEncoderInput::new(values.reshape([2, 5, 64]))
        };
        assert_eq!(
            bits(loaded.forward(input())),
            bits(saved.forward(input())),
            "{dialect} {format}"
        );

        // The same module makes the same bytes, and so does the one that was loaded.
        for (name, module) in [("again", &saved), ("loaded", &loaded)] {
            let again = folder.join(format!("{dialect}-{format}-{name}"));
            module.save_fp4(&again, dialect, &map).unwrap();
            assert!(files(&again) == files(&path), "{dialect} {format} {name}");
        }
    }
}

#[test]
fn a_llama_is_saved_with_the_names_of_transformers_and_loaded_again() {
    let device = Device::flex();
    let folder = folder("llama");
    let map = llama_map();
    for (dialect, format) in WRITTEN {
        let mut saved = with_norms(seeded(Llama::new(&device), 5), 70);
        saved.quantize_fp4(&config(format).exclude("lm_head.*")).unwrap();
        let path = folder.join(format!("{dialect}-{format}"));
        saved.save_fp4(&path, dialect, &map).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let names: Vec<_> =
            checkpoint.weights().unwrap().iter().map(|weight| weight.name.clone()).collect();
        for expected in [
            "model.embed_tokens.weight",
            "model.layers.1.input_layernorm.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.norm.weight",
            "lm_head.weight",
        ] {
            assert!(names.iter().any(|name| name == expected), "{expected} in {names:?}");
        }

        let mut loaded = Llama::new(&device);
        let report = load(&path, &mut loaded, &map);
        assert_eq!(report.packed().count(), 7 * LAYERS);
        let (expected, found) = (saved.forward(tokens(&device)), loaded.forward(tokens(&device)));
        assert_eq!(bits(found), bits(expected), "{dialect} {format}");
    }
}

/// A file as another tool writes it, and its values, in the order of [`Llama::linears`].
fn foreign_llama(path: &Path, dialect: &str) -> (Vec<Vec<f32>>, Vec<f32>, Vec<f32>) {
    let (embedding, embedding_values) = dense("model.embed_tokens.weight", &[VOCABULARY, WIDTH], 1);
    let (norm, norm_values) = dense("model.norm.weight", &[WIDTH], 2);
    let mut weights = vec![embedding, norm];
    let mut values = Vec::new();
    for layer in 0..LAYERS {
        for (at, name) in ["input_layernorm", "post_attention_layernorm"].into_iter().enumerate() {
            let name = format!("model.layers.{layer}.{name}.weight");
            weights.push(dense(&name, &[WIDTH], (10 + 2 * layer + at) as u64).0);
        }
        for (at, (name, inputs, outputs)) in LINEARS.into_iter().enumerate() {
            let name = format!("model.layers.{layer}.{name}.weight");
            let seed = (100 + 10 * layer + at) as u64;
            let (mut weight, file_values) = match name.contains("v_proj") {
                true => fp8(&name, outputs, inputs, seed),
                false => {
                    let matrix = packed(seed, Fp4Format::NvFp4, outputs, inputs, 0.031_25);
                    (fp4(&name, std::slice::from_ref(&matrix)), matrix.dequantize())
                }
            };
            // Readers of ModelOpt need one for FP8 too.
            if dialect == "modelopt" || !name.contains("v_proj") {
                weight.input_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.5])));
            }
            weights.push(weight);
            values.push(transposed(&file_values, outputs, inputs));
        }
    }
    write(weights, path, dialect);
    (values, embedding_values, norm_values)
}

#[test]
fn files_of_other_tools_load_with_the_values_of_the_file() {
    let folder = folder("foreign");
    for dialect in ["modelopt", "compressed-tensors"] {
        let path = folder.join(dialect);
        let (values, embedding, norm) = foreign_llama(&path, dialect);
        for device in [Device::flex(), Device::flex().autodiff(), Device::ndarray()] {
            let mut llama = Llama::new(&device);
            let map = llama_map().tie("lm_head.weight", "embed_tokens.weight");
            let report = load(&path, &mut llama, &map);
            for (at, (linear, expected)) in llama.linears().into_iter().zip(&values).enumerate() {
                let found: Vec<_> =
                    bits(linear.weight.val()).into_iter().map(f32::from_bits).collect();
                assert!(found == *expected, "{dialect}: linear {at}");
                let packed = linear.weight.reparameterization::<PackedWeight>();
                assert_eq!(packed.is_some(), at % 7 != 2, "FP8 is dense");
            }
            assert_eq!(floats(llama.embed_tokens.weight.val()), embedding);
            // Tied: the same tensor, transposed.
            let head = transposed(&embedding, VOCABULARY, WIDTH);
            assert_eq!(floats(llama.lm_head.weight.val()), head);
            assert_eq!(floats(llama.norm.gamma.val()), norm);
            assert_eq!(llama.norm.gamma.val().is_require_grad(), device.is_autodiff());
            let scales = if dialect == "modelopt" { 7 } else { 6 };
            assert_eq!(report.input_scales_left_out, scales * LAYERS);

            let from = |path: &str| report.get(path).unwrap().tensors[0].tensor.clone();
            assert_eq!(from("norm.gamma"), "model.norm.weight");
            assert_eq!(from("lm_head.weight"), "model.embed_tokens.weight");
            let value = &report.get("layers.1.self_attn.v_proj.weight").unwrap();
            assert_eq!(value.tensors[0].file, "model.safetensors");
            let dense = Loaded::Dense { stored: "F8_E4M3".to_owned(), dtype: "F32".to_owned() };
            assert_eq!(value.loaded, dense);
            assert_eq!(llama.forward(tokens(&device)).dims(), [2, 5, VOCABULARY]);
        }
    }
}

#[test]
fn a_linear_that_stores_columns_gets_the_same_weight() {
    let folder = folder("columns");
    let device = Device::flex();
    let matrix = packed(1, Fp4Format::NvFp4, 64, 64, 0.25);
    let (bias, _) = dense("bias", &[64], 3);
    write(
        vec![fp4("weight", std::slice::from_ref(&matrix)), bias.clone()],
        &folder.join("fp4"),
        "modelopt",
    );
    let (weight, values) = dense("weight", &[64, 64], 2);
    write(vec![weight, bias], &folder.join("dense"), "plain");
    for (file, expected) in [("fp4", matrix.dequantize()), ("dense", values)] {
        for layout in [LinearLayout::Row, LinearLayout::Col] {
            for initialized in [false, true] {
                let mut linear = LinearConfig::new(64, 64).with_layout(layout).init(&device);
                if initialized {
                    let _value = linear.weight.val();
                }
                load(&folder.join(file), &mut linear, &CheckpointMap::new());
                let found = floats(linear.weight.val());
                assert!(found == transposed(&expected, 64, 64), "{file} {layout:?} {initialized}");
            }
        }
    }
}

/// Experts `[experts, in, out]`, used as `x.matmul(weight)`.
#[derive(Module, Debug)]
struct Experts {
    up: Param<Tensor<3>>,
    up_bias: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Mixture {
    experts: Experts,
}

/// Experts as separate layers.
#[derive(Module, Debug)]
struct Separate {
    experts: Vec<Expert>,
}

#[derive(Module, Debug)]
struct Expert {
    up: Linear,
}

const EXPERTS: usize = 3;

fn mixture(device: &Device) -> Mixture {
    mixture_of(device, [64, 32], 32)
}

/// Makes experts from a matrix and a bias.
fn mixture_of(device: &Device, [rows, cols]: [usize; 2], bias: usize) -> Mixture {
    let up = Param::from_tensor(Tensor::<3>::zeros([EXPERTS, rows, cols], device));
    let up_bias = Param::from_tensor(Tensor::<2>::zeros([EXPERTS, bias], device));
    Mixture { experts: Experts { up, up_bias } }
}

fn separate(device: &Device) -> Separate {
    let expert = |_| Expert { up: LinearConfig::new(64, 32).with_bias(false).init(device) };
    Separate { experts: (0..EXPERTS).map(expert).collect() }
}

/// Makes the matrices `[out, in]` of the experts, each with its own tensor scale.
fn expert_matrices(format: Fp4Format) -> Vec<Packed> {
    let g = |at: usize| if format.row().tensor_scale { 0.25 * (at + 1) as f32 } else { 1.0 };
    (0..EXPERTS).map(|at| packed(at as u64, format, 32, 64, g(at))).collect()
}

/// Reads the values of a parameter `[experts, in, out]`.
fn expert_values(matrices: &[Packed]) -> Vec<f32> {
    matrices.iter().flat_map(|matrix| transposed(&matrix.dequantize(), 32, 64)).collect()
}

#[test]
fn experts_are_stacked_and_split_in_both_directions() {
    let folder = folder("experts");
    let device = Device::flex();
    let (bias, bias_values) = dense("experts.up_bias", &[EXPERTS, 32], 5);
    for (dialect, format) in [
        ("modelopt", Fp4Format::NvFp4),
        ("modelopt", Fp4Format::MxFp4),
        ("compressed-tensors", Fp4Format::MxFp4),
    ] {
        let matrices = expert_matrices(format);
        let name = |at: usize| format!("experts.{at}.up_proj.weight");
        let split = matrices.iter().enumerate();
        let mut weights: Vec<_> =
            split.map(|(at, one)| fp4(&name(at), std::slice::from_ref(one))).collect();
        weights.push(bias.clone());
        let path = folder.join(format!("{dialect}-{format}-split"));
        write(weights, &path, dialect);

        let map = CheckpointMap::new()
            .container("Experts", 1, FileLayout::OutIn)
            .experts("experts.up", "experts.{}.up_proj.weight");
        let mut stacked = mixture(&device);
        let report = load(&path, &mut stacked, &map);
        assert!(floats(stacked.experts.up.val()) == expert_values(&matrices), "{dialect} {format}");
        assert_eq!(floats(stacked.experts.up_bias.val()), bias_values);
        assert_eq!(report.get("experts.up").unwrap().tensors.len(), EXPERTS);
        assert!(stacked.experts.up.reparameterization::<PackedWeight>().is_some());

        // Out again: the same tensors; the bias was bf16 and is f32 now.
        let again = folder.join(format!("{dialect}-{format}-split-again"));
        stacked.save_fp4(&again, dialect, &map).unwrap();
        let bytes = |path: &Path| -> Vec<_> {
            let checkpoint = Checkpoint::open(path).unwrap();
            let tensors = checkpoint.container().tensors().filter(|one| !one.name.contains("bias"));
            let tensors = tensors.map(|one| (one.name.to_string(), one.bytes.to_vec()));
            let mut tensors: Vec<_> = tensors.collect();
            tensors.sort();
            tensors
        };
        assert!(bytes(&again) == bytes(&path), "{dialect} {format}");

        // A stacked file into layers of their own, and out again.
        if dialect == "modelopt" {
            let path = folder.join(format!("{dialect}-{format}-stacked"));
            write(vec![fp4("experts.up_proj", &matrices)], &path, dialect);
            let map = CheckpointMap::new().experts("experts.{}.up.weight", "experts.up_proj");
            let mut layers = separate(&device);
            load(&path, &mut layers, &map);
            for (expert, matrix) in layers.experts.iter().zip(&matrices) {
                let expected = transposed(&matrix.dequantize(), 32, 64);
                assert!(floats(expert.up.weight.val()) == expected, "{dialect} {format}");
            }
            let again = folder.join(format!("{dialect}-{format}-stacked-again"));
            layers.save_fp4(&again, dialect, &map).unwrap();
            assert!(bytes(&again) == bytes(&path), "{dialect} {format}");
        }
    }
}

#[test]
fn dense_experts_are_stacked_and_split_too() {
    let folder = folder("dense-experts");
    let device = Device::flex();
    let (bias, _) = dense("experts.up_bias", &[EXPERTS, 32], 5);
    let (weights, values): (Vec<_>, Vec<_>) = (0..EXPERTS)
        .map(|at| dense(&format!("experts.{at}.up_proj.weight"), &[32, 64], at as u64))
        .unzip();
    let path = folder.join("split");
    write(weights.into_iter().chain([bias]).collect(), &path, "plain");
    let map = CheckpointMap::new()
        .container("Experts", 1, FileLayout::OutIn)
        .experts("experts.up", "experts.{}.up_proj.weight");
    let mut stacked = mixture(&device);
    load(&path, &mut stacked, &map);
    let expected: Vec<_> = values.iter().flat_map(|one| transposed(one, 32, 64)).collect();
    assert!(floats(stacked.experts.up.val()) == expected);

    // From one to the other by files: split, stacked, and in layers of their own.
    let path = folder.join("stacked");
    let alike = CheckpointMap::new().container("Experts", 1, FileLayout::OutIn);
    stacked.save_fp4(&path, "plain", &alike).unwrap();
    let map = CheckpointMap::new().experts("experts.{}.up.weight", "experts.up").allow_unused();
    let mut layers = separate(&device);
    load(&path, &mut layers, &map);
    for (expert, expected) in layers.experts.iter().zip(&values) {
        assert!(floats(expert.up.weight.val()) == transposed(expected, 32, 64));
    }
    let again = folder.join("stacked-again");
    layers.save_fp4(&again, "plain", &map).unwrap();
    let stacked_tensor = |path: &Path| {
        let checkpoint = Checkpoint::open(path).unwrap();
        checkpoint.container().get("experts.up").expect("a tensor").bytes.to_vec()
    };
    assert!(stacked_tensor(&again) == stacked_tensor(&path));

    // An expert too few, and one too many.
    let four =
        Separate { experts: [separate(&device).experts, separate(&device).experts].concat() };
    let mut many = four;
    let found = refused(&path, &mut many, &map);
    assert!(matches!(&found[..], [Mismatch::Shape { .. }, ..]), "{found:?}");
    let mut few = Separate { experts: separate(&device).experts[..2].to_vec() };
    let strict = CheckpointMap::new().experts("experts.{}.up.weight", "experts.up");
    let found = refused(&path, &mut few, &strict);
    let unused = |tensor: &str| {
        let named =
            |one: &Mismatch| matches!(one, Mismatch::Unused { tensor: t, .. } if t == tensor);
        found.iter().any(named)
    };
    assert!(unused("experts.up[2]") && unused("experts.up_bias"), "{found:?}");
}

#[test]
fn a_tensor_scale_that_is_inexact_as_a_reciprocal_is_counted() {
    let folder = folder("divisors");
    let device = Device::flex();
    let mut saved = seeded(Llama::new(&device), 5);
    let lossy = (50..100).map(|at| at as f32 * 1e-5).find(|g| 1.0 / (1.0 / g) != *g);
    let lossy = TensorScaling::Multiplier(lossy.expect("one in six"));
    let config =
        Fp4Config::nvfp4().with("**.q_proj.*", Fp4Scheme::nvfp4().with_tensor_scale(lossy));
    saved.quantize_fp4(&config).unwrap();
    let path = folder.join("model");
    let report = saved.save_fp4(&path, "compressed-tensors", &llama_map()).unwrap();
    let mut loaded = Llama::new(&device);
    load(&path, &mut loaded, &llama_map());
    let host = |linear: &Linear| {
        let packed = linear.weight.reparameterization::<PackedWeight>().expect("packed");
        packed.tensor::<2>().to_packed().unwrap()
    };
    let both = |llama: &Llama| -> Vec<_> {
        llama.linears().into_iter().chain([&llama.lm_head]).map(host).collect()
    };
    let mut lost = 0;
    for (before, after) in both(&saved).into_iter().zip(both(&loaded)) {
        assert!(before.codes == after.codes && before.scales == after.scales);
        let [before, after] = [before, after].map(|one| one.tensor_scale.of_row(0));
        assert_eq!(after, 1.0 / (1.0 / before));
        assert!(after.to_bits().abs_diff(before.to_bits()) <= 1);
        lost += u64::from(after != before);
    }
    assert_eq!((report.inverted, report.inverted_inexactly), (7 * LAYERS as u64 + 1, lost));
    assert!(lost >= LAYERS as u64, "the premise");
}

#[test]
fn the_stacked_experts_of_gpt_oss_keep_their_bytes() {
    let folder = folder("gpt-oss");
    let device = Device::flex();
    let matrices = expert_matrices(Fp4Format::MxFp4);
    let mut up = fp4("experts.up", &matrices);
    let Value::Fp4(weight) = &mut up.value else { panic!("FP4") };
    weight.transposed = true;
    let (bias, bias_values) = dense("experts.up_bias", &[EXPERTS, 32], 5);
    for dialect in ["gpt-oss", "modelopt"] {
        let path = folder.join(dialect);
        write(vec![up.clone(), bias.clone()], &path, dialect);
        let map = CheckpointMap::new().container("Experts", 1, FileLayout::AsIs);
        let mut module = mixture(&device);
        let report = load(&path, &mut module, &map);
        assert!(floats(module.experts.up.val()) == expert_values(&matrices), "{dialect}");
        assert_eq!(floats(module.experts.up_bias.val()), bias_values);
        let format = Fp4Format::MxFp4;
        let packed = Loaded::Packed { format, block_size: 32, axis: 1 };
        assert_eq!(report.get("experts.up").unwrap().loaded, packed);

        let again = folder.join(format!("{dialect}-again"));
        module.save_fp4(&again, dialect, &map).unwrap();
        let (first, second) = (Checkpoint::open(&path).unwrap(), Checkpoint::open(&again).unwrap());
        for tensor in first.container().tensors().filter(|one| !one.name.contains("bias")) {
            let found = second.container().get(&tensor.name).expect("the same names");
            assert_eq!((&found.shape, &found.bytes), (&tensor.shape, &tensor.bytes), "{dialect}");
        }
    }
}

/// An embedding and an output layer.
#[derive(Module, Debug)]
struct Tied {
    embed: Embedding,
    head: Linear,
}

fn tied(device: &Device) -> Tied {
    Tied {
        embed: EmbeddingConfig::new(32, 64).init(device),
        head: LinearConfig::new(64, 32).with_bias(false).init(device),
    }
}

#[test]
fn tied_parameters_are_one_tensor_in_a_file() {
    let folder = folder("tied");
    let device = Device::flex();
    let matrix = packed(3, Fp4Format::NvFp4, 32, 64, 0.5);
    let path = folder.join("tied");
    write(vec![fp4("embed.weight", std::slice::from_ref(&matrix))], &path, "modelopt");
    let map = CheckpointMap::new().tie("head.weight", "embed.weight");
    let mut module = tied(&device);
    let missing = refused(&path, &mut module, &CheckpointMap::new());
    let [Mismatch::Missing { parameter, .. }] = &missing[..] else { panic!("{missing:?}") };
    assert_eq!(parameter, "head.weight");

    load(&path, &mut module, &map);
    let values = matrix.dequantize();
    assert_eq!(floats(module.embed.weight.val()), values);
    assert_eq!(floats(module.head.weight.val()), transposed(&values, 32, 64));
    let again = folder.join("again");
    module.save_fp4(&again, "modelopt", &map).unwrap();
    assert!(files(&again) == files(&path));

    // With other values of its own it is a tensor of its own, or an error.
    let own = vec![
        fp4("embed.weight", std::slice::from_ref(&matrix)),
        fp4("head.weight", &[packed(4, Fp4Format::NvFp4, 32, 64, 0.5)]),
    ];
    let untied = folder.join("untied");
    write(own, &untied, "modelopt");
    let mut module = tied(&device);
    load(&untied, &mut module, &map);
    assert_ne!(floats(module.head.weight.val()), transposed(&values, 32, 64));
    match module.save_fp4(folder.join("refused"), "modelopt", &map) {
        Err(Fp4Error::Mismatch(mismatches)) => {
            let [Mismatch::Tied { with, .. }] = &mismatches[..] else { panic!("{mismatches:?}") };
            assert_eq!(with, "embed.weight");
            assert!(mismatches[0].to_string().contains("save without `tie`"), "{mismatches:?}");
        }
        other => panic!("{other:?}"),
    }
    assert!(!folder.join("refused").exists());
}

/// Makes a bias that fits, and returns its values.
fn fitting_bias() -> (Weight<'static>, Vec<f32>) {
    dense("bias", &[32], 3)
}

/// A checkpoint that does not fit a linear layer `[64, 32]`, the text of its error, and the map
/// that allows it, if any.
type Misfit = (Vec<Weight<'static>>, &'static str, Option<CheckpointMap>);

fn misfits() -> Vec<Misfit> {
    let matrix = packed(1, Fp4Format::NvFp4, 32, 64, 0.25);
    let weight = || fp4("weight", std::slice::from_ref(&matrix));
    let bias = || fitting_bias().0;
    let (wrong, _) = dense("bias", &[31], 3);
    let (extra, _) = dense("extra.weight", &[4], 4);
    let ints = FileTensor::new("bias", Dtype::I32, vec![32], vec![0; 128]).expect("a shape");
    let ints = Weight::new("bias", 0, Value::Plain(ints));
    let other_way = fp4("weight", &[packed(1, Fp4Format::NvFp4, 64, 32, 0.25)]);
    let mut scaled = weight();
    scaled.pre_quant_scale = FileTensor::new("x", Dtype::F32, vec![64], vec![0; 256]).ok();
    let mut broken = weight();
    if let Value::Fp4(fp4) = &mut broken.value {
        fp4.scales.to_mut()[5] = 0x7F;
    }
    let misfits = || Some(CheckpointMap::new().allow_misfits());
    vec![
        (
            vec![weight()],
            "parameter `bias` [32]: expected a tensor `bias`",
            Some(CheckpointMap::new().allow_missing()),
        ),
        (
            vec![weight(), bias(), extra],
            "tensor `extra.weight`: the module has no parameter `extra.weight`",
            Some(CheckpointMap::new().allow_unused()),
        ),
        (
            vec![weight(), wrong],
            "parameter `bias`, tensor `bias`: expected shape [32] in the file, found [31]",
            misfits(),
        ),
        (
            vec![weight(), ints],
            "parameter `bias`, tensor `bias`: expected floats, FP8 or FP4, found I32",
            misfits(),
        ),
        (
            vec![other_way, bias()],
            "parameter `weight`, tensor `weight`: expected shape [32, 64] in the file, found [64",
            misfits(),
        ),
        (vec![scaled, bias()], "parameter `weight`, tensor `weight`: its layer", None),
        (vec![broken, bias()], "parameter `weight`, tensor `weight`: block scale", None),
    ]
}

#[test]
fn a_mismatch_names_both_sides_and_changes_nothing() {
    let folder = folder("misfits");
    let device = Device::flex();
    let build = || seeded(LinearConfig::new(64, 32).init(&device), 8);
    let everything = CheckpointMap::new().allow_missing().allow_unused().allow_misfits();
    for (at, (weights, expected, allowed)) in misfits().into_iter().enumerate() {
        let path = folder.join(at.to_string());
        write(weights, &path, "modelopt");
        let mut linear = build();
        let before = (bits(linear.weight.val()), bits(linear.bias.clone().unwrap().val()));
        let strict = match allowed {
            Some(_) => CheckpointMap::new(),
            None => everything.clone(),
        };
        let error = Checkpoint::open(&path).unwrap().load_into(&mut linear, &strict).unwrap_err();
        assert!(error.to_string().contains(expected), "{at}: {error}");
        let after = (bits(linear.weight.val()), bits(linear.bias.clone().unwrap().val()));
        assert!(before == after, "{at}");
        assert!(linear.weight.reparameterization::<PackedWeight>().is_none(), "{at}");

        let Some(allowed) = allowed else { continue };
        let report = load(&path, &mut linear, &allowed);
        assert!(report.to_string().contains(expected), "{at}: {report}");
        let kept: Vec<_> = report.kept().map(|(parameter, _)| parameter.path.as_str()).collect();
        assert_eq!(kept.len() + report.unused.len(), 1, "{at}: {report}");
        if at == 4 {
            assert_eq!(floats(linear.bias.unwrap().val()), fitting_bias().1);
            assert_eq!(bits(linear.weight.val()), before.0);
        } else {
            assert!(linear.weight.reparameterization::<PackedWeight>().is_some(), "{at}");
        }
    }
}

#[test]
fn an_invalid_map_is_an_error() {
    let folder = folder("maps");
    let device = Device::flex();
    let path = folder.join("linear");
    let mut linear = LinearConfig::new(64, 32).with_bias(false).init(&device);
    linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    linear.save_fp4(&path, "modelopt", &CheckpointMap::new()).unwrap();
    let fresh = || LinearConfig::new(64, 32).with_bias(false).init(&device);
    let open = || Checkpoint::open(&path).unwrap();

    let renamed = CheckpointMap::new().rename("(", "");
    assert!(matches!(open().load_into(&mut fresh(), &renamed), Err(Fp4Error::Rename { .. })));
    let experts = CheckpointMap::new().experts("up", "up.weight");
    assert!(matches!(open().load_into(&mut fresh(), &experts), Err(Fp4Error::Experts { .. })));
    // A module that is packed already is not loaded over.
    assert!(matches!(
        open().load_into(&mut linear, &CheckpointMap::new()),
        Err(Fp4Error::Attached { path, .. }) if path == "weight"
    ));
    // Names that would not come back.
    let one_way = CheckpointMap::new().rename("^weight$", "other");
    match linear.save_fp4(folder.join("one-way"), "modelopt", &one_way) {
        Err(Fp4Error::Mismatch(mismatches)) => {
            let [Mismatch::RenamedBack { loaded, .. }] = &mismatches[..] else {
                panic!("{mismatches:?}");
            };
            assert_eq!(loaded, "other");
        }
        other => panic!("{other:?}"),
    }
    // Two tensors of one name.
    let (first, _) = dense("a.weight", &[32, 64], 1);
    let (second, _) = dense("b.weight", &[32, 64], 2);
    let twice = folder.join("twice");
    write(vec![first, second], &twice, "plain");
    let both = CheckpointMap::new().rename("^[ab].", "");
    let found = refused(&twice, &mut fresh(), &both);
    assert!(matches!(&found[..], [Mismatch::Renamed { name, .. }, ..] if name == "weight"));
    // Blocks along the outputs are not what files hold.
    let mut other = fresh();
    other.quantize_fp4(&Fp4Config::nvfp4().container("Linear", 1)).unwrap();
    assert!(matches!(
        other.save_fp4(folder.join("axis"), "modelopt", &CheckpointMap::new()),
        Err(Fp4Error::Mismatch(found)) if matches!(found[..], [Mismatch::Axis { found: 1, .. }])
    ));
}

#[test]
fn saved_files_are_split_at_a_size_and_published_atomically() {
    let folder = folder("shards");
    let device = Device::flex();
    let mut saved = seeded(Llama::new(&device), 5);
    saved.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let map = llama_map().shard_size(16 << 10);
    let path = folder.join("model");
    let report = saved.save_fp4(&path, "modelopt", &map).unwrap();
    assert!(report.files > 2, "{report:?}");
    let sizes = files(&path).into_iter().filter(|(name, _)| name.ends_with(".safetensors"));
    let sizes: Vec<_> = sizes.map(|(_, bytes)| bytes.len()).collect();
    assert_eq!(sizes.len(), report.files);
    // The data; headers come on top.
    assert!(sizes.iter().all(|&size| size < (16 << 10) + (8 << 10)), "{sizes:?}");

    let mut loaded = Llama::new(&device);
    load(&path, &mut loaded, &map);
    assert_eq!(bits(loaded.forward(tokens(&device))), bits(saved.forward(tokens(&device))));

    // An existing folder is not replaced, and a failed save leaves nothing.
    let before = files(&path);
    assert!(matches!(
        saved.save_fp4(&path, "modelopt", &map),
        Err(Fp4Error::Checkpoint(error)) if matches!(*error, CheckpointError::TargetExists { .. })
    ));
    assert!(files(&path) == before);
    assert!(saved.save_fp4(folder.join("refused"), "gpt-oss", &map).is_err());
    assert!(saved.save_fp4(folder.join("refused"), "quark", &map).is_err());
    let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|one| one.unwrap().file_name()).collect();
    assert_eq!(left, ["model"]);
}

/// Parameters that are not floats.
#[derive(Module, Debug)]
struct Buffers {
    positions: Param<Tensor<1, Int>>,
    mask: Param<Tensor<2, Bool>>,
}

#[test]
fn integers_and_bools_survive_a_save_and_load() {
    let folder = folder("buffers");
    let device = Device::flex();
    let buffers = |positions: [i64; 3], mask: [[bool; 2]; 2]| Buffers {
        positions: Param::initialized(ParamId::new(), Tensor::from_ints(positions, &device)),
        mask: Param::initialized(ParamId::new(), Tensor::from_data(mask, &device)),
    };
    let saved = buffers([3, -1, 70_000], [[true, false], [false, true]]);
    let map = CheckpointMap::new();
    let path = folder.join("buffers");
    saved.save_fp4(&path, "plain", &map).unwrap();
    let mut loaded = buffers([0; 3], [[false; 2]; 2]);
    load(&path, &mut loaded, &map);
    assert_eq!(loaded.positions.val().into_data(), saved.positions.val().into_data());
    assert_eq!(loaded.mask.val().into_data(), saved.mask.val().into_data());

    // Neither is a float.
    let (positions, _) = dense("positions", &[3], 1);
    let (mask, _) = dense("mask", &[2, 2], 1);
    let floats = folder.join("floats");
    write(vec![positions, mask], &floats, "plain");
    let found = refused(&floats, &mut loaded, &map);
    assert!(matches!(found[..], [Mismatch::Type { .. }, Mismatch::Type { .. }]), "{found:?}");
}

/// Floats, running statistics, and a dtype that is not f32.
#[test]
fn dense_tensors_get_the_dtype_of_their_parameter() {
    let folder = folder("dense");
    let device = Device::flex();
    let path = folder.join("norm");
    let names = ["weight", "bias", "running_mean", "running_var"];
    let (weights, values): (Vec<_>, Vec<_>) =
        names.iter().zip(1..).map(|(name, seed)| dense(name, &[8], seed)).unzip();
    write(weights, &path, "plain");
    let mut norm: BatchNorm = BatchNormConfig::new(8).init(&device);
    let report = load(&path, &mut norm, &CheckpointMap::new());
    let found =
        [norm.gamma.val(), norm.beta.val(), norm.running_mean.value(), norm.running_var.value()];
    for (found, values) in found.into_iter().zip(&values) {
        assert_eq!(found.dtype(), DType::F32);
        assert_eq!(floats(found), *values);
    }
    assert_eq!(report.get("gamma").unwrap().tensors[0].tensor, "weight");

    let mut half = RmsNormConfig::new(8).init(&device);
    half.gamma = half.gamma.map(|gamma| gamma.cast(DType::BF16));
    let map = CheckpointMap::new().allow_unused();
    load(&path, &mut half, &map);
    assert_eq!(half.gamma.val().dtype(), DType::BF16);
    assert_eq!(floats(half.gamma.val()), values[0]);
    // Saved unchanged.
    let again = folder.join("again");
    half.save_fp4(&again, "plain", &map).unwrap();
    let checkpoint = Checkpoint::open(&again).unwrap();
    let saved = checkpoint.container().get("weight").unwrap();
    let source = Checkpoint::open(&path).unwrap();
    assert_eq!(saved.bytes, source.container().get("weight").unwrap().bytes);
}

/// The command `fp4` reads these files: names and stacking must match the checkpoint.
#[test]
fn statistics_are_written_under_the_names_of_the_checkpoint() {
    let file = folder("statistics").join("statistics.safetensors");
    let device = Device::flex();
    let inputs = |seed, channels: usize| {
        let values = normals(seed, 20 * channels);
        Tensor::<1>::from_floats(values.as_slice(), &device).reshape([20, channels])
    };
    let whole = |gram: &Gram| -> Vec<f32> {
        let channels = gram.channels();
        let value = |at: usize| gram.get(at / channels, at % channels).unwrap() as f32;
        (0..channels * channels).map(value).collect()
    };
    let [one, two, three] =
        [(1, 8), (2, 4), (3, 4)].map(|(seed, n)| gram(inputs(seed, n)).unwrap());
    let mut blocks = Gram::in_blocks(16, 4).unwrap();
    blocks.add(&floats(inputs(4, 16))).unwrap();

    let mut calibration = Calibration::new();
    calibration.insert("layers.0.q_proj.weight", 0, one.clone());
    calibration.insert("layers.1.q_proj.weight", 0, blocks.clone());
    // Stacked here and there; stacked here, one by one there; the other way round.
    calibration.insert_slice("stacked.weight", 1, 2, two.clone());
    calibration.insert_slice("stacked.weight", 1, 0, three.clone());
    calibration.insert_slice("mlp.up", 1, 1, two.clone());
    calibration.insert("apart.1.weight", 1, three.clone());
    let map = CheckpointMap::new()
        .rename(r"^model\.", "")
        .rename_back("^layers", "model.layers")
        .experts("mlp.up", "mlp.{}.up.weight")
        .experts("apart.{}.weight", "together.weight");
    calibration.save(&file, &map).unwrap();

    let read = Container::open(&file).unwrap();
    let zeros = || vec![0.0; 16];
    let moments: Vec<f32> = blocks.diagonal().map(|sum| (sum / 20.0) as f32).collect();
    let expected = [
        ("apart", "together.weight", vec![2, 4, 4], [zeros(), whole(&three)].concat()),
        ("each", "mlp.1.up.weight", vec![4, 4], whole(&two)),
        ("whole", "model.layers.0.q_proj.weight", vec![8, 8], whole(&one)),
        ("blocks", "model.layers.1.q_proj.weight", vec![16], moments),
        (
            "stacked",
            "stacked.weight",
            vec![3, 4, 4],
            [whole(&three), zeros(), whole(&two)].concat(),
        ),
    ];
    assert_eq!(read.len(), expected.len());
    for (what, name, shape, values) in expected {
        let found = read.get(name).unwrap_or_else(|| panic!("{what}: {name}"));
        assert_eq!(found.shape, shape, "{what}");
        assert_eq!(found.to_f32().unwrap(), values, "{what}");
    }

    // Names that do not lead back.
    let one_way = CheckpointMap::new().rename(r"^layers\.", "blocks.");
    let error = calibration.save(&file, &one_way).unwrap_err();
    assert!(matches!(error, Fp4Error::Statistics { .. }), "{error}");
    // Along both axes: a file has place for one.
    calibration.insert("layers.0.q_proj.weight", 1, one);
    let error = calibration.save(&file, &map).unwrap_err();
    assert!(matches!(error, Fp4Error::Statistics { .. }), "{error}");
    let nowhere = file.join("below").join("a.safetensors");
    let error = Calibration::new().save(&nowhere, &map).unwrap_err();
    assert!(matches!(error, Fp4Error::Statistics { .. }), "{error}");
}

/// The command `fp4` reads these files: names and stacking must match the checkpoint.
#[test]
fn recipes_have_the_names_of_the_checkpoint() {
    let device = Device::flex();
    let quantized = |report: &Fp4Report| -> Vec<String> {
        report.quantized().map(|one| one.path.clone()).collect()
    };
    let unsaid = |result: Result<_, Fp4Error>| match result {
        Err(Fp4Error::RecipeParameter { path, problem }) => (path, problem),
        Err(error) => panic!("{error}"),
        Ok(()) => panic!("it was said"),
    };
    // Stacked here, one by one there.
    let map = CheckpointMap::new()
        .container("Experts", 1, FileLayout::OutIn)
        .experts("experts.up", "experts.{}.up_proj.weight");
    let dense = seeded(mixture(&device), 3);
    let (mut first, mut again) = (dense.clone(), dense.clone());
    let config = Fp4Config::mxfp4().container("Experts", 1).exclude("**.up_bias");
    let recipe = first.quantize_fp4(&config).unwrap().recipe(&map).unwrap();
    let names: Vec<_> = (0..EXPERTS).map(|at| format!("experts.{at}.up_proj.weight")).collect();
    assert_eq!(recipe.weights[1].names, names);
    again.quantize_fp4(&Fp4Config::of_recipe(&recipe, &map).unwrap()).unwrap();
    assert!(first.experts.up.reparameterization::<PackedWeight>().is_some());
    assert_eq!(floats(again.experts.up.val()), floats(first.experts.up.val()));
    let one = Recipe::parse("[[weights]]\nnames = [\"experts.1.*\"]\nformat = \"dense\"\n");
    let config = Fp4Config::of_recipe(&one.unwrap(), &map).unwrap();
    let (path, problem) = unsaid(dense.clone().quantize_fp4(&config).map(drop));
    assert!(path == "experts.up" && problem.contains("several tensors"), "{path}: {problem}");

    // The other way round.
    let map = CheckpointMap::new().experts("experts.{}.up.weight", "experts.up_proj");
    let dense = seeded(separate(&device), 4);
    let config = Fp4Config::mxfp4();
    let recipe = dense.clone().quantize_fp4(&config).unwrap().recipe(&map).unwrap();
    assert_eq!(recipe.weights[1].names, ["experts.up_proj"]);
    let of = Fp4Config::of_recipe(&recipe, &map).unwrap();
    let paths = [0, 1, 2].map(|at| format!("experts.{at}.up.weight"));
    assert_eq!(quantized(&dense.clone().quantize_fp4(&of).unwrap()), paths);
    let report = dense.clone().quantize_fp4(&config.exclude("experts.1.**")).unwrap();
    let (path, problem) = unsaid(report.recipe(&map).map(drop));
    assert!(path == "experts.1.up.weight" && problem.contains("`experts.up_proj`"), "{problem}");

    // Two parameters of one tensor.
    let map = CheckpointMap::new().tie("head.weight", "embed.weight");
    let module = tied(&device);
    let config = Fp4Config::mxfp4().container("Embedding", 1);
    let recipe = module.clone().quantize_fp4(&config).unwrap().recipe(&map).unwrap();
    assert_eq!(recipe.weights[1].names, ["embed.weight"]);
    let of = Fp4Config::of_recipe(&recipe, &map).unwrap();
    let report = module.clone().quantize_fp4(&of).unwrap();
    assert_eq!(quantized(&report), ["embed.weight", "head.weight"]);
}

#[test]
fn a_recipe_has_the_method_of_each_weight_and_a_module_obeys_it() {
    let (device, map) = (Device::flex(), CheckpointMap::new());
    let dense = Net::new([32, 48, 16], &device);
    let mut calibration = Calibration::new();
    calibration.add("first.weight", 0, random(7, [96, 32], &device)).unwrap();
    let config = Fp4Config::nvfp4().method(Method::GPTQ).with_calibration(&calibration);
    let recipe = dense.clone().quantize_fp4(&config).unwrap().recipe(&map).unwrap();
    let [_, first, second] = &recipe.weights[..] else { panic!("{recipe:?}") };
    assert_eq!(first.names, ["first.weight"]);
    assert_eq!([first.method, second.method], [Some(Method::GPTQ), Some(Method::SSE)]);
    let again = Fp4Config::of_recipe(&recipe, &map).unwrap();
    let report = dense.clone().quantize_fp4(&again.with_calibration(&calibration)).unwrap();
    for (one, method) in report.quantized().zip([Method::GPTQ, Method::SSE]) {
        let Outcome::Quantized { scheme, fallback: None, .. } = &one.outcome else {
            panic!("{report}")
        };
        assert_eq!(scheme.method, method, "{}", one.path);
    }
}

#[derive(Module, Debug)]
struct Blocks {
    layers: Vec<Block>,
}

#[derive(Module, Debug)]
struct Block {
    self_attn: Attention,
}

#[test]
fn scales_of_a_quantized_cache_are_left_out_and_counted() {
    let folder = folder("cache");
    let device = Device::flex();
    let linear = |at: usize| {
        let (_, inputs, outputs) = LINEARS[at];
        LinearConfig::new(inputs, outputs).with_bias(false).init(&device)
    };
    let self_attn =
        Attention { q_proj: linear(0), k_proj: linear(1), v_proj: linear(2), o_proj: linear(3) };
    let fresh = Blocks { layers: vec![Block { self_attn }] };
    let scale = |name: &str| {
        let bytes = 0.5_f32.to_le_bytes().to_vec();
        let tensor = FileTensor::new(name.to_owned(), Dtype::F32, Vec::new(), bytes);
        Weight::new(name, 0, Value::Plain(tensor.expect("a scalar")))
    };
    for dialect in ["modelopt", "compressed-tensors"] {
        let path = folder.join(dialect);
        let mut weights: Vec<_> = LINEARS[..4]
            .iter()
            .map(|&(name, inputs, outputs)| {
                let matrix = packed(1, Fp4Format::NvFp4, outputs, inputs, 0.25);
                fp4(&format!("layers.0.{name}.weight"), &[matrix])
            })
            .collect();
        weights.push(scale("layers.0.self_attn.k_proj.k_scale"));
        weights.push(scale("layers.0.self_attn.v_proj.v_scale"));
        write(weights, &path, dialect);
        let report = load(&path, &mut fresh.clone(), &CheckpointMap::new());
        assert_eq!((report.packed().count(), report.cache_scales_left_out), (4, 2), "{dialect}");
        assert!(report.unused.is_empty(), "{dialect}: {report}");
        let line = "scales of a quantized cache that were left out: 2";
        assert!(report.to_string().contains(line), "{dialect}: {report}");
    }
}

/// A gpt-oss file says that its weight is transposed; the shape of a square weight does not.
#[test]
fn a_transposed_weight_in_a_file_needs_the_layout_of_its_container() {
    let folder = folder("transposed");
    let device = Device::flex();
    for outputs in [64, 32] {
        let matrix = |at: usize| packed(at as u64, Fp4Format::MxFp4, outputs, 64, 1.0);
        let matrices: Vec<_> = (0..EXPERTS).map(matrix).collect();
        let mut up = fp4("experts.up", &matrices);
        let Value::Fp4(weight) = &mut up.value else { panic!("FP4") };
        weight.transposed = true;
        let (bias, _) = dense("experts.up_bias", &[EXPERTS, outputs], 5);
        let path = folder.join(outputs.to_string());
        write(vec![up, bias], &path, "gpt-oss");

        let mut module = mixture_of(&device, [64, outputs], outputs);
        let found = refused(&path, &mut module, &CheckpointMap::new());
        let [Mismatch::Axis { parameter, expected: 2, found: 1, .. }] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(parameter, "experts.up");
        assert!(found[0].to_string().contains("CheckpointMap::container"), "{found:?}");

        let map = CheckpointMap::new().container("Experts", 1, FileLayout::AsIs);
        load(&path, &mut module, &map);
        let expected: Vec<_> =
            matrices.iter().flat_map(|one| transposed(&one.dequantize(), outputs, 64)).collect();
        assert!(floats(module.experts.up.val()) == expected, "{outputs}");
    }
    // A module that has it as the file does, which only one way fits.
    let mut module = mixture_of(&device, [32, 64], 32);
    load(&folder.join("32"), &mut module, &CheckpointMap::new());
    let matrix = |at: usize| packed(at as u64, Fp4Format::MxFp4, 32, 64, 1.0).dequantize();
    let expected: Vec<_> = (0..EXPERTS).flat_map(matrix).collect();
    assert!(floats(module.experts.up.val()) == expected);
}

mod tables {
    use super::*;

    /// A container of the name of Burn's layer, without a float.
    #[derive(Module, Debug)]
    pub(super) struct Linear {
        pub(super) table: Param<Tensor<2, Int>>,
        pub(super) mask: Param<Tensor<2, Bool>>,
    }
}

#[test]
fn integers_and_bools_of_linear_layers_are_not_transposed() {
    let path = folder("tables").join("tables");
    let device = Device::flex();
    let tables = |table: [[i64; 3]; 2], mask: [[bool; 3]; 2]| tables::Linear {
        table: Param::initialized(ParamId::new(), Tensor::from_ints(table, &device)),
        mask: Param::initialized(ParamId::new(), Tensor::from_data(mask, &device)),
    };
    let saved = tables([[1, 2, 3], [4, 5, 6]], [[true, false, false], [true, true, false]]);
    saved.save_fp4(&path, "plain", &CheckpointMap::new()).unwrap();
    let mut loaded = tables([[0; 3]; 2], [[false; 3]; 2]);
    load(&path, &mut loaded, &CheckpointMap::new());
    assert_eq!(loaded.table.val().into_data(), saved.table.val().into_data());
    assert_eq!(loaded.mask.val().into_data(), saved.mask.val().into_data());
}

#[test]
fn stacked_fp8_is_split_into_layers() {
    let path = folder("stacked-fp8").join("stacked");
    let device = Device::flex();
    let mut random = Random::new(7);
    let codes: Vec<u8> = (0..EXPERTS * 32 * 64).map(|_| random.below(0x7F) as u8).collect();
    let scales: Vec<f32> = (0..EXPERTS).map(|at| 0.25 * (at + 1) as f32).collect();
    let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let values = FileTensor::new("x", Dtype::F8_E4M3, vec![EXPERTS, 32, 64], codes.clone());
    let stated = FileTensor::new("scale", Dtype::F32, vec![EXPERTS], bytes).expect("scales");
    let stack = Fp8Weight::new(values.expect("a shape"), stated, [128, 128]).expect("FP8");
    let mut weight = Weight::new("experts.up", 0, Value::Fp8(stack));
    weight.input_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.5; EXPERTS])));
    write(vec![weight], &path, "modelopt");

    let mut layers = separate(&device);
    let map = CheckpointMap::new().experts("experts.{}.up.weight", "experts.up");
    load(&path, &mut layers, &map);
    let matrices = layers.experts.iter().zip(codes.chunks_exact(32 * 64)).zip(scales);
    for ((expert, codes), scale) in matrices {
        let value = |&code: &u8| E4M3_VALUES[usize::from(code)] * scale;
        let values: Vec<f32> = codes.iter().map(value).collect();
        assert!(floats(expert.up.weight.val()) == transposed(&values, 32, 64));
    }
}

#[test]
fn ggml_types_load_as_floats() {
    let path = folder("ggml").join("x.gguf");
    let device = Device::flex();
    let mut random = Random::new(8);
    // Experts and one layer in Q8_0; the other layer has a type that is not decoded.
    let mut records = |name: &str, id: u32, shape: &[usize]| {
        let dtype = DataType::of_ggml(id).expect("a type");
        let bytes = dtype.bytes(shape).expect("whole records");
        let bytes: Vec<u8> = (0..bytes).map(|_| random.below(64) as u8).collect();
        let (name, shape, bytes) = (name.to_owned().into(), shape.to_vec().into(), bytes.into());
        FileTensor { name, file: Path::new(""), dtype, shape, bytes }
    };
    let weight = |tensor: &FileTensor<'static>| {
        Weight::new(tensor.name.to_string(), 0, Value::Plain(tensor.clone()))
    };
    let stack = records("experts.up", 8, &[EXPERTS, 32, 64]);
    write(vec![weight(&stack)], &path, "gguf");
    let mut layers = separate(&device);
    let map = CheckpointMap::new().experts("experts.{}.up.weight", "experts.up");
    load(&path, &mut layers, &map);
    let values = stack.to_f32().unwrap();
    for (expert, values) in layers.experts.iter().zip(values.chunks_exact(32 * 64)) {
        assert!(floats(expert.up.weight.val()) == transposed(values, 32, 64));
    }

    let one = records("weight", 8, &[32, 64]);
    write(vec![weight(&one)], &path.with_file_name("one.gguf"), "gguf");
    let mut linear = LinearConfig::new(64, 32).with_bias(false).init(&device);
    let report = load(&path.with_file_name("one.gguf"), &mut linear, &CheckpointMap::new());
    assert!(floats(linear.weight.val()) == transposed(&one.to_f32().unwrap(), 32, 64));
    assert!(report.to_string().contains("Q8_0"), "{report}");

    let other = records("weight", 16, &[32, 256]);
    write(vec![weight(&other)], &path.with_file_name("other.gguf"), "gguf");
    let mut linear = LinearConfig::new(256, 32).with_bias(false).init(&device);
    let found = refused(&path.with_file_name("other.gguf"), &mut linear, &CheckpointMap::new());
    let said = found.first().expect("a mismatch").to_string();
    assert!(said.contains("expected floats, FP8 or FP4, found IQ2_XXS"), "{said}");
}

#[test]
fn rules_of_a_map_that_match_nothing_are_named() {
    let folder = folder("rules");
    let device = Device::flex();
    let path = folder.join("linear");
    let fresh = || LinearConfig::new(64, 32).with_bias(false).init(&device);
    let mut linear = fresh();
    linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    linear.save_fp4(&path, "modelopt", &CheckpointMap::new()).unwrap();
    let new = CheckpointMap::new;
    for (at, (map, call, loads, saves)) in [
        (new().rename("^model.", ""), "rename(", true, false),
        (new().rename_back("^layers.", ""), "rename_back(", false, true),
        (new().tie("weigth", "weight"), "tie(", true, true),
        (new().experts("up", "up.{}.weight"), "experts(", true, true),
        (new().container("Experts", 1, FileLayout::AsIs), "container(", true, true),
    ]
    .into_iter()
    .enumerate()
    {
        let named = |found: &[Mismatch]| match found {
            [Mismatch::Rule { rule, .. }] => rule.starts_with(call),
            _ => false,
        };
        let allowed = map.clone().allow_unused();
        if loads {
            let found = refused(&path, &mut fresh(), &map);
            assert!(named(&found), "{call}: {found:?}");
        }
        let report = load(&path, &mut fresh(), &allowed);
        assert_eq!(named(&report.unused), loads, "{call}: {report}");
        let out = folder.join(at.to_string());
        if saves {
            match linear.save_fp4(&out, "modelopt", &map) {
                Err(Fp4Error::Mismatch(found)) => assert!(named(&found), "{call}: {found:?}"),
                other => panic!("{call}: {other:?}"),
            }
        }
        linear.save_fp4(&out, "modelopt", &allowed).unwrap();
    }
}

#[test]
fn gguf_is_saved_where_it_can_be_opened() {
    let folder = folder("gguf");
    let device = Device::flex();
    let fresh = || LinearConfig::new(64, 32).with_bias(false).init(&device);
    let mut linear = fresh();
    linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let map = CheckpointMap::new();
    let error = linear.save_fp4(folder.join("out"), "gguf", &map).unwrap_err();
    assert!(error.to_string().contains("ends in .gguf"), "{error}");
    linear.save_fp4(folder.join("out.gguf"), "gguf", &map).unwrap();
    let mut loaded = fresh();
    load(&folder.join("out.gguf"), &mut loaded, &map);
    assert_eq!(bits(loaded.weight.val()), bits(linear.weight.val()));
}

#[test]
fn quantized_embeddings_are_covered_by_the_config_of_compressed_tensors() {
    let path = folder("embedding").join("out");
    let device = Device::flex();
    let mut saved = seeded(tied(&device), 4);
    saved.quantize_fp4(&Fp4Config::nvfp4().container("Embedding", 1)).unwrap();
    saved.save_fp4(&path, "compressed-tensors", &CheckpointMap::new()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let container = checkpoint.container();
    assert!(container.get("embed.weight_packed").is_some());
    let config = container.quantization().expect("a config");
    let targets = &config["config_groups"]["group_0"]["targets"];
    assert_eq!(targets.to_string(), r#"["Linear","embed","head"]"#);
    let mut loaded = tied(&device);
    let report = load(&path, &mut loaded, &CheckpointMap::new());
    assert_eq!(report.packed().count(), 2, "{report}");
}
