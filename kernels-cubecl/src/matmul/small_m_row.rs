//! `small_m.rs` for one row of the input.
//!
//! ```text
//! start to copy codes and scales of the first steps, one per stage    (copy_codes)
//! start to copy their input, or wait for the link before and then do  (copy_input, wait_for_link)
//! if a norm comes before: normalize the whole input                   (share_normalized)
//! prefetch the weight of the next matmul, now or after the last copy  (prefetch_next)
//! for the steps of all n tiles:
//!     wait for a step's copies; put its input in the order of decoded codes
//!     sums += block sums x scales                                     (add_products)
//!     start to copy a step to the same place, also of the next n tile
//!     after the last step of an n tile: share the sums, add, store    (stage_row, store_sums)
//! ```
//!
//! The instruction multiplies by eight columns, of which a row fills one. Here the columns stand
//! for blocks instead: a column has the input of one block, and zeros for the others. So the sums
//! of blocks stay apart, codes need no scales, and a sum is scaled when its block is done:
//!
//! ```text
//! a vector of 32 codes of each part of a row: eight blocks of 16
//! column 2 part:     the input of the part's first 16 codes
//! column 2 part + 1: the input of its other 16
//! the lane that has the codes of a part also has the sums of its blocks
//! ```
//!
//! Lanes whose quad is none of the part's two columns read zeros from shared memory.
//!
//! Codes decoded to bf16 are 2^126 times too small. So that f32 holds their products, the input is
//! 2^62 times too large, but in k tiles with values of 2^65 or more.

use cubecl::prelude::*;

use super::operands::{MatmulBlueprint, Operands, tensor_scale};
use super::plan::SmallM;
use super::prefetch::prefetch_next;
use super::small_m_input::{
    FACTOR_AT, NormArgs, NormRow, QUARTER_STRIDE_PADDED, ROW_STRIDE_PADDED, ZERO_VECTORS, is_large,
    load_row, place_in_row, share_normalized, share_row,
};
use super::small_m_link::{LinkCube, wait_for_link};
use super::small_m_load::{Lane, ROWS_PER_LANE, Rows, n_tile};
use super::small_m_slots::{
    ROW_CODES, ROW_SCALES, STEP_CODES, STEP_SCALES, Slots, copy_codes, copy_input, is_within,
    place_of_codes,
};
use super::small_m_store::{TensorScales, stage_row, store_sums};
use crate::instructions::{MmaInstructions, Pair, WgmmaInstructions};
use crate::memory::PackedIn;
use crate::numeric::element::decode_word;
use crate::numeric::scale_grid::decoded_shift;
use crate::plan::Dtype;

/// Multiplies by a weight: runs the steps at the head of this file; `up` and `up_bias` are the
/// other weight of SwiGLU and its bias. Slots for codes begin at `slots_from` in shared memory, and
/// those for the input, or the normalized input, at its start.
#[cube]
#[allow(clippy::too_many_arguments)]
#[allow(clippy::too_many_lines, reason = "one loop, so that code is short")]
pub(super) fn multiply_row<
    I: MmaInstructions,
    C: WgmmaInstructions,
    F: Float,
    S: Int,
    W: Size,
    V: Size,
