//! The host engine: the bits of the reference quantizer, with SIMD chosen at run time and with
//! threads, along any axis, without materializing anything but its output.
//!
//! Values pass through a strip of 32 blocks that stays in the first-level cache; only how a strip
//! is read and written knows along which axis the blocks run.

mod dequantize;
mod element;
mod quantize;
mod strip;
mod view;

pub use dequantize::{PackedView, dequantize, squared_error};
pub use element::HostElement;
pub use quantize::{amax, fake_quantize, quantize};
pub use view::View;

/// Values per parallel task: large enough to amortize a task, small enough to balance two cores.
const TASK: usize = 1 << 16;
