//! [`Fp4Tensor`]: codes and scales of a tensor on any device.

use burn::backend::Dispatch;
use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData, Transaction};
use burn_fp4_search::Hadamard;
use burn_fp4_search::formats::{Fp4Format, Packed, TensorScale, check_scales};

use crate::devices::extension::{Fp4Backend, weight_data};
use crate::error::OpsError;
use crate::hadamard::hadamard;
use crate::layout::{Fp4Layout, Fp4Primitive, check_dtype, from_bits};

/// A quantized tensor of rank `D` on a device: codes and scales, about 4.5 bits per value.
///
/// Physically the blocked axis is innermost: a weight `[K, N]` quantized along axis 0 holds codes
/// `[N, K / 2]`, which is also how files of the Python world lay it out.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, quantize};
///
/// let weight = Tensor::<2>::full([64, 8], 1.4, &Device::flex());
/// let packed = quantize(weight, 0, &Fp4Scheme::mxfp4())?;
/// assert_eq!((packed.codes().dims(), packed.scales().dims()), ([8, 32], [8, 2]));
/// assert_eq!(packed.bytes(), 8 * 32 + 8 * 2 + 4);
/// // 1.4 is 5.6 times the block scale 1/4; the nearest element is 6.
/// assert_eq!(packed.dequantize().into_data(), TensorData::from([[1.5f32; 8]; 64]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Fp4Tensor<const D: usize> {
    codes: Tensor<2, Int>,
    scales: Tensor<2, Int>,
    tensor_scale: Tensor<1, Int>,
    layout: Fp4Layout,
}

