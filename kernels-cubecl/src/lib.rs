//! FP4 quantization as CubeCL kernels, with the bits of the reference quantizer.
//!
//! ```
//! # #[cfg(feature = "cpu")] {
//! use burn_fp4_cubecl::cubecl::Device;
//! use burn_fp4_cubecl::cubecl::prelude::CubeElement;
//! use burn_fp4_cubecl::{Capability, Dtype, Matmul, Problem, amax, dequantize, quantize};
//! use burn_fp4_search::Fp4Scheme;
//! use burn_fp4_search::host::View;
//!
//! let client = Device::default().client();
//! let device = Capability::of(&client);
//! let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
//! // Two rows, a block each: elements of 6 and 0.5 with a scale of 14.
//! let mut weight = [7.0f32; 32];
//! (weight[0], weight[16]) = (84.0, -84.0);
//! let (view, dtype, scheme) = (View::rows(2, 16), Dtype::F32, Fp4Scheme::nvfp4());
//! let problem = Problem { view, dtype, scheme };
//! let values = upload(&weight);
//! let largest = amax(&client, &device, values.clone(), view, dtype, false)?;
//! let packed = quantize(&client, &device, values, largest, &problem)?;
//! let restored = dequantize(&client, &device, packed.clone(), &problem)?;
//! assert_eq!(f32::from_bytes(&client.read_one_unchecked(restored)), weight);
//!
//! let (format, block_size) = (scheme.format(), scheme.block_size);
//! let matmul = Matmul { m: 1, n: 2, k: 16, format, block_size, dtype };
//! let planned = matmul.plan(&device)?.expect("few rows");
//! let output = planned.run(&client, packed, upload(&[1.0; 16]), None, None)?;
//! assert_eq!(f32::from_bytes(&client.read_one_unchecked(output)), [189.0, 21.0]);
//! # }
//! # Ok::<(), burn_fp4_cubecl::Refusal>(())
//! ```
//!
//! Each operation takes handles of contiguous device memory, a [`Problem`], a client and the
//! [`Capability`] of its device. [`plan`] decides whether and how it is launched. Nothing panics on
//! a worker thread: an operation that no kernel can run, or memory that is shorter than a kernel
//! would read, is a [`Refusal`]. Handles have no dtype; the caller guarantees that the memory has
//! the dtype of the problem.
//!
//! A file at the root holds an operation, its launch and its kernel. A folder holds code that
//! operations share, or a family of operations. It uses only the folders above it in the table.
//!
//! | operation                | what it does                                                     |
//! |--------------------------|------------------------------------------------------------------|
//! | `tensor_amax.rs`         | [`amax()`]: largest magnitude of a tensor or of its rows         |
//! | `quantize.rs`            | codes and scales                                                 |
//! | `quantize_by_hessian.rs` | codes and scales that minimize `r^T H r` of each block           |
//! | `fake_quantize.rs`       | quantizes and dequantizes in one pass                            |
//! | `dequantize.rs`          | dense values of codes and scales                                 |
//! | `squared_error.rs`       | squared error of a packed tensor                                 |
//! | `self_test.rs`           | [`Capability::tested`]: if a driver of wgpu is trusted           |
//! | `hadamard.rs`            | Hadamard transform before the operands of a matmul are quantized |
//! | `gather.rs`              | [`gather_rows`]: rows of bytes at indices, for wgpu              |
//! | `gram.rs`                | [`add_gram`]: `X^T X`, the second moments of a layer's inputs    |
//!
//! | folder      | what it holds                                                              |
//! |-------------|----------------------------------------------------------------------------|
//! | `plan/`     | problem, device and scheme -> launch or refusal; pure functions            |
//! | `numeric/`  | elements, the grid of block scales, scale rules, random bits, transform    |
//! | `tensor/`   | thread tiles: indexing, loads and stores, transpose in shared memory       |
//! | `memory.rs` | [`PackedHandles`]: packed tensors in device memory; checks of its length   |
//! | `search/`   | choice of the block scales, a file per method                              |
//! | `gptq/`     | codes that compensate each other's rounding errors                         |
//! | `decoder/`  | a decoder besides its matmuls: norms, attention, SwiGLU, tokens            |
//! | `instructions/` | WGMMA: matrix instructions of Hopper, as PTX and emulated              |
//! | `matmul/`   | matmuls with a packed weight: GEMV, small M, MMA, WGMMA; kernels for wgpu  |
//!
//! Arithmetic is f32. Where the reference rounds a product before an addition, the product is not
//! an operand of the addition: CubeCL would fuse the two and change the bits.
//!
//! On CubeCL's wgpu runtime only [`amax()`], [`dequantize`], [`hadamard()`], [`gather_rows`],
//! [`Matmul`] and `decoder/` run. Drivers may flush subnormals and choose the size of a plane, see
//! [`Portable`].

#[cfg(feature = "cuda")]
extern crate alloc;

mod decoder;
mod dequantize;
mod fake_quantize;
mod gather;
mod gptq;
mod gram;
mod hadamard;
mod instructions;
mod numeric;
/// Paths that CubeCL's derived operations refer to.
#[cfg(feature = "cuda")]
mod interfaces {
    pub(crate) use cubecl_ir::interfaces::*;
}
mod matmul;
mod memory;
mod plan;
mod quantize;
mod quantize_by_hessian;
mod search;
mod self_test;
mod squared_error;
mod tensor;
mod tensor_amax;

pub use cubecl;
pub use decoder::{
    AttentionHandles, MAX_DENSE_GEMV_ROWS, MAX_INT8_GEMV_ROWS, Normalized, PackedKv, argmax,
    attend, attention_weights, check_attention, check_flash_attention, check_prefill, dense_gemv,
    dequantize_heads, flash_attention, int8_gemv, rms_norm, rotate_into_cache, sample, swiglu,
};
pub use dequantize::dequantize;
pub use fake_quantize::fake_quantize;
pub use gather::gather_rows;
pub use gptq::{HessianFactorHandles, hessian_factor, quantize_gptq};
pub use gram::{Activations, add_gram};
pub use hadamard::hadamard;
pub use matmul::{
    Chain, FamilyLaunch, FamilyOutputs, FamilyPlan, Fp8Plan, Matmul, MatmulPlan, NormOperands,
    Prefetch, fp8_rows,
};
pub use memory::{Counters, PackedHandles};
pub use plan::{
    Capability, Conversion, Decoding, Dtype, Launch, Operation, Portable, Problem, Refusal,
    ThreadTile, TileSharing, UNITS, WgmmaSupport, plan,
};
pub use quantize::{quantize, quantize_weighted};
pub use quantize_by_hessian::{Hessians, quantize_by_hessian};
pub use squared_error::{PartialSums, squared_error};
pub use tensor_amax::amax;
