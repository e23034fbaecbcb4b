//! [`Fp4Error`]: why a module cannot be quantized or loaded.

use std::fmt;
use std::path::PathBuf;

use burn::module::{LoraAdapter, Reparameterization};
use burn_fp4_checkpoints::CheckpointError;
use burn_fp4_ops::OpsError;
use burn_fp4_policy::{PolicyError, RecipeError};

use crate::budget::Budget;
use crate::checkpoint::mismatch::Mismatch;
use crate::fake_quant_weight::FakeQuantWeight;

/// Why a module cannot be quantized or loaded.
///
/// A message holds its cause, so that `source()` is empty.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fp4Error {
    /// A parameter cannot be quantized as asked.
    #[error("parameter `{path}`: {problem}{}", remedy(.problem))]
    Parameter {
        /// Path of the parameter.
        path: String,
        /// The problem of the parameter.
        problem: OpsError,
    },
    /// The scheme of the configuration is inconsistent.
    #[error("{0}")]
    Scheme(OpsError),
    /// A device, or the sum over several devices (NCCL), failed.
    #[error("device: {problem}")]
    Device {
        /// The message of the device.
        problem: String,
    },
    /// Quantization failed half-way.
    #[error("{problem}; packed before that, and packed now:{}", list(.packed))]
    Partial {
        /// Paths of the weights that are packed. All others are as they were.
        packed: Vec<String>,
        /// The error of the next one.
        problem: Box<Fp4Error>,
    },
    /// There is no decision about the parameters, as for a pattern without a meaning.
    #[error("{0}")]
    Policy(PolicyError),
    /// A container's axis is not one of a parameter's.
    #[error(
        "parameter `{path}`: container `{container}` is blocked along axis {axis}, but its rank is \
         {rank}"
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
    /// The configuration selects no parameter.
    #[error("no parameter is selected:{0}")]
    NothingSelected(String),
    /// All weights that the configuration selects are packed already.
    #[error(
        "every selected weight is quantized already; call `materialize` first to quantize them in \
         another way:{}", list(.0)
    )]
    AlreadyQuantized(Vec<String>),
    /// Parts of the configuration fit nothing in the module.
    #[error(
        "nothing uses these parts of the configuration (Unused::Report allows it):{}", list(.0)
    )]
    Unused(Vec<String>),
    /// A method needs statistics of the inputs of layers, and no selected weight has any that it
    /// can use.
    #[error(
        "{method} needs statistics of inputs, and none of the selected weights has any that it can \
         use: calibrate, and hand the calibration over by `with_calibration`:{}", list(.paths)
    )]
    Uncalibrated {
        /// The method asked for.
        method: String,
        /// Paths of the selected weights.
        paths: Vec<String>,
    },
    /// There are statistics for a parameter that the module does not have.
    #[error(
        "calibration: no parameter `{path}` with an axis {axis} and a slice {slice} in the module"
    )]
    Calibration {
        /// Path of the calibration.
        path: String,
        /// The axis that the inputs are multiplied along.
        axis: usize,
        /// Which slice over the leading axes of the weight.
        slice: usize,
    },
    /// Nothing can be said of how sensitive weights are.
    #[error("sensitivity: {0}")]
    Sensitivity(&'static str),
    /// Errors of different weights cannot be compared.
    #[error(
        "neither a finite loss nor a finite error of outputs is known; calibrate, and let the loss \
         depend on them:{}", list(.paths)
    )]
    NotComparable {
        /// Paths of the weights for which neither is known.
        paths: Vec<String>,
    },
    /// No choice of candidates is as small as asked for.
    #[error(
        "{asked}: the smallest candidates take {least_bytes} bytes, {least_bits:.6} bits per weight"
    )]
    Budget {
        /// The budget.
        asked: Budget,
        /// Bytes of the smallest candidates of all weights.
        least_bytes: usize,
        /// That, in bits for each value.
        least_bits: f64,
    },
    /// Something cannot be fake-quantized for training.
    #[error("fake quantization: {what}: {reason}")]
    FakeQuantization {
        /// The part of the configuration.
        what: &'static str,
        /// Why it does not go together.
        reason: &'static str,
    },
    /// No layer reads its input as it was asked to.
    #[error(
        "activations: no `Fp4Linear` or `Fp4Embedding` has a weight that is quantized along its \
         input; make the layers `Fp4Linear` (Burn's `Linear` dequantizes), then quantize or load"
    )]
    NoFp4Layers,
    /// No parameter is fake-quantized, so there is nothing to convert.
    #[error("no parameter is fake-quantized")]
    NothingFakeQuantized,
    /// No adapter can be attached, or there is none to merge.
    #[error("LoRA: {0}")]
    NothingAdapted(&'static str),
    /// Something else is attached to a parameter, which would be lost.
    #[error("parameter `{path}` has `{name}` attached; call `{}` first", detaching(.name))]
    Attached {
        /// Path of the parameter.
        path: String,
        /// Name of what is attached.
        name: String,
    },
    /// A dense weight is not finite once its adapter is added to it.
    #[error(
        "parameter `{path}`: the sum of the weight and its adapter is not finite; load factors \
         from before the training diverged"
    )]
    NotFinite {
        /// Path of the parameter.
        path: String,
    },
    /// Codes that were provided for a parameter do not fit it.
    #[error("parameter `{path}`: {what}: expected {expected}, found {found}")]
    Provided {
        /// Path of the parameter.
        path: String,
        /// Shape or device.
        what: &'static str,
        /// Shape or device of the parameter.
        expected: String,
        /// Shape or device of the codes.
        found: String,
    },
    /// A module shows a parameter to visitors that it does not hand to mappers, or the other way
    /// round.
    #[error(
        "the module visits parameter `{path}`, but does not map it: its `Module` is inconsistent"
    )]
    Unmapped {
        /// Path of the parameter.
        path: String,
    },
    /// A part of a module does not fit the decisions about the whole.
    #[error(
        "parameter `{path}`: the module that was decided about {found}; pass parts of it alone"
    )]
    Part {
        /// Path of the parameter.
        path: String,
        /// What the whole module has there instead.
        found: String,
    },
    /// Parameters cannot share a tensor scale.
    #[error("parameter `{path}` shares its tensor scale, but {reason}")]
    SharedScale {
        /// A parameter that would share.
        path: String,
        /// Why it cannot.
        reason: &'static str,
    },
    /// A module cannot be calibrated with these batches.
    #[error("calibration: {problem}")]
    Recording {
        /// The reason.
        problem: String,
    },
    /// A file of a calibration's cache cannot be written or read.
    #[error("calibration cache: {}: {problem}", .path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// Statistics of inputs cannot be written.
    #[error("statistics {}: {problem}", .path.display())]
    Statistics {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// A checkpoint cannot be read or written.
    #[error("{0}")]
    Checkpoint(Box<CheckpointError>),
    /// Parameters of a module and tensors of a checkpoint do not go together.
    #[error("the checkpoint does not fit the module:{}", lines(.0))]
    Mismatch(Vec<Mismatch>),
    /// A pattern of [`CheckpointMap::rename`](crate::CheckpointMap::rename) is no regular
    /// expression.
    #[error("rename `{pattern}`: {problem}")]
    Rename {
        /// The pattern.
        pattern: String,
        /// The error of its syntax.
        problem: Box<regex::Error>,
    },
    /// A replacement of [`CheckpointMap::rename`](crate::CheckpointMap::rename) refers to a group
    /// that its pattern does not have.
    #[error(
        "rename `{pattern}`: `{replacement}` refers to the group `{group}`, which the pattern does \
         not have: before letters, digits and `_` a group has braces, `${{1}}`"
    )]
    Group {
        /// The pattern.
        pattern: String,
        /// The replacement.
        replacement: String,
        /// The group.
        group: String,
    },
    /// A pair of [`CheckpointMap::experts`](crate::CheckpointMap::experts) does not say on which
    /// side matrices are stacked.
    #[error("experts `{parameter}` and `{tensor}`: expected `{{}}` in one of them, and once")]
    Experts {
        /// The end of a path.
        parameter: String,
        /// The end of a tensor's name.
        tensor: String,
    },
    /// A recipe cannot be read or written, or its choices do not go together.
    #[error("recipe: {0}")]
    Recipe(Box<RecipeError>),
    /// A recipe cannot say what was done to a parameter, or a module cannot do what one asks for.
    #[error("recipe: parameter `{path}`: {problem}")]
    RecipeParameter {
        /// Path of the parameter.
        path: String,
        /// The thing that cannot be said or done.
        problem: String,
    },
    /// A record does not fit the module.
    #[error("record: {problem}{}", list(.names))]
    Record {
        /// The reason.
        problem: String,
        /// The tensors concerned.
        names: Vec<String>,
    },
}

