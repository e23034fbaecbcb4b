//! [`Packed`]: a quantized matrix in host memory, with its validation.

use serde::{Deserialize, Serialize};

use crate::error::{FormatError, check_length};
use crate::format::Fp4Format;

/// Holds the f32 that multiplies every value of a quantized matrix, or of each of its rows.
///
/// Always the multiplier (amax / 2688 for NVFP4). Some files hold its reciprocal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorScale {
    /// One for the whole matrix; 1 for formats that have none.
    One(f32),
    /// One per row ("per-token" scaling).
    PerRow(Vec<f32>),
}

impl TensorScale {
    /// Returns the multiplier of a row.
    #[must_use]
    pub fn of_row(&self, row: usize) -> f32 {
        match self {
            Self::One(scale) => *scale,
            Self::PerRow(scales) => scales[row],
        }
    }

    /// Returns the multipliers as a slice of length 1 or `rows`.
    #[must_use]
    pub fn as_slice(&self) -> &[f32] {
        match self {
            Self::One(scale) => core::slice::from_ref(scale),
            Self::PerRow(scales) => scales,
        }
    }
}

/// A quantized matrix `[rows, cols]` in host memory. Blocks run along a row.
///
/// It is serialized field by field; call [`validate`](Self::validate) on a matrix that was read.
///
/// ```
/// use burn_fp4_formats::{Fp4Format, Packed, TensorScale};
///
/// let packed = Packed {
///     format: Fp4Format::NvFp4,
///     block_size: 16,
///     rows: 1,
///     cols: 16,
///     codes: vec![0x21; 8],  // elements 0.5 and 1
///     scales: vec![0x40],    // the block scale 2
///     tensor_scale: TensorScale::One(3.0),
/// };
/// packed.validate()?;
/// assert_eq!(packed.dequantize()[..2], [3.0, 6.0]);
/// assert_eq!((packed.blocks(), packed.bytes()), (1, 8 + 1 + 4));
/// # Ok::<(), burn_fp4_formats::FormatError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Packed {
    /// Format of the codes and scales.
    pub format: Fp4Format,
    /// Number of elements that share a block scale.
    pub block_size: usize,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix, a multiple of the block size.
    pub cols: usize,
    /// `[rows, cols / 2]`: two codes per byte, the even column in the low nibble.
    pub codes: Vec<u8>,
    /// `[rows, cols / block_size]`, row-major.
    pub scales: Vec<u8>,
    /// The multiplier of the whole, or of each row.
    pub tensor_scale: TensorScale,
}

impl Packed {
    /// Number of blocks of a row.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.cols / self.block_size
    }

    /// Number of bytes of codes, block scales and tensor scale.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.codes.len() + self.scales.len() + 4 * self.tensor_scale.as_slice().len()
    }

    /// Checks shapes and values. A valid matrix can be dequantized, and is finite unless a product
    /// overflows f32.
    ///
    /// # Errors
    /// The first problem: block size, divisibility, lengths, a NaN or negative scale, or a tensor
    /// scale that is negative, not finite, or not 1 if the format has none.
    pub fn validate(&self) -> Result<(), FormatError> {
        self.format.check_block_size(self.block_size)?;
        if !self.cols.is_multiple_of(self.block_size) {
            return Err(FormatError::Indivisible { cols: self.cols, block_size: self.block_size });
        }
        check_length("codes", self.rows * self.cols / 2, self.codes.len())?;
        check_length("block scales", self.rows * self.blocks(), self.scales.len())?;
        if let TensorScale::PerRow(scales) = &self.tensor_scale {
            check_length("tensor scales", self.rows, scales.len())?;
        }

        check_scales(self.format, self.blocks(), &self.scales, self.tensor_scale.as_slice())
    }
}

/// Checks the values of scales, for rows of `blocks` blocks. Valid scales can be dequantized, and
/// values are finite unless a product overflows f32.
///
/// ```
/// use burn_fp4_formats::{Fp4Format, check_scales};
///
/// check_scales(Fp4Format::NvFp4, 2, &[0x38, 0x40], &[0.5])?; // block scales 1 and 2
/// assert!(check_scales(Fp4Format::NvFp4, 2, &[0x38, 0x7F], &[0.5]).is_err(), "0x7F is NaN");
/// assert!(check_scales(Fp4Format::MxFp4, 2, &[127, 128], &[0.5]).is_err(), "no tensor scale");
/// # Ok::<(), burn_fp4_formats::FormatError>(())
/// ```
///
/// # Errors
/// [`FormatError::BlockScale`] for the first that is NaN or negative, [`FormatError::TensorScale`]
/// for the first that is negative, not finite, or not 1 if the format has none.
pub fn check_scales(
    format: Fp4Format,
    blocks: usize,
    scales: &[u8],
    tensor_scale: &[f32],
) -> Result<(), FormatError> {
    let row = format.row();
    for (index, &code) in scales.iter().enumerate() {
        let problem = if row.block_scale.is_nan(code) {
            "NaN"
        } else if code & row.block_scale.sign_bit() != 0 {
            "negative"
        } else {
            continue;
        };
        let (row, block) = (index / blocks, index % blocks);
        return Err(FormatError::BlockScale { row, block, code, problem });
    }
    for (index, &found) in tensor_scale.iter().enumerate() {
        let expected = if !row.tensor_scale && found != 1.0 {
            "the format has no tensor scale, so it must be 1"
        } else if !(found.is_finite() && found.is_sign_positive()) {
            "it must be finite and not negative"
        } else {
            continue;
        };
        return Err(FormatError::TensorScale { row: index, found, expected });
    }
    Ok(())
}
