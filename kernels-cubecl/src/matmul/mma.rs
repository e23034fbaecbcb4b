//! A matmul with the matrix instructions of a plane (MMA).
//!
//! An instruction multiplies 16 packed rows of the weight with 8 rows of the input along 16 values
//! of k. The 32 lanes of a plane hold these fragments in registers, `lane = 4 x quad + part`:
//!
//! ```text
//! A, the weight: 16 rows x 16 k             B, the input: 8 rows      C, the sums: 16 x 8
//!            2 part  2 part + 8                       quad                  2 part, 2 part + 1
//! quad      | word 0 | word 1 |             2 part   | word 0 |    quad     | half 0 |
//! quad + 8  | word 0 | word 1 |             .. + 8   | word 1 |    quad + 8 | half 1 |
//!  (half)     2 values a word                          2 values               2 sums
//! ```
//!
//! Any order of k will do if A and B have the same. So the four lanes of a row take 32 neighbouring
//! elements each, and a lane loads 16 bytes of codes at once:
//!
//! ```text
//! a k tile: 128 elements of a packed row
//! | part 0: 32 elements      | part 1                   | part 2         | part 3         |
//! | block 0     | block 1    |    a block: 16 elements, two words of eight codes,
//! | word | word | word | word |   eight codes: 4 pairs (p, p + 4), decoded a word at a time
//! ```
//!
//! Each of the 2 x 4 blocks and pairs of a k tile is one instruction for every tile of m and n. The
//! planes of a cube divide its packed rows, its rows of the input, and k (split-K within the cube):
//!
//! ```text
//! cube: 256 units = 8 planes = n_planes x m_planes x k_planes
//! for round in the k tiles, `k_planes` at a time:
//!     factors = the block scales, decoded                               (decode_scales)
//!     the input goes to shared memory, if planes share it               (share_input)
//!     load codes, scales and input of the next round                    (load_round)
//!     for block in 0..2:
//!         weights = codes x factors, in registers                       (decode_weights)
//!         for some tiles of m: read the next, multiply the last         (multiply_tiles)
//! add the sums of the planes along k; epilogue                          (store_sums)
//! ```

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{
    MatmulBlueprint, OperandHandles, Operands, Widths, decode_elements, decode_scales, epilogue,
    operands,
};
use super::plan::{K_TILE, Matmul, Mma, PLANES};
use crate::instructions::{MmaInstructions, Pair};
use crate::numeric::scale_grid::sum_shift;
use crate::plan::UNITS;

