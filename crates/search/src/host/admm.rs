//! ADMM on the blocks of a strip, one at a time; see `reference/admm.rs`.

use super::point::Start;
use super::strip::Strip;
use crate::Fp4Scheme;
use crate::importance::BlockHessian;
use crate::reference::admm::{Operator, improve, published};

impl<const B: usize> Strip<B> {
    /// Takes the scales and codes of ADMM from the best known point.
    #[inline(always)]
    pub(super) fn search_admm<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
    ) {
        let operator = Operator::new(hessian.values);
        let from = Start::CoordinateDescent;
        self.improve_points::<FORMAT>(scheme, hessian, n, from, |target, start| {
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
        self.improve_points::<FORMAT>(scheme, hessian, n, Start::Rule, |target, _| {
            published(target, &operator)
        });
    }
}
