//! Block scales: the one file of the kernels that knows what a code of a block scale is.
//!
//! A [`ScaleGrid`] says how the values of the codes lie on the number line. What the arithmetic
//! below needs of it, on the bits of an f32, follows at compile time from the row inside:
//!
//! ```text
//! f32      s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm   bias 127
//! E4M3          seeee mmm|<---- dropped ---->   bias 7: fields differ by 127 - 7
//! E8M0       eeeeeeee|<------ dropped ------>   bias 127: the exponent field of an f32
//! ```
//!
//! Codes are non-negative: block scales have no sign. They ascend with their values.

use burn_fp4_search::formats::{E2M1, Minifloat, ScaleGrid};
use burn_fp4_search::scale_grid::{
    ELEMENT_BINADE, F32_BIAS, F32_MANTISSA_BITS, POWERS_ABOVE, POWERS_BELOW,
};
use cubecl::prelude::*;

use crate::plan::Dtype;

/// The exponent field of 1 in an f32.
const BIAS: i32 = F32_BIAS as i32;
/// Mantissa bits of an f32.
pub(crate) const MANTISSA: u32 = F32_MANTISSA_BITS;
/// Infinity, as bits of an f32.
const INFINITY: u32 = 0x7F80_0000;
/// NaN, as bits of an f32.
const NAN: u32 = 0x7FC0_0000;
/// What decoding to f16 leaves to be multiplied with elements: they come as
/// [`decode_pair`](super::element::decode_pair) leaves them.
const F16_ELEMENT: i32 = 14;
/// The same for bf16.
const BF16_ELEMENT: i32 = 126;
/// Products `element x block scale` are kept 2^8 times smaller, within the range of an f16.
const PRODUCT: i32 = 8;

/// 2^exponent, a normal f32.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + BIAS) as u32) << MANTISSA)
}

/// The code whose bits are all set, which is NaN; also the mask of codes without sign.
const fn ones(row: Minifloat) -> u32 {
    (1 << (row.exponent_bits + row.mantissa_bits)) - 1
}

/// The code of the largest value.
const fn last(row: Minifloat) -> u32 {
    row.max_code() as u32
}

/// Bits of an f32's mantissa that a code has no room for.
const fn dropped(row: Minifloat) -> u32 {
    MANTISSA - row.mantissa_bits
}

/// What the fields of an f32, without the bits dropped, are more than those of a code.
const fn rebias(row: Minifloat) -> u32 {
    ((BIAS - row.bias) as u32) << row.mantissa_bits
}

/// The code of the smallest normal value: those before are multiples of the smallest positive one.
const fn first_normal(row: Minifloat) -> u32 {
    1 << row.mantissa_bits
}

/// The exponent of the smallest positive value, by which subnormals are apart.
const fn step(row: Minifloat) -> i32 {
    1 - row.bias - row.mantissa_bits as i32
}

/// The smallest code of a positive value.
const fn smallest(grid: ScaleGrid) -> u32 {
    match grid {
        ScaleGrid::Float(_) => 1,
        ScaleGrid::PowersOfTwo(_) => 0,
    }
}

/// The code nearest to a non-negative f32 on a float grid: ties to even, at most the largest, NaN
/// kept.
#[cube]
pub(crate) fn round_to_float(exact: f32, #[comptime] row: Minifloat) -> u32 {
    let is_nan = u32::reinterpret(exact) > INFINITY;
    let largest = comptime!(row.max_value());
    let clamped = select(exact > largest, largest, exact);
    let bits = u32::reinterpret(clamped);
    let half = comptime!((1u32 << (dropped(row) - 1)) - 1);
    let rounded = bits + half + ((bits >> comptime!(dropped(row))) & 1u32);
    let normal = (rounded >> comptime!(dropped(row))) - comptime!(rebias(row));
    // What is added leaves an ulp of the step between subnormal codes.
    let shift = comptime!(power(step(row) + MANTISSA as i32));
    let shifted = clamped + shift;
    let subnormal = u32::reinterpret(shifted) - comptime!(shift.to_bits());
    let code = select(clamped < comptime!(power(1 - row.bias)), subnormal, normal);
    select(is_nan, comptime!(ones(row)), code)
}

/// The largest code on a float grid whose value is at most that of a non-negative f32.
#[cube]
pub(crate) fn round_down_to_float(value: f32, #[comptime] row: Minifloat) -> u32 {
    let normal = (u32::reinterpret(value) >> comptime!(dropped(row))) - comptime!(rebias(row));
    let subnormal = u32::cast_from(min(value, 1.0f32) * comptime!(power(-step(row))));
    let code = select(value < comptime!(power(1 - row.bias)), subnormal, normal);
    min(code, comptime!(last(row)))
}

