//! The Hadamard transform along any axis, with SIMD and threads.

use burn_fp4_formats::{FormatError, check_length};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::arch::arch;
use super::dense::{HostElement, View};
use super::threads::TASK;
use crate::error::SearchError;
use crate::hadamard::Hadamard;

/// Largest number of values transformed together.
const MOST: usize = Hadamard::SIZES[Hadamard::SIZES.len() - 1];
/// Number of columns transformed together.
const COLUMNS: usize = 32;

/// Transforms neighbours along an axis, `y = x T`, or back: `x = y T^T`, because the inverse of an
/// orthogonal matrix is its transpose. Arithmetic is f32, and results are rounded once to the type
/// of the output.
///
/// Sixteen neighbours are summed with fused multiply-adds in the order of the terms. More are
/// summed by butterflies, `(a + b, a - b)`, of neighbours, then of pairs and so on; the sums are
/// multiplied by `1 / sqrt(n)`.
///
/// # Errors
/// [`SearchError::Format`] if the size of the transform does not divide the axis, or for an output
/// of another length.
pub fn hadamard<T: HostElement, U: HostElement>(
    values: &[T],
    view: View,
    hadamard: Hadamard,
    inverse: bool,
    output: &mut [U],
) -> Result<(), SearchError> {
    let size = hadamard.size();
    if !view.axis.is_multiple_of(size) {
        return Err(FormatError::Indivisible { cols: view.axis, block_size: size }.into());
    }
    check_length("values", view.len(), values.len())?;
    check_length("output", view.len(), output.len())?;
    if !view.is_empty() {
        let group = size * view.inner;
        let task = (TASK / group).max(1) * group;
        let tasks = output.par_chunks_mut(task).zip(values.par_chunks(task));
        tasks.for_each(|(output, values)| {
            arch().dispatch(Transform { values, inner: view.inner, hadamard, inverse, output });
        });
    }
    Ok(())
}

/// Transforms each 16 neighbours without signs, with the bits of [`hadamard`] and the instructions
/// of the caller.
#[inline(always)]
pub(super) fn transform_sixteens(values: &mut [f32]) {
    for block in values.as_chunks_mut::<16>().0 {
        let mut sums = [0.0f32; 16];
        for (term, value) in block.iter().enumerate() {
            for (at, sum) in sums.iter_mut().enumerate() {
                let factor = if (term & at).count_ones() % 2 == 1 { -0.25 } else { 0.25 };
                // Exact, fused or not.
                *sum += value * factor;
            }
        }
        *block = sums;
    }
}

/// Whole groups of lines of `inner` values.
struct Transform<'a, T, U> {
    values: &'a [T],
    inner: usize,
    hadamard: Hadamard,
    inverse: bool,
    output: &'a mut [U],
}

impl<T: HostElement, U: HostElement> NullaryFnOnce for Transform<'_, T, U> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        match (self.inner, self.hadamard.size()) {
            (1, 16) => self.along_16(),
            (1, _) => self.along(),
            _ => self.across(),
        }
    }
}

impl<T: HostElement, U: HostElement> Transform<'_, T, U> {
    #[inline(always)]
    fn along_16(self) {
        let matrix = self.matrix();
        for (values, output) in self.values.chunks_exact(16).zip(self.output.chunks_exact_mut(16)) {
            let mut terms = [0.0; 16];
            T::read(values, &mut terms);
            let mut sums = [0.0f32; 16];
            for (term, factors) in terms.iter().zip(&matrix) {
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    *sum = term.mul_add(*factor, *sum);
                }
            }
            U::write(&sums, output);
        }
    }

    /// The factor of each of 16 terms in each sum.
    #[inline(always)]
    fn matrix(&self) -> [[f32; 16]; 16] {
        core::array::from_fn(|term| {
            core::array::from_fn(|sum| match self.inverse {
                false => self.hadamard.factor(term, sum),
                true => self.hadamard.factor(sum, term),
            })
        })
    }

    #[inline(always)]
    fn along(self) {
        let size = self.hadamard.size();
        let scale = self.hadamard.scale();
        let groups = self.values.chunks_exact(size).zip(self.output.chunks_exact_mut(size));
        for (values, output) in groups {
            let mut terms = [0.0f32; MOST];
            let terms = &mut terms[..size];
            T::read(values, terms);
            for eight in terms.chunks_exact_mut(8) {
                butterflies_of_eight(eight);
            }
            let mut half = 8;
            while half < size {
                for pair in terms.chunks_exact_mut(2 * half) {
                    let (left, right) = pair.split_at_mut(half);
                    butterfly(left, right);
                }
                half *= 2;
            }
            terms.iter_mut().for_each(|sum| *sum *= scale);
            U::write(terms, output);
        }
    }

    #[inline(always)]
    fn across(self) {
        let (inner, size) = (self.inner, self.hadamard.size());
        let matrix = self.matrix();
        let groups =
            self.values.chunks_exact(size * inner).zip(self.output.chunks_exact_mut(size * inner));
        for (values, output) in groups {
            for column in (0..inner).step_by(COLUMNS) {
                let n = COLUMNS.min(inner - column);
                let mut lines = [[0.0; COLUMNS]; MOST];
                let lines = &mut lines[..size];
                for (line, terms) in lines.iter_mut().enumerate() {
                    T::read(&values[line * inner + column..][..n], &mut terms[..n]);
                }
                if size == 16 {
                    sum_16(lines, &matrix);
                } else {
                    sum_by_butterflies(lines, self.hadamard.scale());
                }
                for (line, sums) in lines.iter().enumerate() {
                    U::write(&sums[..n], &mut output[line * inner + column..][..n]);
                }
            }
        }
    }
}

