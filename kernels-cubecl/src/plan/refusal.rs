//! Why an operation is not launched.

use burn_fp4_search::{Method, SearchError};

use super::problem::Operation;

/// Why an operation is not launched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The scheme is inconsistent, or its blocks do not divide the axis.
    #[error(transparent)]
    Scheme(#[from] SearchError),
    /// The operation does not search that way.
    #[error("there is no kernel for Method::{found:?} in {operation:?}")]
    Search {
        /// The operation.
        operation: Operation,
        /// The search asked for.
        found: Method,
    },
    /// The product does not fit matrix instructions.
    #[error("no matrix instructions: {reason}")]
    Instructions {
        /// Why.
        reason: &'static str,
    },
    /// The device does not compute in f64.
    #[error("the device has no f64")]
    NoDoubles,
    /// Memory that is shorter than the operation reads.
    #[error("{what} is {found} bytes of memory, not {expected}")]
    Memory {
        /// The argument.
        what: &'static str,
        /// Bytes of what it is to hold.
        expected: usize,
        /// Bytes of the memory.
        found: u64,
    },
    /// A number of tensor scales that is neither 1 nor that of the packed rows.
    #[error("{found} tensor scales of {expected} packed rows")]
    TensorScales {
        /// Packed rows.
        expected: usize,
        /// Tensor scales.
        found: usize,
    },
    /// Two arguments that do not belong together.
    #[error("{what}: {found}, not {expected}")]
    Mismatch {
        /// What they have to have in common.
        what: &'static str,
        /// That of the one.
        expected: usize,
        /// That of the other.
        found: usize,
    },
    /// More values than [`View::MAX_LEN`](burn_fp4_search::host::View::MAX_LEN).
    #[error("a tensor of {found} values: at most {expected} are quantized as one")]
    TooLarge {
        /// Values of the tensor.
        found: usize,
        /// Largest number supported.
        expected: usize,
    },
}
