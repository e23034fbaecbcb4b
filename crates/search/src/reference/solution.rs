//! A scale and codes of one block, as the methods see them that improve a block on its own.

use super::block::{Block, Choice};
use super::coordinate_descent;
use crate::e2m1::nearest_element;
use crate::importance::BlockHessian;
use crate::scale_grid::BlockNormalization;

/// What a block is to be approximated by, in its units, and what errors cost.
pub(crate) struct BlockProblem<'a, const B: usize> {
    pub(crate) normalization: BlockNormalization,
    /// The scale that the rule makes of the amax.
    pub(crate) own: u8,
    pub(crate) scaled: [f32; B],
    pub(crate) hessian: BlockHessian<'a>,
}

/// A scale and the E2M1 values of the codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Solution<const B: usize> {
    pub(crate) scale: u8,
    pub(crate) elements: [f32; B],
    /// `r^T H r`.
    pub(crate) cost: f32,
}

/// Improves the point that coordinate descent ends with.
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
    /// `r^T H r` of a scale and elements.
    #[inline(always)]
    pub(crate) fn cost(&self, scale: u8, elements: &[f32; B]) -> f32 {
        let value = self.normalization.value(scale);
        let mut errors = [0.0; B];
        for i in 0..B {
            errors[i] = (-elements[i]).mul_add(value, self.scaled[i]);
        }
        self.hessian.cost(&errors)
    }

    /// `H v`.
    #[inline(always)]
    pub(crate) fn product(&self, vector: &[f32; B]) -> [f32; B] {
        product(self.hessian.values, vector)
    }
}

/// A symmetric matrix times a vector: by its rows, so that the compiler adds them up side by side,
/// in four sums that need not wait for each other.
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

/// The E2M1 values nearest to others.
#[inline(always)]
pub(crate) fn nearest<const B: usize>(values: &[f32; B]) -> [f32; B] {
    values.map(nearest_element)
}
