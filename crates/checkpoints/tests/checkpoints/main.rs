//! Checkpoints: what other projects wrote is read and written again byte for byte, dialects keep
//! codes and block scales, and hostile files are refused with an error that names the tensor.

mod architectures;
mod counting;
mod drive;
mod ggml;
mod headers;
mod hostile;
mod models;
mod mutate;
mod mutations;
mod pickles;
mod random;
mod readers;
mod samples;
mod stacked;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn_fp4_checkpoints::cast::{cast, fold};
use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Container, DIALECTS, Dtype, Fp4Weight, Fp8Weight, Granularity,
    KnownBy, Model, Numbers, Pattern, Shards, Storage, Syntax, Tensor, TensorProblem, TensorScale,
    Value, Weight, WriteOptions,
};
use burn_fp4_formats::TensorScale as Scale;
use burn_fp4_formats::{E2M1, E8M0, Fp4Format, Packed, ScaleLayout, bf16};
use burn_fp4_policy::search::Hadamard;
use serde_json::json;

use counting::{Counting, peak};
use models::{experts, fp4, mixed, model, raw_file, scalar, writable};
use random::Random;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An empty folder.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoints").join(name);
    if path.exists() {
        fs::remove_dir_all(&path).expect("an old folder");
    }
    fs::create_dir_all(&path).expect("a folder");
    path
}

fn golden(name: &str) -> PathBuf {
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    std::env::var_os("FP4_GOLDEN").map_or_else(own, PathBuf::from).join(name)
}

/// Names and bytes of all files of a folder, or of a file.
fn bytes_of(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    if path.is_file() {
        return [("file".to_owned(), fs::read(path).expect("a file"))].into();
    }
    let files = fs::read_dir(path).expect("a folder").map(|entry| entry.expect("an entry").path());
    files.map(|path| (name(&path), fs::read(&path).expect("a file"))).collect()
}

fn assert_same_files(left: &Path, right: &Path) {
    let (left, right) = (bytes_of(left), bytes_of(right));
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>());
    for (name, bytes) in &left {
        assert!(bytes == &right[name], "{name} differs");
    }
}

fn path_of(folder: &Path, dialect: &str) -> PathBuf {
    folder.join(if dialect == "gguf" { "model.gguf" } else { dialect })
}

/// Codes, block scales and multipliers.
type Parts = (Vec<u8>, Vec<u8>, Vec<f32>);

fn fp4_weights(model: &Model<'_>) -> BTreeMap<String, Parts> {
    let parts = |weight: &Weight<'_>| match &weight.value {
        Value::Fp4(fp4) => Some((
            weight.name.clone(),
            (fp4.plain_codes().to_vec(), fp4.plain_scales().to_vec(), fp4.multipliers()),
        )),
        Value::Plain(_) | Value::Fp8(_) => None,
    };
    model.weights.iter().filter_map(parts).collect()
}

#[test]
fn what_miles_wrote_is_written_again_byte_for_byte() {
    let checkpoint = Checkpoint::open_as(golden("miles_moe"), "miles").expect("the golden files");
    let model = checkpoint.model().expect("weights");
    let quantized = fp4_weights(&model);
    assert_eq!((model.weights.len(), quantized.len()), (63, 16));
    let folder = folder("miles_moe");
    let out = folder.join("out");
    let report = model.write(&out, "miles", &WriteOptions::default()).expect("written");
    assert_same_files(&golden("miles_moe"), &out);
    assert_eq!((report.files, report.bytes), (2, 241_408));
    assert_eq!((report.inverted, report.cast.blocks), (0, 0));

    // It says that it is ModelOpt's, and is the same there.
    let detected = Checkpoint::open(golden("miles_moe")).expect("the golden files");
    assert_eq!(detected.dialect(), "modelopt");
    let out = folder.join("modelopt");
    detected
        .model()
        .expect("weights")
        .write(&out, "modelopt", &WriteOptions::default())
        .expect("written");
    let (ours, theirs) = (bytes_of(&out), bytes_of(&golden("miles_moe")));
    for name in ["model-00001.safetensors", "config.json", "hf_quant_config.json"] {
        assert!(ours[name] == theirs[name], "{name}");
    }
}

#[test]
fn every_dialect_reads_what_it_writes_and_writes_it_again() {
    let folder = folder("round");
    for (at, (dialect, model)) in writable().into_iter().enumerate() {
        let folder = folder.join(at.to_string());
        fs::create_dir(&folder).expect("a folder");
        let path = path_of(&folder, dialect);
        model.write(&path, dialect, &WriteOptions::default()).expect(dialect);
        let checkpoint = match dialect {
            "miles" => Checkpoint::open_as(&path, dialect),
            _ => Checkpoint::open(&path),
        };
        let checkpoint = checkpoint.expect(dialect);
        assert_eq!(checkpoint.dialect(), dialect);
        let read = checkpoint.model().expect(dialect);
        let (given, found) = (fp4_weights(&model), fp4_weights(&read));
        for (name, (codes, scales, multipliers)) in &given {
            assert!(&found[name].0 == codes && &found[name].1 == scales, "{dialect} {name}");
            // A divisor is a reciprocal.
            if dialect != "compressed-tensors" {
                assert_eq!(&found[name].2, multipliers, "{dialect} {name}");
            }
        }
        assert_eq!(read.weights.len(), model.weights.len());
        let names = |model: &Model<'_>| {
            let mut names: Vec<String> = model.weights.iter().map(|w| w.name.clone()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&read), names(&model), "{dialect}");
        let again = folder.join(if dialect == "gguf" { "again.gguf" } else { "again" });
        read.write(&again, dialect, &WriteOptions::default()).expect(dialect);
        assert_same_files(&path, &again);
    }
}

#[test]
fn safetensors_files_are_those_of_the_library() {
    let folder = folder("library");
    let path = folder.join("out");
    mixed().write(&path, "modelopt", &WriteOptions::default()).expect("written");
    let bytes = fs::read(path.join("model.safetensors")).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let metadata = Some([("format".to_owned(), "pt".to_owned())].into());
    assert!(safetensors::serialize(file.tensors(), metadata).expect("tensors") == bytes);
}

#[test]
fn dialects_keep_codes_and_block_scales() {
    let folder = folder("convert");
    for (format, scales) in [
        (Fp4Format::NvFp4, [0.001_234_5, 0.017]),
        (Fp4Format::NvFp4, [1.0, 1.0]),
        (Fp4Format::MxFp4, [1.0, 1.0]),
    ] {
        let source = model(format, scales, None);
        let given = fp4_weights(&source);
        let first = folder.join(format!("{format}-{}", scales[0]));
        fs::create_dir(&first).expect("a folder");
        let exact = scales == [1.0, 1.0];
        let mut chain = vec!["modelopt", "compressed-tensors", "gguf", "compressed-tensors"];
        chain.extend(exact.then_some("mlx"));
        chain.push("modelopt");
        let mut path = PathBuf::new();
        for (step, dialect) in chain.into_iter().enumerate() {
            let next = match dialect {
                "gguf" => first.join(format!("{step}.gguf")),
                _ => first.join(step.to_string()),
            };
            let report = if step == 0 {
                source.write(&next, dialect, &WriteOptions::default())
            } else {
                let checkpoint = Checkpoint::open(&path).expect("the last step");
                checkpoint.model().expect("weights").write(&next, dialect, &WriteOptions::default())
            };
            let report = report.expect(dialect);
            let scaled = format == Fp4Format::NvFp4;
            let inverts =
                scaled && (dialect == "compressed-tensors" || (step > 0 && dialect == "gguf"));
            if dialect != "modelopt" && dialect != "mlx" {
                assert_eq!(report.inverted, if inverts { 2 } else { 0 }, "{dialect} at {step}");
            }
            assert_eq!(report.folded.changed_values, 0);
            path = next;
            let checkpoint = Checkpoint::open(&path).expect(dialect);
            let found = fp4_weights(&checkpoint.model().expect(dialect));
            for (name, (codes, scales, multipliers)) in &given {
                assert!(&found[name].0 == codes, "{dialect} {name}");
                assert!(&found[name].1 == scales, "{dialect} {name}");
                let close = (found[name].2[0] / multipliers[0] - 1.0).abs() < 1e-6;
                assert!(close, "{dialect} {name}");
            }
        }
    }
}

#[test]
fn a_tensor_scale_is_folded_exactly_or_only_if_that_is_allowed() {
    let folder = folder("fold");
    let odd = model(Fp4Format::NvFp4, [0.017, 1.0], None);
    let refused = odd.write(folder.join("refused"), "mlx", &WriteOptions::default());
    assert!(matches!(
        &refused,
        Err(CheckpointError::CannotHold { weight, .. }) if weight.ends_with("k_proj.weight")
    ));
    let options = WriteOptions { inexact: true, ..WriteOptions::default() };
    let report = odd.write(folder.join("allowed"), "mlx", &options).expect("allowed");
    assert!(report.folded.changed_values > 0);
    assert!(report.folded.changed_blocks < report.folded.blocks);

    // 448 / 2, 2^-6 x 2^-1: both are E4M3.
    let mut packed = Random(1).packed(Fp4Format::NvFp4, 1, 32, 0.5);
    packed.scales = vec![0x7E, 0x08];
    let weight = Fp4Weight::stack("w", &[packed]).expect("valid");
    let (folded, report) = fold("w", &weight).expect("valid");
    assert_eq!((report.changed_values, &folded.plain_scales()[..]), (0, &[0x76, 0x04][..]));
    assert_eq!(folded.dequantize(), weight.dequantize());
}

