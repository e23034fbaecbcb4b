//! Problem and [`Solution`] of methods that improve one block at a time.

use super::block::{Block, Choice};
use super::coordinate_descent;
use crate::importance::BlockHessian;
use crate::rounding::nearest_element;
use crate::scale_grid::BlockNormalization;

/// A normalized block to approximate, with the cost of errors.
pub(crate) struct BlockProblem<'a, const B: usize> {
    pub(crate) normalization: BlockNormalization,
    /// The scale of the rule for the amax.
    pub(crate) own: u8,
    pub(crate) scaled: [f32; B],
    pub(crate) hessian: BlockHessian<'a>,
}

/// A scale, and the E2M1 values of the codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Solution<const B: usize> {
    pub(crate) scale: u8,
    pub(crate) elements: [f32; B],
    /// `r^T H r`.
    pub(crate) cost: f32,
}

/// Improves the solution of coordinate descent.
pub(super) fn choose<const B: usize>(
    block: &Block<'_>,
    hessian: BlockHessian<'_>,
    improve: impl Fn(&BlockProblem<'_, B>, Solution<B>) -> Solution<B>,
) -> Choice {
    let Choice { scale, elements: Some(elements) } = coordinate_descent::choose(block, hessian)
    else {
        return Choice::nearest(block.rule_scale());
    };
    let problem = BlockProblem {
        normalization: block.normalization,
        own: block.rule_scale(),
        scaled: block.scaled(0).try_into().expect("a block"),
        hessian,
    };
    let elements: [f32; B] = elements.try_into().expect("a block");
    let start = Solution { scale, elements, cost: problem.cost(scale, &elements) };
    let solution = improve(&problem, start);
    Choice { scale: solution.scale, elements: Some(solution.elements.to_vec()) }
}

impl<const B: usize> BlockProblem<'_, B> {
    /// Computes `r^T H r` of a scale and elements.
    #[inline(always)]
    pub(crate) fn cost(&self, scale: u8, elements: &[f32; B]) -> f32 {
        let value = self.normalization.value(scale);
        let mut errors = [0.0; B];
        for i in 0..B {
            errors[i] = (-elements[i]).mul_add(value, self.scaled[i]);
        }
        self.hessian.cost(&errors)
    }

    /// Computes `H v`.
    #[inline(always)]
    pub(crate) fn product(&self, vector: &[f32; B]) -> [f32; B] {
        product(self.hessian.values, vector)
    }
}

/// Multiplies a symmetric matrix with a vector, row by row, so that the compiler vectorizes the
/// sums: four sums that do not wait for each other.
#[inline(always)]
pub(crate) fn product<const B: usize>(matrix: &[f32], vector: &[f32; B]) -> [f32; B] {
    let mut sums = [[0.0; B]; 4];
    for (rows, factors) in matrix.chunks_exact(4 * B).zip(vector.chunks_exact(4)) {
        for (sums, (row, &factor)) in sums.iter_mut().zip(rows.chunks_exact(B).zip(factors)) {
            for i in 0..B {
                sums[i] = row[i].mul_add(factor, sums[i]);
            }
        }
    }
    let mut product = [0.0; B];
    for i in 0..B {
        product[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
    product
}

/// Rounds values to the nearest E2M1 values.
#[inline(always)]
pub(crate) fn nearest<const B: usize>(values: &[f32; B]) -> [f32; B] {
    values.map(nearest_element)
}
