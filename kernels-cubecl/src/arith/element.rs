//! Element codes: f32 -> E2M1 and back, on bits.

use cubecl::prelude::*;

use crate::plan::Dtype;

/// What adding to a magnitude below 2^(e + 1) leaves of it: a multiple of 2^(e - 1) in the low
/// bits.
const SHIFT: f32 = 4_194_304.0;

/// Codes of one exponent are evenly spaced, 2^(e - 1) apart for the binade [2^e, 2^(e + 1)); below
/// 1 as in [1, 2). Adding 2^(22 + e) rounds a magnitude to this grid, ties to even.
#[derive(CubeType)]
struct OnGrid {
    /// 2^e.
    binade: f32,
    /// The magnitude, 6 at most, plus 2^(22 + e).
    shifted: f32,
}

#[cube]
fn round_to_grid(magnitude: f32) -> OnGrid {
    let magnitude = min(magnitude, 6.0f32);
    let exponent = u32::reinterpret(max(magnitude, 1.0f32)) & 0x7F80_0000u32;
    let binade = f32::reinterpret(exponent);
    // The product is exact, so it does not matter whether this is fused.
    OnGrid { binade, shifted: fma(binade, SHIFT, magnitude) }
}

/// The E2M1 code nearest to an f32, ties to even, 6 at most, in the highest four bits of the
/// result; the other bits mean nothing. The sign bit is kept. A NaN gives any code.
#[cube]
pub(crate) fn round_to_e2m1(value: f32) -> u32 {
    let grid = round_to_grid(value.abs());
    // The bits of `shifted` are (149 + e) << 23 | steps, and the code is steps + 2 e.
    let code = u32::reinterpret(grid.shifted) * 0x1000_0040u32 + 0x6000_0000u32;
    code | (u32::reinterpret(value) & 0x8000_0000u32)
}

/// The value of the E2M1 code nearest to an f32; see [`round_to_e2m1`].
#[cube]
pub(crate) fn nearest_element(value: f32) -> f32 {
    let magnitude = nearest_magnitude(value.abs());
    f32::reinterpret(u32::reinterpret(magnitude) | (u32::reinterpret(value) & 0x8000_0000u32))
}

/// [`nearest_element`] of a value without sign.
#[cube]
pub(crate) fn nearest_magnitude(magnitude: f32) -> f32 {
    let grid = round_to_grid(magnitude);
    fma(grid.binade, -SHIFT, grid.shifted)
}

/// The value of the E2M1 code in the highest four bits of a word.
#[cube]
pub(crate) fn element_value(word: u32) -> f32 {
    // Exponent and mantissa bits make an f32 that is 2^126 too small, subnormals included.
    let bits = (word & 0x8000_0000u32) | ((word >> 6u32) & 0x01C0_0000u32);
    f32::reinterpret(bits) * f32::reinterpret(0x7E80_0000u32)
}

/// The elements of the codes in bits 12..16 and 28..32 of a word, for f16 times 2^-14 and for bf16
/// times 2^-126: exponent and mantissa of a code are the lowest exponent bits and the highest
/// mantissa bit, subnormals included.
#[cube]
pub(crate) fn decode_pair<F: Float, N: Size>(word: u32, #[comptime] dtype: Dtype) -> Vector<F, N> {
    let bits = if comptime!(dtype == Dtype::Bf16) {
        (word & 0x8000_8000u32) | ((word >> 6u32) & 0x01C0_01C0u32)
    } else {
        (word & 0x8000_8000u32) | ((word >> 3u32) & 0x0E00_0E00u32)
    };
    Vector::<F, N>::reinterpret(bits)
}

/// The elements of the two codes of a byte, the rest of the word being zeros; see [`decode_pair`].
/// A product with a constant is two shifts and an addition at once.
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
