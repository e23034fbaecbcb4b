//! The better of two scales for every block of a batch; see `reference/four_over_six.rs`.

use crate::host::scale_grid::Scales;
use crate::host::simd_batch::{BATCH, BlockBatch, positive_zero};
use crate::host::tile_reduce::sum_tiles;
use crate::method::ErrorMetric;
use crate::rounding::{round_to_e2m1, twice_element};
use crate::scheme::Fp4Scheme;

impl<const B: usize> BlockBatch<B> {
    /// Chooses amax on element 6, or on 4, for the first `n` blocks or their tiles. Each error is
    /// summed in element order.
    #[inline(always)]
    pub(super) fn search_four_over_six<const FORMAT: usize>(
        &mut self,
        scheme: &Fp4Scheme,
        metric: ErrorMetric,
        n: usize,
    ) {
        let mut codes = [[0; BATCH]; 2];
        let mut scales = [[0.0; BATCH]; 2];
        for block in 0..BATCH {
            let on_six = (self.amax[block] / 6.0) * self.encode[block];
            for (candidate, exact) in [on_six, on_six * 1.5].into_iter().enumerate() {
                let (code, scale) = Scales::<FORMAT>::round(exact);
                codes[candidate][block] = u32::from(code);
                scales[candidate][block] = scale;
            }
        }
        let multipliers = [0, 1].map(|candidate: usize| {
            self.multipliers_of::<FORMAT>(scheme.rule, &codes[candidate], &scales[candidate])
        });
        let range = scheme.largest_code_product();
        let mut errors = [[0.0; BATCH]; 2];
        for values in self.values().chunks_exact(BATCH) {
            for candidate in 0..2 {
                for block in 0..BATCH {
                    let value = values[block];
                    let normalized = positive_zero(value * multipliers[candidate][block]);
                    let twice = twice_element(round_to_e2m1(normalized));
                    let scaled = twice * (scales[candidate][block] * 0.5);
                    let difference = (scaled * self.tensor_amax[block]) / range - value;
                    errors[candidate][block] += match metric {
                        ErrorMetric::Mae => difference.abs(),
                        ErrorMetric::Mse => difference * difference,
                    };
                }
            }
        }
        if scheme.tile_rows() > 1 {
            errors.iter_mut().for_each(|errors| sum_tiles(errors, n));
        }
        for block in 0..BATCH {
            let four = errors[1][block] < errors[0][block];
            self.scales[block] = codes[four as usize][block] as u8;
            self.multipliers[block] = multipliers[four as usize][block];
        }
    }
}
