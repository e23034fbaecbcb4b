//! Products in FP8. [`fp8_rows`]: weights whose products `element x block scale` E4M3 holds.
//! [`fp8_values`]: the values of other weights. [`round_to_fp8`]: the rounding of inputs.

use core::array::from_fn;
use std::collections::HashMap;

use burn_fp4_formats::{E2M1_VALUES, E4M3, Packed, ScaleGrid};

/// Returns the facts about the rows of a weight for products in FP8, `[2, rows]`: the largest code
/// of the block scales of a row, blocks of zeros left out, and the number of its blocks that E4M3
/// does not hold.
///
/// E4M3 has to hold the products of all elements with the scale of a block, relative to a power of
/// two: an eighth, or 2^6 divided by the largest scale of a format whose scales are powers of two.
/// It does for scales of NVFP4 with a significand of 1, 1.25 or 1.5, from 2^-5, 2^-3 and 2^-4 on.
/// Blocks of MXFP4 may be 2^14 times smaller than the largest one of their row.
///
/// ```
/// use burn_fp4_search::formats::{E4M3, Packed};
/// use burn_fp4_search::{Fp4Scheme, fp8_rows, quantize};
///
/// let packed = quantize(&[6.0; 32], 1, 32, &Fp4Scheme::nvfp4())?;
/// // A single magnitude has the largest scale, 448, whose significand is 1.75.
/// assert_eq!(fp8_rows(&packed), [f32::from(E4M3.encode(448.0)), 2.0]);
/// let scales = vec![E4M3.encode(384.0); 2]; // 1.5 x 2^8
/// assert_eq!(fp8_rows(&Packed { scales, ..packed })[1], 0.0);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[must_use]
pub fn fp8_rows(packed: &Packed) -> Vec<f32> {
    let (blocks, block_bytes) = (packed.blocks(), packed.block_size / 2);
    let mut tables = Tables::new(packed);
    let row_facts = |row: usize| {
        let blocks = row * blocks..(row + 1) * blocks;
        let has_elements = |&block: &usize| {
            let codes = &packed.codes[block * block_bytes..][..block_bytes];
            codes.iter().any(|byte| byte & 0x77 != 0)
        };
        let codes = blocks.filter(has_elements).map(|block| packed.scales[block]);
        let largest = codes.clone().max().unwrap_or(0);
        let table = tables.of_row(largest);
        let inexact = codes.filter(|&code| !table[usize::from(code)].are_exact).count();
        (f32::from(largest), inexact as f32)
    };
    let (largest, inexact): (Vec<_>, Vec<_>) = (0..packed.rows).map(row_facts).unzip();
    [largest, inexact].concat()
}

/// Returns the values `[rows, cols]` of a weight as products with
/// [`Activations::Fp8Rounded`](crate::Activations::Fp8Rounded) read it: products `element x block
/// scale` that E4M3 does not hold are rounded to the nearest. Blocks of MXFP4 that are too small
/// become zeros.
///
/// ```
/// use burn_fp4_search::formats::{E4M3, Packed};
/// use burn_fp4_search::{Fp4Scheme, fp8_values, quantize};
///
/// let packed = quantize(&[6.0; 16], 1, 16, &Fp4Scheme::nvfp4().without_tensor_scale())?;
/// assert_eq!(fp8_values(&packed), [6.0; 16]);
/// let scales = vec![E4M3.encode(1.125)]; // 6 x 1.125 is 6.75, between 6.5 and 7
/// assert_eq!(fp8_values(&Packed { scales, ..packed }), [7.0; 16]);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[must_use]
pub fn fp8_values(packed: &Packed) -> Vec<f32> {
    let (facts, blocks) = (fp8_rows(packed), packed.blocks());
    let mut tables = Tables::new(packed);
    let mut values = packed.dequantize();
    for (block, values) in values.chunks_mut(packed.block_size).enumerate() {
        let row = block / blocks;
        let largest = facts[row] as u8;
        let unit = tables.unit(largest) * f64::from(packed.tensor_scale.of_row(row));
        let products = &tables.of_row(largest)[usize::from(packed.scales[block])];
        if products.are_exact {
            continue;
        }
        let codes = &packed.codes[block * packed.block_size / 2..];
        for (at, value) in values.iter_mut().enumerate() {
            let element = usize::from(codes[at / 2] >> (4 * (at % 2)) & 7);
            let magnitude = f64::from(products.rounded[element]) * unit;
            *value = (magnitude as f32).copysign(*value);
        }
    }
    values
}

/// Returns the error that [`fp8_values`] adds to a weight, relative to it: `|fp8 - w| / |w|`.
///
/// ```
/// use burn_fp4_search::{Fp4Scheme, fp8_rounding_error, quantize};
///
/// let ramp: Vec<f32> = (0..1024).map(|at| (at % 37) as f32 - 18.0).collect();
/// let packed = quantize(&ramp, 1, 1024, &Fp4Scheme::nvfp4())?;
/// assert!((0.0..0.04).contains(&fp8_rounding_error(&packed)));
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[must_use]
pub fn fp8_rounding_error(packed: &Packed) -> f64 {
    let squares = |sum: f64, value: f64| sum + value * value;
    let values = packed.dequantize();
    let errors = fp8_values(packed).into_iter().zip(&values);
    let errors = errors.map(|(rounded, &value)| f64::from(rounded) - f64::from(value));
    let norm = values.iter().map(|&value| f64::from(value)).fold(0.0, squares);
    if norm == 0.0 { 0.0 } else { (errors.fold(0.0, squares) / norm).sqrt() }
}

