//! Lanes of `small_m.rs`, their packed rows, and loads of a step of several rows of the input to
//! registers.

use cubecl::prelude::*;

use super::operands::Operands;
use super::plan::SmallM;
use super::small_m_input::K_TILE_VECTORS;
use crate::memory::PackedIn;

/// Packed rows of a lane: eight rows apart, or the same row of two weights.
pub(super) const ROWS_PER_LANE: u32 = 2;

/// Position of a lane in its cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lane {
    /// Number in its plane.
    pub(super) lane: u32,
    /// Number of its quad: the row it has of each eight.
    pub(super) quad: u32,
    /// Number in its quad: the part it has of a row.
    pub(super) part: u32,
    /// Number of its plane among the planes that divide the packed rows.
    pub(super) n_plane: u32,
    /// Number of its plane among the planes that divide k.
    pub(super) k_plane: u32,
}

/// A weight's packed rows, and the cubes that multiply by it.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rows {
    pub(super) n: u32,
    /// Number of this cube among the cubes.
    pub(super) cube: u32,
    pub(super) cubes: u32,
}

/// Packed rows of an n tile.
#[derive(CubeType, Clone, Copy)]
pub(super) struct NTile {
    /// The first one.
    pub(super) first: u32,
    /// The first one of the lane.
    row: u32,
}

/// Returns the position of this unit.
#[cube]
pub(super) fn lane_of_unit(#[comptime] plan: SmallM) -> Lane {
    let plane = UNIT_POS / 32;
    Lane {
        lane: UNIT_POS % 32,
        quad: UNIT_POS % 32 / 4,
        part: UNIT_POS % 4,
        n_plane: plane % plan.n_planes,
        k_plane: plane / plan.n_planes,
    }
}

/// Returns the n tile of a number.
#[cube]
pub(super) fn n_tile(tile: u32, lane: &Lane, #[comptime] plan: SmallM) -> NTile {
    let first = tile * comptime!(plan.tile_n());
    NTile { first, row: first + lane.n_plane * comptime!(plan.plane_n()) + lane.quad }
}

/// Registers that a lane loads for a step.
#[derive(CubeType)]
pub(super) struct StepRegisters<W: Size> {
    /// Two vectors of codes of both rows.
    pub(super) codes: Array<Vector<u32, W>>,
    /// The scales of their blocks, in a word.
    pub(super) scales: Array<u32>,
    /// The part of the input that the lane copies.
    pub(super) input: Array<Vector<u32, W>>,
}

/// Loads the codes and scales of a step. K tiles beyond the last repeat it. `up` is the other
/// weight of SwiGLU.
#[cube]
pub(super) fn load_codes<F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    weight: &PackedIn<S, W>,
    up: &PackedIn<S, W>,
    n: u32,
    loaded: &mut StepRegisters<W>,
    tile: u32,
    step: u32,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let dims = &operands.dims;
    let n_tile = n_tile(tile, lane, plan);
    let k_tile = min(step * plan.k_planes + lane.k_plane, dims.k_tiles - 1);
    #[unroll]
    for half in 0..ROWS_PER_LANE {
        let below = if comptime!(plan.gated) { 0u32 } else { half * 8 };
        let row = min(n_tile.row + below, n - 1);
        let at = ((row * dims.k_tiles + k_tile) * 4 + lane.part) as usize;
        let to = comptime!(half as usize);
        let weight = if comptime!(plan.gated && half == 1) { up } else { weight };
        loaded.codes[comptime!(2 * to)] = weight.codes[at * 2];
        loaded.codes[comptime!(2 * to + 1)] = weight.codes[at * 2 + 1];
        loaded.scales[to] = u32::cast_from(weight.scales[at]);
    }
}

/// Loads the lane's copies of the input of a step.
#[cube]
pub(super) fn load_input<F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    loaded: &mut StepRegisters<W>,
    step: u32,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let dims = &operands.dims;
    let k_tile = min(step * plan.k_planes + lane.k_plane, dims.k_tiles - 1);
    #[unroll]
    for copy in 0..comptime!(plan.copies()) {
        let row = min(copied_row(lane, copy, plan), dims.m - 1);
        let at = (row * dims.k_tiles + k_tile) * K_TILE_VECTORS + lane.lane;
        loaded.input[copy as usize] = operands.input[at as usize];
    }
}

/// Returns the row of the input that a plane copies. Planes of the same k tile divide the rows.
#[cube]
pub(super) fn copied_row(lane: &Lane, #[comptime] copy: u32, #[comptime] plan: SmallM) -> u32 {
    (lane.n_plane * comptime!(plan.copies()) + copy) % plan.tile_m
}
