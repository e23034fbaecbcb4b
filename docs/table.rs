//! [`Table`]: figures with their source, and their table in Markdown.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Deserialize;

use crate::page::DocsError;

/// A cell: nothing, a number, or words.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Cell {
    /// Empty cell.
    Nothing(()),
    /// Figure.
    Number(serde_json::Number),
    /// Name, or a figure that is not a plain number.
    Words(String),
}

/// Figures that come from another run than the rest of the table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherRun {
    /// Names of rows or columns.
    pub of: Vec<String>,
    /// Date and commit of the other run, and its differences.
    pub run: String,
}

/// A file of `docs/benchmarks`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Name of the file, without `.json`.
    #[serde(skip)]
    pub id: String,
    /// Heading of the record.
    pub title: String,
    /// Measured quantity.
    pub what: String,
    /// Machine of the run.
    pub machine: String,
    /// Date of the run, as in `2026-11-21`.
    pub date: String,
    /// Commit of the run.
    pub commit: String,
    /// Command that prints the figures.
    pub command: String,
    /// Digits after the point, for columns in which numbers end in zeros.
    #[serde(default)]
    pub decimals: BTreeMap<String, usize>,
    /// Names of the columns, with units.
    pub columns: Vec<String>,
    /// Rows; the first cell of each is its name.
    pub rows: Vec<Vec<Cell>>,
    /// Rows and columns of other runs.
    #[serde(default)]
    pub other_runs: Vec<OtherRun>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

impl Table {
    /// Parses a file of figures.
    ///
    /// # Errors
    /// [`DocsError::Table`] if the JSON has another form, a row, date or column is malformed, or
    /// `other_runs` names a row or column that does not exist.
    pub fn read(id: &str, json: &str) -> Result<Self, DocsError> {
        let problem = |problem: String| DocsError::Table { id: id.to_owned(), problem };
        let mut table: Self = serde_json::from_str(json).map_err(|e| problem(e.to_string()))?;
        table.id = id.to_owned();
        let columns = table.columns.len();
        for row in &table.rows {
            if row.len() != columns {
                let found = row.len();
                return Err(problem(format!("expected {columns} cells, found {found}: {row:?}")));
            }
            if !matches!(row[0], Cell::Words(_)) {
                return Err(problem(format!("expected a name, found {:?}", row[0])));
            }
        }
        if let Some(name) = table.decimals.keys().find(|name| !table.columns.contains(name)) {
            return Err(problem(format!("`decimals`: column `{name}` does not exist")));
        }
        let mut named = table.other_runs.iter().flat_map(|other| &other.of);
        let is_unknown =
            |name: &&String| table.row(name).is_none() && !table.columns.contains(name);
        if let Some(name) = named.find(is_unknown) {
            return Err(problem(format!("`other_runs`: `{name}` is not a row or a column")));
        }
        let date = table.date.split('-').map(str::len).collect::<Vec<_>>();
        if date != [4, 2, 2] || !table.date.chars().all(|c| c == '-' || c.is_ascii_digit()) {
            return Err(problem(format!("expected a date such as 2026-11-21: {}", table.date)));
        }
        Ok(table)
    }

    /// Returns the figure of a row in a column, if it is a number.
    pub fn figure(&self, row: &str, column: &str) -> Option<f64> {
        let column = self.columns.iter().position(|name| name == column)?;
        match &self.row(row)?[column] {
            Cell::Number(number) => number.as_f64(),
            Cell::Nothing(()) | Cell::Words(_) => None,
        }
    }

    fn row(&self, name: &str) -> Option<&[Cell]> {
        let is = |row: &&Vec<Cell>| matches!(&row[0], Cell::Words(first) if first == name);
        self.rows.iter().find(is).map(Vec::as_slice)
    }

    /// Formats the table in Markdown: the named rows, or all rows if none are named.
    ///
    /// # Errors
    /// [`DocsError::Table`] if a row does not exist.
    pub fn markdown(&self, rows: &[&str]) -> Result<String, DocsError> {
        let mut text = line(self.columns.iter().map(String::as_str));
        text += &line(self.columns.iter().map(|_| "---"));
        let found = match rows {
            [] => self.rows.iter().map(Vec::as_slice).collect(),
            names => names
                .iter()
                .map(|name| {
                    let problem = format!("no row `{name}`");
                    self.row(name).ok_or(DocsError::Table { id: self.id.clone(), problem })
                })
                .collect::<Result<Vec<_>, _>>()?,
        };
        for row in found {
            let cells: Vec<_> =
                row.iter().zip(&self.columns).map(|(c, n)| self.cell(c, n)).collect();
            text += &line(cells.iter().map(String::as_str));
        }
        Ok(text)
    }

    fn cell(&self, cell: &Cell, column: &str) -> String {
        match (cell, self.decimals.get(column)) {
            (Cell::Nothing(()), _) => String::new(),
            (Cell::Words(words), _) => words.clone(),
            (Cell::Number(number), None) => number.to_string(),
            (Cell::Number(number), Some(&digits)) => {
                format!("{:.digits$}", number.as_f64().unwrap_or(f64::NAN))
            }
        }
    }

