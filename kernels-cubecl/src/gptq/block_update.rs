//! The kernels of GPTQ, numbered like the steps in `mod.rs`.

use cubecl::prelude::*;

use crate::memory::{PackedOut, store_tensor_scale};
use crate::numeric::element::{element_value, nearest_element, round_to_e2m1};
use crate::numeric::rule::{TensorScaleArgs, code_mask, factor_of, normalize, tensor_factor};
use crate::numeric::scale_grid::scale_value;
use crate::plan::Blueprint;

/// The channels that a kernel works on, and how their scales are decoded.
#[derive(CubeType, CubeLaunch)]
pub(super) struct GptqBlockArgs {
    /// Largest magnitude of the tensor, or of each row.
    amax: &'static [f32],
    rows: u32,
    channels: u32,
    /// First channel of the block, or of the range.
    first: u32,
    /// End of the block or range.
    end: u32,
    /// First channel of the group, where `Codes::errors` begin.
    group: u32,
    scale_args: TensorScaleArgs,
    #[cube(comptime)]
    blueprint: Blueprint,
}

/// The codes of a weight so far.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Codes {
    /// E2M1 values of the codes, `[channels, rows]`.
    elements: &'static mut [f32],
    /// `[blocks, rows]`.
    scales: &'static mut [u8],
    /// Errors, or changes of the values, of a group's channels: `[channels, rows]`.
    errors: &'static mut [f32],
}

/// Returns the product of a block scale and the row's tensor scale.
#[cube]
fn value_of(scale: u32, row: u32, args: &GptqBlockArgs) -> f32 {
    let tensor = tensor_factor(args.amax, row, &args.scale_args, comptime!(args.blueprint));
    scale_value(scale, comptime!(args.blueprint.grid())) * tensor.decode
}

/// Returns the index of the scale of a row's block.
#[cube]
fn scale_at(row: u32, args: &GptqBlockArgs) -> u32 {
    args.first / comptime!(args.blueprint.block_size) * args.rows + row
}

/// Loads the values of a row's block.
#[cube]
fn load(matrix: &[f32], row: u32, args: &GptqBlockArgs) -> Array<f32> {
    let size = comptime!(args.blueprint.block_size);
    let mut values = Array::<f32>::new(comptime!(size as usize));
    #[unroll]
    for k in 0..size {
        values[k as usize] = matrix[((args.first + k) * args.rows + row) as usize];
    }
    values
}

