//! A small model in the files of Hugging Face, and the command that is tested.

// Each test is a program of its own, and none of them needs all of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use burn_fp4_checkpoints::{Checkpoint, Value, Weight};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

/// The program, as if it is not on a terminal.
pub(crate) fn fp4() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fp4"));
    command.env_remove("COLUMNS");
    command
}

/// Runs the program in a folder; its exit code, and what it says on stdout and on stderr.
pub(crate) fn run(folder: &Path, arguments: &str) -> (i32, String, String) {
    let output = fp4().current_dir(folder).args(arguments.split_whitespace()).output();
    let output = output.expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("an exit code");
    (code, text(&output.stdout), text(&output.stderr))
}

/// Runs it, and expects exit code 0; what it prints.
pub(crate) fn succeeds(folder: &Path, arguments: &str) -> String {
    let (code, out, error) = run(folder, arguments);
    assert_eq!(code, 0, "fp4 {arguments}: {error}");
    out
}

/// Runs it, and expects an exit code and a single line on stderr that says all of this.
pub(crate) fn fails(folder: &Path, arguments: &str, expected: i32, says: &[&str]) {
    let (code, _, error) = run(folder, arguments);
    assert_eq!(code, expected, "fp4 {arguments}: {error}");
    for word in says {
        assert!(error.contains(word), "fp4 {arguments}: {error} does not say {word}");
    }
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
}

/// Numbers between -0.5 and 0.5, the same for the same seed.
pub(crate) fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    }
}

/// Numbers like a trained layer's, the same for the same seed.
pub(crate) fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut uniform = random(seed);
    // Nearly normal, with a deviation of 0.03.
    (0..count).map(|_| 0.03 * (0..4).map(|_| uniform()).sum::<f32>() * 1.73).collect()
}

/// A tensor to write.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A tensor of bf16.
pub(crate) fn tensor(name: &str, shape: &[usize], seed: u64) -> Tensor {
    let values = values(shape.iter().product(), seed);
    let bytes = values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
    Tensor { name: name.to_owned(), dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
}

/// Writes a safetensors file.
pub(crate) fn write(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes);
        (tensor.name.as_str(), view.expect("a tensor"))
    });
    serialize_to_file(views, None, path).expect("a file");
}

/// The sizes of a model: layers, channels, inner channels.
#[derive(Clone, Copy)]
pub(crate) struct Sizes(pub(crate) usize, pub(crate) usize, pub(crate) usize);

/// A model of two decoder layers of 128 channels.
pub(crate) const SMALL: Sizes = Sizes(2, 128, 192);

/// The tensors of a model.
pub(crate) fn tensors(Sizes(layers, hidden, inner): Sizes) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[usize]| {
        let seed = tensors.len() as u64 + 1;
        tensors.push(tensor(&name, shape, seed));
    };
    add("model.embed_tokens.weight".into(), &[64, hidden]);
    for layer in 0..layers {
        let mut layer = |name: &str, shape: &[usize]| {
            add(format!("model.layers.{layer}.{name}.weight"), shape);
        };
        layer("input_layernorm", &[hidden]);
        layer("mlp.down_proj", &[hidden, inner]);
        layer("mlp.gate_proj", &[inner, hidden]);
        layer("mlp.up_proj", &[inner, hidden]);
        layer("self_attn.k_proj", &[hidden / 2, hidden]);
        layer("self_attn.o_proj", &[hidden, hidden]);
        layer("self_attn.q_proj", &[hidden, hidden]);
        layer("self_attn.v_proj", &[hidden / 2, hidden]);
    }
    add("model.norm.weight".into(), &[hidden]);
    add("lm_head.weight".into(), &[64, hidden]);
    tensors
}

/// Makes the folder of a model with two shards, which neighbours are spread over.
pub(crate) fn model(parent: &Path, name: &str, sizes: Sizes) -> PathBuf {
    let folder = parent.join(name);
    fs::create_dir_all(&folder).expect("a folder");
    let (mut shards, mut map) = ([Vec::new(), Vec::new()], BTreeMap::new());
    for (at, tensor) in tensors(sizes).into_iter().enumerate() {
        map.insert(tensor.name.clone(), format!("model-{:05}-of-00002.safetensors", at % 2 + 1));
        shards[at % 2].push(tensor);
    }
    for (at, shard) in shards.iter().enumerate() {
        write(&folder.join(format!("model-{:05}-of-00002.safetensors", at + 1)), shard);
    }
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
    let config = serde_json::json!({"model_type": "llama", "num_hidden_layers": sizes.0});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("an index");
    fs::write(folder.join("config.json"), config.to_string()).expect("a config");
    fs::write(folder.join("tokenizer.json"), "{}").expect("a tokenizer");
    folder
}

