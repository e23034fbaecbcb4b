//! JSON whose objects keep the order of their fields, so that a config that is written again
//! differs only where something changed.

use std::cell::Cell;
use std::fmt;
use std::io;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde_json::Number;
use serde_json::ser::{Formatter, PrettyFormatter};

/// A JSON value.
///
/// ```
/// use burn_fp4_checkpoints::Json;
///
/// let mut config = Json::parse(br#"{"model_type": "llama", "cache": {"bits": 8}}"#)?;
/// config.set("model_type", "qwen3".into());
/// config.set("heads", Json::strings(["q", "k"]));
/// assert_eq!(config.at(&["cache", "bits"]).and_then(Json::as_u64), Some(8));
/// let text = r#"{"model_type":"qwen3","cache":{"bits":8},"heads":["q","k"]}"#;
/// assert_eq!(config.to_string(), text);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number.
    Number(Number),
    /// A text.
    String(String),
    /// `[...]`
    Array(Vec<Json>),
    /// `{...}`, its fields in their order. Of a field that stands twice the last counts.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// An object of these fields.
    pub fn object<const N: usize>(fields: [(&str, Json); N]) -> Self {
        Self::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// An array of texts.
    pub fn strings<S: Into<String>>(items: impl IntoIterator<Item = S>) -> Self {
        Self::Array(items.into_iter().map(|item| Self::String(item.into())).collect())
    }

    /// Reads a text.
    ///
    /// # Errors
    /// A text that is not JSON, nested deeper than 128, or whose values would take 12 MB
    /// more than their text.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        Self::parse_within(text, text.len().saturating_add(FREE))
    }

    /// Reads a text whose values take at most `bytes` of memory.
    pub(crate) fn parse_within(text: &[u8], bytes: usize) -> Result<Self, serde_json::Error> {
        let left = Cell::new(bytes);
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        let json = Values { left: &left }.deserialize(&mut deserializer)?;
        deserializer.end()?;
        Ok(json)
    }

    /// Writes it as Python's `json.dump(value, indent=2)` does, without a newline at the end.
    #[must_use]
    pub fn pretty(&self) -> String {
        let mut text = Vec::new();
        let python = Python(PrettyFormatter::new());
        let mut serializer = serde_json::Serializer::with_formatter(&mut text, python);
        self.serialize(&mut serializer).expect("every JSON value can be written");
        String::from_utf8(text).expect("JSON is text")
    }

    /// The field of an object.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.as_object()?.iter().rfind(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The field of an object in an object and so on.
    pub fn at(&self, path: &[&str]) -> Option<&Json> {
        path.iter().try_fold(self, |value, key| value.get(key))
    }

    /// Puts a field in its place, or at the end of the object.
    ///
    /// Makes an object of any other value.
    pub fn set(&mut self, key: &str, value: Json) {
        if !matches!(self, Self::Object(_)) {
            *self = Self::Object(Vec::new());
        }
        let Self::Object(fields) = self else { return };
        match fields.iter_mut().rfind(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => fields.push((key.to_owned(), value)),
        }
    }

    /// Takes a field out of an object.
    pub fn remove(&mut self, key: &str) {
        if let Self::Object(fields) = self {
            fields.retain(|(name, _)| name != key);
        }
    }

    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The number, if it is a whole one.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Number(number) => number.as_u64(),
            _ => None,
        }
    }

    /// The truth, if it is one.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// The items, if it is an array.
    pub fn as_array(&self) -> Option<&[Json]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// The fields, if it is an object.
    pub fn as_object(&self) -> Option<&[(String, Json)]> {
        match self {
            Self::Object(fields) => Some(fields),
            _ => None,
        }
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<bool> for Json {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<u64> for Json {
    fn from(number: u64) -> Self {
        Self::Number(number.into())
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).expect("every JSON value can be written"))
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(truth) => serializer.serialize_bool(*truth),
            Self::Number(number) => number.serialize(serializer),
            Self::String(text) => serializer.serialize_str(text),
            Self::Array(items) => {
                let mut array = serializer.serialize_seq(Some(items.len()))?;
                items.iter().try_for_each(|item| array.serialize_element(item))?;
                array.end()
            }
            Self::Object(fields) => {
                let mut object = serializer.serialize_map(Some(fields.len()))?;
                fields.iter().try_for_each(|(key, value)| object.serialize_entry(key, value))?;
                object.end()
            }
        }
    }
}

