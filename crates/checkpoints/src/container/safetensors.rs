//! safetensors: 8 bytes of header length, a JSON header, the tensors without holes; and the index
//! that names the shard of every tensor.
//!
//! The format: <https://github.com/huggingface/safetensors#format>. The index:
//! `model.safetensors.index.json` of huggingface_hub (`serialization/_base.py`).

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::json;

use super::entry::{Entries, Entry, by_data};
use super::file::{HEADER, Mapped, read_text};
use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};

/// The name of the index of a folder.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The name of the only file of a folder.
pub(crate) const SINGLE: &str = "model.safetensors";

/// The field of a header that is no tensor.
const METADATA: &str = "__metadata__";
/// The field of an index that names the shards.
const WEIGHT_MAP: &str = "weight_map";

/// Most axes of a tensor; torch has no more.
const MAX_AXES: usize = 64;

/// `__metadata__` of a file: texts by their keys, in its order.
///
/// ```
/// use burn_fp4_checkpoints::{Container, Metadata};
///
/// # let path = format!("burn-fp4-metadata-{}.safetensors", std::process::id());
/// # let path = std::env::temp_dir().join(path);
/// let header = br#"{"__metadata__":{"format":"pt","step":"7"}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], &header[..]].concat();
/// std::fs::write(&path, file)?;
/// let container = Container::open(&path)?;
/// let Some(Metadata::Safetensors(metadata)) = container.metadata() else { panic!() };
/// assert_eq!(metadata.get("format"), Some("pt"));
/// assert_eq!(metadata.iter().last(), Some(("step", "7")));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(transparent)]
pub struct Metadata {
    texts: IndexMap<String, String>,
}

impl Metadata {
    /// Returns the keys, each with its text.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts.iter().map(|(key, text)| (key.as_str(), text.as_str()))
    }

    /// Returns the text of a key. If the file has the key twice, the last text wins.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.texts.get(key).map(String::as_str)
    }
}

/// Reads the header of the file with a number in the container, and checks every offset.
pub(super) fn read(
    path: &Path,
    map: &Mapped,
    number: usize,
) -> Result<(Entries, Metadata), CheckpointError> {
    let (header, data) = split(path, map.bytes())?;
    let json = |source| CheckpointError::Json { path: path.to_owned(), what: "header", source };
    let start = map.bytes().len() - data.len();
    let mut deserializer = serde_json::Deserializer::from_slice(header);
    let header = deserializer.deserialize_map(HeaderVisitor).map_err(json)?;
    deserializer.end().map_err(json)?;
    let limit = data.len() as u64;
    let mut entries = Entries::with_capacity(header.tensors.len());
    for (name, raw) in header.tensors {
        let checked = raw.check(limit);
        let (dtype, shape) =
            checked.map_err(|problem| CheckpointError::tensor(path, &name, problem))?;
        let [begin, end] = raw.data_offsets.map(|offset| start + offset as usize);
        entries.push((name, Entry { dtype, shape, file: number, data: begin..end }));
    }
    check_cover(path, &entries, start, limit)?;
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
    if length > HEADER.0 {
        return Err(wrong("a header of at most 100,000,000 bytes", length));
    }
    if length > rest.len() as u64 {
        return Err(wrong("a header that ends within the file", length));
    }
    Ok(rest.split_at(length as usize))
}

/// Checks that the tensors cover the data, without holes and overlaps. The data begin at `start`
/// and have `limit` bytes.
fn check_cover(
    path: &Path,
    entries: &Entries,
    start: usize,
    limit: u64,
) -> Result<(), CheckpointError> {
    let mut covered = start;
    for (name, Entry { data, .. }) in by_data(entries) {
        if data.start != covered {
            let [begin, end] = [data.start, data.end].map(|at| (at - start) as u64);
            let expected = "the byte after the tensor before";
            let problem = TensorProblem::Offsets { begin, end, expected, limit };
            return Err(CheckpointError::tensor(path, name, problem));
        }
        covered = data.end;
    }
    let found = (covered - start) as u64;
    if found != limit {
        let expected = "tensors that cover the data; it has more bytes than these";
        return Err(CheckpointError::Header { path: path.to_owned(), expected, found });
    }
    Ok(())
}

