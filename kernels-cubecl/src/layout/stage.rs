//! Exchange between the units of a cube, through its shared memory.
//!
//! Along a strided axis, what is contiguous in the dense tensor are neighbouring packed rows, which
//! lie far apart in the packed tensor. So a cube takes a rectangle of shares, [`Share::lanes`]
//! times its rows by [`Share::spread`] blocks, and counts its units both ways:
//!
//! ```text
//!  dense: along rows first            packed: along blocks first
//!              block 0   1   2  ..               block 0   1   2  ..
//!  row 0      | unit 0 | 4 | 8 |      row 0     | unit 0 | 1 | 2 |
//!  row 1      | unit 1 | 5 | 9 |      row 1     | unit 3 | 4 | 5 |
//!  row 2      | unit 2 | 6 | .. |     row 2     | unit 6 | 7 | 8 |
//!  row 3      | unit 3 | 7 |          row 3     | unit 9 | ..
//!  neighbours load or store           neighbours load or store
//!  neighbouring dense values          neighbouring codes
//!
//!  quantize:    load dense, choose codes -> exchange (ToStore) -> store packed
//!  dequantize:  load packed -> exchange (Loaded) -> decode, store dense
//! ```
//!
//! Each unit writes what it holds to its place in one order, and reads what it needs at its place
//! in the other.

use cubecl::prelude::*;

use super::place::{Extent, Place};
use crate::plan::Share;

/// A block of the packed matrix.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PackedPlace {
    /// The first packed row of the share.
    pub(crate) row: u32,
    /// The block in each of its rows.
    pub(crate) block: u32,
    /// Number of the block in the packed matrix, in the first row.
    pub(crate) index: u32,
}

/// The place whose codes and scales this unit loads or stores: its own, or if they are exchanged
/// the one that is its own when units are counted along blocks first.
#[cube]
pub(crate) fn packed_place(
    place: &Place,
    extent: &Extent,
    #[comptime] share: Share,
) -> PackedPlace {
    if comptime!(share.staged) {
        let row =
            place.row + UNIT_POS / share.spread * share.rows - UNIT_POS % share.lanes * share.rows;
        let block = place.block + UNIT_POS % share.spread - UNIT_POS / share.lanes;
        PackedPlace { row, block, index: row * extent.blocks + block }
    } else {
        PackedPlace { row: place.row, block: place.block, index: place.index }
    }
}

/// Where the units of a cube put what they hold, and where they take what they need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Exchange {
    /// Computed along rows first, stored along blocks first.
    ToStore,
    /// Loaded along blocks first, used along rows first.
    Loaded,
}

/// Gives away the codes and scales of one share, and takes those of another.
#[cube]
pub(crate) fn exchange<W: Size>(
    codes: &mut Array<Vector<u32, W>>,
    scales: &mut Array<u32>,
    #[comptime] words: u32,
    #[comptime] share: Share,
    #[comptime] way: Exchange,
) {
    // Lines that are 16 bytes longer than they have to be start in different banks.
    let code_line = comptime!(share.spread + 4 / words);
    let scale_line = comptime!(share.spread + 1);
    let lines = comptime!(share.rows * share.lanes);
    let mut staged_codes =
        Shared::<[Vector<u32, W>]>::new_slice(comptime!((lines * code_line) as usize));
    let mut staged_scales = Shared::<[u32]>::new_slice(comptime!((lines * scale_line) as usize));
    let (by_row_line, by_row_at) = (UNIT_POS % share.lanes, UNIT_POS / share.lanes);
    let (by_block_line, by_block_at) = (UNIT_POS / share.spread, UNIT_POS % share.spread);
    let to_store = comptime!(way == Exchange::ToStore);
    let given_line = if comptime!(to_store) { by_row_line } else { by_block_line };
    let given_at = if comptime!(to_store) { by_row_at } else { by_block_at };
    let taken_line = if comptime!(to_store) { by_block_line } else { by_row_line };
    let taken_at = if comptime!(to_store) { by_block_at } else { by_row_at };
    #[unroll]
    for row in 0..share.rows {
        let line = row * share.lanes + given_line;
        staged_codes[(line * code_line + given_at) as usize] = codes[row as usize];
        staged_scales[(line * scale_line + given_at) as usize] = scales[row as usize];
    }
    sync_cube();
    #[unroll]
    for row in 0..share.rows {
        let line = row * share.lanes + taken_line;
        codes[row as usize] = staged_codes[(line * code_line + taken_at) as usize];
        scales[row as usize] = staged_scales[(line * scale_line + taken_at) as usize];
    }
}