impl<const D: usize> Fp4Tensor<D> {
    /// Builds a tensor from [`codes`](Self::codes), [`scales`](Self::scales) and
    /// [`tensor_scale_bits`](Self::tensor_scale_bits), such as parts read from a file.
    ///
    /// Reads both kinds of scales back in one transfer to check them. Codes need no check: each is
    /// a number.
    ///
    /// ```
    /// use burn::tensor::{DType, Device, Tensor, TensorData};
    /// use burn_fp4_ops::{Fp4Layout, Fp4Scheme, Fp4Tensor};
    ///
    /// let device = Device::flex();
    /// let layout = Fp4Layout::new(&[32].into(), 0, &Fp4Scheme::mxfp4())?;
    /// let codes = Tensor::from_data([[0x21u8; 16]], (&device, DType::U8)); // elements 0.5 and 1
    /// let scales = Tensor::from_data([[128u8]], (&device, DType::U8)); // 2^(128 - 127)
    /// let one = Tensor::from_data([1f32.to_bits() as i32], (&device, DType::I32));
    /// let packed = Fp4Tensor::<1>::from_parts(codes, scales, one, layout)?;
    /// assert_eq!(packed.dequantize().slice([0..2]).into_data(), TensorData::from([1f32, 2.0]));
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_parts_unread`](Self::from_parts_unread), and [`OpsError::Format`] for a scale that
    /// [`check_scales`] refuses; [`OpsError::Device`] if the device fails.
    pub fn from_parts(
        codes: Tensor<2, Int>,
        scales: Tensor<2, Int>,
        tensor_scale: Tensor<1, Int>,
        layout: Fp4Layout,
    ) -> Result<Self, OpsError> {
        let tensor = Self::from_parts_unread(codes, scales, tensor_scale, layout)?;
        tensor.check_scales()?;
        let Self { codes, scales, tensor_scale, layout } = tensor;
        let [codes, scales] = [codes, scales].map(without_padding);
        Ok(Self { codes, scales, tensor_scale, layout })
    }

    /// [`from_parts`](Self::from_parts) for parts whose bits are known to be valid: nothing is read
    /// back. A NaN among the scales would end up in every product.
    ///
    /// ```
    /// use burn::tensor::{DType, Device, Tensor};
    /// use burn_fp4_ops::{Fp4Scheme, Fp4Tensor, OpsError, quantize};
    ///
    /// let device = Device::flex();
    /// let packed = quantize(Tensor::<1>::ones([32], &device), 0, &Fp4Scheme::mxfp4())?;
    /// let nan = || Tensor::from_data([[0xFFu8]], (&device, DType::U8));
    /// let (codes, one, layout) = (packed.codes(), packed.tensor_scale_bits(), packed.layout());
    /// let checked = Fp4Tensor::<1>::from_parts(codes.clone(), nan(), one.clone(), layout.clone());
    /// assert!(matches!(checked, Err(OpsError::Format(_))));
    /// assert!(Fp4Tensor::<1>::from_parts_unread(codes, nan(), one, layout.clone()).is_ok());
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::PartDType`] or [`OpsError::Shape`] if a part does not match the layout,
    /// [`OpsError::PartDevice`] if it is not on the device of the codes; as [`Fp4Layout::validate`]
    /// for the layout.
    pub fn from_parts_unread(
        codes: Tensor<2, Int>,
        scales: Tensor<2, Int>,
        tensor_scale: Tensor<1, Int>,
        layout: Fp4Layout,
    ) -> Result<Self, OpsError> {
        layout.validate()?;
        check_shape("shape", &[D], &[layout.shape.len()])?;
        let device = codes.device();
        #[cfg(feature = "cube")]
        crate::devices::cube::queues::relax_this_thread(&device);
        check_part("codes", &codes, DType::U8, &layout.codes_shape(), &device)?;
        check_part("block scales", &scales, DType::U8, &layout.scales_shape(), &device)?;
        let count = if tensor_scale.dims() == [1] { 1 } else { layout.rows() };
        check_part("tensor scale", &tensor_scale, DType::I32, &[count], &device)?;
        Ok(Self { codes, scales, tensor_scale, layout })
    }

    /// Reads the scales back and checks them.
    ///
    /// # Errors
    /// [`OpsError::Format`] if a scale is not valid in the format, [`OpsError::Device`] if the
    /// device fails.
    fn check_scales(&self) -> Result<(), OpsError> {
        let read = Transaction::default()
            .register(self.scales.clone())
            .register(self.tensor_scale.clone())
            .try_execute()
            .map_err(OpsError::device)?;
        let [scales, tensor_scale] = &read[..] else {
            let problem = format!("{} tensors came back instead of 2", read.len());
            return Err(OpsError::Device(problem));
        };
        let scales = scales.as_slice::<u8>().map_err(OpsError::device)?;
        let [_, blocks] = self.layout.scales_shape();
        Ok(check_scales(self.format(), blocks, scales, &from_bits(tensor_scale))?)
    }

    pub(crate) fn from_primitive(packed: Fp4Primitive<Dispatch>, layout: Fp4Layout) -> Self {
        Self {
            codes: Tensor::from_dispatch(packed.codes),
            scales: Tensor::from_dispatch(packed.scales),
            tensor_scale: Tensor::from_dispatch(packed.tensor_scale),
            layout,
        }
    }

    pub(crate) fn into_primitive(self) -> (Fp4Primitive<Dispatch>, Fp4Layout) {
        let Self { codes, scales, tensor_scale, layout } = self;
        let packed = Fp4Primitive {
            codes: codes.into_dispatch(),
            scales: scales.into_dispatch(),
            tensor_scale: tensor_scale.into_dispatch(),
        };
        (packed, layout)
    }

    /// Returns the codes, u8 `[rows, axis / 2]`: two per byte, the even one in the low nibble.
    #[must_use]
    pub fn codes(&self) -> Tensor<2, Int> {
        self.codes.clone()
    }

    /// Returns the block scales, u8 `[rows, axis / block_size]`, encoded as the format says.
    #[must_use]
    pub fn scales(&self) -> Tensor<2, Int> {
        self.scales.clone()
    }

    /// Returns the bits of the f32 tensor scale in i32, `[1]` or `[rows]`.
    #[must_use]
    pub fn tensor_scale_bits(&self) -> Tensor<1, Int> {
        self.tensor_scale.clone()
    }

    /// Returns format, shape and axis.
    #[must_use]
    pub fn layout(&self) -> &Fp4Layout {
        &self.layout
    }

    /// Returns the format of codes and scales.
    #[must_use]
    pub fn format(&self) -> Fp4Format {
        self.layout.format
    }

    /// Returns the axis that the blocks run along.
    #[must_use]
    pub fn axis(&self) -> usize {
        self.layout.axis
    }

    /// Returns the shape of the dense tensor.
    #[must_use]
    pub fn dims(&self) -> [usize; D] {
        core::array::from_fn(|axis| self.layout.shape[axis])
    }

    /// Returns the device of the tensor.
    #[must_use]
    pub fn device(&self) -> Device {
        self.codes.device()
    }

    /// Returns the bytes of codes, block scales and tensor scale.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let elements = |dims: [usize; 2]| dims[0] * dims[1];
        elements(self.codes.dims()) + elements(self.scales.dims()) + 4 * self.tensor_scale.dims()[0]
    }

    /// Dequantizes to f32, `(element x block scale) x tensor scale`: bit for bit the oracle's
    /// values.
    #[must_use]
    pub fn dequantize(&self) -> Tensor<D> {
        self.dequantize_to(FloatDType::F32)
    }

    /// Dequantizes to a dtype: computed in f32 and rounded once.
    ///
    /// ```
    /// use burn::tensor::{Device, FloatDType, Tensor, TensorData, f16};
    /// use burn_fp4_ops::{Fp4Scheme, quantize};
    ///
    /// let weight = Tensor::<1>::full([32], 1.4, &Device::flex());
    /// let packed = quantize(weight, 0, &Fp4Scheme::mxfp4())?;
    /// let expected = TensorData::from([f16::from_f32(1.5); 32]);
    /// assert_eq!(packed.dequantize_to(FloatDType::F16).into_data(), expected);
    /// assert_eq!(packed.into_dense(FloatDType::F16).into_data(), expected); // the last use
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    #[must_use]
    pub fn dequantize_to(&self, dtype: FloatDType) -> Tensor<D> {
        self.clone().into_dense(dtype)
    }

