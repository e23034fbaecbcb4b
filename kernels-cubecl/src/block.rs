//! What happens to the blocks of a share: largest magnitude, scale, normalized elements.

use burn_fp4_search::{ErrorMetric, ScaleRule, ScaleSearch};
use cubecl::prelude::*;

use crate::element::nearest_element;
use crate::plan::{Share, Tile};
use crate::scale::{
    BlockScale, Factors, Method, TensorFactor, block_scale, scale_value, te_scale, tensor_factor,
};
use crate::share::{Extent, Place, at_row, load_blocks};
use crate::sse::search_sse;

/// Largest magnitude of a block, which starts at `start` of the elements; NaN if a value is.
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

/// All bits, or none where every code of a block is 0: its factor is no number, or so small that it
/// leaves only zeros and, of infinities, no numbers.
#[cube]
pub(crate) fn code_mask(factor: f32, #[comptime] rule: ScaleRule) -> u32 {
    let numbers = if comptime!(rule == ScaleRule::NoTensorScale) {
        factor >= 0.0f32
    } else {
        factor > 0.0f32
    };
    select(numbers, 0xFFFF_FFFFu32, 0u32)
}

/// What an element is rounded from: -0.0 only if the rule keeps it.
#[cube]
pub(crate) fn normalize(
    element: f32,
    factor: f32,
    factors: &Factors,
    #[comptime] rule: ScaleRule,
) -> f32 {
    let normalized = if comptime!(rule == ScaleRule::NoTensorScale) {
        element / factor
    } else {
        element * factor
    };
    let normalized = if comptime!(matches!(rule, ScaleRule::Gist | ScaleRule::NoTensorScale)) {
        // Where amax is 0: zero times an infinite factor, or divided by a scale of zero.
        select(normalized.is_nan(), 0.0f32, normalized)
    } else {
        normalized
    };
    if comptime!(rule.row().keeps_negative_zero) {
        normalized
    } else {
        // Adds a zero, which turns -0.0 into 0.0 and nothing else.
        fma(normalized, factors.one, 0.0f32)
    }
}

/// The scales of one block of each row of a share.
#[derive(CubeType)]
pub(crate) struct BlockScales {
    pub(crate) codes: Array<u32>,
    pub(crate) factors: Array<f32>,
}

/// Chooses the scale of a block of every row of a share.
///
/// `elements` are those of [`load_blocks`]; the values are only read again where tiles ask for it.
#[cube]
pub(crate) fn choose_scales<E: Int, N: Size>(
    elements: &Array<f32>,
    values: &[Vector<E, N>],
    place: &Place,
    extent: &Extent,
    amax: &[f32],
    weights: &[f32],
    factors: &Factors,
    #[comptime] method: Method,
    #[comptime] share: Share,
) -> BlockScales {
    let block_size = comptime!(method.block_size);
    let mut largest = Array::<f32>::new(comptime!(share.rows as usize));
    if comptime!(share.tile == Tile::Repeated) {
        let mut of_tile = 0.0f32.runtime();
        for row in place.row / 16 * 16..min(place.row / 16 * 16 + 16, extent.rows) {
            let neighbour = at_row(place, extent, row, block_size, share);
            let elements = load_blocks::<E, N>(values, &neighbour, extent, block_size, share);
            of_tile = max_nan(of_tile, largest_magnitude(&elements, 0u32, block_size));
        }
        largest[0] = of_tile;
    } else {
        #[unroll]
        for row in 0..share.rows {
            let of_row = largest_magnitude(elements, row * block_size, block_size);
            largest[row as usize] = select(row < place.rows_left, of_row, 0.0f32);
        }
        if comptime!(share.tile == Tile::Exchanged) {
            largest_of_tile(&mut largest, share.rows);
        }
        if comptime!(share.tile == Tile::Halves) {
            largest[0] = max_nan(largest[0], plane_shuffle_xor(largest[0], 1u32));
        }
    }
    let mut scales = BlockScales {
        codes: Array::<u32>::new(comptime!(share.rows as usize)),
        factors: Array::<f32>::new(comptime!(share.rows as usize)),
    };
    if comptime!(method.search == ScaleSearch::Amax) {
        #[unroll]
        for row in 0..share.rows {
            let tensor = tensor_factor(amax, place.row + row, factors, method);
            let scale = block_scale(largest[row as usize], &tensor, comptime!(method.rule));
            scales.codes[row as usize] = scale.code;
            scales.factors[row as usize] = scale.factor;
        }
    } else if comptime!(method.search == ScaleSearch::Sse) {
        search_sse::<E, N>(
            elements,
            &largest,
            values,
            place,
            extent,
            amax,
            weights,
            factors,
            &mut scales,
            method,
            share,
        );
    } else {
        four_over_six::<E, N>(
            elements,
            &largest,
            values,
            place,
            extent,
            amax,
            factors,
            &mut scales,
            method,
            share,
        );
    }
    scales
}

/// Replaces the amax of each row by that of its tile, of which every unit holds `rows` rows.
#[cube]
fn largest_of_tile(largest: &mut Array<f32>, #[comptime] rows: u32) {
    let mut of_tile = largest[0];
    #[unroll]
    for row in 1..rows {
        of_tile = max_nan(of_tile, largest[row as usize]);
    }
    #[unroll]
    for step in 0..comptime!(16 / rows).ilog2() {
        of_tile = max_nan(of_tile, plane_shuffle_xor(of_tile, comptime!(1u32 << step)));
    }
    #[unroll]
    for row in 0..rows {
        largest[row as usize] = of_tile;
    }
}

