//! Products and triangular factors of dense matrices, blocked so that most of the work is in
//! products.

use core::ops::Range;

use gemm::{Parallelism, gemm};

/// Borrows a matrix from a slice, with any strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    values: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Borrows a matrix `[rows, cols]` stored row by row.
    pub(crate) fn row_major(values: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "elements of a matrix [{rows}, {cols}]");
        Self { values, rows, cols, row_stride: cols, col_stride: 1 }
    }

    pub(crate) fn transposed(self) -> Self {
        let Self { values, rows, cols, row_stride, col_stride } = self;
        Self { values, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }

    /// Returns a part of the rows and columns.
    pub(crate) fn part(self, rows: Range<usize>, cols: Range<usize>) -> Self {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "{rows:?}, {cols:?}");
        let first = rows.start * self.row_stride + cols.start * self.col_stride;
        let values = &self.values[first.min(self.values.len())..];
        Self { values, rows: rows.len(), cols: cols.len(), ..self }
    }

    /// Returns a part of the columns.
    pub(crate) fn columns(self, cols: Range<usize>) -> Self {
        let rows = self.rows;
        self.part(0..rows, cols)
    }

    /// Returns the index after the last element.
    fn end(&self) -> usize {
        match self.rows == 0 || self.cols == 0 {
            true => 0,
            false => (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1,
        }
    }
}

/// A float type of matrices.
pub(crate) trait Real: Copy + Default + Into<f64> + Send + Sync + 'static {
    const ONE: Self;

    /// Rounds a number to this type.
    fn of(value: f64) -> Self;
}

impl Real for f32 {
    const ONE: Self = 1.0;

    fn of(value: f64) -> Self {
        value as Self
    }
}

impl Real for f64 {
    const ONE: Self = 1.0;

    fn of(value: f64) -> Self {
        value
    }
}

