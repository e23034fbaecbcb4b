//! Coordinate descent over scale and codes of a block: for every scale, improves the nearest codes
//! one at a time while `r^T H r` falls.
//!
//! With all others held, the best value of element i is `x_i + (H r)_i / H_ii` less its own error;
//! its code is the nearest. Never worse than [`hessian`](super::hessian) on any block: each scale
//! keeps its nearest codes unless others are better.

use burn_fp4_formats::E2M1;

use super::block::{Block, Choice};
use crate::importance::BlockHessian;
use crate::method::Method;

/// Chooses the best scale with its codes. Of equals the rule's own wins, then the smallest. Scales
/// beyond the first that rounds all elements to zero are not tried. A block that is not searchable
/// keeps its nearest codes.
pub(super) fn choose(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
    let descend = |scale| descend(block, hessian, scale, block.nearest(0, scale));
    let (cost, scale) = block.start(|scale| descend(scale).0);
    if !block.normalization.searchable {
        return Choice::nearest(scale);
    }
    let mut best = (cost, scale, descend(scale).1);
    for scale in block.normalization.lowest()
        ..=block.normalization.zeros(block.amax * block.normalization.factor)
    {
        let (cost, values) = descend(scale);
        if cost < best.0 {
            best = (cost, scale, values);
        }
    }
    Choice { scale: best.1, elements: Some(best.2) }
}

/// Descends from the nearest values. Returns the final cost and values.
fn descend(
    block: &Block<'_>,
    hessian: BlockHessian<'_>,
    scale: u8,
    nearest: Vec<f32>,
) -> (f32, Vec<f32>) {
    let n = hessian.size;
    let value = block.normalization.value(scale);
    let reciprocal = 1.0 / value;
    let errors = block.errors(0, scale, &nearest);
    let nearest_cost = hessian.cost(&errors);
    let mut values = nearest.clone();
    let mut gradient: Vec<f32> = (0..n)
        .map(|i| (0..n).fold(0.0, |sum: f32, j| hessian.at(i, j).mul_add(errors[j], sum)))
        .collect();
    for _ in 0..Method::SWEEPS {
        let mut changed = false;
        for i in 0..n {
            let diagonal = hessian.at(i, i);
            let step = if diagonal > 0.0 { 1.0 / diagonal } else { 0.0 };
            let target = gradient[i].mul_add(step, values[i] * value);
            let next = E2M1.decode(E2M1.encode(target * reciprocal));
            // Exact: a multiple of half the scale, with few bits.
            let change = (next - values[i]) * value;
            changed |= change != 0.0;
            for (k, gradient) in gradient.iter_mut().enumerate() {
                *gradient = (-hessian.at(k, i)).mul_add(change, *gradient);
            }
            values[i] = next;
        }
        if !changed {
            break;
        }
    }
    let cost = hessian.cost(&block.errors(0, scale, &values));
    if cost < nearest_cost { (cost, values) } else { (nearest_cost, nearest) }
}