/// The better of two scales: amax on element 6, or on element 4; see
/// [`ScaleSearch::FourOverSix`](burn_fp4_search::ScaleSearch).
#[cube]
fn four_over_six<E: Int, N: Size>(
    elements: &Array<f32>,
    largest: &Array<f32>,
    values: &[Vector<E, N>],
    place: &Place,
    extent: &Extent,
    amax: &[f32],
    factors: &Factors,
    scales: &mut BlockScales,
    #[comptime] method: Method,
    #[comptime] share: Share,
) {
    let block_size = comptime!(method.block_size);
    // Of the rows of the unit, or of all rows of the tile if it looks at them alone.
    let count = comptime!(if share.tile == Tile::Repeated { 16 } else { share.rows });
    let mut on_six = Array::<f32>::new(comptime!(count as usize));
    let mut on_four = Array::<f32>::new(comptime!(count as usize));
    if comptime!(share.tile == Tile::Repeated) {
        let tensor = tensor_factor(amax, place.row, factors, method);
        #[unroll]
        for index in 0..16u32 {
            let row = place.row / 16 * 16 + index;
            let neighbour = at_row(place, extent, min(row, extent.rows - 1), block_size, share);
            let elements = load_blocks::<E, N>(values, &neighbour, extent, block_size, share);
            let both = candidates(largest[0], &tensor);
            let six = error(&elements, 0u32, &both.on_six, &tensor, factors, method);
            let four = error(&elements, 0u32, &both.on_four, &tensor, factors, method);
            on_six[index as usize] = select(row < extent.rows, six, 0.0f32);
            on_four[index as usize] = select(row < extent.rows, four, 0.0f32);
        }
    } else {
        #[unroll]
        for row in 0..share.rows {
            let tensor = tensor_factor(amax, place.row + row, factors, method);
            let both = candidates(largest[row as usize], &tensor);
            let start = comptime!(row * block_size);
            let six = error(elements, start, &both.on_six, &tensor, factors, method);
            let four = error(elements, start, &both.on_four, &tensor, factors, method);
            on_six[row as usize] = select(row < place.rows_left, six, 0.0f32);
            on_four[row as usize] = select(row < place.rows_left, four, 0.0f32);
        }
    }
    if comptime!(share.tile != Tile::None) {
        sum_of_tile(&mut on_six, count);
        sum_of_tile(&mut on_four, count);
    }
    #[unroll]
    for row in 0..share.rows {
        let tensor = tensor_factor(amax, place.row + row, factors, method);
        let both = candidates(largest[row as usize], &tensor);
        let take_four = on_four[row as usize] < on_six[row as usize];
        scales.codes[row as usize] = select(take_four, both.on_four.code, both.on_six.code);
        scales.factors[row as usize] = select(take_four, both.on_four.factor, both.on_six.factor);
    }
}

#[derive(CubeType)]
struct Candidates {
    on_six: BlockScale,
    on_four: BlockScale,
}

/// Both come from the division form, whatever the rule.
#[cube]
fn candidates(largest: f32, tensor: &TensorFactor) -> Candidates {
    let exact = (largest / 6.0f32) * tensor.encode;
    Candidates { on_six: te_scale(exact, tensor), on_four: te_scale(exact * 1.5f32, tensor) }
}

/// The error of a row of a block, summed in element order, every operation rounded on its own.
#[cube]
fn error(
    elements: &Array<f32>,
    #[comptime] start: u32,
    scale: &BlockScale,
    tensor: &TensorFactor,
    factors: &Factors,
    #[comptime] method: Method,
) -> f32 {
    let value = scale_value(scale.code, comptime!(method.rule.row().format));
    let mut error = 0.0f32.runtime();
    #[unroll]
    for k in 0..method.block_size {
        let element = elements[(start + k) as usize];
        let nearest =
            nearest_element(normalize(element, scale.factor, factors, comptime!(method.rule)));
        let difference = (nearest * value) * tensor.amax / factors.range - element;
        if comptime!(squares(method.search)) {
            error = fma(difference * difference, factors.one, error);
        } else {
            error += difference.abs();
        }
    }
    error
}

fn squares(search: ScaleSearch) -> bool {
    matches!(search, ScaleSearch::FourOverSix { error: ErrorMetric::Mse, .. })
}

/// Replaces the errors of the rows of a tile, of which every unit holds `rows`, by their sum: row r and
/// r + 8, then + 4, + 2, + 1.
#[cube]
pub(crate) fn sum_of_tile(errors: &mut Array<f32>, #[comptime] rows: u32) {
    #[unroll]
    for step in 0..4u32 {
        let half = comptime!(8u32 >> step);
        if comptime!(half >= rows) {
            #[unroll]
            for row in 0..rows {
                let own = errors[row as usize];
                errors[row as usize] = own + plane_shuffle_xor(own, comptime!(half / rows));
            }
        } else {
            #[unroll]
            for row in 0..half {
                errors[row as usize] += errors[(row + half) as usize];
            }
        }
    }
    #[unroll]
    for row in 1..rows {
        errors[row as usize] = errors[0];
    }
}
