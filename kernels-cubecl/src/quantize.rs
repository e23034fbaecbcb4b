//! Quantization: codes and scales of a tensor.

use burn_fp4_search::{Method, Sse};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::memory::{PackedHandles, PackedOut, check_memory, store_tensor_scale};
use crate::numeric::codes::{limits_all, nearest_codes};
use crate::numeric::rule::{TensorScaleArgs, code_mask, normalize, tensor_factor};
use crate::numeric::stochastic::{Draw, draw, random_bits, random_words, round_stochastically};
use crate::plan::{Blueprint, Capability, Launch, Operation, Problem, Refusal, UNITS, plan};
use crate::search::amax::largest_magnitudes;
use crate::search::choose_scales;
use crate::search::quantize_args::{QuantizeArgs, quantize_args};
use crate::tensor::indexing::{tile_index, tile_origin};
use crate::tensor::load_store::load_blocks;
use crate::tensor::smem_transpose::{Transpose, packed_origin, smem_transpose};

/// Quantizes a tensor, given the result of [`amax`](crate::amax()) in device memory.
///
/// `values` is the contiguous dense tensor of the problem; `amax` holds an f32 for every tensor
/// scale. The tensor is read once, for any axis.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, Problem, amax, quantize};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let mut block = [7.0f32; 16];
/// block[0] = 84.0;
/// let values = client.create_from_slice(f32::as_bytes(&block));
/// let (view, dtype, scheme) = (View::rows(1, 16), Dtype::F32, Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype, scheme };
/// let largest = amax(&client, &device, values.clone(), view, dtype, false)?;
/// let packed = quantize(&client, &device, values, largest, &problem)?;
///
/// let codes = client.read_one_unchecked(packed.codes);
/// assert_eq!(codes[..2], [0x17, 0x11]); // elements of 6 and 0.5, then of 0.5 and 0.5
/// let scales = client.read_one_unchecked(packed.scales);
/// assert_eq!(scales[0], 0x7E); // 448, the largest E4M3
/// let tensor_scale = client.read_one_unchecked(packed.tensor_scale);
/// assert_eq!(f32::from_bytes(&tensor_scale), [84.0 / 2688.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    problem: &Problem,
) -> Result<PackedHandles, Refusal> {
    quantize_weighted(client, device, values, amax, None, problem)
}

/// [`quantize`] with errors weighted by input channel. `weights` are f32, one for every element
/// along the axis, not negative. The method is [`Sse`](Method::SSE).
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, Problem, dequantize, quantize_weighted};
/// use burn_fp4_search::host::View;
/// use burn_fp4_search::{Fp4Scheme, Method};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// let scheme = Fp4Scheme::mxfp4().with_block_size(16).with_method(Method::SSE);
/// let problem = Problem { view: View::rows(1, 16), dtype: Dtype::F32, scheme };
/// let mut block = [0.5f32; 16];
/// block[0] = 8.0;
/// let mut weights = [1.0f32; 16];
/// weights[0] = 0.25;
/// for (weights, first) in [(None, 8.0), (Some(upload(&weights)), 6.0)] {
///     let (values, amax) = (upload(&block), client.empty(4)); // MXFP4 has no tensor scale
///     let packed = quantize_weighted(&client, &device, values, amax, weights, &problem)?;
///     let restored = dequantize(&client, &device, packed, &problem)?;
///     // A scale of 2 leaves no error in 8, a scale of 1 none in 0.5.
///     assert_eq!(f32::from_bytes(&client.read_one_unchecked(restored))[0], first);
/// }
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize_weighted(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    problem: &Problem,
) -> Result<PackedHandles, Refusal> {
    let launch = plan(Operation::Quantize, problem, device)?;
    problem.check_values(&values)?;
    problem.check_amax(&amax)?;
    let found = problem.scheme.method;
    let fits = match (found, &weights) {
        (Method::Sse(Sse::Weighted), None) => false,
        (Method::Sse(_), _) | (_, None) => true,
        _ => false,
    };
    if !fits {
        return Err(Refusal::Method { operation: Operation::Quantize, found });
    }
    if let Some(weights) = &weights {
        check_memory("weights", weights, 4 * problem.view.axis)?;
    }
    Ok(if launch.thread_tile.wide() {
        launch_quantize::<u32>(client, values, amax, weights, problem, launch)
    } else {
        launch_quantize::<u16>(client, values, amax, weights, problem, launch)
    })
}

