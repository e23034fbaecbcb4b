//! Sums of squares in f32 for values of any magnitude, one sum for each of three ranges. Kernels of
//! Cube devices fill only the middle range, at the cost that
//! [`Fp4Tensor::squared_error`](crate::Fp4Tensor::squared_error) names.
//!
//! The square of an f32 value below 1e-19 or above 1e19 is not an f32 number. So each range has a
//! power of two that its values are multiplied by before they are squared (Blue, "A Portable
//! Fortran Program to Find the Euclidean Norm of a Vector", 1978). The total is an f64 number.

use burn_fp4_search::formats::power_of_two;

/// Magnitudes below `end` and not in an earlier range, with the factor before they are squared.
pub(crate) struct Range {
    pub(crate) end: f32,
    pub(crate) factor: f32,
}

/// Ranges from the smallest magnitudes on. Sums of fewer than 2^32 squares do not overflow.
pub(crate) const RANGES: [Range; 3] = [
    Range { end: power_of_two(-50), factor: power_of_two(90) },
    Range { end: power_of_two(45), factor: 1.0 },
    Range { end: f32::INFINITY, factor: power_of_two(-90) },
];

/// Converts a sum of squares in f64 to the sums of all ranges.
#[cfg_attr(
    not(any(feature = "flex", feature = "ndarray", test)),
    allow(dead_code, reason = "only devices in host memory sum in f64")
)]
pub(crate) fn ranges_of(sum: f64) -> [f32; 3] {
    let root = sum.sqrt();
    let is_within = |range: &Range| root < f64::from(range.end);
    // NaN and infinity are in the last.
    let at = RANGES.iter().position(is_within).unwrap_or(RANGES.len() - 1);
    let mut sums = [0.0; 3];
    sums[at] = (sum * f64::from(RANGES[at].factor).powi(2)) as f32;
    sums
}

/// Computes the sum of squared differences and the sum of the values' squares from the `[6]` of
/// [`Fp4Tensor::squared_error`](crate::Fp4Tensor::squared_error). Returns `None` for another number
/// of sums.
#[must_use]
pub fn squared_sums(sums: &[f32]) -> Option<[f64; 2]> {
    let total = |sums: &[f32]| -> f64 {
        let scaled = sums.iter().zip(RANGES);
        scaled.map(|(&sum, range)| f64::from(sum) / f64::from(range.factor).powi(2)).sum()
    };
    match sums.len() {
        6 => Some([total(&sums[..3]), total(&sums[3..])]),
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
