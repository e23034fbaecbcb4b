use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::plan::UNITS;
use crate::product::{Mma, PLANES, Product, STEP};
use crate::scale::scale_value;
use crate::share::narrow;
use crate::{Dtype, Packed, Refusal};

/// `input x weight^T + bias` by matrix instructions, the weight decoded in registers: exact products of
/// `element x block scale`, sums in f32, multiplied with the tensor scale, rounded once.
///
/// As [`gemv`](crate::gemv()), for f16 and bf16.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn mma(
    client: &Client,
    weight: Packed,
    input: Handle,
    bias: Option<Handle>,
    product: &Product,
    plan: Mma,
) -> Result<Handle, Refusal> {
    product.check()?;
    let launch = match product.dtype {
        Dtype::Bf16 => launch::<bf16>,
        Dtype::F16 | Dtype::F32 => launch::<f16>,
    };
    Ok(launch(client, weight, input, bias, product, plan))
}

fn launch<F: Float>(
    client: &Client,
    weight: Packed,
    input: Handle,
    bias: Option<Handle>,
    product: &Product,
    plan: Mma,
) -> Handle {
    let Product { inputs, outputs, channels, block_size, format, dtype, .. } = *product;
    let output = client.empty(inputs * outputs * dtype.size());
    if inputs * outputs == 0 {
        return output;
    }
    let method = MmaMethod {
        block_size: block_size as u32,
        format,
        dtype,
        by_row: weight.tensor_scales > 1,
        bias: bias.is_some(),
        plan,
    };
    let weight_values = outputs * channels;
    // SAFETY: the lengths are those of the product; rows beyond the last repeat it and are not stored.
    unsafe {
        mma_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            4,
            4,
            BufferArg::from_raw_parts(weight.codes, weight_values / 32),
            BufferArg::from_raw_parts(weight.scales, weight_values / block_size),
            BufferArg::from_raw_parts(weight.tensor_scale, weight.tensor_scales),
            BufferArg::from_raw_parts(input.clone(), inputs * channels / 8),
            // Where there is none, something that is not read.
            match bias {
                Some(bias) => BufferArg::from_raw_parts(bias, outputs),
                None => BufferArg::from_raw_parts(input, inputs * channels),
            },
            BufferArg::from_raw_parts(output.clone(), inputs * outputs),
            MmaExtentLaunch::new(inputs as u32, outputs as u32, (channels / STEP) as u32),
            method,
        );
    }
    output
}

/// Lengths of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct MmaExtent {
    inputs: u32,
    outputs: u32,
    /// Steps along the contracted axis.
    steps: u32,
}

/// What the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MmaMethod {
    block_size: u32,
    format: Fp4Format,
    dtype: Dtype,
    by_row: bool,
    bias: bool,
    plan: Mma,
}

