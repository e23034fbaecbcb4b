//! [`Table`]: figures with where they come from, and what Markdown makes of them.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Deserialize;

use crate::page::DocsError;

/// A cell: nothing, a number, or words.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Cell {
    /// Not measured, or without a meaning.
    Nothing(()),
    /// A figure.
    Number(serde_json::Number),
    /// A name, or a figure that is no plain number.
    Words(String),
}

/// Rows and columns that another run measured.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherRun {
    /// Names of rows or columns.
    pub of: Vec<String>,
    /// Its date and commit, and what was different.
    pub run: String,
}

/// A file of `docs/benchmarks`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The name of the file, without `.json`.
    #[serde(skip)]
    pub id: String,
    /// A heading.
    pub title: String,
    /// The quantity that was measured.
    pub what: String,
    /// On what.
    pub machine: String,
    /// When the figures were recorded, `2026-11-21`.
    pub date: String,
    /// The commit that recorded them.
    pub commit: String,
    /// The command that prints them.
    pub command: String,
    /// Digits after the point, for columns in which numbers end in zeros.
    #[serde(default)]
    pub decimals: BTreeMap<String, usize>,
    /// Names of the columns, with units.
    pub columns: Vec<String>,
    /// The first cell of each is its name.
    pub rows: Vec<Vec<Cell>>,
    /// Rows and columns that are not of that date and commit.
    #[serde(default)]
    pub other_runs: Vec<OtherRun>,
    /// Other facts that a reader needs.
    pub notes: Vec<String>,
}

impl Table {
    /// The table of a file.
    ///
    /// # Errors
    /// [`DocsError::Table`] for JSON of another form, for rows, dates or columns that are none, and
    /// for other runs of what is not in the table.
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
            return Err(problem(format!("`decimals` names no column `{name}`")));
        }
        let mut named = table.other_runs.iter().flat_map(|other| &other.of);
        let is_unknown =
            |name: &&String| table.row(name).is_none() && !table.columns.contains(name);
        if let Some(name) = named.find(is_unknown) {
            return Err(problem(format!("`other_runs` names no row and no column `{name}`")));
        }
        let date = table.date.split('-').map(str::len).collect::<Vec<_>>();
        if date != [4, 2, 2] || !table.date.chars().all(|c| c == '-' || c.is_ascii_digit()) {
            return Err(problem(format!("expected a date such as 2026-11-21: {}", table.date)));
        }
        Ok(table)
    }

    /// The figure of a row in a column, if it is a plain number.
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

    /// The table in Markdown; of some rows if they are named.
    ///
    /// # Errors
    /// [`DocsError::Table`] for a row that does not exist.
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

    /// Machine, date, commit and command, in a line of Markdown.
    fn source(&self) -> String {
        let Self { machine, date, commit, command, .. } = self;
        format!("{}; {date}, commit {commit}; `{command}`", capital(machine))
    }

    /// Rows and columns that other runs measured: a sentence for each run, behind a space.
    fn others(&self) -> String {
        let mut text = String::new();
        for OtherRun { of, run } in &self.other_runs {
            // The run comes last: a line that began with `1.`, of "axis 1.", would be a list.
            let _ = write!(text, " Of another run: {} ({run}).", of.join("; "));
        }
        text
    }

    /// Heading, table, source and notes.
    pub fn record(&self) -> String {
        let mut text = format!("## {}\n\n{}\n\n", self.title, wrapped(&self.what, ""));
        text += &self.markdown(&[]).unwrap_or_default();
        let source = format!("{}.{}", self.source(), self.others());
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
        // Code such as `flex` keeps its case.
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => String::new(),
    }
}

/// Breaks a text into lines of at most 100 characters, the second and later ones behind `indent`; a
/// piece of code stays whole.
fn wrapped(text: &str, indent: &str) -> String {
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
    fn a_table_is_its_figures_with_their_digits() {
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
        assert!(table.record().contains("`x`. Of another run: b; n (r).\n"));
        assert!(Table::read("t", &json(&rows.replace(r#""b", "n""#, r#""c""#))).is_err());
    }

    #[test]
    fn what_is_no_table_is_an_error() {
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
