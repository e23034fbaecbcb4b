//! Errors of weights that were written against those that were read, measured while both are in
//! memory.
//!
//! The error of a weight is `|Wq - W| / |W|`. The mean of several is that of their errors: each
//! weight counts once, whatever its size.

use burn_fp4_checkpoints::Model;
use serde::Serialize;

use crate::counted::counted;
use crate::percent::Percent;

/// Sums of squares over a weight: of what quantization changed, and of what was there, in f64.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Squares {
    /// Sums over its values.
    pub(crate) values: [f64; 2],
    /// Sums over the outputs of its layer, if statistics of its inputs are whole.
    pub(crate) outputs: Option<[f64; 2]>,
}

impl Squares {
    /// Adds the sums of another matrix of the same stack.
    pub(crate) fn add(&mut self, other: Self) {
        let sum = |a: [f64; 2], b: [f64; 2]| [a[0] + b[0], a[1] + b[1]];
        self.values = [self.values, other.values].into_iter().fold([0.0; 2], sum);
        self.outputs = self.outputs.into_iter().chain(other.outputs).reduce(sum);
    }
}

/// The sums of a weight, by its place in the model.
pub(crate) type SquaresAt = (usize, Squares);

/// Percent above which an error is warned of: what NVFP4 and MXFP4 leave of any usual weight is
/// 8 to 12.
const WARNED: f64 = 20.0;

/// The same for a cast: bf16 rounds by 0.2 at most, unless values are too small for the dtype.
const CAST_WARNED: f64 = 1.0;

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
}

impl Errors {
    /// Makes percents of sums, by the places of weights in the model. `not_measured` more were
    /// changed.
    pub(crate) fn new(
        model: &Model<'_>,
        not_measured: usize,
        mut measured: Vec<SquaresAt>,
    ) -> Self {
        measured.sort_by_key(|(at, _)| *at);
        let error = |(at, squares): SquaresAt| WeightError {
            name: model.weights[at].name.clone(),
            error_percent: Percent::of(squares.values).0,
            output_error_percent: squares.outputs.map(|outputs| Percent::of(outputs).0),
        };
        let weights: Vec<WeightError> = measured.into_iter().map(error).collect();
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

    /// Warns of weights that FP4 has no good values for, the worst first.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.beyond(WARNED, |name, error| {
            format!("`{name}`: its error is {error}; pass --keep '{name}' to keep it")
        })
    }

    /// Warns of weights that a dtype has no good values for, the worst first.
    pub(crate) fn cast_warnings(&self) -> Vec<String> {
        self.beyond(CAST_WARNED, |name, error| {
            format!("`{name}`: the cast changes it by {error}; leave out --cast-kept")
        })
    }

    /// Describes the errors beyond some percent, the worst first.
    fn beyond(&self, percent: f64, describe: impl Fn(&str, Percent) -> String) -> Vec<String> {
        let far = self.weights.iter().filter(|weight| weight.error_percent > percent);
        let mut far: Vec<&WeightError> = far.collect();
        far.sort_by(|a, b| b.error_percent.total_cmp(&a.error_percent));
        let warning = |weight: &&WeightError| describe(&weight.name, Percent(weight.error_percent));
        let mut warnings: Vec<String> = far.iter().take(SHOWN).map(warning).collect();
        if far.len() > SHOWN {
            let more = counted(far.len() - SHOWN, "more weight");
            warnings.push(format!("an error beyond {percent} %: {more}; --json lists all"));
        }
        warnings
    }
}

/// Returns the mean of errors. None: there are none.
pub(crate) fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, sum) = values.fold((0_usize, 0.0), |(count, sum), value| (count + 1, sum + value));
    (count > 0).then(|| sum / count as f64)
}
