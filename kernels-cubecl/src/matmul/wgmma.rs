//! A matmul with the matrix instructions of a warpgroup (WGMMA).
//!
//! Two warpgroups have 64 packed rows each. They decode them in registers and multiply them with
//! the cube's rows of the input in shared memory; `instructions/wgmma.rs` draws the fragments.
//! Shared memory is a ring of k tiles of 128 elements:
//!
//! ```text
//! a k tile: | half 0: 64 elements               | half 1                            |
//! k_step    | 0      | 1      | 2      | 3      | 0      | 1      | 2      | 3      |
//! input     | 64 values of all rows             | 64 values of all rows             |
//! codes     | 32 bytes of a packed row          | 32 bytes of a packed row          |
//! scales    | scales of a packed row's blocks, in one word or two                   |
//!
//! cube: 256 units = 2 warpgroups; `split_k` cubes divide k
//! for k_tile in the k tiles of the cube:
//!     for half in 0..2:
//!         wait until it has been copied, and for the other units
//!         for k_step in 0..4:
//!             weights = codes x scales, in registers                    (decode_k_step)
//!             start to multiply                                         (multiply)
//!             start to copy a part of the k tile `stages - 1` ahead,
//!             over the half before the last, which is no longer read    (copy_part)
//!             wait for the multiplication before
//! store the sums; epilogue without split-K                              (store_sums)
//! add the sums of the cubes that divide k, in order; epilogue           (reduce_split_k)
//! ```
//!
//! A multiplication is always in flight while a unit decodes, copies or waits.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{MatmulBlueprint, OperandHandles, Operands, Widths, epilogue, operands};
use super::plan::{K_TILE, Matmul, WGMMA_TILE_N, Wgmma};
use crate::instructions::{Operand, WgmmaInstructions};
use crate::numeric::element::decode_byte;
use crate::numeric::scale_grid::{element_shift, product_scale_pair, sum_shift};
use crate::plan::UNITS;

/// Vectors of eight values of a row of the input in half a k tile.
const VECTORS: u32 = K_TILE as u32 / 16;
/// Vectors of 32 codes of a packed row in half a k tile.
const CODES: u32 = K_TILE as u32 / 64;
/// K steps of 16 elements in half a k tile.
const K_STEPS: u32 = K_TILE as u32 / 32;
/// Packed rows of a cube.
const ROWS: u32 = WGMMA_TILE_N as u32;
/// Columns of the sums that go through shared memory at a time.
const STAGED: u32 = 64;

pub(super) fn launch<I: WgmmaInstructions, F: Float>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: Wgmma,
) {
    let Matmul { m, n, block_size, .. } = *matmul;
    let widths = || Widths { codes: 32, scales: 4 * block_size, input: 8, k_tile: K_TILE };
    let count = CubeCount::Static(plan.cubes, 1, 1);
    let dim = CubeDim::new_1d(UNITS);
    if plan.split_k == 1 {
        // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not
        // stored.
        unsafe {
            wgmma_kernel::launch_unchecked::<I, F, F>(
                client,
                count,
                dim,
                4,
                4,
                8,
                operands(handles, matmul, blueprint, widths()),
                BufferArg::from_raw_parts(output, m * n / 8),
                plan,
            );
        }
        return;
    }
    let length = plan.split_k as usize * m * n;
    let parts = client.empty(4 * length);
    // SAFETY: as above.
    unsafe {
        wgmma_kernel::launch_unchecked::<I, F, f32>(
            client,
            count,
            dim,
            4,
            4,
            4,
            operands(handles.clone(), matmul, blueprint, widths()),
            BufferArg::from_raw_parts(parts.clone(), length / 4),
            plan,
        );
    }
    reduce::<F>(client, handles, parts, output, matmul, blueprint, plan, false);
}

/// Launches the sum of the parts of k. `scaled` parts are products already, without the tensor
/// scale.
#[allow(clippy::too_many_arguments)]
pub(super) fn reduce<F: Float>(
    client: &Client,
    handles: OperandHandles,
    parts: Handle,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: Wgmma,
    scaled: bool,
) {
    let Matmul { m, n, block_size, .. } = *matmul;
    let widths = Widths { codes: 32, scales: 4 * block_size, input: 8, k_tile: K_TILE };
    let vectors = m * n / 4;
    // SAFETY: the lengths match the matmul.
    unsafe {
        reduce_split_k::launch_unchecked::<F>(
            client,
            CubeCount::Static((vectors as u32).div_ceil(UNITS), 1, 1),
            CubeDim::new_1d(UNITS),
            4,
            4,
            4,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(parts, plan.split_k as usize * vectors),
            BufferArg::from_raw_parts(output, vectors),
            plan,
            scaled,
        );
    }
}

