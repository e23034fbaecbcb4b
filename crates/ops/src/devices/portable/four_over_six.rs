//! Four Over Six: the amax of a block on element 6 or on element 4, whichever leaves the smaller
//! error.

use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn_fp4_search::formats::{E2M1, E2M1_VALUES, ScaleGrid};
use burn_fp4_search::{Blocks, ErrorMetric, Fp4Scheme};

use super::element::{normalize, round_to_e2m1};
use super::floats::{Floats, Mask};
use super::scale_grid::round_to_float;
use super::tensor_scale::TensorFactors;
use super::tiles::share_sum;

/// Chooses the better of two candidate scales; see [`Method::FOUR_OVER_SIX`].
pub(super) fn four_over_six<B: Backend>(
    values: &Floats<B>,
    amax: &Floats<B>,
    factors: &TensorFactors<B>,
    scheme: &Fp4Scheme,
    metric: ErrorMetric,
) -> (Floats<B>, Floats<B>) {
    let [rows, blocks] = amax.shape()[..] else { unreachable!("amaxes are a matrix") };
    let grid = match scheme.format().row().scale_grid() {
        ScaleGrid::Float(grid) => grid,
        ScaleGrid::PowersOfTwo(_) => unreachable!("its scales have a mantissa"),
    };
    let on_six = amax.div_by(E2M1.max_value()).mul(&factors.encode);
    let candidates =
        [round_to_float(&on_six, &grid), round_to_float(&on_six.times(6.0 / 4.0), &grid)];
    let errors = candidates.each_ref().map(|(codes, scales)| {
        let normalized = normalize(values, codes, scales, factors, scheme);
        let elements = round_to_e2m1(&normalized, scheme).look_up(&E2M1_VALUES);
        let scaled = elements.mul(&scales.reshape(&[rows, blocks, 1]));
        let per_row = |factor: &Floats<B>| factor.reshape(&[factor.shape()[0], 1, 1]);
        let restored = scaled.mul(&per_row(&factors.amax)).div_by(scheme.largest_code_product());
        let difference = restored.sub(values);
        let terms = match metric {
            ErrorMetric::Mae => difference.abs(),
            ErrorMetric::Mse => difference.mul(&difference),
        };
        // In element order, then for tiles as a tree over rows: the order decides the last bit.
        let mut sum = Floats::filled(0.0, amax);
        for index in 0..scheme.block_size {
            sum = sum.add(&terms.slice(2, index, index + 1).reshape(&[rows, blocks]));
        }
        if scheme.blocks == Blocks::Tile16x16 {
            sum = share_sum(&sum);
        }
        sum
    });
    let [six, four] = candidates;
    let dtype = get_or_init_device_settings::<B>(&amax.0.device()).bool_dtype;
    let better = B::float_lower(errors[1].0.clone(), errors[0].0.clone(), dtype);
    let choose = |six: Floats<B>, four: &Floats<B>| six.or_from(Mask(better.clone()), four);
    (choose(six.0, &four.0), choose(six.1, &four.1))
}
