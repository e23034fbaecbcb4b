//! The parts of Markdown pages that are made, and those that are written.
//!
//! ```text
//! <!-- table: methods; `amax`; `gptq` -->    some rows of docs/benchmarks/methods.json, or all
//! | method | ..
//! <!-- end -->
//! 4.25<!-- = methods; `gptq`; NVFP4, `3.up` --> %    a cell, rounded to the digits of the page
//! <!-- records -->                         every table with its source and notes
//! <!-- end -->
//! ```

use std::fmt::Write;

use crate::table::Table;

const BEGIN: &str = "<!-- ";
const CLOSE: &str = " -->";
const END: &str = "<!-- end -->";
/// Begins a comment that names the cell of the number before it.
const CELL: &str = "<!-- = ";

/// Why a table, a page or a picture cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DocsError {
    /// A file of figures.
    #[error("docs/benchmarks/{id}.json: {problem}")]
    Table {
        /// Its name, without `.json`.
        id: String,
        /// The mistake.
        problem: String,
    },
    /// A page.
    #[error("{page}:{line}: {problem}")]
    Page {
        /// Its path.
        page: String,
        /// The line, from 1.
        line: usize,
        /// The mistake.
        problem: String,
    },
    /// A file or folder.
    #[error("{path}: {problem}")]
    File {
        /// Its path.
        path: String,
        /// The message of the system, or of the library of plots.
        problem: String,
    },
}

/// A request of a comment.
enum Asked<'a> {
    Table { id: &'a str, rows: Vec<&'a str> },
    Records,
}

fn asked(line: &str) -> Option<Asked<'_>> {
    let inside = line.trim().strip_prefix(BEGIN)?.strip_suffix(CLOSE)?;
    if inside == "records" {
        return Some(Asked::Records);
    }
    let mut parts = inside.strip_prefix("table: ")?.split("; ");
    let id = parts.next()?;
    Some(Asked::Table { id, rows: parts.collect() })
}

/// A page with all tables and figures that its comments ask for, whatever was there before.
/// `home` is the way from the page to that of all figures, for a link.
///
/// # Errors
/// [`DocsError::Page`] for a comment without an end, or a table or figure that does not exist.
pub fn fill(
    page: &str,
    text: &str,
    tables: &[Table],
    home: Option<&str>,
) -> Result<String, DocsError> {
    let mut made = String::new();
    let mut in_code = false;
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let error =
            |problem: String| DocsError::Page { page: page.to_owned(), line: index + 1, problem };
        in_code ^= is_fence(line);
        match in_code {
            true => made += line,
            false => made += &with_figures(line, tables).map_err(&error)?,
        }
        made += "\n";
        let Some(asked) = asked(line).filter(|_| !in_code) else { continue };
        if !lines.by_ref().any(|(_, line)| line.trim() == END) {
            return Err(error(format!("expected `{END}` behind it")));
        }
        match asked {
            Asked::Table { id, rows } => {
                let table = tables.iter().find(|table| table.id == id);
                let table = table.ok_or_else(|| error(format!("no table `{id}`")))?;
                made += &table.markdown(&rows)?;
                if let Some(home) = home {
                    let anchor = anchor(&table.title);
                    made += &format!("\n[Source]({home}#{anchor}).\n");
                }
            }
            Asked::Records => {
                let records: Vec<_> = tables.iter().map(Table::record).collect();
                made += &format!("\n{}\n", records.join("\n"));
            }
        }
        made += END;
        made += "\n";
    }
    Ok(made)
}

/// Replaces the figures of a line with the cells that its comments name.
fn with_figures(line: &str, tables: &[Table]) -> Result<String, String> {
    let mut made = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once(CELL) {
        let (cell, after) = after.split_once(CLOSE).ok_or("expected ` -->` in the same line")?;
        let (text, number) = split_number(before);
        if number.is_empty() {
            return Err(format!("expected a number before the comment that names `{cell}`"));
        }
        let digits = number.split_once('.').map_or(0, |(_, digits)| digits.len());
        let figure = figure(cell, tables).ok_or_else(|| format!("no figure `{cell}`"))?;
        let _ = write!(made, "{text}{figure:.digits$}{CELL}{cell}{CLOSE}");
        rest = after;
    }
    Ok(made + rest)
}

