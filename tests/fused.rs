//! Fused products and lookups of unmodified layers with packed weights: the operations that are
//! fused, and their results. Every test calls `init` before any operation on a Cube device.

#![cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]

use std::sync::{Mutex, MutexGuard};

use burn::backend::DispatchDevice;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::module::{Lora, Module, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData, read_sync};
use burn_cubecl::CubeBackend;
use burn_fp4::ops::{
    Fp4Backend, Fp4Primitive, FusedProducts, MatmulPath, add_rms_norm, fused_products, matmul_path,
    rms_norm, swiglu,
};
use burn_fp4::{
    Blocks, Fp4Config, Fp4Linear, Fp4Module, Fp4Scheme, Fp4Tensor, Hadamard, Method, PackedWeight,
    ParameterReport, TensorScaling,
};
use tests::compare::assert_bits;
use tests::engines::devices;
use tests::inputs::Random;
use tests::modules::seeded;
use tests::tensors::{floats, random};

/// Serializes the tests: the counters are global.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    burn_fp4::init().expect("before any operation");
    guard
}

/// Returns the devices with kernels, and their dtypes.
fn cube_devices() -> Vec<(&'static str, Device, Vec<DType>)> {
    let devices = devices().into_iter().filter(|(name, ..)| ["cpu", "cuda", "wgpu"].contains(name));
    let with_halves = |(name, device, mut dtypes): (_, Device, Vec<_>)| {
        if name == "wgpu" && device.supports_dtype(DType::F16) {
            dtypes.push(DType::F16);
        }
        (name, device, dtypes)
    };
    devices.map(with_halves).collect()
}

/// Counts the fused products of a closure, and not their groups or what joins these.
fn counted<R>(run: impl FnOnce() -> R) -> (R, FusedProducts) {
    let before = fused_products();
    let result = run();
    let after = fused_products();
    let counted = FusedProducts {
        fused: after.fused - before.fused,
        groups: 0,
        joined: 0,
        lookups: after.lookups - before.lookups,
        dense: after.dense - before.dense,
    };
    (result, counted)
}

const fn fused(fused: u64) -> FusedProducts {
    FusedProducts { fused, groups: 0, joined: 0, lookups: 0, dense: 0 }
}

const fn looked_up(lookups: u64) -> FusedProducts {
    FusedProducts { fused: 0, groups: 0, joined: 0, lookups, dense: 0 }
}

/// Counts products that are recognized, but run dense.
const fn dequantized(dense: u64) -> FusedProducts {
    FusedProducts { fused: 0, groups: 0, joined: 0, lookups: 0, dense }
}

fn cast<M: Module>(module: M, dtype: DType) -> M {
    struct Cast(DType);
    impl burn::module::ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(self.0))
        }
    }
    module.map(&mut Cast(dtype))
}

fn linear(inputs: usize, outputs: usize, bias: bool, dtype: DType, device: &Device) -> Linear {
    let linear = LinearConfig::new(inputs, outputs).with_bias(bias).init(device);
    cast(seeded(linear, (inputs * outputs) as u64), dtype)
}

fn embedding(rows: usize, cols: usize, dtype: DType, device: &Device) -> Embedding {
    cast(seeded(EmbeddingConfig::new(rows, cols).init(device), rows as u64), dtype)
}

/// Computes the product in f64 with the dequantized weight, and the sums of magnitudes.
fn expected<const D: usize>(layer: &Linear, x: &Tensor<D>) -> (Vec<f64>, Vec<f64>) {
    let [channels, outputs] = layer.weight.shape().dims();
    let weight = floats(layer.weight.val());
    let bias = layer.bias.as_ref().map(|bias| floats(bias.val()));
    let x = floats(x.clone());
    let (mut sums, mut sizes) = (Vec::new(), Vec::new());
    for row in x.chunks(channels) {
        for output in 0..outputs {
            let mut sum = bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
            let mut size = sum.abs();
            for (k, &x) in row.iter().enumerate() {
                let term = f64::from(x) * f64::from(weight[k * outputs + output]);
                sum += term;
                size += term.abs();
            }
            sums.push(sum);
            sizes.push(size);
        }
    }
    (sums, sizes)
}

fn check<const D: usize>(what: &str, layer: &Linear, x: Tensor<D>) {
    assert_product(what, layer, &x, floats(layer.forward(x.clone())));
}

fn assert_product<const D: usize>(what: &str, layer: &Linear, x: &Tensor<D>, found: Vec<f32>) {
    let dtype = x.dtype();
    let (sums, sizes) = expected(layer, x);
    let once = match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 0.0,
    };
    let packed = layer.weight.reparameterization::<PackedWeight>();
    let adapted = packed.is_some_and(|packed| packed.adapter().is_some());
    // Dense products and products of adapters round f32 factors to 11 bits on CUDA.
    let burns = what.starts_with("cuda") && (what.contains("dense") || adapted);
    let dense = if dtype == DType::F32 && burns { 2e-3 } else { 1e-5 };
    for (at, (found, (sum, size))) in found.iter().zip(sums.iter().zip(&sizes)).enumerate() {
        // Values of halves are rounded when they are dequantized, and once more as they are
        // multiplied dense.
        let tolerance = dense * size + 2.0 * once * size;
        assert!((f64::from(*found) - sum).abs() <= tolerance, "{what}, {at}: {found}, not {sum}");
    }
}

