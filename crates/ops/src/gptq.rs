use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::formats::check_length;
use burn_fp4_search::host::View;
use burn_fp4_search::{Curvature, Fp4Scheme, Gptq, Gram, NonFinite};

use crate::{Fp4Backend, Fp4Layout, Fp4Tensor, OpsError, check_dtype, checked_amax, has_kernels};

/// [`quantize`](crate::quantize) by [`Gptq`]: every rounding error is made up for by the weights that are
/// still to be rounded. The search of the scheme is not used.
///
/// # Errors
/// As [`quantize_by_curvature`], with [`OpsError::NonFinite`] whatever the scheme says of it; [`OpsError::Search`] if the Gram matrix is singular and not damped.
pub fn quantize_gptq<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    options: &Gptq,
    gram: &Gram,
) -> Result<Fp4Tensor<D>, OpsError> {
    options.validate(scheme)?;
    let curvature = options.curvature(gram, scheme.block_size)?;
    let scheme = scheme.with_non_finite(NonFinite::Reject);
    quantize_by_curvature(values, axis, &scheme, &Arc::new(curvature))
}

/// [`quantize_gptq`] of one of several tensors that meet the same activations.
///
/// It runs on the device of the tensor, if that has kernels, and nothing is read back unless the scheme rejects values
/// that are not finite: one that does not is for values that are known to be finite, of others the codes mean nothing.
/// Elsewhere it runs on the host, by all its cores, and such values are an error in any case.
///
/// # Errors
/// As [`quantize`](crate::quantize), and [`OpsError::NonFinite`]; [`OpsError::Search`] if the curvature is for another number of channels or another block size, or if the scheme has
/// tiles.
pub fn quantize_by_curvature<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    curvature: &Arc<Curvature>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let values = values.without_autodiff();
    let mut scheme = curvature.scheme(scheme)?;
    let channels = curvature.channels();
    if !has_kernels(&values.device()) || channels * channels > View::MAX_LEN {
        scheme = scheme.with_non_finite(NonFinite::Reject);
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
