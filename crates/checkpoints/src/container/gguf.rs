//! GGUF, version 3: key-value pairs, tensor infos, and the tensors at aligned offsets.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::ops::Range;
use std::path::Path;

use super::entry::{Entries, Entry, by_data};
use super::file::Mapped;
use crate::dtype::DataType;
use crate::error::{CheckpointError, TensorProblem};

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;
const ARCHITECTURE: &str = "general.architecture";
/// `GGML_MAX_DIMS`.
const MAX_AXES: u32 = 4;

/// The key-value pairs of a file, as its bytes.
///
/// They are kept whole, so that a file that is written again has what its readers need, whether
/// this project knows the keys or not.
///
/// ```
/// use burn_fp4_checkpoints::GgufMetadata;
///
/// assert_eq!(GgufMetadata::new("llama").architecture(), Some("llama"));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Metadata {
    pairs: u64,
    bytes: Vec<u8>,
    alignment: u64,
}

impl Metadata {
    /// The pairs that every file has: `general.architecture`.
    #[must_use]
    pub fn new(architecture: &str) -> Self {
        let mut bytes = Vec::new();
        text(&mut bytes, ARCHITECTURE);
        bytes.extend(ValueKind::String.id().to_le_bytes());
        text(&mut bytes, architecture);
        Self { pairs: 1, bytes, alignment: ALIGNMENT }
    }

    /// `general.architecture`.
    #[must_use]
    pub fn architecture(&self) -> Option<&str> {
        let mut cursor = self.cursor();
        let mut found = None;
        for _ in 0..self.pairs {
            let Pair { key, kind, mut value } = cursor.pair().ok()?;
            if key == ARCHITECTURE && kind == ValueKind::String {
                found = value.text().ok();
            }
        }
        found
    }

    /// Gives a key this number, in its place or behind all others.
    pub(crate) fn set_u32(&mut self, key: &str, number: u32) {
        let mut pair = Vec::new();
        text(&mut pair, key);
        pair.extend(ValueKind::U32_ID.to_le_bytes());
        pair.extend(number.to_le_bytes());
        match self.place_of(key) {
            Some(place) => drop(self.bytes.splice(place, pair)),
            None => {
                self.pairs += 1;
                self.bytes.extend(pair);
            }
        }
    }

    /// Removes a key, if it is there.
    pub(crate) fn remove(&mut self, key: &str) {
        if let Some(place) = self.place_of(key) {
            self.pairs -= 1;
            self.bytes.drain(place);
        }
    }

    /// Where a key and its value are among the bytes.
    fn place_of(&self, key: &str) -> Option<Range<usize>> {
        let mut cursor = self.cursor();
        (0..self.pairs).find_map(|_| {
            let begin = cursor.at;
            let found = cursor.pair().ok()?.key;
            (found == key).then_some(begin..cursor.at)
        })
    }

    /// The pairs, which were read before or are our own.
    fn cursor(&self) -> Cursor<'_> {
        Cursor { path: Path::new(""), bytes: &self.bytes, at: 0 }
    }
}

/// The type of a value (`enum gguf_metadata_value_type`).
#[derive(Clone, Copy, PartialEq)]
enum ValueKind {
    Fixed(usize),
    String,
    Array,
}

impl ValueKind {
    const U32_ID: u32 = 4;

    fn of(id: u32) -> Option<Self> {
        Some(match id {
            0 | 1 | 7 => Self::Fixed(1),
            2 | 3 => Self::Fixed(2),
            4..=6 => Self::Fixed(4),
            8 => Self::String,
            9 => Self::Array,
            10..=12 => Self::Fixed(8),
            _ => return None,
        })
    }

    const fn id(self) -> u32 {
        match self {
            Self::String => 8,
            Self::Array => 9,
            Self::Fixed(_) => Self::U32_ID,
        }
    }

