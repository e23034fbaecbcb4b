//! Weights are identified by their values, not by their ids: Burn's clones of a parameter share an
//! id, and keep it when an optimizer step or a record changes their values.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]

use std::collections::BTreeSet;

use burn::module::{
    Devices, Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup, ParamId,
};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor};
use burn_fp4::formats::Packed;
use burn_fp4::{
    Calibration, CalibrationOptions, E4m3Range, ErrorMetric, Fp4Config, Fp4Module, Fp4Scheme, Gptq,
    Method, Outcome, PackedWeight, ops,
};
use tests::engines::devices;
use tests::modules::seeded;
use tests::tensors::{floats, random};

/// Number of blocks on hosts; fewer on CubeCL's CPU runtime, which would take minutes.
const BLOCKS: usize = 100;
const WIDTH: usize = 32;

/// Blocks with residual connections, which keep the size of activations.
#[derive(Module, Debug)]
struct Stack {
    blocks: Vec<Linear>,
}

impl Stack {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.blocks.iter().fold(x, |x, block| block.forward(x.clone()).tanh() * 0.1 + x)
    }

    fn weight(&self, at: usize) -> Tensor<2> {
        self.blocks[at].weight.val()
    }
}

fn blocks(name: &str) -> usize {
    if name.contains("cpu") { 4 } else { BLOCKS }
}

fn block(device: &Device) -> Linear {
    LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device)
}

fn weight_of(linear: Linear, values: Tensor<2>) -> Linear {
    Linear { weight: linear.weight.map(|_| values), ..linear }
}

/// Clones of one block, filled from a file with different blocks of the same id.
fn cloned_and_filled(blocks: usize, device: &Device) -> Stack {
    let block = block(device);
    let values = |at: usize| random(at as u64, [WIDTH, WIDTH], device) * 0.1;
    let saved = (0..blocks).map(|at| weight_of(block.clone(), values(at))).collect();
    let file = Stack { blocks: saved }.into_record().into_bytes().unwrap();
    let stack = Stack { blocks: vec![block; blocks] };
    let stack = stack.load_record(ModuleRecord::from_bytes(file).unwrap());
    let ids: BTreeSet<_> = stack.blocks.iter().map(|block| block.weight.id.val()).collect();
    assert_eq!(ids.len(), 1, "the premise: one id for all of them");
    assert_eq!(floats(stack.weight(blocks - 1)), floats(values(blocks - 1)));
    stack
}

/// Returns the same weights with different ids.
fn with_ids_of_their_own(stack: &Stack) -> Stack {
    let blocks = stack.blocks.iter().cloned();
    let fresh = blocks.map(|mut block| {
        block.weight.id = ParamId::new();
        block
    });
    Stack { blocks: fresh.collect() }
}

fn packed(linear: &Linear) -> Packed {
    let packed = linear.weight.reparameterization::<PackedWeight>().expect("quantized");
    packed.tensor::<2>().to_packed().unwrap()
}

fn all_packed(stack: &Stack) -> Vec<Packed> {
    stack.blocks.iter().map(packed).collect()
}

/// Asserts that every block equals the block of a model whose ids do not repeat.
fn assert_each_has_its_own(what: &str, found: &Stack, expected: &Stack) {
    let (found, expected) = (all_packed(found), all_packed(expected));
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(found == expected, "{what}: block {at} has other codes");
    }
    let different: BTreeSet<_> = found.iter().map(|packed| packed.codes.clone()).collect();
    assert_eq!(different.len(), found.len(), "{what}: two blocks have the same codes");
}

fn by(search: Method) -> Fp4Config {
    Fp4Config::new(Fp4Scheme::nvfp4().with_method(search))
}

/// Returns methods that need only weights.
fn methods_without_inputs() -> Vec<(&'static str, Fp4Config)> {
    let four_over_six = Method::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
    vec![("amax", by(Method::Amax)), ("four over six", by(four_over_six)), ("sse", by(Method::SSE))]
}

/// Returns methods that need statistics of inputs.
fn methods_with_inputs() -> Vec<(&'static str, Fp4Config)> {
    vec![
        ("hessian", by(Method::Hessian)),
        ("coordinate descent", by(Method::CoordinateDescent)),
        ("gptq", Fp4Config::nvfp4().method(Method::GPTQ)),
    ]
}

fn batches(device: &Device) -> Vec<Tensor<2>> {
    (0..2).map(|seed| random(1000 + seed, [64, WIDTH], device)).collect()
}

