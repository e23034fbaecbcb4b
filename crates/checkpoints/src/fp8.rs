//! A weight in FP8: the values of a file and their scales, decoded on request.
//!
//! | scales | shape | written by |
//! |---|---|---|
//! | per tensor | `[]` or `[1]`, one a matrix | ModelOpt, compressed-tensors |
//! | per row | `[.., N]` or `[.., N, 1]` | compressed-tensors, ModelOpt per channel |
//! | blocks | `[.., N/128, K/128]`, rounded up | DeepSeek, ModelOpt FP8_PB_WO |
//! | MXFP8 | `[.., N, K/32]`, E8M0 | OCP MX 1.0; ModelOpt, compressed-tensors mxfp8 |
//!
//! A scale always multiplies, whatever its name (`weight_scale_inv` of DeepSeek does too). FP8 that
//! was cast without scales is a plain tensor, whose numbers are its values.

use burn_fp4_formats::E8M0_VALUES;

use crate::dtype::{Dtype, fp8};
use crate::error::CheckpointError;
use crate::tensor::{TO_DECODE_TO, Tensor, append, check_range};

/// Numbers that share a scale of MXFP8 (OCP MX 1.0).
const MX_BLOCK: usize = 32;

/// A weight in FP8.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Fp8Weight, Granularity, Tensor};
///
/// let values = Tensor::new("up.weight", Dtype::F8_E4M3, vec![2, 2], vec![0x38; 4])?; // 4 times 1
/// let scales: Vec<u8> = [1.0_f32, 3.0].into_iter().flat_map(f32::to_le_bytes).collect();
/// let scales = Tensor::new("up.weight_scale", Dtype::F32, vec![2, 1], scales)?;
/// let weight = Fp8Weight::new(values, scales, [128, 128])?;
/// assert_eq!((weight.granularity, weight.stacked()), (Granularity::Row, 1));
/// assert_eq!(weight.to_f32()?, [1.0, 1.0, 3.0, 3.0]);
/// assert_eq!(weight.decode(Dtype::BF16)?.to_f32()?, weight.to_f32()?);
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Fp8Weight<'a> {
    /// The values: F8_E4M3 or F8_E5M2, `[.., rows, cols]`.
    pub values: Tensor<'a>,
    /// The scales: f32, f16, bf16, or E8M0.
    pub scales: Tensor<'a>,
    /// Which values share a scale.
    pub granularity: Granularity,
}

/// Which values share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// All of them, or all of a stacked matrix.
    Tensor,
    /// A row.
    Row,
    /// A block of `rows` x `cols`; the last ones may be cut off.
    Block {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        cols: usize,
    },
}

impl<'a> Fp8Weight<'a> {
    /// Puts values and scales together. `block` is the size of two-dimensional blocks.
    ///
    /// # Errors
    /// A dtype that is no FP8, a scale that is no float, or a shape that is none of the table's.
    pub fn new(
        values: Tensor<'a>,
        scales: Tensor<'a>,
        block: [usize; 2],
    ) -> Result<Self, CheckpointError> {
        if !values.is(&[Dtype::F8_E4M3, Dtype::F8_E5M2]) {
            return Err(values.wrong_dtype("F8_E4M3 or F8_E5M2"));
        }
        let mx = scales.is(&[Dtype::U8, Dtype::F8_E8M0]);
        if !mx && !scales.is(&[Dtype::F32, Dtype::F16, Dtype::BF16]) {
            return Err(scales.wrong_dtype("F32, F16, BF16, U8 or F8_E8M0"));
        }
        let [stack @ .., rows, cols] = &values.shape[..] else {
            return Err(values.wrong_shape("at least two axes"));
        };
        let (rows, cols) = (*rows, *cols);
        let block = block.map(|size| size.max(1));
        let with = |tail: &[usize]| [stack, tail].concat();
        let blocks = with(&[rows.div_ceil(block[0]), cols.div_ceil(block[1])]);
        let found = &scales.shape[..];
        let granularity = if mx && found == with(&[rows, cols.div_ceil(MX_BLOCK)]) {
            Granularity::Block { rows: 1, cols: MX_BLOCK }
        } else if found == blocks {
            Granularity::Block { rows: block[0], cols: block[1] }
        } else if mx {
            let mx = with(&[rows, cols.div_ceil(MX_BLOCK)]);
            return Err(scales.wrong_shape(format!("{mx:?} or {blocks:?}")));
        } else if found.is_empty() || found == [1] || found == stack {
            Granularity::Tensor
        } else if found == with(&[rows]) || found == with(&[rows, 1]) {
            Granularity::Row
        } else {
            let row = with(&[rows, 1]);
            return Err(scales.wrong_shape(format!("[], {row:?} or {blocks:?}")));
        };
        Ok(Self { values, scales, granularity })
    }

