//! Rounding to E2M1, and its values, in a few operations on bits, for loops that the compiler
//! vectorizes. [`E2M1`] is the definition, with which the tests compare.
//!
//! Every function is `inline(always)`, so that it is compiled for the instruction set of its
//! caller.

use burn_fp4_formats::E2M1;

/// The largest element.
const LARGEST: f32 = E2M1.max_value();
/// The bits of 1.
const ONE: u32 = 1.0f32.to_bits();

/// Rounds an f32 that is not NaN to the nearest E2M1 code, ties to even.
#[inline(always)]
pub(crate) fn round_to_e2m1(value: f32) -> u32 {
    let magnitude = value.abs();
    let magnitude = if magnitude > LARGEST { LARGEST } else { magnitude };
    // The power of two below, at least 1. Elements there are half of it apart. Adding 2^22 times
    // that power makes this distance the unit in the last place, so that the sum is rounded like
    // the element.
    let binade = (magnitude.to_bits() & 0x7F80_0000).max(ONE);
    let shift = binade + (22 << 23);
    let steps = (magnitude + f32::from_bits(shift)).to_bits().wrapping_sub(shift);
    // Two codes a binade.
    steps.wrapping_add((binade - ONE) >> 22) | value.to_bits() >> 28 & 8
}

/// Rounds an f32 that is not NaN to an E2M1 code; see [`stochastic_code`](crate::stochastic_code).
#[inline(always)]
pub(crate) fn round_stochastically(value: f32, bits: u16) -> u32 {
    let magnitude = value.abs();
    let magnitude = if magnitude > LARGEST { LARGEST } else { magnitude };
    // As in `round_to_e2m1`; what follows is exact.
    let binade = (magnitude.to_bits() & 0x7F80_0000).max(ONE);
    let steps = magnitude * f32::from_bits((255 << 23) - binade);
    let below = steps as i32;
    let way = steps - below as f32;
    let up = i32::from(bits) as f32 + 0.5 < way * 65536.0;
    (below as u32 + ((binade - ONE) >> 22) + up as u32) | value.to_bits() >> 28 & 8
}

/// Rounds an f32 that is not NaN to the nearest E2M1 value, ties to even. Zeros keep the sign of
/// the f32.
#[inline(always)]
pub(crate) fn nearest_element(value: f32) -> f32 {
    let nearest = nearest_magnitude(value.abs());
    f32::from_bits(nearest.to_bits() | value.to_bits() & 0x8000_0000)
}

/// Rounds a magnitude that is not NaN to the nearest E2M1 value, ties to even.
#[inline(always)]
pub(crate) fn nearest_magnitude(magnitude: f32) -> f32 {
    let magnitude = if magnitude > LARGEST { LARGEST } else { magnitude };
    // As in `round_to_e2m1`.
    let shift = f32::from_bits((magnitude.to_bits() & 0x7F80_0000).max(ONE) + (22 << 23));
    (magnitude + shift) - shift
}

/// Returns twice the value of an E2M1 code. Higher bits of the code are ignored.
#[inline(always)]
pub(crate) const fn twice_element(code: u32) -> f32 {
    // Twice the eight magnitudes, a nibble each.
    const TWICE: u32 = 0xC864_3210;
    let magnitude = (TWICE >> ((code & 7) << 2) & 0xF) as i32 as f32;
    f32::from_bits(magnitude.to_bits() | (code & 8) << 28)
}

/// Returns twice the magnitude of an E2M1 code in the lower bits, its sign in the top bit.
#[inline(always)]
pub(crate) fn signed_twice(code: u8) -> u8 {
    let magnitude = code & 7;
    let beyond = (magnitude >= 5) as u8 + (magnitude >= 6) as u8 + 3 * (magnitude >= 7) as u8;
    (magnitude + beyond) | ((code & 8) << 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Yields every f32 at which a rounding could change, and both neighbours.
    fn around(values: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        values.flat_map(|value| [value.next_down(), value, value.next_up()])
    }

    #[test]
    fn e2m1_rounds_as_the_format_says() {
        let midpoints = (0..7).map(|code| (E2M1.decode(code) + E2M1.decode(code + 1)) / 2.0);
        let specials = [0.0, 1e-45, 6.0, 8.0, f32::MAX, f32::INFINITY];
        for magnitude in around(midpoints.chain(specials)) {
            for value in [magnitude, -magnitude] {
                let code = E2M1.encode(value);
                assert_eq!(round_to_e2m1(value), code as u32, "{value:e}");
                let nearest = nearest_element(value);
                assert_eq!(nearest.to_bits(), E2M1.decode(code).to_bits(), "{value:e}");
            }
        }
    }

    #[test]
    fn e2m1_is_drawn_as_the_reference_draws() {
        let eighths = (0..=56).map(|eighth| eighth as f32 / 8.0);
        for magnitude in around(eighths.chain([1e-45, f32::MAX, f32::INFINITY])) {
            for value in [magnitude, -magnitude] {
                for bits in (0..=u16::MAX).step_by(97).chain([0, 1 << 13, u16::MAX]) {
                    let expected = crate::rounding::stochastic_code(value, bits).into();
                    assert_eq!(round_stochastically(value, bits), expected, "{value:e} {bits}");
                }
            }
        }
    }

    #[test]
    fn elements_decode_as_the_format_says() {
        for code in 0..16 {
            let expected = E2M1.decode(code as u8);
            assert_eq!((twice_element(code) * 0.5).to_bits(), expected.to_bits());
            let signed = signed_twice(code as u8);
            assert_eq!((signed & 0x7F) as f32 * 0.5, expected.abs());
            assert_eq!(signed & 0x80 != 0, expected.is_sign_negative());
        }
    }
}
