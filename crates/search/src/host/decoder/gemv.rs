//! The product of one row with a dense weight, at the bandwidth of the memory.

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use crate::error::SearchError;
use crate::host::arch::arch;
use crate::host::decode::{prefetch, prefetch_distance};
use crate::host::dots::dots;
use crate::host::threads::{TASK, Work, for_each_chunk, per_microsecond};

/// Number of columns that a task multiplies at least: their sums stay in the first-level cache, and
/// a row of them is enough for prefetching.
const COLUMNS: usize = 256;
/// Number of rows that are read at a time: one stream alone waits for the memory.
const ROWS: usize = 4;

/// Computes `input x weight` for `k` values and a row-major weight `[k, n]`.
///
/// ```
/// use burn_fp4_search::host::{gemv, gemv_rows};
///
/// let (input, mut output) = ([1.0, 2.0], [0.0; 3]);
/// gemv(&input, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &mut output)?;
/// assert_eq!(output, [9.0, 12.0, 15.0]);
/// gemv_rows(&input, &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0], &mut output)?; // its transpose
/// assert_eq!(output, [9.0, 12.0, 15.0]);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// A slice of the wrong length.
pub fn gemv(input: &[f32], weight: &[f32], output: &mut [f32]) -> Result<(), SearchError> {
    let n = output.len();
    check_length("weight", input.len() * n, weight.len())?;
    let work = Work::new(weight.len(), per_microsecond::DENSE);
    let columns = if work.is_worth_threads() {
        n.div_ceil(rayon::current_num_threads()).next_multiple_of(16).max(COLUMNS)
    } else {
        n.max(1)
    };
    for_each_chunk(
        work,
        output,
        columns,
        || (),
        |(), task, output| {
            arch().dispatch(Columns { input, weight, n, first: task * columns, output });
        },
    );
    Ok(())
}

/// Computes `weight x input` for `k` values and a row-major weight `[n, k]`.
///
/// # Errors
/// A slice of the wrong length.
pub fn gemv_rows(input: &[f32], weight: &[f32], output: &mut [f32]) -> Result<(), SearchError> {
    let k = input.len();
    check_length("weight", k * output.len(), weight.len())?;
    if k == 0 {
        output.fill(0.0);
        return Ok(());
    }
    let rows = (TASK / k).max(1);
    let work = Work::new(weight.len(), per_microsecond::DENSE);
    for_each_chunk(
        work,
        output,
        rows,
        || (),
        |(), task, output| {
            let weight = &weight[task * rows * k..][..output.len() * k];
            arch().dispatch(Rows { input, weight, output });
        },
    );
    Ok(())
}

struct Columns<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    n: usize,
    first: usize,
    output: &'a mut [f32],
}

impl WithSimd for Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { input, weight, n, first, output } = self;
        let columns = output.len();
        output.fill(0.0);
        let (whole, tail) = input.as_chunks::<ROWS>();
        let row = |at: usize| &weight[at * n + first..][..columns];
        for (at, inputs) in whole.iter().enumerate() {
            let [a, b, c, d] = from_fn(|index| row(ROWS * at + index));
            let [x, y, z, w] = *inputs;
            let terms = a.iter().zip(b).zip(c).zip(d);
            for (sum, (((a, b), c), d)) in output.iter_mut().zip(terms) {
                *sum += (x * a + y * b) + (z * c + w * d);
            }
        }
        for (at, input) in tail.iter().enumerate() {
            let row = row(ROWS * whole.len() + at);
            output.iter_mut().zip(row).for_each(|(sum, weight)| *sum += input * weight);
        }
    }
}

struct Rows<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    output: &'a mut [f32],
}

impl WithSimd for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { input, weight, output } = self;
        let k = input.len().max(1);
        let distance = prefetch_distance(ROWS * k * size_of::<f32>());
        for (weight, output) in weight.chunks(ROWS * k).zip(output.chunks_mut(ROWS)) {
            // Rows beyond the last repeat it.
            let row = |at: usize| &weight[at.min(output.len() - 1) * input.len()..][..input.len()];
            let dots =
                dots::<S, ROWS, 2>(simd, input, from_fn(row), |next| prefetch(next, distance));
            output.copy_from_slice(&dots[..output.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_is_multiplied_by_weights_in_either_order() {
        for (k, n) in [(1, 1), (7, 3), (64, 600), (577, 1100), (100, 5)] {
            let input: Vec<_> = (0..k).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
            let value = |row: usize, column: usize| (row * 37 + column * 11) as f32 % 31.0 - 15.0;
            let by_row: Vec<_> = (0..k * n).map(|at| value(at / n, at % n)).collect();
            let by_column: Vec<_> = (0..k * n).map(|at| value(at % k, at / k)).collect();
            let (mut found, mut found_by_rows) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            // Inside the pool other threads are worth their while earlier.
            rayon::scope(|_| {
                gemv(&input, &by_row, &mut found).unwrap();
                gemv_rows(&input, &by_column, &mut found_by_rows).unwrap();
            });
            for column in 0..n {
                let terms = input.iter().enumerate();
                let terms = terms.map(|(row, x)| f64::from(*x) * f64::from(value(row, column)));
                let expected: f64 = terms.sum();
                for found in [found[column], found_by_rows[column]] {
                    assert!((f64::from(found) - expected).abs() < 1e-4 * k as f64, "{k} x {n}");
                }
            }
        }
        assert!(gemv(&[1.0], &[1.0], &mut [0.0; 2]).is_err());
        assert!(gemv_rows(&[1.0], &[1.0], &mut [0.0; 2]).is_err());
    }
}
