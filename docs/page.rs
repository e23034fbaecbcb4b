//! The parts of Markdown pages that are made, and those that are written.
//!
//! ```text
//! <!-- table: methods; `amax`; `gptq` -->    some rows of docs/benchmarks/methods.json, or all
//! | method | ..
//! <!-- end -->
//! <!-- records -->                         every table with its source and notes
//! <!-- end -->
//! ```

use crate::table::{Table, wrapped};

const BEGIN: &str = "<!-- ";
const CLOSE: &str = " -->";
const END: &str = "<!-- end -->";

/// Why a table, a page or a picture cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum DocsError {
    /// A file of figures.
    #[error("docs/benchmarks/{id}.json: {problem}")]
    Table {
        /// Its name, without `.json`.
        id: String,
        /// What is wrong.
        problem: String,
    },
    /// A page.
    #[error("{page}:{line}: {problem}")]
    Page {
        /// Its path.
        page: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// A file or folder.
    #[error("{path}: {problem}")]
    File {
        /// Its path.
        path: String,
        /// What the system, or the library of plots, says.
        problem: String,
    },
}

/// What a comment asks for.
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

/// A page with all tables that its comments ask for; what was between the comments does not matter.
/// `home` is the way from the page to that of all figures, for a link.
///
/// # Errors
/// [`DocsError::Page`] for a comment without an end, or a table that does not exist.
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
        made += line;
        made += "\n";
        in_code ^= is_fence(line);
        let Some(asked) = asked(line).filter(|_| !in_code) else { continue };
        let error =
            |problem: String| DocsError::Page { page: page.to_owned(), line: index + 1, problem };
        if !lines.by_ref().any(|(_, line)| line.trim() == END) {
            return Err(error(format!("expected `{END}` behind it")));
        }
        match asked {
            Asked::Table { id, rows } => {
                let table = tables.iter().find(|table| table.id == id);
                let table = table.ok_or_else(|| error(format!("no table `{id}`")))?;
                let link = |home| format!(" ([more]({home}#{}))", anchor(&table.title));
                let link = home.map_or(String::new(), link);
                let source = format!("{}{link}.{}", table.source(), table.others(&rows));
                // A page without a link to the record says itself what was measured.
                if home.is_none() {
                    made += &format!("{}\n\n", wrapped(&table.what, ""));
                }
                made += &format!("{}\n{}\n", table.markdown(&rows)?, wrapped(&source, ""));
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

/// Whether a line begins or ends a block of code.
fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// What GitHub calls a heading in links.
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
            A machine; 2026-01-02, commit abc; `cargo x` ([more](b/README.md#a-t)).\n\
            <!-- end -->\nlast 1 us\n";
        assert_eq!(made, expected);
        assert_eq!(fill("p.md", &made, &tables(), Some("b/README.md")).expect("a page"), made);
        assert_eq!(outside(&made), [(1, "# P"), (9, "last 1 us")]);
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
        for page in ["<!-- table: u -->\n<!-- end -->\n", "\n<!-- table: t -->\n"] {
            assert!(fill("p.md", page, &tables(), None).is_err(), "{page}");
        }
    }
}
