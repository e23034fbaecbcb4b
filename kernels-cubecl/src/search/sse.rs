//! The scale with the smallest squared error, of a row's block or of a 16 x 16 tile; see
//! [`ScaleSearch::Sse`](burn_fp4_search::ScaleSearch).
//!
//! `sse.rs` in the search crate derives which scales are tried, and why no other can be better.

use burn_fp4_search::scale_grid::{HALF_IS_AS_GOOD, MARGIN};
use cubecl::prelude::*;

use super::best::{Best, Candidate, candidate, improve, normalized, own_candidate, start};
use super::quantize_args::QuantizeArgs;
use crate::numeric::element::{UNLIMITED, nearest_magnitude, nearest_unlimited};
use crate::numeric::rule::{
    BlockScale, BlockScales, TensorFactor, block_scale, normalize_magnitude, tensor_factor,
};
use crate::numeric::scale_grid::{
    BlockNormalization, Window, block_normalization, is_searchable, window,
};
use crate::plan::{Blueprint, TileSharing};
use crate::tensor::indexing::{TileOrigin, at_row};
use crate::tensor::load_store::load_blocks;
use crate::tensor::tile_reduce::sum_of_tile;

/// Factors that widen the limits of a window.
const MORE: f32 = 1.0 + MARGIN;
const LESS: f32 = 1.0 - MARGIN;

/// Returns the scales to try for a block whose normalized amax is `scaled`.
#[cube]
fn window_of(
    normalization: &BlockNormalization,
    scaled: f32,
    crest: f32,
    #[comptime] blueprint: Blueprint,
) -> Window {
    let above = scaled / crest * LESS;
    let upto = scaled / HALF_IS_AS_GOOD * MORE;
    window(normalization, scaled, above, upto, comptime!(blueprint.grid()))
}

/// Returns the scale to try after another. Wraps below 0.
#[cube]
fn next(window: &Window, code: u32) -> u32 {
    code - select(code > window.high + 1u32, 2u32, 1u32)
}

/// Returns true if a scale is in the window. It may have wrapped below 0.
#[cube]
fn is_left(window: &Window, code: u32) -> bool {
    code >= window.low && code < 0x8000_0000u32
}

/// Returns true if a scale is tried next. The pass without limits also ends where an element is
/// beyond the largest code, given the largest magnitude and the factor of the scale.
#[cube]
fn is_next(
    window: &Window,
    code: u32,
    largest: f32,
    factor: f32,
    #[comptime] limits: bool,
    #[comptime] blueprint: Blueprint,
) -> bool {
    let left = is_left(window, code);
    if comptime!(limits) {
        left
    } else {
        let is_unlimited =
            normalize_magnitude(largest, factor, comptime!(blueprint.rule)) < UNLIMITED;
        left && is_unlimited
    }
}

/// Weight of a row's largest element (the largest weight if several are), and the sum of all.
#[derive(CubeType, Clone, Copy)]
struct Weights {
    largest: f32,
    total: f32,
}

#[cube]
fn weights_of(
    elements: &Array<f32>,
    #[comptime] start: u32,
    largest: f32,
    weights: &[f32],
    channel: u32,
    #[comptime] blueprint: Blueprint,
) -> Weights {
    if comptime!(blueprint.weighted) {
        let mut of_largest = 0.0f32.runtime();
        let mut total = 0.0f32.runtime();
        #[unroll]
        for k in 0..blueprint.block_size {
            let weight = weights[(channel + k) as usize];
            let is_largest = elements[(start + k) as usize].abs() == largest;
            of_largest = select(is_largest, max(weight, of_largest), of_largest);
            total += weight;
        }
        Weights { largest: of_largest, total }
    } else {
        let total = comptime!(blueprint.block_size as f32);
        Weights { largest: 1.0f32.runtime(), total: total.runtime() }
    }
}

#[cube]
fn crest(weights: &Weights) -> f32 {
    let crest = 7.0f32 + (weights.total - weights.largest) / (16.0f32 * weights.largest);
    select(weights.largest > 0.0f32, crest, f32::reinterpret(0x7F80_0000u32))
}

/// Returns true if no scale up to this value can be better.
#[cube]
fn is_hopeless(value: f32, amax: f32, weight: f32, best: &Best) -> bool {
    let clipped = max(fma(-6.0f32, value, amax), 0.0f32);
    (weight * clipped) * clipped > best.cost
}

