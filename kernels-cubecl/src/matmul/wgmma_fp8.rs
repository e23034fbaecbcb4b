//! A matmul with the matrix instructions of a warpgroup (WGMMA) for E4M3, which run twice as fast
//! as those for bf16.
//!
//! Products `element x block scale` are numbers of E4M3, relative to the largest block scale of the
//! packed row or to 2^3. `fp8_rows.rs` counts the blocks for which they are not: these are rounded.
//! The input is rounded to E4M3 by `fp8_input.rs`, which also explains its order.
//!
//! ```text
//! cube: 256 units = 2 warpgroups with 64 packed rows each; `split_k` cubes divide k
//! for k_tile in the k tiles of the cube, 128 elements:
//!     load codes and scales of the k tile after the next to registers      (fetch)
//!     wait until the rows of the input have been copied, and for the other units
//!     start to copy the rows of the k tile `stages - 2` ahead,
//!     over those before the last, which are no longer read
//!     read the products of the blocks from a table in shared memory        (read_tables)
//!     for k_step in 0..4, 32 elements:
//!         weights = products selected by codes, with their signs           (decode_k_step)
//!         start to multiply, and wait until at most two multiplications are in flight
//! multiply the sums by the scales of their rows; store them as `wgmma.rs` does
//! ```
//!
//! The instructions add with fewer bits than f32: on an H100 sums of 8192 products of one sign are
//! 10 % too small, and sums of products of random signs are off by 0.03 % of the sum of magnitudes.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::fp8_input::Fp8Input;
use super::operands::{MatmulBlueprint, OperandHandles, Operands, Widths, operands};
use super::plan::{K_TILE, Matmul, Wgmma};
use super::wgmma::{Lane, lane, reduce, store_sums};
use crate::instructions::{Operand, WgmmaInstructions};
use crate::numeric::scale_grid::{e4m3_entries, e4m3_entry, e4m3_products, e4m3_row_factor};
use crate::plan::UNITS;

/// Vectors of 16 bytes of a row of the input in a k tile.
const VECTORS: u32 = K_TILE as u32 / 16;
/// K steps of 32 elements in a k tile.
const K_STEPS: u32 = K_TILE as u32 / 32;
/// K tiles of codes and scales in registers after the current one.
const FETCHED: u32 = 2;

/// Launches the product with an input in E4M3. The operands hold the input it was made of, which is
/// not read. `rows` comes from [`fp8_rows`](super::fp8_rows).
#[allow(clippy::too_many_arguments)]
pub(super) fn launch<I: WgmmaInstructions, F: Float>(
    client: &Client,
    handles: OperandHandles,
    input: Fp8Input,
    rows: Handle,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: Wgmma,
) {
    let Matmul { m, n, k, block_size, .. } = *matmul;
    let widths = Widths { codes: 32, scales: 4 * block_size, input: 8, k_tile: K_TILE };
    let count = CubeCount::Static(plan.cubes, 1, 1);
    let dim = CubeDim::new_1d(UNITS);
    let vectors = plan.padded(m) * k / 16;
    // SAFETY: the lengths match the matmul; packed rows beyond the last repeat it, rows of the
    // input are padded, and neither is stored.
    unsafe {
        let args = operands(handles.clone(), matmul, blueprint, widths);
        let values = BufferArg::from_raw_parts(input.values, vectors);
        let scales = BufferArg::from_raw_parts(input.scales, m);
        let largest = BufferArg::from_raw_parts(rows, n);
        if plan.split_k == 1 {
            let output = BufferArg::from_raw_parts(output, m * n / 8);
            wgmma_fp8_kernel::launch_unchecked::<I, F, F>(
                client, count, dim, 4, 4, 8, args, values, scales, largest, output, plan,
            );
        } else {
            let length = plan.split_k as usize * m * n;
            let parts = client.empty(4 * length);
            let sums = BufferArg::from_raw_parts(parts.clone(), length / 4);
            wgmma_fp8_kernel::launch_unchecked::<I, F, f32>(
                client, count, dim, 4, 4, 4, args, values, scales, largest, sums, plan,
            );
            reduce::<F>(client, handles, parts, output, matmul, blueprint, plan, true);
        }
    }
}

/// Codes and scales of the two packed rows of a unit: those of the current k tile and of the
/// following ones.
#[derive(CubeType)]
struct Weights {
    /// Positions of the rows in the first k tile, in vectors of codes and words of scales.
    codes_from: Array<u32>,
    scales_from: Array<u32>,
    codes: Array<u32>,
    scales: Array<u32>,
    /// Largest codes of the scales of the rows.
    largest: Array<u32>,
}

/// Returns the words of block scales of a packed row in a k tile.
fn scale_words(blueprint: MatmulBlueprint) -> u32 {
    K_TILE as u32 / blueprint.block_size / 4
}

