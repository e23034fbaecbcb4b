//! The product of a few rows with a dense weight.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::devices::decoder::{DecoderBackend, multiplies_rows};
use crate::matmul::product_of_nothing;

/// Multiplies an input `[.., K]` by a dense weight `[K, N]`, in either order of memory. A single
/// row on `flex` is multiplied by all threads, where Burn's product has one, with sums in f32. Up
/// to 8 rows are one kernel on devices with kernels, where Burn would tune one. Both are for input
/// and weight in one dtype.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::dense_matmul;
///
/// let device = Device::flex();
/// let weight = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &device);
/// let product = dense_matmul(Tensor::<3>::ones([1, 1, 2], &device), weight);
/// assert_eq!(product.into_data(), TensorData::from([[[4f32, 6.0]]]));
/// ```
///
/// # Panics
/// If the last axis of the input is not `K`.
#[must_use]
pub fn dense_matmul<const D: usize>(input: Tensor<D>, weight: Tensor<2>) -> Tensor<D> {
    let [channels, outputs] = weight.dims();
    let mut shape = input.dims();
    let found = core::mem::replace(&mut shape[D - 1], outputs);
    let rows: usize = shape[..D - 1].iter().product();
    if found != channels {
        return burn::tensor::module::linear(input, weight, None);
    }
    if rows == 0 || channels == 0 {
        return product_of_nothing(input, outputs);
    }
    let input = input.reshape([rows, channels]);
    let product: Tensor<2> =
        if multiplies_rows(&input.device(), [input.dtype(), weight.dtype()], rows) {
            let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
            Tensor::from_dispatch(Dispatch::decoder_gemv(input, weight))
        } else {
            // `linear` would copy a transposed weight where rows are few.
            input.matmul(weight)
        };
    product.reshape(shape)
}