/// Returns the weighted squared error of a row with a scale, summed in element order. With
/// `limits`, elements may be beyond the largest code.
#[cube]
fn cost(
    elements: &Array<f32>,
    #[comptime] start: u32,
    candidate: &Candidate,
    normalization: &BlockNormalization,
    weights: &[f32],
    channel: u32,
    #[comptime] limits: bool,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for k in 0..blueprint.block_size {
        // A value and its code have the same sign: their magnitudes have the same squared error.
        let magnitude = elements[comptime!((start + k) as usize)].abs();
        let normalized = normalized(magnitude, candidate, blueprint);
        let nearest = if comptime!(limits) {
            nearest_magnitude(normalized)
        } else {
            nearest_unlimited(normalized)
        };
        let error = fma(-nearest, candidate.value, magnitude * normalization.factor);
        let weighted = if comptime!(blueprint.weighted) {
            weights[(channel + k) as usize] * error
        } else {
            error
        };
        cost = fma(weighted, error, cost);
    }
    cost
}

/// Returns the best scale of a row's block.
#[cube]
fn search_row(
    elements: &Array<f32>,
    #[comptime] start_at: u32,
    largest: f32,
    tensor: &TensorFactor,
    weights: &[f32],
    channel: u32,
    #[comptime] blueprint: Blueprint,
) -> BlockScale {
    let grid = comptime!(blueprint.grid());
    let own = block_scale(largest, tensor, comptime!(blueprint.rule));
    let normalization = block_normalization(largest, tensor.encode, grid);
    let scaled = largest * normalization.factor;
    let mut chosen_code = own.code;
    let mut chosen_factor = own.factor;
    if is_searchable(largest, scaled, &normalization, grid) {
        let weight = weights_of(elements, start_at, largest, weights, channel, blueprint);
        let window = window_of(&normalization, scaled, crest(&weight), blueprint);
        let mut best = start(f32::reinterpret(0x7F80_0000u32), own.code, grid);
        // The window contains the rule's own scale, except at the ends of the grid.
        if own.code < window.low || own.code > window.high {
            let tried = own_candidate(&own, &normalization, blueprint);
            let found =
                cost(elements, start_at, &tried, &normalization, weights, channel, true, blueprint);
            best.cost = start(found, own.code, grid).cost;
        }
        let mut code = max(window.high, window.odd);
        let first = candidate(code, &normalization, tensor, blueprint);
        let mut value = first.value;
        let mut factor = first.factor;
        // The first pass skips clamping: elements are beyond the largest code only with the last
        // few scales, or none.
        #[unroll]
        for pass in 0..2u32 {
            let limits = comptime!(pass == 1);
            while is_next(&window, code, largest, factor, limits, blueprint) {
                let tried = Candidate { code, value, factor };
                let found = cost(
                    elements,
                    start_at,
                    &tried,
                    &normalization,
                    weights,
                    channel,
                    limits,
                    blueprint,
                );
                improve(&mut best, found, code, own.code);
                let below = candidate(next(&window, code), &normalization, tensor, blueprint);
                value = below.value;
                factor = below.factor;
                let hopeless = is_hopeless(value, scaled, weight.largest, &best);
                code = select(hopeless, 0xFFFF_FFFFu32, below.code);
            }
        }
        if best.code != own.code {
            let chosen = candidate(best.code, &normalization, tensor, blueprint);
            chosen_code = chosen.code;
            chosen_factor = chosen.factor;
        }
    }
    BlockScale { code: chosen_code, factor: chosen_factor }
}

/// Sets the best scales of a thread tile, given the largest magnitudes.
#[cube]
pub(crate) fn search_sse<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    largest: &Array<f32>,
    origin: &TileOrigin,
    scales: &mut BlockScales,
) {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let channel = origin.block * blueprint.block_size;
    if comptime!(thread_tile.sharing == TileSharing::None) {
        #[unroll]
        for row in 0..thread_tile.rows {
            let tensor = tensor_factor(args.amax, origin.row + row, &args.scale_args, blueprint);
            let start = comptime!(row * blueprint.block_size);
            let of_row = largest[row as usize];
            let found =
                search_row(elements, start, of_row, &tensor, args.weights, channel, blueprint);
            scales.codes[row as usize] = found.code;
            scales.factors[row as usize] = found.factor;
        }
    } else {
        let found = search_tile::<E, N>(args, elements, largest[0], origin);
        #[unroll]
        for row in 0..thread_tile.rows {
            scales.codes[row as usize] = found.code;
            scales.factors[row as usize] = found.factor;
        }
    }
}

