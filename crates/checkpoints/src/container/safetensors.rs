//! safetensors: 8 bytes of header length, a JSON header, the tensors without holes; and the index
//! that names the shard of every tensor.
//!
//! The format: <https://github.com/huggingface/safetensors#format>. The index:
//! `model.safetensors.index.json` of huggingface_hub (`serialization/_base.py`).

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::entry::FileEntries;
use super::file::{MAX_TEXT, Mapped, TOO_LONG};
use super::leb128::Rest;
use super::tokens::{self, LONGEST, Outline};
use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};
use crate::json::Json;

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
#[derive(Clone, PartialEq, Default)]
pub struct Metadata {
    /// Keys and texts in turn, each behind its length.
    bytes: Vec<u8>,
}

impl Metadata {
    /// The keys, each with its text.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.pairs().map(|(key, text)| (utf8(key), utf8(text)))
    }

    /// The text of a key; if it stands there twice, the first.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.pairs().find(|(name, _)| *name == key.as_bytes()).map(|(_, text)| utf8(text))
    }

    fn pairs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        let mut rest = Rest(&self.bytes);
        std::iter::from_fn(move || (!rest.0.is_empty()).then(|| (rest.bytes(), rest.bytes())))
    }

    /// Reads the fields of an object that serde_json has read.
    fn of(fields: &[u8]) -> Result<Self, serde_json::Error> {
        let rooms = tokens::fields(fields)
            .map(|(key, text)| tokens::text_room(key) + text.map_or(0, tokens::text_room));
        let mut bytes = Vec::with_capacity(rooms.sum());
        for (key, text) in tokens::fields(fields) {
            let wrong = |what| {
                let key = String::from_utf8_lossy(key);
                serde_json::Error::custom(format_args!("`{METADATA}`: `{key}`: {what}"))
            };
            let text = text.ok_or_else(|| wrong("expected a string"))?;
            tokens::push(&mut bytes, key).map_err(wrong)?;
            tokens::push(&mut bytes, text).map_err(wrong)?;
        }
        Ok(Self { bytes })
    }
}

impl fmt::Debug for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

fn utf8(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("it was a text")
}

/// Reads the header; checks every offset.
///
/// The entries take less than the header does, and are allocated once.
pub(super) fn read(path: &Path, map: &Mapped) -> Result<(FileEntries, Metadata), CheckpointError> {
    let (header, data) = split(path, map.bytes())?;
    let json = |source| CheckpointError::Json { path: path.to_owned(), what: "header", source };
    let outline = Outline::of(header, METADATA).map_err(|found| too_long(path, found))?;
    let limit = data.len() as u64;
    let mut entries = FileEntries::new(map.bytes().len() - data.len(), outline.room);
    let long = outline.longest > LONGEST;
    let mut deserializer = serde_json::Deserializer::from_slice(header);
    let tensors = Tensors { entries: &mut entries, limit, long };
    let wrong = deserializer.deserialize_map(tensors).map_err(json)?;
    deserializer.end().map_err(json)?;
    let metadata = outline.texts.map(|texts| Metadata::of(&header[texts..]));
    let metadata = metadata.transpose().map_err(json)?.unwrap_or_default();
    if let Some((name, problem)) = wrong {
        return Err(CheckpointError::tensor(path, &name, problem));
    }
    check_cover(path, &entries, limit)?;
    Ok((entries, metadata))
}

fn too_long(path: &Path, found: u64) -> CheckpointError {
    let expected = "names, numbers and nesting of at most 1,048,576 bytes each";
    CheckpointError::Header { path: path.to_owned(), expected, found }
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
fn check_cover(path: &Path, entries: &FileEntries, limit: u64) -> Result<(), CheckpointError> {
    let mut covered = 0;
    for (at, data) in entries.by_data() {
        if data.start != covered {
            let (begin, end) = (data.start, data.end);
            let expected = "the byte after the tensor before";
            let problem = TensorProblem::Offsets { begin, end, expected, limit };
            return Err(CheckpointError::tensor(path, entries.name(at), problem));
        }
        covered = data.end;
    }
    if covered != limit {
        let expected = "tensors that cover the data; it has more bytes than these";
        let found = covered;
        return Err(CheckpointError::Header { path: path.to_owned(), expected, found });
    }
    Ok(())
}

/// A name, borrowed from the header where it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

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

/// Reads a header into entries, until one is wrong; what is no JSON comes before that.
struct Tensors<'e> {
    entries: &'e mut FileEntries,
    /// Bytes of data in the file.
    limit: u64,
    /// True if serde_json only skips the texts of `__metadata__`.
    long: bool,
}

