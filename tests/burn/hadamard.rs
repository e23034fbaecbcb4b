//! Weights that are quantized after a Hadamard transform: the same codes on every device, products
//! that transform their input, modules, records and files.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fp4::{
    Calibration, Checkpoint, CheckpointMap, Fp4Config, Fp4Error, Fp4Linear, Fp4Module, KeepReason,
    LoadCheckpoint, Outcome, PackedWeight,
};
use burn_fp4_ops::{
    Activations, Fp4Scheme, Fp4Tensor, Gptq, Hadamard, Importance, Method, OpsError, TrainRecipe,
    embedding, fake_quantize, gram, hadamard, inverse_hadamard, linear, linear_with, quantize,
    quantize_by_importance, quantize_gptq, quantize_with_best_tensor_scale,
};
use burn_fp4_search::SearchError;
use burn_fp4_search::formats::Fp4Format;
use tests::compare::assert_bits;
use tests::engines::devices;
use tests::modules::seeded;
use tests::tensors::{floats, random, sums};

fn of_size(size: usize) -> Hadamard {
    Hadamard::of_size(size).unwrap()
}

/// Transforms with and without signs, each with a scheme.
fn schemes() -> Vec<Fp4Scheme> {
    let transforms = Hadamard::SIZES.map(of_size).into_iter().chain([Hadamard::seeded(3)]);
    let both = transforms.flat_map(|hadamard| {
        [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()].map(|one| one.with_hadamard(Some(hadamard)))
    });
    both.collect()
}

/// Values with an outlier in every column.
fn weight(shape: [usize; 2], device: &Device) -> Tensor<2> {
    let values = random(1, shape, device);
    let first = [0..1, 0..shape[1]];
    let outliers = values.clone().slice(first.clone()) * 8.0;
    values.slice_assign(first, outliers)
}

fn assert_same(what: &str, found: &Fp4Tensor<2>, expected: &Fp4Tensor<2>) {
    let (found, expected) = (found.to_packed().unwrap(), expected.to_packed().unwrap());
    assert_eq!(found, expected, "{what}");
}

#[test]
fn codes_are_those_of_the_transformed_values_on_every_device() {
    for scheme in schemes() {
        let transform = scheme.hadamard.unwrap();
        let on_host = quantize(weight([256, 24], &Device::flex()), 0, &scheme).unwrap();
        for (name, device, _) in devices() {
            let what = format!("{name}: {scheme}");
            for (dense, axis) in
                [(weight([256, 24], &device), 0), (weight([256, 24], &device).transpose(), 1)]
            {
                let packed = quantize(dense.clone(), axis, &scheme).unwrap();
                assert_eq!(packed.layout().hadamard, Some(transform));
                assert_same(&what, &packed, &on_host);
                let transformed = hadamard(dense.clone(), axis, transform).unwrap();
                let plain = quantize(transformed, axis, &scheme.without_hadamard()).unwrap();
                assert_same(&what, &packed, &plain);
                // Values are transformed back.
                let back = inverse_hadamard(plain.dequantize(), axis, transform).unwrap();
                assert_bits(&what, &floats(packed.dequantize()), &floats(back));
                let difference = packed.dequantize() - dense.clone();
                let direct = floats(difference.powf_scalar(2.0).sum())[0];
                let [error, _] = sums(packed.squared_error(dense).unwrap());
                assert!((error - f64::from(direct)).abs() < 1e-3 * error, "{what}: {error}");
            }
        }
    }
}

/// Compares with products of the dequantized weight in f64. The bound is of the norms: an input
/// that is transformed is rounded in another basis.
fn check_product(what: &str, packed: &Fp4Tensor<2>, input: &Tensor<2>, found: Tensor<2>) {
    let [channels, outputs] = packed.dims();
    let rounding = match input.dtype() {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ if what.starts_with("cuda") => 2f64.powi(-10),
        _ => 1e-6,
    };
    let norm = |values: &mut dyn Iterator<Item = f32>| -> f64 {
        values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
    };
    let (dense, input) = (floats(packed.dequantize()), floats(input.clone()));
    for (at, found) in floats(found).into_iter().enumerate() {
        let (row, output) = (at / outputs, at % outputs);
        let x = || input[row * channels..][..channels].iter().copied();
        let w = || (0..channels).map(|k| dense[k * outputs + output]);
        let sum: f64 = x().zip(w()).map(|(x, w)| f64::from(x) * f64::from(w)).sum();
        let bound = 2.0 * rounding * norm(&mut x()) * norm(&mut w()) + 1e-6;
        assert!((f64::from(found) - sum).abs() <= bound, "{what}: {found}, not {sum}");
    }
}

