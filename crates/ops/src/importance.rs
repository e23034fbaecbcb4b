//! Quantization that knows the activations a weight meets.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_fp4_search::formats::{FormatError, check_length};
use burn_fp4_search::host::{self, View};
use burn_fp4_search::{
    BlockHessians, Fp4Scheme, Gptq, Gram, Importance, ScaleSearch, TensorScaling,
    check_tensor_scale, tensor_scale_candidates,
};

use crate::layout::check_len;
use crate::{Fp4Backend, Fp4Layout, Fp4Tensor, OpsError, check_dtype, checked_amax};

/// [`quantize`](crate::quantize) for errors that do not all cost the same: by channel for
/// [`ScaleSearch::Sse`], by block for the searches that need activations.
///
/// [`Joint`](ScaleSearch::Joint) and the two of ADMM run on the host, wherever the tensor is; the others on
/// its device, if that has kernels.
///
/// # Errors
/// As [`quantize`](crate::quantize); [`OpsError::Search`] if the search takes another kind of importance,
/// or if it is for another number of channels; [`OpsError::TooLarge`] for too many Hessians.
pub fn quantize_by_importance<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let values = values.without_autodiff();
    let layout = Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_dtype(&values)?;
    importance.check(scheme, layout.shape[axis])?;
    let amax = checked_amax(&values, axis, scheme)?;
    let device = values.device();
    let upload = |values: &[f32]| {
        Tensor::<1>::from_data(
            TensorData::new(values.to_vec(), [values.len()]),
            (&device, DType::F32),
        )
        .into_dispatch()
    };
    let [costs, bounds] = match importance {
        Importance::Uniform => return Ok(crate::quantize_with_amax(values, layout, scheme, amax)),
        Importance::Channels(weights) => [upload(weights), upload(&[0.0])],
        Importance::Blocks(hessians) => {
            check_len(&[hessians.values().len()])?;
            [upload(hessians.values()), upload(hessians.bounds())]
        }
    };
    let packed = Dispatch::fp4_quantize_by_importance(
        values.into_dispatch(),
        amax.into_dispatch(),
        costs,
        bounds,
        axis,
        *scheme,
    );
    Ok(Fp4Tensor::from_primitive(packed, layout))
}

/// [`quantize`](crate::quantize) by [`Gptq`]: every rounding error is made up for by the weights that are
/// still to be rounded. The search of the scheme is not used.
///
/// The weight is read back and quantized on the host, by all its cores.
///
/// # Errors
/// As [`quantize`](crate::quantize); [`OpsError::Search`] if the Gram matrix is for another number of
/// channels, or singular and not damped.
pub fn quantize_gptq<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    options: &Gptq,
    gram: &Gram,
) -> Result<Fp4Tensor<D>, OpsError> {
    let values = values.without_autodiff();
    let scheme = scheme.with_search(ScaleSearch::Amax);
    let layout = Fp4Layout::new(&values.shape(), axis, &scheme)?;
    check_dtype(&values)?;
    let device = values.device();
    let (rows, cols) = (layout.rows(), layout.shape[axis]);
    let matrix: Tensor<2> = values.movedim(axis, D - 1).reshape([rows, cols]);
    let matrix = read(matrix)?;
    let amax = host::amax(&matrix, View::rows(rows, cols), &scheme);
    let packed = options.quantize(&matrix, rows, cols, &scheme, &amax, gram)?;
    let shape = core::array::from_fn(|dim| layout.shape[dim]);
    Fp4Tensor::from_packed(packed, shape, axis, &device)
}

/// [`quantize`](crate::quantize) with the tensor scale, of
/// [those worth trying](burn_fp4_search::tensor_scale_candidates), that leaves the smallest squared error.
///
/// # Errors
/// As [`quantize`](crate::quantize), and [`OpsError::Search`] if the scheme has no tensor scale to choose.
pub fn quantize_with_best_tensor_scale<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Tensor<D>, OpsError> {
    check_tensor_scale(scheme)?;
    let amax = read(crate::amax(values.clone())?)?[0];
    if !amax.is_finite() {
        return Err(OpsError::NonFinite { found: amax });
    }
    let with = |amax| scheme.with_tensor_scale(TensorScaling::Amax(amax));
    let candidates: Vec<_> = tensor_scale_candidates(amax).collect();
    let errors = candidates.iter().map(|&amax| {
        let packed = crate::quantize(values.clone(), axis, &with(amax))?;
        packed.squared_error(values.clone())
    });
    let errors = read(Tensor::cat(errors.collect::<Result<Vec<_>, _>>()?, 0))?;
    let mut best = 0;
    for candidate in 0..candidates.len() {
        if errors[2 * candidate] < errors[2 * best] {
            best = candidate;
        }
    }
    crate::quantize(values, axis, &with(candidates[best]))
}

