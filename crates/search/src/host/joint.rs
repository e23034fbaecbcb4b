//! The best scales and codes of the blocks of a strip, one at a time; see `reference/joint.rs`.

use super::point::Start;
use super::strip::Strip;
use crate::Fp4Scheme;
use crate::importance::BlockHessian;
use crate::reference::joint::improve;

impl<const B: usize> Strip<B> {
    /// Takes the best scales and codes there are.
    #[inline(always)]
    pub(super) fn search_joint<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
    ) {
        self.improve_points::<FORMAT>(scheme, hessian, n, Start::CoordinateDescent, improve);
    }
}
