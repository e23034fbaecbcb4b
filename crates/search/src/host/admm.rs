//! ADMM on the blocks of a strip, one at a time; see `reference/admm.rs`.

use super::point::Points;
use super::strip::{STRIP, Strip};
use crate::Fp4Scheme;
use crate::importance::BlockHessian;
use crate::reference::admm::{Operator, improve, published};

impl<const B: usize> Strip<B> {
    /// Takes the scales and codes of ADMM from the best known point, that of coordinate descent.
    #[inline(always)]
    pub(super) fn search_admm<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
        own: [u8; STRIP],
        start: Points<B>,
    ) {
        let operator = Operator::new(hessian.values);
        self.improve_points::<FORMAT>(scheme, hessian, n, own, start, |target, start| {
            improve(target, &operator, start)
        });
    }

    /// Takes the scales and codes of ADMM as published.
    #[inline(always)]
    pub(super) fn search_admm_published<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
    ) {
        let operator = Operator::new(hessian.values);
        let own = self.scales;
        let start = (own.map(u32::from), [[0.0; STRIP]; B]);
        self.improve_points::<FORMAT>(scheme, hessian, n, own, start, |target, _| {
            published(target, &operator)
        });
    }
}
