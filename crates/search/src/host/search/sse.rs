//! The scales with the smallest squared error, for a batch of blocks. `reference/sse.rs` is the
//! definition, and explains why a window of scales is enough.

use crate::host::scale_grid::{Scales, Window};
use crate::host::simd_batch::{BATCH, BlockBatch};
use crate::host::tile_reduce::sum_tiles;
use crate::rounding::nearest_magnitude;
use crate::scheme::Fp4Scheme;

impl<const B: usize> BlockBatch<B> {
    /// Chooses the scales of the first `n` blocks or of their tiles. `weights` has a weight for
    /// each element of a block.
    #[inline(always)]
    pub(super) fn search_sse<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        weights: Option<&[f32]>,
        n: usize,
    ) {
        let tiles = scheme.tile_rows() > 1;
        let normalizations = self.normalizations::<FORMAT>(n);
        let mut weight = [1.0; BATCH];
        let mut total = [B as f32; BATCH];
        if let Some(weights) = weights {
            (weight, total) = self.weights_of_largest(weights);
        }
        if tiles {
            share_weights(&mut weight, &mut total, n);
        }
        let magnitudes = Magnitudes::new(self, &normalizations.factor);
        // One array for each, and masks instead of booleans, so that the compiler vectorizes the
        // loops below.
        let (mut high, mut low) = ([0; BATCH], [0; BATCH]);
        let (mut amax, mut code, mut active) = ([0.0; BATCH], [0u32; BATCH], [0u32; BATCH]);
        for block in 0..BATCH {
            let crest = crest(weight[block], total[block]);
            amax[block] = self.amax[block] * normalizations.factor[block];
            let window = Scales::<FORMAT>::window(normalizations.base[block], amax[block], crest);
            (high[block], low[block]) = (window.high, window.low);
            code[block] = window.first();
            active[block] = mask(normalizations.searchable[block] & (code[block] >= window.low));
        }
        let own = self.scales.map(u32::from);
        let (mut best, mut best_code) = ([f32::INFINITY; BATCH], own);
        // The rule's own scale first, then the window. One loop, because its inlined body
        // is long.
        let (mut tried, mut is_own) = (own, true);
        loop {
            let (values, multipliers) =
                self.scales_of::<FORMAT>(scheme.rule, &tried, &normalizations.base);
            let mut costs = magnitudes.squared_error(scheme, &values, &multipliers, weights);
            if tiles {
                sum_tiles(&mut costs, n);
            }
            if is_own {
                best = start::<FORMAT>(&own, &costs);
            } else {
                for block in 0..BATCH {
                    let better = active[block]
                        & mask(is_better(costs[block], best[block], best_code[block], own[block]));
                    best[block] = if better != 0 { costs[block] } else { best[block] };
                    best_code[block] = if better != 0 { code[block] } else { best_code[block] };
                    let next = Window::next(code[block], high[block]);
                    let value = Scales::<FORMAT>::value(next, normalizations.base[block]);
                    let clipped = (-6.0f32).mul_add(value, amax[block]).max(0.0);
                    let hopeless = (weight[block] * clipped) * clipped > best[block];
                    // Below 0 codes wrap around.
                    let left = (next as i32) >= (low[block] as i32);
                    active[block] &= mask(left & !hopeless);
                    code[block] = next;
                }
            }
            if active.iter().fold(0, |any, active| any | active) == 0 {
                break;
            }
            (tried, is_own) = (code, false);
        }
        self.take_scales::<FORMAT>(scheme.rule, &best_code);
    }

    /// Returns the weight of the element of largest magnitude, the largest if there are several,
    /// and the sum of all weights.
    #[inline(always)]
    fn weights_of_largest(&self, weights: &[f32]) -> ([f32; BATCH], [f32; BATCH]) {
        let mut of_largest = [0.0; BATCH];
        for (line, &weight) in self.values().chunks_exact(BATCH).zip(weights) {
            for block in 0..BATCH {
                let is_largest = line[block].abs() == self.amax[block];
                let larger = is_largest & (weight > of_largest[block]);
                of_largest[block] = if larger { weight } else { of_largest[block] };
            }
        }
        (of_largest, [weights[..B].iter().sum(); BATCH])
    }
}

