use burn_fp4_formats::FormatError;

use crate::ScaleRule;

/// Why something cannot be quantized as asked.
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
        /// Why.
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
    /// A name is not a known rule.
    #[error("unknown scale rule `{0}`")]
    UnknownRule(String),
}
