//! `e^x` that the compiler vectorizes.

use core::f32::consts::LOG2_E;

/// Computes `e^x` within 2 units in the last place, without branches. `x` is first clamped to
/// -86 to 88, so that no result is subnormal or infinite.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Added and subtracted, it rounds to an integer, which is then in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the product of the first with a small integer is exact.
    const LN_2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
    // Cephes' `expf`.
    const COEFFICIENTS: [f32; 6] =
        [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let x = x.clamp(-86.0, 88.0);
    let shifted = x * LOG2_E + ROUND;
    let exponent = shifted - ROUND;
    let rest = x - exponent * LN_2[0] - exponent * LN_2[1];
    let mut sum = COEFFICIENTS[0];
    for coefficient in &COEFFICIENTS[1..] {
        sum = sum * rest + coefficient;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1f32.to_bits()));
    (sum * (rest * rest) + rest + 1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for step in -86_000..=88_000 {
            let x = step as f32 / 1000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "{x}: {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan() && exp(f32::from_bits(0x7FC0_0001)).is_nan());
    }
}
