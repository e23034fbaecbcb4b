//! Bytes as people write and read them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub(crate) u64);

/// Decimal units, as disks are sold and files are listed.
const UNITS: [(&str, u64); 5] =
    [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1000), ("B", 1)];

impl Size {
    /// The least size as large as this whose text says all of it: whole tenths of its unit.
    pub(crate) fn rounded_up(self) -> Self {
        let (_, unit) = UNITS.into_iter().find(|(_, unit)| self.0 >= *unit).unwrap_or(("B", 1));
        Self(self.0.next_multiple_of((unit / 10).max(1)))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = UNITS.into_iter().find(|(_, unit)| self.0 >= *unit).unwrap_or(("B", 1));
        match unit {
            1 => write!(f, "{} B", self.0),
            unit => write!(f, "{:.1} {name}", self.0 as f64 / unit as f64),
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size; write it as 500MB, 2GB or 1073741824");
        let upper = text.trim().to_ascii_uppercase();
        let unit = UNITS.into_iter().find(|(name, _)| upper.ends_with(&name.to_ascii_uppercase()));
        let (name, unit) = unit.unwrap_or(("", 1));
        let number: f64 = upper[..upper.len() - name.len()].trim().parse().map_err(|_| wrong())?;
        let bytes = number * unit as f64;
        if !(bytes.is_finite() && bytes >= 0.0) {
            return Err(wrong());
        }
        Ok(Self(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [("2GB", 2_000_000_000), ("1.5 mb", 1_500_000), ("7", 7), ("7B", 7)] {
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
        assert!("a lot".parse::<Size>().is_err() && "-1GB".parse::<Size>().is_err());
        assert_eq!(Size(2_345_000_000).to_string(), "2.3 GB");
        assert_eq!(Size(999).to_string(), "999 B");
    }

    #[test]
    fn a_size_that_is_rounded_up_is_enough_as_it_is_shown() {
        for bytes in [0, 7, 999, 1001, 67_108_864, 2_345_000_000, 1_999_999_999_999] {
            let shown = Size(bytes).rounded_up().to_string();
            let read: Size = shown.parse().expect("a size");
            assert!(read.0 >= bytes && read.0 - bytes <= bytes / 10 + 1, "{bytes}: {shown}");
        }
    }
}
