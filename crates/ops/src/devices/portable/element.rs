//! Elements: division by the scale of their block, and rounding to E2M1.

use burn::backend::Backend;
use burn_fp4_search::formats::{E2M1, E2M1_VALUES};
use burn_fp4_search::{Fp4Scheme, Normalization, ScaleRule, TensorFactor};

use super::floats::Floats;
use super::tensor_scale::{TensorFactors, saturate};

/// Divides elements by their scale, `[rows, blocks, block_size]`.
pub(super) fn normalize<B: Backend>(
    values: &Floats<B>,
    codes: &Floats<B>,
    scales: &Floats<B>,
    factors: &TensorFactors<B>,
    scheme: &Fp4Scheme,
) -> Floats<B> {
    let [rows, blocks] = scales.shape()[..] else { unreachable!("scales are a matrix") };
    let each = |per_block: &Floats<B>| per_block.reshape(&[rows, blocks, 1]);
    match scheme.rule.row().normalization {
        Normalization::Reciprocal => {
            let one = Floats::filled(1.0, scales);
            values.mul(&each(&saturate(&one.div(&scales.mul(&factors.decode)))))
        }
        Normalization::EncodeOverScale => {
            let smallest = ScaleRule::SMALLEST_DIVISOR;
            let scales = scales.or_where(scales.below(smallest), smallest);
            values.mul(&each(&Floats::filled(1.0, &scales).mul(&factors.encode).div(&scales)))
        }
        Normalization::Division => values.div(&each(scales)),
        Normalization::PowerReciprocal | Normalization::PowerReciprocalOrOne => {
            let multiplier = |code| scheme.rule.multiplier(code, TensorFactor::ONE);
            let table: Vec<_> = (0..=255).map(multiplier).collect();
            values.mul(&each(&codes.look_up(&table)))
        }
    }
}

/// Rounds normalized elements to the nearest E2M1 codes.
pub(super) fn round_to_e2m1<B: Backend>(normalized: &Floats<B>, scheme: &Fp4Scheme) -> Floats<B> {
    let magnitude = normalized.abs();
    let beyond_midpoint = |code: usize| {
        let midpoint = (E2M1_VALUES[code] + E2M1_VALUES[code + 1]) / 2.0;
        // A tie goes to the even code.
        let up = (code + 1).is_multiple_of(2);
        if up { magnitude.at_least(midpoint) } else { magnitude.above(midpoint) }.as_float()
    };
    let codes = (1..usize::from(E2M1.max_code()))
        .fold(beyond_midpoint(0), |codes, code| codes.add(&beyond_midpoint(code)));
    let mut negative = normalized.below(0.0).as_float();
    if scheme.rule.row().keeps_negative_zero {
        // 1 / -0 is -infinity.
        let reciprocal = Floats::constant(1.0, normalized).div(normalized);
        let negative_zero = reciprocal.below(f32::MIN).as_float();
        negative = negative.add(&negative_zero);
    }
    codes.add(&negative.above(0.0).as_float().times(8.0))
}
