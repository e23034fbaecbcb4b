//! [`RecipeError`] and [`PolicyError`].

use std::path::PathBuf;

use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Method, ScaleRule, SearchError};

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
    #[error("{path}: {}{problem}", line_of(.line), path = .path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// Line, starting at 1; none if the problem names it, or is about no single line.
        line: Option<usize>,
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
    #[error("the recipe cannot be written as TOML: {0}; use paths in UTF-8 and smaller numbers")]
    NotToml(String),
    /// Weights are selected in two ways.
    #[error("`only` does not go with `preset`: both choose the weights; remove one of them")]
    OnlyWithPreset,
    /// A preset is for files alone.
    #[error("the preset `{0}` is for the files of its converter; choose another one for a module")]
    Preset(String),
    /// An entry does not name any weights.
    #[error("`weights` without `names`; add the names of weights")]
    Nameless,
    /// An entry names weights and chooses nothing for them.
    #[error(
        "weights `{weights}`: names without a choice; add a format, block size, method or rule, \
         or remove the table"
    )]
    NoChoice {
        /// The weights.
        weights: String,
    },
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
    #[error(
        "{}block size {found}: expected {}; choose one of these",
        of(.weights), sizes(.expected)
    )]
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

/// Reports why there is no decision about the weights of a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A pattern of a user matches nothing.
    #[error(
        "{list} pattern `{pattern}` matches none of {tensors} tensor{}{}",
        if *.tensors == 1 { "" } else { "s" }, hint(.pattern, .nearest, .first)
    )]
    NoMatch {
        /// Name of the list, as printed.
        list: &'static str,
        /// The pattern.
        pattern: String,
        /// Number of tensors.
        tensors: usize,
        /// The name of the first.
        first: String,
        /// A pattern that is spelt much like it and matches some.
        nearest: Option<String>,
    },
    /// A pattern has characters that other tools read as operators, or none at all.
    #[error("pattern `{pattern}`: {problem}")]
    Malformed {
        /// The pattern as the user has it.
        pattern: String,
        /// The characters, and what to write instead.
        problem: &'static str,
    },
    /// A pattern has no meaning.
    #[error("pattern `{pattern}`: {}", reason(.source))]
    Pattern {
        /// The pattern as the user or the file has it.
        pattern: String,
        /// Error of its regular expression.
        source: Box<regex::Error>,
    },
    /// Layers that inference engines fuse would have different formats.
    #[error(
        "`{weight}`: the dialect `{dialect}` cannot hold another format than that of layers that \
         run as one with it; say `together = false` to let them differ"
    )]
    OtherFormat {
        /// The dialect to be written.
        dialect: &'static str,
        /// The weight.
        weight: String,
    },
    /// Weights with one tensor scale would be quantized in different ways.
    #[error("{first} and {other} share a tensor scale; choose the same method and rule for both")]
    OtherScheme {
        /// A weight, with its method and rule.
        first: String,
        /// Another weight of its group.
        other: String,
    },
    /// A weight that a user has listed with others cannot share their tensor scale.
    #[error("`{weight}` shares its tensor scale, but {reason}")]
    SharedScale {
        /// The weight.
        weight: String,
        /// Why it cannot.
        reason: &'static str,
    },
    /// A method chooses a tensor scale where there is no place for one.
    #[error(
        "`{weight}`: method `{method}` chooses a tensor scale, and the dialect `{dialect}` has \
         none; choose the method `{}`",
        Method::SSE
    )]
    NoTensorScale {
        /// The dialect to be written.
        dialect: &'static str,
        /// The weight.
        weight: String,
        /// The method.
        method: Method,
    },
    /// Choices do not go together.
    #[error(transparent)]
    Scheme(#[from] SearchError),
}

impl RecipeError {
    /// Returns the place of the problem in a recipe: the weights of a table, or none for the
    /// choices for all weights; and the key.
    pub(crate) fn place(&self) -> Option<(Option<&str>, &'static str)> {
        match self {
            Self::OnlyWithPreset => Some((None, "only")),
            Self::Nameless => Some((Some(""), "names")),
            Self::NoChoice { weights } => Some((Some(weights), "names")),
            Self::Dense { weights } => Some((Some(weights), "format")),
            Self::Rule { weights, .. } => Some((weights.as_deref(), "rule")),
            Self::BlockSize { weights, .. } => Some((weights.as_deref(), "block-size")),
            Self::Method { weights, .. } | Self::Scheme { weights, .. } => {
                Some((weights.as_deref(), "method"))
            }
            Self::File { .. } | Self::In { .. } | Self::Syntax { .. } => None,
            Self::NotToml(_) | Self::Preset(_) => None,
        }
    }
}

fn line_of(line: &Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!("line {line}: "))
}

fn of(weights: &Option<String>) -> String {
    weights.as_ref().map_or_else(String::new, |weights| format!("weights `{weights}`: "))
}

fn sizes(expected: &[usize]) -> String {
    expected.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
}

/// Suggests a name for a pattern that matches nothing.
fn hint(pattern: &str, nearest: &Option<String>, first: &str) -> String {
    match nearest {
        None if pattern.contains(',') && !pattern.starts_with("re:") => {
            "; write a pattern for each name: a comma does not separate names".to_owned()
        }
        Some(nearest) => format!("; did you mean `{nearest}`?"),
        None => format!(", such as `{first}`; name some of them, or leave it out"),
    }
}

/// Describes a wrong expression in a line: the lines before the last repeat it.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default().trim();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}
