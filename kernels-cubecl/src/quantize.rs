use burn_fp4_search::host::Restore;
use burn_fp4_search::{TensorFactor, TensorScaling};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::block::{choose_scales, code_mask, normalize};
use crate::element::{element_value, nearest_element, round_to_e2m1};
use crate::plan::{Share, Tile, UNITS};
use crate::scale::{Factors, FactorsLaunch, Method, scale_value, tensor_factor};
use crate::share::{Extent, ExtentLaunch, item, load_blocks, place, store_blocks};
use crate::stage::{Exchange, exchange, packed_place};
use crate::stochastic::{Draw, draw, random_bits, random_words, round_stochastically};
use crate::{Capability, Dtype, Launch, Operation, Problem, Refusal, plan};

/// A quantized tensor in device memory.
#[derive(Debug, Clone)]
pub struct Packed {
    /// `[packed_rows, axis / 2]` bytes.
    pub codes: Handle,
    /// `[packed_rows, axis / block_size]` bytes.
    pub scales: Handle,
    /// Bits of the f32 tensor scale, 1 or `packed_rows`.
    pub tensor_scale: Handle,
    /// Which of the two.
    pub tensor_scales: usize,
}

/// Codes and scales of a tensor, given the amax of [`amax`](crate::amax()) in device memory.
///
/// The tensor is read once, whichever axis the blocks run along.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    problem: &Problem,
) -> Result<Packed, Refusal> {
    quantize_weighted(client, device, values, amax, None, problem)
}

/// [`quantize`] for errors that cost as much as their input channel: `weights` are f32, one for every
/// element along the axis, not negative. The search is [`Sse`](burn_fp4_search::ScaleSearch).
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
) -> Result<Packed, Refusal> {
    let launch = plan(Operation::Quantize, problem, device)?;
    Ok(if launch.share.wide() {
        launch_quantize::<u32>(client, values, amax, weights, problem, launch)
    } else {
        launch_quantize::<u16>(client, values, amax, weights, problem, launch)
    })
}

/// What [`dequantize`](crate::dequantize()) makes of [`quantize`], in one pass.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn fake_quantize(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    problem: &Problem,
    restore: Restore,
) -> Result<Handle, Refusal> {
    let launch = plan(Operation::FakeQuantize, problem, device)?;
    let launch_kernel = match (problem.dtype, launch.share.wide()) {
        (Dtype::F16, true) => launch_fake_quantize::<u32, f16>,
        (Dtype::F16, false) => launch_fake_quantize::<u16, f16>,
        (Dtype::Bf16, true) => launch_fake_quantize::<u32, bf16>,
        (Dtype::Bf16, false) => launch_fake_quantize::<u16, bf16>,
        (Dtype::F32, _) => launch_fake_quantize::<u32, f32>,
    };
    Ok(launch_kernel(client, values, amax, problem, restore, launch))
}

fn launch_quantize<E: Int>(
    client: &Client,
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    problem: &Problem,
    launch: Launch,
) -> Packed {
    let Problem { view, scheme, .. } = problem;
    let method = Method::of(scheme, weights.is_some());
    let share = launch.share;
    let packed = empty(client, problem);
    let tensor_scales = packed.tensor_scales;
    if launch.items == 0 {
        return packed;
    }
    let words = scheme.block_size / 8;
    // SAFETY: the lengths are those of the problem, and units beyond `items` write nothing.
    unsafe {
        quantize_kernel::launch_unchecked::<E>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            share.words() as usize,
            words,
            BufferArg::from_raw_parts(values, view.len() / share.vector as usize),
            BufferArg::from_raw_parts(amax.clone(), tensor_scales),
            // Where there are none, something that is not read.
            match weights {
                Some(weights) => BufferArg::from_raw_parts(weights, view.axis),
                None => BufferArg::from_raw_parts(amax, tensor_scales),
            },
            BufferArg::from_raw_parts(packed.codes.clone(), problem.code_bytes() / 4 / words),
            BufferArg::from_raw_parts(packed.scales.clone(), problem.scale_bytes()),
            BufferArg::from_raw_parts(packed.tensor_scale.clone(), tensor_scales),
            extent(problem, &launch),
            factors(problem),
            draw(scheme),
            method,
            share,
        );
    }
    packed
}