    /// Stacked matrices: 1 if it is a single one.
    #[must_use]
    pub fn stacked(&self) -> usize {
        self.values.shape[..self.values.shape.len() - 2].iter().product()
    }

    /// One of the stacked matrices, or itself if it is a single one. No data is copied.
    ///
    /// # Panics
    /// If `index` is not below their count.
    #[must_use]
    pub fn matrix(&self, index: usize) -> Fp8Weight<'_> {
        let (count, stack) = (self.stacked(), self.values.shape.len() - 2);
        assert!(index < count, "matrix {index} of {count}");
        // One number for all of them is that of each.
        let shared = self.granularity == Granularity::Tensor && self.scales.len() == 1;
        Fp8Weight {
            values: self.values.part(stack, index),
            scales: match shared {
                true => self.scales.clone(),
                false => self.scales.part(stack, index),
            },
            granularity: self.granularity,
        }
    }

    /// The values times their scales, f32: exact for scales that are powers of two, otherwise
    /// rounded once.
    ///
    /// # Errors
    /// None of what [`new`](Self::new) lets through.
    pub fn to_f32(&self) -> Result<Vec<f32>, CheckpointError> {
        let scales = match self.scales.is(&[Dtype::U8, Dtype::F8_E8M0]) {
            true => self.scales.bytes.iter().map(|&b| E8M0_VALUES[usize::from(b)]).collect(),
            false => self.scales.to_f32()?,
        };
        let dtype = self.values.plain().unwrap_or(Dtype::F8_E4M3);
        let axes = &self.values.shape;
        let (rows, cols) = (axes[axes.len() - 2], axes[axes.len() - 1]);
        let matrix = (rows * cols).max(1);
        let scale_of = |at: usize| {
            let (stack, row, col) = (at / matrix, at % matrix / cols, at % cols);
            let index = match self.granularity {
                Granularity::Tensor => stack.min(scales.len() - 1),
                Granularity::Row => stack * rows + row,
                Granularity::Block { rows: height, cols: width } => {
                    let (down, across) = (rows.div_ceil(height), cols.div_ceil(width));
                    (stack * down + row / height) * across + col / width
                }
            };
            scales[index]
        };
        let values = self.values.bytes.iter().enumerate();
        Ok(values.map(|(at, &byte)| fp8(dtype, byte) * scale_of(at)).collect())
    }

    /// The values times their scales, as a tensor of `dtype`.
    ///
    /// # Errors
    /// A `dtype` that is not F32, BF16 or F16, and values beyond its range.
    pub fn decode(&self, dtype: Dtype) -> Result<Tensor<'a>, CheckpointError> {
        let (values, mut bytes) = (self.to_f32()?, Vec::new());
        let known = append(&values, dtype, &mut bytes);
        known.ok_or_else(|| self.values.wrong_dtype(TO_DECODE_TO))?;
        check_range(&values, dtype).map_err(|problem| self.values.error(problem))?;
        let (name, shape) = (self.values.name.clone(), self.values.shape.clone());
        Tensor::new(name, dtype, shape, bytes)
    }
}
