//! [`Refusal`]: the reason why an operation is not launched.

use burn_fp4_search::{Method, SearchError};

use super::problem::Operation;

/// The reason why an operation is not launched.
///
/// ```
/// use burn_fp4_cubecl::{Operation, Refusal};
/// use burn_fp4_search::Method;
///
/// let short = Refusal::Memory { what: "values", expected: 1024, found: 1020 };
/// assert_eq!(short.to_string(), "values is 1020 bytes of memory, not 1024");
/// let method = Refusal::Method { operation: Operation::Quantize, found: Method::Hessian };
/// assert_eq!(method.to_string(), "there is no kernel of `quantize` for method `hessian`");
/// ```
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The scheme is inconsistent, or its blocks do not divide the axis.
    #[error(transparent)]
    Scheme(#[from] SearchError),
    /// No kernel of the operation runs this method.
    #[error("there is no kernel of `{operation}` for method `{found}`")]
    Method {
        /// The operation.
        operation: Operation,
        /// The method of the scheme.
        found: Method,
    },
    /// No matrix instruction computes the matmul or the attention.
    #[error("no matrix instructions: {reason}")]
    Instructions {
        /// The reason.
        reason: &'static str,
    },
    /// The device does not compute in f64.
    #[error("the device has no f64")]
    NoDoubles,
    /// The device lacks what kernels need.
    #[error("the device {lacks}")]
    Device {
        /// The reason, as the end of a sentence that begins with the device.
        lacks: &'static str,
    },
    /// The driver's results differ from the host's.
    #[error("the driver fails the self-test: {operation} has {wrong} wrong values of {values}")]
    SelfTest {
        /// The operation that was tested.
        operation: &'static str,
        /// Values that differ.
        wrong: usize,
        /// Values that were compared.
        values: usize,
    },
    /// The device failed while it was tested.
    #[error("the device fails during the self-test: {error}")]
    Failed {
        /// The error of the device.
        error: String,
    },
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
