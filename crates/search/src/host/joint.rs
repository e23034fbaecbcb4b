//! The best scales and codes of the blocks of a strip, one at a time; see `reference/joint.rs`.

use super::point::Points;
use super::strip::Strip;
use crate::importance::BlockHessian;
use crate::reference::joint::improve;

impl<const B: usize> Strip<B> {
    /// The best scales and elements there are, starting where coordinate descent ended.
    #[inline(always)]
    pub(super) fn search_joint<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        start: Points<B>,
    ) -> Points<B> {
        self.improve_points::<FORMAT>(hessian, n, start, improve)
    }
}
