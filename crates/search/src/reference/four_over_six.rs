//! Four Over Six: a block may put its amax on element 4 instead of 6, which makes its grid coarser at
//! the top but finer relative to its other values.

use burn_fp4_formats::{E2M1, E4M3};

use crate::rule::saturating_e4m3;
use crate::{ErrorMetric, Fp4Scheme, TensorFactor};

/// The better scale of a block or of the rows of a tile.
pub(crate) fn choose(
    scheme: &Fp4Scheme,
    metric: ErrorMetric,
    tile: &[&[f32]],
    amax: f32,
    factor: TensorFactor,
) -> u8 {
    let [on_six, on_four] = candidates(amax, factor);
    let total = |scale| {
        let mut errors = [0.0; 16];
        for (sum, row) in errors.iter_mut().zip(tile) {
            *sum = error(scheme, metric, row, scale, factor);
        }
        sum_rows(errors)
    };
    if total(on_four) < total(on_six) { on_four } else { on_six }
}

/// The candidate scales of a block: amax on 6, and on 4.
///
/// Both come from the division form, in every version of TransformerEngine.
fn candidates(amax: f32, factor: TensorFactor) -> [u8; 2] {
    let on_six = (amax / 6.0) * factor.encode;
    [saturating_e4m3(on_six), saturating_e4m3(on_six * 1.5)]
}

/// The error of one row of a block, summed in element order without fused operations.
fn error(
    scheme: &Fp4Scheme,
    metric: ErrorMetric,
    elements: &[f32],
    scale: u8,
    factor: TensorFactor,
) -> f32 {
    let multiplier = scheme.rule.multiplier(scale, factor);
    let mut error = 0.0;
    for &element in elements {
        let code = scheme.rule.code(element, scale, multiplier);
        let scaled = E2M1.decode(code) * E4M3.decode(scale);
        let value = (scaled * factor.amax) / scheme.largest_code_product();
        let difference = value - element;
        error += match metric {
            ErrorMetric::Mae => difference.abs(),
            ErrorMetric::Mse => difference * difference,
        };
    }
    error
}

/// The errors of the rows of a block or tile, added as a tree: row r and r + 8, then + 4, + 2, + 1.
#[inline(always)]
pub(crate) fn sum_rows(mut errors: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for row in 0..half {
            errors[row] += errors[row + half];
        }
    }
    errors[0]
}
