//! The arithmetic of the reference quantizer on a strip of blocks at once, in loops that the
//! compiler turns into SIMD: no branch depends on the data and no order of additions matters.
//!
//! Every function is `inline(always)`, so that it is compiled for the instruction set of its caller.

use burn_fp4_formats::{E4M3_VALUES, E8M0_VALUES, Fp4Format};

use crate::{Fp4Scheme, ScaleRule, TensorFactor};

/// Blocks of a strip. With f32 values, codes and scales it stays within the first-level cache.
pub(super) const STRIP: usize = 32;

/// A strip of up to [`STRIP`] blocks of `B` values.
pub(super) struct Strip<const B: usize> {
    /// The values, then their dequantized counterparts.
    pub(super) values: [[f32; B]; STRIP],
    /// amax of each block, or of the tile it belongs to.
    pub(super) amax: [f32; STRIP],
    /// Tensor factor of each block's row.
    pub(super) encode: [f32; STRIP],
    pub(super) decode: [f32; STRIP],
    /// Code of each block's scale.
    pub(super) scales: [u8; STRIP],
    /// What the elements of each block are multiplied with.
    pub(super) multipliers: [f32; STRIP],
    /// Eight codes a word, the first in the lowest nibble.
    pub(super) codes: [[u32; 4]; STRIP],
}

impl<const B: usize> Strip<B> {
    pub(super) const fn new() -> Self {
        Self {
            values: [[0.0; B]; STRIP],
            amax: [0.0; STRIP],
            encode: [1.0; STRIP],
            decode: [1.0; STRIP],
            scales: [0; STRIP],
            multipliers: [1.0; STRIP],
            codes: [[0; 4]; STRIP],
        }
    }

    #[inline(always)]
    pub(super) fn set_factor(&mut self, block: usize, factor: TensorFactor) {
        self.encode[block] = factor.encode;
        self.decode[block] = factor.decode;
    }

    /// Fills `amax` from the values.
    #[inline(always)]
    pub(super) fn find_amax(&mut self) {
        for (amax, block) in self.amax.iter_mut().zip(&self.values) {
            // As integers magnitudes order like the floats, and NaN comes out on top.
            let largest = block.iter().fold(0, |largest, value| {
                u32::max(largest, value.to_bits() & 0x7FFF_FFFF)
            });
            *amax = f32::from_bits(largest);
        }
    }

    /// Fills `scales` and `multipliers` from `amax`.
    #[inline(always)]
    pub(super) fn find_scales(&mut self, scheme: &Fp4Scheme) {
        match scheme.rule {
            ScaleRule::Te => self.e4m3_scales(
                |amax, encode| amax * (encode * crate::rule::SIXTH),
                |scale, _, decode| saturate(1.0 / (scale * decode)),
            ),
            ScaleRule::TeDivision => self.e4m3_scales(
                |amax, encode| (amax / 6.0) * encode,
                |scale, _, decode| saturate(1.0 / (scale * decode)),
            ),
            // The rest is rare or has no tensor scale: one block at a time is fast enough.
            rule => {
                for block in 0..STRIP {
                    let factor = TensorFactor {
                        amax: f32::NAN,
                        encode: self.encode[block],
                        decode: self.decode[block],
                    };
                    self.scales[block] = rule.block_scale(self.amax[block], factor);
                    self.multipliers[block] = rule.multiplier(self.scales[block], factor);
                }
            }
        }
    }

    #[inline(always)]
    fn e4m3_scales(
        &mut self,
        exact: impl Fn(f32, f32) -> f32,
        multiplier: impl Fn(f32, f32, f32) -> f32,
    ) {
        for block in 0..STRIP {
            let (encode, decode) = (self.encode[block], self.decode[block]);
            let (code, scale) = round_to_e4m3(exact(self.amax[block], encode));
            self.scales[block] = code;
            self.multipliers[block] = multiplier(scale, encode, decode);
        }
    }

    /// Fills `codes` from the values, scales and multipliers.
    #[inline(always)]
    pub(super) fn find_codes(&mut self, scheme: &Fp4Scheme) {
        if scheme.rule == ScaleRule::NoTensorScale {
            self.round_elements(|value, scale, _| positive_zero(value / scale));
        } else if scheme.rule.row().keeps_negative_zero {
            self.round_elements(|value, _, multiplier| value * multiplier);
        } else {
            self.round_elements(|value, _, multiplier| positive_zero(value * multiplier));
        }
    }

    #[inline(always)]
    fn round_elements(&mut self, normalize: impl Fn(f32, f32, f32) -> f32) {
        for block in 0..STRIP {
            let scale = E4M3_VALUES[self.scales[block] as usize];
            let multiplier = self.multipliers[block];
            for word in 0..B / 8 {
                let mut codes = 0;
                for index in 0..8 {
                    let value = self.values[block][word * 8 + index];
                    codes |= round_to_e2m1(normalize(value, scale, multiplier)) << (4 * index);
                }
                self.codes[block][word] = codes;
            }
        }
    }

