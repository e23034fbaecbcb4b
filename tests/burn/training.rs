//! Fake quantization: modules trained as if they were quantized.

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fp4::{
    ActivationRange, Blocks, Calibration, Draw, E4m3Range, ErrorMetric, FakeQuantWeight,
    FakeQuantizeConfig, Fp4Config, Fp4Error, Fp4Module, Fp4Scheme, KeepReason, Method, OpsError,
    Outcome, PackedWeight, Rounding, Saturated, TensorScaling, ops,
};
use burn_fp4_formats::{Packed, TensorScale};
use burn_fp4_search::quantize_with_amax;
use tests::compare::{ROUNDING_OF_FACTORS, assert_bits, assert_near};
use tests::engines::devices;
use tests::inputs::{Kind, normals};
use tests::modules::{Net, seeded, unwrapped};
use tests::tensors::{floats, random};

fn two_layers(device: &Device) -> Net {
    Net::new([64, 96, 32], device)
}

fn schemes() -> Vec<Fp4Scheme> {
    let search = Method::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
    vec![
        Fp4Scheme::nvfp4(),
        Fp4Scheme::mxfp4(),
        Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16),
        Fp4Scheme::nvfp4().with_method(search),
        Fp4Scheme::nvfp4().with_method(Method::SSE),
        Fp4Scheme::mxfp4().with_method(Method::SSE),
        Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row),
        Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(0.7)),
    ]
}

/// Computes the gradients of a loss with respect to the input and both weights.
fn gradients(net: &Net, x: &Tensor<2>) -> Vec<Vec<f32>> {
    let x = x.clone().require_grad();
    let gradients = net.forward(x.clone()).powf_scalar(2.0).sum().backward();
    let of = |weight: &Param<Tensor<2>>| floats(weight.base().grad(&gradients).unwrap());
    let bias = net.first.bias.as_ref().unwrap().base().grad(&gradients).unwrap();
    let x = floats(x.grad(&gradients).unwrap());
    vec![x, of(&net.first.weight), of(&net.second.weight), floats(bias)]
}

