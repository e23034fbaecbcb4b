//! Errors of weights that were written against those that were read, measured while both are in
//! memory.
//!
//! The error of a weight is `|Wq - W| / |W|`. The mean of several is that of their errors: each
//! weight counts once, whatever its size.

use std::collections::BTreeMap;

use burn_fp4_checkpoints::{ALL_ZERO, DefectKind, Model, implausible};
use burn_fp4_search::Method;
use serde::Serialize;

use crate::counted::counted;
use crate::number::{number, optional};
use crate::percent::Percent;
use crate::remarks::{Remarks, Warning};
use crate::warnings;

/// Sums over a weight. A pair of squares, in f64, is of the change by quantization and of the
/// original.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Tally {
    /// Squares of its values.
    pub(crate) values: [f64; 2],
    /// Squares of the outputs of its layer, if statistics of its inputs are whole.
    pub(crate) outputs: Option<[f64; 2]>,
    /// Its blocks.
    pub(crate) blocks: Blocks,
    /// Sums of the choice that a warning may advise: the relative errors of blocks in MXFP4, and
    /// their number; of a cast to f16, the squares of one to bf16.
    pub(crate) other: [f64; 2],
    /// Matrices whose statistics were all zero, and all matrices.
    pub(crate) unseen: [u64; 2],
}

/// Counts of the blocks of a weight.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Blocks {
    /// All blocks. 0 for formats without a tensor scale, whose block scales reach any value.
    pub(crate) all: u64,
    /// Blocks that became zero though their values were not.
    pub(crate) zeroed: u64,
    /// Other blocks with one of the smallest scales, the subnormal numbers of their format.
    pub(crate) small: u64,
    /// The sum of the relative errors of blocks all over the weight, and their number.
    pub(crate) errors: [f64; 2],
    /// The largest magnitude of a value.
    pub(crate) peak: f64,
}

fn sum(a: [f64; 2], b: [f64; 2]) -> [f64; 2] {
    [a[0] + b[0], a[1] + b[1]]
}

impl Blocks {
    fn add(&mut self, other: Self) {
        self.all += other.all;
        self.zeroed += other.zeroed;
        self.small += other.small;
        self.errors = sum(self.errors, other.errors);
        self.peak = self.peak.max(other.peak);
    }

    /// A count of blocks, in percent of all.
    fn share(self, count: u64) -> Option<f64> {
        (self.all > 0).then(|| 100.0 * count as f64 / self.all as f64)
    }
}

impl Tally {
    /// Makes the sums of a weight of which only the squares of values are known.
    pub(crate) fn of_values(values: [f64; 2]) -> Self {
        Self { values, ..Self::default() }
    }

    /// Measures another choice, if a warning would advise one: more was lost than usual.
    pub(crate) fn with_other(self, other: impl FnOnce() -> [f64; 2]) -> Self {
        match WeightError::new("", &self).loss() {
            Some(_) => Self { other: other(), ..self },
            None => self,
        }
    }

    /// Adds the sums of another matrix of the same stack.
    pub(crate) fn add(&mut self, other: Self) {
        self.values = sum(self.values, other.values);
        self.outputs = self.outputs.into_iter().chain(other.outputs).reduce(sum);
        self.blocks.add(other.blocks);
        self.other = sum(self.other, other.other);
        self.unseen = [self.unseen[0] + other.unseen[0], self.unseen[1] + other.unseen[1]];
    }

    /// Describes the matrices that were quantized by [`Method::FALLBACK`], as their statistics are
    /// all zero.
    pub(crate) fn fallback(&self) -> Option<String> {
        let method = Method::FALLBACK;
        match self.unseen {
            [0, _] => None,
            [unseen, all] if unseen == all => {
                Some(format!("quantized by `{method}`: its statistics are all zero"))
            }
            [unseen, all] => Some(format!(
                "{unseen} of its {all} matrices quantized by `{method}`: their statistics are all \
                 zero"
            )),
        }
    }
}

/// The sums of a weight, by its place in the model.
pub(crate) type TallyAt = (usize, Tally);

/// The factor between the largest values of weights with one tensor scale above which it costs the
/// smaller one precision.
const APART: f64 = 16.0;

/// The factor by which another format or dtype must have the smaller error to be advised.
const BETTER: f64 = 0.9;