    /// Fewest bytes of a value.
    const fn least(self) -> u64 {
        match self {
            Self::Fixed(bytes) => bytes as u64,
            Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A key and its value.
struct Pair<'a> {
    key: &'a str,
    kind: ValueKind,
    value: Cursor<'a>,
}

/// Reads a file from the front; no read leaves it.
struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn wrong(&self, expected: &'static str, found: u64) -> CheckpointError {
        CheckpointError::Header { path: self.path.to_owned(), expected, found }
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], CheckpointError> {
        let rest = &self.bytes[self.at..];
        if length > rest.len() as u64 {
            return Err(self.wrong("a header that ends within the file", length));
        }
        self.at += length as usize;
        Ok(&rest[..length as usize])
    }

    fn u32(&mut self) -> Result<u32, CheckpointError> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn u64(&mut self) -> Result<u64, CheckpointError> {
        Ok(u64::from(self.u32()?) | u64::from(self.u32()?) << 32)
    }

    fn text(&mut self) -> Result<&'a str, CheckpointError> {
        let length = self.u64()?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|e| self.wrong("UTF-8", e.valid_up_to() as u64))
    }

    fn pair(&mut self) -> Result<Pair<'a>, CheckpointError> {
        let key = self.text()?;
        let id = self.u32()?;
        let Some(kind) = ValueKind::of(id) else {
            return Err(self.wrong("the type of a value", id.into()));
        };
        let begin = self.at;
        self.skip(kind)?;
        let value = Cursor { path: self.path, bytes: &self.bytes[begin..self.at], at: 0 };
        Ok(Pair { key, kind, value })
    }

    /// A count of things that take at least `least` bytes each.
    fn count(&mut self, least: u64) -> Result<u64, CheckpointError> {
        let count = self.u64()?;
        let rest = (self.bytes.len() - self.at) as u64;
        if count.checked_mul(least).is_none_or(|bytes| bytes > rest) {
            return Err(self.wrong("a count that fits into the file", count));
        }
        Ok(count)
    }

    fn skip(&mut self, kind: ValueKind) -> Result<(), CheckpointError> {
        match kind {
            ValueKind::Fixed(bytes) => self.take(bytes as u64).map(|_| ()),
            ValueKind::String => {
                let length = self.u64()?;
                self.take(length).map(|_| ())
            }
            ValueKind::Array => {
                let id = self.u32()?;
                // ggml has no arrays of arrays.
                let Some(kind) = ValueKind::of(id).filter(|kind| *kind != ValueKind::Array) else {
                    return Err(self.wrong("the type of an array's values", id.into()));
                };
                let count = self.count(kind.least())?;
                match kind {
                    ValueKind::Fixed(bytes) => self.take(count * bytes as u64).map(|_| ()),
                    ValueKind::String | ValueKind::Array => {
                        (0..count).try_for_each(|_| self.skip(kind))
                    }
                }
            }
        }
    }
}

/// Reads the header of the file with a number in the container, and checks every offset.
pub(super) fn read(
    path: &Path,
    map: &Mapped,
    number: usize,
) -> Result<(Entries, Metadata), CheckpointError> {
    let mut cursor = Cursor { path, bytes: map.bytes(), at: 0 };
    let magic = cursor.u32()?;
    if magic != u32::from_le_bytes(*MAGIC) {
        return Err(cursor.wrong("the magic GGUF", magic.into()));
    }
    let version = cursor.u32()?;
    if version != VERSION {
        return Err(cursor.wrong("GGUF version 3", version.into()));
    }
    let tensors = cursor.u64()?;
    // A tensor info takes at least the length of a name, a count of axes, a type and an offset.
    // A count that cannot be true is refused before anything is allocated for it.
    if tensors > map.bytes().len() as u64 / 24 {
        return Err(cursor.wrong("a count of tensors that fits into the file", tensors));
    }
    let metadata = read_pairs(&mut cursor)?;
    let infos = (0..tensors).map(|_| read_info(&mut cursor)).collect::<Result<Vec<_>, _>>()?;
    let file = map.bytes().len() as u64;
    // Without data there may be no padding either.
    let start = (cursor.at as u64).next_multiple_of(metadata.alignment).min(file);
    let mut entries = Entries::with_capacity(infos.len());
    for info in infos {
        let checked = info.check(file - start, metadata.alignment);
        let (dtype, shape, data) =
            checked.map_err(|problem| CheckpointError::tensor(path, info.name, problem))?;
        let data = (start + data.start) as usize..(start + data.end) as usize;
        entries.push((info.name.to_owned(), Entry { dtype, shape, file: number, data }));
    }
    check_apart(path, &entries, start as usize, file - start)?;
    Ok((entries, metadata))
}

fn read_pairs(cursor: &mut Cursor<'_>) -> Result<Metadata, CheckpointError> {
    let pairs = cursor.count(8 + 4 + 1)?;
    let begin = cursor.at;
    let mut alignment = ALIGNMENT;
    for _ in 0..pairs {
        let Pair { key, kind, mut value } = cursor.pair()?;
        match (key, kind) {
            ("general.alignment", ValueKind::Fixed(4)) => alignment = u64::from(value.u32()?),
            // `LLM_KV_SPLIT_COUNT` of llama.cpp: u16.
            ("split.count", ValueKind::Fixed(2)) => {
                let count = value.take(2)?;
                let count = u16::from_le_bytes([count[0], count[1]]);
                if count > 1 {
                    return Err(CheckpointError::Refused {
                        path: cursor.path.to_owned(),
                        what: format!("split.count {count}"),
                        because: "the other files have tensors of the model",
                        remedy: "merge them with llama-gguf-split --merge",
                    });
                }
            }
            (ARCHITECTURE, ValueKind::String) => _ = value.text()?,
            _ => {}
        }
    }
    if !alignment.is_power_of_two() || alignment > 1 << 20 {
        return Err(cursor.wrong("an alignment that is a power of two up to 2^20", alignment));
    }
    let bytes = cursor.bytes[begin..cursor.at].to_vec();
    Ok(Metadata { pairs, bytes, alignment })
}