/// Schemes with each kind of transform.
fn transformed_schemes() -> [Fp4Scheme; 3] {
    [
        Fp4Scheme::nvfp4().with_hadamard(Some(of_size(32))),
        Fp4Scheme::mxfp4().with_hadamard(Some(of_size(128))),
        Fp4Scheme::nvfp4().with_hadamard(Some(Hadamard::seeded(3))),
    ]
}

fn check_products(rows: usize) {
    for (name, device, dtypes) in devices() {
        for scheme in transformed_schemes() {
            for &dtype in &dtypes {
                let what = format!("{name} {dtype:?} {rows} rows: {scheme}");
                let packed = quantize(weight([256, 40], &device), 0, &scheme).unwrap();
                let input = random(2, [rows, 256], &device).cast(dtype);
                let bias = random(3, [40], &device).cast(dtype);
                let found = linear(input.clone(), &packed, Some(bias.clone())).unwrap();
                let found = found.cast(DType::F32) - bias.cast(DType::F32).unsqueeze();
                check_product(&what, &packed, &input, found);
            }
        }
    }
}

#[test]
fn one_row_is_transformed_before_the_product_on_every_device() {
    check_products(1);
}

#[test]
fn many_rows_are_transformed_before_the_product_on_every_device() {
    check_products(70);
}

#[test]
fn lookups_transform_back_on_every_device() {
    for (name, device, _) in devices() {
        for scheme in transformed_schemes() {
            let table = quantize(random(4, [9, 128], &device), 1, &scheme).unwrap();
            let indices = Tensor::<2, Int>::from_ints([[8, 0], [3, 3]], &device);
            let found = embedding(&table, indices.clone(), FloatDType::F32).unwrap();
            let expected =
                table.dequantize().select(0, indices.flatten::<1>(0, 1)).reshape([2, 2, 128]);
            assert_bits(name, &floats(found), &floats(expected));
        }
    }
}

#[test]
fn int8_activations_are_quantized_after_the_transform() {
    let device = Device::flex();
    let scheme = Fp4Scheme::nvfp4().with_hadamard(Some(of_size(32)));
    let packed = quantize(weight([256, 40], &device), 0, &scheme).unwrap();
    let input = random(2, [2, 256], &device);
    let exact = linear(input.clone(), &packed, None).unwrap();
    let int8 = linear_with(input, &packed, None, Activations::Int8).unwrap();
    let norm = |x: Tensor<2>| floats(x.powf_scalar(2.0).sum())[0].sqrt();
    assert!(norm(exact.clone() - int8) < 0.02 * norm(exact));
}

#[test]
fn gradients_of_the_input_are_those_of_the_dequantized_weight() {
    for (name, device, _) in devices() {
        let scheme = Fp4Scheme::nvfp4().with_hadamard(Some(of_size(64)));
        let packed = quantize(weight([128, 8], &device), 0, &scheme).unwrap();
        let device = device.autodiff();
        let x = random(1, [3, 128], &device).require_grad();
        let found = linear(x.clone(), &packed, None).unwrap();
        let gradient = x.grad(&found.sum().backward()).unwrap();
        let expected = packed.dequantize().sum_dim(1).transpose();
        let scale = floats(expected.clone().abs().max())[0];
        let expected = floats(expected);
        for (at, found) in floats(gradient).into_iter().enumerate() {
            let near = (found - expected[at % 128]).abs() < 4e-3 * scale;
            assert!(near, "{name}: {found}, not {}", expected[at % 128]);
        }
    }
}

