//! A weight in FP4: codes, block scales and tensor scale as the file states them.

use std::borrow::Cow;
use std::path::Path;

use burn_fp4_formats::{self as formats, E2M1, Fp4Format, Packed};
use burn_fp4_policy::search::Hadamard;
use burn_fp4_policy::search::host::{self, View};

use crate::dtype::Dtype;
use crate::error::{CheckpointError, TensorProblem};
use crate::storage::{Geometry, Storage, transpose};
use crate::tensor::Tensor;

/// The f32 by which a weight is scaled, or one for each of its stacked matrices, **as the file
/// states it**.
///
/// A file is written again byte for byte only from its own number: 1 / (1 / d) differs from d for
/// one f32 in six.
///
/// ```
/// use burn_fp4_checkpoints::{Numbers, TensorScale};
///
/// let stated = TensorScale::Divisor(Numbers::new(&[4.0, 8.0]));
/// assert_eq!(stated.multipliers().to_vec(), [0.25, 0.125]);
/// assert_eq!(stated.divisors().to_vec(), [4.0, 8.0]);
/// assert_eq!(stated.of_matrix(1).stated().to_vec(), [8.0]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum TensorScale<'a> {
    /// It multiplies (amax / 2688): ModelOpt, GGUF, torchao.
    Multiplier(Numbers<'a>),
    /// It divides (2688 / amax): compressed-tensors.
    Divisor(Numbers<'a>),
}

/// f32 numbers, little-endian, read when they are asked for.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Numbers, Tensor};
///
/// let numbers = Numbers::new(&[0.5, 2.0]);
/// assert_eq!((numbers.len(), numbers.to_vec()), (2, vec![0.5, 2.0]));
/// let half = Tensor::new("up.weight_scale_2", Dtype::F16, vec![1], vec![0; 2])?;
/// assert!(Numbers::of(half).is_err());
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Numbers<'a>(Cow<'a, [u8]>);

impl<'a> Numbers<'a> {
    /// Numbers of a file.
    ///
    /// # Errors
    /// [`TensorProblem::Dtype`] if they are not f32.
    pub fn of(tensor: Tensor<'a>) -> Result<Self, CheckpointError> {
        match tensor.is(&[Dtype::F32]) {
            true => Ok(Self(tensor.bytes)),
            false => Err(tensor.wrong_dtype("F32")),
        }
    }

    /// Numbers made in memory.
    #[must_use]
    pub fn new(numbers: &[f32]) -> Self {
        Self(numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    }

    /// The same numbers in other memory: `read` takes their bytes.
    pub(crate) fn try_map<'b, E>(
        &self,
        read: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>,
    ) -> Result<Numbers<'b>, E> {
        read(&self.0).map(|bytes| Numbers(bytes.into()))
    }

    /// Number of them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len() / 4
    }

    /// Returns true if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers.
    #[must_use]
    pub fn to_vec(&self) -> Vec<f32> {
        self.0.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The number at a place.
    fn one(&self, at: usize) -> Numbers<'_> {
        Numbers(Cow::Borrowed(&self.0[4 * at..4 * (at + 1)]))
    }

    fn reciprocals(&self) -> Self {
        let reciprocals: Vec<f32> = self.to_vec().into_iter().map(reciprocal).collect();
        Self::new(&reciprocals)
    }
}

