//! [`Importance`]: the cost of an error, uniform, weighted by input channel, or a quadratic form
//! per block.

use burn_fp4_formats::{FormatError, check_length};
use rayon::prelude::*;

use crate::error::SearchError;
use crate::method::{Method, Sse};
use crate::scheme::Fp4Scheme;

/// Sets the cost of the errors of a weight.
///
/// The rows of a weight `[out, in]` multiply activations `[.., in]`, so the error of an output is a
/// sum over the errors of a row, weighted by the activations.
///
/// ```
/// use burn_fp4_search::{Fp4Scheme, Importance, Method, Sse};
///
/// let scheme = Fp4Scheme::nvfp4().with_method(Method::Sse(Sse::Weighted));
/// Importance::Channels(&[1.0; 32]).check(&scheme, 32)?;
/// assert!(Importance::Uniform.check(&scheme, 32).is_err(), "the method takes weights");
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub enum Importance<'a> {
    /// The square of an error.
    #[default]
    Uniform,
    /// The square of an error times the weight of its input channel, `[in]`, not negative.
    Channels(&'a [f32]),
    /// `r^T H r` for the errors `r` of a block.
    Blocks(&'a BlockHessians),
}

impl<'a> Importance<'a> {
    /// Returns the importance of the block with this number in each row.
    pub(crate) fn of_block(self, block: usize, block_size: usize) -> BlockImportance<'a> {
        match self {
            Self::Uniform => BlockImportance::Uniform,
            Self::Channels(weights) => {
                BlockImportance::Channels(&weights[block * block_size..][..block_size])
            }
            Self::Blocks(hessians) => BlockImportance::Hessian(hessians.block(block)),
        }
    }

    /// Checks that the search of a scheme takes this kind of importance, for rows of `cols`
    /// elements, and that it is usable.
    ///
    /// # Errors
    /// [`SearchError::Importance`] for another kind, [`SearchError::Format`] for a wrong length,
    /// [`SearchError::ChannelWeight`] for a weight that is negative or not finite.
    pub fn check(self, scheme: &Fp4Scheme, cols: usize) -> Result<(), SearchError> {
        let (method, block_size) = (scheme.method, scheme.block_size);
        if method == Method::Sse(Sse::TensorScale) {
            let choice = "method `sse-tensor-scale`";
            let reason = "it chooses the tensor scale; call `quantize_with_best_tensor_scale`";
            return Err(SearchError::Scheme { rule: scheme.rule, choice, reason });
        }
        let found = match self {
            Self::Uniform => "none",
            Self::Channels(_) => "channel weights",
            Self::Blocks(_) => "block Hessians",
        };
        let expected = match (method, self) {
            (Method::Gptq(_), _) => Some("a Gram matrix"),
            (_, Self::Blocks(_)) if method.needs_hessians() => None,
            _ if method.needs_hessians() => Some("block Hessians"),
            (Method::Sse(Sse::Weighted), Self::Channels(_)) => None,
            (Method::Sse(Sse::Weighted), _) => Some("channel weights"),
            (Method::Sse(_), Self::Blocks(_)) => Some("channel weights or none"),
            (Method::Sse(_), _) | (_, Self::Uniform) => None,
            _ => Some("none"),
        };
        if let Some(expected) = expected {
            return Err(SearchError::Importance { method, expected, found });
        }
        match self {
            Self::Uniform => Ok(()),
            Self::Channels(weights) => {
                check_length("channel weights", cols, weights.len())?;
                match weights.iter().position(|weight| !(weight.is_finite() && *weight >= 0.0)) {
                    Some(channel) => {
                        Err(SearchError::ChannelWeight { channel, found: weights[channel] })
                    }
                    None => Ok(()),
                }
            }
            Self::Blocks(hessians) => {
                check_length("block size of the Hessians", block_size, hessians.block_size)?;
                Ok(check_length("block Hessians", cols / block_size, hessians.len())?)
            }
        }
    }
}

