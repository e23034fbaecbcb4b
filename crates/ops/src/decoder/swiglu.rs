//! SwiGLU: the gate of an MLP.

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn::tensor::activation::silu;

use crate::devices::decoder::{DecoderBackend, is_one_operation};

/// Computes `silu(gate) * up`. Kernels compute in f32 and round once.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::swiglu;
///
/// let device = Device::flex();
/// let gate = Tensor::<1>::from_floats([0.0, 80.0], &device);
/// let up = Tensor::<1>::from_floats([5.0, 0.5], &device);
/// assert_eq!(swiglu(gate, up).into_data(), TensorData::from([0f32, 40.0]));
/// ```
///
/// # Panics
/// If the shapes differ.
#[must_use]
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    assert_eq!(gate.dims(), up.dims(), "SwiGLU: shape of `up`");
    let dtypes = [gate.dtype(), up.dtype()];
    if is_one_operation(&gate.device(), dtypes, gate.shape().num_elements()) {
        let (gate, up) = (gate.into_dispatch(), up.into_dispatch());
        return Tensor::from_dispatch(Dispatch::decoder_swiglu(gate, up));
    }
    silu(gate) * up
}
