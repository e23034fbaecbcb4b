//! Scale and codes together by coordinate descent on `r^T H r`; see `coordinate_descent.rs` in the
//! search crate.
//!
//! ```text
//! best = the rule's own scale
//! for scale in all others, from the smallest that rounds everything to 0, downward:
//!     nearest codes and their errors                                        (round_all)
//!     unless one of these errors alone costs more than the best:
//!         the gradient H r, and r^T H r of the nearest codes                (slope)
//!         codes moved one at a time while that lowers r^T H r               (sweep)
//!         best = scale and codes, if r^T H r is smaller
//!     stop where no smaller scale can be better, whatever the codes
//! ```
//!
//! The values that live across steps decide the occupancy: elements, their gradient and the values
//! of their codes, an f32 each. H, bounds and steps are read again wherever they are needed, and
//! anything that follows from elements and codes is computed again.

use burn_fp4_search::Method;
use cubecl::prelude::*;

use super::best::{Candidate, candidate, improve, normalized, start};
use super::block_hessian::{BlockHessian, again, anew, bound, costs, row_vector, step};
use crate::numeric::element::{element_value, nearest_element, round_to_e2m1};
use crate::numeric::rule::TensorFactor;
use crate::numeric::scale_grid::{BlockNormalization, lowest, top};
use crate::plan::Blueprint;

/// Largest number of passes over the elements of a block.
const SWEEPS: u32 = Method::SWEEPS as u32;

/// Returns the best scale, and writes its codes. `own` is the rule's own scale, `scaled` the
/// normalized amax.
#[cube]
pub(crate) fn descend<H: Size>(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    hessian: &BlockHessian<'_, H>,
    tensor: &TensorFactor,
    own: u32,
    normalization: &BlockNormalization,
    scaled: f32,
    #[comptime] blueprint: Blueprint,
) -> u32 {
    let words = comptime!(blueprint.block_size / 8);
    let grid = comptime!(blueprint.grid());
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let mut found = Array::<u32>::new(comptime!(words as usize));
    let mut best = start(infinity, own, grid);
    let lowest = lowest(normalization, grid);
    // The rule's own scale, then all others from the top down. Below 0 codes wrap around.
    let mut next = own;
    let mut is_own = true;
    while is_own || next >= lowest && next < 0x8000_0000u32 {
        let tried = candidate(next, normalization, tensor, blueprint);
        let outcome = try_scale::<H>(
            elements,
            &mut found,
            &tried,
            best.cost,
            normalization,
            hessian,
            blueprint,
        );
        let mut takes = is_own;
        if is_own {
            best.cost = start(outcome.cost, own, grid).cost;
            next = top(normalization, scaled, grid);
        } else {
            let before = best.code;
            improve(&mut best, outcome.cost, next, own);
            takes = best.code != before;
            let hopeless = outcome.clipped * outcome.clipped > best.cost;
            next = select(hopeless, 0xFFFF_FFFFu32, next - 1u32);
        }
        if takes {
            #[unroll]
            for word in 0..words {
                codes[word as usize] = found[word as usize];
            }
        }
        // The rule's own scale has been tried.
        next = select(next == own, next - 1u32, next);
        is_own = false;
    }
    best.code
}

/// Result of trying a scale.
#[derive(CubeType, Clone, Copy)]
struct TriedScale {
    /// Infinite if the scale cannot be better than the best.
    cost: f32,
    /// See [`Limits`].
    clipped: f32,
}

/// Returns the cost of a scale, and writes the codes that go with it.
#[cube]
fn try_scale<H: Size>(
    elements: &Array<f32>,
    found: &mut Array<u32>,
    tried: &Candidate,
    best: f32,
    normalization: &BlockNormalization,
    hessian: &BlockHessian<'_, H>,
    #[comptime] blueprint: Blueprint,
) -> TriedScale {
    let size = comptime!(blueprint.block_size);
    let words = comptime!(size / 8);
    let hessian = again::<H>(hessian, tried.code);
    let mut nearest = Array::<u32>::new(comptime!(words as usize));
    let mut errors = Array::<f32>::new(comptime!(size as usize));
    let limits = round_all::<H>(
        elements,
        &mut nearest,
        &mut errors,
        tried,
        normalization,
        &hessian,
        blueprint,
    );
    let mut result = f32::reinterpret(0x7F80_0000u32);
    if limits.largest * limits.largest <= best {
        let mut gradient = Array::<f32>::new(comptime!(size as usize));
        let of_nearest = slope::<H>(&mut gradient, &errors, &hessian, size);
        let turn = u32::reinterpret(of_nearest);
        let mut values = Array::<f32>::new(comptime!(size as usize));
        #[unroll]
        for word in 0..words {
            let eight = anew::<H>(nearest[word as usize], &hessian, turn);
            found[word as usize] = eight;
            #[unroll]
            for index in 0..8u32 {
                values[comptime!((word * 8 + index) as usize)] = value_at(eight, index);
            }
        }
        sweep::<H>(found, &mut values, &mut gradient, tried.value, &hessian, size);
        let factor =
            f32::reinterpret(anew::<H>(u32::reinterpret(normalization.factor), &hessian, turn));
        #[unroll]
        for k in 0..size {
            let element = elements[k as usize] * factor;
            errors[k as usize] = fma(-values[k as usize], tried.value, element);
        }
        let hessian = again::<H>(&hessian, turn);
        let of_moved = costs::<H>(&errors, &hessian, size, 1u32);
        let improved = of_moved[0] < of_nearest;
        result = select(improved, of_moved[0], of_nearest);
        #[unroll]
        for word in 0..words {
            let (moved, kept) = (found[word as usize], nearest[word as usize]);
            found[word as usize] = select(improved, moved, kept);
        }
    }
    TriedScale { cost: result, clipped: limits.clipped }
}

