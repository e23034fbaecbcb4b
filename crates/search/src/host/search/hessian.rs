//! The scales with the smallest `r^T H r` of the nearest codes, for a batch of blocks.
//! `reference/hessian.rs` is the definition, and explains why the search may stop early.

use super::sse::{is_better, start};
use crate::host::scale_grid::Scales;
use crate::host::simd_batch::{BATCH, BlockBatch, BlockNormalizations};
use crate::importance::BlockHessian;
use crate::rounding::nearest_element;
use crate::rule::ScaleRule;
use crate::scheme::Fp4Scheme;

/// One value for every block of a batch.
pub(super) type Line = [f32; BATCH];

/// One value for every element of a batch.
pub(super) type Lines<const B: usize> = [Line; B];

/// Searches scales by `r^T H r`, from the smallest that rounds every element to zero down to where
/// no smaller one can be better.
pub(super) struct Descent<const B: usize> {
    pub(super) normalizations: BlockNormalizations,
    /// The normalized elements.
    scaled: Lines<B>,
    /// Magnitudes of the normalized elements times the bound of their row.
    bounded: Lines<B>,
    pub(super) code: [u32; BATCH],
    /// The rule's own scales.
    pub(super) own: [u32; BATCH],
    pub(super) active: [bool; BATCH],
    pub(super) best: Line,
    pub(super) best_code: [u32; BATCH],
}

impl<const B: usize> BlockBatch<B> {
    /// Chooses the scales of the first `n` blocks.
    #[inline(always)]
    pub(super) fn search_hessian<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        hessian: BlockHessian<'_>,
        n: usize,
    ) {
        let mut descent = Descent::new::<FORMAT>(self, hessian, n);
        let (values, _) =
            self.scales_of::<FORMAT>(scheme.rule, &descent.own, &descent.normalizations.base);
        let nearest = descent.nearest(self, scheme.rule, &self.multipliers);
        let costs = cost(&descent.errors(&nearest, &values), hessian);
        descent.best = start::<FORMAT>(&descent.own, &costs);
        while descent.active.contains(&true) {
            let (values, multipliers) =
                self.scales_of::<FORMAT>(scheme.rule, &descent.code, &descent.normalizations.base);
            let errors = descent.errors(&descent.nearest(self, scheme.rule, &multipliers), &values);
            let possible = descent.possible(&errors, hessian);
            if possible.contains(&true) {
                let costs = cost(&errors, hessian);
                descent.keep_better(&costs, &possible);
            }
            descent.advance::<FORMAT>(self, scheme.rule, hessian);
        }
        self.take_scales::<FORMAT>(scheme.rule, &descent.best_code);
    }
}

impl<const B: usize> Descent<B> {
    #[inline(always)]
    pub(super) fn new<const FORMAT: usize>(
        batch: &BlockBatch<B>,
        hessian: BlockHessian<'_>,
        n: usize,
    ) -> Self {
        let normalizations = batch.normalizations::<FORMAT>(n);
        let mut scaled = [[0.0; BATCH]; B];
        let mut bounded = [[0.0; BATCH]; B];
        for k in 0..B {
            let line = &batch.values()[k * BATCH..][..BATCH];
            for block in 0..BATCH {
                scaled[k][block] = line[block] * normalizations.factor[block];
                bounded[k][block] = scaled[k][block].abs() * hessian.bounds[k];
            }
        }
        let code = core::array::from_fn(|block| {
            let amax = batch.amax[block] * normalizations.factor[block];
            Scales::<FORMAT>::zeros(normalizations.base[block], amax)
        });
        let own = batch.scales.map(u32::from);
        let (active, best) = (normalizations.searchable, [f32::INFINITY; BATCH]);
        Self { normalizations, scaled, bounded, code, own, active, best, best_code: own }
    }

    /// Returns the E2M1 values nearest to the elements, rounded by the rule.
    #[inline(always)]
    pub(super) fn nearest(
        &self,
        batch: &BlockBatch<B>,
        rule: ScaleRule,
        multipliers: &Line,
    ) -> Lines<B> {
        if rule.row().normalization.divides() {
            nearest_by(batch, multipliers, |x, scale| x / scale)
        } else {
            nearest_by(batch, multipliers, |x, multiplier| x * multiplier)
        }
    }

