//! Products with a packed weight and lookups of its rows, straight from the codes.

use burn::backend::Dispatch;
use burn::tensor::{FloatDType, Int, Tensor};

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::check_dtype;
use crate::tensor::Fp4Tensor;

/// `input x weight` for an input `[.., K]` and a weight `[K, N]` quantized along its first axis.
///
/// A weight `[N, K]` quantized along its last axis is used through
/// [`transpose`](Fp4Tensor::transpose), which moves nothing. `flex`, `ndarray` and Cube devices
/// with kernels multiply straight from the codes. On an autodiff device the gradient of the input
/// flows.
///
/// # Errors
/// [`OpsError::DType`] if the input is not f32, f16 or bf16, [`OpsError::Contraction`] if the
/// weight is quantized along the other axis or K differs.
pub fn matmul<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
) -> Result<Tensor<D>, OpsError> {
    linear(input, weight, None)
}

/// [`matmul`] plus a bias `[N]`, in one operation if it has the dtype of the input.
///
/// # Errors
/// As [`matmul`]; [`OpsError::Shape`] for a bias of another length.
pub fn linear<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Result<Tensor<D>, OpsError> {
    check_dtype(&input)?;
    let [expected, outputs] = weight.dims();
    let mut shape = input.dims();
    let found = core::mem::replace(&mut shape[D - 1], outputs);
    if weight.axis() != 0 || found != expected {
        return Err(OpsError::Contraction { input: found, weight: expected, axis: weight.axis() });
    }
    let rows = input.shape().num_elements().checked_div(found).unwrap_or(0);
    let input = input.reshape([rows, found]);
    if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [outputs]) {
        let (expected, found) = (vec![outputs], bias.dims().to_vec());
        return Err(OpsError::Shape { what: "bias", expected, found });
    }
    let layout = weight.layout().clone();
    #[cfg(feature = "cube")]
    let device = weight.device();
    let (dtype, input, weight) = (input.dtype(), input.into_dispatch(), weight.to_primitive());
    let (bias, other_bias) = match bias {
        Some(bias) if bias.dtype() == dtype => (Some(bias.into_dispatch()), None),
        other => (None, other),
    };
    let product = match bias {
        Some(bias) => Dispatch::fp4_linear(input, weight, bias, layout),
        None => Dispatch::fp4_matmul(input, weight, layout),
    };
    #[cfg(feature = "cube")]
    crate::fused::run_now(&device);
    let product = Tensor::<2>::from_dispatch(product);
    let product = match other_bias {
        Some(bias) => product + bias.unsqueeze(),
        None => product,
    };
    Ok(product.reshape(shape))
}

/// The rows of a weight `[rows, cols]` at indices `[batch, length]`: `[batch, length, cols]`, as
/// Burn's [`embedding`](burn::tensor::module::embedding) of the dequantized weight, bit for bit.
/// Only these rows are decoded; the values are not part of an autodiff graph.
///
/// # Errors
/// As [`Fp4Tensor::select_rows`].
pub fn embedding(
    weight: &Fp4Tensor<2>,
    indices: Tensor<2, Int>,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpsError> {
    let ([batch, length], [_, cols]) = (indices.dims(), weight.dims());
    let rows = weight.select_rows(indices.reshape([batch * length]))?;
    Ok(rows.into_dense(dtype).reshape([batch, length, cols]))
}
