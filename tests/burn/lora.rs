//! LoRA over packed weights: adapters train, codes stay.

use burn::module::{Lora, LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fp4::{
    CheckpointMap, Fp4Config, Fp4Error, Fp4Linear, Fp4Module, Fp4Report, Fp4Scheme, KeepReason,
    OpsError, Outcome, PackedWeight, ops,
};
use tests::compare::{ROUNDING_OF_FACTORS, assert_near};
use tests::engines::devices;
use tests::modules::{Net, seeded};
use tests::tensors::{floats, random, sums};

fn two_layers(device: &Device) -> Net {
    // 48 and 64 are tuned as one: the products of both layers share kernels.
    Net::new([64, 48, 64], device)
}

/// Returns a net with both weights packed and adapted.
fn adapted(device: &Device) -> Net {
    let mut net = two_layers(device);
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let report = net.lora_fp4(&lora()).unwrap();
    assert_eq!(paths_of_adapters(&report), ["first.weight", "second.weight"]);
    net
}

fn paths_of_adapters(report: &Fp4Report) -> Vec<&str> {
    report.adapted().map(|parameter| parameter.path.as_str()).collect()
}

/// Adapters of rank 4, scaled by 2.
fn lora() -> Lora {
    Lora::new(4, 8.0)
}

/// Rows of every input. With one number of rows, all tests share compiled kernels.
const ROWS: usize = 8;

/// Trains on random targets. Returns the net and the losses.
fn train(mut net: Net, steps: usize) -> (Net, Vec<f32>) {
    let device = net.first.weight.val().device();
    let (x, target) = (random(9, [ROWS, 64], &device), random(10, [ROWS, 64], &device));
    let mut optimizer = AdamConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..steps {
        let loss = (net.forward(x.clone()) - target.clone()).powf_scalar(2.0).mean();
        losses.push(floats(loss.clone())[0]);
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-2, net, gradients);
    }
    (net, losses)
}

fn packed(linear: &Linear) -> &PackedWeight {
    linear.weight.reparameterization::<PackedWeight>().expect("packed")
}

fn adapter(linear: &Linear) -> &LoraAdapter {
    packed(linear).adapter().expect("adapted")
}

/// Reads all integer tensors, which are codes and scales, with their paths.
fn codes(module: &impl Module) -> Vec<(String, Vec<i64>)> {
    struct Codes {
        stack: Vec<String>,
        found: Vec<(String, Vec<i64>)>,
    }
    impl ModuleVisitor for Codes {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.stack.push(name.to_owned());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.stack.pop();
        }
        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.found
                .push((self.stack.join("."), param.val().into_data().iter::<i64>().collect()));
        }
    }
    let mut codes = Codes { stack: Vec::new(), found: Vec::new() };
    module.visit(&mut codes);
    codes.found
}

/// Returns the paths of float parameters, and true for those that are trained.
fn trained(module: &impl Module) -> Vec<(String, bool)> {
    struct Trained {
        stack: Vec<String>,
        found: Vec<(String, bool)>,
    }
    impl ModuleVisitor for Trained {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.stack.push(name.to_owned());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.stack.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.found.push((self.stack.join("."), param.base().is_require_grad()));
        }
    }
    let mut trained = Trained { stack: Vec::new(), found: Vec::new() };
    module.visit(&mut trained);
    trained.found
}

/// Computes `dequantized + scale a b` on the host.
fn adapted_values(linear: &Linear) -> Vec<f32> {
    let dequantized = floats(packed(linear).tensor::<2>().dequantize());
    let delta = floats(adapter(linear).delta());
    dequantized.into_iter().zip(delta).map(|(base, delta)| base + delta).collect()
}

#[test]
fn adapters_train_and_codes_stay() {
    for (name, device, _) in devices() {
        let device = device.autodiff();
        let net = adapted(&device);
        let before = codes(&net);
        assert_eq!(before.len(), 6, "{name}: two weights of three tensors");
        let start = adapted_values(&net.first);
        let (net, losses) = train(net, 5);
        assert!(losses[4] < losses[0], "{name}: {losses:?}");
        assert_eq!(codes(&net), before, "{name}");
        assert_ne!(adapted_values(&net.first), start, "{name}");
        for linear in [&net.first, &net.second] {
            let expected = adapted_values(linear);
            assert_near(name, &floats(linear.weight.val()), &expected, 1e-6);
        }
    }
}

