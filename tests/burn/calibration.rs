//! Calibration: inputs recorded from unmodified modules, against inputs that the forward passes of
//! the tests keep themselves.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Stdio};

use burn::module::{Module, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig, Relu,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fp4::{
    Calibration, CalibrationOptions, Fp4Config, Fp4Error, Fp4Module, Fp4Scheme, Gptq, Method,
    Outcome, PackedWeight, TensorScaling, ops,
};
use burn_fp4_search::Gram;
use tests::compare::assert_same;
use tests::engines::devices;
use tests::modules::{seeded, unwrapped};
use tests::tensors::{floats, random};

/// Inputs `[.., channels]` of each weight, by path, in the order of the forward pass.
type Kept = RefCell<Vec<(&'static str, Vec<f32>, usize)>>;

fn keep<const D: usize>(kept: &Kept, paths: &[&'static str], input: &Tensor<D>) {
    for path in paths {
        kept.borrow_mut().push((path, floats(input.clone()), input.dims()[D - 1]));
    }
}

/// A module whose forward pass can keep the inputs of its layers.
trait Watched: Module {
    type Batch: Module;
    fn run(&self, batch: Self::Batch, kept: Option<&Kept>);
}

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
    head: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let layers = (0..2).map(|_| LinearConfig::new(32, 32).init(device)).collect();
        seeded(Self { layers, head: LinearConfig::new(32, 16).with_bias(false).init(device) }, 2)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self.layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
        self.head.forward(hidden)
    }
}

impl Mlp {
    /// The input of a layer.
    fn input_of(&self, path: &str, batch: Tensor<2>) -> Tensor<2> {
        let kept = Kept::default();
        let device = batch.device();
        self.run(batch, Some(&kept));
        let (_, values, channels) = kept
            .into_inner()
            .into_iter()
            .find(|(found, ..)| *found == path)
            .expect("a layer has this path");
        let rows = values.len() / channels;
        Tensor::from_data(TensorData::new(values, [rows, channels]), &device)
    }
}

impl Watched for Mlp {
    type Batch = Tensor<2>;
    fn run(&self, batch: Tensor<2>, kept: Option<&Kept>) {
        let mut x = batch;
        for (layer, path) in self.layers.iter().zip(["layers.0.weight", "layers.1.weight"]) {
            kept.inspect(|kept| keep(kept, &[path], &x));
            x = layer.forward(x).tanh();
        }
        kept.inspect(|kept| keep(kept, &["head.weight"], &x));
        self.head.forward(x);
    }
}

/// A block of a transformer: tokens, attention, and a hidden layer.
#[derive(Module, Debug)]
struct Block {
    tokens: Embedding,
    norm: LayerNorm,
    attention: MultiHeadAttention,
    up: Linear,
    down: Linear,
}

const HEADS: usize = 4;

impl Watched for Block {
    type Batch = Tensor<2, Int>;
    fn run(&self, batch: Tensor<2, Int>, kept: Option<&Kept>) {
        let x = self.tokens.forward(batch);
        let normed = self.norm.forward(x.clone());
        let attended = self.attention.forward(MhaInput::self_attn(normed.clone()));
        if let Some(kept) = kept {
            let paths =
                ["attention.query.weight", "attention.key.weight", "attention.value.weight"];
            keep(kept, &paths, &normed);
            let [batch, length, width] = normed.dims();
            let value = self.attention.value.forward(normed);
            let value = value.reshape([batch, length, HEADS, width / HEADS]).swap_dims(1, 2);
            let mixed = attended.weights.matmul(value).swap_dims(1, 2);
            keep(kept, &["attention.output.weight"], &mixed.reshape([batch, length, width]));
        }
        let x = x + attended.context;
        kept.inspect(|kept| keep(kept, &["up.weight"], &x));
        let hidden = Relu::new().forward(self.up.forward(x));
        kept.inspect(|kept| keep(kept, &["down.weight"], &hidden));
        self.down.forward(hidden);
    }
}

/// One layer twice, and another with the same weight.
#[derive(Module, Debug)]
struct Tied {
    layer: Linear,
    same: Linear,
}

impl Watched for Tied {
    type Batch = Tensor<3>;
    fn run(&self, batch: Tensor<3>, kept: Option<&Kept>) {
        let mut x = batch;
        for (layer, path) in [
            (&self.layer, "layer.weight"),
            (&self.layer, "layer.weight"),
            (&self.same, "same.weight"),
        ] {
            kept.inspect(|kept| keep(kept, &[path], &x));
            x = layer.forward(x).tanh();
        }
    }
}

#[derive(Module, Debug)]
struct Stem {
    conv: Conv1d,
    head: Linear,
    /// Multiplied without a layer.
    last: Param<Tensor<2>>,
}

impl Watched for Stem {
    type Batch = Tensor<3>;
    fn run(&self, batch: Tensor<3>, kept: Option<&Kept>) {
        let x = Relu::new().forward(self.conv.forward(batch)).flatten::<2>(1, 2);
        kept.inspect(|kept| keep(kept, &["head.weight"], &x));
        let x = self.head.forward(x);
        kept.inspect(|kept| keep(kept, &["last"], &x));
        x.matmul(self.last.val());
    }
}

/// Returns a device other than this one.
fn other_device(device: &Device) -> Device {
    if *device == Device::flex() { Device::ndarray() } else { Device::flex() }
}

fn check<M: Watched>(what: &str, model: &M, batches: Vec<M::Batch>, unreached: &[&str]) {
    let kept = Kept::default();
    batches.iter().for_each(|batch| model.run(batch.clone(), Some(&kept)));
    let mut expected: std::collections::BTreeMap<&str, Gram> = Default::default();
    for (path, values, channels) in kept.into_inner() {
        expected.entry(path).or_insert_with(|| Gram::new(channels)).add(&values).unwrap();
    }
    // All batches in flight, one after the other, and divided among devices.
    let devices = model.devices();
    let divided: Vec<_> = devices.iter().cloned().chain([other_device(&devices[0])]).collect();
    for (memory, devices) in [(1 << 30, vec![]), (1, vec![]), (1 << 30, divided)] {
        // The other device multiplies in f32, CUDA with factors of 11 bits.
        let others = what.starts_with("cuda") && !devices.is_empty();
        let tolerance = if others { 2e-3 } else { 1e-5 };
        let options = CalibrationOptions::default().memory(memory).devices(devices);
        let calibration = Calibration::of(model)
            .options(options)
            .run(batches.clone(), |model: &M, batch| model.run(batch, None))
            .unwrap();
        assert_eq!(calibration.iter().count(), expected.len(), "{what}");
        assert_eq!(calibration.unreached().collect::<Vec<_>>(), unreached, "{what}");
        for (path, expected) in &expected {
            let found = calibration.get(path, 0).expect(path);
            assert_eq!(found.rows(), expected.rows(), "{what} {path}");
            let near = (found.amax() - expected.amax()).abs() <= tolerance as f32 * expected.amax();
            assert!(near, "{what} {path}: {} {}", found.amax(), expected.amax());
            let size: f64 = expected.diagonal().fold(0.0, f64::max);
            for (found, expected) in found.values().iter().zip(expected.values()) {
                let near = (found - expected).abs() <= tolerance * size;
                assert!(near, "{what} {path}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn recorded_grams_equal_those_of_kept_inputs() {
    for (name, device, _) in devices() {
        let batches = (0..3).map(|seed| random(seed, [20, 32], &device)).collect();
        check(&format!("{name} mlp"), &Mlp::new(&device), batches, &[]);
        // Kernels of other layers are Burn's, and compile for minutes on CubeCL's CPU runtime.
        if name == "cpu" {
            continue;
        }

        let block = Block {
            tokens: EmbeddingConfig::new(11, 32).init(&device),
            norm: LayerNormConfig::new(32).init(&device),
            attention: MultiHeadAttentionConfig::new(32, HEADS).init(&device),
            up: LinearConfig::new(32, 48).init(&device),
            down: LinearConfig::new(48, 32).init(&device),
        };
        let block = seeded(block, 3);
        let tokens = |length: i32| {
            let tokens: Vec<_> = (0..2 * length).map(|at| at * 7 % 11).collect();
            let shape = [2, length as usize];
            Tensor::<2, Int>::from_data(TensorData::new(tokens, shape), &device)
        };
        // Batches of different lengths.
        let batches = vec![tokens(5), tokens(7)];
        check(&format!("{name} transformer"), &block, batches, &["tokens.weight"]);

        let layer = seeded(LinearConfig::new(32, 32).init(&device), 4);
        let tied = Tied { same: layer.clone(), layer };
        let batches = (0..2).map(|seed| random(seed, [2, 3, 32], &device)).collect();
        check(&format!("{name} tied"), &tied, batches, &[]);

        let stem = Stem {
            conv: Conv1dConfig::new(2, 4, 3).init(&device),
            head: LinearConfig::new(4 * 8, 16).init(&device),
            last: Param::from_tensor(random(6, [16, 16], &device)),
        };
        let batches = (0..2).map(|seed| random(seed, [5, 2, 10], &device)).collect();
        check(&format!("{name} stem"), &seeded(stem, 5), batches, &[]);
    }
}

/// A model whose embedding is its `lm_head` too.
#[derive(Module, Debug)]
struct Words {
    tokens: Embedding,
    layer: Linear,
}

impl Words {
    fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.layer.forward(self.tokens.forward(tokens)).tanh()
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let table = self.tokens.weight.val().transpose().unsqueeze();
        self.hidden(tokens).matmul(table)
    }
}

#[test]
fn a_transposed_weight_is_calibrated_along_its_last_axis() {
    for (name, device, _) in devices() {
        let words = Words {
            tokens: EmbeddingConfig::new(48, 32).init(&device),
            layer: LinearConfig::new(32, 32).init(&device),
        };
        let words = seeded(words, 7);
        let tokens: Vec<_> = (0..60).map(|at| at * 7 % 48).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [6, 10]), &device);
        let run = |words: &Words, tokens| words.forward(tokens);
        let calibration = Calibration::of(&words).run([tokens.clone()], run).unwrap();
        assert_eq!(calibration.unreached().count(), 0, "{name}");
        assert_eq!(calibration.get("tokens.weight", 0), None, "{name}");
        let found = calibration.get("tokens.weight", 1).unwrap();
        let expected = Gram::of(&floats(words.hidden(tokens.clone())), 32).unwrap();
        assert_eq!(found.rows(), 60, "{name}");
        for (found, expected) in found.values().iter().zip(expected.values()) {
            assert!((found - expected).abs() <= 1e-5 * 60.0, "{name}: {found} {expected}");
        }
        let gptq = Gptq::default();
        let chosen = |axis| {
            let config = Fp4Config::nvfp4().method(Method::Gptq(gptq)).container("Embedding", axis);
            let mut quantized = words.clone();
            let calibrated = config.with_calibration(&calibration);
            let report = quantized.quantize_fp4(&calibrated).unwrap();
            let mut sequential = words.clone();
            let options = CalibrationOptions::default();
            sequential.quantize_fp4_sequential(&config, options, [tokens.clone()], run).unwrap();
            let exact = floats(words.forward(tokens.clone()));
            let found = floats(sequential.forward(tokens.clone()));
            let sum =
                |of: &dyn Fn((&f32, &f32)) -> f32| exact.iter().zip(&found).map(of).sum::<f32>();
            let (error, size) = (sum(&|(a, b)| (a - b).powi(2)), sum(&|(a, _)| a.powi(2)));
            assert!(error > 0.0 && error < 0.1 * size, "{name} axis {axis}: {error} of {size}");
            let Outcome::Quantized { scheme, .. } = report.parameters[0].outcome else {
                panic!("{report}")
            };
            (scheme.method, floats(quantized.tokens.weight.val()))
        };
        let (by, weight) = chosen(1);
        assert_eq!(by, Method::Gptq(gptq), "{name}");
        let table = words.tokens.weight.val();
        let expected = ops::quantize_gptq(table, 1, &Fp4Scheme::nvfp4(), &gptq, found).unwrap();
        assert_eq!(weight, floats(expected.dequantize()), "{name}");
        assert_eq!(chosen(0).0, Method::SSE, "{name}");
    }
}

/// A module with running statistics, which its clones share.
#[derive(Module, Debug)]
struct Normalized {
    conv: Conv1d,
    norm: BatchNorm,
    head: Linear,
}

impl Watched for Normalized {
    type Batch = Tensor<3>;
    fn run(&self, batch: Tensor<3>, kept: Option<&Kept>) {
        let x = self.norm.forward(self.conv.forward(batch)).flatten::<2>(1, 2);
        kept.inspect(|kept| keep(kept, &["head.weight"], &x));
        self.head.forward(x);
    }
}

#[test]
fn calibration_leaves_running_statistics_on_their_device() {
    for (name, device, _) in devices() {
        let net = Normalized {
            conv: Conv1dConfig::new(2, 4, 3).init(&device),
            norm: BatchNormConfig::new(4).init(&device),
            head: LinearConfig::new(4 * 8, 16).init(&device),
        };
        let net = seeded(net, 5);
        let mean = random(8, [4], &device);
        net.norm.running_mean.update(mean.clone());
        net.norm.running_mean.value_sync();
        let batches: Vec<_> = (0..2).map(|seed| random(seed, [5, 2, 10], &device)).collect();
        check(&format!("{name} batch norm"), &net, batches.clone(), &[]);
        assert_eq!(net.norm.running_mean.value().device(), device, "{name}");
        assert_eq!(floats(net.norm.running_mean.value_sync()), floats(mean), "{name}");
        let mut quantized = net.clone();
        let config = Fp4Config::nvfp4().method(Method::GPTQ);
        let run = |model: &Normalized, x| model.run(x, None);
        let options = CalibrationOptions::default();
        quantized.quantize_fp4_sequential(&config, options, batches.clone(), run).unwrap();
        quantized.run(batches[0].clone(), None);
        net.run(batches[0].clone(), None);
    }
}

#[test]
fn half_precision_inputs_are_calibrated_in_f32() {
    for (name, device, dtypes) in devices() {
        for dtype in dtypes.into_iter().filter(|&dtype| dtype != DType::F32) {
            let mut layer = seeded(LinearConfig::new(32, 16).with_bias(false).init(&device), 3);
            layer.weight = layer.weight.map(|weight| weight.cast(dtype));
            let x = random(4, [50, 32], &device).cast(dtype);
            let mut expected = Gram::new(32);
            expected.add(&floats(x.clone())).unwrap();
            let calibration =
                Calibration::of(&layer).run([x], |layer: &Linear, x| layer.forward(x)).unwrap();
            let found = calibration.get("weight", 0).unwrap();
            for (found, expected) in found.values().iter().zip(expected.values()) {
                assert!((found - expected).abs() <= 1e-5 * 80.0, "{name} {dtype:?}");
            }
        }
    }
}

#[test]
fn a_pass_that_cannot_be_recorded_is_an_error() {
    let device = Device::flex();
    let model = Mlp::new(&device);
    let batch = || random(1, [4, 32], &device);
    let run = |model: &Mlp, batches: Vec<Tensor<2>>| {
        Calibration::of(model).run(batches, |model: &Mlp, x| model.forward(x))
    };
    let reads = Calibration::of(&model).run([batch()], |model: &Mlp, x: Tensor<2>| {
        let y = model.forward(x);
        if y.clone().sum().into_scalar::<f32>() > 0.0 { y } else { y.neg() }
    });
    let message = reads.unwrap_err().to_string();
    let said = message.contains("no concrete value") && message.contains("control flow");
    assert!(said, "{message}");
    let fails = Calibration::of(&model).run([batch()], |_: &Mlp, _: Tensor<2>| panic!("no way"));
    assert!(matches!(fails, Err(Fp4Error::Recording { problem }) if problem.contains("no way")));
    let error = run(&model, vec![]).unwrap_err();
    assert_eq!(error.to_string(), "calibration: there are no batches");
    // Layers that depend on the batch.
    let differs = Calibration::of(&model).run(
        [batch(), batch().slice([0..2, 0..32])],
        |model: &Mlp, x: Tensor<2>| match x.dims() {
            [4, _] => model.forward(x),
            _ => model.head.forward(x),
        },
    );
    let error = differs.unwrap_err().to_string();
    assert!(error.contains("different layers"), "{error}");
    let mut quantized = model.clone();
    quantized.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let error = run(&quantized, vec![batch()]).unwrap_err();
    assert!(matches!(&error, Fp4Error::Attached { path, .. } if path == "layers.0.weight"));
    let infinite = batch().slice_fill([0..1, 0..1], f32::INFINITY);
    let error = run(&model, vec![infinite]).unwrap_err();
    assert!(matches!(&error, Fp4Error::Parameter { path, .. } if path == "layers.0.weight"));
    // A module in training is calibrated in inference mode.
    let trained = Mlp::new(&device.clone().autodiff());
    assert!(run(&trained, vec![batch()]).is_ok());
}

#[test]
fn an_interrupted_calibration_resumes_from_its_cache() {
    let device = Device::flex();
    let model = Mlp::new(&device);
    let batches = || (0..3).map(|seed| random(seed, [20, 32], &device)).collect::<Vec<_>>();
    let directory = std::env::temp_dir().join(format!("burn-fp4-cache-{}", std::process::id()));
    let run = |model: &Mlp, stop: usize, cache: bool| {
        let seen = RefCell::new(Vec::new());
        let mut options = CalibrationOptions::default().on_progress(|progress| {
            seen.borrow_mut().push((progress.done, progress.total));
            assert!(progress.done != stop, "killed");
        });
        if cache {
            options = options.cache(&directory);
        }
        let result = catch_unwind(AssertUnwindSafe(|| {
            Calibration::of(model)
                .options(options)
                .run(batches(), |model: &Mlp, x| model.forward(x))
                .unwrap()
        }));
        (result, seen.into_inner())
    };
    let (expected, seen) = run(&model, 0, false);
    assert_eq!(seen, [(1, 3), (2, 3), (3, 3)]);
    assert!(run(&model, 2, true).0.is_err());
    let mut files: Vec<_> = std::fs::read_dir(&directory).unwrap().map(Result::unwrap).collect();
    assert_eq!(files.len(), 1);
    let of_model = files.pop().unwrap().path();
    assert_eq!(std::fs::read_dir(&of_model).unwrap().count(), 2);
    let written = std::fs::metadata(of_model.join("00000.safetensors")).unwrap();
    let (found, _) = run(&model, 0, true);
    assert_eq!(found.unwrap(), expected.unwrap());
    let kept = std::fs::metadata(of_model.join("00000.safetensors")).unwrap();
    assert_eq!(written.modified().unwrap(), kept.modified().unwrap());
    // Another module has files of its own, and a file that is broken is named.
    let mut other = model.clone();
    other.head.weight = other.head.weight.map(|weight| weight * 2.0);
    assert!(run(&other, 0, true).0.is_ok());
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2);
    std::fs::write(of_model.join("00001.safetensors"), b"no").unwrap();
    let broken = Calibration::of(&model)
        .options(CalibrationOptions::default().cache(&directory))
        .run(batches(), |model: &Mlp, x| model.forward(x));
    assert!(matches!(broken, Err(Fp4Error::Cache { .. })));
    std::fs::remove_dir_all(directory).unwrap();
}

fn codes_by_gptq(options: CalibrationOptions<'_>) -> Vec<u8> {
    let device = Device::flex();
    let mut model = Mlp::new(&device);
    let batches: Vec<_> = (0..3).map(|seed| random(seed, [20, 32], &device)).collect();
    let config = Fp4Config::nvfp4().method(Method::GPTQ);
    let forward = |model: &Mlp, x| model.forward(x);
    model.quantize_fp4_sequential(&config, options, batches, forward).unwrap();
    [&model.layers[0], &model.layers[1], &model.head].into_iter().flat_map(codes).collect()
}

const CACHE_OF_KILLED: &str = "BURN_FP4_CACHE_OF_KILLED";

/// Runs in a separate process, which another test kills.
#[test]
#[ignore = "never ends"]
fn stands_still_in_the_middle() {
    let options = CalibrationOptions::default().on_progress(|progress| {
        if progress.done == 2 {
            loop {
                std::thread::park();
            }
        }
    });
    codes_by_gptq(options.cache(std::env::var(CACHE_OF_KILLED).expect("set by the other test")));
}

#[test]
fn a_killed_calibration_resumes() {
    let directory = std::env::temp_dir().join(format!("burn-fp4-killed-{}", std::process::id()));
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "calibration::stands_still_in_the_middle", "--ignored"])
        .env(CACHE_OF_KILLED, &directory)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let written = || {
        let of_model = std::fs::read_dir(&directory).ok()?.next()?.ok()?.path();
        let mut files: Vec<_> = std::fs::read_dir(of_model).ok()?.map(Result::unwrap).collect();
        files.sort_by_key(|file| file.file_name());
        let whole = files.iter().all(|file| file.path().extension().unwrap() == "safetensors");
        (whole && files.len() == 2).then_some(files)
    };
    let files = loop {
        if let Some(files) = written() {
            break files;
        }
        assert_eq!(process.try_wait().unwrap(), None, "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    process.kill().unwrap();
    process.wait().unwrap();
    let modified = || -> Vec<_> {
        files.iter().map(|file| file.metadata().unwrap().modified().unwrap()).collect()
    };
    let before = modified();
    let expected = codes_by_gptq(CalibrationOptions::default());
    assert_eq!(codes_by_gptq(CalibrationOptions::default().cache(&directory)), expected);
    assert_eq!(modified(), before, "what was known was found again");
    std::fs::remove_dir_all(directory).unwrap();
}

/// Statistics depend on the module, on the batches, and on the quantization of the layers before. A
/// cache of another calibration must not be used.
#[test]
fn a_cache_is_refused_by_another_calibration() {
    let device = Device::flex();
    let model = Mlp::new(&device);
    let batches = || (0..3).map(|seed| random(seed, [20, 32], &device)).collect::<Vec<_>>();
    let directory = std::env::temp_dir().join(format!("burn-fp4-caches-{}", std::process::id()));
    let forward = |model: &Mlp, x| model.forward(x);
    let calibrate = |model: &Mlp, memory: usize, cached: bool| {
        let options = CalibrationOptions::default().memory(memory);
        let options = if cached { options.cache(&directory) } else { options };
        Calibration::of(model).options(options).run(batches(), forward).unwrap()
    };
    // The same largest magnitudes; the same shapes of all operations.
    let mut pruned = model.clone();
    pruned.layers[0].weight = pruned.layers[0].weight.clone().map(|weight| {
        let small = weight.clone().abs().lower_elem(0.1);
        weight.mask_fill(small, 0.0)
    });
    for model in [&model, &pruned] {
        for memory in [1 << 30, 1] {
            assert_eq!(calibrate(model, memory, true), calibrate(model, memory, false));
            assert_eq!(calibrate(model, memory, true), calibrate(model, memory, false), "cached");
        }
    }
    let run = |activation: fn(Tensor<2>) -> Tensor<2>, cached: bool| {
        let options = CalibrationOptions::default();
        let options = if cached { options.cache(&directory) } else { options };
        let forward = |model: &Mlp, x| model.head.forward(activation(model.layers[0].forward(x)));
        Calibration::of(&model).options(options).run(batches(), forward).unwrap()
    };
    for activation in [Tensor::tanh, Tensor::sin] {
        assert_eq!(run(activation, true), run(activation, false));
    }
    let sequential = |config: &Fp4Config, cached: bool| {
        let options = CalibrationOptions::default();
        let options = if cached { options.cache(&directory) } else { options };
        let mut model = model.clone();
        model.quantize_fp4_sequential(config, options, batches(), forward).unwrap();
        codes(&model.head)
    };
    let gptq = Fp4Config::nvfp4().method(Method::GPTQ);
    for config in [gptq.clone(), gptq.exclude("layers.0.*")] {
        assert_eq!(sequential(&config, true), sequential(&config, false));
    }
    std::fs::remove_dir_all(directory).unwrap();
}

/// Reads the codes of a weight.
fn codes(linear: &Linear) -> Vec<u8> {
    let packed = linear.weight.reparameterization::<PackedWeight>().expect("quantized");
    packed.tensor::<2>().codes().into_data().iter::<u8>().collect()
}

#[test]
fn sequential_quantization_calibrates_on_quantized_layers() {
    let device = Device::flex();
    let batches = || (0..3).map(|seed| random(seed, [40, 32], &device)).collect::<Vec<_>>();
    for config in [
        Fp4Config::nvfp4().method(Method::GPTQ),
        corrected_by(0.0),
        Fp4Config::new(Fp4Scheme::mxfp4().with_method(Method::CoordinateDescent)),
        corrected_by(0.8).exclude("layers.1.*"),
    ] {
        let dense = Mlp::new(&device);
        let mut model = dense.clone();
        let report = model
            .quantize_fp4_sequential(
                &config,
                CalibrationOptions::default(),
                batches(),
                |model: &Mlp, x| model.forward(x),
            )
            .unwrap();
        let by_gptq = config.scheme.method.gptq();
        assert_eq!(report.relative_output_error().is_some(), by_gptq.is_some(), "{report}");
        let corrects = by_gptq.is_some_and(|options| options.correction > 0.0);
        let skips = !config.exclude.is_empty();
        assert_eq!(report.quantized().count(), if skips { 2 } else { 3 });
        // By hand: each layer by its inputs behind the layers that are quantized already.
        let mut by_hand = dense.clone();
        for layer in ["layers.0", "layers.1", "head"] {
            if skips && layer == "layers.1" {
                continue;
            }
            let path = format!("{layer}.weight");
            let plain = by_hand.clone().materialize();
            let mut sum = ops::GramSum::new(32);
            for batch in batches() {
                let [found, expected] =
                    [&plain, &dense].map(|model| model.input_of(&path, batch.clone()));
                match corrects {
                    true => sum.add_with_drift(found, expected).unwrap(),
                    false => sum.add(found).unwrap(),
                }
            }
            let mut of_layer = Calibration::new();
            of_layer.insert(&path, 0, sum.finish().unwrap());
            let config = config.clone().include(format!("{layer}.*")).with_calibration(&of_layer);
            by_hand.quantize_fp4(&config).unwrap();
        }
        for (found, expected) in
            [(&model.layers[0], &by_hand.layers[0]), (&model.head, &by_hand.head)]
        {
            assert_eq!(codes(found), codes(expected));
        }
        assert_eq!(floats(model.forward(batches().remove(0))), {
            floats(by_hand.forward(batches().remove(0)))
        });
        let Outcome::Quantized { scheme, .. } = &report.parameters[0].outcome else {
            panic!("{report}")
        };
        assert_ne!(scheme.method, Method::SSE);
    }
}

/// Quantizes by GPTQ with a correction.
fn corrected_by(correction: f64) -> Fp4Config {
    Fp4Config::nvfp4().method(Method::Gptq(Gptq { correction, ..Gptq::DEFAULT }))
}

#[test]
fn a_correction_brings_outputs_nearer_to_those_of_the_dense_model() {
    for (name, device, _) in devices() {
        let dense = Mlp::new(&device);
        let drawn = |seed| random(seed, [60, 32], &device);
        let batches = || (0..4).map(drawn).collect::<Vec<_>>();
        let error = |correction, hadamard: Option<ops::Hadamard>| {
            let mut model = dense.clone();
            let mut config = corrected_by(correction);
            if let Some(hadamard) = hadamard {
                config = config.hadamard(hadamard);
            }
            let options = CalibrationOptions::default();
            let forward = |model: &Mlp, x| model.forward(x);
            model.quantize_fp4_sequential(&config, options, batches(), forward).unwrap();
            let held_out = (4..8).map(drawn);
            let differences = held_out.flat_map(|batch| {
                let outputs = [&model, &dense].map(|model| floats(model.forward(batch.clone())));
                let [found, expected] = outputs;
                found.into_iter().zip(expected).map(|(found, expected)| (found - expected).powi(2))
            });
            differences.sum::<f32>()
        };
        // CubeCL's CPU runtime compiles GPTQ for a quarter of a minute per scheme.
        let transforms = if name == "cpu" { 1 } else { 2 };
        let hadamards = [None, Some(ops::Hadamard::of_size(32).unwrap())];
        for hadamard in hadamards.into_iter().take(transforms) {
            let [without, half, all] = [0.0, 0.5, 1.0].map(|share| error(share, hadamard));
            assert!(half < 0.95 * without, "{name} {hadamard:?}: {half} {without}");
            assert!(all < 0.95 * without, "{name} {hadamard:?}: {all} {without}");
        }
    }
    for correction in [-0.1, 1.1, f64::NAN] {
        let config = corrected_by(correction);
        let error = Mlp::new(&Device::flex()).quantize_fp4(&config).unwrap_err();
        assert!(error.to_string().contains("give a share from 0 to 1"), "{error}");
    }
}

#[test]
fn weights_are_divided_among_several_devices() {
    let batches =
        |device: &Device| (0..4).map(|seed| random(seed, [40, 32], device)).collect::<Vec<_>>();
    let forward = |model: &Mlp, x| model.forward(x);
    let hessian = Fp4Config::new(Fp4Scheme::nvfp4().with_method(Method::Hessian));
    for (name, device, _) in devices() {
        let dense = Mlp::new(&device);
        let there = [device.clone(), other_device(&device)];
        let options = || CalibrationOptions::default().devices(there.clone());
        let calibration =
            Calibration::of(&dense).options(options()).run(batches(&device), forward).unwrap();
        assert_eq!(calibration.devices(), there, "{name}");
        // The same statistics, gathered by nobody.
        let mut elsewhere = Calibration::new();
        for (path, axis, _, gram) in calibration.iter() {
            elsewhere.insert(path, axis, gram.clone());
        }
        let gptq = Fp4Config::nvfp4().method(Method::GPTQ);
        // GPTQ compiles for a quarter of a minute per device on CubeCL's CPU runtime.
        let skipped = usize::from(name == "cpu");
        for config in [gptq, hessian.clone()].into_iter().skip(skipped) {
            let quantized = |calibration: &Calibration| {
                let mut model = dense.clone();
                let config = config.with_calibration(calibration);
                let report = model.quantize_fp4(&config).unwrap();
                assert_eq!(report.quantized().count(), 3, "{name}");
                let outputs = report.relative_output_error();
                assert_eq!(outputs.is_some(), config.scheme.method == Method::GPTQ, "{name}");
                (model, [report.relative_error(), outputs.unwrap_or_default()])
            };
            let (on_one, expected) = quantized(&elsewhere);
            let (on_two, found) = quantized(&calibration);
            assert_eq!(on_two.devices(), on_one.devices(), "{name}");
            // GPTQ of the second device adds up in another order: only outputs are compared.
            assert_eq!(codes(&on_two.layers[0]), codes(&on_one.layers[0]), "{name}");
            assert_eq!(codes(&on_two.head), codes(&on_one.head), "{name}");
            for (found, expected) in found.into_iter().zip(expected) {
                assert!((found - expected).abs() <= 0.02 * expected, "{name}: {found} {expected}");
            }

            let mut sequential = dense.clone();
            sequential
                .quantize_fp4_sequential(&config, options(), batches(&device), forward)
                .unwrap();
            assert_eq!(sequential.devices(), on_one.devices(), "{name}");
            assert_eq!(codes(&sequential.layers[0]), codes(&on_one.layers[0]), "{name}");
        }
        let twice = [device.clone(), device.clone()];
        let options = CalibrationOptions::default().devices(twice);
        let error =
            Calibration::of(&dense).options(options).run(batches(&device), forward).unwrap_err();
        assert!(error.to_string().contains("named twice"), "{error}");
    }
}

#[test]
fn statistics_are_recorded_for_the_methods_of_a_config() {
    let forward = |model: &Mlp, x| model.forward(x);
    let by_hessian = Fp4Config::new(Fp4Scheme::nvfp4().with_method(Method::Hessian));
    let gptq = Fp4Config::nvfp4().method(Method::GPTQ);
    for (name, device, _) in devices() {
        let model = Mlp::new(&device);
        let batches = [random(1, [50, 32], &device), random(2, [50, 32], &device)];
        let calibrate = |options| {
            Calibration::of(&model).options(options).run(batches.clone(), forward).unwrap()
        };
        let whole = calibrate(CalibrationOptions::default().for_config(&gptq));
        let blocks = calibrate(CalibrationOptions::default().for_config(&by_hessian));
        for (path, axis, _, gram) in whole.iter() {
            assert!(gram.is_whole());
            let found = blocks.get(path, axis).unwrap();
            assert_eq!((found.block_size(), found.rows()), (16, 100), "{name} {path}");
            let size = gram.diagonal().fold(0.0, f64::max) as f32;
            let expected = gram.blocks(16).unwrap();
            for (found, expected) in
                found.blocks(16).unwrap().values().iter().zip(expected.values())
            {
                assert!((found - expected).abs() <= 1e-5 * size, "{name} {path}");
            }
        }
        let chosen = |config: &Fp4Config, calibration: &Calibration| {
            let report = model.clone().quantize_fp4(&config.with_calibration(calibration)).unwrap();
            match report.parameters[0].outcome {
                Outcome::Quantized { scheme, .. } => scheme.method,
                _ => panic!("{report}"),
            }
        };
        let hessian = Method::Hessian;
        assert_eq!(chosen(&by_hessian, &blocks), hessian);
        assert_eq!(chosen(&by_hessian, &whole), hessian);
        assert_eq!(chosen(&gptq, &whole), Method::Gptq(Gptq::default()));
        // Too little is known for these: an error where that holds for all weights.
        let mut mxfp4 = by_hessian.clone();
        mxfp4.scheme = Fp4Scheme::mxfp4().with_method(Method::Hessian);
        for config in [&gptq, &mxfp4] {
            let unusable = model.clone().quantize_fp4(&config.with_calibration(&blocks));
            assert!(matches!(unusable, Err(Fp4Error::Uncalibrated { .. })), "{name}");
        }
        let mut some = blocks.clone();
        some.insert("head.weight", 0, whole.get("head.weight", 0).unwrap().clone());
        let report = model.clone().quantize_fp4(&gptq.with_calibration(&some)).unwrap();
        assert!(unwrapped(&report).contains("calibrated for another method"), "{report}");
        let head = report.parameters.iter().find(|parameter| parameter.path == "head.weight");
        let Outcome::Quantized { scheme, fallback: None, .. } = head.unwrap().outcome else {
            panic!("{report}")
        };
        assert_eq!(scheme.method, Method::Gptq(Gptq::default()), "{name}");
    }
}

#[test]
fn tied_weights_are_quantized_after_their_last_use() {
    let device = Device::flex();
    let layer = seeded(LinearConfig::new(32, 32).init(&device), 4);
    let mut tied = Tied { same: layer.clone(), layer };
    let batches: Vec<_> = (0..2).map(|seed| random(seed, [2, 30, 32], &device)).collect();
    let mut expected = tied.clone();
    let run = |model: &Tied, x| model.run(x, None);
    let calibration = Calibration::of(&tied).run(batches.clone(), run).unwrap();
    let config = Fp4Config::nvfp4().method(Method::GPTQ);
    expected.quantize_fp4(&config.with_calibration(&calibration)).unwrap();
    tied.quantize_fp4_sequential(&config, CalibrationOptions::default(), batches, run).unwrap();
    assert_eq!(codes(&tied.layer), codes(&expected.layer));
    assert_eq!(codes(&tied.same), codes(&expected.same));
}

#[test]
fn a_resumed_sequential_run_equals_an_uninterrupted_one() {
    let device = Device::flex();
    // The first weight is used twice, the second once between.
    let build = || {
        let layer = seeded(LinearConfig::new(32, 32).init(&device), 4);
        Tied { layer, same: seeded(LinearConfig::new(32, 32).init(&device), 5) }
    };
    let directory = std::env::temp_dir().join(format!("burn-fp4-resumed-{}", std::process::id()));
    let quantize = |stop: usize, cache: bool| {
        let mut model = build();
        let batches: Vec<_> = (0..2).map(|seed| random(seed, [2, 30, 32], &device)).collect();
        let mut options = CalibrationOptions::default()
            .on_progress(|progress| assert!(progress.done != stop, "killed"));
        if cache {
            options = options.cache(&directory);
        }
        let config = Fp4Config::nvfp4().method(Method::GPTQ);
        let run = |model: &Tied, x| model.run(x, None);
        let done = catch_unwind(AssertUnwindSafe(|| {
            model.quantize_fp4_sequential(&config, options, batches, run).unwrap();
        }));
        done.map(|()| [codes(&model.layer), codes(&model.same)]).ok()
    };
    let expected = quantize(0, false).expect("it ends");
    for stop in 1..=3 {
        assert!(quantize(stop, true).is_none(), "stopped after {stop}");
        assert_eq!(quantize(0, true).as_ref(), Some(&expected), "stopped after {stop}");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

#[test]
fn a_tied_weight_may_stay_dense_in_one_place() {
    let device = Device::flex();
    let layer = seeded(LinearConfig::new(32, 32).init(&device), 4);
    let dense = floats(layer.weight.val());
    let mut tied = Tied { same: layer.clone(), layer };
    let batches: Vec<_> = (0..2).map(|seed| random(seed, [2, 30, 32], &device)).collect();
    let config = Fp4Config::nvfp4().method(Method::GPTQ).exclude("same.*");
    let run = |model: &Tied, x| model.run(x, None);
    let options = CalibrationOptions::default();
    let report = tied.quantize_fp4_sequential(&config, options, batches, run).unwrap();
    let Outcome::Quantized { scheme, .. } = &report.parameters[0].outcome else {
        panic!("{report}")
    };
    assert_eq!(scheme.method, Method::Gptq(Gptq::default()));
    assert_eq!(floats(tied.same.weight.val()), dense);
}

/// Layers with the same inputs, and one between them with other inputs.
#[derive(Module, Debug)]
struct Siblings {
    query: Linear,
    output: Linear,
    key: Linear,
    value: Linear,
}

impl Siblings {
    /// More channels than a group of GPTQ has.
    const WIDTH: usize = 160;

    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let query = linear(Self::WIDTH, 40);
        let (key, value) = (linear(Self::WIDTH, 7), linear(Self::WIDTH, 17));
        seeded(Self { query, output: linear(40 + 7 + 17, 24), key, value }, 6)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let inner = [&self.query, &self.key, &self.value].map(|layer| layer.forward(x.clone()));
        self.output.forward(Tensor::cat(inner.to_vec(), 1).tanh())
    }

    fn layers(&self) -> [(&'static str, &Linear); 4] {
        let Self { query, key, value, output } = self;
        [("query", query), ("key", key), ("value", value), ("output", output)]
    }
}

#[test]
fn weights_with_the_same_inputs_get_the_codes_they_get_alone() {
    let gptq = Gptq::default();
    let forward = |model: &Siblings, x| model.forward(x);
    for (name, device, _) in devices() {
        let dense = Siblings::new(&device);
        let batch = || [random(3, [300, Siblings::WIDTH], &device)];
        let calibration = Calibration::of(&dense).run(batch(), forward).unwrap();
        let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
        // GPTQ compiles for half a minute per scheme on CubeCL's CPU runtime.
        let schemes = [by_row, Fp4Scheme::mxfp4(), Fp4Scheme::nvfp4()];
        let count = if name == "cpu" { 1 } else { 3 };
        for scheme in schemes.into_iter().take(count) {
            let config = Fp4Config::new(scheme).method(Method::Gptq(gptq));
            let mut at_once = dense.clone();
            at_once.quantize_fp4(&config.clone().with_calibration(&calibration)).unwrap();
            let mut in_turn = dense.clone();
            let options = CalibrationOptions::default();
            in_turn.quantize_fp4_sequential(&config, options, batch(), forward).unwrap();
            for (at, (path, layer)) in dense.layers().into_iter().enumerate() {
                let gram = calibration.get(&format!("{path}.weight"), 0).unwrap();
                let alone = ops::quantize_gptq(layer.weight.val(), 0, &scheme, &gptq, gram);
                let expected = alone.unwrap().to_packed().unwrap();
                for (how, model) in [("at once", &at_once), ("in turn", &in_turn)] {
                    // Behind quantized layers the inputs are others.
                    if (how, path) == ("in turn", "output") {
                        continue;
                    }
                    let (_, layer) = model.layers()[at];
                    let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
                    let found = packed.tensor::<2>().to_packed().unwrap();
                    assert_same(&format!("{name} {scheme:?} {how} {path}"), &found, &expected);
                }
            }
        }
    }
}

#[test]
fn recorded_operations_have_the_outputs_of_the_module() {
    // A replayed pass has the bits of the module: the last layer has the same inputs.
    let device = Device::flex();
    let model = Mlp::new(&device);
    let x = random(1, [8, 32], &device);
    let hidden = model.layers.iter().fold(x.clone(), |x, layer| layer.forward(x).tanh());
    let calibration = Calibration::of(&model).run([x], |model: &Mlp, x| model.forward(x)).unwrap();
    assert_eq!(calibration.get("head.weight", 0).unwrap(), &ops::gram(hidden).unwrap());
}