>(
    operands: &Operands<F, S, W, W>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    up: &PackedIn<S, W>,
    up_bias: &[F],
    output: &mut [F],
    norm: &mut Sequence<NormArgs<F, V>>,
    rows: &Rows,
    counters: &[u32],
    shared: &mut [Vector<u32, W>],
    scales: &mut [S],
    staged: &mut [f32],
    lane: &Lane,
    place: &LinkCube,
    #[comptime] slots_from: u32,
    #[comptime] plan: SmallM,
) {
    let waits = comptime!(place.link > 0);
    let SmallM { k_planes, stages, .. } = comptime!(plan);
    let blueprint = comptime!(operands.blueprint);
    let steps = comptime!(plan.k_tiles.div_ceil(k_planes));
    let (n, grid) = (rows.n, rows.cubes);
    let tiles = n.div_ceil(comptime!(plan.tile_n()));
    let slots = Slots {
        codes: slots_from.runtime(),
        address: C::address::<Vector<u32, W>>(&*shared),
        scale_address: C::address::<S>(&*scales),
    };
    // Before the first codes: all else waits for it.
    let mut normalized = Sequence::<NormRow<F, V>>::new();
    if let Some(norm_plan) = comptime!(plan.norm.filter(|_| !waits)) {
        let units = comptime!(plan.units());
        normalized.push(load_row::<F, V>(norm.index(0usize), norm_plan, units, false));
    }
    let tensor_scales = TensorScales {
        weight: tensor_scale::<S, W>(weight, 0u32, blueprint),
        up: tensor_scale::<S, W>(up, 0u32, blueprint),
    };
    let mut sums = Array::<Vector<f32, Pair>>::new(2usize);
    sums[0] = Vector::new(0.0f32);
    sums[1] = Vector::new(0.0f32);
    let end = (tiles - rows.cube).div_ceil(grid) * steps;
    // Next step to copy, and step to multiply.
    let mut load_tile = rows.cube;
    let mut load_at = 0u32.runtime();
    let mut tile = rows.cube;
    let mut step = 0u32.runtime();
    // Slot of this plane.
    let mut slot = lane.k_plane;
    // Two places for the sums of an n tile take turns: planes write to one while others read.
    let mut staged_from = 0u32.runtime();
    let mut turn = 0u32.runtime();
    while turn < end + stages {
        if turn == stages {
            if comptime!(waits) {
                wait_for_link(counters, comptime!(place.link - 1).runtime(), place.before);
            }
            if let Some(norm_plan) = comptime!(plan.norm) {
                let units = comptime!(plan.units());
                if comptime!(waits) {
                    normalized.push(load_row::<F, V>(norm.index(0usize), norm_plan, units, true));
                }
                share_normalized::<F, V, W>(
                    norm.index_mut(0usize),
                    normalized.index_mut(0usize),
                    shared,
                    place.cube,
                    norm_plan,
                    units,
                    blueprint,
                );
            } else if comptime!(waits) {
                // Steps whose codes are on their way.
                let mut ahead = 0u32.runtime();
                let mut of_step = 0u32.runtime();
                let mut of_slot = lane.k_plane;
                while ahead < stages {
                    copy_input::<C, F, S, W>(
                        operands, shared, &slots, of_slot, of_step, lane, plan,
                    );
                    of_slot += k_planes;
                    of_step += 1u32;
                    if of_step == steps {
                        of_step = 0u32;
                    }
                    ahead += 1u32;
                }
                C::commit_copies();
                C::wait_for_own_copies(0u32);
            }
            if comptime!(plan.norm.is_none()) {
                // The zeros; a norm waits for all planes.
                sync_cube();
            }
            prefetch_next(&operands.prefetch, place.cube, place.cubes, false);
        }
        if turn == end {
            // The rest of this matmul's own weight is in flight.
            prefetch_next(&operands.prefetch, place.cube, place.cubes, true);
        }
        if turn >= stages {
            C::wait_for_own_copies(comptime!(stages - 1));
            I::sync_plane();
            let codes = slots.codes + slot * STEP_CODES;
            let mut from = (step * k_planes + lane.k_plane) * ROW_STRIDE_PADDED;
            if comptime!(plan.norm.is_none()) {
                from = slot * ROW_STRIDE_PADDED;
                let values = shared[(from + place_in_row(lane.lane)) as usize];
                let mut large = false.runtime();
                if comptime!(blueprint.dtype == Dtype::Bf16) {
                    large = I::any_of_plane(is_large::<W>(values), staged, plan.staged_sums());
                }
                share_row::<F, W>(shared, from, lane.lane, values, large, blueprint.dtype);
                I::sync_plane();
            }
            if is_within(step, lane, plan) {
                add_products::<I, C, F, S, W>(
                    codes,
                    &*scales,
                    slot * STEP_SCALES,
                    from,
                    &*shared,
                    slots.address,
                    &mut sums,
                    staged,
                    lane,
                    blueprint,
                    plan,
                );
            }
            I::sync_plane();
            step += 1u32;
        }
        if turn < end {
            copy_codes::<C, S, W>(
                weight, up, n, shared, scales, &slots, slot, load_tile, load_at, lane, blueprint,
                plan,
            );
            if comptime!(plan.norm.is_none()) {
                // A link that waits copies the first ones then.
                let first = if comptime!(waits) { stages } else { 0u32 };
                if turn >= first {
                    copy_input::<C, F, S, W>(operands, shared, &slots, slot, load_at, lane, plan);
                }
            }
            load_at += 1u32;
            if load_at == steps {
                load_at = 0u32;
                load_tile += grid;
            }
        }
        C::commit_copies();
        slot += k_planes;
        if slot >= comptime!(stages * k_planes) {
            slot = lane.k_plane;
        }
        if step == steps {
            let stored = n_tile(tile, lane, plan);
            stage_row::<I>(&sums, staged, staged_from, lane, plan);
            store_sums::<F, S, W>(
                operands,
                weight,
                bias,
                up,
                up_bias,
                &tensor_scales,
                output,
                n,
                &*staged,
                staged_from,
                &stored,
                plan,
            );
            staged_from = comptime!(plan.tile_sums()) - staged_from;
            sums[0] = Vector::new(0.0f32);
            sums[1] = Vector::new(0.0f32);
            step = 0u32;
            tile += grid;
        }
        turn += 1u32;
    }
}

