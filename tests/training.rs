//! Training: fake quantization, random codes, the Hadamard transform, and products by a recipe.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fp4::{
    ActivationRange, Blocks, Draw, E4m3Range, ErrorMetric, FakeQuantWeight, FakeQuantizeConfig,
    Fp4Config, Fp4Error, Fp4Module, Fp4Scheme, Fp4TrainLinear, Gptq, Hadamard, NonFinite, OpsError,
    Outcome, PackedWeight, Reason, Rounding, Saturated, ScaleRule, ScaleSearch, TensorScaling,
    TrainRecipe, ops,
};
use burn_fp4_formats::{E2M1_VALUES, Packed, TensorScale};
use burn_fp4_search::host::{self, View};
use burn_fp4_search::{Importance, quantize, quantize_with_amax, stochastic_code};
use tests::compare::assert_bits;
use tests::engines::{devices, tensor_data};
use tests::golden::Golden;
use tests::inputs::{Dense, Dtype, Kind, normals};
use tests::modules::seeded;

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn random<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    let values = normals(seed, shape.iter().product());
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The golden bytes of TransformerEngine's column-wise output with the transform.
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
fn the_hadamard_transform_is_undone() {
    for (name, device, _) in devices() {
        for signs in [0, 0xD7E8, Hadamard::seeded(3).signs] {
            let transform = Hadamard { signs };
            let x = random(1, [3, 32, 5], &device);
            let there = ops::hadamard(x.clone(), 1, transform).unwrap();
            let back = ops::inverse_hadamard(there.clone(), 1, transform).unwrap();
            let energy = |x: &Tensor<3>| floats(x.clone().powf_scalar(2.0).sum())[0];
            assert!((energy(&x) - energy(&there)).abs() < 1e-3 * energy(&x), "{name}");
            for (x, back) in floats(x).into_iter().zip(floats(back)) {
                assert!((x - back).abs() < 1e-5, "{name}: {x} {back}");
            }
        }
        let odd = ops::hadamard(random(1, [24, 3], &device), 0, Hadamard::default());
        assert!(matches!(odd, Err(OpsError::Search(_))), "{name}: {odd:?}");

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

/// A block of a scale of 1, so that codes are drawn for its values as they are.
fn draw_codes(values: &[f32], draw: Draw) -> Packed {
    let scheme = Fp4Scheme::nvfp4()
        .with_tensor_scale(TensorScaling::Multiplier(1.0))
        .with_rounding(Rounding::Stochastic(draw));
    let view = View::rows(1, values.len());
    host::quantize_packed(values, view, &scheme, &[f32::NAN], Importance::Uniform).unwrap()
}

#[test]
fn random_codes_are_unbiased() {
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

/// Between two codes, exactly as many of all random bits as there should be lead up.
#[test]
fn probabilities_of_random_codes_are_right() {
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
fn draws_do_not_depend_on_who_draws() {
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
    let search = Fp4Scheme::nvfp4().with_search(ScaleSearch::Sse);
    let drawn = search.with_rounding(Rounding::Stochastic(Draw::default()));
    assert!(drawn.validate().is_err());
}

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        seeded(Self { first: linear(64, 96), second: linear(96, 32) }, 3)
    }

    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.second.forward(self.first.forward(x).tanh())
    }
}

fn schemes() -> Vec<Fp4Scheme> {
    let search = ScaleSearch::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
    vec![
        Fp4Scheme::nvfp4(),
        Fp4Scheme::mxfp4(),
        Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16),
        Fp4Scheme::nvfp4().with_search(search),
        Fp4Scheme::nvfp4().with_search(ScaleSearch::Sse),
        Fp4Scheme::mxfp4().with_search(ScaleSearch::Sse),
        Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row),
        Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(0.7)),
    ]
}

/// Gradients of a loss with respect to the input and both weights.
fn gradients(net: &Net, x: &Tensor<2>) -> Vec<Vec<f32>> {
    let x = x.clone().require_grad();
    let gradients = net.forward(x.clone()).powf_scalar(2.0).sum().backward();
    let of = |weight: &Param<Tensor<2>>| floats(weight.base().grad(&gradients).unwrap());
    let bias = net.first.bias.as_ref().unwrap().base().grad(&gradients).unwrap();
    let x = floats(x.grad(&gradients).unwrap());
    vec![x, of(&net.first.weight), of(&net.second.weight), floats(bias)]
}

