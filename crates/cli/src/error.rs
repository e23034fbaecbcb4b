//! Errors of the command line, named so that a user can fix them.

use std::io::ErrorKind;
use std::path::PathBuf;

use burn_fp4_checkpoints::{CheckpointError, ErrorWords, TensorProblem};
use burn_fp4_policy::{PolicyError, RecipeError, RecipeFile};
use burn_fp4_search::SearchError;

use crate::counted::counted;
use crate::size::Size;

/// The end of a command that failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A checkpoint cannot be read or written.
    #[error("{}{}", described(.0), remedy(.0))]
    Checkpoint(#[from] CheckpointError),
    /// The result of a run that is to be resumed exists.
    #[error(
        "{}: exists, so no interrupted run is left to resume; look at it with `fp4 inspect`, or \
         remove it to quantize again", .path.display()
    )]
    NothingToResume {
        /// The result.
        path: PathBuf,
    },
    /// Nothing is where the input should be.
    #[error("{}: no such file or folder; check the path", .path.display())]
    NoInput {
        /// The path.
        path: PathBuf,
    },
    /// The input is named as models on Hugging Face are.
    #[error(
        "{id}: no such file or folder; if it is a model on Hugging Face, download it with \
         `{command}`"
    )]
    NotDownloaded {
        /// The name.
        id: String,
        /// The command that downloads it.
        command: String,
    },
    /// One of several checkpoints does not say its dialect.
    #[error("{error} with {option}")]
    Dialect {
        /// The error without the option.
        error: Box<CheckpointError>,
        /// The option that names its dialect.
        option: &'static str,
    },
    /// The dialect has no place for a weight that would be quantized.
    #[error("{error}; {remedy}")]
    Unheld {
        /// The weight, and what the dialect cannot hold.
        error: Box<CheckpointError>,
        /// Options that help.
        remedy: String,
    },
    /// The file system refused what it allowed when the work began.
    #[error(transparent)]
    ChangedDuringRun(Box<CliError>),
    /// The machine failed, and what is written so far stays.
    #[error(
        "{error}; run the same command with --resume to go on, or remove {}", .partial.display()
    )]
    Interrupted {
        /// The error.
        error: Box<CliError>,
        /// Where it is.
        partial: PathBuf,
    },
    /// Something has to be changed, and what an earlier run has written stays.
    #[error("{error}; what an earlier run has written stays: {}", .partial.display())]
    PartialKept {
        /// The error.
        error: Box<CliError>,
        /// Where it is.
        partial: PathBuf,
    },
    /// A device cannot be used.
    #[error("--device {device}: {problem}")]
    Device {
        /// Its name on the command line.
        device: &'static str,
        /// Why, and what to do.
        problem: String,
    },
    /// A device failed.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[error("tensor `{name}`: the device failed: {problem}")]
    OnDevice {
        /// The weight, or the first of those that share a tensor scale.
        name: String,
        /// Its message, in a line.
        problem: String,
    },
    /// There is less memory than a group of weights takes.
    #[error("`{weight}` needs {needed} of memory, but --memory is {found}; raise it to {needed}")]
    Memory {
        /// The weight, or the first of those that share a tensor scale.
        weight: String,
        /// The memory for the work on it.
        needed: Size,
        /// The memory that is allowed.
        found: Size,
    },
    /// A choice of a recipe is wrong for the model.
    #[error("{path}: {}{error}", line_of(.line), path = .path.display())]
    InRecipe {
        /// The file of the recipe.
        path: PathBuf,
        /// The line of the choice, starting at 1; none if several lines are about it.
        line: Option<usize>,
        /// The error.
        error: Box<CliError>,
    },
    /// A recipe cannot be read, or its choices do not go together.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// Choices that exclude each other.
    #[error("{0}")]
    Conflict(String),
    /// A file has no statistics of a weight.
    #[error(
        "{path}: no statistics of `{weight}`; write them for the whole model with {made_by}, or \
         pass --keep '{weight}' or another --method",
        path = .path.display()
    )]
    NoStatistics {
        /// The file.
        path: PathBuf,
        /// The weight.
        weight: String,
        /// The program that writes them.
        made_by: &'static str,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}", path = .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// A folder is not a file of weights and activations.
    #[error(
        "{path}: a folder; give a file of weights and activations, as `fp4 evaluate --help` \
         describes it",
        path = .path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// There is no weight to evaluate.
    #[error("{path}: no tensor is named `<name>.weight`; found {found}", path = .path.display())]
    NoWeights {
        /// The file.
        path: PathBuf,
        /// The tensors that are there.
        found: String,
    },
    /// A tensor is missing.
    #[error("tensor `{name}` is missing; add the activations of `{weight}`")]
    Missing {
        /// Its name.
        name: String,
        /// The weight that they are of.
        weight: String,
    },
    /// A tensor has the wrong shape.
    #[error("tensor `{name}`: expected shape {expected}, found {found:?}")]
    Shape {
        /// Its name.
        name: String,
        /// The shape that is needed.
        expected: String,
        /// Its shape.
        found: Vec<usize>,
    },
    /// A tensor cannot be used.
    #[error("tensor `{name}`: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// The error.
        source: SearchError,
    },
    /// A tensor of a known file cannot be used.
    #[error("{file}: tensor `{name}`: {source}{}", keep(.source, .name), file = .file.display())]
    TensorOf {
        /// The file (shard).
        file: PathBuf,
        /// Its name.
        name: String,
        /// The error.
        source: SearchError,
    },
    /// Nothing asked for goes together.
    #[error("nothing to evaluate: {0}")]
    Nothing(String),
    /// Some methods failed on some weights; everything else was evaluated and printed.
    #[error("{failed} of {} failed: {errors}", counted(*.of, "evaluation"))]
    Failed {
        /// Their number.
        failed: usize,
        /// The number that was asked for.
        of: usize,
        /// Each error once, with its methods.
        errors: String,
    },
    /// There is no bar to draw.
    #[error(
        "{path}: nothing to draw: expected a finite error on the evaluation activations, \
         found none in {}",
        counted(*.of, "evaluation"),
        path = .path.display()
    )]
    NothingToDraw {
        /// The file.
        path: PathBuf,
        /// Number of evaluations.
        of: usize,
    },
}

