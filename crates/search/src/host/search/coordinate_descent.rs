//! Coordinate descent on `r^T H r` over scales and codes, for a batch of blocks.
//! `reference/coordinate_descent.rs` is the definition.

use super::hessian::{Descent, Line, Lines, cost};
use super::solution::Solutions;
use super::sse::start;
use crate::host::simd_batch::{BATCH, BlockBatch};
use crate::importance::BlockHessian;
use crate::method::Method;
use crate::rounding::nearest_element;
use crate::rule::ScaleRule;
use crate::scheme::Fp4Scheme;

impl<const B: usize> BlockBatch<B> {
    /// Runs coordinate descent. Returns the final scales and elements.
    #[inline(always)]
    pub(super) fn search_coordinate_descent<const FORMAT: usize>(
        &self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
    ) -> Solutions<B> {
        let steps: [f32; B] = core::array::from_fn(|i| {
            let diagonal = hessian.at(i, i);
            if diagonal > 0.0 { 1.0 / diagonal } else { 0.0 }
        });
        let mut descent = Descent::new::<FORMAT>(self, hessian, n);
        let mut elements = [[0.0; BATCH]; B];
        let mut best_elements = elements;
        let by = (scheme.rule, hessian, &steps);
        // The rule's own scale first, then all from the largest down. One loop, because its inlined
        // body is long.
        let (mut codes, mut is_own) = (descent.own, true);
        loop {
            let costs = self.descend::<FORMAT>(by, &descent, &codes, &mut elements);
            if is_own {
                descent.best = start::<FORMAT>(&codes, &costs);
                best_elements = elements;
            } else {
                let kept = descent.keep_better(&costs, &descent.active.clone());
                for (best, elements) in best_elements.iter_mut().zip(&elements) {
                    for block in 0..BATCH {
                        best[block] = if kept[block] { elements[block] } else { best[block] };
                    }
                }
                descent.advance::<FORMAT>(self, scheme.rule, hessian);
            }
            if !descent.active.contains(&true) {
                break;
            }
            (codes, is_own) = (descent.code, false);
        }
        (descent.best_code, best_elements)
    }

    /// Descends from the nearest elements. Returns the final costs, infinite where a scale cannot
    /// be better than the best, and writes the elements. `steps` are the reciprocals of the
    /// diagonal of H.
    #[inline(always)]
    fn descend<const FORMAT: usize>(
        &self,
        (rule, hessian, steps): (ScaleRule, BlockHessian<'_>, &[f32; B]),
        descent: &Descent<B>,
        codes: &[u32; BATCH],
        elements: &mut Lines<B>,
    ) -> Line {
        let (values, multipliers) =
            self.scales_of::<FORMAT>(rule, codes, &descent.normalizations.base);
        let nearest = descent.nearest(self, rule, &multipliers);
        let errors = descent.errors(&nearest, &values);
        // The nearest codes have the smallest errors, so the bound holds for all codes.
        let possible = descent.possible(&errors, hessian);
        if !possible.contains(&true) {
            return [f32::INFINITY; BATCH];
        }
        let nearest_costs = cost(&errors, hessian);
        *elements = sweep(&nearest, &errors, &values, hessian, steps, &possible);
        let mut costs = cost(&descent.errors(elements, &values), hessian);
        for block in 0..BATCH {
            let improved = possible[block] & (costs[block] < nearest_costs[block]);
            costs[block] = if improved { costs[block] } else { nearest_costs[block] };
            costs[block] = if possible[block] { costs[block] } else { f32::INFINITY };
            for (elements, nearest) in elements.iter_mut().zip(&nearest) {
                elements[block] = if improved { elements[block] } else { nearest[block] };
            }
        }
        costs
    }
}

/// Sweeps over the elements until none changes in a block with `counts` set.
#[inline(always)]
fn sweep<const B: usize>(
    nearest: &Lines<B>,
    errors: &Lines<B>,
    values: &Line,
    hessian: BlockHessian<'_>,
    steps: &[f32; B],
    counts: &[bool; BATCH],
) -> Lines<B> {
    let mut elements = *nearest;
    let reciprocals = values.map(|value| 1.0 / value);
    let mut gradient = [[0.0; BATCH]; B];
    for i in 0..B {
        for j in 0..B {
            let entry = hessian.at(i, j);
            for block in 0..BATCH {
                gradient[i][block] = entry.mul_add(errors[j][block], gradient[i][block]);
            }
        }
    }
    for _ in 0..Method::SWEEPS {
        let mut changed = [false; BATCH];
        for i in 0..B {
            let mut changes = [0.0; BATCH];
            for block in 0..BATCH {
                let now = elements[i][block];
                let target = gradient[i][block].mul_add(steps[i], now * values[block]);
                let next = nearest_element(target * reciprocals[block]);
                changes[block] = (next - now) * values[block];
                changed[block] |= counts[block] & (changes[block] != 0.0);
                elements[i][block] = next;
            }
            for k in 0..B {
                let entry = -hessian.at(k, i);
                for block in 0..BATCH {
                    gradient[k][block] = entry.mul_add(changes[block], gradient[k][block]);
                }
            }
        }
        if !changed.contains(&true) {
            break;
        }
    }
    elements
}