    /// [`dequantize_to`](Self::dequantize_to) for the last use of a tensor.
    ///
    /// A Cube device fuses dequantization and a product only if no operation comes in between.
    /// Freeing a tensor that another thread made is an operation.
    #[must_use]
    pub fn into_dense(self, dtype: FloatDType) -> Tensor<D> {
        // Dequantization and the product that reads it have to follow each other in the stream.
        #[cfg(feature = "cube")]
        crate::fusion::flush_for_product(&self.device());
        let (packed, layout) = self.into_primitive();
        // Engines write the dtypes they read; any other is cast from f32.
        let written = match dtype {
            FloatDType::F16 | FloatDType::BF16 => dtype,
            _ => FloatDType::F32,
        };
        let values = Tensor::from_dispatch(Dispatch::fp4_dequantize(packed, layout, written));
        if values.dtype() == dtype.into() { values } else { values.cast(dtype) }
    }

    /// Sums the squared differences from `values`, and the squares of `values`, as `[6]` in f32 on
    /// the device. Read it back and call [`squared_sums`](crate::squared_sums) for the two sums. A
    /// value that is infinite in the dtype of `values` makes the first sum infinite. Values may
    /// have any magnitude.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::{Fp4Scheme, quantize, squared_sums};
    ///
    /// let values = Tensor::<1>::from_floats([6.0, 2.25], &Device::flex()).repeat_dim(0, 16);
    /// let packed = quantize(values.clone(), 0, &Fp4Scheme::mxfp4())?; // 2.25 becomes 2
    /// let sums = packed.squared_error(values)?.into_data();
    /// let sums = squared_sums(sums.as_slice::<f32>().unwrap());
    /// assert_eq!(sums, Some([16.0 * 0.0625, 16.0 * (36.0 + 5.0625)]));
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::Shape`] if the values have another shape, [`OpsError::DType`] if they are not
    /// f32, f16 or bf16.
    pub fn squared_error(&self, values: Tensor<D>) -> Result<Tensor<1>, OpsError> {
        check_dtype(&values)?;
        check_shape("values", &self.dims(), &values.dims())?;
        let values = match self.layout.hadamard {
            // An orthogonal transform changes no sum of squares.
            Some(transform) => hadamard(values.cast(DType::F32), self.layout.axis, transform)?,
            None => values,
        };
        let values = values.without_autodiff().into_dispatch();
        let (packed, layout) = self.clone().into_primitive();
        let layout = layout.of_codes();
        Ok(Tensor::from_dispatch(Dispatch::fp4_squared_error(values, packed, layout)))
    }

    /// Moves the tensor to another device, bits unchanged.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::{Fp4Scheme, quantize};
    ///
    /// let device = Device::flex();
    /// let packed = quantize(Tensor::<1>::ones([32], &device), 0, &Fp4Scheme::mxfp4())?;
    /// let moved = packed.to_device(&device); // or another one
    /// assert_eq!(moved.device(), device);
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    pub fn to_device(self, device: &Device) -> Self {
        Self {
            codes: without_padding(self.codes.to_device(device)),
            scales: without_padding(self.scales.to_device(device)),
            tensor_scale: self.tensor_scale.to_device(device),
            layout: self.layout,
        }
    }

    /// Says that the codes are of values after a Hadamard transform along the blocked axis, such as
    /// those of a file. Dequantization then transforms back, and products transform their input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::{Fp4Scheme, Hadamard, hadamard, quantize};
    ///
    /// let transform = Hadamard::of_size(32).expect("a known size");
    /// let weight = Tensor::<2>::full([64, 4], 1.5, &Device::flex());
    /// let transformed = hadamard(weight.clone(), 0, transform)?;
    /// let packed = quantize(transformed, 0, &Fp4Scheme::nvfp4())?.with_hadamard(Some(transform))?;
    /// let scheme = Fp4Scheme::nvfp4().with_hadamard(Some(transform));
    /// let same = quantize(weight, 0, &scheme)?; // all of it in one call
    /// assert_eq!(packed.dequantize().into_data(), same.dequantize().into_data());
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::Indivisible`] if the size of the transform does not divide the axis.
    pub fn with_hadamard(self, hadamard: Option<Hadamard>) -> Result<Self, OpsError> {
        let layout = Fp4Layout { hadamard, ..self.layout };
        layout.validate()?;
        Ok(Self { layout, ..self })
    }

    /// Reads the tensor back to the host: the codes and scales as they are, of transformed values
    /// if the [layout](Self::layout) has a Hadamard transform.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_fp4_ops::{Fp4Scheme, Fp4Tensor, quantize};
    ///
    /// let device = Device::flex();
    /// let tensor = quantize(Tensor::<2>::full([32, 4], 1.5, &device), 0, &Fp4Scheme::mxfp4())?;
    /// let packed = tensor.to_packed()?;
    /// assert_eq!((packed.rows, packed.cols), (4, 32));
    /// assert_eq!(packed.codes, [0x77; 4 * 16]); // two elements of 6, code 7
    /// assert_eq!(packed.scales, [125; 4]); // 2^(125 - 127)
    /// let tensor = Fp4Tensor::from_packed(packed, [32, 4], 0, &device)?;
    /// assert_eq!(tensor.dequantize().into_data(), TensorData::from([[1.5f32; 4]; 32]));
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::Device`] if the device fails.
    pub fn to_packed(&self) -> Result<Packed, OpsError> {
        let bytes = |tensor: &Tensor<2, Int>| -> Result<Vec<u8>, OpsError> {
            let data = tensor.clone().try_into_data().map_err(OpsError::device)?;
            data.try_into_vec().map_err(OpsError::device)
        };
        let tensor_scale = self.tensor_scale.clone().try_into_data().map_err(OpsError::device)?;
        let tensor_scale = from_bits(&tensor_scale);
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

    /// Uploads a packed matrix as a tensor of a shape, blocked along an axis.
    ///
    /// # Errors
    /// [`OpsError::Format`] if the matrix is not valid, [`OpsError::Shape`] if it does not match
    /// the shape; as [`Fp4Layout::validate`] for shape and axis.
    pub fn from_packed(
        packed: Packed,
        shape: [usize; D],
        axis: usize,
        device: &Device,
    ) -> Result<Self, OpsError> {
        let layout = Fp4Layout {
            format: packed.format,
            block_size: packed.block_size,
            shape: shape.to_vec(),
            axis,
            hadamard: None,
        };
        layout.validate()?;
        let found = [packed.rows, packed.cols];
        check_shape("packed matrix", &[layout.rows(), shape[axis]], &found)?;
        packed.validate()?;
        let packed = Fp4Primitive::<Dispatch>::from_packed(packed, |data, _its_own_dtype| {
            // A vector has no padding; see `without_padding`.
            let (bytes, shape, dtype) = data.into_parts();
            let data = TensorData::from_bytes(bytes, [shape.num_elements()], dtype);
            let data = weight_data(data, device);
            Dispatch::int_reshape(Dispatch::int_from_data(data, device.as_dispatch()), shape)
        });
        Ok(Self::from_primitive(packed, layout))
    }
}

/// Returns codes or block scales `[rows, bytes]` without padding between their rows, which CUDA
/// uploads a matrix with if the bytes of a row are not a multiple of its alignment. Kernels read no
/// padding: each product would copy.
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_fp4_ops::without_padding;
///
/// let codes = Tensor::from_data([[0x21u8, 0x43]], (&Device::flex(), DType::U8));
/// assert_eq!(without_padding(codes.clone()).into_data(), codes.into_data());
/// ```
#[must_use]
pub fn without_padding(part: Tensor<2, Int>) -> Tensor<2, Int> {
    let shape = part.dims();
    if shape.contains(&0) {
        return part;
    }
    part.flatten::<1>(0, 1).reshape(shape)
}

