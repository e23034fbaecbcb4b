//! The errors of a method on a weight, and tables of them.

use burn_fp4_search::Method;
use burn_fp4_search::formats::Fp4Format;
use serde::Serialize;

use crate::fold::{Folded, fold};
use crate::number::number;
use crate::table::{self, Column, ColumnOrder};

/// A method on a weight.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Evaluation {
    /// The weight, without `.weight`.
    pub(crate) name: String,
    /// The format.
    pub(crate) format: Fp4Format,
    /// Elements of a block.
    pub(crate) block: usize,
    /// The method.
    pub(crate) method: Method,
    /// The damping, where one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) damping: Option<f64>,
    /// The result.
    #[serde(flatten)]
    pub(crate) outcome: EvaluationResult,
}

/// The errors of a method on a weight, or the reason why it failed.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum EvaluationResult {
    /// It ran.
    Measured(Figures),
    /// It did not.
    Failed {
        /// The reason.
        error: String,
    },
}

/// The errors of a method on a weight.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    /// `|Wq - W| / |W|`.
    #[serde(serialize_with = "number")]
    pub(crate) weight_error_percent: f64,
    /// `|X (Wq - W)^T| / |X W^T|` of the calibration activations.
    #[serde(serialize_with = "number")]
    pub(crate) calibration_error_percent: f64,
    /// The same of the evaluation activations.
    #[serde(serialize_with = "number")]
    pub(crate) evaluation_error_percent: f64,
    /// `-20 log10` of the weight error.
    #[serde(serialize_with = "number")]
    pub(crate) sqnr_db: f64,
    /// Time to quantize, with the sums over activations that the method needs.
    pub(crate) seconds: f64,
}

impl Evaluation {
    /// The method, as tables and plots name it.
    pub(crate) fn label(&self) -> String {
        match self.damping {
            Some(damping) => format!("{} {damping}", self.method),
            None => self.method.to_string(),
        }
    }

    /// The figures, if the method ran.
    pub(crate) fn figures(&self) -> Option<&Figures> {
        match &self.outcome {
            EvaluationResult::Measured(figures) => Some(figures),
            EvaluationResult::Failed { .. } => None,
        }
    }

    /// Why the method failed.
    pub(crate) fn error(&self) -> Option<&str> {
        match &self.outcome {
            EvaluationResult::Measured(_) => None,
            EvaluationResult::Failed { error } => Some(error),
        }
    }
}

/// Folds evaluations of names that differ in numbers alone, with the means of their figures.
pub(crate) fn folded(evaluations: &[Evaluation]) -> Vec<Evaluation> {
    let names = evaluations.iter().map(|one| {
        let key = (one.format.row().name, one.block, one.label(), one.error());
        (one.name.as_str(), key)
    });
    let row = |folded: Folded| {
        let members = || folded.members.iter().map(|&at| &evaluations[at]);
        let first = &evaluations[folded.members[0]];
        let figures: Vec<&Figures> = members().filter_map(Evaluation::figures).collect();
        let outcome = match figures.is_empty() {
            true => first.outcome.clone(),
            false => EvaluationResult::Measured(Figures::mean(&figures)),
        };
        Evaluation { name: folded.name.clone(), outcome, ..first.clone() }
    };
    fold(names).into_iter().map(row).collect()
}

impl Figures {
    /// Takes the mean of each figure.
    fn mean(all: &[&Self]) -> Self {
        let mean =
            |of: fn(&Self) -> f64| all.iter().map(|one| of(one)).sum::<f64>() / all.len() as f64;
        Self {
            weight_error_percent: mean(|one| one.weight_error_percent),
            calibration_error_percent: mean(|one| one.calibration_error_percent),
            evaluation_error_percent: mean(|one| one.evaluation_error_percent),
            sqnr_db: mean(|one| one.sqnr_db),
            seconds: mean(|one| one.seconds),
        }
    }
}

/// The method and its error on other activations go last.
const ORDER: ColumnOrder<'_> = ColumnOrder {
    first: &["SQNR\ndB", "seconds", "calibration\nerror, %", "weight\nerror, %"],
    then: &[],
    last: &["format"],
};

/// Lays out a row for each evaluation.
pub(crate) fn table(evaluations: &[Evaluation], width: Option<u16>) -> String {
    let columns = [
        ("weight", Column::Name),
        ("format", Column::Name),
        ("method", Column::Name),
        ("weight\nerror, %", Column::Figure),
        ("calibration\nerror, %", Column::Figure),
        ("evaluation\nerror, %", Column::Figure),
        ("SQNR\ndB", Column::Figure),
        ("seconds", Column::Figure),
    ];
    let row = |evaluation: &Evaluation| {
        let format = format!("{} {}", evaluation.format, evaluation.block);
        let mut row = vec![evaluation.name.clone(), format, evaluation.label()];
        match &evaluation.outcome {
            EvaluationResult::Measured(figures) => row.extend([
                format!("{:.3}", figures.weight_error_percent),
                format!("{:.3}", figures.calibration_error_percent),
                format!("{:.3}", figures.evaluation_error_percent),
                format!("{:.2}", figures.sqnr_db),
                format!("{:.3}", figures.seconds),
            ]),
            EvaluationResult::Failed { .. } => row.extend(["failed"; 5].map(str::to_owned)),
        }
        row
    };
    table::table(&columns, &ORDER, evaluations.iter().map(row).collect(), width)
}
