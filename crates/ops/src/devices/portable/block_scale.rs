//! Block scales from the amaxes of blocks, by the rule of a scheme.

use burn::backend::Backend;
use burn_fp4_search::formats::E2M1;
use burn_fp4_search::{Fp4Scheme, ScaleForm, ScaleRule};

use super::floats::Floats;
use super::scale_grid::{round_to_float, round_to_power_of_two, values};
use super::tensor_scale::TensorFactors;

/// Computes codes and values of the scales for block amaxes `[rows, blocks]`.
pub(super) fn block_scales<B: Backend>(
    amax: &Floats<B>,
    factors: &TensorFactors<B>,
    scheme: &Fp4Scheme,
) -> (Floats<B>, Floats<B>) {
    let grid = &scheme.format().row().block_scale;
    let largest = E2M1.max_value();
    let exact = match scheme.rule.row().scale {
        ScaleForm::TimesSixth => amax.mul(&factors.encode.times(1.0 / largest)),
        ScaleForm::DividedBySix => amax.div_by(largest).mul(&factors.encode),
        ScaleForm::WithoutTensorScale => {
            let exact = amax.div_by(largest);
            let smallest = ScaleRule::SMALLEST_DIVISOR;
            exact.or_where(exact.below(smallest), smallest)
        }
        ScaleForm::PowerOfTwo(rounding) => {
            let codes = round_to_power_of_two(amax, rounding, grid);
            let values = codes.look_up(&values(scheme.format()));
            return (codes, values);
        }
    };
    round_to_float(&exact, grid)
}
