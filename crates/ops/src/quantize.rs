//! Quantization of a tensor, and its amax.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};
use burn_fp4_search::{Fp4Scheme, Importance, NonFinite, TensorScaling};

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::hadamard::hadamard;
use crate::layout::{Fp4Layout, check_dtype, check_len};
use crate::tensor::Fp4Tensor;

/// Quantizes a tensor along an axis.
///
/// The values may be f32, f16 or bf16. The result is not part of an autodiff graph.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, quantize};
///
/// let values = Tensor::<1>::from_floats([0.7, 6.0, -2.6, 0.2], &Device::flex()).repeat_dim(0, 8);
/// let packed = quantize(values, 0, &Fp4Scheme::mxfp4())?;
/// // The largest element, 6, is the amax of the block of 32: the block scale is 1.
/// let dense = packed.dequantize().slice([0..4]).into_data();
/// assert_eq!(dense, TensorData::from([0.5f32, 6.0, -3.0, 0.0]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// - [`OpsError::Axis`]: the tensor has no such axis.
/// - [`OpsError::DType`]: another dtype.
/// - [`OpsError::TooLarge`]: 2^32 - 2^24 values or more.
/// - [`OpsError::Indivisible`]: blocks do not divide the axis.
/// - [`OpsError::Search`]: the scheme is inconsistent, or its method needs activations
///   ([`quantize_by_importance`](crate::quantize_by_importance)) or chooses the tensor scale
///   ([`quantize_with_best_tensor_scale`](crate::quantize_with_best_tensor_scale)).
/// - [`OpsError::NonFinite`]: a NaN or an infinity, unless the scheme says
///   [`FollowReference`](NonFinite::FollowReference).
/// - [`OpsError::Device`]: the device failed to hand back the amax.
pub fn quantize<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Tensor<D>, OpsError> {
    let (values, layout, scheme) = transformed(values.without_autodiff(), axis, scheme)?;
    Importance::Uniform.check(&scheme, layout.shape[axis])?;
    let amax = checked_amax(&values, axis, &scheme)?;
    Ok(quantize_with_amax(values, layout, &scheme, amax))
}

/// Checks values that are quantized along an axis, and transforms them as the scheme says, in f32.
/// Returns them with the layout of their codes and the scheme that is left.
///
/// # Errors
/// As [`Fp4Layout::new`], and [`OpsError::DType`].
pub(crate) fn transformed<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<(Tensor<D>, Fp4Layout, Fp4Scheme), OpsError> {
    let layout = Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_dtype(&values)?;
    let values = match scheme.hadamard {
        Some(transform) => hadamard(values.cast(DType::F32), axis, transform)?,
        None => values,
    };
    Ok((values, layout, scheme.without_hadamard()))
}

/// [`quantize`] with a known amax, without checks.
pub(crate) fn quantize_with_amax<const D: usize>(
    values: Tensor<D>,
    layout: Fp4Layout,
    scheme: &Fp4Scheme,
    amax: Tensor<1>,
) -> Fp4Tensor<D> {
    let packed =
        Dispatch::fp4_quantize(values.into_dispatch(), amax.into_dispatch(), layout.axis, *scheme);
    Fp4Tensor::from_primitive(packed, layout)
}

/// Computes the largest magnitude of a tensor in f32, `[1]`; NaN if a value is NaN.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::amax;
///
/// let values = Tensor::<2>::from_floats([[1.0, -3.0], [2.5, 0.0]], &Device::flex());
/// assert_eq!(amax(values)?.into_data(), TensorData::from([3f32]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::DType`] if the values are not f32, f16 or bf16, [`OpsError::TooLarge`] for
/// 2^32 - 2^24 of them or more.
pub fn amax<const D: usize>(values: Tensor<D>) -> Result<Tensor<1>, OpsError> {
    check_dtype(&values)?;
    check_len(&values.dims())?;
    let values = values.without_autodiff().into_dispatch();
    Ok(Tensor::from_dispatch(Dispatch::fp4_amax(values, 0, false)))
}

/// Computes the amax for the tensor scale of a scheme, on the device.
///
/// # Errors
/// [`OpsError::NonFinite`] if the scheme rejects NaN and infinity and a value is one.
pub(crate) fn checked_amax<const D: usize>(
    values: &Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Tensor<1>, OpsError> {
    #[cfg(feature = "cube")]
    crate::devices::cube::queues::relax_this_thread(&values.device());
    let by_row = scheme.tensor_scale == TensorScaling::Row && scheme.rule.row().tensor_scale;
    let measure = |by_row| {
        let values = values.clone().into_dispatch();
        Tensor::<1>::from_dispatch(Dispatch::fp4_amax(values, axis, by_row))
    };
    let constant = |value: f32| Tensor::from_data([value], (&values.device(), DType::F32));
    let from_values = scheme.rule.row().tensor_scale
        && matches!(scheme.tensor_scale, TensorScaling::Tensor | TensorScaling::Row);
    let measured = (from_values || scheme.non_finite == NonFinite::Reject).then(|| measure(by_row));
    if scheme.non_finite == NonFinite::Reject
        && let Some(measured) = &measured
    {
        let data = measured.clone().try_into_data().map_err(OpsError::device)?;
        if let Some(found) = data.iter::<f32>().find(|amax| !amax.is_finite()) {
            return Err(OpsError::NonFinite { found });
        }
    }
    Ok(match (scheme.tensor_scale, measured) {
        (TensorScaling::Amax(amax), _) => constant(amax),
        (_, Some(measured)) if from_values => measured,
        // The rule has no tensor scale, or its multiplier is given.
        _ => constant(1.0),
    })
}