fn line_of(line: &Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!("line {line}: "))
}

/// The remedy for a weight that cannot be quantized.
fn keep(source: &SearchError, name: &str) -> String {
    match source {
        SearchError::NonFinite { .. } => format!("; fix it, or pass --keep '{name}' to keep it"),
        _ => String::new(),
    }
}

/// Returns the remedy for an error of the library, in words of the command line.
fn remedy(error: &CheckpointError) -> &'static str {
    match error {
        CheckpointError::AlreadyQuantized { .. } => {
            ", or `fp4 convert` to write quantized weights in another dialect or format"
        }
        CheckpointError::NoDialect { .. } | CheckpointError::Ambiguous { .. } => " with --from",
        CheckpointError::Unfinished { .. } => {
            ", or pass --resume to go on with it if `fp4 quantize` has left it"
        }
        CheckpointError::CannotHold { what, .. } => match *what {
            CheckpointError::FP4_TO_DECODE | CheckpointError::TRANSFORMED_TO_DECODE => {
                " with `fp4 convert --decode-fp4 bf16`"
            }
            CheckpointError::FP8_TO_DECODE | CheckpointError::FP8_WITHOUT_INPUT_SCALE => {
                " with `fp4 convert --decode-fp8 bf16`"
            }
            CheckpointError::GGML_TO_DECODE => " with `fp4 convert --decode-ggml bf16`",
            CheckpointError::NOT_EXPERTS => "; write another --dialect",
            CheckpointError::NOT_FOLDED_EXACTLY => " with `fp4 convert --inexact`",
            _ => "",
        },
        _ => "",
    }
}

