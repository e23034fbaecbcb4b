//! A matmul with few rows of the input (small M), with the matrix instructions of a plane.
//!
//! Instruction, lanes and order of k are as in `mma.rs`. With a small input, reading
//! the weight takes nearly all of the time. So a lane loads 32 bytes of codes at a time, a plane
//! has 16 packed rows of its own, and planes divide k:
//!
//! ```text
//! a k tile: 256 elements of a packed row
//! | part 0: 64 elements     | part 1                  | part 2       | part 3       |
//! | 16 bytes   | 16 bytes   |  and the scales of their blocks in one word
//!
//! cube: n_planes x k_planes planes for one weight of a family that multiplies one input. They take
//! every `cubes`-th of its n tiles: 16 x n_planes packed rows
//! load codes, scales and input of the first two steps                  (load_step)
//! prefetch the weight of the next matmul, now or before the last steps (prefetch_next)
//! for the steps of all n tiles: `k_planes` k tiles each
//!     the input of the step goes to shared memory                      (share_input)
//!     for half of a word of eight codes:                               (multiply)
//!         weights = codes x scales, in registers
//!         sums += weights x input, for every eight rows of the input
//!     load the step after the next, also of the next n tile            (load_step)
//!     after the last step of an n tile:
//!         add the sums of the planes along k; epilogue                 (store_sums)
//! ```
//!
//! Loads go on from one n tile to the next, so that memory does not idle in between. The input in
//! shared memory is in the order of decoded codes. To share a small input as a whole before
//! the first step took longer than to load it again with each n tile. Each weight has a main loop
//! of its own: if one loop loaded either of two weights into the same registers, the second load
//! would wait for the first.

use cubecl::client::Client;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{
    MatmulBlueprint, Member, MemberHandles, MemberLaunch, OperandHandles, Operands, Widths,
    decode_elements, decode_scales, epilogue_of, operands,
};
use super::plan::{Matmul, SMALL_M_K_TILE, SmallM};
use super::prefetch::prefetch_next;
use crate::memory::PackedIn;
use crate::numeric::scale_grid::sum_shift;

/// Launches the kernel for a weight, and for the other weights of its family. `S` holds the block
/// scales that a lane needs of a packed row.
pub(super) fn launch<F: Float, S: Int>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    family: Vec<MemberHandles>,
    blueprint: MatmulBlueprint,
    plan: SmallM,
) {
    let Matmul { m, n, k, .. } = *matmul;
    let widths = Widths { codes: 32, scales: 64, input: 8, k_tile: SMALL_M_K_TILE };
    let tiles: Vec<usize> = [n]
        .into_iter()
        .chain(family.iter().map(|member| member.n))
        .map(|n| plan.tiles(n))
        .collect();
    let cubes = plan.cubes_of(&tiles);
    let mut members = SequenceArg::new();
    let mut first_cube = cubes[0];
    for (MemberHandles { weight, bias, output, n }, &cubes) in family.into_iter().zip(&cubes[1..]) {
        let input = handles.input.clone();
        // SAFETY: as below.
        members.push(unsafe {
            MemberLaunch::new(
                weight.read(n * k, widths.codes, widths.scales),
                match bias {
                    Some(bias) => BufferArg::from_raw_parts(bias, n),
                    None => BufferArg::from_raw_parts(input, m * k),
                },
                BufferArg::from_raw_parts(output, m * n),
                n as u32,
                first_cube,
                cubes,
            )
        });
        first_cube += cubes;
    }
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not
    // stored.
    unsafe {
        small_m_kernel::launch_unchecked::<F, S>(
            client,
            CubeCount::Static(first_cube, 1, 1),
            CubeDim::new_1d(plan.units()),
            4,
            4,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            cubes[0],
            members,
            plan,
        );
    }
}

