use std::path::PathBuf;

use burn_fp4_ops::OpsError;

/// Why a module cannot be quantized or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fp4Error {
    /// A parameter cannot be quantized as asked.
    #[error("parameter `{path}`: {source}")]
    Parameter {
        /// Path of the parameter.
        path: String,
        /// What is wrong with it.
        source: OpsError,
    },
    /// The scheme of the configuration is inconsistent.
    #[error(transparent)]
    Scheme(#[from] OpsError),
    /// A path pattern is not a glob.
    #[error("pattern `{pattern}`: {source}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        source: globset::Error,
    },
    /// A container's axis is not one of a parameter's.
    #[error(
        "parameter `{path}`: container `{container}` is blocked along axis {axis}, but its rank is {rank}"
    )]
    Axis {
        /// Path of the parameter.
        path: String,
        /// The container type.
        container: String,
        /// Axis configured for it.
        axis: usize,
        /// Rank of the parameter.
        rank: usize,
    },
    /// No parameter is left to be quantized, which is hardly what was meant.
    #[error("no parameter is selected:{0}")]
    NothingSelected(String),
    /// Inputs are known of a parameter that the module does not have.
    #[error("calibration: no parameter `{path}` with an axis {axis} in the module")]
    Calibration {
        /// Path of the calibration.
        path: String,
        /// The axis that the inputs meet.
        axis: usize,
    },
    /// Something cannot be fake-quantized for training.
    #[error("fake quantization: {what}: {reason}")]
    FakeQuantization {
        /// What was asked for.
        what: &'static str,
        /// Why it does not go together.
        reason: &'static str,
    },
    /// No parameter is fake-quantized, so there is nothing to convert.
    #[error("no parameter is fake-quantized")]
    NothingFakeQuantized,
    /// Something else is attached to a parameter, which converting the module would take off.
    #[error(
        "parameter `{path}` has `{name}` attached: materialize the module first, or convert before"
    )]
    Attached {
        /// Path of the parameter.
        path: String,
        /// Name of what is attached.
        name: String,
    },
    /// Parameters cannot share a tensor scale and have one per row.
    #[error(
        "parameter `{path}` shares its tensor scale, so it cannot have one per row or a given one"
    )]
    SharedScale {
        /// A parameter that would share.
        path: String,
    },
    /// A module cannot be calibrated with these batches.
    #[error("calibration: {problem}")]
    Capture {
        /// What went wrong.
        problem: String,
    },
    /// A file of a calibration's cache cannot be written or read.
    #[error("calibration cache: {}: {problem}", .path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A record does not fit the module.
    #[error("record: {problem}{}", list(.names))]
    Record {
        /// What is wrong.
        problem: String,
        /// The tensors concerned.
        names: Vec<String>,
    },
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| format!("\n  {name}")).collect()
}