/// Adds `factor * left * right` to a matrix whose rows begin `stride` elements apart in `sums`, on
/// several threads if it is large.
pub(crate) fn add_product<T: Real>(
    sums: &mut [T],
    stride: usize,
    factor: T,
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
) {
    let (rows, inner, cols) = (left.rows, left.cols, right.cols);
    assert_eq!(inner, right.rows, "columns of the left matrix and rows of the right one");
    if rows == 0 || cols == 0 {
        return;
    }
    assert!(cols <= stride && (rows - 1) * stride + cols <= sums.len(), "[{rows}, {cols}]");
    assert!(left.end() <= left.values.len() && right.end() <= right.values.len());
    // SAFETY: the last element of each matrix lies within its slice, as asserted above; rows of the
    // sums do not overlap, and nothing else refers to them. `T` is f32 or f64, the only types that
    // implement `Real`, and `gemm` knows both.
    unsafe {
        gemm(
            rows,
            cols,
            inner,
            sums.as_mut_ptr(),
            1,
            stride as isize,
            true,
            left.values.as_ptr(),
            left.col_stride as isize,
            left.row_stride as isize,
            right.values.as_ptr(),
            right.col_stride as isize,
            right.row_stride as isize,
            T::ONE,
            factor,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

/// Returns the product `[left rows, right columns]`, row by row.
pub(crate) fn product<T: Real>(left: Matrix<'_, T>, right: Matrix<'_, T>) -> Vec<T> {
    let mut sums = vec![T::default(); left.rows * right.cols];
    add_product(&mut sums, right.cols, T::ONE, left, right);
    sums
}

/// Side of a block that is factored or inverted element by element.
const CORNER: usize = 64;

/// Number of columns of a panel of a triangular matrix. The elements of a panel in the other half
/// are computed in vain.
const PANEL: usize = 512;

/// Replaces a symmetric positive definite matrix `[n, n]` by the inverse of its lower Cholesky
/// factor, zero above the diagonal: `A^-1 = X^T X`. Returns `None` if the matrix is singular. Reads
/// the lower half and the diagonal.
pub(crate) fn invert_factor(matrix: &mut [f64], n: usize) -> Option<()> {
    assert_eq!(matrix.len(), n * n, "elements of a matrix [{n}, {n}]");
    factor(matrix, n)?;
    for (row, values) in matrix.chunks_exact_mut(n.max(1)).enumerate() {
        values[row + 1..].fill(0.0);
    }
    invert_lower(matrix, n);
    Some(())
}

/// Computes the lower factor L of `A = L L^T`, right-looking: factors a block on the diagonal, then
/// subtracts its part from everything that follows.
fn factor(matrix: &mut [f64], n: usize) -> Option<()> {
    for first in (0..n).step_by(CORNER) {
        let end = n.min(first + CORNER);
        let width = end - first;
        let corner = factor_corner(&matrix[first * (n + 1)..], n, width)?;
        let mut inverse = corner.clone();
        invert_corner(&mut inverse, width);
        for (row, values) in corner.chunks_exact(width).enumerate() {
            matrix[(first + row) * n + first..][..width].copy_from_slice(values);
        }
        let left = Matrix::row_major(matrix, n, n).part(end..n, first..end);
        let right = Matrix::row_major(&inverse, width, width).transposed();
        let below = product(left, right);
        for (row, values) in (end..n).zip(below.chunks_exact(width)) {
            matrix[row * n + first..][..width].copy_from_slice(values);
        }
        let below = Matrix::row_major(&below, n - end, width);
        for panel in (end..n).step_by(PANEL) {
            let rows = below.part(panel - end..n - end, 0..width);
            let cols = below.part(panel - end..n.min(panel + PANEL) - end, 0..width);
            add_product(&mut matrix[panel * (n + 1)..], n, -1.0, rows, cols.transposed());
        }
    }
    Some(())
}

/// Factorizes the first `width` rows and columns of a matrix with rows `stride` apart.
fn factor_corner(matrix: &[f64], stride: usize, width: usize) -> Option<Vec<f64>> {
    let mut lower = vec![0.0; width * width];
    for row in 0..width {
        for col in 0..=row {
            let (of_row, of_col) = (&lower[row * width..][..col], &lower[col * width..][..col]);
            let known: f64 = of_row.iter().zip(of_col).map(|(left, right)| left * right).sum();
            let rest = matrix[row * stride + col] - known;
            lower[row * width + col] = match row == col {
                false => rest / lower[col * (width + 1)],
                true if rest > 0.0 && rest.is_finite() => rest.sqrt(),
                true => return None,
            };
        }
    }
    Some(lower)
}

/// Replaces a lower triangular matrix, zero above the diagonal, by its inverse, one row of blocks
/// after the other. The rows above already hold the inverse.
fn invert_lower(matrix: &mut [f64], n: usize) {
    for first in (0..n).step_by(CORNER) {
        let end = n.min(first + CORNER);
        let width = end - first;
        let rows = Matrix::row_major(matrix, n, n).part(first..end, 0..n);
        let mut sums = vec![0.0; width * first];
        for panel in (0..first).step_by(PANEL) {
            let cols = panel..first.min(panel + PANEL);
            let known = Matrix::row_major(matrix, n, n).part(panel..first, cols);
            let left = rows.part(0..width, panel..first);
            add_product(&mut sums[panel..], first, 1.0, left, known);
        }
        let mut corner = Vec::with_capacity(width * width);
        for row in matrix[first * n..end * n].chunks_exact_mut(n) {
            corner.extend_from_slice(&row[first..end]);
            row[..first].fill(0.0);
        }
        invert_corner(&mut corner, width);
        for (row, values) in (first..end).zip(corner.chunks_exact(width)) {
            matrix[row * n + first..][..width].copy_from_slice(values);
        }
        let corner = Matrix::row_major(&corner, width, width);
        let sums = Matrix::row_major(&sums, width, first);
        add_product(&mut matrix[first * n..], n, -1.0, corner, sums);
    }
}

/// Inverts a lower triangular matrix element by element; see [`invert_lower`].
fn invert_corner(lower: &mut [f64], width: usize) {
    for row in 0..width {
        let pivot = 1.0 / lower[row * (width + 1)];
        let (above, rest) = lower.split_at_mut(row * width);
        let rest = &mut rest[..width];
        for col in 0..row {
            let known = (col..row).map(|at| rest[at] * above[at * width + col]);
            rest[col] = -pivot * known.sum::<f64>();
        }
        rest[row] = pivot;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most rows of a matrix: Miri is a thousand times slower.
    const MOST: usize = if cfg!(miri) { 65 } else { 640 };

    /// `A = B B^T + I` of small integers: positive definite, and exact.
    fn definite(n: usize) -> Vec<f64> {
        let b: Vec<f64> = (0..n * n).map(|at| (at * 31 % 17) as f64 - 8.0).collect();
        let b = Matrix::row_major(&b, n, n);
        let mut matrix = product(b, b.transposed());
        (0..n).for_each(|at| matrix[at * (n + 1)] += 1.0);
        matrix
    }

    /// Products of integers, so that no order of summation matters, below and above the size that
    /// several threads multiply.
    #[test]
    fn products_of_parts_are_those_of_their_elements() {
        for (rows, inner, cols) in [(0, 3, 2), (2, 0, 3), (1, 1, 1), (5, 7, 3), (300, 65, 270)] {
            if rows > MOST {
                continue;
            }
            let fill = |len: usize| (0..len).map(|at| (at * 7 % 11) as f32 - 5.0).collect();
            let (left, right): (Vec<f32>, Vec<f32>) =
                (fill((rows + 1) * (inner + 2)), fill((cols + 3) * (inner + 1)));
            let stride = cols + 4;
            let mut sums = vec![1.0; rows * stride];
            add_product(
                &mut sums,
                stride,
                -1.0,
                Matrix::row_major(&left, rows + 1, inner + 2).part(1..rows + 1, 2..inner + 2),
                Matrix::row_major(&right, cols + 3, inner + 1)
                    .part(3..cols + 3, 1..inner + 1)
                    .transposed(),
            );
            for row in 0..rows {
                for col in 0..stride {
                    let of_left = &left[(row + 1) * (inner + 2) + 2..][..inner];
                    let sum: f32 = match col < cols {
                        true => {
                            let of_right = &right[(col + 3) * (inner + 1) + 1..][..inner];
                            of_left.iter().zip(of_right).map(|(left, right)| left * right).sum()
                        }
                        false => 0.0,
                    };
                    assert_eq!(sums[row * stride + col], 1.0 - sum, "{row}, {col}");
                }
            }
        }
    }

    #[test]
    fn the_inverse_factor_turns_a_matrix_into_one() {
        for n in [0, 1, 2, 16, 63, 64, 65, 200, 640].into_iter().filter(|n| *n <= MOST) {
            let matrix = definite(n);
            let mut inverse = matrix.clone();
            // Values above the diagonal are not read.
            for row in 0..n {
                inverse[row * n + row + 1..][..n - row - 1].fill(f64::NAN);
            }
            invert_factor(&mut inverse, n).unwrap();
            for row in 0..n {
                assert!(inverse[row * n + row + 1..][..n - row - 1].iter().all(|&x| x == 0.0));
            }
            let inverse = Matrix::row_major(&inverse, n, n);
            let one = product(inverse, Matrix::row_major(&matrix, n, n));
            let one = product(Matrix::row_major(&one, n, n), inverse.transposed());
            for (at, &value) in one.iter().enumerate() {
                let expected = if at / n == at % n { 1.0 } else { 0.0 };
                assert!((value - expected).abs() < 1e-8, "{n}: {value} at {at}");
            }
        }
    }

    #[test]
    fn singular_matrices_have_none() {
        for n in [2, 100.min(MOST)] {
            for found in [0.0, -1.0, f64::NAN, f64::INFINITY] {
                let mut matrix = definite(n);
                matrix[n * n - 1] = found;
                assert_eq!(invert_factor(&mut matrix, n), None, "{n}, {found}");
            }
        }
        assert_eq!(invert_factor(&mut [1.0, 1.0, 1.0, 1.0], 2), None);
    }
}