#[test]
fn linears_of_any_rank_are_fused() {
    let _alone = alone();
    for (name, device, dtypes) in cube_devices() {
        for &dtype in &dtypes {
            for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
                for bias in [false, true] {
                    let mut layer = linear(64, 40, bias, dtype, &device);
                    let report = layer.quantize_fp4(&Fp4Config::new(scheme)).unwrap();
                    let slow = |parameter: &ParameterReport| {
                        matches!(parameter.products(), Some(MatmulPath::Dequantized(_)))
                    };
                    assert!(!report.quantized().any(slow), "{name}: {report}");
                    let what = |rank| {
                        format!("{name} {dtype:?} {:?} bias {bias} rank {rank}", scheme.rule)
                    };
                    let run = |rank: usize| match rank {
                        1 => check(&what(1), &layer, random(1, [64], &device).cast(dtype)),
                        2 => check(&what(2), &layer, random(2, [3, 64], &device).cast(dtype)),
                        3 => check(&what(3), &layer, random(3, [2, 3, 64], &device).cast(dtype)),
                        _ => check(&what(4), &layer, random(4, [2, 1, 3, 64], &device).cast(dtype)),
                    };
                    for rank in 1..=4 {
                        let ((), counted) = counted(|| run(rank));
                        assert_eq!(counted, fused(1), "{}", what(rank));
                    }
                }
            }
        }
    }
}

#[test]
fn any_addend_is_fused_or_added() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let mut layer = linear(64, 64, false, DType::F32, &device);
        let mut other = linear(64, 64, true, DType::F32, &device);
        layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        other.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let (dense, other_dense) = (layer.clone().materialize(), other.clone().materialize());
        let x = random(9, [2, 3, 64], &device);
        let scalar = Tensor::<1>::from_data([0.5f32], &device);
        let run = |layer: &Linear, other: &Linear| {
            let residual = layer.forward(x.clone()) + x.clone();
            let twice = layer.forward(residual.clone()) + other.forward(residual);
            let each = layer.forward(twice.clone()) + scalar.clone().reshape([1, 1, 1]);
            let rows = layer.forward(each) + twice.slice([0..2, 0..1, 0..64]);
            floats(rows)
        };
        let (found, in_codes) = counted(|| run(&layer, &other));
        assert_eq!(in_codes, fused(5), "{name}");
        for (found, expected) in found.iter().zip(run(&dense, &other_dense)) {
            let size = 1.0 + expected.abs();
            assert!((found - expected).abs() < 5e-3 * size, "{name}: {found}, not {expected}");
        }
    }
}

/// Weights that multiply one input, with views and biases between: one launch on a GPU.
#[test]
fn families_are_fused() {
    let _alone = alone();
    for (name, device, dtypes) in cube_devices() {
        for (&dtype, bias) in dtypes.iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            let layer = |outputs| {
                let mut layer = linear(256, outputs, bias, dtype, &device);
                layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
                // The first use of a weight makes a stand-in for it, which is in no family.
                floats(layer.weight.val());
                layer
            };
            let layers = [layer(64), layer(16), layer(24), layer(40)];
            let what = |number: usize| format!("{name} {dtype:?} bias {bias} layer {number}");
            for rows in [1, 3] {
                let x = random(13, [1, rows, 256], &device).cast(dtype);
                let before = fused_products().groups;
                let (outputs, in_codes) = counted(|| {
                    let outputs = layers.each_ref().map(|layer| layer.forward(x.clone()));
                    outputs.map(floats)
                });
                assert_eq!(in_codes, fused(4), "{}", what(rows));
                // Three, and one more.
                assert_eq!(fused_products().groups - before, 2, "{}", what(rows));
                let (views, in_codes) = counted(|| {
                    let outputs = layers.each_ref().map(|layer| {
                        let output = layer.forward(x.clone());
                        let heads = output.dims()[2] / 8;
                        output.reshape([1, rows, heads, 8]).swap_dims(1, 2)
                    });
                    outputs.map(|heads| floats(heads.swap_dims(1, 2)))
                });
                assert_eq!(in_codes, fused(4), "{}", what(rows));
                assert_eq!(fused_products().groups - before, 4, "{}", what(rows));
                for (number, layer) in layers.iter().enumerate() {
                    assert_product(&what(number), layer, &x, outputs[number].clone());
                    assert_product(&what(number), layer, &x, views[number].clone());
                }
            }
            // Outputs that are viewed, added to each other and to the input, in between.
            if !bias {
                let square = || {
                    let mut square = linear(256, 256, false, dtype, &device);
                    square.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
                    square
                };
                let [first, second] = [square(), square()];
                for rows in [1, 3] {
                    let x = random(16, [rows, 256], &device).cast(dtype);
                    let ((view, sum, residual), in_codes) = counted(|| {
                        let (a, b) = (first.forward(x.clone()), second.forward(x.clone()));
                        let view = a.clone().reshape([256, rows]);
                        let sum = b + a;
                        let residual = first.forward(x.clone()) + x.clone();
                        let residual = residual + second.forward(x.clone());
                        (floats(view), floats(sum), floats(residual))
                    });
                    assert_eq!(in_codes, fused(4), "{}", what(rows));
                    let a = floats(first.forward(x.clone()));
                    let b = floats(second.forward(x.clone()));
                    let near = |found: f32, terms: &[f32]| {
                        let size: f32 = 1.0 + terms.iter().map(|term| term.abs()).sum::<f32>();
                        (found - terms.iter().sum::<f32>()).abs() <= 0.02 * size
                    };
                    let x = floats(x);
                    for at in 0..a.len() {
                        assert!(near(view[at], &[a[at]]), "{}", what(rows));
                        assert!(near(sum[at], &[a[at], b[at]]), "{}", what(rows));
                        assert!(near(residual[at], &[a[at], x[at], b[at]]), "{}", what(rows));
                    }
                }
            }
            // The second weight reads another input, and the last one an output.
            let (x, y) = (random(14, [2, 256], &device), random(15, [2, 256], &device));
            let (x, y) = (x.cast(dtype), y.cast(dtype));
            let square = {
                let mut square = linear(256, 256, bias, dtype, &device);
                square.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
                square
            };
            let ((first, hidden, last), in_codes) = counted(|| {
                let first = layers[0].forward(x.clone());
                let hidden = square.forward(y.clone());
                let last = layers[1].forward(hidden.clone());
                (floats(first), hidden, floats(last))
            });
            assert_eq!(in_codes, fused(3), "{}", what(0));
            assert_product(&what(0), &layers[0], &x, first);
            assert_product(&what(1), &layers[1], &hidden, last);
            assert_product("square", &square, &y, floats(hidden));
        }
    }
}

