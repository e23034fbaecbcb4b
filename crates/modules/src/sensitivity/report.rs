//! [`Sensitivity`]: the errors of every candidate for every group of weights.

use core::fmt;

use burn_fp4_policy::fold::{Folded, fold};
use serde::{Deserialize, Serialize};

use crate::config::Fp4Config;
use crate::report_table::table;

use super::candidate::Candidate;

/// Errors that [`fp4_sensitivity`](crate::Fp4Module::fp4_sensitivity) measured.
///
/// Displays a table with a row for each pattern of names; `{:#}` has a row for each group.
/// Serialized it has everything but the calibration.
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
/// println!("{sensitivity}");
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
        let groups = self.groups.iter();
        let alone = |(at, group)| Folded::alone(first(group), at);
        let folded: Vec<Folded> = match f.alternate() {
            true => groups.enumerate().map(alone).collect(),
            false => fold(groups.map(|group| {
                let known = |one: &CandidateSensitivity| {
                    (one.candidate.to_string(), one.output_error.is_some(), one.loss.is_some())
                };
                let candidates: Vec<_> = group.candidates.iter().map(known).collect();
                (first(group), (others(group), candidates))
            })),
        };
        let mut rows = Vec::new();
        for Folded { name, members } in &folded {
            let members: Vec<_> = members.iter().map(|&at| &self.groups[at]).collect();
            let group = &united(&members);
            let paths: Vec<_> = core::iter::once(name.clone()).chain(others(group)).collect();
            for (at, candidate) in group.candidates.iter().enumerate() {
                let mut row = row(group, candidate);
                row[0] = if at == 0 { paths.join("\n") } else { String::new() };
                rows.push(row);
            }
        }
        let header = ["weights", "candidate", "bits", "weight %", "output %", "loss"];
        write!(
            f,
            "{}\nweight %, output %: error relative to the norm of the weight, of the outputs",
            table(header, rows, 2)
        )?;
        if folded.iter().any(|folded| folded.members.len() > 1) {
            f.write_str(
                "\na row of several weights: their largest errors, the sum of their losses",
            )?;
        }
        Ok(())
    }
}

/// Returns the first path of a group.
fn first(group: &GroupSensitivity) -> &str {
    group.paths.first().map_or("", String::as_str)
}

/// Returns all paths of a group but the first, each without the components that it shares with the
/// first.
fn others(group: &GroupSensitivity) -> Vec<String> {
    let own = |path: &String| {
        let parts = path.split('.').zip(first(group).split('.'));
        let shared = parts.take_while(|(one, other)| one == other);
        let begin: usize = shared.map(|(part, _)| part.len() + 1).sum();
        format!("+ {}", path.get(begin..).unwrap_or(path))
    };
    group.paths.iter().skip(1).map(own).collect()
}

/// Returns groups with the same candidates as one: their bytes, largest errors and sum of losses.
fn united(groups: &[&GroupSensitivity]) -> GroupSensitivity {
    // NaN is the largest.
    let largest = |all: f64, one: f64| if one.is_nan() { one } else { all.max(one) };
    let mut united = groups[0].clone();
    for group in &groups[1..] {
        united.values += group.values;
        for (all, one) in united.candidates.iter_mut().zip(&group.candidates) {
            all.bytes += one.bytes;
            all.weight_error = largest(all.weight_error, one.weight_error);
            all.output_error =
                all.output_error.zip(one.output_error).map(|(all, one)| largest(all, one));
            all.loss = all.loss.zip(one.loss).map(|(all, one)| all + one);
        }
    }
    united
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

#[cfg(test)]
mod tests {
    use burn_fp4_ops::Fp4Scheme;

    use super::*;

    fn group(paths: &[String], weight_error: f64, loss: Option<f64>) -> GroupSensitivity {
        let candidate = Candidate::Fp4(Fp4Scheme::nvfp4());
        let of = |candidate, weight_error, loss| CandidateSensitivity {
            candidate,
            bytes: 36,
            weight_error,
            output_error: None,
            loss,
        };
        let dense = of(Candidate::Dense, 0.0, Some(0.0));
        let candidates = vec![of(candidate, weight_error, loss), dense];
        GroupSensitivity { paths: paths.to_vec(), values: 64, candidates }
    }

    #[test]
    fn groups_of_one_pattern_are_a_row_with_the_largest_errors_and_the_sum_of_losses() {
        let family =
            |layer: usize| ["attn.q", "attn.k"].map(|name| format!("layers.{layer}.{name}.weight"));
        let groups = vec![
            group(&family(0), 0.01, Some(0.5)),
            group(&family(1), 0.04, Some(0.25)),
            group(&["head.weight".to_owned()], 0.0225, None),
        ];
        let sensitivity = Sensitivity { groups, config: Fp4Config::nvfp4() };
        let folded = sensitivity.to_string();
        let lines: Vec<&str> = folded.lines().collect();
        assert!(lines[2].starts_with("layers.{0..1}.attn.q.weight"), "{folded}");
        assert!(lines[3].starts_with("+ k.weight"), "{folded}");
        let figures: Vec<&str> = lines[2].split_whitespace().skip(1).collect();
        assert_eq!(figures, ["nvfp4/16", "4.500", "20.000", "7.500e-1"], "{folded}");
        assert!(folded.contains("15.000"), "{folded}");
        assert!(folded.ends_with("the sum of their losses"), "{folded}");
        let all = format!("{sensitivity:#}");
        for own in ["layers.0.attn.q.weight", "layers.1.attn.q.weight", "5.000e-1", "2.500e-1"] {
            assert!(all.contains(own), "{all}");
        }
        assert!(!all.contains("the sum of"), "{all}");
        // What is known of one layer alone is not lost.
        let mut apart = sensitivity;
        apart.groups[1].candidates[0].output_error = Some(0.09);
        let apart = apart.to_string();
        for own in ["layers.0.attn.q.weight", "layers.1.attn.q.weight", "30.000"] {
            assert!(apart.contains(own), "{apart}");
        }
    }
}
