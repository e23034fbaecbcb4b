//! Dequantization: dense values of codes and scales.

use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::memory::{PackedHandles, PackedIn, load_scale};
use crate::numeric::normal::{scale_factor, scaled_value};
use crate::plan::{
    Capability, Decoding, Dtype, Operation, Problem, Refusal, ThreadTile, UNITS, plan,
};
use crate::tensor::indexing::{Dims, dims, tile_origin};
use crate::tensor::load_store::{store_blocks, store_vectors};
use crate::tensor::smem_transpose::{Transpose, packed_origin, smem_transpose};

/// Dequantizes a packed tensor to the dtype of the problem: computed in f32, rounded once.
///
/// Only format and block size of the scheme matter.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, PackedHandles, Problem, dequantize};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let packed = PackedHandles {
///     codes: client.create_from_slice(&[0x21; 8]), // elements of 0.5 and 1
///     scales: client.create_from_slice(&[0x40]),   // the block scale 2
///     tensor_scale: client.create_from_slice(f32::as_bytes(&[3.0])),
///     tensor_scales: 1,
/// };
/// let (view, scheme) = (View::rows(1, 16), Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype: Dtype::F32, scheme };
/// let values = dequantize(&client, &device, packed, &problem)?;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(values))[..2], [3.0, 6.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn dequantize(
    client: &Client,
    device: &Capability,
    packed: PackedHandles,
    problem: &Problem,
) -> Result<Handle, Refusal> {
    device.check_portable(problem.dtype)?;
    let launch = match (problem.dtype, device.portable.is_some()) {
        (Dtype::F32, false) => launch::<f32, u8>,
        (Dtype::F16, false) => launch::<f16, u8>,
        (Dtype::Bf16, false) => launch::<bf16, u8>,
        (Dtype::F32, true) => launch::<f32, u32>,
        (Dtype::F16, true) => launch::<f16, u32>,
        (Dtype::Bf16, true) => launch::<bf16, u32>,
    };
    launch(client, device, packed, problem)
}

/// Launches the kernel. `S` holds one block scale, or four.
fn launch<F: Float, S: Int>(
    client: &Client,
    device: &Capability,
    packed: PackedHandles,
    problem: &Problem,
) -> Result<Handle, Refusal> {
    let Problem { view, scheme, dtype } = problem;
    let launch = plan(Operation::Dequantize, problem, device)?;
    problem.check_packed(&packed)?;
    let (thread_tile, by_row) = (launch.thread_tile, packed.tensor_scales > 1);
    let values = client.empty(view.len() * dtype.size());
    if launch.items == 0 {
        return Ok(values);
    }
    let words = if thread_tile.contiguous_axis { 1 } else { scheme.block_size / 8 };
    let Capability { decoding, portable, .. } = *device;
    let scale_values = if portable.is_some() { 4 * scheme.block_size } else { scheme.block_size };
    // SAFETY: the lengths match the problem, and units beyond `items` do nothing.
    unsafe {
        dequantize_kernel::launch_unchecked::<F, S>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            thread_tile.vector as usize,
            words,
            packed.read(view.len(), 8 * words, scale_values),
            BufferArg::from_raw_parts(values.clone(), view.len() / thread_tile.vector as usize),
            dims(problem, &launch),
            scheme.block_size as u32,
            thread_tile,
            scheme.format(),
            by_row,
            decoding,
            portable.is_some(),
        );
    }
    Ok(values)
}

/// Along a contiguous axis a unit takes eight codes, so that neighbouring units write neighbouring
/// 16 bytes. Along a strided axis it takes a thread tile.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_kernel<F: Float, S: Int, N: Size, W: Size>(
    packed: &PackedIn<S, W>,
    values: &mut [Vector<F, N>],
    dims: Dims,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
    #[comptime] format: Fp4Format,
    #[comptime] by_row: bool,
    #[comptime] decoding: Decoding,
    #[comptime] in_words: bool,
) {
    let tile_index = ABSOLUTE_POS as u32;
    if tile_index >= dims.items {
        terminate!();
    }
    let block_words = comptime!(block_size / 8);
    if comptime!(thread_tile.contiguous_axis) {
        let block = tile_index / block_words;
        let row = if comptime!(by_row) { block / dims.blocks } else { 0u32.runtime() };
        let scale = load_scale::<S>(packed.scales, block, in_words);
        let decode = f32::reinterpret(packed.tensor_scale[row as usize]);
        let mut elements = Array::<f32>::new(8usize);
        let word = packed.codes[tile_index as usize].extract(0usize);
        decode_word(word, &mut elements, 0u32, scale, decode, format, decoding);
        let lines = comptime!(8 / thread_tile.vector);
        store_vectors::<F, N>(&elements, 0u32, values, tile_index * lines, lines, thread_tile);
    } else {
        let origin = tile_origin(tile_index, &dims, block_size, thread_tile);
        let source = packed_origin(&origin, &dims, thread_tile);
        let mut block_codes = Array::<Vector<u32, W>>::new(comptime!(thread_tile.rows as usize));
        let mut block_scales = Array::<u32>::new(comptime!(thread_tile.rows as usize));
        #[unroll]
        for row in 0..thread_tile.rows {
            let index = source.index + row * dims.blocks;
            block_codes[row as usize] = packed.codes[index as usize];
            block_scales[row as usize] = load_scale::<S>(packed.scales, index, in_words);
        }
        if comptime!(thread_tile.through_shared_memory) {
            smem_transpose::<W>(
                &mut block_codes,
                &mut block_scales,
                block_words,
                thread_tile,
                Transpose::AfterLoad,
            );
        }
        let mut elements = Array::<f32>::new(comptime!((thread_tile.rows * block_size) as usize));
        #[unroll]
        for row in 0..thread_tile.rows {
            let factor = if comptime!(by_row) { origin.row + row } else { 0u32.runtime() };
            let scale = block_scales[row as usize];
            let decode = f32::reinterpret(packed.tensor_scale[factor as usize]);
            #[unroll]
            for word in 0..block_words {
                let at = comptime!(row * block_size + word * 8);
                let word = block_codes[row as usize].extract(comptime!(word as usize));
                decode_word(word, &mut elements, at, scale, decode, format, decoding);
            }
        }
        store_blocks::<F, N>(&elements, values, &origin, &dims, block_size, thread_tile);
    }
}

/// Decodes eight codes, given the code of their block scale.
#[cube]
fn decode_word(
    word: u32,
    elements: &mut Array<f32>,
    #[comptime] at: u32,
    scale: u32,
    decode: f32,
    #[comptime] format: Fp4Format,
    #[comptime] decoding: Decoding,
) {
    let grid = comptime!(format.row().scale_grid());
    let factor = scale_factor(scale, grid, decoding);
    #[unroll]
    for index in 0..8u32 {
        let code = word << comptime!(28 - 4 * index);
        let value = scaled_value(code, scale, factor, grid, decoding);
        let restored = if comptime!(decoding == Decoding::Subnormals || format.row().tensor_scale) {
            value * decode
        } else {
            // A multiplication by 1 would flush subnormals.
            value
        };
        elements[(at + index) as usize] = restored;
    }
}
