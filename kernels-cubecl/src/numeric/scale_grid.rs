//! Block scales: the only file of the kernels that interprets their codes.
//!
//! A [`ScaleGrid`] describes the values of the codes. The constants of the arithmetic below, on the
//! bits of an f32, are derived from its row at compile time:
//!
//! ```text
//! f32      s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm   bias 127
//! E4M3          seeee mmm|<---- dropped ---->   bias 7: fields differ by 127 - 7
//! E8M0       eeeeeeee|<------ dropped ------>   bias 127: the exponent field of an f32
//! ```
//!
//! Codes are non-negative, since block scales have no sign. They ascend with their values.

use burn_fp4_search::formats::{E2M1, E4M3, Minifloat, ScaleGrid};
use burn_fp4_search::scale_grid::{
    ELEMENT_BINADE, F32_BIAS, F32_MANTISSA_BITS, POWERS_ABOVE, POWERS_BELOW,
};
use cubecl::prelude::*;
use half::f16;

use crate::plan::Dtype;

/// Exponent field of 1 in an f32.
const BIAS: i32 = F32_BIAS as i32;
/// Mantissa bits of an f32.
pub(crate) const MANTISSA: u32 = F32_MANTISSA_BITS;
/// Bits of infinity in an f32.
pub(crate) const INFINITY: u32 = 0x7F80_0000;
/// Bits of NaN in an f32.
pub(crate) const NAN: u32 = 0x7FC0_0000;
/// Elements that [`decode_word`](super::element::decode_word) decodes to f16 are 2^14 times too
/// small.
const F16_ELEMENT: i32 = 14;
/// Elements decoded to bf16 are 2^126 times too small.
const BF16_ELEMENT: i32 = 126;
/// Products `element x block scale` are kept 2^8 times smaller, within the range of an f16.
const PRODUCT: i32 = 8;

/// Returns 2^exponent, a normal f32.
pub(crate) const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + BIAS) as u32) << MANTISSA)
}

/// Returns the code with all bits set, which is NaN; also the mask of codes without sign.
pub(crate) const fn ones(row: Minifloat) -> u32 {
    (1 << (row.exponent_bits + row.mantissa_bits)) - 1
}

/// Returns the code of the largest value.
const fn last(row: Minifloat) -> u32 {
    row.max_code() as u32
}

/// Returns the number of mantissa bits of an f32 that a code lacks.
const fn dropped(row: Minifloat) -> u32 {
    MANTISSA - row.mantissa_bits
}

/// Returns the difference between the fields of an f32, without the dropped bits, and of its code.
pub(crate) const fn rebias(row: Minifloat) -> u32 {
    ((BIAS - row.bias) as u32) << row.mantissa_bits
}

/// Returns the code of the smallest normal value. Smaller values are multiples of the smallest
/// positive one.
pub(crate) const fn first_normal(row: Minifloat) -> u32 {
    1 << row.mantissa_bits
}

/// Returns the exponent of the smallest positive value, the distance between subnormals.
const fn step(row: Minifloat) -> i32 {
    1 - row.bias - row.mantissa_bits as i32
}

/// Returns the smallest code of a positive value.
const fn smallest(grid: ScaleGrid) -> u32 {
    match grid {
        ScaleGrid::Float(_) => 1,
        ScaleGrid::PowersOfTwo(_) => 0,
    }
}

/// Returns the code of a float grid that is nearest to a non-negative f32: ties to even, at most
/// the largest, NaN kept.
#[cube]
pub(crate) fn round_to_float(exact: f32, #[comptime] row: Minifloat) -> u32 {
    let is_nan = u32::reinterpret(exact) > INFINITY;
    let largest = comptime!(row.max_value());
    let clamped = select(exact > largest, largest, exact);
    let bits = u32::reinterpret(clamped);
    let half = comptime!((1u32 << (dropped(row) - 1)) - 1);
    let rounded = bits + half + ((bits >> comptime!(dropped(row))) & 1u32);
    let normal = (rounded >> comptime!(dropped(row))) - comptime!(rebias(row));
    // The addend gives the sum an ulp of the distance between subnormals.
    let shift = comptime!(power(step(row) + MANTISSA as i32));
    let shifted = clamped + shift;
    let subnormal = u32::reinterpret(shifted) - comptime!(shift.to_bits());
    let code = select(clamped < comptime!(power(1 - row.bias)), subnormal, normal);
    select(is_nan, comptime!(ones(row)), code)
}