/// The figure that a comment names: `table; row; column`.
fn figure(cell: &str, tables: &[Table]) -> Option<f64> {
    let (id, cell) = cell.split_once("; ")?;
    let (row, column) = cell.split_once("; ")?;
    tables.iter().find(|table| table.id == id)?.figure(row, column)
}

/// A text without the number that it ends with, and the number.
fn split_number(text: &str) -> (&str, &str) {
    let before = text.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    text.split_at(before.len())
}

/// A line without its figures that are made, and the comments that name their cells.
pub fn without_figures(line: &str) -> String {
    let mut written = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once(CELL) {
        written += split_number(before).0;
        rest = after.split_once(CLOSE).map_or("", |(_, after)| after);
    }
    written + rest
}

/// Returns true if a line begins or ends a block of code.
fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// Returns GitHub's anchor of a heading.
fn anchor(title: &str) -> String {
    let kept = title.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-');
    kept.collect::<String>().replace(' ', "-")
}

/// The lines of a page that are written, not made, and are not code; with their numbers from 1.
pub fn outside(text: &str) -> Vec<(usize, &str)> {
    let (mut in_made, mut in_code) = (false, false);
    let mut written = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if is_fence(line) {
            in_code = !in_code;
            continue;
        }
        in_made |= asked(line).is_some() && !in_code;
        if !in_made && !in_code {
            written.push((index + 1, line));
        }
        in_made &= line.trim() != END;
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Vec<Table> {
        let json = r#"{"title": "A `T`", "what": "w", "machine": "a machine", "date": "2026-01-02",
            "commit": "abc", "command": "cargo x", "columns": ["name", "us"],
            "rows": [["a", 1], ["b", 2]], "notes": ["n"]}"#;
        vec![Table::read("t", json).expect("a table")]
    }

    #[test]
    fn what_is_between_the_comments_is_made() {
        let page = "# P\n<!-- table: t; b -->\nold 7\n<!-- end -->\nlast 1 us\n";
        let made = fill("p.md", page, &tables(), Some("b/README.md")).expect("a page");
        let expected = "# P\n<!-- table: t; b -->\n| name | us |\n| --- | --- |\n| b | 2 |\n\n\
            [Source](b/README.md#a-t).\n<!-- end -->\nlast 1 us\n";
        assert_eq!(made, expected);
        assert_eq!(fill("p.md", &made, &tables(), Some("b/README.md")).expect("a page"), made);
        assert_eq!(outside(&made), [(1, "# P"), (9, "last 1 us")]);
    }

    #[test]
    fn a_figure_in_a_sentence_is_its_cell_with_the_digits_of_the_page() {
        let page =
            "**7.00<!-- = t; a; us --> us**, 9<!-- = t; b; us -->\n```\n7<!-- = t -->\n```\n";
        let made = fill("p.md", page, &tables(), None).expect("a page");
        let expected = page.replace("7.00<", "1.00<").replace("9<", "2<");
        assert_eq!(made, expected);
        assert_eq!(without_figures("**1.00<!-- = t; a; us --> us**, 9 s"), "** us**, 9 s");
    }

    #[test]
    fn comments_in_code_are_code() {
        let page = "```text\n<!-- table: t -->\n<!-- end -->\n```\n7 us\n";
        assert_eq!(fill("p.md", page, &tables(), None).expect("a page"), page);
        assert_eq!(outside(page), [(5, "7 us")]);
    }

    #[test]
    fn records_have_everything() {
        let page = "<!-- records -->\n<!-- end -->\n";
        let made = fill("p.md", page, &tables(), None).expect("a page");
        for part in ["## A `T`", "| a | 1 |", "| b | 2 |", "\n- n\n", "commit abc", "(t.json)"] {
            assert!(made.contains(part), "{made}");
        }
    }

    #[test]
    fn comments_that_ask_for_nothing_there_is_are_errors() {
        let tables_of_none = ["<!-- table: u -->\n<!-- end -->\n", "\n<!-- table: t -->\n"];
        let figures_of_none = ["1<!-- = t; c; us -->", "1 <!-- = t; a; us -->", "1<!-- = t; a; us"];
        for page in tables_of_none.into_iter().chain(figures_of_none) {
            assert!(fill("p.md", page, &tables(), None).is_err(), "{page}");
        }
    }
}