/// The [`Importance`] of one block.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BlockImportance<'a> {
    Uniform,
    Channels(&'a [f32]),
    Hessian(BlockHessian<'a>),
}

impl<'a> BlockImportance<'a> {
    /// Returns the Hessian, for searches that need one: [`Importance::check`] refuses anything
    /// else.
    #[inline(always)]
    pub(crate) fn hessian(self) -> BlockHessian<'a> {
        match self {
            Self::Hessian(hessian) => hessian,
            Self::Uniform | Self::Channels(_) => unreachable!("checked before: {self:?}"),
        }
    }

    /// Returns the weights of the channels; `None` if there are none.
    #[inline(always)]
    pub(crate) fn weights(self) -> Option<&'a [f32]> {
        match self {
            Self::Channels(weights) => Some(weights),
            Self::Uniform | Self::Hessian(_) => None,
        }
    }
}

/// Holds a symmetric positive semidefinite matrix for every block of a row: `X^T X` of the
/// activations that the block is multiplied by.
///
/// ```
/// use burn_fp4_search::BlockHessians;
///
/// let hessians = BlockHessians::new(vec![4.0, 0.0, 0.0, 9.0], 2)?;
/// assert_eq!((hessians.len(), hessians.block_size()), (1, 2));
/// let bound = hessians.bounds()[0]; // sqrt(4), rounded down
/// assert!(bound > 1.99 && bound <= 2.0);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct BlockHessians {
    block_size: usize,
    /// `[blocks, block_size, block_size]`.
    values: Vec<f32>,
    /// `[blocks, block_size]`: the square roots of `1 / (H^-1)_ii`, rounded down; 0 where H is
    /// singular.
    ///
    /// For any errors `r`, `r^T H r >= r_i^2 / (H^-1)_ii`. With this bound a search is exact
    /// without trying every scale.
    bounds: Vec<f32>,
}

/// Largest asymmetry that rounding may cause, relative to the larger of two diagonal elements.
const ASYMMETRY: f64 = 1e-4;

/// Checks a matrix `[n, n]`: the Hessian of a block, or a Gram matrix.
///
/// # Errors
/// [`SearchError::Hessian`] naming the element that is not finite, negative on the diagonal, or not
/// symmetric.
pub(crate) fn check_symmetric<T: Copy + Sync + Into<f64>>(
    matrix: &[T],
    n: usize,
    block: Option<usize>,
) -> Result<(), SearchError> {
    let at = |row: usize, col: usize| -> f64 { matrix[row * n + col].into() };
    let check = |row: usize, col: usize| {
        let (found, mirrored) = (at(row, col), at(col, row));
        let problem = if !found.is_finite() || !mirrored.is_finite() {
            "is not finite"
        } else if row == col && found < 0.0 {
            "is negative, on the diagonal"
        } else if (found - mirrored).abs() > ASYMMETRY * at(row, row).max(at(col, col)) {
            "differs from its mirror image"
        } else {
            return Ok(());
        };
        Err(SearchError::Hessian { block, row, col, found, problem })
    };
    // In squares, which fit the cache together with their mirror images.
    let starts: Vec<_> = (0..n).step_by(SQUARE).collect();
    let of_rows = |&rows: &usize| {
        for cols in (0..=rows).step_by(SQUARE) {
            for row in rows..n.min(rows + SQUARE) {
                for col in cols..(row + 1).min(cols + SQUARE) {
                    check(row, col)?;
                }
            }
        }
        Ok(())
    };
    if n <= SQUARE {
        return starts.iter().try_for_each(of_rows);
    }
    // The first error, however many threads there are.
    starts.par_iter().map(of_rows).find_first(Result::is_err).unwrap_or(Ok(()))
}

/// Side of a square that is checked at a time.
const SQUARE: usize = 64;

