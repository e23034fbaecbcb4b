//! The example `llama` against `transformers`, dense and in FP4.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Display};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::SystemTime;

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_fp4::checkpoints::Value;
use burn_fp4::ops::KvFormat;
use burn_fp4::{
    Activations, CalibrationOptions, CheckpointMap, Fp4Config, Fp4Format, Fp4Linear, Fp4Module,
    Fp4Scheme, Method, Outcome, ParameterReport,
};
use llama::{
    CalibrationWindows, Folder, Llama, LlamaConfig, Projection, QuantizeFolder, QuantizeOptions,
    QuantizedFolder, Sampling, Tokens, Windows, generate, perplexity,
};
use safetensors::SafeTensors;
use tests::tensors::floats;

/// Made with `transformers` 5.23: tests/interop/llama.py.
static GOLDEN: &[u8] = include_bytes!("golden/llama.safetensors");

const BOOK: &str = include_str!("../examples/data/genesis.txt");

fn golden(name: &str) -> TensorData {
    let file = SafeTensors::deserialize(GOLDEN).expect("the golden file");
    let tensor = file.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (shape, words) = (tensor.shape().to_vec(), tensor.data().chunks_exact(4));
    let words = words.map(|b| [b[0], b[1], b[2], b[3]]);
    match tensor.dtype() {
        safetensors::Dtype::F32 => TensorData::new(words.map(f32::from_le_bytes).collect(), shape),
        _ => TensorData::new(words.map(i32::from_le_bytes).collect::<Vec<_>>(), shape),
    }
}

fn ids(name: &str) -> Vec<u32> {
    golden(name).iter::<i32>().map(|id| id as u32).collect()
}

fn folder(name: &str) -> Folder {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(name);
    Folder::open(&path).unwrap_or_else(|error| panic!("{name}: {error:?}"))
}

fn load<L: Projection>(folder: &Folder) -> Llama<L> {
    folder.load(&Device::flex()).unwrap_or_else(|error| panic!("{error:?}")).0
}

/// Returns a path that does not exist.
fn out(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("llama").join(name);
    if path.exists() {
        std::fs::remove_dir_all(&path).expect("an old folder");
    }
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    path
}

/// Computes the largest difference of two lists.
fn distance(left: &[f32], right: &[f32]) -> f32 {
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(|(left, right)| (left - right).abs()).fold(0.0, f32::max)
}

const GREEDY: Sampling =
    Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 1, sequences: 1 };

fn greedy<L: Projection>(folder: &Folder, model: &Llama<L>) -> Vec<u32> {
    let prompt = ids("genesis.prompt");
    let found = generate(model, &folder.config, &prompt, 200, GREEDY, &Device::flex());
    found.expect("200 tokens").sequences.remove(0)
}

#[test]
fn dense_logits_match_transformers() {
    for name in ["genesis", "llama3", "qwen2", "qwen3"] {
        let (folder, device) = (folder(name), Device::flex());
        let tokens = Tensor::<2, Int>::from_data(golden(&format!("{name}.tokens")), &device);
        let expected: Vec<f32> = golden(&format!("{name}.logits")).iter().collect();
        let found = floats(load::<Linear>(&folder).forward(tokens.clone()));
        let most = distance(&found, &expected);
        assert!(most < 1e-4, "{name}: {most}");
        println!("{name}: {most:.2e} of {:.1}", distance(&expected, &vec![0.0; expected.len()]));
        let other = floats(load::<Fp4Linear>(&folder).forward(tokens));
        assert_eq!(other, found, "{name}: dense, the other linear layer is the same");
    }
}

