//! NVIDIA's training recipe: the Hadamard transform, stochastic rounding, and the three products of
//! a linear layer.

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fp4::{
    Draw, Fp4Scheme, Fp4TrainLinear, Hadamard, Method, NonFinite, OpsError, Rounding, ScaleRule,
    TensorScaling, TrainRecipe, ops,
};
use burn_fp4_formats::{E2M1_VALUES, Packed};
use burn_fp4_search::host::{self, View};
use burn_fp4_search::{Importance, quantize, stochastic_code};
use tests::compare::{ROUNDING, ROUNDING_OF_FACTORS, assert_bits, assert_near};
use tests::engines::{devices, tensor_data};
use tests::golden::Golden;
use tests::inputs::{Dense, Dtype, Kind, normals};
use tests::modules::seeded;
use tests::tensors::{floats, random};

/// Compares with golden bytes of TransformerEngine's column-wise output with the transform.
#[test]
fn the_hadamard_transform_is_transformer_engines() {
    let golden = Golden::read("te_variants");
    let scheme = Fp4Scheme::nvfp4().with_non_finite(NonFinite::FollowReference);
    let mut cases = 0;
    for case in golden.cases("x") {
        let rht = format!("{case}/rht");
        if !golden.has(&format!("{rht}/codes")) {
            continue;
        }
        let dense = golden.dense(&format!("{case}/x"));
        let view = View::along(&[dense.rows, dense.cols], 0);
        let on_host = dense.hadamard(view, Hadamard::TRANSFORMER_ENGINE, false);
        for (name, device, dtypes) in devices() {
            let data = tensor_data(&dense);
            if !dtypes.contains(&data.dtype()) {
                continue;
            }
            let dtype = data.dtype();
            let x = Tensor::<2>::from_data(data, (&device, dtype));
            let transformed = ops::hadamard(x, 0, Hadamard::default()).unwrap();
            let what = format!("{case} on {name}");
            assert_bits(&what, &floats(transformed.clone()), &on_host.to_f32());
            let amax = floats(ops::amax(transformed.clone()).unwrap());
            assert_bits(&what, &amax, &golden.floats(&format!("{rht}/amax")));
            let packed = ops::quantize(transformed, 0, &scheme).unwrap().to_packed().unwrap();
            assert_eq!(packed.codes, golden.bytes(&format!("{rht}/codes")), "{what}");
            assert_eq!(packed.scales, golden.bytes(&format!("{rht}/scales")), "{what}");
            cases += 1;
        }
    }
    println!("{cases} cases");
    // Three of f32, three of bf16, which not every device has.
    assert!(cases >= 3 * 2 + 3);
}

#[test]
fn the_inverse_hadamard_transform_undoes_the_transform() {
    for (name, device, _) in devices() {
        let sizes = Hadamard::SIZES.map(|size| Hadamard::of_size(size).unwrap());
        let signed = [Hadamard::TRANSFORMER_ENGINE, Hadamard::seeded(3)];
        for transform in signed.into_iter().chain(sizes) {
            let x = random(1, [3, 128, 5], &device);
            let there = ops::hadamard(x.clone(), 1, transform).unwrap();
            let back = ops::inverse_hadamard(there.clone(), 1, transform).unwrap();
            let energy = |x: &Tensor<3>| floats(x.clone().powf_scalar(2.0).sum())[0];
            assert!((energy(&x) - energy(&there)).abs() < 1e-3 * energy(&x), "{name}");
            for (x, back) in floats(x).into_iter().zip(floats(back)) {
                assert!((x - back).abs() < 1e-5, "{name}: {x} {back}");
            }
        }
        let odd = ops::hadamard(random(1, [24, 3], &device), 0, Hadamard::default());
        assert!(matches!(odd, Err(OpsError::Indivisible { .. })), "{name}: {odd:?}");

        // The gradient is transformed back.
        let device = device.autodiff();
        let x = random(1, [32, 4], &device).require_grad();
        let weights = random(2, [32, 4], &device);
        let y = ops::hadamard(x.clone(), 0, Hadamard::default()).unwrap();
        let gradients = (y * weights.clone()).sum().backward();
        let expected = ops::inverse_hadamard(weights, 0, Hadamard::default()).unwrap();
        assert_bits(name, &floats(x.grad(&gradients).unwrap()), &floats(expected));
    }
    assert_ne!(Hadamard::seeded(3), Hadamard::seeded(4));
}