/// Position of a unit, and the work of its cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lane {
    /// First row of the input of its cube.
    pub(super) cube_input: u32,
    /// First packed row of its cube.
    pub(super) cube_row: u32,
    /// First k tile of its cube, and their number.
    pub(super) first: u32,
    pub(super) k_tiles: u32,
    /// First of its packed rows, counted in its cube. The other is eight rows below.
    pub(super) row: u32,
    /// Number of its quad: the row it has of each eight.
    pub(super) quad: u32,
    /// Number in its quad: the part it has of a row.
    pub(super) part: u32,
}

#[cube]
pub(super) fn lane<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    #[comptime] plan: Wgmma,
) -> Lane {
    let dims = &operands.dims;
    let groups = dims.m.div_ceil(plan.tile_m);
    let cube = CUBE_POS as u32 / plan.split_k;
    let each = dims.k_tiles.div_ceil(plan.split_k);
    let first = CUBE_POS as u32 % plan.split_k * each;
    let quad = UNIT_POS % 32 / 4;
    Lane {
        cube_input: cube % groups * plan.tile_m,
        cube_row: cube / groups * ROWS,
        first,
        k_tiles: min(each, dims.k_tiles - first),
        row: UNIT_POS / 32 * 16 + quad,
        quad,
        part: UNIT_POS % 4,
    }
}

/// Rings in shared memory, and their addresses.
#[derive(CubeType)]
struct Rings<W: Size, X: Size> {
    input: Shared<[Vector<u32, X>]>,
    codes: Shared<[Vector<u32, W>]>,
    scales: Shared<[u32]>,
    input_address: u32,
    codes_address: u32,
    scales_address: u32,
}

/// A unit's copies of every k tile: places in the rings, and sources in the first k tile. Places
/// count in vectors, but for the scales in k tiles.
#[derive(CubeType)]
struct Copies {
    /// Number of k tiles.
    k_tiles: u32,
    input_to: u32,
    input: Array<u32>,
    codes_to: u32,
    codes: u32,
    scales: u32,
    has_scales: bool,
}

#[cube]
fn copies<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    lane: &Lane,
    #[comptime] plan: Wgmma,
) -> Copies {
    let dims = &operands.dims;
    let (row, vector) = (UNIT_POS / VECTORS, UNIT_POS % VECTORS);
    let rows = comptime!(UNITS / VECTORS);
    let mut input = Array::<u32>::new(comptime!((plan.tile_m / rows) as usize));
    #[unroll]
    for copy in 0..comptime!(plan.tile_m / rows) {
        let from = min(lane.cube_input + row + comptime!(copy * rows), dims.m - 1);
        input[copy as usize] = (from * dims.k_tiles + lane.first) * (2 * VECTORS) + vector;
    }
    let (code_row, of_codes) = (UNIT_POS / CODES, UNIT_POS % CODES);
    let from = min(lane.cube_row + code_row, dims.n - 1);
    let of_scales = min(lane.cube_row + UNIT_POS, dims.n - 1);
    Copies {
        k_tiles: lane.k_tiles,
        input_to: row * VECTORS + (vector ^ (row % 8)),
        input,
        codes_to: code_row * CODES + (of_codes ^ (code_row / 4 % 2)),
        codes: (from * dims.k_tiles + lane.first) * (2 * CODES) + of_codes,
        scales: of_scales * dims.k_tiles + lane.first,
        has_scales: UNIT_POS < ROWS,
    }
}

