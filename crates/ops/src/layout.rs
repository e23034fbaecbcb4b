//! [`Fp4Layout`]: format, shape and blocked axis of a quantized tensor. [`Fp4Primitive`]: its parts
//! as tensors of a backend.

// With fusion, `ExtensionType` generates types without `Debug`.
#![cfg_attr(feature = "cube", allow(missing_debug_implementations))]

#[cfg(feature = "cube")]
use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, IntDType, Shape, Tensor, TensorData};
use burn_fp4_search::formats::{Fp4Format, Packed};
use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, Hadamard};

use crate::error::OpsError;
#[cfg(feature = "cube")]
use crate::factorization::Factorization;

/// Format, shape and blocked axis of a quantized tensor. Shapes of its parts follow from it.
///
/// ```
/// use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError};
///
/// let layout = Fp4Layout::new(&[64, 10].into(), 0, &Fp4Scheme::nvfp4())?;
/// assert_eq!(layout.codes_shape(), [10, 32]); // two codes are a byte
/// assert_eq!(layout.scales_shape(), [10, 4]); // blocks of 16
/// assert_eq!(layout.view().packed_rows(), 10);
/// let odd = Fp4Layout { shape: vec![24, 10], ..layout };
/// let error = OpsError::Indivisible { axis: 0, length: 24, block_size: 16 };
/// assert_eq!(odd.validate(), Err(error));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fp4Layout {
    /// Format of codes and scales.
    pub format: Fp4Format,
    /// Number of elements that share a block scale.
    pub block_size: usize,
    /// Shape of the dense tensor.
    pub shape: Vec<usize>,
    /// Axis that the blocks run along.
    pub axis: usize,
    /// Hadamard transform along this axis of the values that the codes are of. Dequantization
    /// transforms back; a product transforms its input instead.
    pub hadamard: Option<Hadamard>,
}

impl Fp4Layout {
    /// Makes the layout of a tensor of this shape that is quantized along an axis.
    ///
    /// # Errors
    /// [`OpsError::Search`] if the scheme is inconsistent; [`OpsError::Axis`],
    /// [`OpsError::TooLarge`], or [`OpsError::Indivisible`] if its blocks do not divide the axis.
    pub fn new(shape: &Shape, axis: usize, scheme: &Fp4Scheme) -> Result<Self, OpsError> {
        scheme.validate()?;
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let hadamard = scheme.hadamard;
        let layout = Self { format, block_size, shape: shape.to_vec(), axis, hadamard };
        layout.validate()?;
        Ok(layout)
    }

    /// Encodes all but the shape as one number; see [`from_tag`](Self::from_tag).
    #[cfg(feature = "cube")]
    pub(crate) fn tag(&self) -> u64 {
        let format = Fp4Format::ALL.iter().position(|format| *format == self.format);
        let format = format.expect("one of all") as u64;
        let hadamard = self.hadamard.map_or(0, |hadamard| {
            (hadamard.size() as u64) << 8 | u64::from(hadamard.signs()) << 48
        });
        format | (self.block_size as u64) << 24 | (self.axis as u64) << 32 | hadamard
    }

    /// Decodes the layout of a shape from its [`tag`](Self::tag).
    #[cfg(feature = "cube")]
    pub(crate) fn from_tag(tag: u64, shape: Vec<usize>) -> Option<Self> {
        let format = *Fp4Format::ALL.get((tag & 0xFF) as usize)?;
        let (block_size, axis) = ((tag >> 24 & 0xFF) as usize, (tag >> 32 & 0xFFFF) as usize);
        let hadamard = match (tag >> 8 & 0xFFFF) as usize {
            0 => None,
            16 => Some(Hadamard::with_signs((tag >> 48) as u16)),
            size => Some(Hadamard::of_size(size).ok()?),
        };
        Some(Self { format, block_size, shape, axis, hadamard })
    }

    /// Checks a layout that was not made by [`new`](Self::new).
    ///
    /// # Errors
    /// [`OpsError::Axis`], [`OpsError::TooLarge`], [`OpsError::Format`] for the block size, or
    /// [`OpsError::Indivisible`].
    pub fn validate(&self) -> Result<(), OpsError> {
        self.format.check_block_size(self.block_size)?;
        let transformed = self.hadamard.map_or(1, Hadamard::size);
        check_divided(&self.shape, self.axis, self.block_size.max(transformed))
    }

