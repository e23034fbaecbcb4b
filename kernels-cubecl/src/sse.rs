//! The scale with the smallest squared error, of a row's block or of a tile; see
//! [`ScaleSearch::Sse`](burn_fp4_search::ScaleSearch).
//!
//! The scales that are tried, and why no other can be better, are those of `sse.rs` in the search crate.

use burn_fp4_search::formats::Fp4Format;
use cubecl::prelude::*;

use crate::block::{BlockScales, sum_of_tile};
use crate::element::nearest_element;
use crate::plan::{Share, Tile};
use crate::scale::{
    BlockScale, Factors, Method, TensorFactor, block_scale, factor_of, round_down_to_e4m3,
    tensor_factor,
};
use crate::share::{Extent, Place, at_row, load_blocks};

/// In which units a block is searched: elements times `factor`, scales 2^(code - base) or those of E4M3.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) factor: f32,
    pub(crate) base: u32,
}

#[cube]
pub(crate) fn unit(largest: f32, tensor: &TensorFactor, #[comptime] format: Fp4Format) -> Unit {
    if comptime!(format == Fp4Format::NvFp4) {
        Unit { factor: tensor.encode, base: 0u32.runtime() }
    } else {
        let base = max(u32::reinterpret(largest) >> 23u32, 2u32) - 2u32;
        Unit { factor: f32::reinterpret((254u32 - min(base, 253u32)) << 23u32), base }
    }
}

/// The value of a scale in the units of its block.
#[cube]
pub(crate) fn value_in(unit: &Unit, code: u32, #[comptime] format: Fp4Format) -> f32 {
    if comptime!(format == Fp4Format::NvFp4) {
        let normal = f32::reinterpret((code << 20u32) + 0x3C00_0000u32);
        select(code < 8u32, f32::cast_from(code) * 0.001953125f32, normal)
    } else {
        f32::reinterpret((code - unit.base + 127u32) << 23u32)
    }
}

/// Whether there is anything to search for: not among zeros, infinities and NaN, nor at the ends
/// of f32; see `block.rs` in the search crate.
#[cube]
pub(crate) fn is_searchable(
    largest: f32,
    amax: f32,
    unit: &Unit,
    #[comptime] format: Fp4Format,
) -> bool {
    let in_range = if comptime!(format == Fp4Format::NvFp4) {
        // 2^118
        unit.factor <= f32::reinterpret(0x7A80_0000u32)
    } else {
        unit.base >= 2u32 && unit.base < 252u32
    };
    in_range && largest > 0.0f32 && amax <= f32::reinterpret(0x7F7F_FFFFu32)
}

/// Scales to try, from the largest down: `odd` codes to `high`, then all to `low`.
#[derive(CubeType, Clone, Copy)]
struct Window {
    high: u32,
    low: u32,
    odd: u32,
}

#[cube]
fn window(unit: &Unit, amax: f32, crest: f32, #[comptime] format: Fp4Format) -> Window {
    let margin = 0.0009765625f32;
    let above = amax / crest * (1.0f32 - margin);
    let upto = amax / 3.5f32 * (1.0f32 + margin);
    if comptime!(format == Fp4Format::NvFp4) {
        let multiples = u32::cast_from(min(amax * 2048.0f32, 15.0f32));
        Window {
            high: round_down_to_e4m3(upto),
            low: min(round_down_to_e4m3(above) + 1u32, 0x77u32),
            odd: (max(multiples, 1u32) - 1u32) | 1u32,
        }
    } else {
        // Exponents of f32, with the base added before 127 is taken away: no less than 0.
        let below = (u32::reinterpret(above) >> 23u32) + unit.base;
        let high = (u32::reinterpret(upto) >> 23u32) + unit.base;
        let lowest = max(unit.base, 30u32) - 30u32;
        Window {
            high: min(max(high, 127u32) - 127u32, 254u32),
            low: max(max(below + 1u32, 127u32) - 127u32, lowest),
            odd: 0u32.runtime(),
        }
    }
}

/// The best scale so far.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Best {
    pub(crate) cost: f32,
    pub(crate) code: u32,
}

/// Takes a scale, tried after all larger ones, if it is better: of equals the rule's own stays, of others
/// the smallest.
#[cube]
pub(crate) fn improve(best: &mut Best, cost: f32, code: u32, own: u32) {
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let equal = cost == best.cost && best.code != own && cost < infinity;
    let is_better = cost < best.cost || equal;
    best.cost = select(is_better, cost, best.cost);
    best.code = select(is_better, code, best.code);
}

/// What a search starts with: the rule's own scale, if it is one.
#[cube]
pub(crate) fn start(cost: f32, own: u32, #[comptime] format: Fp4Format) -> Best {
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let counts = cost < infinity && (comptime!(format == Fp4Format::MxFp4) || own > 0u32);
    Best { cost: select(counts, cost, infinity), code: own }
}