/// Makes a block with a scale of 1: values are rounded without scaling.
fn draw_codes(values: &[f32], draw: Draw) -> Packed {
    let scheme = Fp4Scheme::nvfp4()
        .with_tensor_scale(TensorScaling::Multiplier(1.0))
        .with_rounding(Rounding::Stochastic(draw));
    let view = View::rows(1, values.len());
    host::quantize_packed(values, view, &scheme, &[f32::NAN], Importance::Uniform).unwrap()
}

#[test]
fn stochastic_rounding_is_unbiased() {
    const DRAWS: u64 = 4096;
    // Each block holds a 6, whose scale is 1.
    let mut grid: Vec<f32> = (-48..=48).map(|eighth| eighth as f32 / 8.0).collect();
    grid.extend(normals(5, 200).iter().map(|x| (1.7 * x).clamp(-6.0, 6.0)));
    let blocks = grid.chunks(15).flat_map(|values| {
        let mut block = vec![6.0];
        block.extend(values);
        block.resize(16, 0.0);
        block
    });
    let values: Vec<f32> = blocks.collect();
    let mut sums = vec![0.0f64; values.len()];
    for step in 0..DRAWS {
        let packed = draw_codes(&values, Draw { seed: 11, step });
        assert!(packed.scales.iter().all(|&scale| scale == 0x38));
        for (sum, value) in sums.iter_mut().zip(packed.dequantize()) {
            *sum += f64::from(value);
        }
    }
    for (&value, sum) in values.iter().zip(sums) {
        let magnitude = value.abs();
        let above = E2M1_VALUES[..8].iter().copied().find(|&x| x >= magnitude).unwrap();
        let below = E2M1_VALUES[..8].iter().copied().rfind(|&x| x <= magnitude).unwrap();
        let step = f64::from(above - below);
        let mean = sum / DRAWS as f64;
        // The deviation of a choice between two.
        let (low, high) = (f64::from(magnitude - below), f64::from(above - magnitude));
        let error = (low * high / DRAWS as f64).sqrt();
        let (mean, value) = (mean, f64::from(value));
        assert!((mean - value).abs() <= 4.0 * error, "{value}: {mean}, {step} {error}");
    }
}

/// Exactly the expected share of all random bits rounds up.
#[test]
fn stochastic_rounding_has_the_right_probabilities() {
    for below in 0..7u8 {
        let (low, high) = (E2M1_VALUES[below as usize], E2M1_VALUES[below as usize + 1]);
        for eighth in 0..8 {
            let value = low + (high - low) * eighth as f32 / 8.0;
            for sign in [1.0, -1.0f32] {
                let codes = (0..=u16::MAX).map(|bits| stochastic_code(sign * value, bits) & 7);
                let up = codes.filter(|&code| code == below + 1).count();
                assert_eq!(up, eighth * 65536 / 8, "{value}");
            }
        }
    }
    for bits in [0, u16::MAX] {
        assert_eq!(stochastic_code(6.0, bits), 7);
        assert_eq!(stochastic_code(f32::NEG_INFINITY, bits), 15);
        assert_eq!(stochastic_code(f32::NAN, bits), 0);
    }
}