/// The value of a code of a float grid; the sign bit is not looked at.
#[cube]
pub(crate) fn float_value(code: u32, #[comptime] row: Minifloat) -> f32 {
    let magnitude = code & comptime!(ones(row));
    // Exponent and mantissa bits make an f32 that is too small by a power of two, subnormals
    // included.
    let tiny = f32::reinterpret(magnitude << comptime!(dropped(row)));
    let value = tiny * comptime!(power(BIAS - row.bias));
    select(magnitude == comptime!(ones(row)), f32::reinterpret(NAN), value)
}

/// The value of a code that is a power of two.
#[cube]
fn power_value(code: u32, #[comptime] row: Minifloat) -> f32 {
    let least = comptime!(row.decode(0).to_bits());
    let bits = select(code == 0u32, least, code << MANTISSA);
    f32::reinterpret(select(code == comptime!(ones(row)), NAN, bits))
}

/// The reciprocal of [`power_value`], for any code but 0.
#[cube]
pub(crate) fn power_reciprocal(code: u32, #[comptime] row: Minifloat) -> f32 {
    let twice = comptime!(2 * row.bias as u32);
    let least = comptime!(row.decode(0).to_bits());
    let bits = select(code == twice, least, (twice - code) << MANTISSA);
    f32::reinterpret(select(code == comptime!(ones(row)), NAN, bits))
}

/// The code of a power of two, given its exponent field in an f32 of amax, which is not finite
/// where `amax` is not.
#[cube]
pub(crate) fn power_code(field: u32, amax: f32, #[comptime] row: Minifloat) -> u32 {
    let largest = comptime!(last(row));
    let code = select(field > largest, largest, field);
    select(u32::reinterpret(amax) >= INFINITY, comptime!(ones(row)), code)
}

/// The value of a block scale.
#[cube]
pub(crate) fn scale_value(code: u32, #[comptime] grid: ScaleGrid) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => float_value(code, row),
        ScaleGrid::PowersOfTwo(row) => power_value(code, row),
    }
}

/// Whether a code is that of a positive scale.
#[cube]
pub(crate) fn is_positive(code: u32, #[comptime] grid: ScaleGrid) -> bool {
    code >= comptime!(smallest(grid))
}

// What searches need.

/// Normalizes a block for a search: elements are multiplied by `factor`. A code of a float grid
/// then has its own value, and a power of two is 2^(code - base).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BlockNormalization {
    pub(crate) factor: f32,
    pub(crate) base: u32,
}

/// Normalizes a block with this amax, given what the tensor scale multiplies elements with.
#[cube]
pub(crate) fn block_normalization(
    amax: f32,
    encode: f32,
    #[comptime] grid: ScaleGrid,
) -> BlockNormalization {
    match comptime!(grid) {
        ScaleGrid::Float(_) => BlockNormalization { factor: encode, base: 0u32.runtime() },
        ScaleGrid::PowersOfTwo(row) => {
            let field = u32::reinterpret(amax) >> MANTISSA;
            let base = max(field, ELEMENT_BINADE) - ELEMENT_BINADE;
            let twice = comptime!(2 * row.bias as u32);
            let exponent = twice - min(base, comptime!(twice - 1));
            BlockNormalization { factor: f32::reinterpret(exponent << MANTISSA), base }
        }
    }
}

/// The value of a scale, relative to the block's normalization.
#[cube]
pub(crate) fn value_in(
    normalization: &BlockNormalization,
    code: u32,
    #[comptime] grid: ScaleGrid,
) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            // As [`float_value`], of codes that are not NaN.
            f32::reinterpret(code << comptime!(dropped(row))) * comptime!(power(BIAS - row.bias))
        }
        ScaleGrid::PowersOfTwo(_) => {
            f32::reinterpret((code - normalization.base + comptime!(BIAS as u32)) << MANTISSA)
        }
    }
}

/// Whether there is anything to search for: not among zeros, infinities and NaN, nor at the ends
/// of f32; see `scale_grid.rs` in the search crate. `scaled` is the normalized amax.
#[cube]
pub(crate) fn is_searchable(
    amax: f32,
    scaled: f32,
    normalization: &BlockNormalization,
    #[comptime] grid: ScaleGrid,
) -> bool {
    let in_range = match comptime!(grid) {
        // Beyond, what elements are multiplied with overflows for the smallest scales.
        ScaleGrid::Float(row) => normalization.factor <= comptime!(power(BIAS + step(row))),
        // At the ends, scales overflow or have no half.
        ScaleGrid::PowersOfTwo(row) => {
            let end = comptime!(last(row) - 2);
            normalization.base >= 2u32 && normalization.base < end
        }
    };
    in_range && amax > 0.0f32 && scaled <= f32::reinterpret(0x7F7F_FFFFu32)
}

