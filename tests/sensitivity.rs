//! Sensitivity: predicted errors of candidates against measured ones, and choices in a budget.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, Relu};
use burn::tensor::{Device, Distribution, Tensor};
use burn_fp4::ops::{Fp4Scheme, Hadamard, gram};
use burn_fp4::{
    Budget, Calibration, Candidate, CandidateSensitivity, Fp4Config, Fp4Error, Fp4Module,
    Indivisible, Method, Outcome, PackedWeight, Sse, Unused,
};

const CANDIDATES: [Candidate; 4] = [
    Candidate::Fp4(Fp4Scheme::nvfp4()),
    Candidate::Fp4(Fp4Scheme::nvfp4().with_block_size(32)),
    Candidate::Fp4(Fp4Scheme::mxfp4()),
    Candidate::Dense,
];

/// The candidates, and one after a Hadamard transform.
fn candidates() -> Vec<Candidate> {
    let hadamard = Hadamard::of_size(32).expect("a size of transforms");
    let transformed = Candidate::Fp4(Fp4Scheme::mxfp4().with_hadamard(Some(hadamard)));
    CANDIDATES.into_iter().chain([transformed]).collect()
}

#[derive(Module, Debug)]
struct Net {
    dropout: Dropout,
    query: Linear,
    key: Linear,
    down: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let layer = |outputs| LinearConfig::new(64, outputs).with_bias(false).init(device);
        let dropout = DropoutConfig::new(0.5).init();
        Self { dropout, query: layer(64), key: layer(64), down: layer(32) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mixed = self.query.forward(x.clone()) + Relu::new().forward(self.key.forward(x));
        self.down.forward(self.dropout.forward(mixed))
    }
}

fn inputs(device: &Device) -> Tensor<2> {
    let normal = Tensor::<2>::random([256, 64], Distribution::Normal(0.0, 1.0), device);
    let wide = Tensor::<1>::random([64], Distribution::Uniform(0.2, 3.0), device);
    normal * wide.unsqueeze()
}

fn scalar(sum: Tensor<1>) -> f64 {
    f64::from(sum.into_scalar::<f32>())
}

fn close(found: f64, expected: f64, by: f64) {
    assert!((found - expected).abs() <= by * expected.abs(), "{found} {expected}");
}

#[test]
fn predicted_errors_equal_those_of_quantized_weights_and_outputs() {
    let device = Device::flex();
    let net = Net::new(&device);
    let x = inputs(&device);
    let calibration =
        Calibration::of(&net).run([x.clone()], |net: &Net, x| net.forward(x)).unwrap();
    let config = Fp4Config::nvfp4()
        .method(Method::GPTQ)
        .share_scale(["query", "key"])
        .with_calibration(&calibration);
    let sensitivity = net.fp4_sensitivity(&config, &candidates()).unwrap();
    let paths: Vec<_> = sensitivity.groups.iter().map(|group| group.paths.join(" ")).collect();
    assert_eq!(paths, ["query.weight key.weight", "down.weight"]);

    for (at, candidate) in candidates().into_iter().enumerate() {
        let found = &sensitivity.groups[0].candidates[at];
        assert_eq!(found.candidate, candidate);
        let Candidate::Fp4(scheme) = candidate else {
            assert_eq!((found.bytes, found.error()), (2 * 4 * 64 * 64, Some(0.0)));
            continue;
        };
        let mut quantized = net.clone();
        let mut config = config.clone();
        config.scheme = scheme.with_method(config.scheme.method);
        quantized.quantize_fp4(&config).unwrap();
        let mut sums = [0.0; 4];
        let mut bytes = 0;
        for (dense, quantized) in [(&net.query, &quantized.query), (&net.key, &quantized.key)] {
            bytes += quantized.weight.reparameterization::<PackedWeight>().unwrap().bytes();
            let (dense, rounded) = (dense.weight.val(), quantized.weight.val());
            let error = rounded - dense.clone();
            let outputs = [x.clone().matmul(error.clone()), x.clone().matmul(dense.clone())];
            for (sum, values) in sums.iter_mut().zip([error, dense].into_iter().chain(outputs)) {
                *sum += scalar(values.powf_scalar(2.0).sum());
            }
        }
        assert_eq!(found.bytes, bytes);
        close(found.weight_error, sums[0] / sums[1], 1e-4);
        close(found.output_error.unwrap(), sums[2] / sums[3], 1e-3);
    }
}

