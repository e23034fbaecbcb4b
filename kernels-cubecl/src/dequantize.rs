//! The values of codes and scales.

use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::arith::element::element_value;
use crate::arith::scale_grid::scale_value;
use crate::layout::place::{Extent, extent, place};
use crate::layout::share::{store_blocks, store_vectors};
use crate::layout::stage::{Exchange, exchange, packed_place};
use crate::packed::{PackedHandles, PackedIn};
use crate::plan::{Capability, Dtype, Operation, Problem, Refusal, Share, UNITS, plan};

/// The values of a packed tensor in the dtype of the problem: computed in f32, rounded once.
///
/// Of the scheme, only format and block size matter.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn dequantize(
    client: &Client,
    device: &Capability,
    packed: PackedHandles,
    problem: &Problem,
) -> Result<Handle, Refusal> {
    match problem.dtype {
        Dtype::F32 => launch::<f32>(client, device, packed, problem),
        Dtype::F16 => launch::<f16>(client, device, packed, problem),
        Dtype::Bf16 => launch::<bf16>(client, device, packed, problem),
    }
}

fn launch<F: Float>(
    client: &Client,
    device: &Capability,
    packed: PackedHandles,
    problem: &Problem,
) -> Result<Handle, Refusal> {
    let Problem { view, scheme, dtype } = problem;
    let launch = plan(Operation::Dequantize, problem, device)?;
    problem.check_packed(&packed)?;
    let (share, by_row) = (launch.share, packed.tensor_scales > 1);
    let values = client.empty(view.len() * dtype.size());
    if launch.items == 0 {
        return Ok(values);
    }
    let words = if share.along { 1 } else { scheme.block_size / 8 };
    // SAFETY: the lengths are those of the problem, and units beyond `items` do nothing.
    unsafe {
        dequantize_kernel::launch_unchecked::<F>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            share.vector as usize,
            words,
            packed.read(view.len(), 8 * words, scheme.block_size),
            BufferArg::from_raw_parts(values.clone(), view.len() / share.vector as usize),
            extent(problem, &launch),
            scheme.block_size as u32,
            share,
            scheme.format(),
            by_row,
        );
    }
    Ok(values)
}

/// Along a contiguous axis one unit takes eight codes, so that neighbouring units write
/// neighbouring 16 bytes; along a strided one it takes a share.
#[cube(launch_unchecked)]
fn dequantize_kernel<F: Float, N: Size, W: Size>(
    packed: &PackedIn<u8, W>,
    values: &mut [Vector<F, N>],
    extent: Extent,
    #[comptime] block_size: u32,
    #[comptime] share: Share,
    #[comptime] format: Fp4Format,
    #[comptime] by_row: bool,
) {
    let item = ABSOLUTE_POS as u32;
    if item >= extent.items {
        terminate!();
    }
    let block_words = comptime!(block_size / 8);
    let grid = comptime!(format.row().scale_grid());
    if comptime!(share.along) {
        let block = item / block_words;
        let row = if comptime!(by_row) { block / extent.blocks } else { 0u32.runtime() };
        let scale = scale_value(u32::cast_from(packed.scales[block as usize]), grid);
        let decode = f32::reinterpret(packed.tensor_scale[row as usize]);
        let mut elements = Array::<f32>::new(8usize);
        let word = packed.codes[item as usize].extract(0usize);
        decode_word(word, &mut elements, 0u32, scale, decode);
        let lines = comptime!(8 / share.vector);
        store_vectors::<F, N>(&elements, 0u32, values, item * lines, lines, share);
    } else {
        let place = place(item, &extent, block_size, share);
        let source = packed_place(&place, &extent, share);
        let mut block_codes = Array::<Vector<u32, W>>::new(comptime!(share.rows as usize));
        let mut block_scales = Array::<u32>::new(comptime!(share.rows as usize));
        #[unroll]
        for row in 0..share.rows {
            let index = source.index + row * extent.blocks;
            block_codes[row as usize] = packed.codes[index as usize];
            block_scales[row as usize] = u32::cast_from(packed.scales[index as usize]);
        }
        if comptime!(share.staged) {
            exchange::<W>(
                &mut block_codes,
                &mut block_scales,
                block_words,
                share,
                Exchange::Loaded,
            );
        }
        let mut elements = Array::<f32>::new(comptime!((share.rows * block_size) as usize));
        #[unroll]
        for row in 0..share.rows {
            let factor = if comptime!(by_row) { place.row + row } else { 0u32.runtime() };
            let scale = scale_value(block_scales[row as usize], grid);
            let decode = f32::reinterpret(packed.tensor_scale[factor as usize]);
            #[unroll]
            for word in 0..block_words {
                let at = comptime!(row * block_size + word * 8);
                let word = block_codes[row as usize].extract(comptime!(word as usize));
                decode_word(word, &mut elements, at, scale, decode);
            }
        }
        store_blocks::<F, N>(&elements, values, &place, &extent, block_size, share);
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
