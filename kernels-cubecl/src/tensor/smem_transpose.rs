//! Transpose of packed blocks through shared memory.
//!
//! Along a strided axis, neighbours in the dense tensor are neighbouring packed rows, which are far
//! apart in the packed tensor. Without the transpose, either the dense or the packed accesses would
//! not coalesce. So the tiles of a cube form a rectangle, [`ThreadTile::units_over_rows`] times
//! their rows by [`ThreadTile::units_over_blocks`] blocks, and the units are counted in both
//! orders:
//!
//! ```text
//!  dense: rows first                  packed: blocks first
//!              block 0   1   2  ..               block 0   1   2  ..
//!  row 0      | unit 0 | 4 | 8 |      row 0     | unit 0 | 1 | 2 |
//!  row 1      | unit 1 | 5 | 9 |      row 1     | unit 3 | 4 | 5 |
//!  row 2      | unit 2 | 6 | .. |     row 2     | unit 6 | 7 | 8 |
//!  row 3      | unit 3 | 7 |          row 3     | unit 9 | ..
//!  neighbours load or store           neighbours load or store
//!  neighbouring dense values          neighbouring codes
//!
//!  quantize:    load dense, choose codes -> transpose (BeforeStore) -> store packed
//!  dequantize:  load packed -> transpose (AfterLoad) -> decode, store dense
//! ```
//!
//! Each unit writes its blocks at its position in one order, and reads those at its position in the
//! other.

use cubecl::prelude::*;

use super::indexing::{Dims, TileOrigin};
use crate::plan::ThreadTile;

/// Position of a block in the packed matrix.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PackedOrigin {
    /// First packed row of the tile.
    pub(crate) row: u32,
    /// The block in each of its rows.
    pub(crate) block: u32,
    /// Number of the block in the packed matrix, in the first row.
    pub(crate) index: u32,
}

/// Returns the position of the codes and scales that this unit loads or stores: that of its own
/// tile, or with the transpose that of the tile it would have if units were counted blocks first.
#[cube]
pub(crate) fn packed_origin(
    origin: &TileOrigin,
    dims: &Dims,
    #[comptime] thread_tile: ThreadTile,
) -> PackedOrigin {
    if comptime!(thread_tile.through_shared_memory) {
        let row = origin.row + UNIT_POS / thread_tile.units_over_blocks * thread_tile.rows
            - UNIT_POS % thread_tile.units_over_rows * thread_tile.rows;
        let block = origin.block + UNIT_POS % thread_tile.units_over_blocks
            - UNIT_POS / thread_tile.units_over_rows;
        PackedOrigin { row, block, index: row * dims.blocks + block }
    } else {
        PackedOrigin { row: origin.row, block: origin.block, index: origin.index }
    }
}

/// Direction of the transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Transpose {
    /// From rows first, as computed, to blocks first, as stored.
    BeforeStore,
    /// From blocks first, as loaded, to rows first, as decoded.
    AfterLoad,
}

/// Exchanges this unit's codes and scales for another unit's.
#[cube]
pub(crate) fn smem_transpose<W: Size>(
    codes: &mut Array<Vector<u32, W>>,
    scales: &mut Array<u32>,
    #[comptime] words: u32,
    #[comptime] thread_tile: ThreadTile,
    #[comptime] way: Transpose,
) {
    // Lines are padded by 16 bytes, so that they start in different banks.
    let code_line = comptime!(thread_tile.units_over_blocks + 4 / words);
    let scale_line = comptime!(thread_tile.units_over_blocks + 1);
    let lines = comptime!(thread_tile.rows * thread_tile.units_over_rows);
    let mut staged_codes =
        Shared::<[Vector<u32, W>]>::new_slice(comptime!((lines * code_line) as usize));
    let mut staged_scales = Shared::<[u32]>::new_slice(comptime!((lines * scale_line) as usize));
    let (by_row_line, by_row_at) =
        (UNIT_POS % thread_tile.units_over_rows, UNIT_POS / thread_tile.units_over_rows);
    let (by_block_line, by_block_at) =
        (UNIT_POS / thread_tile.units_over_blocks, UNIT_POS % thread_tile.units_over_blocks);
    let to_store = comptime!(way == Transpose::BeforeStore);
    let write_line = if comptime!(to_store) { by_row_line } else { by_block_line };
    let write_at = if comptime!(to_store) { by_row_at } else { by_block_at };
    let read_line = if comptime!(to_store) { by_block_line } else { by_row_line };
    let read_at = if comptime!(to_store) { by_block_at } else { by_row_at };
    #[unroll]
    for row in 0..thread_tile.rows {
        let line = row * thread_tile.units_over_rows + write_line;
        staged_codes[(line * code_line + write_at) as usize] = codes[row as usize];
        staged_scales[(line * scale_line + write_at) as usize] = scales[row as usize];
    }
    sync_cube();
    #[unroll]
    for row in 0..thread_tile.rows {
        let line = row * thread_tile.units_over_rows + read_line;
        codes[row as usize] = staged_codes[(line * code_line + read_at) as usize];
        scales[row as usize] = staged_scales[(line * scale_line + read_at) as usize];
    }
}
