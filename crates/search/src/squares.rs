//! Sums of squares in f32 for values of any magnitude, one sum for each of three ranges.
//!
//! The square of an f32 value below 1e-19 or above 1e19 is not an f32 number. So each range has a
//! power of two that its values are multiplied by before they are squared (Blue, "A Portable
//! Fortran Program to Find the Euclidean Norm of a Vector", 1978). The total is an f64 number.

use burn_fp4_formats::power_of_two;

/// Magnitudes below `end` and not in an earlier range, with the factor before they are squared.
#[derive(Debug, Clone, Copy)]
pub struct MagnitudeRange {
    /// The first magnitude beyond the range.
    pub end: f32,
    /// Factor of a value before it is squared, a power of two.
    pub factor: f32,
}

/// Ranges from the smallest magnitudes on; infinity and NaN are in the last. Sums of fewer than
/// 2^32 squares do not overflow.
pub const RANGES: [MagnitudeRange; 3] = [
    MagnitudeRange { end: power_of_two(-50), factor: power_of_two(90) },
    MagnitudeRange { end: power_of_two(45), factor: 1.0 },
    MagnitudeRange { end: f32::INFINITY, factor: power_of_two(-90) },
];

/// Number of sums of a squared error: a range each for the differences, then for the values.
pub const SUMS: usize = 2 * RANGES.len();

/// Converts a sum of squares in f64 to the sums of all ranges.
///
/// ```
/// use burn_fp4_search::squares::{ranges_of, squared_sums};
///
/// let sums = [ranges_of(1e-60), ranges_of(4.0)].concat();
/// let [error, energy] = squared_sums(&sums).unwrap();
/// assert!((error / 1e-60 - 1.0).abs() < 1e-6);
/// assert_eq!(energy, 4.0);
/// ```
#[must_use]
pub fn ranges_of(sum: f64) -> [f32; 3] {
    let root = sum.sqrt();
    let is_within = |range: &MagnitudeRange| root < f64::from(range.end);
    // NaN and infinity are in the last.
    let at = RANGES.iter().position(is_within).unwrap_or(RANGES.len() - 1);
    let mut sums = [0.0; 3];
    sums[at] = (sum * f64::from(RANGES[at].factor).powi(2)) as f32;
    sums
}

/// Adds up the ranges of two sums, `[6]` in f32: three ranges of squared differences, and three of
/// the squares of the values. Returns `None` for another number of sums.
///
/// ```
/// use burn_fp4_search::squares::squared_sums;
///
/// assert_eq!(squared_sums(&[0.0, 2.0, 0.0, 0.0, 8.0, 0.0]), Some([2.0, 8.0]));
/// assert_eq!(squared_sums(&[2.0, 8.0]), None);
/// ```
#[must_use]
pub fn squared_sums(sums: &[f32]) -> Option<[f64; 2]> {
    let total = |sums: &[f32]| -> f64 {
        let scaled = sums.iter().zip(RANGES);
        scaled.map(|(&sum, range)| f64::from(sum) / f64::from(range.factor).powi(2)).sum()
    };
    match sums.len() {
        SUMS => Some([total(&sums[..RANGES.len()]), total(&sums[RANGES.len()..])]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_any_magnitude_come_back() {
        for exponent in [-280, -200, -101, -99, -1, 0, 63, 89, 91, 200, 280] {
            let sum = 1.375 * 2f64.powi(exponent);
            let [error, energy] = [ranges_of(sum), ranges_of(4.0 * sum)];
            let sums: Vec<f32> = error.into_iter().chain(energy).collect();
            assert_eq!(squared_sums(&sums), Some([sum, 4.0 * sum]), "2^{exponent}");
        }
        let sums = |sum| [ranges_of(sum), ranges_of(1.0)].concat();
        assert_eq!(squared_sums(&sums(f64::INFINITY)), Some([f64::INFINITY, 1.0]));
        assert!(squared_sums(&sums(f64::NAN)).unwrap()[0].is_nan());
        assert_eq!(squared_sums(&sums(0.0)), Some([0.0, 1.0]));
        assert_eq!(squared_sums(&[1.0; 2]), None);
    }
}
