//! The better of two scales, which map amax to element 6 or to element 4; see
//! [`Method::FOUR_OVER_SIX`](burn_fp4_search::Method).

use burn_fp4_search::{ErrorMetric, Method, ScaleRule};
use cubecl::prelude::*;

use super::quantize_args::QuantizeArgs;
use crate::numeric::element::nearest_magnitude;
use crate::numeric::rule::{
    BlockScale, BlockScales, TensorFactor, TensorScaleArgs, nearest_scale, normalize_magnitude,
    tensor_factor,
};
use crate::numeric::scale_grid::scale_value;
use crate::plan::{Blueprint, TileSharing};
use crate::tensor::indexing::{TileOrigin, at_row};
use crate::tensor::load_store::load_blocks;
use crate::tensor::tile_reduce::sum_of_tile;

/// With an amax between its reciprocal and this, dividends are far from the ends of f32.
const LARGEST_AMAX: f32 = (1u64 << 60) as f32;

/// Sets the better of two scales for each row of a thread tile, given the largest magnitudes.
#[cube]
pub(crate) fn better_of_both<E: Int, N: Size>(
    args: &QuantizeArgs<E, N>,
    elements: &Array<f32>,
    largest: &Array<f32>,
    origin: &TileOrigin,
    scales: &mut BlockScales,
) {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let block_size = comptime!(blueprint.block_size);
    let rule = comptime!(blueprint.rule);
    // The rows of the unit, or all rows of the 16 x 16 tile if the unit processes it alone.
    let count =
        comptime!(if thread_tile.sharing == TileSharing::Repeated { 16 } else { thread_tile.rows });
    let mut on_six = Array::<f32>::new(comptime!(count as usize));
    let mut on_four = Array::<f32>::new(comptime!(count as usize));
    if comptime!(thread_tile.sharing == TileSharing::Repeated) {
        let tensor = tensor_factor(args.amax, origin.row, &args.scale_args, blueprint);
        #[unroll]
        for index in 0..16u32 {
            let row = origin.row / 16 * 16 + index;
            let last = args.dims.rows - 1;
            let neighbour = at_row(origin, &args.dims, min(row, last), block_size, thread_tile);
            let elements =
                load_blocks::<E, N>(args.values, &neighbour, &args.dims, block_size, thread_tile);
            let both = candidates(largest[0], &tensor, rule);
            let six = error(&elements, 0u32, &both.on_six, &tensor, &args.scale_args, blueprint);
            let four = error(&elements, 0u32, &both.on_four, &tensor, &args.scale_args, blueprint);
            on_six[index as usize] = select(row < args.dims.rows, six, 0.0f32);
            on_four[index as usize] = select(row < args.dims.rows, four, 0.0f32);
        }
    } else {
        #[unroll]
        for row in 0..thread_tile.rows {
            let tensor = tensor_factor(args.amax, origin.row + row, &args.scale_args, blueprint);
            let both = candidates(largest[row as usize], &tensor, rule);
            let start = comptime!(row * block_size);
            let six = error(elements, start, &both.on_six, &tensor, &args.scale_args, blueprint);
            let four = error(elements, start, &both.on_four, &tensor, &args.scale_args, blueprint);
            on_six[row as usize] = select(row < origin.rows_left, six, 0.0f32);
            on_four[row as usize] = select(row < origin.rows_left, four, 0.0f32);
        }
    }
    if comptime!(thread_tile.sharing != TileSharing::None) {
        sum_of_tile(&mut on_six, count);
        sum_of_tile(&mut on_four, count);
    }
    #[unroll]
    for row in 0..thread_tile.rows {
        let tensor = tensor_factor(args.amax, origin.row + row, &args.scale_args, blueprint);
        let both = candidates(largest[row as usize], &tensor, rule);
        let take_four = on_four[row as usize] < on_six[row as usize];
        scales.codes[row as usize] = select(take_four, both.on_four.code, both.on_six.code);
        scales.factors[row as usize] = select(take_four, both.on_four.factor, both.on_six.factor);
    }
}

/// The scales that map amax to element 6 and to element 4.
#[derive(CubeType)]
pub(crate) struct Candidates {
    pub(crate) on_six: BlockScale,
    pub(crate) on_four: BlockScale,
}

