//! The scale with the smallest `r^T H r` for nearest codes, or for those of coordinate descent; see
//! `hessian.rs` in the search crate.
//!
//! ```text
//! best = the rule's own scale
//! for scale in all from the first that leaves only zeros, downward:
//!     stop where no smaller scale can be better, whatever the codes     (is_hopeless)
//!     codes = nearest elements, moved by coordinate descent if asked for
//!     best = scale and codes, if r^T H r is smaller
//! ```

use burn_fp4_search::ScaleSearch;
use cubecl::prelude::*;

use super::amax::largest_magnitude;
use super::best::{Candidate, candidate, improve, start};
use super::block_hessian::{BlockHessian, bound, cost};
use super::coordinate_descent::{steps, sweep, value_at, without_negative_zeros};
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
    let words = comptime!(recipe.block_size / 8);
    let grid = comptime!(recipe.grid());
    let descends = comptime!(recipe.search == ScaleSearch::CoordinateDescent);
    let largest = largest_magnitude(elements, 0u32, recipe.block_size);
    let own = block_scale(largest, tensor, comptime!(recipe.rule));
    let unit = unit(largest, tensor.encode, grid);
    let scaled_amax = largest * unit.factor;
    let mut code = own.code;
    let mut factor = own.factor;
    let searchable = is_searchable(largest, scaled_amax, &unit, grid);
    if searchable {
        let mut found = Array::<u32>::new(comptime!(words as usize));
        let infinity = f32::reinterpret(0x7F80_0000u32);
        let mut best = start(infinity, own.code, grid);
        let lowest = lowest(&unit, grid);
        let steps = steps::<H>(hessian, comptime!(recipe.block_size));
        // The rule's own scale, then all from the top down; below 0 codes wrap around.
        let mut next = own.code;
        let mut is_own = true;
        while is_own || next >= lowest && next < 0x8000_0000u32 {
            let tried = candidate(next, &unit, tensor, recipe);
            if is_hopeless::<H>(elements, tried.value, &unit, best.cost, hessian, recipe) {
                next = 0xFFFF_FFFFu32;
            } else {
                let cost = try_scale::<H>(
                    elements, &mut found, &tried, best.cost, &unit, &steps, hessian, recipe,
                );
                let mut takes = is_own;
                if is_own {
                    best.cost = start(cost, own.code, grid).cost;
                    next = top(&unit, scaled_amax, grid);
                } else {
                    let before = best.code;
                    improve(&mut best, cost, next, own.code);
                    takes = best.code != before;
                    next -= 1u32;
                }
                if comptime!(descends) && takes {
                    #[unroll]
                    for word in 0..words {
                        codes[word as usize] = found[word as usize];
                    }
                }
            }
            is_own = false;
        }
        if best.code != own.code {
            let chosen = candidate(best.code, &unit, tensor, recipe);
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
        round_block(elements, codes, factor, factors, recipe);
    }
    code
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
        let bound = bound::<H>(hessian, k);
        let bounded = (elements[k as usize] * unit.factor).abs() * bound;
        clipped = max(clipped, fma(-6.0f32 * bound, value, bounded));
    }
    clipped * clipped > best
}

/// The cost of a scale, and for coordinate descent the codes that go with it; infinite if it cannot
/// be better than the best.
#[cube]
fn try_scale<H: Size>(
    elements: &Array<f32>,
    found: &mut Array<u32>,
    tried: &Candidate,
    best: f32,
    unit: &Unit,
    steps: &Array<f32>,
    hessian: &BlockHessian<'_, H>,
    #[comptime] recipe: Recipe,
) -> f32 {
    let size = comptime!(recipe.block_size);
    let words = comptime!(size / 8);
    let mut nearest = Array::<u32>::new(comptime!(words as usize));
    let mut errors = Array::<f32>::new(comptime!(size as usize));
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for word in 0..words {
        let mut packed = 0u32;
        #[unroll]
        for index in 0..8u32 {
            let k = comptime!(word * 8 + 7 - index);
            let element = elements[k as usize];
            let normalized = if comptime!(recipe.divides()) {
                element / tried.factor
            } else {
                element * tried.factor
            };
            let rounded = nearest_element(normalized);
            let error = fma(-rounded, tried.value, element * unit.factor);
            errors[k as usize] = error;
            largest = max(largest, error.abs() * bound::<H>(hessian, k));
            packed = (packed << 4u32) | (round_to_e2m1(rounded) >> 28u32);
        }
        nearest[word as usize] = packed;
        found[word as usize] = packed;
    }
    let mut result = f32::reinterpret(0x7F80_0000u32);
    if largest * largest <= best {
        result = cost::<H>(&errors, hessian, size);
        if comptime!(recipe.search == ScaleSearch::CoordinateDescent) {
            sweep::<H>(found, &errors, steps, tried.value, hessian, size);
            #[unroll]
            for k in 0..size {
                let scaled = elements[k as usize] * unit.factor;
                let element = value_at(found[comptime!((k / 8) as usize)], comptime!(k % 8));
                errors[k as usize] = fma(-element, tried.value, scaled);
            }
            let descended = cost::<H>(&errors, hessian, size);
            let improved = descended < result;
            result = select(improved, descended, result);
            #[unroll]
            for word in 0..words {
                let (moved, kept) = (found[word as usize], nearest[word as usize]);
                found[word as usize] = select(improved, moved, kept);
            }
        }
    }
    result
}