/// Layers between a norm and SwiGLU, as in the MLP of a decoder.
struct Mlp {
    gamma: Tensor<1>,
    gate: Linear,
    up: Linear,
}

impl Mlp {
    fn new(inputs: usize, outputs: usize, bias: bool, dtype: DType, device: &Device) -> Self {
        let layer = |seed: u64| {
            let config = LinearConfig::new(inputs, outputs).with_bias(bias);
            let mut layer = cast(seeded(config.init(device), seed), dtype);
            layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
            // The first use of a weight makes a stand-in for it, which is in no family.
            floats(layer.weight.val());
            layer
        };
        let gamma = random(31, [1, inputs], device).reshape([inputs]).cast(dtype);
        Self { gamma, gate: layer(32), up: layer(33) }
    }

    /// Computes SwiGLU of both layers' outputs for an input that is normalized already.
    fn expected(&self, normed: &Tensor<3>) -> Vec<f64> {
        let [gate, up] = [&self.gate, &self.up].map(|layer| expected(layer, normed).0);
        gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect()
    }

    fn assert_near(&self, what: &str, normed: &Tensor<3>, found: &[f32]) {
        let step = if normed.dtype() == DType::BF16 { 0.02 } else { 0.003 };
        for (at, (&found, expected)) in found.iter().zip(self.expected(normed)).enumerate() {
            let far = (f64::from(found) - expected).abs();
            assert!(far <= step * (1.0 + expected.abs()), "{what}, {at}: {found}, not {expected}");
        }
    }
}

/// A row or some rows, and layers that read them after a norm.
struct NormCase {
    what: String,
    rows: usize,
    hidden: Tensor<3>,
    update: Tensor<3>,
    mlp: Mlp,
    square: Linear,
    /// Sums of the norm, and normalized sums.
    sums: Vec<f32>,
    normed: Tensor<3>,
    /// Norms that join a launch, and SwiGLUs.
    of_row: u64,
    of_few: u64,
}

impl NormCase {
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for (name, device, dtypes) in cube_devices() {
            for (&dtype, bias) in dtypes.iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
                let joins = name == "cuda" && dtype != DType::F32;
                // Elsewhere 40 rows are multiplied dense.
                for rows in [1, 3, 40].into_iter().filter(|&rows| joins || rows < 40) {
                    let values = |seed| random(seed, [1, rows, 512], &device).cast(dtype);
                    let mut square = linear(512, 512, false, dtype, &device);
                    square.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
                    floats(square.weight.val());
                    let mut case = Self {
                        what: format!("{name} {dtype:?} bias {bias} rows {rows}"),
                        rows,
                        hidden: values(35),
                        update: values(36),
                        mlp: Mlp::new(512, 64, bias, dtype, &device),
                        square,
                        sums: Vec::new(),
                        normed: values(35),
                        of_row: u64::from(joins && rows == 1),
                        of_few: u64::from(joins && rows <= 16),
                    };
                    let [sums, normed] = case.norm();
                    floats(normed.clone());
                    (case.sums, case.normed) = (floats(sums), normed);
                    cases.push(case);
                }
            }
        }
        cases
    }

    /// Multiplies before a norm: the product runs, and the norm waits.
    fn before(&self) {
        drop(self.square.forward(self.hidden.clone()));
    }

    fn norm(&self) -> [Tensor<3>; 2] {
        add_rms_norm(self.hidden.clone(), self.update.clone(), self.mlp.gamma.clone(), 1e-5)
    }

    /// Returns the normalized input, without an update.
    fn plain(&self) -> Tensor<3> {
        let plain = rms_norm(self.hidden.clone(), self.mlp.gamma.clone(), 1e-5);
        floats(plain.clone());
        plain
    }
}