    /// Formats machine, date, commit and command, in a line of Markdown.
    pub fn source(&self) -> String {
        let Self { machine, date, commit, command, .. } = self;
        format!("{}; {date}, commit {commit}; `{command}`", capital(machine))
    }

    /// Formats a sentence for each other run that measured one of these rows, or any row without
    /// names. Each sentence follows a space.
    pub fn others(&self, rows: &[&str]) -> String {
        let mut text = String::new();
        for OtherRun { of, run } in &self.other_runs {
            let is_shown = |name: &&str| {
                rows.is_empty() || rows.contains(name) || self.columns.iter().any(|c| c == name)
            };
            let shown: Vec<_> = of.iter().map(String::as_str).filter(is_shown).collect();
            if !shown.is_empty() {
                // The run comes last: a line that starts with `1.`, as from "axis 1.", is a list.
                let _ = write!(text, " Of another run: {} ({run}).", shown.join("; "));
            }
        }
        text
    }

    /// Formats the record: heading, table, source and notes.
    pub fn record(&self) -> String {
        let mut text = format!("## {}\n\n{}\n\n", self.title, wrapped(&self.what, ""));
        text += &self.markdown(&[]).unwrap_or_default();
        let source = format!("{}.{}", self.source(), self.others(&[]));
        let _ = writeln!(text, "\n{}", wrapped(&source, ""));
        for note in &self.notes {
            let _ = writeln!(text, "\n- {}", wrapped(note, "  "));
        }
        let _ = writeln!(text, "\nFigures: [`{id}.json`]({id}.json).", id = self.id);
        text
    }
}

fn line<'a>(cells: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::from("|");
    for cell in cells {
        let _ = write!(text, " {cell} |");
    }
    text + "\n"
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    match letters.next() {
        // A backtick, as in `flex`, stays.
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => String::new(),
    }
}

/// Wraps a text at 100 characters and indents every line but the first. Code in backticks is not
/// broken.
pub(crate) fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    let mut in_code = false;
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match words.last_mut().filter(|_| in_code) {
            Some(last) => *last += &format!(" {word}"),
            None => words.push(word.to_owned()),
        }
        in_code ^= word.matches('`').count() % 2 == 1;
    }
    for word in words {
        let width = indent.len().max(2) + word.chars().count() + 1;
        let last = lines.last_mut().expect("a first line");
        if !last.is_empty() && last.chars().count() + width > 100 {
            lines.push(word);
        } else {
            *last += if last.is_empty() { "" } else { " " };
            *last += &word;
        }
    }
    lines.join(&format!("\n{indent}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(rows: &str) -> String {
        format!(
            r#"{{"title": "T", "what": "w", "machine": "m", "date": "2026-01-02", "commit": "c",
            "command": "x", "decimals": {{"us": 2}}, "columns": ["name", "us", "n"],
            "rows": {rows}, "notes": []}}"#
        )
    }

    #[test]
    fn figures_keep_their_decimals() {
        let table = Table::read("t", &json(r#"[["a", 1.5, 3], ["b", 2, null]]"#)).expect("a table");
        let all = "| name | us | n |\n| --- | --- | --- |\n| a | 1.50 | 3 |\n| b | 2.00 |  |\n";
        assert_eq!(table.markdown(&[]).expect("rows"), all);
        assert!(table.markdown(&["b"]).expect("a row").ends_with("| b | 2.00 |  |\n"));
        assert_eq!((table.figure("a", "us"), table.figure("b", "n")), (Some(1.5), None));
        assert!(table.markdown(&["c"]).is_err());
    }

    #[test]
    fn rows_and_columns_of_another_run_are_named() {
        let rows = r#"[["a", 1, 2], ["b", 3, 4]], "other_runs": [{"of": ["b", "n"], "run": "r"}]"#;
        let table = Table::read("t", &json(rows)).expect("a table");
        assert_eq!(table.others(&[]), " Of another run: b; n (r).");
        assert_eq!(table.others(&["a"]), " Of another run: n (r).");
        assert!(table.record().contains("`x`. Of another run: b; n (r).\n"));
        assert!(Table::read("t", &json(&rows.replace(r#""b", "n""#, r#""c""#))).is_err());
    }

    #[test]
    fn a_malformed_table_is_an_error() {
        for rows in [r#"[["a", 1.5]]"#, r#"[[1, 2, 3]]"#, r#"{}"#] {
            assert!(Table::read("t", &json(rows)).is_err(), "{rows}");
        }
        let none = [("2026-01-02", "2026-1"), (r#""us": 2"#, r#""ms": 2"#), ("title", "name")];
        for (known, other) in none {
            let json = json("[]").replace(known, other);
            assert!(Table::read("t", &json).is_err(), "{json}");
        }
    }

    #[test]
    fn lines_are_narrow_and_code_is_whole() {
        let text = format!("{}`two words` end", "word ".repeat(18));
        let lines = wrapped(&text, "  ");
        assert_eq!(lines.lines().count(), 2);
        assert!(lines.ends_with("\n  `two words` end"), "{lines}");
    }
}
