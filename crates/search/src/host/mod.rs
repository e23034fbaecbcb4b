//! The host engine: the bits of the reference quantizer, with SIMD chosen at run time and with
//! threads, along any axis, without materializing anything but its output.
//!
//! Values pass through a batch of 32 blocks that stays in the first-level cache. Only the functions
//! that read and write a batch depend on the axis of the blocks.
//!
//! | file                     | what it holds                                               |
//! |--------------------------|-------------------------------------------------------------|
//! | `quantize.rs`            | amax; from a tensor to batches, then to codes and scales    |
//! | `dequantize.rs`          | from codes and scales to values, and the squared error      |
//! | `fake_quantize.rs`       | both in one call                                            |
//! | `simd_batch.rs`          | the batch: 32 blocks, their amax, scales and codes          |
//! | `tile_reduce.rs`         | tiles of 16 blocks of a batch                               |
//! | `search/`                | scales and codes of a batch, a file for each search         |
//! | `scale_grid.rs`          | the arithmetic of block scales                              |
//! | `gptq.rs`                | GPTQ, whose errors propagate from block to block            |
//! | `gram.rs`                | `X^T X` of activations, in tiles                            |
//! | `matmul.rs`, `decode.rs` | products with packed weights, decoded in groups             |
//! | `panels.rs`              | their products, while they are computed                     |
//! | `int8_matmul.rs`         | the same with inputs rounded to 8-bit integers              |
//! | `int8_input.rs`          | such an input                                               |
//! | `int8_lanes.rs`          | sums of products of bytes                                   |
//! | `int8_x86.rs`, `int8_neon.rs` | the same with the instructions of a processor          |
//! | `int8_instructions.rs`   | the choice of these instructions                            |
//! | `dots.rs`                | dot products of dense rows                                  |
//! | `hadamard.rs`            | the Hadamard transform                                      |
//! | `decoder/`               | a decoder besides its quantized products                    |
//! | `int8_weight.rs`         | matrices of signed bytes, for output layers                 |
//! | `arch.rs`                | the SIMD instructions                                       |
//! | `threads.rs`             | the threads of a pass, and tasks that are worth them        |
//! | `dense.rs`               | dense tensors: f32, bf16 and f16, and their blocked axis    |

mod arch;
mod decode;
mod decoder;
mod dense;
mod dequantize;
mod dots;
mod fake_quantize;
mod gptq;
mod gram;
mod hadamard;
mod int8_input;
mod int8_instructions;
mod int8_lanes;
mod int8_matmul;
#[cfg(target_arch = "aarch64")]
mod int8_neon;
mod int8_weight;
#[cfg(target_arch = "x86_64")]
mod int8_x86;
mod matmul;
mod panels;
mod quantize;
mod scale_grid;
mod search;
mod simd_batch;
mod threads;
mod tile_reduce;

pub use decoder::{
    AttentionShape, FP8_BINADES, KV_BLOCK, KvFormat, KvMut, MAX_HEAD_DIM, Rotary, SampleOptions,
    add_rms_norm, attention, dequantize_heads, gemv, gemv_rows, quantize_heads, rms_norm, sample,
    swiglu,
};
pub use dense::{HostElement, View};
pub use dequantize::{PackedView, dequantize, squared_error};
pub use fake_quantize::{DequantTarget, fake_quantize};
pub use gram::add_gram;
pub use hadamard::hadamard;
pub use int8_weight::{INT8_BLOCK, Int8Weight, int8_weight_matmul, quantize_int8};
pub use matmul::matmul;
pub use quantize::{
    amax, quantize, quantize_by_importance, quantize_packed, row_amax, tensor_amax,
};
pub use threads::on_awake_threads;
