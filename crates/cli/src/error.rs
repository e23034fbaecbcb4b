//! What can be wrong, named so that a user can mend it.

use std::path::PathBuf;

use burn_fp4_search::SearchError;

/// What ends a command with exit code 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: std::io::Error,
    },
    /// A file is not safetensors.
    #[error("{path}: not a safetensors file: {source}", path = .path.display())]
    Container {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: safetensors::SafeTensorError,
    },
    /// There is no weight to evaluate.
    #[error("{path}: no tensor is named `<name>.weight`; found {found}", path = .path.display())]
    NoWeights {
        /// The file.
        path: PathBuf,
        /// What is there instead.
        found: String,
    },
    /// A tensor is missing.
    #[error("tensor `{name}` is missing: {reason}")]
    Missing {
        /// Its name.
        name: String,
        /// What asks for it.
        reason: String,
    },
    /// A tensor has the wrong shape.
    #[error("tensor `{name}`: expected shape {expected}, found {found:?}")]
    Shape {
        /// Its name.
        name: String,
        /// What it has to be.
        expected: String,
        /// What it is.
        found: Vec<usize>,
    },
    /// A tensor has the wrong dtype.
    #[error("tensor `{name}`: expected f32, f16 or bf16, found {found}")]
    Dtype {
        /// Its name.
        name: String,
        /// What it is.
        found: safetensors::Dtype,
    },
    /// A tensor cannot be used.
    #[error("tensor `{name}`: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        source: SearchError,
    },
    /// Nothing asked for goes together.
    #[error("nothing to evaluate: {0}")]
    Nothing(String),
    /// Some methods failed on some weights; everything else was evaluated and printed.
    #[error("{failed} of {of} evaluations failed; the first: {first}")]
    Failed {
        /// How many.
        failed: usize,
        /// How many were asked for.
        of: usize,
        /// What was wrong with the first of them.
        first: String,
    },
    /// There is no bar to draw.
    #[error(
        "{path}: nothing to draw: expected a finite error on the evaluation activations, \
         found none in {of} evaluations",
        path = .path.display()
    )]
    NothingToDraw {
        /// The file.
        path: PathBuf,
        /// How many evaluations there are.
        of: usize,
    },
    /// A plot cannot be drawn.
    #[error("{path}: {problem}", path = .path.display())]
    Plot {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}