#[test]
fn random_bits_do_not_depend_on_the_engine() {
    for (name, device, _) in devices() {
        let values = Kind::Outliers.values(64 * 96, 3);
        let draw = Draw { seed: 1 << 50 | 9, step: 77 };
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
            let scheme = scheme.with_rounding(Rounding::Stochastic(draw));
            let expected = quantize(&values, 64, 96, &scheme).unwrap();
            let x = Tensor::<2>::from_data(TensorData::new(values.clone(), [64, 96]), &device);
            let along = ops::quantize(x.clone(), 1, &scheme).unwrap().to_packed().unwrap();
            assert_eq!(along, expected, "{name}");
            // The same packed matrix from a transposed tensor, in memory or not.
            let lazy = ops::quantize(x.clone().transpose(), 0, &scheme).unwrap();
            assert_eq!(lazy.to_packed().unwrap(), expected, "{name}");
            let columns = Dense::new(64, 96, &values, Dtype::F32).transposed().to_f32();
            let columns = Tensor::<2>::from_data(TensorData::new(columns, [96, 64]), &device);
            let across = ops::quantize(columns, 0, &scheme).unwrap().to_packed().unwrap();
            assert_eq!(across, expected, "{name}");
            let again = scheme.with_rounding(Rounding::Stochastic(Draw { step: 78, ..draw }));
            assert_ne!(ops::quantize(x, 1, &again).unwrap().to_packed().unwrap(), expected);
        }
    }
    assert_ne!(Draw::default().stream(0), Draw::default().stream(1));
    let search = Fp4Scheme::nvfp4().with_method(Method::SSE);
    let drawn = search.with_rounding(Rounding::Stochastic(Draw::default()));
    assert!(drawn.validate().is_err());
}

/// A matrix in f64, for products without a dependence on the order of terms.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn new(rows: usize, cols: usize, values: &[f32]) -> Self {
        assert_eq!(values.len(), rows * cols);
        Self { rows, cols, values: values.iter().map(|&x| f64::from(x)).collect() }
    }

    fn transposed(&self) -> Self {
        let values = (0..self.values.len())
            .map(|at| self.values[at % self.rows * self.cols + at / self.rows]);
        Self { rows: self.cols, cols: self.rows, values: values.collect() }
    }

    fn times(&self, other: &Self) -> Self {
        assert_eq!(self.cols, other.rows);
        let mut values = vec![0.0; self.rows * other.cols];
        for row in 0..self.rows {
            for k in 0..self.cols {
                for col in 0..other.cols {
                    values[row * other.cols + col] +=
                        self.values[row * self.cols + k] * other.values[k * other.cols + col];
                }
            }
        }
        Self { rows: self.rows, cols: other.cols, values }
    }

    /// Padded with rows of zeros, up to a multiple.
    fn padded(&self, multiple: usize) -> Self {
        let rows = self.rows.next_multiple_of(multiple);
        let mut values = self.values.clone();
        values.resize(rows * self.cols, 0.0);
        Self { rows, cols: self.cols, values }
    }

    /// Quantized down its columns by the oracle, and dequantized.
    fn quantized(&self, scheme: Option<Fp4Scheme>) -> Self {
        let Some(scheme) = scheme else { return self.clone() };
        let scheme = scheme.with_non_finite(NonFinite::FollowReference);
        let packed = self.padded(scheme.block_size).transposed();
        let values: Vec<f32> = packed.values.iter().map(|&x| x as f32).collect();
        let packed = quantize(&values, packed.rows, packed.cols, &scheme).expect("consistent");
        let rows = packed.cols;
        Self::new(packed.rows, rows, &packed.dequantize()).transposed()
    }

    fn hadamard(&self, hadamard: Option<Hadamard>) -> Self {
        let Some(hadamard) = hadamard else { return self.clone() };
        let padded = self.padded(16);
        let values: Vec<f32> = padded.values.iter().map(|&x| x as f32).collect();
        let view = View::along(&[padded.rows, padded.cols], 0);
        let mut output = vec![0.0; values.len()];
        host::hadamard(&values, view, hadamard, false, &mut output).expect("padded");
        Self::new(padded.rows, padded.cols, &output)
    }

    fn check(&self, what: &str, found: &[f32], tolerance: f64) {
        let expected: Vec<_> = self.values.iter().map(|&value| value as f32).collect();
        assert_near(what, found, &expected, tolerance);
    }
}

