use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::element::decode_pair;
use crate::plan::UNITS;
use crate::product::{
    Mma, PLANES, Product, ProductExtent, ProductExtentLaunch, ProductMethod, STEP, finish,
};
use crate::scale::scale_value;
use crate::{Capability, Dtype, Packed, Refusal};

/// `input x weight^T + bias` by matrix instructions, the weight decoded in registers: exact products of
/// `element x block scale`, sums in f32, multiplied with the tensor scale, rounded once.
///
/// As [`gemv`](crate::gemv()), for f16 and bf16.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn mma(
    client: &Client,
    device: &Capability,
    weight: Packed,
    input: Handle,
    bias: Option<Handle>,
    product: &Product,
) -> Result<Handle, Refusal> {
    let plan = product.mma(device)?;
    // The scales that a lane needs of a packed row are loaded as one word. There is no plan for f32.
    let launch = match (product.dtype, product.block_size) {
        (Dtype::Bf16, 16) => launch::<bf16, u16>,
        (Dtype::Bf16, _) => launch::<bf16, u8>,
        (Dtype::F16 | Dtype::F32, 16) => launch::<f16, u16>,
        (Dtype::F16 | Dtype::F32, _) => launch::<f16, u8>,
    };
    let method = ProductMethod::new(product, device, &weight, bias.is_some());
    Ok(launch(client, weight, input, bias, product, method, plan))
}