/// Launches the kernel. `S` holds the block scales that a lane needs of a packed row.
pub(super) fn launch<I: MmaInstructions, F: Float, S: Int>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: Mma,
) {
    let Matmul { m, n, .. } = *matmul;
    let widths = Widths { codes: 32, scales: 32, input: 8, k_tile: K_TILE };
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not
    // stored.
    unsafe {
        mma_kernel::launch_unchecked::<I, F, S>(
            client,
            CubeCount::Static(plan.cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            4,
            4,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            plan,
        );
    }
}

/// Vectors of eight values of the input in a k tile.
const K_TILE_VECTORS: u32 = K_TILE as u32 / 8;

/// Returns the pairs of vectors that a unit copies to shared memory in a round.
const fn copied(plan: Mma) -> u32 {
    if plan.shares_input() {
        plan.tile_m() * plan.k_planes() * K_TILE_VECTORS / 2 / UNITS
    } else {
        0
    }
}

/// Position of a lane, and the rows it works on.
#[derive(CubeType, Clone, Copy)]
struct Lane {
    /// Number of its plane.
    plane: u32,
    /// Number of its quad: the row it has of each eight.
    quad: u32,
    /// Number in its quad: the part it has of a row.
    part: u32,
    /// First row of the input of its cube.
    cube_input: u32,
    /// First packed row of its cube.
    cube_row: u32,
    /// First row of the input of its plane, counted in its cube.
    plane_input: u32,
    /// First row of the input of its plane, plus `quad`.
    input: u32,
    /// First packed row of its plane, plus `quad`.
    row: u32,
    /// Number of its plane among the planes that divide k.
    k_plane: u32,
}

/// Returns the position of this unit.
#[cube]
fn lane(m: u32, #[comptime] plan: Mma) -> Lane {
    let Mma { n_tiles, m_tiles, n_planes, m_planes, .. } = comptime!(plan);
    let plane = UNIT_POS / 32;
    let (quad, part) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let groups = m.div_ceil(comptime!(plan.tile_m()));
    let cube_input = CUBE_POS as u32 % groups * comptime!(plan.tile_m());
    let cube_row = CUBE_POS as u32 / groups * comptime!(plan.tile_n());
    let plane_row = plane % n_planes * comptime!(16 * n_tiles);
    let plane_input = plane / n_planes % m_planes * comptime!(8 * m_tiles);
    Lane {
        plane,
        quad,
        part,
        cube_input,
        cube_row,
        plane_input,
        input: cube_input + plane_input + quad,
        row: cube_row + plane_row + quad,
        k_plane: plane / comptime!(n_planes * m_planes),
    }
}

/// Registers that a unit loads for a round.
#[derive(CubeType)]
struct RoundRegisters<W: Size, X: Size> {
    /// Four words of codes, for two rows of every tile.
    words: Array<Vector<u32, W>>,
    /// The scales of their blocks, in a word.
    scales: Array<u32>,
    /// The part of the input that the unit copies to shared memory, or multiplies itself.
    copies: Array<Vector<u32, X>>,
}

/// Loads a round from device memory. K tiles beyond the last repeat it.
#[cube]
fn load_round<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    round: u32,
    loaded: &mut RoundRegisters<W, X>,
    lane: &Lane,
    #[comptime] plan: Mma,
) {
    let dims = &operands.dims;
    let last = dims.k_tiles - 1;
    let k_planes = comptime!(plan.k_planes());
    let k_tile = min(round * k_planes + lane.k_plane, last);
    #[unroll]
    for tile in 0..comptime!(2 * plan.n_tiles) {
        let row = min(lane.row + tile * 8, dims.n - 1);
        let at = (row * dims.k_tiles + k_tile) * 4 + lane.part;
        loaded.words[tile as usize] = operands.weight.codes[at as usize];
        loaded.scales[tile as usize] = u32::cast_from(operands.weight.scales[at as usize]);
    }
    if comptime!(plan.takes_input()) {
        let row = min(lane.input, dims.m - 1);
        let from = (row * dims.k_tiles + k_tile) * K_TILE_VECTORS + lane.part * 4;
        #[unroll]
        for index in 0..4u32 {
            loaded.copies[index as usize] = operands.input[(from + index) as usize];
        }
    }
    if comptime!(plan.shares_input()) {
        let pairs = comptime!(K_TILE_VECTORS / 2);
        #[unroll]
        for copy in 0..comptime!(copied(plan)) {
            let at = UNIT_POS + comptime!(copy * UNITS);
            let row = at / pairs % comptime!(plan.tile_m());
            let row = min(lane.cube_input + row, dims.m - 1);
            let k_tile = min(round * k_planes + at / comptime!(pairs * plan.tile_m()), last);
            // The pairs of four lanes, the first half of each lane first.
            let pair = at % 4 * 2 + at / 4 % 2;
            let from = (row * dims.k_tiles + k_tile) * K_TILE_VECTORS + pair * 2;
            loaded.copies[comptime!((2 * copy) as usize)] = operands.input[from as usize];
            loaded.copies[comptime!((2 * copy + 1) as usize)] = operands.input[(from + 1) as usize];
        }
    }
}

