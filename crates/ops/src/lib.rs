//! FP4 quantization of Burn tensors: one function for every Burn device.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_fp4_ops::{Fp4Scheme, quantize};
//!
//! let device = Device::flex();
//! let weight = Tensor::<2>::random([64, 128], Distribution::Normal(0.0, 0.02), &device);
//! let packed = quantize(weight, 0, &Fp4Scheme::nvfp4())?; // blocks of 16 along axis 0
//! assert_eq!(packed.codes().dims(), [128, 32]);
//! assert_eq!(packed.dequantize().dims(), [64, 128]);
//! # Ok::<(), burn_fp4_ops::OpsError>(())
//! ```
//!
//! | file           | what it holds                                                             |
//! |----------------|---------------------------------------------------------------------------|
//! | `lib.rs`       | the functions a user calls                                                |
//! | `tensor.rs`    | [`Fp4Tensor`]: codes and scales of a tensor                               |
//! | `importance.rs`| quantization that knows the activations a weight meets                    |
//! | `layout.rs`    | [`Fp4Layout`]: logical shape, blocked axis and format                     |
//! | `extension.rs` | [`Fp4Backend`]: what a backend has to do                                  |
//! | `host.rs`      | the host engine on tensor data; `flex.rs`, `ndarray.rs`: its two devices   |
//! | `cube.rs`      | the kernels on CUDA and CubeCL's CPU runtime                              |
//! | `portable.rs`  | the same bits from tensor operations, for any other device                |
//! | `autodiff.rs`  | gradients                                                                 |
//! | `modelopt.rs`  | ModelOpt's functions on tensors                                           |

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
mod error;
mod extension;
#[cfg(feature = "flex")]
mod flex;
// Without a device in host memory, only `portable.rs` uses it, and not all.
#[cfg_attr(not(any(feature = "flex", feature = "ndarray")), allow(dead_code))]
mod host;
mod importance;
mod layout;
pub mod modelopt;
#[cfg(feature = "ndarray")]
mod ndarray;
pub mod portable;
mod tensor;

use burn::backend::Dispatch;
use burn::tensor::{DType, FloatDType, Tensor};

pub use burn_fp4_search as search;
pub use burn_fp4_search::formats;
pub use burn_fp4_search::formats::Fp4Format;
pub use burn_fp4_search::{
    BlockHessians, BlockOrder, Blocks, E4m3Range, ErrorMetric, Fp4Scheme, Gptq, Gram, Importance,
    NonFinite, ScaleRule, ScaleSearch, TensorScaling,
};
pub use error::OpsError;
pub use extension::{Fp4Backend, Fp4Primitive};
pub use importance::{
    block_hessians, gram, quantize_by_importance, quantize_gptq, quantize_with_best_tensor_scale,
};
pub use layout::Fp4Layout;
pub use tensor::Fp4Tensor;

/// Quantizes a tensor along an axis.
///
/// The values may be f32, f16 or bf16. They are not part of an autodiff graph afterwards.
///
/// # Errors
/// - [`OpsError::Axis`]: the tensor has no such axis.
/// - [`OpsError::DType`]: another dtype.
/// - [`OpsError::TooLarge`]: 2^32 - 2^24 values or more.
/// - [`OpsError::Search`]: the scheme is inconsistent, its blocks do not divide the axis, or its search
///   needs activations ([`quantize_by_importance`]).
/// - [`OpsError::NonFinite`]: a NaN or an infinity, unless the scheme says
///   [`FollowReference`](NonFinite::FollowReference).
/// - [`OpsError::Device`]: the device failed to hand back the amax.
pub fn quantize<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Tensor<D>, OpsError> {
    let values = values.without_autodiff();
    let layout = Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_dtype(&values)?;
    Importance::Uniform.check(scheme, layout.shape[axis])?;
    let amax = checked_amax(&values, axis, scheme)?;
    Ok(quantize_with_amax(values, layout, scheme, amax))
}

/// [`quantize`] with everything checked and the amax at hand.
fn quantize_with_amax<const D: usize>(
    values: Tensor<D>,
    layout: Fp4Layout,
    scheme: &Fp4Scheme,
    amax: Tensor<1>,
) -> Fp4Tensor<D> {
    let packed =
        Dispatch::fp4_quantize(values.into_dispatch(), amax.into_dispatch(), layout.axis, *scheme);
    Fp4Tensor::from_primitive(packed, layout)
}

/// Rounds every value to what [`quantize`] and [`dequantize`](Fp4Tensor::dequantize) make of it,
/// in the dtype of the input.
///
/// On an autodiff device the gradient passes straight through.
///
/// # Errors
/// As [`quantize`].
pub fn fake_quantize<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Tensor<D>, OpsError> {
    let layout = Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_dtype(&values)?;
    Importance::Uniform.check(scheme, layout.shape[axis])?;
    let amax = checked_amax(&values.clone().without_autodiff(), axis, scheme)?;
    Ok(Tensor::from_dispatch(Dispatch::fp4_fake_quantize(
        values.into_dispatch(),
        amax.into_dispatch(),
        axis,
        *scheme,
    )))
}

/// `input x weight` for an input `[.., K]` and a weight `[K, N]` quantized along its first axis.
///
/// A weight `[N, K]` quantized along its last axis is used through
/// [`transpose`](Fp4Tensor::transpose), which moves nothing.
///
/// # Errors
/// [`OpsError::Contraction`] if the weight is quantized along the other axis or K differs.
pub fn matmul<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
) -> Result<Tensor<D>, OpsError> {
    let [expected, _] = weight.dims();
    let found = input.dims()[D - 1];
    if weight.axis() != 0 || found != expected {
        return Err(OpsError::Contraction { input: found, weight: expected, axis: weight.axis() });
    }
    let dtype = FloatDType::from(input.dtype());
    Ok(burn::tensor::module::linear(input, weight.dequantize_to(dtype), None))
}

/// The largest magnitude of a tensor in f32, shape `[1]`; NaN if one of the values is.
///
/// # Errors
/// [`OpsError::DType`] if the values are not f32, f16 or bf16, [`OpsError::TooLarge`] for
/// 2^32 - 2^24 of them or more.
pub fn amax<const D: usize>(values: Tensor<D>) -> Result<Tensor<1>, OpsError> {
    check_dtype(&values)?;
    layout::check_len(&values.dims())?;
    let values = values.without_autodiff().into_dispatch();
    Ok(Tensor::from_dispatch(Dispatch::fp4_amax(values, 0, false)))
}

/// The amax that the tensor scale of a scheme is made from, on the device.
///
/// # Errors
/// [`OpsError::NonFinite`] if the scheme rejects NaN and infinity and there is one.
fn checked_amax<const D: usize>(
    values: &Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Tensor<1>, OpsError> {
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

/// # Errors
/// [`OpsError::DType`] unless f32, f16 or bf16.
fn check_dtype<const D: usize>(values: &Tensor<D>) -> Result<(), OpsError> {
    match values.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        found => Err(OpsError::DType { found }),
    }
}
