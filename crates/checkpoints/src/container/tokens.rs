//! JSON taken apart without being read: where its texts are, and what they say.
//!
//! serde_json gathers a text with escapes, the digits of a number that is none of 64 bits and the
//! brackets around what it skips in a vector that grows: it takes three times as many bytes.

use std::borrow::Cow;
use std::iter;

use super::{entry, leb128};

/// The most bytes of a name and of a number, and the most brackets around a value, that serde_json
/// is given.
pub(super) const LONGEST: usize = 1 << 20;

/// A text as it is written, without its quotes; or a byte of anything else but white space.
enum Token<'a> {
    Text(&'a [u8]),
    Byte(u8),
}

/// The tokens of a text, which need not be JSON.
struct Tokens<'a> {
    json: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        let space = |byte: &u8| matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.at += self.json[self.at..].iter().position(|byte| !space(byte))?;
        let byte = self.json[self.at];
        self.at += 1;
        if byte != b'"' {
            return Some(Token::Byte(byte));
        }
        let (begin, mut end) = (self.at, self.at);
        while let Some(byte) = self.json.get(end).filter(|byte| **byte != b'"') {
            end += if *byte == b'\\' { 2 } else { 1 };
        }
        let end = end.min(self.json.len());
        self.at = (end + 1).min(self.json.len());
        Some(Token::Text(&self.json[begin..end]))
    }
}

/// Facts that the tokens of an object tell.
#[derive(Default)]
pub(super) struct Outline {
    /// The most bytes that its fields take as entries, if they are tensors.
    pub(super) room: usize,
    /// Where the fields of the object of texts begin, if it has one; of several, the last.
    pub(super) texts: Option<usize>,
    /// The bytes of the longest text there.
    pub(super) longest: usize,
}

impl Outline {
    /// Reads an object, whose field `texts` may be an object of texts. It need not be JSON.
    ///
    /// # Errors
    /// The length of what is longer than [`LONGEST`], but for those texts.
    pub(super) fn of(json: &[u8], texts: &str) -> Result<Self, u64> {
        let at_most = |length: usize| if length > LONGEST { Err(length as u64) } else { Ok(()) };
        let mut outline = Self::default();
        let mut tokens = Tokens { json, at: 0 };
        let (mut depth, mut number) = (0_usize, 0);
        // Whether the last field is that of the texts, and whether what comes now is a value.
        let (mut within, mut value) = (false, false);
        while let Some(token) = tokens.next() {
            let digits = number;
            number = 0;
            match token {
                Token::Text(text) if within && depth == 2 && value => {
                    outline.longest = outline.longest.max(text.len());
                }
                Token::Text(name) => {
                    at_most(name.len())?;
                    if depth == 1 && !value {
                        within = text(name).is_ok_and(|name| name == texts);
                        outline.room += entry::room(name.len());
                    }
                }
                Token::Byte(bracket @ (b'{' | b'[')) => {
                    depth += 1;
                    at_most(depth)?;
                    if within && depth == 2 && bracket == b'{' {
                        outline.texts = Some(tokens.at);
                    }
                }
                Token::Byte(b'}' | b']') => depth = depth.saturating_sub(1),
                Token::Byte(b',' | b':') => {}
                Token::Byte(byte) => {
                    number = digits + 1;
                    at_most(number)?;
                    // No number is longer in an entry.
                    outline.room += usize::from(byte.is_ascii_digit());
                }
            }
            value = matches!(token, Token::Byte(b':'));
        }
        // What is no JSON may seem to have more.
        outline.room = outline.room.min(json.len());
        Ok(outline)
    }
}

/// The fields of an object behind its bracket: the name of each, and its text if it is one.
pub(super) fn fields(json: &[u8]) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
    let mut tokens = Tokens { json, at: 0 };
    iter::from_fn(move || {
        loop {
            match tokens.next()? {
                Token::Byte(b'}') => return None,
                // A comma.
                Token::Byte(_) => {}
                Token::Text(name) => {
                    let colon_and_value = [tokens.next(), tokens.next()];
                    let [_, Some(Token::Text(text))] = colon_and_value else {
                        return Some((name, None));
                    };
                    return Some((name, Some(text)));
                }
            }
        }
    })
}

/// The characters of a text of JSON.
///
/// # Errors
/// As [`unescape`].
pub(super) fn text(json: &[u8]) -> Result<Cow<'_, str>, &'static str> {
    if !json.contains(&b'\\') {
        return utf8(json).map(Cow::Borrowed);
    }
    let mut text = String::new();
    unescape(json, |part| text.push_str(part))?;
    Ok(Cow::Owned(text))
}

