//! FP4 quantization as CubeCL kernels, with the bits of the reference quantizer.
//!
//! Each operation takes handles of contiguous device memory, a [`Problem`], a client and what its
//! device can do ([`Capability`]); [`plan`] decides whether and how it is launched. Nothing panics
//! on a worker thread: what a kernel cannot do is a [`Refusal`], and so is memory that is shorter
//! than it would read. Handles have no dtype: callers make sure that the memory has that of the
//! problem.
//!
//! Every file here is an operation, its launch and its kernel; a folder holds what operations share
//! or a family of them. A folder uses only those above it in the second table.
//!
//! | operation                | what it does                                                  |
//! |--------------------------|---------------------------------------------------------------|
//! | `tensor_amax.rs`         | [`amax()`]: largest magnitude of a tensor or of its rows      |
//! | `quantize.rs`            | codes and scales                                              |
//! | `quantize_by_hessian.rs` | codes and scales by the activations multiplied with a block   |
//! | `fake_quantize.rs`       | the values of codes and scales, from the dense tensor         |
//! | `dequantize.rs`          | the values of codes and scales, from these                    |
//! | `squared_error.rs`       | how far these are from the original                           |
//! | `hadamard.rs`            | the transform before a product is quantized                   |
//! | `gram.rs`                | [`add_gram`]: `X^T X`, the second moments of a layer's inputs |
//!
//! | folder      | what it holds                                                              |
//! |-------------|----------------------------------------------------------------------------|
//! | `plan/`     | problem, device and scheme -> launch, or why not; pure functions           |
//! | `arith/`    | elements, the grid of block scales, scale rules, random bits, transform    |
//! | `layout/`   | which values are a unit's, how they are loaded, exchanged and stored       |
//! | `packed.rs` | [`PackedHandles`]: codes, block scales and tensor scale in device memory   |
//! | `memory.rs` | whether device memory is as long as an operation reads                     |
//! | `search/`   | how the scale of a block is chosen, a file per method                      |
//! | `gptq/`     | codes that compensate each other's rounding errors                         |
//! | `product/`  | products with a packed weight: with few rows, and by matrix instructions   |
//!
//! Arithmetic is f32. Where the reference rounds a product before it is added, the product is not
//! written as an operand of an addition: CubeCL would fuse the two.

#[cfg(feature = "cuda")]
extern crate alloc;

mod dequantize;
mod fake_quantize;
mod gptq;
mod gram;
mod hadamard;
mod numeric;
/// What CubeCL's derived operations name.
#[cfg(feature = "cuda")]
mod interfaces {
    pub(crate) use cubecl_ir::interfaces::*;
}
mod matmul;
mod memory;
mod packed;
mod plan;
mod quantize;
mod quantize_by_hessian;
mod search;
mod squared_error;
mod tensor;
mod tensor_amax;

pub use cubecl;
pub use dequantize::dequantize;
pub use fake_quantize::fake_quantize;
pub use gptq::{HessianFactorHandles, hessian_factor, quantize_gptq};
pub use gram::{Activations, add_gram};
pub use hadamard::hadamard;
pub use matmul::{Matmul, MatmulPlan, Prefetch};
pub use packed::PackedHandles;
pub use plan::{
    Capability, Conversion, Dtype, Launch, Operation, Problem, Refusal, ThreadTile, TileSharing,
    UNITS, WgmmaSupport, plan,
};
pub use quantize::{quantize, quantize_weighted};
pub use quantize_by_hessian::{Hessians, quantize_by_hessian};
pub use squared_error::{PartialSums, squared_error};
pub use tensor_amax::amax;
