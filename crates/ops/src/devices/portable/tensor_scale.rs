//! Tensor scales, as the two factors that rules use.

use burn::backend::Backend;
use burn_fp4_search::{Fp4Scheme, TensorFactor, TensorScaling};

use super::floats::Floats;

/// Factors of the tensor scale, and its amax, `[1, 1]` or `[rows, 1]`; see [`TensorFactor`].
pub(super) struct TensorFactors<B: Backend> {
    pub(super) amax: Floats<B>,
    pub(super) encode: Floats<B>,
    pub(super) decode: Floats<B>,
}

/// Computes the factors for the amax of a tensor `[1, 1]`, or of its rows `[rows, 1]`.
pub(super) fn factors<B: Backend>(amax: Floats<B>, scheme: &Fp4Scheme) -> TensorFactors<B> {
    let fixed = match scheme.tensor_scale {
        _ if !scheme.rule.row().tensor_scale => Some(TensorFactor::ONE),
        TensorScaling::Multiplier(_) => Some(TensorFactor::new(scheme, f32::NAN)),
        _ => None,
    };
    if let Some(factor) = fixed {
        let filled = |value| Floats::filled(value, &amax);
        return TensorFactors {
            encode: filled(factor.encode),
            decode: filled(factor.decode),
            amax: filled(factor.amax),
        };
    }
    let one = Floats::filled(1.0, &amax);
    let range = scheme.largest_code_product();
    let encode = match scheme.rule.row().inverts_amax {
        true => one.div(&amax).times(range),
        false => Floats::filled(range, &amax).div(&amax),
    };
    let encode = saturate(&encode).or_where(encode.equals(0.0), 1.0);
    TensorFactors { decode: one.div(&encode), amax, encode }
}

/// Computes `min(value, FLT_MAX)`, but keeps NaN.
pub(super) fn saturate<B: Backend>(values: &Floats<B>) -> Floats<B> {
    values.or_where(values.above(f32::MAX), f32::MAX)
}