    /// Replaces the values by those that `codes`, `scales` and `decode` stand for.
    #[inline(always)]
    pub(super) fn dequantize(&mut self, format: Fp4Format) {
        let table = match format {
            Fp4Format::NvFp4 => &E4M3_VALUES,
            Fp4Format::MxFp4 => &E8M0_VALUES,
        };
        for block in 0..STRIP {
            // Twice the element is an integer; half the scale is exact, as is their product.
            let half_scale = table[self.scales[block] as usize] * 0.5;
            let decode = self.decode[block];
            for word in 0..B / 8 {
                let codes = self.codes[block][word];
                for index in 0..8 {
                    let code = codes >> (4 * index) & 0xF;
                    self.values[block][word * 8 + index] =
                        (twice_element(code) * half_scale) * decode;
                }
            }
        }
    }
}

/// `min(value, FLT_MAX)` that keeps NaN.
#[inline(always)]
fn saturate(value: f32) -> f32 {
    if value > f32::MAX { f32::MAX } else { value }
}

/// -0 to +0, everything else to itself: the references that compare with zero lose its sign.
#[inline(always)]
fn positive_zero(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { value }
}

/// The E4M3 code and value nearest to a non-negative f32, ties to even, 448 at most, NaN kept.
#[inline(always)]
pub(super) fn round_to_e4m3(exact: f32) -> (u8, f32) {
    // Adding 2^14 leaves an ulp of 2^-9, the step of the subnormal codes.
    const SUBNORMAL: f32 = 16384.0;
    let is_nan = exact.is_nan();
    let clamped = if exact > 448.0 { 448.0 } else { exact };
    let bits = clamped.to_bits();
    let rounded = bits.wrapping_add(0x7_FFFF + (bits >> 20 & 1)) & !0xF_FFFF;
    let shifted = clamped + SUBNORMAL;
    let small = clamped < 1.0 / 64.0;
    let code = if small {
        shifted.to_bits().wrapping_sub(SUBNORMAL.to_bits())
    } else {
        (rounded >> 20).wrapping_sub(120 << 3)
    };
    let value = if small { shifted - SUBNORMAL } else { f32::from_bits(rounded) };
    (if is_nan { 0x7F } else { code } as u8, if is_nan { exact } else { value })
}

/// The E2M1 code nearest to an f32, ties to even; NaN gives 0.
#[inline(always)]
pub(super) fn round_to_e2m1(value: f32) -> u32 {
    let magnitude = value.abs();
    let code = (magnitude > 0.25) as u32
        + (magnitude >= 0.75) as u32
        + (magnitude > 1.25) as u32
        + (magnitude >= 1.75) as u32
        + (magnitude > 2.5) as u32
        + (magnitude >= 3.5) as u32
        + (magnitude > 5.0) as u32;
    let sign = if value.is_nan() { 0 } else { value.to_bits() >> 28 & 8 };
    code | sign
}

/// Twice the value of an E2M1 code.
#[inline(always)]
pub(super) fn twice_element(code: u32) -> f32 {
    let magnitude = code & 7;
    let shift = (magnitude >> 1).wrapping_sub(1) & 3;
    let large = (2 | magnitude & 1) << shift;
    let twice = if magnitude < 4 { magnitude } else { large } as f32;
    f32::from_bits(twice.to_bits() | (code & 8) << 28)
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::{E2M1, E4M3};

    use super::*;

    /// Every f32 at which a rounding could change its mind, and both neighbours.
    fn around(values: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        values.flat_map(|value| [value.next_down(), value, value.next_up()])
    }

    #[test]
    fn e4m3_rounds_as_the_format_says() {
        let codes = (0..E4M3.max_code()).map(|code| {
            (E4M3.decode(code) as f64 + E4M3.decode(code + 1) as f64) as f32 / 2.0
        });
        let specials = [0.0, f32::MIN_POSITIVE, 1e-45, 448.0, 464.0, f32::MAX, f32::INFINITY];
        for exact in around(codes.chain(E4M3_VALUES[..127].iter().copied()).chain(specials)) {
            if exact >= 0.0 {
                let expected = E4M3.encode(exact);
                assert_eq!(round_to_e4m3(exact), (expected, E4M3.decode(expected)), "{exact:e}");
            }
        }
        let (code, value) = round_to_e4m3(f32::NAN);
        assert!(code == 0x7F && value.is_nan());
    }

    #[test]
    fn e2m1_rounds_as_the_format_says() {
        let midpoints = (0..7).map(|code| (E2M1.decode(code) + E2M1.decode(code + 1)) / 2.0);
        let specials = [0.0, 1e-45, 6.0, 8.0, f32::MAX, f32::INFINITY];
        for magnitude in around(midpoints.chain(specials)) {
            for value in [magnitude, -magnitude] {
                assert_eq!(round_to_e2m1(value), E2M1.encode(value) as u32, "{value:e}");
            }
        }
        assert_eq!(round_to_e2m1(f32::NAN), 0);
        assert_eq!(round_to_e2m1(-f32::NAN), 0);
    }

    #[test]
    fn elements_decode_as_the_format_says() {
        for code in 0..16 {
            let expected = E2M1.decode(code as u8);
            assert_eq!((twice_element(code) * 0.5).to_bits(), expected.to_bits());
        }
    }
}