#[test]
fn a_fresh_adapter_changes_nothing() {
    for (name, device, _) in devices() {
        let mut net = two_layers(&device);
        net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let x = random(5, [ROWS, 64], &device);
        let expected = floats(net.forward(x.clone()));
        net.lora_fp4(&lora()).unwrap();
        assert_near(name, &floats(net.forward(x)), &expected, 1e-6);
        assert_eq!(adapter(&net.first).a.val().dims(), [64, 4], "{name}");
        assert_eq!(adapter(&net.first).b.val().dims(), [4, 48], "{name}");
        assert_eq!(adapter(&net.first).scale, 2.0, "{name}");
    }
}

#[test]
fn only_adapters_are_trained() {
    let net = adapted(&Device::flex().autodiff());
    let check = |net: &Net| {
        let trained: Vec<_> = trained(net).into_iter().filter(|(_, trained)| *trained).collect();
        let factors = [("first", ".a"), ("first", ".b"), ("second", ".a"), ("second", ".b")];
        assert_eq!(trained.len(), factors.len(), "{trained:?}");
        for ((path, _), (layer, factor)) in trained.iter().zip(factors) {
            let prefix = format!("{layer}.weight.fp4.lora");
            assert!(path.starts_with(&prefix) && path.ends_with(factor), "{path}");
        }
    };
    check(&net);
    // Out of training and back.
    check(&net.valid().train());
}

#[test]
fn fp4_linear_has_the_outputs_and_gradients_of_its_adapted_weight() {
    for (name, device, _) in devices() {
        let device = device.autodiff();
        let (net, _) = train(adapted(&device), 2);
        let linear = net.first;
        let straight = Fp4Linear::from(linear.clone());
        let x = || random(6, [ROWS, 64], &device).require_grad();
        let weights = random(7, [ROWS, 48], &device);
        let results = |x: &Tensor<2>, output: Tensor<2>| {
            let found = floats(output.clone());
            let gradients = (output * weights.clone()).sum().backward();
            let LoraAdapter { a, b, .. } = adapter(&linear);
            let of = |tensor: Tensor<2>| floats(tensor.grad(&gradients).expect("a gradient"));
            [found, of(x.clone()), of(a.val()), of(b.val())]
        };
        let input = x();
        let found = results(&input, straight.forward(input.clone()));
        let input = x();
        let bias = linear.bias.as_ref().expect("a bias").val().unsqueeze::<2>();
        let dense = input.clone().matmul(linear.weight.val()) + bias;
        let expected = results(&input, dense);
        let whats = ["output", "gradient of x", "gradient of a", "gradient of b"];
        for ((found, expected), what) in found.iter().zip(&expected).zip(whats) {
            assert_near(&format!("{name} {what}"), found, expected, 2e-3);
        }
    }
}

/// Asserts that codes and factors make the same weight; on CUDA Burn rounds f32 factors to 11 bits.
fn assert_same_weight(what: &str, linear: &Linear, expected: &[f32]) {
    let tolerance = if what.contains("cuda") { ROUNDING_OF_FACTORS } else { 1e-6 };
    assert_near(what, &floats(linear.weight.val()), expected, tolerance);
}

#[test]
fn records_hold_codes_and_adapters() {
    for (from, device, _) in devices() {
        let (net, _) = train(adapted(&device.clone().autodiff()), 2);
        let net = net.valid();
        let expected = [&net.first, &net.second].map(|linear| floats(linear.weight.val()));
        let kept = codes(&net);
        let bytes = net.clone().into_record().into_bytes().unwrap();
        for (to, device, _) in devices() {
            for (what, mut loaded) in
                [("fresh", two_layers(&device)), ("adapted", adapted(&device))]
            {
                let record = ModuleRecord::from_bytes(bytes.clone()).unwrap();
                loaded.load_fp4_record(record).unwrap();
                let what = format!("{from} to {what} {to}");
                for (linear, expected) in [&loaded.first, &loaded.second].into_iter().zip(&expected)
                {
                    assert_eq!(adapter(linear).scale, 2.0, "{what}");
                    assert_same_weight(&what, linear, expected);
                }
                assert_eq!(codes(&loaded), kept, "{what}");
            }
        }
    }
}

#[test]
fn records_with_adapters_do_not_load_into_weights_without() {
    let device = Device::flex();
    let record = adapted(&device).into_record();
    let mut packed = two_layers(&device);
    packed.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let before = codes(&packed);
    let error = packed.load_fp4_record(record).unwrap_err();
    assert!(matches!(error, Fp4Error::Record { .. }), "{error:?}");
    assert_eq!(codes(&packed), before);
}