/// Returns two devices to divide weights among.
fn pairs() -> Vec<(&'static str, [Device; 2])> {
    vec![
        ("flex and ndarray", [Device::flex(), Device::ndarray()]),
        #[cfg(feature = "cpu")]
        ("cpu and flex", [Device::cpu(), Device::flex()]),
    ]
}

#[test]
fn a_hundred_blocks_cloned_from_one_and_filled_from_a_file_get_their_own_codes() {
    for (name, device, _) in devices() {
        let dense = cloned_and_filled(blocks(name), &device);
        for (method, config) in methods_without_inputs() {
            let mut stack = dense.clone();
            let report = stack.quantize_fp4(&config).unwrap();
            assert_eq!(report.quantized().count(), blocks(name), "{name} {method}");
            for (at, block) in stack.blocks.iter().enumerate() {
                let alone = ops::quantize(dense.weight(at), 0, &config.scheme).unwrap();
                assert!(packed(block) == alone.to_packed().unwrap(), "{name} {method}: {at}");
            }
        }
    }
}

#[test]
fn a_hundred_blocks_of_one_id_are_calibrated_each_by_its_own_inputs() {
    for (name, device, _) in devices() {
        let dense = cloned_and_filled(blocks(name), &device);
        let apart = with_ids_of_their_own(&dense);
        let forward = |stack: &Stack, x| stack.forward(x);
        let calibration = Calibration::of(&dense).run(batches(&device), forward).unwrap();
        assert_eq!(calibration.iter().count(), blocks(name), "{name}");
        for (method, config) in methods_with_inputs() {
            let config = config.with_calibration(&calibration);
            let (mut found, mut expected) = (dense.clone(), apart.clone());
            found.quantize_fp4(&config).unwrap();
            expected.quantize_fp4(&config).unwrap();
            assert_each_has_its_own(&format!("{name} {method}"), &found, &expected);
            if let Some(options) = config.scheme.method.gptq() {
                let last = blocks(name) - 1;
                let gram = calibration.get(&format!("blocks.{last}.weight"), 0).unwrap();
                let weight = dense.weight(last);
                let alone = ops::quantize_gptq(weight, 0, &config.scheme, &options, gram).unwrap();
                assert!(packed(&found.blocks[last]) == alone.to_packed().unwrap(), "{name}");
            }
        }
    }
}

#[test]
#[ignore = "slow"]
fn a_hundred_blocks_of_one_id_are_quantized_sequentially() {
    for (name, device, _) in devices() {
        let dense = cloned_and_filled(blocks(name), &device);
        let apart = with_ids_of_their_own(&dense);
        for (method, config) in methods_with_inputs() {
            let quantized = |dense: &Stack| {
                let mut stack = dense.clone();
                let options = CalibrationOptions::default();
                let forward = |stack: &Stack, x| stack.forward(x);
                let report = stack
                    .quantize_fp4_sequential(&config, options, batches(&device), forward)
                    .unwrap();
                assert_eq!(report.quantized().count(), blocks(name), "{name} {method}");
                stack
            };
            let what = format!("{name} {method}, sequential");
            assert_each_has_its_own(&what, &quantized(&dense), &quantized(&apart));
        }
    }
}

#[test]
#[ignore = "slow"]
fn a_hundred_blocks_of_one_id_are_divided_among_two_devices() {
    for (name, pair) in pairs() {
        let device = &pair[0];
        let dense = cloned_and_filled(blocks(name), device);
        let apart = with_ids_of_their_own(&dense);
        let options = || CalibrationOptions::default().devices(pair.clone());
        let forward = |stack: &Stack, x| stack.forward(x);
        let calibration =
            Calibration::of(&dense).options(options()).run(batches(device), forward).unwrap();
        for (method, config) in methods_with_inputs() {
            let at_once = config.with_calibration(&calibration);
            let (mut found, mut expected) = (dense.clone(), apart.clone());
            found.quantize_fp4(&at_once).unwrap();
            expected.quantize_fp4(&at_once).unwrap();
            assert_each_has_its_own(&format!("{name} {method}"), &found, &expected);

            let in_turn = |dense: &Stack| {
                let mut stack = dense.clone();
                stack
                    .quantize_fp4_sequential(&config, options(), batches(device), forward)
                    .unwrap();
                stack
            };
            let what = format!("{name} {method}, sequential");
            assert_each_has_its_own(&what, &in_turn(&dense), &in_turn(&apart));
        }
    }
}

