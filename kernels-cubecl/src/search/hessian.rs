//! The scale with the smallest `r^T H r` for nearest codes; see `hessian.rs` in the search crate.
//! Scale and codes by coordinate descent are from `coordinate_descent.rs`.
//!
//! ```text
//! best = the rule's own scale
//! for scale in all from the first that leaves only zeros, downward:
//!     stop where no smaller scale can be better, whatever the codes     (is_hopeless)
//!     best = scale, if r^T H r of the nearest codes is smaller          (cost_of)
//! ```

use burn_fp4_search::ScaleSearch;
use cubecl::prelude::*;

use super::amax::largest_magnitude;
use super::best::{Candidate, candidate, improve, start};
use super::block_hessian::{BlockHessian, bound, cost};
use super::coordinate_descent::{descend, without_negative_zeros};
use crate::arith::element::{nearest_element, round_to_e2m1};
use crate::arith::rule::{Factors, TensorFactor, block_scale, code_mask, normalize};
use crate::arith::scale_grid::{Unit, is_searchable, lowest, top, unit};
use crate::plan::Recipe;

/// The best scale, and codes that go with it.
#[cube]
pub(crate) fn search<H: Size>(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    hessian: &BlockHessian<'_, H>,
    tensor: &TensorFactor,
    factors: &Factors,
    #[comptime] recipe: Recipe,
) -> u32 {
    let grid = comptime!(recipe.grid());
    let descends = comptime!(recipe.search == ScaleSearch::CoordinateDescent);
    let largest = largest_magnitude(elements, 0u32, recipe.block_size);
    let own = block_scale(largest, tensor, comptime!(recipe.rule));
    let unit = unit(largest, tensor.encode, grid);
    let scaled = largest * unit.factor;
    let mut code = own.code;
    let mut factor = own.factor;
    let searchable = is_searchable(largest, scaled, &unit, grid);
    if searchable {
        if comptime!(descends) {
            code = descend::<H>(elements, codes, hessian, tensor, own.code, &unit, scaled, recipe);
        } else {
            code =
                scale_of_nearest::<H>(elements, hessian, tensor, own.code, &unit, scaled, recipe);
            if code != own.code {
                factor = candidate(code, &unit, tensor, recipe).factor;
            }
        }
    }
    if comptime!(descends) && searchable {
        #[unroll]
        for word in 0..comptime!(recipe.block_size / 8) {
            codes[word as usize] = without_negative_zeros(codes[word as usize]);
        }
    } else {
        round_block(elements, codes, factor, factors, recipe);
    }
    code
}

/// The best scale for nearest codes. `own` is the rule's own scale, `scaled` the largest
/// magnitude in the units of the block.
#[cube]
fn scale_of_nearest<H: Size>(
    elements: &Array<f32>,
    hessian: &BlockHessian<'_, H>,
    tensor: &TensorFactor,
    own: u32,
    unit: &Unit,
    scaled: f32,
    #[comptime] recipe: Recipe,
) -> u32 {
    let grid = comptime!(recipe.grid());
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let mut best = start(infinity, own, grid);
    let lowest = lowest(unit, grid);
    // The rule's own scale, then all from the top down; below 0 codes wrap around.
    let mut next = own;
    let mut is_own = true;
    while is_own || next >= lowest && next < 0x8000_0000u32 {
        let tried = candidate(next, unit, tensor, recipe);
        if is_hopeless::<H>(elements, tried.value, unit, best.cost, hessian, recipe) {
            next = 0xFFFF_FFFFu32;
        } else {
            let found = cost_of::<H>(elements, &tried, best.cost, unit, hessian, recipe);
            if is_own {
                best.cost = start(found, own, grid).cost;
                next = top(unit, scaled, grid);
            } else {
                improve(&mut best, found, next, own);
                next -= 1u32;
            }
        }
        is_own = false;
    }
    best.code
}

/// The nearest codes of a block.
#[cube]
fn round_block(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    factor: f32,
    factors: &Factors,
    #[comptime] recipe: Recipe,
) {
    let rule = comptime!(recipe.rule);
    let mask = code_mask(factor, rule);
    #[unroll]
    for word in 0..comptime!(recipe.block_size / 8) {
        let mut packed = 0u32;
        #[unroll]
        for index in 0..8u32 {
            let element = elements[comptime!((word * 8 + 7 - index) as usize)];
            let normalized = normalize(element, factor, factors, rule);
            packed = (packed << 4u32) | (round_to_e2m1(normalized) >> 28u32);
        }
        codes[word as usize] = packed & mask;
    }
}

/// Whether no scale up to one of this value can be better, whatever the codes.
#[cube]
fn is_hopeless<H: Size>(
    elements: &Array<f32>,
    value: f32,
    unit: &Unit,
    best: f32,
    hessian: &BlockHessian<'_, H>,
    #[comptime] recipe: Recipe,
) -> bool {
    let mut clipped = 0.0f32.runtime();
    #[unroll]
    for k in 0..recipe.block_size {
        let bound = bound::<H>(hessian, k, recipe.block_size);
        let bounded = (elements[k as usize] * unit.factor).abs() * bound;
        clipped = max(clipped, fma(-6.0f32 * bound, value, bounded));
    }
    clipped * clipped > best
}

/// The cost of a scale; infinite if it cannot be better than the best.
#[cube]
fn cost_of<H: Size>(
    elements: &Array<f32>,
    tried: &Candidate,
    best: f32,
    unit: &Unit,
    hessian: &BlockHessian<'_, H>,
    #[comptime] recipe: Recipe,
) -> f32 {
    let size = comptime!(recipe.block_size);
    let mut errors = Array::<f32>::new(comptime!(size as usize));
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for k in 0..size {
        let element = elements[k as usize];
        let normalized = if comptime!(recipe.divides()) {
            element / tried.factor
        } else {
            element * tried.factor
        };
        let error = fma(-nearest_element(normalized), tried.value, element * unit.factor);
        errors[k as usize] = error;
        largest = max(largest, error.abs() * bound::<H>(hessian, k, size));
    }
    let mut result = f32::reinterpret(0x7F80_0000u32);
    if largest * largest <= best {
        result = cost::<H>(&errors, hessian, size);
    }
    result
}
