//! Behaviour of quantized modules as Burn modules, and the truth of reports and errors.

use std::error::Error;

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fp4::ops::{self, MatmulPath};
use burn_fp4::{
    Calibration, CalibrationOptions, Fallback, Fp4Config, Fp4Embedding, Fp4Error, Fp4Linear,
    Fp4Module, Fp4Report, Fp4Scheme, Fp4TrainLinear, Gptq, Method, OpsError, Outcome, PackedWeight,
    Unused,
};
use tests::compare::assert_near;
use tests::engines::devices;
use tests::modules::{Net, seeded, unwrapped};
use tests::tensors::{floats, random, sums};

fn two_layers(device: &Device) -> Net {
    Net::new([32, 48, 16], device)
}

fn is_packed(linear: &Linear) -> bool {
    linear.weight.reparameterization::<PackedWeight>().is_some()
}

fn weights(net: &Net) -> [Vec<f32>; 2] {
    [&net.first, &net.second].map(|linear| floats(linear.weight.val()))
}

fn outcome<'a>(report: &'a Fp4Report, path: &str) -> &'a Outcome {
    let parameter = report.parameters.iter().find(|parameter| parameter.path == path);
    &parameter.unwrap_or_else(|| panic!("no `{path}` in {report}")).outcome
}

fn products<'a>(report: &'a Fp4Report, path: &str) -> &'a MatmulPath {
    match outcome(report, path) {
        Outcome::Quantized { products, .. } | Outcome::Provided { products, .. } => products,
        other => panic!("`{path}`: {other:?}"),
    }
}

/// Runs one step of Adam against random targets.
fn step(net: Net) -> Net {
    let device = net.first.weight.val().device();
    let (x, target) = (random(5, [16, 32], &device), random(6, [16, 16], &device));
    let loss = (net.forward(x) - target).powf_scalar(2.0).mean();
    let gradients = GradientsParams::from_grads(loss.backward(), &net);
    AdamConfig::new().init().step(1e-2, net, gradients)
}

// Dense again.

#[test]
fn a_materialized_module_trains_the_parameters_trained_before() {
    let mut net = two_layers(&Device::flex().autodiff());
    net.second = net.second.no_grad();
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let net = net.materialize();
    assert!(!is_packed(&net.first) && !is_packed(&net.second));
    assert!(net.first.weight.val().is_require_grad());
    assert!(!net.second.weight.val().is_require_grad(), "it was frozen before");
    let before = weights(&net);
    let after = weights(&step(net));
    assert_ne!(after[0], before[0]);
    assert_eq!(after[1], before[1]);
}

#[test]
fn a_module_quantized_without_autodiff_trains_once_materialized() {
    let mut net = two_layers(&Device::flex().autodiff()).valid();
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let net = net.materialize().train();
    assert!(net.first.weight.val().is_require_grad());
    let before = weights(&net);
    assert_ne!(weights(&step(net)), before);
}

#[test]
fn a_square_column_layout_saves_and_loads_as_before_once_materialized() {
    for (name, device, _) in devices() {
        let config = LinearConfig::new(32, 32).with_bias(false).with_layout(LinearLayout::Col);
        let mut linear = seeded(config.init(&device), 3);
        linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let dense = linear.materialize();
        let expected = floats(dense.weight.val());
        let loaded = config.init(&device).load_record(dense.clone().into_record());
        assert_eq!(floats(loaded.weight.val()), expected, "{name}: saved");

        let other = seeded(config.init(&device), 4);
        let expected = floats(other.weight.val());
        let loaded = dense.load_record(other.into_record());
        assert_eq!(floats(loaded.weight.val()), expected, "{name}: loaded");
    }
}

#[test]
fn a_weight_of_zeros_survives_materialization() {
    for (name, device, _) in devices() {
        let config = LinearConfig::new(32, 16).with_bias(false);
        let mut linear = config.init(&device);
        linear.weight = linear.weight.map(|weight| weight.zeros_like());
        linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let dense = linear.materialize();
        let loaded = config.init(&device).try_load_record(dense.into_record());
        let loaded = loaded.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(loaded.weight.val().dims(), [32, 16], "{name}");
        assert_eq!(floats(loaded.weight.val()), [0.0; 512], "{name}");
    }
}

