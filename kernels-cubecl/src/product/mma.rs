//! A product by matrix instructions, straight from the codes.
//!
//! An instruction multiplies 16 packed rows of the weight with 8 rows of the input along 16
//! channels. The 32 lanes of a plane hold these matrices in registers, `lane = 4 x quad + part`:
//!
//! ```text
//! A, the weight: 16 rows x 16 channels      B, the input: 8 rows      C, the sums: 16 x 8
//!            2 part  2 part + 8                       quad                  2 part, 2 part + 1
//! quad      | word 0 | word 1 |             2 part   | word 0 |    quad     | half 0 |
//! quad + 8  | word 0 | word 1 |             .. + 8   | word 1 |    quad + 8 | half 1 |
//!  (half)     2 values a word                          2 values               2 sums
//! ```
//!
//! The order of the channels does not matter as long as A and B have the same. So the four lanes of
//! a row take 32 neighbouring channels each, and a lane loads 16 bytes of codes at once:
//!
//! ```text
//! a step: 128 channels of a packed row
//! | part 0: 32 channels      | part 1                   | part 2         | part 3         |
//! | block 0     | block 1    |    a block: 16 channels, two words of eight codes,
//! | word | word | word | word |   eight codes: 4 pairs (p, p + 4), decoded a pair at a time
//! ```
//!
//! Each of the 2 x 4 blocks and pairs of a step is one instruction for every tile. The planes of a
//! cube share its rows of the weight and of the input, and what is left of them divides the steps:
//!
//! ```text
//! cube: 256 units = 8 planes = row_planes x input_planes x depth
//! for round in the steps of the channels, `depth` at a time:
//!     factors = the block scales, decoded                               (decode_scales)
//!     the input goes to shared memory, if planes share it               (share_input)
//!     load codes, scales and input of the next round                    (load_round)
//!     for block in 0..2:                                                (multiply)
//!         weights = codes x factors, in registers                       (decode_weights)
//!         for some tiles of the input: read the next, multiply the last (read_tiles, ..._tiles)
//! add the sums of the planes along the depth, and store them            (store_sums)
//! ```

use cubecl::client::Client;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::finish::{OperandHandles, Operands, ProductRecipe, Widths, finish, operands};
use super::plan::{Mma, PLANES, Product, STEP};
use crate::arith::element::decode_pair;
use crate::arith::scale_grid::{element_shift, product_scale, product_scale_pair, sum_shift};
use crate::plan::UNITS;

