//! [`Sensitivity`]: the errors of every candidate for every group of weights.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::config::Fp4Config;
use crate::report_table::table;

use super::candidate::Candidate;

/// Errors that [`fp4_sensitivity`](crate::Fp4Module::fp4_sensitivity) measured.
///
/// Displayed it is a table. Serialized it has everything but the calibration.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{Candidate, Fp4Config, Fp4Module, ops::Fp4Scheme};
///
/// let layer = LinearConfig::new(64, 64).init(&Device::flex());
/// let candidates = [Candidate::Fp4(Fp4Scheme::nvfp4()), Candidate::Dense];
/// let sensitivity = layer.fp4_sensitivity(&Fp4Config::nvfp4(), &candidates)?;
/// let group = &sensitivity.groups[0];
/// let [packed, dense] = [&group.candidates[0], &group.candidates[1]];
/// assert!(group.bits(packed) < 4.6 && group.bits(dense) == 32.0);
/// assert_eq!((packed.error(), dense.error()), (None, Some(0.0))); // no calibration
/// assert!(sensitivity.html(None).contains("nvfp4/16"));
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sensitivity {
    /// The selected weights, those together that must have the same format, in the order of the
    /// first of each in the module.
    pub groups: Vec<GroupSensitivity>,
    /// How they were selected and quantized.
    pub config: Fp4Config,
}

/// Weights that have the same format: one, those that
/// [share a tensor scale](Fp4Config::share_scale), or those that are tied.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupSensitivity {
    /// Their paths.
    pub paths: Vec<String>,
    /// Number of their values.
    pub values: usize,
    /// The possible candidates, in the order asked for. The method is defined for them, and their
    /// blocks divide the weights: the configuration may [skip](crate::Indivisible::Skip) others.
    pub candidates: Vec<CandidateSensitivity>,
}

/// Bytes and errors of a candidate for a group. A dense candidate has errors of 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CandidateSensitivity {
    /// The candidate.
    pub candidate: Candidate,
    /// Bytes of the group.
    pub bytes: usize,
    /// `|dW|^2 / |W|^2`, summed over the group.
    pub weight_error: f64,
    /// `tr(dW^T H dW) / tr(W^T H W)` with the Gram matrices `H` of the calibrated inputs: the
    /// squared error of the outputs over their energy. Nothing if there are none of a weight, only
    /// blocks of them, or none of inputs other than zeros.
    pub output_error: Option<f64>,
    /// By how much the loss of a batch is expected to grow; see
    /// [`fp4_sensitivity_of_loss`](crate::Fp4Module::fp4_sensitivity_of_loss).
    pub loss: Option<f64>,
}

impl GroupSensitivity {
    /// Bits for each value.
    #[must_use]
    pub fn bits(&self, candidate: &CandidateSensitivity) -> f64 {
        8.0 * candidate.bytes as f64 / self.values as f64
    }
}

impl CandidateSensitivity {
    /// Returns the error by which candidates of different groups are compared: the loss if it is
    /// known, else the error of the outputs.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        self.loss.or(self.output_error)
    }
}

impl fmt::Display for Sensitivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = Vec::new();
        for group in &self.groups {
            for (at, candidate) in group.candidates.iter().enumerate() {
                let mut row = row(group, candidate);
                if at > 0 {
                    row[0].clear();
                }
                rows.push(row);
            }
        }
        let header = ["weights", "candidate", "bits", "weight %", "output %", "loss"];
        write!(
            f,
            "{}\nweight %, output %: error relative to the norm of the weight, of the outputs",
            table(header, rows, 2)
        )
    }
}

/// Returns the cells of a candidate. Errors are square roots, as in reports. A dense one has none.
pub(super) fn row(group: &GroupSensitivity, candidate: &CandidateSensitivity) -> [String; 6] {
    let percent = |error: f64| format!("{:.3}", 100.0 * error.sqrt());
    let errors = match candidate.candidate {
        Candidate::Dense => Default::default(),
        Candidate::Fp4(_) => [
            percent(candidate.weight_error),
            candidate.output_error.map_or(String::new(), percent),
            candidate.loss.map_or(String::new(), |loss| format!("{loss:.3e}")),
        ],
    };
    let [weight, outputs, loss] = errors;
    let bits = format!("{:.3}", group.bits(candidate));
    [group.paths.join("\n"), candidate.candidate.to_string(), bits, weight, outputs, loss]
}