#[test]
fn predicted_loss_growth_equals_the_second_order_term() {
    // Targets are normal around the outputs, so that the loss is at its minimum, and the growth
    // half the square of what the outputs change by.
    let device = Device::flex();
    device.seed(5);
    let layer = LinearConfig::new(64, 32).with_bias(false).init(&device);
    let batches: Vec<_> = (0..300)
        .map(|_| {
            let x = Tensor::<2>::random([8, 64], Distribution::Normal(0.0, 1.0), &device);
            let noise = Tensor::random([8, 32], Distribution::Normal(0.0, 1.0), &device);
            (x.clone(), layer.forward(x) + noise)
        })
        .collect();
    let loss = |layer: &Linear, (x, target): (Tensor<2>, Tensor<2>)| {
        let device = layer.weight.val().device();
        let (x, target) = (x.to_device(&device), target.to_device(&device));
        (layer.forward(x) - target).powf_scalar(2.0).sum() * 0.5
    };
    let config = Fp4Config::nvfp4();
    let found = layer.fp4_sensitivity_of_loss(&config, &CANDIDATES, batches.clone(), loss).unwrap();
    for (candidate, one) in CANDIDATES.iter().zip(&found.groups[0].candidates) {
        let Candidate::Fp4(scheme) = candidate else {
            assert_eq!(one.loss, Some(0.0));
            continue;
        };
        let mut quantized = layer.clone();
        quantized.quantize_fp4(&Fp4Config::new(*scheme)).unwrap();
        let change = quantized.weight.val() - layer.weight.val();
        let growth = |(x, _): &(Tensor<2>, Tensor<2>)| {
            0.5 * scalar(x.clone().matmul(change.clone()).powf_scalar(2.0).sum())
        };
        let expected = batches.iter().map(growth).sum::<f64>() / batches.len() as f64;
        // The mean of 300 x 32 squares of normal numbers: 1.4 % standard deviation.
        close(one.loss.unwrap(), expected, 0.08);
    }
    let none = layer.fp4_sensitivity_of_loss(&config, &CANDIDATES, Vec::new(), loss);
    assert!(matches!(none, Err(Fp4Error::Sensitivity(_))));
    let other = layer.clone();
    let constant = |_: &Linear, batch| loss(&other, batch);
    let constant = layer.fp4_sensitivity_of_loss(&config, &CANDIDATES, batches, constant);
    assert!(matches!(constant, Err(Fp4Error::Sensitivity(_))));
}

#[test]
fn a_choice_quantizes_as_predicted_within_its_budget() {
    let device = Device::flex();
    let net: Vec<Net> = (0..3).map(|_| Net::new(&device)).collect();
    let calibration = Calibration::of(&net)
        .run([inputs(&device)], |nets: &Vec<Net>, x: Tensor<2>| {
            nets.iter().map(|net| net.forward(x.clone())).collect::<Vec<_>>()
        })
        .unwrap();
    let config = Fp4Config::nvfp4()
        .method(Method::Hessian)
        .exclude("0.down.*")
        .keep_last(1)
        .share_scale(["query", "key"])
        .with_calibration(&calibration);
    let sensitivity = net.fp4_sensitivity(&config, &candidates()).unwrap();
    assert_eq!(sensitivity.groups.len(), 3);
    let mut errors = Vec::new();
    for bits in [4.25, 4.5, 6.0, 12.0, 20.0, 40.0] {
        let choice = sensitivity.choose(Budget::BitsPerWeight(bits)).unwrap();
        assert!(
            choice.bits_per_weight <= bits + 0.02
                && choice.gap() >= -1e-12
                && choice.bound <= choice.error + 1e-12
        );
        errors.push(choice.error);

        // The configuration, and the one that is read back from JSON.
        let json = serde_json::to_string(&choice.config).unwrap();
        let read: Fp4Config = serde_json::from_str(&json).unwrap();
        let mut quantized = net.clone();
        let report = match quantized.quantize_fp4(&read.with_calibration(&calibration)) {
            Ok(report) => report,
            Err(Fp4Error::NothingSelected(_)) if bits >= 32.0 => continue,
            Err(error) => panic!("{error}"),
        };
        for (group, chosen) in sensitivity.groups.iter().zip(&choice.candidates) {
            for path in &group.paths {
                let found = report.parameters.iter().find(|one| one.path == *path).unwrap();
                match (&found.outcome, chosen.candidate) {
                    (Outcome::Kept { .. }, Candidate::Dense) => {}
                    (Outcome::Quantized { scheme, .. }, Candidate::Fp4(asked)) => {
                        assert_eq!(*scheme, asked.with_method(config.scheme.method));
                    }
                    (found, asked) => panic!("{path}: {asked} {found:?}"),
                }
            }
        }
    }
    assert!(errors.is_sorted_by(|a, b| a >= b), "{errors:?}");
    assert_eq!(errors[5], 0.0);

    let error = sensitivity.choose(Budget::BitsPerWeight(4.0)).unwrap_err();
    assert!(matches!(error, Fp4Error::Budget { .. }), "{error}");
    assert!(sensitivity.choose(Budget::BitsPerWeight(f64::NAN)).is_err());
    let (table, page) = (format!("{sensitivity:#}"), sensitivity.html(None));
    for text in ["1.query.weight", "nvfp4/32", "mxfp4/32"] {
        assert!(table.contains(text) && page.contains(text), "{text}");
    }
    assert!(table.contains("dense"), "{table}");
}