#[test]
fn gradients_are_those_of_the_dense_model_at_the_rounded_weights() {
    for (name, device, _) in devices() {
        for device in [device.clone().autodiff(), device.autodiff().gradient_checkpointing()] {
            let dense = Net::new(&device);
            let x = random(9, [5, 64], &device);
            for scheme in schemes() {
                let mut net = dense.clone();
                let report = net.fake_quantize_fp4(&Fp4Config::new(scheme)).unwrap();
                assert_eq!(report.parameters.len(), 4);
                let rounded = net.clone().materialize();
                assert_ne!(floats(rounded.first.weight.val()), floats(dense.first.weight.val()));
                assert!(rounded.first.weight.reparameterization::<FakeQuantWeight>().is_none());
                let (found, expected) = (gradients(&net, &x), gradients(&rounded, &x));
                for (found, expected) in found.iter().zip(&expected) {
                    let what = format!("{name} {scheme:?}");
                    if name == "cuda" {
                        // Burn picks its products there by measuring, and they differ in order.
                        assert_near(&what, found, expected, ROUNDING_OF_FACTORS);
                    } else {
                        assert_bits(&what, found, expected);
                    }
                }
            }
        }
    }
}

#[test]
fn what_saturates_may_have_no_gradient() {
    for (name, device, _) in devices() {
        let device = device.autodiff();
        // OCP's rule gives an amax of 7 a scale of 1: 6.5 and 7 are cut off, 6 is not.
        let mut values = vec![0.25; 32];
        values[..5].copy_from_slice(&[7.0, 6.5, -6.25, 6.0, 5.0]);
        let x = Tensor::<2>::from_data(TensorData::new(values, [1, 32]), &device).require_grad();
        let gradient = |saturated| {
            let scheme = Fp4Scheme::mxfp4();
            let y = ops::fake_quantize_for_training(x.clone(), 1, &scheme, saturated).unwrap();
            let scale = Tensor::<1>::from_data([3.0], &device).unsqueeze();
            floats(x.grad(&(y * scale).sum().backward()).unwrap())
        };
        assert_eq!(gradient(Saturated::PassThrough), [3.0; 32], "{name}");
        let mut expected = [3.0; 32];
        expected[..3].fill(0.0);
        assert_eq!(gradient(Saturated::Zero), expected, "{name}");
    }
}

/// The gradient of a learned tensor scale against finite differences of what its rule says: codes, block scales
/// and rounding errors in units of the scale stay as they are.
#[test]
fn a_learned_scale_has_the_gradient_of_its_rule() {
    let values = Kind::Weights.values(32 * 48, 8);
    let weights = normals(4, 32 * 48);
    // Below the true amax the largest blocks saturate.
    let largest = values.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    for amax in [largest, 0.4 * largest, 3.0 * largest] {
        let scheme = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(amax));
        let packed = quantize_with_amax(&values, 32, 48, &scheme, &[amax]).unwrap();
        let unscaled = Packed { tensor_scale: TensorScale::One(1.0), ..packed.clone() };
        let unscaled = unscaled.dequantize();
        let sixes = Packed { codes: vec![0x77; packed.codes.len()], ..packed.clone() }.dequantize();
        let loss = |changed: f64| -> f64 {
            let (scale, was) = (changed / 2688.0, f64::from(amax) / 2688.0);
            let terms = (0..values.len()).map(|at| {
                let (x, q) = (f64::from(values[at]), f64::from(unscaled[at]));
                let saturates = values[at].abs() > sixes[at];
                let kept = if saturates { 0.0 } else { x / was };
                // round(v) s = (v + (round(v) - v)) s, where v = x / s.
                let output = if saturates { q * scale } else { x + (q - kept) * scale };
                output * f64::from(weights[at])
            });
            terms.sum()
        };
        let h = 1e-3 * f64::from(amax);
        let expected = (loss(f64::from(amax) + h) - loss(f64::from(amax) - h)) / (2.0 * h);
        for (name, device, _) in devices() {
            let device = device.autodiff();
            let tensor = |values: &[f32]| {
                Tensor::<2>::from_data(TensorData::new(values.to_vec(), [32, 48]), &device)
            };
            let learned = Tensor::<1>::from_data([amax], &device).require_grad();
            let scheme = Fp4Scheme::nvfp4();
            let y = ops::fake_quantize_with_amax(
                tensor(&values),
                learned.clone(),
                1,
                &scheme,
                Saturated::PassThrough,
            )
            .unwrap();
            assert_bits(name, &floats(y.clone()), &packed.dequantize());
            let gradients = (y * tensor(&weights)).sum().backward();
            let found = f64::from(floats(learned.grad(&gradients).unwrap())[0]);
            let near = (found - expected).abs() <= 1e-3 * expected.abs() + 1e-3;
            assert!(near, "{name}, amax {amax}: {found}, not {expected}");
        }
    }
}

