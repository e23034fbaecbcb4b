//! The best scales and codes of the blocks of a batch, one at a time; see `reference/joint.rs`.

use super::simd_batch::BlockBatch;
use super::solution::{Solutions, Solver};
use crate::importance::BlockHessian;
use crate::reference::joint::improve;
use crate::reference::solution::{BlockProblem, Solution};

/// The best point there is.
struct Joint;

impl<const B: usize> Solver<B> for Joint {
    #[inline(always)]
    fn solve(&self, problem: &BlockProblem<'_, B>, start: Solution<B>) -> Solution<B> {
        improve(problem, start)
    }
}

impl<const B: usize> BlockBatch<B> {
    /// The best scales and elements there are, starting where coordinate descent ended.
    #[inline(always)]
    pub(super) fn search_joint<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        start: Solutions<B>,
    ) -> Solutions<B> {
        self.solve_blocks::<FORMAT>(hessian, n, start, &Joint)
    }
}