/// By `S` the block scales that a lane needs of a packed row are loaded, in one word.
pub(super) fn launch<F: Float, S: Int>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    product: &Product,
    recipe: ProductRecipe,
    plan: Mma,
) {
    let Product { inputs, outputs, .. } = *product;
    let widths = Widths { codes: 32, scales: 32, input: 8, chunk: STEP };
    // SAFETY: the lengths are those of the product; rows beyond the last repeat it and are not
    // stored.
    unsafe {
        mma_kernel::launch_unchecked::<F, S>(
            client,
            CubeCount::Static(plan.cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            4,
            4,
            operands(handles, product, recipe, widths),
            BufferArg::from_raw_parts(output, inputs * outputs),
            plan,
        );
    }
}

/// Vectors of eight values of the input in a step.
const STEP_VECTORS: u32 = STEP as u32 / 8;

/// Pairs of these that a unit copies to shared memory at a time.
const fn copied(plan: Mma) -> u32 {
    if plan.shares_input() { plan.inputs() * plan.depth() * STEP_VECTORS / 2 / UNITS } else { 0 }
}

/// Where a lane is, and the rows it works on.
#[derive(CubeType, Clone, Copy)]
struct Lane {
    /// The number of its plane.
    plane: u32,
    /// Its place among the eight that have rows of their own.
    quad: u32,
    /// Its place among the four that share a row.
    part: u32,
    /// The first row of the input of its cube.
    cube_input: u32,
    /// The first packed row of its cube.
    cube_row: u32,
    /// The first row of the input of its plane, in its cube.
    plane_input: u32,
    /// The first row of the input of its plane, plus its place among eight.
    input: u32,
    /// The first packed row of its plane, plus its place among eight.
    row: u32,
    /// The place of its plane among those that divide the contracted axis.
    depth: u32,
}

/// The lane of this unit.
#[cube]
fn lane(inputs: u32, #[comptime] plan: Mma) -> Lane {
    let Mma { row_tiles, input_tiles, row_planes, input_planes, .. } = comptime!(plan);
    let plane = UNIT_POS / 32;
    let (quad, part) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let groups = inputs.div_ceil(comptime!(plan.inputs()));
    let cube_input = CUBE_POS as u32 % groups * comptime!(plan.inputs());
    let cube_row = CUBE_POS as u32 / groups * comptime!(plan.rows());
    let plane_row = plane % row_planes * comptime!(16 * row_tiles);
    let plane_input = plane / row_planes % input_planes * comptime!(8 * input_tiles);
    Lane {
        plane,
        quad,
        part,
        cube_input,
        cube_row,
        plane_input,
        input: cube_input + plane_input + quad,
        row: cube_row + plane_row + quad,
        depth: plane / comptime!(row_planes * input_planes),
    }
}

/// What a unit has loaded for a round.
#[derive(CubeType)]
struct Loaded<W: Size, X: Size> {
    /// Of two rows of every tile, four words of codes.
    words: Array<Vector<u32, W>>,
    /// And the scales of their blocks, in a word.
    scales: Array<u32>,
    /// The part of the input that the unit copies, or takes itself.
    copies: Array<Vector<u32, X>>,
}

/// Loads what a round needs from device memory. Steps beyond the last are loaded from the last.
#[cube]
fn load_round<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    round: u32,
    loaded: &mut Loaded<W, X>,
    lane: &Lane,
    #[comptime] plan: Mma,
) {
    let extent = &operands.extent;
    let last = extent.chunks - 1;
    let depth = comptime!(plan.depth());
    let step = min(round * depth + lane.depth, last);
    #[unroll]
    for tile in 0..comptime!(2 * plan.row_tiles) {
        let row = min(lane.row + tile * 8, extent.outputs - 1);
        let at = (row * extent.chunks + step) * 4 + lane.part;
        loaded.words[tile as usize] = operands.weight.codes[at as usize];
        loaded.scales[tile as usize] = u32::cast_from(operands.weight.scales[at as usize]);
    }
    if comptime!(plan.takes_input()) {
        let row = min(lane.input, extent.inputs - 1);
        let from = (row * extent.chunks + step) * STEP_VECTORS + lane.part * 4;
        #[unroll]
        for index in 0..4u32 {
            loaded.copies[index as usize] = operands.input[(from + index) as usize];
        }
    }
    if comptime!(plan.shares_input()) {
        let pairs = comptime!(STEP_VECTORS / 2);
        #[unroll]
        for copy in 0..comptime!(copied(plan)) {
            let at = UNIT_POS + comptime!(copy * UNITS);
            let row = at / pairs % comptime!(plan.inputs());
            let row = min(lane.cube_input + row, extent.inputs - 1);
            let step = min(round * depth + at / comptime!(pairs * plan.inputs()), last);
            // The pairs of four lanes, first those of their first halves.
            let pair = at % 4 * 2 + at / 4 % 2;
            let from = (row * extent.chunks + step) * STEP_VECTORS + pair * 2;
            loaded.copies[comptime!((2 * copy) as usize)] = operands.input[from as usize];
            loaded.copies[comptime!((2 * copy + 1) as usize)] = operands.input[(from + 1) as usize];
        }
    }
}