/// Writes numbers and texts as Python does.
struct Python(PrettyFormatter<'static>);

impl Formatter for Python {
    /// `repr`: exponents have a sign and two digits at least.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:?}");
        match text.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
            Some((digits, Ok(exponent))) => write!(writer, "{digits}e{exponent:+03}"),
            Some((_, Err(_))) | None => writer.write_all(text.as_bytes()),
        }
    }

    /// ASCII: other characters as numbers of UTF-16.
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        fragment.chars().try_for_each(|char| match char {
            ' '..='~' => writer.write_all(&[char as u8]),
            _ => {
                let mut units = [0; 2];
                let units = char.encode_utf16(&mut units).iter();
                units.copied().try_for_each(|unit| write!(writer, "\\u{unit:04x}"))
            }
        })
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

/// Bytes that values may take whatever the length of their text: two bytes of it can be a value
/// of fifty.
pub(crate) const FREE: usize = 12 << 20;

/// Reads a value, and counts its memory.
#[derive(Clone, Copy)]
struct Values<'l> {
    left: &'l Cell<usize>,
}

impl Values<'_> {
    /// Counts `slots` of a vector of `T`, and `bytes` elsewhere.
    fn count<T, E: serde::de::Error>(self, slots: usize, bytes: usize) -> Result<(), E> {
        match self.left.get().checked_sub(slots * size_of::<T>() + bytes) {
            Some(left) => self.left.set(left),
            None => return Err(E::custom("too many values for the memory that they may take")),
        }
        Ok(())
    }
}

/// The first slots of a vector.
const FIRST: usize = 4;
/// The slots for one more, while a vector grows: half of them old, and room for as many again.
const NEXT: usize = 3;

impl<'de> DeserializeSeed<'de> for Values<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Values<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Json, E> {
        Ok(Json::Bool(truth))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Number(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Number(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Number::from_f64(number).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Json, E> {
        self.count::<u8, E>(0, text.len())?;
        Ok(Json::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        self.count::<Json, A::Error>(FIRST, 0)?;
        while let Some(item) = access.next_element_seed(self)? {
            self.count::<Json, A::Error>(NEXT, 0)?;
            items.push(item);
        }
        Ok(Json::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut fields = Vec::new();
        self.count::<(String, Json), A::Error>(FIRST, 0)?;
        while let Some(key) = access.next_key::<String>()? {
            self.count::<(String, Json), A::Error>(NEXT, key.len())?;
            fields.push((key, access.next_value_seed(self)?));
        }
        Ok(Json::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text that `json.dumps(json.loads(text), indent=2)` of Python 3.11 makes of it.
    #[test]
    fn texts_are_those_of_python() {
        let text = r#"{"rms_norm_eps": 1e-06, "rope_theta": 1E+16,
            "layers": [1, -2.50, 1e-4, {}, []], "largest": 1.7976931348623157e308,
            "name": "Zo\u00eb \ud83d\ude00\u007f\n"}"#;
        let python = r#"{
  "rms_norm_eps": 1e-06,
  "rope_theta": 1e+16,
  "layers": [
    1,
    -2.5,
    0.0001,
    {},
    []
  ],
  "largest": 1.7976931348623157e+308,
  "name": "Zo\u00eb \ud83d\ude00\u007f\n"
}"#;
        assert_eq!(Json::parse(text.as_bytes()).expect("JSON").pretty(), python);
    }
}
