//! JSON text as Python's `json` module writes it, so that a config that is written again differs
//! only where something changed.

use std::io;

use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter};

/// Writes a value as Python's `json.dump(value, indent=2)` does, without a newline at the end.
pub(crate) fn to_python(value: &serde_json::Value) -> String {
    let mut text = Vec::new();
    let python = Python(PrettyFormatter::new());
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, python);
    value.serialize(&mut serializer).expect("every JSON value can be written");
    String::from_utf8(text).expect("JSON is text")
}

/// Writes numbers and texts as Python does.
struct Python(PrettyFormatter<'static>);

impl Formatter for Python {
    /// Writes a float as `repr` does: its exponent has a sign and at least two digits.
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:?}");
        match text.split_once('e').map(|(digits, exponent)| (digits, exponent.parse::<i32>())) {
            Some((digits, Ok(exponent))) => write!(writer, "{digits}e{exponent:+03}"),
            Some((_, Err(_))) | None => writer.write_all(text.as_bytes()),
        }
    }

    /// Writes ASCII, and escapes of UTF-16 for other characters.
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
        assert_eq!(to_python(&text.parse().expect("JSON")), python);
    }
}
