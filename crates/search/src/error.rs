//! [`SearchError`] and [`RecipeError`].

use std::path::PathBuf;

use burn_fp4_formats::{FormatError, Fp4Format};

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
    /// A name is not a known rule.
    #[error("unknown scale rule `{0}`; choose one of {known}", known = rules())]
    UnknownRule(String),
    /// A weight of an input channel is not usable.
    #[error("the weight of input channel {channel} is {found}: it must be finite and not negative")]
    Weight {
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

/// Reports why a [`Recipe`](crate::Recipe) cannot be used.
///
/// `weights` names the weights of an entry; none for the choices for all weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// A file holds a wrong recipe.
    #[error("{path}: {problem}", path = .path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// Problem of the recipe.
        problem: Box<RecipeError>,
    },
    /// A text is not a recipe.
    #[error("line {line}: {problem}")]
    Syntax {
        /// Line, starting at 1.
        line: usize,
        /// Problem of the line.
        problem: String,
    },
    /// A recipe cannot be written as TOML.
    #[error("the recipe cannot be written as TOML: {0}")]
    NotToml(String),
    /// Weights are selected in two ways.
    #[error("`only` does not go with `preset`: both choose the weights; remove one of them")]
    OnlyWithPreset,
    /// A preset is unknown, or not usable here.
    #[error("{0}")]
    Preset(String),
    /// An entry does not name any weights.
    #[error("`weights` without `names`; add the names of weights")]
    Nameless,
    /// Dense weights have choices for quantization.
    #[error(
        "weights `{weights}`: dense ones have no method, rule or block size; remove these, or the \
         format"
    )]
    Dense {
        /// The weights.
        weights: String,
    },
    /// A rule is for another format.
    #[error(
        "{}the rule `{rule}` is for {}, not {format}; choose another rule or format",
        of(.weights), .rule.row().format
    )]
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
    #[error(
        "{}method `{method}` is not defined for {format}; choose another method or format",
        of(.weights)
    )]
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
        /// Problem of the choices.
        problem: SearchError,
    },
}

fn rules() -> String {
    ScaleRule::ALL.map(|rule| rule.row().name).join(", ")
}

fn methods() -> String {
    Method::NAMED.map(|row| row.name).join(", ")
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
