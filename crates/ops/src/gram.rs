//! Statistics of activations.

use std::ops::Range;

use burn::tensor::distributed::{CollectiveTensor, ReduceOperation, all_reduce};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fp4_search::formats::check_length;
use burn_fp4_search::{BlockHessians, Gram};
use rayon::prelude::*;

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

/// `X^T X` summed up over batches of activations, and their largest magnitude: in f64 on hosts, on other devices there,
/// products of 1024 activations in f32 and their sum in f64 where the device has it. What is on several devices is added
/// up by Burn's all-reduce. In f64 the order hardly matters: rounded to f32, the sums are the same however batches were
/// divided.
///
/// Devices that round the factors of an f32 product to 11 bits, as CUDA does, get f32 activations in two parts, so
/// that nothing is lost; f16 and bf16 lose nothing anyway.
#[derive(Debug)]
pub struct GramSum {
    /// Of what was on hosts.
    host: Gram,
    /// Of what was on other devices.
    devices: Vec<DeviceSum>,
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
        let known = self.devices.iter().position(|sum| sum.device() == device);
        let at = known.unwrap_or_else(|| {
            let block_size = self.host.block_size();
            self.devices.push(DeviceSum::new(channels, block_size, PART, &device));
            self.devices.len() - 1
        });
        self.rows += rows;
        self.devices[at].add(x)
    }

    /// Reads the sum back.
    ///
    /// # Errors
    /// [`OpsError::Search`] if a value was not finite, [`OpsError::Device`] if a device fails, or if there are several
    /// that [cannot add up](check_addable) what they have.
    pub fn finish(self) -> Result<Gram, OpsError> {
        let Self { host, devices, rows } = self;
        if devices.is_empty() {
            return Ok(host);
        }
        let mut amax = 0.0f32;
        for sum in &devices {
            amax = read(sum.amax.clone())?.into_iter().fold(amax, f32::max);
        }
        let values = add_up(devices)?;
        let mut gram = Gram::from_values(values, host.channels(), host.block_size(), rows, amax)?;
        if host.rows() > 0 {
            gram.merge(&host)?;
        }
        Ok(gram)
    }
}

/// What one device sums up.
#[derive(Debug)]
struct DeviceSum {
    /// Rows of the whole matrix `[1, rows, channels]`, part after part, or its blocks
    /// `[blocks, block_size, block_size]`.
    parts: Vec<Tensor<3>>,
    /// `[1]`: the largest magnitude of what was summed.
    amax: Tensor<1>,
}

impl DeviceSum {
    /// Of nothing yet; of a whole matrix, so many rows are computed at a time.
    fn new(channels: usize, block_size: usize, rows: usize, device: &Device) -> Self {
        let wide = if device.supports_dtype(DType::F64) { DType::F64 } else { DType::F32 };
        let zeros = |shape: [usize; 3]| Tensor::zeros(shape, (device, wide));
        let parts = match channels / block_size.max(1) {
            1 => {
                let starts = (0..channels).step_by(rows);
                starts.map(|start| zeros([1, rows.min(channels - start), channels])).collect()
            }
            blocks => vec![zeros([blocks, block_size, block_size])],
        };
        Self { parts, amax: Tensor::zeros([1], (device, DType::F32)) }
    }

    fn device(&self) -> Device {
        self.parts[0].device()
    }

    /// Adds activations `[rows, channels]`.
    fn add(&mut self, x: Tensor<2>) -> Result<(), OpsError> {
        let [rows, channels] = x.dims();
        let amax = crate::amax(x.clone())?;
        self.amax.inplace(|largest| largest.max_pair(amax));
        let size = self.parts[0].dims()[2];
        for start in (0..rows).step_by(CHUNK) {
            let end = rows.min(start + CHUNK);
            let x = x.clone().slice_dim(0, start..end);
            let x = x.reshape([end - start, channels / size.max(1), size]).swap_dims(0, 1);
            let x = Exact::new(x);
            let mut from = 0;
            for part in &mut self.parts {
                let channels = from..from + part.dims()[1];
                from = channels.end;
                let wide: FloatDType = part.dtype().into();
                part.inplace(|sum| sum + x.products(channels).cast(wide));
            }
            // Otherwise operations of several turns are fused, every time in another way, which takes compiling. That
            // something failed is found when the sum is read.
            let _ = self.device().flush();
        }
        Ok(())
    }
}