impl<'a> TensorScale<'a> {
    /// The numbers as the file states them.
    #[must_use]
    pub fn stated(&self) -> &Numbers<'a> {
        match self {
            Self::Multiplier(numbers) | Self::Divisor(numbers) => numbers,
        }
    }

    /// The scale of one of the stacked matrices, as the file states it: the matrix's own number,
    /// or the one that all of them share.
    ///
    /// # Panics
    /// If there are several numbers, and `at` is not below their count.
    #[must_use]
    pub fn of_matrix(&self, at: usize) -> TensorScale<'_> {
        let numbers = self.stated();
        let one = numbers.one(if numbers.len() == 1 { 0 } else { at });
        match self {
            Self::Multiplier(_) => TensorScale::Multiplier(one),
            Self::Divisor(_) => TensorScale::Divisor(one),
        }
    }

    /// The stated number of every stacked matrix.
    pub(crate) fn of_matrices(&self, stacked: usize) -> Vec<f32> {
        spread(self.stated().to_vec(), stacked)
    }

    /// As multipliers; a divisor's reciprocal, rounded once.
    #[must_use]
    pub fn multipliers(&self) -> Cow<'_, Numbers<'a>> {
        match self {
            Self::Multiplier(numbers) => Cow::Borrowed(numbers),
            Self::Divisor(numbers) => Cow::Owned(numbers.reciprocals()),
        }
    }

    /// As divisors; a multiplier's reciprocal, rounded once (`modelopt_nvfp4.py` of
    /// compressed-tensors converts so).
    #[must_use]
    pub fn divisors(&self) -> Cow<'_, Numbers<'a>> {
        match self {
            Self::Divisor(numbers) => Cow::Borrowed(numbers),
            Self::Multiplier(numbers) => Cow::Owned(numbers.reciprocals()),
        }
    }
}

/// In which order a dialect multiplies. The f32 result differs by 1 ulp at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// (element x block scale) x tensor scale: this project's, and ggml's, which multiplies the
    /// product of matrices.
    #[default]
    ElementFirst,
    /// element x (block scale x tensor scale), or element x (block scale / divisor): ModelOpt,
    /// compressed-tensors, torchao, ComfyUI.
    ScalesFirst,
}

/// A weight in FP4. Its bytes are the file's until they are asked for in another layout.
///
/// ```
/// use burn_fp4_checkpoints::Fp4Weight;
/// use burn_fp4_formats::{Fp4Format, Packed, TensorScale};
///
/// let (format, tensor_scale) = (Fp4Format::NvFp4, TensorScale::One(0.5));
/// let (codes, scales) = (vec![0x22; 8], vec![0x38]); // 16 times 1, times 1
/// let expert = Packed { format, block_size: 16, rows: 1, cols: 16, codes, scales, tensor_scale };
/// let stack = Fp4Weight::stack("experts", &[expert.clone(), expert.clone()])?;
/// assert_eq!((&stack.shape[..], stack.dequantize()), (&[2, 1, 16][..], vec![0.5; 32]));
/// assert_eq!((stack.stacked(), stack.rows(), stack.cols()), (2, 1, 16));
/// assert_eq!(stack.plain_codes()[..], [0x22; 16]);
/// assert_eq!(stack.plain_scales()[..], [0x38; 2]);
/// assert_eq!((stack.matrix(1).to_packed(), stack.facts().blocks), (vec![expert], 2));
/// let experts = stack.split();
/// let again = Fp4Weight::join("experts", &[("0", &experts[0]), ("1", &experts[1])])?;
/// assert_eq!(again.to_packed(), stack.to_packed());
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fp4Weight<'a> {
    /// Meaning of the bits.
    pub format: Fp4Format,
    /// Numbers that share a block scale.
    pub block_size: usize,
    /// `[rows, cols]`, or `[stack, rows, cols]` of stacked matrices (experts). Blocks run along
    /// `cols`, the axis of the layer's input.
    pub shape: Vec<usize>,
    /// True if the model's parameter is `[.., cols, rows]`: the experts of Llama 4 and gpt-oss, and
    /// the layers of GPT-2.
    pub transposed: bool,
    /// In which order the bytes lie.
    pub storage: Storage,
    /// The codes of the file, or its records.
    pub codes: Cow<'a, [u8]>,
    /// The block scales of the file; empty if the records have them.
    pub scales: Cow<'a, [u8]>,
    /// The tensor scale, if the file has one.
    pub tensor_scale: Option<TensorScale<'a>>,
    /// The Hadamard transform along `cols` of the values that the codes are of. Layers transform
    /// their input alike; [`dequantize`](Self::dequantize) transforms back.
    pub hadamard: Option<Hadamard>,
    /// The order of the dialect's products.
    pub order: Order,
}