/// The rows of a page.
fn rows(page: &str) -> Vec<&str> {
    page.lines().filter(|line| line.starts_with("<tr><td>")).collect()
}

#[test]
fn a_page_has_a_row_for_each_group_with_the_choice_marked_and_the_worst_first() {
    let device = Device::flex();
    let net = Net::new(&device);
    let calibration = Calibration::of(&net).run([inputs(&device)], Net::forward).unwrap();
    let config = Fp4Config::nvfp4().unused(Unused::Report).share_scale(["query", "key"]);
    let config = config.with_calibration(&calibration);
    let found = net.fp4_sensitivity(&config, &Candidate::DEFAULT).unwrap();
    let plain = found.html(None);
    assert_eq!(rows(&plain).len(), found.groups.len());
    assert!(plain.contains("white-space: nowrap") && !plain.contains("class=\"chosen\""));
    assert!(!plain.contains("dense"), "dense candidates have no error to show");
    for row in rows(&plain) {
        assert_eq!([row.matches("bar0").count(), row.matches("bar1").count()], [1, 1], "{row}");
    }
    let worst = |at: usize| {
        let errors = found.groups[at].candidates.iter().filter_map(|one| one.error());
        errors.fold(0.0, f64::max)
    };
    let first = (0..found.groups.len()).max_by(|a, b| worst(*a).total_cmp(&worst(*b))).unwrap();
    assert!(rows(&plain)[0].contains(&found.groups[first].paths[0]), "{plain}");
    let choice = found.choose(Budget::BitsPerWeight(12.0)).unwrap();
    let page = found.html(Some(&choice));
    for (group, chosen) in found.groups.iter().zip(&choice.candidates) {
        let row = rows(&page).into_iter().find(|row| row.contains(&group.paths[0])).unwrap();
        let marked = format!("<div class=\"chosen\">{} ✓</div>", chosen.candidate);
        assert!(row.contains(&marked), "{row} does not mark {marked}");
    }
    assert!(page.contains("bits a value.</p>"), "{page}");
    assert!(page.contains("Bars: error of the outputs; the longest is "), "{page}");
    let (_, made) = page.rsplit_once("<footer>").unwrap();
    let (_, date) = made.split_once(", ").unwrap();
    assert_eq!(date[..10].split('-').map(str::len).collect::<Vec<_>>(), [4, 2, 2], "{made}");

    // Without a calibration errors of weights are all that is known.
    let config = Fp4Config::nvfp4().unused(Unused::Report).share_scale(["query", "key"]);
    let page = net.fp4_sensitivity(&config, &Candidate::DEFAULT).unwrap().html(None);
    assert!(page.contains("Bars: error of the weights; the longest is "), "{page}");
    assert!(rows(&page)[0].contains("width:100.00%"), "{page}");
}

