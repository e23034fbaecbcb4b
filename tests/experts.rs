//! Weights of rank 3: a mixture of experts, calibrated and quantized expert by expert.

use std::sync::LazyLock;

use burn::module::{Module, Param};
use burn::tensor::{Bool, Device, Tensor, s};
use burn_fp4::{
    Calibration, CalibrationOptions, Fallback, Fp4Config, Fp4Error, Fp4Module, Fp4Report,
    Fp4Scheme, Gptq, Method, Outcome, PackedWeight, TensorScaling, Unused, ops,
};
use burn_fp4_search::Gram;
use tests::engines::devices;
use tests::experts::{Digits, EXPERTS, Mixture, PIXELS};
use tests::tensors::{floats, random};

const UP: &str = "experts.up";
const DOWN: &str = "experts.down";

/// Quantizes the experts with GPTQ. The router stays dense: images keep their experts.
fn by_gptq() -> Fp4Config {
    by(Method::Amax).method(Method::GPTQ)
}

fn by(search: Method) -> Fp4Config {
    Fp4Config::new(Fp4Scheme::nvfp4().with_method(search))
        .without_container("Linear")
        .container("Experts", 1)
}

fn forward(model: &Mixture, images: Tensor<2>) -> Tensor<2> {
    model.forward(images)
}

/// Returns the training images in four batches.
fn batches(digits: &Digits, device: &Device) -> Vec<Tensor<2>> {
    digits.images(device).chunk(4, 0)
}

/// Returns a trained mixture; all tests share it.
fn trained(device: &Device) -> Mixture {
    static TRAINED: LazyLock<Mixture> = LazyLock::new(|| {
        let (train, _) = Digits::train_and_test();
        Mixture::new(&Device::flex().autodiff()).train_on(&train, 20).valid()
    });
    TRAINED.clone().to_device(device)
}

/// Returns a mixture that never routes an image to `expert`.
fn without(expert: usize, mut model: Mixture) -> Mixture {
    let bias = model.router.bias.take().expect("a router with a bias");
    model.router.bias = Some(bias.map(|bias| bias.slice_fill(s![expert..expert + 1], -1e9f32)));
    model
}

/// Computes the relative error of the logits.
fn output_error(found: &Mixture, exact: &Mixture, images: &Tensor<2>) -> f64 {
    let sum = |values: Tensor<2>| values.powf_scalar(2.0).sum().into_scalar::<f64>();
    let expected = exact.forward(images.clone());
    let error = sum(found.forward(images.clone()) - expected.clone());
    (error / sum(expected)).sqrt()
}

fn outcome<'a>(
    report: &'a Fp4Report,
    path: &str,
) -> (&'a Method, &'a Method, Option<&'a Fallback>) {
    let parameter = report.parameters.iter().find(|parameter| parameter.path == path);
    match &parameter.unwrap_or_else(|| panic!("no `{path}` in {report}")).outcome {
        Outcome::Quantized { asked, scheme, fallback, .. } => {
            (asked, &scheme.method, fallback.as_ref())
        }
        other => panic!("`{path}`: {other:?}"),
    }
}

/// Returns the images of an expert, with zeros for the others.
fn seen_by(expert: usize, routes: &Tensor<2, Bool>, images: &Tensor<2>) -> Tensor<2> {
    let [rows, _] = images.dims();
    images.clone() * routes.clone().slice([0..rows, expert..expert + 1]).float()
}

#[test]
fn outputs_of_experts_are_nearer_by_gptq_than_by_sse() {
    let device = Device::flex();
    let (train, test) = Digits::train_and_test();
    let dense = trained(&device);
    let accuracy = dense.accuracy(&test, &device);
    assert!(accuracy > 0.85, "the premise: {accuracy}");
    let images = test.images(&device);

    let mut sse = dense.clone();
    let report = sse.quantize_fp4(&by(Method::SSE)).unwrap();
    assert_eq!(report.quantized().count(), 2);

    let calibration = Calibration::of(&dense).run(batches(&train, &device), forward).unwrap();
    let mut gptq = dense.clone();
    gptq.quantize_fp4(&by_gptq().with_calibration(&calibration)).unwrap();

    let mut in_turn = dense.clone();
    let options = CalibrationOptions::default();
    let batches = batches(&train, &device);
    in_turn.quantize_fp4_sequential(&by_gptq(), options, batches, forward).unwrap();

    let [by_sse, by_gptq, sequential] =
        [&sse, &gptq, &in_turn].map(|model| output_error(model, &dense, &images));
    println!("output error: sse {by_sse:.4}, gptq {by_gptq:.4}, sequential {sequential:.4}");
    assert!(by_gptq < by_sse, "{by_gptq} by GPTQ, {by_sse} by SSE");
    assert!(sequential < by_sse, "{sequential} by GPTQ in turn, {by_sse} by SSE");
    assert!(gptq.accuracy(&test, &device) > accuracy - 0.03);
}