#[cube]
fn weights<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    largest: &[f32],
    lane: &Lane,
) -> Weights {
    let dims = &operands.dims;
    let words = comptime!(scale_words(operands.blueprint));
    let mut codes_from = Array::<u32>::new(2usize);
    let mut scales_from = Array::<u32>::new(2usize);
    let mut own = Array::<u32>::new(2usize);
    #[unroll]
    for row in 0..2u32 {
        let of = min(lane.cube_row + lane.row + comptime!(8 * row), dims.n - 1);
        let tile = of * dims.k_tiles + lane.first;
        codes_from[row as usize] = tile * 4u32 + lane.part;
        scales_from[row as usize] = tile * words + lane.part * words / 4u32;
        own[row as usize] = u32::cast_from(largest[of as usize]);
    }
    let codes = Array::<u32>::new(comptime!(2 * (FETCHED + 1) * K_STEPS) as usize);
    let scales = Array::<u32>::new(comptime!(2 * (FETCHED + 1) as usize));
    Weights { codes_from, scales_from, codes, scales, largest: own }
}

/// Loads codes and scales of a k tile to a slot.
#[cube]
fn fetch<I: WgmmaInstructions, F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    weights: &mut Weights,
    k_tile: u32,
    #[comptime] slot: u32,
) {
    let words = comptime!(scale_words(operands.blueprint));
    #[unroll]
    for row in 0..2u32 {
        let codes = weights.codes_from[row as usize] + k_tile * 4u32;
        let scales = weights.scales_from[row as usize] + k_tile * words;
        let to = comptime!(2 * slot + row);
        let words = I::load_vector::<W>(operands.weight.codes, codes);
        #[unroll]
        for k_step in 0..K_STEPS {
            weights.codes[comptime!((to * K_STEPS + k_step) as usize)] = words[k_step as usize];
        }
        weights.scales[to as usize] = I::load_word(operands.weight.scales, scales);
    }
}

/// Reads the products of the blocks of a unit in the current k tile: of one block of each row, or
/// of two.
#[cube]
fn read_tables<I: WgmmaInstructions>(
    table: &[Vector<u32, Const<2>>],
    weights: &Weights,
    lane: &Lane,
    #[comptime] blueprint: MatmulBlueprint,
) -> Array<Vector<u32, Const<2>>> {
    let blocks = comptime!(32 / blueprint.block_size);
    let mut tables = Array::<Vector<u32, Const<2>>>::new(comptime!(2 * blocks as usize));
    #[unroll]
    for row in 0..2u32 {
        let largest = weights.largest[row as usize];
        #[unroll]
        for block in 0..blocks {
            let byte = (lane.part * blocks) % 4u32 + block;
            let code = I::byte(weights.scales[row as usize], byte);
            let entry = e4m3_entry(code, largest, comptime!(blueprint.grid()));
            tables[comptime!((row * blocks + block) as usize)] = table[entry as usize];
        }
    }
    tables
}

/// Decodes the words of A of a k step.
#[cube]
fn decode_k_step<I: WgmmaInstructions>(
    weights: &Weights,
    tables: &Array<Vector<u32, Const<2>>>,
    a: &mut Array<u32>,
    #[comptime] k_step: u32,
    #[comptime] blueprint: MatmulBlueprint,
) {
    let blocks = comptime!(32 / blueprint.block_size);
    #[unroll]
    for row in 0..2u32 {
        let word = weights.codes[comptime!((row * K_STEPS + k_step) as usize)];
        let products = tables[comptime!((row * blocks + k_step * blocks / K_STEPS) as usize)];
        let (low, high) = (products.extract(0usize), products.extract(1usize));
        let magnitudes = word & 0x7777_7777u32;
        // Signs of odd codes are at the top of bytes; this moves the signs of even codes there.
        let even = word << 4u32;
        #[unroll]
        for half in 0..2u32 {
            let order = comptime!(if half == 0 { 0x5140u32 } else { 0x7362 });
            let signs = I::select_bytes(even, word, order.runtime());
            let selected = I::select_bytes(low, high, magnitudes >> (16 * half));
            a[comptime!((2 * half + row) as usize)] = (signs & 0x8080_8080u32) | selected;
        }
    }
}

