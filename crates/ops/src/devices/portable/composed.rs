//! What is composed of operations that a device may have code of its own for.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::FloatDType;
use burn_fp4_search::GramLayout;

use super::{dequantize, gram};
use crate::devices::extension::Fp4Backend;
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

/// See [`Fp4Backend::fp4_matmul`]. The product is the device's own, of the dense weight.
pub fn matmul<B: Fp4Backend>(
    input: FloatTensor<B>,
    weight: Fp4Primitive<B>,
    layout: Fp4Layout,
) -> FloatTensor<B> {
    let dtype = FloatDType::from(input.dtype());
    B::float_matmul(input, B::fp4_dequantize(weight, layout, dtype))
}

/// See [`Fp4Backend::fp4_squared_error`].
pub fn squared_error<B: Fp4Backend>(
    values: FloatTensor<B>,
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
) -> FloatTensor<B> {
    dequantize::squared_error::<B>(values, packed, layout, B::fp4_untuned_sum)
}

/// See [`Fp4Backend::fp4_add_gram`].
pub fn add_gram<B: Fp4Backend>(
    sums: FloatTensor<B>,
    activations: FloatTensor<B>,
    layout: GramLayout,
    first: usize,
) -> FloatTensor<B> {
    gram::add_gram::<B>(sums, activations, layout, first, B::fp4_untuned_matmul)
}
