//! A named tensor of a file, and one that is to be written.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use half::{bf16, f16};

use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};

/// Most bytes of a tensor that are decoded at a time.
pub(crate) const PIECE: usize = 1 << 20;

/// Dtypes that values are decoded to.
pub(crate) const TO_DECODE_TO: &str = "F32, BF16 or F16 to decode to";

/// A tensor of a file (its bytes are borrowed from the memory map), or one made in memory.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Tensor};
///
/// let tensor = Tensor::new("norm.weight", Dtype::BF16, vec![2], vec![0x80, 0x3F, 0, 0x40])?;
/// assert_eq!((tensor.len(), tensor.to_f32()?), (2, vec![1.0, 2.0]));
/// assert_eq!(tensor.part(1, 1).to_f32()?, [2.0]);
/// assert_eq!(tensor.plain(), Some(Dtype::BF16));
/// assert!(tensor.is(&[Dtype::F16, Dtype::BF16]) && !tensor.is_wide_matrix());
/// assert!(Tensor::new("norm.weight", Dtype::BF16, vec![3], vec![0; 4]).is_err());
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: Cow<'a, str>,
    /// The file; empty if it was made in memory.
    pub file: &'a Path,
    /// The type of its numbers.
    pub dtype: DataType,
    /// Its shape, row-major: the last axis is contiguous.
    pub shape: Cow<'a, [usize]>,
    /// Its numbers, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

/// Writes how many bytes there are, not which.
impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, file, dtype, shape, bytes } = self;
        let mut parts = f.debug_struct("Tensor");
        parts.field("name", name).field("file", file).field("dtype", dtype).field("shape", shape);
        parts.field("bytes", &format_args!("[{}]", bytes.len())).finish()
    }
}

impl<'a> Tensor<'a> {
    /// A tensor made in memory.
    ///
    /// # Errors
    /// [`TensorProblem::Bytes`] if the bytes are not as many as the shape takes.
    pub fn new(
        name: impl Into<Cow<'a, str>>,
        dtype: Dtype,
        shape: impl Into<Cow<'a, [usize]>>,
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<Self, CheckpointError> {
        let (name, shape, bytes) = (name.into(), shape.into(), bytes.into());
        let (dtype, file) = (DataType::Plain(dtype), Path::new(""));
        let tensor = Self { name, file, dtype, shape, bytes };
        tensor.check_bytes().map(|()| tensor)
    }

    /// Checks that the bytes are as many as the shape takes.
    fn check_bytes(&self) -> Result<(), CheckpointError> {
        match self.dtype.bytes(&self.shape) {
            Some(expected) if expected == self.bytes.len() => Ok(()),
            Some(expected) => {
                let (expected, found) = (expected as u64, self.bytes.len() as u64);
                Err(self.error(TensorProblem::Bytes { expected, found }))
            }
            None => {
                let found = self.shape.iter().map(|&axis| axis as u64).collect();
                Err(self.error(TensorProblem::Size { found }))
            }
        }
    }

    /// The dtype, if it is a plain one.
    #[must_use]
    pub fn plain(&self) -> Option<Dtype> {
        match self.dtype {
            DataType::Plain(dtype) => Some(dtype),
            DataType::Ggml(_) => None,
        }
    }

    /// Returns true if its numbers are of one of these dtypes.
    #[must_use]
    pub fn is(&self, dtypes: &[Dtype]) -> bool {
        self.plain().is_some_and(|dtype| dtypes.contains(&dtype))
    }

    /// Number of its values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if it has no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads its numbers as f32, if they are [floats](DataType::is_float). Records of ggml have the
    /// bits of `gguf.quants.dequantize`.
    ///
    /// # Errors
    /// [`TensorProblem::Dtype`] if they are others, [`TensorProblem::Beyond`] if one is too
    /// large, [`TensorProblem::Bytes`] or [`TensorProblem::Size`] if the bytes are not as many as
    /// the shape takes.
    pub fn to_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        self.check_bytes()?;
        let mut values = Vec::new();
        self.append_values(&self.bytes, &mut values)?;
        Ok(values)
    }

