//! Element codes: f32 -> E2M1 and back, on bits.

use cubecl::prelude::*;

/// The E2M1 code nearest to an f32, ties to even; NaN gives 0. The sign bit is kept.
#[cube]
pub(crate) fn round_to_e2m1(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let magnitude = f32::reinterpret(bits & 0x7FFF_FFFFu32);
    let mut code = u32::cast_from(magnitude > 0.25f32);
    code += u32::cast_from(magnitude >= 0.75f32);
    code += u32::cast_from(magnitude > 1.25f32);
    code += u32::cast_from(magnitude >= 1.75f32);
    code += u32::cast_from(magnitude > 2.5f32);
    code += u32::cast_from(magnitude >= 3.5f32);
    code += u32::cast_from(magnitude > 5.0f32);
    let is_nan = (bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
    select(is_nan, 0u32, code | ((bits >> 28u32) & 8u32))
}

/// The value of an E2M1 code.
#[cube]
pub(crate) fn element_value(code: u32) -> f32 {
    let magnitude = code & 7u32;
    // From 1.0 on a code is the exponent and mantissa bits of an f32; 0 and 0.5 are not.
    let normal = (magnitude << 22u32) + 0x3F00_0000u32;
    let small = (magnitude & 1u32) * 0x3F00_0000u32;
    let bits = select(magnitude > 1u32, normal, small);
    f32::reinterpret(bits | ((code & 8u32) << 28u32))
}
