//! RMSNorm, also of a residual stream and its update.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

use crate::devices::decoder::{DecoderBackend, is_one_operation};

/// Normalizes along the last axis: `x / sqrt(mean(x^2) + epsilon) * weight`, as Burn's
/// [`RmsNorm`](burn::nn::RmsNorm). The mean and the root are f32.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::rms_norm;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::from_floats([[3.0, -3.0, 3.0, 3.0]], &device);
/// let weight = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0], &device);
/// let normalized = rms_norm(x, weight, 0.0);
/// assert_eq!(normalized.into_data(), TensorData::from([[1f32, -2.0, 3.0, 4.0]]));
/// ```
///
/// # Panics
/// If the weight does not have the length of the last axis.
#[must_use]
pub fn rms_norm<const D: usize>(input: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    assert_eq!(weight.dims(), [input.dims()[D - 1]], "RMSNorm: length of the weight");
    let dtype = input.dtype();
    let len = input.shape().num_elements();
    if is_one_operation(&input.device(), [dtype, weight.dtype()], len) {
        let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
        return Tensor::from_dispatch(Dispatch::decoder_rms_norm(input, weight, epsilon));
    }
    let rms = (input.clone().cast(DType::F32).square().mean_dim(D - 1) + epsilon).sqrt();
    (input / rms.cast(dtype)) * weight.unsqueeze()
}

/// Adds an update to a residual stream, and [normalizes](rms_norm) the sums: the sums, and the
/// normalized sums.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::add_rms_norm;
///
/// let device = Device::flex();
/// let hidden = Tensor::<2>::from_floats([[1.0, -1.0]], &device);
/// let update = Tensor::<2>::from_floats([[1.0, -1.0]], &device);
/// let weight = Tensor::<1>::from_floats([1.0, 4.0], &device);
/// let [hidden, normalized] = add_rms_norm(hidden, update, weight, 0.0);
/// assert_eq!(hidden.into_data(), TensorData::from([[2f32, -2.0]]));
/// assert_eq!(normalized.into_data(), TensorData::from([[1f32, -4.0]]));
/// ```
///
/// # Panics
/// As [`rms_norm`], and if `hidden` and `update` differ in shape.
#[must_use]
pub fn add_rms_norm<const D: usize>(
    hidden: Tensor<D>,
    update: Tensor<D>,
    weight: Tensor<1>,
    epsilon: f64,
) -> [Tensor<D>; 2] {
    assert_eq!(hidden.dims(), update.dims(), "RMSNorm: shape of the update");
    assert_eq!(weight.dims(), [hidden.dims()[D - 1]], "RMSNorm: length of the weight");
    let dtypes = [hidden.dtype(), update.dtype(), weight.dtype()];
    if is_one_operation(&hidden.device(), dtypes, hidden.shape().num_elements()) {
        let (hidden, update) = (hidden.into_dispatch(), update.into_dispatch());
        let weight = weight.into_dispatch();
        let (hidden, normalized) = Dispatch::decoder_add_rms_norm(hidden, update, weight, epsilon);
        return [hidden, normalized].map(Tensor::from_dispatch);
    }
    let hidden = hidden + update;
    [hidden.clone(), rms_norm(hidden, weight, epsilon)]
}
