//! Checks of lengths, block sizes and names of formats, and their [`FormatError`].

use core::str::FromStr;

use crate::format::Fp4Format;

/// Checks the length of a buffer.
///
/// # Errors
/// [`FormatError::Length`] if it is another.
pub fn check_length(what: &'static str, expected: usize, found: usize) -> Result<(), FormatError> {
    if expected == found { Ok(()) } else { Err(FormatError::Length { what, expected, found }) }
}

impl Fp4Format {
    /// Checks that blocks of `block_size` elements are supported.
    ///
    /// # Errors
    /// [`FormatError::BlockSize`] if they are not.
    pub fn check_block_size(self, block_size: usize) -> Result<(), FormatError> {
        let expected = self.row().block_sizes;
        if expected.contains(&block_size) {
            Ok(())
        } else {
            Err(FormatError::BlockSize { format: self, expected, found: block_size })
        }
    }
}

impl FromStr for Fp4Format {
    type Err = FormatError;

    fn from_str(name: &str) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|format| format.row().name == name)
            .ok_or_else(|| FormatError::UnknownFormat(name.to_owned()))
    }
}

/// Reports why a set of codes and scales is not a quantized matrix.
///
/// ```
/// use burn_fp4_formats::{FormatError, Fp4Format, check_length};
///
/// Fp4Format::NvFp4.check_block_size(16)?;
/// check_length("codes", 8, 8)?;
/// let error = FormatError::Length { what: "codes", expected: 8, found: 7 };
/// assert_eq!(error.to_string(), "codes: expected 8 values, found 7");
/// assert_eq!(check_length("codes", 8, 7), Err(error));
/// # Ok::<(), burn_fp4_formats::FormatError>(())
/// ```
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The block size is not one the format is used with.
    #[error("{format}: block size {found} is not one of {expected:?}")]
    BlockSize {
        /// The format asked for.
        format: Fp4Format,
        /// Block sizes the format allows.
        expected: &'static [usize],
        /// Block size found.
        found: usize,
    },
    /// The blocked axis does not hold a whole number of blocks.
    #[error("{} not a multiple of the block size {block_size}", columns_are(*.cols))]
    Indivisible {
        /// Length of the blocked axis.
        cols: usize,
        /// Elements of a block.
        block_size: usize,
    },
    /// A buffer has the wrong length.
    #[error("{what}: expected {expected} values, found {found}")]
    Length {
        /// Name of the buffer.
        what: &'static str,
        /// Length that the shape asks for.
        expected: usize,
        /// Length found.
        found: usize,
    },
    /// A block scale is NaN or negative.
    #[error("block scale at row {row}, block {block}: code {code:#04x} is {problem}")]
    BlockScale {
        /// Row of the scale.
        row: usize,
        /// Block within the row.
        block: usize,
        /// The code found.
        code: u8,
        /// `NaN` or `negative`.
        problem: &'static str,
    },
    /// A tensor scale is negative, not finite, or not one where the format has none.
    #[error("tensor scale of row {row} is {found}: {expected}")]
    TensorScale {
        /// Row the scale belongs to (0 if one scale serves the whole tensor).
        row: usize,
        /// The value found.
        found: f32,
        /// Requirement for the value.
        expected: &'static str,
    },
    /// A name is not a known format.
    #[error("unknown FP4 format `{0}`: expected {known}", known = known_formats())]
    UnknownFormat(String),
}

/// Lists the names of all formats.
fn columns_are(cols: usize) -> String {
    if cols == 1 { "1 column is".to_owned() } else { format!("{cols} columns are") }
}

fn known_formats() -> String {
    Fp4Format::ALL.map(|format| format!("`{format}`")).join(" or ")
}
