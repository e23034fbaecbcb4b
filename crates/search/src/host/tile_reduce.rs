//! The sum over rows of 16 x 16 tiles in a batch.

use super::simd_batch::BATCH;
use crate::tile_reduce::sum_rows;

/// Replaces the costs of the first `n` rows by the costs of their tiles.
#[inline(always)]
pub(super) fn sum_tiles(costs: &mut [f32; BATCH], n: usize) {
    costs[n..].fill(0.0);
    for tile in costs.chunks_exact_mut(16) {
        let rows = *tile.first_chunk().expect("sixteen rows");
        tile.fill(sum_rows(rows));
    }
}
