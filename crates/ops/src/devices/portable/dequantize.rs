//! Dequantization by tensor operations, and squared errors.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{DType, FloatDType, Shape, bf16, f16};
use burn_fp4_search::formats::{E2M1, E2M1_VALUES, Fp4Format};
use burn_fp4_search::host::{HostElement, INT8_BLOCK};
use burn_fp4_search::squares::{MagnitudeRange, RANGES, SUMS};

use super::bits::from_bits;
use super::floats::{Floats, from_rows, rows};
use super::scale_grid::values;
use crate::layout::{Fp4Layout, Fp4Primitive};

/// [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize) by tensor operations.
pub fn dequantize<B: Backend>(
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let [rows, half_cols] = layout.codes_shape();
    let [_, blocks] = layout.scales_shape();
    let int = get_or_init_device_settings::<B>(&packed.codes.device()).int_dtype;
    let bytes = B::int_cast(packed.codes, int);
    let low = B::bitwise_and_scalar(bytes.clone(), 15i64.into());
    let high = B::bitwise_right_shift_scalar(bytes, 4i64.into());
    let column = |codes| B::int_reshape(codes, Shape::from(vec![rows, half_cols, 1]));
    let codes = B::int_cat(vec![column(low), column(high)], 2);
    let codes = Floats::<B>(B::int_into_float(codes, FloatDType::F32));
    let elements = codes.look_up(&E2M1_VALUES).reshape(&[rows, blocks, layout.block_size]);
    let scales = Floats::<B>(B::int_into_float(B::int_cast(packed.scales, int), FloatDType::F32));
    let rows = restore(&elements, &scales, &from_bits(packed.tensor_scale), layout.format);
    from_rows(rows, &layout.shape, layout.axis, dtype)
}

/// Two elements of 6 in a byte.
pub(crate) const SIXES: u8 = E2M1.max_code() * 0x11;

/// [`fp4_dequantize_int8`](crate::Fp4Backend::fp4_dequantize_int8) by tensor operations.
pub(crate) fn dequantize_int8<B: Backend>(
    codes: IntTensor<B>,
    scales: FloatTensor<B>,
) -> FloatTensor<B> {
    let (shape, [rows, blocks]) = (codes.shape(), scales.shape().dims());
    let codes = Floats::<B>(B::int_into_float(codes, FloatDType::F32));
    let scales = Floats::<B>(scales).reshape(&[rows, blocks, 1]);
    codes.reshape(&[rows, blocks, INT8_BLOCK]).mul(&scales).reshape(&shape).0
}

/// [`fp4_select_rows`](crate::Fp4Backend::fp4_select_rows) by tensor operations.
pub fn select_rows<B: Backend>(packed: Fp4Primitive<B>, rows: IntTensor<B>) -> Fp4Primitive<B> {
    let by_row = packed.tensor_scale.shape().num_elements() > 1;
    Fp4Primitive {
        codes: B::int_select(packed.codes, 0, rows.clone()),
        scales: B::int_select(packed.scales, 0, rows.clone()),
        tensor_scale: match by_row {
            true => B::int_select(packed.tensor_scale, 0, rows),
            false => packed.tensor_scale,
        },
    }
}

/// Computes `(element x block scale) x tensor scale`, `[rows, cols]`.
pub(super) fn restore<B: Backend>(
    elements: &Floats<B>,
    scales: &Floats<B>,
    tensor_scale: &Floats<B>,
    format: Fp4Format,
) -> Floats<B> {
    let [rows, blocks, block_size] = elements.shape()[..] else { unreachable!("blocks") };
    let scales = scales.look_up(&values(format)).reshape(&[rows, blocks, 1]);
    let tensor_scale = tensor_scale.reshape(&[tensor_scale.shape()[0], 1, 1]);
    elements.mul(&scales).mul(&tensor_scale).reshape(&[rows, blocks * block_size])
}

/// Computes [`fp4_squared_error`](crate::Fp4Backend::fp4_squared_error) of dequantized values in
/// f32, with the device's
/// [`fp4_deterministic_sum`](crate::Fp4Backend::fp4_deterministic_sum), so that reports are the
/// same in every run.
pub(crate) fn squared_error<B: Backend>(
    values: FloatTensor<B>,
    dense: FloatTensor<B>,
    sum_dim: fn(FloatTensor<B>, usize, bool) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let overflow = match values.dtype() {
        DType::F16 => f16::OVERFLOW,
        DType::BF16 => bf16::OVERFLOW,
        _ => f32::OVERFLOW,
    };
    let last = values.shape().num_dims() - 1;
    let [values, dense] = [values, dense].map(|values| rows::<B>(values, last));
    let dense = dense.or_where(dense.abs().at_least(overflow), f32::INFINITY);
    let sum = |terms: Floats<B>| {
        let of_rows = sum_dim(terms.0, 1, false);
        B::float_reshape(sum_dim(of_rows, 0, false), Shape::from(vec![1]))
    };
    let mut sums = Vec::with_capacity(SUMS);
    for terms in [dense.sub(&values), values] {
        let (magnitudes, mut start) = (terms.abs(), 0.0);
        for MagnitudeRange { end, factor } in RANGES {
            let mut within = terms.or_where(magnitudes.below(start), 0.0);
            if end.is_finite() {
                within = within.or_where(magnitudes.at_least(end), 0.0);
            }
            let scaled = within.times(factor);
            sums.push(sum(scaled.mul(&scaled)));
            start = end;
        }
    }
    B::float_cat(sums, 0)
}
