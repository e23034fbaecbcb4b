//! Conversions between f32 and E2M1 codes, on bits, and from f32 to the dtypes of tensors.

use cubecl::prelude::*;

use crate::instructions::MmaInstructions;
use crate::plan::{Conversion, Dtype};

/// Elements of one binade [2^e, 2^(e + 1)) are 2^(e - 1) apart, and those below 1 as in [1, 2). A
/// sum of about 2^e times this number has that distance as its unit in the last place: adding
/// rounds a value as an element is rounded, ties to even.
const SHIFT: f32 = 4_194_304.0;

/// Magnitudes below it round to 6, the largest element, or less without clamping.
pub(crate) const UNLIMITED: f32 = 7.0;

/// Factor that, with the addend [`TO_CODE`], moves a code to the highest four bits. The rounded sum
/// has the bits `sign << 31 | (149 + e) << 23 | steps`; its code is the sign and `steps + 2 e`. The
/// bits below, (21 + e) << 23 and 65 steps, carry nothing.
const FROM_STEPS: u32 = 0x1000_0041;
const TO_CODE: u32 = 0x2000_0000;

/// Returns the E2M1 code nearest to an f32, ties to even, at most 6, in the highest four bits of
/// the result. The other bits are arbitrary. The sign bit is kept. A NaN gives any code.
#[cube]
pub(crate) fn round_to_e2m1(value: f32) -> u32 {
    round_unlimited(max(min(value, 6.0f32), -6.0f32))
}

/// Like [`round_to_e2m1`], for values whose magnitude is below [`UNLIMITED`].
#[cube]
pub(crate) fn round_unlimited(value: f32) -> u32 {
    // 2^e with the sign of the value. If the two differ in more bits, the larger one is 1, whose
    // exponent has every bit of a smaller exponent.
    let bits = u32::reinterpret(max(value.abs(), 1.0f32)) | u32::reinterpret(value);
    let binade = f32::reinterpret(bits & 0xFF80_0000u32);
    // The product is exact, fused or not.
    let shifted = fma(binade, SHIFT, value);
    u32::reinterpret(shifted) * FROM_STEPS + TO_CODE
}

/// Returns the value of the E2M1 code nearest to an f32; see [`round_to_e2m1`].
#[cube]
pub(crate) fn nearest_element(value: f32) -> f32 {
    let magnitude = nearest_magnitude(value.abs());
    f32::reinterpret(u32::reinterpret(magnitude) | (u32::reinterpret(value) & 0x8000_0000u32))
}

/// Like [`nearest_element`], for values without sign.
#[cube]
pub(crate) fn nearest_magnitude(magnitude: f32) -> f32 {
    nearest_unlimited(min(magnitude, 6.0f32))
}

/// Like [`nearest_magnitude`], for magnitudes below [`UNLIMITED`].
///
/// Values below 1.5 are added to 1.5 times [`SHIFT`], which rounds them to halves. A larger value
/// is added to itself times `SHIFT`. In units of 2^(e - 1) it is M / 2^22 for an integer M of 24
/// bits, and that product is M. The difference M - M / 2^22 is rounded to an integer, even just
/// below 2^23 where an f32 could have a half. M minus that is the integer nearest to M / 2^22. At a
/// tie M is even, so both are even together.
#[cube]
pub(crate) fn nearest_unlimited(magnitude: f32) -> f32 {
    let far = max(magnitude, 1.5f32);
    // Both products and the remainder are exact.
    fma(far, SHIFT, fma(far, -SHIFT, magnitude))
}

/// Returns the value of the E2M1 code in the highest four bits of a word.
#[cube]
pub(crate) fn element_value(word: u32) -> f32 {
    // Exponent and mantissa bits make an f32 that is 2^126 too small, subnormals included.
    let bits = (word & 0x8000_0000u32) | ((word >> 6u32) & 0x01C0_0000u32);
    f32::reinterpret(bits) * f32::reinterpret(0x7E80_0000u32)
}

