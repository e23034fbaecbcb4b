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
//! load codes, scales and input of the first steps, one per stage       (load_codes, load_input)
//! prefetch the weight of the next matmul, now or before the last steps (prefetch_next)
//! for the steps of all n tiles: `k_planes` k tiles each
//!     the input of the step goes to shared memory                      (share_input)
//!     for half of a word of eight codes:                               (multiply)
//!         weights = codes x scales, in registers
//!         sums += weights x input, for every eight rows of the input
//!     load a step to these registers, also of the next n tile          (load_codes, load_input)
//!     after the last step of an n tile:
//!         share the sums of the planes                                 (stage_sums)
//!         add those along k; epilogue                                  (store_sums)
//! ```
//!
//! One row of the input has another main loop, in `small_m_row.rs`, which also has the norm before
//! the matmul. With SwiGLU a plane has eight rows of the weight of the gate and the same eight of
//! the other, so that the epilogue of an n tile has both: `silu(gate) x up`, each rounded before.
//!
//! A launch may have several links: families of one row of which each reads what others have made.
//! Links after the first load their inputs later, see `small_m_link.rs`.
//!
//! Loads go on from one n tile to the next, so that memory does not idle in between. The input in
//! shared memory is in the order of decoded codes. To share a small input as a whole before the
//! first step took longer than to load it again with each n tile. Each weight has a main loop of
//! its own: if one loop loaded either of two weights into the same registers, the second load would
//! wait for the first.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{
    MatmulBlueprint, Member, MemberHandles, MemberLaunch, OperandHandles, Operands, Widths,
    decode_elements, decode_scales, operands, tensor_scale,
};
use super::plan::{Matmul, ROW_CUBES, SMALL_M_K_TILE, SMALL_M_VECTOR as VECTOR, SmallM};
use super::prefetch::prefetch_next;
use super::small_m_input::{
    NormArgs, NormArgsLaunch, NormOperands, QUARTER_STRIDE_PADDED, ROW_STRIDE_PADDED,
    input_vectors, share, share_zeros,
};
use super::small_m_link::{LinkCube, MAX_LINKS, end_in_link};
use super::small_m_load::{
    Lane, ROWS_PER_LANE, Rows, StepRegisters, copied_row, lane_of_unit, load_codes, load_input,
    n_tile,
};
use super::small_m_row::multiply_row;
use super::small_m_slots::{scale_words, slot_vectors};
use super::small_m_store::{TensorScales, stage_sums, store_sums};
use crate::instructions::{MmaInstructions, Pair, WgmmaInstructions, publish};
use crate::memory::PackedIn;

/// A weight, the other weights of its family, and what joins them. With SwiGLU the family has one
/// more weight, without an output of its own.
#[derive(Clone)]
pub(super) struct LinkHandles {
    pub(super) handles: OperandHandles,
    pub(super) output: Handle,
    pub(super) matmul: Matmul,
    pub(super) family: Vec<MemberHandles>,
    /// With the sums that the norm stores.
    pub(super) norm: Option<(NormOperands, Handle)>,
    pub(super) blueprint: MatmulBlueprint,
    pub(super) plan: SmallM,
}

/// A family in a kernel: alone, or a link of a chain.
#[derive(CubeType, CubeLaunch)]
struct Link<F: Float, S: Int, W: Size, V: Size> {
    operands: Operands<F, S, W, W>,
    output: &'static mut [F],
    /// Cubes of the first weight.
    cubes: u32,
    family: Sequence<Member<F, S, W>>,
    /// The norm, or nothing.
    norm: Sequence<NormArgs<F, V>>,
    /// The first of its cubes.
    first_cube: u32,
    /// Cubes of all weights.
    all_cubes: u32,
    #[cube(comptime)]
    plan: SmallM,
}