#[test]
fn learned_scales_learn() {
    let device = Device::flex().autodiff();
    let mut linear = seeded(LinearConfig::new(64, 64).with_bias(false).init(&device), 5);
    let config = Fp4Config::nvfp4().learn_tensor_scale();
    let report = linear.fake_quantize_fp4(&config).unwrap();
    assert!(report.to_string().contains("tensor scale learned"), "{report}");
    let learned = |linear: &Linear| {
        let fake = linear.weight.reparameterization::<FakeQuantWeight>().expect("attached");
        floats(fake.amax().expect("learned").val())[0]
    };
    let before = learned(&linear);
    assert_eq!(linear.num_params(), 64 * 64 + 1);
    let mut optimizer = SgdConfig::new().init();
    let target = linear.weight.base().detach();
    for _ in 0..5 {
        let loss = (linear.weight.val() - target.clone()).powf_scalar(2.0).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &linear);
        linear = optimizer.step(1e-3, linear, gradients);
    }
    assert_ne!(learned(&linear), before);
    // It travels with records, and is what conversion uses.
    let record = linear.clone().into_record().into_bytes().unwrap();
    let mut fresh = LinearConfig::new(64, 64).with_bias(false).init(&device);
    fresh.fake_quantize_fp4(&config).unwrap();
    let fresh = fresh.load_record(ModuleRecord::from_bytes(record).unwrap());
    assert_eq!(learned(&fresh), learned(&linear));
    let expected = floats(linear.weight.val());
    assert_bits("loaded", &floats(fresh.weight.val()), &expected);
    linear.convert_fp4().unwrap();
    assert!(linear.weight.reparameterization::<PackedWeight>().is_some());
    assert_bits("converted", &floats(linear.weight.val()), &expected);
}

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
}

/// Burn gives the gradient of a parameter that stands in two places to the first one.
#[test]
fn tied_weights_learn_one_scale_and_are_converted_as_they_became() {
    let device = Device::flex().autodiff();
    let first = seeded(LinearConfig::new(32, 32).with_bias(false).init(&device), 8);
    let mut net = Tied { second: first.clone(), first };
    net.fake_quantize_fp4(&Fp4Config::nvfp4().learn_tensor_scale()).unwrap();
    let amax = |linear: &Linear| {
        let fake = linear.weight.reparameterization::<FakeQuantWeight>().expect("attached");
        fake.amax().expect("learned").id
    };
    assert_eq!(amax(&net.first), amax(&net.second));
    let x = random(9, [4, 32], &device);
    let forward = |net: &Tied| net.second.forward(net.first.forward(x.clone()).tanh());
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..3 {
        let gradients = forward(&net).powf_scalar(2.0).mean().backward();
        let gradients = GradientsParams::from_grads(gradients, &net);
        net = optimizer.step(1e-2, net, gradients);
    }
    assert_eq!(net.first.weight.id, net.second.weight.id);
    assert_ne!(floats(net.first.weight.base()), floats(net.second.weight.base()));
    let expected = floats(forward(&net));
    net.convert_fp4().unwrap();
    assert_bits("converted", &floats(forward(&net)), &expected);
}

#[test]
fn packed_records_do_not_load_where_something_else_is_attached() {
    let device = Device::flex();
    let net = Net::new(&device);
    let (mut packed, mut fake) = (net.clone(), net);
    packed.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    fake.fake_quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let before = floats(fake.first.weight.val());
    let error = fake.load_fp4_record(packed.into_record()).unwrap_err();
    let named = error.to_string().contains("something else attached\n  first.weight");
    assert!(named, "{error}");
    assert_bits("unchanged", &floats(fake.first.weight.val()), &before);
}