impl Fp4Weight<'_> {
    /// The weight of a quantized matrix, or of several that are stacked.
    ///
    /// # Errors
    /// Matrices of different formats or shapes, or that are not valid.
    pub fn stack(name: &str, matrices: &[Packed]) -> Result<Fp4Weight<'static>, CheckpointError> {
        let wrong = |problem: TensorProblem| CheckpointError::tensor(Path::new(""), name, problem);
        let Some(first) = matrices.first() else {
            return Err(wrong(TensorProblem::Shape { expected: "matrices".into(), found: vec![] }));
        };
        let mut multipliers = Vec::new();
        for matrix in matrices {
            matrix.validate().map_err(|error| wrong(error.into()))?;
            let facts = |m: &Packed| (m.format, m.block_size, m.rows, m.cols);
            let formats::TensorScale::One(multiplier) = &matrix.tensor_scale else {
                let (expected, found) = ("one tensor scale a matrix", matrix.rows);
                let what = TensorProblem::Shape { expected: expected.into(), found: vec![found] };
                return Err(wrong(what));
            };
            if facts(matrix) != facts(first) {
                let expected = format!("[{}, {}]", first.rows, first.cols);
                let found = vec![matrix.rows, matrix.cols];
                return Err(wrong(TensorProblem::Shape { expected, found }));
            }
            multipliers.push(*multiplier);
        }
        let mut shape = vec![first.rows, first.cols];
        if matrices.len() > 1 {
            shape.insert(0, matrices.len());
        }
        let scaled = first.format.row().tensor_scale;
        Ok(Fp4Weight {
            format: first.format,
            block_size: first.block_size,
            shape,
            transposed: false,
            storage: Storage::Rows,
            codes: matrices.iter().flat_map(|m| &m.codes).copied().collect(),
            scales: matrices.iter().flat_map(|m| &m.scales).copied().collect(),
            tensor_scale: scaled.then(|| TensorScale::Multiplier(Numbers::new(&multipliers))),
            hadamard: None,
            order: Order::ElementFirst,
        })
    }

    /// A weight without its bytes, for a plan: the dialect gets the values later.
    ///
    /// `shape` is `[.., rows, cols]`; with `scaled` there is a tensor scale for every matrix.
    ///
    /// ```
    /// use burn_fp4_checkpoints::Fp4Weight;
    /// use burn_fp4_formats::Fp4Format;
    ///
    /// let mut weight = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![2, 16], true, false);
    /// (weight.codes, weight.scales) = (vec![0x22; 16].into(), vec![0x38, 0x40].into());
    /// let (shape, values) = weight.parameter();
    /// assert_eq!((&shape[..], &values[..4]), (&[16, 2][..], &[1.0, 2.0, 1.0, 2.0][..]));
    /// ```
    ///
    /// # Panics
    /// If the shape has fewer than two axes.
    #[must_use]
    pub fn outline(
        format: Fp4Format,
        block_size: usize,
        shape: Vec<usize>,
        transposed: bool,
        scaled: bool,
    ) -> Fp4Weight<'static> {
        let stacked = shape[..shape.len() - 2].iter().product();
        let scale = || TensorScale::Multiplier(Numbers::new(&vec![1.0; stacked]));
        Fp4Weight {
            format,
            block_size,
            shape,
            transposed,
            storage: Storage::Rows,
            codes: (&[]).into(),
            scales: (&[]).into(),
            tensor_scale: scaled.then(scale),
            hadamard: None,
            order: Order::ElementFirst,
        }
    }

    /// Stacked matrices: 1 if it is a single one.
    #[must_use]
    pub fn stacked(&self) -> usize {
        self.shape[..self.shape.len() - 2].iter().product()
    }

    /// One of the stacked matrices, or itself if it is a single one. No data is copied but the
    /// number that scales it.
    ///
    /// # Panics
    /// If `index` is not below their count.
    #[must_use]
    pub fn matrix(&self, index: usize) -> Fp4Weight<'_> {
        let count = self.stacked();
        assert!(index < count, "matrix {index} of {count}");
        let part = |bytes: &'_ [u8]| {
            let length = bytes.len() / count;
            index * length..(index + 1) * length
        };
        let number = |numbers: &Numbers<'_>| {
            let numbers = numbers.to_vec();
            Numbers::new(&[numbers[index.min(numbers.len() - 1)]])
        };
        Fp4Weight {
            shape: vec![self.rows(), self.cols()],
            codes: Cow::Borrowed(&self.codes[part(&self.codes)]),
            scales: Cow::Borrowed(&self.scales[part(&self.scales)]),
            tensor_scale: self.tensor_scale.as_ref().map(|scale| match scale {
                TensorScale::Multiplier(numbers) => TensorScale::Multiplier(number(numbers)),
                TensorScale::Divisor(numbers) => TensorScale::Divisor(number(numbers)),
            }),
            ..*self
        }
    }

    /// Rows of a matrix.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape[self.shape.len() - 2]
    }

    /// Columns of a matrix, the axis of the blocks.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// `[.., rows, cols / 2]`.
    #[must_use]
    pub fn codes_shape(&self) -> Vec<usize> {
        self.last_axis(self.cols() / 2)
    }

    /// `[.., rows, cols / block_size]`.
    #[must_use]
    pub fn scales_shape(&self) -> Vec<usize> {
        self.last_axis(self.cols() / self.block_size)
    }

    fn last_axis(&self, last: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        *shape.last_mut().expect("a weight has at least two axes") = last;
        shape
    }

    /// The codes, row-major, two a byte, the even one in the low nibble.
    #[must_use]
    pub fn plain_codes(&self) -> Cow<'_, [u8]> {
        self.storage.codes(self.geometry(), &self.codes)
    }

    /// The block scales, row-major.
    #[must_use]
    pub fn plain_scales(&self) -> Cow<'_, [u8]> {
        self.storage.scales(self.geometry(), &self.codes, &self.scales)
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            format: self.format,
            block_size: self.block_size,
            stacked: self.stacked(),
            rows: self.rows(),
            cols: self.cols(),
        }
    }

    /// The multiplier of every stacked matrix.
    #[must_use]
    pub fn multipliers(&self) -> Vec<f32> {
        let stated = self.tensor_scale.as_ref().map(|scale| scale.multipliers().to_vec());
        spread(stated.unwrap_or_else(|| vec![1.0]), self.stacked())
    }

    /// The matrices as the rest of the project knows them: [`Packed::validate`] is for the caller,
    /// who knows whether the values are to be trusted. A Hadamard transform is left out.
    #[must_use]
    pub fn to_packed(&self) -> Vec<Packed> {
        let (rows, cols, stacked) = (self.rows(), self.cols(), self.stacked());
        let (codes, scales) = (self.plain_codes(), self.plain_scales());
        let part = |bytes: &[u8], at: usize| {
            let length = bytes.len() / stacked;
            bytes[at * length..(at + 1) * length].to_vec()
        };
        let matrix = |(at, multiplier): (usize, f32)| Packed {
            format: self.format,
            block_size: self.block_size,
            rows,
            cols,
            codes: part(&codes, at),
            scales: part(&scales, at),
            tensor_scale: formats::TensorScale::One(multiplier),
        };
        (0..stacked).zip(self.multipliers()).map(matrix).collect()
    }

    /// Returns the values of the codes in f64, `[.., rows, cols]`, without transforming back:
    /// products of element, block scale and
    /// multiplier are exact, and quotients by a divisor are rounded once. The order in which a
    /// dialect multiplies in f32 does not change them.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Fp4Weight, Numbers, TensorScale};
    /// use burn_fp4_formats::Fp4Format;
    ///
    /// let mut weight = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, false);
    /// (weight.codes, weight.scales) = (vec![0x33; 8].into(), vec![0x39].into()); // 1.5 x 1.125
    /// weight.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.1])));
    /// assert!(weight.exact_values().all(|value| value == 1.6875 * f64::from(0.1_f32)));
    /// ```
    pub fn exact_values(&self) -> impl Iterator<Item = f64> + '_ {
        let row = self.format.row();
        let (codes, scales) = (self.plain_codes(), self.plain_scales());
        let matrix = self.rows() * self.cols();
        let stated = self.tensor_scale.as_ref().map(|scale| scale.of_matrices(self.stacked()));
        let divides = matches!(self.tensor_scale, Some(TensorScale::Divisor(_)));
        (0..self.stacked() * matrix).map(move |at| {
            let element = f64::from(E2M1.decode(codes[at / 2] >> (4 * (at % 2)) & 0xF));
            let scaled = element * f64::from(row.block_scale.decode(scales[at / self.block_size]));
            match stated.as_ref().map(|stated| f64::from(stated[at / matrix])) {
                None => scaled,
                Some(divisor) if divides => scaled / divisor,
                Some(multiplier) => scaled * multiplier,
            }
        })
    }

    /// The values as the dialect computes them, f32, `[.., rows, cols]`. Those after a Hadamard
    /// transform are transformed back.
    ///
    /// [`to_packed`](Self::to_packed) and this project's order of products differ by 1 ulp at
    /// most.
    ///
    /// # Panics
    /// If the size of the transform does not divide the columns. Weights of files are checked.
    #[must_use]
    pub fn dequantize(&self) -> Vec<f32> {
        let row = self.format.row();
        let (codes, scales) = (self.plain_codes(), self.plain_scales());
        let matrix = self.rows() * self.cols();
        let stated = self.tensor_scale.as_ref().map(|scale| scale.of_matrices(self.stacked()));
        let value = |at: usize| {
            let code = codes[at / 2] >> (4 * (at % 2)) & 0xF;
            let element = E2M1.decode(code);
            let scale = row.block_scale.decode(scales[at / self.block_size]);
            let number = stated.as_ref().map(|stated| stated[at / matrix]);
            match (&self.tensor_scale, number) {
                (None, _) | (_, None) => element * scale,
                (Some(TensorScale::Divisor(_)), Some(divisor)) => element * (scale / divisor),
                (Some(TensorScale::Multiplier(_)), Some(multiplier)) => match self.order {
                    Order::ElementFirst => (element * scale) * multiplier,
                    Order::ScalesFirst => element * (scale * multiplier),
                },
            }
        };
        let values: Vec<f32> = (0..self.stacked() * matrix).map(value).collect();
        let Some(hadamard) = self.hadamard else { return values };
        let rows = View::rows(self.stacked() * self.rows(), self.cols());
        let mut back = vec![0.0; values.len()];
        match host::hadamard(&values, rows, hadamard, true, &mut back) {
            Ok(()) => back,
            Err(error) => panic!("a weight of {} columns: {error}", self.cols()),
        }
    }
}