/// Describes an error of the library, with options and sizes as the command line has them.
fn described(error: &CheckpointError) -> String {
    error.described(&ErrorWords {
        keep: &|name| format!("pass --keep '{name}'"),
        only: "--only",
        bytes: &|bytes| Size(bytes).to_string(),
    })
}

impl CliError {
    /// The error of a choice that is made in a recipe.
    pub(crate) fn in_recipe(file: &RecipeFile, line: Option<usize>, error: Self) -> Self {
        Self::InRecipe { path: file.path().to_owned(), line, error: Box::new(error) }
    }

    /// The error of a pattern, with the name of the option in place of that of the list.
    pub(crate) fn of_option(mut self) -> Self {
        if let Self::Checkpoint(CheckpointError::Policy(PolicyError::NoMatch { list, .. })) =
            &mut self
        {
            *list = match *list {
                "`keep`" => "--keep",
                "`only`" => "--only",
                other => other,
            };
        }
        self
    }

    /// The error of work that has begun: files that are missing, or may not be read or written,
    /// were there and allowed before, so that it is not the command that is wrong.
    pub(crate) fn during_run(self) -> Self {
        match self.source_of_io() {
            Some(_) => Self::ChangedDuringRun(Box::new(self)),
            None => self,
        }
    }

    /// The error of one of several checkpoints, whose dialect another option names than `--from`.
    pub(crate) fn with_option(self, option: &'static str) -> Self {
        match self {
            Self::Checkpoint(
                error @ (CheckpointError::NoDialect { .. } | CheckpointError::Ambiguous { .. }),
            ) => Self::Dialect { error: Box::new(error), option },
            other => other,
        }
    }

    fn source_of_io(&self) -> Option<&std::io::Error> {
        match self {
            Self::Checkpoint(CheckpointError::Io { source, .. })
            | Self::Checkpoint(CheckpointError::TensorIo { source, .. })
            | Self::File { source, .. }
            | Self::Recipe(RecipeError::File { source, .. }) => Some(source),
            _ => None,
        }
    }

    /// Returns true if an error of the library comes with a remedy of the command line.
    pub(crate) fn has_remedy(error: &CheckpointError) -> bool {
        !remedy(error).is_empty()
    }

    /// Returns true if the text ends with a command in one line.
    pub(crate) fn has_command(&self) -> bool {
        matches!(self, Self::Checkpoint(CheckpointError::Pickle { .. }))
    }

    /// 3 if the machine failed, 2 if the command or a file is wrong.
    pub(crate) fn exit_code(&self) -> u8 {
        let Some(source) = self.source_of_io() else {
            return match self {
                Self::ChangedDuringRun(_) | Self::Interrupted { .. } => 3,
                Self::Checkpoint(CheckpointError::NoSpace { .. }) => 3,
                Self::Checkpoint(CheckpointError::Tensor { problem, .. })
                    if matches!(problem, TensorProblem::Changed { .. }) =>
                {
                    3
                }
                #[cfg(any(feature = "cpu", feature = "cuda"))]
                Self::OnDevice { .. } => 3,
                _ => 2,
            };
        };
        match source.kind() {
            ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::AlreadyExists
            | ErrorKind::IsADirectory
            | ErrorKind::NotADirectory
            | ErrorKind::InvalidFilename
            | ErrorKind::InvalidInput => 2,
            _ => 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_stand_in_remedies_and_not_in_names() {
        let tensor = "keep the weight".to_owned();
        let problem = TensorProblem::NoReciprocal { what: "scale", found: 0.0 };
        let error = CheckpointError::Tensor { file: PathBuf::new(), tensor, problem };
        let says = "tensor `keep the weight`: its scale is 0e0, whose reciprocal is no finite f32 \
                    other than 0; pass --keep 'keep the weight', or write another dialect";
        assert_eq!(CliError::from(error).to_string(), says);
        let path = PathBuf::from("9 are free");
        let error = CheckpointError::NoSpace { path, needed: 2_000_000, free: 9 };
        let says = "9 are free: 2.0 MB are needed, but 9 B are free; free some, or write \
                    elsewhere";
        assert_eq!(CliError::from(error).to_string(), says);
    }
}
