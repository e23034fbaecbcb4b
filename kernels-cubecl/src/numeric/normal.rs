//! Codes and block scales to floats without subnormals, for drivers that flush them to zero.
//!
//! ```text
//! magnitude   0    1    2    3    4    5    6    7     the lowest three bits of a code
//! element     0    0.5  1    1.5  2    3    4    6
//! twice       0    1    2    3    4    6    8    12    a nibble each
//! ```

use burn_fp4_search::formats::{Minifloat, ScaleGrid};
use cubecl::prelude::*;
use half::f16;

use super::element::{decode_word, element_value};
use super::scale_grid::{INFINITY, MANTISSA, NAN, first_normal, ones, power, rebias, scale_value};
use crate::instructions::PlaneMma;
use crate::plan::{Decoding, Dtype};

/// Bits of 2^23: an integer below 2^23 in the mantissa adds itself.
const TWO_23: u32 = 0x4B00_0000;

/// Returns the element of the code in the highest four bits of a word.
#[cube]
fn normal_element(word: u32) -> f32 {
    let magnitude = (word >> 28u32) & 7u32;
    // From 1 on, exponent and mantissa bits equal an f32's with the exponent field 126 more.
    let bits = (magnitude << 22u32) + 0x3F00_0000u32;
    let small = magnitude * 0x3F00_0000u32;
    f32::reinterpret(select(magnitude < 2u32, small, bits) | (word & 0x8000_0000u32))
}

/// Returns the value of a code of a float grid. The sign bit is ignored.
#[cube]
fn normal_float(code: u32, #[comptime] row: Minifloat) -> f32 {
    let magnitude = code & comptime!(ones(row));
    let bits = (magnitude + comptime!(rebias(row))) << comptime!(MANTISSA - row.mantissa_bits);
    let step = comptime!(power(1 - row.bias - row.mantissa_bits as i32));
    // Exact in f32, which the subnormals of the grid are multiples of.
    let subnormal = f32::cast_from(magnitude) * step;
    let value = select(magnitude < comptime!(first_normal(row)), subnormal, f32::reinterpret(bits));
    select(magnitude == comptime!(ones(row)), f32::reinterpret(NAN), value)
}

/// Returns the value of a block scale as a factor of a matmul. A power of two that is subnormal may
/// count as zero.
#[cube]
pub(crate) fn scale_factor(
    code: u32,
    #[comptime] grid: ScaleGrid,
    #[comptime] decoding: Decoding,
) -> f32 {
    if comptime!(decoding == Decoding::Subnormals) {
        scale_value(code, grid)
    } else {
        match comptime!(grid) {
            ScaleGrid::Float(row) => normal_float(code, row),
            ScaleGrid::PowersOfTwo(_) => scale_value(code, grid),
        }
    }
}

/// Returns `element x block scale`, given the element in the highest four bits of a word, and the
/// block scale as a code and as its [`scale_factor`]. Products with powers of two are exact even if
/// they are subnormal.
#[cube]
pub(crate) fn scaled_value(
    word: u32,
    code: u32,
    factor: f32,
    #[comptime] grid: ScaleGrid,
    #[comptime] decoding: Decoding,
) -> f32 {
    if comptime!(decoding == Decoding::Subnormals) {
        element_value(word) * factor
    } else {
        match comptime!(grid) {
            ScaleGrid::Float(_) => normal_element(word) * factor,
            ScaleGrid::PowersOfTwo(row) => {
                let element = u32::reinterpret(normal_element(word));
                let magnitude = element & 0x7FFF_FFFFu32;
                // The exponent fields of an element are 126 to 129.
                let field = (magnitude >> MANTISSA) + code;
                let normal =
                    magnitude + (code << MANTISSA) - comptime!((row.bias as u32) << MANTISSA);
                let finite = min(normal, INFINITY);
                let mantissa = (magnitude & 0x007F_FFFFu32) | 0x0080_0000u32;
                let subnormal = mantissa >> (128u32 - min(max(field, 126u32), 127u32));
                let value = select(field > 127u32, finite, subnormal);
                let value = select(magnitude == 0u32, 0u32, value);
                let value = select(code == comptime!(ones(row)), NAN, value);
                f32::reinterpret(value | (element & 0x8000_0000u32))
            }
        }
    }
}

/// Returns twice the magnitudes of the elements of eight codes, a nibble each.
#[cube]
fn twice_elements(word: u32) -> u32 {
    let high = (word >> 2u32) & 0x1111_1111u32;
    let low = (word >> 1u32) & 0x1111_1111u32;
    let half = word & 0x1111_1111u32;
    let eights = high & low;
    let fours = high & (half | !low);
    let twos = (low & !high) | (high & half & !low);
    let ones = half & !high;
    ones | (twos << 1u32) | (fours << 2u32) | (eights << 3u32)
}

/// Decodes eight codes to floats that are too small or too large by [`decoded_unit`].
#[cube]
pub(crate) fn decode_eight(word: u32, #[comptime] decoding: Decoding) -> Array<f32> {
    let mut values = Array::<f32>::new(8usize);
    if comptime!(decoding == Decoding::Integers) {
        let twice = twice_elements(word);
        #[unroll]
        for index in 0..8u32 {
            let nibble = (twice >> comptime!(4 * index)) & 15u32;
            let magnitude = f32::reinterpret(nibble | TWO_23) - f32::reinterpret(TWO_23);
            let sign = (word << comptime!(28 - 4 * index)) & 0x8000_0000u32;
            values[comptime!(index as usize)] =
                f32::reinterpret(u32::reinterpret(magnitude) | sign);
        }
    } else {
        let pairs = decode_word::<PlaneMma, f16, Const<2>>(word, Dtype::F16);
        #[unroll]
        for pair in 0..4u32 {
            let halves = pairs[pair as usize];
            values[comptime!(pair as usize)] = f32::cast_from(halves.extract(0usize));
            values[comptime!((pair + 4) as usize)] = f32::cast_from(halves.extract(1usize));
        }
    }
    values
}

/// Returns the factor that restores the elements of [`decode_eight`].
pub(crate) fn decoded_unit(decoding: Decoding) -> f32 {
    match decoding {
        Decoding::Integers => 0.5,
        Decoding::Subnormals | Decoding::HalfSubnormals => power(14),
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::formats::E2M1;

    use super::*;

    #[test]
    fn twice_every_element_is_a_nibble() {
        for (code, place) in (0..16u8).flat_map(|code| (0..8).map(move |place| (code, place))) {
            // All other nibbles have another code.
            let others = (u32::from(code ^ 5) * 0x1111_1111) & !(15 << (4 * place));
            let word = others | (u32::from(code) << (4 * place));
            let twice = (twice_elements(word) >> (4 * place)) & 15;
            assert_eq!(twice as f32, 2.0 * E2M1.decode(code).abs(), "{code} at {place}");
        }
    }
}