#[test]
fn an_amax_beside_the_scheme_needs_one_tensor_scale_made_from_it() {
    let device = Device::flex();
    let values = random(3, [4, 32], &device);
    let row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let given = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(2.0));
    for scheme in [Fp4Scheme::mxfp4(), row, given] {
        let amax = Tensor::ones([1], &device);
        let error =
            ops::fake_quantize_with_amax(values.clone(), amax, 1, &scheme, Saturated::PassThrough);
        let error = error.unwrap_err();
        assert!(matches!(error, OpsError::Search(_)), "{scheme:?}: {error}");
    }
    let two = Tensor::ones([2], &device);
    let scheme = Fp4Scheme::nvfp4();
    let error = ops::fake_quantize_with_amax(values, two, 1, &scheme, Saturated::PassThrough);
    assert!(matches!(error, Err(OpsError::Shape { .. })));
}

#[test]
fn converted_models_give_the_same_outputs() {
    for (name, device, dtypes) in devices() {
        for &dtype in &dtypes {
            for scheme in schemes() {
                let mut net = Net::new(&device);
                if dtype != DType::F32 {
                    net = cast(net, dtype);
                }
                let x = random(9, [5, 64], &device).cast(dtype);
                let config = Fp4Config::new(scheme).exclude("second.*");
                net.fake_quantize_fp4(&config).unwrap();
                let fake = floats(net.forward(x.clone()));
                let report = net.convert_fp4().unwrap();
                let what = format!("{name} {dtype:?} {scheme:?}");
                assert_bits(&what, &floats(net.forward(x)), &fake);
                assert_eq!(report.quantized().count(), 1, "{what}");
                let second = &report.parameters[2];
                assert_eq!(second.outcome, Outcome::Kept { reason: Reason::NotFakeQuantized });
                assert!(net.first.weight.reparameterization::<PackedWeight>().is_some());
                assert!(net.second.weight.reparameterization::<PackedWeight>().is_none());
            }
        }
    }
}

fn cast(net: Net, dtype: DType) -> Net {
    struct Cast(DType);
    impl burn::module::ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(self.0))
        }
    }
    net.map(&mut Cast(dtype))
}

#[test]
fn a_fake_quantized_model_trains_saves_and_converts() {
    for (name, device, _) in devices() {
        let device = device.autodiff();
        let mut net = Net::new(&device);
        net.fake_quantize_fp4(&Fp4Config::mxfp4()).unwrap();
        assert_eq!(net.num_params(), Net::new(&device).num_params(), "{name}");
        let (x, target) = (random(9, [64, 64], &device), random(10, [64, 32], &device));
        let mut optimizer = AdamConfig::new().init();
        let mut losses = Vec::new();
        for _ in 0..8 {
            let loss = (net.forward(x.clone()) - target.clone()).powf_scalar(2.0).mean();
            losses.push(floats(loss.clone())[0]);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(1e-2, net, gradients);
        }
        assert!(losses[7] < 0.9 * losses[0], "{name}: {losses:?}");

        let valid = net.valid();
        let plain = device.clone().inner();
        let x = x.without_autodiff();
        let expected = floats(valid.forward(x.clone()));
        assert_bits(name, &floats(valid.clone().train().valid().forward(x.clone())), &expected);
        // A record holds the trained weights: it loads into dense and fake-quantized models.
        let record = || ModuleRecord::from_bytes(valid.clone().into_record().into_bytes().unwrap());
        let dense = Net::new(&plain).load_record(record().unwrap());
        assert_bits(name, &floats(dense.first.weight.val()), &floats(valid.first.weight.base()));
        let mut fresh = Net::new(&plain);
        fresh.fake_quantize_fp4(&Fp4Config::mxfp4()).unwrap();
        let mut fresh = fresh.load_record(record().unwrap());
        assert_bits(name, &floats(fresh.forward(x.clone())), &expected);
        let moved = fresh.clone().to_device(&Device::flex());
        let same = floats(moved.first.weight.val());
        assert_bits(name, &same, &floats(fresh.first.weight.val()));
        fresh.convert_fp4().unwrap();
        assert_bits(name, &floats(fresh.forward(x)), &expected);
    }
}