/// Makes the folder of a model with a shard for each of so many layers.
pub(crate) fn sharded(parent: &Path, name: &str, shards: usize, shape: [usize; 2]) -> PathBuf {
    let folder = parent.join(name);
    fs::create_dir_all(&folder).expect("a folder");
    let mut map = BTreeMap::new();
    for at in 0..shards {
        let tensor =
            tensor(&format!("model.layers.{at:02}.mlp.down_proj.weight"), &shape, at as u64 + 1);
        let shard = format!("model-{:05}-of-{shards:05}.safetensors", at + 1);
        map.insert(tensor.name.clone(), shard.clone());
        write(&folder.join(shard), &[tensor]);
    }
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("an index");
    fs::write(folder.join("config.json"), r#"{"model_type": "llama"}"#).expect("a config");
    folder
}

/// Makes a file whose tensors, of 128 GiB each, are holes.
pub(crate) fn holes(path: &Path, names: &[&str]) {
    let side = 1_u64 << 18;
    let mut header = serde_json::Map::new();
    for (at, name) in names.iter().enumerate() {
        let bytes = 2 * side * side;
        let offsets = [at as u64 * bytes, (at as u64 + 1) * bytes];
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": [side, side], "data_offsets": offsets});
        header.insert((*name).to_owned(), entry);
    }
    let mut text = serde_json::Value::Object(header).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend(text.as_bytes());
    fs::write(path, &file).expect("a header");
    let length = file.len() as u64 + names.len() as u64 * 2 * side * side;
    let file = fs::OpenOptions::new().write(true).open(path).expect("the file");
    file.set_len(length).expect("holes");
}

/// Writes a GGUF file of f16 tensors, with the names of llama.cpp.
pub(crate) fn gguf(path: &Path) {
    let shapes: [(&str, &[usize]); 5] = [
        ("token_embd.weight", &[64, 128]),
        ("blk.0.attn_norm.weight", &[128]),
        ("blk.0.attn_q.weight", &[128, 128]),
        ("blk.0.ffn_down.weight", &[128, 192]),
        ("blk.0.ffn_up.weight", &[192, 96]),
    ];
    let mut data: Vec<GgufTensor> = Vec::new();
    for (at, (name, shape)) in shapes.iter().enumerate() {
        let values = values(shape.iter().product(), at as u64 + 70);
        let (kind, bytes) = match shape.len() {
            1 => (0, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            _ => (1, values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()),
        };
        data.push(((*name).to_owned(), shape.to_vec(), kind, bytes));
    }
    write_gguf(path, &data);
}

/// A tensor of a GGUF file: name, shape, number of the type, bytes.
pub(crate) type GgufTensor = (String, Vec<usize>, u32, Vec<u8>);

/// Records of a quantized type whose f16 scales are finite, of a matrix with 256 columns.
pub(crate) fn records(name: &str, kind: u32, rows: usize, bytes: usize) -> GgufTensor {
    let mut random = random(u64::from(kind) + 50);
    let byte = |_| ((random() + 0.5) * 64.0) as u8;
    (name.to_owned(), vec![rows, 256], kind, (0..rows * bytes).map(byte).collect())
}

/// Writes a GGUF file of tensors.
pub(crate) fn write_gguf(path: &Path, tensors: &[GgufTensor]) {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((tensors.len() as u64).to_le_bytes());
    file.extend(2_u64.to_le_bytes());
    for (key, value) in [("general.architecture", "llama"), ("general.name", "small")] {
        file.extend(text(key));
        file.extend(8_u32.to_le_bytes());
        file.extend(text(value));
    }
    let mut offset = 0_u64;
    for (name, shape, kind, bytes) in tensors {
        file.extend(text(name));
        file.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&axis| file.extend((axis as u64).to_le_bytes()));
        file.extend(kind.to_le_bytes());
        file.extend(offset.to_le_bytes());
        offset = (offset + bytes.len() as u64).next_multiple_of(32);
    }
    file.resize(file.len().next_multiple_of(32), 0);
    for (_, _, _, bytes) in tensors {
        file.extend(bytes);
        file.resize(file.len().next_multiple_of(32), 0);
    }
    fs::write(path, file).expect("a file");
}

/// Names and bytes of the files of a folder, or of a file.
pub(crate) fn bytes(path: &Path) -> BTreeMap<String, Vec<u8>> {
    if path.is_file() {
        return [(String::new(), fs::read(path).expect("a file"))].into();
    }
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read(path).expect("a file"))
    };
    fs::read_dir(path).expect("a folder").map(entry).collect()
}

/// Two folders or files have the same bytes.
pub(crate) fn assert_same(left: &Path, right: &Path) {
    let (left, right) = (bytes(left), bytes(right));
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>());
    for (name, bytes) in &left {
        assert!(*bytes == right[name], "{name} differs");
    }
}

/// The names in a folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("an entry").file_name().to_string_lossy().into_owned()
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

/// Format, codes and block scales of what is quantized, by its name in files.
pub(crate) type Packed = BTreeMap<String, (String, Vec<u8>, Vec<u8>)>;

/// The quantized ones of these weights.
pub(crate) fn packed(weights: &[Weight<'_>]) -> Packed {
    let one = |weight: &Weight<'_>| match &weight.value {
        Value::Fp4(fp4) => {
            let (codes, scales) = (fp4.plain_codes().into_owned(), fp4.plain_scales().into_owned());
            Some((weight.name.clone(), (weight.kind(), codes, scales)))
        }
        Value::Plain(_) | Value::Fp8(_) => None,
    };
    weights.iter().filter_map(one).collect()
}

/// The quantized weights of a folder or file.
pub(crate) fn packed_in(path: &Path) -> Packed {
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    packed(&checkpoint.weights().expect("weights"))
}