/// Computes both by division, whatever the rule.
#[cube]
pub(crate) fn candidates(
    largest: f32,
    tensor: &TensorFactor,
    #[comptime] rule: ScaleRule,
) -> Candidates {
    let exact = (largest / 6.0f32) * tensor.encode;
    Candidates {
        on_six: nearest_scale(exact, tensor, rule),
        on_four: nearest_scale(exact * 1.5f32, tensor, rule),
    }
}

/// Sums the error of a row's block in element order, every operation rounded on its own.
#[cube]
fn error(
    elements: &Array<f32>,
    #[comptime] start: u32,
    scale: &BlockScale,
    tensor: &TensorFactor,
    scale_args: &TensorScaleArgs,
    #[comptime] blueprint: Blueprint,
) -> f32 {
    let mut error = sum_of_errors(elements, start, scale, tensor, scale_args, blueprint, true);
    if !divides_by_product(tensor.amax) {
        error = sum_of_errors(elements, start, scale, tensor, scale_args, blueprint, false);
    }
    error
}

/// Sums the [`error`], with [`quotient`] or with a division. The difference of magnitudes is that
/// of the values, which have the same sign.
#[cube]
fn sum_of_errors(
    elements: &Array<f32>,
    #[comptime] start: u32,
    scale: &BlockScale,
    tensor: &TensorFactor,
    scale_args: &TensorScaleArgs,
    #[comptime] blueprint: Blueprint,
    #[comptime] by_product: bool,
) -> f32 {
    let value = scale_value(scale.code, comptime!(blueprint.grid()));
    let range = scale_args.range;
    let reciprocal = 1.0f32 / range;
    let mut error = 0.0f32.runtime();
    #[unroll]
    for k in 0..blueprint.block_size {
        let magnitude = elements[(start + k) as usize].abs();
        let normalized = normalize_magnitude(magnitude, scale.factor, comptime!(blueprint.rule));
        let scaled = (nearest_magnitude(normalized) * value) * tensor.amax;
        let restored = if comptime!(by_product) {
            quotient(scaled, range, reciprocal)
        } else {
            scaled / range
        };
        let difference = restored - magnitude;
        if comptime!(squares(blueprint.method)) {
            error = fma(difference * difference, scale_args.one, error);
        } else {
            error += difference.abs();
        }
    }
    error
}

/// Returns `scaled / range`, given the reciprocal of the range, without a division. The first
/// product is less than an ulp off, and its remainder is exact. The result is right for every
/// mantissa if nothing underflows; see the test.
#[cube]
fn quotient(scaled: f32, range: f32, reciprocal: f32) -> f32 {
    let near = scaled * reciprocal;
    fma(fma(-near, range, scaled), reciprocal, near)
}

/// Returns true if [`quotient`] is right for all products with this amax: the smallest is 2^-10
/// times the amax, and the remainder at least 2^-48 times that.
#[cube]
fn divides_by_product(amax: f32) -> bool {
    let is_large = amax >= comptime!(1.0 / LARGEST_AMAX);
    is_large && amax <= comptime!(LARGEST_AMAX)
}

fn squares(search: Method) -> bool {
    matches!(search, Method::FourOverSix { error: ErrorMetric::Mse, .. })
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::{E4m3Range, Fp4Scheme};

    use super::*;

    #[test]
    fn the_quotient_is_that_of_a_division_for_every_mantissa() {
        for e4m3 in [E4m3Range::E448, E4m3Range::E256] {
            let error = ErrorMetric::default();
            let search = Method::FourOverSix { range: e4m3, error };
            let range = Fp4Scheme::nvfp4().with_method(search).largest_code_product();
            let reciprocal = 1.0 / range;
            // Mantissas at 1, and at both ends of the dividends.
            for first in [1.0, 2f32.powi(-70), 2f32.powi(71)] {
                for mantissa in 0..1 << 23 {
                    let scaled = f32::from_bits(first.to_bits() + mantissa);
                    let near = scaled * reciprocal;
                    let rest = (-near).mul_add(range, scaled);
                    let quotient = rest.mul_add(reciprocal, near);
                    assert_eq!(quotient, scaled / range, "{scaled:e} / {range}");
                }
            }
        }
    }
}