/// See the head of this file. What a round needs from device memory is loaded while the one before
/// is computed.
#[cube(launch_unchecked)]
fn mma_kernel<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    output: &mut [F],
    #[comptime] plan: Mma,
) {
    let recipe = comptime!(operands.recipe);
    let Mma { row_tiles, input_tiles, .. } = comptime!(plan);
    let lane = lane(operands.extent.inputs, plan);

    let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = definition.vector_size(MatrixIdent::A);
    let size!(NB) = definition.vector_size(MatrixIdent::B);
    let size!(NC) = definition.vector_size(MatrixIdent::Accumulator);

    let mut sums = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..comptime!(row_tiles * input_tiles) {
        let mut zeros = Array::<Vector<f32, NC>>::new(2usize);
        zeros[0] = Vector::new(0.0f32);
        zeros[1] = Vector::new(0.0f32);
        sums.push(zeros);
    }

    // What planes share of the input, of this round and of the next.
    let half = comptime!((2 * copied(plan) * UNITS).max(1));
    let mut shared = Shared::<[Vector<u32, X>]>::new_slice(comptime!(2 * half as usize));

    let takes_input = comptime!(plan.takes_input());
    let length = comptime!(if takes_input { 4 } else { (2 * copied(plan)).max(1) });
    let mut loaded = Loaded::<W, X> {
        words: Array::<Vector<u32, W>>::new(comptime!((2 * row_tiles) as usize)),
        scales: Array::<u32>::new(comptime!((2 * row_tiles) as usize)),
        copies: Array::<Vector<u32, X>>::new(comptime!(length as usize)),
    };
    load_round::<F, S, W, X>(operands, 0u32.runtime(), &mut loaded, &lane, plan);

    let rounds = operands.extent.chunks.div_ceil(comptime!(plan.depth()));
    let mut round = 0u32.runtime();
    while round < rounds {
        let buffer = (round & 1u32) * half;
        let step = round * comptime!(plan.depth()) + lane.depth;
        let source = Source { buffer, step };
        // What the plane takes of the input.
        let mut taken = Array::<Vector<u32, X>>::new(4usize);
        if comptime!(takes_input) {
            #[unroll]
            for index in 0..4u32 {
                taken[index as usize] = loaded.copies[index as usize];
            }
        }
        let mut words = Array::<Vector<u32, W>>::new(comptime!((2 * row_tiles) as usize));
        let mut factors = Array::<Vector<F, NA>>::new(comptime!((4 * row_tiles) as usize));
        #[unroll]
        for row in 0..comptime!(2 * row_tiles) {
            words[row as usize] = loaded.words[row as usize];
            decode_scales::<F, NA>(&mut factors, row, loaded.scales[row as usize], recipe);
        }
        share_input::<X>(&mut shared, buffer, &loaded.copies, plan);
        load_round::<F, S, W, X>(operands, round + 1, &mut loaded, &lane, plan);
        if comptime!(plan.shares_input()) {
            sync_cube();
        }
        if step < operands.extent.chunks {
            #[unroll]
            for block in 0..2u32 {
                let part = comptime!(Part::new(plan, block));
                let mut weights = Sequence::<Array<Vector<F, NA>>>::new();
                let mut values = Array::<Vector<u32, X>>::new(comptime!((4 * part.both) as usize));
                // While some tiles of the input are multiplied, the next are read.
                #[unroll]
                for group in 0..comptime!(part.groups + 1) {
                    if comptime!(group < part.groups) {
                        #[unroll]
                        for tile in 0..part.both {
                            read_tile::<F, S, W, X>(
                                operands,
                                &shared,
                                &taken,
                                &mut values,
                                &lane,
                                &source,
                                comptime!(group * part.both + tile),
                                part,
                            );
                        }
                    }
                    if comptime!(group == 0) {
                        decode_weights::<F, W, NA>(&words, &factors, &mut weights, recipe, part);
                    } else {
                        multiply_tiles::<F, X, NA, NB, NC>(
                            &definition,
                            &weights,
                            &values,
                            &mut sums,
                            comptime!(group - 1),
                            part,
                        );
                    }
                }
            }
        }
        round += 1u32;
    }
    store_sums::<F, S, W, X, NC>(operands, output, &sums, &lane, plan);
}

/// A block of a step, and how many tiles of the input are multiplied with it at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Part {
    plan: Mma,
    block: u32,
    /// Two instructions that do not wait for each other: two tiles of the input, unless there are
    /// two of rows.
    both: u32,
    /// How often.
    groups: u32,
}

impl Part {
    const fn new(plan: Mma, block: u32) -> Self {
        let both = if plan.input_tiles > 1 && plan.row_tiles == 1 { 2 } else { 1 };
        Self { plan, block, both, groups: plan.input_tiles / both }
    }

    /// Where the two vectors of a tile of the input are kept: those of two groups in turn.
    const fn place(&self, tile: u32) -> u32 {
        tile / self.both % 2 * 2 * self.both + 2 * (tile % self.both)
    }
}

/// What the codes of a row are multiplied with: the scales of its two blocks.
#[cube]
pub(super) fn decode_scales<F: Float, NA: Size>(
    factors: &mut Array<Vector<F, NA>>,
    #[comptime] row: u32,
    scales: u32,
    #[comptime] recipe: ProductRecipe,
) {
    let grid = comptime!(recipe.grid());
    if comptime!(recipe.block_size == 16) {
        let codes = (scales & 0xFFu32) | ((scales & 0xFF00u32) << 8u32);
        let pair = product_scale_pair::<F, NA>(codes, grid, comptime!(recipe.dtype));
        factors[comptime!((row * 2) as usize)] = Vector::new(pair.extract(0usize));
        factors[comptime!((row * 2 + 1) as usize)] = Vector::new(pair.extract(1usize));
    } else {
        #[unroll]
        for block in 0..2u32 {
            let shift = comptime!(block * 16 / recipe.block_size * 8);
            let code = (scales >> shift) & 0xFFu32;
            let factor = product_scale::<F>(code, grid, comptime!(recipe.dtype));
            factors[comptime!((row * 2 + block) as usize)] = Vector::new(factor);
        }
    }
}