impl Fp4Tensor<2> {
    /// Selects the rows at indices `[n]`, packed `[n, cols]`. Blocks have to run along axis 1.
    /// Reads no other row, and decodes none. An index out of range behaves as in Burn's `select`.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor, TensorData};
    /// use burn_fp4_ops::{Fp4Scheme, quantize};
    ///
    /// let device = Device::flex();
    /// let table = Tensor::<2>::from_floats([[1.5], [3.0]], &device).repeat_dim(1, 32);
    /// let table = quantize(table, 1, &Fp4Scheme::mxfp4())?;
    /// let row = table.select_rows(Tensor::<1, Int>::from_ints([1], &device))?;
    /// assert_eq!(row.dequantize().into_data(), TensorData::from([[3f32; 32]]));
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::Rows`] if the blocks run along axis 0, [`OpsError::PartDevice`] if the indices
    /// are on another device, [`OpsError::TooLarge`] for too many values.
    pub fn select_rows(&self, rows: Tensor<1, Int>) -> Result<Self, OpsError> {
        let layout = self.layout_of_rows(&rows)?;
        let (packed, _) = self.clone().into_primitive();
        let selected = Dispatch::fp4_select_rows(packed, rows.into_dispatch());
        Ok(Self::from_primitive(selected, layout))
    }

    /// Returns the layout of the rows at indices of any rank.
    ///
    /// # Errors
    /// As [`select_rows`](Self::select_rows).
    pub(crate) fn layout_of_rows<const R: usize>(
        &self,
        rows: &Tensor<R, Int>,
    ) -> Result<Fp4Layout, OpsError> {
        let layout = self.layout.of_rows(rows.shape().num_elements())?;
        let (expected, found) = (self.device(), rows.device());
        if expected != found {
            let (expected, found) = (expected.into(), found.into());
            return Err(OpsError::PartDevice { what: "indices of rows", expected, found });
        }
        Ok(layout)
    }

    /// Transposes without a copy: the packed rows stay in place, and the axis is renamed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_fp4_ops::{Fp4Scheme, quantize};
    ///
    /// let weight = Tensor::<2>::from_floats([[1.5, 3.0]], &Device::flex()).repeat_dim(0, 32);
    /// let transpose = quantize(weight, 0, &Fp4Scheme::mxfp4())?.transpose();
    /// assert_eq!((transpose.dims(), transpose.axis()), ([2, 32], 1));
    /// let values = transpose.dequantize().into_data();
    /// assert_eq!(values, TensorData::from([[1.5f32; 32], [3.0; 32]]));
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    pub fn transpose(self) -> Self {
        Self { layout: self.layout.transposed(), ..self }
    }
}

/// Checks a shape.
///
/// # Errors
/// [`OpsError::Shape`] if it differs from the expected one.
fn check_shape(what: &'static str, expected: &[usize], found: &[usize]) -> Result<(), OpsError> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (expected.to_vec(), found.to_vec());
    Err(OpsError::Shape { what, expected, found })
}

/// Checks dtype, shape and device of a part.
///
/// # Errors
/// As [`Fp4Tensor::from_parts_unread`].
fn check_part<const R: usize>(
    what: &'static str,
    part: &Tensor<R, Int>,
    dtype: DType,
    shape: &[usize],
    device: &Device,
) -> Result<(), OpsError> {
    if part.dtype() != dtype {
        let (expected, found) = (dtype, part.dtype());
        return Err(OpsError::PartDType { what, expected, found });
    }
    check_shape(what, shape, &part.dims())?;
    let found = part.device();
    if found != *device {
        let (expected, found) = (device.clone().into(), found.into());
        return Err(OpsError::PartDevice { what, expected, found });
    }
    Ok(())
}
