//! The product of one row with a dense weight, at the bandwidth of the memory.

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use crate::error::SearchError;
use crate::host::arch::arch;
use crate::host::decode::{prefetch, prefetch_distance};
use crate::host::dense::HostElement;
use crate::host::dots::dots;
use crate::host::threads::{TASK, Work, for_each_chunk, per_microsecond};

/// Maximum number of values of a task if rows are at most [`COLUMNS`] long. The tasks are whole
/// rows, as short stretches of memory are read slower, and even in number, for two threads.
const VALUES: usize = 1 << 18;
/// Minimum number of values of a weight that is divided into tasks.
const LEAST: usize = 1 << 15;
/// Maximum number of columns of a task if rows are longer: their sums stay in the first-level
/// cache, and a part of a row is long enough for prefetching.
const COLUMNS: usize = 2048;
/// Number of rows that are read at a time: one stream alone waits for the memory.
const ROWS: usize = 4;

/// Computes `input x weight` for `k` values and a row-major weight `[k, n]`, whose values are read
/// in f32.
///
/// ```
/// use burn_fp4_search::host::{gemv, gemv_rows};
///
/// let (input, mut output) = ([1.0, 2.0], [0.0; 3]);
/// gemv(&input, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &mut output)?;
/// assert_eq!(output, [9.0, 12.0, 15.0]);
/// gemv_rows(&input, &[1.0f32, 4.0, 2.0, 5.0, 3.0, 6.0], &mut output)?; // its transpose
/// assert_eq!(output, [9.0, 12.0, 15.0]);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// A slice of the wrong length.
pub fn gemv<T: HostElement>(
    input: &[f32],
    weight: &[T],
    output: &mut [f32],
) -> Result<(), SearchError> {
    let n = output.len();
    check_length("weight", input.len() * n, weight.len())?;
    let work = Work::new(weight.len(), per_microsecond::DENSE);
    // The tasks, and so the order of the sums, do not depend on the number of threads.
    if n > COLUMNS {
        let tasks = n.div_ceil(COLUMNS).next_multiple_of(2);
        let columns = n.div_ceil(tasks).next_multiple_of(16);
        for_each_chunk(work, output, columns, Scratch::default, |scratch, task, output| {
            let first = task * columns;
            arch().dispatch(Columns { input, weight, n, first, scratch, output });
        });
        return Ok(());
    }
    if weight.len() < LEAST {
        let scratch = &mut Scratch::default();
        arch().dispatch(Columns { input, weight, n, first: 0, scratch, output });
        return Ok(());
    }
    let tasks = weight.len().div_ceil(VALUES).next_multiple_of(2);
    let rows = input.len().div_ceil(tasks).next_multiple_of(ROWS);
    let mut sums = vec![0.0; input.len().div_ceil(rows) * n];
    for_each_chunk(work, &mut sums, n, Scratch::default, |scratch, task, output| {
        let input = input.chunks(rows).nth(task).expect("a chunk for each task");
        let weight = &weight[task * rows * n..];
        arch().dispatch(Columns { input, weight, n, first: 0, scratch, output });
    });
    let (first, others) = sums.split_at(n);
    output.copy_from_slice(first);
    for sums in others.chunks(n) {
        output.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    Ok(())
}

/// Computes `weight x input` for `k` values and a row-major weight `[n, k]`, whose values are read
/// in f32.
///
/// # Errors
/// A slice of the wrong length.
pub fn gemv_rows<T: HostElement>(
    input: &[f32],
    weight: &[T],
    output: &mut [f32],
) -> Result<(), SearchError> {
    let k = input.len();
    check_length("weight", k * output.len(), weight.len())?;
    if k == 0 {
        output.fill(0.0);
        return Ok(());
    }
    let rows = (TASK / k).max(1);
    let work = Work::new(weight.len(), per_microsecond::DENSE);
    for_each_chunk(work, output, rows, Scratch::default, |scratch, task, output| {
        let weight = &weight[task * rows * k..][..output.len() * k];
        arch().dispatch(Rows { input, weight, scratch, output });
    });
    Ok(())
}

struct Columns<'a, T> {
    input: &'a [f32],
    weight: &'a [T],
    n: usize,
    first: usize,
    scratch: &'a mut Scratch,
    output: &'a mut [f32],
}