/// The forward product and both gradients, against products of operands that the oracle quantizes.
#[test]
fn training_products_multiply_the_values_of_the_recipe() {
    let full = TrainRecipe::NVFP4;
    let mxfp4 = Some(Fp4Scheme::mxfp4());
    let recipes = [
        full,
        TrainRecipe { hadamard: Some(Hadamard::seeded(8)), ..full },
        TrainRecipe { hadamard: None, ..full },
        TrainRecipe { stochastic_rounding: false, ..full },
        TrainRecipe { weights: None, ..full },
        TrainRecipe { activations: None, ..full },
        TrainRecipe { gradients: None, ..full },
        TrainRecipe { weights: Some(Fp4Scheme::nvfp4()), ..full },
        TrainRecipe { weights: mxfp4, activations: mxfp4, gradients: mxfp4, ..full },
        TrainRecipe { weights: mxfp4, ..full },
        TrainRecipe::HIGH_PRECISION,
    ];
    for (name, device, _) in devices() {
        let training = device.clone().autodiff();
        for (m, k, n) in [(32, 64, 48), (5, 40, 10)] {
            let values = |seed, len| normals(seed, len);
            let (x, w, g) = (values(1, m * k), values(2, k * n), values(3, m * n));
            let tensor = |values: &[f32], shape: [usize; 2]| {
                Tensor::<2>::from_data(TensorData::new(values.to_vec(), shape), &training)
            };
            for recipe in recipes {
                let draw = Draw { seed: 4, step: 9 };
                let input = tensor(&x, [m, k]).require_grad();
                let weight = tensor(&w, [k, n]).require_grad();
                let y = ops::train_product(input.clone(), weight.clone(), &recipe, draw).unwrap();
                let gradients = (y.clone() * tensor(&g, [m, n])).sum().backward();

                let (x, w, g) =
                    (Matrix::new(m, k, &x), Matrix::new(k, n, &w), Matrix::new(m, n, &g));
                let drawn = |stream| {
                    let rounding = match recipe.stochastic_rounding {
                        true => Rounding::Stochastic(draw.stream(stream)),
                        false => Rounding::Nearest,
                    };
                    recipe.gradients.map(|scheme| scheme.with_rounding(rounding))
                };
                let TrainRecipe { weights, activations, gradients: of_gradients, .. } = recipe;
                let quantizes = activations.is_some() || of_gradients.is_some();
                let all = weights.is_some() && activations.is_some() && of_gradients.is_some();
                let tolerance = match name {
                    "cuda" if !all => ROUNDING_OF_FACTORS,
                    _ => ROUNDING,
                };
                // Along K, N and M: the contracted axis of each operand down its columns.
                let pad = |x: &Matrix| x.padded(32);
                let what = |product| format!("{name} {m} {k} {n}, {product} of {recipe:?}");
                let xq = pad(&x.transposed().quantized(recipe.activations)).transposed();
                let wq = pad(&w.quantized(recipe.weights));
                xq.times(&wq).check(&what("output"), &floats(y), tolerance);
                let gq = pad(&g.transposed().quantized(drawn(0))).transposed();
                let wq = pad(&w.transposed().quantized(recipe.weights));
                let dx = floats(input.grad(&gradients).unwrap());
                gq.times(&wq).check(&what("input gradient"), &dx, tolerance);
                let transform = recipe.hadamard.filter(|_| quantizes);
                let xq = pad(&x.hadamard(transform).quantized(recipe.activations));
                let gq = pad(&g.hadamard(transform).quantized(drawn(1)));
                let dw = floats(weight.grad(&gradients).unwrap());
                xq.transposed().times(&gq).check(&what("weight gradient"), &dw, tolerance);
            }
        }
    }
}

#[test]
fn products_of_halves_are_rounded_once() {
    for (name, device, dtypes) in devices() {
        for dtype in dtypes {
            let (x, w) = (random(1, [17, 64], &device), random(2, [64, 48], &device));
            let (x, w) = (x.cast(dtype), w.cast(dtype));
            let draw = Draw::default();
            let recipe = TrainRecipe::NVFP4;
            let found = ops::train_product(x.clone(), w.clone(), &recipe, draw).unwrap();
            assert_eq!(found.dtype(), dtype, "{name}");
            // The same factors, since widening is exact and what is quantized short enough.
            let (x, w) = (x.cast(DType::F32), w.cast(DType::F32));
            let exact = ops::train_product(x, w, &recipe, draw).unwrap();
            assert_bits(name, &floats(found), &floats(exact.cast(dtype)));
        }
    }
}

