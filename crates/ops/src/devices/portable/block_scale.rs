//! The scale of a block from its amax, by the rule of the scheme.

use burn::backend::Backend;
use burn_fp4_search::formats::{E2M1, ScaleGrid};
use burn_fp4_search::{Fp4Scheme, ScaleRule};

use super::floats::Floats;
use super::scale_grid::{round_to_float, round_to_power_of_two, values};
use super::tensor_scale::Factors;

/// What the torch recipe and qwantize do not let a divisor fall below.
pub(super) const SMALLEST_DIVISOR: f32 = 1e-12;

/// Codes and values of the scales for block amaxes `[rows, blocks]`.
pub(super) fn block_scales<B: Backend>(
    amax: &Floats<B>,
    factors: &Factors<B>,
    scheme: &Fp4Scheme,
) -> (Floats<B>, Floats<B>) {
    match scheme.format().row().scale_grid() {
        ScaleGrid::Float(grid) => round_to_float(&exact(amax, factors, scheme.rule), &grid),
        ScaleGrid::PowersOfTwo(grid) => {
            let codes = round_to_power_of_two(amax, scheme.rule, &grid);
            let values = codes.look_up(&values(scheme.format()));
            (codes, values)
        }
    }
}

/// The scales before they are rounded to a grid of floats.
fn exact<B: Backend>(amax: &Floats<B>, factors: &Factors<B>, rule: ScaleRule) -> Floats<B> {
    let largest = E2M1.max_value();
    match rule {
        ScaleRule::Te => amax.mul(&factors.encode.times(1.0 / largest)),
        ScaleRule::TeDivision | ScaleRule::Gist => amax.div_by(largest).mul(&factors.encode),
        ScaleRule::NoTensorScale => {
            let exact = amax.div_by(largest);
            exact.or_where(exact.below(SMALLEST_DIVISOR), SMALLEST_DIVISOR)
        }
        ScaleRule::Floor | ScaleRule::Even | ScaleRule::RoundUp | ScaleRule::Ceil => {
            unreachable!("{rule} rounds to powers of two")
        }
    }
}
