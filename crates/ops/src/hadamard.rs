//! The Hadamard transform of a tensor, and its inverse.

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::Hadamard;

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::{check_divided, check_dtype};

/// Transforms neighbours along an axis, in the dtype of the input; see [`Hadamard`].
///
/// On an autodiff device the gradient is transformed back.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Hadamard, hadamard};
///
/// let mut values = [0f32; 16];
/// values[0] = 4.0; // an outlier
/// let values = Tensor::<1>::from_floats(values, &Device::flex());
/// let spread = hadamard(values, 0, Hadamard::default())?;
/// assert_eq!(spread.into_data(), TensorData::from([1f32; 16]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::Axis`], [`OpsError::DType`], [`OpsError::TooLarge`] as
/// [`quantize`](crate::quantize), [`OpsError::Indivisible`] if the size of the transform does not
/// divide the axis.
pub fn hadamard<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    hadamard: Hadamard,
) -> Result<Tensor<D>, OpsError> {
    transform(values, axis, hadamard, false)
}

/// Inverts [`hadamard`], except for rounding.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Hadamard, hadamard, inverse_hadamard};
///
/// let values = Tensor::<1>::from_floats([4.0, -2.0, 1.5, 0.0], &Device::flex()).repeat_dim(0, 4);
/// let transformed = hadamard(values.clone(), 0, Hadamard::seeded(7))?;
/// let back = inverse_hadamard(transformed, 0, Hadamard::seeded(7))?;
/// // Sums of quarters of such short numbers are exact.
/// assert_eq!(back.into_data(), values.into_data());
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`hadamard`].
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
    check_divided(&values.dims(), axis, hadamard.size())?;
    check_dtype(&values)?;
    let values = values.into_dispatch();
    Ok(Tensor::from_dispatch(Dispatch::fp4_hadamard(values, axis, hadamard, inverse)))
}