    /// Appends the values of some of its bytes as f32.
    pub(crate) fn append_values(
        &self,
        bytes: &[u8],
        values: &mut Vec<f32>,
    ) -> Result<(), CheckpointError> {
        let begin = values.len();
        self.dtype.decode(bytes, values).ok_or_else(|| self.not_floats())?;
        if self.is(&[Dtype::F64]) {
            let numbers = bytes.as_chunks().0.iter().map(|&number| f64::from_le_bytes(number));
            let mut pairs = numbers.zip(&values[begin..]);
            let beyond = pairs.find(|(number, value)| number.is_finite() && value.is_infinite());
            if let Some((found, _)) = beyond {
                return Err(self.error(TensorProblem::Beyond { found, dtype: Dtype::F32 }));
            }
        }
        Ok(())
    }

    /// Decodes its numbers to a tensor of `dtype`. Only a piece of them is in f32 at a time.
    ///
    /// # Errors
    /// As [`to_f32`](Self::to_f32); a `dtype` that is not F32, BF16 or F16; and
    /// [`TensorProblem::Beyond`] if a finite value is infinite in it.
    pub fn decode(&self, dtype: Dtype) -> Result<Tensor<'static>, CheckpointError> {
        self.check_bytes()?;
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        // One piece at least: a tensor of no values is checked too.
        for piece in self.pieces().chain(self.is_empty().then_some(&[][..])) {
            values.clear();
            self.append_values(piece, &mut values)?;
            append(&values, dtype, &mut bytes).ok_or_else(|| self.wrong_dtype(TO_DECODE_TO))?;
            check_range(&values, dtype).map_err(|problem| self.error(problem))?;
        }
        Tensor::new(self.name.to_string(), dtype, self.shape.to_vec(), bytes)
    }

    /// Splits its bytes into runs of whole numbers or records, of [`PIECE`] bytes at most.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let step = self.dtype.step();
        self.bytes.chunks(PIECE / step * step)
    }

    /// Borrows what the first `axes` axes count: one of stacked matrices, one row. No data is
    /// copied.
    ///
    /// # Panics
    /// If there are fewer axes, or `index` is not below their product.
    #[must_use]
    pub fn part(&self, axes: usize, index: usize) -> Tensor<'_> {
        let (stack, shape) = self.shape.split_at(axes);
        let count: usize = stack.iter().product();
        assert!(index < count, "part {index} of {count}");
        let length = self.bytes.len() / count;
        Tensor {
            name: Cow::Borrowed(&self.name),
            file: self.file,
            dtype: self.dtype,
            shape: shape.into(),
            bytes: self.bytes[index * length..][..length].into(),
        }
    }

    pub(crate) fn error(&self, problem: impl Into<TensorProblem>) -> CheckpointError {
        CheckpointError::tensor(self.file, &self.name, problem)
    }

    pub(crate) fn wrong_dtype(&self, expected: &'static str) -> CheckpointError {
        self.error(TensorProblem::Dtype { expected, found: self.dtype.to_string() })
    }

    /// Returns true for a matrix, or a stack of them, in F32 or F64.
    #[must_use]
    pub fn is_wide_matrix(&self) -> bool {
        self.is(&[Dtype::F32, Dtype::F64]) && self.shape.len() >= 2
    }

    pub(crate) fn not_floats(&self) -> CheckpointError {
        self.wrong_dtype("F32, F16, BF16, F64, FP8, or a type of ggml that is decoded")
    }

    pub(crate) fn wrong_shape(&self, expected: impl Into<String>) -> CheckpointError {
        let (expected, found) = (expected.into(), self.shape.to_vec());
        self.error(TensorProblem::Shape { expected, found })
    }
}

/// Checks that no finite value is infinite in another dtype.
pub(crate) fn check_range(values: &[f32], dtype: Dtype) -> Result<(), TensorProblem> {
    let cast = |value: f32| match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    };
    match values.iter().find(|value| value.is_finite() && cast(**value).is_infinite()) {
        Some(&found) => Err(TensorProblem::Beyond { found: f64::from(found), dtype }),
        None => Ok(()),
    }
}

