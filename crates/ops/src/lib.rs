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
//! | `gram.rs`      | [`GramSum`]: what is known of these activations                           |
//! | `gptq.rs`      | errors that are made up for                                               |
//! | `curvature.rs` | [`Curvature`]: what that takes, where the weights are                     |
//! | `train.rs`     | products of quantized values, forward and backward                        |
//! | `saturation.rs`| elements beyond the largest code, in gradients                            |
//! | `layout.rs`    | [`Fp4Layout`]: logical shape, blocked axis and format                     |
//! | `extension.rs` | [`Fp4Backend`]: what a backend has to do                                  |
//! | `host.rs`      | the host engine on tensor data; `flex.rs`, `ndarray.rs`: its two devices   |
//! | `reuse.rs`     | memory of a dequantized weight, kept for the next one                     |
//! | `products.rs`  | [`Products`]: whether a weight is multiplied straight from its codes      |
//! | `fused.rs`     | unmodified layers straight from codes, on Cube devices                    |
//! | `cube.rs`      | the kernels on CUDA and CubeCL's CPU runtime                              |
//! | `portable.rs`  | the same bits from tensor operations, for any other device                |
//! | `autodiff.rs`  | gradients                                                                 |
//! | `replay.rs`    | [`Replay`]: recorded operations, one at a time                            |
//! | `untuned.rs`   | what these add up, in an order that no tuning decides                     |
//! | `modelopt.rs`  | ModelOpt's functions on tensors                                           |

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod cube;
mod curvature;
mod error;
mod extension;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cube")]
mod fused;
mod gptq;
mod gram;
// Without a device in host memory, only `portable.rs` uses it, and not all.
#[cfg_attr(not(any(feature = "flex", feature = "ndarray")), allow(dead_code))]
mod host;
mod importance;
mod layout;
pub mod modelopt;
#[cfg(feature = "ndarray")]
mod ndarray;
pub mod portable;
mod products;
mod replay;
#[cfg(feature = "flex")]
mod reuse;
// Without autodiff nothing asks for gradients.
#[cfg_attr(not(feature = "autodiff"), allow(dead_code))]
mod saturation;
mod tensor;
#[cfg_attr(not(feature = "autodiff"), allow(dead_code))]
mod train;
mod untuned;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fp4_search::SearchError;
use burn_fp4_search::host::Restore;

pub use burn_fp4_search as search;
pub use burn_fp4_search::formats;
pub use burn_fp4_search::formats::Fp4Format;
pub use burn_fp4_search::{
    BlockHessians, BlockOrder, Blocks, Draw, E4m3Range, ErrorMetric, Fp4Scheme, Gptq, Gram,
    GramTiles, Hadamard, Importance, NonFinite, Rounding, ScaleRule, ScaleSearch, TensorScaling,
};
pub use curvature::Curvature;
pub use error::OpsError;
pub use extension::{Fp4Backend, Fp4Primitive};
#[cfg(feature = "cube")]
pub use fused::{FusedProducts, fused_products};
pub use gptq::{quantize_by_curvature, quantize_gptq};
pub use gram::{FetchedGram, GramSum, block_hessians, check_addable, gram};
pub use importance::{quantize_by_importance, quantize_with_best_tensor_scale};
pub use layout::Fp4Layout;
pub use products::{Products, Why, products};
pub use replay::Replay;
pub use saturation::Saturated;
pub use tensor::Fp4Tensor;
pub use train::TrainRecipe;

/// Has layers with packed weights multiply, and look rows up, straight from the codes on Cube
/// devices (CUDA, CubeCL's CPU runtime), from now on. To be called at the start of a program; to
/// call it again changes nothing, and without such devices it does nothing. [`products`] says what
/// becomes of a weight.
///
/// # Errors
/// [`OpsError::Registration`] after the first operation on a Cube device: its operations are being
/// fused then, without these products.
pub fn init() -> Result<(), OpsError> {
    #[cfg(feature = "cube")]
    fused::init()?;
    Ok(())
}