#[test]
fn train_linear_has_the_outputs_and_records_of_linear() {
    for (name, device, _) in devices() {
        let training = device.clone().autodiff();
        let linear = seeded(LinearConfig::new(48, 32).init(&training), 2);
        let x = random(3, [2, 5, 48], &training).require_grad();
        // Without any part of the recipe it is the layer it was made from.
        let plain = Fp4TrainLinear::new(linear.clone(), TrainRecipe::HIGH_PRECISION, 0).unwrap();
        let gradient = |y: Tensor<3>| floats(x.grad(&y.powf_scalar(2.0).sum().backward()).unwrap());
        let tolerance = if name == "cuda" { ROUNDING_OF_FACTORS } else { ROUNDING };
        let close = |found: Vec<f32>, expected: Vec<f32>| {
            assert_near(name, &found, &expected, tolerance);
        };
        close(floats(plain.forward(x.clone())), floats(linear.forward(x.clone())));
        close(gradient(plain.forward(x.clone())), gradient(linear.forward(x.clone())));

        // Every step has new random numbers, which depend on seed and step alone.
        let layer = Fp4TrainLinear::new(linear.clone(), TrainRecipe::NVFP4, 5).unwrap();
        let again = Fp4TrainLinear::new(linear.clone(), TrainRecipe::NVFP4, 5).unwrap();
        let (first, second) =
            (gradient(layer.forward(x.clone())), gradient(layer.forward(x.clone())));
        assert_ne!(first, second, "{name}");
        assert_eq!(gradient(again.forward(x.clone())), first, "{name}");
        again.set_step(layer.step());
        assert_eq!(gradient(again.forward(x.clone())), gradient(layer.forward(x.clone())));
        assert_eq!(layer.step(), 3);
        let _ = layer.valid().forward(x.clone().without_autodiff());
        assert_eq!(layer.step(), 3, "inference draws nothing");

        let record = layer.valid().into_record().into_bytes().unwrap();
        let record = || ModuleRecord::from_bytes(record.clone()).unwrap();
        let loaded = LinearConfig::new(48, 32).init(&device).load_record(record());
        assert_bits(name, &floats(loaded.weight.val()), &floats(linear.weight.val()));
        let other = Fp4TrainLinear::from(LinearConfig::new(48, 32).init(&device));
        let other = other.load_record(record());
        assert_bits(name, &floats(other.weight.val()), &floats(linear.weight.val()));
    }
    let layers: Vec<_> = (0..4).map(|layer| TrainRecipe::NVFP4.for_layer(layer, 4, 1)).collect();
    assert_eq!(layers[2], TrainRecipe::NVFP4);
    assert_eq!(layers[3], TrainRecipe::HIGH_PRECISION);
}

#[test]
fn inconsistent_recipes_are_refused() {
    let device = Device::flex();
    let (x, w) = (random(1, [4, 32], &device), random(2, [32, 16], &device));
    let refused = |recipe: TrainRecipe| {
        ops::train_product(x.clone(), w.clone(), &recipe, Draw::default()).unwrap_err().to_string()
    };
    let with = |scheme| TrainRecipe { activations: Some(scheme), ..TrainRecipe::NVFP4 };
    let rows = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    assert!(refused(with(rows)).contains("activations"));
    for method in Method::NAMED.map(|row| row.method).into_iter().filter(|m| !m.is_blockwise()) {
        let error = refused(with(Fp4Scheme::nvfp4().with_method(method)));
        assert!(error.contains("too slow in training"), "{method}: {error}");
    }
    let drawn = Fp4Scheme::nvfp4().with_rounding(Rounding::Stochastic(Draw::default()));
    assert!(refused(with(drawn)).contains("stochastic_rounding"));
    refused(with(Fp4Scheme::nvfp4().with_block_size(24)));
    let sse = Fp4Scheme::of(ScaleRule::Te).with_method(Method::SSE);
    refused(TrainRecipe { gradients: Some(sse), ..TrainRecipe::NVFP4 });

    let narrow = random(2, [16, 16], &device);
    let error = ops::train_product(x.clone(), narrow, &TrainRecipe::NVFP4, Draw::default());
    assert!(matches!(error, Err(OpsError::Contraction { .. })));
    let half = w.clone().cast(DType::F16);
    let error = ops::train_product(x, half, &TrainRecipe::NVFP4, Draw::default());
    assert!(matches!(error, Err(OpsError::Operands { .. })));
}