/// `X^T X` of activations `[.., channels]`; see [`GramSum`].
///
/// # Errors
/// As [`GramSum::add`] and [`GramSum::finish`].
pub fn gram<const D: usize>(activations: Tensor<D>) -> Result<Gram, OpsError> {
    let mut sum = GramSum::new(activations.dims()[D - 1]);
    sum.add(activations)?;
    sum.finish()
}

/// `X^T X` summed up over batches of activations: in f64 on hosts, on other devices in f32 and there.
///
/// Devices that round the factors of an f32 product to 11 bits, as CUDA does, get f32 activations in two parts, so
/// that nothing is lost; f16 and bf16 lose nothing anyway.
#[derive(Debug)]
pub struct GramSum {
    /// Of what was on hosts.
    host: Gram,
    device: Option<Tensor<2>>,
    rows: usize,
}

impl GramSum {
    /// Of no activations yet.
    pub fn new(channels: usize) -> Self {
        Self { host: Gram::new(channels), device: None, rows: 0 }
    }

    /// Adds activations `[.., channels]`. On a device nothing is read back.
    ///
    /// # Errors
    /// [`OpsError::DType`] unless f32, f16 or bf16, [`OpsError::Format`] for another number of channels,
    /// [`OpsError::Search`] for a value that is not finite, on hosts already here.
    pub fn add<const D: usize>(&mut self, activations: Tensor<D>) -> Result<(), OpsError> {
        let (x, rows, channels) = matrix(activations)?;
        check_length("channels", self.host.channels(), channels)?;
        if is_host(&x.device()) {
            return Ok(self.host.add(&read(x)?)?);
        }
        let device = x.device();
        let zeros = || Tensor::zeros([channels, channels], (&device, DType::F32));
        let mut sum = self.device.take().unwrap_or_else(zeros);
        for start in (0..rows).step_by(CHUNK) {
            let x = x.clone().slice_dim(0, start..rows.min(start + CHUNK));
            sum = sum + exact_square(x);
        }
        self.device = Some(sum);
        self.rows += rows;
        Ok(())
    }

    /// Reads the sum back.
    ///
    /// # Errors
    /// [`OpsError::Search`] if a value was not finite, [`OpsError::Device`] if the device fails.
    pub fn finish(self) -> Result<Gram, OpsError> {
        let Self { mut host, device, rows } = self;
        if let Some(sum) = device {
            let values = read(sum)?.into_iter().map(f64::from).collect();
            host.merge(&Gram::from_values(values, host.channels(), rows)?)?;
        }
        Ok(host)
    }
}

/// `x^T x` in f32.
fn exact_square(x: Tensor<2>) -> Tensor<2> {
    let square = |x: Tensor<2>| x.clone().transpose().matmul(x);
    if x.dtype() != DType::F32 {
        return square(x.cast(DType::F32));
    }
    let high = x.clone().cast(DType::BF16).cast(DType::F32);
    let low = x - high.clone();
    let mixed = high.clone().transpose().matmul(low.clone());
    square(high) + (mixed.clone() + mixed.transpose()) + square(low)
}

/// Whether tensors are in the memory of the host.
fn is_host(device: &Device) -> bool {
    let plain = device.clone().inner();
    match plain.as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        burn::backend::DispatchDevice::NdArray(_) => true,
        _ => false,
    }
}

/// `X^T X` of activations `[.., channels]` within every block of channels, as [`gram`].
///
/// # Errors
/// As [`gram`], and [`OpsError::Format`] if the blocks do not divide the channels.
pub fn block_hessians<const D: usize>(
    activations: Tensor<D>,
    block_size: usize,
) -> Result<BlockHessians, OpsError> {
    let (x, rows, channels) = matrix(activations)?;
    if block_size == 0 || !channels.is_multiple_of(block_size) {
        let indivisible = FormatError::Indivisible { cols: channels, block_size };
        return Err(indivisible.into());
    }
    let blocks = channels / block_size;
    let shape = [blocks, block_size, block_size];
    let mut sum = Tensor::<3>::zeros(shape, (&x.device(), DType::F32));
    for start in (0..rows).step_by(CHUNK) {
        let end = rows.min(start + CHUNK);
        let x = x.clone().slice_dim(0, start..end).cast(DType::F32);
        let x = x.reshape([end - start, blocks, block_size]).swap_dims(0, 1);
        sum = sum + x.clone().swap_dims(1, 2).matmul(x);
    }
    Ok(BlockHessians::new(read(sum)?, block_size)?)
}

/// Rows that are multiplied at a time.
const CHUNK: usize = 1024;

/// Activations as a matrix, with its rows and channels.
fn matrix<const D: usize>(activations: Tensor<D>) -> Result<(Tensor<2>, usize, usize), OpsError> {
    check_dtype(&activations)?;
    let channels = activations.dims()[D - 1];
    let rows = activations.shape().num_elements() / channels.max(1);
    Ok((activations.without_autodiff().reshape([rows, channels]), rows, channels))
}

fn read<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f32>, OpsError> {
    let data = tensor.cast(DType::F32).try_into_data().map_err(OpsError::device)?;
    data.try_into_vec().map_err(OpsError::device)
}