#[test]
fn each_expert_has_the_statistics_of_its_own_inputs() {
    let (train, _) = Digits::train_and_test();
    for (name, device, _) in devices() {
        let model = trained(&device);
        let batches: Vec<_> = batches(&train, &device).into_iter().take(2).collect();
        let calibration = Calibration::of(&model).run(batches.clone(), forward).unwrap();
        assert_eq!(calibration.slices(UP, 1), EXPERTS, "{name}");
        assert_eq!(calibration.slices(DOWN, 1), EXPERTS, "{name}");
        let mut tokens = 0;
        for expert in 0..EXPERTS {
            let mut expected = Gram::new(PIXELS);
            let mut seen = 0;
            for images in &batches {
                let routes = model.routes(images.clone());
                expected.add(&floats(seen_by(expert, &routes, images))).unwrap();
                let column = routes.slice([0..images.dims()[0], expert..expert + 1]);
                seen += floats(column.float()).into_iter().sum::<f32>() as usize;
            }
            let found = calibration.get_slice(UP, 1, expert).expect("calibrated");
            let size: f64 = expected.diagonal().fold(0.0, f64::max);
            for (found, expected) in found.values().iter().zip(expected.values()) {
                let near = (found - expected).abs() <= 1e-5 * size;
                assert!(near, "{name}, expert {expert}: {found}, not {expected}");
            }
            assert_eq!(calibration.tokens(UP, 1, expert), seen, "{name}, expert {expert}");
            tokens += seen;
        }
        let images: usize = batches.iter().map(|images| images.dims()[0]).sum();
        assert_eq!(tokens, 2 * images, "{name}: two experts an image");
    }
}

#[test]
fn each_expert_is_quantized_by_its_own_statistics() {
    let (train, _) = Digits::train_and_test();
    for (name, device, _) in devices() {
        let dense = trained(&device);
        let calibration = Calibration::of(&dense).run(batches(&train, &device), forward).unwrap();
        let mut model = dense.clone();
        let report = model.quantize_fp4(&by_gptq().with_calibration(&calibration)).unwrap();
        let gptq = Gptq::default();
        for path in [UP, DOWN] {
            let (asked, method, fallback) = outcome(&report, path);
            assert_eq!([asked, method], [&Method::Gptq(gptq); 2], "{name} {path}");
            assert_eq!(fallback, None, "{name} {path}");
        }
        let weights = [
            (UP, &model.experts.up, &dense.experts.up),
            (DOWN, &model.experts.down, &dense.experts.down),
        ];
        for (path, packed, dense) in weights {
            // The experts share a tensor scale.
            let amax = ops::amax(dense.val()).unwrap().into_scalar::<f32>();
            let scheme = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(amax));
            let [_, inputs, outputs] = dense.val().dims();
            for expert in 0..EXPERTS {
                let of_expert = [expert..expert + 1, 0..inputs, 0..outputs];
                let slice = |values: Tensor<3>| values.slice(of_expert.clone()).squeeze_dim::<2>(0);
                let gram = calibration.get_slice(path, 1, expert).expect("calibrated");
                let alone =
                    ops::quantize_gptq(slice(dense.val()), 0, &scheme, &gptq, gram).unwrap();
                let found = floats(slice(packed.val()));
                assert_eq!(found, floats(alone.dequantize()), "{name} {path}, expert {expert}");
            }
        }
    }
}

/// Experts with two layers that share their inputs.
#[derive(Module, Debug)]
struct Gated {
    gate: Param<Tensor<3>>,
    up: Param<Tensor<3>>,
}

