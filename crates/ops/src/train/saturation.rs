//! Gradients of fake quantization that depend on the elements beyond the largest code.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{TensorMetadata, get_or_init_device_settings};
use burn::tensor::FloatDType;
use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::host::DequantTarget;

use crate::devices::extension::Fp4Backend;
use crate::layout::Fp4Layout;
use crate::saturated::Saturated;

/// Marks elements with a magnitude above 6 times the scale of their block.
pub(crate) fn beyond<B: Fp4Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> BoolTensor<B> {
    let layout = Fp4Layout::new(&values.shape(), axis, &scheme).expect("callers check it");
    let packed = B::fp4_quantize(values.clone(), amax, axis, scheme);
    let largest = B::fp4_largest(packed, layout);
    let magnitudes = B::float_abs(B::float_cast(values, FloatDType::F32));
    let dtype = get_or_init_device_settings::<B>(&magnitudes.device()).bool_dtype;
    B::float_greater(magnitudes, largest, dtype)
}

/// Computes the gradient of the amax of a tensor scale, as in Esser et al., "Learned step size
/// quantization", ICLR 2020. Codes and block scales stay, and the rounding error of an element that
/// does not saturate moves with the element.
pub(crate) fn amax_gradient<B: Fp4Backend>(
    grad: FloatTensor<B>,
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> FloatTensor<B> {
    let (target, saturated) = (DequantTarget::Full, Saturated::PassThrough);
    let f32 = |tensor| B::float_cast(tensor, FloatDType::F32);
    let values = f32(values);
    let quantized =
        B::fp4_fake_quantize(values.clone(), amax.clone(), axis, scheme, target, saturated);
    let beyond = beyond::<B>(values.clone(), amax.clone(), axis, scheme);
    let moved = B::float_sub(quantized, B::float_mask_fill(values, beyond, 0f32.into()));
    B::float_div(B::float_sum(B::float_mul(f32(grad), moved)), amax)
}