#[test]
fn statistics_are_transformed_with_the_inputs() {
    let device = Device::flex();
    let transform = of_size(32);
    let inputs = random(5, [200, 128], &device) * (random(6, [1, 128], &device) * 2.0).exp();
    let (dense, statistics) = (weight([128, 32], &device), gram(inputs.clone()).unwrap());
    let turned = statistics.clone().transformed(transform).unwrap();
    let summed = gram(hadamard(inputs.clone(), 1, transform).unwrap()).unwrap();
    for row in 0..128 {
        for col in 0..128 {
            let [a, b] = [&turned, &summed].map(|gram| gram.get(row, col).unwrap());
            let size = (turned.get(row, row).unwrap() * turned.get(col, col).unwrap()).sqrt();
            assert!((a - b).abs() < 1e-5 * size, "{row} {col}: {a} {b}");
            assert_eq!(turned.get(row, col), turned.get(col, row));
        }
    }
    let outputs = |packed: &Fp4Tensor<2>| {
        let difference = inputs.clone().matmul(packed.dequantize() - dense.clone());
        floats(difference.powf_scalar(2.0).sum())[0]
    };
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
        let scheme = scheme.with_hadamard(Some(transform));
        let plain = quantize(dense.clone(), 0, &scheme).unwrap();
        let gptq = quantize_gptq(dense.clone(), 0, &scheme, &Gptq::DEFAULT, &statistics).unwrap();
        assert!(outputs(&gptq) < 0.8 * outputs(&plain), "{scheme}");
        let hessians = turned.blocks(scheme.block_size).unwrap();
        let by_hessian = scheme.with_method(Method::Hessian);
        let blocks = Importance::Blocks(&hessians);
        let by_hessian = quantize_by_importance(dense.clone(), 0, &by_hessian, blocks).unwrap();
        assert!(outputs(&by_hessian) < outputs(&plain), "{scheme}");
    }
    let scheme = Fp4Scheme::nvfp4().with_hadamard(Some(transform));
    let best = quantize_with_best_tensor_scale(dense.clone(), 0, &scheme).unwrap();
    assert_eq!(best.layout().hadamard, Some(transform));
    assert!(statistics.transformed(of_size(64)).is_ok());
    let narrow = gram(random(5, [20, 48], &device)).unwrap();
    assert!(matches!(narrow.transformed(transform), Err(SearchError::Format(_))));
}

#[test]
fn what_has_no_transform_refuses_it() {
    let device = Device::flex();
    let scheme = Fp4Scheme::nvfp4().with_hadamard(Some(of_size(32)));
    let refused = fake_quantize(weight([64, 8], &device), 0, &scheme);
    assert!(matches!(refused, Err(OpsError::Search(SearchError::Untransformed))), "{refused:?}");
    let mut divisible = vec![model(&device).remove(0)];
    let trained = divisible.fake_quantize_fp4(&Fp4Config::new(scheme));
    assert!(matches!(trained, Err(Fp4Error::FakeQuantization { .. })), "{trained:?}");
    let recipe = TrainRecipe { weights: Some(scheme), ..TrainRecipe::NVFP4 };
    assert!(matches!(recipe.validate(), Err(OpsError::Recipe { part: "weights", .. })));
    let odd = quantize(weight([48, 8], &device), 0, &scheme);
    let expected = OpsError::Indivisible { axis: 0, length: 48, block_size: 32 };
    assert_eq!(odd.map(|_| ()), Err(expected));
    let packed = quantize(weight([64, 8], &device), 0, &scheme).unwrap();
    assert!(matches!(packed.to_burn_data(), Err(OpsError::BurnData { .. })));
}

fn model(device: &Device) -> Vec<Linear> {
    let layer = |[inputs, outputs]: [usize; 2]| {
        let layer = LinearConfig::new(inputs, outputs).with_bias(false).init(device);
        seeded(layer, inputs as u64)
    };
    [[96, 64], [64, 48], [48, 8]].map(layer).into()
}

