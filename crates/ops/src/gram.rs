//! Statistics of the inputs of layers: sums of products, and how many inputs there were.

use std::borrow::Cow;

use burn::backend::Dispatch;
use burn::tensor::distributed::{CollectiveTensor, ReduceOperation, all_reduce};
use burn::tensor::{DType, DataError, Device, Int, Tensor, TensorData};
use burn_fp4_search::formats::check_length;
use burn_fp4_search::host::View;
use burn_fp4_search::{BlockHessians, Gram, GramLayout};

use crate::devices::extension::Fp4Backend;
use crate::devices::is_host;
use crate::error::OpsError;
use crate::importance::read;
use crate::layout::check_dtype;
use crate::quantize;

/// `X^T X` of activations `[.., channels]`; see [`GramSum`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::gram;
///
/// let activations = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &Device::flex());
/// let gram = gram(activations)?;
/// assert_eq!(gram.get(0, 1), Some(1.0 * 2.0 + 3.0 * 4.0));
/// assert_eq!((gram.rows(), gram.amax()), (2, 4.0));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
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
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::block_hessians;
///
/// let activations = Tensor::<2>::from_floats([[1.0, 2.0, 3.0, 4.0]], &Device::flex());
/// let hessians = block_hessians(activations, 2)?;
/// assert_eq!(hessians.values(), [1.0, 2.0, 2.0, 4.0, 9.0, 12.0, 12.0, 16.0]);
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
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

/// `X^T X` summed over batches of activations, and their largest magnitude. On hosts in f64; on
/// other devices in place, products of 1024 activations in f32 and their sum in f64 where the
/// device has it. Sums of several devices are added by Burn's all-reduce. The products do not
/// depend on the device, and in f64 the order hardly matters: rounded to f32, the sums are the same
/// however batches were divided.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::GramSum;
///
/// let device = Device::flex();
/// let mut sum = GramSum::new(2);
/// sum.add(Tensor::<2>::from_floats([[1.0, 2.0]], &device))?;
/// sum.add(Tensor::<2>::from_floats([[3.0, 4.0]], &device))?;
/// let fetched = sum.fetch()?; // the device is free for the next sum
/// let gram = fetched.gather()?;
/// assert_eq!((gram.rows(), gram.get(0, 1)), (2, Some(14.0)));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
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
    #[must_use]
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
    /// [`OpsError::DType`] unless f32, f16 or bf16, [`OpsError::Format`] for another number of
    /// channels, [`OpsError::Search`] for a value that is not finite, on hosts already here.
    pub fn add<const D: usize>(&mut self, activations: Tensor<D>) -> Result<(), OpsError> {
        let (x, rows, channels) = matrix(activations)?;
        check_length("channels", self.host.channels(), channels)?;
        let device = x.device();
        if is_host(&device) {
            return Ok(self.host.add(&read(x)?)?);
        }
        let known = self.devices.iter().position(|sum| sum.device() == device);
        let at = known.unwrap_or_else(|| {
            let layout = GramLayout::of_device(channels, self.host.block_size());
            self.devices.push(DeviceSum::new(layout, PART, &device));
            self.devices.len() - 1
        });
        self.rows += rows;
        self.devices[at].add(x)
    }

    /// Reads the sum back.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch) and [`FetchedGram::gather`].
    pub fn finish(self) -> Result<Gram, OpsError> {
        self.fetch()?.gather()
    }

    /// Reads the sum back as devices lay it out. Then these are done with it, while the host has to
    /// gather it.
    ///
    /// # Errors
    /// [`OpsError::Device`] if a device fails, or if there are several that [cannot add
    /// up](check_addable) what they have.
    pub fn fetch(self) -> Result<FetchedGram, OpsError> {
        let Self { host, devices, rows } = self;
        let (mut amax, mut tokens) = (0.0f32, 0);
        for sum in &devices {
            amax = read(sum.amax.clone())?.into_iter().fold(amax, f32::max);
            let counted = sum.tokens.clone().try_into_data().map_err(OpsError::device)?;
            tokens += counted.iter::<i64>().map(|count| count as usize).sum::<usize>();
        }
        let layout = GramLayout::of_device(host.channels(), host.block_size());
        Ok(FetchedGram { host, layout, parts: add_up(devices)?, rows, tokens, amax })
    }
}