impl<T: HostElement> WithSimd for Columns<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { input, weight, n, first, scratch, output } = self;
        let columns = output.len();
        output.fill(0.0);
        let (whole, tail) = input.as_chunks::<ROWS>();
        let row = |at: usize| &weight[at * n + first..][..columns];
        // The processor prefetches along a row, and a task reads only a part of each.
        let distance = ROWS * n * size_of::<T>();
        for (at, inputs) in whole.iter().enumerate() {
            let rows = scratch.in_f32(|index| row(ROWS * at + index), ROWS);
            let [x, y, z, w] = inputs.map(|input| simd.splat_f32s(input));
            let [a, b, c, d] = rows.map(|row| S::as_simd_f32s(row).0);
            let (sums, sums_tail) = S::as_mut_simd_f32s(output);
            for (at, sum) in sums.iter_mut().enumerate() {
                if T::as_f32(&[]).is_some() {
                    for row in [a, b, c, d] {
                        prefetch(&row[at..], distance);
                    }
                }
                let first = simd.add_f32s(simd.mul_f32s(x, a[at]), simd.mul_f32s(y, b[at]));
                let last = simd.add_f32s(simd.mul_f32s(z, c[at]), simd.mul_f32s(w, d[at]));
                *sum = simd.add_f32s(*sum, simd.add_f32s(first, last));
            }
            let [x, y, z, w] = *inputs;
            let [a, b, c, d] = rows.map(|row| &row[columns - sums_tail.len()..]);
            for (at, sum) in sums_tail.iter_mut().enumerate() {
                *sum += (x * a[at] + y * b[at]) + (z * c[at] + w * d[at]);
            }
        }
        for (at, input) in tail.iter().enumerate() {
            let [row, ..] = scratch.in_f32(|_| row(ROWS * whole.len() + at), 1);
            output.iter_mut().zip(row).for_each(|(sum, weight)| *sum += input * weight);
        }
    }
}

struct Rows<'a, T> {
    input: &'a [f32],
    weight: &'a [T],
    scratch: &'a mut Scratch,
    output: &'a mut [f32],
}

impl<T: HostElement> WithSimd for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { input, weight, scratch, output } = self;
        let k = input.len().max(1);
        let distance = prefetch_distance(ROWS * k * size_of::<T>());
        for (weight, output) in weight.chunks(ROWS * k).zip(output.chunks_mut(ROWS)) {
            let row = |at: usize| &weight[at * input.len()..][..input.len()];
            let rows = scratch.in_f32(row, output.len());
            let dots = dots::<S, ROWS, 2>(simd, input, rows, |next| {
                if T::as_f32(&[]).is_some() {
                    prefetch(next, distance);
                }
            });
            output.copy_from_slice(&dots[..output.len()]);
        }
    }
}

/// Memory of a thread for rows that are read in f32. Rows of f32 leave it empty.
#[derive(Default)]
struct Scratch([Vec<f32>; ROWS]);

impl Scratch {
    /// Returns `count` rows in f32. Those beyond the last repeat it.
    #[inline(always)]
    fn in_f32<'a, T: HostElement>(
        &'a mut self,
        row: impl Fn(usize) -> &'a [T],
        count: usize,
    ) -> [&'a [f32]; ROWS] {
        if T::as_f32(&[]).is_none() {
            for (at, scratch) in self.0.iter_mut().enumerate().take(count) {
                let row = row(at);
                scratch.resize(row.len(), 0.0);
                T::read(row, scratch);
            }
        }
        let scratch = &self.0;
        from_fn(|at| {
            let at = at.min(count - 1);
            T::as_f32(row(at)).unwrap_or(&scratch[at])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_is_multiplied_by_weights_in_either_order() {
        for (k, n) in [(1, 1), (7, 3), (64, 600), (577, 1100), (100, 5), (64, 2100), (0, 4)] {
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
            let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let mut found_by_one = vec![f32::NAN; n];
            one.install(|| gemv(&input, &by_row, &mut found_by_one)).unwrap();
            assert_eq!(found_by_one, found, "{k} x {n}");
            for column in 0..n {
                let terms = input.iter().enumerate();
                let terms = terms.map(|(row, x)| f64::from(*x) * f64::from(value(row, column)));
                let expected: f64 = terms.sum();
                for found in [found[column], found_by_rows[column]] {
                    assert!((f64::from(found) - expected).abs() <= 1e-4 * k as f64, "{k} x {n}");
                }
            }
        }
        assert!(gemv(&[1.0], &[1.0f32], &mut [0.0; 2]).is_err());
        assert!(gemv_rows(&[1.0], &[1.0f32], &mut [0.0; 2]).is_err());
    }

    #[test]
    fn weights_in_16_bits_are_read_in_f32() {
        fn check<T: HostElement>() {
            for (k, n) in [(7, 3), (64, 600), (577, 1100), (64, 2100)] {
                let input: Vec<_> = (0..k).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
                let values: Vec<_> = (0..k * n).map(|at| (at * 37 % 255) as f32 / 8.0).collect();
                let mut rounded = vec![T::default(); k * n];
                T::write(&values, &mut rounded);
                let [mut expected, mut found] = [(); 2].map(|()| vec![f32::NAN; n]);
                gemv(&input, &values, &mut expected).unwrap();
                gemv(&input, &rounded, &mut found).unwrap();
                assert_eq!(found, expected, "{k} x {n}");
                gemv_rows(&input, &values, &mut expected).unwrap();
                gemv_rows(&input, &rounded, &mut found).unwrap();
                assert_eq!(found, expected, "{k} x {n}, rows");
            }
        }
        check::<burn_fp4_formats::bf16>();
        check::<burn_fp4_formats::f16>();
    }
}
