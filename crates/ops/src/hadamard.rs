//! The Hadamard transform of a tensor, and back.

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::Hadamard;

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::{check_divided, check_dtype};

/// Transforms every 16 neighbours along an axis, in the dtype of the input; see [`Hadamard`].
///
/// On an autodiff device the gradient is transformed back.
///
/// # Errors
/// [`OpsError::Axis`], [`OpsError::DType`], [`OpsError::TooLarge`] as
/// [`quantize`](crate::quantize), [`OpsError::Indivisible`] if 16 does not divide the axis.
pub fn hadamard<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    hadamard: Hadamard,
) -> Result<Tensor<D>, OpsError> {
    transform(values, axis, hadamard, false)
}

/// The inverse of [`hadamard`], but for rounding.
///
/// # Errors
/// As there.
pub fn inverse_hadamard<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    hadamard: Hadamard,
) -> Result<Tensor<D>, OpsError> {
    transform(values, axis, hadamard, true)
}

fn transform<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    hadamard: Hadamard,
    inverse: bool,
) -> Result<Tensor<D>, OpsError> {
    check_divided(&values.dims(), axis, Hadamard::SIZE)?;
    check_dtype(&values)?;
    let values = values.into_dispatch();
    Ok(Tensor::from_dispatch(Dispatch::fp4_hadamard(values, axis, hadamard, inverse)))
}
