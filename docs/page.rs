//! Generated and written parts of Markdown pages.
//!
//! ```text
//! <!-- table: methods; `amax`; `gptq` -->    rows of docs/benchmarks/methods.json
//! | method | ..
//! <!-- end -->
//! <!-- records -->                         all tables with their sources and notes
//! <!-- end -->
//! ```

use crate::table::{Table, wrapped};

const BEGIN: &str = "<!-- ";
const CLOSE: &str = " -->";
const END: &str = "<!-- end -->";

/// Reason that a table, a page or a plot cannot be generated.
#[derive(Debug, thiserror::Error)]
pub enum DocsError {
    /// A file of figures.
    #[error("docs/benchmarks/{id}.json: {problem}")]
    Table {
        /// Name of the file, without `.json`.
        id: String,
        /// Problem and its remedy.
        problem: String,
    },
    /// A page.
    #[error("{page}:{line}: {problem}")]
    Page {
        /// Path of the page.
        page: String,
        /// Line, from 1.
        line: usize,
        /// Problem and its remedy.
        problem: String,
    },
    /// A file or folder.
    #[error("{path}: {problem}")]
    File {
        /// Path of the file or folder.
        path: String,
        /// Message of the system or of the plot library.
        problem: String,
    },
}

/// Request of a comment.
enum Request<'a> {
    Table { id: &'a str, rows: Vec<&'a str> },
    Records,
}

fn request(line: &str) -> Option<Request<'_>> {
    let inside = line.trim().strip_prefix(BEGIN)?.strip_suffix(CLOSE)?;
    if inside == "records" {
        return Some(Request::Records);
    }
    let mut parts = inside.strip_prefix("table: ")?.split("; ");
    let id = parts.next()?;
    Some(Request::Table { id, rows: parts.collect() })
}

/// Generates the tables that the comments of a page request, and replaces the text between the
/// comments. `records` is the path from the page to the page of all records, for a link.
///
/// # Errors
/// [`DocsError::Page`] if a comment has no end, or a table does not exist.
pub fn fill(
    page: &str,
    text: &str,
    tables: &[Table],
    records: Option<&str>,
) -> Result<String, DocsError> {
    let mut filled = String::new();
    let mut in_code = false;
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        filled += line;
        filled += "\n";
        in_code ^= is_fence(line);
        let Some(request) = request(line).filter(|_| !in_code) else { continue };
        let error =
            |problem: String| DocsError::Page { page: page.to_owned(), line: index + 1, problem };
        if !lines.by_ref().any(|(_, line)| line.trim() == END) {
            return Err(error(format!("the comment has no end; add `{END}` after it")));
        }
        match request {
            Request::Table { id, rows } => {
                let table = tables.iter().find(|table| table.id == id);
                let table = table.ok_or_else(|| error(format!("no table `{id}`")))?;
                let link = |records| format!(" ([more]({records}#{}))", anchor(&table.title));
                let link = records.map_or(String::new(), link);
                let source = format!("{}{link}.{}", table.source(), table.others(&rows));
                // Without a link to the record, the page has to name the measured quantity.
                if records.is_none() {
                    filled += &format!("{}\n\n", wrapped(&table.what, ""));
                }
                filled += &format!("{}\n{}\n", table.markdown(&rows)?, wrapped(&source, ""));
            }
            Request::Records => {
                let records: Vec<_> = tables.iter().map(Table::record).collect();
                filled += &format!("\n{}\n", records.join("\n"));
            }
        }
        filled += END;
        filled += "\n";
    }
    Ok(filled)
}

/// Returns true if a line begins or ends a code block.
fn is_fence(line: &str) -> bool {
    line.trim_start().starts_with("```")
}

/// Computes the anchor that GitHub gives a heading.
fn anchor(title: &str) -> String {
    let kept = title.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-');
    kept.collect::<String>().replace(' ', "-")
}

/// Returns the lines of a page that are neither generated nor code, with their numbers from 1.
pub fn written(text: &str) -> Vec<(usize, &str)> {
    let (mut in_generated, mut in_code) = (false, false);
    let mut written = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if is_fence(line) {
            in_code = !in_code;
            continue;
        }
        in_generated |= request(line).is_some() && !in_code;
        if !in_generated && !in_code {
            written.push((index + 1, line));
        }
        in_generated &= line.trim() != END;
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
    fn text_between_comments_is_generated() {
        let page = "# P\n<!-- table: t; b -->\nold 7\n<!-- end -->\nlast 1 us\n";
        let made = fill("p.md", page, &tables(), Some("b/README.md")).expect("a page");
        let expected = "# P\n<!-- table: t; b -->\n| name | us |\n| --- | --- |\n| b | 2 |\n\n\
            A machine; 2026-01-02, commit abc; `cargo x` ([more](b/README.md#a-t)).\n\
            <!-- end -->\nlast 1 us\n";
        assert_eq!(made, expected);
        assert_eq!(fill("p.md", &made, &tables(), Some("b/README.md")).expect("a page"), made);
        assert_eq!(written(&made), [(1, "# P"), (9, "last 1 us")]);
    }

    #[test]
    fn comments_in_code_blocks_are_ignored() {
        let page = "```text\n<!-- table: t -->\n<!-- end -->\n```\n7 us\n";
        assert_eq!(fill("p.md", page, &tables(), None).expect("a page"), page);
        assert_eq!(written(page), [(5, "7 us")]);
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
    fn an_unknown_table_or_a_missing_end_is_an_error() {
        for page in ["<!-- table: u -->\n<!-- end -->\n", "\n<!-- table: t -->\n"] {
            assert!(fill("p.md", page, &tables(), None).is_err(), "{page}");
        }
    }
}
