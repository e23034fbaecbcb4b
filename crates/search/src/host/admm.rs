//! ADMM on the blocks of a batch, one at a time; see `reference/admm.rs`.

use super::simd_batch::{BATCH, BlockBatch};
use super::solution::{Solutions, Solver};
use crate::importance::BlockHessian;
use crate::reference::admm::{Operator, improve, published};
use crate::reference::solution::{BlockProblem, Solution};

/// The best of a point and of all iterates.
struct Admm<const B: usize>(Operator<B>);

impl<const B: usize> Solver<B> for Admm<B> {
    #[inline(always)]
    fn solve(&self, problem: &BlockProblem<'_, B>, start: Solution<B>) -> Solution<B> {
        improve(problem, &self.0, start)
    }
}

/// The last iterate from the rule's scale, wherever it starts.
struct Published<const B: usize>(Operator<B>);

impl<const B: usize> Solver<B> for Published<B> {
    #[inline(always)]
    fn solve(&self, problem: &BlockProblem<'_, B>, _start: Solution<B>) -> Solution<B> {
        published(problem, &self.0)
    }
}

impl<const B: usize> BlockBatch<B> {
    /// The scales and elements of ADMM from the best known point, that of coordinate descent.
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

    /// The scales and elements of ADMM as published.
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
