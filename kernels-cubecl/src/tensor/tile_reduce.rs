//! Reductions over the rows of a 16 x 16 tile, which neighbours in a plane hold.
//!
//! ```text
//! rows = 4 per unit, 4 units per tile     the sum of the errors e of 16 rows, in this order:
//! unit 0: rows 0..4                       e[r] + e[r + 8]      shuffle: units 0-2, 1-3
//! unit 1: rows 4..8                       .. + e[r + 4]        shuffle: units 0-1, 2-3
//! unit 2: rows 8..12                      .. + e[r + 2]        in the unit
//! unit 3: rows 12..16                     .. + e[r + 1]        in the unit
//! ```

use cubecl::prelude::*;

/// Replaces the amax of each row with the amax of its tile, of which every unit holds `rows` rows.
#[cube]
pub(crate) fn largest_of_tile(largest: &mut Array<f32>, #[comptime] rows: u32) {
    let mut of_tile = largest[0];
    #[unroll]
    for row in 1..rows {
        of_tile = max_nan(of_tile, largest[row as usize]);
    }
    #[unroll]
    for step in 0..comptime!(16 / rows).ilog2() {
        of_tile = max_nan(of_tile, plane_shuffle_xor(of_tile, comptime!(1u32 << step)));
    }
    #[unroll]
    for row in 0..rows {
        largest[row as usize] = of_tile;
    }
}

/// Replaces the errors of a tile's rows, of which every unit holds `rows`, with their sum: row r
/// and r + 8, then + 4, + 2, + 1.
#[cube]
pub(crate) fn sum_of_tile(errors: &mut Array<f32>, #[comptime] rows: u32) {
    #[unroll]
    for step in 0..4u32 {
        let half = comptime!(8u32 >> step);
        if comptime!(half >= rows) {
            #[unroll]
            for row in 0..rows {
                let own = errors[row as usize];
                errors[row as usize] = own + plane_shuffle_xor(own, comptime!(half / rows));
            }
        } else {
            #[unroll]
            for row in 0..half {
                errors[row as usize] += errors[(row + half) as usize];
            }
        }
    }
    #[unroll]
    for row in 1..rows {
        errors[row as usize] = errors[0];
    }
}