#[test]
fn configs_keep_what_is_not_ours_and_translate_ignore_lists() {
    let folder = folder("configs");
    let path = folder.join("ct");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], Some(0.5));
    source.weights.push(scalar("model.layers.0.self_attn.k_proj.k_scale", 0.75));
    // It hits quantized modules, so that what else it hits is listed.
    source.quantization.ignore.push(Pattern::parse("model.layers.0*", Syntax::Glob));
    fs::write(folder.join("tokenizer.json"), "{}").expect("a file");
    source.sidecars.push(folder.join("tokenizer.json"));
    source.write(&path, "compressed-tensors", &WriteOptions::default()).expect("written");
    let config = config_of(&path, "config.json");
    assert_eq!(config["odd_field"]["a"], json!([1.5, null]));
    let keys: Vec<&str> = config.as_object().expect("object").keys().map(String::as_str).collect();
    assert_eq!(keys, ["model_type", "odd_field", "layers", "quantization_config"]);
    let ignore = config["quantization_config"]["ignore"].to_string();
    assert_eq!(
        ignore,
        r#"["lm_head","re:model\\.layers\\.0\\.mlp\\.gate.*","model.embed_tokens"]"#
    );
    assert_eq!(fs::read(path.join("tokenizer.json")).expect("a sidecar"), b"{}");

    let checkpoint = Checkpoint::open(&path).expect("compressed-tensors");
    assert!(checkpoint.container().get("model.layers.0.self_attn.k_scale").is_some());
    let model = checkpoint.model().expect("weights");
    let back = folder.join("modelopt");
    let report = model.write(&back, "modelopt", &WriteOptions::default()).expect("written");
    assert_eq!((report.inverted, report.inverted_inexactly), (2, 0));
    let checkpoint = Checkpoint::open(&back).expect("modelopt");
    assert!(checkpoint.container().get("model.layers.0.self_attn.k_proj.k_scale").is_some());
    let input = checkpoint.container().get("model.layers.0.self_attn.k_proj.input_scale");
    assert_eq!(input.expect("carried").to_f32().expect("f32"), [0.5]);
    let config = checkpoint.container().quantization().expect("a config");
    let ignore = config["ignore"].to_string();
    assert_eq!(ignore, r#"["lm_head","model.layers.0.mlp.gate*","model.embed_tokens"]"#);
    assert_eq!(config["quant_algo"], "NVFP4");
}

#[test]
fn an_output_layer_that_is_tied_to_a_dense_embedding_is_ignored() {
    let folder = folder("tied");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    source.quantization.ignore.clear();
    source.weights.retain(|weight| weight.name != "lm_head.weight");
    let ignored = |source: &Model<'_>, name: &str| {
        let path = folder.join(name);
        source.write(&path, name, &WriteOptions::default()).expect("written");
        let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
        let config = checkpoint.container().quantization().expect("a config");
        let list = config["ignore"].to_string();
        fs::remove_dir_all(&path).expect("a folder");
        (list.contains(r#""lm_head""#), list)
    };
    for dialect in ["compressed-tensors", "modelopt"] {
        for (tied, expected) in [(Some(true), true), (Some(false), false), (None, false)] {
            let mut config = source.config.clone().expect("a config");
            if let Some(tied) = tied {
                config["tie_word_embeddings"] = json!(tied);
            }
            let source = Model { config: Some(config), ..source.clone() };
            let (found, list) = ignored(&source, dialect);
            assert_eq!(found, expected, "{dialect}, tied {tied:?}: {list}");
        }
    }
}

#[test]
fn reciprocals_of_tensor_scales_are_counted_where_they_are_rounded() {
    let folder = folder("reciprocals");
    for (scales, rounded) in [([0.25, 0.5], 0), ([0.25, 0.3], 1), ([0.001_234_5, 0.017], 2)] {
        let path = folder.join(rounded.to_string());
        let source = model(Fp4Format::NvFp4, scales, None);
        let report = source.write(&path, "compressed-tensors", &WriteOptions::default());
        let report = report.expect("written");
        assert_eq!((report.inverted, report.inverted_rounded), (2, rounded));
        assert_eq!(report.inverted_error > 0.0, rounded > 0);
        assert!(report.inverted_error <= 0.5_f64.powi(24), "{}", report.inverted_error);
    }
}

/// llama.cpp names a file by it.
#[test]
fn the_type_of_a_gguf_file_goes_with_the_weights_that_it_told_of() {
    let folder = folder("file-type");
    let q8_0 = models::ggml_rows().find(|row| row.name == "Q8_0").expect("a row");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    source.weights.push(models::ggml("blk.0.q.weight", q8_0, &[2, 32], vec![0; 2 * 34]));
    let has = |path: &Path| {
        let bytes = fs::read(path).expect("a file");
        bytes.windows(17).any(|part| part == b"general.file_type")
    };
    let [before, after] = ["before.gguf", "after.gguf"].map(|name| folder.join(name));
    source.write(&before, "gguf", &WriteOptions::default()).expect("written");
    assert!(has(&before));
    let decoded = WriteOptions { decode_fp4: Some(Dtype::BF16), ..WriteOptions::default() };
    let checkpoint = Checkpoint::open(&before).expect("a checkpoint");
    checkpoint.model().and_then(|model| model.write(&after, "gguf", &decoded)).expect("written");
    assert!(!has(&after), "no type says what Q8_0 with floats is");
}

#[test]
fn tensors_of_no_values_are_decoded_only_if_others_of_their_kind_are() {
    let empty = |dtype| Tensor::new("x", dtype, vec![0, 4], vec![]).expect("a tensor");
    let decoded = empty(Dtype::F16).decode(Dtype::BF16).expect("floats");
    assert_eq!((&decoded.shape[..], decoded.bytes.len()), (&[0, 4][..], 0));
    for (from, to) in [(Dtype::I32, Dtype::F32), (Dtype::F32, Dtype::F8_E4M3)] {
        let error = empty(from).decode(to).expect_err("another dtype").to_string();
        assert!(error.contains("expected dtype F32"), "{error}");
    }
}

#[test]
fn files_are_filled_up_to_a_size_and_published_whole() {
    let folder = folder("shards");
    let source = model(Fp4Format::NvFp4, [0.25, 0.5], Some(0.5));
    let path = folder.join("out");
    let options = WriteOptions { shards: Shards::Size(5000), ..WriteOptions::default() };
    let report = source.write(&path, "modelopt", &options).expect("written");
    assert_eq!(report.files, 3);
    assert!(path.join("model-00003-of-00003.safetensors").is_file());
    let checkpoint = Checkpoint::open(&path).expect("shards");
    let read = checkpoint.model().expect("weights");
    assert_eq!(fp4_weights(&read), fp4_weights(&source));
    // The same again, from the shards, as they are and in one file.
    read.write(folder.join("again"), "modelopt", &WriteOptions::default()).expect("written");
    assert_same_files(&path, &folder.join("again"));
    let one = WriteOptions { shards: Shards::Size(u64::MAX), ..WriteOptions::default() };
    assert_eq!(read.write(folder.join("one"), "modelopt", &one).expect("written").files, 1);
    assert!(!folder.join("one/model.safetensors.index.json").exists());

    let exists = source.write(&path, "modelopt", &options);
    assert!(matches!(exists, Err(CheckpointError::TargetExists { .. })));
    // NaN is found while the file is written, and nothing is left behind.
    let mut bad = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    if let Value::Fp4(fp4) = &mut bad.weights[3].value {
        fp4.scales.to_mut()[0] = 0x7F;
    }
    let failed = bad.write(folder.join("bad.gguf"), "gguf", &WriteOptions::default());
    assert!(matches!(failed, Err(CheckpointError::CannotHold { .. })));
    let left: Vec<String> = bytes_of_names(&folder);
    assert_eq!(left, ["again", "one", "out"]);
}

fn bytes_of_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_file_alone_is_read_in_the_dialect_that_explains_its_tensors() {
    let folder = folder("alone");
    let (nv, mx) = (Fp4Format::NvFp4, Fp4Format::MxFp4);
    for (written, format, read) in [
        ("compressed-tensors", nv, "compressed-tensors"),
        ("compressed-tensors", mx, "compressed-tensors"),
        ("modelopt", nv, "modelopt"),
        ("modelopt", mx, "modelopt"),
        ("miles", nv, "modelopt"),
        ("mlx", nv, "mlx"),
        ("mlx", mx, "mlx"),
    ] {
        let path = folder.join(format!("{written}-{format}"));
        let scales = if written == "mlx" { [1.0, 1.0] } else { [0.25, 0.5] };
        let source = model(format, scales, None);
        source.write(&path, written, &WriteOptions::default()).expect("written");
        let (inside, moved) = (path.join("model.safetensors"), folder.join("moved.safetensors"));
        fs::copy(&inside, &moved).expect("a copy");
        let alone = Checkpoint::open(&moved).expect("a file");
        assert_eq!((alone.dialect(), alone.known_by()), (read, KnownBy::Tensors));
        let whole = Checkpoint::open(&path).expect("a folder");
        assert_eq!(whole.known_by(), KnownBy::Metadata);
        // The configs next to a file are its own.
        let inside = Checkpoint::open(&inside).expect("a file");
        assert_eq!((inside.dialect(), inside.known_by()), (whole.dialect(), KnownBy::Metadata));
        assert_eq!(inside.container().config(), whole.container().config());
        assert!(inside.container().configs().eq(whole.container().configs()));
        let (alone, whole) = (alone.weights().expect("weights"), whole.weights().expect("weights"));
        for (alone, whole) in alone.iter().zip(&whole) {
            assert_eq!((&alone.name, alone.kind()), (&whole.name, whole.kind()));
            let values = |weight: &Weight<'_>| weight.values().expect("floats");
            assert_eq!(values(alone), values(whole), "{written}: {}", alone.name);
        }
    }
    // Four integers of 8 bits in a word are no dialect's.
    let path = folder.join("other.safetensors");
    let words = ("a.qweight", Dtype::U32, vec![2, 1], vec![0; 8]);
    raw_file(&path, &[], &[words]);
    let alone = Checkpoint::open(&path).expect("a file");
    let error = alone.model().map(|_| ()).expect_err("no dialect");
    assert!(matches!(error, CheckpointError::NoDialect { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("put the config.json of its model next to it"), "{error}");
    assert!(error.contains("name one of modelopt, ") && !error.contains("open_as"));
    // Two dialects read these codes, and one of them the scale of the input too.
    let path = folder.join("quark.safetensors");
    let scale = |name| (name, Dtype::F32, vec![], 1.0_f32.to_le_bytes().to_vec());
    let codes = ("a.weight", Dtype::U8, vec![2, 8], vec![0x22; 16]);
    let scales = ("a.weight_scale", Dtype::F8_E4M3, vec![2, 1], vec![0x38; 2]);
    let (second, input) = (scale("a.weight_scale_2"), scale("a.input_scale_2"));
    raw_file(&path, &[], &[codes, scales, second, input]);
    assert_eq!(Checkpoint::open(&path).expect("a file").dialect(), "quark");
}

#[test]
fn configs_of_a_model_of_floats_state_no_quantization() {
    let folder = folder("floats");
    let tensor = Tensor::new("layers.0.o_proj.weight", Dtype::BF16, vec![2, 32], vec![0; 128]);
    let weight = |tensor| Weight::new("layers.0.o_proj.weight", 0, Value::Plain(tensor));
    let weights = vec![weight(tensor.expect("a shape"))];
    let config = Some(json!({"model_type": "llama", "quantization_config": {"bits": 4}}));
    let mut model = Model { weights, config, ..Model::default() };
    let written = burn_fp4_checkpoints::dialect::written();
    for dialect in written.iter().copied().filter(|dialect| *dialect != "gguf") {
        let path = folder.join(dialect);
        model.write(&path, dialect, &WriteOptions::default()).expect("written");
        assert_eq!(bytes_of_names(&path), ["config.json", "model.safetensors"], "{dialect}");
        let checkpoint = Checkpoint::open(&path).expect("a folder");
        assert_eq!(checkpoint.container().config(), Some(&json!({"model_type": "llama"})));
        assert_eq!(checkpoint.dialect(), "plain");
    }
    model.config = None;
    for dialect in written.into_iter().filter(|dialect| *dialect != "gguf") {
        let path = folder.join(format!("{dialect}-alone"));
        model.write(&path, dialect, &WriteOptions::default()).expect("written");
        assert_eq!(bytes_of_names(&path), ["model.safetensors"], "{dialect}");
    }
}

#[test]
fn the_dialect_is_what_the_files_say() {
    let folder = folder("detect");
    let open = |name: &str| Checkpoint::open(folder.join(name)).map(|c| c.dialect());
    let ct = folder.join("ct");
    let source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    source.write(&ct, "compressed-tensors", &WriteOptions::default()).expect("written");
    assert_eq!(open("ct").ok(), Some("compressed-tensors"));

    fs::write(ct.join("hf_quant_config.json"), r#"{"quantization": {}}"#).expect("a file");
    let error = Checkpoint::open(&ct).expect_err("two claims").to_string();
    assert!(error.contains("modelopt (hf_quant_config.json)"), "{error}");
    assert!(error.contains("; name one of them"), "{error}");
    assert!(Checkpoint::open_as(&ct, "compressed-tensors").is_ok());
    assert!(matches!(Checkpoint::open_as(&ct, "x"), Err(CheckpointError::UnknownDialect { .. })));
    fs::remove_file(ct.join("hf_quant_config.json")).expect("removed");

    let config = |text: &str| fs::write(ct.join("config.json"), text).expect("a config");
    for (text, word) in [
        (r#"{"quantization_config": {"quant_method": "awq"}}"#, "awq"),
        (r#"{"quantization_config": {"quant_method": "fp_quant"}}"#, "forward_dtype"),
        (
            r#"{"quantization_config": {"quant_method": "fp_quant", "forward_dtype": "mxfp4",
               "pseudoquantization": true}}"#,
            "pseudoquantization",
        ),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors",
               "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}}"#,
            "hadamard",
        ),
        (
            r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}}"#,
            "NVFP4_SVD",
        ),
        (r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "INT4"}}"#, "INT4"),
        (
            r#"{"quantization_config": {"quant_method": "modelopt",
               "quant_algo": "MIXED_PRECISION",
               "quantized_layers": {"a": {"quant_algo": "NVFP4_SVD"}}}}"#,
            "quantized_layers.a.quant_algo` NVFP4_SVD",
        ),
        ("{", "config.json"),
    ] {
        config(text);
        let error = Checkpoint::open(&ct).and_then(|c| c.model().map(|_| ())).err();
        let error = error.expect(text).to_string().to_lowercase();
        assert!(error.contains(&word.to_lowercase()), "{text}: {error}");
    }
    // Parts that no dialect explains alone: of ModelOpt's stacked experts, and of DeepSeek's.
    let bare = folder.join("bare");
    fs::create_dir(&bare).expect("a folder");
    for (name, dtype, cols) in [
        ("experts.gate_up_proj_weight_scale", Dtype::F8_E4M3, 2),
        ("experts.gate_up_proj_weight_scale_2", Dtype::F8_E4M3, 2),
        ("e.w1.scale", Dtype::F8_E8M0, 2),
        ("e.w1.weight", Dtype::F4, 4),
    ] {
        let tensors = [(name, dtype, vec![2, cols], vec![0x38; 4])];
        raw_file(&bare.join("model.safetensors"), &[], &tensors);
        let checkpoint = Checkpoint::open(&bare).expect("a folder");
        let error = checkpoint.model().map(|_| ()).expect_err(name);
        let CheckpointError::NoDialect { tensor, .. } = &error else { panic!("{error}") };
        assert_eq!(tensor, name);
    }
    let unwritten = source.write(folder.join("x"), "quark", &WriteOptions::default());
    assert!(matches!(unwritten, Err(CheckpointError::ReadOnly { .. })));
    assert_eq!(DIALECTS.iter().filter(|dialect| dialect.writer().is_some()).count(), 8);
}

