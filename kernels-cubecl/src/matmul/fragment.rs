//! Decoding of the weight's fragments for `mma.rs` and `small_m.rs`: block scales and elements.

use cubecl::prelude::*;

use super::operands::MatmulBlueprint;
use crate::numeric::element::decode_pair;
use crate::numeric::scale_grid::{element_shift, product_scale, product_scale_pair};

/// Decodes the scales of a row's two blocks to factors of decoded elements.
#[cube]
pub(super) fn decode_scales<F: Float, NA: Size>(
    factors: &mut Array<Vector<F, NA>>,
    #[comptime] row: u32,
    scales: u32,
    #[comptime] blueprint: MatmulBlueprint,
) {
    let grid = comptime!(blueprint.grid());
    if comptime!(blueprint.block_size == 16) {
        let codes = (scales & 0xFFu32) | ((scales & 0xFF00u32) << 8u32);
        let pair = product_scale_pair::<F, NA>(codes, grid, comptime!(blueprint.dtype));
        factors[comptime!((row * 2) as usize)] = Vector::new(pair.extract(0usize));
        factors[comptime!((row * 2 + 1) as usize)] = Vector::new(pair.extract(1usize));
    } else {
        #[unroll]
        for block in 0..2u32 {
            let shift = comptime!(block * 16 / blueprint.block_size * 8);
            let code = (scales >> shift) & 0xFFu32;
            let factor = product_scale::<F>(code, grid, comptime!(blueprint.dtype));
            factors[comptime!((row * 2 + block) as usize)] = Vector::new(factor);
        }
    }
}

/// Decodes elements as [`decode_pair`] does, and restores their magnitude if block scales need it.
#[cube]
pub(super) fn decode_elements<F: Float, N: Size>(
    word: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> Vector<F, N> {
    let decoded = decode_pair::<F, N>(word, comptime!(blueprint.dtype));
    match comptime!(element_shift(blueprint.grid(), blueprint.dtype)) {
        Some(shift) => decoded * Vector::new(F::cast_from(shift)),
        None => decoded,
    }
}