impl Fp4Error {
    /// Returns the error of a parameter, or of its device.
    pub(crate) fn at(path: impl Into<String>, problem: impl Into<OpsError>) -> Self {
        let path = path.into();
        match problem.into() {
            OpsError::Device(problem) => {
                Self::Device { problem: format!("parameter `{path}`: {problem}") }
            }
            problem => Self::Parameter { path, problem },
        }
    }
}

impl From<CheckpointError> for Fp4Error {
    fn from(problem: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(problem))
    }
}

impl From<RecipeError> for Fp4Error {
    fn from(problem: RecipeError) -> Self {
        Self::Recipe(Box::new(problem))
    }
}

impl From<PolicyError> for Fp4Error {
    fn from(problem: PolicyError) -> Self {
        match problem {
            PolicyError::Scheme(problem) => OpsError::from(problem).into(),
            PolicyError::SharedScale { weight: path, reason } => Self::SharedScale { path, reason },
            problem => Self::Policy(problem),
        }
    }
}

impl From<OpsError> for Fp4Error {
    fn from(problem: OpsError) -> Self {
        match problem {
            OpsError::Device(problem) => Self::Device { problem },
            problem => Self::Scheme(problem),
        }
    }
}

/// How a configuration can avoid a problem, if it can.
fn remedy(problem: &OpsError) -> &'static str {
    match problem {
        OpsError::Indivisible { .. } => {
            "; use `exclude` to keep it dense, or `indivisible(Indivisible::Skip)` for all such \
             weights"
        }
        OpsError::NonFinite { .. } => "; or use `exclude` to keep the weight dense",
        OpsError::DType { .. } => "; cast the module, or use `exclude` to keep the weight dense",
        _ => "",
    }
}

/// The call that takes something off a parameter.
fn detaching(name: &str) -> &'static str {
    match name {
        LoraAdapter::NAME => "merge_lora_fp4",
        FakeQuantWeight::NAME => "convert_fp4",
        _ => "materialize",
    }
}

fn list(names: &[String]) -> String {
    lines(names)
}

fn lines(items: &[impl fmt::Display]) -> String {
    items.iter().map(|item| format!("\n  {item}")).collect()
}