#[test]
fn modules_are_quantized_recorded_and_saved_with_their_transform() {
    let device = Device::flex();
    let transform = of_size(32);
    let config = Fp4Config::mxfp4().hadamard(transform);
    let error = model(&device).quantize_fp4(&config).unwrap_err().to_string();
    assert!(error.contains("2.weight") && error.contains("48"), "{error}");
    let config = config.indivisible(burn_fp4::Indivisible::Skip);
    let mut quantized = model(&device);
    let report = quantized.quantize_fp4(&config).unwrap();
    let outcome = |at: usize| &report.parameters[at].outcome;
    for at in [0, 1] {
        let Outcome::Quantized { scheme, .. } = outcome(at) else { panic!("{report}") };
        assert_eq!(scheme.hadamard, Some(transform));
    }
    let kept =
        Outcome::Kept { reason: KeepReason::Indivisible { axis: 0, length: 48, block_size: 32 } };
    assert_eq!(*outcome(2), kept);
    assert!(report.to_string().contains("Hadamard"), "{report}");
    let packed = quantized[0].weight.reparameterization::<PackedWeight>().unwrap();
    assert_eq!(packed.layout().hadamard, Some(transform));
    let x = random(1, [3, 96], &device);
    let dense = floats(x.clone().matmul(quantized[0].weight.val()));
    let fp4 = floats(Fp4Linear::from(quantized[0].clone()).forward(x.clone()));
    for (a, b) in dense.iter().zip(&floats(quantized[0].forward(x))) {
        assert_eq!(a, b);
    }
    for (a, b) in dense.iter().zip(&fp4) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }

    let values = |model: &[Linear]| -> Vec<Vec<f32>> {
        model.iter().map(|layer| floats(layer.weight.val())).collect()
    };
    let record = quantized.clone().into_record();
    let mut again = model(&device);
    again.load_fp4_record(record).unwrap();
    assert_eq!(values(&again), values(&quantized));

    let folder = std::env::temp_dir().join(format!("burn-fp4-hadamard-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("model");
    let map = CheckpointMap::new();
    let refused = quantized.save_fp4(&path, "modelopt", &map).unwrap_err().to_string();
    assert!(refused.contains("Hadamard"), "{refused}");
    quantized.save_fp4(&path, "fp-quant", &map).unwrap();
    let mut loaded = model(&device);
    Checkpoint::open(&path).unwrap().load_into(&mut loaded, &map).unwrap();
    assert_eq!(values(&loaded), values(&quantized));
    let packed = loaded[1].weight.reparameterization::<PackedWeight>().unwrap();
    assert_eq!(
        (packed.layout().hadamard, packed.layout().format),
        (Some(transform), Fp4Format::MxFp4)
    );

    std::fs::remove_dir_all(&folder).unwrap();

    // A recipe says it too.
    let recipe = report.recipe(&map).unwrap();
    let mut by_recipe = model(&device);
    by_recipe.quantize_fp4(&Fp4Config::of_recipe(&recipe, &map).unwrap()).unwrap();
    assert_eq!(values(&by_recipe), values(&quantized));
}

/// With GPTQ, for weights of one input that share a tensor scale, as query, key and value do.
#[test]
fn families_share_scales_and_statistics_after_a_transform() {
    let device = Device::flex();
    let layer = |seed| {
        let layer = LinearConfig::new(64, 32).with_bias(false).init(&device);
        seeded(layer, seed)
    };
    let (first, second): (Linear, Linear) = (layer(1), layer(2));
    let inputs = random(3, [300, 64], &device) * (random(4, [1, 64], &device) * 2.0).exp();
    let mut calibration = Calibration::new();
    let statistics = gram(inputs.clone()).unwrap();
    for path in ["0.weight", "1.weight"] {
        calibration.insert(path, 0, statistics.clone());
    }
    for format in [Fp4Format::NvFp4, Fp4Format::MxFp4] {
        let errors = [None, Some(of_size(64))].map(|hadamard| {
            let scheme = Method::GPTQ.scheme(format, format.row().block_size);
            let config = Fp4Config::new(scheme.with_hadamard(hadamard)).share_scale(["0", "1"]);
            let mut model = vec![first.clone(), second.clone()];
            let report = model.quantize_fp4(&config.with_calibration(&calibration)).unwrap();
            let packed = |at: usize| {
                let packed = model[at].weight.reparameterization::<PackedWeight>().unwrap();
                packed.tensor::<2>().to_packed().unwrap()
            };
            assert_eq!(packed(0).tensor_scale, packed(1).tensor_scale, "{report}");
            let error = |at: usize, dense: &Linear| {
                let difference = model[at].weight.val() - dense.weight.val();
                let found = inputs.clone().matmul(difference).powf_scalar(2.0).sum();
                let Outcome::Quantized { output_error, .. } = &report.parameters[at].outcome else {
                    panic!("{report}")
                };
                let outputs = inputs.clone().matmul(dense.weight.val()).powf_scalar(2.0).sum();
                let [found, outputs] = [found, outputs].map(|sum| f64::from(floats(sum)[0]));
                let reported = output_error.expect("measured").relative().powi(2);
                assert!((reported - found / outputs).abs() < 1e-2 * reported, "{report}");
                found
            };
            error(0, &first) + error(1, &second)
        });
        assert!(errors[1] < 1.5 * errors[0], "{format}: {errors:?}");
    }
}