/// The file is of this dialect, and has these weights.
fn check(dialect: &str, path: &Path, expected: &[(&str, &Packed)]) {
    let checkpoint = Checkpoint::open(path).expect(dialect);
    assert_eq!(checkpoint.dialect(), dialect);
    let model = checkpoint.model().expect(dialect);
    for (name, packed) in expected {
        let weight = model.weights.iter().find(|w| w.name == *name).expect(name);
        let Value::Fp4(fp4) = &weight.value else { panic!("{dialect} {name}") };
        assert_eq!(&fp4.to_packed(), &[(*packed).clone()], "{dialect} {name}");
    }
    assert_eq!(model.weights.len(), expected.len(), "{dialect}");
}

#[test]
fn dialects_that_are_only_read() {
    let folder = folder("read");
    let random = &mut Random(5);
    let nv = random.packed(Fp4Format::NvFp4, 48, 160, 0.017);
    let mx = random.packed(Fp4Format::MxFp4, 48, 160, 1.0);
    let g = 0.017_f32.to_le_bytes().to_vec();
    let tiles = |packed: &Packed| {
        ScaleLayout::Tiled128x4.arrange(&packed.scales, 48, packed.blocks()).expect("scales")
    };
    let swapped: Vec<u8> = nv.codes.iter().map(|byte| byte.rotate_left(4)).collect();

    let comfy = folder.join("comfy.safetensors");
    let layers = r#"{"format_version": "1.0", "layers": {"x": {"format": "nvfp4"}}}"#;
    raw_file(
        &comfy,
        &[("_quantization_metadata", layers)],
        &[
            ("x.weight", Dtype::U8, vec![48, 80], swapped),
            ("x.weight_scale", Dtype::F8_E4M3, vec![128, 12], tiles(&nv)),
            ("x.weight_scale_2", Dtype::F32, vec![], g.clone()),
        ],
    );
    check("comfyui", &comfy, &[("x.weight", &nv)]);

    let ao = folder.join("ao.safetensors");
    let facts =
        r#"{"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": true}}"#;
    let mx_facts = r#"{"_type": "MXTensor", "_data": {"is_swizzled_scales": false,
        "elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}}}"#;
    let metadata = [
        ("tensor_names", r#"["x.weight", "y.weight"]"#),
        ("x.weight", facts),
        ("y.weight", mx_facts),
    ];
    raw_file(
        &ao,
        &metadata,
        &[
            ("x._weight_qdata", Dtype::U8, vec![48, 80], nv.codes.clone()),
            ("x._weight_scale", Dtype::F8_E4M3, vec![128, 12], tiles(&nv)),
            ("x._weight_per_tensor_scale", Dtype::F32, vec![], g.clone()),
            ("y._weight_qdata", Dtype::U8, vec![48, 80], mx.codes.clone()),
            ("y._weight_scale", Dtype::F8_E8M0, vec![48, 5], mx.scales.clone()),
        ],
    );
    check("torchao", &ao, &[("x.weight", &nv), ("y.weight", &mx)]);
}

#[test]
fn dialects_that_are_only_read_with_a_config() {
    let folder = folder("read-config");
    let random = &mut Random(6);
    let nv = random.packed(Fp4Format::NvFp4, 48, 160, 0.017);
    let mx = random.packed(Fp4Format::MxFp4, 48, 160, 1.0);
    let g = 0.017_f32.to_le_bytes().to_vec();
    let named = |name: &str, config: &str| {
        let path = folder.join(name);
        fs::create_dir(&path).expect("a folder");
        fs::write(path.join("config.json"), config).expect("a config");
        path
    };
    let deepseek = r#"{"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"}"#;
    let path = named("deepseek", deepseek);
    raw_file(
        &path.join("model.safetensors"),
        &[],
        &[
            ("e.w1.weight", Dtype::I8, vec![48, 80], mx.codes.clone()),
            ("e.w1.scale", Dtype::F8_E8M0, vec![48, 5], mx.scales.clone()),
        ],
    );
    check("deepseek", &path, &[("e.w1.weight", &mx)]);

    let path = named("quark", r#"{"quantization_config": {"quant_method": "quark"}}"#);
    raw_file(
        &path.join("model.safetensors"),
        &[],
        &[
            ("x.weight", Dtype::U8, vec![48, 80], mx.codes.clone()),
            ("x.weight_scale", Dtype::U8, vec![48, 5], mx.scales.clone()),
            ("y.weight", Dtype::F4, vec![48, 160], nv.codes.clone()),
            ("y.weight_scale", Dtype::F8_E4M3, vec![48, 10], nv.scales.clone()),
            ("y.weight_scale_2", Dtype::F32, vec![1], g),
        ],
    );
    check("quark", &path, &[("x.weight", &mx), ("y.weight", &nv)]);
}

/// FP-Quant: values are those of the codes, divided by the tensor scale and transformed back by the
/// matrix of the file. No other dialect takes them without decoding.
#[test]
fn weights_after_a_hadamard_transform_are_read_and_written() {
    let folder = folder("fp-quant");
    let random = &mut Random(8);
    for (format, dtype) in [(Fp4Format::MxFp4, "mxfp4"), (Fp4Format::NvFp4, "nvfp4")] {
        let packed = random.packed(format, 8, 64, if dtype == "mxfp4" { 1.0 } else { 0.25 });
        let path = folder.join(dtype);
        fs::create_dir(&path).expect("a folder");
        let config = json!({"quant_method": "fp_quant", "forward_dtype": dtype});
        let config = json!({ "quantization_config": config }).to_string();
        fs::write(path.join("config.json"), config).expect("a config");
        let hadamard = Hadamard::of_size(32).expect("a size");
        let file = |transform: Vec<u8>, size: usize| {
            let blocks = 64 / format.row().block_size;
            let divisor = if dtype == "mxfp4" { 1.0_f32 } else { 4.0 };
            let number = |name| (name, Dtype::F32, vec![1], divisor.to_le_bytes().to_vec());
            let matrix = |name| (name, Dtype::BF16, vec![size, size], transform.clone());
            raw_file(
                &path.join("model.safetensors"),
                &[],
                &[
                    ("x.qweight", Dtype::U8, vec![8, 32], packed.codes.clone()),
                    ("x.scales", Dtype::U8, vec![8, blocks], packed.scales.clone()),
                    number("x.weight_global_scale"),
                    number("x.act_global_scale"),
                    matrix("x.forward_hadamard_matrix"),
                    matrix("x.backward_hadamard_matrix"),
                ],
            );
        };
        let matrix = |size: usize, element: &dyn Fn(usize, usize) -> f32| -> Vec<u8> {
            let bits = |at: usize| bf16::from_f32(element(at / size, at % size)).to_le_bytes();
            (0..size * size).flat_map(bits).collect()
        };
        file(matrix(32, &|row, col| hadamard.factor(row, col)), 32);
        check("fp-quant", &path, &[("x.weight", &packed)]);
        let checkpoint = Checkpoint::open(&path).expect("a folder");
        let model = checkpoint.model().expect("weights");
        assert_eq!(model.weights[0].kind(), format!("{format} {} hadamard 32", packed.block_size));
        let (_, values) = model.weights[0].values().expect("values");
        let codes = packed.dequantize();
        for (at, value) in values.iter().enumerate() {
            let (row, col) = (at / 64, at % 64);
            let group = row * 64 + col / 32 * 32;
            let terms = (0..32).map(|i| f64::from(codes[group + i] * hadamard.factor(col % 32, i)));
            let expected: f64 = terms.sum();
            assert!((f64::from(*value) - expected).abs() < 1e-5 * (1.0 + expected.abs()));
        }
        let again = folder.join(format!("{dtype}-again"));
        model.write(&again, "fp-quant", &WriteOptions::default()).expect("written");
        let written = Checkpoint::open(&again).expect("a folder");
        let found = written.model().expect("weights");
        assert_eq!(found.weights[0].values().expect("values").1, values);
        assert!(written.container().get("x.backward_hadamard_matrix").is_none());
        let config = |folder: &Path| -> serde_json::Value {
            let text = fs::read_to_string(folder.join("config.json")).expect("a config");
            serde_json::from_str(&text).expect("an object")
        };
        assert_eq!(config(&again), config(&path));
        let error = model.write(folder.join("x"), "modelopt", &WriteOptions::default());
        let error = error.expect_err("no place for a transform").to_string();
        assert!(error.contains("Hadamard"), "{error}");
        let decoded = folder.join(format!("{dtype}-decoded"));
        let options = WriteOptions { decode_fp4: Some(Dtype::F32), ..WriteOptions::default() };
        model.write(&decoded, "plain", &options).expect("decoded");
        let decoded = Checkpoint::open(&decoded).expect("a folder");
        assert_eq!(
            decoded.model().expect("weights").weights[0].values().expect("values").1,
            values
        );

        // Without a transform, and with a matrix that is none.
        file(matrix(32, &|row, col| f32::from(row == col)), 32);
        check("fp-quant", &path, &[("x.weight", &packed)]);
        let model = Checkpoint::open(&path).expect("a folder");
        assert_eq!(model.model().expect("weights").weights[0].kind(), packed_kind(&packed));
        for (transform, size) in [
            (matrix(32, &|row, col| hadamard.factor(row ^ 1, col)), 32),
            (Vec::new(), 0),
            (matrix(24, &|row, col| f32::from(row == col)), 24),
            (matrix(2, &|row, col| if row * col == 1 { -0.7 } else { 0.7 }), 2),
        ] {
            file(transform, size);
            let model = Checkpoint::open(&path).expect("a folder");
            let error = model.model().map(|_| ()).expect_err("another matrix").to_string();
            assert!(error.contains("forward_hadamard_matrix"), "{error}");
        }
    }
}

fn packed_kind(packed: &Packed) -> String {
    format!("{} {}", packed.format, packed.block_size)
}

#[test]
fn records_of_ggml_hold_the_codes_in_halves() {
    let folder = folder("records");
    let path = folder.join("x.gguf");
    // Elements 0..16 of every block are the codes 0..16: byte j holds j and j + 8.
    let codes: Vec<u8> = (0..32).map(|at| (2 * at % 16) | (2 * at % 16 + 1) << 4).collect();
    let scales = vec![1, 2, 3, 4];
    let (format, tensor_scale) = (Fp4Format::NvFp4, Scale::One(0.5));
    let packed = Packed { format, block_size: 16, rows: 1, cols: 64, codes, scales, tensor_scale };
    let weights = vec![fp4("x.weight", std::slice::from_ref(&packed))];
    let model = Model { weights, ..Model::default() };
    model.write(&path, "gguf", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("gguf");
    let record = checkpoint.container().get("x.weight").expect("a tensor").bytes.into_owned();
    assert_eq!(record[..4], [1, 2, 3, 4]);
    assert_eq!(record[4..12], [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]);
    let read = checkpoint.model().expect("weights");
    let Value::Fp4(fp4) = &read.weights[0].value else { panic!("FP4") };
    assert_eq!(fp4.storage, Storage::Records);
    assert_eq!(fp4.to_packed(), [packed]);
}

#[test]
fn casts_are_exact_or_counted() {
    let random = &mut Random(9);
    let packed = random.packed(Fp4Format::MxFp4, 16, 128, 1.0);
    let weight = Fp4Weight::stack("w", std::slice::from_ref(&packed)).expect("valid");
    let (nv, report) = cast("w", &weight, Fp4Format::NvFp4).expect("a cast");
    assert_eq!((report.blocks, report.changed_values), (128, 0));
    assert_eq!(nv.dequantize(), weight.dequantize());
    assert_eq!(nv.plain_codes(), weight.plain_codes());
    // ModelOpt's rule: the largest block scale is 2^8.
    let top = packed.scales.iter().max().expect("scales");
    assert_eq!(nv.multipliers(), [(2.0_f32).powi(i32::from(*top) - 127 - 8)]);
    assert_eq!(nv.plain_scales().iter().max(), Some(&0x78));

    let (back, report) = cast("w", &nv, Fp4Format::MxFp4).expect("a cast");
    assert_eq!(report.changed_values, 0);
    assert_eq!(back.dequantize(), weight.dequantize());

    // 2^18 apart: E4M3 does not reach the small block, whose values are lost and counted.
    let mut far = packed.clone();
    far.codes.fill(0x22);
    far.scales.fill(127);
    far.scales[0] = 127 - 18;
    let weight = Fp4Weight::stack("w", &[far]).expect("valid");
    let (nv, report) = cast("w", &weight, Fp4Format::NvFp4).expect("a cast");
    assert_eq!((report.changed_blocks, report.changed_values), (0, 0));
    assert_eq!(nv.plain_codes()[..16], [0x11; 16], "1 x 2^-18 is 0.5 x 2^-17");
    assert_eq!(nv.dequantize(), weight.dequantize());

    // Scales that are no powers of two have no exact counterpart; the nearest is no worse than
    // the rule of OCP (the power of two below the largest value, over 4).
    let packed = random.packed(Fp4Format::NvFp4, 16, 128, 0.017);
    let weight = Fp4Weight::stack("w", &[packed]).expect("valid");
    let (mx, report) = cast("w", &weight, Fp4Format::MxFp4).expect("a cast");
    assert!(report.changed_values > 0);
    let (values, cast_values) = (weight.dequantize(), mx.dequantize());
    for (values, found) in values.chunks(32).zip(cast_values.chunks(32)) {
        let amax = values.iter().fold(0.0_f32, |amax, value| amax.max(value.abs()));
        if amax == 0.0 {
            continue;
        }
        let scale = 2.0_f32.powi(amax.log2().floor() as i32 - 2);
        let ocp = values.iter().map(|value| E2M1.decode(E2M1.encode(value / scale)) * scale);
        let error = |found: f32, value: &f32| f64::from(found - value).powi(2);
        let theirs: f64 = ocp.zip(values).map(|(found, value)| error(found, value)).sum();
        let ours: f64 = found.iter().zip(values).map(|(found, value)| error(*found, value)).sum();
        assert!(ours <= theirs * 1.000_001);
    }
    let nan = Packed {
        scales: vec![E8M0.max_code() + 1; 64],
        ..random.packed(Fp4Format::MxFp4, 16, 128, 1.0)
    };
    let mut weight =
        Fp4Weight::stack("w", &[random.packed(Fp4Format::MxFp4, 16, 128, 1.0)]).expect("valid");
    weight.scales = nan.scales.into();
    assert!(cast("w", &weight, Fp4Format::NvFp4).is_err());
}

#[test]
fn fp8_is_decoded_by_its_granularity() {
    let fp8 = |scales: &[f32], shape: &[usize]| {
        // 0x38 is 1 in E4M3.
        let values = Tensor::new("x", Dtype::F8_E4M3, vec![3, 4], vec![0x38; 12]).expect("values");
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let scales = Tensor::new("s", Dtype::F32, shape.to_vec(), bytes).expect("scales");
        Fp8Weight::new(values, scales, [2, 2]).expect("FP8")
    };
    assert_eq!(fp8(&[2.0], &[]).to_f32().expect("f32"), [2.0; 12]);
    let rows = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0];
    assert_eq!(fp8(&[1.0, 2.0, 3.0], &[3, 1]).to_f32().expect("f32"), rows);
    let blocks = [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0];
    let block = fp8(&[1.0, 2.0, 3.0, 4.0], &[2, 2]);
    assert_eq!(block.granularity, Granularity::Block { rows: 2, cols: 2 });
    assert_eq!(block.to_f32().expect("f32"), blocks);
    assert_eq!(block.decode(Dtype::BF16).expect("bf16").to_f32().expect("f32"), blocks);

    let folder = folder("fp8");
    let options = WriteOptions { decode_fp8: Some(Dtype::BF16), ..WriteOptions::default() };
    let report = mixed().write(folder.join("out.gguf"), "gguf", &options).expect("decoded");
    assert_eq!(report.decoded, 4);
    let both = WriteOptions { decode_fp4: Some(Dtype::F32), ..options };
    mixed().write(folder.join("out"), "plain", &both).expect("decoded");
    assert_eq!(Checkpoint::open(folder.join("out")).expect("plain").dialect(), "plain");
}

#[test]
fn a_matrix_of_stacked_fp8_is_decoded_alone() {
    let random = &mut Random(23);
    let (stack, rows, cols) = (3, 4, 64);
    let values: Vec<u8> = (0..stack * rows * cols).map(|_| random.below(0x7F) as u8).collect();
    let shapes: [(&[usize], Dtype); 6] = [
        (&[], Dtype::F32),
        (&[1], Dtype::BF16),
        (&[3], Dtype::F32),
        (&[3, 4, 1], Dtype::F32),
        (&[3, 2, 2], Dtype::BF16),
        (&[3, 4, 2], Dtype::U8),
    ];
    for (shape, dtype) in shapes {
        let count: usize = shape.iter().product();
        let scales: Vec<u8> = (0..count)
            .flat_map(|at| match dtype {
                Dtype::U8 => vec![120 + at as u8 % 8],
                Dtype::BF16 => (0x3F80 + at as u16).to_le_bytes().to_vec(),
                _ => (0.5 + at as f32).to_le_bytes().to_vec(),
            })
            .collect();
        let values = Tensor::new("x", Dtype::F8_E4M3, vec![stack, rows, cols], values.clone());
        let scales = Tensor::new("s", dtype, shape.to_vec(), scales).expect("scales");
        let fp8 = Fp8Weight::new(values.expect("values"), scales, [2, 32]).expect("FP8");
        let all = fp8.to_f32().expect("f32");
        assert_eq!(fp8.stacked(), stack);
        for (at, expected) in all.chunks_exact(rows * cols).enumerate() {
            let matrix = fp8.matrix(at);
            assert_eq!(matrix.values.shape[..], [rows, cols], "{shape:?}");
            assert_eq!(matrix.to_f32().expect("f32"), expected, "{shape:?} {at}");
        }
    }
}

#[test]
fn broken_headers_name_the_tensor() {
    let folder = folder("broken");
    let path = folder.join("x.safetensors");
    let write = |header: &str, data: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        fs::write(&path, bytes).expect("written");
        match Checkpoint::open(&path) {
            Err(CheckpointError::Tensor { tensor, problem, .. }) => {
                assert_eq!(tensor, "x");
                Ok(problem)
            }
            Err(other) => Err(other.to_string()),
            Ok(_) => Err("read".to_owned()),
        }
    };
    let entry = |dtype: &str, shape: &str, begin: u64, end: u64| {
        format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#)
    };
    assert_eq!(write(&entry("F32", "[2]", 0, 8), 8), Err("read".to_owned()));
    assert!(matches!(write(&entry("F3", "[2]", 0, 8), 8), Ok(TensorProblem::UnknownDtype { .. })));
    assert!(matches!(write(&entry("F32", "[3]", 0, 8), 8), Ok(TensorProblem::Bytes { .. })));
    assert!(matches!(write(&entry("F32", "[2]", 0, 8), 4), Ok(TensorProblem::Offsets { .. })));
    assert!(matches!(write(&entry("F32", "[2]", 8, 0), 8), Ok(TensorProblem::Offsets { .. })));
    assert!(matches!(write(&entry("F32", "[1]", 4, 8), 8), Ok(TensorProblem::Offsets { .. })));
    assert!(matches!(write(&entry("F4", "[3]", 0, 2), 2), Ok(TensorProblem::Size { .. })));
    let huge = "[4294967296,4294967296,0]";
    assert!(matches!(write(&entry("F32", huge, 0, 0), 0), Ok(TensorProblem::Size { .. })));
    let twice = entry("U8", "[1]", 0, 1);
    let twice = format!(
        "{},{}",
        twice.trim_end_matches('}').to_owned() + "}",
        &entry("U8", "[1]", 1, 2)[1..]
    );
    assert!(matches!(write(&twice, 2), Ok(TensorProblem::Duplicate)));
    let text = write(r#"{"x":{"dtype":"U8","shape":[1]}}"#, 1).expect_err("a missing field");
    assert!(text.contains("tensor `x`") && text.contains("data_offsets"), "{text}");
    assert!(write(&entry("U8", "[1]", 0, 1), 2).expect_err("unused bytes").contains("cover"));
    fs::write(&path, u64::MAX.to_le_bytes()).expect("written");
    assert!(matches!(Checkpoint::open(&path), Err(CheckpointError::Header { .. })));

    // An index that leads out of its folder.
    fs::create_dir(folder.join("index")).expect("a folder");
    let index = r#"{"weight_map": {"x": "../x.safetensors"}}"#;
    fs::write(folder.join("index/model.safetensors.index.json"), index).expect("written");
    let out = Checkpoint::open(folder.join("index"));
    assert!(matches!(out, Err(CheckpointError::Field { .. })));
}

/// A header of a shard, and a hole where the data would be.
fn sparse_shard(path: &Path, shard: usize, layers: usize, rows: usize, cols: usize) -> Vec<String> {
    let mut fields = Vec::new();
    let mut offset = 0;
    let mut names = Vec::new();
    let mut add = |name: String, dtype: &str, shape: String, bytes: usize| {
        let end = offset + bytes;
        fields.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{offset},{end}]}}"#
        ));
        offset = end;
        names.push(name);
    };
    for layer in 0..layers {
        let module = format!("model.layers.{shard}.mlp.experts.{layer}.up_proj");
        add(format!("{module}.weight_scale_2"), "F32", "[]".into(), 4);
        add(format!("{module}.input_scale"), "F32", "[]".into(), 4);
        add(
            format!("{module}.weight_scale"),
            "F8_E4M3",
            format!("[{rows},{}]", cols / 16),
            rows * cols / 16,
        );
        add(format!("{module}.weight"), "U8", format!("[{rows},{}]", cols / 2), rows * cols / 2);
    }
    let header = format!("{{{}}}", fields.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    fs::write(path, &bytes).expect("written");
    let file = fs::OpenOptions::new().write(true).open(path).expect("a file");
    file.set_len((bytes.len() + offset) as u64).expect("a sparse file");
    names
}

