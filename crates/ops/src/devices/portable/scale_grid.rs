//! Block scales on the grid of a format, derived from its row.

use burn::backend::Backend;
use burn_fp4_search::PowerRounding;
use burn_fp4_search::formats::{Fp4Format, Minifloat, ScaleGrid, power_of_two};
use burn_fp4_search::scale_grid::{ELEMENT_BINADE, F32_BIAS, SIXTH};

use super::floats::Floats;

/// Returns the value of every scale code of a format.
pub(super) fn values(format: Fp4Format) -> Vec<f32> {
    let grid = match format.row().scale_grid() {
        ScaleGrid::Float(grid) | ScaleGrid::PowersOfTwo(grid) => grid,
    };
    (0..=255).map(|code| grid.decode(code)).collect()
}

/// Rounds non-negative values to a float grid, ties to the even code: codes and values.
pub(super) fn round_to_float<B: Backend>(
    exact: &Floats<B>,
    grid: &Minifloat,
) -> (Floats<B>, Floats<B>) {
    // Adding 2^23 leaves no room for a fraction: the sum is rounded to the nearest even integer.
    const INTEGER: f32 = 8_388_608.0;
    let steps_of_binade = power_of_two(grid.mantissa_bits as i32);
    let largest_exponent = (grid.max_code() >> grid.mantissa_bits) as i32 - grid.bias;
    let clamped = exact.or_where(exact.above(grid.max_value()), grid.max_value());
    // The subnormals and the first binade have the same step.
    let mut step = Floats::filled(grid.decode(1), exact);
    let mut binade = Floats::filled(0.0, exact);
    for exponent in 2 - grid.bias..=largest_exponent {
        let floor = power_of_two(exponent);
        step = step.or_where(clamped.at_least(floor), floor / steps_of_binade);
        binade = binade.add(&clamped.at_least(floor).as_float());
    }
    let steps = clamped.div(&step).plus(INTEGER).plus(-INTEGER);
    let nan = f32::from(grid.encode(f32::NAN));
    let code = steps.add(&binade.times(steps_of_binade)).or_where(exact.is_nan(), nan);
    (code, steps.mul(&step))
}

/// Rounds block amaxes to the codes of a grid of powers of two; see
/// [`ScaleRule::block_scale`](burn_fp4_search::ScaleRule::block_scale).
pub(super) fn round_to_power_of_two<B: Backend>(
    amax: &Floats<B>,
    rounding: PowerRounding,
    grid: &Minifloat,
) -> Floats<B> {
    // One rule rounds a sixth of the amax, the others the exponent of the amax.
    let measured = match rounding {
        PowerRounding::RoundUp => amax.times(SIXTH),
        PowerRounding::Floor | PowerRounding::Even | PowerRounding::Ceil => amax.clone(),
    };
    // The significand in [1, 2) and the biased exponent, by halving; both 0 for a subnormal.
    let large = measured.at_least(1.0).as_float();
    let mut significand = measured.or_from(measured.below(1.0), &measured.times(power_of_two(126)));
    let mut exponent = large.times(126.0).plus(1.0);
    let subnormal = significand.below(1.0).as_float();
    for bits in [64, 32, 16, 8, 4, 2, 1] {
        let power = power_of_two(bits);
        let over = significand.at_least(power).as_float();
        exponent = exponent.add(&over.times(bits as f32));
        let divided = significand.div_by(power);
        significand = significand.or_from(significand.at_least(power), &divided);
    }
    let exponent = exponent.or_where(subnormal.above(0.0), 0.0);
    let up = match rounding {
        PowerRounding::Floor => Floats::filled(0.0, amax),
        PowerRounding::Even => significand.at_least(1.75).as_float(),
        PowerRounding::Ceil => significand.above(1.0).as_float(),
        PowerRounding::RoundUp => {
            // A subnormal was multiplied by 2^126: above 1/2 it lies above 2^-127.
            let above = significand.above(0.5).as_float().mul(&subnormal);
            significand.above(1.0).as_float().add(&above)
        }
    };
    let code = exponent.add(&up);
    let above = match rounding {
        PowerRounding::RoundUp => 0,
        PowerRounding::Floor | PowerRounding::Even | PowerRounding::Ceil => ELEMENT_BINADE as i32,
    };
    let offset = grid.bias - F32_BIAS as i32 - above;
    let code = if offset == 0 { code } else { code.plus(offset as f32) };
    let (largest, nan) = (f32::from(grid.max_code()), f32::from(grid.encode(f32::NAN)));
    let code = code.or_where(code.below(0.0), 0.0);
    let code = code.or_where(code.above(largest), largest);
    code.or_where(amax.is_nan(), nan).or_where(amax.above(f32::MAX), nan)
}
