//! Bits of f32 values in i32, and back, by arithmetic.

use burn::backend::Backend;
use burn::backend::tensor::IntTensor;
use burn::tensor::{FloatDType, IntDType};
use burn_fp4_search::formats::power_of_two;

use super::floats::Floats;

/// Converts non-negative f32 values to their bits in i32.
pub(super) fn bits<B: Backend>(values: &Floats<B>) -> IntTensor<B> {
    let nans = values.is_nan();
    let values = values.or_where(values.is_nan(), 0.0);
    // The exponent field, and the significand scaled to an integer of 24 bits, both exact.
    let mut significand = values.or_from(values.below(1.0), &values.times(power_of_two(126)));
    let mut field = values.at_least(1.0).as_float().times(126.0).plus(1.0);
    let normal = significand.at_least(1.0).as_float();
    for bits in [64, 32, 16, 8, 4, 2, 1] {
        let power = power_of_two(bits);
        field = field.add(&significand.at_least(power).as_float().times(bits as f32));
        let divided = significand.div_by(power);
        significand = significand.or_from(significand.at_least(power), &divided);
    }
    let exponent = field.mul(&normal).to_int(IntDType::I32);
    let mantissa = significand.sub(&normal).times(power_of_two(23)).to_int(IntDType::I32);
    let bits = B::int_add(B::int_mul_scalar(exponent, (1i64 << 23).into()), mantissa);
    B::int_mask_fill(bits, nans.0, i64::from(f32::NAN.to_bits()).into())
}

/// Converts bits in i32 to non-negative f32 values.
pub(super) fn from_bits<B: Backend>(bits: IntTensor<B>) -> Floats<B> {
    let field = B::bitwise_right_shift_scalar(bits.clone(), 23i64.into());
    let mantissa = B::bitwise_and_scalar(bits, i64::from((1 << 23) - 1).into());
    let float = |ints| Floats::<B>(B::int_into_float(ints, FloatDType::F32));
    let (field, mantissa) = (float(field), float(mantissa));
    let significand = mantissa.add(&field.above(0.0).as_float().times(power_of_two(23)));
    // 2^(field - 150), and 2^-149 for subnormals; the product is the value, exactly.
    let powers: Vec<_> = (0..=255i32)
        .map(|field| if field == 255 { f32::NAN } else { power_of_two(field.max(1) - 150) })
        .collect();
    significand.mul(&field.look_up(&powers))
}