/// Products of the magnitudes of E2M1 with a block scale, as numbers of E4M3.
#[derive(Clone)]
struct Products {
    /// True if E4M3 holds all of them.
    are_exact: bool,
    /// The nearest numbers; zeros if most products are below them.
    rounded: [f32; 8],
}

impl Products {
    fn new(grid: ScaleGrid, code: u8, largest: u8) -> Self {
        // The smallest quotients are beyond f32.
        let (factor, are_zeros) = match grid {
            ScaleGrid::Float(row) => (f64::from(row.decode(code)) / 8.0, false),
            ScaleGrid::PowersOfTwo(row) => {
                let relative = f64::from(row.decode(code)) / f64::from(row.decode(largest));
                (64.0 * relative, 64.0 * relative < SMALLEST_FACTOR)
            }
        };
        let exact = |element: usize| f64::from(E2M1_VALUES[element]) * factor;
        let nearest = |element| E4M3.decode(E4M3.encode(exact(element) as f32));
        let are_exact = (0..8).all(|element| f64::from(nearest(element)) == exact(element));
        Self { are_exact, rounded: if are_zeros { [0.0; 8] } else { from_fn(nearest) } }
    }
}

/// The [`Products`] of every block scale of a weight.
struct Tables {
    grid: ScaleGrid,
    /// By the largest scale of a row, 0 for float scales.
    known: HashMap<u8, Vec<Products>>,
}

impl Tables {
    fn new(packed: &Packed) -> Self {
        Self { grid: packed.format.row().scale_grid(), known: HashMap::new() }
    }

    /// Returns the products of a row with a largest scale, by the code of a block scale.
    fn of_row(&mut self, largest: u8) -> &[Products] {
        let (grid, key) = match self.grid {
            ScaleGrid::Float(_) => (self.grid, 0),
            ScaleGrid::PowersOfTwo(_) => (self.grid, largest),
        };
        let table = || (0..=u8::MAX).map(|code| Products::new(grid, code, key)).collect();
        self.known.entry(key).or_insert_with(table)
    }

    /// Returns the value of 1 in E4M3 in a row, without the tensor scale.
    fn unit(&self, largest: u8) -> f64 {
        match self.grid {
            ScaleGrid::Float(_) => 8.0,
            ScaleGrid::PowersOfTwo(row) => f64::from(row.decode(largest)) / 64.0,
        }
    }
}

/// Blocks of powers of two with a smaller factor are zeros: most of their products are below E4M3.
const SMALLEST_FACTOR: f64 = 1.0 / 256.0;

/// Rows with smaller magnitudes are zeros: 448 divided by them is not finite.
const SMALLEST: f32 = f32::from_bits((127 - 118) << 23);

/// Returns a row of the input as products with [`Activations::Fp8`](crate::Activations::Fp8) read
/// it: rounded to the nearest numbers of E4M3 times a 448th of its largest magnitude. A row with
/// NaN or infinity becomes NaN, one below 2^-118 zeros.
///
/// ```
/// use burn_fp4_search::round_to_fp8;
///
/// assert_eq!(round_to_fp8(&[448.0, -1.2, 0.1]), [448.0, -1.25, 0.1015625]);
/// assert!(round_to_fp8(&[1.0, f32::INFINITY])[0].is_nan());
/// ```
#[must_use]
pub fn round_to_fp8(row: &[f32]) -> Vec<f32> {
    if !row.iter().all(|value| value.is_finite()) {
        return vec![f32::NAN; row.len()];
    }
    let amax = row.iter().fold(0f32, |amax, value| amax.max(value.abs()));
    if amax < SMALLEST {
        return vec![0.0; row.len()];
    }
    let largest = E4M3.max_value();
    let (scale, factor) = (amax / largest, largest / amax);
    let magnitude = |value: f32| E4M3.decode(E4M3.encode(value.abs() * factor)) * scale;
    row.iter().map(|&value| magnitude(value).copysign(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_fp4_formats::E8M0;

    fn holds(grid: ScaleGrid, code: u8, largest: u8) -> bool {
        Products::new(grid, code, largest).are_exact
    }

    #[test]
    fn exact_scales_are_those_of_short_significands() {
        let exact: Vec<_> = (0..=u8::MAX)
            .filter(|&code| holds(ScaleGrid::Float(E4M3), code, 0))
            .map(|code| E4M3.decode(code))
            .filter(|scale| *scale > 0.0)
            .collect();
        let expected: Vec<_> = (-9..=8)
            .flat_map(|power| [(1.0, -5), (1.25, -3), (1.5, -4)].map(|it| (power, it)))
            .filter(|(power, (_, least))| power >= least)
            .map(|(power, (significand, _))| significand * f32::powi(2.0, power))
            .collect();
        assert_eq!(exact, expected);
    }

    #[test]
    fn powers_of_two_are_exact_within_fifteen_binades() {
        let grid = ScaleGrid::PowersOfTwo(E8M0);
        for largest in [14, 127, 254] {
            for below in 0..=14 {
                assert!(holds(grid, largest - below, largest), "{largest}, {below}");
            }
        }
        assert!(!holds(grid, 112, 127));
        assert!(!holds(grid, 0, 254));
        assert!(!holds(grid, 255, 255));
    }
}