/// A header before it is checked.
struct Header<'a> {
    tensors: Vec<(String, RawEntry<'a>)>,
    metadata: Metadata,
}

#[derive(Deserialize)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
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

impl RawEntry<'_> {
    fn check(&self, limit: u64) -> Result<(DataType, Vec<usize>), TensorProblem> {
        let Some(dtype) = DataType::named(&self.dtype) else {
            return Err(TensorProblem::UnknownDtype { found: self.dtype.to_string() });
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

/// Reads a header in its order. A map would lose a tensor whose name stands there twice.
struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut header = Header { tensors: Vec::new(), metadata: Metadata::default() };
        while let Some(name) = access.next_key::<String>()? {
            if name == METADATA {
                let named = |e| A::Error::custom(format_args!("`{METADATA}`: {e}"));
                header.metadata = access.next_value().map_err(named)?;
            } else {
                let named = |e| A::Error::custom(format_args!("tensor `{name}`: {e}"));
                let raw = access.next_value().map_err(named)?;
                header.tensors.push((name, raw));
            }
        }
        Ok(header)
    }
}

/// The tensors of an index with their shards, in its order.
struct WeightMap(IndexMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor;

        impl<'de> Visitor<'de> for MapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors with their files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<WeightMap, A::Error> {
                let mut map = IndexMap::new();
                while let Some((name, shard)) = access.next_entry::<String, String>()? {
                    if map.contains_key(&name) {
                        return Err(A::Error::custom(format_args!(
                            "tensor `{name}` is there twice"
                        )));
                    }
                    map.insert(name, shard);
                }
                Ok(WeightMap(map))
            }
        }

        deserializer.deserialize_map(MapVisitor)
    }
}

/// Reads an index: tensors with their shards, in its order.
pub(super) fn read_index(path: &Path) -> Result<IndexMap<String, String>, CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }

    let text = read_text(path, &HEADER)?;
    let wrong = |source| CheckpointError::Json { path: path.to_owned(), what: "index", source };
    // serde takes a list for an object of these fields too.
    if !text.trim_ascii_start().starts_with(b"{") {
        let what = format!("expected an object with the field `{WEIGHT_MAP}`");
        return Err(wrong(serde_json::Error::custom(what)));
    }
    let Index { weight_map: WeightMap(weight_map) } =
        serde_json::from_slice(&text).map_err(wrong)?;
    // A name, not a path: an index must not lead out of its folder.
    let plain = |shard: &str| !shard.contains(['/', '\\', '\0']) && shard.ends_with(".safetensors");
    match weight_map.values().find(|shard| !plain(shard)) {
        None => Ok(weight_map),
        Some(shard) => Err(CheckpointError::Field {
            path: path.to_owned(),
            field: WEIGHT_MAP.to_owned(),
            expected: "names of safetensors files in the same folder",
            found: shard.clone(),
            remedy: "correct it, or download the model again",
        }),
    }
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
    let mut fields = serde_json::Map::with_capacity(tensors.len() + 1);
    if !metadata.is_empty() {
        fields.insert(METADATA.to_owned(), metadata.iter().cloned().collect());
    }
    let mut offsets = vec![0; tensors.len()];
    let mut end = 0;
    for at in order {
        let (name, dtype, shape, bytes) = tensors[at];
        offsets[at] = end;
        let begin = end;
        end += bytes;
        let dtype = dtype.to_string();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
        fields.insert(name.to_owned(), entry);
    }
    let mut text = serde_json::to_vec(&fields).expect("every JSON value can be written");
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    let start = header.len() as u64;
    offsets.iter_mut().for_each(|offset| *offset += start);
    (header, offsets, start + end)
}
