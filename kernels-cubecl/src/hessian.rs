//! Scales and codes by `r^T H r`: the best scale for nearest codes, or scale and codes together by
//! coordinate descent; see `hessian.rs` and `coordinate_descent.rs` in the search crate.
//!
//! A cube takes one block of as many rows as it has units: they share its H, which lies in shared memory
//! where the device gains by that.

use burn_fp4_search::ScaleSearch;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::block::{code_mask, largest_magnitude, normalize};
use crate::element::{element_value, nearest_element, round_to_e2m1};
use crate::plan::Share;
use crate::quantize::{empty, extent, factors};
use crate::scale::{Factors, Method, TensorFactor, block_scale, factor_of, tensor_factor};
use crate::share::{Extent, load_blocks, place_of};
use crate::sse::{Unit, improve, is_searchable, start, unit, value_in};
use crate::{Capability, Launch, Operation, Packed, Problem, Refusal, plan};

/// Passes over the elements of a block at most, as on the host.
const SWEEPS: u32 = 8;

/// The Hessians of the blocks of a row in device memory.
#[derive(Debug, Clone)]
pub struct Hessians {
    /// f32 `[blocks, block_size, block_size]`, symmetric;
    /// [`BlockHessians::values`](burn_fp4_search::BlockHessians::values).
    pub values: Handle,
    /// f32 `[blocks, block_size]`; [`BlockHessians::bounds`](burn_fp4_search::BlockHessians::bounds).
    pub bounds: Handle,
}

/// Codes and scales of a tensor by [`Hessian`](ScaleSearch::Hessian) or
/// [`CoordinateDescent`](ScaleSearch::CoordinateDescent), given the amax of [`amax`](crate::amax()).
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize_by_hessian(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    hessians: Hessians,
    problem: &Problem,
) -> Result<Packed, Refusal> {
    let launch = plan(Operation::QuantizeByHessian, problem, device)?;
    let packed = empty(client, problem);
    if launch.items > 0 {
        if launch.share.wide() {
            run::<u32>(client, values, amax, hessians, problem, launch, &packed);
        } else {
            run::<u16>(client, values, amax, hessians, problem, launch, &packed);
        }
    }
    Ok(packed)
}

fn run<E: Int>(
    client: &Client,
    values: Handle,
    amax: Handle,
    hessians: Hessians,
    problem: &Problem,
    launch: Launch,
    packed: &Packed,
) {
    let Problem { view, scheme, .. } = problem;
    let share = launch.share;
    let (size, words) = (scheme.block_size, scheme.block_size / 8);
    // SAFETY: the lengths are those of the problem, and units beyond the last row write nothing.
    unsafe {
        hessian_kernel::launch_unchecked::<E>(
            client,
            launch.count(),
            CubeDim::new_1d(launch.units),
            share.words() as usize,
            words,
            4,
            BufferArg::from_raw_parts(values, view.len() / share.vector as usize),
            BufferArg::from_raw_parts(amax, packed.tensor_scales),
            BufferArg::from_raw_parts(hessians.values, view.axis * size / 4),
            BufferArg::from_raw_parts(hessians.bounds, view.axis),
            BufferArg::from_raw_parts(packed.codes.clone(), problem.code_bytes() / 4 / words),
            BufferArg::from_raw_parts(packed.scales.clone(), problem.scale_bytes()),
            BufferArg::from_raw_parts(packed.tensor_scale.clone(), packed.tensor_scales),
            extent(problem, &launch),
            factors(problem),
            Method::of(scheme, false),
            share,
        );
    }
}

