//! GPTQ: rounding errors are compensated by the weights that are still to be rounded.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::formats::check_length;
use burn_fp4_search::{Fp4Scheme, Gptq, Gram, NonFinite};

use crate::curvature::Curvature;
use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::{Fp4Layout, check_dtype};
use crate::quantize::checked_amax;
use crate::tensor::Fp4Tensor;

/// [`quantize`](crate::quantize) by [`Gptq`]: every rounding error is compensated by the weights
/// that are still to be rounded. The search of the scheme is not used.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Fp4Scheme, Gptq, gram, quantize_gptq};
///
/// let mut weight = [[0.7f32]; 32];
/// weight[0] = [6.0]; // the block scale is 1, and the nearest element to 0.7 is 0.5
/// let weight = Tensor::<2>::from_floats(weight, &Device::flex());
/// let gram = gram(Tensor::<2>::ones([8, 32], &Device::flex()))?;
/// let packed = quantize_gptq(weight, 0, &Fp4Scheme::mxfp4(), &Gptq::TEXTBOOK, &gram)?;
/// // All inputs are the same, so that the sum counts: 27.7, and 21.5 of nearest elements.
/// let sum = packed.dequantize().sum().into_scalar::<f32>();
/// assert!((sum - 27.7).abs() < 1.0, "{sum}");
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize_by_curvature`], with [`OpsError::NonFinite`] whatever the scheme says of it;
/// [`OpsError::Search`] if the Gram matrix is singular and not damped.
pub fn quantize_gptq<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    options: &Gptq,
    gram: &Gram,
) -> Result<Fp4Tensor<D>, OpsError> {
    options.validate(scheme)?;
    Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_length("channels of the Gram matrix", values.dims()[axis], gram.channels())?;
    let curvature = Curvature::new(gram, options, scheme.block_size, &values.device())?;
    let scheme = scheme.with_non_finite(NonFinite::Reject);
    quantize_by_curvature(values, axis, &scheme, &Arc::new(curvature))
}

/// [`quantize_gptq`] of one of several tensors that are multiplied by the same activations.
///
/// It runs where the curvature was made. On a device nothing is read back unless the scheme rejects
/// values that are not finite: one that does not is for values that are finite for sure, of
/// others the codes mean nothing. On the host such values are an error in any case.
///
/// ```
/// use std::sync::Arc;
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Curvature, Fp4Scheme, Gptq, gram, quantize_by_curvature};
///
/// let device = Device::flex();
/// let gram = gram(Tensor::<2>::eye(32, &device))?;
/// let curvature = Arc::new(Curvature::new(&gram, &Gptq::TEXTBOOK, 32, &device)?);
/// for (value, nearest) in [(1.4, 1.5f32), (2.6, 3.0)] {
///     let weight = Tensor::<2>::full([32, 1], value, &device);
///     let packed = quantize_by_curvature(weight, 0, &Fp4Scheme::mxfp4(), &curvature)?;
///     // Inputs are never together, so that no error can make up for another.
///     assert_eq!(packed.dequantize().into_data(), TensorData::from([[nearest]; 32]));
/// }
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize`](crate::quantize), and [`OpsError::NonFinite`]; [`OpsError::PartDevice`] if the
/// curvature was made on another device, [`OpsError::Search`] if it is for another number of
/// channels or another block size, or if the scheme has tiles.
pub fn quantize_by_curvature<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    curvature: &Arc<Curvature>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let values = values.without_autodiff();
    let mut scheme = curvature.scheme(scheme)?;
    let channels = curvature.channels();
    let device = values.device().inner();
    if curvature.on_host().is_some() {
        scheme = scheme.with_non_finite(NonFinite::Reject);
    } else if *curvature.device() != device {
        let (expected, found) = (device.into(), curvature.device().clone().into());
        return Err(OpsError::PartDevice { what: "curvature", expected, found });
    }
    let layout = Fp4Layout::new(&values.shape(), axis, &scheme)?;
    check_dtype(&values)?;
    check_length("channels of the Gram matrix", layout.shape[axis], channels)?;
    let amax = checked_amax(&values, axis, &scheme)?;
    let packed = Dispatch::fp4_quantize_gptq(
        values.into_dispatch(),
        amax.into_dispatch(),
        axis,
        scheme,
        curvature.clone(),
    );
    Ok(Fp4Tensor::from_primitive(packed, layout))
}
