//! Names that an option takes, as its help lists them.

use burn_fp4_search::Method;

/// A sentence, and a line for each name with what it means.
pub(crate) fn listed(head: &str, rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let line = |(name, what): &(&str, String)| format!("\n  {name:width$}  {what}");
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