#[test]
fn what_cannot_be_fake_quantized_is_refused_and_changes_nothing() {
    let device = Device::flex();
    let net = Net::new(&device);
    let refused = |config: Fp4Config| {
        let mut net = net.clone();
        let error = net.fake_quantize_fp4(&config).unwrap_err();
        assert!(net.first.weight.reparameterization::<FakeQuantWeight>().is_none());
        error
    };
    let with = |scheme| Fp4Config::new(scheme);
    let drawn = Rounding::Stochastic(Draw::default());
    for config in [
        with(Fp4Scheme::nvfp4().with_search(ScaleSearch::Hessian)),
        with(Fp4Scheme::nvfp4().with_rounding(drawn)),
        Fp4Config::nvfp4().gptq(Gptq::default()),
        Fp4Config::nvfp4().share_scale(["first", "second"]),
        Fp4Config::mxfp4().learn_tensor_scale(),
        with(Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row)).learn_tensor_scale(),
    ] {
        let error = refused(config);
        assert!(matches!(error, Fp4Error::FakeQuantization { .. }), "{error}");
    }
    let mut infinite = net.clone();
    let values = infinite.second.weight.val().slice_fill([0..1, 0..1], f32::INFINITY);
    infinite.second.weight = Param::from_tensor(values);
    let error = infinite.fake_quantize_fp4(&Fp4Config::nvfp4()).unwrap_err();
    assert!(error.to_string().contains("`second.weight`"), "{error}");

    // What has something attached is left alone, and converted only if it is alone.
    let mut mixed = net.clone();
    mixed.quantize_fp4(&Fp4Config::nvfp4().include("first.*")).unwrap();
    let report = mixed.fake_quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let first = &report.parameters[0];
    assert_eq!(first.outcome, Outcome::Kept { reason: Reason::AlreadyQuantized });
    let before = floats(mixed.second.weight.val());
    let error = mixed.convert_fp4().unwrap_err();
    assert!(matches!(&error, Fp4Error::Attached { path, .. } if path == "first.weight"), "{error}");
    assert_bits("unchanged", &floats(mixed.second.weight.val()), &before);
    assert!(matches!(net.clone().convert_fp4(), Err(Fp4Error::NothingFakeQuantized)));

    // A weight that training has driven to infinity is named, and stays.
    let mut diverged = net.clone();
    diverged.fake_quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    struct Diverge;
    impl burn::module::ModuleMapper for Diverge {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor * f32::INFINITY)
        }
    }
    let mut diverged = diverged.map(&mut Diverge);
    let error = diverged.convert_fp4().unwrap_err();
    assert!(error.to_string().contains("`first.weight`"), "{error}");
    assert!(diverged.first.weight.reparameterization::<FakeQuantWeight>().is_some());
}

#[test]
fn activations_are_rounded_by_their_own_or_a_running_amax() {
    for (name, device, _) in devices() {
        let x = random(3, [4, 6, 32], &device);
        let dynamic = FakeQuantizeConfig::new(32).with_range(ActivationRange::Dynamic);
        let dynamic = dynamic.init(&device).unwrap();
        let own = floats(ops::fake_quantize(x.clone(), 2, &Fp4Scheme::nvfp4()).unwrap());
        assert_bits(name, &floats(dynamic.forward(x.clone())), &own);

        let config =
            FakeQuantizeConfig::new(32).with_range(ActivationRange::Static { momentum: 0.25 });
        let training = device.clone().autodiff();
        let quantize = config.init(&training).unwrap();
        // Nothing was seen yet.
        assert_bits(name, &floats(quantize.valid().forward(x.clone())), &own);
        let tracked = Tensor::from_inner(x.clone()).require_grad();
        let y = quantize.forward(tracked.clone());
        assert_bits(name, &floats(y.clone()), &own);
        let gradient = floats(tracked.grad(&y.sum().backward()).unwrap());
        assert_eq!(gradient, vec![1.0; 4 * 6 * 32], "{name}");
        let amax = floats(ops::amax(x.clone()).unwrap())[0];
        quantize.forward(Tensor::from_inner(x.clone() * 3.0));
        let valid = quantize.valid();
        let seen = floats(valid.amax.value())[0];
        assert!((seen - 1.5 * amax).abs() < 1e-5 * amax, "{name}: {seen} {amax}");
        let scheme = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(seen));
        let expected = floats(ops::fake_quantize(x.clone(), 2, &scheme).unwrap());
        assert_bits(name, &floats(valid.forward(x.clone())), &expected);
        // Frozen, or off the autodiff device, it follows nothing.
        let frozen = quantize.clone().freeze();
        frozen.forward(Tensor::from_inner(x.clone() * 9.0));
        assert_eq!(floats(frozen.valid().amax.value())[0], seen, "{name}");
        // It travels with records.
        let record = valid.clone().into_record().into_bytes().unwrap();
        let loaded = config.init(&device).unwrap();
        let loaded = loaded.load_record(ModuleRecord::from_bytes(record).unwrap());
        assert_bits(name, &floats(loaded.forward(x.clone())), &expected);
        // MXFP4 has no tensor scale to follow.
        let mx = config.clone().with_scheme(Fp4Scheme::mxfp4()).init(&device).unwrap();
        let expected = floats(ops::fake_quantize(x.clone(), 2, &Fp4Scheme::mxfp4()).unwrap());
        assert_bits(name, &floats(mx.forward(x)), &expected);
    }
    let device = Device::flex();
    assert!(FakeQuantizeConfig::new(24).init(&device).is_err());
    let momentum = ActivationRange::Static { momentum: 0.0 };
    assert!(FakeQuantizeConfig::new(32).with_range(momentum).init(&device).is_err());
}

