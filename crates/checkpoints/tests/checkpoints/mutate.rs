//! Mutations of files: of their bytes, of their configs, and of their tensors with a header that
//! fits what was changed, so that the mutation reaches the dialect.

use burn_fp4_checkpoints::{Container, DataType, Metadata};
use serde_json::Value;

use super::random::Random;

/// Flips, copies, cuts and overwrites bytes, more often near the front, where headers are.
pub(crate) fn bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let reach = [16, 64, 512, 4096, bytes.len()][random.below(5)].min(bytes.len());
        let at = random.below(reach);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.remove(at)),
            4 => bytes.insert(at, random.next() as u8),
            5 => {
                let digit = bytes[at..].iter().position(u8::is_ascii_digit);
                if let Some(digit) = digit {
                    bytes[at + digit] = b'0' + random.below(10) as u8;
                }
            }
            6 => {
                let end = (at + 8).min(bytes.len());
                let number = [u64::MAX, 1 << 63, 1 << 32, 0, random.next()][random.below(5)];
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            _ => {
                let from = random.below(bytes.len());
                let length = random.below(40).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + length, at);
            }
        }
    }
}

/// What configs say, in the words of one dialect or the other.
const WORDS: [&str; 28] = [
    "modelopt",
    "compressed-tensors",
    "mxfp4",
    "nvfp4",
    "mxfp8",
    "affine",
    "fp8",
    "fp4",
    "quark",
    "torchao",
    "fp_quant",
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_SVD",
    "FP8_PB_WO",
    "MIXED_PRECISION",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "float-quantized",
    "dense",
    "NVFP4Tensor",
    "MXTensor",
    "float8_e4m3fn",
    "re:.*(",
    "re:a{9999}{9999}",
    "*",
    "[",
    "",
];

/// Changes some values and fields of a JSON text.
pub(crate) fn json(text: &[u8], random: &mut Random) -> Vec<u8> {
    let Ok(mut json) = serde_json::from_slice(text) else { return text.to_vec() };
    for _ in 0..=random.below(3) {
        let mut at = random.below(nodes(&json));
        change(&mut json, &mut at, random);
    }
    serde_json::to_vec_pretty(&json).expect("JSON")
}