    /// Returns the layout of the values that the codes are of, without a Hadamard transform.
    pub(crate) fn of_codes(self) -> Self {
        Self { hadamard: None, ..self }
    }

    /// Returns the layout of the transpose of a matrix: packed rows stay in place, and the axis is
    /// renamed.
    pub(crate) fn transposed(&self) -> Self {
        let mut shape = self.shape.clone();
        shape.reverse();
        Self { shape, axis: 1 - self.axis, ..*self }
    }

    /// Returns the layout of some rows of a matrix.
    ///
    /// # Errors
    /// [`OpsError::Rows`] unless it is a matrix whose blocks run along its rows,
    /// [`OpsError::TooLarge`].
    pub(crate) fn of_rows(&self, rows: usize) -> Result<Self, OpsError> {
        let (&[_, cols], 1) = (&self.shape[..], self.axis) else {
            return Err(OpsError::Rows { axis: self.axis, rank: self.shape.len() });
        };
        let of_rows = Self { shape: vec![rows, cols], ..*self };
        of_rows.validate()?;
        Ok(of_rows)
    }

    /// Returns the view of the dense tensor along the axis.
    #[must_use]
    pub fn view(&self) -> View {
        View::along(&self.shape, self.axis)
    }

    /// Returns the rows of the packed matrix, the product of all dimensions but the blocked one.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.view().packed_rows()
    }

    /// Returns the shape of the codes, `[rows, axis / 2]`.
    #[must_use]
    pub fn codes_shape(&self) -> [usize; 2] {
        [self.rows(), self.shape[self.axis] / 2]
    }

    /// Returns the shape of the block scales, `[rows, axis / block_size]`.
    #[must_use]
    pub fn scales_shape(&self) -> [usize; 2] {
        [self.rows(), self.shape[self.axis] / self.block_size]
    }
}

/// A quantized tensor as tensors of a backend.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub struct Fp4Primitive<B: Backend> {
    /// u8, `[rows, axis / 2]`.
    pub codes: IntTensor<B>,
    /// u8, `[rows, axis / block_size]`.
    pub scales: IntTensor<B>,
    /// The bits of the f32 tensor scale in i32, `[1]` or `[rows]`. As integers they are safe from
    /// code that casts or trains the floats of a module.
    pub tensor_scale: IntTensor<B>,
}

impl<B: Backend> Fp4Primitive<B> {
    /// Uploads a matrix in host memory. `upload` gets the data of a tensor, and its dtype.
    pub(crate) fn from_packed(
        packed: Packed,
        upload: impl Fn(TensorData, IntDType) -> IntTensor<B>,
    ) -> Self {
        let (rows, blocks) = (packed.rows, packed.blocks());
        let tensor_scale = packed.tensor_scale.as_slice();
        let bits: Vec<_> = tensor_scale.iter().map(|scale| scale.to_bits() as i32).collect();
        let count = bits.len();
        Self {
            codes: upload(TensorData::new(packed.codes, [rows, packed.cols / 2]), IntDType::U8),
            scales: upload(TensorData::new(packed.scales, [rows, blocks]), IntDType::U8),
            tensor_scale: upload(TensorData::new(bits, [count]), IntDType::I32),
        }
    }
}

/// Checks that values are f32, f16 or bf16.
///
/// # Errors
/// [`OpsError::DType`] if they are not.
pub(crate) fn check_dtype<const D: usize>(values: &Tensor<D>) -> Result<(), OpsError> {
    match values.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        found => Err(OpsError::DType { found }),
    }
}

/// Checks that blocks divide an axis of a shape.
///
/// # Errors
/// [`OpsError::Axis`], [`OpsError::TooLarge`] or [`OpsError::Indivisible`].
pub(crate) fn check_divided(
    shape: &[usize],
    axis: usize,
    block_size: usize,
) -> Result<(), OpsError> {
    let rank = shape.len();
    let &length = shape.get(axis).ok_or(OpsError::Axis { axis, rank })?;
    check_len(shape)?;
    if length.is_multiple_of(block_size) {
        Ok(())
    } else {
        Err(OpsError::Indivisible { axis, length, block_size })
    }
}

