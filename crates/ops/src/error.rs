//! [`OpsError`]: errors of operations on tensors.

use core::any::Any;

use burn::tensor::{DType, Device};
use burn_fp4_search::SearchError;
use burn_fp4_search::formats::FormatError;

/// Error of an operation on tensors.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpsError {
    /// The scheme is inconsistent, or does not fit the tensor.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// Codes and scales are not valid.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The tensor has no such axis.
    #[error("axis {axis}: the tensor has {rank} axes; choose one of them")]
    Axis {
        /// The axis.
        axis: usize,
        /// Rank of the tensor.
        rank: usize,
    },
    /// Blocks do not divide the axis that they run along.
    #[error("axis {axis}: its {length} values are not a multiple of the block size {block_size}")]
    Indivisible {
        /// The axis.
        axis: usize,
        /// Values along it.
        length: usize,
        /// Values of a block.
        block_size: usize,
    },
    /// Rows cannot be looked up, because blocks do not run along them.
    #[error(
        "rows: a lookup needs a matrix with blocks along axis 1, but the tensor has rank {rank} \
         and blocks along axis {axis}; quantize it along axis 1"
    )]
    Rows {
        /// Axis that the blocks run along.
        axis: usize,
        /// Rank of the tensor.
        rank: usize,
    },
    /// A tensor has more values than [`View::MAX_LEN`](burn_fp4_search::host::View::MAX_LEN).
    #[error("a tensor has {found} values, but at most {expected} are quantized as one; split it")]
    TooLarge {
        /// Values of the tensor.
        found: usize,
        /// Largest number.
        expected: usize,
    },
    /// Only f32, f16 and bf16 are quantized.
    #[error("values: expected f32, f16 or bf16, found {found:?}")]
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
    /// The contracted axes of a product differ, or the weight is blocked along the other axis.
    #[error(
        "product: the last axis of the input has {input} values, the first axis of the weight \
         {weight}, and its blocks run along axis {axis}; make both lengths equal, with blocks \
         along axis 0"
    )]
    Contraction {
        /// Last dimension of the input.
        input: usize,
        /// First dimension of the weight.
        weight: usize,
        /// Axis that the weight is blocked along.
        axis: usize,
    },
    /// A training recipe has a scheme that its products cannot use.
    #[error("recipe: {part}: {reason}")]
    Recipe {
        /// Weights, activations or gradients.
        part: &'static str,
        /// The reason.
        reason: &'static str,
    },
    /// Two operands have different dtypes.
    #[error("{what}: expected {expected:?}, as the other operand, found {found:?}; cast one")]
    Operands {
        /// The operand.
        what: &'static str,
        /// dtype of the other operand.
        expected: DType,
        /// Its own.
        found: DType,
    },
    /// A shape does not fit the others.
    #[error("{what}: expected shape {expected:?}, found {found:?}")]
    Shape {
        /// The tensor.
        what: &'static str,
        /// Expected shape.
        expected: Vec<usize>,
        /// Shape found.
        found: Vec<usize>,
    },
    /// The data are not an E2M1 tensor of Burn, or a tensor has no such data.
    #[error(
        "Burn's quantized tensor: expected E2M1 in PackedU32 with blocks along the last axis, or \
         axis 0 of a matrix, and scales UE4M3 with F32, or UE8M0; found {found}"
    )]
    BurnData {
        /// Property that differs.
        found: String,
    },
    /// A part of a quantized tensor has a wrong dtype.
    #[error("{what}: expected dtype {expected:?}, found {found:?}")]
    PartDType {
        /// The part.
        what: &'static str,
        /// Expected dtype.
        expected: DType,
        /// Its own.
        found: DType,
    },
    /// A tensor is on another device than the tensors it is used with.
    #[error("{what}: expected on {expected:?}, found on {found:?}; move it")]
    PartDevice {
        /// The tensor.
        what: &'static str,
        /// Expected device.
        expected: Box<Device>,
        /// Its own.
        found: Box<Device>,
    },
    /// `init` came after the first operation on a Cube device.
    #[error("burn_fp4::init: {0}")]
    Registration(String),
    /// A pass cannot be captured.
    #[error("graph: the pass cannot be captured: {0}")]
    Capture(String),
    /// A device failed, or devices cannot add up their sums.
    #[error("device: {0}")]
    Device(String),
}

impl OpsError {
    pub(crate) fn device(error: impl core::fmt::Debug) -> Self {
        Self::Device(format!("{error:?}"))
    }
}

/// Returns the message of a panic.
#[doc(hidden)]
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("it panicked").to_owned()
}