fn launch_quantize<E: Int>(
    client: &Client,
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    problem: &Problem,
    launch: Launch,
) -> PackedHandles {
    let blueprint = Blueprint::of(&problem.scheme, weights.is_some());
    let packed = PackedHandles::empty(client, problem);
    if launch.items == 0 {
        return packed;
    }
    let words = problem.scheme.block_size / 8;
    // SAFETY: the lengths match the problem, and units beyond `items` write nothing.
    unsafe {
        quantize_kernel::launch_unchecked::<E>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            launch.thread_tile.words() as usize,
            words,
            quantize_args(values, amax, weights, blueprint, problem, &launch),
            packed.write(problem, words),
            draw(&problem.scheme),
        );
    }
    packed
}

#[cube(launch_unchecked)]
fn quantize_kernel<E: Int, N: Size, W: Size>(
    args: &QuantizeArgs<E, N>,
    packed: &mut PackedOut<W>,
    draw: Draw,
) {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let block_size = comptime!(blueprint.block_size);
    let tile_index = tile_index(&args.dims);
    // Units beyond the last tile repeat it and store nothing: whole planes take part in exchanges.
    let origin =
        tile_origin(min(tile_index, args.dims.items - 1), &args.dims, block_size, thread_tile);
    let rows_left = select(tile_index < args.dims.items, origin.rows_left, 0u32);
    let elements = load_blocks::<E, N>(args.values, &origin, &args.dims, block_size, thread_tile);
    let largest = largest_magnitudes::<E, N>(args, &elements, &origin);
    let chosen = choose_scales::<E, N>(args, &elements, &largest, &origin);
    let words = comptime!(block_size / 8);
    let mut block_codes = Array::<Vector<u32, W>>::new(comptime!(thread_tile.rows as usize));
    let mut block_scales = chosen.codes;
    #[unroll]
    for row in 0..thread_tile.rows {
        let mut codes = Array::<u32>::new(comptime!(words as usize));
        let start = comptime!(row * block_size);
        let factor = chosen.factors[row as usize];
        if comptime!(blueprint.stochastic) {
            let group = (origin.index + row * args.dims.blocks) * words;
            drawn_codes(
                &elements,
                &mut codes,
                start,
                factor,
                group,
                &args.scale_args,
                &draw,
                blueprint,
            );
        } else {
            let limits = comptime!(limits_all(blueprint, thread_tile.rows));
            let of_row = largest[row as usize];
            let scale_args = &args.scale_args;
            nearest_codes(
                &elements, &mut codes, start, of_row, factor, scale_args, limits, blueprint,
            );
        }
        let mut row_codes = Vector::<u32, W>::empty();
        #[unroll]
        for word in 0..words {
            row_codes.insert(comptime!(word as usize), codes[word as usize]);
        }
        block_codes[row as usize] = row_codes;
    }

    if comptime!(thread_tile.through_shared_memory) {
        smem_transpose::<W>(
            &mut block_codes,
            &mut block_scales,
            words,
            thread_tile,
            Transpose::BeforeStore,
        );
    }
    let target = packed_origin(&origin, &args.dims, thread_tile);
    #[unroll]
    for row in 0..thread_tile.rows {
        if row < rows_left {
            let index = target.index + row * args.dims.blocks;
            packed.codes[index as usize] = block_codes[row as usize];
            packed.scales[index as usize] = u8::cast_from(block_scales[row as usize]);
            // The first block of all is recognized by its index: row and block of a row cost
            // divisions.
            let begins =
                if comptime!(blueprint.by_row) { target.block == 0u32 } else { index == 0u32 };
            if begins {
                let tensor =
                    tensor_factor(args.amax, target.row + row, &args.scale_args, blueprint);
                store_tensor_scale::<W>(packed, target.row + row, tensor.decode, blueprint);
            }
        }
    }
}

/// Draws the codes of the block that starts at `start` of the elements, each between its two
/// neighbours, given the factor of its scale. `group` is the number of its first eight elements.
#[cube]
fn drawn_codes(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    #[comptime] start: u32,
    factor: f32,
    group: u32,
    scale_args: &TensorScaleArgs,
    draw: &Draw,
    #[comptime] blueprint: Blueprint,
) {
    let rule = comptime!(blueprint.rule);
    let mask = code_mask(factor, rule);
    #[unroll]
    for word in 0..comptime!(blueprint.block_size / 8) {
        let mut packed = 0u32;
        let random = random_words(group + word, draw);
        #[unroll]
        for index in 0..8u32 {
            let element = comptime!(7 - index);
            let at = comptime!((start + word * 8 + element) as usize);
            let normalized = normalize(elements[at], factor, scale_args, rule);
            let bits = random_bits(&random, element);
            packed = (packed << 4u32) | (round_stochastically(normalized, bits) >> 28u32);
        }
        codes[word as usize] = packed & mask;
    }
}
