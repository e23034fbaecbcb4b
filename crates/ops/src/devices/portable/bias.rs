//! The addition of a bias to a product.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::Shape;

/// Adds a bias `[N]` to a product `[M, N]`.
pub(crate) fn add_bias<B: Backend>(
    product: FloatTensor<B>,
    bias: FloatTensor<B>,
) -> FloatTensor<B> {
    let outputs = bias.shape().num_elements();
    B::float_add(product, B::float_reshape(bias, Shape::new([1, outputs])))
}