/// Starts to copy a part of half a k tile from device memory.
#[cube]
fn copy_part<I: WgmmaInstructions, F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    rings: &mut Rings<W, X>,
    k_tile: u32,
    stage: u32,
    copies: &Copies,
    #[comptime] half: u32,
    #[comptime] k_step: u32,
    #[comptime] plan: Wgmma,
) {
    let wanted = k_tile < copies.k_tiles;
    let slot = stage * 2 + half;
    let to = slot * comptime!(plan.tile_m * VECTORS) + copies.input_to;
    let from = k_tile * (2 * VECTORS) + comptime!(half * VECTORS);
    let address = rings.input_address;
    #[unroll]
    for copy in 0..comptime!(plan.tile_m * VECTORS / UNITS) {
        if comptime!(copy % K_STEPS == k_step) {
            let to = to + comptime!(copy * UNITS);
            let from = from + copies.input[copy as usize];
            I::copy(wanted, &mut rings.input, address, to, operands.input, from, 0u32, 1u32, 16u32);
        }
    }
    if comptime!(k_step == 1) {
        let to = slot * comptime!(ROWS * CODES) + copies.codes_to;
        let from = k_tile * (2 * CODES) + comptime!(half * CODES) + copies.codes;
        let address = rings.codes_address;
        I::copy(
            wanted,
            &mut rings.codes,
            address,
            to,
            operands.weight.codes,
            from,
            0u32,
            1u32,
            16u32,
        );
    }
    if comptime!(k_step == 2 && half == 0) {
        let wanted = select(copies.has_scales, wanted, false);
        let words = comptime!(scale_words(operands.blueprint));
        let (to, from) = (stage * ROWS + UNIT_POS, k_tile + copies.scales);
        let (address, bytes) = (rings.scales_address, comptime!(4 * words));
        I::copy(
            wanted,
            &mut rings.scales,
            address,
            to,
            operands.weight.scales,
            from,
            0u32,
            words,
            bytes,
        );
    }
}

/// Returns the words of block scales of a packed row in a k tile.
fn scale_words(blueprint: MatmulBlueprint) -> u32 {
    K_TILE as u32 / blueprint.block_size / 4
}

/// Registers that a unit reads for half a k tile.
#[derive(CubeType)]
struct Half<F: Float, W: Size> {
    /// Two vectors of codes of both rows.
    codes: Array<Vector<u32, W>>,
    /// Their factors: a pair is for every second k step.
    factors: Array<Vector<F, Const<2>>>,
}

#[cube]
fn read_half<F: Float, W: Size, X: Size>(
    rings: &Rings<W, X>,
    stage: u32,
    lane: &Lane,
    #[comptime] half: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> Half<F, W> {
    let mut codes = Array::<Vector<u32, W>>::new(comptime!(2 * CODES as usize));
    let mut factors = Array::<Vector<F, Const<2>>>::new(4usize);
    #[unroll]
    for row in 0..2u32 {
        let below = lane.row + comptime!(8 * row);
        let first = ((stage * 2 + half) * ROWS + below) * CODES;
        #[unroll]
        for vector in 0..CODES {
            let from = first + (vector ^ (lane.quad / 4));
            codes[comptime!((row * CODES + vector) as usize)] = rings.codes[from as usize];
        }
        let (grid, dtype) = comptime!((blueprint.grid(), blueprint.dtype));
        let from = (stage * ROWS + below) * comptime!(scale_words(blueprint));
        if comptime!(blueprint.block_size == 16) {
            // A block is a k step.
            let word = rings.scales[(from + half) as usize];
            #[unroll]
            for odd in 0..2u32 {
                let pair = product_scale_pair::<F, Const<2>>(word >> (8 * odd), grid, dtype);
                factors[comptime!((row * 2 + odd) as usize)] = pair;
            }
        } else {
            let word = rings.scales[from as usize] >> comptime!(16 * half);
            let word = (word & 0xFFu32) | ((word & 0xFF00u32) << 8u32);
            let pair = product_scale_pair::<F, Const<2>>(word, grid, dtype);
            factors[comptime!((row * 2) as usize)] = pair;
            factors[comptime!((row * 2 + 1) as usize)] = pair;
        }
    }
    Half::<F, W> { codes, factors }
}

