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
//! if a norm comes before the matmul: load the whole input              (load_row)
//! load codes, scales and input of the first steps, one per stage       (load_step)
//! if a norm comes before: normalize the input                          (share_normalized)
//! prefetch the weight of the next matmul, now or before the last steps (prefetch_next)
//! for the steps of all n tiles: `k_planes` k tiles each
//!     the input of the step goes to shared memory                      (share_input)
//!     for half of a word of eight codes:                               (multiply)
//!         weights = codes x scales, in registers
//!         sums += weights x input, for every eight rows of the input
//!     for one row of the input: sums += block sums x scales            (multiply_row)
//!     load a step to these registers, also of the next n tile          (load_step)
//!     after the last step of an n tile:
//!         share the sums of the planes                                 (stage_sums)
//!         add those along k; epilogue                                  (store_sums)
//! ```
//!
//! With SwiGLU a plane has eight rows of the weight of the gate and the same eight of the other, so
//! that the epilogue of an n tile has both: `silu(gate) x up`, each rounded before.
//!
//! Loads go on from one n tile to the next, so that memory does not idle in between. The input in
//! shared memory is in the order of decoded codes. Without a norm, to share a small input as a
//! whole before the first step took longer than to load it again with each n tile. Each weight has
//! a main loop of its own: if one loop loaded either of two weights into the same registers, the
//! second load would wait for the first.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{
    MatmulBlueprint, Member, MemberHandles, MemberLaunch, OperandHandles, Operands, Widths,
    decode_elements, decode_scales, epilogue_with, operands, tensor_scale,
};
use super::plan::{Matmul, SMALL_M_K_TILE, SMALL_M_VECTOR as VECTOR, SmallM};
use super::prefetch::prefetch_next;
use super::small_m_input::{
    K_TILE_VECTORS, NormArgs, NormArgsLaunch, NormOperands, NormRow, QUARTER_STRIDE_PADDED,
    ROW_STRIDE_PADDED, ZERO_VECTORS, is_large, load_row, share, share_normalized, share_row,
    share_zeros,
};
use super::small_m_load::{
    Lane, NTile, ROWS_PER_LANE, StepRegisters, copied_row, lane_of_unit, load_step, n_tile,
};
use super::small_m_row::multiply_row;
use crate::decoder::swiglu::silu;
use crate::instructions::{MmaInstructions, Pair};
use crate::memory::PackedIn;
use crate::numeric::element::narrow;
use crate::numeric::scale_grid::sum_shift;
use crate::plan::Dtype;

/// Launches the kernel for a weight, and for the other weights of its family. `norm` has the sums
/// that it stores. With SwiGLU the family has one more weight, without an output of its own. `S`
/// holds the block scales that a lane needs of a packed row.
#[allow(clippy::too_many_arguments)]
pub(super) fn launch<I: MmaInstructions, F: Float, S: Int>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    family: Vec<MemberHandles>,
    norm: Option<(NormOperands, Handle)>,
    blueprint: MatmulBlueprint,
    plan: SmallM,
) {
    let Matmul { m, n, k, .. } = *matmul;
    let widths = Widths { codes: 32, scales: 64, input: VECTOR as usize, k_tile: SMALL_M_K_TILE };
    // With SwiGLU the cubes of the first weight multiply by both.
    let own = if plan.gated { &[] } else { &family[..] };
    let tiles: Vec<usize> =
        [n].into_iter().chain(own.iter().map(|member| member.n)).map(|n| plan.tiles(n)).collect();
    let cubes = plan.cubes_of(&tiles);
    let mut norms = SequenceArg::new();
    if let Some((norm, sums)) = norm {
        // SAFETY: as below.
        norms.push(unsafe { NormArgsLaunch::of(norm, handles.input.clone(), sums, k) });
    }
    let mut members = SequenceArg::new();
    let mut first_cube = cubes[0];
    let of_members = cubes[1..].iter().copied().chain(core::iter::repeat(0));
    for (MemberHandles { weight, bias, output, n }, cubes) in family.into_iter().zip(of_members) {
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
        small_m_kernel::launch_unchecked::<I, F, S>(
            client,
            CubeCount::Static(first_cube, 1, 1),
            CubeDim::new_1d(plan.units()),
            4,
            4,
            VECTOR as usize,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            cubes[0],
            members,
            norms,
            plan,
        );
    }
}

/// Tensor scales of a weight and of the other weight of SwiGLU; not used if packed rows have one
/// each.
#[derive(CubeType, Clone, Copy)]
struct TensorScales {
    weight: f32,
    up: f32,
}

