//! The block scale with the smallest `r^T H r`, where `r` are the errors of the nearest codes.
//!
//! [`choose`] tries every scale. The host engine and the kernels stop where no smaller scale can be
//! better: whatever the codes, the error of an element is at least `|x_i| - 6s`, and
//! `r^T H r >= r_i^2 / (H^-1)_ii` ([`BlockHessians::bounds`](crate::BlockHessians::bounds)). They
//! start where every element rounds to zero, beyond which all scales are alike.

use super::block::{Block, Choice};
use crate::importance::BlockHessian;

/// Chooses the best scale. Of equals the rule's own wins, then the smallest.
pub(super) fn choose(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
    let cost = |scale| hessian.cost(&block.errors(0, scale, &block.nearest(0, scale)));
    Choice::nearest(block.cheapest(cost))
}
