//! The Hadamard transform along any axis, with SIMD and threads.

use burn_fp4_formats::{FormatError, check_length};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::arch::{TASK, arch};
use super::dense::{HostElement, View};
use crate::error::SearchError;
use crate::hadamard::Hadamard;

const SIZE: usize = Hadamard::SIZE;

/// Number of columns transformed together.
const COLUMNS: usize = 64;

/// Transforms every 16 neighbours along an axis, `y = x T`, or back: `x = y T^T`, because the
/// inverse of an orthogonal matrix is its transpose. Each sum uses fused multiply-adds in f32 in
/// the order of the terms, and is rounded once.
///
/// # Errors
/// [`SearchError::Format`] if 16 does not divide the axis, or for an output of another length.
pub fn hadamard<T: HostElement>(
    values: &[T],
    view: View,
    hadamard: Hadamard,
    inverse: bool,
    output: &mut [T],
) -> Result<(), SearchError> {
    if !view.axis.is_multiple_of(SIZE) {
        return Err(FormatError::Indivisible { cols: view.axis, block_size: SIZE }.into());
    }
    check_length("values", view.len(), values.len())?;
    check_length("output", view.len(), output.len())?;
    if !view.is_empty() {
        let matrix = core::array::from_fn(|term| {
            core::array::from_fn(|sum| match inverse {
                false => hadamard.factor(term, sum),
                true => hadamard.factor(sum, term),
            })
        });
        let group = SIZE * view.inner;
        let task = (TASK / group).max(1) * group;
        let tasks = output.par_chunks_mut(task).zip(values.par_chunks(task));
        tasks.for_each(|(output, values)| {
            arch().dispatch(Transform { values, inner: view.inner, matrix: &matrix, output });
        });
    }
    Ok(())
}

/// Whole groups of 16 lines of `inner` values.
struct Transform<'a, T> {
    values: &'a [T],
    inner: usize,
    /// Factor of each term in each sum.
    matrix: &'a [[f32; SIZE]; SIZE],
    output: &'a mut [T],
}

impl<T: HostElement> NullaryFnOnce for Transform<'_, T> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        if self.inner == 1 { self.along() } else { self.across() }
    }
}

impl<T: HostElement> Transform<'_, T> {
    #[inline(always)]
    fn along(self) {
        let groups = self.values.chunks_exact(SIZE).zip(self.output.chunks_exact_mut(SIZE));
        for (values, output) in groups {
            let mut terms = [0.0; SIZE];
            T::read(values, &mut terms);
            let mut sums = [0.0f32; SIZE];
            for (term, factors) in terms.iter().zip(self.matrix) {
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    *sum = term.mul_add(*factor, *sum);
                }
            }
            T::write(&sums, output);
        }
    }

    #[inline(always)]
    fn across(self) {
        let inner = self.inner;
        let groups =
            self.values.chunks_exact(SIZE * inner).zip(self.output.chunks_exact_mut(SIZE * inner));
        for (values, output) in groups {
            for column in (0..inner).step_by(COLUMNS) {
                let n = COLUMNS.min(inner - column);
                let mut terms = [[0.0; COLUMNS]; SIZE];
                for (line, terms) in terms.iter_mut().enumerate() {
                    T::read(&values[line * inner + column..][..n], &mut terms[..n]);
                }
                for sum in 0..SIZE {
                    let mut sums = [0.0f32; COLUMNS];
                    for (terms, factors) in terms.iter().zip(self.matrix) {
                        let factor = factors[sum];
                        for (sum, term) in sums.iter_mut().zip(terms) {
                            *sum = term.mul_add(factor, *sum);
                        }
                    }
                    T::write(&sums[..n], &mut output[sum * inner + column..][..n]);
                }
            }
        }
    }
}
