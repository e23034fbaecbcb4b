//! The host engine: the bits of the reference quantizer, with SIMD chosen at run time and with
//! threads, along any axis, without materializing anything but its output.
//!
//! Values pass through a strip of 32 blocks that stays in the first-level cache; only how a strip
//! is read and written knows along which axis the blocks run.

mod coordinate_descent;
mod dequantize;
mod element;
mod group;
mod hadamard;
mod hessian;
mod matmul;
mod point;
mod quantize;
mod sse;
mod strip;
mod view;

pub use dequantize::{PackedView, dequantize, squared_error};
pub use element::HostElement;
pub use hadamard::hadamard;
pub use matmul::matmul;
pub use quantize::{
    Restore, amax, fake_quantize, quantize, quantize_by_importance, quantize_packed,
};
pub(crate) use strip::nearest_element;
pub use view::View;

/// Values per parallel task: large enough to amortize a task, small enough to balance two cores.
const TASK: usize = 1 << 16;
/// Values per parallel task of a search.
const SEARCH_TASK: usize = 1 << 14;