#[test]
fn a_configuration_with_a_budget_chooses_and_quantizes() {
    let device = Device::flex();
    let net = Net::new(&device);
    let calibration = Calibration::of(&net).run([inputs(&device)], Net::forward).unwrap();
    let config = Fp4Config::nvfp4().method(Method::SSE).with_calibration(&calibration);
    let config = config.unused(Unused::Report).share_scale(["query", "key"]);
    for (budget, quantized) in [(Budget::BitsPerWeight(12.0), 2), (Budget::Bytes(7500), 3)] {
        let found = net.fp4_sensitivity(&config, &Candidate::DEFAULT).unwrap();
        let choice = found.choose(budget).unwrap();
        let [mut together, mut one_by_one] = [net.clone(), net.clone()];
        let mut report = together.quantize_fp4(&config.clone().budget(budget)).unwrap();
        assert!(report.relative_output_error().is_some(), "{report}");
        let chosen = choice.config.with_calibration(&Calibration::new());
        for parameter in &mut report.parameters {
            if let Outcome::Quantized { output_error, .. } = &mut parameter.outcome {
                *output_error = None; // The inputs are known only to one of the two.
            }
        }
        assert_eq!(report, one_by_one.quantize_fp4(&chosen).unwrap());
        assert_eq!(report.quantized().count(), quantized, "{report}");
        assert!(!report.to_string().contains("calibration"), "{report}");
    }
    let config = config.budget(Budget::BitsPerWeight(8.0));
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Fp4Config>(&json).unwrap().budget, config.budget);
    for lost in [
        config.clone().with("down.*", Fp4Scheme::mxfp4()).budget(Budget::BitsPerWeight(8.0)),
        config.clone().budget(Budget::BitsPerWeight(40.0)),
    ] {
        let error = net.clone().quantize_fp4(&lost).unwrap_err();
        assert!(matches!(error, Fp4Error::Sensitivity(_)), "{error}");
    }
    // A weight of zeros has no error either way.
    let mut zeros = net.clone();
    zeros.down.weight = zeros.down.weight.map(|weight| weight.zeros_like());
    let config_of_zeros = config.clone();
    for everything in [Budget::BitsPerWeight(32.0), Budget::Bytes(usize::MAX)] {
        let error = zeros.clone().quantize_fp4(&config_of_zeros.clone().budget(everything));
        let Err(Fp4Error::Sensitivity(problem)) = error else { panic!("{error:?}") };
        assert!(problem.contains("as they are"), "{problem}");
    }
    // Elsewhere it would be lost.
    let uncalibrated = Fp4Config::nvfp4().budget(Budget::BitsPerWeight(8.0));
    for error in [
        net.clone().fake_quantize_fp4(&uncalibrated).unwrap_err(),
        net.fp4_sensitivity(&config, &CANDIDATES).unwrap_err(),
    ] {
        assert!(matches!(error, Fp4Error::Sensitivity(_)), "{error}");
    }
    let error = net.clone().quantize_fp4(&uncalibrated).unwrap_err();
    assert!(matches!(error, Fp4Error::NotComparable { .. }), "{error}");
}

#[test]
fn candidates_with_indivisible_blocks_are_left_out_if_those_are_skipped() {
    let device = Device::flex();
    let layers: Vec<Linear> =
        [48, 64].map(|inputs| LinearConfig::new(inputs, 16).init(&device)).into();
    let config = Fp4Config::nvfp4();
    let error = layers.fp4_sensitivity(&config, &CANDIDATES).unwrap_err();
    assert!(matches!(error, Fp4Error::Parameter { .. }), "{error}");
    assert!(layers.fp4_sensitivity(&config, &[]).is_err());

    let config = config.indivisible(Indivisible::Skip);
    let sensitivity = layers.fp4_sensitivity(&config, &CANDIDATES).unwrap();
    let counts: Vec<_> = sensitivity.groups.iter().map(|group| group.candidates.len()).collect();
    assert_eq!(counts, [2, 4]);
    // Without inputs nothing tells how groups compare.
    let error = sensitivity.choose(Budget::Bytes(1 << 20)).unwrap_err();
    assert!(matches!(error, Fp4Error::NotComparable { .. }), "{error}");
}

