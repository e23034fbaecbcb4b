//! Fake quantization: quantizes and dequantizes a tensor, in its own dtype.

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::host::DequantTarget;
use burn_fp4_search::{Fp4Scheme, Importance, NonFinite, SearchError, TensorScaling};

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::{Fp4Layout, check_dtype};
use crate::quantize::checked_amax;
use crate::saturated::Saturated;

/// Rounds every value as [`quantize`](crate::quantize) and
/// [`dequantize`](crate::Fp4Tensor::dequantize) do, in the dtype of the input.
///
/// On an autodiff device the gradient passes straight through.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, fake_quantize};
///
/// let values = Tensor::<1>::from_floats([0.7, 6.0, -2.6, 0.2], &Device::flex()).repeat_dim(0, 8);
/// let rounded = fake_quantize(values, 0, &Fp4Scheme::mxfp4())?; // the block scale is 1
/// assert_eq!(rounded.slice([0..4]).into_data(), TensorData::from([0.5f32, 6.0, -3.0, 0.0]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize`](crate::quantize).
pub fn fake_quantize<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Tensor<D>, OpsError> {
    by_own_amax(values, axis, scheme, scheme.non_finite, Saturated::PassThrough)
}

/// [`fake_quantize`] with a given amax, f32 `[1]`, for the tensor scale. It may come from
/// calibration, or be learned.
///
/// Nothing is read back; NaN and infinity give the results of the references. On an autodiff device
/// the gradient of the values passes straight through, or is zero where they saturate if
/// `saturated` says so. The gradient of the amax is that of learned step sizes (Esser et al., ICLR
/// 2020), with codes and block scales fixed.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, Saturated, fake_quantize_with_amax};
///
/// let device = Device::flex();
/// let values = Tensor::<1>::full([16], 6.0, &device);
/// let amax = Tensor::<1>::from_floats([1.3125], &device);
/// let (scheme, saturated) = (Fp4Scheme::nvfp4(), Saturated::PassThrough);
/// let rounded = fake_quantize_with_amax(values, amax, 0, &scheme, saturated)?;
/// // No value is larger than the amax.
/// assert_eq!(rounded.into_data(), TensorData::from([1.3125f32; 16]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize`](crate::quantize); [`OpsError::Search`] if the scheme has no tensor scale, or
/// fixes it; [`OpsError::Shape`] if the amax is not one value.
pub fn fake_quantize_with_amax<const D: usize>(
    values: Tensor<D>,
    amax: Tensor<1>,
    axis: usize,
    scheme: &Fp4Scheme,
    saturated: Saturated,
) -> Result<Tensor<D>, OpsError> {
    check_uniform(&values, axis, scheme)?;
    let refuse = |reason| {
        let (rule, choice) = (scheme.rule, "a given amax");
        Err(SearchError::Scheme { rule, choice, reason }.into())
    };
    if !scheme.rule.row().tensor_scale {
        return refuse("it has no tensor scale");
    }
    if scheme.tensor_scale != TensorScaling::Tensor {
        return refuse("the scheme fixes its tensor scale");
    }
    let (expected, found) = (vec![1], amax.dims().to_vec());
    if expected != found {
        return Err(OpsError::Shape { what: "amax", expected, found });
    }
    Ok(fake_quantize_unchecked(values, amax, axis, scheme, saturated))
}

/// [`fake_quantize`] for a training loop: nothing is read back, and NaN and infinity give the
/// results of the references. `saturated` chooses the gradient of elements that saturate.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, Saturated, fake_quantize_for_training};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<1>::from_floats([0.7, 7.5, -2.6, 0.2], &device).repeat_dim(0, 8);
/// let x = x.require_grad();
/// let y = fake_quantize_for_training(x.clone(), 0, &Fp4Scheme::mxfp4(), Saturated::Zero)?;
/// let gradient = x.grad(&y.sum().backward()).unwrap().slice([0..4]);
/// // With the block scale 1, only 7.5 is beyond the largest element.
/// assert_eq!(gradient.into_data(), TensorData::from([1f32, 0.0, 1.0, 1.0]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize`](crate::quantize), except for values that are not finite.
pub fn fake_quantize_for_training<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    saturated: Saturated,
) -> Result<Tensor<D>, OpsError> {
    by_own_amax(values, axis, scheme, NonFinite::FollowReference, saturated)
}

/// Fake-quantizes with the amax of the values; `non_finite` decides about NaN and infinity.
fn by_own_amax<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    non_finite: NonFinite,
    saturated: Saturated,
) -> Result<Tensor<D>, OpsError> {
    check_uniform(&values, axis, scheme)?;
    if values.shape().contains(&0) {
        return Ok(values);
    }
    let measured = scheme.with_non_finite(non_finite);
    let amax = checked_amax(&values.clone().without_autodiff(), axis, &measured)?;
    Ok(fake_quantize_unchecked(values, amax, axis, scheme, saturated))
}

fn fake_quantize_unchecked<const D: usize>(
    values: Tensor<D>,
    amax: Tensor<1>,
    axis: usize,
    scheme: &Fp4Scheme,
    saturated: Saturated,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::fp4_fake_quantize(
        values.into_dispatch(),
        amax.into_dispatch(),
        axis,
        *scheme,
        DequantTarget::Full,
        saturated,
    ))
}

/// Checks values that are fake-quantized.
///
/// # Errors
/// As [`quantize`](crate::quantize), except for values that are not finite; [`OpsError::Search`]
/// for a scheme with a Hadamard transform, which is for weights.
fn check_uniform<const D: usize>(
    values: &Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<(), OpsError> {
    let layout = Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_dtype(values)?;
    scheme.check_columns(layout.shape[axis])?;
    Ok(Importance::Uniform.check(scheme, layout.shape[axis])?)
}