/// Decodes a word of eight codes to four pairs, of f16 times 2^-14 or bf16 times 2^-126: code `i`
/// and code `i + 4`. Exponent and mantissa of a code become the lowest exponent bits and the
/// highest mantissa bit, subnormals included.
///
/// One shift moves these bits of two pairs away from the signs: then they do not overlap.
#[cube]
pub(crate) fn decode_word<I: MmaInstructions, F: Float, N: Size>(
    word: u32,
    #[comptime] dtype: Dtype,
) -> Array<Vector<F, N>> {
    let mut pairs = Array::<Vector<F, N>>::new(4usize);
    #[unroll]
    for half in 0..2u32 {
        if comptime!(dtype == Dtype::Bf16) {
            // Pairs 3 and 2, then 1 and 0.
            let signs = word << comptime!(8 * half);
            let rest = if comptime!(half == 0) { word >> 6u32 } else { word << 2u32 };
            let both = I::merge_bits(signs, rest, 0x8800_8800u32);
            let first = comptime!((3 - 2 * half) as usize);
            pairs[first] = Vector::<F, N>::reinterpret(both & 0x81C0_81C0u32);
            let second = (both << 4u32) & 0x81C0_81C0u32;
            pairs[comptime!(first - 1)] = Vector::<F, N>::reinterpret(second);
        } else {
            // Pairs 3 and 1, then 2 and 0.
            let signs = word << comptime!(4 * half);
            let rest = if comptime!(half == 0) { word >> 3u32 } else { word << 1u32 };
            let both = I::merge_bits(signs, rest, 0x8080_8080u32);
            let first = comptime!((3 - half) as usize);
            pairs[first] = Vector::<F, N>::reinterpret(both & 0x8E00_8E00u32);
            let second = (both << 8u32) & 0x8E00_8E00u32;
            pairs[comptime!(first - 2)] = Vector::<F, N>::reinterpret(second);
        }
    }
    pairs
}

/// Decodes the two codes of a byte in a word of otherwise zeros; see [`decode_word`]. A
/// multiplication by a constant stands for two shifts and an addition.
#[cube]
pub(crate) fn decode_byte<F: Float, N: Size>(byte: u32, #[comptime] dtype: Dtype) -> Vector<F, N> {
    let signs = (byte * 0x0100_1000u32) & 0x8000_8000u32;
    let bits = if comptime!(dtype == Dtype::Bf16) {
        signs | ((byte * 0x0004_0040u32) & 0x01C0_01C0u32)
    } else {
        signs | ((byte * 0x0020_0200u32) & 0x0E00_0E00u32)
    };
    Vector::<F, N>::reinterpret(bits)
}

/// Rounds an f32 once, to nearest even.
#[cube]
pub(crate) fn narrow<F: Float>(value: f32, #[comptime] conversion: Conversion) -> F {
    if comptime!(conversion == Conversion::Bf16Bits) {
        let bits = u32::reinterpret(value);
        let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
        let is_nan = (bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
        F::reinterpret(u16::cast_from(select(is_nan, 0x7FC0u32, rounded)))
    } else if comptime!(conversion == Conversion::F16Bits) {
        Vector::<F, Const<2>>::reinterpret(f16_bits(value)).extract(0usize)
    } else {
        F::cast_from(value)
    }
}

/// Returns the bits of the f16 nearest to an f32, ties to even.
#[cube]
fn f16_bits(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7FFF_FFFFu32;
    // The exponents differ by 127 - 15, the mantissas by 13 bits.
    let rounded = magnitude + 0xFFFu32 + ((magnitude >> 13u32) & 1u32);
    let normal = min((max(rounded, 0x3800_0000u32) - 0x3800_0000u32) >> 13u32, 0x7C00u32);
    // Below 2^-14: multiples of 2^-24. A shift of 25 leaves nothing.
    let mantissa = (magnitude & 0x007F_FFFFu32) | 0x0080_0000u32;
    let shift = 126u32 - min(magnitude >> 23u32, 112u32);
    let shift = min(shift, 25u32);
    let half = (1u32 << (shift - 1u32)) - 1u32;
    let subnormal = (mantissa + half + ((mantissa >> shift) & 1u32)) >> shift;
    let finite = select(magnitude < 0x3880_0000u32, subnormal, normal);
    let found = select(magnitude > 0x7F80_0000u32, 0x7E00u32, finite);
    found | ((bits >> 16u32) & 0x8000u32)
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::formats::E2M1;

    use super::*;

    /// Kernels only run on a device: the test repeats their formulas, for every value below the
    /// limit.
    #[test]
    fn every_value_is_rounded_as_the_format_says() {
        // The largest tie to 0 is 1/4.
        let bits = 0.125f32.to_bits()..UNLIMITED.to_bits();
        let tiny = [0.0, 1e-45, f32::MIN_POSITIVE];
        for magnitude in bits.map(f32::from_bits).chain(tiny) {
            let expected = E2M1.encode(magnitude);
            let far = magnitude.max(1.5);
            let nearest = far.mul_add(SHIFT, far.mul_add(-SHIFT, magnitude));
            assert_eq!(nearest, E2M1.decode(expected), "{magnitude:e}");
            for (value, sign) in [(magnitude, 0), (-magnitude, E2M1.sign_bit())] {
                let bits = magnitude.max(1.0).to_bits() | value.to_bits();
                let shifted = f32::from_bits(bits & 0xFF80_0000).mul_add(SHIFT, value);
                let code = shifted.to_bits().wrapping_mul(FROM_STEPS).wrapping_add(TO_CODE) >> 28;
                assert_eq!(code, u32::from(expected | sign), "{value:e}");
            }
        }
    }
}