/// Returns the largest code of a float grid whose value is at most a non-negative f32.
#[cube]
pub(crate) fn round_down_to_float(value: f32, #[comptime] row: Minifloat) -> u32 {
    let normal = (u32::reinterpret(value) >> comptime!(dropped(row))) - comptime!(rebias(row));
    let subnormal = u32::cast_from(min(value, 1.0f32) * comptime!(power(-step(row))));
    let code = select(value < comptime!(power(1 - row.bias)), subnormal, normal);
    min(code, comptime!(last(row)))
}

/// Returns the value of a code of a float grid. The sign bit is ignored.
#[cube]
pub(crate) fn float_value(code: u32, #[comptime] row: Minifloat) -> f32 {
    let magnitude = code & comptime!(ones(row));
    // Exponent and mantissa bits make an f32 that is too small by a power of two, subnormals
    // included.
    let tiny = f32::reinterpret(magnitude << comptime!(dropped(row)));
    let value = tiny * comptime!(power(BIAS - row.bias));
    select(magnitude == comptime!(ones(row)), f32::reinterpret(NAN), value)
}

/// Returns the value of a power-of-two code.
#[cube]
fn power_value(code: u32, #[comptime] row: Minifloat) -> f32 {
    let least = comptime!(row.decode(0).to_bits());
    let bits = select(code == 0u32, least, code << MANTISSA);
    f32::reinterpret(select(code == comptime!(ones(row)), NAN, bits))
}

/// Returns the reciprocal of [`power_value`], for any code but 0.
#[cube]
pub(crate) fn power_reciprocal(code: u32, #[comptime] row: Minifloat) -> f32 {
    let twice = comptime!(2 * row.bias as u32);
    let least = comptime!(row.decode(0).to_bits());
    let bits = select(code == twice, least, (twice - code) << MANTISSA);
    f32::reinterpret(select(code == comptime!(ones(row)), NAN, bits))
}

/// Returns the code of a power of two, given its exponent field in an f32, or NaN if amax is not
/// finite.
#[cube]
pub(crate) fn power_code(field: u32, amax: f32, #[comptime] row: Minifloat) -> u32 {
    let largest = comptime!(last(row));
    let code = select(field > largest, largest, field);
    select(u32::reinterpret(amax) >= INFINITY, comptime!(ones(row)), code)
}

/// Returns the value of a block scale.
#[cube]
pub(crate) fn scale_value(code: u32, #[comptime] grid: ScaleGrid) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => float_value(code, row),
        ScaleGrid::PowersOfTwo(row) => power_value(code, row),
    }
}

/// Returns true if the value of a code is positive.
#[cube]
pub(crate) fn is_positive(code: u32, #[comptime] grid: ScaleGrid) -> bool {
    code >= comptime!(smallest(grid))
}

// Searches.

/// Normalizes a block for a search: elements are multiplied by `factor`. A code of a float grid
/// then has its own value, and a power of two is 2^(code - base).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BlockNormalization {
    pub(crate) factor: f32,
    pub(crate) base: u32,
}

/// Returns the normalization of a block with this amax. `encode` is the tensor scale's factor of
/// elements.
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

/// Returns the value of a scale, relative to the block's normalization.
#[cube]
pub(crate) fn value_in(
    normalization: &BlockNormalization,
    code: u32,
    #[comptime] grid: ScaleGrid,
) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            // Like [`float_value`], for codes that are not NaN.
            f32::reinterpret(code << comptime!(dropped(row))) * comptime!(power(BIAS - row.bias))
        }
        ScaleGrid::PowersOfTwo(_) => {
            f32::reinterpret((code - normalization.base + comptime!(BIAS as u32)) << MANTISSA)
        }
    }
}