/// Puts what a unit has copied of the input where the planes read it. Odd rows exchange the vectors
/// of their lanes' halves, so that neighbouring rows are in other banks.
#[cube]
fn share_input<X: Size>(
    shared: &mut [Vector<u32, X>],
    buffer: u32,
    copies: &Array<Vector<u32, X>>,
    #[comptime] plan: Mma,
) {
    let pairs = comptime!(STEP_VECTORS / 2);
    let (row, half) = (UNIT_POS / pairs, UNIT_POS / 4 % 2);
    let written = row * STEP_VECTORS + (half ^ (row % 2)) * 4 + UNIT_POS % 4;
    #[unroll]
    for copy in 0..comptime!(copied(plan)) {
        let at = comptime!(copy * UNITS * 2);
        let first = copies[comptime!((2 * copy) as usize)];
        let second = copies[comptime!((2 * copy + 1) as usize)];
        shared[(buffer + written + at) as usize] = interleave::<X>(first, second, 0u32);
        shared[(buffer + written + at + 8) as usize] = interleave::<X>(first, second, 1u32);
    }
}

/// Where the input of a step is read.
#[derive(CubeType, Clone, Copy)]
struct Source {
    /// Where the input of the round begins in shared memory.
    buffer: u32,
    step: u32,
}

