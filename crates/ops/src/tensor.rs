use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_fp4_search::formats::{Fp4Format, Packed, TensorScale};

use crate::{Fp4Backend, Fp4Layout, Fp4Primitive, OpsError};

/// A quantized tensor of rank `D` on a device: codes and scales, about 4.5 bits per value.
///
/// Physically the blocked axis is innermost: a weight `[K, N]` quantized along axis 0 holds codes
/// `[N, K / 2]`, which is also how files of the Python world lay it out.
#[derive(Debug, Clone)]
pub struct Fp4Tensor<const D: usize> {
    codes: Tensor<2, Int>,
    scales: Tensor<2, Int>,
    tensor_scale: Tensor<1, Int>,
    layout: Fp4Layout,
}

impl<const D: usize> Fp4Tensor<D> {
    /// Puts together what [`codes`](Self::codes), [`scales`](Self::scales) and
    /// [`tensor_scale_bits`](Self::tensor_scale_bits) hand out.
    ///
    /// # Errors
    /// [`OpsError::Shape`] if a tensor does not have the shape that the layout asks for,
    /// [`OpsError::Axis`] or [`OpsError::Format`] for the layout itself.
    pub fn from_parts(
        codes: Tensor<2, Int>,
        scales: Tensor<2, Int>,
        tensor_scale: Tensor<1, Int>,
        layout: Fp4Layout,
    ) -> Result<Self, OpsError> {
        layout.validate()?;
        let check = |what, expected: &[usize], found: &[usize]| {
            if expected == found {
                Ok(())
            } else {
                let (expected, found) = (expected.to_vec(), found.to_vec());
                Err(OpsError::Shape { what, expected, found })
            }
        };
        check("shape", &[D], &[layout.shape.len()])?;
        check("codes", &layout.codes_shape(), &codes.dims())?;
        check("block scales", &layout.scales_shape(), &scales.dims())?;
        if tensor_scale.dims() != [1] {
            check("tensor scale", &[layout.rows()], &tensor_scale.dims())?;
        }
        Ok(Self { codes, scales, tensor_scale, layout })
    }

    pub(crate) fn from_primitive(packed: Fp4Primitive<Dispatch>, layout: Fp4Layout) -> Self {
        Self {
            codes: Tensor::from_dispatch(packed.codes),
            scales: Tensor::from_dispatch(packed.scales),
            tensor_scale: Tensor::from_dispatch(packed.tensor_scale),
            layout,
        }
    }

    pub(crate) fn to_primitive(&self) -> Fp4Primitive<Dispatch> {
        Fp4Primitive {
            codes: self.codes.clone().into_dispatch(),
            scales: self.scales.clone().into_dispatch(),
            tensor_scale: self.tensor_scale.clone().into_dispatch(),
        }
    }

    /// The codes, u8 `[rows, axis / 2]`: two per byte, the even one in the low nibble.
    pub fn codes(&self) -> Tensor<2, Int> {
        self.codes.clone()
    }

    /// The block scales, u8 `[rows, axis / block_size]`: E4M3 (NVFP4) or E8M0 (MXFP4).
    pub fn scales(&self) -> Tensor<2, Int> {
        self.scales.clone()
    }

    /// The bits of the f32 tensor scale in i32, `[1]` or `[rows]`.
    pub fn tensor_scale_bits(&self) -> Tensor<1, Int> {
        self.tensor_scale.clone()
    }

    /// Format, shape and axis.
    pub fn layout(&self) -> &Fp4Layout {
        &self.layout
    }

    /// What the bits mean.
    pub fn format(&self) -> Fp4Format {
        self.layout.format
    }

    /// Axis that the blocks run along.
    pub fn axis(&self) -> usize {
        self.layout.axis
    }

    /// Shape of the dense tensor.
    pub fn dims(&self) -> [usize; D] {
        core::array::from_fn(|axis| self.layout.shape[axis])
    }

    /// Where the tensor is.
    pub fn device(&self) -> Device {
        self.codes.device()
    }

    /// Bytes of codes, block scales and tensor scale.
    pub fn bytes(&self) -> usize {
        let elements = |dims: [usize; 2]| dims[0] * dims[1];
        elements(self.codes.dims()) + elements(self.scales.dims()) + 4 * self.tensor_scale.dims()[0]
    }

    /// The values in f32: bit for bit the oracle's, `(element x block scale) x tensor scale`.
    pub fn dequantize(&self) -> Tensor<D> {
        self.dequantize_to(FloatDType::F32)
    }

