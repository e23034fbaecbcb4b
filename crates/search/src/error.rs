//! [`SearchError`].

use burn_fp4_formats::FormatError;

use crate::method::Method;
use crate::rule::ScaleRule;

/// Reports why a tensor cannot be quantized as asked.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SearchError {
    /// Block size, divisibility or length.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Two choices of a scheme exclude each other.
    #[error("{choice} does not go with rule `{rule}`: {reason}")]
    Scheme {
        /// The rule of the scheme.
        rule: ScaleRule,
        /// The choice that does not fit.
        choice: &'static str,
        /// Reason.
        reason: &'static str,
    },
    /// A given amax or multiplier is not usable.
    #[error("the given {what} is {found}: it must be finite and positive")]
    TensorScale {
        /// `amax` or `multiplier`.
        what: &'static str,
        /// The value given.
        found: f32,
    },
    /// A Hadamard transform of this size is not known.
    #[error("a Hadamard transform of {found} is not known; choose one of {expected:?}")]
    HadamardSize {
        /// The sizes there are.
        expected: &'static [usize],
        /// The size given.
        found: usize,
    },
    /// An engine was given a scheme with a transform.
    #[error(
        "the scheme has a Hadamard transform, which is for weights; transform the values before, \
         and give the scheme without it"
    )]
    Untransformed,
    /// Second moments of the inputs are not enough where these are transformed.
    #[error(
        "a Hadamard transform of the inputs needs X^T X, not the mean square of each channel; \
         leave the transform out, or gather X^T X"
    )]
    TransformedMoments,
    /// A name is not a known rule.
    #[error("unknown scale rule `{0}`; choose one of {known}", known = rules())]
    UnknownRule(String),
    /// A weight of an input channel is not usable.
    #[error("the weight of input channel {channel} is {found}: it must be finite and not negative")]
    ChannelWeight {
        /// The channel.
        channel: usize,
        /// Its weight.
        found: f32,
    },
    /// A Hessian or Gram matrix is not valid.
    #[error("{}: element ({row}, {col}), {found}, {problem}", matrix_name(.block))]
    Hessian {
        /// Number of the block; none for a Gram matrix.
        block: Option<usize>,
        /// Row of the element.
        row: usize,
        /// Column of the element.
        col: usize,
        /// Its value.
        found: f64,
        /// Problem of the element.
        problem: &'static str,
    },
    /// An activation is not finite.
    #[error("activation of row {row}, channel {channel} is {found}; leave that row out")]
    Activation {
        /// Row of the activation.
        row: usize,
        /// Channel of the activation.
        channel: usize,
        /// Its value.
        found: f32,
    },
    /// A search does not use the importance given.
    #[error("method `{method}` takes {expected}, found {found}")]
    Importance {
        /// The method.
        method: Method,
        /// Importance that the search takes.
        expected: &'static str,
        /// Importance that was given.
        found: &'static str,
    },
    /// Keys and values of a KV cache have different formats.
    #[error("KV cache: keys are {keys} and values {values}; use one format")]
    KvFormats {
        /// Format of the keys.
        keys: String,
        /// Format of the values.
        values: String,
    },
    /// The damping of GPTQ is not usable.
    #[error("damping is {found}: it must be finite and not negative")]
    Damping {
        /// The damping.
        found: f64,
    },
    /// The correction of GPTQ is not usable.
    #[error("correction is {found}; give a share from 0 to 1")]
    Correction {
        /// The correction.
        found: f64,
    },
    /// The drift of activations is not finite.
    #[error(
        "the drift of the activations is {found}; check the dense activations for NaN and infinity"
    )]
    Drift {
        /// The first such value.
        found: f32,
    },
    /// A Gram matrix has no Cholesky factor.
    #[error(
        "the Gram matrix of the activations is singular: give some damping, or more activations"
    )]
    Singular,
    /// A name is not a known method.
    #[error("unknown method `{0}`; choose one of {known}", known = methods())]
    UnknownMethod(String),
    /// A weight to quantize is NaN or infinite.
    #[error("a value is not finite: {found}")]
    NonFinite {
        /// The value.
        found: f32,
    },
    /// A method that needs activations was given none.
    #[error("method `{method}` needs activations; give some, or choose another method")]
    Uncalibrated {
        /// The method.
        method: Method,
    },
}

fn rules() -> String {
    ScaleRule::ALL.map(|rule| rule.row().name).join(", ")
}

fn methods() -> String {
    Method::NAMED.map(|row| row.name).join(", ")
}

fn matrix_name(block: &Option<usize>) -> String {
    block.map_or_else(|| "Gram matrix".to_owned(), |block| format!("Hessian of block {block}"))
}