/// Before step 1: copies the weight, which the steps change.
#[cube(launch_unchecked)]
pub(super) fn copy_kernel(from: &[f32], to: &mut [f32], items: u32) {
    if (ABSOLUTE_POS as u32) < items {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

/// Step 2: rounds the channels of a block in turn, and propagates each error to later channels of
/// the block. The errors for all other channels are left in `codes.errors`.
#[cube(launch_unchecked)]
pub(super) fn round_kernel(
    weights: &[f32],
    chosen: &[u8],
    factor: &[f32],
    codes: &mut Codes,
    args: &GptqBlockArgs,
) {
    let row = ABSOLUTE_POS as u32;
    if row < args.rows {
        let blueprint = comptime!(args.blueprint);
        let size = comptime!(blueprint.block_size);
        let rule = comptime!(blueprint.rule);
        let scale = u32::cast_from(chosen[row as usize]);
        let tensor = tensor_factor(args.amax, row, &args.scale_args, blueprint);
        let block_scale = scale_value(scale, comptime!(blueprint.grid()));
        let multiplier = factor_of(scale, block_scale, &tensor, rule);
        let mask = code_mask(multiplier, rule);
        let value = block_scale * tensor.decode;
        codes.scales[scale_at(row, args) as usize] = chosen[row as usize];
        let mut left = load(weights, row, args);
        #[unroll]
        for k in 0..size {
            let channel = args.first + k;
            let factor_row = channel * args.channels + args.first;
            let normalized = normalize(left[k as usize], multiplier, &args.scale_args, rule);
            let element = select(mask == 0u32, 0.0f32, nearest_element(normalized));
            codes.elements[(channel * args.rows + row) as usize] = element;
            let error = fma(-element, value, left[k as usize]) / factor[(factor_row + k) as usize];
            codes.errors[((channel - args.group) * args.rows + row) as usize] = error;
            #[unroll]
            for other in comptime!(k + 1)..size {
                left[other as usize] =
                    fma(-error, factor[(factor_row + other) as usize], left[other as usize]);
            }
        }
    }
}

/// Step 4: leaves the change `q - w` that the codes of some channels make in `codes.errors`.
#[cube(launch_unchecked)]
pub(super) fn change_kernel(original: &[f32], codes: &mut Codes, args: &GptqBlockArgs) {
    let item = ABSOLUTE_POS as u32;
    let channel = args.first + item / args.rows;
    let row = item % args.rows;
    if channel < args.end {
        let block = channel / comptime!(args.blueprint.block_size);
        let scale = u32::cast_from(codes.scales[(block * args.rows + row) as usize]);
        let value = value_of(scale, row, args);
        let at = (channel * args.rows + row) as usize;
        codes.errors[item as usize] = fma(codes.elements[at], value, -original[at]);
    }
}

/// Step 5: moves every code of a block to the best one while all others stay. The changes of the
/// values are left in `codes.errors`.
#[cube(launch_unchecked)]
pub(super) fn move_kernel(
    residuals: &[f32],
    hessian: &[f32],
    codes: &mut Codes,
    args: &GptqBlockArgs,
) {
    let row = ABSOLUTE_POS as u32;
    if row < args.rows {
        let size = comptime!(args.blueprint.block_size);
        let scale = u32::cast_from(codes.scales[scale_at(row, args) as usize]);
        let value = value_of(scale, row, args);
        let mut left = load(residuals, row, args);
        #[unroll]
        for k in 0..size {
            let channel = args.first + k;
            let at = (channel * args.rows + row) as usize;
            let hessian_row = channel * args.channels + args.first;
            let element = codes.elements[at];
            let step = left[k as usize] / (hessian[(hessian_row + k) as usize] * value);
            let next = nearest_element(element + step);
            // With a scale of 0 all codes have the same value.
            let change = select(value > 0.0f32, (next - element) * value, 0.0f32);
            if change != 0.0f32 {
                codes.elements[at] = next;
            }
            codes.errors[((channel - args.group) * args.rows + row) as usize] = change;
            #[unroll]
            for other in 0..size {
                left[other as usize] =
                    fma(-change, hessian[(hessian_row + other) as usize], left[other as usize]);
            }
        }
    }
}

/// Step 6a: writes the minimum of the cost of a block, a quadratic form: `q + R H^-1`.
#[cube(launch_unchecked)]
pub(super) fn aim_kernel(
    residuals: &[f32],
    inverses: &[f32],
    targets: &mut [f32],
    codes: &Codes,
    args: &GptqBlockArgs,
) {
    let row = ABSOLUTE_POS as u32;
    if row < args.rows {
        let size = comptime!(args.blueprint.block_size);
        let scale = u32::cast_from(codes.scales[scale_at(row, args) as usize]);
        let value = value_of(scale, row, args);
        let mut aims = Array::<f32>::new(comptime!(size as usize));
        #[unroll]
        for k in 0..size {
            let element = codes.elements[((args.first + k) * args.rows + row) as usize];
            aims[k as usize] = element * value;
        }
        let residuals = load(residuals, row, args);
        #[unroll]
        for j in 0..size {
            #[unroll]
            for k in 0..size {
                let inverse = inverses[((args.first + j) * size + k) as usize];
                aims[k as usize] = fma(residuals[j as usize], inverse, aims[k as usize]);
            }
        }
        #[unroll]
        for k in 0..size {
            targets[(k * args.rows + row) as usize] = aims[k as usize];
        }
    }
}

/// Step 6c: takes the scale and codes that were chosen for a block if they cost less than its own.
/// The changes of the values are left in `codes.errors`.
#[cube(launch_unchecked)]
pub(super) fn accept_kernel(
    targets: &[f32],
    chosen_codes: &[u32],
    chosen_scales: &[u8],
    hessian: &[f32],
    codes: &mut Codes,
    args: &GptqBlockArgs,
) {
    let row = ABSOLUTE_POS as u32;
    if row < args.rows {
        let size = comptime!(args.blueprint.block_size);
        let of_scale = scale_at(row, args) as usize;
        let scale = u32::cast_from(codes.scales[of_scale]);
        let value = value_of(scale, row, args);
        let new_scale = chosen_scales[row as usize];
        let new_value = value_of(u32::cast_from(new_scale), row, args);
        let mut next = Array::<f32>::new(comptime!(size as usize));
        let mut error_now = Array::<f32>::new(comptime!(size as usize));
        let mut error_next = Array::<f32>::new(comptime!(size as usize));
        #[unroll]
        for word in 0..comptime!(size / 8) {
            let packed = chosen_codes[(row * comptime!(size / 8) + word) as usize];
            #[unroll]
            for index in 0..8u32 {
                let k = comptime!(word * 8 + index);
                let target = targets[(k * args.rows + row) as usize];
                let element = codes.elements[((args.first + k) * args.rows + row) as usize];
                next[k as usize] = element_value(packed << comptime!(28 - 4 * index));
                error_now[k as usize] = fma(-element, value, target);
                error_next[k as usize] = fma(-next[k as usize], new_value, target);
            }
        }
        let cost_now = distance(&error_now, hessian, args);
        let cost_next = distance(&error_next, hessian, args);
        let better = cost_next < cost_now;
        if better {
            codes.scales[of_scale] = new_scale;
        }
        #[unroll]
        for k in 0..size {
            let channel = args.first + k;
            let change = error_now[k as usize] - error_next[k as usize];
            codes.errors[((channel - args.group) * args.rows + row) as usize] =
                select(better, change, 0.0f32);
            if better {
                codes.elements[(channel * args.rows + row) as usize] = next[k as usize];
            }
        }
    }
}

/// Returns `r^T H r`.
#[cube]
fn distance(errors: &Array<f32>, hessian: &[f32], args: &GptqBlockArgs) -> f32 {
    let size = comptime!(args.blueprint.block_size);
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for i in 0..size {
        let hessian_row = (args.first + i) * args.channels + args.first;
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for j in 0..size {
            sum = fma(hessian[(hessian_row + j) as usize], errors[j as usize], sum);
        }
        cost = fma(errors[i as usize], sum, cost);
    }
    cost
}

/// Step 7: writes the packed tensor. `order` holds the position of each block in a row.
#[cube(launch_unchecked)]
pub(super) fn pack_kernel<W: Size>(
    order: &[u32],
    packed: &mut PackedOut<W>,
    codes: &Codes,
    args: &GptqBlockArgs,
) {
    let blueprint = comptime!(args.blueprint);
    let size = comptime!(blueprint.block_size);
    let item = ABSOLUTE_POS as u32;
    let block = item / args.rows;
    let row = item % args.rows;
    let blocks = args.channels / size;
    if block < blocks {
        let to = row * blocks + order[block as usize];
        let mut row_codes = Vector::<u32, W>::empty();
        #[unroll]
        for word in 0..comptime!(size / 8) {
            let mut eight = 0u32.runtime();
            #[unroll]
            for index in 0..8u32 {
                let channel = block * size + comptime!(word * 8 + 7 - index);
                let element = codes.elements[(channel * args.rows + row) as usize];
                // Turns -0.0 into 0.0.
                let element = fma(element, args.scale_args.one, 0.0f32);
                eight = (eight << 4u32) | (round_to_e2m1(element) >> 28u32);
            }
            row_codes.insert(comptime!(word as usize), eight);
        }
        packed.codes[to as usize] = row_codes;
        packed.scales[to as usize] = codes.scales[item as usize];
        if block == 0u32 && (comptime!(blueprint.by_row) || row == 0u32) {
            let tensor = tensor_factor(args.amax, row, &args.scale_args, blueprint);
            store_tensor_scale::<W>(packed, row, tensor.decode, blueprint);
        }
    }
}