/// Launches the kernel for a family, or for several families of one row in turn, given counters of
/// 0. `S` holds the block scales that a lane needs of a packed row.
pub(super) fn launch<I: MmaInstructions, C: WgmmaInstructions, F: Float, S: Int>(
    client: &Client,
    links: Vec<LinkHandles>,
    counters: Handle,
) {
    let (mut args, mut first_cube) = (SequenceArg::new(), 0);
    let largest = |size: fn(&SmallM) -> u32| links.iter().map(|link| size(&link.plan)).max();
    let sizes = [input_vectors, slot_vectors, scale_words, SmallM::staged_values];
    let sizes = sizes.map(|size| largest(size).unwrap_or(0));
    let units = largest(SmallM::units).unwrap_or(0);
    let rows = links.iter().all(|link| link.plan.is_row());
    let cubes_at_once = rows.then_some(ROW_CUBES);
    for link in links {
        let (link, cubes) = link_args(link, first_cube);
        args.push(link);
        first_cube += cubes;
    }
    // SAFETY: see `link_args`; the counters are not read by a single link.
    unsafe {
        small_m_kernel::launch_unchecked::<I, C, F, S>(
            client,
            CubeCount::Static(first_cube, 1, 1),
            CubeDim::new_1d(units),
            4,
            VECTOR as usize,
            args,
            BufferArg::from_raw_parts(counters, MAX_LINKS),
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            cubes_at_once,
        );
    }
}

/// Returns the argument for a family, and the number of its cubes.
fn link_args<F: Float, S: Int, W: Size, V: Size>(
    link: LinkHandles,
    first_cube: u32,
) -> (LinkLaunch<F, S, W, V>, u32) {
    let LinkHandles { handles, output, matmul, family, norm, blueprint, plan } = link;
    let Matmul { m, n, k, .. } = matmul;
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
    let mut all_cubes = cubes[0];
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
                all_cubes,
                cubes,
            )
        });
        all_cubes += cubes;
    }
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not
    // stored.
    let output = unsafe { BufferArg::from_raw_parts(output, m * n) };
    let operands = operands(handles, &matmul, blueprint, widths);
    let link =
        LinkLaunch::new(operands, output, cubes[0], members, norms, first_cube, all_cubes, plan);
    (link, all_cubes)
}

/// Multiplies by the weights of families, in turn.
#[cube(launch_unchecked)]
fn small_m_kernel<I: MmaInstructions, C: WgmmaInstructions, F: Float, S: Int, W: Size, V: Size>(
    links: &mut Sequence<Link<F, S, W, V>>,
    counters: &mut [u32],
    #[comptime] input_vectors: u32,
    #[comptime] slot_vectors: u32,
    #[comptime] scale_words: u32,
    #[comptime] staged_values: u32,
    #[comptime] cubes_at_once: Option<u32>,
) {
    if let Some(cubes) = comptime!(cubes_at_once) {
        I::limit_registers(cubes);
    }
    // CubeCL never reuses shared memory: one allocation for all weights.
    let mut shared = Shared::<[Vector<u32, W>]>::new_aligned_slice(
        comptime!((input_vectors + slot_vectors) as usize),
        16usize,
    );
    let mut scales =
        Shared::<[S]>::new_aligned_slice(comptime!(scale_words.max(1) as usize), 16usize);
    let mut staged = Shared::<[f32]>::new_slice(comptime!(staged_values as usize));
    let count = links.len();
    let mut before = 0u32.runtime();
    #[unroll]
    for index in 0..count {
        let link = links.index_mut(index);
        let cubes = link.all_cubes;
        if comptime!(count == 1) {
            let place = LinkCube { cube: CUBE_POS as u32, cubes, link: 0u32, before };
            multiply_link::<I, C, F, S, W, V>(
                link,
                &*counters,
                &mut shared,
                &mut scales,
                &mut staged,
                &place,
                input_vectors,
            );
        } else {
            let cube = CUBE_POS as u32 - link.first_cube;
            if CUBE_POS as u32 >= link.first_cube && cube < cubes {
                let place = LinkCube { cube, cubes, link: comptime!(index as u32), before };
                multiply_link::<I, C, F, S, W, V>(
                    link,
                    &*counters,
                    &mut shared,
                    &mut scales,
                    &mut staged,
                    &place,
                    input_vectors,
                );
                publish_outputs::<F, S, W, V>(link);
                let links = comptime!(if index + 1 == count { count as u32 } else { 0u32 });
                end_in_link(counters, comptime!(index as u32).runtime(), cubes, links);
            }
            before = cubes;
        }
    }
}