/// A matrix in f64, for products that do not depend on an order of terms.
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

    /// Zeros below, up to a multiple.
    fn padded(&self, multiple: usize) -> Self {
        let rows = self.rows.next_multiple_of(multiple);
        let mut values = self.values.clone();
        values.resize(rows * self.cols, 0.0);
        Self { rows, cols: self.cols, values }
    }

    /// Quantized down its columns by the oracle: what it stands for.
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

/// What f32 products may differ by, in units of the largest.
const ROUNDING: f64 = 2e-6;

/// The same on CUDA, where Burn rounds factors to 11 bits; those that are quantized are shorter.
const ROUNDING_OF_FACTORS: f64 = 1e-3;

fn assert_near(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (&expected, &found)) in expected.iter().zip(found).enumerate() {
        let near = f64::from(expected - found).abs() <= tolerance * f64::from(scale);
        assert!(near, "{what}, element {at}: {found}, not {expected} (of {scale})");
    }
}

/// Forward, and both gradients, against products of what the oracle quantizes.
#[test]
fn products_multiply_the_values_that_the_recipe_names() {
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
fn train_linear_is_a_linear_with_records_of_one() {
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

        // Every step draws anew, and a seed and a step tell what.
        let layer = Fp4TrainLinear::new(linear.clone(), TrainRecipe::NVFP4, 5).unwrap();
        let again = Fp4TrainLinear::new(linear.clone(), TrainRecipe::NVFP4, 5).unwrap();
        let (first, second) =
            (gradient(layer.forward(x.clone())), gradient(layer.forward(x.clone())));
        assert_ne!(first, second, "{name}");
        assert_eq!(gradient(again.forward(x.clone())), first, "{name}");
        again.set_step(layer.step());
        assert_eq!(gradient(again.forward(x.clone())), gradient(layer.forward(x.clone())));
        assert_eq!(layer.step(), 3);
        layer.valid().forward(x.clone().without_autodiff());
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
    let hessian = Fp4Scheme::nvfp4().with_search(ScaleSearch::Hessian);
    assert!(refused(with(hessian)).contains("activations"));
    let drawn = Fp4Scheme::nvfp4().with_rounding(Rounding::Stochastic(Draw::default()));
    assert!(refused(with(drawn)).contains("stochastic_rounding"));
    refused(with(Fp4Scheme::nvfp4().with_block_size(24)));
    let sse = Fp4Scheme::of(ScaleRule::Te).with_search(ScaleSearch::Sse);
    refused(TrainRecipe { gradients: Some(sse), ..TrainRecipe::NVFP4 });

    let narrow = random(2, [16, 16], &device);
    let error = ops::train_product(x.clone(), narrow, &TrainRecipe::NVFP4, Draw::default());
    assert!(matches!(error, Err(OpsError::Contraction { .. })));
    let half = w.clone().cast(DType::F16);
    let error = ops::train_product(x, half, &TrainRecipe::NVFP4, Draw::default());
    assert!(matches!(error, Err(OpsError::Operands { .. })));
}
