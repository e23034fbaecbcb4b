//! The best scales and codes of the blocks of a strip, one at a time; see `reference/joint.rs`.

use super::point::{Improve, Points};
use super::strip::Strip;
use crate::importance::BlockHessian;
use crate::reference::joint::improve;
use crate::reference::point::{Point, Target};

/// The best point there is.
struct Joint;

impl<const B: usize> Improve<B> for Joint {
    #[inline(always)]
    fn improve(&self, target: &Target<'_, B>, start: Point<B>) -> Point<B> {
        improve(target, start)
    }
}

impl<const B: usize> Strip<B> {
    /// The best scales and elements there are, starting where coordinate descent ended.
    #[inline(always)]
    pub(super) fn search_joint<const FORMAT: usize>(
        &self,
        hessian: BlockHessian<'_>,
        n: usize,
        start: Points<B>,
    ) -> Points<B> {
        self.improve_points::<FORMAT>(hessian, n, start, &Joint)
    }
}
