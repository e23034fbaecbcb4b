//! RMSNorm, also of a residual stream and its update.

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use crate::error::SearchError;
use crate::host::arch::arch;
use crate::host::threads::{Work, for_each_chunk, per_microsecond};

/// Normalizes rows as long as `weight`: `x / sqrt(mean(x^2) + epsilon) * weight`.
///
/// # Errors
/// The slices differ in length, or do not hold whole rows.
pub fn rms_norm(
    input: &[f32],
    weight: &[f32],
    epsilon: f32,
    output: &mut [f32],
) -> Result<(), SearchError> {
    check(weight, input.len(), output.len())?;
    if input.is_empty() {
        return Ok(());
    }
    let cols = weight.len();
    let work = Work::new(input.len(), per_microsecond::VALUES);
    for_each_chunk(
        work,
        output,
        cols,
        || (),
        |(), row, output| {
            let input = &input[row * cols..][..cols];
            arch().dispatch(NormRow { input, weight, epsilon, output });
        },
    );
    Ok(())
}

/// Adds `update` to `hidden`, and replaces `update` by the [normalized](rms_norm) sums.
///
/// # Errors
/// As [`rms_norm`].
pub fn add_rms_norm(
    hidden: &mut [f32],
    update: &mut [f32],
    weight: &[f32],
    epsilon: f32,
) -> Result<(), SearchError> {
    check(weight, hidden.len(), update.len())?;
    if hidden.is_empty() {
        return Ok(());
    }
    let cols = weight.len();
    let work = Work::new(hidden.len(), per_microsecond::VALUES);
    let mut rows: Vec<_> = hidden.chunks_mut(cols).zip(update.chunks_mut(cols)).collect();
    for_each_chunk(
        work,
        &mut rows,
        1,
        || (),
        |(), _, rows| {
            for (hidden, update) in rows {
                for (hidden, update) in hidden.iter_mut().zip(&**update) {
                    *hidden += update;
                }
                arch().dispatch(NormRow { input: hidden, weight, epsilon, output: update });
            }
        },
    );
    Ok(())
}

fn check(weight: &[f32], input: usize, output: usize) -> Result<(), SearchError> {
    let rows = input.checked_div(weight.len()).unwrap_or(0);
    check_length("input", rows * weight.len(), input)?;
    Ok(check_length("output", input, output)?)
}

struct NormRow<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    output: &'a mut [f32],
}

impl WithSimd for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        /// Independent sums, as many as the widest vector has lanes.
        const SUMS: usize = 16;
        let Self { input, weight, epsilon, output } = self;
        let mut sums = [0f32; SUMS];
        let (chunks, tail) = input.as_chunks::<SUMS>();
        for chunk in chunks {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += value * value;
            }
        }
        for (sum, value) in sums.iter_mut().zip(tail) {
            *sum += value * value;
        }
        let rms = (sums.iter().sum::<f32>() / input.len() as f32 + epsilon).sqrt();
        for ((output, input), weight) in output.iter_mut().zip(input).zip(weight) {
            *output = input / rms * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_normalized_for_one_task_and_for_many() {
        for (rows, cols) in [(1, 576), (3, 37), (2001, 64)] {
            let len = rows * cols;
            let hidden: Vec<_> = (0..len).map(|at| (at * 37 % 1001) as f32 / 40.0 - 12.0).collect();
            let update: Vec<_> = (0..len).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
            let weight: Vec<_> = (0..cols).map(|at| (at % 5) as f32 - 2.0).collect();
            let sums: Vec<_> = hidden.iter().zip(&update).map(|(a, b)| a + b).collect();
            let mut expected = vec![0.0; len];
            rms_norm(&sums, &weight, 1e-5, &mut expected).unwrap();
            for (row, expected) in sums.chunks(cols).zip(expected.chunks(cols)) {
                let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                let rms = (squares / cols as f64 + 1e-5).sqrt();
                for ((x, weight), found) in row.iter().zip(&weight).zip(expected) {
                    let expected = f64::from(*x) / rms * f64::from(*weight);
                    assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected.abs());
                }
            }
            let (mut hidden, mut update) = (hidden, update);
            add_rms_norm(&mut hidden, &mut update, &weight, 1e-5).unwrap();
            assert!(hidden == sums && update == expected, "{rows} x {cols}");
        }
        assert!(rms_norm(&[1.0; 3], &[1.0; 2], 0.0, &mut [0.0; 3]).is_err());
    }
}
