//! The product of quantized operands.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use burn_fp4_search::host::DequantTarget;
use burn_fp4_search::{Fp4Scheme, TensorScaling};

use super::recipe::TrainRecipe;
use crate::saturated::Saturated;

/// A device's functions that quantize an operand.
pub(crate) struct Quantizer<B: Backend> {
    /// Its [`fp4_amax`](crate::Fp4Backend::fp4_amax).
    pub(crate) amax: Amax<B>,
    /// Its [`fp4_fake_quantize`](crate::Fp4Backend::fp4_fake_quantize).
    pub(crate) fake_quantize: FakeQuantize<B>,
}

type Amax<B> = fn(FloatTensor<B>, usize, bool) -> FloatTensor<B>;
type FakeQuantize<B> = fn(
    FloatTensor<B>,
    FloatTensor<B>,
    usize,
    Fp4Scheme,
    DequantTarget,
    Saturated,
) -> FloatTensor<B>;

/// Computes `x w`.
pub(crate) fn forward<B: Backend>(
    input: FloatTensor<B>,
    weight: FloatTensor<B>,
    recipe: &TrainRecipe,
    quantizer: &Quantizer<B>,
) -> FloatTensor<B> {
    let dtype = input.dtype();
    let input = Factor::new(input, 1, recipe.activations, quantizer);
    product(input, Factor::new(weight, 0, recipe.weights, quantizer), dtype)
}

/// An operand of a product.
pub(super) struct Factor<B: Backend> {
    /// Values in f32; of a quantized operand `element x block scale`.
    pub(super) values: FloatTensor<B>,
    /// Numerator, f32 `[1]`, and denominator of the factor of the product.
    pub(super) tensor_scale: Option<(FloatTensor<B>, f32)>,
    /// Divides the contracted axis.
    pub(super) block_size: usize,
}

impl<B: Backend> Factor<B> {
    /// Quantizes values along an axis, if there is a scheme.
    pub(super) fn new(
        values: FloatTensor<B>,
        axis: usize,
        scheme: Option<Fp4Scheme>,
        quantizer: &Quantizer<B>,
    ) -> Self {
        let f32 = |values| B::float_cast(values, FloatDType::F32);
        let Some(scheme) = scheme else {
            return Self { values: f32(values), tensor_scale: None, block_size: 1 };
        };
        // f16 does not hold the scales of MXFP4.
        let values = if values.dtype() == DType::F16 { f32(values) } else { values };
        let device = values.device();
        let one =
            |value: f32| B::float_full(Shape::new([1]), value.into(), &device, FloatDType::F32);
        let (amax, tensor_scale) = match scheme.tensor_scale {
            _ if !scheme.rule.row().tensor_scale => (one(1.0), None),
            TensorScaling::Multiplier(scale) => (one(1.0), Some((one(scale), 1.0))),
            given => {
                let amax = match given {
                    TensorScaling::Amax(amax) => one(amax),
                    _ => (quantizer.amax)(values.clone(), axis, false),
                };
                (amax.clone(), Some((amax, scheme.largest_code_product())))
            }
        };
        let values = pad::<B>(values, axis, scheme.block_size);
        let (target, saturated) = (DequantTarget::WithoutTensorScale, Saturated::PassThrough);
        let values = (quantizer.fake_quantize)(values, amax, axis, scheme, target, saturated);
        Self { values: f32(values), tensor_scale, block_size: scheme.block_size }
    }
}

/// Multiplies `[M, K]` by `[K, N]`, rounded once to a dtype.
pub(super) fn product<B: Backend>(
    left: Factor<B>,
    right: Factor<B>,
    dtype: DType,
) -> FloatTensor<B> {
    let block_size = left.block_size.max(right.block_size);
    let (left_values, right_values) =
        (pad::<B>(left.values, 1, block_size), pad::<B>(right.values, 0, block_size));
    let mut output = B::float_matmul(left_values, right_values);
    let scale = match (left.tensor_scale, right.tensor_scale) {
        (Some((a, m)), Some((b, n))) => Some((B::float_mul(a, b), m * n)),
        (one, other) => one.or(other),
    };
    if let Some((numerator, denominator)) = scale {
        let scale = B::float_div_scalar(numerator, denominator.into());
        output = B::float_mul(output, B::float_reshape(scale, Shape::new([1, 1])));
    }
    B::float_cast(output, dtype.into())
}

/// Pads an axis of a matrix with zeros to a multiple of a length.
pub(super) fn pad<B: Backend>(
    values: FloatTensor<B>,
    axis: usize,
    multiple: usize,
) -> FloatTensor<B> {
    let mut shape = values.shape();
    let missing = shape[axis].next_multiple_of(multiple) - shape[axis];
    if missing == 0 {
        return values;
    }
    shape[axis] = missing;
    let zeros = B::float_zeros(shape, &values.device(), values.dtype().into());
    B::float_cat(vec![values, zeros], axis)
}