impl<'de> Visitor<'de> for Tensors<'_> {
    /// The first tensor that is wrong.
    type Value = Option<(String, TensorProblem)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut wrong = None;
        while let Some(Name(name)) = access.next_key()? {
            if name == METADATA {
                let skipped = match self.long {
                    true => access.next_value::<Fields<IgnoredAny>>().map(drop),
                    false => access.next_value::<Fields<String>>().map(drop),
                };
                skipped.map_err(|e| A::Error::custom(format_args!("`{METADATA}`: {e}")))?;
                continue;
            }
            let named = |e| A::Error::custom(format_args!("tensor `{name}`: {e}"));
            let raw: RawEntry<'_> = access.next_value().map_err(named)?;
            if wrong.is_some() {
                continue;
            }
            match raw.check(self.limit) {
                Ok((dtype, shape)) => {
                    let [begin, end] = raw.data_offsets;
                    self.entries.push(&name, dtype, &shape, begin..end);
                }
                Err(problem) => wrong = Some((name.into_owned(), problem)),
            }
        }
        Ok(wrong)
    }
}

/// An object of texts, of which nothing is kept: of values `V`, which are texts or not looked at.
struct Fields<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Fields<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self(PhantomData))
    }
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for Fields<V> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self, A::Error> {
        while let Some(Name(key)) = access.next_key()? {
            let named = |e| A::Error::custom(format_args!("`{key}`: {e}"));
            access.next_value::<V>().map_err(named)?;
        }
        Ok(self)
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: Fields<String>,
}

/// An index. Its text stays in the file and is gone through again for every question.
pub(super) struct IndexFile<'p> {
    path: &'p Path,
    map: Mapped,
    /// Where the fields of `weight_map` begin.
    weight_map: usize,
}

impl<'p> IndexFile<'p> {
    /// Checks an index.
    pub(super) fn open(path: &'p Path) -> Result<Self, CheckpointError> {
        let map = Mapped::open(path)?;
        let text = map.bytes();
        let found = text.len() as u64;
        if found > MAX_TEXT {
            let (path, expected) = (path.to_owned(), TOO_LONG);
            return Err(CheckpointError::Header { path, expected, found });
        }
        let outline = Outline::of(text, WEIGHT_MAP).map_err(|found| too_long(path, found))?;
        if outline.longest > LONGEST {
            return Err(too_long(path, outline.longest as u64));
        }
        let Index { weight_map: Fields(_) } =
            serde_json::from_slice(text).map_err(|source| wrong_index(path, source))?;
        // serde takes a list for an object of these fields too.
        let weight_map = outline.texts.ok_or_else(|| {
            let what = format!("expected an object with the field `{WEIGHT_MAP}`");
            wrong_index(path, serde_json::Error::custom(what))
        })?;
        let index = Self { path, map, weight_map };
        for pair in index.pairs() {
            let (_, shard) = pair?;
            // A name, not a path: an index must not lead out of its folder.
            let plain = !shard.contains(['/', '\\', '\0']) && shard.ends_with(".safetensors");
            if !plain {
                return Err(CheckpointError::Field {
                    path: path.to_owned(),
                    field: WEIGHT_MAP.to_owned(),
                    expected: "names of safetensors files in the same folder",
                    found: shard.into_owned(),
                });
            }
        }
        Ok(index)
    }

    /// Where it is.
    pub(super) fn path(&self) -> &'p Path {
        self.path
    }

    /// Each tensor and its shard, in its order.
    pub(super) fn pairs(
        &self,
    ) -> impl Iterator<Item = Result<(Cow<'_, str>, Cow<'_, str>), CheckpointError>> {
        tokens::fields(&self.map.bytes()[self.weight_map..]).map(move |(tensor, shard)| {
            let wrong = |what| wrong_index(self.path, serde_json::Error::custom(what));
            let shard = shard.ok_or_else(|| wrong("expected a string"))?;
            Ok((tokens::text(tensor).map_err(wrong)?, tokens::text(shard).map_err(wrong)?))
        })
    }
}

fn wrong_index(path: &Path, source: serde_json::Error) -> CheckpointError {
    CheckpointError::Json { path: path.to_owned(), what: "index", source }
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
        fields.push((METADATA.to_owned(), Json::Object(texts.collect())));
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