/// Ends the compiler's changes to the order of stores of a link's outputs.
#[cube]
fn publish_outputs<F: Float, S: Int, W: Size, V: Size>(link: &mut Link<F, S, W, V>) {
    publish::<F>(link.output);
    #[unroll]
    for index in 0..link.family.len() {
        publish::<F>(link.family.index_mut(index).output);
    }
    #[unroll]
    for index in 0..link.norm.len() {
        publish::<Vector<F, V>>(link.norm.index_mut(index).sums);
    }
}

/// Multiplies the input by each weight of a family, with cubes of its own.
#[cube]
fn multiply_link<I: MmaInstructions, C: WgmmaInstructions, F: Float, S: Int, W: Size, V: Size>(
    link: &mut Link<F, S, W, V>,
    counters: &[u32],
    shared: &mut [Vector<u32, W>],
    scales: &mut [S],
    staged: &mut [f32],
    place: &LinkCube,
    #[comptime] slots_from: u32,
) {
    let plan = comptime!(link.plan);
    let lane = lane_of_unit(plan);
    if comptime!(plan.is_row()) {
        share_zeros::<W>(shared);
    }
    let operands = &link.operands;
    let (cube, cubes) = (place.cube, link.cubes);
    let rows = Rows { n: operands.dims.n, cube, cubes };
    if comptime!(plan.gated) {
        let up = link.family.index(0usize);
        multiply_by::<I, C, F, S, W, V>(
            operands,
            &operands.weight,
            operands.bias,
            &up.weight,
            up.bias,
            link.output,
            &mut link.norm,
            &rows,
            counters,
            shared,
            scales,
            staged,
            &lane,
            place,
            slots_from,
            plan,
        );
    } else {
        if cube < cubes {
            multiply_by::<I, C, F, S, W, V>(
                operands,
                &operands.weight,
                operands.bias,
                &operands.weight,
                operands.bias,
                link.output,
                &mut link.norm,
                &rows,
                counters,
                shared,
                scales,
                staged,
                &lane,
                place,
                slots_from,
                plan,
            );
        }
        #[unroll]
        for index in 0..link.family.len() {
            let member = link.family.index_mut(index);
            if cube >= member.first_cube && cube < member.first_cube + member.cubes {
                let cube = cube - member.first_cube;
                let rows = Rows { n: member.n, cube, cubes: member.cubes };
                multiply_by::<I, C, F, S, W, V>(
                    operands,
                    &member.weight,
                    member.bias,
                    &member.weight,
                    member.bias,
                    member.output,
                    &mut link.norm,
                    &rows,
                    counters,
                    shared,
                    scales,
                    staged,
                    &lane,
                    place,
                    slots_from,
                    plan,
                );
            }
        }
    }
}

/// Multiplies by a weight; `up` and `up_bias` are the other weight of SwiGLU and its bias.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_by<I: MmaInstructions, C: WgmmaInstructions, F: Float, S: Int, W: Size, V: Size>(
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
    if comptime!(plan.is_row()) {
        multiply_row::<I, C, F, S, W, V>(
            operands, weight, bias, up, up_bias, output, norm, rows, counters, shared, scales,
            staged, lane, place, slots_from, plan,
        );
    } else {
        multiply_rows::<I, F, S, W>(
            operands, weight, bias, up, up_bias, output, rows, shared, staged, lane, place, plan,
        );
    }
}