/// Runs the main loop at the head of this file. The next round is loaded while one is computed.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn mma_kernel<I: MmaInstructions, F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    output: &mut [F],
    #[comptime] plan: Mma,
) {
    let blueprint = comptime!(operands.blueprint);
    let Mma { n_tiles, m_tiles, .. } = comptime!(plan);
    let lane = lane(operands.dims.m, plan);

    let mut sums = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..comptime!(n_tiles * m_tiles) {
        let mut zeros = Array::<Vector<f32, Pair>>::new(2usize);
        zeros[0] = Vector::new(0.0f32);
        zeros[1] = Vector::new(0.0f32);
        sums.push(zeros);
    }

    // Double buffer of the input that planes share: this round and the next.
    let half = comptime!((2 * copied(plan) * UNITS).max(1));
    let mut shared = Shared::<[Vector<u32, X>]>::new_slice(comptime!(2 * half as usize));
    let mut scratch = Shared::<[f32]>::new_slice(comptime!(plan.scratch.max(1) as usize));

    let takes_input = comptime!(plan.takes_input());
    let length = comptime!(if takes_input { 4 } else { (2 * copied(plan)).max(1) });
    let mut loaded = RoundRegisters::<W, X> {
        words: Array::<Vector<u32, W>>::new(comptime!((2 * n_tiles) as usize)),
        scales: Array::<u32>::new(comptime!((2 * n_tiles) as usize)),
        copies: Array::<Vector<u32, X>>::new(comptime!(length as usize)),
    };
    load_round::<F, S, W, X>(operands, 0u32.runtime(), &mut loaded, &lane, plan);

    let rounds = operands.dims.k_tiles.div_ceil(comptime!(plan.k_planes()));
    let mut round = 0u32.runtime();
    while round < rounds {
        let buffer = (round & 1u32) * half;
        let k_tile = round * comptime!(plan.k_planes()) + lane.k_plane;
        let source = InputPosition { buffer, k_tile };
        // The input of this plane, if it keeps it in registers.
        let mut taken = Array::<Vector<u32, X>>::new(4usize);
        if comptime!(takes_input) {
            #[unroll]
            for index in 0..4u32 {
                taken[index as usize] = loaded.copies[index as usize];
            }
        }
        let mut words = Array::<Vector<u32, W>>::new(comptime!((2 * n_tiles) as usize));
        let mut factors = Array::<Vector<F, Pair>>::new(comptime!((4 * n_tiles) as usize));
        #[unroll]
        for row in 0..comptime!(2 * n_tiles) {
            words[row as usize] = loaded.words[row as usize];
            decode_scales::<F, Pair>(&mut factors, row, loaded.scales[row as usize], blueprint);
        }
        share_input::<X>(&mut shared, buffer, &loaded.copies, plan);
        load_round::<F, S, W, X>(operands, round + 1, &mut loaded, &lane, plan);
        if comptime!(plan.shares_input()) {
            sync_cube();
        }
        if k_tile < operands.dims.k_tiles {
            #[unroll]
            for block in 0..2u32 {
                let tiling = comptime!(BlockTiling::new(plan, block));
                let mut weights = Sequence::<Array<Vector<F, Pair>>>::new();
                let mut values =
                    Array::<Vector<u32, X>>::new(comptime!((4 * tiling.tiles_per_group) as usize));
                // The next tiles of the input are read while some are multiplied.
                #[unroll]
                for group in 0..comptime!(tiling.groups + 1) {
                    if comptime!(group < tiling.groups) {
                        #[unroll]
                        for tile in 0..tiling.tiles_per_group {
                            read_tile::<F, S, W, X>(
                                operands,
                                &shared,
                                &taken,
                                &mut values,
                                &lane,
                                &source,
                                comptime!(group * tiling.tiles_per_group + tile),
                                tiling,
                            );
                        }
                    }
                    if comptime!(group == 0) {
                        decode_weights::<I, F, W>(
                            &words,
                            &factors,
                            &mut weights,
                            blueprint,
                            tiling,
                        );
                    } else {
                        multiply_tiles::<I, F, X>(
                            &weights,
                            &values,
                            &mut sums,
                            &mut scratch,
                            comptime!(group - 1),
                            tiling,
                        );
                    }
                }
            }
        }
        round += 1u32;
    }
    store_sums::<F, S, W, X>(operands, output, &sums, &lane, plan);
}

/// A block of a k tile, and the grouping of the tiles of the input that are multiplied with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct BlockTiling {
    plan: Mma,
    block: u32,
    /// Tiles of the input in a group: 2 if there is only one tile of packed rows, so that two
    /// independent instructions are in flight.
    tiles_per_group: u32,
    /// Number of groups.
    groups: u32,
}

impl BlockTiling {
    const fn new(plan: Mma, block: u32) -> Self {
        let tiles_per_group = if plan.m_tiles > 1 && plan.n_tiles == 1 { 2 } else { 1 };
        Self { plan, block, tiles_per_group, groups: plan.m_tiles / tiles_per_group }
    }

    /// Returns where the two vectors of a tile are kept: two groups alternate.
    const fn slot(&self, tile: u32) -> u32 {
        tile / self.tiles_per_group % 2 * 2 * self.tiles_per_group
            + 2 * (tile % self.tiles_per_group)
    }
}

/// Stores a unit's copy of the input in shared memory. Odd rows swap the halves of each lane, so
/// that neighbouring rows are in different banks.
#[cube]
fn share_input<X: Size>(
    shared: &mut [Vector<u32, X>],
    buffer: u32,
    copies: &Array<Vector<u32, X>>,
    #[comptime] plan: Mma,
) {
    let pairs = comptime!(K_TILE_VECTORS / 2);
    let (row, half) = (UNIT_POS / pairs, UNIT_POS / 4 % 2);
    let written = row * K_TILE_VECTORS + (half ^ (row % 2)) * 4 + UNIT_POS % 4;
    #[unroll]
    for copy in 0..comptime!(copied(plan)) {
        let at = comptime!(copy * UNITS * 2);
        let first = copies[comptime!((2 * copy) as usize)];
        let second = copies[comptime!((2 * copy + 1) as usize)];
        shared[(buffer + written + at) as usize] = interleave::<X>(first, second, 0u32);
        shared[(buffer + written + at + 8) as usize] = interleave::<X>(first, second, 1u32);
    }
}

