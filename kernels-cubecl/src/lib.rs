//! FP4 quantization as CubeCL kernels, with the bits of the reference quantizer.
//!
//! Each operation takes handles of contiguous device memory, a [`Problem`], a client and what its device
//! can do ([`Capability`]); [`plan`] decides whether and how it is launched. Nothing panics on a worker
//! thread: what a kernel cannot do is a [`Refusal`].
//!
//! | file               | what it holds                                                          |
//! |--------------------|------------------------------------------------------------------------|
//! | `problem.rs`       | [`Problem`]: shape, axis, dtype and scheme of an operation             |
//! | `plan.rs`          | [`plan`]: problem and device -> launch, or why not; a pure function    |
//! | `share.rs`         | the part of a tensor that is a unit's: where it lies, loads and stores |
//! | `element.rs`       | code <-> f32, on bits                                                  |
//! | `scale.rs`         | amax -> scale, for every rule                                          |
//! | `block.rs`         | blocks and tiles: amax, choice of the scale, normalized elements       |
//! | `sse.rs`           | the scale with the smallest squared error                              |
//! | `hessian.rs`       | scales and codes by the activations that meet each block               |
//! | `gptq.rs`          | codes that make up for the errors of others                            |
//! | `spread.rs`        | what these ask of the channels that follow                             |
//! | `curvature.rs`     | [`Curvature`]: the factorization that tells it                         |
//! | `gram.rs`          | what activations say about the inputs of a layer                       |
//! | `stage.rs`         | exchange between the units of a cube                                   |
//! | `amax.rs`          | largest magnitude of a tensor or of its rows                           |
//! | `stochastic.rs`    | random bits, and codes drawn by them                                   |
//! | `hadamard.rs`      | the transform before a product is quantized                            |
//! | `quantize.rs`      | codes and scales, or right away their values                           |
//! | `dequantize.rs`    | the values of codes and scales                                         |
//! | `product.rs`       | [`Product`]: a product with a packed weight, and how it is computed      |
//! | `gemv.rs`          | a product with few rows, straight from the codes                       |
//! | `mma.rs`           | the same by matrix instructions                                        |
//! | `squared_error.rs` | how far they are from the original                                     |
//!
//! Arithmetic is f32, written so that no multiplication meets an addition: CubeCL would fuse them, and
//! the reference does not.

mod amax;
mod block;
mod curvature;
mod dequantize;
mod element;
mod gemv;
mod gptq;
mod gram;
mod hadamard;
mod hessian;
mod mma;
mod plan;
mod problem;
mod product;
mod quantize;
mod scale;
mod share;
mod spread;
mod squared_error;
mod sse;
mod stage;
mod stochastic;

pub use amax::amax;
pub use cubecl;
pub use curvature::{Curvature, curvature};
pub use dequantize::dequantize;
pub use gemv::gemv;
pub use gptq::quantize_gptq;
pub use gram::{Activations, add_gram};
pub use hadamard::hadamard;
pub use hessian::{Hessians, quantize_by_hessian};
pub use mma::mma;
pub use plan::{Capability, Conversion, Launch, Operation, Refusal, Share, Tile, UNITS, plan};
pub use problem::{Dtype, Problem};
pub use product::{Gemv, Mma, Product, ProductPlan};
pub use quantize::{Packed, fake_quantize, quantize, quantize_weighted};
pub use squared_error::{PartialSums, squared_error};
