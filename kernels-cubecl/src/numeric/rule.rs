//! Scale rules: the block scale of an amax, and the factor of the elements.

use burn_fp4_search::formats::Minifloat;
use burn_fp4_search::scale_grid::{self, ELEMENT_BINADE};
use burn_fp4_search::{
    Normalization, PowerRounding, ScaleForm, ScaleRule, TensorFactor as HostTensorFactor,
    TensorScaling,
};
use cubecl::prelude::*;

use super::scale_grid::{MANTISSA, float_value, power_code, power_reciprocal, round_to_float};
use crate::plan::{Blueprint, Problem};

/// One sixth in f32, as bits.
const SIXTH: u32 = scale_grid::SIXTH.to_bits();

/// Smallest divisor of the torch recipe and of qwantize.
const SMALLEST: f32 = ScaleRule::SMALLEST_DIVISOR;

/// Mantissa field of an f32, its highest bit, and the next bit.
const FRACTION: u32 = (1 << MANTISSA) - 1;
const HALF: u32 = 1 << (MANTISSA - 1);
const QUARTER: u32 = 1 << (MANTISSA - 2);

/// Returns the number format of a rule's block scales.
pub(crate) const fn row_of(rule: ScaleRule) -> Minifloat {
    rule.row().format.row().block_scale
}

/// A block scale: its code, and the factor that multiplies or divides the elements of the block.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BlockScale {
    pub(crate) code: u32,
    pub(crate) factor: f32,
}

/// Scales of one block of each row of a thread tile.
#[derive(CubeType)]
pub(crate) struct BlockScales {
    pub(crate) codes: Array<u32>,
    pub(crate) factors: Array<f32>,
}

/// Returns `min(value, FLT_MAX)`, but keeps NaN.
#[cube]
pub(crate) fn saturate(value: f32) -> f32 {
    let largest = f32::reinterpret(0x7F7F_FFFFu32);
    select(value > largest, largest, value)
}

/// The tensor scale; see [`TensorFactor`](burn_fp4_search::TensorFactor).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TensorFactor {
    pub(crate) amax: f32,
    pub(crate) encode: f32,
    pub(crate) decode: f32,
}

/// Arguments from which a kernel computes the tensor scale.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct TensorScaleArgs {
    /// Largest element times largest block scale.
    pub(crate) range: f32,
    /// The tensor scale, if the scheme fixes it: this and the next two fields.
    pub(crate) amax: f32,
    pub(crate) encode: f32,
    pub(crate) decode: f32,
    /// 1, unknown to the compiler: a product times this is rounded before an addition instead of
    /// being fused with it.
    pub(crate) one: f32,
}

pub(crate) fn tensor_scale_args(problem: &Problem) -> TensorScaleArgsLaunch {
    let scheme = &problem.scheme;
    // A fixed multiplier needs no amax: the one in device memory is not read.
    let given = match scheme.tensor_scale {
        TensorScaling::Multiplier(_) => HostTensorFactor::new(scheme, f32::NAN),
        _ => HostTensorFactor::ONE,
    };
    let range = scheme.largest_code_product();
    TensorScaleArgsLaunch::new(range, given.amax, given.encode, given.decode, 1.0)
}

/// Returns the tensor scale of a packed row.
#[cube]
pub(crate) fn tensor_factor(
    amax: &[f32],
    row: u32,
    scale_args: &TensorScaleArgs,
    #[comptime] blueprint: Blueprint,
) -> TensorFactor {
    let rule = comptime!(blueprint.rule);
    if comptime!(blueprint.given) {
        TensorFactor { amax: scale_args.amax, encode: scale_args.encode, decode: scale_args.decode }
    } else if comptime!(!rule.row().tensor_scale) {
        let one = 1.0f32.runtime();
        TensorFactor { amax: one, encode: one, decode: one }
    } else {
        let at = if comptime!(blueprint.by_row) { row } else { 0u32.runtime() };
        let amax = amax[at as usize];
        let range = scale_args.range;
        let encode =
            if comptime!(rule.row().inverts_amax) { range * (1.0f32 / amax) } else { range / amax };
        let encode = select(encode == 0.0f32, 1.0f32, saturate(encode));
        TensorFactor { amax, encode, decode: 1.0f32 / encode }
    }
}

/// Returns the scale of a float grid that is nearest to an exact value.
#[cube]
pub(crate) fn nearest_scale(
    exact: f32,
    tensor: &TensorFactor,
    #[comptime] rule: ScaleRule,
) -> BlockScale {
    let row = comptime!(row_of(rule));
    let code = round_to_float(exact, row);
    BlockScale { code, factor: factor_of(code, float_value(code, row), tensor, rule) }
}

