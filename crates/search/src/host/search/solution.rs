//! Methods that improve one block at a time, using the functions of the reference.

use super::hessian::Lines;
use crate::host::scale_grid::Scales;
use crate::host::simd_batch::{BATCH, BlockBatch};
use crate::importance::BlockHessian;
use crate::reference::solution::{BlockProblem, Solution};

/// Scales and elements of the blocks of a batch.
pub(super) type Solutions<const B: usize> = ([u32; BATCH], Lines<B>);

/// A method that improves one block at a time. A trait instead of a closure: a function that is not
/// inlined is compiled for any processor, where each fused multiply-add is a call.
pub(super) trait Solver<const B: usize> {
    /// Returns the final solution, given where to start.
    fn solve(&self, problem: &BlockProblem<'_, B>, start: Solution<B>) -> Solution<B>;
}

impl<const B: usize> BlockBatch<B> {
    /// Runs a method on every searchable block. Returns the final scales and elements.
    #[inline(always)]
    pub(super) fn solve_blocks<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        (mut scales, mut elements): Solutions<B>,
        method: &impl Solver<B>,
    ) -> Solutions<B> {
        let normalizations = self.normalizations::<FORMAT>(n);
        for block in (0..n).filter(|&block| normalizations.searchable[block]) {
            let problem = BlockProblem {
                normalization: Scales::<FORMAT>::normalization(
                    self.amax[block],
                    self.encode[block],
                ),
                own: self.scales[block],
                scaled: core::array::from_fn(|k| {
                    self.values()[k * BATCH + block] * normalizations.factor[block]
                }),
                hessian,
            };
            let (scale, start) = (scales[block] as u8, elements.each_ref().map(|line| line[block]));
            let cost = problem.cost(scale, &start);
            let solution = method.solve(&problem, Solution { scale, elements: start, cost });
            scales[block] = solution.scale.into();
            for (line, element) in elements.iter_mut().zip(solution.elements) {
                line[block] = element;
            }
        }
        (scales, elements)
    }
}