/// Checks that a tensor has at most [`View::MAX_LEN`] values.
///
/// # Errors
/// [`OpsError::TooLarge`] if it has more.
pub(crate) fn check_len(shape: &[usize]) -> Result<(), OpsError> {
    let expected = View::MAX_LEN;
    // A shape from a file may overflow, also as a product of some dimensions.
    let found = shape.iter().fold(1, |len: usize, &dim| len.saturating_mul(dim.max(1)));
    if found > expected { Err(OpsError::TooLarge { found, expected }) } else { Ok(()) }
}

/// Returns the shape of the amax of a tensor, or of each of its packed rows along an axis.
#[cfg(feature = "cube")]
pub(crate) fn amax_shape(values: &Shape, axis: usize, by_row: bool) -> Shape {
    Shape::new([if by_row { View::along(values, axis).packed_rows() } else { 1 }])
}

/// Returns the shape of a product `[.., m, k] x [.., k, n]`, whose leading axes are equal or 1.
#[cfg(feature = "cube")]
pub(crate) fn product_shape(left: &Shape, right: &Shape) -> Shape {
    let mut shape = left.to_vec();
    let rank = shape.len();
    for axis in 0..rank - 2 {
        shape[axis] = left[axis].max(right[axis]);
    }
    shape[rank - 1] = right[rank - 1];
    shape.into()
}

/// Returns the shape of a sum along an axis.
#[cfg(feature = "cube")]
pub(crate) fn reduced_shape(values: &Shape, axis: usize) -> Shape {
    let mut shape = values.to_vec();
    shape[axis] = 1;
    shape.into()
}

/// Returns shapes and dtypes of a quantized tensor before it is computed.
#[cfg(feature = "cube")]
pub(crate) fn packed_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
) -> Fp4PrimitiveMetadata {
    let layout = Fp4Layout::new(&values.shape, *axis, scheme).expect("callers check the scheme");
    Fp4PrimitiveMetadata {
        codes: TensorSpec::new(layout.codes_shape().into(), DType::U8),
        scales: TensorSpec::new(layout.scales_shape().into(), DType::U8),
        tensor_scale: TensorSpec::new(amax.shape.clone(), DType::I32),
    }
}

/// [`packed_metadata`] for
/// [`fp4_quantize_by_importance`](crate::Fp4Backend::fp4_quantize_by_importance).
#[cfg(feature = "cube")]
pub(crate) fn packed_by_importance_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    _costs: &TensorSpec,
    _bounds: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
) -> Fp4PrimitiveMetadata {
    packed_metadata(values, amax, axis, scheme)
}

/// [`packed_metadata`] for [`fp4_quantize_gptq`](crate::Fp4Backend::fp4_quantize_gptq).
#[cfg(feature = "cube")]
pub(crate) fn packed_by_gptq_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
    _factorization: &Arc<Factorization>,
) -> Fp4PrimitiveMetadata {
    packed_metadata(values, amax, axis, scheme)
}

/// Describes the selected rows of [`fp4_select_rows`](crate::Fp4Backend::fp4_select_rows).
#[cfg(feature = "cube")]
pub(crate) fn selected_metadata(
    packed: &Fp4PrimitiveMetadata,
    rows: &TensorSpec,
) -> Fp4PrimitiveMetadata {
    let of_rows = |part: &TensorSpec| {
        let mut shape = part.shape.clone();
        shape[0] = rows.shape[0];
        TensorSpec::new(shape, part.dtype)
    };
    let one = packed.tensor_scale.shape.num_elements() == 1;
    Fp4PrimitiveMetadata {
        codes: of_rows(&packed.codes),
        scales: of_rows(&packed.scales),
        tensor_scale: if one { packed.tensor_scale.clone() } else { of_rows(&packed.tensor_scale) },
    }
}

/// Converts the bits of f32 values, in i32, to the values.
pub(crate) fn from_bits(bits: &TensorData) -> Vec<f32> {
    bits.iter::<i32>().map(|bits| f32::from_bits(bits as u32)).collect()
}