fn nodes(json: &Value) -> usize {
    1 + match json {
        Value::Array(items) => items.iter().map(nodes).sum(),
        Value::Object(fields) => fields.values().map(nodes).sum::<usize>(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// Changes the node that comes `at` in order; whether it was found.
fn change(json: &mut Value, at: &mut usize, random: &mut Random) -> bool {
    if *at == 0 {
        *json = changed(json, random);
        return true;
    }
    *at -= 1;
    match json {
        Value::Array(items) => items.iter_mut().any(|item| change(item, at, random)),
        Value::Object(fields) => fields.values_mut().any(|value| change(value, at, random)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn changed(json: &Value, random: &mut Random) -> Value {
    let number = |random: &mut Random| {
        let numbers = [0, 1, 2, 16, 32, 127, 1 << 31, 1 << 32, 1 << 63, u64::MAX];
        Value::from(*random.choose(&numbers))
    };
    match (json, random.below(8)) {
        (Value::Object(fields), 0..=4) if !fields.is_empty() => {
            let mut fields: Vec<_> = fields.clone().into_iter().collect();
            let at = random.below(fields.len());
            match random.below(4) {
                0 => drop(fields.remove(at)),
                1 => fields[at].0 = (*random.choose(&WORDS)).to_owned(),
                2 => fields[at].1 = json.clone(),
                _ => {
                    let from = random.below(fields.len());
                    fields[at].1 = fields[from].1.clone();
                }
            }
            fields.into_iter().collect()
        }
        (Value::Array(items), 0..=3) if !items.is_empty() => {
            let mut items = items.clone();
            let at = random.below(items.len());
            match random.below(3) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ => items[at] = number(random),
            }
            Value::Array(items)
        }
        (Value::Number(_), 0..=4) => number(random),
        (Value::String(_), 0..=4) => Value::from(*random.choose(&WORDS)),
        (_, 5) => Value::Null,
        (_, 6) => Value::Array(vec![number(random), json.clone()]),
        (_, 7) => Value::from(random.one_in(2)),
        _ => Value::from(*random.choose(&WORDS)),
    }
}

/// A tensor that need not fit its header.
#[derive(Clone)]
struct Entry {
    name: String,
    dtype: String,
    ggml: u32,
    shape: Vec<u64>,
    bytes: Vec<u8>,
    /// Where the header says that it lies, if that is wrong.
    offsets: Option<[u64; 2]>,
}

/// The tensors of a file, to be changed and put into a file again.
#[derive(Clone)]
pub(crate) struct Sheet {
    metadata: Vec<(String, String)>,
    gguf: bool,
    tensors: Vec<Entry>,
}

const DTYPES: [&str; 20] = [
    "F32", "F16", "BF16", "F64", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL",
    "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "F3",
];
const GGML: [u32; 25] =
    [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 20, 23, 24, 26, 27, 28, 30, 39, 40, 4, 99];
/// How names end.
const ENDS: [&str; 16] = [
    ".weight",
    ".weight_scale",
    ".weight_scale_2",
    ".input_scale",
    ".weight_packed",
    ".weight_global_scale",
    ".scales",
    ".scale",
    "_blocks",
    "_scales",
    "._weight_qdata",
    "._weight_scale",
    ".weight_zero_point",
    ".pre_quant_scale",
    ".weight_scale_inv",
    "",
];

impl Sheet {
    /// The tensors of a valid file.
    pub(crate) fn of(container: &Container) -> Self {
        let tensor = |tensor: burn_fp4_checkpoints::Tensor<'_>| Entry {
            name: tensor.name.to_string(),
            dtype: tensor.dtype.to_string(),
            ggml: tensor.dtype.ggml().unwrap_or_default(),
            shape: tensor.shape.iter().map(|&axis| axis as u64).collect(),
            bytes: tensor.bytes.to_vec(),
            offsets: None,
        };
        let (metadata, gguf) = match container.metadata() {
            Some(Metadata::Safetensors(metadata)) => {
                let owned = |(key, text): (&str, &str)| (key.to_owned(), text.to_owned());
                (metadata.iter().map(owned).collect(), false)
            }
            Some(Metadata::Gguf(_)) => (Vec::new(), true),
            None => (Vec::new(), false),
        };
        Self { metadata, gguf, tensors: container.tensors().map(tensor).collect() }
    }

    /// The names of the tensors.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// Changes some tensors, or what the file says of them.
    pub(crate) fn mutate(&mut self, random: &mut Random) {
        for _ in 0..=random.below(3) {
            if self.tensors.is_empty() {
                return;
            }
            let (at, other) = (random.below(self.tensors.len()), random.below(self.tensors.len()));
            match random.below(12) {
                0 => self.dtype(at, random),
                1 => self.reshape(at, random),
                2 => self.resize(at, random),
                3 => self.rename(at, other, random),
                4 => drop(self.tensors.remove(at)),
                5 => {
                    let mut copy = self.tensors[at].clone();
                    copy.name += *random.choose(&ENDS);
                    self.tensors.push(copy);
                }
                6 => {
                    let fill = *random.choose(&[0xFF, 0x7F, 0x80, 0x00, 0x7C]);
                    self.tensors[at].bytes.fill(fill);
                }
                7 => {
                    let (name, again) = (self.tensors[at].name.clone(), &mut self.tensors[other]);
                    let name = std::mem::replace(&mut again.name, name);
                    self.tensors[at].name = name;
                }
                8 => {
                    let numbers = [0, 1, 32, 1 << 20, 1 << 63, u64::MAX, random.next()];
                    let [begin, end] = [*random.choose(&numbers), *random.choose(&numbers)];
                    self.tensors[at].offsets = Some([begin, end]);
                }
                9 if !self.metadata.is_empty() => {
                    let at = random.below(self.metadata.len());
                    let text = json(self.metadata[at].1.as_bytes(), random);
                    self.metadata[at].1 = String::from_utf8(text).expect("JSON");
                }
                _ => {
                    self.reshape(at, random);
                    self.reshape(other, random);
                }
            }
        }
    }

    fn dtype(&mut self, at: usize, random: &mut Random) {
        let tensor = &mut self.tensors[at];
        tensor.dtype = (*random.choose(&DTYPES)).to_owned();
        tensor.ggml = *random.choose(&GGML);
        if random.one_in(2) {
            // Another shape for the same bytes, so that only the dialect can object.
            let size = self.dtype_of(at).and_then(|dtype| dtype.bytes(&[64]));
            let tensor = &mut self.tensors[at];
            if let Some(size) = size {
                let count = tensor.bytes.len() / size * 64;
                let last = tensor.shape.last().copied().unwrap_or(1).max(1);
                tensor.shape = vec![count as u64 / last, last];
                self.refit(at);
            }
        } else if random.one_in(2) {
            self.refit(at);
        }
    }

    fn dtype_of(&self, at: usize) -> Option<DataType> {
        let tensor = &self.tensors[at];
        if self.gguf { DataType::of_ggml(tensor.ggml) } else { DataType::named(&tensor.dtype) }
    }

    /// Makes the bytes as many as the shape takes, if that is a small number.
    fn refit(&mut self, at: usize) {
        let shape: Vec<usize> = self.tensors[at].shape.iter().map(|&axis| axis as usize).collect();
        let bytes = self.dtype_of(at).and_then(|dtype| dtype.bytes(&shape));
        if let Some(bytes) = bytes.filter(|bytes| *bytes < 1 << 13) {
            self.tensors[at].bytes.resize(bytes, 0x38);
        }
    }

    /// As many numbers along other axes.
    fn reshape(&mut self, at: usize, random: &mut Random) {
        let shape = &mut self.tensors[at].shape;
        let count = shape.iter().fold(1_u64, |count, axis| count.wrapping_mul(*axis));
        match random.below(7) {
            0 => *shape = vec![count],
            1 => shape.insert(0, 1),
            2 => shape.push(1),
            3 => shape.reverse(),
            4 if count == 1 => shape.clear(),
            5 if count.is_multiple_of(4) => *shape = vec![2, count / 4, 2],
            _ if count.is_multiple_of(2) => *shape = vec![2, count / 2],
            _ => *shape = vec![1, count, 1],
        }
    }

    /// Other axes, with bytes that fit or not.
    fn resize(&mut self, at: usize, random: &mut Random) {
        let shape = &mut self.tensors[at].shape;
        let axis = random.below(shape.len().max(1));
        let new = [0, 1, 2, 3, 17, 64, 1 << 31, 1 << 57, u64::MAX];
        match shape.get_mut(axis) {
            Some(axis) if random.one_in(2) => *axis = axis.saturating_mul(2),
            Some(axis) => *axis = *random.choose(&new),
            None => shape.push(*random.choose(&new)),
        }
        if !random.one_in(4) {
            self.refit(at);
        }
    }

    fn rename(&mut self, at: usize, other: usize, random: &mut Random) {
        let name = &self.tensors[at].name;
        let stem = name.rsplit_once('.').map_or(name.as_str(), |(stem, _)| stem);
        let name = match random.below(4) {
            0 => self.tensors[other].name.clone(),
            1 => format!("{stem}{}", random.choose(&ENDS)),
            2 => (*random.choose(&["", ".", "\u{0}", "é\u{1F600}", "__metadata__"])).to_owned(),
            _ => format!("{name}{}", random.choose(&ENDS)),
        };
        self.tensors[at].name = name;
    }

    /// The file.
    pub(crate) fn file(&self) -> Vec<u8> {
        if self.gguf { self.gguf() } else { self.safetensors() }
    }

    fn safetensors(&self) -> Vec<u8> {
        let text = |text: &str| Value::from(text).to_string();
        let fields = self.metadata.iter().map(|(k, v)| format!("{}:{}", text(k), text(v)));
        let fields: Vec<String> = fields.collect();
        let mut header = vec![format!("\"__metadata__\":{{{}}}", fields.join(","))];
        let mut data = Vec::new();
        for tensor in &self.tensors {
            let begin = data.len() as u64;
            data.extend(&tensor.bytes);
            let [begin, end] = tensor.offsets.unwrap_or([begin, data.len() as u64]);
            let (name, dtype, shape) = (text(&tensor.name), text(&tensor.dtype), &tensor.shape);
            header.push(format!(
                "{name}:{{\"dtype\":{dtype},\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}"
            ));
        }
        let header = format!("{{{}}}", header.join(","));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    }

    fn gguf(&self) -> Vec<u8> {
        let text = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
        text(&mut bytes, "general.architecture");
        bytes.extend(8_u32.to_le_bytes());
        text(&mut bytes, "toy");
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            text(&mut bytes, &tensor.name);
            bytes.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|axis| bytes.extend(axis.to_le_bytes()));
            bytes.extend(tensor.ggml.to_le_bytes());
            let offset = tensor.offsets.map_or(data.len() as u64, |[begin, _]| begin);
            bytes.extend(offset.to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }
}