/// Position of the input of a k tile.
#[derive(CubeType, Clone, Copy)]
struct InputPosition {
    /// Start of the round's input in shared memory.
    buffer: u32,
    k_tile: u32,
}

/// Reads the two vectors of a tile of the input from shared memory, registers or device memory.
#[cube]
fn read_tile<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    shared: &[Vector<u32, X>],
    taken: &Array<Vector<u32, X>>,
    values: &mut Array<Vector<u32, X>>,
    lane: &Lane,
    source: &InputPosition,
    #[comptime] tile: u32,
    #[comptime] tiling: BlockTiling,
) {
    let plan = comptime!(tiling.plan);
    let to = comptime!(tiling.slot(tile));
    let tile_row = comptime!(tile * 8);
    if comptime!(plan.shares_input()) {
        let row = lane.k_plane * comptime!(plan.tile_m()) + lane.plane_input + lane.quad;
        let (read, odd) = (row * K_TILE_VECTORS + lane.part, lane.quad % 2 * 4);
        let from = if comptime!(tiling.block == 0) {
            source.buffer + read + odd
        } else {
            source.buffer + read + 4 - odd
        };
        #[unroll]
        for half in 0..2u32 {
            let at = from + comptime!(tile_row * K_TILE_VECTORS + half * 8);
            values[comptime!((to + half) as usize)] = shared[at as usize];
        }
    } else {
        let mut loaded = Array::<Vector<u32, X>>::new(2usize);
        let row = lane.cube_input + lane.plane_input + tile_row + lane.quad;
        let row = min(row, operands.dims.m - 1);
        let from = (row * operands.dims.k_tiles + source.k_tile) * K_TILE_VECTORS + lane.part * 4;
        #[unroll]
        for index in 0..2u32 {
            let vector = comptime!(tiling.block * 2 + index);
            loaded[index as usize] = if comptime!(plan.takes_input()) {
                taken[vector as usize]
            } else {
                operands.input[(from + vector) as usize]
            };
        }
        #[unroll]
        for half in 0..2u32 {
            values[comptime!((to + half) as usize)] = interleave::<X>(loaded[0], loaded[1], half);
        }
    }
}

/// Decodes the weight's fragments of every pair and tile of rows: `element x block scale`.
#[cube]
fn decode_weights<I: MmaInstructions, F: Float, W: Size>(
    words: &Array<Vector<u32, W>>,
    factors: &Array<Vector<F, Pair>>,
    weights: &mut Sequence<Array<Vector<F, Pair>>>,
    #[comptime] blueprint: MatmulBlueprint,
    #[comptime] tiling: BlockTiling,
) {
    let rows = comptime!(2 * tiling.plan.n_tiles);
    let mut decoded = Sequence::<Array<Vector<F, Pair>>>::new();
    #[unroll]
    for row in 0..rows {
        #[unroll]
        for word in 0..2u32 {
            let word_of = comptime!((2 * tiling.block + word) as usize);
            let packed = words[row as usize].extract(word_of);
            decoded.push(decode_elements::<I, F, Pair>(packed, blueprint));
        }
    }
    #[unroll]
    for pair in 0..4u32 {
        #[unroll]
        for tile in 0..tiling.plan.n_tiles {
            let mut registers = Array::<Vector<F, Pair>>::new(4usize);
            #[unroll]
            for word in 0..2u32 {
                #[unroll]
                for half in 0..2u32 {
                    let row = comptime!(tile * 2 + half);
                    let pairs = decoded.index(comptime!((2 * row + word) as usize));
                    let factor = factors[comptime!((row * 2 + tiling.block) as usize)];
                    registers[comptime!((2 * word + half) as usize)] =
                        pairs[pair as usize] * factor;
                }
            }
            weights.push(registers);
        }
    }
}

