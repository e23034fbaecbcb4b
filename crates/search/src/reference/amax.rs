//! The rule's scale, computed from the largest magnitude of the block.

use super::block::{Block, Choice};
use crate::scheme::{Fp4Scheme, TensorScaling};

/// Computes the amax for the tensor scale: one value, or one per row.
///
/// A NaN among the values makes the result NaN.
#[must_use]
pub fn amax(values: &[f32], cols: usize, scheme: &Fp4Scheme) -> Vec<f32> {
    match scheme.tensor_scale {
        TensorScaling::Amax(amax) => vec![amax],
        TensorScaling::Row => values.chunks(cols.max(1)).map(largest_magnitude).collect(),
        TensorScaling::Tensor | TensorScaling::Multiplier(_) => vec![largest_magnitude(values)],
    }
}

/// Returns the largest magnitude, NaN if there is a NaN.
pub(super) fn largest_magnitude<'a>(values: impl IntoIterator<Item = &'a f32>) -> f32 {
    let mut largest = 0.0;
    for value in values {
        if value.is_nan() {
            return f32::NAN;
        }
        largest = f32::max(largest, value.abs());
    }
    largest
}

/// Takes the scale of the rule.
pub(super) fn choose(block: &Block<'_>) -> Choice {
    Choice::nearest(block.rule_scale())
}
