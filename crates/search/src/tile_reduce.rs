//! The sum over the rows of a 16 x 16 tile, which share a scale.

/// Sums the costs of the rows of a block or tile as a tree: row r and r + 8, then + 4, + 2, + 1.
/// Every engine keeps to this order.
#[inline(always)]
pub(crate) fn sum_rows(mut costs: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for row in 0..half {
            costs[row] += costs[row + half];
        }
    }
    costs[0]
}