/// Runs the main loop at the head of this file for several rows of the input.
#[cube]
#[allow(clippy::too_many_arguments)]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn multiply_rows<I: MmaInstructions, F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    weight: &PackedIn<S, W>,
    bias: &[F],
    up: &PackedIn<S, W>,
    up_bias: &[F],
    output: &mut [F],
    rows: &Rows,
    shared: &mut [Vector<u32, W>],
    staged: &mut [f32],
    lane: &Lane,
    place: &LinkCube,
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
    let mut loaded = Sequence::<StepRegisters<W>>::new();
    #[unroll]
    for _ in 0..plan.stages {
        let mut next = StepRegisters::<W> {
            codes: Array::<Vector<u32, W>>::new(comptime!(2 * ROWS_PER_LANE as usize)),
            scales: Array::<u32>::new(comptime!(ROWS_PER_LANE as usize)),
            input: Array::<Vector<u32, W>>::new(comptime!(plan.copies() as usize)),
        };
        load_codes::<F, S, W>(operands, weight, up, n, &mut next, load_tile, load_at, lane, plan);
        load_input::<F, S, W>(operands, &mut next, load_at, lane, plan);
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
    prefetch_next(&operands.prefetch, place.cube, place.cubes, false);

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
            prefetch_next(&operands.prefetch, place.cube, place.cubes, true);
        }
        // Unrolled: each stage has registers of its own, and nothing is moved between them.
        #[unroll]
        for stage in 0..plan.stages {
            if done + stage < end {
                let k_tile = step * k_planes + lane.k_plane;
                let registers = loaded.index(comptime!(stage as usize));
                let from = input_from + lane.k_plane * buffer;
                input_from = step_buffer - input_from;
                share_input::<W>(shared, from, &registers.input, lane, plan);
                if comptime!(shares_steps) {
                    sync_cube();
                } else {
                    I::sync_plane();
                }
                if k_tile < k_tiles {
                    multiply::<I, F, S, W>(
                        operands, registers, from, &*shared, &mut sums, staged, lane, plan,
                    );
                }
                if done + (stage + plan.stages) < end {
                    let next = loaded.index_mut(comptime!(stage as usize));
                    load_codes::<F, S, W>(
                        operands, weight, up, n, next, load_tile, load_at, lane, plan,
                    );
                    load_input::<F, S, W>(operands, next, load_at, lane, plan);
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
                    store_sums::<F, S, W>(
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

/// Stores a lane's copies of the input of a step in shared memory.
#[cube]
fn share_input<W: Size>(
    shared: &mut [Vector<u32, W>],
    from: u32,
    input: &Array<Vector<u32, W>>,
    lane: &Lane,
    #[comptime] plan: SmallM,
) {
    #[unroll]
    for copy in 0..comptime!(plan.copies()) {
        let row = copied_row(lane, copy, plan);
        share::<W>(shared, from, row, lane.lane, input[copy as usize]);
    }
}

/// Adds the products of a k tile to the sums. `from` is the start of its input in shared memory.
#[cube]
fn multiply<I: MmaInstructions, F: Float, S: Int, W: Size>(
    operands: &Operands<F, S, W, W>,
    loaded: &StepRegisters<W>,
    from: u32,
    shared: &[Vector<u32, W>],
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
        let mut values = Array::<Vector<u32, W>>::new(comptime!(m_tiles as usize));
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

#[cfg(test)]
mod tests {
    use burn_fp4_search::formats::Fp4Format;

    use super::super::plan::{MAX_SMALL_M, NormPlan};
    use super::*;
    use crate::plan::{Dtype, GPU};

    /// Cards such as A10 and RTX 4090 have 99 KiB of shared memory for a cube.
    #[test]
    fn inputs_codes_and_sums_fit_the_shared_memory_of_small_cards() {
        let mut planned = 0;
        for m in 1..=MAX_SMALL_M {
            for (n, k) in [(20, 256), (4096, 4096), (8192, 8192), (8192, 17408), (65536, 256)] {
                let (format, dtype) = (Fp4Format::NvFp4, Dtype::Bf16);
                let matmul = Matmul { m, n, k, format, block_size: 16, dtype };
                let Ok(plan) = matmul.small_m_launch(&GPU) else { continue };
                let norm = NormPlan::of(k, plan.units(), true).filter(|_| m == 1);
                for plan in [plan, SmallM { norm, ..plan }] {
                    planned += 1;
                    let vectors = input_vectors(&plan) + slot_vectors(&plan);
                    let words = scale_words(&plan) + plan.staged_values();
                    let bytes = 16 * vectors + 4 * words;
                    assert!(bytes <= 99 << 10, "{m} x {n} x {k}: {bytes} bytes, {plan:?}");
                }
            }
        }
        assert!(planned > 50, "{planned} plans");
    }
}
