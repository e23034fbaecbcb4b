//! Errors of weights that were written against those that were read, measured while both are in
//! memory.
//!
//! The error of a weight is `|Wq - W| / |W|`. The mean of several is that of their errors: each
//! weight counts once, whatever its size.

use burn_fp4_checkpoints::Model;
use burn_fp4_search::Method;
use serde::Serialize;

use crate::counted::counted;
use crate::percent::Percent;

/// Sums over a weight. Squares are those of what quantization changed and of what was there, in
/// f64.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Tally {
    /// Squares of its values.
    pub(crate) values: [f64; 2],
    /// Squares of the outputs of its layer, if statistics of its inputs are whole.
    pub(crate) outputs: Option<[f64; 2]>,
    /// Blocks that became zero though their values were not, and all blocks. Both are 0 for formats
    /// without a tensor scale, whose block scales reach any value.
    pub(crate) zeroed: [u64; 2],
    /// Matrices whose statistics were all zero, and all matrices.
    pub(crate) unseen: [u64; 2],
}

impl Tally {
    /// Makes the sums of a weight of which only the squares of values are known.
    pub(crate) fn of_values(values: [f64; 2]) -> Self {
        Self { values, ..Self::default() }
    }

    /// Adds the sums of another matrix of the same stack.
    pub(crate) fn add(&mut self, other: Self) {
        let sum = |a: [f64; 2], b: [f64; 2]| [a[0] + b[0], a[1] + b[1]];
        let count = |a: [u64; 2], b: [u64; 2]| [a[0] + b[0], a[1] + b[1]];
        self.values = sum(self.values, other.values);
        self.outputs = self.outputs.into_iter().chain(other.outputs).reduce(sum);
        self.zeroed = count(self.zeroed, other.zeroed);
        self.unseen = count(self.unseen, other.unseen);
    }