/// Memory for what becomes of a problem.
pub(crate) fn empty(client: &Client, problem: &Problem) -> Packed {
    let tensor_scales = problem.scheme.tensor_scales(problem.view.packed_rows());
    Packed {
        codes: client.empty(problem.code_bytes()),
        scales: client.empty(problem.scale_bytes()),
        tensor_scale: client.empty(4 * tensor_scales),
        tensor_scales,
    }
}

fn launch_fake_quantize<E: Int, F: Float>(
    client: &Client,
    values: Handle,
    amax: Handle,
    problem: &Problem,
    restore: Restore,
    launch: Launch,
) -> Handle {
    let mut problem = *problem;
    if launch.share.tile == Tile::Halves {
        // Each is a block of its own, but for what they exchange.
        problem.scheme = problem.scheme.with_block_size(problem.scheme.block_size / 2);
    }
    let Problem { view, scheme, dtype } = &problem;
    let output = client.empty(view.len() * dtype.size());
    if launch.items == 0 {
        return output;
    }
    let vectors = view.len() / launch.share.vector as usize;
    // SAFETY: the lengths are those of the problem, and units beyond `items` write nothing.
    unsafe {
        fake_quantize_kernel::launch_unchecked::<E, F>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            launch.share.words() as usize,
            launch.share.vector as usize,
            BufferArg::from_raw_parts(values, vectors),
            BufferArg::from_raw_parts(amax, scheme.tensor_scales(view.packed_rows())),
            BufferArg::from_raw_parts(output.clone(), vectors),
            extent(&problem, &launch),
            factors(&problem),
            draw(scheme),
            restore,
            Method::of(scheme, false),
            launch.share,
        );
    }
    output
}

pub(crate) fn extent(problem: &Problem, launch: &Launch) -> ExtentLaunch {
    let view = problem.view;
    ExtentLaunch::new(
        view.packed_rows() as u32,
        problem.blocks() as u32,
        view.inner as u32,
        launch.items,
        launch.cubes[0] * launch.cubes[1],
    )
}

pub(crate) fn factors(problem: &Problem) -> FactorsLaunch {
    let scheme = &problem.scheme;
    // A given multiplier is its own factor; the amax in device memory is then not looked at.
    let given = match scheme.tensor_scale {
        TensorScaling::Multiplier(_) => TensorFactor::new(scheme, f32::NAN),
        _ => TensorFactor::ONE,
    };
    let range = scheme.largest_code_product();
    FactorsLaunch::new(range, given.amax, given.encode, given.decode, 1.0)
}

