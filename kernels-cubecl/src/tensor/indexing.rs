//! Positions of a unit's thread tile, in the dense and in the packed tensor.
//!
//! A dense tensor is `[outer, axis, inner]`; its packed rows are `outer x inner`, of `axis` values
//! each. Thread tiles are numbered so that neighbouring units load neighbouring values:
//!
//! ```text
//! contiguous axis:           strided axis, a group of units_over_rows x units_over_blocks = 4 x 2
//! tile_index = row x blocks  tile_index:  block b      block b + 1
//!              + block       rows 0       0            4
//!                            rows 1       1            5
//!                            rows 2       2            6
//!                            rows 3       3            7      then the next group
//! ```

use cubecl::prelude::*;

use crate::plan::{Launch, Problem, ThreadTile, TileSharing};

/// Lengths of a tensor, see [`View`](burn_fp4_search::host::View).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Dims {
    /// Packed rows.
    pub(crate) rows: u32,
    /// Blocks of a row.
    pub(crate) blocks: u32,
    /// Distance between neighbours along the axis.
    pub(crate) inner: u32,
    /// Work items of the launch.
    pub(crate) items: u32,
    /// Cubes launched.
    pub(crate) cubes: u32,
}

pub(crate) fn dims(problem: &Problem, launch: &Launch) -> DimsLaunch {
    let view = problem.view;
    DimsLaunch::new(
        view.packed_rows() as u32,
        problem.blocks() as u32,
        view.inner as u32,
        launch.items,
        launch.cubes[0] * launch.cubes[1],
    )
}

/// Returns the number of this unit's tile. The first cubes take the last tiles: the amax pass
/// before has left the end of the tensor in the cache.
#[cube]
pub(crate) fn tile_index(dims: &Dims) -> u32 {
    (dims.cubes - 1 - CUBE_POS as u32) * CUBE_DIM + UNIT_POS
}

/// Position of a thread tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileOrigin {
    /// The first of its packed rows.
    pub(crate) row: u32,
    /// Its block in each of them.
    pub(crate) block: u32,
    /// Number of the block in the packed matrix, in the first row.
    pub(crate) index: u32,
    /// Index of its first value in the dense tensor.
    pub(crate) first: u32,
    /// Rows from the first one to the end. The last 16 x 16 tile may have fewer than 16.
    pub(crate) rows_left: u32,
}

/// Returns the position of the tile with this number; see [`ThreadTile`] for the order.
#[cube]
pub(crate) fn tile_origin(
    tile_index: u32,
    dims: &Dims,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
) -> TileOrigin {
    if comptime!(thread_tile.contiguous_axis && thread_tile.sharing != TileSharing::Exchanged) {
        TileOrigin {
            row: tile_index / dims.blocks,
            block: tile_index % dims.blocks,
            index: tile_index,
            first: tile_index * block_size,
            rows_left: 1u32.runtime(),
        }
    } else {
        let units_over_rows = comptime!(thread_tile.units_over_rows);
        let row_unit = tile_index % units_over_rows;
        let block_unit = tile_index / units_over_rows % thread_tile.units_over_blocks;
        let group = tile_index / (units_over_rows * thread_tile.units_over_blocks);
        let rows = comptime!(units_over_rows * thread_tile.rows);
        let blocks = dims.blocks / thread_tile.units_over_blocks;
        if comptime!(thread_tile.contiguous_axis) {
            let row = group / blocks * rows + row_unit * thread_tile.rows;
            let block = group % blocks * thread_tile.units_over_blocks + block_unit;
            let index = row * dims.blocks + block;
            let rows_left = max(dims.rows, row) - row;
            TileOrigin { row, block, index, first: index * block_size, rows_left }
        } else {
            let columns = dims.inner.div_ceil(rows);
            let column = group % columns * rows + row_unit * thread_tile.rows;
            let block = group / columns % blocks * thread_tile.units_over_blocks + block_unit;
            let outer = group / columns / blocks;
            let row = outer * dims.inner + column;
            let first = (outer * dims.blocks + block) * block_size * dims.inner + column;
            let rows_left = max(dims.inner, column) - column;
            TileOrigin { row, block, index: row * dims.blocks + block, first, rows_left }
        }
    }
}

/// Returns the same block of another row.
#[cube]
pub(crate) fn at_row(
    origin: &TileOrigin,
    dims: &Dims,
    row: u32,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
) -> TileOrigin {
    origin_of(row, origin.block, dims, block_size, thread_tile)
}

/// Returns the position of one block of one row.
#[cube]
pub(crate) fn origin_of(
    row: u32,
    block: u32,
    dims: &Dims,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
) -> TileOrigin {
    let index = row * dims.blocks + block;
    let first = if comptime!(thread_tile.contiguous_axis) {
        index * block_size
    } else {
        let outer = row / dims.inner * dims.blocks;
        (outer + block) * block_size * dims.inner + row % dims.inner
    };
    TileOrigin { row, block, index, first, rows_left: 1u32.runtime() }
}