/// The planes of a cube share the rows of the weight and of the input, and take the steps of the contracted axis in
/// turn. An instruction multiplies 16 rows of the weight with 8 of the input along 16 channels. The order of
/// channels does not matter as long as both operands have the same: each four lanes that share a row take 32
/// neighbouring channels each, so that a lane loads 16 bytes of codes at once.
#[cube(launch_unchecked)]
fn mma_kernel<F: Float, W: Size, X: Size>(
    codes: &[Vector<u32, W>],
    scales: &[u8],
    tensor_scale: &[u32],
    input: &[Vector<u32, X>],
    bias: &[F],
    output: &mut [F],
    extent: MmaExtent,
    #[comptime] method: MmaMethod,
) {
    let Mma { row_tiles, input_tiles, .. } = comptime!(method.plan);
    let lane = UNIT_POS % 32;
    let plane = UNIT_POS / 32;
    let (quad, part) = (lane / 4, lane % 4);
    let groups = extent.inputs.div_ceil(8 * input_tiles);
    let first_input = CUBE_POS as u32 % groups * 8 * input_tiles;
    let first_row = CUBE_POS as u32 / groups * 16 * row_tiles;

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

    let row_vectors = extent.steps * 4;
    let input_vectors = extent.steps * 16;
    let row_blocks = extent.steps * comptime!(STEP as u32 / method.block_size);
    let mut step = plane;
    while step < extent.steps {
        // A vector of four words for each of two rows of every tile, and the scales of its two halves.
        let mut loaded = Array::<Vector<u32, W>>::new(comptime!((2 * row_tiles) as usize));
        let mut factors = Array::<Vector<F, NA>>::new(comptime!((4 * row_tiles) as usize));
        #[unroll]
        for tile in 0..row_tiles {
            #[unroll]
            for half in 0..2u32 {
                let row = min(first_row + tile * 16 + half * 8 + quad, extent.outputs - 1);
                let at = comptime!((tile * 2 + half) as usize);
                loaded[at] = codes[(row * row_vectors + step * 4 + part) as usize];
                let first = row * row_blocks
                    + step * comptime!(STEP as u32 / method.block_size)
                    + part * 32 / method.block_size;
                #[unroll]
                for block in 0..2u32 {
                    let index = first + comptime!(block * 16 / method.block_size);
                    let scale = scale_value(u32::cast_from(scales[index as usize]), method.format);
                    let factor = F::cast_from(scale * comptime!(scale_shift(method)));
                    factors[comptime!((tile * 4 + half * 2 + block) as usize)] =
                        Vector::new(factor);
                }
            }
        }
        // The weight of eight instructions, four registers each.
        let mut weights = Sequence::<Array<Vector<F, NA>>>::new();
        #[unroll]
        for tile in 0..row_tiles {
            #[unroll]
            for block in 0..2u32 {
                #[unroll]
                for pair in 0..4u32 {
                    let mut registers = Array::<Vector<F, NA>>::new(4usize);
                    #[unroll]
                    for word in 0..2u32 {
                        #[unroll]
                        for half in 0..2u32 {
                            let at = comptime!((tile * 2 + half) as usize);
                            let packed = loaded[at].extract(comptime!((2 * block + word) as usize));
                            let factor = factors[comptime!((tile * 4 + half * 2 + block) as usize)];
                            let decoded =
                                decode_pair::<F, NA>(packed << comptime!(12 - 4 * pair), method);
                            registers[comptime!((2 * word + half) as usize)] = decoded * factor;
                        }
                    }
                    weights.push(registers);
                }
            }
        }
        #[unroll]
        for tile in 0..input_tiles {
            let row = min(first_input + tile * 8 + quad, extent.inputs - 1);
            let start = row * input_vectors + step * 16 + part * 4;
            let mut values = Array::<Vector<u32, X>>::new(4usize);
            #[unroll]
            for index in 0..4u32 {
                values[comptime!(index as usize)] = input[(start + index) as usize];
            }
            #[unroll]
            for block in 0..2u32 {
                #[unroll]
                for pair in 0..4u32 {
                    let mut registers = Array::<Vector<F, NB>>::new(2usize);
                    #[unroll]
                    for word in 0..2u32 {
                        let of = values[comptime!((2 * block + word) as usize)];
                        let low = of.extract(comptime!((pair / 2) as usize));
                        let high = of.extract(comptime!((pair / 2 + 2) as usize));
                        let both = if comptime!(pair.is_multiple_of(2)) {
                            (low & 0xFFFFu32) | (high << 16u32)
                        } else {
                            (low >> 16u32) | (high & 0xFFFF_0000u32)
                        };
                        registers[comptime!(word as usize)] = Vector::<F, NB>::reinterpret(both);
                    }
                    #[unroll]
                    for row_tile in 0..row_tiles {
                        let weight = comptime!((row_tile * 8 + block * 4 + pair) as usize);
                        let sum = comptime!((row_tile * input_tiles + tile) as usize);
                        definition.execute_inplace(
                            weights.index(weight),
                            &registers,
                            sums.index_mut(sum),
                        );
                    }
                }
            }
        }
        step += PLANES;
    }

    // The sums of all planes, a tile at a time.
    let mut staged = Shared::<[f32]>::new_slice(comptime!((PLANES * 128) as usize));
    #[unroll]
    for row_tile in 0..row_tiles {
        #[unroll]
        for tile in 0..input_tiles {
            let own = sums.index(comptime!((row_tile * input_tiles + tile) as usize));
            #[unroll]
            for half in 0..2u32 {
                #[unroll]
                for index in 0..2u32 {
                    let place = plane * 128 + (quad + 8 * half) * 8 + part * 2 + index;
                    staged[place as usize] =
                        own[comptime!(half as usize)].extract(comptime!(index as usize));
                }
            }
            sync_cube();
            let row = first_row + row_tile * 16 + UNIT_POS / 8;
            let to = first_input + tile * 8 + UNIT_POS % 8;
            if UNIT_POS < 128u32 && row < extent.outputs && to < extent.inputs {
                let mut sum = 0.0f32.runtime();
                for from in 0..PLANES {
                    sum += staged[(from * 128 + UNIT_POS) as usize];
                }
                let factor = if comptime!(method.by_row) { row } else { 0u32.runtime() };
                let tensor = f32::reinterpret(tensor_scale[factor as usize]);
                let mut value = (sum * comptime!(sum_shift(method))) * tensor;
                if comptime!(method.bias) {
                    value += f32::cast_from(bias[row as usize]);
                }
                output[(to * extent.outputs + row) as usize] =
                    narrow::<F>(value, crate::plan::Conversion::Device);
            }
            sync_cube();
        }
    }
}

/// The elements of the codes in bits 12..16 and 28..32 of a word, for bf16 times 2^-126 and for f16 times 2^-14:
/// exponent and mantissa of a code are the lowest exponent bits and the highest mantissa bit, subnormals included.
/// MXFP4, which is bf16 here, is multiplied back.
#[cube]
fn decode_pair<F: Float, N: Size>(word: u32, #[comptime] method: MmaMethod) -> Vector<F, N> {
    let bits = if comptime!(method.dtype == Dtype::Bf16) {
        (word & 0x8000_8000u32) | ((word >> 6u32) & 0x01C0_01C0u32)
    } else {
        (word & 0x8000_8000u32) | ((word >> 3u32) & 0x0E00_0E00u32)
    };
    let decoded = Vector::<F, N>::reinterpret(bits);
    if comptime!(method.format == Fp4Format::MxFp4) {
        decoded * Vector::new(F::cast_from(f32::reinterpret(0x7E80_0000u32)))
    } else {
        decoded
    }
}

/// What block scales are multiplied with, so that times a decoded element they are `element x block scale` times
/// 2^-8, within the range of the dtype.
fn scale_shift(method: MmaMethod) -> f32 {
    match (method.format, method.dtype) {
        (Fp4Format::MxFp4, _) => 1.0,
        (Fp4Format::NvFp4, Dtype::Bf16) => 2f32.powi(118),
        (Fp4Format::NvFp4, _) => 2f32.powi(6),
    }
}

/// What the sums are multiplied with in return.
fn sum_shift(method: MmaMethod) -> f32 {
    match method.format {
        Fp4Format::MxFp4 => 1.0,
        Fp4Format::NvFp4 => 2f32.powi(8),
    }
}