    /// The values, computed in f32 and rounded once to a dtype.
    pub fn dequantize_to(&self, dtype: FloatDType) -> Tensor<D> {
        self.settle();
        let layout = self.layout.clone();
        let packed = self.to_primitive();
        // Engines write the dtypes they read; any other is made from f32.
        let written = match dtype {
            FloatDType::F16 | FloatDType::BF16 => dtype,
            _ => FloatDType::F32,
        };
        let values = Tensor::from_dispatch(Dispatch::fp4_dequantize(packed, layout, written));
        if values.dtype() == dtype.into() { values } else { values.cast(dtype) }
    }

    /// Sends the operations that wait for this device on their way, so that dequantization and the product that
    /// reads it follow each other in the stream, as the fuser needs them.
    pub(crate) fn settle(&self) {
        #[cfg(feature = "cube")]
        crate::fused::settle(&self.codes.device());
    }

    /// `[2]` in f32 on the device: the sum of squared differences from `values`, and the sum of
    /// their squares.
    ///
    /// # Errors
    /// [`OpsError::Shape`] if the values have another shape, [`OpsError::DType`] if they are not f32,
    /// f16 or bf16.
    pub fn squared_error(&self, values: Tensor<D>) -> Result<Tensor<1>, OpsError> {
        crate::check_dtype(&values)?;
        if values.dims() != self.dims() {
            return Err(OpsError::Shape {
                what: "values",
                expected: self.layout.shape.clone(),
                found: values.dims().to_vec(),
            });
        }
        Ok(Tensor::from_dispatch(Dispatch::fp4_squared_error(
            values.without_autodiff().into_dispatch(),
            self.to_primitive(),
            self.layout.clone(),
        )))
    }

    /// The tensor on another device, bits unchanged.
    pub fn to_device(self, device: &Device) -> Self {
        Self {
            codes: self.codes.to_device(device),
            scales: self.scales.to_device(device),
            tensor_scale: self.tensor_scale.to_device(device),
            layout: self.layout,
        }
    }

    /// Reads the bits back to the host.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the device fails.
    pub fn to_packed(&self) -> Result<Packed, OpsError> {
        let bytes = |tensor: &Tensor<2, Int>| -> Result<Vec<u8>, OpsError> {
            let data = tensor.clone().try_into_data().map_err(OpsError::device)?;
            data.convert::<u8>().try_into_vec().map_err(OpsError::device)
        };
        let tensor_scale = self.tensor_scale.clone().try_into_data().map_err(OpsError::device)?;
        let tensor_scale: Vec<_> =
            tensor_scale.iter::<i32>().map(|bits| f32::from_bits(bits as u32)).collect();
        Ok(Packed {
            format: self.layout.format,
            block_size: self.layout.block_size,
            rows: self.layout.rows(),
            cols: self.layout.shape[self.layout.axis],
            codes: bytes(&self.codes)?,
            scales: bytes(&self.scales)?,
            tensor_scale: match tensor_scale[..] {
                [scale] => TensorScale::One(scale),
                _ => TensorScale::PerRow(tensor_scale),
            },
        })
    }

    /// Puts a packed matrix on a device as the tensor of a shape blocked along an axis.
    ///
    /// # Errors
    /// [`OpsError::Format`] if the matrix is not valid, [`OpsError::Axis`] or [`OpsError::Shape`]
    /// if it is not that of the shape.
    pub fn from_packed(
        packed: Packed,
        shape: [usize; D],
        axis: usize,
        device: &Device,
    ) -> Result<Self, OpsError> {
        packed.validate()?;
        let layout = Fp4Layout {
            format: packed.format,
            block_size: packed.block_size,
            shape: shape.to_vec(),
            axis,
        };
        layout.validate()?;
        let expected = vec![layout.rows(), shape[axis]];
        if expected != [packed.rows, packed.cols] {
            let found = vec![packed.rows, packed.cols];
            return Err(OpsError::Shape { what: "packed matrix", expected, found });
        }
        let bits: Vec<_> =
            packed.tensor_scale.as_slice().iter().map(|scale| scale.to_bits() as i32).collect();
        let count = bits.len();
        let codes = TensorData::new(packed.codes, layout.codes_shape());
        let scales = TensorData::new(packed.scales, layout.scales_shape());
        Ok(Self {
            codes: Tensor::from_data(codes, (device, DType::U8)),
            scales: Tensor::from_data(scales, (device, DType::U8)),
            tensor_scale: Tensor::from_data(TensorData::new(bits, [count]), (device, DType::I32)),
            layout,
        })
    }
}

impl Fp4Tensor<2> {
    /// The transpose. Nothing moves: the packed rows keep their place, the axis changes its name.
    pub fn transpose(mut self) -> Self {
        self.layout.shape.reverse();
        self.layout.axis = 1 - self.layout.axis;
        self
    }
}