impl Gated {
    fn layers(&self) -> [(&'static str, &Param<Tensor<3>>); 2] {
        [("gate", &self.gate), ("up", &self.up)]
    }
}

#[test]
fn experts_with_the_same_inputs_get_the_codes_they_get_alone() {
    const IDLE: usize = 1;
    let gptq = Gptq::default();
    for (name, device, _) in devices() {
        let weight = |seed, outputs| Param::from_tensor(random(seed, [3, 32, outputs], &device));
        let dense = Gated { gate: weight(1, 24), up: weight(2, 7) };
        // Errors of an expert without inputs cost nothing.
        let seen = Tensor::<3>::from_floats([[[1.0]], [[0.0]], [[1.0]]], &device);
        let batch = random(3, [3, 100, 32], &device) * seen;
        let run = |model: &Gated, x: Tensor<3>| {
            (x.clone().matmul(model.gate.val()), x.matmul(model.up.val()))
        };
        let calibration = Calibration::of(&dense).run([batch], run).unwrap();
        let mut model = dense.clone();
        let config = Fp4Config::nvfp4().method(Method::Gptq(gptq)).container("Gated", 1);
        let config = config.unused(Unused::Report).with_calibration(&calibration);
        let report = model.quantize_fp4(&config).unwrap();
        let layers = dense.layers().into_iter().zip(model.layers());
        for ((path, dense), (_, packed)) in layers {
            let (_, method, fallback) = outcome(&report, path);
            assert_eq!(*method, Method::Gptq(gptq), "{name} {path}");
            let idle = Fallback::Slices { without_inputs: vec![IDLE] };
            assert_eq!(fallback, Some(&idle), "{name} {path}");
            let amax = ops::amax(dense.val()).unwrap().into_scalar::<f32>();
            let scheme = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(amax));
            for expert in 0..3 {
                let slice = |values: Tensor<3>| values.narrow(0, expert, 1).squeeze_dim::<2>(0);
                let matrix = slice(dense.val());
                let alone = match calibration.get_slice(path, 1, expert) {
                    Some(gram) if expert != IDLE => {
                        ops::quantize_gptq(matrix, 0, &scheme, &gptq, gram)
                    }
                    _ => ops::quantize(matrix, 0, &scheme.with_method(Method::SSE)),
                };
                let found = floats(slice(packed.val()));
                let expected = floats(alone.unwrap().dequantize());
                assert_eq!(found, expected, "{name} {path}, expert {expert}");
            }
        }
    }
}

#[test]
#[ignore = "slow"]
fn an_expert_without_tokens_falls_back_and_the_report_says_which() {
    const IDLE: usize = 3;
    let (train, _) = Digits::train_and_test();
    for (name, device, _) in devices() {
        let dense = without(IDLE, trained(&device));
        let calibration = Calibration::of(&dense).run(batches(&train, &device), forward).unwrap();
        for expert in 0..EXPERTS {
            let idle = calibration.tokens(UP, 1, expert) == 0;
            assert_eq!(idle, expert == IDLE, "{name}, expert {expert}");
        }
        let idle = Fallback::Slices { without_inputs: vec![IDLE] };

        let mut model = dense.clone();
        let report = model.quantize_fp4(&by_gptq().with_calibration(&calibration)).unwrap();
        for path in [UP, DOWN] {
            let (asked, _, fallback) = outcome(&report, path);
            assert_eq!(*asked, Method::Gptq(Gptq::default()), "{name} {path}");
            assert_eq!(fallback, Some(&idle), "{name} {path}");
        }
        // It is quantized as a weight of which nothing but its values is known.
        let amax = ops::amax(dense.experts.up.val()).unwrap().into_scalar::<f32>();
        let scheme = Fp4Scheme::nvfp4()
            .with_method(Method::SSE)
            .with_tensor_scale(TensorScaling::Amax(amax));
        let slice = |values: Tensor<3>| {
            let [_, inputs, outputs] = values.dims();
            values.slice([IDLE..IDLE + 1, 0..inputs, 0..outputs]).squeeze_dim::<2>(0)
        };
        let expected = ops::quantize(slice(dense.experts.up.val()), 0, &scheme).unwrap();
        let found = floats(slice(model.experts.up.val()));
        assert_eq!(found, floats(expected.dequantize()), "{name}");

        let mut in_turn = dense.clone();
        let options = CalibrationOptions::default();
        let batches = batches(&train, &device);
        let report =
            in_turn.quantize_fp4_sequential(&by_gptq(), options, batches, forward).unwrap();
        for path in [UP, DOWN] {
            assert_eq!(outcome(&report, path).2, Some(&idle), "{name} {path}, sequential");
        }
    }
}