/// What a [`GramSum`] came to, where devices have written it.
#[derive(Debug)]
pub struct FetchedGram {
    /// Of what was on hosts.
    host: Gram,
    /// How the rest is laid out.
    layout: GramLayout,
    /// Its tiles, part after part, if there are any.
    parts: Vec<TensorData>,
    rows: usize,
    tokens: usize,
    amax: f32,
}

impl FetchedGram {
    /// As a matrix, or the blocks along its diagonal.
    ///
    /// # Errors
    /// [`OpsError::Search`] if a value was not finite.
    pub fn gather(self) -> Result<Gram, OpsError> {
        let Self { host, layout, parts, rows, tokens, amax } = self;
        if parts.is_empty() {
            return Ok(host);
        }
        let parts = parts.iter().map(elements).collect::<Result<Vec<_>, _>>();
        let parts: Vec<_> = parts.map_err(OpsError::device)?.into_iter().map(Sums::wide).collect();
        let tiles = parts.iter().flat_map(|part| part.chunks_exact(layout.tile_len()));
        let tiles: Vec<_> = tiles.collect();
        let gram = Gram::from_tiles(&tiles, layout, host.block_size(), rows, amax)?;
        let mut gram = gram.with_tokens(tokens)?;
        if host.rows() > 0 {
            gram.merge(&host)?;
        }
        Ok(gram)
    }
}

/// Elements of a part.
enum Sums<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
}

impl<'a> Sums<'a> {
    fn wide(self) -> Cow<'a, [f64]> {
        match self {
            Self::F32(sums) => sums.iter().map(|&sum| f64::from(sum)).collect(),
            Self::F64(sums) => Cow::Borrowed(sums),
        }
    }
}

fn elements(part: &TensorData) -> Result<Sums<'_>, DataError> {
    match part.dtype() {
        DType::F64 => part.as_slice().map(Sums::F64),
        _ => part.as_slice().map(Sums::F32),
    }
}

/// What one device sums up.
#[derive(Debug)]
struct DeviceSum {
    layout: GramLayout,
    /// Its tiles `[tiles, SIDE, SIDE]`, part after part.
    parts: Vec<Tensor<3>>,
    /// `[1]`: the largest magnitude of what was summed.
    amax: Tensor<1>,
    /// `[1]`: how many of its rows are not all zero.
    tokens: Tensor<1, Int>,
}

impl DeviceSum {
    /// Of nothing yet, in parts of so many tiles.
    fn new(layout: GramLayout, part: usize, device: &Device) -> Self {
        let wide = if device.supports_dtype(DType::F64) { DType::F64 } else { DType::F32 };
        let parts = (0..layout.count()).step_by(part).map(|first| {
            let tiles = part.min(layout.count() - first);
            Tensor::zeros([tiles, GramLayout::SIDE, GramLayout::SIDE], (device, wide))
        });
        let parts = parts.collect();
        let amax = Tensor::zeros([1], (device, DType::F32));
        Self { layout, parts, amax, tokens: Tensor::zeros([1], device) }
    }

    fn device(&self) -> Device {
        self.amax.device()
    }

    /// Adds activations `[rows, channels]`, as many rows at a time as a kernel takes.
    fn add(&mut self, x: Tensor<2>) -> Result<(), OpsError> {
        let [rows, channels] = x.dims();
        let most = (View::MAX_LEN / channels.max(1)).max(1);
        for start in (0..rows).step_by(most) {
            self.add_rows(x.clone().slice_dim(0, start..rows.min(start + most)))?;
        }
        Ok(())
    }

    fn add_rows(&mut self, x: Tensor<2>) -> Result<(), OpsError> {
        let amax = quantize::amax(x.clone())?;
        self.amax.inplace(|largest| largest.max_pair(amax));
        let of_rows = Dispatch::fp4_amax(x.clone().into_dispatch(), 1, true);
        let tokens = Tensor::<1>::from_dispatch(of_rows).greater_elem(0.0).int().sum();
        self.tokens.inplace(|sum| sum + tokens);
        let mut first = 0;
        for part in &mut self.parts {
            let tiles = part.dims()[0];
            part.inplace(|sums| {
                let (sums, x) = (sums.into_dispatch(), x.clone().into_dispatch());
                Tensor::from_dispatch(Dispatch::fp4_add_gram(sums, x, self.layout, first))
            });
            first += tiles;
        }
        Ok(())
    }
}

