//! The findings of a comparison, and the sentences about them.

use serde::Serialize;

use crate::accuracy::mean;
use crate::counted::counted;
use crate::number::optional;
use crate::percent::Percent;
use crate::remarks::Remarks;

/// The findings of a comparison.
#[derive(Serialize)]
pub(super) struct Report {
    /// The path of A.
    pub(super) a: String,
    /// The path of B.
    pub(super) b: String,
    /// The largest relative error that is no difference, in percent.
    pub(super) tolerance_percent: f64,
    /// The mean error of quantized weights that can be compared, in percent. None: there are none.
    #[serde(serialize_with = "optional")]
    pub(super) quantized_error_percent: Option<f64>,
    /// The mean error of the others.
    #[serde(serialize_with = "optional")]
    pub(super) kept_error_percent: Option<f64>,
    /// Weights in both that differ by more than the tolerance.
    pub(super) different: usize,
    /// Weights in both that cannot be compared.
    pub(super) not_comparable: usize,
    /// In the natural order of their names.
    pub(super) weights: Vec<Row>,
    pub(super) only_in_a: Vec<String>,
    pub(super) only_in_b: Vec<String>,
    /// Counts of each code in the FP4 weights of B, or of A if B has none.
    pub(super) codes: [u64; 16],
    #[serde(flatten)]
    pub(super) remarks: Remarks,
    /// The last line that is printed.
    pub(super) verdict: String,
}

/// The relation of the two forms of a weight.
#[derive(Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Relation {
    /// Every value is the same.
    Same,
    /// They differ by no more than the tolerance.
    Within,
    /// They differ by more.
    Different,
    /// There is no error: shapes differ, or values that are no numbers.
    NotComparable,
}

/// A weight that both have.
#[derive(Serialize, Clone)]
pub(super) struct Row {
    pub(super) name: String,
    /// Its format in A.
    pub(super) a: String,
    /// Its format in B.
    pub(super) b: String,
    /// The shape in A.
    pub(super) shape: Vec<usize>,
    /// True if it is FP4 in A or B, or has another quantized format in one of them.
    pub(super) quantized: bool,
    pub(super) relation: Relation,
    /// None: they cannot be compared.
    #[serde(serialize_with = "optional")]
    pub(super) error_percent: Option<f64>,
    #[serde(serialize_with = "optional")]
    pub(super) largest_difference: Option<f64>,
    /// Why they cannot be compared, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
}

impl Row {
    /// The name without `.weight`.
    pub(super) fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }
}

impl Report {
    /// Sets the means and the verdict, once all weights are known.
    pub(super) fn conclude(&mut self) {
        let mean_of = |quantized| {
            let rows = self.weights.iter();
            mean(rows.filter(|row| row.quantized == quantized).filter_map(|row| row.error_percent))
        };
        [self.quantized_error_percent, self.kept_error_percent] = [true, false].map(mean_of);
        self.verdict = self.verdict_of();
    }

    /// Returns true if anything differs, is missing or cannot be compared.
    pub(super) fn finds_difference(&self) -> bool {
        let missing = self.only_in_a.len() + self.only_in_b.len();
        self.different + self.not_comparable + missing > 0
    }

    /// The weights with the largest errors first, behind those that cannot be compared.
    pub(super) fn worst(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.weights.iter().collect();
        let key = |row: &Row| (row.error_percent.is_none(), row.error_percent.unwrap_or(0.0));
        rows.sort_by(|a, b| {
            let ((no_a, a_percent), (no_b, b_percent)) = (key(a), key(b));
            let worse = no_b.cmp(&no_a).then(b_percent.total_cmp(&a_percent));
            worse.then(a.name.cmp(&b.name))
        });
        rows
    }

    /// Counts the weights by how they relate, the quantized ones apart from the others.
    pub(super) fn counts(&self) -> String {
        let of =
            |quantized: bool| self.weights.iter().filter(move |row| row.quantized == quantized);
        let related = |quantized: bool| {
            let parts = [
                (Relation::Same, "the same"),
                (Relation::Within, "within the tolerance"),
                (Relation::Different, "different"),
                (Relation::NotComparable, "not comparable"),
            ];
            let count = |relation| of(quantized).filter(|row| row.relation == relation).count();
            let counts = parts.map(|(relation, what)| (count(relation), what));
            let there = counts.into_iter().filter(|(count, _)| *count > 0);
            there.map(|(count, what)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
        };
        let mut text = Vec::new();
        match [of(true).count(), of(false).count()] {
            [0, 0] => {}
            [0, all] => text.push(format!("{}: {}", counted(all, "weight"), related(false))),
            [all, others] => {
                text.push(format!("{}: {}", counted(all, "quantized weight"), related(true)));
                if others > 0 {
                    let others = counted(others, "other weight");
                    text.push(format!("{others}: {}", related(false)));
                }
            }
        }
        for (names, side) in [(&self.only_in_a, "A"), (&self.only_in_b, "B")] {
            if !names.is_empty() {
                text.push(format!("{} only in {side}", counted(names.len(), "weight")));
            }
        }
        text.join("; ")
    }

    /// States the mean errors of quantized and of other weights, in a line, if some are quantized.
    pub(super) fn errors(&self) -> Option<String> {
        let quantized = Percent(self.quantized_error_percent?);
        let others =
            self.kept_error_percent.map(|kept| format!(", of the others {}", Percent(kept)));
        let others = others.unwrap_or_default();
        Some(format!("mean error of quantized weights {quantized}{others}"))
    }

    /// States the largest error, and whether it is within the tolerance.
    fn verdict_of(&self) -> String {
        let tolerance = format!("{} %", self.tolerance_percent);
        let mut worst = self.worst().into_iter();
        let worst = worst.find_map(|row| Some((row, row.error_percent?)));
        let Some((worst, error)) = worst else {
            let why = self.weights.iter().find_map(|row| row.problem.as_deref());
            let why = why.unwrap_or("A and B have no weight in common");
            return format!("no weight could be compared: {why}");
        };
        let (error, name) = (Percent(error), &worst.name);
        let mut text = match worst.relation {
            Relation::Same => "all values that were compared are the same".to_owned(),
            Relation::Within => {
                format!("largest error {error}, {name}: within the tolerance of {tolerance}")
            }
            Relation::Different | Relation::NotComparable => {
                format!("largest error {error}, {name}: beyond the tolerance of {tolerance}")
            }
        };
        if self.not_comparable > 0 {
            let count = counted(self.not_comparable, "weight");
            text.push_str(&format!("; {count} could not be compared"));
        }
        let alone = self.only_in_a.len() + self.only_in_b.len();
        if alone > 0 {
            text.push_str(&format!("; {} only in A or B", counted(alone, "weight")));
        }
        text
    }
}
