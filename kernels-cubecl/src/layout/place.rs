//! Where the share of a unit lies, in the dense and in the packed tensor.
//!
//! A dense tensor is `[outer, axis, inner]`; its packed rows are `outer x inner`, of `axis` values
//! each. Shares are numbered so that neighbouring units load neighbouring values:
//!
//! ```text
//! contiguous axis:          strided axis, lanes = 4, spread = 2: a group of 8 shares
//! item = row x blocks       item:       block b      block b + 1
//!        + block              rows 0     0            4
//!                             rows 1     1            5
//!                             rows 2     2            6
//!                             rows 3     3            7      then the next group
//! ```

use cubecl::prelude::*;

use crate::plan::{Launch, Problem, Share, TileSharing};

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

pub(crate) fn extent(problem: &Problem, launch: &Launch) -> ExtentLaunch {
    let view = problem.view;
    ExtentLaunch::new(
        view.packed_rows() as u32,
        problem.blocks() as u32,
        view.inner as u32,
        launch.items,
        launch.cubes[0] * launch.cubes[1],
    )
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
    if comptime!(share.along && share.tile != TileSharing::Exchanged) {
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
