//! The scale that the rule makes of the largest magnitude of a block; see
//! [`ScaleSearch::Amax`](burn_fp4_search::ScaleSearch).

use cubecl::prelude::*;

use super::quantize_args::QuantizeArgs;
use crate::arith::rule::{BlockScales, block_scale, tensor_factor};
use crate::layout::place::{Place, at_row};
use crate::layout::share::load_blocks;
use crate::layout::tile::largest_of_tile;
use crate::plan::TileSharing;

/// The rule's own scale of one block of each row of a share, given the largest magnitudes.
#[cube]
pub(crate) fn amax_scales<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    largest: &Array<f32>,
    place: &Place,
    scales: &mut BlockScales,
) {
    let (recipe, share) = comptime!((args.recipe, args.share));
    #[unroll]
    for row in 0..share.rows {
        let tensor = tensor_factor(args.amax, place.row + row, &args.factors, recipe);
        let scale = block_scale(largest[row as usize], &tensor, comptime!(recipe.rule));
        scales.codes[row as usize] = scale.code;
        scales.factors[row as usize] = scale.factor;
    }
}

/// Largest magnitude of the block of every row of a share, or of the tile it belongs to.
#[cube]
pub(crate) fn largest_magnitudes<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    place: &Place,
) -> Array<f32> {
    let (recipe, share) = comptime!((args.recipe, args.share));
    let block_size = comptime!(recipe.block_size);
    let mut largest = Array::<f32>::new(comptime!(share.rows as usize));
    if comptime!(share.tile == TileSharing::Repeated) {
        let mut of_tile = 0.0f32.runtime();
        for row in place.row / 16 * 16..min(place.row / 16 * 16 + 16, args.extent.rows) {
            let neighbour = at_row(place, &args.extent, row, block_size, share);
            let elements =
                load_blocks::<E, N>(args.values, &neighbour, &args.extent, block_size, share);
            of_tile = max_nan(of_tile, largest_magnitude(&elements, 0u32, block_size));
        }
        largest[0] = of_tile;
    } else {
        #[unroll]
        for row in 0..share.rows {
            let of_row = largest_magnitude(elements, row * block_size, block_size);
            largest[row as usize] = select(row < place.rows_left, of_row, 0.0f32);
        }
        if comptime!(share.tile == TileSharing::Exchanged) {
            largest_of_tile(&mut largest, share.rows);
        }
        if comptime!(share.tile == TileSharing::Halves) {
            largest[0] = max_nan(largest[0], plane_shuffle_xor(largest[0], 1u32));
        }
    }
    largest
}

/// Largest magnitude of a block, which starts at `start` of the elements; NaN if a value is.
#[cube]
pub(crate) fn largest_magnitude(
    elements: &Array<f32>,
    #[comptime] start: u32,
    #[comptime] block_size: u32,
) -> f32 {
    let mut largest = elements[comptime!(start as usize)].abs();
    #[unroll]
    for k in 1..block_size {
        largest = max_nan(largest, elements[(start + k) as usize].abs());
    }
    largest
}
