//! Operations of a decoder besides its quantized products, in f32, with few passes over memory and
//! without allocations.
//!
//! | file           | what it holds                                                       |
//! |----------------|---------------------------------------------------------------------|
//! | `rms_norm.rs`  | RMSNorm, also of a residual stream and its update                   |
//! | `swiglu.rs`    | SwiGLU                                                              |
//! | `attention.rs` | RoPE, the KV cache in place, attention to its filled prefix         |
//! | `kv_cache.rs`  | keys or values of a KV cache, dense or packed                       |
//! | `kv_format.rs` | codes and scales of packed ones                                     |
//! | `gemv.rs`      | one row times a dense weight                                        |
//! | `sample.rs`    | the draw of the next token                                          |
//! | `exp.rs`       | `e^x` that the compiler vectorizes                                  |

mod attention;
mod exp;
mod gemv;
mod kv_cache;
mod kv_format;
mod rms_norm;
mod sample;
mod swiglu;

pub use attention::{AttentionShape, MAX_HEAD_DIM, Rotary, attention};
pub use gemv::{gemv, gemv_rows};
pub use kv_cache::KvMut;
pub use kv_format::{FP8_BINADES, KV_BLOCK, KvFormat, dequantize_heads, quantize_heads};
pub use rms_norm::{add_rms_norm, rms_norm};
pub use sample::{SampleOptions, sample};
pub use swiglu::swiglu;
