//! Block scales: amax -> code, code -> value, and what elements are multiplied with.

use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Fp4Scheme, Rounding, ScaleRule, ScaleSearch, TensorScaling};
use cubecl::prelude::*;

/// The choices of a scheme that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Method {
    pub(crate) rule: ScaleRule,
    pub(crate) search: ScaleSearch,
    /// Whether codes are drawn.
    pub(crate) stochastic: bool,
    pub(crate) block_size: u32,
    /// Whether errors have a weight per input channel.
    pub(crate) weighted: bool,
    /// Whether the tensor scale is given.
    pub(crate) given: bool,
    /// Whether there is one per packed row.
    pub(crate) by_row: bool,
}

impl Method {
    /// Whether scales are E4M3.
    pub(crate) fn is_nvfp4(&self) -> bool {
        self.rule.row().format == Fp4Format::NvFp4
    }

    /// Whether elements are divided by their factor.
    pub(crate) fn divides(&self) -> bool {
        self.rule == ScaleRule::NoTensorScale
    }

    pub(crate) fn of(scheme: &Fp4Scheme, weighted: bool) -> Self {
        let has_tensor_scale = scheme.rule.row().tensor_scale;
        Self {
            rule: scheme.rule,
            search: scheme.search,
            stochastic: scheme.rounding != Rounding::Nearest,
            block_size: scheme.block_size as u32,
            weighted,
            given: matches!(scheme.tensor_scale, TensorScaling::Multiplier(_)),
            by_row: has_tensor_scale && scheme.tensor_scale == TensorScaling::Row,
        }
    }
}

/// A block scale: its code, and what the elements of the block are multiplied with or divided by.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BlockScale {
    pub(crate) code: u32,
    pub(crate) factor: f32,
}

/// The code of the E4M3 value nearest to a non-negative f32, ties to even, 448 at most, NaN kept.
#[cube]
pub(crate) fn round_to_e4m3(exact: f32) -> u32 {
    let is_nan = u32::reinterpret(exact) > 0x7F80_0000u32;
    let clamped = select(exact > 448.0f32, 448.0f32, exact);
    let bits = u32::reinterpret(clamped);
    let rounded = bits + 0x7_FFFFu32 + ((bits >> 20u32) & 1u32);
    let normal = (rounded >> 20u32) - 960u32;
    // Adding 2^14 leaves an ulp of 2^-9, the step of the subnormal codes.
    let shifted = clamped + 16384.0f32;
    let subnormal = u32::reinterpret(shifted) - 0x4680_0000u32;
    let code = select(clamped < 0.015625f32, subnormal, normal);
    select(is_nan, 0x7Fu32, code)
}

/// The largest E4M3 code whose value is at most that of a non-negative f32.
#[cube]
pub(crate) fn round_down_to_e4m3(value: f32) -> u32 {
    let normal = (u32::reinterpret(value) >> 20u32) - 960u32;
    let subnormal = u32::cast_from(min(value, 1.0f32) * 512.0f32);
    min(select(value < 0.015625f32, subnormal, normal), 126u32)
}

/// The value of a non-negative E4M3 code.
#[cube]
fn e4m3_value(code: u32) -> f32 {
    let magnitude = code & 0x7Fu32;
    // Exponent and mantissa bits make an f32 that is 2^120 too small, subnormals included.
    let value = f32::reinterpret(magnitude << 20u32) * f32::reinterpret(0x7B80_0000u32);
    select(magnitude == 0x7Fu32, f32::reinterpret(0x7FC0_0000u32), value)
}

/// The value of an E8M0 code.
#[cube]
fn e8m0_value(code: u32) -> f32 {
    let bits = select(code == 0u32, 0x0040_0000u32, code << 23u32);
    f32::reinterpret(select(code == 0xFFu32, 0x7FC0_0000u32, bits))
}

/// The value of a scale code.
#[cube]
pub(crate) fn scale_value(code: u32, #[comptime] format: Fp4Format) -> f32 {
    if comptime!(format == Fp4Format::NvFp4) { e4m3_value(code) } else { e8m0_value(code) }
}

/// `min(value, FLT_MAX)` that keeps NaN.
#[cube]
fn saturate(value: f32) -> f32 {
    let largest = f32::reinterpret(0x7F7F_FFFFu32);
    select(value > largest, largest, value)
}

/// The tensor scale, see [`TensorFactor`](burn_fp4_search::TensorFactor).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TensorFactor {
    pub(crate) amax: f32,
    pub(crate) encode: f32,
    pub(crate) decode: f32,
}

/// Where the tensor scale comes from, and what stays the same for every block.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Factors {
    /// Largest element times largest block scale.
    pub(crate) range: f32,
    /// The tensor scale if it is given.
    pub(crate) amax: f32,
    pub(crate) encode: f32,
    pub(crate) decode: f32,
    /// 1, which the compiler does not know: multiplied by it, a product is rounded before it is added.
    pub(crate) one: f32,
}