/// Appends values in F32, BF16 or F16, little-endian. None: the dtype is another.
pub(crate) fn append(values: &[f32], dtype: Dtype, bytes: &mut Vec<u8>) -> Option<()> {
    match dtype {
        Dtype::F32 => put(values, bytes, f32::to_le_bytes),
        Dtype::BF16 => put(values, bytes, |value| bf16::from_f32(value).to_le_bytes()),
        Dtype::F16 => put(values, bytes, |value| f16::from_f32(value).to_le_bytes()),
        _ => return None,
    }
    Some(())
}

/// Appends numbers of `N` bytes: into their places, which is faster than one by one.
fn put<const N: usize>(values: &[f32], bytes: &mut Vec<u8>, number: impl Fn(f32) -> [u8; N]) {
    let begin = bytes.len();
    bytes.resize(begin + N * values.len(), 0);
    let places = bytes[begin..].as_chunks_mut::<N>().0;
    places.iter_mut().zip(values).for_each(|(place, &value)| *place = number(value));
}

/// A tensor that a dialect writes.
///
/// ```
/// use burn_fp4_checkpoints::{Data, Dtype, NewTensor, Tensor};
///
/// let bytes = NewTensor::bytes("x", Dtype::U8, [2_usize], vec![1, 2]);
/// assert!(matches!(bytes.data, Data::Bytes(_)));
/// let made = NewTensor::made("x", bytes.dtype, [2_usize], || Ok(vec![1, 2].into()));
/// let Data::Made(make) = &made.data else { panic!("nothing is made before it is written") };
/// assert_eq!(make()?[..], [1, 2]);
/// let tensor = Tensor::new("x", Dtype::U8, vec![2], vec![1, 2])?;
/// let copy = NewTensor::copy("y", &tensor);
/// assert_eq!((copy.name.as_str(), copy.dtype), ("y", bytes.dtype));
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Debug)]
pub struct NewTensor<'w> {
    /// Its name in the file.
    pub name: String,
    /// The type of its numbers.
    pub dtype: DataType,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// Its bytes, or how to make them.
    pub data: Data<'w>,
}

/// The bytes of a tensor that is to be written.
pub enum Data<'w> {
    /// As they are.
    Bytes(Cow<'w, [u8]>),
    /// Made when they are written, so that planning a file touches no data.
    Made(Box<dyn Fn() -> Result<Cow<'w, [u8]>, CheckpointError> + 'w>),
}

impl fmt::Debug for Data<'_> {
    /// Number of bytes; what is made is not known yet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => f.debug_tuple("Bytes").field(&bytes.len()).finish(),
            Self::Made(_) => f.write_str("Made"),
        }
    }
}

impl<'w> NewTensor<'w> {
    /// A tensor whose bytes are at hand.
    #[must_use]
    pub fn bytes(
        name: impl Into<String>,
        dtype: Dtype,
        shape: impl Into<Vec<usize>>,
        bytes: impl Into<Cow<'w, [u8]>>,
    ) -> Self {
        let (name, shape, data) = (name.into(), shape.into(), Data::Bytes(bytes.into()));
        Self { name, dtype: DataType::Plain(dtype), shape, data }
    }

    /// A tensor whose bytes are made when they are written.
    pub fn made(
        name: impl Into<String>,
        dtype: DataType,
        shape: impl Into<Vec<usize>>,
        make: impl Fn() -> Result<Cow<'w, [u8]>, CheckpointError> + 'w,
    ) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), data: Data::Made(Box::new(make)) }
    }

    /// A copy of a tensor under another name.
    #[must_use]
    pub fn copy(name: impl Into<String>, tensor: &'w Tensor<'_>) -> Self {
        let (shape, data) = (tensor.shape.to_vec(), Data::Bytes(Cow::Borrowed(&*tensor.bytes)));
        Self { name: name.into(), dtype: tensor.dtype, shape, data }
    }
}