#[test]
fn output_errors_cover_inputs_of_several_tiles_and_experts() {
    let device = Device::flex();
    let layer = LinearConfig::new(192, 32).with_bias(false).init(&device);
    let x = Tensor::<2>::random([256, 192], Distribution::Normal(0.0, 1.0), &device);
    let mut calibration = Calibration::new();
    calibration.add("weight", 0, x.clone()).unwrap();
    // The method needs no inputs, the error of the outputs does.
    let config = Fp4Config::nvfp4().with_calibration(&calibration);
    let found = layer.fp4_sensitivity(&config, &CANDIDATES).unwrap();
    let mut quantized = layer.clone();
    quantized.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let energy = |weight: Tensor<2>| scalar(x.clone().matmul(weight).powf_scalar(2.0).sum());
    let dense = layer.weight.val();
    let expected = energy(quantized.weight.val() - dense.clone()) / energy(dense);
    close(found.groups[0].candidates[0].output_error.unwrap(), expected, 1e-3);

    #[derive(Module, Debug)]
    struct Experts {
        weight: Param<Tensor<3>>,
    }

    let values = Tensor::<3>::random([2, 64, 32], Distribution::Normal(0.0, 1.0), &device);
    let experts = Experts { weight: Param::from_tensor(values.clone()) };
    let inputs = [0, 1].map(|slice| {
        let wide = Distribution::Normal(0.0, 1.0 + 3.0 * f64::from(slice));
        Tensor::<2>::random([128, 64], wide, &device)
    });
    let mut calibration = Calibration::new();
    for (slice, x) in inputs.iter().enumerate() {
        calibration.insert_slice("weight", 1, slice, gram(x.clone()).unwrap());
    }
    let config = Fp4Config::nvfp4().container("Experts", 1);
    let config = config.with_calibration(&calibration);
    let found = experts.fp4_sensitivity(&config, &CANDIDATES).unwrap();
    let mut quantized = experts.clone();
    let alone = config.with_calibration(&Calibration::new());
    quantized.quantize_fp4(&alone).unwrap();
    let energy = |weight: Tensor<3>| -> f64 {
        let slice = |at: usize| {
            let matrix: Tensor<2> = weight.clone().narrow(0, at, 1).squeeze_dim(0);
            scalar(inputs[at].clone().matmul(matrix).powf_scalar(2.0).sum())
        };
        slice(0) + slice(1)
    };
    let expected = energy(quantized.weight.val() - values.clone()) / energy(values);
    close(found.groups[0].candidates[0].output_error.unwrap(), expected, 1e-3);
}

#[test]
fn predicted_losses_do_not_depend_on_training_state() {
    let device = Device::flex();
    let net = Net::new(&device);
    let batches: Vec<_> = (0..4).map(|_| inputs(&device)).collect();
    let losses = |net: &Net| -> Vec<f64> {
        let loss = |net: &Net, x: Tensor<2>| {
            let x = x.to_device(&net.query.weight.val().device());
            net.forward(x).powf_scalar(2.0).sum()
        };
        let config = Fp4Config::nvfp4();
        let found = net.fp4_sensitivity_of_loss(&config, &CANDIDATES, batches.clone(), loss);
        let groups = found.unwrap().groups;
        groups.iter().flat_map(|group| &group.candidates).filter_map(|one| one.loss).collect()
    };
    let expected = losses(&net);
    assert_eq!(expected.len(), 3 * CANDIDATES.len());
    assert!(expected.iter().filter(|loss| **loss > 0.0).count() == 9, "{expected:?}");
    // Frozen, and on a device that differentiates; dropout is not drawn.
    assert_eq!(losses(&net.clone().no_grad()), expected);
    assert_eq!(losses(&net.clone().train()), expected);

    // Tied weights have one format, and their errors add up.
    let tied = vec![net.query.clone(), net.query.clone()];
    for tied in [tied.clone(), tied.train()] {
        let loss = |layers: &Vec<Linear>, x: Tensor<2>| {
            let x = x.to_device(&layers[0].weight.val().device());
            let outputs = layers.iter().map(|layer| layer.forward(x.clone()).sum());
            outputs.reduce(|sum, one| sum + one).unwrap()
        };
        let config = Fp4Config::nvfp4();
        let x = [batches[0].clone()];
        let both = tied.fp4_sensitivity_of_loss(&config, &CANDIDATES, x.clone(), loss).unwrap();
        let one = vec![tied[0].clone()];
        let one = one.fp4_sensitivity_of_loss(&config, &CANDIDATES, x, loss).unwrap();
        assert_eq!((both.groups.len(), both.groups[0].paths.len()), (1, 2));
        let loss = |found: &burn_fp4::Sensitivity| found.groups[0].candidates[0].loss.unwrap();
        close(loss(&both), 2.0 * loss(&one), 1e-5);
    }
}

