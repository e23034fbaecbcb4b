//! Statistics of activations.

use burn::tensor::distributed::{CollectiveTensor, ReduceOperation, all_reduce};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fp4_search::formats::check_length;
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

/// `X^T X` of activations `[.., channels]` within every block of channels; see [`GramSum`].
///
/// # Errors
/// As [`gram`], and [`OpsError::Search`] if the blocks do not divide the channels.
pub fn block_hessians<const D: usize>(
    activations: Tensor<D>,
    block_size: usize,
) -> Result<BlockHessians, OpsError> {
    let mut sum = GramSum::in_blocks(activations.dims()[D - 1], block_size)?;
    sum.add(activations)?;
    Ok(sum.finish()?.blocks(block_size)?)
}

/// `X^T X` summed up over batches of activations: in f64 on hosts, on other devices there, products of 1024 activations
/// in f32 and their sum in f64 where the device has it. What is on several devices is added up by Burn's all-reduce. In
/// f64 the order hardly matters: rounded to f32 at the end, the sums are the same however batches were divided.
///
/// Devices that round the factors of an f32 product to 11 bits, as CUDA does, get f32 activations in two parts, so
/// that nothing is lost; f16 and bf16 lose nothing anyway.
#[derive(Debug)]
pub struct GramSum {
    /// Of what was on hosts.
    host: Gram,
    /// Of what was on other devices, `[blocks, block_size, block_size]`, one for each.
    devices: Vec<Tensor<3>>,
    /// How many activations were there.
    rows: usize,
}

impl GramSum {
    /// Of the whole matrix and no activations yet.
    pub fn new(channels: usize) -> Self {
        Self { host: Gram::new(channels), devices: Vec::new(), rows: 0 }
    }

    /// Of the blocks along its diagonal and no activations yet.
    ///
    /// # Errors
    /// [`OpsError::Search`] if they do not divide the channels.
    pub fn in_blocks(channels: usize, block_size: usize) -> Result<Self, OpsError> {
        Ok(Self { host: Gram::in_blocks(channels, block_size)?, devices: Vec::new(), rows: 0 })
    }

    /// Adds activations `[.., channels]`. On a device nothing is read back.
    ///
    /// # Errors
    /// [`OpsError::DType`] unless f32, f16 or bf16, [`OpsError::Format`] for another number of channels,
    /// [`OpsError::Search`] for a value that is not finite, on hosts already here.
    pub fn add<const D: usize>(&mut self, activations: Tensor<D>) -> Result<(), OpsError> {
        let (x, rows, channels) = matrix(activations)?;
        check_length("channels", self.host.channels(), channels)?;
        let device = x.device();
        if is_host(&device) {
            return Ok(self.host.add(&read(x)?)?);
        }
        let size = self.host.block_size();
        let blocks = channels / size.max(1);
        let known = self.devices.iter().position(|sum| sum.device() == device);
        let mut sum = match known {
            Some(at) => self.devices.swap_remove(at),
            None => {
                let wide = if device.supports_dtype(DType::F64) { DType::F64 } else { DType::F32 };
                Tensor::zeros([blocks, size, size], (&device, wide))
            }
        };
        let wide = FloatDType::from(sum.dtype());
        for start in (0..rows).step_by(CHUNK) {
            let end = rows.min(start + CHUNK);
            let x = x.clone().slice_dim(0, start..end);
            let square: Tensor<3> = match blocks {
                1 => exact_square(x).unsqueeze(),
                _ => exact_square(x.reshape([end - start, blocks, size]).swap_dims(0, 1)),
            };
            sum = sum + square.cast(wide);
        }
        self.devices.push(sum);
        self.rows += rows;
        Ok(())
    }

    /// Reads the sum back.
    ///
    /// # Errors
    /// [`OpsError::Search`] if a value was not finite, [`OpsError::Device`] if a device fails, or if there are several
    /// that [cannot add up](check_addable) what they have.
    pub fn finish(self) -> Result<Gram, OpsError> {
        let Self { host, devices, rows } = self;
        let Some(sum) = add_up(devices)? else { return Ok(host) };
        let values = read(sum.cast(DType::F32))?;
        let mut gram = Gram::from_values(&values, host.channels(), host.block_size(), rows)?;
        if host.rows() > 0 {
            gram.merge(&host)?;
        }
        Ok(gram)
    }
}

/// The sum of tensors on different devices, on one of them.
fn add_up(mut tensors: Vec<Tensor<3>>) -> Result<Option<Tensor<3>>, OpsError> {
    if tensors.len() < 2 {
        return Ok(tensors.pop());
    }
    let devices: Vec<_> = tensors.iter().map(Tensor::device).collect();
    check_addable(&devices)?;
    // All have to take part before any can be waited for.
    let sums: Vec<_> = tensors
        .into_iter()
        .map(|tensor| all_reduce(tensor, ReduceOperation::Sum, devices.clone()))
        .collect();
    let mut sums: Vec<_> = sums.into_iter().map(CollectiveTensor::resolve).collect();
    Ok(sums.pop())
}

/// Checks that what is computed on several devices can be added up: on hosts always, otherwise by NCCL, which
/// connects those of CUDA.
///
/// # Errors
/// [`OpsError::Device`] if it cannot.
pub fn check_addable(devices: &[Device]) -> Result<(), OpsError> {
    let others: Vec<_> = devices.iter().filter(|device| !is_host(device)).collect();
    match others.iter().find(|device| !has_collectives(device)) {
        Some(device) if others.len() > 1 => Err(OpsError::Device(format!(
            "{device:?} cannot add up tensors with other devices: that takes CUDA and its library NCCL"
        ))),
        _ => Ok(()),
    }
}

fn has_collectives(device: &Device) -> bool {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cuda")]
        burn::backend::DispatchDevice::Cube(device @ burn_cubecl::CubeDevice::Cuda(_)) => {
            device.client().has_device_transport()
        }
        _ => false,
    }
}

/// `x^T x` in f32, of matrices `[.., rows, channels]`.
fn exact_square<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let square = |x: Tensor<D>| x.clone().transpose().matmul(x);
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

/// Rows that are multiplied at a time.
const CHUNK: usize = 1024;

/// Activations as a matrix, with its rows and channels.
fn matrix<const D: usize>(activations: Tensor<D>) -> Result<(Tensor<2>, usize, usize), OpsError> {
    check_dtype(&activations)?;
    let channels = activations.dims()[D - 1];
    let rows = activations.shape().num_elements() / channels.max(1);
    Ok((activations.without_autodiff().reshape([rows, channels]), rows, channels))
}