#[test]
fn cached_logits_match_and_200_greedy_tokens_match_transformers() {
    let (folder, device) = (folder("genesis"), Device::flex());
    let mut model = load::<Linear>(&folder);
    let tokens = Tensor::<2, Int>::from_data(golden("genesis.tokens"), &device);
    let [batch, count] = tokens.dims();
    let dense = floats(model.forward(tokens.clone()));
    // A rounding that differs in its last bit may take another code.
    let formats = KvFormat::ALL.map(|format| (Some(format), 0.05));
    for (format, tolerance) in formats.into_iter().chain([(None, 2e-5)]) {
        model.set_kv_format(format).expect("heads of whole blocks");
        let whole = model.forward(tokens.clone());
        let lost = distance(&floats(whole.clone()), &dense);
        assert_eq!(lost > 0.0, format.is_some(), "{format:?}: {lost}");
        // Measured: 0.57 in FP8, 1.83 in NVFP4, 1.22 with transformed keys.
        assert!(lost < 2.5, "{format:?}: {lost}");
        let mut kv_cache = model.kv_cache(batch, count + 3);
        // One token at a time, and several.
        for (start, length) in [(0, 5), (5, 1), (6, 1), (7, 20), (27, count - 27)] {
            let part;
            let positions = Tensor::arange(start as i64..(start + length) as i64, &device);
            let inputs = (tokens.clone().narrow(1, start, length), positions);
            (kv_cache, part) = model.forward_cached(kv_cache, inputs);
            let expected = whole.clone().narrow(1, start + length - 1, 1).squeeze_dim::<2>(1);
            let most = distance(&floats(part), &floats(expected));
            assert!(most < tolerance, "{format:?} from {start}: {most}, {lost} from dense");
        }
    }
    assert_eq!(greedy(&folder, &model), ids("genesis.greedy"));
}

#[test]
fn an_int8_head_keeps_greedy_tokens_and_nearly_the_perplexity() {
    let (folder, device) = (folder("genesis"), Device::flex());
    let tokenizer = folder.tokenizer().expect("a tokenizer");
    let tokens = Tokens::new(&tokenizer, &BOOK[BOOK.len() - 4000..], 1.0).expect("tokens");
    let windows = Windows { window: 256, stride: 128, batch: 8 };
    let nats = |model: &Llama<Fp4Linear>| {
        perplexity(model, tokens.held_out(), windows, &device).expect("a number").nats
    };
    let mut model = load::<Fp4Linear>(&folder);
    let dense = nats(&model);
    assert!(model.round_head_to_int8().expect("blocks of 32"));
    let found = nats(&model);
    assert!(found != dense && (found - dense).abs() < 1e-3, "{found} for {dense}");
    assert_eq!(greedy(&folder, &model)[..50], ids("genesis.greedy")[..50]);
    assert!(!model.round_head_to_int8().expect("nothing to do"), "it is rounded already");
    let mut quantized = load::<Fp4Linear>(&folder);
    quantized.quantize_tied_embedding(Fp4Format::NvFp4).expect("blocks of 16");
    assert!(!quantized.round_head_to_int8().expect("nothing to do"), "an FP4 head stays one");
}

#[test]
fn an_lm_head_of_its_own_is_freed_when_it_is_rounded() {
    let (folder, device) = (folder("qwen3"), Device::flex());
    let mut model = load::<Fp4Linear>(&folder);
    assert!(model.has_lm_head(), "the test needs one");
    let tokens = Tensor::<2, Int>::from_data(golden("qwen3.tokens"), &device);
    let dense = floats(model.forward(tokens.clone()));
    let parameters = model.num_params();
    assert!(model.round_head_to_int8().expect("blocks of 32"));
    assert!(!model.has_lm_head() && model.num_params() < parameters);
    let rounded = floats(model.forward(tokens));
    let most = distance(&rounded, &dense);
    let largest = distance(&dense, &vec![0.0; dense.len()]);
    assert!(most > 0.0 && most < 0.02 * largest, "{most} of {largest}");
    assert!(!model.quantize_tied_embedding(Fp4Format::NvFp4).expect("nothing to do"));
    let out = std::env::temp_dir().join(format!("burn-fp4-rounded-{}", std::process::id()));
    let error = folder.save(&model, &out, "plain").expect_err("no lm_head");
    assert!(error.to_string().contains("lm_head.weight: lost"), "{error}");
}

