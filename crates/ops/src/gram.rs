//! Statistics of the inputs of layers: sums of products, and counts of inputs.

use std::borrow::Cow;

use burn::backend::Dispatch;
use burn::tensor::distributed::{CollectiveTensor, ReduceOperation, all_reduce};
use burn::tensor::{DType, DataError, Device, Int, Tensor, TensorData};
use burn_fp4_search::formats::check_length;
use burn_fp4_search::host::View;
use burn_fp4_search::{BlockHessians, Gram, GramLayout};

use crate::devices::extension::{Fp4Backend, is_host};
use crate::error::OpsError;
use crate::importance::read;
use crate::layout::check_dtype;
use crate::quantize;

/// Computes `X^T X` of activations `[.., channels]`; see [`GramSum`].
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

/// Computes `X^T X` of activations `[.., channels]` within each block of channels; see
/// [`GramSum`].
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

/// Sum of `X^T X` over batches of activations, with their largest magnitude.
///
/// Hosts sum products of up to 1024 activations of a batch in f32, and these sums in f64; for
/// blocks, every product in f64. Other devices sum in place: products of 1024 activations in f32,
/// and their sum in f64 if the device has it. Burn's all-reduce adds the sums of several devices.
/// The products do not depend on the device, and in f64 the order hardly matters, so the sums
/// rounded to f32 are the same however batches are divided among devices.
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
    /// Sum of the activations on hosts.
    host: Gram,
    /// Sums of the activations on other devices.
    devices: Vec<DeviceSum>,
    /// Number of activations on other devices.
    rows: usize,
    /// [Drift](Gram::drift) of the activations, by device.
    drift: Vec<Tensor<2>>,
}

impl GramSum {
    /// Begins a sum for the whole matrix.
    #[must_use]
    pub fn new(channels: usize) -> Self {
        Self::of(Gram::new(channels))
    }