    /// Describes the matrices that were quantized by the default method, as their statistics are
    /// all zero.
    pub(crate) fn fallback(&self) -> Option<String> {
        let method = Method::default();
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

/// Percent above which an error is warned of: what NVFP4 and MXFP4 leave of any usual weight is
/// 8 to 12.
const WARNED: f64 = 20.0;

/// The same for a cast: bf16 rounds by 0.2 at most, unless values are too small for the dtype.
const CAST_WARNED: f64 = 1.0;

/// Percent of the blocks of a weight above which zeros that were no zeros are warned of. Weights of
/// trained models have none: their largest value is not half a million times that of a block.
const ZEROED_WARNED: f64 = 1.0;

/// Warnings that are printed one by one.
const SHOWN: usize = 5;

/// The errors of a run.
#[derive(Serialize)]
pub(crate) struct Errors {
    /// The mean of the errors of the weights, in percent. None: nothing was measured.
    mean_percent: Option<f64>,
    /// The weight with the largest error.
    worst: Option<WeightError>,
    /// The mean over the weights whose outputs are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_output_percent: Option<f64>,
    /// Weights that an earlier run has written, whose errors only `fp4 compare` tells.
    not_measured: usize,
    weights: Vec<WeightError>,
    /// The lines that are printed about them.
    warnings: Vec<String>,
}

/// The error of a weight.
#[derive(Serialize, Clone)]
struct WeightError {
    name: String,
    /// `|Wq - W| / |W|`.
    error_percent: f64,
    /// The same of the outputs of its layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_error_percent: Option<f64>,
    /// Blocks that became zero though their values were not, in percent of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    zeroed_blocks_percent: Option<f64>,
}

impl Errors {
    /// Makes percents of the sums of quantized weights, by their places in the model.
    /// `not_measured` more were changed.
    pub(crate) fn of_quantized(
        model: &Model<'_>,
        not_measured: usize,
        measured: Vec<TallyAt>,
    ) -> Self {
        let mut errors = Self::new(model, not_measured, measured);
        let text = |name: &str, error: Percent| {
            format!("`{name}`: its error is {error}; pass --keep '{name}' to keep it")
        };
        errors.warnings = errors.beyond(WARNED, "an error", |weight| weight.error_percent, text);
        // The error of other weights is that of their largest values alone.
        let zeroed = |weight: &WeightError| match weight.error_percent > WARNED {
            true => 0.0,
            false => weight.zeroed_blocks_percent.unwrap_or(0.0),
        };
        let text = |name: &str, share: Percent| {
            format!(
                "`{name}`: {share} of its blocks became zero: next to its largest value they are \
                 below the range of NVFP4; pass --keep '{name}' to keep it, or --format mxfp4, \
                 whose scales reach further"
            )
        };
        errors.warnings.extend(errors.beyond(ZEROED_WARNED, "blocks of zeros", zeroed, text));
        errors
    }

    /// Makes percents of the sums of matrices that a dtype was cast to.
    pub(crate) fn of_casts(model: &Model<'_>, measured: Vec<TallyAt>) -> Self {
        let mut errors = Self::new(model, 0, measured);
        let text = |name: &str, error: Percent| {
            format!("`{name}`: the cast changes it by {error}; leave out --cast-kept")
        };
        let error = |weight: &WeightError| weight.error_percent;
        errors.warnings = errors.beyond(CAST_WARNED, "an error", error, text);
        errors
    }

    fn new(model: &Model<'_>, not_measured: usize, mut measured: Vec<TallyAt>) -> Self {
        measured.sort_by_key(|(at, _)| *at);
        let share = |[zeroed, all]: [u64; 2]| (all > 0).then(|| 100.0 * zeroed as f64 / all as f64);
        let error = |(at, tally): TallyAt| WeightError {
            name: model.weights[at].name.clone(),
            error_percent: Percent::of(tally.values).0,
            output_error_percent: tally.outputs.map(|outputs| Percent::of(outputs).0),
            zeroed_blocks_percent: share(tally.zeroed),
        };
        let weights: Vec<WeightError> = measured.into_iter().map(error).collect();
        let worst = weights.iter().max_by(|a, b| a.error_percent.total_cmp(&b.error_percent));
        Self {
            mean_percent: mean(weights.iter().map(|weight| weight.error_percent)),
            worst: worst.cloned(),
            mean_output_percent: mean(weights.iter().filter_map(|w| w.output_error_percent)),
            not_measured,
            weights,
            warnings: Vec::new(),
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
        let mut text = format!("mean error {mean}, worst {most} {}", worst.name);
        if let Some(outputs) = self.mean_output_percent {
            text.push_str(&format!("; mean error of outputs {}", Percent(outputs)));
        }
        match self.not_measured {
            0 => {}
            count => text.push_str(&format!(" (without {count} that an earlier run quantized)")),
        }
        text
    }

    /// The warnings about these weights, the worst first.
    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Adds a warning about some of the weights.
    pub(crate) fn warn(&mut self, warning: String) {
        self.warnings.push(warning);
    }

    /// Describes the weights of which some share is beyond some percent, the worst first.
    fn beyond(
        &self,
        percent: f64,
        what: &str,
        share: impl Fn(&WeightError) -> f64,
        describe: impl Fn(&str, Percent) -> String,
    ) -> Vec<String> {
        let mut far: Vec<(f64, &WeightError)> =
            self.weights.iter().map(|weight| (share(weight), weight)).collect();
        far.retain(|(share, _)| *share > percent);
        far.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let warning =
            |(share, weight): &(f64, &WeightError)| describe(&weight.name, Percent(*share));
        let mut warnings: Vec<String> = far.iter().take(SHOWN).map(warning).collect();
        if far.len() > SHOWN {
            let more = counted(far.len() - SHOWN, "more weight");
            warnings.push(format!("{what} beyond {percent} %: {more}; --json lists all"));
        }
        warnings
    }
}

/// Returns the mean of errors. None: there are none.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0_usize, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / count as f64)
}