/// The sum of what different devices have: the blocks, one after the other.
fn add_up(sums: Vec<DeviceSum>) -> Result<Vec<f64>, OpsError> {
    let devices: Vec<_> = sums.iter().map(DeviceSum::device).collect();
    check_addable(&devices)?;
    let count = sums[0].parts.len();
    let elements = sums[0].parts.iter().map(|part| part.shape().num_elements()).sum();
    let mut queues: Vec<_> = sums.into_iter().map(|sum| sum.parts.into_iter()).collect();
    let added = |_| {
        let mut of_devices = queues.iter_mut().filter_map(Iterator::next);
        if devices.len() == 1 {
            return of_devices.next();
        }
        // All have to take part before any can be waited for.
        let sums: Vec<_> = of_devices
            .map(|part| all_reduce(part, ReduceOperation::Sum, devices.clone()))
            .collect();
        sums.into_iter().map(CollectiveTensor::resolve).last()
    };
    let mut values = Vec::with_capacity(elements);
    for part in (0..count).filter_map(added) {
        // Large: looked at where the device has written it.
        let data = part.try_into_data().map_err(OpsError::device)?;
        match data.dtype() {
            DType::F64 => values.par_extend(data.as_slice::<f64>().map_err(OpsError::device)?),
            _ => {
                let narrow = data.as_slice::<f32>().map_err(OpsError::device)?;
                values.par_extend(narrow.par_iter().map(|&value| f64::from(value)));
            }
        }
    }
    Ok(values)
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

/// Matrices `[blocks, rows, channels]` as f32 of 8 bits, or as sums of two.
struct Exact {
    high: Tensor<3>,
    low: Option<Tensor<3>>,
}

impl Exact {
    fn new(x: Tensor<3>) -> Self {
        if x.dtype() != DType::F32 {
            return Self { high: x.cast(DType::F32), low: None };
        }
        let high = x.clone().cast(DType::BF16).cast(DType::F32);
        Self { low: Some(x - high.clone()), high }
    }

    /// `left^T right` in f32, of some channels and all.
    fn products(&self, channels: Range<usize>) -> Tensor<3> {
        let products = |left: &Tensor<3>, right: &Tensor<3>| {
            let left = match channels.len() == left.dims()[2] {
                true => left.clone(),
                false => left.clone().slice_dim(2, channels.clone()),
            };
            // A single matrix as one, which is multiplied faster.
            match left.dims()[0] {
                1 => {
                    let left: Tensor<2> = left.squeeze_dim(0);
                    left.transpose().matmul(right.clone().squeeze_dim(0)).unsqueeze()
                }
                _ => left.transpose().matmul(right.clone()),
            }
        };
        let high = products(&self.high, &self.high);
        match &self.low {
            None => high,
            Some(low) => {
                let mixed = products(&self.high, low) + products(low, &self.high);
                high + mixed + products(low, low)
            }
        }
    }
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

/// Activations that are multiplied at a time.
const CHUNK: usize = 1024;

/// Rows of the sum that are computed at a time: of a matrix of many channels, products take less memory than sums.
const PART: usize = 2048;

/// Activations as a matrix, with its rows and channels.
fn matrix<const D: usize>(activations: Tensor<D>) -> Result<(Tensor<2>, usize, usize), OpsError> {
    check_dtype(&activations)?;
    let channels = activations.dims()[D - 1];
    let rows = activations.shape().num_elements() / channels.max(1);
    Ok((activations.without_autodiff().reshape([rows, channels]), rows, channels))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn parts_make_up_the_whole_matrix() {
        let x = Tensor::<1>::from_floats([0.5, -1.25, 3.0, 0.75, -2.0, 1.0, 4.0], &Device::flex());
        let x = x.repeat_dim(0, 12).reshape([7, 12]);
        let exact = Gram::of(&read(x.clone()).unwrap(), 12).unwrap();
        for rows in [1, 5, 6, 12, 100] {
            let mut sum = DeviceSum::new(12, 12, rows, &x.device());
            assert_eq!(sum.parts.len(), 12_usize.div_ceil(rows));
            sum.add(x.clone().slice_dim(0, 0..3)).unwrap();
            sum.add(x.clone().slice_dim(0, 3..7)).unwrap();
            assert_eq!(read(sum.amax.clone()).unwrap(), [exact.amax()]);
            // Of so short numbers no bit is lost.
            assert_eq!(add_up(vec![sum]).unwrap(), exact.values());
        }
    }
}