/// The scale to try after another. Wraps below 0.
#[cube]
fn next(window: &Window, code: u32) -> u32 {
    code - select(code > window.high + 1u32, 2u32, 1u32)
}

/// Whether a scale is among those to try, of which one may have wrapped below 0.
#[cube]
fn is_left(window: &Window, code: u32) -> bool {
    code >= window.low && code < 0x8000_0000u32
}

/// Weight of the largest element of a row, the largest if there are several, and the sum of all.
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
    #[comptime] method: Method,
) -> Weights {
    if comptime!(method.weighted) {
        let mut of_largest = 0.0f32.runtime();
        let mut total = 0.0f32.runtime();
        #[unroll]
        for k in 0..method.block_size {
            let weight = weights[(channel + k) as usize];
            let is_largest = elements[(start + k) as usize].abs() == largest;
            of_largest = select(is_largest, max(weight, of_largest), of_largest);
            total += weight;
        }
        Weights { largest: of_largest, total }
    } else {
        let total = comptime!(method.block_size as f32);
        Weights { largest: 1.0f32.runtime(), total: total.runtime() }
    }
}

#[cube]
fn crest(weights: &Weights) -> f32 {
    let crest = 7.0f32 + (weights.total - weights.largest) / (16.0f32 * weights.largest);
    select(weights.largest > 0.0f32, crest, f32::reinterpret(0x7F80_0000u32))
}

/// Whether no scale up to one of this value can be better.
#[cube]
fn is_hopeless(value: f32, amax: f32, weight: f32, best: &Best) -> bool {
    let clipped = max(fma(-6.0f32, value, amax), 0.0f32);
    (weight * clipped) * clipped > best.cost
}

/// The weighted squared error of a row with a scale, summed in element order.
#[cube]
fn cost(
    elements: &Array<f32>,
    #[comptime] start: u32,
    value: f32,
    factor: f32,
    unit: &Unit,
    weights: &[f32],
    channel: u32,
    #[comptime] method: Method,
) -> f32 {
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for k in 0..method.block_size {
        let element = elements[comptime!((start + k) as usize)];
        let nearest = if comptime!(method.divides()) {
            nearest_element(element / factor)
        } else {
            nearest_element(element * factor)
        };
        let error = fma(-nearest, value, element * unit.factor);
        let weighted = if comptime!(method.weighted) {
            weights[(channel + k) as usize] * error
        } else {
            error
        };
        cost = fma(weighted, error, cost);
    }
    cost
}

/// The scale of the block of a row.
#[cube]
fn search_row(
    elements: &Array<f32>,
    #[comptime] start_at: u32,
    largest: f32,
    tensor: &TensorFactor,
    weights: &[f32],
    channel: u32,
    #[comptime] method: Method,
) -> BlockScale {
    let rule = comptime!(method.rule);
    let format = comptime!(rule.row().format);
    let own = block_scale(largest, tensor, rule);
    let unit = unit(largest, tensor, format);
    let amax = largest * unit.factor;
    let mut chosen_code = own.code;
    let mut chosen_factor = own.factor;
    if is_searchable(largest, amax, &unit, format) {
        let value = value_in(&unit, own.code, format);
        let own_cost = cost(elements, start_at, value, own.factor, &unit, weights, channel, method);
        let mut best = start(own_cost, own.code, format);
        let weight = weights_of(elements, start_at, largest, weights, channel, method);
        let window = window(&unit, amax, crest(&weight), format);
        let mut code = max(window.high, window.odd);
        while is_left(&window, code) {
            let value = value_in(&unit, code, format);
            let factor = factor_of(code, value, tensor, rule);
            let found = cost(elements, start_at, value, factor, &unit, weights, channel, method);
            improve(&mut best, found, code, own.code);
            code = next(&window, code);
            let hopeless = is_hopeless(value_in(&unit, code, format), amax, weight.largest, &best);
            code = select(hopeless, 0xFFFF_FFFFu32, code);
        }
        if best.code != own.code {
            let value = value_in(&unit, best.code, format);
            chosen_code = best.code;
            chosen_factor = factor_of(best.code, value, tensor, rule);
        }
    }
    BlockScale { code: chosen_code, factor: chosen_factor }
}

