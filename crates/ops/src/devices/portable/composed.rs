//! Operations composed of the device's own ones.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;
use burn_fp4_search::{GramLayout, Hadamard};

use super::{dequantize, gram};
use crate::devices::extension::Fp4Backend;
use crate::layout::{Fp4Layout, Fp4Primitive};

/// [`Fp4Backend::fp4_matmul`] of the dense weight.
pub fn matmul<B: Fp4Backend>(
    input: FloatTensor<B>,
    weight: Fp4Primitive<B>,
    layout: Fp4Layout,
) -> FloatTensor<B> {
    let dtype = FloatDType::from(input.dtype());
    B::float_matmul(input, B::fp4_dequantize(weight, layout, dtype))
}

/// [`Fp4Backend::fp4_dequantize`] of codes of transformed values: transformed back in f32, and
/// rounded once.
pub fn dequantize_transformed<B: Fp4Backend>(
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
    hadamard: Hadamard,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let axis = layout.axis;
    let values = B::fp4_dequantize(packed, layout.of_codes(), FloatDType::F32);
    B::float_cast(B::fp4_hadamard(values, axis, hadamard, true), dtype)
}

/// Transforms the input `[M, K]` of a product as the values of its weight were.
pub fn transformed_input<B: Fp4Backend>(
    input: FloatTensor<B>,
    layout: &Fp4Layout,
) -> FloatTensor<B> {
    match layout.hadamard {
        Some(hadamard) => B::fp4_hadamard(input, 1, hadamard, false),
        None => input,
    }
}

/// [`Fp4Backend::fp4_squared_error`] with the sums of the device.
pub fn squared_error<B: Fp4Backend>(
    values: FloatTensor<B>,
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
) -> FloatTensor<B> {
    let dense = B::fp4_dequantize(packed, layout, FloatDType::F32);
    dequantize::squared_error::<B>(values, dense, B::fp4_deterministic_sum)
}

/// [`Fp4Backend::fp4_add_gram`] with the products of the device.
pub fn add_gram<B: Fp4Backend>(
    sums: FloatTensor<B>,
    activations: FloatTensor<B>,
    layout: GramLayout,
    first: usize,
) -> FloatTensor<B> {
    gram::add_gram::<B>(sums, activations, layout, first, B::fp4_deterministic_matmul)
}