/// A tensor as the header describes it: name, axes (the contiguous one first), type, offset.
struct Info<'a> {
    name: &'a str,
    axes: Vec<u64>,
    id: u32,
    offset: u64,
}

fn read_info<'a>(cursor: &mut Cursor<'a>) -> Result<Info<'a>, CheckpointError> {
    let name = cursor.text()?;
    let count = cursor.u32()?;
    if count > MAX_AXES {
        let problem = TensorProblem::Axes { most: MAX_AXES, found: count };
        return Err(CheckpointError::tensor(cursor.path, name, problem));
    }
    let axes: Result<Vec<u64>, _> = (0..count).map(|_| cursor.u64()).collect();
    Ok(Info { name, axes: axes?, id: cursor.u32()?, offset: cursor.u64()? })
}

impl Info<'_> {
    /// Checks type, size and offset in `limit` bytes of data.
    fn check(
        &self,
        limit: u64,
        alignment: u64,
    ) -> Result<(DataType, Vec<usize>, Range<u64>), TensorProblem> {
        let Some(dtype) = DataType::of_ggml(self.id) else {
            return Err(TensorProblem::UnknownDtype { found: self.id.to_string() });
        };
        let axes = self.axes.iter().rev().map(|&axis| usize::try_from(axis).ok());
        let shape: Option<Vec<usize>> = axes.collect();
        let sized = shape.and_then(|shape| Some((dtype.bytes(&shape)? as u64, shape)));
        let Some((bytes, shape)) = sized else {
            return Err(TensorProblem::Size { found: self.axes.clone() });
        };
        let begin = self.offset;
        let end = begin.saturating_add(bytes);
        if end > limit || !begin.is_multiple_of(alignment) {
            let expected = "an aligned offset and an end";
            return Err(TensorProblem::Offsets { begin, end, expected, limit });
        }
        Ok((dtype, shape, begin..end))
    }
}

/// Checks that no two tensors overlap. The data begin at `start` and have `limit` bytes.
fn check_apart(
    path: &Path,
    entries: &Entries,
    start: usize,
    limit: u64,
) -> Result<(), CheckpointError> {
    let mut free = start;
    for (name, Entry { data, .. }) in by_data(entries) {
        if data.start < free {
            let [begin, end] = [data.start, data.end].map(|at| (at - start) as u64);
            let expected = "an offset behind the tensor before";
            let problem = TensorProblem::Offsets { begin, end, expected, limit };
            return Err(CheckpointError::tensor(path, name, problem));
        }
        free = data.end;
    }
    Ok(())
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// The header of a file of these tensors (name, number of the type, shape, bytes), the offset of
/// each in the file, and the length of the file.
pub(crate) fn layout(
    tensors: &[(&str, u32, &[usize], u64)],
    metadata: &Metadata,
) -> (Vec<u8>, Vec<u64>, u64) {
    let alignment = metadata.alignment;
    let mut header = MAGIC.to_vec();
    header.extend(VERSION.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend(metadata.pairs.to_le_bytes());
    header.extend(&metadata.bytes);
    let mut offsets = Vec::with_capacity(tensors.len());
    let mut end = 0;
    for (name, id, shape, bytes) in tensors {
        text(&mut header, name);
        header.extend((shape.len() as u32).to_le_bytes());
        for &axis in shape.iter().rev() {
            header.extend((axis as u64).to_le_bytes());
        }
        header.extend(id.to_le_bytes());
        header.extend(u64::to_le_bytes(end));
        offsets.push(end);
        end = (end + bytes).next_multiple_of(alignment);
    }
    header.resize((header.len() as u64).next_multiple_of(alignment) as usize, 0);
    let start = header.len() as u64;
    offsets.iter_mut().for_each(|offset| *offset += start);
    (header, offsets, start + end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_set_in_its_place_or_behind_all_others() {
        let mut metadata = Metadata::new("llama");
        metadata.set_u32("general.file_type", 39);
        metadata.set_u32("general.quantization_version", 2);
        let before = metadata.clone();
        metadata.set_u32("general.file_type", 38);
        assert_eq!((metadata.pairs, metadata.bytes.len()), (3, before.bytes.len()));
        let differing = metadata.bytes.iter().zip(&before.bytes).filter(|(a, b)| a != b);
        assert_eq!(differing.collect::<Vec<_>>(), [(&38, &39)]);
        assert_eq!(metadata.place_of("general.file"), None);
        metadata.remove("general.file_type");
        metadata.remove("general.file");
        assert_eq!((metadata.pairs, metadata.place_of("general.file_type")), (2, None));
        assert!(metadata.place_of("general.quantization_version").is_some());
    }
}