/// Whether layers with packed weights on this device can multiply straight from the codes; see
/// [`init`], and [`products`] for a weight.
pub fn multiplies_codes(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    return fused::is_active(device);
    #[cfg(not(feature = "cube"))]
    {
        let _ = device;
        false
    }
}

/// Quantizes a tensor along an axis.
///
/// The values may be f32, f16 or bf16. They are not part of an autodiff graph afterwards.
///
/// # Errors
/// - [`OpsError::Axis`]: the tensor has no such axis.
/// - [`OpsError::DType`]: another dtype.
/// - [`OpsError::TooLarge`]: 2^32 - 2^24 values or more.
/// - [`OpsError::Indivisible`]: blocks do not divide the axis.
/// - [`OpsError::Search`]: the scheme is inconsistent, or its search needs activations
///   ([`quantize_by_importance`]).
/// - [`OpsError::NonFinite`]: a NaN or an infinity, unless the scheme says
///   [`FollowReference`](NonFinite::FollowReference).
/// - [`OpsError::Device`]: the device failed to hand back the amax.
pub fn quantize<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Tensor<D>, OpsError> {
    let values = values.without_autodiff();
    let layout = check_uniform(&values, axis, scheme)?;
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
    check_uniform(&values, axis, scheme)?;
    let amax = checked_amax(&values.clone().without_autodiff(), axis, scheme)?;
    Ok(fake_quantize_unchecked(values, amax, axis, scheme, Saturated::PassThrough))
}

/// [`fake_quantize`] with the amax given that the tensor scale is made from, f32 `[1]`: as a
/// calibrated activation has it, or a scale that is learned.
///
/// Nothing is read back, and NaN and infinity give what the references give. On an autodiff device
/// the gradient of the values passes straight through, unless they saturate and `saturated` says
/// otherwise; that of the amax is the one of learned step sizes (Esser et al., ICLR 2020) with
/// codes and block scales as they are.
///
/// # Errors
/// As [`quantize`]; [`OpsError::Search`] if the scheme has no tensor scale or says itself what it
/// is made from; [`OpsError::Shape`] if the amax is not one value.
pub fn fake_quantize_with_amax<const D: usize>(
    values: Tensor<D>,
    amax: Tensor<1>,
    axis: usize,
    scheme: &Fp4Scheme,
    saturated: Saturated,
) -> Result<Tensor<D>, OpsError> {
    check_uniform(&values, axis, scheme)?;
    let refuse = |reason| {
        let (rule, choice) = (scheme.rule, "an amax beside the scheme");
        Err(SearchError::Scheme { rule, choice, reason }.into())
    };
    if !scheme.rule.row().tensor_scale {
        return refuse("it has no tensor scale");
    }
    if scheme.tensor_scale != TensorScaling::Tensor {
        return refuse("the scheme says otherwise what its tensor scale is made from");
    }
    let (expected, found) = (vec![1], amax.dims().to_vec());
    if expected != found {
        return Err(OpsError::Shape { what: "amax", expected, found });
    }
    Ok(fake_quantize_unchecked(values, amax, axis, scheme, saturated))
}

/// [`fake_quantize`] for a loop that trains: nothing is read back, and NaN and infinity give what
/// the references give. Elements that saturate have the gradient that `saturated` says.
///
/// # Errors
/// As [`quantize`], but for values that are not finite.
pub fn fake_quantize_for_training<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    saturated: Saturated,
) -> Result<Tensor<D>, OpsError> {
    check_uniform(&values, axis, scheme)?;
    let follow = scheme.with_non_finite(NonFinite::FollowReference);
    let amax = checked_amax(&values.clone().without_autodiff(), axis, &follow)?;
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
        Restore::Values,
        saturated,
    ))
}