#[test]
#[ignore = "slow"]
fn int8_activations_keep_nearly_the_perplexity_of_fp4() {
    let (folder, device) = (folder("genesis"), Device::flex());
    let tokenizer = folder.tokenizer().expect("a tokenizer");
    let tokens = Tokens::new(&tokenizer, &BOOK[BOOK.len() - 4000..], 1.0).expect("tokens");
    let windows = Windows { window: 256, stride: 128, batch: 8 };
    for format in Fp4Format::ALL {
        let mut model = load::<Fp4Linear>(&folder);
        let config = llama::fp4_config(&model, llama::scheme(format, Method::SSE));
        model.quantize_fp4(&config).expect("quantized");
        let nats = |model: &Llama<Fp4Linear>| {
            perplexity(model, tokens.held_out(), windows, &device).expect("a number").nats
        };
        let in_f32 = nats(&model);
        model.set_activations(Activations::Int8);
        let in_int8 = nats(&model);
        assert!(in_f32 != in_int8 && (in_f32 - in_int8).abs() < 5e-3, "{in_f32}, {in_int8}");
    }
}

#[test]
fn perplexity_matches_transformers() {
    let (folder, device) = (folder("genesis"), Device::flex());
    let model = load::<Linear>(&folder);
    let tokenizer = folder.tokenizer().expect("a tokenizer");
    let held_out = &BOOK[BOOK.len() - 4000..];
    let tokens = Tokens::new(&tokenizer, held_out, 1.0).expect("tokens");
    let expected = {
        let file = SafeTensors::deserialize(GOLDEN).expect("the golden file");
        let bytes = file.tensor("genesis.nats").expect("a number").data().to_vec();
        f64::from_le_bytes(bytes.try_into().expect("8 bytes"))
    };
    for batch in [1, 8] {
        let windows = Windows { window: 256, stride: 128, batch };
        let found = perplexity(&model, tokens.held_out(), windows, &device).expect("a number");
        assert_eq!(found.tokens, 3999);
        assert!((found.nats - expected).abs() < 1e-5, "{} for {expected}", found.nats);
        assert_eq!(found.perplexity, found.nats.exp());
    }
    for (window, stride) in [(8, 8), (8, 0), (1, 1)] {
        let windows = Windows { window, stride, batch: 1 };
        assert!(perplexity(&model, tokens.held_out(), windows, &device).is_err());
    }
}

/// Collects codes and block scales by the path of the weight.
fn codes<M: Module>(model: &M) -> BTreeMap<String, [Vec<u8>; 2]> {
    let saved = model.checkpoint_fp4(&CheckpointMap::new()).expect("a checkpoint");
    let packed = saved.weights.into_iter().filter_map(|weight| match weight.value {
        Value::Fp4(fp4) => Some((weight.name, [fp4.codes.into_owned(), fp4.scales.into_owned()])),
        Value::Plain(_) | Value::Fp8(_) => None,
    });
    packed.collect()
}

/// Quantizes a model by `sse`.
fn quantized(folder: &Folder, format: Fp4Format) -> Llama<Linear> {
    let mut model = load::<Linear>(folder);
    let config = llama::fp4_config(&model, llama::scheme(format, Method::SSE));
    let report = model.quantize_fp4(&config).expect("quantized");
    assert_eq!(report.quantized().count(), 28);
    // Engines fuse q, k and v, and gate and up: these share a tensor scale.
    let shared = report.parameters.iter().filter(|one| {
        matches!(&one.outcome, Outcome::Quantized { shares_scale_with: Some(_), .. })
    });
    assert_eq!(shared.count(), 20);
    model
}

#[test]
fn two_dialects_keep_the_codes_and_the_greedy_tokens_of_transformers() {
    let folder = folder("genesis");
    for format in Fp4Format::ALL {
        let model = quantized(&folder, format);
        let expected = ids(&format!("{format}.greedy"));
        let mut found = Vec::new();
        for dialect in ["compressed-tensors", "modelopt"] {
            let path = out(&format!("{dialect}-{format}"));
            folder.save(&model, &path, dialect).expect("a folder");
            let saved = Folder::open(&path).expect("a folder");
            let loaded = load::<Fp4Linear>(&saved);
            assert_eq!(greedy(&saved, &loaded), expected, "{dialect} {format}");
            assert!(saved.tokenizer().is_ok(), "the tokenizer comes along");
            found.push(codes(&loaded));
        }
        assert_eq!(found[0].len(), 28);
        assert!(found[0] == found[1] && found[0] == codes(&model), "{format}");
    }
}

