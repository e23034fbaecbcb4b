//! The scale with the smallest `r^T H r` for nearest codes; see `hessian.rs` in the search crate.
//! For scale and codes together it calls `coordinate_descent.rs`.
//!
//! ```text
//! best = the rule's own scale
//! for scale in all, from the smallest that rounds everything to 0, downward:
//!     stop where no smaller scale can be better, whatever the codes     (is_hopeless)
//!     best = scale, if r^T H r of the nearest codes is smaller          (costs)
//! ```
//!
//! Scales are tried in pairs, so that a value of H is loaded once for two costs. Trying a scale
//! that could be skipped does no harm: it has its own cost.

use burn_fp4_search::ScaleSearch;
use cubecl::prelude::*;

use super::amax::largest_magnitude;
use super::best::{Candidate, candidate, improve, normalized, start};
use super::block_hessian::{BlockHessian, again, bound, costs, least_cost};
use super::coordinate_descent::{descend, without_negative_zeros};
use crate::numeric::codes::{limits_all, nearest_codes};
use crate::numeric::element::nearest_element;
use crate::numeric::rule::{TensorFactor, TensorScaleArgs, block_scale};
use crate::numeric::scale_grid::{
    BlockNormalization, block_normalization, is_positive, is_searchable, lowest, top, value_in,
};
use crate::plan::Blueprint;

/// If amax is less than this many times the scale, errors are large compared with the best, and a
/// cheap lower bound often saves the cost.
const COARSE: f32 = 3.0;

/// Returns the best scale, and writes its codes.
#[cube]
pub(crate) fn search<H: Size>(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    hessian: &BlockHessian<'_, H>,
    tensor: &TensorFactor,
    scale_args: &TensorScaleArgs,
    #[comptime] blueprint: Blueprint,
) -> u32 {
    let words = comptime!(blueprint.block_size / 8);
    let grid = comptime!(blueprint.grid());
    let descends = comptime!(blueprint.search == ScaleSearch::CoordinateDescent);
    let largest = largest_magnitude(elements, 0u32, blueprint.block_size);
    let own = block_scale(largest, tensor, comptime!(blueprint.rule));
    let normalization = block_normalization(largest, tensor.encode, grid);
    let amax = largest * normalization.factor;
    let mut code = own.code;
    let mut factor = own.factor;
    let searchable = is_searchable(largest, amax, &normalization, grid);
    if searchable {
        let best = if comptime!(descends) {
            descend::<H>(
                elements,
                codes,
                hessian,
                tensor,
                own.code,
                &normalization,
                amax,
                blueprint,
            )
        } else {
            search_nearest::<H>(
                elements,
                own.code,
                amax,
                &normalization,
                tensor,
                hessian,
                blueprint,
            )
        };
        if best != own.code {
            let chosen = candidate(best, &normalization, tensor, blueprint);
            code = chosen.code;
            factor = chosen.factor;
        }
    }
    if comptime!(descends) && searchable {
        #[unroll]
        for word in 0..words {
            codes[word as usize] = without_negative_zeros(codes[word as usize]);
        }
    } else {
        let limits = comptime!(limits_all(blueprint, 1));
        nearest_codes(elements, codes, 0u32, largest, factor, scale_args, limits, blueprint);
    }
    code
}

/// Returns the best scale for nearest codes, given the rule's own and the normalized amax.
#[cube]
fn search_nearest<H: Size>(
    elements: &Array<f32>,
    own: u32,
    amax: f32,
    normalization: &BlockNormalization,
    tensor: &TensorFactor,
    hessian: &BlockHessian<'_, H>,
    #[comptime] blueprint: Blueprint,
) -> u32 {
    let grid = comptime!(blueprint.grid());
    let size = comptime!(blueprint.block_size);
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let mut best = start(infinity, own, grid);
    let lowest = lowest(normalization, grid);
    let mut errors = Array::<f32>::new(comptime!((2 * size) as usize));
    // The rule's own scale and the top one, then all others downward.
    let mut first = own;
    let mut second = other_than(own, top(normalization, amax, grid));
    let mut first_counts = is_positive(own, grid);
    let mut goes_on = true;
    while goes_on {
        let tried = candidate(first, normalization, tensor, blueprint);
        nearest_errors(elements, &mut errors, 0u32, &tried, normalization, blueprint);
        let tried = candidate(second, normalization, tensor, blueprint);
        nearest_errors(elements, &mut errors, size, &tried, normalization, blueprint);
        let mut possible = true;
        if amax < tried.value * COARSE {
            let of_first = least_cost::<H>(&errors, 0u32, hessian, size);
            let of_second = least_cost::<H>(&errors, size, hessian, size);
            possible = of_first <= best.cost || of_second <= best.cost;
        }
        if possible {
            let hessian = again::<H>(hessian, second);
            let found = costs::<H>(&errors, &hessian, size, 2u32);
            let second_counts = is_left(second, lowest);
            improve(&mut best, select(first_counts, found[0], infinity), first, own);
            improve(&mut best, select(second_counts, found[1], infinity), second, own);
        }
        first = other_than(own, second - 1u32);
        second = other_than(own, first - 1u32);
        first_counts = true;
        goes_on = is_left(first, lowest);
        let value = value_in(normalization, first, grid);
        // With larger scales no element is beyond the largest code.
        let clips = goes_on && value * 6.0f32 < amax;
        if clips && is_hopeless::<H>(elements, value, normalization, best.cost, hessian, blueprint)
        {
            goes_on = false;
        }
    }
    best.code
}

/// Returns true if a scale is left. Below 0 codes wrap around.
#[cube]
fn is_left(code: u32, lowest: u32) -> bool {
    code >= lowest && code < 0x8000_0000u32
}

/// Returns a scale, or the one below if it is the rule's own, which has been tried.
#[cube]
fn other_than(own: u32, code: u32) -> u32 {
    code - select(code == own, 1u32, 0u32)
}

/// Returns true if no scale up to this value can be better, whatever the codes.
#[cube]
fn is_hopeless<H: Size>(
    elements: &Array<f32>,
    value: f32,
    normalization: &BlockNormalization,
    best: f32,
    hessian: &BlockHessian<'_, H>,
    #[comptime] blueprint: Blueprint,
) -> bool {
    let mut clipped = 0.0f32.runtime();
    #[unroll]
    for k in 0..blueprint.block_size {
        let bound = bound::<H>(hessian, k, blueprint.block_size);
        let bounded = (elements[k as usize] * normalization.factor).abs() * bound;
        clipped = max(clipped, fma(-6.0f32 * bound, value, bounded));
    }
    clipped * clipped > best
}

/// Writes the errors of the nearest codes with a scale, from `start` on.
#[cube]
fn nearest_errors(
    elements: &Array<f32>,
    errors: &mut Array<f32>,
    #[comptime] start: u32,
    tried: &Candidate,
    normalization: &BlockNormalization,
    #[comptime] blueprint: Blueprint,
) {
    #[unroll]
    for k in 0..blueprint.block_size {
        let element = elements[k as usize];
        let nearest = nearest_element(normalized(element, tried, blueprint));
        errors[comptime!((start + k) as usize)] =
            fma(-nearest, tried.value, element * normalization.factor);
    }
}