/// Vectors of eight values of the input in a k tile.
const K_TILE_VECTORS: u32 = SMALL_M_K_TILE as u32 / 8;
/// Vectors between the four parts of a row of the input in shared memory. One vector of padding
/// puts the eight lanes of two rows in different banks.
const QUARTER_STRIDE_PADDED: u32 = K_TILE_VECTORS / 4 + 1;
/// Vectors between the rows of the input in shared memory.
const ROW_STRIDE_PADDED: u32 = 4 * QUARTER_STRIDE_PADDED;
/// Packed rows of a lane, eight rows apart.
const ROWS_PER_LANE: u32 = 2;
/// K tiles in registers: one is multiplied while the other is loaded.
const PIPELINE_STAGES: u32 = 2;

/// Position of a lane in its cube.
#[derive(CubeType, Clone, Copy)]
struct Lane {
    /// Number in its plane.
    lane: u32,
    /// Number of its quad: the row it has of each eight.
    quad: u32,
    /// Number in its quad: the part it has of a row.
    part: u32,
    /// Number of its plane among the planes that divide the packed rows.
    n_plane: u32,
    /// Number of its plane among the planes that divide k.
    k_plane: u32,
}

/// A weight's packed rows, and the cubes that multiply by it.
#[derive(CubeType, Clone, Copy)]
struct Rows {
    n: u32,
    /// Number of this cube among the cubes.
    cube: u32,
    cubes: u32,
}

/// Packed rows of an n tile.
#[derive(CubeType, Clone, Copy)]
struct NTile {
    /// The first one.
    first: u32,
    /// The first one of the lane.
    row: u32,
}

/// Returns the position of this unit.
#[cube]
fn lane_of_unit(#[comptime] plan: SmallM) -> Lane {
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
fn n_tile(tile: u32, lane: &Lane, #[comptime] plan: SmallM) -> NTile {
    let first = tile * comptime!(plan.tile_n());
    NTile { first, row: first + lane.n_plane * 16 + lane.quad }
}

/// Registers that a lane loads for a step.
#[derive(CubeType)]
struct StepRegisters<W: Size, X: Size> {
    /// Two vectors of codes of both rows.
    codes: Array<Vector<u32, W>>,
    /// The scales of their blocks, in a word.
    scales: Array<u32>,
    /// The part of the input that the lane copies.
    input: Array<Vector<u32, X>>,
}

/// Loads a step from device memory. K tiles beyond the last repeat it.
#[cube]
fn load_step<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    weight: &PackedIn<S, W>,
    n: u32,
    loaded: &mut StepRegisters<W, X>,
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
        let row = min(n_tile.row + half * 8, n - 1);
        let at = ((row * dims.k_tiles + k_tile) * 4 + lane.part) as usize;
        let to = comptime!(half as usize);
        loaded.codes[comptime!(2 * to)] = weight.codes[at * 2];
        loaded.codes[comptime!(2 * to + 1)] = weight.codes[at * 2 + 1];
        loaded.scales[to] = u32::cast_from(weight.scales[at]);
    }
    #[unroll]
    for copy in 0..comptime!(plan.copies()) {
        let row = min(copied_row(lane, copy, plan), dims.m - 1);
        let at = (row * dims.k_tiles + k_tile) * K_TILE_VECTORS + lane.lane;
        loaded.input[copy as usize] = operands.input[at as usize];
    }
}

/// Returns the row of the input that a plane copies. Planes of the same k tile divide the rows.
#[cube]
fn copied_row(lane: &Lane, #[comptime] copy: u32, #[comptime] plan: SmallM) -> u32 {
    (lane.n_plane * comptime!(plan.copies()) + copy) % plan.tile_m
}

/// Returns the place of a vector of the input in shared memory, within its k tile.
#[cube]
fn place_of(row: u32, vector: u32) -> u32 {
    row * ROW_STRIDE_PADDED + vector / 8 * QUARTER_STRIDE_PADDED + vector % 8
}

