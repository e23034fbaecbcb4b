//! NVFP4 and MXFP4 as rows of facts: everything else about a format is derived from its row.
//!
//! The element of an FP4 format is E2M1 by definition ([`E2M1`](crate::E2M1)). Formats differ in
//! the number format of their block scales and in the tensor scale.

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::minifloat::{E4M3, E8M0, Minifloat};

/// A 4-bit block floating-point format: E2M1 elements, a scale for every block of them.
///
/// ```
/// use burn_fp4_formats::{E4M3, E8M0, Fp4Format, ScaleGrid};
///
/// let nvfp4 = Fp4Format::NvFp4.row();
/// assert_eq!((nvfp4.name, nvfp4.block_size, nvfp4.tensor_scale), ("nvfp4", 16, true));
/// assert_eq!(nvfp4.scale_grid(), ScaleGrid::Float(E4M3));
/// assert_eq!(Fp4Format::MxFp4.row().scale_grid(), ScaleGrid::PowersOfTwo(E8M0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fp4Format {
    /// NVIDIA's format: an E4M3 scale per block, one f32 per tensor.
    NvFp4,
    /// OCP Microscaling 1.0: an E8M0 scale per block.
    MxFp4,
}

/// Sizes of blocks that share a scale. Searches, kernels and products support both.
pub const BLOCK_SIZES: [usize; 2] = [16, 32];

/// The facts of an [`Fp4Format`].
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct FormatRow {
    /// Name in files, tables and on command lines.
    pub name: &'static str,
    /// Number format of the block scales.
    pub block_scale: Minifloat,
    /// True if a tensor scale multiplies every value; otherwise it is 1.
    pub tensor_scale: bool,
    /// Block size of the format's definition.
    pub block_size: usize,
    /// Block sizes that this project supports.
    pub block_sizes: &'static [usize],
}

/// Places the block scales of a format on the number line, derived from the row inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleGrid {
    /// A float with a mantissa, zero and subnormals (E4M3): searches compare absolute values.
    Float(Minifloat),
    /// Every power of two and no zero (E8M0): searches count from the power of the block's amax.
    PowersOfTwo(Minifloat),
}

impl FormatRow {
    /// Returns the grid of the block scales.
    #[must_use]
    pub const fn scale_grid(&self) -> ScaleGrid {
        match self.block_scale.mantissa_bits {
            0 => ScaleGrid::PowersOfTwo(self.block_scale),
            _ => ScaleGrid::Float(self.block_scale),
        }
    }
}

impl Fp4Format {
    /// Every format.
    pub const ALL: [Self; 2] = [Self::NvFp4, Self::MxFp4];

    /// Returns the facts of the format.
    #[must_use]
    pub const fn row(self) -> &'static FormatRow {
        match self {
            Self::NvFp4 => &FormatRow {
                name: "nvfp4",
                block_scale: E4M3,
                tensor_scale: true,
                block_size: 16,
                block_sizes: &BLOCK_SIZES,
            },
            Self::MxFp4 => &FormatRow {
                name: "mxfp4",
                block_scale: E8M0,
                tensor_scale: false,
                block_size: 32,
                block_sizes: &BLOCK_SIZES,
            },
        }
    }
}

impl fmt::Display for Fp4Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}
