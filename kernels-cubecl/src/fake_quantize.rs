//! Fake quantization: quantizes and dequantizes in one pass over the dense tensor.

use burn_fp4_search::host::DequantTarget;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::numeric::element::{element_value, nearest_element};
use crate::numeric::rule::{TensorScaleArgs, code_mask, normalize, tensor_factor};
use crate::numeric::scale_grid::scale_value;
use crate::numeric::stochastic::{Draw, draw, random_bits, random_words, round_stochastically};
use crate::plan::{
    Blueprint, Capability, Dtype, Launch, Operation, Problem, Refusal, TileSharing, UNITS, plan,
};
use crate::search::amax::largest_magnitudes;
use crate::search::choose_scales;
use crate::search::quantize_args::{QuantizeArgs, quantize_args};
use crate::tensor::indexing::{tile_index, tile_origin};
use crate::tensor::load_store::{load_blocks, store_blocks};

/// Returns the bits of [`dequantize`](crate::dequantize()) after [`quantize`](crate::quantize()),
/// in one pass.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, Problem, amax, fake_quantize};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::{DequantTarget, View};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let mut block = [8.0f32; 16];
/// block[0] = 84.0;
/// let values = client.create_from_slice(f32::as_bytes(&block));
/// let (view, dtype, scheme) = (View::rows(1, 16), Dtype::F32, Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype, scheme };
/// let largest = amax(&client, &device, values.clone(), view, dtype, false)?;
/// for (target, expected) in [
///     (DequantTarget::Full, [84.0f32, 7.0]),
///     (DequantTarget::WithoutTensorScale, [2688.0, 224.0]), // 32 times as much
/// ] {
///     let (values, largest) = (values.clone(), largest.clone());
///     let found = fake_quantize(&client, &device, values, largest, &problem, target)?;
///     assert_eq!(f32::from_bytes(&client.read_one_unchecked(found))[..2], expected);
/// }
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn fake_quantize(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    problem: &Problem,
    target: DequantTarget,
) -> Result<Handle, Refusal> {
    let launch = plan(Operation::FakeQuantize, problem, device)?;
    problem.check_values(&values)?;
    problem.check_amax(&amax)?;
    let launch_kernel = match (problem.dtype, launch.thread_tile.wide()) {
        (Dtype::F16, true) => launch_fake_quantize::<u32, f16>,
        (Dtype::F16, false) => launch_fake_quantize::<u16, f16>,
        (Dtype::Bf16, true) => launch_fake_quantize::<u32, bf16>,
        (Dtype::Bf16, false) => launch_fake_quantize::<u16, bf16>,
        (Dtype::F32, _) => launch_fake_quantize::<u32, f32>,
    };
    Ok(launch_kernel(client, values, amax, problem, target, launch))
}

fn launch_fake_quantize<E: Int, F: Float>(
    client: &Client,
    values: Handle,
    amax: Handle,
    problem: &Problem,
    target: DequantTarget,
    launch: Launch,
) -> Handle {
    let mut problem = *problem;
    if launch.thread_tile.sharing == TileSharing::Halves {
        // Each half is treated as a block; only the amax comes from both.
        problem.scheme = problem.scheme.with_block_size(problem.scheme.block_size / 2);
    }
    let Problem { view, scheme, dtype } = &problem;
    let output = client.empty(view.len() * dtype.size());
    if launch.items == 0 {
        return output;
    }
    let vectors = view.len() / launch.thread_tile.vector as usize;
    let blueprint = Blueprint::of(scheme, false);
    // SAFETY: the lengths match the problem, and units beyond `items` write nothing.
    unsafe {
        fake_quantize_kernel::launch_unchecked::<E, F>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            launch.thread_tile.words() as usize,
            launch.thread_tile.vector as usize,
            quantize_args(values, amax, None, blueprint, &problem, &launch),
            BufferArg::from_raw_parts(output.clone(), vectors),
            draw(scheme),
            target,
        );
    }
    output
}

#[cube(launch_unchecked)]
fn fake_quantize_kernel<E: Int, M: Size, F: Float, N: Size>(
    args: &QuantizeArgs<E, M>,
    output: &mut [Vector<F, N>],
    draw: Draw,
    #[comptime] target: DequantTarget,
) {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let block_size = comptime!(blueprint.block_size);
    let tile_index = tile_index(&args.dims);
    let origin =
        tile_origin(min(tile_index, args.dims.items - 1), &args.dims, block_size, thread_tile);
    let mut elements =
        load_blocks::<E, M>(args.values, &origin, &args.dims, block_size, thread_tile);
    let largest = largest_magnitudes::<E, M>(args, &elements, &origin);
    let chosen = choose_scales::<E, M>(args, &elements, &largest, &origin);
    #[unroll]
    for row in 0..thread_tile.rows {
        let value = scale_value(chosen.codes[row as usize], comptime!(blueprint.grid()));
        let decode = if comptime!(target == DequantTarget::Full) {
            tensor_factor(args.amax, origin.row + row, &args.scale_args, blueprint).decode
        } else {
            1.0f32.runtime()
        };
        let scale = Scale { factor: chosen.factors[row as usize], value, decode };
        let group = (origin.index + row * args.dims.blocks) * comptime!(block_size / 8);
        restore_row(&mut elements, row, &scale, group, &args.scale_args, &draw, blueprint);
    }
    if tile_index < args.dims.items {
        store_blocks::<F, N>(&elements, output, &origin, &args.dims, block_size, thread_tile);
    }
}

/// Factor of the elements of a block, and the two scales that multiply the values of their codes.
#[derive(CubeType, Clone, Copy)]
struct Scale {
    factor: f32,
    value: f32,
    decode: f32,
}

/// Replaces the elements of a row's block with the values of their codes. `group` is the number of
/// its first eight elements, a counter of the random bits.
#[cube]
fn restore_row(
    elements: &mut Array<f32>,
    #[comptime] row: u32,
    scale: &Scale,
    group: u32,
    scale_args: &TensorScaleArgs,
    draw: &Draw,
    #[comptime] blueprint: Blueprint,
) {
    let rule = comptime!(blueprint.rule);
    let mask = code_mask(scale.factor, rule);
    #[unroll]
    for word in 0..comptime!(blueprint.block_size / 8) {
        let start = comptime!(row * blueprint.block_size + word * 8);
        if comptime!(blueprint.stochastic) {
            let random = random_words(group + word, draw);
            #[unroll]
            for element in 0..8u32 {
                let at = comptime!((start + element) as usize);
                let normalized = normalize(elements[at], scale.factor, scale_args, rule);
                let code = round_stochastically(normalized, random_bits(&random, element));
                let drawn = element_value(code & mask);
                elements[at] = (drawn * scale.value) * scale.decode;
            }
        } else {
            #[unroll]
            for element in 0..8u32 {
                let at = comptime!((start + element) as usize);
                let nearest =
                    nearest_element(normalize(elements[at], scale.factor, scale_args, rule));
                let nearest = f32::reinterpret(u32::reinterpret(nearest) & mask);
                elements[at] = (nearest * scale.value) * scale.decode;
            }
        }
    }
}
