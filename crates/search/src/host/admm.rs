//! ADMM on the blocks of a strip, one at a time; see `reference/admm.rs`.

use super::point::{Improve, Points};
use super::strip::{STRIP, Strip};
use crate::importance::BlockHessian;
use crate::reference::admm::{Operator, improve, published};
use crate::reference::point::{Point, Target};

/// The best of a point and of all iterates.
struct Admm<const B: usize>(Operator<B>);

impl<const B: usize> Improve<B> for Admm<B> {
    #[inline(always)]
    fn improve(&self, target: &Target<'_, B>, start: Point<B>) -> Point<B> {
        improve(target, &self.0, start)
    }
}

/// The last iterate from the rule's scale, wherever it starts.
struct Published<const B: usize>(Operator<B>);

impl<const B: usize> Improve<B> for Published<B> {
    #[inline(always)]
    fn improve(&self, target: &Target<'_, B>, _start: Point<B>) -> Point<B> {
        published(target, &self.0)
    }
}

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
        self.improve_points::<FORMAT>(hessian, n, start, &Admm(operator))
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
        self.improve_points::<FORMAT>(hessian, n, start, &Published(operator))
    }
}