// A failure changes nothing.

#[test]
fn a_failed_quantization_leaves_the_module_as_it_was_or_names_what_is_packed() {
    for (name, device, _) in devices() {
        let dense = two_layers(&device.clone().autodiff());
        let expected = weights(&dense);
        let mut calibration = Calibration::new();
        calibration.add("first.weight", 0, random(7, [96, 32], &device)).unwrap();
        // All channels are equal: without damping the matrix is singular.
        calibration.add("second.weight", 0, Tensor::<2>::ones([4, 48], &device)).unwrap();
        let gptq = |damping| {
            let options = Gptq { damping, ..Gptq::default() };
            Fp4Config::nvfp4().method(Method::Gptq(options)).with_calibration(&calibration)
        };
        let mut net = dense.clone();
        let packed = match net.quantize_fp4(&gptq(0.0)).unwrap_err() {
            Fp4Error::Partial { packed, problem } => {
                assert!(problem.to_string().contains("second.weight"), "{name}: {problem}");
                packed
            }
            error => {
                assert!(error.to_string().contains("second.weight"), "{name}: {error}");
                Vec::new()
            }
        };
        for (path, linear, expected) in [
            ("first.weight", &net.first, &expected[0]),
            ("second.weight", &net.second, &expected[1]),
        ] {
            assert_eq!(is_packed(linear), packed.iter().any(|packed| packed == path), "{name}");
            if !is_packed(linear) {
                assert_eq!(floats(linear.weight.val()), *expected, "{name} {path}");
                assert!(linear.weight.val().is_require_grad(), "{name} {path}");
            }
        }
        // The rest can still be quantized.
        let report = net.quantize_fp4(&gptq(0.01)).unwrap();
        assert_eq!(report.quantized().count(), 2 - packed.len(), "{name}");

        let mut broken = dense.clone();
        broken.second.weight = broken
            .second
            .weight
            .map(|weight| weight.slice_fill([0..1, 0..1], f32::NAN).detach().require_grad());
        broken.quantize_fp4(&Fp4Config::nvfp4()).unwrap_err();
        assert!(!is_packed(&broken.first), "{name}");
        assert_eq!(weights(&broken)[0], expected[0], "{name}");
        assert!(broken.first.weight.val().is_require_grad(), "{name}");
    }
}

#[test]
fn a_failed_sequential_quantization_leaves_the_module_as_it_was() {
    let device = Device::flex();
    let mut net = two_layers(&device);
    let expected = weights(&net);
    let undamped = Gptq { damping: 0.0, ..Gptq::default() };
    let config = Fp4Config::nvfp4().method(Method::Gptq(undamped));
    let options = CalibrationOptions::default();
    let batches = [Tensor::<2>::ones([4, 32], &device)];
    let run = |net: &Net, x| net.forward(x);
    let error = net.quantize_fp4_sequential(&config, options, batches, run).unwrap_err();
    assert!(error.to_string().contains("first.weight"), "{error}");
    assert!(!is_packed(&net.first) && !is_packed(&net.second));
    assert_eq!(weights(&net), expected);
}

// Codes from elsewhere, and schemes path by path.

#[test]
fn provided_codes_are_attached_by_path() {
    for (name, device, _) in devices() {
        let dense = two_layers(&device);
        let mut net = dense.clone();
        let mut asked = Vec::new();
        let report = net
            .pack_fp4(|weight| {
                asked.push((weight.path().to_owned(), weight.shape().to_vec()));
                assert_eq!(weight.container(), "Linear");
                assert_eq!(weight.device(), device);
                if weight.path() != "second.weight" {
                    return Ok(None);
                }
                assert!(weight.tensor::<3>().is_none());
                let values = weight.tensor::<2>().expect("a matrix");
                let packed = ops::quantize(values, 0, &Fp4Scheme::nvfp4())?;
                Ok(Some(packed.into()))
            })
            .unwrap();
        assert!(asked.contains(&("first.weight".to_owned(), vec![32, 48])), "{name}: {asked:?}");
        assert!(!is_packed(&net.first), "{name}");
        let expected = ops::quantize(dense.second.weight.val(), 0, &Fp4Scheme::nvfp4()).unwrap();
        assert_eq!(floats(net.second.weight.val()), floats(expected.dequantize()), "{name}");
        let sums = sums(expected.squared_error(dense.second.weight.val()).unwrap());
        let Outcome::Provided { format, block_size, axis, weight_error, .. } =
            outcome(&report, "second.weight")
        else {
            panic!("{report}")
        };
        assert_eq!((*format, *block_size, *axis), (expected.format(), 16, 0), "{name}");
        let found = weight_error.expect("the values were read");
        let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-5 * expected;
        assert!(near(found.error, sums[0]) && near(found.energy, sums[1]), "{name}: {report}");
        assert_eq!(report.quantized().count(), 1, "{name}");
        assert!(matches!(outcome(&report, "first.weight"), Outcome::Kept { .. }), "{name}");
        // They travel as any other.
        let mut fresh = two_layers(&device);
        fresh.load_fp4_record(net.clone().into_record()).unwrap();
        assert_eq!(weights(&fresh), weights(&net), "{name}");
    }
}