/// Transforms every 16 neighbours along an axis, in the dtype of the input; see [`Hadamard`].
///
/// On an autodiff device the gradient is transformed back.
///
/// # Errors
/// [`OpsError::Axis`], [`OpsError::DType`], [`OpsError::TooLarge`] as [`quantize`],
/// [`OpsError::Indivisible`] if 16 does not divide the axis.
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
    // Groups are as long as NVFP4's blocks.
    Fp4Layout::new(&values.shape(), axis, &Fp4Scheme::nvfp4())?;
    check_dtype(&values)?;
    let values = values.into_dispatch();
    Ok(Tensor::from_dispatch(Dispatch::fp4_hadamard(values, axis, hadamard, inverse)))
}

/// `input x weight` for an input `[.., K]` and a weight `[K, N]`, with the operands of this product
/// and, on an autodiff device, of those for both gradients quantized as a recipe says; see
/// [`TrainRecipe`].
///
/// Gradients are rounded by random numbers of this draw: another one for every layer and step.
///
/// # Errors
/// [`OpsError::Recipe`] or [`OpsError::Search`] for an inconsistent recipe,
/// [`OpsError::Contraction`] if K differs, [`OpsError::DType`] unless f32, f16 or bf16,
/// [`OpsError::Operands`] if both have not the same, [`OpsError::TooLarge`] as [`quantize`].
pub fn train_product<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    recipe: &TrainRecipe,
    draw: Draw,
) -> Result<Tensor<D>, OpsError> {
    recipe.validate()?;
    let mut shape = input.dims();
    let [channels, outputs] = weight.dims();
    let found = shape[D - 1];
    if found != channels {
        return Err(OpsError::Contraction { input: found, weight: channels, axis: 0 });
    }
    check_dtype(&input)?;
    if weight.dtype() != input.dtype() {
        let (expected, found) = (input.dtype(), weight.dtype());
        return Err(OpsError::Operands { what: "weight", expected, found });
    }
    let rows = shape[..D - 1].iter().product();
    shape[D - 1] = outputs;
    for shape in [[rows, channels], [channels, outputs], [rows, outputs]] {
        // Padded to whole blocks.
        layout::check_len(&shape.map(|dim: usize| dim.next_multiple_of(32)))?;
    }
    let input = input.reshape([rows, channels]).into_dispatch();
    let product = Dispatch::fp4_train_product(input, weight.into_dispatch(), *recipe, draw);
    Ok(Tensor::<2>::from_dispatch(product).reshape(shape))
}

/// `input x weight` for an input `[.., K]` and a weight `[K, N]` quantized along its first axis.
///
/// A weight `[N, K]` quantized along its last axis is used through
/// [`transpose`](Fp4Tensor::transpose), which moves nothing. `flex` and `ndarray` multiply straight
/// from the codes, Cube devices after [`init`]. On an autodiff device the gradient of the input
/// flows.
///
/// # Errors
/// [`OpsError::DType`] if the input is not f32, f16 or bf16, [`OpsError::Contraction`] if the
/// weight is quantized along the other axis or K differs.
pub fn matmul<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
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
    weight.settle();
    let layout = weight.layout().clone();
    let product = Dispatch::fp4_matmul(input.into_dispatch(), weight.to_primitive(), layout);
    Ok(Tensor::<2>::from_dispatch(product).reshape(shape))
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
    Ok(rows.dequantize_to(dtype).reshape([batch, length, cols]))
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

/// Whether what this device computes is done by kernels.
#[cfg(feature = "cube")]
fn has_kernels(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => cube::has_kernels(device),
        _ => false,
    }
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
/// As [`quantize`], but for values that are not finite.
fn check_uniform<const D: usize>(
    values: &Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Layout, OpsError> {
    let layout = Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_dtype(values)?;
    Importance::Uniform.check(scheme, layout.shape[axis])?;
    Ok(layout)
}

/// # Errors
/// [`OpsError::DType`] unless f32, f16 or bf16.
fn check_dtype<const D: usize>(values: &Tensor<D>) -> Result<(), OpsError> {
    match values.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        found => Err(OpsError::DType { found }),
    }
}