/// Returns all bits set if `holds`, otherwise none.
#[inline(always)]
fn mask(holds: bool) -> u32 {
    u32::from(holds).wrapping_neg()
}

/// The magnitudes of a batch, as they are and normalized.
struct Magnitudes<const B: usize> {
    own: [[f32; BATCH]; B],
    scaled: [[f32; BATCH]; B],
}

impl<const B: usize> Magnitudes<B> {
    #[inline(always)]
    fn new(batch: &BlockBatch<B>, factors: &[f32; BATCH]) -> Self {
        let mut magnitudes = Self { own: [[0.0; BATCH]; B], scaled: [[0.0; BATCH]; B] };
        for (k, line) in batch.values().chunks_exact(BATCH).enumerate() {
            for block in 0..BATCH {
                magnitudes.own[k][block] = line[block].abs();
                magnitudes.scaled[k][block] = line[block].abs() * factors[block];
            }
        }
        magnitudes
    }

    /// Computes the weighted squared error of every block with given scales, summed in element
    /// order.
    #[inline(always)]
    fn squared_error(
        &self,
        scheme: &Fp4Scheme,
        values: &[f32; BATCH],
        multipliers: &[f32; BATCH],
        weights: Option<&[f32]>,
    ) -> [f32; BATCH] {
        if scheme.rule.row().normalization.divides() {
            self.sum_errors(values, multipliers, weights, |x, scale| x / scale)
        } else {
            self.sum_errors(values, multipliers, weights, |x, multiplier| x * multiplier)
        }
    }

    #[inline(always)]
    fn sum_errors(
        &self,
        values: &[f32; BATCH],
        multipliers: &[f32; BATCH],
        weights: Option<&[f32]>,
        normalize: impl Fn(f32, f32) -> f32,
    ) -> [f32; BATCH] {
        let mut costs = [0.0; BATCH];
        for (k, (own, scaled)) in self.own.iter().zip(&self.scaled).enumerate() {
            let weight = weights.map_or(1.0, |weights| weights[k]);
            for block in 0..BATCH {
                let nearest = nearest_magnitude(normalize(own[block], multipliers[block]));
                let error = (-nearest).mul_add(values[block], scaled[block]);
                costs[block] = (weight * error).mul_add(error, costs[block]);
            }
        }
        costs
    }
}

/// Returns the value of `amax / scale` beyond which twice the scale is better: 7 + sum of the other
/// weights / (16 weight of the largest element).
#[inline(always)]
pub(in crate::host) fn crest(largest: f32, total: f32) -> f32 {
    if largest > 0.0 { 7.0 + (total - largest) / (16.0 * largest) } else { f32::INFINITY }
}

/// Returns the costs of the rule's own scales, infinite for a scale of 0 or a cost of NaN.
#[inline(always)]
pub(super) fn start<const FORMAT: usize>(own: &[u32; BATCH], costs: &[f32; BATCH]) -> [f32; BATCH] {
    core::array::from_fn(|block| {
        let counts = !Scales::<FORMAT>::is_zero(own[block]) & (costs[block] < f32::INFINITY);
        if counts { costs[block] } else { f32::INFINITY }
    })
}

/// Returns true if a scale, tried after all larger ones, replaces the best. Of equals the rule's
/// own stays, otherwise the smallest wins, as in the reference.
#[inline(always)]
pub(super) fn is_better(cost: f32, best: f32, best_code: u32, own: u32) -> bool {
    (cost < best) | ((cost == best) & (best_code != own) & (cost < f32::INFINITY))
}

/// Gives every row of a tile the weight of the tile's largest element, and the sum of all weights.
#[inline(always)]
fn share_weights(weight: &mut [f32; BATCH], total: &mut [f32; BATCH], n: usize) {
    for start in (0..BATCH).step_by(16) {
        let rows = start..n.clamp(start, start + 16);
        // Any row with the tile's amax may hold its largest element: the smallest weight is safe.
        let least = weight[rows.clone()].iter().fold(f32::INFINITY, |a, &b| a.min(b));
        let sum: f32 = total[rows.clone()].iter().sum();
        weight[start..start + 16].fill(least);
        total[start..start + 16].fill(sum);
    }
}
