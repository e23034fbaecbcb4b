use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::element::element_value;
use crate::scale::{e4m3_value, e8m0_value};
use crate::{Dtype, Operation, Packed, Problem, Refusal, plan};

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
    let launch = plan(Operation::Dequantize, problem)?;
    let values = client.empty(view.len() * dtype.size());
    if launch.items == 0 {
        return Ok(values);
    }
    let tensor_scales = scheme.tensor_scales(view.packed_rows());
    // SAFETY: the lengths are those of the problem, and units beyond `items` do nothing.
    unsafe {
        dequantize_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(launch.cubes, 1, 1),
            CubeDim::new_1d(launch.units),
            BufferArg::from_raw_parts(packed.codes, problem.code_bytes() / 4),
            BufferArg::from_raw_parts(packed.scales, problem.scale_bytes()),
            BufferArg::from_raw_parts(packed.tensor_scale, tensor_scales),
            BufferArg::from_raw_parts(values.clone(), view.len()),
            (view.axis / 8) as u32,
            view.inner as u32,
            launch.items,
            scheme.block_size as u32,
            scheme.format(),
            *dtype,
            tensor_scales > 1,
        );
    }
    Ok(values)
}

/// One unit per word of eight codes; neighbouring units write neighbouring columns or words.
#[cube(launch_unchecked)]
fn dequantize_kernel<F: Float>(
    codes: &[u32],
    scales: &[u8],
    tensor_scale: &[u32],
    values: &mut [F],
    words: u32,
    inner: u32,
    count: u32,
    #[comptime] block_size: u32,
    #[comptime] format: Fp4Format,
    #[comptime] dtype: Dtype,
    #[comptime] by_row: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at >= count {
        terminate!();
    }
    let column = at % inner;
    let word = (at / inner) % words;
    let outer = at / inner / words;
    let first = ((outer * words + word) * 8) * inner + column;
    let row = outer * inner + column;
    let source = row * words + word;

    let factor_at = if comptime!(by_row) { row } else { 0u32.runtime() };
    let decode = f32::reinterpret(tensor_scale[factor_at as usize]);
    let code = u32::cast_from(scales[(source / (block_size / 8)) as usize]);
    let scale =
        if comptime!(format == Fp4Format::NvFp4) { e4m3_value(code) } else { e8m0_value(code) };
    let packed = codes[source as usize];
    #[unroll]
    for index in 0..8u32 {
        let element = element_value((packed >> (4 * index)) & 0xFu32);
        values[(first + index * inner) as usize] = narrow::<F>((element * scale) * decode, dtype);
    }
}

/// Rounds an f32 once to nearest even. bf16 on its bits: the instruction of an x86 processor takes
/// subnormals for zero.
#[cube]
fn narrow<F: Float>(value: f32, #[comptime] dtype: Dtype) -> F {
    if comptime!(dtype == Dtype::Bf16) {
        let bits = u32::reinterpret(value);
        let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
        let is_nan = (bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
        F::reinterpret(u16::cast_from(select(is_nan, 0x7FC0u32, rounded)))
    } else {
        F::cast_from(value)
    }
}