    /// Begins a sum for the blocks along the diagonal.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::GramSum;
    ///
    /// let mut sum = GramSum::in_blocks(4, 2)?;
    /// sum.add(Tensor::<2>::from_floats([[1.0, 2.0, 3.0, 4.0]], &Device::flex()))?;
    /// let gram = sum.finish()?;
    /// assert_eq!((gram.get(2, 3), gram.get(1, 2)), (Some(12.0), None)); // of other blocks
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::Search`] if the blocks do not divide the channels.
    pub fn in_blocks(channels: usize, block_size: usize) -> Result<Self, OpsError> {
        Ok(Self::of(Gram::in_blocks(channels, block_size)?))
    }

    fn of(host: Gram) -> Self {
        Self { host, devices: Vec::new(), rows: 0, drift: Vec::new() }
    }

    /// Adds activations `[.., channels]`. Reads nothing back from a device.
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

    /// [Adds](Self::add) activations `[.., channels]` that quantized layers leave, with their
    /// [drift](Gram::drift) from the dense activations that dense layers leave. Products of the
    /// drift are summed in f32 (on CUDA in TF32), and these sums in f64 if the device has it. An
    /// activation that is all zero in either, such as an input of an expert that was not chosen,
    /// has no drift.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::GramSum;
    ///
    /// let device = Device::flex();
    /// let mut sum = GramSum::new(2);
    /// let quantized = Tensor::<2>::from_floats([[1.0, 2.0]], &device);
    /// let dense = Tensor::<2>::from_floats([[1.5, 2.0]], &device);
    /// sum.add_with_drift(quantized, dense)?;
    /// assert_eq!(sum.finish()?.drift().unwrap(), [0.5, 0.0, 1.0, 0.0]);
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// As [`add`](Self::add); [`OpsError::DType`] and [`OpsError::Format`] also for the dense
    /// activations, and if the sum is of blocks. [`finish`](Self::finish) returns
    /// [`OpsError::Search`] if the drift is not finite.
    pub fn add_with_drift<const D: usize>(
        &mut self,
        quantized: Tensor<D>,
        dense: Tensor<D>,
    ) -> Result<(), OpsError> {
        let (x, rows, channels) = matrix(quantized)?;
        let (y, dense_rows, dense_channels) = matrix(dense)?;
        check_length("channels of dense activations", channels, dense_channels)?;
        check_length("rows of dense activations", rows, dense_rows)?;
        check_length("channels of a block", self.host.channels(), self.host.block_size())?;
        self.add(x.clone())?;
        let drift = match rows {
            0 => Tensor::zeros([channels, channels], (&x.device(), DType::F32)),
            _ => {
                let y = y.to_device(&x.device()).cast(DType::F32);
                let x = x.cast(DType::F32);
                let seen = y.clone().abs().max_dim(1).greater_elem(0.0).float().cast(DType::F32);
                deterministic_matmul(x.clone().transpose(), (y - x) * seen)
            }
        };
        let device = drift.device();
        let drift = drift.cast(widest(&device));
        match self.drift.iter_mut().find(|sum| sum.device() == device) {
            Some(sum) => sum.inplace(|sum| sum + drift),
            None => self.drift.push(drift),
        }
        Ok(())
    }

    /// Reads the sum back.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch) and [`FetchedGram::gather`].
    pub fn finish(self) -> Result<Gram, OpsError> {
        self.fetch()?.gather()
    }

    /// Reads the sum back in the layout of the devices, which are free afterwards. The host still
    /// has to [gather](FetchedGram::gather) it.
    ///
    /// # Errors
    /// [`OpsError::Device`] if a device fails, or if several devices [cannot add up](check_addable)
    /// their sums.
    pub fn fetch(self) -> Result<FetchedGram, OpsError> {
        let Self { host, devices, rows, drift } = self;
        let drift = drift.into_iter().map(read_here).collect::<Result<Vec<_>, _>>()?;
        let (mut amax, mut tokens) = (0.0f32, 0);
        for sum in &devices {
            amax = read(sum.amax.clone())?.into_iter().fold(amax, f32::max);
            let counted = sum.tokens.clone().try_into_data().map_err(OpsError::device)?;
            tokens += counted.iter::<i64>().map(|count| count as usize).sum::<usize>();
        }
        let layout = GramLayout::of_device(host.channels(), host.block_size());
        Ok(FetchedGram { host, layout, parts: add_up(devices)?, rows, tokens, amax, drift })
    }
}

/// A finished [`GramSum`], in the layout of the devices.
#[derive(Debug)]
pub struct FetchedGram {
    /// Sum of the activations on hosts.
    host: Gram,
    layout: GramLayout,
    /// Tiles of the sum of other devices, part after part.
    parts: Vec<TensorData>,
    rows: usize,
    tokens: usize,
    amax: f32,
    /// By device.
    drift: Vec<TensorData>,
}

impl FetchedGram {
    /// Converts it to a matrix, or the blocks along the diagonal.
    ///
    /// # Errors
    /// [`OpsError::Search`] if a value was not finite.
    pub fn gather(mut self) -> Result<Gram, OpsError> {
        let drift = std::mem::take(&mut self.drift);
        let gram = self.gather_squares()?;
        let parts = drift.iter().map(elements).collect::<Result<Vec<_>, _>>();
        let parts = parts.map_err(OpsError::device)?.into_iter().map(Sums::wide);
        let sum = parts.reduce(|mut sum, part| {
            sum.to_mut().iter_mut().zip(&*part).for_each(|(sum, value)| *sum += value);
            sum
        });
        Ok(match sum {
            Some(sum) => gram.with_drift(sum.iter().map(|&sum| sum as f32).collect())?,
            None => gram,
        })
    }

    fn gather_squares(self) -> Result<Gram, OpsError> {
        let Self { host, layout, parts, rows, tokens, amax, drift: _ } = self;
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

/// Sum of the activations on one device.
#[derive(Debug)]
struct DeviceSum {
    layout: GramLayout,
    /// Tiles `[tiles, SIDE, SIDE]`, part after part.
    parts: Vec<Tensor<3>>,
    /// Largest magnitude `[1]` of the activations.
    amax: Tensor<1>,
    /// Number `[1]` of rows that are not all zero.
    tokens: Tensor<1, Int>,
}

impl DeviceSum {
    /// Begins a sum in parts of `part` tiles.
    fn new(layout: GramLayout, part: usize, device: &Device) -> Self {
        let wide = widest(device);
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

    /// Adds activations `[rows, channels]`, at most [`View::MAX_LEN`] values at a time.
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

/// Adds up the sums of several devices, part after part.
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
        // An all-reduce waits for all devices: start it on each before waiting for any.
        let sums: Vec<_> = of_devices
            .map(|part| all_reduce(part, ReduceOperation::Sum, devices.clone()))
            .collect();
        sums.into_iter().map(CollectiveTensor::resolve).last()
    };
    (0..count).filter_map(added).map(read_here).collect()
}

/// Reads sums back on this thread. Burn reads at the first access, through memory pinned by the
/// accessing thread, and the threads that gather have none.
fn read_here<const D: usize>(sums: Tensor<D>) -> Result<TensorData, OpsError> {
    let data = sums.try_into_data().map_err(OpsError::device)?;
    elements(&data).map_err(OpsError::device)?;
    Ok(data)
}

/// Checks that tensors of several devices can be summed. Hosts always can; of other devices only
/// CUDA's can, with NCCL.
///
/// ```
/// use burn::tensor::Device;
/// use burn_fp4_ops::check_addable;
///
/// assert!(check_addable(&[Device::flex(), Device::flex()]).is_ok());
/// ```
///
/// # Errors
/// [`OpsError::Device`] if they cannot.
pub fn check_addable(devices: &[Device]) -> Result<(), OpsError> {
    let others: Vec<_> = devices.iter().filter(|device| !is_host(device)).collect();
    match others.iter().find(|device| !has_collectives(device)) {
        Some(device) if others.len() > 1 => Err(OpsError::Device(format!(
            "{device:?} cannot add up tensors of several devices; use one device, or CUDA with \
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

/// The dtype of sums on a device.
fn widest(device: &Device) -> DType {
    if device.supports_dtype(DType::F64) { DType::F64 } else { DType::F32 }
}

/// Tiles that are reduced and read at a time, 128 MiB.
const PART: usize = 1024;

/// Multiplies matrices in a fixed order of sums.
pub(crate) fn deterministic_matmul(left: Tensor<2>, right: Tensor<2>) -> Tensor<2> {
    let (left, right) = (left.into_dispatch(), right.into_dispatch());
    Tensor::from_dispatch(Dispatch::fp4_deterministic_matmul(left, right))
}

/// Reshapes activations to a matrix `[rows, channels]`.
fn matrix<const D: usize>(activations: Tensor<D>) -> Result<(Tensor<2>, usize, usize), OpsError> {
    check_dtype(&activations)?;
    let channels = activations.dims()[D - 1];
    let rows = activations.shape().num_elements() / channels.max(1);
    let matrix = match rows * channels {
        // In Burn's `reshape` a 0 keeps the length of an axis.
        0 => Tensor::zeros([rows, channels], (&activations.device().inner(), activations.dtype())),
        _ => activations.without_autodiff().reshape([rows, channels]),
    };
    Ok((matrix, rows, channels))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Distribution;

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
            let drift = Vec::new();
            let fetched = FetchedGram { host, layout, parts, rows: 7, tokens, amax, drift };
            let found = fetched.gather().unwrap();
            // The values are short: their sums are exact.
            assert_eq!(found, exact);
        }
    }

    /// Makes activations behind quantized and behind dense layers.
    fn both(device: &Device) -> [Tensor<2>; 2] {
        let x = [[1.0, -2.0], [0.0, 0.0], [3.0, 0.5], [4.0, 1.0]];
        let y = [[1.5, -2.0], [2.0, 1.0], [0.0, 0.0], [4.0, 3.0]];
        [x, y].map(|values| Tensor::from_floats(values, device))
    }

    #[test]
    fn only_activations_seen_by_both_have_a_drift() {
        let device = Device::flex();
        let [x, y] = both(&device);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut sum = GramSum::new(2);
            for rows in [0..2, 2..2, 2..4] {
                let part =
                    |values: &Tensor<2>| values.clone().slice_dim(0, rows.clone()).cast(dtype);
                sum.add_with_drift(part(&x), part(&y)).unwrap();
            }
            let gram = sum.finish().unwrap();
            assert_eq!(gram.drift().unwrap(), [0.5, 8.0, -1.0, 2.0], "{dtype:?}");
            assert_eq!((gram.rows(), gram.get(0, 0)), (4, Some(26.0)));
        }
    }

    #[test]
    fn a_drift_of_other_shapes_or_values_is_an_error() {
        let device = Device::flex();
        let [x, y] = both(&device);
        let mut blocks = GramSum::in_blocks(2, 1).unwrap();
        let error = blocks.add_with_drift(x.clone(), y.clone()).unwrap_err();
        assert!(error.to_string().contains("channels of a block"), "{error}");
        let short = y.clone().slice_dim(0, 0..3);
        let error = GramSum::new(2).add_with_drift(x.clone(), short).unwrap_err();
        assert!(error.to_string().contains("rows of dense activations"), "{error}");
        let mut infinite = GramSum::new(2);
        infinite.add_with_drift(x, y / 0.0).unwrap();
        let error = infinite.finish().unwrap_err();
        assert!(error.to_string().contains("the drift of the activations is"), "{error}");
    }

    #[test]
    fn a_drift_is_transformed_as_its_inputs_are() {
        let device = Device::flex();
        device.seed(5);
        let normal = Distribution::Normal(0.0, 1.0);
        let [x, y] = [(); 2].map(|()| Tensor::<2>::random([40, 64], normal, &device));
        let gram = |x, y| {
            let mut sum = GramSum::new(64);
            sum.add_with_drift(x, y).unwrap();
            sum.finish().unwrap()
        };
        let plain = gram(x.clone(), y.clone());
        for size in [16, 64] {
            let hadamard = burn_fp4_search::Hadamard::of_size(size).unwrap();
            let transformed = |values: &Tensor<2>| crate::hadamard(values.clone(), 1, hadamard);
            let expected = gram(transformed(&x).unwrap(), transformed(&y).unwrap());
            let found = plain.clone().transformed(hadamard).unwrap();
            let pairs = found.drift().unwrap().iter().zip(expected.drift().unwrap());
            let far = pairs.map(|(found, expected)| (found - expected).abs()).fold(0.0, f32::max);
            assert!(far < 1e-3, "{size}: {far}");
        }
    }
}