/// Reads the two vectors of a tile of the input: from shared memory, from what was loaded ahead, or
/// from device memory.
#[cube]
fn read_tile<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    shared: &[Vector<u32, X>],
    taken: &Array<Vector<u32, X>>,
    values: &mut Array<Vector<u32, X>>,
    lane: &Lane,
    source: &Source,
    #[comptime] tile: u32,
    #[comptime] part: Part,
) {
    let plan = comptime!(part.plan);
    let to = comptime!(part.place(tile));
    let tile_row = comptime!(tile * 8);
    if comptime!(plan.shares_input()) {
        let row = lane.depth * comptime!(plan.inputs()) + lane.plane_input + lane.quad;
        let (read, odd) = (row * STEP_VECTORS + lane.part, lane.quad % 2 * 4);
        let from = if comptime!(part.block == 0) {
            source.buffer + read + odd
        } else {
            source.buffer + read + 4 - odd
        };
        #[unroll]
        for half in 0..2u32 {
            let at = from + comptime!(tile_row * STEP_VECTORS + half * 8);
            values[comptime!((to + half) as usize)] = shared[at as usize];
        }
    } else {
        let mut loaded = Array::<Vector<u32, X>>::new(2usize);
        let row = lane.cube_input + lane.plane_input + tile_row + lane.quad;
        let row = min(row, operands.extent.inputs - 1);
        let from = (row * operands.extent.chunks + source.step) * STEP_VECTORS + lane.part * 4;
        #[unroll]
        for index in 0..2u32 {
            let vector = comptime!(part.block * 2 + index);
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

/// The registers of the weight for every pair and tile of rows: `element x block scale`.
#[cube]
fn decode_weights<F: Float, W: Size, NA: Size>(
    words: &Array<Vector<u32, W>>,
    factors: &Array<Vector<F, NA>>,
    weights: &mut Sequence<Array<Vector<F, NA>>>,
    #[comptime] recipe: ProductRecipe,
    #[comptime] part: Part,
) {
    #[unroll]
    for pair in 0..4u32 {
        #[unroll]
        for tile in 0..part.plan.row_tiles {
            let mut registers = Array::<Vector<F, NA>>::new(4usize);
            #[unroll]
            for word in 0..2u32 {
                #[unroll]
                for half in 0..2u32 {
                    let row = comptime!((tile * 2 + half) as usize);
                    let word_of = comptime!((2 * part.block + word) as usize);
                    let decoded = elements::<F, NA>(
                        words[row].extract(word_of) << comptime!(12 - 4 * pair),
                        recipe,
                    );
                    let factor = factors[comptime!(row * 2 + part.block as usize)];
                    registers[comptime!((2 * word + half) as usize)] = decoded * factor;
                }
            }
            weights.push(registers);
        }
    }
}

/// Adds the products of every tile of rows with a group of tiles of the input to the sums.
#[cube]
fn multiply_tiles<F: Float, X: Size, NA: Size, NB: Size, NC: Size>(
    definition: &MmaDefinition<F, F, f32>,
    weights: &Sequence<Array<Vector<F, NA>>>,
    values: &Array<Vector<u32, X>>,
    sums: &mut Sequence<Array<Vector<f32, NC>>>,
    #[comptime] group: u32,
    #[comptime] part: Part,
) {
    let Mma { row_tiles, input_tiles, .. } = comptime!(part.plan);
    #[unroll]
    for pair in 0..4u32 {
        #[unroll]
        for tile in 0..part.both {
            let input_tile = comptime!(group * part.both + tile);
            let of = values[comptime!((part.place(input_tile) + pair / 2) as usize)];
            let mut registers = Array::<Vector<F, NB>>::new(2usize);
            #[unroll]
            for word in 0..2u32 {
                let value = of.extract(comptime!((pair % 2 * 2 + word) as usize));
                registers[comptime!(word as usize)] = Vector::<F, NB>::reinterpret(value);
            }
            #[unroll]
            for row_tile in 0..row_tiles {
                let weight = comptime!((pair * row_tiles + row_tile) as usize);
                let sum = comptime!(row_tile * input_tiles + input_tile);
                definition.execute_inplace(
                    weights.index(weight),
                    &registers,
                    sums.index_mut(comptime!(sum as usize)),
                );
            }
        }
    }
}

/// Stores the sums of all planes, a tile at a time: 16 rows for each of 8 inputs, which are in
/// other banks. Those of the planes that divide the contracted axis are added up.
#[cube]
fn store_sums<F: Float, S: Int, W: Size, X: Size, NC: Size>(
    operands: &Operands<F, S, W, X>,
    output: &mut [F],
    sums: &Sequence<Array<Vector<f32, NC>>>,
    lane: &Lane,
    #[comptime] plan: Mma,
) {
    let Mma { row_tiles, input_tiles, row_planes, input_planes, .. } = comptime!(plan);
    let stride = 20u32;
    let region = comptime!(8 * stride);
    let outputs = comptime!(128 * row_planes * input_planes);
    let mut staged = Shared::<[f32]>::new_slice(comptime!((PLANES * region) as usize));
    #[unroll]
    for row_tile in 0..row_tiles {
        #[unroll]
        for tile in 0..input_tiles {
            let own = sums.index(comptime!((row_tile * input_tiles + tile) as usize));
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
            for turn in 0..comptime!(outputs.div_ceil(UNITS)) {
                let at = UNIT_POS + comptime!(turn * UNITS);
                let (of_plane, in_row, in_input) = (at / 128, at % 16, at / 16 % 8);
                let row = lane.cube_row
                    + of_plane % row_planes * comptime!(16 * row_tiles)
                    + comptime!(row_tile * 16)
                    + in_row;
                let to = lane.cube_input
                    + of_plane / row_planes * comptime!(8 * input_tiles)
                    + comptime!(tile * 8)
                    + in_input;
                if at < outputs && row < operands.extent.outputs && to < operands.extent.inputs {
                    let mut sum = 0.0f32.runtime();
                    #[unroll]
                    for from in 0..comptime!(plan.depth()) {
                        let region_of = of_plane + comptime!(from * row_planes * input_planes);
                        sum += staged[(region_of * region + in_input * stride + in_row) as usize];
                    }
                    let shift = comptime!(sum_shift(operands.recipe.grid()));
                    output[(to * operands.extent.outputs + row) as usize] =
                        finish::<F, S, W, X>(operands, sum * shift, row);
                }
            }
            sync_cube();
        }
    }
}

/// Half of two times eight values in the order in which codes are decoded, each with the fourth
/// after it: those of the first eight and of the second in turn, as an instruction takes them.
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

/// Elements as [`decode_pair`] leaves them, unless block scales need them as they are.
#[cube]
pub(super) fn elements<F: Float, N: Size>(
    word: u32,
    #[comptime] recipe: ProductRecipe,
) -> Vector<F, N> {
    let decoded = decode_pair::<F, N>(word, comptime!(recipe.dtype));
    match comptime!(element_shift(recipe.grid(), recipe.dtype)) {
        Some(shift) => decoded * Vector::new(F::cast_from(shift)),
        None => decoded,
    }
}