#[cube(launch_unchecked)]
fn hessian_kernel<E: Int, N: Size, W: Size, H: Size>(
    values: &[Vector<E, N>],
    amax: &[f32],
    hessians: &[Vector<f32, H>],
    bounds: &[f32],
    codes: &mut [Vector<u32, W>],
    scales: &mut [u8],
    tensor_scale: &mut [u32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
    #[comptime] share: Share,
) {
    let size = comptime!(method.block_size);
    let cube = CUBE_POS as u32;
    if cube < extent.items / CUBE_DIM {
        let block = cube % extent.blocks;
        let row = cube / extent.blocks * CUBE_DIM + UNIT_POS;
        let vectors = comptime!(size * size / 4);
        let first = block * vectors;
        if comptime!(share.staged) {
            let mut shared = Shared::<[Vector<f32, H>]>::new_slice(comptime!(vectors as usize));
            let mut at = UNIT_POS;
            while at < vectors {
                shared[at as usize] = hessians[(first + at) as usize];
                at += CUBE_DIM;
            }
            sync_cube();
            quantize_row::<E, N, W, H>(
                values,
                amax,
                &shared,
                0u32,
                bounds,
                codes,
                scales,
                tensor_scale,
                row,
                block,
                &extent,
                &factors,
                method,
                share,
            );
        } else {
            quantize_row::<E, N, W, H>(
                values,
                amax,
                hessians,
                first,
                bounds,
                codes,
                scales,
                tensor_scale,
                row,
                block,
                &extent,
                &factors,
                method,
                share,
            );
        }
    }
}

/// A block of a row. `first` is where its H begins.
#[cube]
fn quantize_row<E: Int, N: Size, W: Size, H: Size>(
    values: &[Vector<E, N>],
    amax: &[f32],
    hessian: &[Vector<f32, H>],
    first: u32,
    bounds: &[f32],
    codes: &mut [Vector<u32, W>],
    scales: &mut [u8],
    tensor_scale: &mut [u32],
    row: u32,
    block: u32,
    extent: &Extent,
    factors: &Factors,
    #[comptime] method: Method,
    #[comptime] share: Share,
) {
    let size = comptime!(method.block_size);
    if row < extent.rows {
        let place = place_of(row, block, extent, size, share);
        let elements = load_blocks::<E, N>(values, &place, extent, size, share);
        let tensor = tensor_factor(amax, row, factors, method);
        let mut words = Array::<u32>::new(comptime!((size / 8) as usize));
        let scale = search::<H>(
            &elements,
            &mut words,
            hessian,
            first,
            bounds,
            block * size,
            &tensor,
            factors,
            method,
        );
        let mut row_codes = Vector::<u32, W>::empty();
        #[unroll]
        for word in 0..comptime!(size / 8) {
            row_codes.insert(comptime!(word as usize), words[word as usize]);
        }
        codes[place.index as usize] = row_codes;
        scales[place.index as usize] = u8::cast_from(scale);
        if block == 0u32 && (comptime!(method.by_row) || row == 0u32) {
            let at = if comptime!(method.by_row) { row } else { 0u32.runtime() };
            tensor_scale[at as usize] = u32::reinterpret(tensor.decode);
        }
    }
}

/// The best scale, and codes that go with it.
#[cube]
fn search<H: Size>(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    hessian: &[Vector<f32, H>],
    first: u32,
    bounds: &[f32],
    channel: u32,
    tensor: &TensorFactor,
    factors: &Factors,
    #[comptime] method: Method,
) -> u32 {
    let size = comptime!(method.block_size);
    let words = comptime!(size / 8);
    let rule = comptime!(method.rule);
    let format = comptime!(rule.row().format);
    let descends = comptime!(method.search == ScaleSearch::CoordinateDescent);
    let largest = largest_magnitude(elements, 0u32, size);
    let own = block_scale(largest, tensor, rule);
    let unit = unit(largest, tensor, format);
    let scaled_amax = largest * unit.factor;
    let mut code = own.code;
    let mut factor = own.factor;
    let searchable = is_searchable(largest, scaled_amax, &unit, format);
    if searchable {
        let mut found = Array::<u32>::new(comptime!(words as usize));
        let infinity = f32::reinterpret(0x7F80_0000u32);
        let mut best = start(infinity, own.code, format);
        let lowest = lowest(&unit, method);
        // The rule's own scale, then all from the top down; below 0 codes wrap around.
        let mut next = own.code;
        let mut is_own = true;
        while is_own || next >= lowest && next < 0x8000_0000u32 {
            let value = value_in(&unit, next, format);
            if is_hopeless(elements, value, &unit, best.cost, bounds, channel, method) {
                next = 0xFFFF_FFFFu32;
            } else {
                let cost = try_scale::<H>(
                    elements,
                    &mut found,
                    value,
                    factor_of(next, value, tensor, rule),
                    best.cost,
                    &unit,
                    hessian,
                    first,
                    bounds,
                    channel,
                    method,
                );
                let mut takes = is_own;
                if is_own {
                    best.cost = start(cost, own.code, format).cost;
                    next = top(&unit, scaled_amax, method);
                } else {
                    let before = best.code;
                    improve(&mut best, cost, next, own.code);
                    takes = best.code != before;
                    next -= 1u32;
                }
                if comptime!(descends) && takes {
                    #[unroll]
                    for word in 0..words {
                        codes[word as usize] = found[word as usize];
                    }
                }
            }
            is_own = false;
        }
        if best.code != own.code {
            let value = value_in(&unit, best.code, format);
            code = best.code;
            factor = factor_of(best.code, value, tensor, rule);
        }
    }
    if comptime!(descends) && searchable {
        #[unroll]
        for word in 0..words {
            codes[word as usize] = without_negative_zeros(codes[word as usize]);
        }
    } else {
        let mask = code_mask(factor, rule);
        #[unroll]
        for word in 0..words {
            let mut packed = 0u32;
            #[unroll]
            for index in 0..8u32 {
                let element = elements[comptime!((word * 8 + 7 - index) as usize)];
                let normalized = normalize(element, factor, factors, rule);
                packed = (packed << 4u32) | (round_to_e2m1(normalized) >> 28u32);
            }
            codes[word as usize] = packed & mask;
        }
    }
    code
}

/// Eight codes, of zeros the positive one.
#[cube]
fn without_negative_zeros(codes: u32) -> u32 {
    let magnitudes = codes | (codes >> 1u32) | (codes >> 2u32);
    codes & (0x7777_7777u32 | ((magnitudes & 0x1111_1111u32) << 3u32))
}

/// The value of a code among eight.
#[cube]
fn value_at(codes: u32, #[comptime] index: u32) -> f32 {
    element_value(codes << comptime!(28 - 4 * index))
}

/// The smallest scale that is tried.
#[cube]
fn lowest(unit: &Unit, #[comptime] method: Method) -> u32 {
    if comptime!(method.is_nvfp4()) { 1u32.runtime() } else { max(unit.base, 30u32) - 30u32 }
}

/// The first scale at which every element rounds to 0.
#[cube]
fn top(unit: &Unit, amax: f32, #[comptime] method: Method) -> u32 {
    if comptime!(method.is_nvfp4()) {
        min(crate::scale::round_down_to_e4m3(amax * 4.0f32) + 1u32, 126u32)
    } else {
        min(unit.base + 5u32, 254u32)
    }
}

/// Whether no scale up to one of this value can be better, whatever the codes.
#[cube]
fn is_hopeless(
    elements: &Array<f32>,
    value: f32,
    unit: &Unit,
    best: f32,
    bounds: &[f32],
    channel: u32,
    #[comptime] method: Method,
) -> bool {
    let mut clipped = 0.0f32.runtime();
    #[unroll]
    for k in 0..method.block_size {
        let bound = bounds[(channel + k) as usize];
        let bounded = (elements[k as usize] * unit.factor).abs() * bound;
        clipped = max(clipped, fma(-6.0f32 * bound, value, bounded));
    }
    clipped * clipped > best
}

/// The cost of a scale, and for coordinate descent the codes that go with it; infinite if it cannot be
/// better than the best.
#[cube]
fn try_scale<H: Size>(
    elements: &Array<f32>,
    found: &mut Array<u32>,
    value: f32,
    factor: f32,
    best: f32,
    unit: &Unit,
    hessian: &[Vector<f32, H>],
    first: u32,
    bounds: &[f32],
    channel: u32,
    #[comptime] method: Method,
) -> f32 {
    let size = comptime!(method.block_size);
    let words = comptime!(size / 8);
    let mut nearest = Array::<u32>::new(comptime!(words as usize));
    let mut errors = Array::<f32>::new(comptime!(size as usize));
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for word in 0..words {
        let mut packed = 0u32;
        #[unroll]
        for index in 0..8u32 {
            let k = comptime!(word * 8 + 7 - index);
            let element = elements[k as usize];
            let normalized =
                if comptime!(method.divides()) { element / factor } else { element * factor };
            let rounded = nearest_element(normalized);
            let error = fma(-rounded, value, element * unit.factor);
            errors[k as usize] = error;
            largest = max(largest, error.abs() * bounds[(channel + k) as usize]);
            packed = (packed << 4u32) | (round_to_e2m1(rounded) >> 28u32);
        }
        nearest[word as usize] = packed;
        found[word as usize] = packed;
    }
    let mut result = f32::reinterpret(0x7F80_0000u32);
    if largest * largest <= best {
        result = cost::<H>(&errors, hessian, first, size);
        if comptime!(method.search == ScaleSearch::CoordinateDescent) {
            sweep::<H>(found, &errors, value, hessian, first, size);
            #[unroll]
            for k in 0..size {
                let scaled = elements[k as usize] * unit.factor;
                let element = value_at(found[comptime!((k / 8) as usize)], comptime!(k % 8));
                errors[k as usize] = fma(-element, value, scaled);
            }
            let descended = cost::<H>(&errors, hessian, first, size);
            let improved = descended < result;
            result = select(improved, descended, result);
            #[unroll]
            for word in 0..words {
                let (moved, kept) = (found[word as usize], nearest[word as usize]);
                found[word as usize] = select(improved, moved, kept);
            }
        }
    }
    result
}

/// `r^T H r`, in the order of the reference.
#[cube]
fn cost<H: Size>(
    errors: &Array<f32>,
    hessian: &[Vector<f32, H>],
    first: u32,
    #[comptime] size: u32,
) -> f32 {
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for i in 0..size {
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for vector in 0..comptime!(i / 4 + 1) {
            let row = hessian[(first + comptime!(i * size / 4 + vector)) as usize];
            #[unroll]
            for index in 0..4u32 {
                let j = comptime!(vector * 4 + index);
                let curvature = row.extract(comptime!(index as usize));
                if comptime!(j < i) {
                    // Twice either factor is exact.
                    sum = fma(curvature, 2.0f32 * errors[j as usize], sum);
                } else if comptime!(j == i) {
                    sum = fma(curvature, errors[j as usize], sum);
                }
            }
        }
        cost = fma(errors[i as usize], sum, cost);
    }
    cost
}

/// Moves elements one at a time to where they are best while all others stay, until none does.
#[cube]
fn sweep<H: Size>(
    found: &mut Array<u32>,
    errors: &Array<f32>,
    value: f32,
    hessian: &[Vector<f32, H>],
    first: u32,
    #[comptime] size: u32,
) {
    let reciprocal = 1.0f32 / value;
    let mut gradient = Array::<f32>::new(comptime!(size as usize));
    #[unroll]
    for i in 0..size {
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for vector in 0..comptime!(size / 4) {
            let row = hessian[(first + comptime!(i * size / 4 + vector)) as usize];
            #[unroll]
            for index in 0..4u32 {
                let error = errors[comptime!((vector * 4 + index) as usize)];
                sum = fma(row.extract(comptime!(index as usize)), error, sum);
            }
        }
        gradient[i as usize] = sum;
    }
    let mut sweeps = 0u32;
    while sweeps < SWEEPS {
        let mut changed = false;
        #[unroll]
        for i in 0..size {
            let word = comptime!((i / 8) as usize);
            let now = value_at(found[word], comptime!(i % 8));
            let diagonal = hessian[(first + comptime!(i * size / 4 + i / 4)) as usize];
            let curvature = diagonal.extract(comptime!((i % 4) as usize));
            let step = select(curvature > 0.0f32, 1.0f32 / curvature, 0.0f32);
            let target = fma(gradient[i as usize], step, now * value);
            let code = round_to_e2m1(target * reciprocal) & 0xF000_0000u32;
            let change = (element_value(code) - now) * value;
            if change != 0.0f32 {
                changed = true;
                let others = found[word] & comptime!(!(0xFu32 << (4 * (i % 8))));
                found[word] = others | (code >> comptime!(28 - 4 * (i % 8)));
                #[unroll]
                for vector in 0..comptime!(size / 4) {
                    let row = hessian[(first + comptime!(i * size / 4 + vector)) as usize];
                    #[unroll]
                    for index in 0..4u32 {
                        let k = comptime!((vector * 4 + index) as usize);
                        let curvature = row.extract(comptime!(index as usize));
                        gradient[k] = fma(-curvature, change, gradient[k]);
                    }
                }
            }
        }
        sweeps = select(changed, sweeps + 1u32, SWEEPS);
    }
}