/// Bytes of a text, as a number and they themselves take: at least as many as [`push`] adds.
pub(super) fn text_room(json: &[u8]) -> usize {
    leb128::width(json.len() as u64) + json.len()
}

/// Puts what a text of JSON says behind what is there: a number, and as many bytes.
///
/// # Errors
/// As [`unescape`].
pub(super) fn push(bytes: &mut Vec<u8>, json: &[u8]) -> Result<(), &'static str> {
    let mut length = 0;
    unescape(json, |part| length += part.len())?;
    leb128::push(bytes, length as u64);
    unescape(json, |part| bytes.extend_from_slice(part.as_bytes()))
}

/// Gives what a text of JSON says, part by part.
///
/// # Errors
/// The error of what is not a text, in the words of serde_json.
fn unescape(json: &[u8], mut part: impl FnMut(&str)) -> Result<(), &'static str> {
    let mut rest = utf8(json)?;
    while let Some((before, escape)) = rest.split_once('\\') {
        let (char, length) = escaped(escape).ok_or("invalid escape")?;
        part(before);
        part(char.encode_utf8(&mut [0; 4]));
        rest = &escape[length..];
    }
    part(rest);
    Ok(())
}

fn utf8(json: &[u8]) -> Result<&str, &'static str> {
    std::str::from_utf8(json).map_err(|_| "invalid unicode code point")
}

/// The character of an escape, and how many bytes it has behind the backslash.
fn escaped(escape: &str) -> Option<(char, usize)> {
    let char = match *escape.as_bytes().first()? {
        b'b' => '\u{8}',
        b'f' => '\u{C}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let unit = |at: usize| u16::from_str_radix(escape.get(at..at + 4)?, 16).ok();
            // A character beyond 16 bits is two escapes.
            let second = if escape.get(5..7) == Some("\\u") { unit(7) } else { None };
            let mut chars = char::decode_utf16(iter::once(unit(1)?).chain(second));
            let char = chars.next()?.ok()?;
            return Some((char, if char.len_utf16() == 2 { 11 } else { 5 }));
        }
        byte @ (b'"' | b'\\' | b'/') => char::from(byte),
        _ => return None,
    };
    Some((char, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_what_serde_json_reads() {
        let texts = [
            r#""""#,
            r#""plain""#,
            r#""\"\\\/\b\f\n\r\t""#,
            r#""a\u00e9\ud83d\ude00\u0041\ud83d\ude00""#,
            r#""Zoë 😀\u00EB""#,
            r#""\ud83d""#,
            r#""\ude00""#,
            r#""\ud83d\u0041""#,
            r#""\ud83d\n""#,
        ];
        for quoted in texts {
            let json = &quoted.as_bytes()[1..quoted.len() - 1];
            let expected: Option<String> = serde_json::from_str(quoted).ok();
            assert_eq!(text(json).ok().as_deref(), expected.as_deref(), "{quoted}");
            let mut bytes = Vec::new();
            assert_eq!(push(&mut bytes, json).is_ok(), expected.is_some());
            if let Some(expected) = expected {
                assert_eq!(leb128::Rest(&bytes).bytes(), expected.as_bytes());
                assert!(bytes.len() <= text_room(json));
            }
        }
        assert!(text(b"\xFF").is_err());
    }

    #[test]
    fn texts_are_found_by_the_name_of_their_object() {
        let json = br#"{"a": {"x": 1}, "t\u0065xts": {"b\"": "c", "d": 12}, "texts": []}"#;
        let outline = Outline::of(json, "texts").expect("short");
        let found: Vec<_> = fields(&json[outline.texts.expect("texts")..]).collect();
        assert_eq!(found, [(&br#"b\""#[..], Some(&b"c"[..])), (&b"d"[..], None)]);
        assert_eq!(outline.longest, 1);
        // Names with their lengths and two bytes more, and the digits.
        assert_eq!(outline.room, (1 + 3) + (10 + 3) + (5 + 3) + 3);
        for invalid in ["", "\"", "\"\\", "}]", "{\"", "{\"texts\":{\"a\":\"b", "[[[", "12"] {
            let outline = Outline::of(invalid.as_bytes(), "texts").expect("short");
            assert!(outline.room <= invalid.len());
        }
        let long = "7".repeat(LONGEST + 1);
        let texts = format!(r#"{{"texts": {{"a": "{long}"}}}}"#);
        assert_eq!(Outline::of(texts.as_bytes(), "texts").map(|o| o.longest), Ok(LONGEST + 1));
        for other in [format!(r#"{{"a": {{"b": "{long}"}}}}"#), long.clone(), "[".repeat(LONGEST)] {
            let refused = Outline::of((other + "[").as_bytes(), "texts").err();
            assert_eq!(refused, Some(LONGEST as u64 + 1));
        }
    }
}
