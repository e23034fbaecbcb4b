use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::element::element_value;
use crate::plan::{Share, UNITS};
use crate::quantize::extent;
use crate::scale::scale_value;
use crate::share::{Extent, first_value, place, store_block};
use crate::{Capability, Dtype, Operation, Packed, Problem, Refusal, plan};

/// The values of a packed tensor in the dtype of the problem: computed in f32, rounded once.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn dequantize(client: &Client, packed: Packed, problem: &Problem) -> Result<Handle, Refusal> {
    match problem.dtype {
        Dtype::F32 => launch::<f32>(client, packed, problem),
        Dtype::F16 => launch::<f16>(client, packed, problem),
        Dtype::Bf16 => launch::<bf16>(client, packed, problem),
    }
}

fn launch<F: Float>(client: &Client, packed: Packed, problem: &Problem) -> Result<Handle, Refusal> {
    let Problem { view, scheme, dtype } = problem;
    let device = Capability::of(client);
    let launch = plan(Operation::Dequantize, problem, &device)?;
    let share = launch.share;
    let values = client.empty(view.len() * dtype.size());
    if launch.items == 0 {
        return Ok(values);
    }
    let tensor_scales = scheme.tensor_scales(view.packed_rows());
    let words = match share.along {
        true => 1,
        false => (share.blocks as usize * scheme.block_size / 8).min(4),
    };
    // SAFETY: the lengths are those of the problem, and units beyond `items` do nothing.
    unsafe {
        dequantize_kernel::launch_unchecked::<F>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            share.vector as usize,
            words,
            BufferArg::from_raw_parts(packed.codes, problem.code_bytes() / 4 / words),
            BufferArg::from_raw_parts(packed.scales, problem.scale_bytes()),
            BufferArg::from_raw_parts(packed.tensor_scale, tensor_scales),
            BufferArg::from_raw_parts(values.clone(), view.len() / share.vector as usize),
            extent(problem, &launch),
            scheme.block_size as u32,
            share,
            words as u32,
            scheme.format(),
            tensor_scales > 1,
        );
    }
    Ok(values)
}

/// Along a contiguous axis one unit takes eight codes, so that neighbouring units write neighbouring
/// 16 bytes; along a strided one it takes a share.
#[cube(launch_unchecked)]
fn dequantize_kernel<F: Float, N: Size, W: Size>(
    codes: &[Vector<u32, W>],
    scales: &[u8],
    tensor_scale: &[u32],
    values: &mut [Vector<F, N>],
    extent: Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
    #[comptime] words: u32,
    #[comptime] format: Fp4Format,
    #[comptime] by_row: bool,
) {
    let item = ABSOLUTE_POS as u32;
    if item >= extent.items {
        terminate!();
    }
    let block_words = comptime!(block_size / 8);
    if comptime!(share.along) {
        let block = item / block_words;
        let row = if comptime!(by_row) { block / extent.blocks } else { 0u32.runtime() };
        let scale = scale_value(u32::cast_from(scales[block as usize]), format);
        let decode = f32::reinterpret(tensor_scale[row as usize]);
        let mut elements = Array::<f32>::new(8usize);
        let word = codes[item as usize].extract(0usize);
        decode_word(word, &mut elements, 0u32, scale, decode);
        store_block::<F, N>(&elements, values, item * 8, extent.inner, 8u32, share);
    } else {
        let start = place(item, &extent, share);
        let first = first_value(&start, &extent, block_size, share);
        let lines = comptime!(share.blocks * block_words / words);
        let line_values = comptime!(words * 8);
        #[unroll]
        for line in 0..lines {
            let mut elements = Array::<f32>::new(comptime!((share.rows * line_values) as usize));
            #[unroll]
            for row in 0..share.rows {
                let index = start.index + row * extent.blocks;
                let factor = if comptime!(by_row) { start.row + row } else { 0u32.runtime() };
                let decode = f32::reinterpret(tensor_scale[factor as usize]);
                let loaded = codes[(index * block_words / words + line) as usize];
                #[unroll]
                for word in 0..words {
                    let block = comptime!((line * words + word) / block_words);
                    let code = u32::cast_from(scales[(index + block) as usize]);
                    let scale = scale_value(code, format);
                    let at = comptime!(row * line_values + word * 8);
                    let word = loaded.extract(comptime!(word as usize));
                    decode_word(word, &mut elements, at, scale, decode);
                }
            }
            let first = first + line * line_values * extent.inner;
            store_block::<F, N>(&elements, values, first, extent.inner, line_values, share);
        }
    }
}

/// The values of eight codes.
#[cube]
fn decode_word(word: u32, elements: &mut Array<f32>, #[comptime] at: u32, scale: f32, decode: f32) {
    #[unroll]
    for index in 0..8u32 {
        let element = element_value(word << comptime!(28 - 4 * index));
        elements[(at + index) as usize] = (element * scale) * decode;
    }
}