/// A weight's packed rows, and the cubes that multiply by it.
#[derive(CubeType, Clone, Copy)]
struct Rows {
    n: u32,
    /// Number of this cube among the cubes.
    cube: u32,
    cubes: u32,
}

/// Multiplies the input by each weight of a family, with cubes of its own.
#[cube(launch_unchecked)]
fn small_m_kernel<I: MmaInstructions, F: Float, S: Int, W: Size, X: Size, V: Size>(
    operands: &Operands<F, S, W, X>,
    output: &mut [F],
    cubes: u32,
    family: &mut Sequence<Member<F, S, W>>,
    norm: &mut Sequence<NormArgs<F, V>>,
    #[comptime] plan: SmallM,
) {
    let lane = lane_of_unit(plan);
    // CubeCL never reuses shared memory: one allocation for all weights.
    let k_tiles = comptime!(match plan.norm {
        Some(norm) => norm.vectors / K_TILE_VECTORS,
        None => 2 * plan.k_planes,
    });
    let zeros = comptime!(if plan.is_row() { ZERO_VECTORS } else { 0 });
    let shared = comptime!((k_tiles * plan.tile_m * ROW_STRIDE_PADDED + zeros) as usize);
    let mut shared = Shared::<[Vector<u32, X>]>::new_slice(shared);
    if comptime!(plan.is_row()) {
        share_zeros::<X>(&mut shared);
    }
    let staged = comptime!((plan.staged_sums() + plan.scratch) as usize);
    let mut staged = Shared::<[f32]>::new_slice(staged);
    let cube = CUBE_POS as u32;
    let rows = Rows { n: operands.dims.n, cube, cubes };
    if comptime!(plan.gated) {
        let up = family.index(0usize);
        multiply_by::<I, F, S, W, X, V>(
            operands,
            &operands.weight,
            operands.bias,
            &up.weight,
            up.bias,
            output,
            norm,
            &rows,
            &mut shared,
            &mut staged,
            &lane,
            plan,
        );
    } else {
        if cube < cubes {
            multiply_by::<I, F, S, W, X, V>(
                operands,
                &operands.weight,
                operands.bias,
                &operands.weight,
                operands.bias,
                output,
                norm,
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
                let cube = cube - member.first_cube;
                let rows = Rows { n: member.n, cube, cubes: member.cubes };
                multiply_by::<I, F, S, W, X, V>(
                    operands,
                    &member.weight,
                    member.bias,
                    &member.weight,
                    member.bias,
                    member.output,
                    norm,
                    &rows,
                    &mut shared,
                    &mut staged,
                    &lane,
                    plan,
                );
            }
        }
    }
}

