//! Statistics of activations.

use burn::tensor::{DType, Device, Tensor};
use burn_fp4_search::formats::{FormatError, check_length};
use burn_fp4_search::{BlockHessians, Gram};

use crate::importance::read;
use crate::{OpsError, check_dtype};

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
    channels: usize,
    /// Of what was on hosts.
    host: Option<Gram>,
    /// Of what was on other devices, and how many rows.
    device: Option<(Tensor<2>, usize)>,
}

impl GramSum {
    /// Of no activations yet.
    pub fn new(channels: usize) -> Self {
        Self { channels, host: None, device: None }
    }

    /// Adds activations `[.., channels]`. On a device nothing is read back.
    ///
    /// # Errors
    /// [`OpsError::DType`] unless f32, f16 or bf16, [`OpsError::Format`] for another number of channels,
    /// [`OpsError::Search`] for a value that is not finite, on hosts already here.
    pub fn add<const D: usize>(&mut self, activations: Tensor<D>) -> Result<(), OpsError> {
        let (x, rows, channels) = matrix(activations)?;
        check_length("channels", self.channels, channels)?;
        let device = x.device();
        if is_host(&device) {
            let sum = self.host.get_or_insert_with(|| Gram::new(channels));
            return Ok(sum.add(&read(x)?)?);
        }
        let zeros = || (Tensor::zeros([channels, channels], (&device, DType::F32)), 0);
        let (mut sum, before) = self.device.take().unwrap_or_else(zeros);
        for start in (0..rows).step_by(CHUNK) {
            let x = x.clone().slice_dim(0, start..rows.min(start + CHUNK));
            sum = sum + exact_square(x);
        }
        self.device = Some((sum, before + rows));
        Ok(())
    }

    /// Reads the sum back.
    ///
    /// # Errors
    /// [`OpsError::Search`] if a value was not finite, [`OpsError::Device`] if the device fails.
    pub fn finish(self) -> Result<Gram, OpsError> {
        let Self { channels, host, device } = self;
        let Some((sum, rows)) = device else {
            return Ok(host.unwrap_or_else(|| Gram::new(channels)));
        };
        let values = read(sum)?.into_iter().map(f64::from).collect();
        let mut gram = Gram::from_values(values, channels, rows)?;
        if let Some(host) = host {
            gram.merge(&host)?;
        }
        Ok(gram)
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