#[inline(always)]
fn sum_16(lines: &mut [[f32; COLUMNS]], matrix: &[[f32; 16]; 16]) {
    let mut sums = [[0.0f32; COLUMNS]; 16];
    for (at, sums) in sums.iter_mut().enumerate() {
        for (terms, factors) in lines.iter().zip(matrix) {
            let factor = factors[at];
            for (sum, term) in sums.iter_mut().zip(terms) {
                *sum = term.mul_add(factor, *sum);
            }
        }
    }
    lines.copy_from_slice(&sums);
}

#[inline(always)]
fn sum_by_butterflies(lines: &mut [[f32; COLUMNS]], scale: f32) {
    let mut half = 1;
    while half < lines.len() {
        for pair in lines.chunks_exact_mut(2 * half) {
            let (left, right) = pair.split_at_mut(half);
            left.iter_mut().zip(right).for_each(|(left, right)| butterfly(left, right));
        }
        half *= 2;
    }
    lines.iter_mut().flatten().for_each(|sum| *sum *= scale);
}

/// Replaces each pair of values by its sum and its difference.
#[inline(always)]
fn butterfly(left: &mut [f32], right: &mut [f32]) {
    for (left, right) in left.iter_mut().zip(right) {
        (*left, *right) = (*left + *right, *left - *right);
    }
}

/// Butterflies of neighbours, of pairs and of quadruples, in registers.
#[inline(always)]
fn butterflies_of_eight(values: &mut [f32]) {
    let Ok(values) = <&mut [f32; 8]>::try_from(values) else { return };
    let [a, b, c, d, e, f, g, h] = *values;
    let [a, b, c, d, e, f, g, h] = [a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h];
    let [a, b, c, d, e, f, g, h] = [a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h];
    *values = [a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h];
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the matrix of the definition, along and across, and back.
    #[test]
    fn transforms_multiply_by_the_matrix() {
        let signed = [Hadamard::TRANSFORMER_ENGINE];
        let unsigned = Hadamard::SIZES.map(|size| Hadamard::of_size(size).unwrap());
        for transform in signed.into_iter().chain(unsigned) {
            let size = transform.size();
            for view in [View::rows(2, 2 * size), View { outer: 2, axis: size, inner: 37 }] {
                check(transform, view);
            }
        }
        let odd = hadamard(
            &[0.0f32; 48],
            View::rows(1, 48),
            Hadamard::of_size(32).unwrap(),
            false,
            &mut [0.0f32; 48],
        );
        assert!(matches!(odd, Err(SearchError::Format(FormatError::Indivisible { .. }))));
    }

    fn check(transform: Hadamard, view: View) {
        let size = transform.size();
        // Small integers: every sum of them is exact.
        let values: Vec<f32> = (0..view.len()).map(|at| (at * 7919 % 31) as f32 - 15.0).collect();
        let mut output = vec![0.0f32; view.len()];
        hadamard(&values, view, transform, false, &mut output).unwrap();
        let place = |row: usize, at: usize| {
            row / view.inner * view.axis * view.inner + at * view.inner + row % view.inner
        };
        for row in 0..view.packed_rows() {
            for at in 0..view.axis {
                let group = at / size * size;
                let terms = (0..size).map(|i| {
                    let negative = transform.factor(i, at - group) < 0.0;
                    let term = values[place(row, group + i)];
                    if negative { -term } else { term }
                });
                let expected = terms.sum::<f32>() * transform.scale();
                assert_eq!(output[place(row, at)], expected, "{transform:?} {view:?} {row} {at}");
            }
        }
        if transform == Hadamard::with_signs(0) && view.inner == 1 {
            let mut sixteens = values.clone();
            transform_sixteens(&mut sixteens);
            assert_eq!(sixteens, output);
        }
        let mut back = vec![0.0f32; view.len()];
        hadamard(&output, view, transform, true, &mut back).unwrap();
        let near = values.iter().zip(&back).all(|(value, back)| (value - back).abs() < 1e-4);
        assert!(near, "{transform:?} {view:?}");
    }
}
