//! Four Over Six: a block may put its amax on element 4 instead of 6, which makes its grid coarser
//! at the top but finer relative to its other values (arXiv 2512.02010).

use burn_fp4_formats::E2M1;

use super::block::{Block, Choice};
use crate::method::ErrorMetric;
use crate::tile_reduce::sum_rows;

/// Chooses the better of two scales for a block or for the rows of a tile.
pub(super) fn choose(block: &Block<'_>, metric: ErrorMetric) -> Choice {
    let [on_six, on_four] = candidates(block);
    let total = |scale| {
        let mut errors = [0.0; 16];
        for (sum, row) in errors.iter_mut().zip(block.rows) {
            *sum = error(block, metric, row, scale);
        }
        sum_rows(errors)
    };
    Choice::nearest(if total(on_four) < total(on_six) { on_four } else { on_six })
}

/// Returns the candidate scales of a block: amax on 6, and on 4.
///
/// Both come from the division form, in every version of TransformerEngine.
fn candidates(block: &Block<'_>) -> [u8; 2] {
    let row = block.scheme.format().row().block_scale;
    let on_six = (block.amax / 6.0) * block.tensor.encode;
    [row.encode(on_six), row.encode(on_six * 1.5)]
}

/// Computes the error of one row of a block, summed in element order without fused operations.
fn error(block: &Block<'_>, metric: ErrorMetric, elements: &[f32], scale: u8) -> f32 {
    let scheme = block.scheme;
    let value = scheme.format().row().block_scale.decode(scale);
    let multiplier = scheme.rule.multiplier(scale, block.tensor);
    let mut error = 0.0;
    for &element in elements {
        let code = scheme.rule.code(element, scale, multiplier);
        let scaled = E2M1.decode(code) * value;
        let value = (scaled * block.tensor.amax) / scheme.largest_code_product();
        let difference = value - element;
        error += match metric {
            ErrorMetric::Mae => difference.abs(),
            ErrorMetric::Mse => difference * difference,
        };
    }
    error
}
