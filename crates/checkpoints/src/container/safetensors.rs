//! safetensors: 8 bytes of header length, a JSON header, the tensors without holes; and the index
//! that names the shard of every tensor.
//!
//! The format: <https://github.com/huggingface/safetensors#format>. The index:
//! `model.safetensors.index.json` of huggingface_hub (`serialization/_base.py`).

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::entry::Entry;
use super::file::{MAX_TEXT, Mapped, read_text};
use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};
use crate::json::Json;

/// The name of the index of a folder.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The name of the only file of a folder.
pub(crate) const SINGLE: &str = "model.safetensors";

/// Most axes of a tensor; torch has no more.
const MAX_AXES: usize = 64;

/// `__metadata__`.
type Texts = Vec<(String, String)>;

/// Reads the header; checks every offset.
pub(super) fn read(path: &Path, map: &Mapped) -> Result<(Vec<Entry>, Texts), CheckpointError> {
    let (header, data) = split(path, map.bytes())?;
    let json = |source| CheckpointError::Json { path: path.to_owned(), what: "header", source };
    let header: Header = serde_json::from_slice(header).map_err(json)?;
    let start = (map.bytes().len() - data.len()) as u64;
    let mut entries = Vec::with_capacity(header.tensors.len());
    for (name, raw) in header.tensors {
        let entry = raw
            .check(data.len() as u64)
            .map_err(|problem| CheckpointError::tensor(path, &name, problem));
        let (dtype, shape) = entry?;
        // Within the data, so within an address space.
        let [begin, end] = raw.data_offsets.map(|offset| (start + offset) as usize);
        let (name, shape) = (name.into(), shape.into());
        entries.push(Entry { name, dtype, shape, file: 0, begin, end });
    }
    check_cover(path, &entries, start, data.len() as u64)?;
    Ok((entries, header.metadata))
}

/// The JSON text and the data behind it.
fn split<'a>(path: &Path, bytes: &'a [u8]) -> Result<(&'a [u8], &'a [u8]), CheckpointError> {
    let wrong =
        |expected, found| CheckpointError::Header { path: path.to_owned(), expected, found };
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(wrong("8 bytes of header length", bytes.len() as u64));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_TEXT {
        return Err(wrong("a header of at most 100,000,000 bytes", length));
    }
    if length > rest.len() as u64 {
        return Err(wrong("a header that ends within the file", length));
    }
    Ok(rest.split_at(length as usize))
}

/// The tensors must cover the data, without holes and overlaps.
fn check_cover(
    path: &Path,
    entries: &[Entry],
    start: u64,
    limit: u64,
) -> Result<(), CheckpointError> {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_by_key(|entry| (entry.begin, entry.end));
    let mut covered = start;
    for entry in &order {
        if entry.begin as u64 != covered {
            let (begin, end) = (entry.begin as u64 - start, entry.end as u64 - start);
            let expected = "the byte after the tensor before";
            let problem = TensorProblem::Offsets { begin, end, expected, limit };
            return Err(CheckpointError::tensor(path, &entry.name, problem));
        }
        covered = entry.end as u64;
    }
    if covered != start + limit {
        let expected = "tensors that cover the data; it has more bytes than these";
        let found = covered - start;
        return Err(CheckpointError::Header { path: path.to_owned(), expected, found });
    }
    Ok(())
}

struct Header {
    metadata: Texts,
    tensors: Vec<(String, RawEntry)>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Axes,
    data_offsets: [u64; 2],
}

/// A shape. A list without an end would take more memory than its text.
struct Axes(Vec<u64>);

impl<'de> Deserialize<'de> for Axes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AxesVisitor;

        impl<'de> Visitor<'de> for AxesVisitor {
            type Value = Axes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_AXES} axes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Axes, A::Error> {
                let mut axes = Vec::new();
                while let Some(axis) = access.next_element()? {
                    if axes.len() == MAX_AXES {
                        return Err(A::Error::invalid_length(MAX_AXES + 1, &self));
                    }
                    axes.push(axis);
                }
                Ok(Axes(axes))
            }
        }

        deserializer.deserialize_seq(AxesVisitor)
    }
}