#[test]
fn twenty_gigabytes_are_opened_and_listed_without_being_read() {
    const SHARDS: usize = 5;
    const LAYERS: usize = 3600;
    let folder = folder("sparse");
    let mut weight_map = serde_json::Map::new();
    for shard in 0..SHARDS {
        let name = format!("model-{shard:05}.safetensors");
        let names = sparse_shard(&folder.join(&name), shard, LAYERS, 1024, 2048);
        weight_map.extend(names.into_iter().map(|tensor| (tensor, json!(name))));
    }
    let index = json!({"weight_map": weight_map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("written");
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#;
    fs::write(folder.join("config.json"), config).expect("written");
    let start = Instant::now();
    let (weights, allocated) = peak(|| {
        let checkpoint = Checkpoint::open(&folder).expect("shards");
        checkpoint.model().expect("weights").weights.len()
    });
    let seconds = start.elapsed().as_secs_f64();
    assert_eq!(weights, SHARDS * LAYERS);
    // Names, shapes and places of 72 000 tensors; none of their data.
    assert!(allocated < 50 << 20, "{allocated} bytes");
    let bytes: u64 = (0..SHARDS)
        .map(|shard| {
            fs::metadata(folder.join(format!("model-{shard:05}.safetensors")))
                .expect("a file")
                .len()
        })
        .sum();
    println!(
        "{weights} weights of {:.1} GB in {seconds:.3} s, {} bytes a tensor",
        bytes as f64 / 1e9,
        allocated / (4 * weights),
    );
    assert!(bytes > 20_000_000_000);
    fs::remove_dir_all(&folder).expect("removed");
}

/// Reads what other projects wrote, and writes it in every dialect that can hold it, for
/// `tests/interop/compare.py`.
#[test]
#[ignore = "run by tests/interop/run.sh, which installs the other projects"]
fn interop() {
    let root = PathBuf::from(std::env::var_os("FP4_INTEROP").expect("the folder of run.sh"));
    let decode = WriteOptions {
        decode_fp4: Some(Dtype::F32),
        decode_fp8: Some(Dtype::F32),
        ..WriteOptions::default()
    };
    fs::create_dir_all(root.join("read")).expect("a folder");
    for case in bytes_of_names(&root.join("theirs")) {
        if case.ends_with(".values") {
            continue;
        }
        let theirs = root.join("theirs").join(&case);
        let file = theirs.join("model.gguf");
        let checkpoint = Checkpoint::open(if file.is_file() { &file } else { &theirs });
        let checkpoint = checkpoint.expect(&case);
        let model = checkpoint.model().expect(&case);
        model.write(root.join("read").join(&case), "plain", &decode).expect(&case);
        let ours = root.join("ours").join(&case);
        fs::create_dir_all(&ours).expect("a folder");
        for dialect in ["modelopt", "compressed-tensors", "gpt-oss", "gguf", "mlx"] {
            let path = ours.join(if dialect == "gguf" { "gguf.gguf" } else { dialect });
            let options = WriteOptions { inexact: true, ..WriteOptions::default() };
            match model.write(&path, dialect, &options) {
                Ok(report) => println!("{case} -> {dialect}: {report:?}"),
                Err(CheckpointError::CannotHold { weight, what, .. }) => {
                    println!("{case} -> {dialect}: no place for {what} (`{weight}`)");
                    continue;
                }
                Err(other) => panic!("{case} -> {dialect}: {other}"),
            }
            let written = Checkpoint::open(&path).expect(dialect);
            assert_eq!(written.dialect(), dialect);
            let read = ours.join(format!("{dialect}.read"));
            written.model().expect(dialect).write(read, "plain", &decode).expect(dialect);
        }
    }
}

#[test]
fn what_multiplies_the_input_is_carried_or_refused() {
    let folder = folder("awq");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], Some(0.5));
    for weight in source.weights.iter_mut().filter(|weight| weight.is_quantized()) {
        let scale = Tensor::new("s", Dtype::BF16, vec![128], vec![0x3F; 256]).expect("a shape");
        weight.pre_quant_scale = Some(scale);
    }
    let path = folder.join("modelopt");
    source.write(&path, "modelopt", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("modelopt");
    let config = checkpoint.container().quantization().expect("a config");
    assert_eq!(config["quant_algo"], "NVFP4_AWQ");
    let read = checkpoint.model().expect("weights");
    assert_eq!(read.weights.iter().filter(|weight| weight.pre_quant_scale.is_some()).count(), 2);
    for dialect in ["compressed-tensors", "gguf", "mlx", "miles"] {
        let refused = read.write(folder.join("refused"), dialect, &WriteOptions::default());
        assert!(matches!(refused, Err(CheckpointError::CannotHold { .. })), "{dialect}");
    }
    // The floats of a layer do not say it either.
    let decode = WriteOptions { decode_fp4: Some(Dtype::F32), ..WriteOptions::default() };
    let refused = read.write(folder.join("refused"), "plain", &decode);
    assert!(matches!(refused, Err(CheckpointError::CannotHold { dialect: "decoding", .. })));
}

/// A reader of the target decodes the values of the source, or the conversion is refused.
#[test]
fn a_tensor_scale_of_mxfp4_is_folded_or_refused() {
    let folder = folder("scaled-mxfp4");
    let source = |g: f32, name: &str| {
        let mut source = model(Fp4Format::MxFp4, [1.0, 1.0], None);
        for weight in &mut source.weights {
            if let Value::Fp4(fp4) = &mut weight.value {
                fp4.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[g])));
            }
        }
        let path = folder.join(format!("{name}.gguf"));
        source.write(&path, "gguf", &WriteOptions::default()).expect("GGUF has a place for it");
        path
    };
    let values = |checkpoint: &Checkpoint| -> BTreeMap<String, Vec<f32>> {
        let weights = checkpoint.weights().expect("weights");
        let quantized = weights.iter().filter(|weight| weight.is_quantized());
        quantized.map(|one| (one.name.clone(), one.values().expect("values").1)).collect()
    };
    let power = Checkpoint::open(source(0.25, "power")).expect("gguf");
    for dialect in ["modelopt", "compressed-tensors"] {
        let path = folder.join(dialect);
        let model = power.model().expect("weights");
        let report = model.write(&path, dialect, &WriteOptions::default()).expect(dialect);
        assert!(report.folded.blocks > 0 && report.folded.changed_values == 0, "{report:?}");
        assert_eq!(values(&Checkpoint::open(&path).expect(dialect)), values(&power), "{dialect}");
    }
    let odd = Checkpoint::open(source(0.3, "odd")).expect("gguf");
    let model = odd.model().expect("weights");
    for dialect in ["modelopt", "compressed-tensors"] {
        let path = folder.join(format!("{dialect}-odd"));
        let refused = model.write(&path, dialect, &WriteOptions::default());
        let Err(CheckpointError::CannotHold { what, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(what, CheckpointError::NOT_FOLDED_EXACTLY);
    }
    // NVFP4 has a tensor scale of its own.
    let options = WriteOptions { cast: Some(Fp4Format::NvFp4), ..WriteOptions::default() };
    let path = folder.join("cast");
    model.write(&path, "modelopt", &options).expect("cast");
    assert_eq!(values(&Checkpoint::open(&path).expect("modelopt")), values(&odd));
}

#[test]
fn a_scale_of_inputs_with_mxfp4_is_counted_where_it_is_left_out() {
    let folder = folder("mxfp4-inputs");
    let source = model(Fp4Format::MxFp4, [1.0, 1.0], Some(0.5));
    for (dialect, left_out) in [("modelopt", 0), ("compressed-tensors", 2)] {
        let path = folder.join(dialect);
        let report = source.write(&path, dialect, &WriteOptions::default()).expect(dialect);
        assert_eq!(report.input_scales_left_out, left_out, "{dialect}");
        let checkpoint = Checkpoint::open(&path).expect(dialect);
        let weights = checkpoint.weights().expect("weights");
        let kept = weights.iter().filter(|weight| weight.input_scale.is_some()).count();
        assert_eq!(kept as u64, 2 - left_out, "{dialect}");
    }
}

/// As compressed-tensors matches targets: by the class of a module, or by its name.
#[test]
fn targets_of_compressed_tensors_cover_quantized_embeddings() {
    let folder = folder("targets");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    let targets = |source: &Model<'_>, name: &str| {
        let path = folder.join(name);
        source.write(&path, "compressed-tensors", &WriteOptions::default()).expect("written");
        let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
        let config = checkpoint.container().quantization().expect("a config");
        config["config_groups"]["group_0"]["targets"].to_string()
    };
    assert_eq!(targets(&source, "linear"), r#"["Linear"]"#);
    let embedding =
        fp4("model.embed_tokens.weight", &[Random(1).packed(Fp4Format::NvFp4, 32, 64, 0.5)]);
    source.weights[0] = embedding;
    assert_eq!(targets(&source, "embedding"), r#"["Linear","model.embed_tokens"]"#);
}

#[test]
fn gguf_is_written_to_a_path_that_can_be_opened() {
    let folder = folder("gguf-path");
    let source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    for name in ["out", "out.bin"] {
        let refused = source.write(folder.join(name), "gguf", &WriteOptions::default());
        let error = refused.expect_err("no end").to_string();
        assert!(error.contains("ends in .gguf"), "{error}");
    }
    assert!(bytes_of_names(&folder).is_empty());
}

#[test]
fn one_file_of_a_split_gguf_is_refused() {
    let path = folder("split").join("model-00001-of-00002.gguf");
    let file = |count: u16| {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
        bytes.extend(11_u64.to_le_bytes());
        bytes.extend(b"split.count");
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend(count.to_le_bytes());
        fs::write(&path, bytes).expect("written");
        Checkpoint::open(&path)
    };
    assert!(file(1).is_ok());
    let error = file(2).expect_err("one of two");
    assert!(matches!(error, CheckpointError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("split.count 2"), "{error}");
    let says = "tensors of the model; merge them with llama-gguf-split --merge";
    assert!(error.to_string().ends_with(says), "{error}");
}

#[test]
fn shards_without_an_index_are_all_there_or_an_error() {
    let folder = folder("shards");
    let shard = |number: usize, of: usize, front: &str| {
        let name = format!("{front}-{number:05}-of-{of:05}.safetensors");
        let tensor = format!("{front}.{number}.weight");
        raw_file(&folder.join(name), &[], &[(&tensor, Dtype::U8, vec![1], vec![0])]);
    };
    shard(1, 1, "whole");
    shard(2, 3, "model");
    shard(3, 3, "model");
    let error = Checkpoint::open(&folder).expect_err("one of three is missing");
    let CheckpointError::Shards { found: 2, expected: 3, .. } = error else { panic!("{error}") };
    let alone = Container::open(folder.join("model-00002-of-00003.safetensors")).expect("a file");
    assert_eq!(alone.shard(), Some([2, 3]));
    shard(1, 3, "model");
    let whole = Container::open(&folder).expect("all shards");
    assert_eq!((whole.len(), whole.shard()), (4, None));
}

/// DeepSeek's layers in a folder of ModelOpt; and FP8 whose scales no dialect has.
#[test]
fn scales_of_fp8_are_found_by_either_name_or_named() {
    let folder = folder("scale-inv");
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#;
    fs::write(folder.join("config.json"), config).expect("a config");
    let write = |scale: &'static str| {
        let tensors = [
            ("a.weight", Dtype::F8_E4M3, vec![4, 32], vec![0x38; 128]),
            (scale, Dtype::F32, vec![1, 1], 2.0_f32.to_le_bytes().to_vec()),
        ];
        raw_file(&folder.join("model.safetensors"), &[], &tensors);
        Checkpoint::open(&folder).expect("modelopt")
    };
    let checkpoint = write("a.weight_scale_inv");
    let weights = checkpoint.weights().expect("weights");
    assert_eq!(weights.len(), 1);
    assert_eq!(weights[0].values().expect("values").1, [2.0; 128]);
    let checkpoint = write("b.weight_scale_inv");
    let error = checkpoint.weights().map(|_| ()).expect_err("of no weight");
    let CheckpointError::Tensor { tensor, problem, .. } = &error else { panic!("{error}") };
    assert_eq!(tensor, "b.weight_scale_inv");
    assert!(matches!(problem, TensorProblem::Alone { .. }), "{error}");
}

#[test]
fn fp8_with_scales_that_its_dialect_does_not_read_is_not_taken_for_a_cast() {
    let folder = folder("unread-scales");
    let error = |config: &str, weight: &str, scale: Option<&str>| {
        fs::write(folder.join("config.json"), config).expect("a config");
        let mut tensors = vec![
            (weight, Dtype::F8_E4M3, vec![2, 4, 32], vec![0x38; 256]),
            ("norm.scale", Dtype::F32, vec![1], vec![0; 4]),
        ];
        tensors.extend(scale.map(|scale| (scale, Dtype::F32, vec![2], vec![0; 8])));
        raw_file(&folder.join("model.safetensors"), &[], &tensors);
        Checkpoint::open(&folder).expect("a dialect").weights().map(|_| ()).err()
    };
    let quantized = |fields: &str| {
        format!(
            r#"{{"model_type": "qwen3_moe", "quantization_config": {{"quant_method": {fields}}}}}"#
        )
    };
    let stack = "layers.0.mlp.experts.gate_up_proj";
    let scale = "layers.0.mlp.experts.gate_up_proj_scale_inv";
    let ignored = "[\"layers.0.mlp.experts*\"]";
    for (config, no_scale) in [
        (r#""fp8""#.to_owned(), false),
        (r#""mxfp4""#.to_owned(), false),
        (r#""torchao""#.to_owned(), false),
        (r#""modelopt", "quant_algo": "FP8""#.to_owned(), false),
        (format!(r#""modelopt", "quant_algo": "FP8", "ignore": {ignored}"#), true),
    ] {
        let config = quantized(&config);
        match error(&config, stack, Some(scale)) {
            Some(CheckpointError::Tensor { tensor, problem, .. }) => {
                assert_eq!(tensor, stack);
                assert_eq!(problem, TensorProblem::UnreadScale { scale: scale.to_owned() });
            }
            other => panic!("{config}: {other:?}"),
        }
        match error(&config, stack, None) {
            None => assert!(no_scale, "{config}"),
            Some(CheckpointError::Tensor { problem: TensorProblem::Missing { .. }, .. }) => {
                assert!(!no_scale, "{config}");
            }
            other => panic!("{config}: {other:?}"),
        }
    }
    // Mistral's scales, in a folder that names no dialect.
    for (weight, scale) in
        [("layers.0.attention.wq.weight", "layers.0.attention.wq.qscale_weight"), (stack, scale)]
    {
        let found = error("{}", weight, Some(scale));
        let Some(CheckpointError::NoDialect { tensor, .. }) = &found else { panic!("{found:?}") };
        assert_eq!(tensor, weight);
        assert!(error("{}", weight, None).is_none(), "it was cast");
    }
}

#[test]
fn a_pattern_that_cannot_be_matched_is_an_error_only_where_it_is_needed_and_names_its_file() {
    let folder = folder("patterns");
    let open = |config: &str, dtype: Dtype, size: usize| {
        fs::write(folder.join("config.json"), config).expect("a config");
        let bytes = vec![0x38; 128 * size];
        let tensors = [("layers.0.mlp.up_proj.weight", dtype, vec![4, 32], bytes)];
        raw_file(&folder.join("model.safetensors"), &[], &tensors);
        Checkpoint::open(&folder)
            .expect("a dialect")
            .weights()
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    for (method, ignore, says) in [
        ("compressed-tensors", "re:^(?!.*mlp).*$", "look-around"),
        ("modelopt", "a[9-0]b*", "invalid character class range"),
    ] {
        let config = json!({"quantization_config": {"quant_method": method, "ignore": [ignore]}});
        let config = config.to_string();
        assert_eq!(open(&config, Dtype::BF16, 2), Ok(()), "{method}");
        let error = open(&config, Dtype::F8_E4M3, 1).expect_err("FP8 without scales");
        let file = folder.join("config.json").display().to_string();
        assert!(error.starts_with(&file) && error.contains(says), "{error}");
    }
}

#[test]
fn extensions_in_capitals_are_those_of_weights_in_a_folder_too() {
    let folder = folder("capitals");
    let tensors = [("a", Dtype::U8, vec![1], vec![0])];
    raw_file(&folder.join("MODEL.SAFETENSORS"), &[], &tensors);
    for name in ["L.GGUF", "OLD.BIN", "README.MD"] {
        fs::write(folder.join(name), "").expect("a file");
    }
    let container = Container::open(&folder).expect("a checkpoint");
    assert_eq!(container.file_names(), ["MODEL.SAFETENSORS"]);
    assert_eq!(container.sidecars(), [folder.join("README.MD")]);
    assert_eq!(container.left_out(), [folder.join("L.GGUF"), folder.join("OLD.BIN")]);
}

#[test]
fn scales_of_a_quantized_cache_are_known_in_every_dialect() {
    let folder = folder("cache");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    source.weights.push(scalar("model.layers.0.self_attn.k_proj.k_scale", 0.75));
    source.weights.push(scalar("model.layers.0.self_attn.v_proj.v_scale", 0.75));
    for dialect in ["modelopt", "compressed-tensors", "gguf"] {
        let path = path_of(&folder, dialect);
        source.write(&path, dialect, &WriteOptions::default()).expect(dialect);
        let checkpoint = Checkpoint::open(&path).expect(dialect);
        let weights = checkpoint.weights().expect(dialect);
        let found: Vec<&str> =
            weights.iter().filter(|one| one.is_cache_scale()).map(|one| &*one.name).collect();
        let expected = ["k_proj.k_scale", "v_proj.v_scale"];
        assert!(found.iter().zip(expected).all(|(name, end)| name.ends_with(end)), "{found:?}");
        assert_eq!(found.len(), 2, "{dialect}");
    }
    for name in ["a.attn.k_proj.k_bias", "a.attn.v_proj.v_bias"] {
        assert!(scalar(name, 1.0).is_cache_scale(), "{name}");
    }
    for name in ["k_scale", "model.temperature.k_scale", "a.k_proj.input_scale", "a.attn.k_bias"] {
        assert!(!scalar(name, 1.0).is_cache_scale(), "{name}");
    }
}

/// The config of a folder.
fn config_of(path: &Path, name: &str) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path.join(name)).expect("a config")).expect("JSON")
}

#[test]
fn a_cache_is_quantized_only_if_the_source_says_so() {
    let folder = folder("cache-scheme");
    let first = folder.join("source");
    let mut source = model(Fp4Format::NvFp4, [0.25, 0.5], None);
    source.write(&first, "modelopt", &WriteOptions::default()).expect("written");
    let given = config_of(&first, "hf_quant_config.json");
    let fp8 = json!({
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": true,
        "dynamic": false,
    });
    let name_of = |export: &serde_json::Value| {
        export["quantization"].get("kv_cache_quant_algo").expect("a field").clone()
    };
    // With this option the configs are made new.
    let cast = WriteOptions { cast: Some(Fp4Format::NvFp4), ..WriteOptions::default() };
    let cases = [(json!(null), json!(null)), (json!("FP8"), fp8)];
    for (at, (name, scheme)) in cases.into_iter().enumerate() {
        let mut export = given.clone();
        export["quantization"]["kv_cache_quant_algo"] = name.clone();
        fs::write(first.join("hf_quant_config.json"), export.to_string()).expect("written");
        let checkpoint = Checkpoint::open(&first).expect("modelopt");
        let read = checkpoint.model().expect("weights");
        let [there, back, again] =
            ["ct", "back", "again"].map(|n| folder.join(format!("{n}-{at}")));
        read.write(&there, "compressed-tensors", &WriteOptions::default()).expect("written");
        let found = config_of(&there, "config.json");
        assert_eq!(found["quantization_config"].get("kv_cache_scheme"), Some(&scheme));
        let converted = Checkpoint::open(&there).expect("compressed-tensors");
        let converted = converted.model().expect("weights");
        converted.write(&back, "modelopt", &WriteOptions::default()).expect("written");
        read.write(&again, "modelopt", &cast).expect("written");
        for path_of_it in [back, again] {
            let export = config_of(&path_of_it, "hf_quant_config.json");
            assert_eq!(name_of(&export), name, "{path_of_it:?}");
            let config = config_of(&path_of_it, "config.json");
            let kind = config["quantization_config"]["kv_cache_scheme"]["type"].as_str();
            assert_eq!(kind, name.as_str().map(|_| "float"), "{path_of_it:?}");
        }
    }
    let four = json!({"num_bits": 4, "type": "float"});
    source.quantization.kv_cache = Some(four.clone());
    let other = folder.join("four");
    source.write(&other, "modelopt", &WriteOptions::default()).expect("written");
    assert_eq!(name_of(&config_of(&other, "hf_quant_config.json")), json!(null));
    let config = config_of(&other, "config.json");
    assert_eq!(config["quantization_config"]["kv_cache_scheme"], four);
}

/// `FP8_DYNAMIC` of compressed-tensors; DeepSeek's FP8 has an input in groups of 128.
#[test]
fn inputs_that_are_quantized_as_layers_run_are_said_or_counted() {
    let folder = folder("dynamic");
    let rows = folder.join("rows");
    mixed().write(&rows, "compressed-tensors", &WriteOptions::default()).expect("written");
    let config = config_of(&rows, "config.json");
    let groups = config["quantization_config"]["config_groups"].as_object().expect("groups");
    let rows = groups.values().find(|group| group["weights"]["strategy"] == "channel");
    let inputs = &rows.expect("a group of rows")["input_activations"];
    assert_eq!(inputs["strategy"], "token");
    assert_eq!(inputs["dynamic"], true);

    let source = folder.join("source");
    fs::create_dir(&source).expect("a folder");
    let tensors = [
        ("a.weight", Dtype::F8_E4M3, vec![4, 32], vec![0x38; 128]),
        ("a.weight_scale_inv", Dtype::F32, vec![1, 1], 2.0_f32.to_le_bytes().to_vec()),
    ];
    raw_file(&source.join("model.safetensors"), &[], &tensors);
    for (scheme, expected) in [("dynamic", 1), ("static", 0)] {
        let quantization = json!({"quant_method": "fp8", "activation_scheme": scheme});
        let config = json!({"quantization_config": quantization});
        fs::write(source.join("config.json"), config.to_string()).expect("a config");
        let checkpoint = Checkpoint::open(&source).expect("deepseek");
        let model = checkpoint.model().expect("weights");
        for dialect in ["compressed-tensors", "modelopt"] {
            let path = folder.join(format!("{scheme}-{dialect}"));
            let report = model.write(&path, dialect, &WriteOptions::default()).expect(dialect);
            assert_eq!(report.dynamic_inputs_left_out, expected, "{scheme} {dialect}");
        }
    }
}

#[test]
fn blocks_of_another_size_are_cast_when_they_are_written() {
    let folder = folder("blocks");
    let format = Fp4Format::NvFp4;
    let mut packed = Random(3).packed(format, 24, 128, 0.25);
    packed.block_size = 32;
    packed.scales.truncate(24 * 4);
    let weight = fp4("up.weight", &[packed]);
    let values = weight.values().expect("values").1;
    let source = Model { weights: vec![weight], ..Model::default() };
    for dialect in ["compressed-tensors", "gguf"] {
        let path = path_of(&folder, dialect);
        let refused = source.write(&path, dialect, &WriteOptions::default());
        assert!(matches!(refused, Err(CheckpointError::CannotHold { .. })), "{dialect}");
        let cast = WriteOptions { cast: Some(format), ..WriteOptions::default() };
        let report = source.write(&path, dialect, &cast).expect(dialect);
        assert_eq!((report.cast.blocks, report.cast.changed_values), (24 * 8, 0));
        let checkpoint = Checkpoint::open(&path).expect(dialect);
        let weights = checkpoint.weights().expect(dialect);
        assert_eq!(weights[0].values().expect("values").1, values, "{dialect}");
    }
}

/// As llama.cpp creates them: `{n_expert}`.
#[test]
fn experts_that_share_a_tensor_scale_have_one_each_in_gguf() {
    let path = path_of(&folder("shared-scale"), "gguf");
    let mut source = experts(Fp4Format::NvFp4);
    let stack = &mut source.weights[1];
    let one = |number| Some(TensorScale::Multiplier(Numbers::new(&[number])));
    stack.input_scale = one(0.5);
    let Value::Fp4(fp4) = &mut stack.value else { panic!("FP4") };
    fp4.tensor_scale = one(0.017);
    source.write(&path, "gguf", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("gguf");
    for (end, number) in [("scale", 0.017), ("input_scale", 0.5)] {
        let name = format!("model.layers.0.mlp.experts.gate_up_proj.{end}");
        let tensor = checkpoint.container().get(&name).expect("a scale");
        assert_eq!(tensor.shape[..], [3], "{end}");
        assert_eq!(tensor.to_f32().expect("f32"), [number; 3], "{end}");
    }
    let read = checkpoint.model().expect("weights");
    assert_eq!(fp4_weights(&read), fp4_weights(&source));
}

#[test]
fn scales_of_a_cache_stand_in_any_attention() {
    let path = folder("cache-names").join("ct");
    let packed = Random(2).packed(Fp4Format::NvFp4, 16, 64, 0.5);
    let weights = vec![
        fp4("h.0.attention.k_proj.weight", &[packed]),
        scalar("h.0.attention.k_proj.k_scale", 0.75),
        scalar("h.0.mixer.k_scale", 0.5),
    ];
    let source = Model { weights, ..Model::default() };
    source.write(&path, "compressed-tensors", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("compressed-tensors");
    for name in ["h.0.attention.k_scale", "h.0.mixer.k_scale"] {
        assert!(checkpoint.container().get(name).is_some(), "{name}");
    }
    let names = |weights: &[Weight<'_>]| -> BTreeSet<String> {
        weights.iter().map(|weight| weight.name.clone()).collect()
    };
    assert_eq!(names(&checkpoint.weights().expect("weights")), names(&source.weights));
}

#[test]
fn what_no_reader_of_ours_computes_is_refused_by_name() {
    let folder = folder("refused");
    let refused = |config: &str, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]| {
        let config = format!(r#"{{"quantization_config": {config}}}"#);
        fs::write(folder.join("config.json"), config).expect("a config");
        raw_file(&folder.join("model.safetensors"), &[], tensors);
        let read = Checkpoint::open(&folder).and_then(|c| c.model().map(|_| ()));
        read.expect_err("not read")
    };
    for name in ["rotation", "QuaRot", "hadamard"] {
        let algorithms = format!(r#"[{{"name": "awq"}}, {{"name": "{name}"}}]"#);
        let config = format!(r#"{{"quant_method": "quark", "algo_config": {algorithms}}}"#);
        let error = refused(&config, &[("x", Dtype::U8, vec![1], vec![0])]);
        let CheckpointError::Refused { what, .. } = &error else { panic!("{error}") };
        assert_eq!(*what, format!("algo_config `{name}`"));
    }
    let tensors = [
        ("x.weight_packed", Dtype::U8, vec![4, 16], vec![0x22; 64]),
        ("x.weight_scale", Dtype::U8, vec![4, 1], vec![127; 4]),
        ("x.weight_zero_point", Dtype::U8, vec![4, 1], vec![0; 4]),
    ];
    let error = refused(r#"{"quant_method": "compressed-tensors"}"#, &tensors);
    let CheckpointError::Refused { what, .. } = &error else { panic!("{error}") };
    assert_eq!(what, "x.weight_zero_point");
    let tensors = [
        ("x.weight", Dtype::I8, vec![4, 16], vec![0x22; 64]),
        ("x.scale", Dtype::F8_E8M0, vec![4, 1], vec![127; 4]),
    ];
    for (config, said) in [
        (r#"{"quant_method": "fp8"}"#, "null"),
        (r#"{"quant_method": "fp8"}, "expert_dtype": "fp8""#, "\"fp8\""),
    ] {
        let error = refused(config, &tensors);
        let CheckpointError::Field { field, found, .. } = &error else { panic!("{error}") };
        assert_eq!((&**field, &**found), ("expert_dtype", said));
    }
}

#[test]
fn modelopt_is_read_whatever_dtype_names_its_bytes() {
    let folder = folder("modelopt-dtypes");
    let file = folder.join("model.safetensors");
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#;
    fs::write(folder.join("config.json"), config).expect("a config");
    let random = &mut Random(4);
    let mx = random.packed(Fp4Format::MxFp4, 4, 64, 1.0);
    let nv = random.packed(Fp4Format::NvFp4, 4, 64, 0.017);
    let g = 0.017_f32.to_le_bytes().to_vec();
    for (codes, cols) in [(Dtype::U8, 32), (Dtype::I8, 32), (Dtype::F4, 64)] {
        for scales in [Dtype::U8, Dtype::F8_E8M0] {
            let tensors = [
                ("x.weight", codes, vec![4, cols], mx.codes.clone()),
                ("x.weight_scale", scales, vec![4, 2], mx.scales.clone()),
                ("y.weight", codes, vec![4, cols], nv.codes.clone()),
                ("y.weight_scale", Dtype::F8_E4M3, vec![4, 4], nv.scales.clone()),
                ("y.weight_scale_2", Dtype::F32, vec![], g.clone()),
            ];
            raw_file(&file, &[], &tensors);
            check("modelopt", &folder, &[("x.weight", &mx), ("y.weight", &nv)]);
        }
    }
    // Powers of two have no tensor scale.
    let tensors = [
        ("x.weight", Dtype::U8, vec![4, 32], mx.codes.clone()),
        ("x.weight_scale", Dtype::F8_E8M0, vec![4, 2], mx.scales.clone()),
        ("x.weight_scale_2", Dtype::F32, vec![], g),
    ];
    raw_file(&file, &[], &tensors);
    let error = Checkpoint::open(&folder).and_then(|c| c.model().map(|_| ())).err();
    let Some(CheckpointError::Tensor { tensor, problem, .. }) = &error else { panic!("{error:?}") };
    assert_eq!(tensor, "x.weight_scale");
    assert!(matches!(problem, TensorProblem::Dtype { .. }), "{problem}");
}

#[test]
fn a_weight_whose_scales_lie_in_another_file_is_written_into_one() {
    let folder = folder("apart");
    let source = folder.join("source");
    fs::create_dir(&source).expect("a folder");
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let packed = Random(8).packed(Fp4Format::NvFp4, 4, 64, 0.5);
    let codes = [("x.weight", Dtype::U8, vec![4, 32], packed.codes.clone())];
    let others = [
        ("x.weight_scale", Dtype::F8_E4M3, vec![4, 4], packed.scales.clone()),
        ("x.weight_scale_2", Dtype::F32, vec![], 0.5_f32.to_le_bytes().to_vec()),
        ("y.weight", Dtype::F32, vec![1], vec![0; 4]),
    ];
    raw_file(&source.join(files[0]), &[], &codes);
    raw_file(&source.join(files[1]), &[], &others);
    let map = json!({
        "x.weight": files[0],
        "x.weight_scale": files[1],
        "x.weight_scale_2": files[1],
        "y.weight": files[1],
    });
    let index = json!({"weight_map": map});
    fs::write(source.join("model.safetensors.index.json"), index.to_string()).expect("an index");
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#;
    fs::write(source.join("config.json"), config).expect("a config");
    let checkpoint = Checkpoint::open(&source).expect("modelopt");
    let read = checkpoint.model().expect("weights");
    let expected = [("x.weight".to_owned(), (packed.codes, packed.scales, vec![0.5_f32]))];
    assert_eq!(fp4_weights(&read), BTreeMap::from(expected));
    let out = folder.join("out");
    read.write(&out, "modelopt", &WriteOptions::default()).expect("written");
    let index = config_of(&out, "model.safetensors.index.json");
    for (name, file) in [
        ("x.weight", files[0]),
        ("x.weight_scale", files[0]),
        ("x.weight_scale_2", files[0]),
        ("y.weight", files[1]),
    ] {
        assert_eq!(index["weight_map"][name], file, "{name}");
    }
    let again = Checkpoint::open(&out).expect("modelopt");
    assert_eq!(fp4_weights(&again.model().expect("weights")), fp4_weights(&read));
}
