//! The best scales and codes of the blocks of a strip, one at a time; see `reference/joint.rs`.

use super::point::Points;
use super::strip::{STRIP, Strip};
use crate::Fp4Scheme;
use crate::importance::BlockHessian;
use crate::reference::joint::improve;

impl<const B: usize> Strip<B> {
    /// Takes the best scales and codes there are, starting where coordinate descent ended.
    #[inline(always)]
    pub(super) fn search_joint<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
        own: [u8; STRIP],
        start: Points<B>,
    ) {
        self.improve_points::<FORMAT>(scheme, hessian, n, own, start, improve);
    }
}
