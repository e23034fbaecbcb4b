//! Where the share of a unit lies, and how its values come and go.

use cubecl::prelude::*;
use half::f16;

use crate::Dtype;
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
    /// Cubes launched.
    pub(crate) cubes: u32,
}

/// The number of the share of this unit. The first cubes take the last shares: when quantization
/// starts, the end of the tensor is what the amax pass has left in the cache.
#[cube]
pub(crate) fn item(extent: &Extent) -> u32 {
    (extent.cubes - 1 - CUBE_POS as u32) * CUBE_DIM + UNIT_POS
}

/// Where a share lies.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    /// The first of its packed rows.
    pub(crate) row: u32,
    /// Its block in each of them.
    pub(crate) block: u32,
    /// Number of the block in the packed matrix, in the first row.
    pub(crate) index: u32,
    /// Where its first value stands in the dense tensor.
    pub(crate) first: u32,
    /// How many rows from the first one on there are: the last tile may have fewer than 16.
    pub(crate) rows_left: u32,
}

/// The place of the share with this number; see [`Share`] for the order.
#[cube]
pub(crate) fn place(
    item: u32,
    extent: &Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) -> Place {
    if comptime!(share.along && share.tile != Tile::Exchanged) {
        Place {
            row: item / extent.blocks,
            block: item % extent.blocks,
            index: item,
            first: item * block_size,
            rows_left: 1u32.runtime(),
        }
    } else {
        let lanes = comptime!(share.lanes);
        let lane = item % lanes;
        let near = item / lanes % share.spread;
        let group = item / (lanes * share.spread);
        let rows = comptime!(lanes * share.rows);
        let blocks = extent.blocks / share.spread;
        if comptime!(share.along) {
            let row = group / blocks * rows + lane * share.rows;
            let block = group % blocks * share.spread + near;
            let index = row * extent.blocks + block;
            let rows_left = max(extent.rows, row) - row;
            Place { row, block, index, first: index * block_size, rows_left }
        } else {
            let columns = extent.inner.div_ceil(rows);
            let column = group % columns * rows + lane * share.rows;
            let block = group / columns % blocks * share.spread + near;
            let outer = group / columns / blocks;
            let row = outer * extent.inner + column;
            let first = (outer * extent.blocks + block) * block_size * extent.inner + column;
            let rows_left = max(extent.inner, column) - column;
            Place { row, block, index: row * extent.blocks + block, first, rows_left }
        }
    }
}

/// The same block of another row.
#[cube]
pub(crate) fn at_row(
    place: &Place,
    extent: &Extent,
    row: u32,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) -> Place {
    place_of(row, place.block, extent, block_size, share)
}

/// One block of one row.
#[cube]
pub(crate) fn place_of(
    row: u32,
    block: u32,
    extent: &Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) -> Place {
    let index = row * extent.blocks + block;
    let first = if comptime!(share.along) {
        index * block_size
    } else {
        let outer = row / extent.inner * extent.blocks;
        (outer + block) * block_size * extent.inner + row % extent.inner
    };
    Place { row, block, index, first, rows_left: 1u32.runtime() }
}

/// Loads a block of every row of a share in f32: value k of row r stands at `r * block_size + k`.
/// Rows that do not exist repeat the first one.
#[cube]
pub(crate) fn load_blocks<E: Int, N: Size>(
    values: &[Vector<E, N>],
    place: &Place,
    extent: &Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) -> Array<f32> {
    let mut elements = Array::<f32>::new(comptime!((share.rows * block_size) as usize));
    // Of a share without rows, the first of the tensor.
    let first = select(place.rows_left > 0u32, place.first, 0u32) / share.vector;
    if comptime!(share.along) {
        let lines = comptime!(block_size / share.vector);
        #[unroll]
        for row in 0..share.rows {
            let offset = row * extent.blocks * lines;
            let start = first + select(row < place.rows_left, offset, 0u32);
            #[unroll]
            for line in 0..lines {
                let loaded = values[(start + line) as usize];
                #[unroll]
                for index in 0..share.vector {
                    let at = comptime!(row * block_size + line * share.vector + index);
                    elements[at as usize] = widen::<E, N>(loaded, index, share);
                }
            }
        }
    } else {
        let step = extent.inner / share.vector;
        #[unroll]
        for k in 0..block_size {
            let loaded = values[(first + k * step) as usize];
            #[unroll]
            for row in 0..share.rows {
                let at = comptime!(row * block_size + k);
                elements[at as usize] = widen::<E, N>(loaded, row, share);
            }
        }
    }
    elements
}