/// Returns the factor that multiplies or divides the elements, given a scale that is not NaN and
/// its value.
#[cube]
pub(crate) fn factor_of(
    code: u32,
    value: f32,
    tensor: &TensorFactor,
    #[comptime] rule: ScaleRule,
) -> f32 {
    match comptime!(rule.row().normalization) {
        Normalization::Reciprocal => saturate(1.0f32 / (value * tensor.decode)),
        Normalization::EncodeOverScale => tensor.encode / select(value < SMALLEST, SMALLEST, value),
        Normalization::Division => value,
        Normalization::PowerReciprocal => power_of_two_factor(code, rule),
        Normalization::PowerReciprocalOrOne => {
            select(code == 0u32, 1.0f32, power_of_two_factor(code, rule))
        }
    }
}

/// Returns the reciprocal of a power of two. Code 0 takes that of code 1: the reciprocal of 2^-127
/// is subnormal, which not every device keeps.
#[cube]
fn power_of_two_factor(code: u32, #[comptime] rule: ScaleRule) -> f32 {
    power_reciprocal(select(code == 0u32, 1u32, code), comptime!(row_of(rule)))
}

/// Returns the scale of a block with this amax.
#[cube]
pub(crate) fn block_scale(
    amax: f32,
    tensor: &TensorFactor,
    #[comptime] rule: ScaleRule,
) -> BlockScale {
    let encode = tensor.encode;
    match comptime!(rule.row().scale) {
        ScaleForm::TimesSixth => {
            nearest_scale(amax * (encode * f32::reinterpret(SIXTH)), tensor, rule)
        }
        ScaleForm::DividedBySix => nearest_scale((amax / 6.0f32) * encode, tensor, rule),
        ScaleForm::WithoutTensorScale => {
            let exact = amax / 6.0f32;
            nearest_scale(select(exact < SMALLEST, SMALLEST, exact), tensor, rule)
        }
        ScaleForm::PowerOfTwo(rounding) => {
            let row = comptime!(row_of(rule));
            let code = power_code(power_of_two_field(amax, rounding), amax, row);
            // Rules with powers of two compute the factor from the code and ignore the value.
            BlockScale { code, factor: factor_of(code, amax, tensor, rule) }
        }
    }
}

/// Returns the exponent field of a power-of-two scale, from the bits of amax.
#[cube]
pub(crate) fn power_of_two_field(amax: f32, #[comptime] rounding: PowerRounding) -> u32 {
    let bits = u32::reinterpret(amax);
    match comptime!(rounding) {
        PowerRounding::Floor => below_largest(bits >> MANTISSA),
        PowerRounding::Even => below_largest((bits + QUARTER) >> MANTISSA),
        PowerRounding::Ceil => {
            below_largest((bits >> MANTISSA) + u32::cast_from((bits & FRACTION) != 0u32))
        }
        PowerRounding::RoundUp => {
            let sixth = u32::reinterpret(amax * f32::reinterpret(SIXTH));
            let exponent = sixth >> MANTISSA;
            let mantissa = sixth & FRACTION;
            let above = select(exponent == 0u32, HALF, 0u32);
            exponent + u32::cast_from(mantissa > above)
        }
    }
}

/// Returns the exponent field of amax over the largest power of two among the elements.
#[cube]
fn below_largest(exponent: u32) -> u32 {
    select(exponent < ELEMENT_BINADE, 0u32, exponent - ELEMENT_BINADE)
}

/// Returns a mask for the codes of a block: all bits, or none if every code is 0. That is so if the
/// factor is NaN, or so small that elements become 0 and infinities NaN.
#[cube]
pub(crate) fn code_mask(factor: f32, #[comptime] rule: ScaleRule) -> u32 {
    let numbers = if comptime!(rule.row().normalization.divides()) {
        factor >= 0.0f32
    } else {
        factor > 0.0f32
    };
    select(numbers, 0xFFFF_FFFFu32, 0u32)
}

/// Returns the value that is rounded to a code. It is -0.0 only if the rule keeps it.
#[cube]
pub(crate) fn normalize(
    element: f32,
    factor: f32,
    scale_args: &TensorScaleArgs,
    #[comptime] rule: ScaleRule,
) -> f32 {
    let normalized = normalize_magnitude(element, factor, rule);
    if comptime!(rule.row().keeps_negative_zero) {
        normalized
    } else {
        // Adds a zero, which turns -0.0 into 0.0 and nothing else.
        fma(normalized, scale_args.one, 0.0f32)
    }
}

/// Like [`normalize`], for callers that need not preserve the sign of zero.
#[cube]
pub(crate) fn normalize_magnitude(magnitude: f32, factor: f32, #[comptime] rule: ScaleRule) -> f32 {
    let normalization = comptime!(rule.row().normalization);
    let normalized =
        if comptime!(normalization.divides()) { magnitude / factor } else { magnitude * factor };
    match comptime!(normalization) {
        // For an amax of 0, which gives zero times infinity or zero divided by zero.
        Normalization::EncodeOverScale | Normalization::Division => {
            select(normalized.is_nan(), 0.0f32, normalized)
        }
        Normalization::Reciprocal
        | Normalization::PowerReciprocal
        | Normalization::PowerReciprocalOrOne => normalized,
    }
}