/// Decodes the words of A of a k step.
#[cube]
fn decode_k_step<I: WgmmaInstructions, F: Float, W: Size>(
    read: &Half<F, W>,
    a: &mut Array<u32>,
    lane: &Lane,
    #[comptime] k_step: u32,
    #[comptime] blueprint: MatmulBlueprint,
) {
    #[unroll]
    for row in 0..2u32 {
        let pair = read.factors[comptime!((row * 2 + k_step % 2) as usize)];
        let factor = Vector::<F, Const<2>>::new(pair.extract(comptime!((k_step / 2) as usize)));
        let codes = read.codes[comptime!((row * CODES + k_step / 2) as usize)];
        #[unroll]
        for half in 0..2u32 {
            let word = codes.extract(comptime!((k_step % 2 * 2 + half) as usize));
            let byte = I::byte(word, lane.part);
            let decoded = decode_byte::<F, Const<2>>(byte, comptime!(blueprint.dtype));
            let shifted = match comptime!(element_shift(blueprint.grid(), blueprint.dtype)) {
                Some(shift) => decoded * Vector::new(F::cast_from(shift)),
                None => decoded,
            };
            a[comptime!((2 * half + row) as usize)] = u32::reinterpret(shifted * factor);
        }
    }
}

/// Runs the main loop at the head of this file.
#[cube(launch_unchecked)]
fn wgmma_kernel<I: WgmmaInstructions, F: Float, O: Float, W: Size, X: Size, V: Size>(
    operands: &Operands<F, u32, W, X>,
    output: &mut [Vector<O, V>],
    #[comptime] plan: Wgmma,
) {
    let blueprint = comptime!(operands.blueprint);
    let lane = lane::<F, W, X>(operands, plan);
    let Wgmma { tile_m, stages, .. } = comptime!(plan);
    let input = Shared::<[Vector<u32, X>]>::new_aligned_slice(
        comptime!((2 * stages * tile_m * VECTORS) as usize),
        1024usize,
    );
    let codes = Shared::<[Vector<u32, W>]>::new_aligned_slice(
        comptime!((2 * stages * ROWS * CODES + plan.scratch) as usize),
        128usize,
    );
    let scales = Shared::<[u32]>::new_aligned_slice(
        comptime!((stages * ROWS * scale_words(blueprint)) as usize),
        128usize,
    );
    let input_address = I::address::<Vector<u32, X>>(&input);
    let codes_address = I::address::<Vector<u32, W>>(&codes);
    let scales_address = I::address::<u32>(&scales);
    let mut rings =
        Rings::<W, X> { input, codes, scales, input_address, codes_address, scales_address };

    let mut sums = Array::<f32>::new(comptime!(tile_m as usize / 2));
    #[unroll]
    for index in 0..comptime!(tile_m as usize / 2) {
        sums[index] = 0.0f32;
    }
    let copies = copies::<F, W, X>(operands, &lane, plan);
    let stages_ahead = comptime!(stages - 1);
    #[unroll]
    for k_tile in 0..stages_ahead {
        #[unroll]
        for half in 0..2u32 {
            #[unroll]
            for k_step in 0..K_STEPS {
                let to = k_tile.runtime();
                copy_part::<I, F, W, X>(operands, &mut rings, to, to, &copies, half, k_step, plan);
            }
            I::commit_copies();
        }
    }
    // Slots of the rings of this k tile and of the one before.
    let (mut stage, mut last) = (0u32.runtime(), stages_ahead.runtime());
    let mut k_tile = 0u32.runtime();
    while k_tile < lane.k_tiles {
        #[unroll]
        for half in 0..2u32 {
            I::wait_for_copies(comptime!(2 * stages_ahead - 1));
            sync_cube();
            let read = read_half::<F, W, X>(&rings, stage, &lane, half, blueprint);
            let first = (stage * 2 + half) * comptime!(tile_m * VECTORS);
            #[unroll]
            for k_step in 0..K_STEPS {
                let mut a = Array::<u32>::new(4usize);
                decode_k_step::<I, F, W>(&read, &mut a, &lane, k_step, blueprint);
                let address = rings.input_address;
                I::multiply::<F, X, W>(
                    &a,
                    &rings.input,
                    address,
                    first + comptime!(2 * k_step),
                    &mut sums,
                    &mut rings.codes,
                    tile_m,
                    comptime!(Operand::from(blueprint.dtype)),
                    false,
                );
                let to = k_tile + stages_ahead;
                copy_part::<I, F, W, X>(
                    operands, &mut rings, to, last, &copies, half, k_step, plan,
                );
                I::wait_for_products(1u32);
            }
            I::commit_copies();
        }
        last = stage;
        stage = select(stage == stages_ahead, 0u32, stage + 1u32);
        k_tile += 1u32;
    }
    I::wait_for_sums(&mut sums, comptime!(tile_m / 2));
    I::wait_for_copies(0u32);
    store_sums::<F, O, W, X, V>(operands, output, &mut rings.input, &sums, &lane, plan, false);
}