/// The errors of a run.
#[derive(Serialize)]
pub(crate) struct Errors {
    /// The mean of the errors of the weights, in percent. None: nothing was measured.
    #[serde(serialize_with = "optional")]
    mean_percent: Option<f64>,
    /// The weight with the largest error.
    worst: Option<WeightError>,
    /// The mean over the weights whose outputs are known.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "optional")]
    mean_output_percent: Option<f64>,
    /// Weights that an earlier run has written, whose errors only `fp4 compare` tells.
    not_measured: usize,
    weights: Vec<WeightError>,
}

/// The error of a weight.
#[derive(Serialize, Clone)]
struct WeightError {
    name: String,
    /// `|Wq - W| / |W|`.
    #[serde(serialize_with = "number")]
    error_percent: f64,
    /// The mean of the same over blocks, each of which counts once.
    #[serde(skip_serializing_if = "Option::is_none")]
    block_error_percent: Option<f64>,
    /// The same of these blocks in MXFP4, for a weight in NVFP4 that is warned of.
    #[serde(skip_serializing_if = "Option::is_none")]
    mxfp4_block_error_percent: Option<f64>,
    /// The same of the outputs of its layer.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "optional")]
    output_error_percent: Option<f64>,
    /// Blocks that became zero though their values were not, in percent of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    zeroed_blocks_percent: Option<f64>,
    /// Other blocks with one of the smallest scales, in percent of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    small_blocks_percent: Option<f64>,
}

impl WeightError {
    fn new(name: &str, tally: &Tally) -> Self {
        let Tally { values, outputs, blocks, other, .. } = tally;
        let mean = |[sum, count]: [f64; 2]| (count > 0.0).then(|| 100.0 * sum / count);
        let of_blocks = mean(blocks.errors);
        Self {
            name: name.to_owned(),
            error_percent: Percent::of(*values).0,
            block_error_percent: of_blocks,
            // Not of a stack of which only some matrices were measured.
            mxfp4_block_error_percent: of_blocks
                .filter(|_| other[1] == blocks.errors[1])
                .and_then(|_| mean(*other)),
            output_error_percent: outputs.map(|outputs| Percent::of(outputs).0),
            zeroed_blocks_percent: blocks.share(blocks.zeroed),
            small_blocks_percent: blocks.share(blocks.small),
        }
    }

    /// Describes what was lost, with the kind of the warning. None: no more than usual.
    fn loss(&self) -> Option<(&'static str, String)> {
        let (error, of_blocks) = (self.error_percent, self.block_error_percent.unwrap_or(0.0));
        let [zeroed, small] =
            [self.zeroed_blocks_percent, self.small_blocks_percent].map(|p| p.unwrap_or(0.0));
        let usual = warnings::USUAL[usize::from(self.small_blocks_percent.is_none())];
        let (unusual, shown) = (of_blocks > usual, Percent(error));
        if error > warnings::ERROR {
            Some(("large-error", format!("its error is {shown}")))
        } else if zeroed > warnings::ZEROED {
            let what = format!(
                "{} of its blocks become zero: next to its largest value they are below the range \
                 of NVFP4",
                Percent(zeroed)
            );
            Some(("zeroed-blocks", what))
        } else if unusual && of_blocks > warnings::HIDDEN * error {
            let mut what = format!(
                "its error of {shown} is that of its largest values; the mean error of its blocks \
                 is {}",
                Percent(of_blocks)
            );
            if small > 0.0 {
                let share = Percent(small);
                what.push_str(&format!(
                    ", and {share} of their scales are too small to be precise"
                ));
            }
            Some(("hidden-error", what))
        } else if unusual && small + zeroed > warnings::SMALL {
            let share = Percent(small);
            let what = format!(
                "{share} of its block scales are too small to be precise, and its error is {shown}"
            );
            Some(("small-scales", what))
        } else {
            None
        }
    }

    /// Names the choices that lose less, as far as errors were measured.
    fn remedy(&self) -> String {
        let keep = format!("pass --keep '{}' to `fp4 quantize` to keep it", self.name);
        match (self.block_error_percent, self.mxfp4_block_error_percent) {
            (Some(own), Some(other)) if other < BETTER * own => {
                let other = Percent(other);
                format!(
                    "{keep}, or --format mxfp4, in which the mean error of its blocks is {other}"
                )
            }
            _ => keep,
        }
    }
}