#[test]
fn provided_codes_of_another_shape_are_an_error_that_changes_nothing() {
    let device = Device::flex();
    let mut net = two_layers(&device);
    let expected = weights(&net);
    let error = net
        .pack_fp4(|weight| {
            // Codes of the first weight fit; codes of the second are transposed.
            let packed = match (weight.path(), weight.tensor::<2>()) {
                ("first.weight", Some(values)) => ops::quantize(values, 0, &Fp4Scheme::nvfp4())?,
                ("second.weight", Some(values)) => {
                    ops::quantize(values.transpose(), 0, &Fp4Scheme::nvfp4())?
                }
                _ => return Ok(None),
            };
            Ok(Some(packed.into()))
        })
        .unwrap_err();
    assert!(
        matches!(&error, Fp4Error::Provided { path, .. } if path == "second.weight"),
        "{error:?}"
    );
    assert!(!is_packed(&net.first) && !is_packed(&net.second));
    assert_eq!(weights(&net), expected);

    // An error of the closure itself.
    let error = net
        .pack_fp4(|weight| match weight.path() {
            "second.weight" => Err(OpsError::NonFinite { found: f32::NAN }.into()),
            _ => Ok(None),
        })
        .unwrap_err();
    assert!(error.to_string().contains("not finite"), "{error}");
    assert_eq!(weights(&net), expected);
}

#[test]
fn the_last_matching_override_wins() {
    for (name, device, _) in devices() {
        let dense = two_layers(&device);
        let sse = Fp4Scheme::nvfp4().with_method(Method::SSE);
        let config = Fp4Config::nvfp4().with("**", Fp4Scheme::mxfp4()).with("second.*", sse);
        let mut net = dense.clone();
        let report = net.quantize_fp4(&config).unwrap();
        for (path, linear, dense, expected) in [
            ("first.weight", &net.first, &dense.first, Fp4Scheme::mxfp4()),
            ("second.weight", &net.second, &dense.second, sse),
        ] {
            let Outcome::Quantized { scheme, .. } = outcome(&report, path) else {
                panic!("{report}")
            };
            assert_eq!(*scheme, expected, "{name} {path}");
            let alone = ops::quantize(dense.weight.val(), 0, &expected).unwrap();
            let found = floats(linear.weight.val());
            assert_eq!(found, floats(alone.dequantize()), "{name} {path}");
        }
    }
}

// Reports and errors leave nothing out.

#[test]
fn a_calibrated_method_without_calibration_is_an_error() {
    let device = Device::flex();
    let dense = two_layers(&device);
    let by = |search| Fp4Config::new(Fp4Scheme::nvfp4().with_method(search));
    for (method, config) in [
        ("gptq", Fp4Config::nvfp4().method(Method::GPTQ)),
        ("hessian", by(Method::Hessian)),
        ("coordinate", by(Method::CoordinateDescent)),
    ] {
        let mut net = dense.clone();
        let error = net.quantize_fp4(&config).unwrap_err();
        let Fp4Error::Uncalibrated { method: found, paths } = &error else { panic!("{error:?}") };
        assert!(found.to_lowercase().contains(method), "{found}");
        assert_eq!(*paths, ["first.weight", "second.weight"]);
        assert!(!is_packed(&net.first));
    }
}

