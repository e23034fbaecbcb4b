//! Quantization for given activations, and with the best tensor scale.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor, TensorData};
use burn_fp4_search::squares::squared_sums;
use burn_fp4_search::{Fp4Scheme, Importance, tensor_scale_candidates};

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::check_len;
use crate::quantize::{self, checked_amax, quantize_with_amax, transformed};
use crate::tensor::Fp4Tensor;

/// [`quantize`](crate::quantize) with costs of errors: a weight for each channel for
/// [`Method::Sse`](crate::Method::Sse), a Hessian for each block for the searches that need
/// activations.
///
/// [`Method::Admm`](crate::Method::Admm) runs on the host, wherever the tensor is. The others run
/// on its device, if it has kernels.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Fp4Scheme, Importance, Method, quantize_by_importance};
///
/// let (mut values, mut weights) = ([0.5f32; 32], [1f32; 32]);
/// (values[0], weights[0]) = (9.0, 0.0); // an outlier, of a channel whose inputs are all 0
/// let scheme = Fp4Scheme::mxfp4().with_method(Method::SSE);
/// let values = Tensor::<1>::from_floats(values, &Device::flex());
/// let packed = quantize_by_importance(values, 0, &scheme, Importance::Channels(&weights))?;
/// // The outlier saturates. With the block scale 2, which it needs, 0.5 would become 0.
/// assert_eq!(packed.dequantize().into_data().as_slice::<f32>().unwrap()[1..], [0.5; 31]);
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// If the scheme has a Hadamard transform, the importance has to be that of the transformed inputs:
/// of [`Gram::transformed`](burn_fp4_search::Gram::transformed).
///
/// # Errors
/// As [`quantize`](crate::quantize); [`OpsError::Search`] if the search takes another kind of
/// importance, or the number of channels differs; [`OpsError::TooLarge`] for too many Hessians.
pub fn quantize_by_importance<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let (values, layout, scheme) = transformed(values.without_autodiff(), axis, scheme)?;
    importance.check(&scheme, layout.shape[axis])?;
    let amax = checked_amax(&values, axis, &scheme)?;
    let device = values.device();
    let upload = |values: &[f32]| {
        Tensor::<1>::from_data(
            TensorData::new(values.to_vec(), [values.len()]),
            (&device, DType::F32),
        )
        .into_dispatch()
    };
    let [importance, bounds] = match importance {
        Importance::Uniform => return Ok(quantize_with_amax(values, layout, &scheme, amax)),
        Importance::Channels(weights) => [upload(weights), upload(&[0.0])],
        Importance::Blocks(hessians) => {
            check_len(&[hessians.values().len()])?;
            [upload(hessians.values()), upload(hessians.bounds())]
        }
    };
    let packed = Dispatch::fp4_quantize_by_importance(
        values.into_dispatch(),
        amax.into_dispatch(),
        importance,
        bounds,
        axis,
        scheme,
    );
    Ok(Fp4Tensor::from_primitive(packed, layout))
}

/// [`quantize`](crate::quantize) with the tensor scale that leaves the smallest squared error,
/// among [a few candidates](burn_fp4_search::tensor_scale_candidates).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Fp4Scheme, quantize, quantize_with_best_tensor_scale, squared_sums};
///
/// let values = Tensor::<1>::from_floats([6.0, 5.0], &Device::flex()).repeat_dim(0, 8);
/// let scheme = Fp4Scheme::nvfp4();
/// let by_amax = quantize(values.clone(), 0, &scheme)?.squared_error(values.clone())?;
/// let best = quantize_with_best_tensor_scale(values.clone(), 0, &scheme)?.squared_error(values)?;
/// let error = |sums: Tensor<1>| squared_sums(sums.into_data().as_slice().unwrap()).unwrap()[0];
/// let (by_amax, best) = (error(by_amax), error(best));
/// // By the amax the 6 stays, and each of eight 5 becomes a 4 or a 6.
/// assert!((by_amax - 8.0).abs() < 1e-3 && best < 5.0, "{by_amax} {best}");
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize`](crate::quantize), and [`OpsError::Search`] if the scheme does not leave the
/// tensor scale open.
pub fn quantize_with_best_tensor_scale<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Tensor<D>, OpsError> {
    scheme.check_tensor_scale()?;
    let (values, layout, scheme) = transformed(values.without_autodiff(), axis, scheme)?;
    let amax = read(quantize::amax(values.clone())?)?[0];
    if !amax.is_finite() {
        return Err(OpsError::NonFinite { found: amax });
    }
    let with = |amax| scheme.with_chosen_amax(amax);
    let candidates: Vec<_> = tensor_scale_candidates(amax).collect();
    let errors = candidates.iter().map(|&amax| {
        let packed = quantize::quantize(values.clone(), axis, &with(amax))?;
        packed.squared_error(values.clone())
    });
    let sums = Tensor::<1>::stack::<2>(errors.collect::<Result<Vec<_>, _>>()?, 0);
    let sums = read(sums)?;
    let errors = sums.chunks_exact(sums.len() / candidates.len()).filter_map(squared_sums);
    let mut best: Option<(f64, f32)> = None;
    for ([error, _], amax) in errors.zip(candidates) {
        if best.is_none_or(|(least, _)| error < least) {
            best = Some((error, amax));
        }
    }
    let (_, amax) = best.expect("there are candidates");
    quantize::quantize(values, axis, &with(amax))?.with_hadamard(layout.hadamard)
}

/// Reads values back, in f32.
pub(crate) fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, OpsError> {
    let data = tensor.cast(DType::F32).try_into_data().map_err(OpsError::device)?;
    data.try_into_vec().map_err(OpsError::device)
}