#[test]
fn candidates_without_a_method_are_left_out() {
    assert_eq!(Candidate::ALL, CANDIDATES);
    let device = Device::flex();
    let net = Net::new(&device);
    let calibration = Calibration::of(&net).run([inputs(&device)], Net::forward).unwrap();
    let [nvfp4, nvfp4_of_32, mxfp4, dense] = CANDIDATES;
    let only_nvfp4 = vec![nvfp4, nvfp4_of_32, dense];
    for (method, expected) in [
        (Method::SSE, CANDIDATES.to_vec()),
        (Method::FOUR_OVER_SIX, only_nvfp4.clone()),
        (Method::Sse(Sse::TensorScale), only_nvfp4),
    ] {
        let config = Fp4Config::nvfp4().method(method).unused(Unused::Report);
        let config = config.with_calibration(&calibration);
        let found = net.fp4_sensitivity(&config, &CANDIDATES).unwrap();
        for group in &found.groups {
            let left: Vec<_> = group.candidates.iter().map(|one| one.candidate).collect();
            assert_eq!(left, expected, "{method} {:?}", group.paths);
        }
        // All in FP4, by the method asked for.
        let config = config.budget(Budget::BitsPerWeight(4.6));
        let report = net.clone().quantize_fp4(&config);
        let report = report.unwrap_or_else(|error| panic!("{method}: {error}"));
        assert_eq!(report.quantized().count(), 3, "{method}: {report}");
        for parameter in report.quantized() {
            let Outcome::Quantized { scheme, .. } = &parameter.outcome else { unreachable!() };
            assert_eq!(scheme.method, method, "{}", parameter.path);
        }
    }
    // If none in FP4 is left, there is nothing to measure.
    let config = Fp4Config::nvfp4().method(Method::FOUR_OVER_SIX);
    let error = net.fp4_sensitivity(&config, &[mxfp4, dense]).unwrap_err();
    assert!(matches!(error, Fp4Error::Scheme(_)), "{error}");
    // One that fits no method is an error, whatever the others are.
    let odd = Candidate::Fp4(Fp4Scheme::nvfp4().with_block_size(24));
    let error = net.fp4_sensitivity(&Fp4Config::nvfp4(), &[nvfp4, mxfp4, odd]).unwrap_err();
    assert!(matches!(error, Fp4Error::Scheme(_)), "{error}");
}

#[test]
fn errors_do_not_depend_on_the_magnitude_of_weights() {
    let device = Device::flex();
    let layer = LinearConfig::new(64, 32).with_bias(false).init(&device);
    let mut calibration = Calibration::new();
    calibration.add("weight", 0, inputs(&device)).unwrap();
    let config = Fp4Config::nvfp4().with_calibration(&calibration).unused(Unused::Report);
    let errors = |exponent: i32| {
        let mut layer = layer.clone();
        layer.weight = layer.weight.map(|weight| weight * 2f32.powi(exponent));
        let found = layer.fp4_sensitivity(&config, &CANDIDATES[..3]).unwrap();
        let of = |one: &CandidateSensitivity| [one.weight_error, one.output_error.unwrap()];
        found.groups[0].candidates.iter().flat_map(of).collect::<Vec<_>>()
    };
    let expected = errors(0);
    assert!(expected.iter().all(|&error| error > 1e-3), "{expected:?}");
    for exponent in [-90, 90] {
        for (found, expected) in errors(exponent).into_iter().zip(&expected) {
            close(found, *expected, 1e-4);
        }
    }
}
