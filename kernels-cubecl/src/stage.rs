//! Exchange between the units of a cube, through its shared memory.
//!
//! Along a strided axis what is contiguous in the dense tensor, neighbouring packed rows, lies far apart
//! in the packed one. So a cube takes a square of 16 x 16 shares: units next to each other load or store
//! neighbouring rows of the dense tensor, and after an exchange neighbouring blocks of the packed one.

use cubecl::prelude::*;

use crate::plan::Share;
use crate::share::{Extent, Place};

/// Shares along either side of the square.
pub(crate) const SIDE: u32 = 16;

/// The place whose codes and scales this unit loads or stores: its own, or if they are exchanged that
/// of the share on the other side of the square's diagonal.
#[cube]
pub(crate) fn packed_place(place: &Place, extent: &Extent, #[comptime] share: Share) -> Place {
    let lane = if comptime!(share.staged) { UNIT_POS % SIDE } else { 0u32.runtime() };
    let near = if comptime!(share.staged) { UNIT_POS / SIDE } else { 0u32.runtime() };
    let row = place.row - lane * share.rows + near * share.rows;
    let block = place.block - near + lane;
    let index = row * extent.blocks + block;
    Place { row, block, index, first: place.first, rows_left: place.rows_left }
}

/// Gives away the codes and scales of one share, and takes those of the share across the diagonal.
#[cube]
pub(crate) fn exchange<W: Size>(
    codes: &mut Array<Vector<u32, W>>,
    scales: &mut Array<u32>,
    #[comptime] words: u32,
    #[comptime] share: Share,
    #[comptime] loaded: bool,
) {
    // Rows apart by 16 bytes more than their length fall into different banks.
    let code_stride = comptime!(SIDE + 4 / words);
    let scale_stride = comptime!(SIDE + 1);
    let lines = comptime!(share.rows * SIDE);
    let mut staged_codes =
        Shared::<[Vector<u32, W>]>::new_slice(comptime!((lines * code_stride) as usize));
    let mut staged_scales = Shared::<[u32]>::new_slice(comptime!((lines * scale_stride) as usize));
    let low = UNIT_POS % SIDE;
    let high = UNIT_POS / SIDE;
    // What was computed lies along rows first, what was loaded along blocks.
    let held_lane = if comptime!(loaded) { high } else { low };
    let held_near = if comptime!(loaded) { low } else { high };
    #[unroll]
    for row in 0..share.rows {
        let line = row * SIDE + held_lane;
        staged_codes[(line * code_stride + held_near) as usize] = codes[row as usize];
        staged_scales[(line * scale_stride + held_near) as usize] = scales[row as usize];
    }
    sync_cube();
    #[unroll]
    for row in 0..share.rows {
        let line = row * SIDE + held_near;
        codes[row as usize] = staged_codes[(line * code_stride + held_lane) as usize];
        scales[row as usize] = staged_scales[(line * scale_stride + held_lane) as usize];
    }
}