/// Scales to try, from the largest down: `odd` codes to `high`, then all to `low`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) high: u32,
    pub(crate) low: u32,
    pub(crate) odd: u32,
}

/// The window of the scales above a value, up to another, and of those that have no half; see
/// `sse.rs` in the search crate. `scaled` is the normalized amax.
#[cube]
pub(crate) fn window(
    normalization: &BlockNormalization,
    scaled: f32,
    above: f32,
    upto: f32,
    #[comptime] grid: ScaleGrid,
) -> Window {
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            // Codes up to this one are multiples of the smallest value: odd ones have no half.
            let last_multiple = comptime!((2 * first_normal(row) - 1) as f32);
            // The smallest code whose double does not exist.
            let no_double = comptime!(last(row) + 1 - first_normal(row));
            let multiples =
                u32::cast_from(min(scaled * comptime!(power(2 - step(row))), last_multiple));
            Window {
                high: round_down_to_float(upto, row),
                low: min(round_down_to_float(above, row) + 1u32, no_double),
                odd: (max(multiples, 1u32) - 1u32) | 1u32,
            }
        }
        ScaleGrid::PowersOfTwo(row) => {
            // Exponents of f32, with the base added before the bias is taken away: no less than 0.
            let bias = comptime!(BIAS as u32);
            let largest = comptime!(last(row));
            let below = (u32::reinterpret(above) >> MANTISSA) + normalization.base;
            let high = (u32::reinterpret(upto) >> MANTISSA) + normalization.base;
            Window {
                high: min(max(high, bias) - bias, largest),
                low: max(max(below + 1u32, bias) - bias, lowest(normalization, comptime!(grid))),
                odd: 0u32.runtime(),
            }
        }
    }
}

/// The smallest scale that searches try.
#[cube]
pub(crate) fn lowest(normalization: &BlockNormalization, #[comptime] grid: ScaleGrid) -> u32 {
    match comptime!(grid) {
        ScaleGrid::Float(_) => {
            let smallest = comptime!(smallest(grid));
            smallest.runtime()
        }
        // 6 times this one is nothing beside the amax, in f32.
        ScaleGrid::PowersOfTwo(_) => max(normalization.base, POWERS_BELOW) - POWERS_BELOW,
    }
}

/// The smallest scale at which every element of a block rounds to 0: any larger one does the same.
#[cube]
pub(crate) fn top(
    normalization: &BlockNormalization,
    scaled: f32,
    #[comptime] grid: ScaleGrid,
) -> u32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            let largest = comptime!(last(row));
            min(round_down_to_float(scaled * 4.0f32, row) + 1u32, largest)
        }
        ScaleGrid::PowersOfTwo(row) => {
            let largest = comptime!(last(row));
            min(normalization.base + POWERS_ABOVE, largest)
        }
    }
}

// What products need: elements come from `decode_pair`, too small by a power of two.

/// `element x block scale`, exactly, given an element that was decoded to f16.
#[cube]
pub(crate) fn scaled_element(element: f32, scale: f32, #[comptime] grid: ScaleGrid) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(_) => element * (scale * comptime!(power(F16_ELEMENT))),
        // A power of two may be too large for that.
        ScaleGrid::PowersOfTwo(_) => (element * comptime!(power(F16_ELEMENT))) * scale,
    }
}

/// Whether an f16 holds every product of an element and a block scale, times 2^-8.
pub(crate) fn f16_holds_products(grid: ScaleGrid) -> bool {
    match grid {
        ScaleGrid::Float(row) => {
            let largest = E2M1.max_value() * row.max_value() * power(-PRODUCT);
            // The smallest product is half the smallest scale; the smallest f16 is 2^-24.
            step(row) - 1 - PRODUCT >= -24 && largest <= 65504.0
        }
        ScaleGrid::PowersOfTwo(_) => false,
    }
}

/// What a decoded element is multiplied with before it is multiplied with a [`product_scale`].
pub(crate) fn element_shift(grid: ScaleGrid, dtype: Dtype) -> Option<f32> {
    match grid {
        ScaleGrid::Float(_) => None,
        ScaleGrid::PowersOfTwo(_) => Some(power(element_exponent(dtype))),
    }
}

/// What block scales are multiplied with, so that times a decoded element they are
/// `element x block scale` times 2^-8, within the range of the dtype; powers of two need it not.
fn scale_shift(grid: ScaleGrid, dtype: Dtype) -> f32 {
    match grid {
        ScaleGrid::Float(_) => power(element_exponent(dtype) - PRODUCT),
        ScaleGrid::PowersOfTwo(_) => 1.0,
    }
}

