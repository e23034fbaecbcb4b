//! Where the share of a unit lies, and how its values come and go.

use cubecl::prelude::*;

use crate::plan::{Conversion, Share, Tile};

/// Lengths of a tensor, see [`View`](burn_fp4_search::host::View).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    /// Packed rows.
    pub(crate) rows: u32,
    /// Blocks of a row.
    pub(crate) blocks: u32,
    /// Distance of neighbours along the axis.
    pub(crate) inner: u32,
    /// Shares of the tensor.
    pub(crate) items: u32,
}

/// The first packed row and the first block of a share.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) row: u32,
    pub(crate) block: u32,
    /// Number of the block in the packed matrix.
    pub(crate) index: u32,
    /// Whether the rows exist: the last tile may have fewer than 16.
    pub(crate) exists: bool,
}

/// The place of the share with this number.
///
/// Neighbouring units take neighbouring blocks of a row, or along a strided axis neighbouring rows, so
/// that what they read together is contiguous. Those of a tile take its rows.
#[cube]
pub(crate) fn place(item: u32, extent: &Extent, #[comptime] share: Share) -> Place {
    let blocks = extent.blocks / share.blocks;
    if comptime!(share.along && share.tile == Tile::Exchanged) {
        let row = item / 16 / blocks * 16 + item % 16;
        let block = item / 16 % blocks;
        Place { row, block, index: row * blocks + block, exists: row < extent.rows }
    } else if comptime!(share.along) {
        let exists = true.runtime();
        let index = item * share.blocks;
        Place { row: item / blocks, block: item % blocks * share.blocks, index, exists }
    } else {
        // With tiles a last one that is not whole has idle units, see `plan`.
        let padded = if comptime!(share.tile == Tile::Exchanged) {
            (extent.inner + 15) / 16 * 16
        } else {
            extent.inner
        };
        let columns = padded / share.rows;
        let column = item % columns * share.rows;
        let block = item / columns % blocks * share.blocks;
        let row = item / columns / blocks * extent.inner + column;
        Place { row, block, index: row * extent.blocks + block, exists: column < extent.inner }
    }
}

/// Where the first value of a place stands in the dense tensor.
#[cube]
pub(crate) fn first_value(
    place: &Place,
    extent: &Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) -> u32 {
    if comptime!(share.along) {
        place.index * block_size
    } else {
        let outer = place.row / extent.inner;
        let column = place.row % extent.inner;
        (outer * extent.blocks + place.block) * block_size * extent.inner + column
    }
}

/// Loads a block of every row of a share in f32: value k of row r stands at `r * block_size + k`.
#[cube]
pub(crate) fn load_block<F: Float, N: Size>(
    values: &[Vector<F, N>],
    first: u32,
    inner: u32,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) -> Array<f32> {
    let mut elements = Array::<f32>::new(comptime!((share.rows * block_size) as usize));
    let start = first / share.vector;
    let lines = comptime!(if share.along { block_size / share.vector } else { block_size });
    let step = if comptime!(share.along) { 1u32.runtime() } else { inner / share.vector };
    #[unroll]
    for line in 0..lines {
        let loaded = values[(start + line * step) as usize];
        #[unroll]
        for index in 0..share.vector {
            let at = if comptime!(share.along) {
                line * share.vector + index
            } else {
                index * block_size + line
            };
            let value = loaded.extract(comptime!(index as usize));
            elements[at as usize] = widen::<F>(value, comptime!(share.conversion));
        }
    }
    elements
}

/// Stores what [`load_block`] loads, rounded once to a dtype.
#[cube]
pub(crate) fn store_block<F: Float, N: Size>(
    elements: &Array<f32>,
    values: &mut [Vector<F, N>],
    first: u32,
    inner: u32,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) {
    let start = first / share.vector;
    let lines = comptime!(if share.along { block_size / share.vector } else { block_size });
    let step = if comptime!(share.along) { 1u32.runtime() } else { inner / share.vector };
    #[unroll]
    for line in 0..lines {
        let mut rounded = Vector::<F, N>::empty();
        #[unroll]
        for index in 0..share.vector {
            let at = if comptime!(share.along) {
                line * share.vector + index
            } else {
                index * block_size + line
            };
            rounded.insert(
                comptime!(index as usize),
                narrow::<F>(elements[at as usize], comptime!(share.conversion)),
            );
        }
        values[(start + line * step) as usize] = rounded;
    }
}

/// The f32 of a value.
#[cube]
pub(crate) fn widen<F: Float>(value: F, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion == Conversion::Bf16Bits) {
        f32::reinterpret(u32::cast_from(u16::reinterpret(value)) << 16u32)
    } else {
        f32::cast_from(value)
    }
}

/// Rounds an f32 once to nearest even.
#[cube]
fn narrow<F: Float>(value: f32, #[comptime] conversion: Conversion) -> F {
    if comptime!(conversion == Conversion::Bf16Bits) {
        let bits = u32::reinterpret(value);
        let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
        let is_nan = (bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
        F::reinterpret(u16::cast_from(select(is_nan, 0x7FC0u32, rounded)))
    } else {
        F::cast_from(value)
    }
}
