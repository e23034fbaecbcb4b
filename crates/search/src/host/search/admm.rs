//! ADMM on the blocks of a batch, one at a time; see `reference/admm.rs`.

use super::solution::{Solutions, Solver};
use crate::host::simd_batch::{BATCH, BlockBatch};
use crate::importance::BlockHessian;
use crate::reference::admm::{Operator, improve, published};
use crate::reference::solution::{BlockProblem, Solution};

/// Returns the best of the start and of all iterates.
struct Admm<const B: usize>(Operator<B>);

impl<const B: usize> Solver<B> for Admm<B> {
    #[inline(always)]
    fn solve(&self, problem: &BlockProblem<'_, B>, start: Solution<B>) -> Solution<B> {
        improve(problem, &self.0, start)
    }
}

/// Returns the last iterate from the rule's scale, whatever the start.
struct Published<const B: usize>(Operator<B>);

impl<const B: usize> Solver<B> for Published<B> {
    #[inline(always)]
    fn solve(&self, problem: &BlockProblem<'_, B>, _start: Solution<B>) -> Solution<B> {
        published(problem, &self.0)
    }
}

impl<const B: usize> BlockBatch<B> {
    /// Runs ADMM from the best known solutions, which coordinate descent found.
    #[inline(always)]
    pub(super) fn search_admm<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        start: Solutions<B>,
    ) -> Solutions<B> {
        let operator = Operator::new(hessian.values);
        self.solve_blocks::<FORMAT>(hessian, n, start, &Admm(operator))
    }

    /// Runs ADMM as published.
    #[inline(always)]
    pub(super) fn search_admm_published<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
    ) -> Solutions<B> {
        let operator = Operator::new(hessian.values);
        let start = (self.scales.map(u32::from), [[0.0; BATCH]; B]);
        self.solve_blocks::<FORMAT>(hessian, n, start, &Published(operator))
    }
}
