//! An [`Fp4Tensor`] as the data of Burn's own quantized tensors, and back.

use burn::tensor::quantization::{QuantMode, QuantScheme, QuantStore, QuantValue, ScaleDtype};
use burn::tensor::{DType, Device, TensorData};
use burn_fp4_search::formats::{Fp4Format, Packed, TensorScale};

use crate::error::OpsError;
use crate::tensor::Fp4Tensor;

impl<const D: usize> Fp4Tensor<D> {
    /// Returns the data of Burn's own quantized tensor with these codes and scales, of which
    /// `Tensor::from_data` makes a tensor where the device holds E2M1. Burn multiplies both scales
    /// first: values of NVFP4 may differ in their last bit.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_fp4_ops::{Fp4Scheme, Fp4Tensor, quantize};
    ///
    /// let device = Device::flex();
    /// let weight = Tensor::<2>::random([64, 32], Distribution::Default, &device);
    /// let packed = quantize(weight, 0, &Fp4Scheme::nvfp4())?;
    /// let again = Fp4Tensor::<2>::from_burn_data(&packed.to_burn_data()?, &device)?;
    /// assert_eq!(again.dequantize().into_data(), packed.dequantize().into_data());
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::BurnData`] for blocks along another axis than the last one or axis 0 of a
    /// matrix, for a tensor scale for each row, and for a Hadamard transform; [`OpsError::Device`]
    /// if the device fails.
    pub fn to_burn_data(&self) -> Result<TensorData, OpsError> {
        let layout = self.layout();
        let refused = |found: String| OpsError::BurnData { found };
        if layout.hadamard.is_some() {
            return Err(refused("codes of values after a Hadamard transform".to_owned()));
        }
        let from_end = packed_dimension(layout.axis, D).ok_or_else(|| {
            refused(format!("blocks along axis {} of a tensor of rank {D}", layout.axis))
        })?;
        let block_size = u8::try_from(layout.block_size)
            .map_err(|_| refused(format!("blocks of {}", layout.block_size)))?;
        let packed = self.to_packed()?;
        let mut block = vec![block_size];
        block.resize(1 + from_end, 1);
        let scheme = QuantScheme::default()
            .with_value(QuantValue::E2M1)
            .with_store(QuantStore::PackedU32(from_end));
        let mut bytes = [packed.codes, packed.scales].concat();
        let scheme = match (layout.format, packed.tensor_scale) {
            (Fp4Format::MxFp4, _) => scheme.per_block(block, ScaleDtype::UE8M0),
            (Fp4Format::NvFp4, TensorScale::One(scale)) => {
                bytes.extend(scale.to_ne_bytes());
                scheme.per_block(block, ScaleDtype::UE4M3).per_tensor(ScaleDtype::F32)
            }
            (Fp4Format::NvFp4, TensorScale::PerRow(_)) => {
                return Err(refused("a tensor scale for each row".to_owned()));
            }
        };
        Ok(TensorData::from_bytes_vec(bytes, layout.shape.clone(), DType::QFloat(scheme)))
    }

    /// Uploads the data of Burn's own quantized tensor, such as `into_data` of one gives.
    ///
    /// # Errors
    /// [`OpsError::BurnData`] for other data than [`to_burn_data`](Self::to_burn_data) returns;
    /// as [`from_packed`](Self::from_packed).
    pub fn from_burn_data(data: &TensorData, device: &Device) -> Result<Self, OpsError> {
        let refused = |found: String| OpsError::BurnData { found };
        let DType::QFloat(scheme) = data.dtype() else {
            return Err(refused(format!("{:?}", data.dtype())));
        };
        if (scheme.value, scheme.mode) != (QuantValue::E2M1, QuantMode::Symmetric) {
            return Err(refused(format!("values {:?}, mode {:?}", scheme.value, scheme.mode)));
        }
        let levels = (scheme.block_scale().map(|block| block.dtype), scheme.tensor_scale());
        let format = match levels {
            (Some(ScaleDtype::UE4M3), Some(ScaleDtype::F32)) => Fp4Format::NvFp4,
            (Some(ScaleDtype::UE8M0), None) => Fp4Format::MxFp4,
            (block, tensor) => {
                return Err(refused(format!("block scales {block:?}, tensor scale {tensor:?}")));
            }
        };
        let shape: [usize; D] = data.shape().to_vec().try_into().map_err(|shape: Vec<usize>| {
            refused(format!("shape {shape:?} for a tensor of rank {D}"))
        })?;
        let blocks = scheme.block_size().map_or_else(Vec::new, |size| size.to_dim_vec(D));
        let is_packed = |&axis: &usize| {
            let store = packed_dimension(axis, D).map(QuantStore::PackedU32);
            let others = blocks.iter().enumerate().filter(|&(at, _)| at != axis);
            store == Some(scheme.store) && others.into_iter().all(|(_, &size)| size == 1)
        };
        let axis =
            blocks.iter().position(|&size| size > 1).filter(is_packed).ok_or_else(|| {
                refused(format!("blocks {blocks:?}, stored as {:?}", scheme.store))
            })?;
        let block_size = usize::from(blocks[axis]);
        let (values, cols) = (shape.iter().product::<usize>(), shape[axis]);
        let (bytes, scale_bytes) =
            (data.as_bytes(), 4 * usize::from(scheme.tensor_scale().is_some()));
        let lengths = [values / 2, values / block_size, scale_bytes];
        if bytes.len() != lengths.iter().sum::<usize>() {
            return Err(refused(format!("{} bytes for shape {shape:?}", bytes.len())));
        }
        let (codes, scales) = bytes.split_at(lengths[0]);
        let (scales, tensor_scale) = scales.split_at(lengths[1]);
        let tensor_scale = match *tensor_scale {
            [a, b, c, d] => f32::from_ne_bytes([a, b, c, d]),
            _ => 1.0,
        };
        let packed = Packed {
            format,
            block_size,
            rows: values.checked_div(cols).unwrap_or_default(),
            cols,
            codes: codes.to_vec(),
            scales: scales.to_vec(),
            tensor_scale: TensorScale::One(tensor_scale),
        };
        Self::from_packed(packed, shape, axis, device)
    }
}

/// Returns the dimension that codes are packed along, counted from the last one, where Burn's order
/// of bytes is that of an [`Fp4Tensor`].
fn packed_dimension(axis: usize, rank: usize) -> Option<usize> {
    match rank.checked_sub(1 + axis)? {
        0 => Some(0),
        1 if rank == 2 => Some(1),
        _ => None,
    }
}