/// Square roots of lower bounds of the cost of errors.
#[derive(CubeType, Clone, Copy)]
struct Limits {
    /// Largest bound of an error of the nearest codes; other codes have larger errors.
    largest: f32,
    /// Largest bound among elements beyond the largest code. Their errors grow as scales shrink:
    /// if this bound exceeds the best cost, no smaller scale can be better.
    clipped: f32,
}

/// Rounds the elements to the nearest codes, and writes their errors.
#[cube]
fn round_all<H: Size>(
    elements: &Array<f32>,
    nearest: &mut Array<u32>,
    errors: &mut Array<f32>,
    tried: &Candidate,
    normalization: &BlockNormalization,
    hessian: &BlockHessian<'_, H>,
    #[comptime] blueprint: Blueprint,
) -> Limits {
    let size = comptime!(blueprint.block_size);
    let factor =
        f32::reinterpret(anew::<H>(u32::reinterpret(normalization.factor), hessian, tried.code));
    let mut largest = 0.0f32.runtime();
    let mut clipped = 0.0f32.runtime();
    #[unroll]
    for word in 0..comptime!(size / 8) {
        let mut packed = 0u32;
        #[unroll]
        for index in 0..8u32 {
            let k = comptime!(word * 8 + 7 - index);
            let element = elements[k as usize];
            let normalized = normalized(element, tried, blueprint);
            let error = fma(-nearest_element(normalized), tried.value, element * factor);
            let least = error.abs() * bound::<H>(hessian, k, size);
            errors[k as usize] = error;
            largest = max(largest, least);
            let clips = normalized.abs() >= 6.0f32;
            clipped = max(clipped, select(clips, least, 0.0f32));
            packed = (packed << 4u32) | (round_to_e2m1(normalized) >> 28u32);
        }
        nearest[word as usize] = packed;
    }
    Limits { largest, clipped }
}

/// Writes the gradient `H r` and returns `r^T H r`, each sum in the order of the reference. H is
/// symmetric: a row is read up to its diagonal, and its values also enter the gradients of the
/// elements before.
#[cube]
fn slope<H: Size>(
    gradient: &mut Array<f32>,
    errors: &Array<f32>,
    hessian: &BlockHessian<'_, H>,
    #[comptime] size: u32,
) -> f32 {
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for i in 0..size {
        let error = errors[i as usize];
        let mut of_row = 0.0f32.runtime();
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for vector in 0..comptime!(i / 4 + 1) {
            let row = row_vector::<H>(hessian, comptime!(i * size / 4 + vector));
            #[unroll]
            for index in 0..4u32 {
                let j = comptime!((vector * 4 + index) as usize);
                let entry = row.extract(comptime!(index as usize));
                if comptime!(vector * 4 + index < i) {
                    let before = errors[j];
                    // Doubling either factor is exact.
                    sum = fma(entry, 2.0f32 * before, sum);
                    of_row = fma(entry, before, of_row);
                    gradient[j] = fma(entry, error, gradient[j]);
                } else if comptime!(vector * 4 + index == i) {
                    sum = fma(entry, error, sum);
                    of_row = fma(entry, error, of_row);
                }
            }
        }
        gradient[i as usize] = of_row;
        cost = fma(error, sum, cost);
    }
    cost
}

/// Moves elements one at a time to the best code while all others stay, until none moves.
#[cube]
fn sweep<H: Size>(
    found: &mut Array<u32>,
    values: &mut Array<f32>,
    gradient: &mut Array<f32>,
    scale: f32,
    hessian: &BlockHessian<'_, H>,
    #[comptime] size: u32,
) {
    let reciprocal = 1.0f32 / scale;
    let mut sweeps = 0u32;
    while sweeps < SWEEPS {
        let mut changed = false;
        let hessian = again::<H>(hessian, sweeps);
        #[unroll]
        for i in 0..size {
            let now = values[i as usize];
            let step = step::<H>(&hessian, i, size);
            let target = fma(gradient[i as usize], step, now * scale);
            let normalized = target * reciprocal;
            let next = nearest_element(normalized);
            let change = (next - now) * scale;
            if change != 0.0f32 {
                changed = true;
                values[i as usize] = next;
                let word = comptime!((i / 8) as usize);
                let code = round_to_e2m1(normalized) & 0xF000_0000u32;
                let others = found[word] & comptime!(!(0xFu32 << (4 * (i % 8))));
                found[word] = others | (code >> comptime!(28 - 4 * (i % 8)));
                #[unroll]
                for vector in 0..comptime!(size / 4) {
                    let row = row_vector::<H>(&hessian, comptime!(i * size / 4 + vector));
                    #[unroll]
                    for index in 0..4u32 {
                        let k = comptime!((vector * 4 + index) as usize);
                        let entry = row.extract(comptime!(index as usize));
                        gradient[k] = fma(-entry, change, gradient[k]);
                    }
                }
            }
        }
        sweeps = select(changed, sweeps + 1u32, SWEEPS);
    }
}

/// Turns -0 into +0 among eight codes.
#[cube]
pub(crate) fn without_negative_zeros(codes: u32) -> u32 {
    let magnitudes = codes | (codes >> 1u32) | (codes >> 2u32);
    codes & (0x7777_7777u32 | ((magnitudes & 0x1111_1111u32) << 3u32))
}

/// Returns the value of one of eight codes.
#[cube]
fn value_at(codes: u32, #[comptime] index: u32) -> f32 {
    element_value(codes << comptime!(28 - 4 * index))
}