/// Returns the best scale of a 16 x 16 tile. Units that hold its rows try the same scales in
/// lockstep.
#[cube]
fn search_tile<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    largest: f32,
    origin: &TileOrigin,
) -> BlockScale {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let grid = comptime!(blueprint.grid());
    let tensor = tensor_factor(args.amax, origin.row, &args.scale_args, blueprint);
    let own = block_scale(largest, &tensor, comptime!(blueprint.rule));
    let normalization = block_normalization(largest, tensor.encode, grid);
    let scaled = largest * normalization.factor;
    // A bound that is safe for any weights: only scales that saturate more are left out.
    let rows = args.dims.rows;
    let rows_of_tile = min(rows - min(origin.row / 16 * 16, rows), 16u32);
    let count = f32::cast_from(rows_of_tile * blueprint.block_size);
    let even = Weights { largest: 1.0f32.runtime(), total: count };
    let limit =
        if comptime!(blueprint.weighted) { f32::reinterpret(0x7F80_0000u32) } else { crest(&even) };
    let window = window_of(&normalization, scaled, limit, blueprint);
    let searchable = is_searchable(largest, scaled, &normalization, grid);
    let mut code = max(window.high, window.odd);
    let steps = select(searchable, code + 1u32 - min(window.low, code + 1u32), 0u32);
    // The shuffles need all units of a plane.
    let steps = if comptime!(thread_tile.sharing == TileSharing::Exchanged) {
        plane_max(steps)
    } else {
        steps
    };
    let tried = own_candidate(&own, &normalization, blueprint);
    let own_cost = tile_cost::<E, N>(args, elements, origin, &tried, &normalization);
    let mut best = start(own_cost, own.code, grid);
    for _ in 0..steps {
        let tried = candidate(code, &normalization, &tensor, blueprint);
        let found = tile_cost::<E, N>(args, elements, origin, &tried, &normalization);
        if is_left(&window, code) {
            improve(&mut best, found, code, own.code);
        }
        code = next(&window, code);
    }
    let mut chosen_code = own.code;
    let mut chosen_factor = own.factor;
    if searchable && best.code != own.code {
        let chosen = candidate(best.code, &normalization, &tensor, blueprint);
        chosen_code = chosen.code;
        chosen_factor = chosen.factor;
    }
    BlockScale { code: chosen_code, factor: chosen_factor }
}

/// Returns the cost of a 16 x 16 tile, of which a unit holds some rows or reads all.
#[cube]
fn tile_cost<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    origin: &TileOrigin,
    tried: &Candidate,
    normalization: &BlockNormalization,
) -> f32 {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let block_size = comptime!(blueprint.block_size);
    let channel = origin.block * block_size;
    let rows = args.dims.rows;
    let count =
        comptime!(if thread_tile.sharing == TileSharing::Repeated { 16 } else { thread_tile.rows });
    let mut costs = Array::<f32>::new(comptime!(count as usize));
    if comptime!(thread_tile.sharing == TileSharing::Repeated) {
        #[unroll]
        for index in 0..16u32 {
            let row = origin.row / 16 * 16 + index;
            let neighbour = at_row(origin, &args.dims, min(row, rows - 1), block_size, thread_tile);
            let elements =
                load_blocks::<E, N>(args.values, &neighbour, &args.dims, block_size, thread_tile);
            let found =
                cost(&elements, 0u32, tried, normalization, args.weights, channel, true, blueprint);
            costs[index as usize] = select(row < rows, found, 0.0f32);
        }
    } else {
        #[unroll]
        for row in 0..thread_tile.rows {
            let start = comptime!(row * block_size);
            let found =
                cost(elements, start, tried, normalization, args.weights, channel, true, blueprint);
            costs[row as usize] = select(row < origin.rows_left, found, 0.0f32);
        }
    }
    sum_of_tile(&mut costs, count);
    costs[0]
}