/// The scales of one block of each row of a share.
#[cube]
pub(crate) fn search_sse<E: Int, N: Size>(
    elements: &Array<f32>,
    largest: &Array<f32>,
    values: &[Vector<E, N>],
    place: &Place,
    extent: &Extent,
    amax: &[f32],
    weights: &[f32],
    factors: &Factors,
    scales: &mut BlockScales,
    #[comptime] method: Method,
    #[comptime] share: Share,
) {
    let channel = place.block * method.block_size;
    if comptime!(share.tile == Tile::None) {
        #[unroll]
        for row in 0..share.rows {
            let tensor = tensor_factor(amax, place.row + row, factors, method);
            let start = comptime!(row * method.block_size);
            let found = search_row(
                elements,
                start,
                largest[row as usize],
                &tensor,
                weights,
                channel,
                method,
            );
            scales.codes[row as usize] = found.code;
            scales.factors[row as usize] = found.factor;
        }
    } else {
        let found = search_tile::<E, N>(
            elements, largest[0], values, place, extent, amax, weights, factors, method, share,
        );
        #[unroll]
        for row in 0..share.rows {
            scales.codes[row as usize] = found.code;
            scales.factors[row as usize] = found.factor;
        }
    }
}

/// The scale of a tile. Units that hold its rows go through the same scales side by side.
#[cube]
fn search_tile<E: Int, N: Size>(
    elements: &Array<f32>,
    largest: f32,
    values: &[Vector<E, N>],
    place: &Place,
    extent: &Extent,
    amax: &[f32],
    weights: &[f32],
    factors: &Factors,
    #[comptime] method: Method,
    #[comptime] share: Share,
) -> BlockScale {
    let rule = comptime!(method.rule);
    let format = comptime!(rule.row().format);
    let tensor = tensor_factor(amax, place.row, factors, method);
    let own = block_scale(largest, &tensor, rule);
    let unit = unit(largest, &tensor, format);
    let scaled_amax = largest * unit.factor;
    // The safe bound for any weights: nothing is left out but what saturates.
    let rows_of_tile = min(extent.rows - min(place.row / 16 * 16, extent.rows), 16u32);
    let count = f32::cast_from(rows_of_tile * method.block_size);
    let even = Weights { largest: 1.0f32.runtime(), total: count };
    let limit =
        if comptime!(method.weighted) { f32::reinterpret(0x7F80_0000u32) } else { crest(&even) };
    let window = window(&unit, scaled_amax, limit, format);
    let searchable = is_searchable(largest, scaled_amax, &unit, format);
    let mut code = max(window.high, window.odd);
    let steps = select(searchable, code + 1u32 - min(window.low, code + 1u32), 0u32);
    // Exchange asks that all units of a plane take part.
    let steps = if comptime!(share.tile == Tile::Exchanged) { plane_max(steps) } else { steps };
    let value = value_in(&unit, own.code, format);
    let own_cost = tile_cost::<E, N>(
        elements, values, place, extent, value, own.factor, &unit, weights, method, share,
    );
    let mut best = start(own_cost, own.code, format);
    for _ in 0..steps {
        let value = value_in(&unit, code, format);
        let factor = factor_of(code, value, &tensor, rule);
        let found = tile_cost::<E, N>(
            elements, values, place, extent, value, factor, &unit, weights, method, share,
        );
        if is_left(&window, code) {
            improve(&mut best, found, code, own.code);
        }
        code = next(&window, code);
    }
    let mut chosen_code = own.code;
    let mut chosen_factor = own.factor;
    if searchable && best.code != own.code {
        let value = value_in(&unit, best.code, format);
        chosen_code = best.code;
        chosen_factor = factor_of(best.code, value, &tensor, rule);
    }
    BlockScale { code: chosen_code, factor: chosen_factor }
}

/// The cost of a tile, of which a unit holds some rows or reads all.
#[cube]
fn tile_cost<E: Int, N: Size>(
    elements: &Array<f32>,
    values: &[Vector<E, N>],
    place: &Place,
    extent: &Extent,
    value: f32,
    factor: f32,
    unit: &Unit,
    weights: &[f32],
    #[comptime] method: Method,
    #[comptime] share: Share,
) -> f32 {
    let block_size = comptime!(method.block_size);
    let channel = place.block * block_size;
    let count = comptime!(if share.tile == Tile::Repeated { 16 } else { share.rows });
    let mut costs = Array::<f32>::new(comptime!(count as usize));
    if comptime!(share.tile == Tile::Repeated) {
        #[unroll]
        for index in 0..16u32 {
            let row = place.row / 16 * 16 + index;
            let neighbour = at_row(place, extent, min(row, extent.rows - 1), block_size, share);
            let elements = load_blocks::<E, N>(values, &neighbour, extent, block_size, share);
            let found = cost(&elements, 0u32, value, factor, unit, weights, channel, method);
            costs[index as usize] = select(row < extent.rows, found, 0.0f32);
        }
    } else {
        #[unroll]
        for row in 0..share.rows {
            let start = comptime!(row * block_size);
            let found = cost(elements, start, value, factor, unit, weights, channel, method);
            costs[row as usize] = select(row < place.rows_left, found, 0.0f32);
        }
    }
    sum_of_tile(&mut costs, count);
    costs[0]
}
