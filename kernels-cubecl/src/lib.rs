//! FP4 quantization as CubeCL kernels, with the bits of the reference quantizer.
//!
//! Each operation takes handles of contiguous device memory, a [`Problem`] and a client; [`plan`]
//! decides whether and how it is launched. Nothing panics on a worker thread: what a kernel cannot do
//! is a [`Refusal`].
//!
//! | file            | what it holds                                                            |
//! |-----------------|--------------------------------------------------------------------------|
//! | `problem.rs`    | [`Problem`]: shape, axis, dtype and scheme of an operation                |
//! | `plan.rs`       | [`plan`]: problem -> launch, or why not; a pure function                  |
//! | `element.rs`    | code <-> f32, on bits                                                     |
//! | `scale.rs`      | amax -> block scale, for every rule                                       |
//! | `amax.rs`       | largest magnitude of a tensor or of its rows                             |
//! | `quantize.rs`   | codes and scales                                                          |
//! | `dequantize.rs` | the values of codes and scales                                            |
//!
//! Arithmetic is f32, written so that no multiplication meets an addition: CubeCL would fuse them, and
//! the reference does not.

mod amax;
mod dequantize;
mod element;
mod plan;
mod problem;
mod quantize;
mod scale;

pub use amax::amax;
pub use cubecl;
pub use dequantize::dequantize;
pub use plan::{Launch, Operation, Refusal, plan};
pub use problem::{Dtype, Problem};
pub use quantize::{Packed, quantize};