/// Runs the main loop at the head of this file.
#[cube(launch_unchecked)]
fn wgmma_fp8_kernel<I: WgmmaInstructions, F: Float, O: Float, W: Size, X: Size, V: Size>(
    operands: &Operands<F, u32, W, X>,
    input: &[Vector<u32, X>],
    scales: &[f32],
    largest: &[f32],
    output: &mut [Vector<O, V>],
    #[comptime] plan: Wgmma,
) {
    let blueprint = comptime!(operands.blueprint);
    let grid = comptime!(blueprint.grid());
    let lane = lane::<F, W, X>(operands, plan);
    let Wgmma { tile_m, stages, .. } = comptime!(plan);
    let mut ring = Shared::<[Vector<u32, X>]>::new_aligned_slice(
        comptime!((stages * tile_m * VECTORS) as usize),
        1024usize,
    );
    let mut scratch = Shared::<[Vector<u32, W>]>::new_aligned_slice(
        comptime!(plan.scratch as usize + 1),
        16usize,
    );
    let mut table = Shared::<[Vector<u32, Const<2>>]>::new_aligned_slice(
        comptime!(e4m3_entries(grid) as usize),
        8usize,
    );
    let barriers = Shared::<[u32]>::new_aligned_slice(comptime!(2 * stages as usize), 8usize);
    let address = I::address::<Vector<u32, X>>(&ring);
    let barrier = I::address::<u32>(&barriers);
    I::start_barriers(barrier, stages);
    if UNIT_POS < comptime!(e4m3_entries(grid)) {
        table[UNIT_POS as usize] = e4m3_products(UNIT_POS, grid);
    }
    sync_cube();

    let mut sums = Array::<f32>::new(comptime!(tile_m as usize / 2));
    #[unroll]
    for index in 0..comptime!(tile_m as usize / 2) {
        sums[index] = 0.0f32;
    }
    // Vectors of the rows of a k tile, and of all rows.
    let tile = comptime!(tile_m * VECTORS);
    let all = operands.dims.m.div_ceil(tile_m) * tile;
    let from = lane.first * all + lane.cube_input * VECTORS;
    let stages_ahead = comptime!(stages - 2);
    let first_unit = UNIT_POS == 0u32;
    #[unroll]
    for k_tile in 0..stages_ahead {
        let wanted = select(first_unit, k_tile.runtime() < lane.k_tiles, false);
        let (to, at) = (comptime!(k_tile * tile).runtime(), from + k_tile * all);
        I::copy_rows::<X>(wanted, &mut ring, address, to, input, at, barrier + 8 * k_tile, tile);
    }
    let mut weights = weights::<F, W, X>(operands, largest, &lane);
    let last = lane.k_tiles - 1u32;
    #[unroll]
    for k_tile in 0..FETCHED {
        fetch::<I, F, W, X>(operands, &mut weights, min(k_tile.runtime(), last), k_tile);
    }
    // Slots of the ring of this k tile and of the one that is copied.
    let (mut stage, mut copied) = (0u32.runtime(), stages_ahead.runtime());
    let mut parity = 0u32.runtime();
    let mut k_tile = 0u32.runtime();
    while k_tile < lane.k_tiles {
        fetch::<I, F, W, X>(operands, &mut weights, min(k_tile + FETCHED, last), FETCHED);
        I::wait_for_rows(barrier + 8u32 * stage, parity);
        sync_cube();
        let next = k_tile + stages_ahead;
        let wanted = select(first_unit, next < lane.k_tiles, false);
        let (to, at) = (copied * tile, from + next * all);
        I::copy_rows::<X>(wanted, &mut ring, address, to, input, at, barrier + 8u32 * copied, tile);
        let tables = read_tables::<I>(&table, &weights, &lane, blueprint);
        #[unroll]
        for k_step in 0..K_STEPS {
            let mut a = Array::<u32>::new(4usize);
            decode_k_step::<I>(&weights, &tables, &mut a, k_step, blueprint);
            I::multiply::<F, X, W>(
                &a,
                &ring,
                address,
                stage * tile + comptime!(2 * k_step),
                &mut sums,
                &mut scratch,
                tile_m,
                comptime!(Operand::E4m3),
                false,
            );
            I::wait_for_products(2u32);
        }
        #[unroll]
        for word in 0..comptime!(2 * FETCHED * K_STEPS) {
            weights.codes[word as usize] = weights.codes[comptime!((word + 2 * K_STEPS) as usize)];
        }
        #[unroll]
        for row in 0..comptime!(2 * FETCHED) {
            weights.scales[row as usize] = weights.scales[comptime!((row + 2) as usize)];
        }
        parity = select(stage == comptime!(stages - 1), 1u32 - parity, parity);
        stage = select(stage == comptime!(stages - 1), 0u32, stage + 1u32);
        copied = select(copied == comptime!(stages - 1), 0u32, copied + 1u32);
        k_tile += 1u32;
    }
    I::wait_for_sums(&mut sums, comptime!(tile_m / 2));
    #[unroll]
    for index in 0..comptime!(tile_m / 2) {
        let column = lane.part * 2u32 + comptime!(index / 4 * 8 + index % 2);
        let scale = scales[min(lane.cube_input + column, operands.dims.m - 1) as usize];
        let largest = weights.largest[comptime!((index / 2 % 2) as usize)];
        let sum = sums[index as usize] * scale;
        sums[index as usize] = sum * e4m3_row_factor(largest, grid);
    }
    store_sums::<F, O, W, X, V>(operands, output, &mut ring, &sums, &lane, plan, true);
}