/// The tensor scale of a packed row.
#[cube]
pub(crate) fn tensor_factor(
    amax: &[f32],
    row: u32,
    factors: &Factors,
    #[comptime] method: Method,
) -> TensorFactor {
    let rule = comptime!(method.rule);
    if comptime!(method.given) {
        TensorFactor { amax: factors.amax, encode: factors.encode, decode: factors.decode }
    } else if comptime!(!rule.row().tensor_scale) {
        let one = 1.0f32.runtime();
        TensorFactor { amax: one, encode: one, decode: one }
    } else {
        let at = if comptime!(method.by_row) { row } else { 0u32.runtime() };
        let amax = amax[at as usize];
        let range = factors.range;
        let encode =
            if comptime!(rule == ScaleRule::Gist) { range * (1.0f32 / amax) } else { range / amax };
        let encode = select(encode == 0.0f32, 1.0f32, saturate(encode));
        TensorFactor { amax, encode, decode: 1.0f32 / encode }
    }
}

/// TransformerEngine's scale, given what is rounded to E4M3.
#[cube]
pub(crate) fn te_scale(exact: f32, tensor: &TensorFactor) -> BlockScale {
    let code = round_to_e4m3(exact);
    BlockScale { code, factor: saturate(1.0f32 / (e4m3_value(code) * tensor.decode)) }
}

/// What elements are multiplied with, or divided by, given a scale that is not NaN and its value.
#[cube]
pub(crate) fn factor_of(
    code: u32,
    value: f32,
    tensor: &TensorFactor,
    #[comptime] rule: ScaleRule,
) -> f32 {
    if comptime!(matches!(rule, ScaleRule::Te | ScaleRule::TeDivision)) {
        saturate(1.0f32 / (value * tensor.decode))
    } else if comptime!(rule == ScaleRule::Gist) {
        tensor.encode / select(value < 1e-12f32, 1e-12f32, value)
    } else if comptime!(rule == ScaleRule::NoTensorScale) {
        value
    } else {
        power_of_two_factor(code, rule)
    }
}

/// 2^(127 - code); see `ScaleRule::multiplier` for code 0.
#[cube]
fn power_of_two_factor(code: u32, #[comptime] rule: ScaleRule) -> f32 {
    let at_least_one = select(code == 0u32, 1u32, code);
    let bits = select(at_least_one == 254u32, 0x0040_0000u32, (254u32 - at_least_one) << 23u32);
    let bits = select(code == 0xFFu32, 0x7FC0_0000u32, bits);
    let factor = f32::reinterpret(bits);
    if comptime!(rule == ScaleRule::RoundUp) {
        select(code == 0u32, 1.0f32, factor)
    } else {
        factor
    }
}

/// The scale of a block with this amax.
#[cube]
pub(crate) fn block_scale(
    amax: f32,
    tensor: &TensorFactor,
    #[comptime] rule: ScaleRule,
) -> BlockScale {
    let encode = tensor.encode;
    if comptime!(rule == ScaleRule::Te) {
        te_scale(amax * (encode * f32::reinterpret(0x3E2A_AAABu32)), tensor)
    } else if comptime!(rule == ScaleRule::TeDivision) {
        te_scale((amax / 6.0f32) * encode, tensor)
    } else if comptime!(rule == ScaleRule::Gist) {
        let code = round_to_e4m3((amax / 6.0f32) * encode);
        BlockScale { code, factor: factor_of(code, e4m3_value(code), tensor, rule) }
    } else if comptime!(rule == ScaleRule::NoTensorScale) {
        let exact = amax / 6.0f32;
        let code = round_to_e4m3(select(exact < 1e-12f32, 1e-12f32, exact));
        BlockScale { code, factor: e4m3_value(code) }
    } else {
        let code = power_of_two_scale(amax, rule);
        let factor = power_of_two_factor(code, rule);
        BlockScale { code, factor }
    }
}

#[cube]
fn power_of_two_scale(amax: f32, #[comptime] rule: ScaleRule) -> u32 {
    let bits = u32::reinterpret(amax);
    let code = if comptime!(rule == ScaleRule::RoundUp) {
        let sixth = u32::reinterpret(amax * f32::reinterpret(0x3E2A_AAABu32));
        let exponent = sixth >> 23u32;
        let mantissa = sixth & 0x7F_FFFFu32;
        let above = select(exponent == 0u32, 0x40_0000u32, 0u32);
        exponent + u32::cast_from(mantissa > above)
    } else {
        let exponent = if comptime!(rule == ScaleRule::Even) {
            (bits + 0x20_0000u32) >> 23u32
        } else if comptime!(rule == ScaleRule::Ceil) {
            (bits >> 23u32) + u32::cast_from((bits & 0x7F_FFFFu32) != 0u32)
        } else {
            bits >> 23u32
        };
        select(exponent < 2u32, 0u32, exponent - 2u32)
    };
    let code = select(code > 254u32, 254u32, code);
    select(bits >= 0x7F80_0000u32, 0xFFu32, code)
}