/// Adds the products of a k tile to the sums, of the first and of the other 16 codes of vectors.
/// Its codes, scales and input begin at `codes_from`, `scales_from` and `from` in shared memory.
#[cube]
fn add_products<I: MmaInstructions, C: WgmmaInstructions, F: Float, S: Int, X: Size>(
    codes_from: u32,
    scales: &[S],
    scales_from: u32,
    from: u32,
    shared: &[Vector<u32, X>],
    address: u32,
    sums: &mut Array<Vector<f32, Pair>>,
    staged: &mut [f32],
    lane: &Lane,
    #[comptime] blueprint: MatmulBlueprint,
    #[comptime] plan: SmallM,
) {
    let dtype = comptime!(blueprint.dtype);
    let restored = if comptime!(dtype == Dtype::Bf16) {
        f32::reinterpret(shared[(from + FACTOR_AT) as usize].extract(0usize))
    } else {
        comptime!(decoded_shift(dtype)).runtime()
    };
    let zeros = shared.len() as u32 - ZERO_VECTORS;
    let part = from + lane.part * QUARTER_STRIDE_PADDED;
    let first = select(lane.quad == 2 * lane.part, part, zeros);
    let other = select(lane.quad == 2 * lane.part + 1, part, zeros);
    let mut scales_of_rows = Array::<u32>::new(comptime!(ROWS_PER_LANE as usize));
    #[unroll]
    for row in 0..ROWS_PER_LANE {
        let at = scales_from + (lane.quad + comptime!(8 * row)) * ROW_SCALES + lane.part;
        scales_of_rows[row as usize] = u32::cast_from(scales[at as usize]);
    }
    // The codes of this lane.
    let codes_at = codes_from + place_of_codes(lane.quad, 2 * lane.part);
    #[unroll]
    for vector in 0..2u32 {
        let mut codes = Array::<Vector<u32, X>>::new(comptime!(ROWS_PER_LANE as usize));
        #[unroll]
        for row in 0..ROWS_PER_LANE {
            let at = if comptime!(vector == 0) { codes_at } else { codes_at ^ 1u32 };
            let offset = comptime!(8 * row * ROW_CODES);
            codes[row as usize] = C::load_shared::<X>(shared, address, at, offset);
        }
        let mut products = Array::<Vector<f32, Pair>>::new(2usize);
        products[0] = Vector::new(0.0f32);
        products[1] = Vector::new(0.0f32);
        #[unroll]
        for word in 0..4u32 {
            let column = if comptime!(word < 2) { first } else { other };
            let values = C::load_shared::<X>(shared, address, column, comptime!(4 * vector + word));
            let mut decoded = Sequence::<Array<Vector<F, Pair>>>::new();
            #[unroll]
            for row in 0..ROWS_PER_LANE {
                let packed = codes[row as usize];
                let packed = packed.extract(comptime!(word as usize));
                decoded.push(decode_word::<I, F, Pair>(packed, dtype));
            }
            #[unroll]
            for half in 0..2u32 {
                let mut weights = Array::<Vector<F, Pair>>::new(4usize);
                #[unroll]
                for register in 0..4u32 {
                    // The instruction's order: a pair of both rows, then the next pair.
                    let pairs = decoded.index(comptime!(register as usize % 2));
                    let pair = comptime!((2 * half + register / 2) as usize);
                    weights[comptime!(register as usize)] = pairs[pair];
                }
                let mut registers = Array::<Vector<F, Pair>>::new(2usize);
                #[unroll]
                for register in 0..2u32 {
                    let value = values.extract(comptime!((2 * half + register) as usize));
                    registers[register as usize] = Vector::<F, Pair>::reinterpret(value);
                }
                let scratch_from = comptime!(plan.staged_sums());
                I::multiply::<F>(&weights, &registers, &mut products, staged, scratch_from);
            }
        }
        #[unroll]
        for row in 0..ROWS_PER_LANE {
            let scales = scales_of::<I>(scales_of_rows[row as usize], vector, blueprint);
            let products = products[row as usize] * Vector::new(restored);
            sums[row as usize] = fma(products, scales, sums[row as usize]);
        }
    }
}

/// Returns the block scales of both halves of a vector of codes, of a word with those of two
/// vectors.
#[cube]
fn scales_of<I: MmaInstructions>(
    scales: u32,
    #[comptime] vector: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> Vector<f32, Pair> {
    let grid = comptime!(blueprint.grid());
    if comptime!(blueprint.block_size == 16) {
        I::scale_pair(scales, vector, grid)
    } else {
        Vector::new(I::scale_pair(scales, 0u32, grid).extract(comptime!(vector as usize)))
    }
}
