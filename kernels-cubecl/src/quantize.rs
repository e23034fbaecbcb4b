use burn_fp4_search::{ScaleRule, TensorFactor, TensorScaling};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::element::round_to_e2m1;
use crate::scale::{block_scale, encode_factor};
use crate::{Dtype, Operation, Problem, Refusal, plan};

/// A quantized tensor in device memory.
#[derive(Debug, Clone)]
pub struct Packed {
    /// `[packed_rows, axis / 2]` bytes.
    pub codes: Handle,
    /// `[packed_rows, axis / block_size]` bytes.
    pub scales: Handle,
    /// Bits of the f32 tensor scale, 1 or `packed_rows`.
    pub tensor_scale: Handle,
}

/// Codes and scales of a tensor, given the amax of [`amax`](crate::amax()) in device memory.
///
/// The tensor is read once, whichever axis the blocks run along.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize(
    client: &Client,
    values: Handle,
    amax: Handle,
    problem: &Problem,
) -> Result<Packed, Refusal> {
    match problem.dtype {
        Dtype::F32 => launch::<f32>(client, values, amax, problem),
        Dtype::F16 => launch::<f16>(client, values, amax, problem),
        Dtype::Bf16 => launch::<bf16>(client, values, amax, problem),
    }
}

fn launch<F: Float>(
    client: &Client,
    values: Handle,
    amax: Handle,
    problem: &Problem,
) -> Result<Packed, Refusal> {
    let Problem { view, scheme, .. } = problem;
    let launch = plan(Operation::Quantize, problem)?;
    let tensor_scales = scheme.tensor_scales(view.packed_rows());
    let packed = Packed {
        codes: client.empty(problem.code_bytes()),
        scales: client.empty(problem.scale_bytes()),
        tensor_scale: client.empty(4 * tensor_scales),
    };
    if launch.items == 0 {
        return Ok(packed);
    }
    // A given multiplier is its own factor; the amax is then not looked at.
    let given = match scheme.tensor_scale {
        TensorScaling::Multiplier(_) => Some(TensorFactor::new(scheme, 0.0)),
        _ => None,
    };
    let factor = given.unwrap_or(TensorFactor::ONE);
    // SAFETY: the lengths are those of the problem, and units beyond `items` do nothing.
    unsafe {
        quantize_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(launch.cubes, 1, 1),
            CubeDim::new_1d(launch.units),
            BufferArg::from_raw_parts(values, view.len()),
            BufferArg::from_raw_parts(amax, tensor_scales),
            BufferArg::from_raw_parts(packed.codes.clone(), problem.code_bytes() / 4),
            BufferArg::from_raw_parts(packed.scales.clone(), problem.scale_bytes()),
            BufferArg::from_raw_parts(packed.tensor_scale.clone(), tensor_scales),
            problem.blocks() as u32,
            view.inner as u32,
            launch.items,
            scheme.largest_code_product(),
            factor.encode,
            factor.decode,
            scheme.block_size as u32,
            scheme.rule,
            given.is_some(),
            tensor_scales > 1,
        );
    }
    Ok(packed)
}

/// One unit per block. Neighbouring units take neighbouring columns, or along a contiguous axis
/// neighbouring blocks, so that what they read together is contiguous.
#[cube(launch_unchecked)]
fn quantize_kernel<F: Float>(
    values: &[F],
    amax: &[f32],
    codes: &mut [u32],
    scales: &mut [u8],
    tensor_scale: &mut [u32],
    blocks: u32,
    inner: u32,
    count: u32,
    range: f32,
    given_encode: f32,
    given_decode: f32,
    #[comptime] block_size: u32,
    #[comptime] rule: ScaleRule,
    #[comptime] given: bool,
    #[comptime] by_row: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= count {
        terminate!();
    }
    let column = at % inner;
    let block = (at / inner) % blocks;
    let outer = at / inner / blocks;
    let first = ((outer * blocks + block) * block_size) * inner + column;
    let row = outer * inner + column;
    let target = row * blocks + block;

    let factor_at = if comptime!(by_row) { row } else { 0u32.runtime() };
    let encode = if comptime!(given) {
        given_encode
    } else {
        encode_factor(amax[factor_at as usize], range, rule)
    };
    let decode = if comptime!(given) { given_decode } else { 1.0f32 / encode };
    if block == 0u32 && (comptime!(by_row) || at == 0u32) {
        tensor_scale[factor_at as usize] = u32::reinterpret(decode);
    }

    let mut elements = Array::<f32>::new(comptime!(block_size as usize));
    let mut largest = 0u32;
    #[unroll]
    for k in 0..block_size {
        let value = f32::cast_from(values[(first + k * inner) as usize]);
        elements[k as usize] = value;
        // As integers magnitudes order like the floats, and NaN comes out on top.
        largest = max(largest, u32::reinterpret(value) & 0x7FFF_FFFFu32);
    }
    let scale = block_scale(f32::reinterpret(largest), encode, decode, rule);
    scales[target as usize] = u8::cast_from(scale.code);

    #[unroll]
    for word in 0..block_size / 8 {
        let mut packed = 0u32;
        #[unroll]
        for index in 0..8u32 {
            let value = elements[(word * 8 + index) as usize];
            let normalized = if comptime!(rule == ScaleRule::NoTensorScale) {
                value / scale.factor
            } else {
                value * scale.factor
            };
            // The references that compare with zero lose its sign.
            let normalized = if comptime!(rule.row().keeps_negative_zero) {
                normalized
            } else {
                select(normalized == 0.0f32, 0.0f32, normalized)
            };
            packed |= round_to_e2m1(normalized) << (4 * index);
        }
        codes[(target * (block_size / 8) + word) as usize] = packed;
    }
}
