//! What a comparison finds.

use serde::Serialize;

/// What a comparison finds.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) left: String,
    pub(super) right: String,
    /// Relative error of all weights together, in percent.
    pub(super) error_percent: f64,
    pub(super) different: usize,
    pub(super) weights: Vec<Row>,
    pub(super) only_left: Vec<String>,
    pub(super) only_right: Vec<String>,
    /// How often each code stands in the FP4 weights of B, or of A if B has none.
    pub(super) codes: [u64; 16],
}

/// A weight that both have.
#[derive(Serialize, Clone)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) left: String,
    pub(super) right: String,
    pub(super) error_percent: f64,
    pub(super) largest_difference: f64,
    /// Why there is no error, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) problem: Option<String>,
}

impl Report {
    /// The weights with the largest errors first.
    pub(super) fn worst(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.weights.iter().collect();
        let key = |row: &Row| match row.problem {
            Some(_) => f64::INFINITY,
            None => row.error_percent,
        };
        rows.sort_by(|a, b| key(b).total_cmp(&key(a)).then(a.name.cmp(&b.name)));
        rows
    }
}
