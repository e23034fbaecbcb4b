//! [`Rounding`]: from elements to codes, given their scale.
//!
//! [`E2M1`] and [`stochastic_code`] are the definitions. The functions behind them, with which the
//! tests compare these, take a few operations on bits, for loops that the compiler vectorizes. Each
//! is `inline(always)`, so that it is compiled for the instruction set of its caller.

use burn_fp4_formats::{E2M1, E2M1_VALUES};
use serde::{Deserialize, Serialize};

use crate::philox::philox;

/// Rounds an element to a code, given the scale of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rounding {
    /// To the nearest code, ties to the even one.
    #[default]
    Nearest,
    /// To one of the two codes around the element, at random. The nearer one is likelier, so that
    /// the mean over many draws is the element itself. Scales are still rounded to nearest.
    Stochastic(Draw),
}

/// Selects the random numbers of a tensor: the same on every engine, device and launch.
///
/// An element's 16 bits come from [`philox`] keyed by `seed`, with the counter `(index / 8, 0,
/// step)`, where `index` counts the elements of the packed matrix.
///
/// ```
/// use burn_fp4_search::Draw;
/// use burn_fp4_search::philox::philox;
///
/// let draw = Draw { seed: 7, step: 3 };
/// assert_eq!((draw.key(), draw.counter()), ([7, 0], [3, 0]));
/// let words = philox([1, 0, 3, 0], draw.key()); // of elements 8 to 15
/// assert_eq!(draw.group(1)[..2], [words[0] as u16, (words[0] >> 16) as u16]);
/// let gradients = draw.stream(1); // for another tensor of the same step
/// assert!(gradients.seed != draw.seed && gradients.step == draw.step);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Draw {
    /// Seed of the sequence.
    pub seed: u64,
    /// Position in the sequence, such as a training step.
    pub step: u64,
}

impl Draw {
    /// Number of elements that share four words of 32 bits.
    pub const GROUP: u32 = 8;

    /// Returns the key.
    #[must_use]
    pub const fn key(self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// Returns the last two words of the counter.
    #[must_use]
    pub const fn counter(self) -> [u32; 2] {
        [self.step as u32, (self.step >> 32) as u32]
    }

    /// Returns the random bits of the eight neighbouring elements of a group.
    #[inline(always)]
    #[must_use]
    pub fn group(self, group: u32) -> [u16; Self::GROUP as usize] {
        let [low, high] = self.counter();
        let words = philox([group, 0, low, high], self.key());
        core::array::from_fn(|element| (words[element / 2] >> (16 * (element % 2))) as u16)
    }

    /// Derives another sequence of the same seed, for example for another tensor of the same step.
    #[must_use]
    pub fn stream(self, stream: u64) -> Self {
        let [a, b, c, d] = [stream as u32, (stream >> 32) as u32, u32::MAX, u32::MAX];
        let [low, high, ..] = philox([a, b, c, d], self.key());
        Self { seed: u64::from(high) << 32 | u64::from(low), ..self }
    }
}

/// Rounds an element to an E2M1 code: up in magnitude if `(bits + 1/2) / 2^16` is less than its
/// distance from the code below, as a fraction of the step to the code above. A NaN gives 0.
///
/// ```
/// use burn_fp4_search::formats::E2M1;
/// use burn_fp4_search::stochastic_code;
///
/// // 2.5 lies halfway from 2 to 3, so half of all bits round it up.
/// assert_eq!(E2M1.decode(stochastic_code(2.5, 0x7FFF)), 3.0);
/// assert_eq!(E2M1.decode(stochastic_code(2.5, 0x8000)), 2.0);
/// ```
#[must_use]
pub fn stochastic_code(element: f32, bits: u16) -> u8 {
    if element.is_nan() {
        return 0;
    }
    let magnitude = element.abs().min(E2M1.max_value());
    let below = E2M1_VALUES[..8].iter().rposition(|&value| value <= magnitude).expect("0 is one");
    let way = match E2M1_VALUES[..8].get(below + 1) {
        Some(above) => (magnitude - E2M1_VALUES[below]) / (above - E2M1_VALUES[below]),
        None => 0.0,
    };
    let up = f32::from(bits) + 0.5 < way * 65536.0;
    let sign = if element.is_sign_negative() { 8 } else { 0 };
    sign | (below as u8 + u8::from(up))
}

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
                    let expected = stochastic_code(value, bits).into();
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