#[test]
#[ignore = "slow"]
fn gptq_calibrates_once_or_layer_by_layer() {
    let folder = folder("genesis");
    let tokens = Tokens::new(&folder.tokenizer().expect("a tokenizer"), BOOK, 0.1).unwrap();
    let calibration = CalibrationWindows { windows: 4, context: 64, seed: 1 };
    let model = load::<Linear>(&folder);
    for method in [None, Some(Method::SSE)] {
        let (format, damping) = (Fp4Format::NvFp4, Some(0.1));
        let options = QuantizeOptions {
            format,
            method,
            sequential: false,
            damping,
            correction: None,
            hadamard: None,
            calibration,
        };
        let error = options.config(&model).expect_err("no damping without GPTQ").to_string();
        assert!(error.contains("--damping and --correction are for --method gptq"), "{error}");
    }
    for sequential in [false, true] {
        let (format, damping, method) = (Fp4Format::NvFp4, Some(0.1), Method::GPTQ);
        let options = QuantizeOptions {
            format,
            method: Some(method),
            sequential,
            damping,
            correction: None,
            hadamard: None,
            calibration,
        };
        let config = options.config(&model).expect("a configuration");
        let path = out(&format!("gptq-{sequential}"));
        let report = quantize(&folder, &config, &options, &tokens, false).run(&path);
        let report = report.expect("quantized").report;
        assert_eq!(report.quantized().count(), 28);
        let fell = |one: &ParameterReport| match &one.outcome {
            Outcome::Quantized { fallback, .. } => fallback.is_some(),
            _ => true,
        };
        assert!(!report.quantized().any(fell), "{report}");
    }
}

#[test]
fn a_method_of_a_recipe_table_is_calibrated_for() {
    let folder = folder("genesis");
    let tokens = Tokens::new(&folder.tokenizer().expect("a tokenizer"), BOOK, 0.1).unwrap();
    let file = burn_fp4::Recipe::parse(
        r#"
        method = "sse"
        weights = [
            { names = ["*.mlp.*"], format = "mxfp4" },
            { names = ["*.o_proj"], method = "hessian" },
        ]
        "#,
    );
    let config = Fp4Config::of_recipe(&file.expect("a recipe"), &llama::names());
    // Format and method of the options do not count: the configuration comes from the file.
    let options = options(Method::SSE, false);
    let path = out("recipe-table");
    let config = config.expect("a configuration");
    let report = quantize(&folder, &config, &options, &tokens, false).run(&path);
    let report = report.expect("quantized").report;
    assert_eq!(report.quantized().count(), 28);
    for one in report.quantized() {
        let Outcome::Quantized { scheme, fallback, .. } = &one.outcome else {
            panic!("{}: quantized by this call", one.path);
        };
        let mxfp4 = one.path.contains(".mlp.");
        assert_eq!(scheme.format() == Fp4Format::MxFp4, mxfp4, "{}", one.path);
        let hessian = one.path.contains("o_proj");
        assert_eq!((scheme.method == Method::Hessian), hessian, "{}", one.path);
        assert!(fallback.is_none(), "{report}");
    }
}

fn options(method: Method, sequential: bool) -> QuantizeOptions {
    let calibration = CalibrationWindows { windows: 12, context: 48, seed: 1 };
    let (format, method) = (Fp4Format::NvFp4, Some(method));
    let (damping, correction, hadamard) = (None, None, None);
    QuantizeOptions { format, method, sequential, damping, correction, hadamard, calibration }
}

/// A quantization of a folder, on the host.
fn quantize<'a>(
    folder: &'a Folder,
    config: &'a Fp4Config,
    options: &'a QuantizeOptions,
    tokens: &'a Tokens,
    resume: bool,
) -> QuantizeFolder<'a> {
    static DEVICE: LazyLock<Device> = LazyLock::new(Device::flex);
    let dialect = "compressed-tensors";
    QuantizeFolder { folder, config, options, tokens, dialect, device: &DEVICE, resume }
}

