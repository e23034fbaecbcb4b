//! Outputs of `small_m.rs`: the sums of the planes of a cube in shared memory, and the epilogue.

use cubecl::prelude::*;

use super::operands::{MatmulBlueprint, Operands, epilogue_with, tensor_scale};
use super::plan::SmallM;
use super::small_m_load::{Lane, NTile};
use crate::decoder::swiglu::silu;
use crate::instructions::{MmaInstructions, Pair};
use crate::memory::PackedIn;
use crate::numeric::element::narrow;
use crate::numeric::scale_grid::sum_shift;

/// Tensor scales of a weight and of the other weight of SwiGLU; not used if packed rows have one
/// each.
#[derive(CubeType, Clone, Copy)]
pub(super) struct TensorScales {
    pub(super) weight: f32,
    pub(super) up: f32,
}

/// Stores a plane's sums of an n tile of one row in shared memory.
#[cube]
pub(super) fn stage_row<I: MmaInstructions>(
    sums: &Array<Vector<f32, Pair>>,
    staged: &mut [f32],
    staged_from: u32,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let region = comptime!(plan.plane_sums());
    #[unroll]
    for half in 0..2usize {
        let sums = sums[half];
        let sum = sums.extract(0usize) + sums.extract(1usize);
        let sum = I::sum_of_quad(sum, staged, plan.staged_sums());
        if lane.part == 0 {
            let row = lane.quad + comptime!(8 * half as u32);
            staged[(staged_from + lane.k_plane * region + row) as usize] = sum;
        }
    }
    sync_cube();
}

/// Stores a plane's sums of an n tile in shared memory, by rows of the input.
#[cube]
pub(super) fn stage_sums<I: MmaInstructions>(
    sums: &Sequence<Array<Vector<f32, Pair>>>,
    m: u32,
    staged: &mut [f32],
    staged_from: u32,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let (stride, region) = comptime!((plan.staged_stride(), plan.plane_sums()));
    #[unroll]
    for tile in 0..comptime!(plan.m_tiles()) {
        #[unroll]
        for index in 0..4u32 {
            let (half, column) = comptime!((index as usize / 2, index as usize % 2));
            let sum = sums.index(comptime!(tile as usize))[half].extract(column);
            let to = lane.part * 2 + comptime!(tile * 8 + column as u32);
            let row = lane.n_plane * 16 + lane.quad + comptime!(8 * half as u32);
            if to < m {
                staged[(staged_from + lane.k_plane * region + to * stride + row) as usize] = sum;
            }
        }
    }
    sync_cube();
}

/// Adds the sums of the planes along k, and stores the outputs.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn store_sums<F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    up: &PackedIn<S, W>,
    up_bias: &[F],
    scales: &TensorScales,
    output: &mut [F],
    n: u32,
    staged: &[f32],
    staged_from: u32,
    n_tile: &NTile,
    #[comptime] plan: SmallM,
) {
    let rows = comptime!(plan.tile_n());
    if comptime!(plan.is_row()) {
        // No loop, of which the compiler would make copies.
        if UNIT_POS < rows {
            store_sum::<F, S, W>(
                operands,
                weight,
                bias,
                up,
                up_bias,
                scales,
                output,
                n,
                staged,
                staged_from,
                n_tile.first,
                UNIT_POS,
                0u32.runtime(),
                plan,
            );
        }
    } else {
        let mut at = UNIT_POS;
        while at < rows * operands.dims.m {
            let (in_tile, to) = (at % rows, at / rows);
            store_sum::<F, S, W>(
                operands,
                weight,
                bias,
                up,
                up_bias,
                scales,
                output,
                n,
                staged,
                staged_from,
                n_tile.first,
                in_tile,
                to,
                plan,
            );
            at += comptime!(plan.units());
        }
    }
}

/// Stores an output: of a row of the input, `to`, and a row of an n tile.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_sum<F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    up: &PackedIn<S, W>,
    up_bias: &[F],
    scales: &TensorScales,
    output: &mut [F],
    n: u32,
    staged: &[f32],
    staged_from: u32,
    first: u32,
    in_tile: u32,
    to: u32,
    #[comptime] plan: SmallM,
) {
    let blueprint = comptime!(operands.blueprint);
    let row = first + in_tile;
    if row < n {
        let stored = to * n + row;
        let mut of_weight = scales.weight;
        if comptime!(blueprint.by_row) {
            of_weight = tensor_scale::<S, W>(weight, row, blueprint);
        }
        if comptime!(plan.gated) {
            let mut of_up = scales.up;
            if comptime!(blueprint.by_row) {
                of_up = tensor_scale::<S, W>(up, row, blueprint);
            }
            let gate = in_tile / 8 * 16 + in_tile % 8;
            let sum = sum_along_k(staged, staged_from, to, gate, blueprint, plan);
            let gated = epilogue_with::<F>(of_weight, bias, sum, row, blueprint);
            let sum = sum_along_k(staged, staged_from, to, gate + 8, blueprint, plan);
            let value = epilogue_with::<F>(of_up, up_bias, sum, row, blueprint);
            let gated = silu(f32::cast_from(gated)) * f32::cast_from(value);
            output[stored as usize] = narrow::<F>(gated, comptime!(blueprint.conversion));
        } else {
            let sum = sum_along_k(staged, staged_from, to, in_tile, blueprint, plan);
            output[stored as usize] = epilogue_with::<F>(of_weight, bias, sum, row, blueprint);
        }
    }
}

/// Adds the planes' sums of an output, in order: of a row of the input and a row of those staged.
#[cube]
fn sum_along_k(
    staged: &[f32],
    staged_from: u32,
    input_row: u32,
    row: u32,
    #[comptime] blueprint: MatmulBlueprint,
    #[comptime] plan: SmallM,
) -> f32 {
    let (stride, region) = comptime!((plan.staged_stride(), plan.plane_sums()));
    let mut sum = 0.0f32.runtime();
    #[unroll]
    for k_plane in 0..plan.k_planes {
        sum += staged[(staged_from + k_plane * region + input_row * stride + row) as usize];
    }
    if comptime!(!plan.is_row()) {
        sum *= comptime!(sum_shift(blueprint.grid()));
    }
    sum
}