/// Stores the sums through shared memory, some columns at a time, so that neighbouring units store
/// neighbouring packed rows. `scaled` sums are products already, without the tensor scale.
#[cube]
pub(super) fn store_sums<F: Float, O: Float, W: Size, X: Size, V: Size>(
    operands: &Operands<F, u32, W, X>,
    output: &mut [Vector<O, V>],
    ring: &mut [Vector<u32, X>],
    sums: &Array<f32>,
    lane: &Lane,
    #[comptime] plan: Wgmma,
    #[comptime] scaled: bool,
) {
    let dims = &operands.dims;
    // Padded: neighbouring columns start 4 banks apart.
    let stride = comptime!(ROWS + 4);
    let columns = comptime!(if plan.tile_m < STAGED { plan.tile_m } else { STAGED });
    let width = comptime!(if plan.split_k > 1 { 4u32 } else { 8 });
    let vectors = comptime!(ROWS / width);
    let split = CUBE_POS as u32 % plan.split_k;
    #[unroll]
    for pass in 0..comptime!(plan.tile_m / columns) {
        sync_cube();
        let staged = ring.with_vector_size_mut::<Const<1>>();
        #[unroll]
        for index in 0..comptime!(columns / 2) {
            let from = comptime!(pass * columns / 2 + index);
            let (column, below) = comptime!((index / 4 * 8 + index % 2, index / 2 % 2 * 8));
            let at = (lane.part * 2 + column) * stride + lane.row + below;
            staged[at as usize] = Vector::new(u32::reinterpret(sums[from as usize]));
        }
        sync_cube();
        #[unroll]
        for turn in 0..comptime!((columns * vectors).div_ceil(UNITS)) {
            let at = UNIT_POS + comptime!(turn * UNITS);
            let (column, vector) = (at / vectors, at % vectors);
            let row = lane.cube_row + vector * width;
            let to = lane.cube_input + pass * columns + column;
            if column < columns && row < dims.n && to < dims.m {
                let mut finished = Vector::<O, V>::empty();
                #[unroll]
                for part in 0..comptime!(width / 4) {
                    let at = (column * stride + vector * width) / 4 + part;
                    let read = ring[at as usize];
                    #[unroll]
                    for index in 0..4u32 {
                        let sum = f32::reinterpret(read.extract(comptime!(index as usize)));
                        let slot = comptime!((part * 4 + index) as usize);
                        if comptime!(plan.split_k > 1) {
                            finished.insert(slot, O::cast_from(sum));
                        } else {
                            let shift = comptime!(shift(operands.blueprint, scaled));
                            let of = row + comptime!(part * 4 + index);
                            let value = epilogue::<F, u32, W, X>(operands, sum * shift, of);
                            finished.insert(slot, O::cast_from(value));
                        }
                    }
                }
                let at = ((split * dims.m + to) * dims.n + row) / width;
                output[at as usize] = finished;
            }
        }
    }
}

/// Returns the factor of sums that restores their magnitude.
fn shift(blueprint: MatmulBlueprint, scaled: bool) -> f32 {
    if scaled { 1.0 } else { sum_shift(blueprint.grid()) }
}

/// Adds the sums of the cubes that divide k, in order, and applies the epilogue.
#[cube(launch_unchecked)]
fn reduce_split_k<F: Float, W: Size, X: Size, V: Size>(
    operands: &Operands<F, u32, W, X>,
    parts: &[Vector<f32, V>],
    output: &mut [Vector<F, V>],
    #[comptime] plan: Wgmma,
    #[comptime] scaled: bool,
) {
    let vectors = operands.dims.m * operands.dims.n / 4;
    let at = ABSOLUTE_POS as u32;
    if at < vectors {
        let mut sum = parts[at as usize];
        #[unroll]
        for part in 1..plan.split_k {
            sum += parts[(part * vectors + at) as usize];
        }
        let row = at * 4 % operands.dims.n;
        let shift = comptime!(shift(operands.blueprint, scaled));
        let mut finished = Vector::<F, V>::empty();
        #[unroll]
        for index in 0..4u32 {
            let value = sum.extract(comptime!(index as usize)) * shift;
            let value = epilogue::<F, u32, W, X>(operands, value, row + index);
            finished.insert(comptime!(index as usize), value);
        }
        output[at as usize] = finished;
    }
}
