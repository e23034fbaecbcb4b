//! Warnings and notes of a command: one list of each, which is printed and in `--json`.

use std::collections::BTreeMap;
use std::fmt::Display;

use burn_fp4_checkpoints::Defect;
use burn_fp4_checkpoints::selection;
use serde::Serialize;

use crate::counted::counted;
use crate::print;
use crate::warnings::is_kind;

/// A warning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Warning {
    /// The name of its kind, which stays the same from version to version.
    pub(crate) kind: &'static str,
    /// The weights that it is about. Empty: it is about the whole.
    pub(crate) weights: Vec<String>,
    /// The sentence that is printed.
    pub(crate) text: String,
}

/// Warnings of a kind that are printed; `--json` has all of them.
const SHOWN: usize = 5;

/// Warnings and notes.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Remarks {
    warnings: Vec<Warning>,
    notes: Vec<String>,
    #[serde(skip)]
    printed: Printed,
}

/// Numbers of warnings and notes that are printed, or left out of what is printed.
#[derive(Debug, Clone, Default)]
struct Printed {
    warnings: usize,
    notes: usize,
}

impl Remarks {
    /// Adds a warning.
    pub(crate) fn warn(&mut self, warning: impl Into<Warning>) {
        let warning = warning.into();
        debug_assert!(is_kind(warning.kind), "{}", warning.kind);
        self.warnings.push(warning);
    }

    /// Adds warnings.
    pub(crate) fn warn_each(&mut self, warnings: impl IntoIterator<Item: Into<Warning>>) {
        warnings.into_iter().for_each(|warning| self.warn(warning));
    }

    /// Adds a warning about weights of which the same is true, if there are any.
    pub(crate) fn warn_all(&mut self, kind: &'static str, weights: Vec<String>, what: &str) {
        let others = match weights.len() {
            0 => return,
            1 => String::new(),
            count => format!(" (and {})", counted(count - 1, "more weight")),
        };
        let text = format!("`{}`{others}: {what}", weights[0]);
        self.warn(Warning { kind, weights, text });
    }

    /// Adds a note.
    pub(crate) fn note(&mut self, note: impl Display) {
        self.notes.push(note.to_string());
    }

    /// Adds notes.
    pub(crate) fn note_each(&mut self, notes: impl IntoIterator<Item: Display>) {
        notes.into_iter().for_each(|note| self.note(note));
    }

    /// Adds the warnings and notes of other remarks, as if not printed.
    pub(crate) fn append(&mut self, mut others: Self) {
        self.warnings.append(&mut others.warnings);
        self.notes.append(&mut others.notes);
    }

    /// The notes that are not yet printed.
    pub(crate) fn notes(&self) -> &[String] {
        &self.notes[self.printed.notes..]
    }

    /// The warnings as lines: the first of each kind, and how many more there are.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines_after(0)
    }

    /// Prints the notes and warnings that are not yet printed.
    pub(crate) fn print(&mut self) {
        self.print_notes();
        self.print_warnings();
    }

    /// Prints the notes that are not yet printed.
    pub(crate) fn print_notes(&mut self) {
        self.notes().iter().for_each(print::note);
        self.printed.notes = self.notes.len();
    }

    /// Prints the warnings that are not yet printed.
    pub(crate) fn print_warnings(&mut self) {
        self.lines_after(self.printed.warnings).iter().for_each(print::warn);
        self.printed.warnings = self.warnings.len();
    }

    fn lines_after(&self, first: usize) -> Vec<String> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut lines = Vec::new();
        for Warning { kind, text, .. } in &self.warnings[first..] {
            let count = counts.entry(kind).or_default();
            *count += 1;
            if *count <= SHOWN {
                lines.push(text.clone());
            }
        }
        for (kind, count) in counts.into_iter().filter(|(_, count)| *count > SHOWN) {
            let more = counted(count - SHOWN, "more warning");
            lines.push(format!("{more} of the kind `{kind}`; --json lists all"));
        }
        lines
    }
}

impl From<Defect> for Warning {
    fn from(defect: Defect) -> Self {
        let (kind, text) = (defect.kind.name(), defect.to_string());
        Self { kind, weights: defect.weights, text }
    }
}

impl From<&selection::Warning> for Warning {
    fn from(warning: &selection::Warning) -> Self {
        let weights = warning.weights().to_vec();
        Self { kind: warning.kind(), weights, text: warning.to_string() }
    }
}

impl Warning {
    /// Makes a warning about a weight, whose name is before the text.
    pub(crate) fn of(kind: &'static str, weight: &str, what: impl Display) -> Self {
        Self { kind, weights: vec![weight.to_owned()], text: format!("`{weight}`: {what}") }
    }

    /// Makes a warning about the whole.
    pub(crate) fn of_all(kind: &'static str, text: impl Display) -> Self {
        Self { kind, weights: Vec::new(), text: text.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_warnings_of_a_kind_the_first_are_printed_and_all_are_listed() {
        let mut remarks = Remarks::default();
        remarks.warn(Warning::of_all("stays", "one"));
        (0..7).for_each(|at| remarks.warn(Warning::of("all-zero", &at.to_string(), "x")));
        let lines = remarks.lines();
        assert_eq!(lines.len(), 7);
        assert_eq!(lines[..2], ["one", "`0`: x"]);
        assert_eq!(lines[6], "2 more warnings of the kind `all-zero`; --json lists all");
        let json = serde_json::to_value(&remarks).expect("an object");
        assert_eq!(json["warnings"].as_array().map(Vec::len), Some(8));
        let first = serde_json::json!({"kind": "all-zero", "weights": ["0"], "text": "`0`: x"});
        assert_eq!(json["warnings"][1], first);
        remarks.print();
        assert!(remarks.lines_after(remarks.printed.warnings).is_empty());
        assert_eq!(remarks.lines(), lines);
    }
}
