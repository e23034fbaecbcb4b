//! Why something cannot be quantized as asked, or a recipe be used.

use std::path::PathBuf;

use burn_fp4_formats::{FormatError, Fp4Format};

use crate::method::{Method, ScaleSearch};
use crate::rule::ScaleRule;

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
    /// A weight of an input channel is not usable.
    #[error("the weight of input channel {channel} is {found}: it must be finite and not negative")]
    Weight {
        /// The channel.
        channel: usize,
        /// Its weight.
        found: f32,
    },
    /// A Hessian is not one.
    #[error("{}: element ({row}, {col}), {found}, {problem}", matrix_name(.block))]
    Hessian {
        /// Which block; none for a Gram matrix.
        block: Option<usize>,
        /// Row of the element.
        row: usize,
        /// Column of the element.
        col: usize,
        /// Its value.
        found: f64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// An activation is not finite.
    #[error("activation of row {row}, channel {channel} is {found}")]
    Activation {
        /// Which row.
        row: usize,
        /// Which channel.
        channel: usize,
        /// Its value.
        found: f32,
    },
    /// A search does not use the importance given.
    #[error("ScaleSearch::{search:?} takes {expected}, found {found}")]
    Importance {
        /// The search.
        search: ScaleSearch,
        /// What it takes.
        expected: &'static str,
        /// What was given.
        found: &'static str,
    },
    /// The damping of GPTQ is not usable.
    #[error("damping is {found}: it must be finite and not negative")]
    Damping {
        /// The damping.
        found: f64,
    },
    /// A Gram matrix has no Cholesky factor.
    #[error(
        "the Gram matrix of the activations is singular: give some damping, or more activations"
    )]
    Singular,
    /// A name is not a known method.
    #[error("unknown method `{0}`")]
    UnknownMethod(String),
    /// A weight to quantize is NaN or infinite.
    #[error("a value is not finite: {found}")]
    NonFinite {
        /// The value.
        found: f32,
    },
    /// A method that needs activations was given none.
    #[error("method `{method}` needs activations")]
    Uncalibrated {
        /// The method.
        method: Method,
    },
}

/// Why a [`Recipe`](crate::Recipe) cannot be used.
///
/// `weights` are those that the choice is for; none if it is for all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: std::io::Error,
    },
    /// Something is wrong in a file.
    #[error("{path}: {problem}", path = .path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: Box<RecipeError>,
    },
    /// A text is no recipe.
    #[error("line {line}: {problem}")]
    Syntax {
        /// Where, from 1 on.
        line: usize,
        /// Why.
        problem: String,
    },
    /// A recipe cannot be written as TOML.
    #[error("the recipe cannot be written as TOML: {0}")]
    NotToml(String),
    /// Two ways to say which weights.
    #[error("`only` cannot be used with `preset`: it is instead of one")]
    OnlyWithPreset,
    /// A preset is not known, or not for this.
    #[error("{0}")]
    Preset(String),
    /// Something is said of no weights.
    #[error("`weights` without `names`")]
    Nameless,
    /// Dense weights are said to be quantized somehow.
    #[error("weights `{weights}`: dense ones have no method, rule or block size")]
    Dense {
        /// The weights.
        weights: String,
    },
    /// A rule is for another format.
    #[error("{}the rule `{rule}` is for {}, not {format}", of(.weights), .rule.row().format)]
    Rule {
        /// The weights.
        weights: Option<String>,
        /// The rule.
        rule: ScaleRule,
        /// The format chosen.
        format: Fp4Format,
    },
    /// A format does not have blocks of this size.
    #[error("{}block size {found}: expected {}", of(.weights), sizes(.expected))]
    BlockSize {
        /// The weights.
        weights: Option<String>,
        /// Sizes that the format has.
        expected: &'static [usize],
        /// The size chosen.
        found: usize,
    },
    /// A method is not defined for the format.
    #[error("{}method `{method}` is not defined for {format}", of(.weights))]
    Method {
        /// The weights.
        weights: Option<String>,
        /// The method.
        method: Method,
        /// The format chosen.
        format: Fp4Format,
    },
    /// Other choices do not go together.
    #[error("{}{problem}", of(.weights))]
    Scheme {
        /// The weights.
        weights: Option<String>,
        /// Why.
        problem: SearchError,
    },
}

fn of(weights: &Option<String>) -> String {
    weights.as_ref().map_or_else(String::new, |weights| format!("weights `{weights}`: "))
}

fn matrix_name(block: &Option<usize>) -> String {
    block.map_or_else(|| "Gram matrix".to_owned(), |block| format!("Hessian of block {block}"))
}

fn sizes(expected: &[usize]) -> String {
    expected.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
}