/// The sum of what different devices have, part after part.
fn add_up(sums: Vec<DeviceSum>) -> Result<Vec<TensorData>, OpsError> {
    let devices: Vec<_> = sums.iter().map(DeviceSum::device).collect();
    check_addable(&devices)?;
    let count = sums.first().map_or(0, |sum| sum.parts.len());
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
    let read = |part: Tensor<3>| -> Result<TensorData, OpsError> {
        let data = part.try_into_data().map_err(OpsError::device)?;
        // Burn reads when data is accessed, through memory that the thread which does so has
        // pinned: gathering is by threads that have none.
        elements(&data).map_err(OpsError::device)?;
        Ok(data)
    };
    (0..count).filter_map(added).map(read).collect()
}

/// Checks that tensors of several devices can be summed: on hosts always, otherwise by
/// NCCL, which connects those of CUDA.
///
/// ```
/// use burn::tensor::Device;
/// use burn_fp4_ops::check_addable;
///
/// assert!(check_addable(&[Device::flex(), Device::flex()]).is_ok());
/// ```
///
/// # Errors
/// [`OpsError::Device`] if it cannot.
pub fn check_addable(devices: &[Device]) -> Result<(), OpsError> {
    let others: Vec<_> = devices.iter().filter(|device| !is_host(device)).collect();
    match others.iter().find(|device| !has_collectives(device)) {
        Some(device) if others.len() > 1 => Err(OpsError::Device(format!(
            "{device:?} cannot add up tensors with other devices: that takes CUDA and its library \
             NCCL"
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

/// Tiles that are reduced and read at a time: 128 MiB.
const PART: usize = 1024;

/// Activations as a matrix, with its rows and channels.
fn matrix<const D: usize>(activations: Tensor<D>) -> Result<(Tensor<2>, usize, usize), OpsError> {
    check_dtype(&activations)?;
    let channels = activations.dims()[D - 1];
    let rows = activations.shape().num_elements() / channels.max(1);
    let matrix = match rows * channels {
        // In Burn's `reshape` 0 is the length that an axis has already.
        0 => Tensor::zeros([rows, channels], (&activations.device().inner(), activations.dtype())),
        _ => activations.without_autodiff().reshape([rows, channels]),
    };
    Ok((matrix, rows, channels))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn parts_make_up_the_whole_matrix() {
        let x = Tensor::<1>::from_floats([0.5, -1.25, 3.0, 0.75, -2.0, 1.0, 4.0], &Device::flex());
        for (channels, block_size, parts) in
            [(12, 12, 1), (300, 300, 3), (256, 16, 1), (300, 100, 3)]
        {
            let x = x.clone().repeat_dim(0, channels).reshape([7, channels]);
            let x = x.slice_fill([2..4, 0..channels], 0.0);
            let mut exact = Gram::new(channels);
            if block_size < channels {
                exact = Gram::in_blocks(channels, block_size).unwrap();
            }
            exact.add(&read(x.clone()).unwrap()).unwrap();
            let layout = GramLayout::of_device(channels, block_size);
            let mut sum = DeviceSum::new(layout, 2, &x.device());
            assert_eq!(sum.parts.len(), parts);
            sum.add(x.clone().slice_dim(0, 0..3)).unwrap();
            sum.add(x.clone().slice_dim(0, 3..7)).unwrap();
            assert_eq!(read(sum.amax.clone()).unwrap(), [exact.amax()]);
            let tokens = sum.tokens.clone().into_data().iter::<i64>().sum::<i64>() as usize;
            assert_eq!(tokens, 5);
            let (parts, amax) = (add_up(vec![sum]).unwrap(), exact.amax());
            let host = GramSum::in_blocks(channels, block_size).unwrap().host;
            let fetched = FetchedGram { host, layout, parts, rows: 7, tokens, amax };
            let found = fetched.gather().unwrap();
            // Of so short numbers no bit is lost.
            assert_eq!(found, exact);
        }
    }
}