#[test]
fn gradients_equal_those_of_the_dense_model_at_the_rounded_weights() {
    for (name, device, _) in devices() {
        for device in [device.clone().autodiff(), device.autodiff().gradient_checkpointing()] {
            let dense = two_layers(&device);
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
                    if ["cuda", "wgpu"].contains(&name) {
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
fn saturated_values_can_be_given_no_gradient() {
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

/// The gradient of a learned tensor scale, against finite differences with fixed codes, block
/// scales and relative rounding errors.
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
fn a_learned_scale_is_trained_recorded_and_converted() {
    let device = Device::flex().autodiff();
    let mut linear = seeded(LinearConfig::new(64, 64).with_bias(false).init(&device), 5);
    let config = Fp4Config::nvfp4().learn_tensor_scale();
    let report = linear.fake_quantize_fp4(&config).unwrap();
    assert!(unwrapped(&report).contains("tensor scale learned"), "{report}");
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

/// Burn gives the gradient of a tied parameter to its first place.
#[test]
fn tied_weights_learn_one_scale_and_convert_with_it() {
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
fn packed_records_do_not_load_over_another_attachment() {
    let device = Device::flex();
    let net = two_layers(&device);
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
fn a_tensor_amax_needs_a_scheme_with_one_tensor_scale() {
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
                let mut net = two_layers(&device);
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
                assert_eq!(second.outcome, Outcome::Kept { reason: KeepReason::NotFakeQuantized });
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
        let mut net = two_layers(&device);
        net.fake_quantize_fp4(&Fp4Config::mxfp4()).unwrap();
        assert_eq!(net.num_params(), two_layers(&device).num_params(), "{name}");
        let (x, target) = (random(9, [5, 64], &device), random(10, [5, 32], &device));
        let mut optimizer = AdamConfig::new().init();
        let mut losses = Vec::new();
        // A step takes seconds on CubeCL's CPU runtime.
        for _ in 0..4 {
            let loss = (net.forward(x.clone()) - target.clone()).powf_scalar(2.0).mean();
            losses.push(floats(loss.clone())[0]);
            let gradients = GradientsParams::from_grads(loss.backward(), &net);
            net = optimizer.step(1e-2, net, gradients);
        }
        assert!(losses[3] < 0.95 * losses[0], "{name}: {losses:?}");

        let valid = net.valid();
        let plain = device.clone().inner();
        let x = x.without_autodiff();
        let expected = floats(valid.forward(x.clone()));
        assert_bits(name, &floats(valid.clone().train().valid().forward(x.clone())), &expected);
        // A record holds the trained weights: it loads into dense and fake-quantized models.
        let record = || ModuleRecord::from_bytes(valid.clone().into_record().into_bytes().unwrap());
        let dense = two_layers(&plain).load_record(record().unwrap());
        assert_bits(name, &floats(dense.first.weight.val()), &floats(valid.first.weight.base()));
        let mut fresh = two_layers(&plain);
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
fn a_failed_fake_quantization_changes_nothing() {
    let device = Device::flex();
    let net = two_layers(&device);
    let refused = |config: Fp4Config| {
        let mut net = net.clone();
        let error = net.fake_quantize_fp4(&config).unwrap_err();
        assert!(net.first.weight.reparameterization::<FakeQuantWeight>().is_none());
        error
    };
    let with = |scheme| Fp4Config::new(scheme);
    let drawn = Rounding::Stochastic(Draw::default());
    let mut calibration = Calibration::new();
    calibration.add("first.weight", 0, random(1, [4, 64], &device)).unwrap();
    for config in [
        with(Fp4Scheme::nvfp4().with_method(Method::Hessian)),
        with(Fp4Scheme::nvfp4().with_rounding(drawn)),
        Fp4Config::nvfp4().method(Method::GPTQ),
        Fp4Config::nvfp4().share_scale(["first", "second"]),
        Fp4Config::nvfp4().with_calibration(&calibration),
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

    // A packed weight is left alone; a model that has one is converted only part by part.
    let mut mixed = net.clone();
    mixed.quantize_fp4(&Fp4Config::nvfp4().include("first.*")).unwrap();
    let report = mixed.fake_quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let first = &report.parameters[0];
    assert_eq!(first.outcome, Outcome::Kept { reason: KeepReason::AlreadyQuantized });
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
fn activations_are_rounded_with_their_own_or_a_running_amax() {
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
        // Before the first input.
        assert_bits(name, &floats(quantize.valid().forward(x.clone())), &own);
        let tracked = Tensor::from_inner(x.clone()).require_grad();
        let y = quantize.forward(tracked.clone());
        assert_bits(name, &floats(y.clone()), &own);
        let gradient = floats(tracked.grad(&y.sum().backward()).unwrap());
        assert_eq!(gradient, vec![1.0; 4 * 6 * 32], "{name}");
        let amax = floats(ops::amax(x.clone()).unwrap())[0];
        let _ = quantize.forward(Tensor::from_inner(x.clone() * 3.0));
        let valid = quantize.valid();
        let seen = floats(valid.amax.value())[0];
        assert!((seen - 1.5 * amax).abs() < 1e-5 * amax, "{name}: {seen} {amax}");
        let scheme = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(seen));
        let expected = floats(ops::fake_quantize(x.clone(), 2, &scheme).unwrap());
        assert_bits(name, &floats(valid.forward(x.clone())), &expected);
        // Frozen, or off the autodiff device, the amax does not change.
        let frozen = quantize.clone().freeze();
        let _ = frozen.forward(Tensor::from_inner(x.clone() * 9.0));
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
    for method in Method::NAMED.map(|row| row.method) {
        let scheme = Fp4Scheme::nvfp4().with_method(method);
        let round = FakeQuantizeConfig::new(32).with_scheme(scheme).init(&device);
        assert_eq!(round.is_ok(), method.is_blockwise(), "{method}");
    }
    let momentum = ActivationRange::Static { momentum: 0.0 };
    assert!(FakeQuantizeConfig::new(32).with_range(momentum).init(&device).is_err());
}