#[cube(launch_unchecked)]
fn quantize_kernel<E: Int, N: Size, W: Size>(
    values: &[Vector<E, N>],
    amax: &[f32],
    weights: &[f32],
    codes: &mut [Vector<u32, W>],
    scales: &mut [u8],
    tensor_scale: &mut [u32],
    extent: Extent,
    factors: Factors,
    draw: Draw,
    #[comptime] method: Method,
    #[comptime] share: Share,
) {
    let block_size = comptime!(method.block_size);
    let rule = comptime!(method.rule);
    let item = item(&extent);
    // Units beyond the last share repeat it, so that whole planes exchange values, and keep silent.
    let place = place(min(item, extent.items - 1), &extent, block_size, share);
    let rows_left = select(item < extent.items, place.rows_left, 0u32);
    let elements = load_blocks::<E, N>(values, &place, &extent, block_size, share);
    let chosen = choose_scales::<E, N>(
        &elements, values, &place, &extent, amax, weights, &factors, method, share,
    );
    let words = comptime!(block_size / 8);
    let mut block_codes = Array::<Vector<u32, W>>::new(comptime!(share.rows as usize));
    let mut block_scales = chosen.codes;
    #[unroll]
    for row in 0..share.rows {
        let factor = chosen.factors[row as usize];
        let mask = code_mask(factor, rule);
        let mut row_codes = Vector::<u32, W>::empty();
        let group = (place.index + row * extent.blocks) * words;
        #[unroll]
        for word in 0..words {
            let mut packed = 0u32;
            let start = comptime!(row * block_size + word * 8);
            if comptime!(method.stochastic) {
                let random = random_words(group + word, &draw);
                #[unroll]
                for index in 0..8u32 {
                    let element = comptime!(7 - index);
                    let at = comptime!((start + element) as usize);
                    let normalized = normalize(elements[at], factor, &factors, rule);
                    let bits = random_bits(&random, element);
                    packed = (packed << 4u32) | (round_stochastically(normalized, bits) >> 28u32);
                }
            } else {
                #[unroll]
                for index in 0..8u32 {
                    let at = comptime!((start + 7 - index) as usize);
                    let normalized = normalize(elements[at], factor, &factors, rule);
                    packed = (packed << 4u32) | (round_to_e2m1(normalized) >> 28u32);
                }
            }
            row_codes.insert(comptime!(word as usize), packed & mask);
        }
        block_codes[row as usize] = row_codes;
    }

    if comptime!(share.staged) {
        exchange::<W>(&mut block_codes, &mut block_scales, words, share, Exchange::ToStore);
    }
    let target = packed_place(&place, &extent, share);
    #[unroll]
    for row in 0..share.rows {
        if row < rows_left {
            let index = target.index + row * extent.blocks;
            codes[index as usize] = block_codes[row as usize];
            scales[index as usize] = u8::cast_from(block_scales[row as usize]);
            if target.block == 0u32 && (comptime!(method.by_row) || index == 0u32) {
                let tensor = tensor_factor(amax, target.row + row, &factors, method);
                let at = if comptime!(method.by_row) { target.row + row } else { 0u32.runtime() };
                tensor_scale[at as usize] = u32::reinterpret(tensor.decode);
            }
        }
    }
}

#[cube(launch_unchecked)]
fn fake_quantize_kernel<E: Int, M: Size, F: Float, N: Size>(
    values: &[Vector<E, M>],
    amax: &[f32],
    output: &mut [Vector<F, N>],
    extent: Extent,
    factors: Factors,
    draw: Draw,
    #[comptime] restore: Restore,
    #[comptime] method: Method,
    #[comptime] share: Share,
) {
    let block_size = comptime!(method.block_size);
    let rule = comptime!(method.rule);
    let item = item(&extent);
    let place = place(min(item, extent.items - 1), &extent, block_size, share);
    let mut elements = load_blocks::<E, M>(values, &place, &extent, block_size, share);
    // Fake quantization has no weights; the amax stands where they would.
    let chosen = choose_scales::<E, M>(
        &elements, values, &place, &extent, amax, amax, &factors, method, share,
    );
    #[unroll]
    for row in 0..share.rows {
        let factor = chosen.factors[row as usize];
        let value = scale_value(chosen.codes[row as usize], comptime!(rule.row().format));
        let decode = if comptime!(restore == Restore::Values) {
            tensor_factor(amax, place.row + row, &factors, method).decode
        } else {
            1.0f32.runtime()
        };
        let mask = code_mask(factor, rule);
        let words = comptime!(block_size / 8);
        let group = (place.index + row * extent.blocks) * words;
        #[unroll]
        for word in 0..words {
            let start = comptime!(row * block_size + word * 8);
            if comptime!(method.stochastic) {
                let random = random_words(group + word, &draw);
                #[unroll]
                for element in 0..8u32 {
                    let at = comptime!((start + element) as usize);
                    let normalized = normalize(elements[at], factor, &factors, rule);
                    let code = round_stochastically(normalized, random_bits(&random, element));
                    let drawn = element_value(code & mask);
                    elements[at] = (drawn * value) * decode;
                }
            } else {
                #[unroll]
                for element in 0..8u32 {
                    let at = comptime!((start + element) as usize);
                    let nearest = nearest_element(normalize(elements[at], factor, &factors, rule));
                    let nearest = f32::reinterpret(u32::reinterpret(nearest) & mask);
                    elements[at] = (nearest * value) * decode;
                }
            }
        }
    }
    if item < extent.items {
        store_blocks::<F, N>(&elements, output, &place, &extent, block_size, share);
    }
}
