//! Nearest codes of a block.

use burn_fp4_search::formats::ScaleGrid;
use cubecl::prelude::*;

use super::element::{UNLIMITED, round_to_e2m1, round_unlimited};
use super::rule::{TensorScaleArgs, code_mask, normalize, normalize_magnitude};
use crate::plan::Blueprint;

/// Returns true if the elements of all blocks are clamped. Otherwise blocks without elements beyond
/// the largest code skip it, at the price of twice the code: too much for several rows, and useless
/// with powers of two, which leave many blocks with such elements.
pub(crate) fn limits_all(blueprint: Blueprint, rows: u32) -> bool {
    rows > 1 || matches!(blueprint.grid(), ScaleGrid::PowersOfTwo(_))
}

/// Writes the nearest codes of the block that starts at `start` of the elements, given the factor
/// of its scale and its largest magnitude or a larger one. `limits` is from [`limits_all`].
#[cube]
pub(crate) fn nearest_codes(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    #[comptime] start: u32,
    largest: f32,
    factor: f32,
    scale_args: &TensorScaleArgs,
    #[comptime] limits: bool,
    #[comptime] blueprint: Blueprint,
) {
    round_codes(elements, codes, start, factor, scale_args, limits, blueprint);
    if comptime!(!limits) {
        // Normalized values ascend with the magnitudes. With almost all scales no element is beyond
        // the largest code; the other blocks are rounded again.
        let is_unlimited =
            normalize_magnitude(largest, factor, comptime!(blueprint.rule)) < UNLIMITED;
        if !is_unlimited {
            round_codes(elements, codes, start, factor, scale_args, true, blueprint);
        }
    }
}

/// Writes the nearest codes of a block. With `limits`, elements may be beyond the largest code.
#[cube]
fn round_codes(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    #[comptime] start: u32,
    factor: f32,
    scale_args: &TensorScaleArgs,
    #[comptime] limits: bool,
    #[comptime] blueprint: Blueprint,
) {
    let rule = comptime!(blueprint.rule);
    let mask = code_mask(factor, rule);
    #[unroll]
    for word in 0..comptime!(blueprint.block_size / 8) {
        let mut packed = 0u32;
        #[unroll]
        for index in 0..8u32 {
            let at = comptime!((start + word * 8 + 7 - index) as usize);
            let normalized = normalize(elements[at], factor, scale_args, rule);
            let code = if comptime!(limits) {
                round_to_e2m1(normalized)
            } else {
                round_unlimited(normalized)
            };
            packed = (packed << 4u32) | (code >> 28u32);
        }
        codes[word as usize] = packed & mask;
    }
}