/// Returns true if a search makes sense. It does not for zeros, infinities, NaN, and at the ends
/// of f32; see `scale_grid.rs` in the search crate. `scaled` is the normalized amax.
#[cube]
pub(crate) fn is_searchable(
    amax: f32,
    scaled: f32,
    normalization: &BlockNormalization,
    #[comptime] grid: ScaleGrid,
) -> bool {
    let in_range = match comptime!(grid) {
        // With a larger factor, the factor of elements overflows for the smallest scales.
        ScaleGrid::Float(row) => normalization.factor <= comptime!(power(BIAS + step(row))),
        // At the ends, a scale overflows, or half of it does not exist.
        ScaleGrid::PowersOfTwo(row) => {
            let end = comptime!(last(row) - 2);
            normalization.base >= 2u32 && normalization.base < end
        }
    };
    in_range && amax > 0.0f32 && scaled <= f32::reinterpret(0x7F7F_FFFFu32)
}

/// Scales to try, from the largest down: odd codes from `odd` to `high`, then all down to `low`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Window {
    pub(crate) high: u32,
    pub(crate) low: u32,
    pub(crate) odd: u32,
}

/// Returns the window of the scales from `above` (exclusive) to `upto`, and of larger ones that
/// have no half; see `sse.rs` in the search crate. `scaled` is the normalized amax.
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
            // Up to this code, values are multiples of the smallest one, and odd ones have no half.
            let last_multiple = comptime!((2 * first_normal(row) - 1) as f32);
            // The smallest code without a double.
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
            // Exponents of f32. The base is added before the bias is subtracted, to stay above 0.
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

/// Returns the smallest scale that searches try.
#[cube]
pub(crate) fn lowest(normalization: &BlockNormalization, #[comptime] grid: ScaleGrid) -> u32 {
    match comptime!(grid) {
        ScaleGrid::Float(_) => {
            let smallest = comptime!(smallest(grid));
            smallest.runtime()
        }
        // 6 times this scale is lost in an addition to amax, in f32.
        ScaleGrid::PowersOfTwo(_) => max(normalization.base, POWERS_BELOW) - POWERS_BELOW,
    }
}

/// Returns the smallest scale that rounds every element of a block to 0, as all larger ones do.
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

// Matmuls. Elements come from `decode_word`, too small by a power of two.

/// Returns `element x block scale`, exactly, given an element that was decoded to f16.
#[cube]
pub(crate) fn scaled_element(element: f32, scale: f32, #[comptime] grid: ScaleGrid) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(_) => element * (scale * comptime!(power(F16_ELEMENT))),
        // The product of a power of two and the shift may overflow.
        ScaleGrid::PowersOfTwo(_) => (element * comptime!(power(F16_ELEMENT))) * scale,
    }
}

/// Returns true if an f16 holds every product of an element and a block scale, times 2^-8.
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

/// Returns the factor of a decoded element before it is multiplied with a [`product_scale`].
pub(crate) fn element_shift(grid: ScaleGrid, dtype: Dtype) -> Option<f32> {
    match grid {
        ScaleGrid::Float(_) => None,
        ScaleGrid::PowersOfTwo(_) => Some(decoded_shift(dtype)),
    }
}

/// Returns the factor that restores elements decoded to a dtype.
pub(crate) fn decoded_shift(dtype: Dtype) -> f32 {
    power(element_exponent(dtype))
}

/// Returns the factor of block scales. Their products with decoded elements are then
/// `element x block scale` times 2^-8, within the range of the dtype. Powers of two need none.
fn scale_shift(grid: ScaleGrid, dtype: Dtype) -> f32 {
    match grid {
        ScaleGrid::Float(_) => power(element_exponent(dtype) - PRODUCT),
        ScaleGrid::PowersOfTwo(_) => 1.0,
    }
}

/// Returns the factor that undoes [`scale_shift`] in the sums.
pub(crate) fn sum_shift(grid: ScaleGrid) -> f32 {
    match grid {
        ScaleGrid::Float(_) => power(PRODUCT),
        ScaleGrid::PowersOfTwo(_) => 1.0,
    }
}

/// Blocks whose scale is at most 2^14 times smaller than the largest of their row have products of
/// E4M3: its largest value is 448, the largest element 6 and the smallest 2^-1.
const E4M3_BINADES: u32 = 14;
/// Products of E4M3 are 2^6 times the products with the largest power of two of a row.
const E4M3_POWER: i32 = 6;
/// Products of E4M3 are 2^-3 times the products with a float scale.
const E4M3_FLOAT: i32 = -3;