impl RawEntry {
    fn check(&self, limit: u64) -> Result<(DataType, Vec<usize>), TensorProblem> {
        let Some(dtype) = DataType::named(&self.dtype) else {
            return Err(TensorProblem::UnknownDtype { found: self.dtype.clone() });
        };
        let shape: Option<Vec<usize>> =
            self.shape.0.iter().map(|&axis| usize::try_from(axis).ok()).collect();
        let sized = shape.and_then(|shape| Some((dtype.bytes(&shape)?, shape)));
        let Some((bytes, shape)) = sized else {
            return Err(TensorProblem::Size { found: self.shape.0.clone() });
        };
        let [begin, end] = self.data_offsets;
        if begin > end || end > limit {
            let expected = "a range";
            return Err(TensorProblem::Offsets { begin, end, expected, limit });
        }
        if end - begin != bytes as u64 {
            return Err(TensorProblem::Bytes { expected: bytes as u64, found: end - begin });
        }
        Ok((dtype, shape))
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;

        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Header, A::Error> {
                let mut header = Header { metadata: Vec::new(), tensors: Vec::new() };
                while let Some(name) = access.next_key::<String>()? {
                    let named = |e| A::Error::custom(format_args!("tensor `{name}`: {e}"));
                    if name == "__metadata__" {
                        let Fields(texts) = access
                            .next_value()
                            .map_err(|e| A::Error::custom(format_args!("`__metadata__`: {e}")))?;
                        header.metadata = texts;
                    } else {
                        let raw = access.next_value().map_err(named)?;
                        header.tensors.push((name, raw));
                    }
                }
                Ok(header)
            }
        }

        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// The fields of an object whose values are texts.
struct Fields(Texts);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Vec::new();
        deserializer.deserialize_map(EachText(|key, text| fields.push((key, text))))?;
        Ok(Self(fields))
    }
}

/// Does something with every field of an object whose values are texts.
struct EachText<F>(F);

impl<'de, F: FnMut(String, String)> Visitor<'de> for EachText<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut access: A) -> Result<(), A::Error> {
        while let Some(key) = access.next_key::<String>()? {
            let named = |e| A::Error::custom(format_args!("`{key}`: {e}"));
            let text = access.next_value::<String>().map_err(named)?;
            (self.0)(key, text);
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// The shards of an index, and the shard of every tensor, in its order.
#[derive(Default)]
pub(super) struct WeightMap {
    pub(super) shards: Vec<String>,
    pub(super) tensors: Vec<(Box<str>, usize)>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut map = Self::default();
        // The name of a shard is there once, however many tensors it has.
        let mut places: HashMap<String, usize> = HashMap::new();
        deserializer.deserialize_map(EachText(|tensor: String, shard: String| {
            let next = places.len();
            let place = *places.entry(shard).or_insert_with_key(|shard| {
                map.shards.push(shard.clone());
                next
            });
            map.tensors.push((tensor.into(), place));
        }))?;
        Ok(map)
    }
}

impl WeightMap {
    /// An error of the file system about a shard, of the first tensor that the shard should have.
    pub(super) fn blame(&self, error: CheckpointError, shard: usize) -> CheckpointError {
        let first = self.tensors.iter().find(|(_, of)| *of == shard);
        match (error, first) {
            (CheckpointError::Io { path: file, source }, Some((name, _))) => {
                CheckpointError::TensorIo { file, tensor: name.to_string(), source }
            }
            (error, _) => error,
        }
    }
}

/// Reads an index.
pub(super) fn read_index(path: &Path) -> Result<WeightMap, CheckpointError> {
    let text = read_text(path)?;
    let json = |source| CheckpointError::Json { path: path.to_owned(), what: "index", source };
    let Index { weight_map } = serde_json::from_slice(&text).map_err(json)?;
    for shard in &weight_map.shards {
        // A name, not a path: an index must not lead out of its folder.
        let plain = !shard.contains(['/', '\\', '\0']) && shard.ends_with(".safetensors");
        if !plain {
            return Err(CheckpointError::Field {
                path: path.to_owned(),
                field: "weight_map".to_owned(),
                expected: "names of safetensors files in the same folder",
                found: shard.clone(),
            });
        }
    }
    Ok(weight_map)
}

/// The header of a file of these tensors, and the offset of each in the file.
///
/// Larger dtypes come first, then the names, as the `safetensors` library orders them, so that
/// equal tensors make equal files.
pub(crate) fn layout(
    tensors: &[(&str, Dtype, &[usize], u64)],
    metadata: &[(String, String)],
) -> (Vec<u8>, Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&tensors[a], &tensors[b]);
        b.1.cmp(&a.1).then(a.0.cmp(b.0))
    });
    let mut fields = Vec::with_capacity(tensors.len() + 1);
    if !metadata.is_empty() {
        let texts = metadata.iter().map(|(key, text)| (key.clone(), text.as_str().into()));
        fields.push(("__metadata__".to_owned(), Json::Object(texts.collect())));
    }
    let mut offsets = vec![0; tensors.len()];
    let mut end = 0;
    for at in order {
        let (name, dtype, shape, bytes) = tensors[at];
        offsets[at] = end;
        let begin = end;
        end += bytes;
        let entry = Json::object([
            ("dtype", dtype.to_string().as_str().into()),
            ("shape", Json::Array(shape.iter().map(|&axis| (axis as u64).into()).collect())),
            ("data_offsets", Json::Array(vec![begin.into(), end.into()])),
        ]);
        fields.push((name.to_owned(), entry));
    }
    let mut text = Json::Object(fields).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    let start = header.len() as u64;
    offsets.iter_mut().for_each(|offset| *offset += start);
    (header, offsets, start + end)
}