impl BlockHessians {
    /// Takes matrices `[blocks, block_size, block_size]` and reads their lower halves.
    ///
    /// # Errors
    /// [`SearchError::Hessian`] naming the element that is not finite, negative on the diagonal, or
    /// not symmetric; [`SearchError::Format`] if the length is not a multiple of a matrix.
    pub fn new(mut values: Vec<f32>, block_size: usize) -> Result<Self, SearchError> {
        let square = block_size * block_size;
        if square == 0 || !values.len().is_multiple_of(square) {
            let whole = values.len() / square.max(1) * square;
            return Err(FormatError::Length {
                what: "block Hessians",
                expected: whole,
                found: values.len(),
            }
            .into());
        }
        for (block, matrix) in values.chunks_exact(square).enumerate() {
            check_symmetric(matrix, block_size, Some(block))?;
        }
        for matrix in values.chunks_exact_mut(square) {
            for row in 0..block_size {
                for col in 0..row {
                    matrix[col * block_size + row] = matrix[row * block_size + col];
                }
            }
        }
        let bounds =
            values.chunks_exact(square).flat_map(|matrix| bounds(matrix, block_size)).collect();
        Ok(Self { block_size, values, bounds })
    }

    /// Number of elements of a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len() / (self.block_size * self.block_size)
    }

    /// Returns true if there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns the matrices, `[blocks, block_size, block_size]`.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns `sqrt(1 / (H^-1)_ii)`, rounded down, 0 where a matrix is singular: `[blocks,
    /// block_size]`.
    #[must_use]
    pub fn bounds(&self) -> &[f32] {
        &self.bounds
    }

    /// Copies the matrix and the bounds of one block.
    pub(crate) fn only(&self, block: usize) -> Self {
        let BlockHessian { size, values, bounds } = self.block(block);
        Self { block_size: size, values: values.to_vec(), bounds: bounds.to_vec() }
    }

    pub(crate) fn block(&self, block: usize) -> BlockHessian<'_> {
        let size = self.block_size;
        BlockHessian {
            size,
            values: &self.values[block * size * size..][..size * size],
            bounds: &self.bounds[block * size..][..size],
        }
    }
}

/// The matrix of one block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockHessian<'a> {
    pub(crate) size: usize,
    /// `[size, size]`.
    pub(crate) values: &'a [f32],
    pub(crate) bounds: &'a [f32],
}

impl BlockHessian<'_> {
    #[inline(always)]
    pub(crate) fn at(&self, i: usize, j: usize) -> f32 {
        self.values[i * self.size + j]
    }

    /// Computes `r^T H r`, summed in the order that every engine keeps to.
    pub(crate) fn cost(&self, errors: &[f32]) -> f32 {
        let mut cost = 0.0;
        for i in 0..self.size {
            let mut sum = 0.0;
            for j in 0..i {
                sum = (2.0 * self.at(i, j)).mul_add(errors[j], sum);
            }
            sum = self.at(i, i).mul_add(errors[i], sum);
            cost = errors[i].mul_add(sum, cost);
        }
        cost
    }
}

/// Computes the square roots of the reciprocals of the inverse's diagonal, using a Cholesky
/// factorization in f64.
fn bounds(matrix: &[f32], n: usize) -> Vec<f32> {
    let mut lower = vec![0.0f64; n * n];
    for i in 0..n {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|k| lower[i * n + k] * lower[j * n + k]).sum();
            let rest = f64::from(matrix[i * n + j]) - dot;
            if i > j {
                lower[i * n + j] = rest / lower[j * n + j];
            } else if rest > 1e-6 * f64::from(matrix[i * n + i]) {
                lower[i * n + i] = rest.sqrt();
            } else {
                // Singular, within the precision of sums in f32.
                return vec![0.0; n];
            }
        }
    }
    // Column c of the inverse of L; (H^-1)_cc is the sum of its squares.
    (0..n)
        .map(|c| {
            let mut column = vec![0.0f64; n];
            for i in c..n {
                let dot: f64 = (c..i).map(|k| lower[i * n + k] * column[k]).sum();
                column[i] = (f64::from(u8::from(i == c)) - dot) / lower[i * n + i];
            }
            let inverse: f64 = column.iter().map(|value| value * value).sum();
            // Less by a thousandth, so that rounding never makes it too large.
            (0.999 / inverse.sqrt()) as f32
        })
        .collect()
}
