//! Searches for the scale of a block, and the choice of one: a file per method, named as in the
//! search crate.

pub(crate) mod amax;
pub(crate) mod best;
pub(crate) mod block_hessian;
pub(crate) mod coordinate_descent;
pub(crate) mod four_over_six;
pub(crate) mod hessian;
pub(crate) mod quantize_args;
mod sse;

use burn_fp4_search::Method;
use cubecl::prelude::*;

use self::amax::amax_scales;
use self::four_over_six::better_of_both;
use self::quantize_args::QuantizeArgs;
use self::sse::search_sse;
use crate::numeric::rule::BlockScales;
use crate::tensor::indexing::TileOrigin;

/// Chooses the scale of a block of every row of a thread tile, given the largest magnitudes.
///
/// `elements` come from [`load_blocks`](crate::tensor::load_store::load_blocks). The values are
/// read again only by units that process a whole 16 x 16 tile alone.
#[cube]
pub(crate) fn choose_scales<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    largest: &Array<f32>,
    origin: &TileOrigin,
) -> BlockScales {
    let rows = comptime!(args.thread_tile.rows as usize);
    let mut scales =
        BlockScales { codes: Array::<u32>::new(rows), factors: Array::<f32>::new(rows) };
    match comptime!(args.blueprint.method) {
        Method::Amax => amax_scales::<E, N>(args, largest, origin, &mut scales),
        Method::FourOverSix { .. } => {
            better_of_both::<E, N>(args, elements, largest, origin, &mut scales)
        }
        Method::Sse(_) => search_sse::<E, N>(args, elements, largest, origin, &mut scales),
        // Others need Hessians or have no kernel: no plan leads here.
        _ => comptime!(unreachable!()),
    }
    scales
}