/// Counts the fused products of a closure, and what joins them.
fn joined(run: impl FnOnce() -> Vec<Vec<f32>>) -> (Vec<Vec<f32>>, u64, u64) {
    let before = fused_products().joined;
    let (found, counts) = counted(run);
    (found, counts.fused, fused_products().joined - before)
}

/// A norm of one row and SwiGLU run in the launch of the products between them.
#[test]
fn norms_and_swiglu_join_families() {
    let _alone = alone();
    for case in NormCase::all() {
        let (found, products, joins) = joined(|| {
            case.before();
            let [sums, normed] = case.norm();
            let (gate, up) = (case.mlp.gate.forward(normed.clone()), case.mlp.up.forward(normed));
            [sums, swiglu(gate, up)].map(floats).into()
        });
        assert_eq!((products, joins), (3, case.of_row + case.of_few), "{}", case.what);
        assert_eq!(found[0], case.sums, "{}", case.what);
        case.mlp.assert_near(&case.what, &case.normed, &found[1]);

        // Without an update, and the other way around.
        let plain = case.plain();
        let (found, products, joins) = joined(|| {
            case.before();
            let normed = rms_norm(case.hidden.clone(), case.mlp.gamma.clone(), 1e-5);
            let (up, gate) = (case.mlp.up.forward(normed.clone()), case.mlp.gate.forward(normed));
            vec![floats(swiglu(gate, up))]
        });
        assert_eq!((products, joins), (3, case.of_row + case.of_few), "{}", case.what);
        case.mlp.assert_near(&case.what, &plain, &found[0]);

        // A layer alone after the norm.
        let (found, products, joins) = joined(|| {
            case.before();
            let [sums, normed] = case.norm();
            let gate = case.mlp.gate.forward(normed);
            [sums, gate].map(floats).into()
        });
        assert_eq!((products, joins), (2, case.of_row), "{}", case.what);
        assert_eq!(found[0], case.sums, "{}", case.what);
        assert_product(&case.what, &case.mlp.gate, &case.normed, found[1].clone());
    }
}

/// They do not if anything else reads the tensors between.
#[test]
fn norms_and_swiglu_that_others_read_run_alone() {
    let _alone = alone();
    for case in NormCase::all() {
        // The normalized values or the gate are read by others, too.
        let (found, products, joins) = joined(|| {
            case.before();
            let [_, normed] = case.norm();
            let (gate, up) =
                (case.mlp.gate.forward(normed.clone()), case.mlp.up.forward(normed.clone()));
            [swiglu(gate, up), normed].map(floats).into()
        });
        assert_eq!((products, joins), (3, case.of_few), "{}", case.what);
        assert_eq!(found[1], floats(case.normed.clone()), "{}", case.what);
        case.mlp.assert_near(&case.what, &case.normed, &found[0]);
        let (found, products, joins) = joined(|| {
            case.before();
            let [_, normed] = case.norm();
            let (gate, up) = (case.mlp.gate.forward(normed.clone()), case.mlp.up.forward(normed));
            [swiglu(gate.clone(), up), gate].map(floats).into()
        });
        assert_eq!((products, joins), (3, case.of_row), "{}", case.what);
        assert_product(&case.what, &case.mlp.gate, &case.normed, found[1].clone());
        case.mlp.assert_near(&case.what, &case.normed, &found[0]);

        // The residual stream is added to a product, or reshaped before one: the norm runs
        // first.
        let (found, products, joins) = joined(|| {
            case.before();
            let residual = case.hidden.clone() * 1.0;
            let _ = floats(residual.clone());
            case.before();
            let normed = rms_norm(residual.clone(), case.mlp.gamma.clone(), 1e-5);
            vec![floats(case.square.forward(normed) + residual)]
        });
        assert_eq!((products, joins), (3, 0), "{}", case.what);
        let (exact, sizes) = expected(&case.square, &case.plain());
        for (at, &found) in found[0].iter().enumerate() {
            let residual = f64::from(floats(case.hidden.clone())[at]);
            let far = (f64::from(found) - exact[at] - residual).abs();
            assert!(far <= 0.02 * (sizes[at] + residual.abs()), "{} {at}: {found}", case.what);
        }
        let (found, products, joins) = joined(|| {
            case.before();
            let [sums, normed] = case.norm();
            let reshaped = sums.reshape([case.rows, 512]);
            [floats(case.mlp.gate.forward(normed)), floats(reshaped)].into()
        });
        assert_eq!((products, joins), (2, 0), "{}", case.what);
        assert_product(&case.what, &case.mlp.gate, &case.normed, found[0].clone());
        assert_eq!(found[1], case.sums, "{}", case.what);

        // No product follows.
        let (found, products, joins) = joined(|| {
            case.before();
            let [sums, normed] = case.norm();
            let doubled = normed.clone() * 2.0;
            [sums, normed, doubled].map(floats).into()
        });
        assert_eq!((products, joins), (1, 0), "{}", case.what);
        assert_eq!(found[1], floats(case.normed.clone()), "{}", case.what);
        assert!(found[2].iter().zip(&found[1]).all(|(two, one)| *two == 2.0 * one));
    }
}