/// Runs the main loop at the head of this file for a weight; `up` and `up_bias` are the other
/// weight of SwiGLU and its bias.
#[cube]
#[allow(clippy::too_many_arguments)]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn multiply_by<I: MmaInstructions, F: Float, S: Int, W: Size, X: Size, V: Size>(
    operands: &Operands<F, S, W, X>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    up: &PackedIn<S, W>,
    up_bias: &[F],
    output: &mut [F],
    norm: &mut Sequence<NormArgs<F, V>>,
    rows: &Rows,
    shared: &mut [Vector<u32, X>],
    staged: &mut [f32],
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let SmallM { k_planes, tile_m, .. } = comptime!(plan);
    let mut sums = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..comptime!(plan.m_tiles()) {
        let mut zeros = Array::<Vector<f32, Pair>>::new(2usize);
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
    // Before the first codes: all else waits for it.
    let mut normalized = Sequence::<NormRow<F, V>>::new();
    if let Some(norm_plan) = comptime!(plan.norm) {
        let units = comptime!(plan.units());
        normalized.push(load_row::<F, V>(norm.index(0usize), norm_plan, units));
    }
    let mut loaded = Sequence::<StepRegisters<W, X>>::new();
    #[unroll]
    for _ in 0..plan.stages {
        let mut next = StepRegisters::<W, X> {
            codes: Array::<Vector<u32, W>>::new(comptime!(2 * ROWS_PER_LANE as usize)),
            scales: Array::<u32>::new(comptime!(ROWS_PER_LANE as usize)),
            input: Array::<Vector<u32, X>>::new(comptime!(plan.copies().max(1) as usize)),
        };
        load_step::<F, S, W, X>(operands, weight, up, n, &mut next, load_tile, load_at, lane, plan);
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
    if let Some(norm_plan) = comptime!(plan.norm) {
        let units = comptime!(plan.units());
        share_normalized::<F, V, X>(
            norm.index_mut(0usize),
            normalized.index_mut(0usize),
            shared,
            norm_plan,
            units,
            comptime!(operands.blueprint),
        );
    }
    if comptime!(plan.is_row() && plan.norm.is_none()) {
        // The zeros; a norm waits for all planes.
        sync_cube();
    }
    prefetch_next(&operands.prefetch, comptime!(false));

    // Before the loop: outputs would wait for them.
    let blueprint = comptime!(operands.blueprint);
    let scales = TensorScales {
        weight: tensor_scale::<S, W>(weight, 0u32, blueprint),
        up: tensor_scale::<S, W>(up, 0u32, blueprint),
    };
    // Where the input of a step and the sums of an n tile are in shared memory. Two places take
    // turns, so that planes write to one while others still read the other.
    let mut input_from = 0u32.runtime();
    let mut staged_from = 0u32.runtime();
    let shares_steps = comptime!(plan.shares_steps());
    let own = (tiles - rows.cube).div_ceil(grid);
    let end = own * steps;
    let mut done = 0u32.runtime();
    let mut tile = rows.cube;
    let mut step = 0u32.runtime();
    while done < end {
        // The rest of this matmul's own weight is in flight.
        if done + plan.stages >= end {
            prefetch_next(&operands.prefetch, comptime!(true));
        }
        // Unrolled: each stage has registers of its own, and nothing is moved between them.
        #[unroll]
        for stage in 0..plan.stages {
            if done + stage < end {
                let k_tile = step * k_planes + lane.k_plane;
                let registers = loaded.index(comptime!(stage as usize));
                let mut from = k_tile * buffer;
                if comptime!(plan.norm.is_none()) {
                    from = input_from + lane.k_plane * buffer;
                    input_from = step_buffer - input_from;
                    let dtype = comptime!(operands.blueprint.dtype);
                    share_input::<I, F, X>(
                        shared,
                        from,
                        &registers.input,
                        staged,
                        lane,
                        dtype,
                        plan,
                    );
                    if comptime!(shares_steps) {
                        sync_cube();
                    } else {
                        I::sync_plane();
                    }
                }
                if k_tile < k_tiles {
                    if comptime!(plan.is_row()) {
                        let blueprint = comptime!(operands.blueprint);
                        let sums = sums.index_mut(0usize);
                        multiply_row::<I, F, W, X>(
                            registers, from, &*shared, sums, staged, lane, blueprint, plan,
                        );
                    } else {
                        multiply::<I, F, S, W, X>(
                            operands, registers, from, &*shared, &mut sums, staged, lane, plan,
                        );
                    }
                }
                if done + (stage + plan.stages) < end {
                    let next = loaded.index_mut(comptime!(stage as usize));
                    load_step::<F, S, W, X>(
                        operands, weight, up, n, next, load_tile, load_at, lane, plan,
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
                    stage_sums::<I>(&sums, operands.dims.m, staged, staged_from, lane, plan);
                    store_sums::<F, S, W, X>(
                        operands,
                        weight,
                        bias,
                        up,
                        up_bias,
                        &scales,
                        output,
                        n,
                        &*staged,
                        staged_from,
                        &stored,
                        plan,
                    );
                    if comptime!(plan.staged_tiles() == 2) {
                        staged_from = comptime!(plan.tile_sums()) - staged_from;
                    }
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
        done += plan.stages;
    }
}

/// Stores a lane's copy of the input of a step in shared memory.
#[cube]
fn share_input<I: MmaInstructions, F: Float, X: Size>(
    shared: &mut [Vector<u32, X>],
    from: u32,
    input: &Array<Vector<u32, X>>,
    staged: &mut [f32],
    lane: &Lane,
    #[comptime] dtype: Dtype,
    #[comptime] plan: SmallM,
) {
    if comptime!(plan.is_row()) {
        let values = input[0];
        let mut large = false.runtime();
        if comptime!(dtype == Dtype::Bf16) {
            large = I::any_of_plane(is_large::<X>(values), staged, plan.staged_sums());
        }
        share_row::<F, X>(shared, from, lane.lane, values, large, dtype);
    } else {
        #[unroll]
        for copy in 0..comptime!(plan.copies()) {
            let row = copied_row(lane, copy, plan);
            share::<X>(shared, from, row, lane.lane, input[copy as usize]);
        }
    }
}

/// Adds the products of a k tile to the sums. `from` is the start of its input in shared memory.
#[cube]
fn multiply<I: MmaInstructions, F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    loaded: &StepRegisters<W, X>,
    from: u32,
    shared: &[Vector<u32, X>],
    sums: &mut Sequence<Array<Vector<f32, Pair>>>,
    staged: &mut [f32],
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let blueprint = comptime!(operands.blueprint);
    let m_tiles = comptime!(plan.m_tiles());
    let mut factors = Array::<Vector<F, Pair>>::new(comptime!((2 * ROWS_PER_LANE) as usize));
    // The eight words of both vectors of codes.
    #[unroll]
    for word in 0..8u32 {
        if comptime!(word % 4 == 0) {
            #[unroll]
            for row in 0..ROWS_PER_LANE {
                let shift = comptime!(word / 4 * (256 / blueprint.block_size));
                let scales = loaded.scales[row as usize] >> shift;
                decode_scales::<F, Pair>(&mut factors, row, scales, blueprint);
            }
        }
        let mut values = Array::<Vector<u32, X>>::new(comptime!(m_tiles as usize));
        #[unroll]
        for tile in 0..m_tiles {
            let row = (lane.quad + comptime!(tile * 8)) % plan.tile_m;
            let at = (from + row * ROW_STRIDE_PADDED + lane.part * QUARTER_STRIDE_PADDED) as usize;
            values[tile as usize] = shared[at + comptime!(word as usize)];
        }
        let mut decoded = Sequence::<Array<Vector<F, Pair>>>::new();
        #[unroll]
        for row in 0..ROWS_PER_LANE {
            let packed = loaded.codes[comptime!((2 * row + word / 4) as usize)];
            let packed = packed.extract(comptime!((word % 4) as usize));
            decoded.push(decode_elements::<I, F, Pair>(packed, blueprint));
        }
        #[unroll]
        for half in 0..2u32 {
            let mut weights = Array::<Vector<F, Pair>>::new(4usize);
            #[unroll]
            for register in 0..4u32 {
                // The instruction's order: a pair of both rows, then the next pair.
                let (row, pair) = comptime!((register % 2, 2 * half + register / 2));
                let factor = factors[comptime!((row * 2 + word % 4 / 2) as usize)];
                let pairs = decoded.index(comptime!(row as usize));
                weights[comptime!(register as usize)] = pairs[comptime!(pair as usize)] * factor;
            }
            #[unroll]
            for tile in 0..m_tiles {
                let mut registers = Array::<Vector<F, Pair>>::new(2usize);
                #[unroll]
                for register in 0..2u32 {
                    let pair = comptime!((2 * half + register) as usize);
                    let value = values[tile as usize].extract(pair);
                    registers[register as usize] = Vector::<F, Pair>::reinterpret(value);
                }
                let sums = sums.index_mut(comptime!(tile as usize));
                I::multiply::<F>(&weights, &registers, sums, staged, plan.staged_sums());
            }
        }
    }
}

/// Stores a plane's sums of an n tile in shared memory, by rows of the input.
#[cube]
fn stage_sums<I: MmaInstructions>(
    sums: &Sequence<Array<Vector<f32, Pair>>>,
    m: u32,
    staged: &mut [f32],
    staged_from: u32,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    let (stride, region) = comptime!((plan.staged_stride(), plan.plane_sums()));
    if comptime!(plan.is_row()) {
        #[unroll]
        for half in 0..2usize {
            let sums = sums.index(0usize)[half];
            let sum = sums.extract(0usize) + sums.extract(1usize);
            let sum = I::sum_of_quad(sum, staged, plan.staged_sums());
            if lane.part == 0 {
                let row = lane.quad + comptime!(8 * half as u32);
                staged[(staged_from + lane.k_plane * region + row) as usize] = sum;
            }
        }
    } else {
        #[unroll]
        for tile in 0..comptime!(plan.m_tiles()) {
            #[unroll]
            for index in 0..4u32 {
                let (half, column) = comptime!((index as usize / 2, index as usize % 2));
                let sum = sums.index(comptime!(tile as usize))[half].extract(column);
                let to = lane.part * 2 + comptime!(tile * 8 + column as u32);
                let row = lane.n_plane * 16 + lane.quad + comptime!(8 * half as u32);
                if to < m {
                    staged[(staged_from + lane.k_plane * region + to * stride + row) as usize] =
                        sum;
                }
            }
        }
    }
    sync_cube();
}

/// Adds the sums of the planes along k, and stores the outputs.
#[cube]
#[allow(clippy::too_many_arguments)]
fn store_sums<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
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
    let blueprint = comptime!(operands.blueprint);
    let rows = comptime!(plan.tile_n());
    let mut at = UNIT_POS;
    while at < rows * operands.dims.m {
        let (in_tile, to) = (at % rows, at / rows);
        let row = n_tile.first + in_tile;
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
        at += comptime!(plan.units());
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
