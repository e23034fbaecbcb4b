//! The block scale with the smallest sum of squared errors.
//!
//! [`choose`] tries every scale. The engines try a small window of scales; no scale outside can be
//! better, for any weights `w >= 0` of the errors. With `c = amax / s`:
//!
//! - Where `c <= 3.5`, all elements are at most 3, and half the scale has every value of the grid
//!   of s up to 3: `E(s / 2) <= E(s)`. Half the scale exists except for odd multiples of the
//!   smallest one.
//! - Twice the scale gains `w (4c - 28) s^2` on the largest element, which saturates at s, and
//!   loses at most `w s^2 / 4` on every other: `E(2s) < E(s)` where
//!   `c > 7 + sum of the other w / (16 w)`. Twice the scale exists up to half the largest.
//! - Every scale has at least the error `w (amax - 6s)^2`. Once that exceeds the best, smaller
//!   scales need not be tried.
//!
//! Near a tie rounding decides; the engines sum the same products in the same order.

use super::block::{Block, Choice};
use crate::importance::BlockImportance;
use crate::tile_reduce::sum_rows;

/// Chooses the best scale. Of equals the rule's own wins, then the smallest.
pub(super) fn choose(block: &Block<'_>, importance: BlockImportance<'_>) -> Choice {
    Choice::nearest(block.cheapest(|scale| {
        let mut costs = [0.0; 16];
        for (row, cost) in costs.iter_mut().enumerate().take(block.rows.len()) {
            *cost = error(block, row, scale, importance);
        }
        sum_rows(costs)
    }))
}

/// Computes the weighted error of a row, summed in element order.
fn error(block: &Block<'_>, row: usize, scale: u8, importance: BlockImportance<'_>) -> f32 {
    let errors = block.errors(row, scale, &block.nearest(row, scale));
    errors.iter().enumerate().fold(0.0, |sum, (index, error)| match importance {
        BlockImportance::Channels(weights) => (weights[index] * error).mul_add(*error, sum),
        BlockImportance::Uniform | BlockImportance::Hessian(_) => error.mul_add(*error, sum),
    })
}