#[test]
fn only_factors_of_a_parameter_are_called_an_adapter() {
    #[derive(Module, Debug)]
    struct Named {
        linear: Linear,
        lora: Vec<Linear>,
    }
    #[derive(Module, Debug)]
    struct Fewer {
        linear: Linear,
    }
    let device = Device::flex();
    let linear = || LinearConfig::new(32, 32).with_bias(false).init(&device);
    let problem = |record| {
        let mut fewer = vec![Fewer { linear: linear() }];
        match fewer.load_fp4_record(record).unwrap_err() {
            Fp4Error::Record { problem, .. } => problem,
            error => panic!("{error}"),
        }
    };
    let named = vec![Named { linear: linear(), lora: vec![linear()] }];
    assert_eq!(problem(named.into_record()), "the record has tensors that the module lacks");
    let mut adapted = vec![Fewer { linear: linear() }];
    adapted.lora_fp4(&lora()).unwrap();
    let problem = problem(adapted.into_record());
    assert!(problem.contains("call `lora_fp4` on the module before loading"), "{problem}");
}

#[test]
fn loaded_adapters_continue_training() {
    let device = Device::flex().autodiff();
    let (net, _) = train(adapted(&device), 5);
    let mut loaded = two_layers(&device);
    loaded.load_fp4_record(net.clone().valid().into_record()).unwrap();
    // Only the adapters are trained, as in the module that was saved.
    assert_eq!(trained(&loaded), trained(&net));
    assert_eq!(trained(&loaded.clone().valid().train()), trained(&net));
    let before = (adapted_values(&loaded.first), bias(&loaded));
    let (loaded, losses) = train(loaded, 10);
    assert!(losses[9] < losses[0], "{losses:?}");
    assert_ne!(adapted_values(&loaded.first), before.0);
    assert_eq!(bias(&loaded), before.1);
}

fn bias(net: &Net) -> Vec<f32> {
    floats(net.first.bias.as_ref().expect("a bias").val())
}

#[test]
fn a_record_without_adapters_freezes_nothing() {
    let device = Device::flex().autodiff();
    let mut net = two_layers(&device);
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let mut loaded = two_layers(&device);
    let bias_is_trained = ("first.bias".to_owned(), true);
    assert!(trained(&loaded).contains(&bias_is_trained));
    loaded.load_fp4_record(net.valid().into_record()).unwrap();
    assert!(trained(&loaded).contains(&bias_is_trained));
}

#[test]
fn merging_quantizes_the_adapted_weights() {
    for (name, device, _) in devices() {
        let (net, _) = train(adapted(&device.clone().autodiff()), 3);
        let mut net = net.valid();
        let dense = [&net.first, &net.second].map(|linear| linear.weight.val());
        let report = net.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap();
        assert_eq!(report.quantized().count(), 2, "{name}");
        let merged = [&net.first, &net.second];
        for ((linear, dense), parameter) in merged.into_iter().zip(dense).zip(report.quantized()) {
            assert!(packed(linear).adapter().is_none(), "{name}");
            let expected = ops::quantize(dense.clone(), 0, &Fp4Scheme::nvfp4()).unwrap();
            assert_eq!(floats(linear.weight.val()), floats(expected.dequantize()), "{name}");
            // The error of merging is that of quantizing the merged weight.
            let Outcome::Quantized { weight_error, .. } = parameter.outcome else {
                panic!("{parameter:?}")
            };
            let sums = sums(expected.squared_error(dense).unwrap());
            let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-5 * expected;
            let (error, energy) = (weight_error.error, weight_error.energy);
            assert!(error > 0.0 && near(error, sums[0]), "{name}: {sums:?}");
            assert!(near(energy, sums[1]), "{name}: {energy} {sums:?}");
        }
        assert_eq!(trained(&net).len(), 4, "{name}: no adapter is left");
    }
}

#[test]
fn merging_without_adapters_is_an_error_that_changes_nothing() {
    let device = Device::flex();
    let mut net = two_layers(&device);
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let before = codes(&net);
    let error = net.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap_err();
    assert!(matches!(error, Fp4Error::NothingAdapted(_)), "{error:?}");
    assert_eq!(codes(&net), before);
}

#[test]
fn materialized_adapters_are_in_the_dense_weight() {
    let device = Device::flex().autodiff();
    let (net, _) = train(adapted(&device), 5);
    let expected = adapted_values(&net.first);
    let dense = net.materialize();
    assert!(dense.first.weight.reparameterization::<PackedWeight>().is_none());
    assert_near("materialized", &floats(dense.first.weight.val()), &expected, 1e-6);
}

