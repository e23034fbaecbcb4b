//! The block scale with the smallest `r^T H r`, where `r` are the errors of the nearest codes.
//!
//! [`choose`] tries every scale. The host engine and the kernels stop where no smaller scale can be
//! better: whatever the codes, an element leaves at least `|x_i| - 6s`, and `r^T H r >= r_i^2 / (H^-1)_ii`
//! ([`BlockHessians::bounds`](crate::BlockHessians::bounds)). They start where every element rounds to
//! zero, beyond which all scales are alike.

use crate::block::Block;
use crate::importance::BlockHessian;

/// The reference: the rule's own scale unless another is better, of several such the smallest.
pub(crate) fn choose(block: &Block<'_>, hessian: BlockHessian<'_>) -> u8 {
    let cost = |scale| hessian.cost(&block.errors(0, scale, &block.nearest(0, scale)));
    let mut best = block.start(cost);
    if block.unit.searchable {
        for scale in block.scales() {
            let cost = cost(scale);
            if cost < best.0 {
                best = (cost, scale);
            }
        }
    }
    best.1
}