/// Tokens of the models that have 40 of them, and of the one whose tokens are bytes.
fn few_tokens() -> Tokens {
    let text: String = (0..4000_u32).map(|at| char::from(32 + (at * at / 7 % 8) as u8)).collect();
    Tokens::new(&folder("genesis").tokenizer().expect("a tokenizer"), &text, 0.1).expect("tokens")
}

/// Checks that two folders have the same files.
fn assert_same_files(found: &Path, expected: &Path) {
    let names = |path: &Path| -> BTreeSet<_> {
        let entries = std::fs::read_dir(path).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name()).collect()
    };
    assert_eq!(names(found), names(expected));
    for name in names(found) {
        let [found, expected] =
            [found, expected].map(|path| std::fs::read(path.join(&name)).expect("a file"));
        assert!(found == expected, "{}", name.display());
    }
}

/// Folders of the same model: quantized stage by stage, and as a whole.
#[test]
#[ignore = "slow"]
fn a_folder_stage_by_stage_has_the_bytes_of_the_whole_model() {
    let tokens = few_tokens();
    for (name, method, sequential) in [
        ("genesis", Method::GPTQ, false),
        ("genesis", Method::GPTQ, true),
        ("genesis", Method::SSE, false),
        ("llama3", Method::GPTQ, true),
        ("qwen2", Method::GPTQ, true),
        ("qwen3", Method::Hessian, false),
        ("qwen3", Method::GPTQ, true),
    ] {
        let (folder, options) = (folder(name), options(method, sequential));
        let mut model = load::<Linear>(&folder);
        let config = options.config(&model).expect("a configuration");
        let paths =
            ["stages", "whole"].map(|way| out(&format!("{way}-{name}-{method}-{sequential}")));
        let job = quantize(&folder, &config, &options, &tokens, false);
        let found = job.run(&paths[0]).unwrap_or_else(|error| panic!("{name}: {error:?}"));

        let (calibration, device) = (options.calibration, Device::flex());
        let report = if sequential {
            calibration.quantize_sequential(&mut model, &config, &tokens, &device)
        } else {
            let options = CalibrationOptions::default().memory(512 << 20).for_config(&config);
            let known = calibration.run(&model, options, &tokens, &device).expect("statistics");
            let config = match method {
                Method::SSE => config.clone(),
                _ => config.with_calibration(&known),
            };
            model.quantize_fp4(&config).map_err(Into::into)
        };
        let written = folder.save(&model, &paths[1], job.dialect).expect("a folder");
        let mut report = report.expect("quantized");
        for (one, found) in report.parameters.iter_mut().zip(&found.report.parameters) {
            // Sizes in memory and in files.
            (one.bytes_before, one.bytes_after) = (found.bytes_before, found.bytes_after);
        }
        assert_eq!(found.report, report, "{name} {method}");
        assert_eq!((found.files, found.bytes), (written.files, written.bytes), "{name} {method}");
        assert_same_files(&paths[0], &paths[1]);
    }
}

/// Quantizes the model of bytes by `sse`.
fn quantized_by_sse(sequential: bool, name: &str) -> Result<QuantizedFolder, impl Debug + Display> {
    let (folder, tokens) = (folder("genesis"), few_tokens());
    let options = options(Method::SSE, sequential);
    let config = options.config(&load::<Linear>(&folder)).expect("a configuration");
    quantize(&folder, &config, &options, &tokens, false).run(&out(name))
}

#[test]
fn a_report_on_a_folder_has_the_sizes_of_its_files() {
    let found = quantized_by_sse(false, "sizes").expect("quantized");
    // The model is bf16 in its files, and f32 in memory.
    let folder = folder("genesis");
    let source = folder.checkpoint().model().expect("a model");
    let before: usize = source.weights.iter().map(|weight| weight.bytes()).sum();
    assert_eq!(found.report.bytes_before(), before);
    let after = found.report.bytes_after() as f64;
    assert!((after / found.bytes as f64 - 1.0).abs() < 0.01, "{after} of {}", found.bytes);
}