/// What the sums of such products are multiplied with in return.
pub(crate) fn sum_shift(grid: ScaleGrid) -> f32 {
    match grid {
        ScaleGrid::Float(_) => power(PRODUCT),
        ScaleGrid::PowersOfTwo(_) => 1.0,
    }
}

/// 2 to this power brings back the elements that are decoded to a dtype.
fn element_exponent(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::Bf16 => BF16_ELEMENT,
        Dtype::F16 | Dtype::F32 => F16_ELEMENT,
    }
}

/// What a decoded element is multiplied with for a block scale.
#[cube]
pub(crate) fn product_scale<F: Float>(
    code: u32,
    #[comptime] grid: ScaleGrid,
    #[comptime] dtype: Dtype,
) -> F {
    F::cast_from(scale_value(code, grid) * comptime!(scale_shift(grid, dtype)))
}

/// [`product_scale`] of two codes, 16 bits apart in a word that has other bits between them.
#[cube]
pub(crate) fn product_scale_pair<F: Float, N: Size>(
    codes: u32,
    #[comptime] grid: ScaleGrid,
    #[comptime] dtype: Dtype,
) -> Vector<F, N> {
    // Mantissa bits of the dtype, and the exponent field of 1.
    let (mantissa, bias) = comptime!(if dtype == Dtype::Bf16 { (7, 127) } else { (10, 15) });
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            let above = comptime!(ones(row) + 1);
            let dropped = comptime!(mantissa - row.mantissa_bits);
            let codes = codes & comptime!(ones(row) * 0x0001_0001);
            // Of a code that is NaN, the only one that this sets a bit of.
            let nan = (codes + 0x0001_0001u32) & comptime!(above * 0x0001_0001);
            // Exponent and mantissa bits make a float that is too small by a power of two,
            // subnormals included; those of NaN fill up all of its exponent.
            let filled = comptime!((0x8000 - (above << dropped)) / above);
            let tiny = Vector::<F, N>::reinterpret((codes << dropped) + nan * filled);
            if comptime!(dtype == Dtype::Bf16) {
                // A bf16 holds no more than half the exponent of both together.
                let shift = Vector::new(F::cast_from(comptime!(power(bias - row.bias))));
                tiny * shift * Vector::new(F::cast_from(comptime!(scale_shift(grid, dtype))))
            } else {
                let shift = comptime!(power(bias - row.bias) * scale_shift(grid, dtype));
                tiny * Vector::new(F::cast_from(shift))
            }
        }
        ScaleGrid::PowersOfTwo(_) => {
            // The exponent of a bf16; 0 is half its smallest normal number, and the last is NaN:
            // both have the highest mantissa bit.
            let codes = codes & 0x00FF_00FFu32;
            let (first, last) = (!(codes + 0x00FF_00FFu32), codes + 0x0001_0001u32);
            let half = ((first | last) & 0x0100_0100u32) >> 2u32;
            Vector::<F, N>::reinterpret((codes << 7u32) | half)
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::formats::{E4M3, E8M0};

    use super::*;

    #[test]
    fn the_constants_of_e4m3() {
        assert_eq!((dropped(E4M3), rebias(E4M3), step(E4M3)), (20, 960, -9));
        assert_eq!((ones(E4M3), last(E4M3), first_normal(E4M3)), (0x7F, 126, 8));
        assert_eq!(power(step(E4M3) + MANTISSA as i32), 16384.0);
        assert_eq!(power(1 - E4M3.bias), 1.0 / 64.0);
        assert_eq!(power(BIAS - E4M3.bias).to_bits(), 0x7B80_0000);
        assert_eq!(power(BIAS + step(E4M3)).to_bits(), 0x7A80_0000);
        assert_eq!(power(2 - step(E4M3)), 2048.0);
        assert_eq!(last(E4M3) + 1 - first_normal(E4M3), 0x77);
        let grid = ScaleGrid::Float(E4M3);
        assert_eq!(scale_shift(grid, Dtype::Bf16), 2f32.powi(118));
        assert_eq!(scale_shift(grid, Dtype::F16), 64.0);
        assert!(f16_holds_products(grid));
    }

    #[test]
    fn the_constants_of_e8m0() {
        assert_eq!((ones(E8M0), last(E8M0), dropped(E8M0)), (0xFF, 254, 23));
        assert_eq!(E8M0.decode(0).to_bits(), 0x0040_0000);
        let grid = ScaleGrid::PowersOfTwo(E8M0);
        assert_eq!(element_shift(grid, Dtype::Bf16).map(f32::to_bits), Some(0x7E80_0000));
        assert!(!f16_holds_products(grid));
    }
}