/// A weight that shares its tensor scale with another one, whose largest value is far beyond its
/// own.
struct Neighbor<'m> {
    name: &'m str,
    /// The largest value of the other one by its own.
    times: f64,
}

impl Errors {
    /// Makes percents of the sums of quantized weights, by their places in the model, and warns of
    /// those that lost much. The weights of a group share a tensor scale.
    pub(crate) fn of_quantized(
        model: &Model<'_>,
        groups: &[Vec<usize>],
        measured: Vec<TallyAt>,
        remarks: &mut Remarks,
    ) -> Self {
        let quantized: usize = groups.iter().map(Vec::len).sum();
        let errors = Self::new(model, quantized.saturating_sub(measured.len()), &measured);
        errors.warn_of_losses(model, groups, &measured, remarks);
        let zero = |(_, tally): &&TallyAt| tally.values == [0.0; 2];
        let zero = measured.iter().filter(zero).map(|(at, _)| model.weights[*at].name.clone());
        remarks.warn_all(DefectKind::AllZero.name(), zero.collect(), ALL_ZERO);
        errors
    }

    /// Warns of weights that lose much by quantization, before it by what some of their blocks
    /// lose. The weights of a group share a tensor scale.
    pub(crate) fn warn_of_trial(
        model: &Model<'_>,
        groups: &[Vec<usize>],
        measured: &[TallyAt],
        remarks: &mut Remarks,
    ) {
        Self::new(model, 0, measured).warn_of_losses(model, groups, measured, remarks);
    }

    fn warn_of_losses(
        &self,
        model: &Model<'_>,
        groups: &[Vec<usize>],
        measured: &[TallyAt],
        remarks: &mut Remarks,
    ) {
        let tallies: BTreeMap<usize, &Tally> = measured.iter().map(|(at, t)| (*at, t)).collect();
        let mut lost: Vec<_> = tallies
            .iter()
            .zip(&self.weights)
            .filter_map(|((at, _), weight)| Some((*at, weight, weight.loss()?)))
            .collect();
        lost.sort_by(|(_, a, _), (_, b, _)| b.error_percent.total_cmp(&a.error_percent));
        for (at, weight, (kind, what)) in lost {
            let remedy = match neighbor(model, groups, &tallies, at) {
                Some(Neighbor { name: other, times }) => {
                    let times = match times < 1e5 {
                        true => format!("{times:.0}"),
                        false => format!("{times:.0e}"),
                    };
                    format!(
                        "it shares its tensor scale with `{other}`, whose largest value is {times} \
                         times its own; set `together = false` in a recipe, or pass --keep \
                         '{other}'"
                    )
                }
                None => weight.remedy(),
            };
            remarks.warn(Warning::of(kind, &weight.name, format!("{what}; {remedy}")));
        }
        for (&at, tally) in &tallies {
            if let Some((kind, what)) = implausible(tally.blocks.peak as f32) {
                remarks.warn(Warning::of(kind.name(), &model.weights[at].name, what));
            }
        }
    }

    /// Makes percents of the sums of matrices that a dtype was cast to, and warns of those that
    /// lost much.
    pub(crate) fn of_casts(
        model: &Model<'_>,
        mut measured: Vec<TallyAt>,
        remarks: &mut Remarks,
    ) -> Self {
        measured.sort_by_key(|(at, _)| *at);
        let errors = Self::new(model, 0, &measured);
        let lost = errors.weights.iter().zip(&measured);
        let mut lost: Vec<_> =
            lost.filter(|(weight, _)| weight.error_percent > warnings::CAST_ERROR).collect();
        lost.sort_by(|(a, _), (b, _)| b.error_percent.total_cmp(&a.error_percent));
        for (WeightError { name, error_percent, .. }, (_, tally)) in lost {
            let (error, in_bf16) = (Percent(*error_percent), Percent::of(tally.other));
            // Of other casts no other dtype was measured.
            let better = tally.other[1] > 0.0 && in_bf16.0 < BETTER * error.0;
            let remedy = match better {
                true => format!("pass --cast-kept bf16, which changes it by {in_bf16}"),
                false => "leave out --cast-kept, which keeps its dtype".to_owned(),
            };
            let what = format!("the cast changes it by {error}; {remedy}");
            remarks.warn(Warning::of("cast-error", name, what));
        }
        errors
    }