impl Fp4Weight<'_> {
    /// The axes of the model's parameter.
    pub(crate) fn parameter_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.transposed {
            let axes = shape.len();
            shape.swap(axes - 2, axes - 1);
        }
        shape
    }

    /// [`dequantize`](Self::dequantize) in the axes of the model's parameter, which come first.
    #[must_use]
    pub fn parameter(&self) -> (Vec<usize>, Vec<f32>) {
        let (shape, values) = (self.parameter_shape(), self.dequantize());
        match self.transposed {
            true => (shape, transpose(&values, self.stacked(), self.rows(), self.cols())),
            false => (shape, values),
        }
    }
}

/// The reciprocal of a scale. Rules give 1 / `f32::MAX` to weights of zeros: it is rounded, so that
/// its own reciprocal would be infinite, and stands for that of the largest f32.
pub(crate) fn reciprocal(number: f32) -> f32 {
    if number == 1.0 / f32::MAX { f32::MAX } else { 1.0 / number }
}

/// One number for all becomes one for each.
fn spread(numbers: Vec<f32>, count: usize) -> Vec<f32> {
    match numbers[..] {
        [one] => vec![one; count],
        _ => numbers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_without_rows_comes_back_as_it_was() {
        let empty = Packed {
            format: Fp4Format::NvFp4,
            block_size: 16,
            rows: 0,
            cols: 16,
            codes: Vec::new(),
            scales: Vec::new(),
            tensor_scale: formats::TensorScale::One(0.5),
        };
        let matrices = [empty.clone(), empty];
        let weight = Fp4Weight::stack("empty", &matrices).expect("valid matrices");
        assert_eq!(weight.to_packed(), matrices);
    }
}