/// Products transform their input as the weight was; a lookup transforms its rows back.
#[test]
fn weights_after_a_hadamard_transform_are_fused() {
    let _alone = alone();
    for (name, device, dtypes) in cube_devices() {
        for &dtype in &dtypes {
            let transformed = |size: Option<usize>| {
                let hadamard = size.map(|size| Hadamard::of_size(size).unwrap());
                Fp4Config::new(Fp4Scheme::mxfp4().with_hadamard(hadamard))
            };
            let layer = |outputs, size| {
                let mut layer = linear(256, outputs, true, dtype, &device);
                layer.quantize_fp4(&transformed(size)).unwrap();
                floats(layer.weight.val());
                layer
            };
            let layers =
                [layer(64, Some(64)), layer(16, Some(64)), layer(24, None), layer(40, Some(128))];
            for rows in [1, 3] {
                let x = random(13, [1, rows, 256], &device).cast(dtype);
                let (outputs, in_codes) = counted(|| {
                    let outputs = layers.each_ref().map(|layer| layer.forward(x.clone()));
                    outputs.map(floats)
                });
                assert_eq!(in_codes, fused(4), "{name} {dtype:?} {rows}");
                let once = match dtype {
                    DType::BF16 => 2f64.powi(-7),
                    DType::F16 => 2f64.powi(-10),
                    _ => 1e-5,
                };
                for (number, (layer, found)) in layers.iter().zip(outputs).enumerate() {
                    let (sums, sizes) = expected(layer, &x);
                    for (at, found) in found.into_iter().enumerate() {
                        // In another basis magnitudes differ, and norms do not.
                        let near = (f64::from(found) - sums[at]).abs() <= 4.0 * once * sizes[at];
                        let what = format!("{name} {dtype:?} layer {number}, {at}");
                        assert!(near, "{what}: {found}, not {}", sums[at]);
                    }
                }
            }
            let mut table = embedding(20, 128, dtype, &device);
            let config = transformed(Some(32)).container("Embedding", 1);
            table.quantize_fp4(&config).unwrap();
            let indices = Tensor::<2, Int>::from_ints([[3, 19, 0]], &device);
            let rows = floats(table.weight.val().select(0, indices.clone().flatten::<1>(0, 1)));
            let (found, in_codes) = counted(|| floats(table.forward(indices)));
            assert_eq!((found, in_codes), (rows, looked_up(1)), "{name} {dtype:?}");
        }
    }
}

#[test]
fn products_of_tensors_and_of_fp4_linears_are_fused() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let mut layer = linear(64, 48, true, DType::F32, &device);
        layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let packed = layer.weight.reparameterization::<PackedWeight>().unwrap().tensor::<2>();
        let straight = Fp4Linear::from(layer.clone());
        let x = random(11, [2, 3, 64], &device);
        let (product, counted_product) =
            counted(|| floats(burn_fp4::ops::matmul(x.clone(), &packed).unwrap()));
        let (output, counted_output) = counted(|| floats(straight.forward(x.clone())));
        assert_eq!((counted_product, counted_output), (fused(1), fused(1)), "{name}");
        let bias = floats(layer.bias.as_ref().unwrap().val());
        let (sums, sizes) = expected(&layer, &x);
        for (at, (sum, size)) in sums.iter().zip(&sizes).enumerate() {
            let with_bias = product[at] + bias[at % bias.len()];
            for found in [with_bias, output[at]] {
                let near = (f64::from(found) - sum).abs() <= 1e-5 * size;
                assert!(near, "{name}, {at}: {found}, not {sum}");
            }
        }
    }
}

/// A thread reads tensors of another thread through views of its own, and frees them.
#[test]
fn products_on_another_thread_are_fused() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let mut layer = linear(64, 48, true, DType::F32, &device);
        layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let (here, _) = counted(|| floats(layer.forward(random(12, [3, 64], &device))));
        let there = || counted(|| floats(layer.forward(random(12, [3, 64], &device))));
        let (there, counts) =
            std::thread::scope(|scope| scope.spawn(there).join().expect("the thread runs"));
        assert_eq!(counts, fused(1), "{name}");
        assert_bits(name, &there, &here);
    }
}

#[derive(Module, Debug)]
struct Shared {
    layer: Linear,
    attention: MultiHeadAttention,
}

