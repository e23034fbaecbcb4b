//! ADMM on the blocks of a strip, one at a time; see `reference/admm.rs`.

use super::point::Points;
use super::strip::{STRIP, Strip};
use crate::importance::BlockHessian;
use crate::reference::admm::{Operator, improve, published};

impl<const B: usize> Strip<B> {
    /// The scales and elements of ADMM from the best known point, that of coordinate descent.
    #[inline(always)]
    pub(super) fn search_admm<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        start: Points<B>,
    ) -> Points<B> {
        let operator = Operator::new(hessian.values);
        self.improve_points::<FORMAT>(hessian, n, start, |target, start| {
            improve(target, &operator, start)
        })
    }

    /// The scales and elements of ADMM as published.
    #[inline(always)]
    pub(super) fn search_admm_published<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
    ) -> Points<B> {
        let operator = Operator::new(hessian.values);
        let start = (self.scales.map(u32::from), [[0.0; STRIP]; B]);
        self.improve_points::<FORMAT>(hessian, n, start, |target, _| published(target, &operator))
    }
}