    /// Warns of weights without an error of outputs where others have one. Another warning has
    /// named the `unusable` ones already.
    pub(crate) fn warn_of_outputs(&self, unusable: &[String], remarks: &mut Remarks) {
        if self.mean_output_percent.is_none() {
            return;
        }
        let without = self.weights.iter().filter(|weight| weight.output_error_percent.is_none());
        let names = without.map(|weight| weight.name.clone());
        let names = names.filter(|name| !unusable.contains(name)).collect();
        let what = "the error of its outputs is not measured and not in their mean, as there is no \
                    whole `X^T X` of its inputs; calibrate again to have it";
        remarks.warn_all("no-output-error", names, what);
    }

    fn new(model: &Model<'_>, not_measured: usize, measured: &[TallyAt]) -> Self {
        let mut measured: Vec<&TallyAt> = measured.iter().collect();
        measured.sort_by_key(|(at, _)| *at);
        let error = |(at, tally): &&TallyAt| WeightError::new(&model.weights[*at].name, tally);
        let weights: Vec<WeightError> = measured.iter().map(error).collect();
        let worst = weights.iter().max_by(|a, b| a.error_percent.total_cmp(&b.error_percent));
        Self {
            mean_percent: mean(weights.iter().map(|weight| weight.error_percent)),
            worst: worst.cloned(),
            mean_output_percent: mean(weights.iter().filter_map(|w| w.output_error_percent)),
            not_measured,
            weights,
        }
    }

    /// Weights that were measured.
    pub(crate) fn count(&self) -> usize {
        self.weights.len()
    }

    /// Says the errors in a line.
    pub(crate) fn summary(&self) -> String {
        let (Some(mean), Some(worst)) = (self.mean_percent, &self.worst) else {
            return "no error is known, as an earlier run wrote everything; use fp4 compare"
                .to_owned();
        };
        let (mean, most) = (Percent(mean), Percent(worst.error_percent));
        let mut text = format!("mean error {mean}, worst {most}, {}", worst.name);
        if let Some(outputs) = self.mean_output_percent {
            text.push_str(&format!("; mean error of outputs {}", Percent(outputs)));
            let known = self.weights.iter().filter(|weight| weight.output_error_percent.is_some());
            let known = known.count();
            if known < self.count() {
                text.push_str(&format!(" (of {known} of {})", counted(self.count(), "weight")));
            }
        }
        match self.not_measured {
            0 => {}
            count => text.push_str(&format!(" (without {count} that an earlier run quantized)")),
        }
        text
    }
}

/// Finds the weight with the largest values among those that share a tensor scale with one, if they
/// are far beyond its own.
fn neighbor<'m>(
    model: &'m Model<'_>,
    groups: &[Vec<usize>],
    tallies: &BTreeMap<usize, &Tally>,
    at: usize,
) -> Option<Neighbor<'m>> {
    let peak = |at: usize| tallies.get(&at).map(|tally| tally.blocks.peak);
    let group = groups.iter().find(|group| group.contains(&at))?;
    let others = group.iter().filter(|&&other| other != at);
    let others = others.filter_map(|&other| Some((peak(other)?, other)));
    let (largest, other) = others.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    let times = largest / peak(at)?;
    (times >= APART).then(|| Neighbor { name: &model.weights[other].name, times })
}

/// Returns the mean of errors. None: there are none.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0_usize, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / count as f64)
}

/// Returns the bits of each of some values.
pub(crate) fn bits(bytes: usize, values: usize) -> f64 {
    8.0 * bytes as f64 / values.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mxfp4_is_advised_only_where_its_error_is_smaller_by_a_tenth() {
        let remedy = |in_mxfp4: f64| {
            let blocks = Blocks { errors: [12.5, 100.0], ..Blocks::default() };
            let tally = Tally { blocks, other: [in_mxfp4, 100.0], ..Tally::default() };
            WeightError::new("w", &tally).remedy()
        };
        let kept = "pass --keep 'w' to `fp4 quantize` to keep it";
        for in_mxfp4 in [11.4, 12.5, 20.0] {
            assert_eq!(remedy(in_mxfp4), kept);
        }
        let advised = remedy(11.0);
        assert!(advised.starts_with(&format!("{kept}, or --format mxfp4")), "{advised}");
    }
}