fn launch<F: Float, S: Int>(
    client: &Client,
    weight: Packed,
    input: Handle,
    bias: Option<Handle>,
    product: &Product,
    method: ProductMethod,
    plan: Mma,
) -> Handle {
    let Product { inputs, outputs, channels, dtype, .. } = *product;
    let output = client.empty(inputs * outputs * dtype.size());
    if inputs * outputs == 0 {
        return output;
    }
    let weight_values = outputs * channels;
    // SAFETY: the lengths are those of the product; rows beyond the last repeat it and are not stored.
    unsafe {
        mma_kernel::launch_unchecked::<F, S>(
            client,
            CubeCount::Static(plan.cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            4,
            4,
            BufferArg::from_raw_parts(weight.codes, weight_values / 32),
            BufferArg::from_raw_parts(weight.scales, weight_values / 32),
            BufferArg::from_raw_parts(weight.tensor_scale, weight.tensor_scales),
            BufferArg::from_raw_parts(input.clone(), inputs * channels / 8),
            // Where there is none, something that is not read.
            match bias {
                Some(bias) => BufferArg::from_raw_parts(bias, outputs),
                None => BufferArg::from_raw_parts(input, inputs * channels),
            },
            BufferArg::from_raw_parts(output.clone(), inputs * outputs),
            ProductExtentLaunch::new(inputs as u32, outputs as u32, (channels / STEP) as u32),
            method,
            plan,
        );
    }
    output
}

/// Vectors of eight values of the input in a step.
const STEP_VECTORS: u32 = STEP as u32 / 8;

/// Pairs of these that a unit copies to shared memory at a time.
const fn copied(plan: Mma) -> u32 {
    plan.inputs() * plan.depth() * STEP_VECTORS / 2 / UNITS
}

/// Where the rows of a lane are.
#[derive(CubeType, Clone, Copy)]
struct Lane {
    /// The first row of the input of its cube.
    cube_input: u32,
    /// The first row of the input of its plane, plus its place among eight.
    input: u32,
    /// The first packed row of its plane, plus its place among eight.
    row: u32,
    /// Its place among the four lanes that share a row.
    part: u32,
    /// The place of its plane among those that divide the contracted axis.
    depth: u32,
}

/// Loads what a round needs from device memory: of two rows of every tile four words of codes and the scales of
/// their halves, and the part of the input that the unit copies, or takes itself. Steps beyond the last are loaded from
/// the last.
#[cube]
fn load_round<S: Int, W: Size, X: Size>(
    round: u32,
    codes: &[Vector<u32, W>],
    scales: &[S],
    input: &[Vector<u32, X>],
    words: &mut Array<Vector<u32, W>>,
    scale_words: &mut Array<u32>,
    copies: &mut Array<Vector<u32, X>>,
    lane: &Lane,
    extent: &ProductExtent,
    #[comptime] plan: Mma,
) {
    let last = extent.chunks - 1;
    let depth = comptime!(plan.depth());
    let step = min(round * depth + lane.depth, last);
    #[unroll]
    for tile in 0..comptime!(2 * plan.row_tiles) {
        let row = min(lane.row + tile * 8, extent.outputs - 1);
        let at = (row * extent.chunks + step) * 4 + lane.part;
        words[tile as usize] = codes[at as usize];
        scale_words[tile as usize] = u32::cast_from(scales[at as usize]);
    }
    if comptime!(plan.takes_input()) {
        let row = min(lane.input, extent.inputs - 1);
        let from = (row * extent.chunks + step) * STEP_VECTORS + lane.part * 4;
        #[unroll]
        for index in 0..4u32 {
            copies[index as usize] = input[(from + index) as usize];
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
            copies[comptime!((2 * copy) as usize)] = input[from as usize];
            copies[comptime!((2 * copy + 1) as usize)] = input[(from + 1) as usize];
        }
    }
}

/// An instruction multiplies 16 rows of the weight with 8 of the input along 16 channels. The order of channels does
/// not matter as long as both operands have the same: each four lanes that share a row take 32 neighbouring channels
/// each, so that a lane loads 16 bytes of codes at once. What a round needs from device memory is loaded while the
/// one before is computed.
#[cube(launch_unchecked)]
fn mma_kernel<F: Float, S: Int, W: Size, X: Size>(
    codes: &[Vector<u32, W>],
    scales: &[S],
    tensor_scale: &[u32],
    input: &[Vector<u32, X>],
    bias: &[F],
    output: &mut [F],
    extent: ProductExtent,
    #[comptime] method: ProductMethod,
    #[comptime] plan: Mma,
) {
    let Mma { row_tiles, input_tiles, row_planes, input_planes, .. } = comptime!(plan);
    let depth = comptime!(plan.depth());
    let plane = UNIT_POS / 32;
    let (quad, part) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let groups = extent.inputs.div_ceil(comptime!(plan.inputs()));
    let cube_input = CUBE_POS as u32 % groups * comptime!(plan.inputs());
    let cube_row = CUBE_POS as u32 / groups * comptime!(plan.rows());
    let plane_row = plane % row_planes * comptime!(16 * row_tiles);
    let plane_input = plane / row_planes % input_planes * comptime!(8 * input_tiles);
    let plane_depth = plane / comptime!(row_planes * input_planes);
    let lane = Lane {
        cube_input,
        input: cube_input + plane_input + quad,
        row: cube_row + plane_row + quad,
        part,
        depth: plane_depth,
    };

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
    let copied = comptime!(if plan.shares_input() { copied(plan) } else { 0 });
    let half = comptime!((2 * copied * UNITS).max(1));
    let mut shared = Shared::<[Vector<u32, X>]>::new_slice(comptime!(2 * half as usize));
    // Odd rows of the input exchange the vectors of their lanes' halves, so that neighbouring rows are in other banks.
    let pairs = comptime!(STEP_VECTORS / 2);
    let (copied_row, copied_half) = (UNIT_POS / pairs, UNIT_POS / 4 % 2);
    let written = copied_row * STEP_VECTORS + (copied_half ^ (copied_row % 2)) * 4 + UNIT_POS % 4;
    let row = plane_depth * comptime!(plan.inputs()) + plane_input + quad;
    let (read, odd) = (row * STEP_VECTORS + part, quad % 2 * 4);

    let mut words = Array::<Vector<u32, W>>::new(comptime!((2 * row_tiles) as usize));
    let mut scale_words = Array::<u32>::new(comptime!((2 * row_tiles) as usize));
    let takes_input = comptime!(plan.takes_input());
    let length = comptime!(if takes_input { 4 } else { (2 * copied).max(1) });
    let mut copies = Array::<Vector<u32, X>>::new(comptime!(length as usize));
    load_round::<S, W, X>(
        0u32.runtime(),
        codes,
        scales,
        input,
        &mut words,
        &mut scale_words,
        &mut copies,
        &lane,
        &extent,
        plan,
    );

    let rounds = extent.chunks.div_ceil(depth);
    let mut round = 0u32.runtime();
    while round < rounds {
        let buffer = (round & 1u32) * half;
        let step = round * depth + plane_depth;
        // What the plane takes of the input.
        let mut taken = Array::<Vector<u32, X>>::new(4usize);
        if comptime!(takes_input) {
            #[unroll]
            for index in 0..4u32 {
                taken[index as usize] = copies[index as usize];
            }
        }
        let mut now = Array::<Vector<u32, W>>::new(comptime!((2 * row_tiles) as usize));
        let mut factors = Array::<Vector<F, NA>>::new(comptime!((4 * row_tiles) as usize));
        #[unroll]
        for row in 0..comptime!(2 * row_tiles) {
            now[row as usize] = words[row as usize];
            if comptime!(method.format == Fp4Format::NvFp4 && method.block_size == 16) {
                let pair = e4m3_pair::<F, NA>(scale_words[row as usize], method);
                factors[comptime!((row * 2) as usize)] = Vector::new(pair.extract(0usize));
                factors[comptime!((row * 2 + 1) as usize)] = Vector::new(pair.extract(1usize));
            } else {
                #[unroll]
                for block in 0..2u32 {
                    let shift = comptime!(block * 16 / method.block_size * 8);
                    let code = (scale_words[row as usize] >> shift) & 0xFFu32;
                    let scale = scale_value(code, method.format);
                    let factor = F::cast_from(scale * comptime!(scale_shift(method)));
                    factors[comptime!((row * 2 + block) as usize)] = Vector::new(factor);
                }
            }
        }
        #[unroll]
        for copy in 0..copied {
            let at = comptime!(copy * UNITS * 2);
            let first = copies[comptime!((2 * copy) as usize)];
            let second = copies[comptime!((2 * copy + 1) as usize)];
            shared[(buffer + written + at) as usize] = interleave::<X>(first, second, 0u32);
            shared[(buffer + written + at + 8) as usize] = interleave::<X>(first, second, 1u32);
        }
        load_round::<S, W, X>(
            round + 1,
            codes,
            scales,
            input,
            &mut words,
            &mut scale_words,
            &mut copies,
            &lane,
            &extent,
            plan,
        );
        if comptime!(plan.shares_input()) {
            sync_cube();
        }
        if step < extent.chunks {
            #[unroll]
            for block in 0..2u32 {
                let mut weights = Sequence::<Array<Vector<F, NA>>>::new();
                // Two instructions that do not wait for each other: two tiles of the input, unless there are two of
                // rows. While they are multiplied, the next are read.
                let both = comptime!(if input_tiles > 1 && row_tiles == 1 { 2u32 } else { 1u32 });
                let groups = comptime!(input_tiles / both);
                let mut values = Array::<Vector<u32, X>>::new(comptime!((4 * both) as usize));
                #[unroll]
                for group in 0..comptime!(groups + 1) {
                    if comptime!(group < groups) {
                        #[unroll]
                        for tile in 0..both {
                            let to = comptime!(group % 2 * 2 * both + 2 * tile);
                            let tile_row = comptime!((group * both + tile) * 8);
                            if comptime!(plan.shares_input()) {
                                let lane = if comptime!(block == 0) {
                                    buffer + read + odd
                                } else {
                                    buffer + read + 4 - odd
                                };
                                #[unroll]
                                for half in 0..2u32 {
                                    let at = lane + comptime!(tile_row * STEP_VECTORS + half * 8);
                                    values[comptime!((to + half) as usize)] = shared[at as usize];
                                }
                            } else {
                                let mut loaded = Array::<Vector<u32, X>>::new(2usize);
                                let row = cube_input + plane_input + tile_row + quad;
                                let row = min(row, extent.inputs - 1);
                                let from = (row * extent.chunks + step) * STEP_VECTORS + part * 4;
                                #[unroll]
                                for index in 0..2u32 {
                                    let vector = comptime!(block * 2 + index);
                                    loaded[index as usize] = if comptime!(takes_input) {
                                        taken[vector as usize]
                                    } else {
                                        input[(from + vector) as usize]
                                    };
                                }
                                #[unroll]
                                for half in 0..2u32 {
                                    values[comptime!((to + half) as usize)] =
                                        interleave::<X>(loaded[0], loaded[1], half);
                                }
                            }
                        }
                    }
                    if comptime!(group == 0) {
                        #[unroll]
                        for pair in 0..4u32 {
                            #[unroll]
                            for tile in 0..row_tiles {
                                let mut registers = Array::<Vector<F, NA>>::new(4usize);
                                #[unroll]
                                for word in 0..2u32 {
                                    #[unroll]
                                    for half in 0..2u32 {
                                        let row = comptime!((tile * 2 + half) as usize);
                                        let word_of = comptime!((2 * block + word) as usize);
                                        let decoded = elements::<F, NA>(
                                            now[row].extract(word_of) << comptime!(12 - 4 * pair),
                                            method,
                                        );
                                        let factor = factors[comptime!(row * 2 + block as usize)];
                                        registers[comptime!((2 * word + half) as usize)] =
                                            decoded * factor;
                                    }
                                }
                                weights.push(registers);
                            }
                        }
                    } else {
                        #[unroll]
                        for pair in 0..4u32 {
                            #[unroll]
                            for tile in 0..both {
                                let from =
                                    comptime!((group - 1) % 2 * 2 * both + 2 * tile + pair / 2);
                                let of = values[from as usize];
                                let mut registers = Array::<Vector<F, NB>>::new(2usize);
                                #[unroll]
                                for word in 0..2u32 {
                                    let value =
                                        of.extract(comptime!((pair % 2 * 2 + word) as usize));
                                    registers[comptime!(word as usize)] =
                                        Vector::<F, NB>::reinterpret(value);
                                }
                                #[unroll]
                                for row_tile in 0..row_tiles {
                                    let weight = comptime!((pair * row_tiles + row_tile) as usize);
                                    let input_tile = comptime!((group - 1) * both + tile);
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
                }
            }
        }
        round += 1u32;
    }

    // The sums of all planes, a tile at a time: 16 rows for each of 8 inputs, which are in other banks.
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
                    let place = plane * region + (part * 2 + index) * stride + quad + 8 * half;
                    staged[place as usize] =
                        own[comptime!(half as usize)].extract(comptime!(index as usize));
                }
            }
            sync_cube();
            #[unroll]
            for turn in 0..comptime!(outputs.div_ceil(UNITS)) {
                let at = UNIT_POS + comptime!(turn * UNITS);
                let (of_plane, in_row, in_input) = (at / 128, at % 16, at / 16 % 8);
                let row = cube_row
                    + of_plane % row_planes * comptime!(16 * row_tiles)
                    + comptime!(row_tile * 16)
                    + in_row;
                let to = cube_input
                    + of_plane / row_planes * comptime!(8 * input_tiles)
                    + comptime!(tile * 8)
                    + in_input;
                if at < outputs && row < extent.outputs && to < extent.inputs {
                    let mut sum = 0.0f32.runtime();
                    #[unroll]
                    for from in 0..depth {
                        let region_of = of_plane + comptime!(from * row_planes * input_planes);
                        sum += staged[(region_of * region + in_input * stride + in_row) as usize];
                    }
                    output[(to * extent.outputs + row) as usize] = finish::<F>(
                        sum * comptime!(sum_shift(method)),
                        row,
                        tensor_scale,
                        bias,
                        method,
                    );
                }
            }
            sync_cube();
        }
    }
}

/// Half of two times eight values in the order in which codes are decoded, each with the fourth after it: those of the
/// first eight and of the second in turn, as an instruction takes them.
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

/// Elements as [`decode_pair`] leaves them; those of MXFP4, which is bf16 here, as they are.
#[cube]
fn elements<F: Float, N: Size>(word: u32, #[comptime] method: ProductMethod) -> Vector<F, N> {
    let decoded = decode_pair::<F, N>(word, comptime!(method.dtype));
    if comptime!(method.format == Fp4Format::MxFp4) {
        decoded * Vector::new(F::cast_from(f32::reinterpret(0x7E80_0000u32)))
    } else {
        decoded
    }
}

/// The block scales of two non-negative E4M3 codes, the second in the upper byte of a word, times [`scale_shift`].
#[cube]
fn e4m3_pair<F: Float, N: Size>(codes: u32, #[comptime] method: ProductMethod) -> Vector<F, N> {
    let codes = (codes & 0x7Fu32) | ((codes & 0x7F00u32) << 8u32);
    // Of a code that is NaN, the only one that this sets a bit of.
    let nan = (codes + 0x0001_0001u32) & 0x0080_0080u32;
    // Exponent and mantissa bits make a float that is too small by a power of two, subnormals included; those of NaN
    // fill up all of its exponent.
    if comptime!(method.dtype == Dtype::Bf16) {
        let tiny = Vector::<F, N>::reinterpret((codes << 4u32) + nan * 0xF0u32);
        // 2^238, of which a bf16 holds no more than half the exponent.
        let shift = Vector::new(F::cast_from(comptime!(2f32.powi(120))));
        tiny * shift * Vector::new(F::cast_from(comptime!(scale_shift(method))))
    } else {
        let tiny = Vector::<F, N>::reinterpret((codes << 7u32) + nan * 0x80u32);
        tiny * Vector::new(F::cast_from(comptime!(2f32.powi(8) * scale_shift(method))))
    }
}

/// What block scales are multiplied with, so that times a decoded element they are `element x block scale` times
/// 2^-8, within the range of the dtype.
fn scale_shift(method: ProductMethod) -> f32 {
    match (method.format, method.dtype) {
        (Fp4Format::MxFp4, _) => 1.0,
        (Fp4Format::NvFp4, Dtype::Bf16) => 2f32.powi(118),
        (Fp4Format::NvFp4, _) => 2f32.powi(6),
    }
}

/// What the sums are multiplied with in return.
fn sum_shift(method: ProductMethod) -> f32 {
    match method.format {
        Fp4Format::MxFp4 => 1.0,
        Fp4Format::NvFp4 => 2f32.powi(8),
    }
}
