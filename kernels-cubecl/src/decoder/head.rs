//! Heads of queries, keys and values: vectors of channels, and their rotation by RoPE.

use cubecl::prelude::*;

use super::row::widest_vector;
use crate::numeric::element::narrow;
use crate::plan::{Conversion, Dtype};

/// Returns the channels of the widest vector of up to 16 bytes such that the two halves of a head
/// are in different vectors.
pub(super) fn head_vector(head_dim: u32, dtype: Dtype) -> u32 {
    widest_vector(head_dim as usize / 2, dtype) as u32
}

/// Returns a token's position, at most `last`.
#[cube]
pub(super) fn position_of(positions: &[i32], token: u32, last: u32) -> u32 {
    min(u32::cast_from(max(positions[token as usize], 0i32)), last)
}

/// Rotates the channels of a vector of the first half of a head and of its partner, in f32.
#[cube]
pub(super) fn rotated<F: Float, N: Size>(
    first: Vector<F, N>,
    second: Vector<F, N>,
    cos: &[f32],
    sin: &[f32],
    angle: u32,
    #[comptime] vector: u32,
) -> (Array<f32>, Array<f32>) {
    let mut low = Array::<f32>::new(comptime!(vector as usize));
    let mut high = Array::<f32>::new(comptime!(vector as usize));
    #[unroll]
    for index in 0..comptime!(vector as usize) {
        let at = (angle + comptime!(index as u32)) as usize;
        let (cos, sin) = (cos[at], sin[at]);
        let (left, right) =
            (f32::cast_from(first.extract(index)), f32::cast_from(second.extract(index)));
        low[index] = left * cos - right * sin;
        high[index] = right * cos + left * sin;
    }
    (low, high)
}

/// Rounds values to a vector.
#[cube]
pub(super) fn to_vector<F: Float, N: Size>(
    values: &Array<f32>,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
) -> Vector<F, N> {
    let mut rounded = Vector::<F, N>::empty();
    #[unroll]
    for index in 0..comptime!(vector as usize) {
        rounded.insert(index, narrow::<F>(values[index], conversion));
    }
    rounded
}