/// Stores what [`load_blocks`] loads, rounded once to the dtype of the tensor.
#[cube]
pub(crate) fn store_blocks<F: Float, N: Size>(
    elements: &Array<f32>,
    values: &mut [Vector<F, N>],
    place: &Place,
    extent: &Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
) {
    let first = place.first / share.vector;
    if comptime!(share.along) {
        let lines = comptime!(block_size / share.vector);
        #[unroll]
        for row in 0..share.rows {
            if row < place.rows_left {
                let start = first + row * extent.blocks * lines;
                store_vectors(elements, comptime!(row * block_size), values, start, lines, share);
            }
        }
    } else if place.rows_left > 0u32 {
        let step = extent.inner / share.vector;
        #[unroll]
        for k in 0..block_size {
            let mut rounded = Vector::<F, N>::empty();
            #[unroll]
            for row in 0..share.rows {
                let value = elements[comptime!((row * block_size + k) as usize)];
                let value = narrow::<F>(value, comptime!(share.conversion));
                rounded.insert(comptime!(row as usize), value);
            }
            values[(first + k * step) as usize] = rounded;
        }
    }
}

/// Stores elements from `at` on as `lines` vectors.
#[cube]
pub(crate) fn store_vectors<F: Float, N: Size>(
    elements: &Array<f32>,
    #[comptime] at: u32,
    values: &mut [Vector<F, N>],
    start: u32,
    #[comptime] lines: u32,
    #[comptime] share: Share,
) {
    #[unroll]
    for line in 0..lines {
        let mut rounded = Vector::<F, N>::empty();
        #[unroll]
        for index in 0..share.vector {
            let value = elements[comptime!((at + line * share.vector + index) as usize)];
            let value = narrow::<F>(value, comptime!(share.conversion));
            rounded.insert(comptime!(index as usize), value);
        }
        values[(start + line) as usize] = rounded;
    }
}

/// The f32 of a value of a vector of words.
#[cube]
pub(crate) fn widen<E: Int, N: Size>(
    loaded: Vector<E, N>,
    #[comptime] index: u32,
    #[comptime] share: Share,
) -> f32 {
    let each = comptime!(share.word_values());
    let word = u32::cast_from(loaded.extract(comptime!((index / each) as usize)));
    if comptime!(share.dtype == Dtype::F32) {
        f32::reinterpret(word)
    } else if comptime!(share.dtype == Dtype::Bf16) {
        // The bits of a bf16 are the upper ones of its f32.
        if comptime!(index.is_multiple_of(each)) {
            f32::reinterpret(word << 16u32)
        } else {
            f32::reinterpret(word & 0xFFFF_0000u32)
        }
    } else {
        let half = comptime!(16 * (index % each));
        f32::cast_from(f16::reinterpret(u16::cast_from((word >> half) & 0xFFFFu32)))
    }
}

/// Rounds an f32 once to nearest even.
#[cube]
pub(crate) fn narrow<F: Float>(value: f32, #[comptime] conversion: Conversion) -> F {
    if comptime!(conversion == Conversion::Bf16Bits) {
        let bits = u32::reinterpret(value);
        let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
        let is_nan = (bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
        F::reinterpret(u16::cast_from(select(is_nan, 0x7FC0u32, rounded)))
    } else {
        F::cast_from(value)
    }
}
