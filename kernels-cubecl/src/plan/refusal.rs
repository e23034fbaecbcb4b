//! [`Refusal`]: the reason why an operation is not launched.

use burn_fp4_search::{ScaleSearch, SearchError};

use super::problem::Operation;

/// The reason why an operation is not launched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The scheme is inconsistent, or its blocks do not divide the axis.
    #[error(transparent)]
    Scheme(#[from] SearchError),
    /// No kernel of the operation runs this search.
    #[error("there is no kernel for ScaleSearch::{found:?} in {operation:?}")]
    Search {
        /// The operation.
        operation: Operation,
        /// The search of the scheme.
        found: ScaleSearch,
    },
    /// No matrix instruction computes the matmul.
    #[error("no matrix instructions: {reason}")]
    Instructions {
        /// The reason.
        reason: &'static str,
    },
    /// The device does not compute in f64.
    #[error("the device has no f64")]
    NoDoubles,
    /// Memory is shorter than the operation reads.
    #[error("{what} is {found} bytes of memory, not {expected}")]
    Memory {
        /// The argument.
        what: &'static str,
        /// Bytes that the operation reads.
        expected: usize,
        /// Bytes of the memory.
        found: u64,
    },
    /// The number of tensor scales is neither 1 nor the number of packed rows.
    #[error("{found} tensor scales of {expected} packed rows")]
    TensorScales {
        /// Packed rows.
        expected: usize,
        /// Tensor scales.
        found: usize,
    },
    /// Two arguments do not belong together.
    #[error("{what}: {found}, not {expected}")]
    Mismatch {
        /// The property that they must share.
        what: &'static str,
        /// Its value in the first argument.
        expected: usize,
        /// Its value in the second argument.
        found: usize,
    },
    /// The tensor has more values than [`View::MAX_LEN`](burn_fp4_search::host::View::MAX_LEN).
    #[error("a tensor of {found} values: at most {expected} are quantized as one")]
    TooLarge {
        /// Values of the tensor.
        found: usize,
        /// Largest number supported.
        expected: usize,
    },
}