/// Collects the ids of integer tensors: codes and scales of packed weights.
fn ids_of_parts(module: &impl Module) -> Vec<u64> {
    struct Ids(Vec<u64>);
    impl ModuleVisitor for Ids {
        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.0.push(param.id.val());
        }
    }
    let mut ids = Ids(Vec::new());
    module.visit(&mut ids);
    ids.0
}

#[test]
fn tied_weights_are_packed_once_and_parted_ones_twice() {
    for (name, device, _) in devices() {
        let tied = seeded(block(&device), 4);
        let other = weight_of(tied.clone(), tied.weight.val() * 2.0);
        let dense = Stack { blocks: vec![tied.clone(), other.clone(), tied.clone()] };

        let mut stack = dense.clone();
        stack.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let parts = ids_of_parts(&stack);
        let [first, second, third] = [0, 1, 2].map(|at| &parts[3 * at..3 * at + 3]);
        assert_eq!(first, third, "{name}: one packing for both places");
        assert!(first.iter().all(|id| !second.contains(id)), "{name}");
        assert!(packed(&stack.blocks[0]) == packed(&stack.blocks[2]), "{name}");

        // A tied weight is quantized for the inputs of both its places, the other for its own.
        let mut calibration = Calibration::new();
        for at in 0..3 {
            let inputs = random(20 + at, [96, WIDTH], &device);
            calibration.add(&format!("blocks.{at}.weight"), 0, inputs).unwrap();
        }
        let gptq = Gptq::default();
        let config = Fp4Config::nvfp4().method(Method::Gptq(gptq)).with_calibration(&calibration);
        let mut stack = dense;
        let report = stack.quantize_fp4(&config).unwrap();
        for parameter in report.quantized() {
            let Outcome::Quantized { scheme, .. } = &parameter.outcome else { unreachable!() };
            assert_eq!(scheme.method, Method::Gptq(gptq), "{name} {}", parameter.path);
        }
        let gram = |at: usize| calibration.get(&format!("blocks.{at}.weight"), 0).unwrap().clone();
        let mut both = gram(0);
        both.merge(&gram(2)).unwrap();
        let alone = |block: &Linear, gram: &ops::Gram| {
            let scheme = Fp4Scheme::nvfp4();
            let tensor = ops::quantize_gptq(block.weight.val(), 0, &scheme, &gptq, gram);
            tensor.unwrap().to_packed().unwrap()
        };
        let expected = [alone(&tied, &both), alone(&other, &gram(1)), alone(&tied, &both)];
        assert!(all_packed(&stack) == expected, "{name}");
        assert_eq!(ids_of_parts(&stack)[..3], ids_of_parts(&stack)[6..], "{name}");
    }
}

#[derive(Module, Debug)]
struct Twins {
    first: Linear,
    second: Linear,
}

/// Burn gives the gradient of a tied parameter to its first place.
#[test]
fn weights_that_an_optimizer_step_parted_are_quantized_apart() {
    let device = Device::flex().autodiff();
    let first = seeded(block(&device), 8);
    let mut net = Twins { second: first.clone(), first };
    let x = random(9, [16, WIDTH], &device);
    let mut optimizer = AdamConfig::new().init();
    for _ in 0..3 {
        let loss = net.second.forward(net.first.forward(x.clone()).tanh()).powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(1e-2, net, gradients);
    }
    let mut net = net.valid();
    assert_eq!(net.first.weight.id, net.second.weight.id, "the premise");
    let values = [&net.first, &net.second].map(|linear| linear.weight.val());
    assert_ne!(floats(values[0].clone()), floats(values[1].clone()), "the premise");
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let expected =
        values.map(|values| ops::quantize(values, 0, &Fp4Scheme::nvfp4()).unwrap().dequantize());
    let [first, second] = expected.map(floats);
    assert_eq!(floats(net.first.weight.val()), first);
    assert_eq!(floats(net.second.weight.val()), second);
}

#[test]
fn compacting_leaves_a_dense_weight_that_shares_the_id_of_a_packed_one() {
    for (name, device, _) in devices() {
        let shared = seeded(block(&device), 3);
        let dense = floats(shared.weight.val());
        let mut stack = Stack { blocks: vec![shared.clone(), shared] };
        let report = stack.quantize_fp4(&Fp4Config::nvfp4().keep_first(1)).unwrap();
        assert_eq!(report.quantized().count(), 1, "{name}");
        stack.compact_fp4();
        assert_eq!(floats(stack.weight(0)), dense, "{name}");
        assert!(stack.blocks[1].weight.reparameterization::<PackedWeight>().is_some(), "{name}");
    }
}