/// Returns the length of the table of [`e4m3_products`].
pub(crate) fn e4m3_entries(grid: ScaleGrid) -> u32 {
    match grid {
        ScaleGrid::Float(row) => ones(row) + 1,
        ScaleGrid::PowersOfTwo(_) => E4M3_BINADES + 2,
    }
}

/// Returns the entry of a block scale in the table of [`e4m3_products`], given the largest code of
/// a block of the row that has other elements than zeros.
#[cube]
pub(crate) fn e4m3_entry(code: u32, largest: u32, #[comptime] grid: ScaleGrid) -> u32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => code & comptime!(ones(row)),
        // A larger code is that of a block of zeros. It wraps around to the last entry.
        ScaleGrid::PowersOfTwo(_) => min(largest - code, comptime!(E4M3_BINADES + 1)),
    }
}

/// Returns the factor of the products of an entry: 0 for blocks that are too small.
#[cube]
fn e4m3_factor(entry: u32, #[comptime] grid: ScaleGrid) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(row) => float_value(entry, row) * comptime!(power(E4M3_FLOAT)),
        ScaleGrid::PowersOfTwo(_) => {
            let bits = (comptime!((BIAS + E4M3_POWER) as u32) - entry) << MANTISSA;
            f32::reinterpret(select(entry > comptime!(E4M3_BINADES), 0u32, bits))
        }
    }
}

/// Returns the E4M3 codes of the products of the eight magnitudes of elements with the block scale
/// of an entry, a byte for each. They are exact if [`e4m3_holds`] them, and rounded otherwise.
#[cube]
pub(crate) fn e4m3_products(entry: u32, #[comptime] grid: ScaleGrid) -> Vector<u32, Const<2>> {
    let factor = e4m3_factor(entry, grid);
    let mut words = Vector::<u32, Const<2>>::empty();
    #[unroll]
    for half in 0..2usize {
        let mut word = 0u32;
        #[unroll]
        for index in 0..4usize {
            let element = comptime!(E2M1.decode((4 * half + index) as u8));
            word |=
                round_to_float(factor * element, comptime!(E4M3)) << comptime!(8 * index as u32);
        }
        words.insert(half, word);
    }
    words
}

/// Returns true if E4M3 holds the products of all elements with a block scale, given the largest
/// code of a block of the row that has other elements than zeros.
#[cube]
pub(crate) fn e4m3_holds(code: u32, largest: u32, #[comptime] grid: ScaleGrid) -> bool {
    let entry = e4m3_entry(code, largest, grid);
    match comptime!(grid) {
        ScaleGrid::Float(_) => {
            let factor = e4m3_factor(entry, grid);
            // The others are these times a power of two.
            let (half, more) = (factor * 0.5f32, factor * 1.5f32);
            let e4m3 = comptime!(E4M3);
            float_value(round_to_float(half, e4m3), e4m3) == half
                && float_value(round_to_float(more, e4m3), e4m3) == more
        }
        ScaleGrid::PowersOfTwo(row) => {
            largest != comptime!(ones(row)) && entry <= comptime!(E4M3_BINADES)
        }
    }
}

/// Returns the factor that restores sums of products in E4M3, of a row with this largest code.
#[cube]
pub(crate) fn e4m3_row_factor(largest: u32, #[comptime] grid: ScaleGrid) -> f32 {
    match comptime!(grid) {
        ScaleGrid::Float(_) => comptime!(power(-E4M3_FLOAT)).runtime(),
        ScaleGrid::PowersOfTwo(row) => power_value(largest, row) * comptime!(power(-E4M3_POWER)),
    }
}

/// Returns the exponent of the factor that restores elements decoded to a dtype.
fn element_exponent(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::Bf16 => BF16_ELEMENT,
        Dtype::F16 | Dtype::F32 => F16_ELEMENT,
    }
}

/// Returns the factor of decoded elements for a block scale.
#[cube]
pub(crate) fn product_scale<F: Float>(
    code: u32,
    #[comptime] grid: ScaleGrid,
    #[comptime] dtype: Dtype,
) -> F {
    F::cast_from(scale_value(code, grid) * comptime!(scale_shift(grid, dtype)))
}