    /// Computes the errors of E2M1 values, normalized.
    #[inline(always)]
    pub(super) fn errors(&self, elements: &Lines<B>, values: &Line) -> Lines<B> {
        let mut errors = [[0.0; BATCH]; B];
        for k in 0..B {
            for block in 0..BATCH {
                errors[k][block] =
                    (-elements[k][block]).mul_add(values[block], self.scaled[k][block]);
            }
        }
        errors
    }

    /// Returns the blocks that a scale with at least these errors may improve.
    #[inline(always)]
    pub(super) fn possible(&self, errors: &Lines<B>, hessian: BlockHessian<'_>) -> [bool; BATCH] {
        let mut largest = [0.0f32; BATCH];
        for (errors, &bound) in errors.iter().zip(hessian.bounds) {
            for block in 0..BATCH {
                largest[block] = largest[block].max(errors[block].abs() * bound);
            }
        }
        core::array::from_fn(|block| {
            self.active[block] & (largest[block] * largest[block] <= self.best[block])
        })
    }

    /// Takes the costs that are better, and returns the blocks with such.
    #[inline(always)]
    pub(super) fn keep_better(&mut self, costs: &Line, possible: &[bool; BATCH]) -> [bool; BATCH] {
        let mut kept = [false; BATCH];
        for block in 0..BATCH {
            let cost = costs[block];
            let better = possible[block]
                & is_better(cost, self.best[block], self.best_code[block], self.own[block]);
            self.best[block] = if better { cost } else { self.best[block] };
            self.best_code[block] = if better { self.code[block] } else { self.best_code[block] };
            kept[block] = better;
        }
        kept
    }

    /// Moves on to the next smaller scale; ends where none can be better.
    #[inline(always)]
    pub(super) fn advance<const FORMAT: usize>(
        &mut self,
        batch: &BlockBatch<B>,
        rule: ScaleRule,
        hessian: BlockHessian<'_>,
    ) {
        for block in 0..BATCH {
            let lowest = Scales::<FORMAT>::lowest(self.normalizations.base[block]) as i32;
            self.code[block] = self.code[block].wrapping_sub(1);
            self.active[block] &= self.code[block] as i32 >= lowest;
        }
        let (values, _) = batch.scales_of::<FORMAT>(rule, &self.code, &self.normalizations.base);
        let mut clipped = [0.0f32; BATCH];
        for (bounded, &bound) in self.bounded.iter().zip(hessian.bounds) {
            for block in 0..BATCH {
                let least = (-6.0 * bound).mul_add(values[block], bounded[block]);
                clipped[block] = clipped[block].max(least);
            }
        }
        for block in 0..BATCH {
            self.active[block] &= clipped[block] * clipped[block] <= self.best[block];
        }
    }
}

#[inline(always)]
fn nearest_by<const B: usize>(
    batch: &BlockBatch<B>,
    multipliers: &Line,
    normalize: impl Fn(f32, f32) -> f32,
) -> Lines<B> {
    let mut nearest = [[0.0; BATCH]; B];
    for (nearest, line) in nearest.iter_mut().zip(batch.values().chunks_exact(BATCH)) {
        for block in 0..BATCH {
            nearest[block] = nearest_element(normalize(line[block], multipliers[block]));
        }
    }
    nearest
}

/// Computes `r^T H r` of every block, in the order of [`BlockHessian::cost`].
#[inline(always)]
pub(super) fn cost<const B: usize>(errors: &Lines<B>, hessian: BlockHessian<'_>) -> Line {
    let mut costs = [0.0; BATCH];
    for i in 0..B {
        let row = &hessian.values[i * B..][..B];
        let mut sums = [0.0; BATCH];
        for j in 0..i {
            let doubled = 2.0 * row[j];
            for block in 0..BATCH {
                sums[block] = doubled.mul_add(errors[j][block], sums[block]);
            }
        }
        for block in 0..BATCH {
            sums[block] = row[i].mul_add(errors[i][block], sums[block]);
            costs[block] = errors[i][block].mul_add(sums[block], costs[block]);
        }
    }
    costs
}