/// Adds the products of every tile of packed rows with a group of tiles of the input to the sums.
#[cube]
fn multiply_tiles<I: MmaInstructions, F: Float, X: Size>(
    weights: &Sequence<Array<Vector<F, Pair>>>,
    values: &Array<Vector<u32, X>>,
    sums: &mut Sequence<Array<Vector<f32, Pair>>>,
    scratch: &mut [f32],
    #[comptime] group: u32,
    #[comptime] tiling: BlockTiling,
) {
    let Mma { n_tiles, m_tiles, .. } = comptime!(tiling.plan);
    #[unroll]
    for pair in 0..4u32 {
        #[unroll]
        for tile in 0..tiling.tiles_per_group {
            let m_tile = comptime!(group * tiling.tiles_per_group + tile);
            let of = values[comptime!((tiling.slot(m_tile) + pair / 2) as usize)];
            let mut registers = Array::<Vector<F, Pair>>::new(2usize);
            #[unroll]
            for word in 0..2u32 {
                let value = of.extract(comptime!((pair % 2 * 2 + word) as usize));
                registers[comptime!(word as usize)] = Vector::<F, Pair>::reinterpret(value);
            }
            #[unroll]
            for n_tile in 0..n_tiles {
                let weight = comptime!((pair * n_tiles + n_tile) as usize);
                let sum = comptime!(n_tile * m_tiles + m_tile);
                let sums = sums.index_mut(comptime!(sum as usize));
                I::multiply::<F>(weights.index(weight), &registers, sums, scratch, 0u32);
            }
        }
    }
}

/// Adds the sums along k and stores them, a tile at a time: 16 packed rows for each of 8 rows of
/// the input, which start in different banks.
#[cube]
fn store_sums<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    output: &mut [F],
    sums: &Sequence<Array<Vector<f32, Pair>>>,
    lane: &Lane,
    #[comptime] plan: Mma,
) {
    let Mma { n_tiles, m_tiles, n_planes, m_planes, .. } = comptime!(plan);
    let stride = 20u32;
    let region = comptime!(8 * stride);
    let count = comptime!(128 * n_planes * m_planes);
    let mut staged = Shared::<[f32]>::new_slice(comptime!((PLANES * region) as usize));
    #[unroll]
    for n_tile in 0..n_tiles {
        #[unroll]
        for tile in 0..m_tiles {
            let own = sums.index(comptime!((n_tile * m_tiles + tile) as usize));
            #[unroll]
            for half in 0..2u32 {
                #[unroll]
                for index in 0..2u32 {
                    let at = lane.plane * region + (lane.part * 2 + index) * stride;
                    let at = at + lane.quad + 8 * half;
                    staged[at as usize] =
                        own[comptime!(half as usize)].extract(comptime!(index as usize));
                }
            }
            sync_cube();
            #[unroll]
            for turn in 0..comptime!(count.div_ceil(UNITS)) {
                let at = UNIT_POS + comptime!(turn * UNITS);
                let (of_plane, in_row, in_input) = (at / 128, at % 16, at / 16 % 8);
                let row = lane.cube_row
                    + of_plane % n_planes * comptime!(16 * n_tiles)
                    + comptime!(n_tile * 16)
                    + in_row;
                let to = lane.cube_input
                    + of_plane / n_planes * comptime!(8 * m_tiles)
                    + comptime!(tile * 8)
                    + in_input;
                if at < count && row < operands.dims.n && to < operands.dims.m {
                    let mut sum = 0.0f32.runtime();
                    #[unroll]
                    for from in 0..comptime!(plan.k_planes()) {
                        let region_of = of_plane + comptime!(from * n_planes * m_planes);
                        sum += staged[(region_of * region + in_input * stride + in_row) as usize];
                    }
                    let shift = comptime!(sum_shift(operands.blueprint.grid()));
                    output[(to * operands.dims.n + row) as usize] =
                        epilogue::<F, S, W, X>(operands, sum * shift, row);
                }
            }
            sync_cube();
        }
    }
}

/// Returns half of two times eight values in the order in which codes are decoded, each with the
/// fourth after it. Pairs of the first eight and of the second alternate, as an instruction takes
/// them.
#[cube]
fn interleave<X: Size>(
    first: Vector<u32, X>,
    second: Vector<u32, X>,
    #[comptime] half: u32,
) -> Vector<u32, X> {
    let mut pairs = Vector::<u32, X>::empty();
    let (at, after) = comptime!((half as usize, half as usize + 2));
    let (low, high) = (first.extract(at), first.extract(after));
    pairs.insert(0usize, (low & 0xFFFFu32) | (high << 16u32));
    pairs.insert(2usize, (low >> 16u32) | (high & 0xFFFF_0000u32));
    let (low, high) = (second.extract(at), second.extract(after));
    pairs.insert(1usize, (low & 0xFFFFu32) | (high << 16u32));
    pairs.insert(3usize, (low >> 16u32) | (high & 0xFFFF_0000u32));
    pairs
}
