//! The tile of a tensor that one thread processes, and how threads combine results for a shared
//! block scale.

use super::capability::{Capability, Conversion};
use super::problem::Dtype;

/// The tile of a tensor that one unit processes, a block of each of some neighbouring packed rows,
/// and the arrangement of the tiles of its neighbours.
///
/// Memory that the units of a plane load or store together should be contiguous in runs of at least
/// 32 bytes. Along a contiguous axis neighbours take the blocks of a row one after the other. Along
/// a strided axis units form groups of `units_over_rows x units_over_blocks`: the first neighbours
/// take the same block of the next rows, then come the next blocks.
///
/// ```
/// use burn_fp4_cubecl::{Capability, Dtype, Operation, Problem, plan};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
/// # let gpu = Capability {
/// #     plane: 32, cubes: 528, max_cubes: u32::MAX, converts_bf16: true, mma: true,
/// #     wgmma: burn_fp4_cubecl::WgmmaSupport::None, fast_shared_memory: true, doubles: true,
/// #     decoding: burn_fp4_cubecl::Decoding::Subnormals, portable: None,
/// # };
///
/// // `gpu` is the one in the example of `Capability`.
/// let (view, scheme) = (View::rows(3, 1024), Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype: Dtype::Bf16, scheme };
/// let tile = plan(Operation::Quantize, &problem, &gpu)?.thread_tile;
/// // A load of 16 bytes: eight values, in four words of 32 bits.
/// assert_eq!((tile.vector, tile.word_values(), tile.words()), (8, 2, 4));
/// assert!(tile.contiguous_axis && tile.wide());
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ThreadTile {
    /// Values of the dense tensor that one load or store moves.
    pub vector: u32,
    /// True if the blocked axis is contiguous. Vectors then run along it, otherwise across rows.
    pub contiguous_axis: bool,
    /// Packed rows of the tile.
    pub rows: u32,
    /// Units of a group across rows; each has `rows` of them.
    pub units_over_rows: u32,
    /// Units of a group along a row; each has one block.
    pub units_over_blocks: u32,
    /// True if packed blocks go through shared memory; see `smem_transpose.rs`.
    pub through_shared_memory: bool,
    /// How units share a block scale.
    pub sharing: TileSharing,
    /// dtype of the dense tensor.
    pub dtype: Dtype,
    /// Conversion from f32 to this dtype.
    pub conversion: Conversion,
}

impl ThreadTile {
    /// Returns a tile of one row, loaded and stored a value at a time.
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

    /// Returns the values of a word. A dense tensor is loaded in words of 32 bits, or in words of
    /// 16 if a vector is a single 16-bit value.
    #[must_use]
    pub const fn word_values(&self) -> u32 {
        if self.dtype.size() == 2 && self.vector > 1 { 2 } else { 1 }
    }

    /// Returns the words of a vector.
    #[must_use]
    pub const fn words(&self) -> u32 {
        self.vector / self.word_values()
    }

    /// Returns true if words have 32 bits.
    #[must_use]
    pub const fn wide(&self) -> bool {
        self.dtype.size() == 4 || self.vector > 1
    }
}

/// How units share a block scale: the units that hold the rows of a 16 x 16 tile, or the halves of
/// a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileSharing {
    /// A unit has whole blocks and shares no scale.
    None,
    /// Units with the rows of a 16 x 16 tile are neighbours in a plane and exchange their results.
    Exchanged,
    /// Two neighbours have half a block of 32 each and exchange their results. Their stores are
    /// then as contiguous as with blocks of 16.
    Halves,
    /// Every unit reads the whole 16 x 16 tile.
    Repeated,
}