#[test]
fn attention_and_shared_weights_are_fused() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let mut net = seeded(
            Shared {
                layer: LinearConfig::new(32, 32).init(&device),
                attention: MultiHeadAttentionConfig::new(32, 4).init(&device),
            },
            7,
        );
        net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let dense = net.clone().materialize();
        let x = random(5, [2, 3, 32], &device);
        let run = |net: &Shared| {
            // The same weight twice.
            let hidden = net.layer.forward(net.layer.forward(x.clone()).tanh());
            floats(net.attention.forward(MhaInput::self_attn(hidden)).context)
        };
        let (found, in_codes) = counted(|| run(&net));
        assert_eq!(in_codes, fused(2 + 4), "{name}");
        let (expected, in_dense) = counted(|| run(&dense));
        assert_eq!(in_dense, FusedProducts::default(), "{name}: nothing else is taken");
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 2e-3, "{name}: {found}, not {expected}");
        }
    }
}

#[test]
fn other_uses_of_a_weight_are_not_fused() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let mut layer = linear(64, 64, false, DType::F32, &device);
        layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let x = random(6, [3, 64], &device);
        let weight = floats(layer.weight.val());
        // The weight on the other side, transposed, read again, or only looked at.
        let (_, unfused) = counted(|| {
            floats(layer.weight.val().matmul(x.clone().transpose()));
            floats(x.clone().matmul(layer.weight.val().transpose()));
            floats(layer.weight.val() + 1.0);
            let kept = layer.weight.val();
            floats(x.clone().matmul(kept.clone()));
            assert_eq!(floats(kept), weight);
        });
        assert_eq!(unfused.fused, 0, "{name}");
        // Blocks along the other axis of a square weight.
        let across = layer.weight.val();
        let packed = burn_fp4::ops::quantize(across, 1, &Fp4Scheme::nvfp4()).unwrap();
        let expected = floats(x.clone().matmul(packed.dequantize()));
        let (found, unfused) = counted(|| floats(x.clone().matmul(packed.dequantize())));
        assert_eq!((found, unfused.fused), (expected, 0), "{name}");
        // So many rows that a dense product is faster, where there are matrix instructions.
        let many = random(8, [300, 64], &device);
        let layout = layer.weight.reparameterization::<PackedWeight>().unwrap().layout().clone();
        let expected = match matmul_path(&layout, DType::F32, &device) {
            MatmulPath::FromCodes => fused(1),
            _ => dequantized(1),
        };
        let ((), found) = counted(|| check(&format!("{name} dense"), &layer, many));
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn random_shapes_and_schemes_are_multiplied() {
    let _alone = alone();
    let mut random_numbers = Random::new(12);
    for (name, device, dtypes) in cube_devices() {
        // The CPU runtime compiles every shape for seconds, a software rasterizer is slow.
        let cases = match name {
            "cpu" => 25,
            "wgpu" => 60,
            _ => 200,
        };
        for at in 0..cases {
            let schemes = [
                Fp4Scheme::nvfp4(),
                Fp4Scheme::mxfp4(),
                Fp4Scheme::nvfp4().with_block_size(32),
                Fp4Scheme::mxfp4().with_block_size(16),
                Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16),
                Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row),
                Fp4Scheme::nvfp4().with_method(Method::SSE),
            ];
            let scheme = schemes[random_numbers.below(schemes.len())];
            let dtype = dtypes[random_numbers.below(dtypes.len())];
            let channels = scheme.block_size * (1 + random_numbers.below(12));
            let outputs = 1 + random_numbers.below(90);
            let rows = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64, 65, 1000][random_numbers.below(13)];
            let bias = random_numbers.below(2) == 0;
            let mut layer = linear(channels, outputs, bias, dtype, &device);
            layer.quantize_fp4(&Fp4Config::new(scheme)).unwrap();
            let dense = if rows > 24 { "dense" } else { "fused" };
            let what = format!(
                "{name} {dense} {at}: {rows} x {channels} x {outputs} {dtype:?} {scheme:?}"
            );
            let x = random(at, [rows, channels], &device).cast(dtype);
            check(&what, &layer, x.clone());
            if !bias {
                let weight =
                    layer.weight.reparameterization::<PackedWeight>().unwrap().tensor::<2>();
                let found = without_fusion(&weight, x.clone());
                assert_product(&format!("{what}, without fusion"), &layer, &x, found);
            }
        }
    }
}

/// Runs the product on the backend below fusion.
fn without_fusion(weight: &Fp4Tensor<2>, x: Tensor<2>) -> Vec<f32> {
    let DispatchDevice::Cube(device) = x.device().as_dispatch().clone() else {
        panic!("a Cube device")
    };
    let bytes = |tensor: Tensor<2, Int>| {
        let tensor = CubeBackend::int_from_data(tensor.into_data(), &device);
        CubeBackend::int_cast(tensor, IntDType::U8)
    };
    let scale = weight.tensor_scale_bits().into_data();
    let packed = Fp4Primitive::<CubeBackend> {
        codes: bytes(weight.codes()),
        scales: bytes(weight.scales()),
        tensor_scale: CubeBackend::int_from_data(scale, &device),
    };
    let x = CubeBackend::float_from_data(x.into_data(), &device);
    let product = CubeBackend::fp4_matmul(x, packed, weight.layout().clone());
    let data = read_sync(CubeBackend::float_into_data(product)).expect("the device answers");
    data.iter::<f32>().collect()
}