#[test]
fn the_report_says_which_method_was_asked_for_and_used_and_why() {
    for (name, device, _) in devices() {
        let mut net = two_layers(&device);
        let mut calibration = Calibration::new();
        calibration.add("first.weight", 0, random(7, [96, 32], &device)).unwrap();
        let gptq = Method::Gptq(Gptq::default());
        let config = Fp4Config::nvfp4().method(Method::GPTQ).with_calibration(&calibration);
        let report = net.quantize_fp4(&config).unwrap();
        let of = |path| match outcome(&report, path) {
            Outcome::Quantized { asked, scheme, fallback, .. } => {
                (*asked, scheme.method, fallback.clone())
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(of("first.weight"), (gptq, gptq, None), "{name}");
        let sse = Method::SSE;
        assert_eq!(of("second.weight"), (gptq, sse, Some(Fallback::NoInputs)), "{name}");
        assert!(unwrapped(&report).contains(&Fallback::NoInputs.to_string()), "{report}");
    }
}

#[test]
fn unused_parts_of_a_configuration_are_an_error_or_in_the_report() {
    let device = Device::flex();
    let dense = two_layers(&device);
    let mut calibration = Calibration::new();
    calibration.add("first.weight", 0, random(7, [96, 32], &device)).unwrap();
    for (part, config) in [
        ("**.outptu.*", Fp4Config::nvfp4().exclude("**.outptu.*")),
        ("frist.*", Fp4Config::nvfp4().include("frist.*").include("second.*")),
        ("Lienar", Fp4Config::nvfp4().container("Lienar", 1)),
        ("third.*", Fp4Config::nvfp4().with("third.*", Fp4Scheme::mxfp4())),
        ("query", Fp4Config::nvfp4().share_scale(["query", "key"])),
        // Only one of the siblings exists.
        ("fisrt", Fp4Config::nvfp4().share_scale(["fisrt", "second"])),
        ("fisrt.weight", Fp4Config::nvfp4().share_scale_of(["fisrt.weight", "second.weight"])),
        (
            "no selected weight is `third.weight`",
            Fp4Config::nvfp4().share_scale_of(["first.weight", "second.weight", "third.weight"]),
        ),
        ("calibration", Fp4Config::nvfp4().with_calibration(&calibration)),
    ] {
        let mut net = dense.clone();
        let error = net.quantize_fp4(&config).unwrap_err();
        let Fp4Error::Unused(lines) = &error else { panic!("{part}: {error:?}") };
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(part) && error.to_string().contains(part), "{error}");
        assert!(!is_packed(&net.second), "{part}");

        let report = net.quantize_fp4(&config.unused(Unused::Report)).unwrap();
        assert!(report.unused.starts_with(lines), "{part}: {:?}", report.unused);
        assert!(unwrapped(&report).contains(part), "{report}");
        assert!(is_packed(&net.second), "{part}");
    }
    // A path twice is a mistake whatever is done about unused parts.
    let twice = Fp4Config::nvfp4().share_scale_of(["first.weight", "second.weight"]);
    let twice = twice.share_scale_of(["second.weight", "third.weight"]).unused(Unused::Report);
    let error = dense.clone().quantize_fp4(&twice).unwrap_err();
    assert!(matches!(&error, Fp4Error::SharedScale { path, .. } if path == "second.weight"));
    // No message where everything is used.
    let config = Fp4Config::nvfp4().share_scale(["first", "second"]).exclude("*.bias");
    let report = dense.clone().quantize_fp4(&config.unused(Unused::Report)).unwrap();
    assert!(report.unused.is_empty(), "{:?}", report.unused);
}

#[test]
fn the_report_says_how_products_of_each_weight_run_with_a_remedy() {
    let device = Device::flex();
    let report = two_layers(&device).quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let of_linear = products(&report, "first.weight");
    assert_ne!(*of_linear, MatmulPath::FromCodes);
    assert!(of_linear.to_string().contains("Fp4Linear"), "{of_linear}");
    assert!(report.to_string().contains("Fp4Linear"), "{report}");
    // On the host the kind of layer decides.
    let linear = LinearConfig::new(32, 48).init(&device);
    let report = Fp4Linear::from(linear).quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    assert_eq!(*products(&report, "weight"), MatmulPath::FromCodes);
    assert!(!report.to_string().contains("dequantized"), "{report}");
}

/// Nothing in this program calls `burn_fp4::init`.
#[cfg(feature = "cpu")]
#[test]
fn a_forgotten_init_is_in_the_report() {
    let report = two_layers(&Device::cpu()).quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    assert!(report.to_string().contains("init()"), "{report}");
    assert_ne!(*products(&report, "first.weight"), MatmulPath::FromCodes);
}

#[test]
fn errors_name_axis_remedy_and_cause_once() {
    let device = Device::flex();
    let mut net = vec![LinearConfig::new(24, 16).init(&device)];
    let error = net.quantize_fp4(&Fp4Config::nvfp4()).unwrap_err();
    let message = error.to_string();
    for part in ["`0.weight`", "axis 0", "24", "16", "Indivisible::Skip", "exclude"] {
        assert_eq!(message.matches(part).count(), 1, "{part}: {message}");
    }
    assert!(!message.contains("columns"), "{message}");
    assert!(error.source().is_none(), "the message holds its cause");

    let infinite = Tensor::<2>::full([4, 32], f32::INFINITY, &device);
    let error = Calibration::new().add("first.weight", 0, infinite).unwrap_err();
    assert!(error.source().is_none() && error.to_string().contains("`first.weight`"), "{error}");

    let lost = Fp4Error::from(OpsError::Device("lost".to_owned()));
    assert!(matches!(&lost, Fp4Error::Device { problem } if problem == "lost"), "{lost:?}");
    assert_eq!(lost.to_string().matches("lost").count(), 1, "{lost}");
    let error = two_layers(&device).quantize_fp4(&Fp4Config::nvfp4().include("re:(a")).unwrap_err();
    assert!(error.source().is_none(), "{error}");
}

// Calibration checks only what the configuration uses.

/// A network whose last layer has infinite inputs.
#[derive(Module, Debug)]
struct Overflow {
    body: Linear,
    scores: Linear,
}

impl Overflow {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self.body.forward(x).tanh() + 2.0;
        self.scores.forward(hidden * f32::MAX)
    }
}

