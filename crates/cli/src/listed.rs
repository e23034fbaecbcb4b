//! Names that an option takes: their parser, and how its help lists them.

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

use burn_fp4_search::Method;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::table::is_narrow;

/// The parser of the names that there are of something. The error for another name lists them.
pub(crate) fn one_of<T>(names: impl Into<PossibleValuesParser>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Into<Box<dyn Error + Send + Sync>>> + Clone + Send + Sync + 'static,
{
    names.into().try_map(|name| name.parse())
}

/// Parses the name of a file that ends in a way that viewers know.
pub(crate) fn file_ending(name: &str, ends: &[&str]) -> Result<PathBuf, String> {
    let path = PathBuf::from(name);
    let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
    match ends.iter().any(|known| end.eq_ignore_ascii_case(known)) {
        true => Ok(path),
        false => Err(format!("expected a name that ends in .{}", ends.join(" or ."))),
    }
}

/// Formats a sentence, and a line for each name and its meaning. On a narrow terminal the meaning
/// has a line of its own.
pub(crate) fn listed(head: &str, rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = |(name, what): &(&str, String)| match is_narrow() {
        true => format!("\n  {name}\n    {what}"),
        false => format!("\n  {name:width$}  {what}"),
    };
    format!("{head}:{}", rows.iter().map(line).collect::<String>())
}

/// Every method; a star is at those that need to know of the inputs of layers.
pub(crate) fn methods(head: &str) -> String {
    let rows = Method::NAMED.map(|row| {
        let star = if row.calibrated { " *" } else { "" };
        (row.name, format!("{}{star}", row.summary))
    });
    listed(head, &rows)
}
