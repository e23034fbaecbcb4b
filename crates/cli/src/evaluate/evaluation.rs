//! What a method reaches on a weight, and all of that as a table.

use burn_fp4_search::Method;
use burn_fp4_search::formats::Fp4Format;
use comfy_table::Table;
use serde::Serialize;

use crate::table::{self, Column};

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
    /// What came of it.
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// What a method reaches on a weight, or why it does not.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    /// It ran.
    Measured(Figures),
    /// It did not.
    Failed {
        /// What was wrong.
        error: String,
    },
}

/// What a method reaches on a weight.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    /// `|Wq - W| / |W|`.
    pub(crate) weight_error_percent: f64,
    /// `|X (Wq - W)^T| / |X W^T|` of the calibration activations.
    pub(crate) calibration_error_percent: f64,
    /// The same of the evaluation activations.
    pub(crate) evaluation_error_percent: f64,
    /// `-20 log10` of the weight error.
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

    /// Why the method failed.
    pub(crate) fn error(&self) -> Option<&str> {
        match &self.outcome {
            Outcome::Measured(_) => None,
            Outcome::Failed { error } => Some(error),
        }
    }
}

/// One row an evaluation.
pub(crate) fn table(evaluations: &[Evaluation]) -> Table {
    let mut header = vec![
        ("name", Column::Name),
        ("format", Column::Name),
        ("block", Column::Figure),
        ("method", Column::Name),
        ("weight %", Column::Figure),
        ("calibration %", Column::Figure),
        ("evaluation %", Column::Figure),
        ("SQNR dB", Column::Figure),
        ("seconds", Column::Figure),
    ];
    if evaluations.iter().any(|evaluation| evaluation.error().is_some()) {
        header.push(("error", Column::Text));
    }
    let mut table = table::table(&header);
    for evaluation in evaluations {
        let mut row = vec![
            evaluation.name.clone(),
            evaluation.format.to_string(),
            evaluation.block.to_string(),
            evaluation.label(),
        ];
        match &evaluation.outcome {
            Outcome::Measured(figures) => row.extend([
                format!("{:.3}", figures.weight_error_percent),
                format!("{:.3}", figures.calibration_error_percent),
                format!("{:.3}", figures.evaluation_error_percent),
                format!("{:.2}", figures.sqnr_db),
                format!("{:.3}", figures.seconds),
            ]),
            Outcome::Failed { error } => {
                row.extend(["-"; 5].map(str::to_owned));
                row.push(error.clone());
            }
        }
        table.add_row(row);
    }
    table
}