#[test]
fn infinite_inputs_of_a_dense_layer_are_ignored() {
    for (name, device, _) in devices() {
        let linear = || LinearConfig::new(32, 32).init(&device);
        let dense = seeded(Overflow { body: linear(), scores: linear() }, 2);
        let x = || [random(3, [64, 32], &device)];
        let run = |net: &Overflow, x| net.forward(x);
        let gptq = Fp4Config::nvfp4().method(Method::GPTQ);
        for config in [gptq.clone().exclude("scores.*"), gptq.clone().keep_last(1)] {
            let options = CalibrationOptions::default().for_config(&config);
            let calibration = Calibration::of(&dense).options(options).run(x(), run).unwrap();
            assert!(calibration.get("scores.weight", 0).is_none(), "{name}");
            let mut net = dense.clone();
            let report = net.quantize_fp4(&config.with_calibration(&calibration)).unwrap();
            assert_eq!(report.quantized().count(), 1, "{name}");
            let mut in_turn = dense.clone();
            let options = CalibrationOptions::default();
            in_turn.quantize_fp4_sequential(&config, options, x(), run).unwrap();
            assert_eq!(floats(in_turn.body.weight.val()), floats(net.body.weight.val()), "{name}");
        }
        // Where it is asked for, it is an error that names the layer.
        let options = CalibrationOptions::default().for_config(&gptq);
        let error = Calibration::of(&dense).options(options).run(x(), run).unwrap_err();
        let named = matches!(&error, Fp4Error::Parameter { path, .. } if path == "scores.weight");
        assert!(named, "{name}: {error:?}");
    }
}

// Other containers.

/// A model whose embedding is its `lm_head` too.
#[derive(Module, Debug)]
struct Words {
    tokens: Fp4Embedding,
    layer: Linear,
}

impl Words {
    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let hidden = self.layer.forward(self.tokens.forward(tokens)).tanh();
        hidden.matmul(self.tokens.weight.val().transpose().unsqueeze())
    }
}