#[test]
fn layer_by_layer_without_a_method_that_calibrates_is_refused() {
    let error = quantized_by_sse(true, "sse-sequential").expect_err("nothing to calibrate");
    let error = error.to_string();
    assert!(error.contains("--sequential: ") && error.contains("choose gptq"), "{error}");
}

#[test]
fn a_reference_with_another_vocabulary_is_refused() {
    let (bytes, other) = (folder("genesis"), folder("llama3"));
    assert!(bytes.check_vocabulary(&bytes).is_ok());
    let error = bytes.check_vocabulary(&other).expect_err("40 tokens").to_string();
    assert!(error.contains("256") && error.contains("--reference"), "{error}");
}

/// A copy of a folder whose weights can be spoiled and repaired, without a trace in its times.
struct Copy {
    path: PathBuf,
    bytes: Vec<u8>,
    modified: SystemTime,
}

impl Copy {
    fn of(name: &str, to: &str) -> Self {
        let (from, path) = (folder(name), out(to));
        std::fs::create_dir_all(&path).expect("a folder");
        for entry in std::fs::read_dir(from.checkpoint().container().root()).expect("a folder") {
            let entry = entry.expect("an entry");
            std::fs::copy(entry.path(), path.join(entry.file_name())).expect("a copy");
        }
        let weights = path.join("model.safetensors");
        let modified = weights.metadata().and_then(|known| known.modified()).expect("a time");
        Self { bytes: std::fs::read(&weights).expect("bytes"), path, modified }
    }

    /// Makes the first value of some weights NaN, and others what they were.
    fn spoil(&self, names: &[&str]) {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("tensors");
        let mut bytes = self.bytes.clone();
        for name in names {
            let tensor = tensors.tensor(name).expect("a weight");
            let at = tensor.data().as_ptr() as usize - self.bytes.as_ptr() as usize;
            // The exponent of f32 and bf16 lies in the last two bytes.
            let size = tensor.data().len() / tensor.shape().iter().product::<usize>();
            bytes[at..at + size].fill(0xFF);
        }
        let path = self.path.join("model.safetensors");
        std::fs::write(&path, bytes).expect("written");
        let file = std::fs::File::options().write(true).open(&path).expect("the file");
        file.set_modified(self.modified).expect("a time");
    }
}

/// The second layer cannot be quantized at first. The run that goes on does not read the weights of
/// the first again, but for its activations: the dense ones only for a correction.
#[test]
#[ignore = "slow"]
fn a_run_that_was_interrupted_is_gone_on_with() {
    let tokens = few_tokens();
    for (name, correction) in
        [("genesis", None), ("genesis", Some(0.0)), ("llama3", Some(0.0)), ("llama3", Some(0.5))]
    {
        let way = correction.map_or("dense".to_owned(), |share| format!("sequential-{share}"));
        let copy = Copy::of(name, &format!("resumed-{name}-{way}"));
        let options = QuantizeOptions { correction, ..options(Method::GPTQ, correction.is_some()) };
        let run = |to: &str, resume| {
            let folder = Folder::open(&copy.path).expect("a folder");
            let config = options.config(&load::<Linear>(&folder)).expect("a configuration");
            let path = copy.path.with_file_name(format!("{to}-{name}-{way}"));
            let done = quantize(&folder, &config, &options, &tokens, resume).run(&path);
            (done.map(|done| done.report), path)
        };
        for left in ["left-alone", "gone-on"] {
            for path in [
                out(&format!("{left}-{name}-{way}")),
                out(&format!(".{left}-{name}-{way}.partial")),
            ] {
                assert!(!path.exists());
            }
        }
        copy.spoil(&[]);
        let (expected, whole) = run("left-alone", false);
        copy.spoil(&["model.layers.1.mlp.up_proj.weight"]);
        let (error, path) = run("gone-on", false);
        let error = error.expect_err("a value that is not finite").to_string();
        assert!(error.contains("parameter `layers.1.mlp."), "{error}");
        assert!(error.contains("; add --resume after you fix the cause, or remove "), "{error}");
        assert!(!path.exists());
        let (error, _) = run("gone-on", false);
        let error = error.expect_err("weights would be lost").to_string();
        assert!(error.contains("or pass --resume to go on"), "{error}");
        let read = ["model.layers.0.mlp.up_proj.weight"];
        copy.spoil(if correction == Some(0.0) { &read } else { &[] });
        let (report, path) = run("gone-on", true);
        assert_eq!(report.expect("the rest"), expected.expect("all"));
        assert_same_files(&path, &whole);
    }
}

