//! Operations of a decoder besides its quantized matmuls.
//!
//! | file           | what it does                                                             |
//! |----------------|--------------------------------------------------------------------------|
//! | `norm.rs`      | [`rms_norm`], also of a residual stream and its update                   |
//! | `attention.rs` | [`attend`]: one token's RoPE, the KV cache in place, attention to it     |
//! | `attention_kernel.rs`, `attention_plan.rs` | its kernels, and their sizes               |
//! | `kv_cache.rs`  | [`dequantize_heads`]: packed KV caches, written and read                 |
//! | `prefill.rs`   | [`rotate_into_cache`], [`attention_weights`]: the same for many tokens   |
//! | `flash.rs`     | [`flash_attention`]: for many tokens, without scores in memory           |
//! | `dense_gemv.rs` | [`dense_gemv`]: few rows times a dense output layer                      |
//! | `int8_gemv.rs` | [`int8_gemv`]: few rows times an output layer of signed bytes            |
//! | `argmax.rs`    | [`argmax`]: index of the largest logit                                   |
//! | `sample.rs`    | [`sample`]: draws tokens from logits                                     |
//! | `swiglu.rs`    | [`swiglu`]: the gate of an MLP                                           |
//! | `head.rs`      | heads of queries, keys and values, and RoPE                              |
//! | `row.rs`       | a row that the units of a cube divide                                    |

mod argmax;
mod attention;
mod attention_kernel;
mod attention_plan;
mod dense_gemv;
mod flash;
mod head;
mod int8_gemv;
mod kv_cache;
pub(crate) mod norm;
mod prefill;
pub(crate) mod row;
mod sample;
pub(crate) mod swiglu;

pub use argmax::argmax;
pub use attention::{AttentionHandles, attend, check_attention};
pub use dense_gemv::{MAX_DENSE_GEMV_ROWS, dense_gemv};
pub use flash::{check_flash_attention, flash_attention};
pub use int8_gemv::{MAX_INT8_GEMV_ROWS, int8_gemv};
pub use kv_cache::{PackedKv, dequantize_heads};
pub use norm::{Normalized, rms_norm};
pub use prefill::{attention_weights, check_prefill, rotate_into_cache};
pub use sample::sample;
pub use swiglu::swiglu;
