//! Operations of a decoder besides its matmuls.
//!
//! | file           | what it does                                                             |
//! |----------------|--------------------------------------------------------------------------|
//! | `norm.rs`      | [`rms_norm`], also of a residual stream and its update                   |
//! | `attention.rs` | [`attend`]: one token's RoPE, the KV cache in place, attention to it     |
//! | `sample.rs`    | [`sample`]: draws tokens from logits                                     |

mod attention;
mod norm;
mod sample;

use cubecl::prelude::*;

use crate::plan::Dtype;

pub use attention::{AttentionHandles, attend};
pub use norm::{Normalized, rms_norm};
pub use sample::{SampleOptions, sample};

/// Returns the number of values of the widest vector of up to 16 bytes that divides a row.
fn widest_vector(row: usize, dtype: Dtype) -> usize {
    let widest = 16 / dtype.size();
    [8, 4, 2].into_iter().find(|&width| width <= widest && row.is_multiple_of(width)).unwrap_or(1)
}

/// Adds a value of every unit of a cube: in a plane, then the planes in order. Every unit has the
/// sum.
#[cube]
fn sum_of_cube(own: f32, #[comptime] plane: u32, #[comptime] units: u32) -> f32 {
    let of_plane = if comptime!(plane > 1) { plane_sum(own) } else { own };
    let planes = comptime!(units / plane);
    let mut sum = of_plane;
    if comptime!(planes > 1) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(planes as usize));
        if UNIT_POS % plane == 0u32 {
            shared[(UNIT_POS / plane) as usize] = of_plane;
        }
        sync_cube();
        sum = shared[0];
        #[unroll]
        for at in 1..planes {
            sum += shared[at as usize];
        }
    }
    sum
}