#[test]
fn adapters_without_a_weight_are_an_error_that_freezes_nothing() {
    let device = Device::flex().autodiff();
    let mut net = two_layers(&device);
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let before = trained(&net);
    assert!(before.contains(&("first.bias".to_owned(), true)), "{before:?}");
    let nothing = lora().set_param_group(ParamGroup::from_predicate("third"));
    let error = net.lora_fp4(&nothing).unwrap_err();
    assert!(matches!(error, Fp4Error::NothingAdapted(_)), "{error:?}");
    assert_eq!(trained(&net), before);
}

#[test]
fn a_dense_weight_gets_burns_adapter() {
    let device = Device::flex().autodiff();
    let mut net = two_layers(&device);
    net.quantize_fp4(&Fp4Config::nvfp4().exclude("second.*")).unwrap();
    let report = net.lora_fp4(&lora()).unwrap();
    assert_eq!(paths_of_adapters(&report), ["first.weight", "second.weight"]);
    assert!(net.second.weight.adapter().is_some());
    assert!(packed(&net.first).adapter().is_some());
    let (_, losses) = train(net, 10);
    assert!(losses[9] < losses[0], "{losses:?}");
}

#[test]
fn adapters_move_between_devices() {
    for (from, device, _) in devices() {
        let (net, _) = train(adapted(&device.autodiff()), 2);
        let net = net.valid();
        let factors = |linear: &Linear| {
            let adapter = adapter(linear);
            [&adapter.a, &adapter.b].map(|factor| floats(factor.val()))
        };
        let expected = floats(net.first.weight.val());
        for (to, device, _) in devices() {
            let moved = net.clone().to_device_fp4(&device);
            let what = format!("{from} to {to}");
            assert_eq!(moved.devices(), std::slice::from_ref(&device), "{what}");
            assert_eq!(factors(&moved.first), factors(&net.first), "{what}");
            assert_same_weight(&what, &moved.first, &expected);
        }
    }
}

#[test]
fn adapters_that_are_not_finite_are_not_merged() {
    let device = Device::flex();
    let mut net = adapted(&device);
    struct Spoil;
    impl ModuleMapper for Spoil {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            // `[4, outputs]`: the factor b.
            if param.dims()[0] == 4 {
                param.map(|b| b.mul_scalar(0.0).add_scalar(f32::NAN))
            } else {
                param
            }
        }
    }
    net = net.map(&mut Spoil);
    let packed =
        |net: &Net| net.first.weight.reparameterization::<PackedWeight>().expect("packed").clone();
    let before = packed(&net).tensor::<2>().to_packed().unwrap();
    let error = net.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap_err();
    assert!(
        matches!(&error, Fp4Error::Parameter { problem: OpsError::NonFinite { .. }, .. }),
        "{error}"
    );
    assert!(packed(&net).adapter().is_some());
    assert_eq!(packed(&net).tensor::<2>().to_packed().unwrap(), before);
    // An override that fits nothing is most likely misspelt.
    let misspelt = Fp4Config::nvfp4().with("**.frist.*", Fp4Scheme::mxfp4());
    let error = net.merge_lora_fp4(&misspelt).unwrap_err();
    assert!(matches!(&error, Fp4Error::Unused(lines) if lines[0].contains("frist")), "{error}");
}

const TOKENS: [[i32; ROWS]; 1] = [[1, 2, 3, 19, 4, 5, 6, 7]];

/// A minimal language model.
#[derive(Module, Debug)]
struct Words {
    embed: Embedding,
    norm: LayerNorm,
    head: Linear,
}

impl Words {
    fn new(device: &Device) -> Self {
        let words = Self {
            embed: EmbeddingConfig::new(20, 64).init(device),
            norm: LayerNormConfig::new(64).init(device),
            head: LinearConfig::new(64, 48).init(device),
        };
        seeded(words, 4)
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.head.forward(self.norm.forward(self.embed.forward(tokens)))
    }
}

fn step(words: Words) -> Words {
    let tokens = Tensor::from_ints(TOKENS, &words.head.weight.val().device());
    let mut optimizer = AdamConfig::new().init();
    let mut words = words;
    for _ in 0..3 {
        let loss = words.forward(tokens.clone()).powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &words);
        words = optimizer.step(1e-2, words, gradients);
    }
    words
}

