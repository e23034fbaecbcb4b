use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::element::decode_pair;
use crate::plan::UNITS;
use crate::product::{Gemv, Product, ProductExtent, ProductExtentLaunch, ProductMethod, finish};
use crate::scale::scale_value;
use crate::share::widen;
use crate::{Capability, Dtype, Packed, Refusal};

/// `input x weight^T + bias`, straight from the codes: sums in f32, multiplied with the tensor scale, rounded once.
///
/// The input is `[inputs, channels]`, the bias `[outputs]`, both in the dtype of the product; so is the output
/// `[inputs, outputs]`.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn gemv(
    client: &Client,
    device: &Capability,
    weight: Packed,
    input: Handle,
    bias: Option<Handle>,
    product: &Product,
) -> Result<Handle, Refusal> {
    let plan = product.gemv(device)?;
    let launch = match product.dtype {
        Dtype::F32 => launch::<f32>,
        Dtype::F16 => launch::<f16>,
        Dtype::Bf16 => launch::<bf16>,
    };
    let method = ProductMethod::new(product, device, &weight, bias.is_some());
    Ok(launch(client, weight, input, bias, product, method, plan))
}

fn launch<F: Float>(
    client: &Client,
    weight: Packed,
    input: Handle,
    bias: Option<Handle>,
    product: &Product,
    method: ProductMethod,
    plan: Gemv,
) -> Handle {
    let Product { inputs, outputs, channels, block_size, .. } = *product;
    let size = product.dtype.size();
    let output = client.empty(inputs * outputs * size);
    if inputs * outputs == 0 {
        return output;
    }
    let chunk = 8 * plan.words as usize;
    let weight_values = outputs * channels;
    // SAFETY: the lengths are those of the product; rows beyond the last repeat it and are not stored.
    unsafe {
        gemv_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes[0], plan.cubes[1], 1),
            CubeDim::new_1d(UNITS),
            plan.words as usize,
            plan.share.words() as usize,
            BufferArg::from_raw_parts(weight.codes, weight_values / chunk),
            BufferArg::from_raw_parts(weight.scales, weight_values / block_size),
            BufferArg::from_raw_parts(weight.tensor_scale, weight.tensor_scales),
            BufferArg::from_raw_parts(
                input.clone(),
                inputs * channels / plan.share.vector as usize,
            ),
            // Where there is none, something that is not read.
            match bias {
                Some(bias) => BufferArg::from_raw_parts(bias, outputs),
                None => BufferArg::from_raw_parts(input, inputs * channels),
            },
            BufferArg::from_raw_parts(output.clone(), inputs * outputs),
            ProductExtentLaunch::new(inputs as u32, outputs as u32, (channels / chunk) as u32),
            method,
            plan,
        );
    }
    output
}

#[cube(launch_unchecked)]
fn gemv_kernel<F: Float, W: Size, X: Size>(
    codes: &[Vector<u32, W>],
    scales: &[u8],
    tensor_scale: &[u32],
    input: &[Vector<u32, X>],
    bias: &[F],
    output: &mut [F],
    extent: ProductExtent,
    #[comptime] method: ProductMethod,
    #[comptime] plan: Gemv,
) {
    let Gemv { plane, words, rows, inputs, share, .. } = comptime!(plan);
    let planes = comptime!(UNITS / plane);
    let tiles = extent.inputs.div_ceil(inputs);
    let first_input = CUBE_POS as u32 % tiles * inputs;
    let group = CUBE_POS as u32 / tiles * planes + UNIT_POS / plane;
    let first_row = group * rows;
    let lane = UNIT_POS % plane;

    // Vectors of the input that meet a word of eight codes.
    let vectors = comptime!(8 / share.vector);
    let row_vectors = extent.chunks * comptime!(words * vectors);
    let block_words = comptime!(method.block_size / 8);
    let chunk_blocks = comptime!(if words < block_words { 1 } else { words / block_words });
    let row_blocks = extent.chunks * comptime!(words) / block_words;

    let mut sums = Array::<f32>::new(comptime!((rows * inputs) as usize));
    #[unroll]
    for index in 0..comptime!(rows * inputs) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let mut chunk = lane;
    while chunk < extent.chunks {
        let mut loaded = Array::<Vector<u32, W>>::new(comptime!(rows as usize));
        let mut factors = Array::<f32>::new(comptime!((rows * chunk_blocks) as usize));
        #[unroll]
        for row in 0..rows {
            let at = min(first_row + row, extent.outputs - 1);
            loaded[row as usize] = codes[(at * extent.chunks + chunk) as usize];
            let block = at * row_blocks + chunk * words / block_words;
            #[unroll]
            for index in 0..chunk_blocks {
                let code = u32::cast_from(scales[(block + index) as usize]);
                factors[comptime!((row * chunk_blocks + index) as usize)] =
                    scale_value(code, method.format);
            }
        }
        #[unroll]
        for word in 0..words {
            let block = comptime!(word / block_words);
            let mut values = Array::<f32>::new(comptime!((8 * inputs) as usize));
            #[unroll]
            for index in 0..inputs {
                let at = min(first_input + index, extent.inputs - 1);
                #[unroll]
                for vector in 0..vectors {
                    let place = at * row_vectors + (chunk * words + word) * vectors + vector;
                    let read = input[place as usize];
                    #[unroll]
                    for value in 0..share.vector {
                        let to = comptime!((index * 8 + vector * share.vector + value) as usize);
                        values[to] = widen::<u32, X>(read, value, share);
                    }
                }
            }
            #[unroll]
            for row in 0..rows {
                let factor = factors[comptime!((row * chunk_blocks + block) as usize)];
                let packed = loaded[row as usize].extract(comptime!(word as usize));
                #[unroll]
                for pair in 0..4u32 {
                    let halves = decode_pair::<f16, Const<2>>(
                        packed << comptime!(12 - 4 * pair),
                        Dtype::F16,
                    );
                    #[unroll]
                    for half in 0..2u32 {
                        let element = f32::cast_from(halves.extract(comptime!(half as usize)));
                        let weight = scaled(element, factor, comptime!(method.format));
                        let k = comptime!(pair + 4 * half);
                        #[unroll]
                        for index in 0..inputs {
                            let value = values[comptime!((index * 8 + k) as usize)];
                            let sum = comptime!((row * inputs + index) as usize);
                            sums[sum] = fma(weight, value, sums[sum]);
                        }
                    }
                }
            }
        }
        chunk += plane;
    }

    #[unroll]
    for row in 0..rows {
        let at = first_row + row;
        #[unroll]
        for index in 0..inputs {
            let own = sums[comptime!((row * inputs + index) as usize)];
            let sum = if comptime!(plane > 1) { plane_sum(own) } else { own };
            let to = first_input + index;
            if lane == comptime!((row * inputs + index) % plane)
                && at < extent.outputs
                && to < extent.inputs
            {
                output[(to * extent.outputs + at) as usize] =
                    finish::<F>(sum, at, tensor_scale, bias, method);
            }
        }
    }
}

/// `element x block scale`, exactly, given the element times 2^-14.
#[cube]
fn scaled(element: f32, scale: f32, #[comptime] format: Fp4Format) -> f32 {
    if comptime!(format == Fp4Format::NvFp4) {
        element * (scale * 16384.0f32)
    } else {
        // A power of two may be too large for that.
        (element * 16384.0f32) * scale
    }
}
