//! The part of a tensor that is one unit's, and how units share block scales.

use super::capability::Capability;
use super::problem::Dtype;

/// The part of a tensor that a unit works on, one block of neighbouring packed rows, and which
/// parts its neighbours work on.
///
/// What the units of a plane load and store together should be contiguous, at least 32 bytes at a
/// time. Along a contiguous axis neighbours take the blocks of a row one after the other. Otherwise
/// `lanes` units take neighbouring rows of a block, and `spread` times as many the next blocks of
/// these rows; all that together is a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ThreadTile {
    /// Values that one load or store of the dense tensor moves.
    pub vector: u32,
    /// Whether it moves them along the blocked axis, which is contiguous then, or across rows.
    pub contiguous_axis: bool,
    /// Packed rows.
    pub rows: u32,
    /// Units beside each other across rows.
    pub units_over_rows: u32,
    /// Units beside each other along rows.
    pub units_over_blocks: u32,
    /// Whether the units of a cube exchange packed blocks through shared memory; see `stage.rs`.
    pub through_shared_memory: bool,
    /// How units share a block scale.
    pub sharing: TileSharing,
    /// dtype of the dense tensor.
    pub dtype: Dtype,
    /// How f32 becomes this dtype.
    pub conversion: Conversion,
}

impl ThreadTile {
    /// A block of one row, loaded and stored a value at a time.
    pub(crate) fn one_row(contiguous_axis: bool, dtype: Dtype, device: &Capability) -> Self {
        Self {
            vector: 1,
            contiguous_axis,
            rows: 1,
            units_over_rows: 1,
            units_over_blocks: 1,
            through_shared_memory: false,
            sharing: TileSharing::None,
            dtype,
            conversion: Conversion::to(dtype, device),
        }
    }

    /// Values of a word: a dense tensor is loaded in words of 32 bits, or of 16 where a vector is a
    /// single value of 16 bits.
    pub const fn word_values(&self) -> u32 {
        if self.dtype.size() == 2 && self.vector > 1 { 2 } else { 1 }
    }

    /// Words of a vector.
    pub const fn words(&self) -> u32 {
        self.vector / self.word_values()
    }

    /// Whether words have 32 bits.
    pub const fn wide(&self) -> bool {
        self.dtype.size() == 4 || self.vector > 1
    }
}

/// How f32 is rounded to a dtype, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// By the instructions of the device.
    Device,
    /// bf16, on bits: the instruction of an x86 processor takes subnormals for zero.
    Bf16Bits,
}

impl Conversion {
    /// The one to a dtype on a device.
    pub(crate) fn to(dtype: Dtype, device: &Capability) -> Self {
        let bits = dtype == Dtype::Bf16 && !device.converts_bf16;
        if bits { Self::Bf16Bits } else { Self::Device }
    }
}

/// How units come to share a scale: those that hold the rows of a 16 x 16 tile, or the halves of a
/// block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileSharing {
    /// There are no tiles.
    None,
    /// Units that hold the rows of a tile are neighbours and exchange what they found.
    Exchanged,
    /// There are no tiles, but a block of 32 is divided between two neighbours, which exchange what
    /// they found: shares are of 16, so that what they store together is as contiguous as where
    /// blocks are.
    Halves,
    /// Every unit looks at the whole tile.
    Repeated,
}
