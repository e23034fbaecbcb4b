//! A matmul on devices of CubeCL's wgpu runtime, without matrix instructions.
//!
//! ```text
//! a cube takes 64 packed rows and 64 rows of the input:
//! for 16 values of k at a time:
//!     decode 64 x 16 elements, times their block scales, to shared memory in f32
//!     load 64 x 16 values of the input to shared memory in f32
//!     a unit has 4 x 4 sums: rows 16 apart, so that neighbours read neighbours
//! epilogue
//! ```

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{MatmulBlueprint, OperandHandles, Operands, Widths, epilogue, operands};
use super::plan::Matmul;
use super::portable_plan::{GEMM_TILE as TILE, PortableGemm};
use crate::memory::load_scale;
use crate::numeric::normal::{decode_eight, decoded_unit, scale_factor};
use crate::plan::{Dtype, UNITS};
use crate::tensor::load_store::widen_word;

/// Values of k that a cube takes at a time: a block, or half of one.
const K_TILE: u32 = 16;
/// Rows of both operands of a unit, each [`STEP`] apart.
const ROWS: u32 = 4;
const STEP: u32 = TILE / ROWS;

pub(super) fn launch<F: Float>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: PortableGemm,
) {
    let Matmul { m, n, block_size, dtype, .. } = *matmul;
    let input = if dtype == Dtype::F32 { 4 } else { 8 };
    let k_tile = K_TILE as usize;
    let widths = Widths { codes: 8, scales: 4 * block_size, input, k_tile };
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not stored.
    unsafe {
        portable_gemm_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes[0], plan.cubes[1], 1),
            CubeDim::new_1d(UNITS),
            1,
            4,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            plan,
        );
    }
}

#[cube(launch_unchecked)]
fn portable_gemm_kernel<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    output: &mut [F],
    #[comptime] plan: PortableGemm,
) {
    let dims = &operands.dims;
    let tiles = dims.m.div_ceil(TILE);
    let first_input = CUBE_POS as u32 % tiles * TILE;
    let first_row = CUBE_POS as u32 / tiles * TILE;
    let (row, input) = (UNIT_POS % STEP, UNIT_POS / STEP);

    let mut weights = Shared::<[f32]>::new_slice(comptime!((K_TILE * TILE) as usize));
    let mut inputs = Shared::<[f32]>::new_slice(comptime!((K_TILE * TILE) as usize));
    let mut sums = Array::<f32>::new(comptime!((ROWS * ROWS) as usize));
    #[unroll]
    for index in 0..comptime!(ROWS * ROWS) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let mut k_tile = 0u32.runtime();
    while k_tile < dims.k_tiles {
        share_weights::<F, W, X>(operands, &mut weights, first_row, k_tile, plan);
        share_input::<F, W, X>(operands, &mut inputs, first_input, k_tile);
        sync_cube();
        #[unroll]
        for k in 0..K_TILE {
            let mut left = Array::<f32>::new(comptime!(ROWS as usize));
            let mut right = Array::<f32>::new(comptime!(ROWS as usize));
            #[unroll]
            for index in 0..ROWS {
                let at = comptime!(k * TILE + index * STEP);
                left[index as usize] = inputs[(at + input) as usize];
                right[index as usize] = weights[(at + row) as usize];
            }
            #[unroll]
            for index in 0..comptime!(ROWS * ROWS) {
                let value = left[comptime!((index / ROWS) as usize)];
                let weight = right[comptime!((index % ROWS) as usize)];
                sums[index as usize] = fma(value, weight, sums[index as usize]);
            }
        }
        sync_cube();
        k_tile += 1u32;
    }
    #[unroll]
    for index in 0..comptime!(ROWS * ROWS) {
        let to = first_input + input + comptime!(index / ROWS * STEP);
        let at = first_row + row + comptime!(index % ROWS * STEP);
        if to < dims.m && at < dims.n {
            let value = epilogue::<F, u32, W, X>(operands, sums[index as usize], at);
            output[(to * dims.n + at) as usize] = value;
        }
    }
}

/// Decodes a k tile of the cube's packed rows to `[k][row]`: half of the units have eight codes
/// each.
#[cube]
fn share_weights<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    weights: &mut [f32],
    first_row: u32,
    k_tile: u32,
    #[comptime] plan: PortableGemm,
) {
    let blueprint = comptime!(operands.blueprint);
    let dims = &operands.dims;
    let words = comptime!(K_TILE / 8);
    if UNIT_POS < comptime!(TILE * words) {
        let (row, word) = (UNIT_POS % TILE, UNIT_POS / TILE);
        let at = min(first_row + row, dims.n - 1);
        let codes = operands.weight.codes[((at * dims.k_tiles + k_tile) * words + word) as usize];
        let block = (at * dims.k_tiles + k_tile) * K_TILE / blueprint.block_size;
        let code = load_scale::<u32>(operands.weight.scales, block, true);
        let factor = scale_factor(code, comptime!(blueprint.grid()), comptime!(plan.decoding));
        let elements = decode_eight(codes.extract(0usize), comptime!(plan.decoding));
        #[unroll]
        for element in 0..8u32 {
            let value = elements[element as usize] * comptime!(decoded_unit(plan.decoding));
            weights[((word * 8 + element) * TILE + row) as usize] = value * factor;
        }
    }
}

/// Loads a k tile of the cube's rows of the input to `[k][row]`.
#[cube]
fn share_input<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    inputs: &mut [f32],
    first_input: u32,
    k_tile: u32,
) {
    let dtype = comptime!(operands.blueprint.dtype);
    let dims = &operands.dims;
    let width = comptime!(if dtype == Dtype::F32 { 4u32 } else { 8u32 });
    let vectors = comptime!(K_TILE / width);
    if UNIT_POS < comptime!(TILE * vectors) {
        let (row, vector) = (UNIT_POS % TILE, UNIT_POS / TILE);
        let at = min(first_input + row, dims.m - 1);
        let read = operands.input[((at * dims.k_tiles + k_tile) * vectors + vector) as usize];
        #[unroll]
        for value in 0..width {
            let widened = widen_word::<X>(read, value, dtype);
            inputs[((vector * width + value) * TILE + row) as usize] = widened;
        }
    }
}