#[test]
fn packed_records_fill_clones_of_one_block_each_with_its_own() {
    let device = Device::flex();
    let mut saved = cloned_and_filled(8, &device);
    saved.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let expected = all_packed(&saved);
    let mut loaded = Stack { blocks: vec![block(&device); 8] };
    loaded.load_fp4_record(saved.into_record()).unwrap();
    assert!(all_packed(&loaded) == expected);
    // Their values differ as before.
    let weights: BTreeSet<Vec<u32>> = (0..8)
        .map(|at| floats(loaded.weight(at)).into_iter().map(f32::to_bits).collect())
        .collect();
    assert_eq!(weights.len(), 8);
}

/// A hand-written module that maps its layers in another order than it visits them.
#[derive(Debug, Clone)]
struct Backwards {
    a: Linear,
    b: Linear,
}

const BACKWARDS: &str = "Struct:Backwards";

impl Module for Backwards {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        visitor.enter_module("a", BACKWARDS);
        self.a.visit(visitor);
        visitor.exit_module("a", BACKWARDS);
        visitor.enter_module("b", BACKWARDS);
        self.b.visit(visitor);
        visitor.exit_module("b", BACKWARDS);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        mapper.enter_module("b", BACKWARDS);
        let b = self.b.map(mapper);
        mapper.exit_module("b", BACKWARDS);
        mapper.enter_module("a", BACKWARDS);
        let a = self.a.map(mapper);
        mapper.exit_module("a", BACKWARDS);
        Self { a, b }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.b.collect_devices(self.a.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        Self { a: self.a.fork(device), b: self.b.fork(device) }
    }

    fn to_device(self, device: &Device) -> Self {
        Self { a: self.a.to_device(device), b: self.b.to_device(device) }
    }

    fn train(self) -> Self {
        Self { a: self.a.train(), b: self.b.train() }
    }

    fn valid(&self) -> Self {
        Self { a: self.a.valid(), b: self.b.valid() }
    }

    fn materialize(self) -> Self {
        Self { a: self.a.materialize(), b: self.b.materialize() }
    }
}

#[test]
fn a_module_that_maps_in_another_order_than_it_visits_is_quantized_by_path() {
    for (name, device, _) in devices() {
        let linear = |outputs, seed| {
            let linear = LinearConfig::new(WIDTH, outputs).with_bias(false).init(&device);
            seeded(linear, seed)
        };
        let dense = Backwards { a: linear(16, 1), b: linear(48, 2) };
        let mut calibration = Calibration::new();
        let inputs = |seed| random(seed, [64, WIDTH], &device);
        calibration.add("a.weight", 0, inputs(3)).unwrap();
        calibration.add("b.weight", 0, inputs(4)).unwrap();
        let gptq = Gptq::default();
        let with_inputs =
            Fp4Config::nvfp4().method(Method::Gptq(gptq)).with_calibration(&calibration);
        for config in [Fp4Config::nvfp4(), with_inputs] {
            let mut net = dense.clone();
            let report = net.quantize_fp4(&config).unwrap();
            assert_eq!(report.quantized().count(), 2, "{name}");
            for (path, linear, dense) in
                [("a.weight", &net.a, &dense.a), ("b.weight", &net.b, &dense.b)]
            {
                let values = dense.weight.val();
                let expected = match config.scheme.method.gptq() {
                    None => ops::quantize(values, 0, &config.scheme),
                    Some(options) => {
                        let gram = calibration.get(path, 0).unwrap();
                        ops::quantize_gptq(values, 0, &config.scheme, &options, gram)
                    }
                };
                assert!(packed(linear) == expected.unwrap().to_packed().unwrap(), "{name} {path}");
            }
        }
    }
}

#[test]
fn weights_of_one_id_are_adapted_apart() {
    let device = Device::flex().autodiff();
    let mut stack = cloned_and_filled(2, &device);
    stack.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let group = ParamGroup::from_path("blocks.1.weight");
    let lora = Lora::new(2, 4.0).set_param_group(group);
    let report = stack.lora_fp4(&lora).unwrap();
    let adapted: Vec<_> = report.adapted().map(|parameter| &*parameter.path).collect();
    assert_eq!(adapted, ["blocks.1.weight"]);
    let adapter = |at: usize| {
        let packed = stack.blocks[at].weight.reparameterization::<PackedWeight>();
        packed.expect("quantized").adapter().is_some()
    };
    assert_eq!([adapter(0), adapter(1)], [false, true]);
}