#[test]
fn packed_embeddings_look_up_rows_and_can_be_tied() {
    for (name, device, _) in devices() {
        let embedding: Embedding = EmbeddingConfig::new(48, 32).init(&device);
        let layer = LinearConfig::new(32, 32).init(&device);
        let mut words = seeded(Words { tokens: embedding.into(), layer }, 7);
        let indices: Vec<i32> = (0..60).map(|at| at * 7 % 48).collect();
        let tokens = TensorData::new(indices.clone(), [6, 10]);
        let tokens = Tensor::<2, Int>::from_data(tokens, &device);
        let config = Fp4Config::nvfp4().container("Fp4Embedding", 1);
        let report = words.quantize_fp4(&config).unwrap();
        assert_eq!(report.quantized().count(), 2, "{name}");
        let packed = words.tokens.weight.reparameterization::<PackedWeight>().expect("packed");
        let table = floats(packed.tensor::<2>().dequantize());
        let rows: Vec<_> =
            indices.iter().flat_map(|&at| &table[at as usize * 32..][..32]).copied().collect();
        assert_eq!(floats(words.tokens.forward(tokens.clone())), rows, "{name}");
        let scores = words.forward(tokens.clone());
        assert_eq!(scores.dims(), [6, 10, 48], "{name}");
        // The same values as dense weights.
        let dense = words.clone().materialize();
        let expected = floats(dense.forward(tokens));
        assert_near(name, &floats(scores), &expected, 1e-5);
    }
}

#[test]
fn a_layer_trained_in_fp4_is_quantized_and_becomes_a_linear_layer() {
    let device = Device::flex();
    let linear = seeded(LinearConfig::new(32, 48).init(&device), 2);
    let (id, expected) = (linear.weight.id, floats(linear.weight.val()));
    let trained = Fp4TrainLinear::from(linear);
    let mut quantized = trained.clone();
    let report = quantized.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    assert_eq!(report.quantized().count(), 1);
    let back = Linear::from(trained);
    assert_eq!(back.weight.id, id);
    assert_eq!(floats(back.weight.val()), expected);
    // A packed one keeps its codes.
    assert!(is_packed(&Linear::from(quantized)));
}

#[derive(Module, Debug)]
struct Image {
    conv: Conv2d,
    head: Linear,
}

impl Image {
    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        self.head.forward(self.conv.forward(x).flatten::<2>(1, 3))
    }
}

#[test]
fn convolutions_are_quantized_by_their_container() {
    for (name, device, _) in devices() {
        let image = Image {
            conv: Conv2dConfig::new([16, 8], [3, 3]).init(&device),
            head: LinearConfig::new(8 * 4, 16).init(&device),
        };
        let dense = seeded(image, 4);
        let mut image = dense.clone();
        let report = image.quantize_fp4(&Fp4Config::nvfp4().container("Conv2d", 1)).unwrap();
        assert_eq!(report.quantized().count(), 2, "{name}");
        let Outcome::Quantized { axis: 1, weight_error, .. } = outcome(&report, "conv.weight")
        else {
            panic!("{report}")
        };
        assert!(weight_error.error > 0.0, "{name}");
        let kernel: Tensor<4> = dense.conv.weight.val();
        let expected = ops::quantize(kernel, 1, &Fp4Scheme::nvfp4()).unwrap();
        let expected = floats(expected.dequantize());
        assert_eq!(floats(image.conv.weight.val()), expected, "{name}");
        let x = random(5, [2, 16, 4, 4], &device);
        // The layers have the outputs of the materialized module.
        let materialized = image.clone().materialize();
        assert_eq!(floats(image.forward(x.clone())), floats(materialized.forward(x)), "{name}");
        assert_ne!(*products(&report, "conv.weight"), MatmulPath::FromCodes, "{name}");
    }
}

#[test]
fn a_parameter_outside_a_layer_is_quantized_by_its_container() {
    /// Multiplied without a layer.
    #[derive(Module, Debug)]
    struct Bare {
        matrix: Param<Tensor<2>>,
    }
    let device = Device::flex();
    let mut bare = Bare { matrix: Param::from_tensor(random(6, [32, 16], &device)) };
    let report = bare.quantize_fp4(&Fp4Config::nvfp4().container("Bare", 0)).unwrap();
    assert_eq!(report.quantized().count(), 1);
}
