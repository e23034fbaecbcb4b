//! ModelOpt's functions on tensors, with their names and arithmetic; see
//! [`search::modelopt`](burn_fp4_search::modelopt).
//!
//! They run on the host: each reads its inputs back.

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use burn_fp4_search::modelopt;

use crate::error::OpsError;

/// Computes the scale of every block in f32, in the shape of `amax`.
///
/// `largest_scale` (ModelOpt's `fp8_max_for_normalization`) is 448, or 256 for Four Over Six.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::modelopt::compute_fp4_scales;
///
/// let amax = Tensor::<1>::from_floats([6.3, 12.0], &Device::flex());
/// // A sixth, rounded to E4M3: 1.05 lies between 1 and 1.125.
/// let scales = compute_fp4_scales(amax, Some(6.0 * 448.0), true, 448.0)?;
/// assert_eq!(scales.into_data(), TensorData::from([1f32, 2.0]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::Device`] if a device fails.
pub fn compute_fp4_scales<const D: usize>(
    amax: Tensor<D>,
    global_amax: Option<f32>,
    quantize_block_scales: bool,
    largest_scale: f32,
) -> Result<Tensor<D>, OpsError> {
    let (device, shape) = (amax.device(), amax.shape());
    let amax = floats(amax)?;
    let scales =
        modelopt::compute_fp4_scales(&amax, global_amax, quantize_block_scales, largest_scale);
    Ok(Tensor::from_data(TensorData::new(scales, shape), (&device, DType::F32)))
}

/// Dequantizes packed codes u8 `[.., K]` to `[.., 2 x K]`, given scales `[.., 2 x K / block_size]`
/// of any float dtype.
///
/// ```
/// use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
/// use burn_fp4_ops::modelopt::fp4_dequantize;
///
/// let device = Device::flex();
/// let packed = Tensor::from_data([[0x21u8; 8]], (&device, DType::U8)); // elements 0.5 and 1
/// let scales = Tensor::<2>::from_floats([[8.0]], &device);
/// let values = fp4_dequantize(packed, scales, 0.5, 16, FloatDType::F32)?;
/// assert_eq!(values.slice([0..1, 0..2]).into_data(), TensorData::from([[2f32, 4.0]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::Format`] if the scales do not cover the codes, [`OpsError::Device`] if a device
/// fails.
pub fn fp4_dequantize<const D: usize>(
    packed: Tensor<D, Int>,
    scales: Tensor<D>,
    global_scale: f32,
    block_size: usize,
    dtype: FloatDType,
) -> Result<Tensor<D>, OpsError> {
    let (device, mut shape) = (packed.device(), packed.shape());
    shape[D - 1] *= 2;
    let packed = packed.try_into_data().map_err(OpsError::device)?;
    let packed: Vec<_> = packed.iter::<u8>().collect();
    let values = modelopt::fp4_dequantize(&packed, &floats(scales)?, global_scale, block_size)?;
    let values = Tensor::<D>::from_data(TensorData::new(values, shape), (&device, DType::F32));
    Ok(values.cast(dtype))
}

/// Rounds every value to the FP4 grid of its block. `amax` has one value per block, in any shape;
/// their number decides the block size.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::modelopt::static_blockwise_fp4_fake_quant;
///
/// let device = Device::flex();
/// let values = Tensor::<1>::from_floats([0.7, 6.0, -2.6, 0.2], &device);
/// let amax = Tensor::<1>::from_floats([6.0], &device); // of one block, whose scale is 1
/// let rounded = static_blockwise_fp4_fake_quant(values, amax, None, false, 448.0, None)?;
/// assert_eq!(rounded.into_data(), TensorData::from([0.5f32, 6.0, -3.0, 0.0]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::Format`] if the amaxes do not divide the values, [`OpsError::Device`] if a device
/// fails.
pub fn static_blockwise_fp4_fake_quant<const D: usize, const A: usize>(
    values: Tensor<D>,
    amax: Tensor<A>,
    global_amax: Option<f32>,
    quantize_block_scales: bool,
    largest_scale: f32,
    out_dtype: Option<FloatDType>,
) -> Result<Tensor<D>, OpsError> {
    let (device, shape) = (values.device(), values.shape());
    let dtype = out_dtype.unwrap_or(values.dtype().into());
    let rounded = modelopt::static_blockwise_fp4_fake_quant(
        &floats(values)?,
        &floats(amax)?,
        global_amax,
        quantize_block_scales,
        largest_scale,
    )?;
    let rounded = Tensor::<D>::from_data(TensorData::new(rounded, shape), (&device, DType::F32));
    Ok(rounded.cast(dtype))
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, OpsError> {
    let data = tensor.without_autodiff().try_into_data().map_err(OpsError::device)?;
    Ok(data.iter::<f32>().collect())
}
