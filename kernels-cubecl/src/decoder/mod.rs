//! Operations of a decoder besides its matmuls.
//!
//! | file           | what it does                                                             |
//! |----------------|--------------------------------------------------------------------------|
//! | `norm.rs`      | [`rms_norm`], also of a residual stream and its update                   |
//! | `attention.rs` | [`attend`]: one token's RoPE, the KV cache in place, attention to it     |
//! | `sample.rs`    | [`sample`]: draws tokens from logits                                     |
//! | `row.rs`       | a row that the units of a cube divide                                    |

mod attention;
mod norm;
mod row;
mod sample;

pub use attention::{AttentionHandles, attend, check_attention};
pub use norm::{Normalized, rms_norm};
pub use sample::sample;