#[test]
fn sampling_depends_on_the_seed_alone() {
    let (folder, device) = (folder("genesis"), Device::flex());
    let model = load::<Linear>(&folder);
    let prompt = ids("genesis.prompt");
    let drawn = |sampling| {
        let found = generate(&model, &folder.config, &prompt, 40, sampling, &device);
        found.expect("tokens").sequences.remove(0)
    };
    let sampling = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 3, sequences: 1 };
    assert_eq!(drawn(sampling), drawn(sampling));
    assert_ne!(drawn(sampling), drawn(Sampling { seed: 4, ..sampling }));
    let best = Sampling { top_k: Some(1), ..sampling };
    assert_eq!(drawn(best), ids("genesis.greedy")[..40]);
    let together = Sampling { sequences: 3, ..sampling };
    let together = generate(&model, &folder.config, &prompt, 40, together, &device);
    let each = |seed| drawn(Sampling { seed, ..sampling });
    assert_eq!(together.expect("tokens").sequences, [3, 4, 5].map(each));
    let long = generate(&model, &folder.config, &prompt, 4000, GREEDY, &device);
    assert!(long.is_err(), "it has 512 positions");
}

#[test]
fn the_byte_tokenizer_encodes_bytes() {
    let tokenizer = folder("genesis").tokenizer().expect("a tokenizer");
    let text = "In the beginning\n\tGod 42 \u{1} é 漢 \u{1F600}  ";
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    assert_eq!(tokenizer.encode(text, true).expect("tokens").get_ids(), ids);
    assert_eq!(tokenizer.decode(&ids, true).expect("a text"), text);
}

#[test]
fn bytes_of_weights_are_those_that_are_stored() {
    let folder = folder("genesis");
    let mut model = load::<Fp4Linear>(&folder);
    let config = &folder.config;
    let (hidden, kv) = (config.hidden_size, config.num_key_value_heads() * config.head_dim());
    let queries = config.num_attention_heads * config.head_dim();
    let layer = hidden * (2 * queries + 2 * kv + 3 * config.intermediate_size);
    let values = config.num_hidden_layers * layer;
    let head = config.vocab_size * hidden * size_of::<f32>();
    assert_eq!(model.bytes_of_weights(), values * size_of::<f32>() + head);

    let amax = llama::fp4_config(&model, Fp4Scheme::nvfp4());
    model.quantize_fp4(&amax).expect("quantized");
    // A code and a sixteenth of a scale a value, and a tensor scale for each of seven matrices.
    let packed = values / 2 + values / 16 + config.num_hidden_layers * 7 * size_of::<f32>();
    assert_eq!(model.bytes_of_weights(), packed + head);
    assert_eq!(model.bytes_of_position(), config.num_hidden_layers * 2 * kv * size_of::<f32>());
}

#[test]
fn an_unsupported_config_is_an_error() {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("models/genesis/config.json"),
    );
    let text = text.expect("a config");
    assert!(LlamaConfig::parse(text.as_bytes()).is_ok());
    for (from, to, says) in [
        (r#""model_type": "llama""#, r#""model_type": "gemma""#, "gemma"),
        (r#""hidden_act": "silu""#, r#""hidden_act": "gelu""#, "gelu"),
        (r#""rope_theta": 10000.0"#, r#""rope_parameters": {"rope_type": "yarn"}"#, "yarn"),
        (r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 3"#, "3"),
        (r#""use_cache": true"#, r#""sliding_window": 64"#, "sliding window"),
        (r#""vocab_size": 256"#, r#""vocabulary": 256"#, "vocab_size"),
    ] {
        let changed = text.replace(from, to);
        assert_ne!(changed, text, "{from}");
        let error = LlamaConfig::parse(changed.as_bytes()).expect_err(to);
        assert!(format!("{error:#}").contains(says), "{error:#}");
    }
}