/// Returns [`product_scale`] of two codes, 16 bits apart in a word with other bits between.
#[cube]
pub(crate) fn product_scale_pair<F: Float, N: Size>(
    codes: u32,
    #[comptime] grid: ScaleGrid,
    #[comptime] dtype: Dtype,
) -> Vector<F, N> {
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            let tiny = Vector::<F, N>::reinterpret(tiny_float_pair(codes, row, dtype));
            let bias = comptime!(exponent_bias(dtype));
            if comptime!(dtype == Dtype::Bf16) {
                // A bf16 holds at most half the exponent of both shifts together.
                let shift = Vector::new(F::cast_from(comptime!(power(bias - row.bias))));
                tiny * shift * Vector::new(F::cast_from(comptime!(scale_shift(grid, dtype))))
            } else {
                let shift = comptime!(power(bias - row.bias) * scale_shift(grid, dtype));
                tiny * Vector::new(F::cast_from(shift))
            }
        }
        ScaleGrid::PowersOfTwo(_) => Vector::<F, N>::reinterpret(power_pair(codes)),
    }
}

/// Returns the values of the codes in two bytes of a word: the lower ones, or the upper ones.
#[cube]
pub(crate) fn scale_pair(
    word: u32,
    #[comptime] pair: u32,
    #[comptime] grid: ScaleGrid,
) -> Vector<f32, Const<2>> {
    let bytes = word >> comptime!(16 * pair);
    let codes = (bytes & 0xFFu32) | ((bytes & 0xFF00u32) << 8u32);
    let mut values = Vector::<f32, Const<2>>::empty();
    match comptime!(grid) {
        ScaleGrid::Float(row) => {
            let dtype = comptime!(Dtype::F16);
            let tiny = Vector::<f16, Const<2>>::reinterpret(tiny_float_pair(codes, row, dtype));
            let shift = comptime!(power(exponent_bias(dtype) - row.bias));
            let pair = tiny * Vector::new(f16::cast_from(shift));
            #[unroll]
            for index in 0..2usize {
                values.insert(index, f32::cast_from(pair.extract(index)));
            }
        }
        ScaleGrid::PowersOfTwo(_) => {
            let pair = power_pair(codes);
            values.insert(0usize, f32::reinterpret(pair << 16u32));
            values.insert(1usize, f32::reinterpret(pair & 0xFFFF_0000u32));
        }
    }
    values
}

/// Returns the exponent field of 1 in a dtype of 16 bits.
const fn exponent_bias(dtype: Dtype) -> i32 {
    if matches!(dtype, Dtype::Bf16) { 127 } else { 15 }
}

/// Returns the values of two codes of a float grid, in f16 or bf16, too small by the difference of
/// the biases of their exponents.
#[cube]
fn tiny_float_pair(codes: u32, #[comptime] row: Minifloat, #[comptime] dtype: Dtype) -> u32 {
    let mantissa = comptime!(if dtype == Dtype::Bf16 { 7 } else { 10 });
    let above = comptime!(ones(row) + 1);
    let dropped = comptime!(mantissa - row.mantissa_bits);
    let codes = codes & comptime!(ones(row) * 0x0001_0001);
    // Only the code of NaN sets this bit.
    let nan = (codes + 0x0001_0001u32) & comptime!(above * 0x0001_0001);
    // Exponent and mantissa bits make a float that is too small by a power of two, subnormals
    // included. The bits of NaN fill its whole exponent.
    let filled = comptime!((0x8000 - (above << dropped)) / above);
    (codes << dropped) + nan * filled
}

/// Returns the values of two codes of powers of two, in bf16.
#[cube]
fn power_pair(codes: u32) -> u32 {
    // The code is the exponent of a bf16. 0 is half its smallest normal number and the last code
    // is NaN: both set the highest mantissa bit.
    let codes = codes & 0x00FF_00FFu32;
    let (first, last) = (!(codes + 0x00FF_00FFu32), codes + 0x0001_0001u32);
    let half = ((first | last) & 0x0100_0100u32) >> 2u32;
    (codes << 7u32) | half
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
