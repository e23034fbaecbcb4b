//! Files that once did harm, or would, each written by hand.

use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Dtype, Pattern, Reader, Syntax, TensorProblem, WriteOptions,
};
use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::PolicyError;
use serde_json::json;

use super::counting::peak;
use super::folder;
use super::models::{model, raw_file};

/// The tensor and the problem, if a checkpoint has one.
fn problem(path: &Path, dialect: &str) -> Option<(String, TensorProblem)> {
    let error = Checkpoint::open_as(path, dialect).and_then(|c| c.model().map(|_| ())).err()?;
    match error {
        CheckpointError::Tensor { tensor, problem, .. } => Some((tensor, problem)),
        other => panic!("{other}"),
    }
}

/// Shapes alone would let them through: as many numbers, but half or four times the bytes.
#[test]
fn scales_and_codes_of_another_dtype_are_errors() {
    let folder = folder("hostile-dtypes");
    let path = folder.join("x.safetensors");
    let one = || 1.0_f32.to_le_bytes().to_vec();
    for (dtype, bytes) in [(Dtype::F4, 256), (Dtype::F32, 2048)] {
        let scales = ("x.weight_scale", dtype, vec![128, 4], vec![0; bytes]);
        let codes = ("x.weight", Dtype::U8, vec![4, 32], vec![0; 128]);
        raw_file(&path, &[], &[codes, scales, ("x.weight_scale_2", Dtype::F32, vec![], one())]);
        let (tensor, found) = problem(&path, "comfyui").expect("no E4M3");
        assert_eq!(tensor, "x.weight_scale");
        assert!(matches!(found, TensorProblem::Dtype { .. }), "{found}");

        let facts = [("x.weight", r#"{"_type": "NVFP4Tensor", "_data": {}}"#)];
        let scales = ("x._weight_scale", dtype, vec![4, 128], vec![0; bytes]);
        let codes = ("x._weight_qdata", Dtype::U8, vec![4, 1024], vec![0; 4096]);
        raw_file(&path, &facts, &[codes, scales]);
        assert_eq!(problem(&path, "torchao").expect("no E4M3").0, "x._weight_scale");
    }
    let codes = |dtype, bytes| ("x_blocks", dtype, vec![4, 2, 16], vec![0; bytes]);
    let scales = |dtype, bytes| ("x_scales", dtype, vec![4, 2], vec![0; bytes]);
    raw_file(&path, &[], &[codes(Dtype::U8, 128), scales(Dtype::F4, 4)]);
    assert_eq!(problem(&path, "gpt-oss").expect("no E8M0").0, "x_scales");
    raw_file(&path, &[], &[codes(Dtype::F4, 64), ("x_scales", Dtype::U8, vec![4, 1], vec![0; 4])]);
    assert_eq!(problem(&path, "gpt-oss").expect("no U8").0, "x_blocks");
}

/// The data would begin behind the end of the file.
#[test]
fn a_gguf_file_may_end_with_its_header_which_names_what_is_wrong() {
    let path = folder("hostile-gguf").join("x.gguf");
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend(b"x");
    bytes.extend(1_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    assert!(!bytes.len().is_multiple_of(32));
    fs::write(&path, &bytes).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("an empty tensor");
    assert!(checkpoint.container().get("x").expect("it is there").bytes.is_empty());

    // Behind magic, version, two counts, and a name of one letter.
    bytes[33] = 5;
    fs::write(&path, &bytes).expect("written");
    let (tensor, found) = problem(&path, "gguf").expect("five axes");
    assert_eq!((&*tensor, found), ("x", TensorProblem::Axes { most: 4, found: 5 }));
}

/// A list may stand for an object where serde reads it; such a folder would seem to be empty.
#[test]
fn an_index_is_an_object() {
    let folder = folder("hostile-index");
    for index in [r#"[{"a":"x.safetensors"}]"#, "[{}]", r#"[{"weight_map":"x.safetensors"}]"#] {
        fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
        let error = Checkpoint::open(&folder).expect_err("a list");
        assert!(matches!(error, CheckpointError::Json { what: "index", .. }), "{error}");
        let says = "expected an object with the field `weight_map`";
        assert!(error.to_string().contains(says), "{index}: {error}");
    }
}

#[test]
fn an_index_that_names_a_tensor_twice_is_an_error_that_names_it() {
    let folder = folder("hostile-index-twice");
    raw_file(&folder.join("a.safetensors"), &[], &[("x", Dtype::U8, vec![1], vec![0])]);
    let index = r#"{"weight_map":{"x":"gone.safetensors","x":"a.safetensors"}}"#;
    fs::write(folder.join("model.safetensors.index.json"), index).expect("written");
    let error = Checkpoint::open(&folder).expect_err("twice").to_string();
    assert!(error.contains("index.json: index: tensor `x` is there twice"), "{error}");
}

#[test]
fn errors_about_files_that_are_not_whole_say_what_to_do() {
    let folder = folder("hostile-cut");
    let path = folder.join("model.safetensors");
    raw_file(&path, &[], &[("x", Dtype::U8, vec![64], vec![0; 64])]);
    let whole = fs::read(&path).expect("a file");
    for (bytes, says) in [
        (&whole[..whole.len() - 7], "; the file is cut off: download it again"),
        (&whole[..20], "; download or make the file again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "; run `git lfs pull` in its folder"),
    ] {
        fs::write(&path, bytes).expect("written");
        let error = Checkpoint::open(&path).expect_err("not whole").to_string();
        assert!(error.ends_with(says), "{error}");
    }
    fs::write(&path, &whole).expect("written");
    for (name, text, says) in [
        ("config.json", "{", "; correct the file or download it again"),
        (
            "model.safetensors.index.json",
            r#"{"weight_map":{"x":"gone.safetensors"}}"#,
            "; the file is missing: download it",
        ),
    ] {
        fs::write(folder.join(name), text).expect("written");
        let error = Checkpoint::open(&folder).expect_err("not whole").to_string();
        assert!(error.contains(&folder.display().to_string()) && error.ends_with(says), "{error}");
        fs::remove_file(folder.join(name)).expect("removed");
    }
}

#[test]
fn a_number_in_f64_beyond_f32_is_not_called_infinite() {
    let path = folder("hostile-f64").join("x.safetensors");
    let values = |number: f64| {
        raw_file(&path, &[], &[("x", Dtype::F64, vec![1], number.to_le_bytes().to_vec())]);
        let checkpoint = Checkpoint::open(&path).expect("a file");
        let weights = checkpoint.weights().expect("weights");
        let read = Reader::new(checkpoint.container()).values(&weights[0]);
        match weights[0].values() {
            Ok((_, values)) => assert_eq!(values, read.expect("the same")),
            Err(error) => assert_eq!(error.to_string(), read.expect_err("the same").to_string()),
        }
        weights[0].values().map(|(_, values)| values[0])
    };
    let error = values(-1e300).expect_err("beyond f32").to_string();
    assert!(error.contains("tensor `x`: the value -1e300 is beyond the range of F32"), "{error}");
    assert_eq!(values(f64::INFINITY).expect("infinite in the file"), f32::INFINITY);
    assert_eq!(values(1e30).expect("in range"), 1e30);
}

#[test]
fn texts_that_are_too_long_are_refused_unread() {
    let folder = folder("hostile-long");
    raw_file(&folder.join("model.safetensors"), &[], &[("x", Dtype::U8, vec![1], vec![0])]);
    for (name, most, said) in [
        ("config.json", 16_000_000, "16,000,000"),
        ("hf_quant_config.json", 16_000_000, "16,000,000"),
        ("model.safetensors.index.json", 100_000_000, "100,000,000"),
    ] {
        let path = folder.join(name);
        fs::File::create(&path).and_then(|file| file.set_len(most + 1)).expect("a file");
        let (result, bytes) = peak(|| Checkpoint::open(&folder).map(|_| ()));
        let error = result.expect_err("too long");
        let is_told = matches!(error, CheckpointError::Header { found, .. } if found == most + 1);
        assert!(is_told, "{error}");
        let says = format!("{name}: header: expected a text of at most {said} bytes");
        assert!(error.to_string().contains(&says), "{error}");
        assert!(bytes < 1 << 20, "{bytes} bytes for {name}");
        fs::remove_file(&path).expect("removed");
    }
    Checkpoint::open(&folder).expect("a tensor");
}

/// The most bytes of memory for a byte of a config: an array of one item has room for four.
#[test]
fn a_config_takes_at_most_150_bytes_for_a_byte() {
    let folder = folder("hostile-values");
    raw_file(&folder.join("model.safetensors"), &[], &[("x", Dtype::U8, vec![1], vec![0])]);
    let nested = "[".repeat(100) + &"]".repeat(100) + ",";
    for (item, count) in [("0,", 1_000_000), (&*nested, 10_000), ("{\"\":0},", 300_000)] {
        let text = format!("[{}0]", item.repeat(count));
        fs::write(folder.join("config.json"), &text).expect("written");
        let (result, bytes) = peak(|| Checkpoint::open(&folder).map(|_| ()));
        result.expect("a config");
        assert!(bytes <= 150 * text.len() + (16 << 20), "{bytes} bytes for {}", text.len());
    }
}

/// `serde_json` stops at 128 levels, before the stack of a thread ends.
#[test]
fn a_config_that_is_nested_deeply_is_an_error() {
    let folder = folder("hostile-deep");
    raw_file(&folder.join("model.safetensors"), &[], &[("x", Dtype::U8, vec![1], vec![0])]);
    for (depth, refused) in [(100, false), (200, true), (1_000_000, true)] {
        for [begin, end] in [["[", "]"], ["{\"a\":", "}"]] {
            let text = format!("{}0{}", begin.repeat(depth), end.repeat(depth));
            fs::write(folder.join("config.json"), text).expect("written");
            match Checkpoint::open(&folder) {
                Ok(_) => assert!(!refused, "{depth} levels of {begin}"),
                Err(error) => {
                    assert!(refused, "{depth} levels of {begin}: {error}");
                    let is_json = matches!(error, CheckpointError::Json { what: "config", .. });
                    assert!(is_json && error.to_string().contains("recursion limit"), "{error}");
                }
            }
        }
    }
}

#[test]
fn the_last_of_two_fields_of_one_name_wins_in_the_place_of_the_first() {
    let folder = folder("hostile-fields");
    raw_file(&folder.join("model.safetensors"), &[], &[("x", Dtype::U8, vec![1], vec![0])]);
    let text = r#"{"a": 1, "b": {"c": 2, "c": 3}, "a": {"d": 4}}"#;
    fs::write(folder.join("config.json"), text).expect("written");
    let checkpoint = Checkpoint::open(&folder).expect("a tensor");
    let config = checkpoint.container().config().expect("a config");
    assert_eq!(config.to_string(), r#"{"a":{"d":4},"b":{"c":3}}"#);
}

/// A config may be any value: its quantization is then written into an object.
#[test]
fn a_config_that_is_no_object_is_replaced_where_a_field_is_added() {
    let folder = folder("hostile-replaced");
    for (at, config) in [json!([1]), json!(null), json!("text"), json!({"text_config": [1]})]
        .into_iter()
        .enumerate()
    {
        let mut source = model(Fp4Format::NvFp4, [0.25, 0.25], None);
        source.config = Some(config);
        source.quantization.quant_config = Some(json!([1]));
        source.quantization.dialect = "modelopt";
        for dialect in ["miles", "compressed-tensors", "gpt-oss", "mlx"] {
            let path = folder.join(format!("{dialect}-{at}"));
            let options = WriteOptions { inexact: true, ..WriteOptions::default() };
            match source.write(&path, dialect, &options) {
                Ok(_) => drop(Checkpoint::open_as(&path, dialect).expect("a checkpoint")),
                Err(error) => assert!(matches!(error, CheckpointError::CannotHold { .. })),
            }
        }
    }
}

#[test]
fn texts_do_not_take_many_times_their_length() {
    let folder = folder("hostile-texts");
    let (result, bytes) = peak(|| Pattern::parse("re:a{999}{999}", Syntax::Regex).matcher());
    assert!(matches!(result, Err(PolicyError::Pattern { .. })));
    assert!(bytes < 8 << 20, "{bytes} bytes for an expression");

    let zeros = format!("[{}0]", "0,".repeat(5_000_000));
    let path = folder.join("x.safetensors");
    let header = format!(r#"{{"x":{{"dtype":"U8","shape":{zeros},"data_offsets":[0,0]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    fs::write(&path, &file).expect("written");
    let (result, bytes) = peak(|| Checkpoint::open(&path).map(|_| ()));
    let error = result.expect_err("too many axes").to_string();
    assert!(error.contains("tensor `x`") && error.contains("at most 64 axes"), "{error}");
    assert!(bytes < file.len() + (1 << 20), "{bytes} bytes for a shape");
}