/// Multiplies the input by each weight of a family, with cubes of its own.
#[cube(launch_unchecked)]
fn small_m_kernel<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    output: &mut [F],
    cubes: u32,
    family: &mut Sequence<Member<F, S, W>>,
    #[comptime] plan: SmallM,
) {
    let lane = lane_of_unit(plan);
    // CubeCL never reuses shared memory: one allocation for all weights.
    let shared =
        comptime!((PIPELINE_STAGES * plan.k_planes * plan.tile_m * ROW_STRIDE_PADDED) as usize);
    let mut shared = Shared::<[Vector<u32, X>]>::new_slice(shared);
    let staged = comptime!((plan.k_planes * plan.staged_sums()) as usize);
    let mut staged = Shared::<[f32]>::new_slice(staged);
    let cube = CUBE_POS as u32;
    let rows = Rows { n: operands.dims.n, cube, cubes };
    if cube < cubes {
        multiply_by::<F, S, W, X>(
            operands,
            &operands.weight,
            operands.bias,
            output,
            &rows,
            &mut shared,
            &mut staged,
            &lane,
            plan,
        );
    }
    #[unroll]
    for index in 0..family.len() {
        let member = family.index_mut(index);
        if cube >= member.first_cube && cube < member.first_cube + member.cubes {
            let rows = Rows { n: member.n, cube: cube - member.first_cube, cubes: member.cubes };
            multiply_by::<F, S, W, X>(
                operands,
                &member.weight,
                member.bias,
                member.output,
                &rows,
                &mut shared,
                &mut staged,
                &lane,
                plan,
            );
        }
    }
}

/// Runs the main loop at the head of this file for a weight.
#[cube]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn multiply_by<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    output: &mut [F],
    rows: &Rows,
    shared: &mut [Vector<u32, X>],
    staged: &mut [f32],
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let SmallM { k_planes, tile_m, .. } = comptime!(plan);
    let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = definition.vector_size(MatrixIdent::A);
    let size!(NB) = definition.vector_size(MatrixIdent::B);
    let size!(NC) = definition.vector_size(MatrixIdent::Accumulator);
    let mut sums = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.m_tiles()) {
        let mut zeros = Array::<Vector<f32, NC>>::new(2usize);
        zeros[0] = Vector::new(0.0f32);
        zeros[1] = Vector::new(0.0f32);
        sums.push(zeros);
    }

    let k_tiles = operands.dims.k_tiles;
    let steps = k_tiles.div_ceil(k_planes);
    let (n, grid) = (rows.n, rows.cubes);
    let tiles = n.div_ceil(comptime!(plan.tile_n()));
    let mut load_tile = rows.cube;
    let mut load_at = 0u32.runtime();
    let mut loaded = Sequence::<StepRegisters<W, X>>::new();
    #[unroll]
    for _ in 0..PIPELINE_STAGES {
        let mut next = StepRegisters::<W, X> {
            codes: Array::<Vector<u32, W>>::new(comptime!(2 * ROWS_PER_LANE as usize)),
            scales: Array::<u32>::new(comptime!(ROWS_PER_LANE as usize)),
            input: Array::<Vector<u32, X>>::new(comptime!(plan.copies() as usize)),
        };
        load_step::<F, S, W, X>(operands, weight, n, &mut next, load_tile, load_at, lane, plan);
        loaded.push(next);
        load_at += 1u32;
        if load_at == steps {
            load_at = 0u32;
            // Behind the last n tile nothing uses what is loaded.
            load_tile = min(load_tile + grid, tiles - 1);
        }
    }
    // Input of a k tile, and of the k tiles of a step.
    let buffer = comptime!(tile_m * ROW_STRIDE_PADDED);
    let step_buffer = comptime!(k_planes * buffer);
    prefetch_next(&operands.prefetch, comptime!(false));

    let shares_steps = comptime!(plan.n_planes > 1);
    let own = (tiles - rows.cube).div_ceil(grid);
    let end = own * steps;
    let mut done = 0u32.runtime();
    let mut tile = rows.cube;
    let mut step = 0u32.runtime();
    while done < end {
        // The rest of this matmul's own weight is in flight.
        if done + PIPELINE_STAGES >= end {
            prefetch_next(&operands.prefetch, comptime!(true));
        }
        // Unrolled: each stage has registers of its own, and nothing is moved between them.
        #[unroll]
        for stage in 0..PIPELINE_STAGES {
            if done + stage < end {
                let k_tile = step * k_planes + lane.k_plane;
                let from = stage * step_buffer + lane.k_plane * buffer;
                let registers = loaded.index(comptime!(stage as usize));
                share_input::<X>(shared, from, &registers.input, lane, plan);
                if comptime!(shares_steps) {
                    sync_cube();
                } else {
                    sync_plane();
                }
                if k_tile < k_tiles {
                    multiply::<F, S, W, X, NA, NB, NC>(
                        operands,
                        &definition,
                        registers,
                        from,
                        &*shared,
                        &mut sums,
                        lane,
                        plan,
                    );
                }
                if done + (stage + PIPELINE_STAGES) < end {
                    let next = loaded.index_mut(comptime!(stage as usize));
                    load_step::<F, S, W, X>(
                        operands, weight, n, next, load_tile, load_at, lane, plan,
                    );
                    load_at += 1u32;
                    if load_at == steps {
                        load_at = 0u32;
                        load_tile += grid;
                    }
                }
                step += 1u32;
                if step == steps {
                    let stored = n_tile(tile, lane, plan);
                    store_sums::<F, S, W, X, NC>(
                        operands, weight, bias, output, n, &sums, staged, &stored, lane, plan,
                    );
                    #[unroll]
                    for m_tile in 0..comptime!(plan.m_tiles()) {
                        let sums = sums.index_mut(comptime!(m_tile as usize));
                        sums[0] = Vector::new(0.0f32);
                        sums[1] = Vector::new(0.0f32);
                    }
                    step = 0u32;
                    tile += grid;
                }
            }
        }
        done += PIPELINE_STAGES;
    }
}