#[test]
fn gradients_of_the_input_flow_through_packed_weights() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let device = device.autodiff();
        let mut layer = linear(64, 48, true, DType::F32, &device);
        layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let dense = layer.clone().materialize();
        let gradient = |layer: &Linear| {
            let x = random(6, [3, 64], &device).require_grad();
            let y = layer.forward(x.clone());
            floats(x.grad(&y.powf_scalar(2.0).sum().backward()).unwrap())
        };
        for (found, expected) in gradient(&layer).iter().zip(&gradient(&dense)) {
            assert!((found - expected).abs() < 2e-3 * (1.0 + expected.abs()), "{name}");
        }
    }
}

#[test]
fn the_dense_weight_is_never_made() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        const SIDE: usize = 4096;
        let dense_bytes = (4 * SIDE * SIDE) as u64;
        // Quantized elsewhere, so that the device has never had memory for it.
        let mut on_host = linear(SIDE, SIDE, true, DType::F32, &Device::flex());
        on_host.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let mut layer = LinearConfig::new(SIDE, SIDE).init(&device);
        layer.load_fp4_record(on_host.into_record()).unwrap();
        let x = random(10, [3, SIDE], &device);
        let reserved = || {
            device.sync().unwrap();
            device.memory_pool_usage().expect("reported").bytes_reserved
        };
        device.memory_cleanup();
        let before = reserved();
        let (_, in_codes) = counted(|| floats(layer.forward(x.clone())));
        assert_eq!(in_codes, fused(1), "{name}");
        let after = reserved();
        assert!(after < before + dense_bytes / 2, "{name}: {before} bytes, then {after}");
        let kept = layer.weight.val();
        floats(kept.clone().slice([0..1, 0..1]));
        let dense = reserved();
        assert!(dense >= after + dense_bytes / 2, "{name}: {after} bytes, then {dense}");
        drop(kept);
    }
}

#[test]
fn embedding_lookups_are_fused() {
    let _alone = alone();
    let row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    for (name, device, dtypes) in cube_devices() {
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4(), row] {
            for &dtype in &dtypes {
                let what = format!("{name} {dtype:?} {scheme:?}");
                let mut table = embedding(50, 64, dtype, &device);
                let config = Fp4Config::new(scheme).container("Embedding", 1);
                table.quantize_fp4(&config).unwrap();
                let whole = table.clone().materialize();
                for indices in [vec![7i32], vec![0, 49, 7, 7, 7, 31], vec![3; 128]] {
                    let shape = [1, indices.len()];
                    let indices = TensorData::new(indices, shape);
                    let indices = Tensor::<2, Int>::from_data(indices, &device);
                    let (found, in_codes) = counted(|| floats(table.forward(indices.clone())));
                    assert_eq!(in_codes, looked_up(1), "{what}");
                    let (expected, in_dense) = counted(|| floats(whole.forward(indices)));
                    assert_eq!(in_dense, FusedProducts::default(), "{what}");
                    assert_bits(&what, &found, &expected);
                }
            }
        }
    }
}

#[test]
fn other_uses_of_a_table_are_not_fused() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        let indices = || Tensor::<2, Int>::from_data([[1, 0, 47], [5, 5, 2]], &device);
        let rows = || Tensor::<1, Int>::from_data([1, 0, 47], &device);
        let quantized = |axis| {
            let mut table = embedding(48, 64, DType::F32, &device);
            let config = Fp4Config::nvfp4().container("Embedding", axis);
            table.quantize_fp4(&config).unwrap();
            table
        };
        // Blocks along the other axis.
        let down = quantized(0);
        let expected = floats(down.clone().materialize().forward(indices()));
        let (found, unfused) = counted(|| floats(down.forward(indices())));
        assert_eq!((found, unfused), (expected, dequantized(1)), "{name}");
        // Columns, rows of the transpose, or a table that is used again.
        let along = quantized(1);
        let whole = along.clone().materialize().weight.val();
        let run = |weight: &dyn Fn() -> Tensor<2>| {
            let columns = floats(weight().select(1, rows()));
            let of_transpose = floats(weight().transpose().select(0, rows()));
            let kept = weight();
            let looked_up = floats(kept.clone().select(0, rows()));
            [columns, of_transpose, looked_up, floats(kept)]
        };
        let (found, unfused) = counted(|| run(&|| along.weight.val()));
        assert_eq!((found, unfused.lookups), (run(&|| whole.clone()), 0), "{name}");
    }
}

