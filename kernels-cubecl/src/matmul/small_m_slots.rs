//! Copies of `small_m.rs` for one row of the input: steps of a plane in shared memory.
//!
//! ```text
//! a slot of a plane:   16 rows of codes, eight vectors each     the input of the k tile
//!                      16 rows of scales, four words each       (if it is not normalized)
//! ```
//!
//! The copies are asynchronous on compute capability 9.0. A plane has as many slots as the pipeline
//! has stages: one step is multiplied while the others arrive. Code is short, as all slots share
//! it: a cube runs most of it only once or twice, and waits for instructions that come from device
//! memory.

use cubecl::prelude::*;

use super::operands::{MatmulBlueprint, Operands};
use super::plan::{SMALL_M_K_TILE, SmallM};
use super::small_m_input::{K_TILE_VECTORS, ROW_STRIDE_PADDED, ZERO_VECTORS, place_in_row};
use super::small_m_load::Lane;
use crate::instructions::WgmmaInstructions;
use crate::memory::PackedIn;

/// Returns the vectors of the codes of all slots, and of the zeros, of one row.
pub(super) fn slot_vectors(plan: &SmallM) -> u32 {
    if plan.is_row() { plan.stages * plan.k_planes * STEP_CODES + ZERO_VECTORS } else { 0 }
}

/// Returns the words of scales of the slots of one row.
pub(super) fn scale_words(plan: &SmallM) -> u32 {
    if plan.is_row() { plan.stages * plan.k_planes * STEP_SCALES } else { 0 }
}

/// Packed rows of a plane's step.
const STEP_ROWS: u32 = 16;
/// Words of the scales of a row in a k tile.
pub(super) const ROW_SCALES: u32 = 4;
/// Words of the scales of a plane's step.
pub(super) const STEP_SCALES: u32 = STEP_ROWS * ROW_SCALES;
/// Vectors of the codes of a plane's step.
pub(super) const STEP_CODES: u32 = STEP_ROWS * ROW_CODES;
/// Vectors of the codes of a row in a k tile.
pub(super) const ROW_CODES: u32 = 8;

/// Slots of a cube in shared memory. Those of inputs begin at its start.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Slots {
    /// The first vector of the codes.
    pub(super) codes: u32,
    /// Address of the vectors.
    pub(super) address: u32,
    /// Address of the scales.
    pub(super) scale_address: u32,
}

/// Returns the place of a vector of a row's codes among those of a step. Rows are next to each
/// other; vectors of every second one change places, so that the lanes of two rows are in different
/// banks.
#[cube]
pub(super) fn place_of_codes(row: u32, vector: u32) -> u32 {
    row * ROW_CODES + (vector ^ (row & 1u32))
}

/// Starts to copy the codes and scales of a step to a slot of the lane's plane. K tiles beyond the
/// last are not copied. `up` is the other weight of SwiGLU. Lanes that are next to each other copy
/// vectors that are.
#[cube]
pub(super) fn copy_codes<C: WgmmaInstructions, S: Int, W: Size>(
    weight: &PackedIn<S, W>,
    up: &PackedIn<S, W>,
    n: u32,
    shared: &mut [Vector<u32, W>],
    scales: &mut [S],
    slots: &Slots,
    slot: u32,
    tile: u32,
    step: u32,
    lane: &Lane,
    #[comptime] blueprint: MatmulBlueprint,
    #[comptime] plan: SmallM,
) {
    let SmallM { k_tiles, k_planes, whole, gated, .. } = comptime!(plan);
    let is_within = is_within(step, lane, plan);
    let row_vectors = comptime!(k_tiles * ROW_CODES);
    let (row, vector) = (lane.lane / ROW_CODES, lane.lane % ROW_CODES);
    let to = slots.codes + slot * STEP_CODES + place_of_codes(row, vector);
    // The sums end with what does not change from step to step.
    let in_row = step * comptime!(k_planes * ROW_CODES) + (lane.k_plane * ROW_CODES + vector);
    let first = tile * comptime!(plan.tile_n() * row_vectors) + in_row + row * row_vectors;
    #[unroll]
    for quarter in 0..4u32 {
        let weight = if comptime!(gated && quarter >= 2) { up } else { weight };
        let below = comptime!(if gated { 4 * (quarter % 2) } else { 4 * quarter });
        let (mut at, offset) = (first, comptime!(if whole { below * row_vectors } else { 0 }));
        if comptime!(!whole) {
            at = min(tile * comptime!(plan.tile_n()) + below + row, n - 1) * row_vectors + in_row;
        }
        C::copy::<Vector<u32, W>>(
            is_within,
            shared,
            slots.address,
            to + comptime!(4 * quarter * ROW_CODES),
            weight.codes,
            at,
            offset,
            1u32,
            16u32,
        );
    }
    // Block scales of a row in a k tile are four words, which a lane copies.
    let bytes = comptime!(SMALL_M_K_TILE as u32 / blueprint.block_size);
    let to = slot * STEP_ROWS + lane.lane;
    let row = if comptime!(gated) { lane.lane % 8 } else { lane.lane };
    let k_tile = step * k_planes + lane.k_plane;
    let mut at = tile * comptime!(plan.tile_n() * k_tiles) + (row * k_tiles + k_tile);
    if comptime!(!whole) {
        at = min(tile * comptime!(plan.tile_n()) + row, n - 1) * k_tiles + k_tile;
    }
    let address = slots.scale_address;
    if comptime!(gated) {
        let wanted = is_within && lane.lane < 8;
        C::copy::<S>(wanted, scales, address, to, weight.scales, at, 0u32, ROW_SCALES, bytes);
        let wanted = is_within && lane.lane / 8 == 1;
        C::copy::<S>(wanted, scales, address, to, up.scales, at, 0u32, ROW_SCALES, bytes);
    } else {
        let wanted = is_within && lane.lane < 16;
        C::copy::<S>(wanted, scales, address, to, weight.scales, at, 0u32, ROW_SCALES, bytes);
    }
}

/// Returns true if the lane's plane has a k tile in a step.
#[cube]
pub(super) fn is_within(step: u32, lane: &Lane, #[comptime] plan: SmallM) -> bool {
    if comptime!(plan.k_tiles.is_multiple_of(plan.k_planes)) {
        true.runtime()
    } else {
        step * plan.k_planes + lane.k_plane < plan.k_tiles
    }
}

/// Starts to copy the lane's part of the input of a step to a slot of its plane.
#[cube]
pub(super) fn copy_input<C: WgmmaInstructions, F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    shared: &mut [Vector<u32, W>],
    slots: &Slots,
    slot: u32,
    step: u32,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let to = slot * ROW_STRIDE_PADDED + place_in_row(lane.lane);
    let from = step * comptime!(plan.k_planes * K_TILE_VECTORS)
        + (lane.k_plane * K_TILE_VECTORS + lane.lane);
    C::copy::<Vector<u32, W>>(
        is_within(step, lane, plan),
        shared,
        slots.address,
        to,
        operands.input,
        from,
        0u32,
        1u32,
        16u32,
    );
}