/// Stores a lane's copy of the input of a step in shared memory.
#[cube]
fn share_input<X: Size>(
    shared: &mut [Vector<u32, X>],
    from: u32,
    input: &Array<Vector<u32, X>>,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    #[unroll]
    for copy in 0..comptime!(plan.copies()) {
        let to = from + place_of(copied_row(lane, copy, plan), lane.lane);
        shared[to as usize] = pairs::<X>(input[copy as usize]);
    }
}

/// Adds the products of a k tile to the sums. `from` is the start of its input in shared memory.
#[cube]
fn multiply<F: Float, S: Int, W: Size, X: Size, NA: Size, NB: Size, NC: Size>(
    operands: &Operands<F, S, W, X>,
    definition: &MmaDefinition<F, F, f32>,
    loaded: &StepRegisters<W, X>,
    from: u32,
    shared: &[Vector<u32, X>],
    sums: &mut Sequence<Array<Vector<f32, NC>>>,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let blueprint = comptime!(operands.blueprint);
    let m_tiles = comptime!(plan.m_tiles());
    let mut factors = Array::<Vector<F, NA>>::new(comptime!((2 * ROWS_PER_LANE) as usize));
    // The eight words of both vectors of codes.
    #[unroll]
    for word in 0..8u32 {
        if comptime!(word % 4 == 0) {
            #[unroll]
            for row in 0..ROWS_PER_LANE {
                let shift = comptime!(word / 4 * (256 / blueprint.block_size));
                let scales = loaded.scales[row as usize] >> shift;
                decode_scales::<F, NA>(&mut factors, row, scales, blueprint);
            }
        }
        let mut values = Array::<Vector<u32, X>>::new(comptime!(m_tiles as usize));
        #[unroll]
        for tile in 0..m_tiles {
            let row = (lane.quad + comptime!(tile * 8)) % plan.tile_m;
            let at = (from + row * ROW_STRIDE_PADDED + lane.part * QUARTER_STRIDE_PADDED) as usize;
            values[tile as usize] = shared[at + comptime!(word as usize)];
        }
        #[unroll]
        for half in 0..2u32 {
            let mut weights = Array::<Vector<F, NA>>::new(4usize);
            #[unroll]
            for register in 0..4u32 {
                // The instruction's order: a pair of both rows, then the next pair.
                let (row, pair) = comptime!((register % 2, 2 * half + register / 2));
                let packed = loaded.codes[comptime!((2 * row + word / 4) as usize)];
                let packed = packed.extract(comptime!((word % 4) as usize));
                let decoded =
                    decode_elements::<F, NA>(packed << comptime!(12 - 4 * pair), blueprint);
                let factor = factors[comptime!((row * 2 + word % 4 / 2) as usize)];
                weights[comptime!(register as usize)] = decoded * factor;
            }
            #[unroll]
            for tile in 0..m_tiles {
                let mut registers = Array::<Vector<F, NB>>::new(2usize);
                #[unroll]
                for register in 0..2u32 {
                    let pair = comptime!((2 * half + register) as usize);
                    let value = values[tile as usize].extract(pair);
                    registers[register as usize] = Vector::<F, NB>::reinterpret(value);
                }
                definition.execute_inplace(
                    &weights,
                    &registers,
                    sums.index_mut(comptime!(tile as usize)),
                );
            }
        }
    }
}