#[test]
fn an_output_head_tied_to_an_embedding_is_fused() {
    let _alone = alone();
    for (name, device, dtypes) in cube_devices() {
        for dtype in dtypes {
            let mut table = embedding(48, 64, dtype, &device);
            let config = Fp4Config::nvfp4().container("Embedding", 1);
            table.quantize_fp4(&config).unwrap();
            let whole = table.clone().materialize();
            let indices = Tensor::<2, Int>::from_data([[1, 0, 47], [5, 5, 2]], &device);
            let run = |table: &Embedding| {
                let hidden = table.forward(indices.clone());
                let head = table.weight.val().transpose().unsqueeze::<3>();
                floats(hidden.matmul(head))
            };
            let (found, in_codes) = counted(|| run(&table));
            let both = FusedProducts { fused: 1, groups: 0, joined: 0, lookups: 1, dense: 0 };
            assert_eq!(in_codes, both, "{name} {dtype:?}");
            let rounding = if dtype == DType::BF16 { 3e-2 } else { 4e-3 };
            for (found, expected) in found.iter().zip(run(&whole)) {
                let near = (found - expected).abs() <= rounding * (1.0 + expected.abs());
                assert!(near, "{name} {dtype:?}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn the_dense_table_of_an_embedding_is_never_made() {
    let _alone = alone();
    for (name, device, _) in cube_devices() {
        const ROWS: usize = 16_384;
        let dense_bytes = 4 * (ROWS * 1024) as u64;
        let mut on_host = embedding(ROWS, 1024, DType::F32, &Device::flex());
        let config = Fp4Config::nvfp4().container("Embedding", 1);
        on_host.quantize_fp4(&config).unwrap();
        let mut table = EmbeddingConfig::new(ROWS, 1024).init(&device);
        table.load_fp4_record(on_host.into_record()).unwrap();
        let indices = Tensor::<2, Int>::from_data([[0, 16_383, 77]], &device);
        let reserved = || {
            device.sync().unwrap();
            device.memory_pool_usage().expect("reported").bytes_reserved
        };
        device.memory_cleanup();
        let before = reserved();
        let (_, in_codes) = counted(|| floats(table.forward(indices.clone())));
        assert_eq!(in_codes, looked_up(1), "{name}");
        let after = reserved();
        assert!(after < before + dense_bytes / 2, "{name}: {before} bytes, then {after}");
    }
}

#[test]
fn adapters_run_as_two_thin_products() {
    let _alone = alone();
    for (name, device, dtypes) in cube_devices() {
        for dtype in dtypes {
            for bias in [false, true] {
                let mut layer = linear(64, 96, bias, dtype, &device);
                layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
                layer.lora_fp4(&Lora::new(4, 6.0)).unwrap();
                // Factors other than zero.
                let layer = cast(seeded(layer, 5), dtype);
                let what = format!("{name} {dtype:?}, bias {bias}");
                let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
                assert!(packed.adapter().unwrap().b.val().abs().max().into_scalar::<f32>() > 0.0);
                let x = random(9, [2, 5, 64], &device).cast(dtype);
                let (found, became) = counted(|| floats(layer.forward(x.clone())));
                assert_eq!(became, fused(1), "{what}");
                // The effective weight is dequantized plus `scale a b`, as a tensor of its own.
                assert_product(&what, &layer, &x, found);
                // Lookups and products with the transpose run dense.
                let transposed = |x: Tensor<2>| x.matmul(layer.weight.val().transpose());
                let y = random(3, [2, 96], &device).cast(dtype);
                let (_, became) = counted(|| floats(transposed(y)));
                assert_eq!(became.fused, 0, "{what}");
            }
        }
    }
}

#[test]
fn reported_paths_of_products_are_the_taken_ones() {
    let _alone = alone();
    for (name, device, dtypes) in cube_devices() {
        for dtype in dtypes {
            for (channels, scheme) in
                [(48, Fp4Scheme::nvfp4()), (128, Fp4Scheme::nvfp4()), (128, Fp4Scheme::mxfp4())]
            {
                let mut layer = linear(channels, 40, false, dtype, &device);
                layer.quantize_fp4(&Fp4Config::new(scheme)).unwrap();
                let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
                let said = matmul_path(packed.layout(), dtype, &device);
                for rows in [1, 8, 24, 25, 300] {
                    let expected = match said {
                        MatmulPath::FromCodes => true,
                        MatmulPath::FewRows { rows: most } => rows <= most,
                        ref other => panic!("{name}: {other}"),
                    };
                    let x = random(rows as u64, [rows, channels], &device).cast(dtype);
                    let (_, counted) = counted(|| floats(layer.forward(x)));
                    let what = format!("{name} {dtype:?} {channels} {rows}: {said}");
                    assert_eq!(counted.fused == 1, expected, "{what}");
                }
                let transposed = packed.tensor::<2>().transpose();
                let of_rows = matmul_path(transposed.layout(), dtype, &device);
                assert!(matches!(of_rows, MatmulPath::Rows { .. }), "{name}: {of_rows}");
            }
        }
    }
}

#[test]
fn a_second_init_changes_nothing() {
    let _alone = alone();
    assert!(burn_fp4::init().is_ok());
    assert!(!burn_fp4::ops::multiplies_codes(&Device::flex()));
}
