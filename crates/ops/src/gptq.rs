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