/// Adds the sums of the planes along k, and stores them.
#[cube]
fn store_sums<F: Float, S: Int, W: Size, X: Size, NC: Size>(
    operands: &Operands<F, S, W, X>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    output: &mut [F],
    n: u32,
    sums: &Sequence<Array<Vector<f32, NC>>>,
    staged: &mut [f32],
    n_tile: &NTile,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let dims = &operands.dims;
    let rows = comptime!(plan.tile_n());
    // The sums of a plane are stored by rows of the input.
    let (stride, region) = comptime!((plan.staged_stride(), plan.staged_sums()));
    // Planes may still read the sums of the n tile before.
    sync_cube();
    #[unroll]
    for tile in 0..comptime!(plan.m_tiles()) {
        #[unroll]
        for index in 0..4u32 {
            let (half, column) = comptime!((index as usize / 2, index as usize % 2));
            let sum = sums.index(comptime!(tile as usize))[half].extract(column);
            let to = lane.part * 2 + comptime!(tile * 8 + column as u32);
            let row = n_tile.row - n_tile.first + comptime!(8 * half as u32);
            if to < dims.m {
                staged[(lane.k_plane * region + to * stride + row) as usize] = sum;
            }
        }
    }
    sync_cube();
    let mut at = UNIT_POS;
    while at < rows * dims.m {
        let (in_row, to) = (at % rows, at / rows);
        let row = n_tile.first + in_row;
        if row < n {
            let mut sum = 0.0f32.runtime();
            #[unroll]
            for k_plane in 0..plan.k_planes {
                sum += staged[(k_plane * region + to * stride + in_row) as usize];
            }
            let blueprint = comptime!(operands.blueprint);
            sum *= comptime!(sum_shift(blueprint.grid()));
            let value = epilogue_of::<F, S, W>(weight, bias, sum, row, blueprint);
            output[(to * n + row) as usize] = value;
        }
        at += comptime!(plan.units());
    }
}

/// Returns eight values in the order in which codes are decoded, each with the fourth after it.
#[cube]
fn pairs<X: Size>(values: Vector<u32, X>) -> Vector<u32, X> {
    let mut pairs = Vector::<u32, X>::empty();
    #[unroll]
    for half in 0..2usize {
        let (low, high) = (values.extract(half), values.extract(comptime!(half + 2)));
        pairs.insert(comptime!(2 * half), (low & 0xFFFFu32) | (high << 16u32));
        pairs.insert(comptime!(2 * half + 1), (low >> 16u32) | (high & 0xFFFF_0000u32));
    }
    pairs
}