#[test]
fn experts_are_quantized_sequentially() {
    let (train, _) = Digits::train_and_test();
    for (name, device, _) in devices() {
        let dense = trained(&device);
        let calibration = Calibration::of(&dense).run(batches(&train, &device), forward).unwrap();
        for config in [by_gptq(), by(Method::Hessian), by(Method::CoordinateDescent)] {
            let mut at_once = dense.clone();
            at_once.quantize_fp4(&config.with_calibration(&calibration)).unwrap();
            let mut in_turn = dense.clone();
            let options = CalibrationOptions::default();
            let batches = batches(&train, &device);
            let report =
                in_turn.quantize_fp4_sequential(&config, options, batches, forward).unwrap();
            assert_eq!(report.quantized().count(), 2, "{name}");
            // Nothing is quantized before the first layer; before the second the first is.
            let values = |model: &Mixture| {
                (floats(model.experts.up.val()), floats(model.experts.down.val()))
            };
            let (found, expected) = (values(&in_turn), values(&at_once));
            assert_eq!(found.0, expected.0, "{name}");
            if config.scheme.method.gptq().is_some() {
                assert_ne!(found.1, expected.1, "{name}");
            }
        }
    }
}

#[test]
fn a_container_axis_that_a_weight_does_not_have_is_an_error_that_names_it() {
    let (train, _) = Digits::train_and_test();
    let device = Device::flex();
    let dense = Mixture::new(&device);
    let config = by(Method::Amax).container("Experts", 3);
    let mut model = dense.clone();
    let at_once = model.quantize_fp4(&config).unwrap_err();
    let options = CalibrationOptions::default();
    let batches = batches(&train, &device);
    let config = by_gptq().container("Experts", 3);
    let in_turn = model.quantize_fp4_sequential(&config, options, batches, forward).unwrap_err();
    for error in [at_once, in_turn] {
        let named = matches!(
            &error,
            Fp4Error::Axis { path, axis: 3, rank: 3, .. } if path == UP
        );
        assert!(named, "{error:?}");
    }
    assert!(model.experts.up.reparameterization::<PackedWeight>().is_none());
    assert_eq!(floats(model.experts.up.val()), floats(dense.experts.up.val()));
}

#[test]
fn statistics_of_inputs_are_of_no_use_to_blocks_along_outputs() {
    let device = Device::flex();
    let (train, _) = Digits::train_and_test();
    let dense = Mixture::new(&device);
    let calibration = Calibration::of(&dense).run(batches(&train, &device), forward).unwrap();
    let config = by_gptq().container("Experts", 2).include(UP).unused(Unused::Report);
    let config = config.with_calibration(&calibration);
    let error = dense.clone().quantize_fp4(&config).unwrap_err();
    assert!(
        matches!(&error, Fp4Error::Uncalibrated { paths, .. } if paths[..] == [UP.to_owned()]),
        "{error:?}"
    );
}

#[test]
fn statistics_of_slices_can_be_provided() {
    let device = Device::flex();
    let dense = Mixture::new(&device);
    let mut calibration = Calibration::new();
    for expert in 0..EXPERTS {
        let inputs = floats(random(expert as u64, [200, PIXELS], &device));
        calibration.insert_slice(UP, 1, expert, Gram::of(&inputs, PIXELS).unwrap());
    }
    assert_eq!(calibration.iter().count(), EXPERTS);
    assert_eq!(calibration.tokens(UP, 1, 0), 200);
    let config = by_gptq().include(UP).with_calibration(&calibration);
    let report = dense.clone().quantize_fp4(&config).unwrap();
    assert_eq!(*outcome(&report, UP).1, Method::Gptq(Gptq::default()));

    // A slice that the weight does not have.
    let inputs = floats(random(9, [200, PIXELS], &device));
    calibration.insert_slice(UP, 1, EXPERTS, Gram::of(&inputs, PIXELS).unwrap());
    let config = by_gptq().include(UP).with_calibration(&calibration);
    let error = dense.clone().quantize_fp4(&config).unwrap_err();
    assert!(
        matches!(&error, Fp4Error::Calibration { path, slice: EXPERTS, .. } if path == UP),
        "{error:?}"
    );
}

#[test]
fn records_hold_packed_experts() {
    for (name, device, _) in devices() {
        let mut model = Mixture::new(&device);
        model.quantize_fp4(&by(Method::Amax)).unwrap();
        let expected = floats(model.experts.down.val());
        let mut fresh = Mixture::new(&device);
        fresh.load_fp4_record(model.into_record()).unwrap();
        assert_eq!(floats(fresh.experts.down.val()), expected, "{name}");
    }
}