#[test]
fn the_steps_of_the_guide_end_in_a_record_and_a_checkpoint() {
    for (name, device, _) in devices() {
        let mut words = Words::new(&device.clone().autodiff());
        words.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let report = words.lora_fp4(&Lora::new(4, 8.0)).unwrap();
        assert_eq!(paths_of_adapters(&report), ["embed.weight", "head.weight"], "{name}");
        let frozen = report.get("norm.gamma").unwrap();
        assert!(matches!(frozen.outcome, Outcome::Kept { reason: KeepReason::Rank }), "{name}");
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Fp4Report>(&json).unwrap(), report);
        assert!(report.to_string().contains("2 of 5 parameters have an adapter"), "{report}");

        let untrained = floats(words.embed.weight.val());
        let words = step(words);
        let dense = [words.embed.weight.val(), words.head.weight.val()].map(floats);
        assert_ne!(dense[0], untrained, "{name}: trained");
        let mut words = words.valid();
        let report = words.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap();
        assert!(matches!(report.get("embed.weight").unwrap().outcome, Outcome::Merged), "{name}");
        assert!(report.get("head.weight").unwrap().is_quantized(), "{name}");
        assert_eq!(report.parameters.len(), 5, "{name}: no factor is left");
        assert!(words.embed.weight.adapter().is_none(), "{name}");
        assert_eq!(floats(words.embed.weight.val()), dense[0], "{name}");
        assert!(packed(&words.head).adapter().is_none(), "{name}");

        let tokens = || Tensor::from_ints(TOKENS, &device);
        let expected = floats(words.forward(tokens()));
        let mut fresh = Words::new(&device);
        fresh.load_fp4_record(words.clone().into_record()).unwrap();
        assert_eq!(floats(fresh.forward(tokens())), expected, "{name}");
        let folder = std::env::temp_dir().join(format!("burn-fp4-lora-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        words.save_fp4(&path, "compressed-tensors", &CheckpointMap::new()).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn dense_weights_keep_their_dtype_with_adapters_of_another() {
    let device = Device::flex();
    let group = ParamGroup::from_path("embed.weight");
    let lora = Lora::new(4, 8.0).set_dtype(FloatDType::F16).set_param_group(group);
    let mut words = Words::new(&device);
    words.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let codes_before = codes(&words);
    words.lora_fp4(&lora).unwrap();
    let mut words = words.map(&mut Fill(0.25));
    let expected = words.embed.weight.val();
    assert_eq!(expected.dtype(), DType::F16);
    words.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap();
    assert_eq!(words.embed.weight.val().dtype(), DType::F32);
    assert_eq!(floats(words.embed.weight.val()), floats(expected));
    // Packed weights without an adapter keep their bits.
    assert_eq!(codes(&words), codes_before);
}

/// Sets every factor `b`, `[4, outputs]`.
struct Fill(f32);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.dims()[0] {
            4 => param.map(|b| b.mul_scalar(0.0).add_scalar(self.0)),
            _ => param,
        }
    }
}

#[test]
fn a_dense_weight_whose_adapter_is_not_finite_is_not_merged() {
    let mut words = Words::new(&Device::flex());
    words.lora_fp4(&lora()).unwrap();
    let mut words = words.map(&mut Fill(f32::NAN));
    let error = words.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap_err();
    assert!(matches!(&error, Fp4Error::NotFinite { path } if path == "embed.weight"), "{error}");
    assert!(words.embed.weight.adapter().is_some());
}

#[test]
fn an_attachment_that_merging_would_leave_is_an_error_that_names_the_call() {
    let mut words = Words::new(&Device::flex());
    let only_head = Fp4Config::nvfp4().include("head.*");
    words.fake_quantize_fp4(&only_head).unwrap();
    let error = words.merge_lora_fp4(&Fp4Config::nvfp4()).unwrap_err().to_string();
    assert_eq!(error, "parameter `head.weight` has `fp4_fake` attached; call `convert_fp4` first");
    let mut words = Words::new(&Device::flex());
    words.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    words.lora_fp4(&lora()).unwrap();
    let error = words.checkpoint_fp4(&CheckpointMap::new()).unwrap_err().to_string();
    assert!(error.ends_with("call `merge_lora_fp4` first"), "{error}");
    let mut fresh = Words::new(&Device::flex());
    let error = fresh.load_fp4_record(words.into_record()).unwrap_err().to_string();
    assert!(error.contains("`merge_lora_fp4` before saving"), "{error}");
}
