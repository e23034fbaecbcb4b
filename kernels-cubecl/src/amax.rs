use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::{Dtype, Operation, Problem, Refusal, plan};

/// The largest magnitude in f32: of the tensor, or of each of its packed rows. NaN if a value is.
///
/// `values` holds the tensor contiguously; the result holds 1 or `packed_rows` values.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn amax(
    client: &Client,
    values: Handle,
    problem: &Problem,
    by_row: bool,
) -> Result<Handle, Refusal> {
    match problem.dtype {
        Dtype::F32 => launch::<f32>(client, values, problem, by_row),
        Dtype::F16 => launch::<f16>(client, values, problem, by_row),
        Dtype::Bf16 => launch::<bf16>(client, values, problem, by_row),
    }
}

fn launch<F: Float>(
    client: &Client,
    values: Handle,
    problem: &Problem,
    by_row: bool,
) -> Result<Handle, Refusal> {
    let view = problem.view;
    let operation = if by_row { Operation::RowAmax } else { Operation::Amax };
    let launch = plan(operation, problem)?;
    let results = if by_row { view.packed_rows() } else { 1 };
    // Bits of magnitudes order like magnitudes, so the largest is found among integers.
    let result = client.create_from_slice(u32::as_bytes(&vec![0; results]));
    if launch.items == 0 {
        return Ok(result);
    }
    let count = CubeCount::Static(launch.cubes, 1, 1);
    let dim = CubeDim::new_1d(launch.units);
    // SAFETY: the lengths are those of the problem, and units beyond `items` do nothing.
    unsafe {
        if by_row {
            row_amax_kernel::launch_unchecked::<F>(
                client,
                count,
                dim,
                BufferArg::from_raw_parts(values, view.len()),
                BufferArg::from_raw_parts(result.clone(), results),
                view.axis as u32,
                view.inner as u32,
                launch.items,
            );
        } else {
            amax_kernel::launch_unchecked::<F>(
                client,
                count,
                dim,
                BufferArg::from_raw_parts(values, view.len()),
                BufferArg::from_raw_parts(result.clone(), results),
                launch.items,
                launch.cubes * launch.units,
            );
        }
    }
    Ok(result)
}

#[cube]
fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & 0x7FFF_FFFFu32
}

/// Every unit takes every `stride`-th value.
#[cube(launch_unchecked)]
fn amax_kernel<F: Float>(values: &[F], result: &mut [Atomic<u32>], count: u32, stride: u32) {
    let mut largest = 0u32;
    let mut at = ABSOLUTE_POS as u32;
    while at < count {
        largest = max(largest, magnitude_bits(f32::cast_from(values[at as usize])));
        at += stride;
    }
    result[0].fetch_max(largest);
}

/// Every unit takes a packed row.
#[cube(launch_unchecked)]
fn row_amax_kernel<F: Float>(values: &[F], result: &mut [u32], axis: u32, inner: u32, count: u32) {
    let row = ABSOLUTE_POS as u32;
    if row >= count {
        terminate!();
    }
    let first = row / inner * axis * inner + row % inner;
    let mut largest = 0u32;
    for k in 0..axis {
        let value = f32::cast_from(values[(first + k * inner) as usize]);
        largest = max(largest, magnitude_bits(value));
    }
    result[row as usize] = largest;
}
