//! Operations of a decoder besides its quantized products.
//!
//! On `flex` in f32 each is one operation that writes to the memory of its inputs where nothing
//! else reads it. On devices with kernels a norm is one kernel. Attention of one new token of each
//! sequence is two kernels, which read a packed KV cache as it is stored. Attention of several is
//! two kernels, two dense matmuls and what these copy into their layout; a packed cache is
//! dequantized for them, all of its capacity. On every other device, and where a pass is recorded
//! or differentiated, each is the tensor operations that its documentation names.
//!
//! | file           | contents                                                            |
//! |----------------|---------------------------------------------------------------------|
//! | `norm.rs`      | [`rms_norm`] and [`add_rms_norm`]                                   |
//! | `swiglu.rs`    | [`swiglu`]                                                          |
//! | `dense.rs`     | [`dense_matmul`]: few rows times a dense weight                     |
//! | `rope.rs`      | [`RotaryEmbedding`] and [`Positions`]: what layers share            |
//! | `kv_cache.rs`  | [`KvCache`]: keys and values, dense or packed                       |
//! | `attention.rs` | [`attention`] to a [`KvCache`] in place                             |
//! | `sample.rs`    | [`sample`] and [`argmax`]: the next token from logits               |

mod attention;
mod dense;
mod kv_cache;
mod norm;
mod rope;
mod sample;
mod swiglu;

pub use attention::attention;
pub use dense::dense_matmul;
pub use kv_cache::{KvCache, PackedHeads};
pub use norm::{add_rms_norm, rms_norm};
pub use rope::{Positions, RotaryEmbedding};
pub use sample::{argmax, sample};
pub use swiglu::swiglu;
