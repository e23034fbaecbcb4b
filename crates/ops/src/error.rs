//! [`OpsError`]: why an operation on tensors cannot be done.

use core::any::Any;

use burn::tensor::{DType, Device};
use burn_fp4_search::SearchError;
use burn_fp4_search::formats::FormatError;

/// Why an operation on tensors cannot be done.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpsError {
    /// The scheme is inconsistent, or does not fit the tensor.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// Codes and scales that are not a quantized tensor.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The tensor has no such axis.
    #[error("axis {axis} of a tensor of rank {rank}")]
    Axis {
        /// Axis asked for.
        axis: usize,
        /// Rank of the tensor.
        rank: usize,
    },
    /// Blocks do not divide the axis that they run along.
    #[error("axis {axis} has {length} values, which blocks of {block_size} do not divide")]
    Indivisible {
        /// The axis.
        axis: usize,
        /// Values along it.
        length: usize,
        /// Values of a block.
        block_size: usize,
    },
    /// Rows are looked up where blocks do not run along them.
    #[error(
        "rows are looked up in a matrix whose blocks run along axis 1, not along axis {axis} of a \
         tensor of rank {rank}: quantize it along axis 1"
    )]
    Rows {
        /// Axis that the blocks run along.
        axis: usize,
        /// Rank of the tensor.
        rank: usize,
    },
    /// More values than [`View::MAX_LEN`](burn_fp4_search::host::View::MAX_LEN).
    #[error("a tensor of {found} values: at most {expected} are quantized as one")]
    TooLarge {
        /// Values of the tensor.
        found: usize,
        /// Largest number supported.
        expected: usize,
    },
    /// Only f32, f16 and bf16 are quantized.
    #[error("expected values of f32, f16 or bf16, found {found:?}")]
    DType {
        /// dtype of the tensor.
        found: DType,
    },
    /// A value is NaN or infinite.
    #[error(
        "a value is not finite (amax is {found}); fix it, or use NonFinite::FollowReference to \
         quantize it as TransformerEngine does"
    )]
    NonFinite {
        /// The amax.
        found: f32,
    },
    /// The contracted axes of a product differ, or the weight is blocked along the other one.
    #[error(
        "cannot multiply an input with {input} values in its last axis by a weight with {weight} \
         in its first, blocked along axis {axis}: both must be K, and blocks run along axis 0"
    )]
    Contraction {
        /// Last dimension of the input.
        input: usize,
        /// First dimension of the weight.
        weight: usize,
        /// Axis that the weight is blocked along.
        axis: usize,
    },
    /// A part of a training recipe is quantized in a way that its products cannot use.
    #[error("recipe: {part}: {reason}")]
    Recipe {
        /// Weights, activations or gradients.
        part: &'static str,
        /// Why it does not fit.
        reason: &'static str,
    },
    /// Two operands have different dtypes.
    #[error("{what}: expected {expected:?} as the other operand, found {found:?}")]
    Operands {
        /// Which operand.
        what: &'static str,
        /// dtype of the other.
        expected: DType,
        /// Its own.
        found: DType,
    },
    /// A shape does not fit the others.
    #[error("{what}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// Shape that fits.
        expected: Vec<usize>,
        /// Shape found.
        found: Vec<usize>,
    },
    /// A part of a quantized tensor has another dtype than it is stored in.
    #[error("{what}: expected dtype {expected:?}, found {found:?}")]
    PartDType {
        /// Which part.
        what: &'static str,
        /// dtype that it is stored in.
        expected: DType,
        /// Its own.
        found: DType,
    },
    /// Something is on another device than what it goes with.
    #[error("{what}: expected on {expected:?}, found on {found:?}")]
    PartDevice {
        /// What it is.
        what: &'static str,
        /// Device of what it goes with.
        expected: Box<Device>,
        /// Its own.
        found: Box<Device>,
    },
    /// `init` came after the first operation on a Cube device.
    #[error("burn_fp4::init: {0}")]
    Registration(String),
    /// The launches of a pass cannot be recorded.
    #[error("cannot record what a pass launches: {0}")]
    Recording(String),
    /// A device failed, or devices cannot sum over each other.
    #[error("device: {0}")]
    Device(String),
}

impl OpsError {
    pub(crate) fn device(error: impl core::fmt::Debug) -> Self {
        Self::Device(format!("{error:?}"))
    }
}

/// What a panic said.
#[doc(hidden)]
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("it panicked").to_owned()
}
