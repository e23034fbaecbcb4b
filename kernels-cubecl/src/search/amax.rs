//! The rule's own scale, from the largest magnitude of a block; see
//! [`ScaleSearch::Amax`](burn_fp4_search::ScaleSearch).

use cubecl::prelude::*;

use super::quantize_args::QuantizeArgs;
use crate::numeric::rule::{BlockScales, block_scale, tensor_factor};
use crate::plan::TileSharing;
use crate::tensor::indexing::{TileOrigin, at_row};
use crate::tensor::load_store::load_blocks;
use crate::tensor::tile_reduce::largest_of_tile;

/// Sets the rule's own scales of a tile, given the largest magnitudes.
#[cube]
pub(crate) fn amax_scales<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    largest: &Array<f32>,
    origin: &TileOrigin,
    scales: &mut BlockScales,
) {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    #[unroll]
    for row in 0..thread_tile.rows {
        let tensor = tensor_factor(args.amax, origin.row + row, &args.scale_args, blueprint);
        let scale = block_scale(largest[row as usize], &tensor, comptime!(blueprint.rule));
        scales.codes[row as usize] = scale.code;
        scales.factors[row as usize] = scale.factor;
    }
}

/// Returns the largest magnitude of the block of every row of a thread tile, or of the 16 x 16 tile
/// around it.
#[cube]
pub(crate) fn largest_magnitudes<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    origin: &TileOrigin,
) -> Array<f32> {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let block_size = comptime!(blueprint.block_size);
    let mut largest = Array::<f32>::new(comptime!(thread_tile.rows as usize));
    if comptime!(thread_tile.sharing == TileSharing::Repeated) {
        let mut of_tile = 0.0f32.runtime();
        for row in origin.row / 16 * 16..min(origin.row / 16 * 16 + 16, args.dims.rows) {
            let neighbour = at_row(origin, &args.dims, row, block_size, thread_tile);
            let elements =
                load_blocks::<E, N>(args.values, &neighbour, &args.dims, block_size, thread_tile);
            of_tile = max_nan(of_tile, largest_magnitude(&elements, 0u32, block_size));
        }
        largest[0] = of_tile;
    } else {
        #[unroll]
        for row in 0..thread_tile.rows {
            let of_row = largest_magnitude(elements, row * block_size, block_size);
            largest[row as usize] = select(row < origin.rows_left, of_row, 0.0f32);
        }
        if comptime!(thread_tile.sharing == TileSharing::Exchanged) {
            largest_of_tile(&mut largest, thread_tile.rows);
        }
        if comptime!(thread_tile.sharing == TileSharing::Halves) {
            largest[0] = max_nan(largest[0], plane_shuffle_xor(largest[0], 1u32));
        }
    }
    largest
}

/// Returns the largest magnitude of the block that starts at `start` of the elements; NaN if a
/// value is.
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
